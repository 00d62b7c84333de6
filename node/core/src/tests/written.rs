//! Tests of writes to disk and object store: which chunks, in which order, and the effects of failures.

use larder_protocol::ChunkRef;
use larder_protocol::purge::{NamespaceName, PurgeMode, PurgeScope};

use super::*;
use crate::store::ChunkWrite;
use crate::tiers::described::MayWrite;
use crate::{Description, PurgeStep, SegmentVisit, Visited, WriteNumber, Written};

const BELOW: Sources =
    Sources { siblings: None, peers: None, disk: Some(DEADLINE), object: Some(DEADLINE), known_chunks: 100 };

const DISK: Sources = Sources { object: None, ..BELOW };

fn world(sources: Sources) -> World {
    World { sees_writes: true, ..World::new(sources) }
}

/// A world whose namespace is described on disk.
fn described() -> World {
    let mut w = world(DISK);
    w.put("a");
    describe(&mut w, Description::There);
    let (number, _) = write(&mut w);
    w.tell(Event::WriteEnded { number, answer: Written::There });
    assert!(w.is_idle());
    w
}

/// A world that writes to the object store.
fn uploading(capacity_chunks: Option<u64>) -> World {
    let object =
        limits().object.map(|object| ObjectStoreLimits { write: Some(WritePolicy::WriteThrough), ..object });
    let limits = StoreLimits { object, disk: None, capacity_chunks, ..limits() };
    World { sees_writes: true, ..World::with(limits, Sources { disk: None, ..BELOW }) }
}

fn describe(w: &mut World, description: Description) {
    let Effect::Describe { fingerprint, tenant_name, .. } = w.next() else { panic!("a description") };
    assert_eq!((fingerprint, &*tenant_name), (w.fingerprint, "a"));
    w.tell(Event::Described { fingerprint, description });
}

fn write(w: &mut World) -> (WriteNumber, ChunkWrite) {
    match w.next() {
        Effect::Write { number, write } => (number, write),
        other => panic!("{other:?}"),
    }
}

/// The event that lists all chunks on disk.
fn listed(held: Vec<(Fingerprint, ChunkRef, PoolSet)>) -> Event {
    let result = Visited::Done { held, next: None };
    Event::SegmentVisited { visit: SegmentVisit::List, after: 0, result }
}

fn on_disk(w: &World) -> u64 {
    w.core.store.usage().disk.map_or(0, |disk| disk.chunks)
}

#[test]
fn a_chunk_is_written_once_its_namespace_is_described() {
    let mut w = world(DISK);
    w.put("ab");
    let Effect::Describe { fingerprint, .. } = w.next() else { panic!("a description") };
    assert!(w.is_idle(), "nothing is written meanwhile");
    w.tell(Event::Described { fingerprint, description: Description::There });
    for hash in [name("ab"), name("a")] {
        let (number, write) = write(&mut w);
        assert_eq!((write.chunk.hash, write.fingerprint, write.write.tier), (hash, fingerprint, Below::Disk));
        w.tell(Event::WriteEnded { number, answer: Written::There });
    }
    assert_eq!(on_disk(&w), 2);
    w.put("abc");
    write(&mut w);
    assert!(w.is_idle(), "it is described once");
}

#[test]
fn chunks_of_a_namespace_that_cannot_be_described_stay_in_memory_for_a_while() {
    let mut w = world(DISK);
    w.put("a");
    describe(&mut w, Description::Failed);
    assert!(w.core.cannot_describe());
    assert!(matches!(w.next(), Effect::Count(Counted::NotWritten)));
    w.put("b");
    assert!(matches!(w.next(), Effect::Count(Counted::NotWritten)));
    assert!(w.is_idle());
    w.pass(Duration::from_secs(10));
    w.put("c");
    describe(&mut w, Description::There);
    assert!(!w.core.cannot_describe());
    assert_eq!(write(&mut w).1.chunk.hash, name("c"));
}

#[test]
fn a_tier_that_has_too_much_to_do_is_asked_again_for_the_same_chunk() {
    let mut w = described();
    w.put("bc");
    let ((number, first), (second, _)) = (write(&mut w), write(&mut w));
    w.tell(Event::WriteEnded { number, answer: Written::Busy });
    assert!(w.is_idle(), "not before the next tick");
    w.pass(Duration::from_millis(50));
    let (number, again) = write(&mut w);
    assert_eq!(again, first);
    w.tell(Event::WriteEnded { number, answer: Written::There });
    w.tell(Event::WriteEnded { number: second, answer: Written::There });
    assert_eq!(on_disk(&w), 3);
}

#[test]
fn what_waits_to_be_written_to_a_disk_that_falls_silent_holds_no_memory() {
    let mut w = described();
    w.put("b");
    let (number, _) = write(&mut w);
    w.tell(Event::WriteEnded { number, answer: Written::Busy });
    let waiting_bytes = |w: &World| w.core.store.usage().disk.map(|disk| disk.waiting_bytes);
    assert_ne!(waiting_bytes(&w), Some(0));
    w.tell(Event::DiskSilent(true));
    assert_eq!(waiting_bytes(&w), Some(0));
    w.put("c");
    assert!(w.is_idle());
    w.tell(Event::DiskSilent(false));
    w.pass(Duration::from_millis(50));
    w.put("d");
    assert_eq!(write(&mut w).1.chunk.hash, name("d"));
}

#[test]
fn a_write_that_is_put_off_keeps_its_place_in_line() {
    let object =
        limits().object.map(|object| ObjectStoreLimits { write: Some(WritePolicy::WriteThrough), ..object });
    let sources = Sources { disk: None, ..BELOW };
    let mut w =
        World { sees_writes: true, ..World::with(StoreLimits { object, disk: None, ..limits() }, sources) };
    w.put("abc");
    let (number, first) = write(&mut w);
    assert_eq!(first.chunk.hash, name("a"), "of a prompt that is not written whole the beginning is of use");
    // The test answers as the shell does: at once, before it takes the next effect.
    w.tell(Event::WriteEnded { number, answer: Written::Busy });
    assert!(w.is_idle());
    w.pass(Duration::from_millis(50));
    assert_eq!(["a", "ab", "abc"].map(name), [(); 3].map(|()| write(&mut w).1.chunk.hash));
}

#[test]
fn a_busy_tier_goes_on_as_soon_as_one_of_its_writes_has_ended() {
    let mut w = described();
    w.put("bcd");
    let numbers = [write(&mut w).0, write(&mut w).0, write(&mut w).0];
    w.tell(Event::WriteEnded { number: numbers[2], answer: Written::Busy });
    assert!(w.is_idle());
    w.tell(Event::WriteEnded { number: numbers[0], answer: Written::There });
    assert_eq!(write(&mut w).1.chunk.hash, name("b"));
}

#[test]
fn a_tier_has_so_many_writes_at_a_time() {
    let disk = limits().disk.map(|disk| DiskStoreLimits { max_waiting_bytes: u64::MAX, ..disk });
    let limits = StoreLimits { disk, extents: 40, capacity_chunks: None, ..limits() };
    let mut w = World { sees_writes: true, ..World::with(limits, DISK) };
    let words: Vec<String> = (0..70).map(|i| char::from(b'0' + i).to_string()).collect();
    words.iter().for_each(|word| w.put(word));
    describe(&mut w, Description::There);
    let numbers: Vec<WriteNumber> = (0..64).map(|_| write(&mut w).0).collect();
    assert!(w.is_idle());
    w.tell(Event::WriteEnded { number: numbers[9], answer: Written::Failed });
    write(&mut w);
    assert!(w.is_idle());
}

#[test]
fn an_answer_that_comes_twice_changes_nothing() {
    let mut w = described();
    w.put("b");
    let (number, _) = write(&mut w);
    w.tell(Event::WriteEnded { number, answer: Written::Failed });
    w.tell(Event::WriteEnded { number, answer: Written::There });
    assert_eq!(on_disk(&w), 1);
    assert!(w.is_idle());
}

#[test]
fn a_disk_that_closes_is_written_to_no_more() {
    let mut w = described();
    w.put("bc");
    let (one, other) = (write(&mut w).0, write(&mut w).0);
    w.tell(Event::WriteEnded { number: one, answer: Written::Closed });
    w.tell(Event::WriteEnded { number: other, answer: Written::There });
    w.put("d");
    assert!(w.is_idle());
    assert_eq!(w.core.store.usage().disk, None);
    let request = w.lease("bc");
    assert_eq!(w.leased(request).chunks, 2, "memory has them");
}

#[test]
fn what_was_written_to_the_object_store_is_read_there_without_a_question() {
    let mut w = uploading(Some(1));
    w.put("a");
    let (number, written) = write(&mut w);
    assert_eq!(written.write.tier, Below::Object);
    w.tell(Event::WriteEnded { number, answer: Written::There });
    // The chunk is evicted.
    w.put("b");
    let (number, _) = write(&mut w);
    w.tell(Event::WriteEnded { number, answer: Written::Failed });
    w.lease("a");
    assert_eq!(w.read().1, Below::Object);
}

#[test]
fn the_disk_forgets_what_disagrees_with_what_is_known() {
    let mut w = described();
    let chain = w.chain("ab");
    let wrong = ChunkRef { index: 7, ..chain.chunk(1) };
    let held = vec![(w.fingerprint, wrong, PoolSet::ANY)];
    w.put("ab");
    let (number, _) = write(&mut w);
    w.tell(Event::WriteEnded { number, answer: Written::There });
    w.tell(listed(held));
    assert!(matches!(w.next(), Effect::Disagrees(chunk) if chunk == wrong));
    assert!(matches!(w.next(), Effect::Remove(key) if key.hash == wrong.hash));
    assert_eq!(on_disk(&w), 1);
    let unknown = vec![(Fingerprint([9; 32]), wrong, PoolSet::ANY)];
    w.tell(listed(unknown));
    assert!(w.is_idle(), "a namespace that is not known may be after the next start");
}

#[test]
fn a_description_that_is_of_no_use_is_deleted_and_written_again_when_it_is() {
    let mut w = described();
    let (other, fingerprint) = (spec(2), spec(2).fingerprint("a"));
    w.core.know("a".to_owned(), fingerprint, other.clone()).unwrap();
    w.pass(Duration::from_secs(120));
    assert!(w.is_idle(), "who knows what else is on disk");
    w.tell(listed(Vec::new()));
    w.pass(Duration::from_millis(50));
    let Effect::ForgetDescriptions(unused) = w.next() else { panic!("it is of no use") };
    assert_eq!(unused, [fingerprint]);
    let registered = w.core.register(w.session, &other, &[0], &[2 * BLOCK]).unwrap();
    (w.namespace, w.root, w.fingerprint) = (registered.namespace, registered.root, fingerprint);
    w.put("z");
    assert!(w.is_idle(), "it is being deleted");
    w.tell(Event::Described { fingerprint, description: Description::Gone });
    describe(&mut w, Description::There);
    assert_eq!(write(&mut w).1.chunk.hash, name("z"));
    w.pass(Duration::from_secs(60));
    assert!(w.is_idle(), "now they are of use");
}

#[test]
fn a_new_store_knows_what_is_described_and_hears_nothing_of_old_writes() {
    let mut w = described();
    w.put("b");
    let (number, _) = write(&mut w);
    w.core.begin_anew();
    let Some(Effect::Knows { fingerprint, tenant_name, .. }) = w.core.poll_effect() else {
        panic!("it is described")
    };
    assert_eq!((fingerprint, &*tenant_name), (w.fingerprint, "a"));
    w.tell(Event::WriteEnded { number, answer: Written::There });
    let chain = w.chain("a");
    let held = vec![(w.fingerprint, chain.chunk(0), PoolSet::ANY)];
    w.tell(listed(held));
    assert_eq!(on_disk(&w), 1);
    assert!(w.is_idle());
}

#[test]
fn a_tenant_that_left_writes_nothing_more() {
    let mut w = world(DISK);
    w.put("ab");
    let Effect::Describe { fingerprint, .. } = w.next() else { panic!("a description") };
    w.tell(Event::TenantsAre(vec![("a".to_owned(), 0)]));
    w.tell(Event::Described { fingerprint, description: Description::There });
    w.pass(Duration::from_secs(1));
    let is_write = |effect: &Effect| matches!(effect, Effect::Write { .. });
    assert!(!std::iter::from_fn(|| w.poll()).any(|effect| is_write(&effect)));
}

#[test]
fn no_description_is_kept_of_namespaces_without_a_chunk() {
    let mut w = world(DISK);
    for model in ["b", "c", "d"] {
        let other = NamespaceSpec { model: model.to_owned(), ..spec(1) };
        w.core.register(w.session, &other, &[0], &[BLOCK]).unwrap();
        let another = NamespaceSpec { model: format!("{model} of another node"), ..spec(1) };
        w.core.know_of_another("a", another.fingerprint("a"), &another).unwrap();
    }
    assert_eq!(w.core.described.namespaces(), 0);
    assert_eq!(w.core.may_write_to_disk(w.fingerprint), MayWrite::Later);
    assert_eq!(w.core.described.namespaces(), 1);
}

#[test]
fn while_a_purge_is_open_no_lookup_counts_on_chunks_of_other_nodes() {
    let mut w = World::new(PEERS);
    w.tell(Event::Purge(PurgeStep::Begin(1, PurgeScope::Tenant("a".to_owned()))));
    w.lookup("ab");
    let Effect::Found { found, .. } = w.next() else {
        panic!("nobody is asked, since no lease would bring the chunks")
    };
    assert_eq!(found.tokens, 0);
    w.tell(Event::Purge(PurgeStep::End(1)));
    w.lookup("ab");
    assert_eq!(w.directory_says(&[&[2], &[2]]), 2);
}

/// Purges some chunks: a page, after the beginning. Returns the removed chunks, and those that are still being written.
fn purged(w: &mut World, scope: &PurgeScope) -> (u64, u64) {
    let page = PurgeStep::Page { purge: 1, scope: scope.clone(), mode: PurgeMode::Remove, from: 0 };
    w.tell(Event::Purge(page));
    let purged = |effect| match effect {
        Effect::Purged { page, writes, .. } => Some((page.removed, writes)),
        _ => None,
    };
    std::iter::from_fn(|| w.poll()).find_map(purged).unwrap()
}

fn chunk_a(w: &World) -> PurgeScope {
    let name_of_namespace = NamespaceName(std::array::from_fn(|at| w.fingerprint.0[at]));
    PurgeScope::Chunks(name_of_namespace, vec![name("a")])
}

#[test]
fn a_purge_waits_for_the_write_of_a_chunk_whose_parent_is_gone() {
    let mut w = uploading(None);
    w.put("ab");
    let writes = [write(&mut w), write(&mut w)];
    let scope = chunk_a(&w);
    w.tell(Event::Purge(PurgeStep::Begin(1, scope.clone())));
    assert_eq!(purged(&mut w, &scope), (2, 2));
    for (is_a, left) in [(true, 1), (false, 0)] {
        let (number, _) = writes.iter().find(|(_, write)| (write.chunk.hash == name("a")) == is_a).unwrap();
        w.tell(Event::WriteEnded { number: *number, answer: Written::There });
        assert_eq!(purged(&mut w, &scope), (0, left));
    }
}

#[test]
fn a_purge_waits_for_uploads_beside_a_silent_drive_but_not_for_the_drive() {
    let object =
        limits().object.map(|object| ObjectStoreLimits { write: Some(WritePolicy::WriteThrough), ..object });
    let mut w = World { sees_writes: true, ..World::with(StoreLimits { object, ..limits() }, BELOW) };
    assert_eq!(w.core.may_write_to_disk(w.fingerprint), MayWrite::Later);
    describe(&mut w, Description::There);
    w.put("a");
    let writes = [write(&mut w), write(&mut w)];
    let scope = chunk_a(&w);
    w.tell(Event::Purge(PurgeStep::Begin(1, scope.clone())));
    assert_eq!(purged(&mut w, &scope), (1, 2));
    w.tell(Event::DiskSilent(true));
    assert_eq!(purged(&mut w, &scope), (0, 1));
    for (number, write) in writes {
        if write.write.tier == Below::Object {
            w.tell(Event::WriteEnded { number, answer: Written::There });
        }
    }
    assert_eq!(purged(&mut w, &scope), (0, 0));
}

#[test]
fn a_purge_does_not_wait_for_the_list_of_a_silent_drive() {
    let mut w = world(DISK);
    let scope = chunk_a(&w);
    assert!(w.core.keys_of_purge(1, &scope).is_none());
    w.tell(Event::DiskSilent(true));
    assert!(w.core.keys_of_purge(1, &scope).unwrap().hashes().unwrap().contains(&name("a")));
}

#[test]
fn a_purge_takes_chunks_on_disk_that_continue_a_chunk_which_is_not_here() {
    let mut w = world(DISK);
    let scope = chunk_a(&w);
    assert!(w.core.keys_of_purge(1, &scope).is_none(), "the disk may have more");
    assert!(w.core.keys_of_purge(1, &PurgeScope::Tenant("a".to_owned())).is_some());
    w.tell(listed(vec![(w.fingerprint, w.chain("ab").chunk(1), PoolSet::ANY)]));
    let keys = w.core.keys_of_purge(1, &scope).unwrap();
    assert!(keys.hashes().unwrap().contains(&name("ab")));
    assert_eq!(purged(&mut w, &scope), (1, 0));
    assert_eq!(on_disk(&w), 0);
}

#[test]
fn a_tier_that_has_too_much_to_do_for_long_is_written_to_in_the_end() {
    let mut w = described();
    w.put("b");
    for _ in 0..100 {
        let (number, _) = write(&mut w);
        w.tell(Event::WriteEnded { number, answer: Written::Busy });
        w.pass(Duration::from_millis(50));
    }
    let (number, _) = write(&mut w);
    w.tell(Event::WriteEnded { number, answer: Written::There });
    assert_eq!(on_disk(&w), 2);
}

#[test]
fn a_description_that_was_under_way_before_a_fault_is_ordered_anew() {
    let mut w = world(DISK);
    w.put("a");
    assert!(matches!(w.next(), Effect::Describe { .. }));
    w.core.begin_anew();
    for extent in w.core.store.secluded() {
        w.tell(Event::ExtentLeft { extent, may_renew: false });
    }
    w.session = w.core.open_session(TenantId(0), ProcessId(1), 1 << 20);
    w.core.register(w.session, &spec(1), &[0], &[BLOCK]).unwrap();
    w.put("a");
    describe(&mut w, Description::There);
    write(&mut w);
}
