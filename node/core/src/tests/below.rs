//! Tests of chunks that come from disk and object store in any order, or do not come.

use std::sync::Arc;

use larder_protocol::peer::Class;
use larder_protocol::purge::{NamespaceName, PurgeMode, PurgeScope};

use super::*;
use crate::Offer;
use crate::event::PurgeStep;
use crate::store::Granted;

const BELOW: Sources =
    Sources { siblings: None, peers: None, disk: Some(DEADLINE), object: Some(DEADLINE), known_chunks: 100 };

/// Leases three chunks, two on disk and one in the object store. Returns the reads that bring them.
fn three(w: &mut World) -> (RequestId, [(ReadId, Below); 3]) {
    w.on_disk("ab");
    let request = w.lease("abc");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true)] });
    let reads = [w.read(), w.read(), w.read()];
    assert_eq!(reads.map(|(_, tier)| tier), [Below::Disk, Below::Disk, Below::Object]);
    (request, reads)
}

#[test]
fn answers_of_disk_and_object_store_may_come_in_any_order() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut w = World::new(BELOW);
        let (request, reads) = three(&mut w);
        for at in order {
            assert!(w.is_idle());
            w.tell(Event::ReadEnded { read: reads[at].0, answer: read_here() });
        }
        let leased = w.leased(request);
        assert_eq!(leased.chunks, 3);
        w.core.store.release(w.session, leased.lease).unwrap();
        assert!(w.is_at_rest());
    }
}

#[test]
fn a_lease_ends_before_the_chunk_that_did_not_come() {
    for (lost, chunks) in [(0, 0), (1, 1), (2, 2)] {
        let mut w = World::new(Sources { object: Some(DEADLINE), ..BELOW });
        let (request, reads) = three(&mut w);
        for (at, (read, tier)) in reads.into_iter().enumerate() {
            let answer = if at == lost { ReadAnswer::Missing } else { read_here() };
            w.tell(Event::ReadEnded { read, answer });
            if at == lost && tier == Below::Disk {
                let (read, tier) = w.read();
                assert_eq!(tier, Below::Object, "the object store may have what the disk lost");
                w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
            }
        }
        assert_eq!(w.leased(request).chunks, chunks);
        assert!(w.is_idle());
    }
}

#[test]
fn what_the_disk_lost_comes_from_another_node() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert_eq!(w.directory_says(&[&[2]]), 1);
    let asked = w.fetch();
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn a_disk_that_has_too_much_to_do_is_asked_again_at_the_next_tick() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("ab");
    let request = w.lease("ab");
    let reads = [w.read().0, w.read().0];
    for read in reads {
        w.tell(Event::ReadEnded { read, answer: ReadAnswer::Busy });
    }
    assert!(w.is_idle());
    w.pass(Duration::from_millis(50));
    for _ in 0..2 {
        let (read, _) = w.read();
        w.tell(Event::ReadEnded { read, answer: read_here() });
    }
    assert_eq!(w.leased(request).chunks, 2);
}

#[test]
fn a_disk_that_closes_is_asked_for_nothing_more() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Closed });
    assert_eq!(w.leased(request).chunks, 0);
    let request = w.lease("a");
    assert_eq!(w.leased(request).chunks, 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_lease_does_not_wait_for_a_silent_disk() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("ab");
    let early = w.lease("ab");
    let reads = [w.read().0, w.read().0];
    w.tell(Event::DiskSilent(true));
    assert_eq!(w.leased(early).chunks, 0);
    let late = w.lease("ab");
    assert_eq!(w.leased(late).chunks, 0);
    assert!(w.is_at_rest());
    let unused = |w: &World| w.core.store.usage().bytes.quarantined;
    let of_reads = unused(&w);
    assert!(of_reads > 0, "the drive may still write there");
    w.tell(Event::DiskSilent(false));
    let request = w.lease("ab");
    let again = [w.read().0, w.read().0];
    for (read, left) in reads.into_iter().zip([of_reads / 2, 0]) {
        w.tell(Event::ReadEnded { read, answer: read_here() });
        assert_eq!(unused(&w), left);
    }
    assert!(w.is_idle(), "the answers are of the first reads");
    again.into_iter().for_each(|read| w.tell(Event::ReadEnded { read, answer: read_here() }));
    assert_eq!(w.leased(request).chunks, 2);
}

#[test]
fn a_read_that_nobody_has_begun_when_the_disk_falls_silent_is_never_begun() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
    w.on_disk("ab");
    let request = w.lease("ab");
    let (read, _) = w.read();
    w.tell(Event::DiskSilent(true));
    let of_one = w.core.store.usage().bytes.quarantined;
    assert_eq!(w.directory_says(&[&[2]]), 1, "the second chunk may come from another node");
    let asked = w.fetch();
    w.tell(Event::ReadEnded { read, answer: read_here() });
    assert_eq!(
        (of_one > 0, w.core.store.usage().bytes.quarantined),
        (true, 0),
        "the drive wrote to one chunk's slots"
    );
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 0, "the first chunk did not come");
    assert!(w.is_at_rest());
}

#[test]
fn a_chunk_that_a_silent_disk_was_reading_comes_from_another_node() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
    w.on_disk("a");
    let early = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::DiskSilent(true));
    assert_eq!(w.leased(early).chunks, 0);
    let request = w.lease("a");
    assert_eq!(w.directory_says(&[&[2]]), 1);
    let asked = w.fetch();
    w.tell(Event::ReadEnded { read, answer: read_here() });
    assert!(w.is_idle(), "the chunk of the other node has not come");
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn chunks_on_a_silent_disk_are_found_again_when_it_answers() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    w.tell(Event::DiskSilent(true));
    let request = w.lease("a");
    assert_eq!(w.leased(request).chunks, 0);
    w.tell(Event::DiskSilent(false));
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: read_here() });
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn what_waits_in_line_for_a_disk_that_falls_silent_comes_from_elsewhere() {
    let mut w = World::new(BELOW);
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Busy });
    w.tell(Event::DiskSilent(true));
    let (read, tier) = w.read();
    assert_eq!(tier, Below::Object);
    w.tell(Event::ReadEnded { read, answer: read_here() });
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn a_chunk_on_a_silent_disk_comes_from_another_node() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
    w.on_disk("a");
    w.tell(Event::DiskSilent(true));
    let request = w.lease("a");
    assert_eq!(w.directory_says(&[&[2]]), 1);
    let asked = w.fetch();
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn what_is_in_line_for_the_disk_is_not_read_once_nobody_wants_it() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Busy });
    w.now += DEADLINE;
    w.tell(Event::Tick);
    assert_eq!(w.leased(request).chunks, 0);
    while let Some(effect) = w.poll() {
        let Effect::Read { read, .. } = effect else { panic!("{effect:?}") };
        w.tell(Event::ReadEnded { read, answer: read_here() });
    }
    w.pass(Duration::from_secs(1));
    assert!(w.is_at_rest());
}

#[test]
fn what_a_failed_thread_was_reading_stays_unused() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Lost });
    assert_eq!(w.leased(request).chunks, 0);
    assert_ne!(w.core.store.usage().bytes.quarantined, 0, "nobody knows whether it still writes there");
    assert!(w.is_at_rest());
}

#[test]
fn what_the_object_store_said_is_remembered_for_the_lease_that_follows() {
    let mut w = World::new(BELOW);
    w.lookup("ab");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true), Some(false)] });
    assert!(matches!(w.next(), Effect::Found { found, .. } if found.tokens == 16));
    w.lease("ab");
    assert_eq!(w.read().1, Below::Object, "it is not asked again");
    assert!(w.is_idle());
    w.pass(Duration::from_secs(1));
    w.lookup("b");
    w.stored();
}

#[test]
fn after_a_purge_of_a_chunk_the_object_store_is_asked_anew_for_all_chunks_of_the_namespace() {
    let mut w = World::new(BELOW);
    w.lookup("ab");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true), Some(true)] });
    assert!(matches!(w.next(), Effect::Found { found, .. } if found.tokens == 32));
    let namespace = NamespaceName(std::array::from_fn(|at| w.fingerprint.0[at]));
    w.tell(Event::Purge(PurgeStep::Begin(1, PurgeScope::Chunks(namespace, vec![name("a")]))));
    w.tell(Event::Purge(PurgeStep::End(1)));
    w.lookup("ab");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(false), Some(false)] });
    assert!(
        matches!(w.next(), Effect::Found { found, .. } if found.tokens == 0),
        "b continued a, and its object went with it"
    );
}

#[test]
fn an_object_store_that_is_closed_is_asked_for_nothing() {
    let mut w = World::new(BELOW);
    w.core.object_is_open(false);
    w.lookup("a");
    assert!(matches!(w.next(), Effect::Found { found, .. } if found.tokens == 0));
    w.on_disk("b");
    let request = w.lease("b");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert_eq!(w.leased(request).chunks, 0);
}

#[test]
fn a_chunk_that_its_peers_did_not_give_is_asked_of_the_object_store() {
    let mut w = World::new(Sources { object: Some(DEADLINE), ..PEERS });
    let request = w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![FAILED]);
    w.directory_says(&[&[]]);
    let (read, tier) = w.read();
    assert_eq!(tier, Below::Object);
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert_eq!(w.leased(request).chunks, 0);
    assert!(w.is_at_rest());
}

impl World {
    /// Grants a chunk to a peer.
    fn grants(&mut self, word: &str, class: Class) -> Offer {
        let (names, sizes) = ((self.fingerprint, &[name(word)][..]), Arc::from([BLOCK]));
        self.core.offer(self.now, names, &sizes, class, &Cause::default()).remove(0)
    }
}

#[test]
fn two_peers_that_want_a_chunk_from_disk_have_it_read_once() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    let offer = |w: &mut World| w.grants("a", Class::Decode);
    let (Offer::Later(one), Offer::Later(other)) = (offer(&mut w), offer(&mut w)) else {
        panic!("it is on disk")
    };
    let (read, _) = w.read();
    assert!(w.is_idle());
    w.tell(Event::ReadEnded { read, answer: read_here() });
    for of in [one, other] {
        let Effect::Granted { recall, granted: Granted::Held { grant, .. } } = w.next() else {
            panic!("it is here")
        };
        assert_eq!(recall, of);
        w.core.store.end_grant(grant);
    }
    assert!(w.is_at_rest());
    assert_eq!(w.core.store.usage().cached_chunks, 0, "it does not stay for them");
}

#[test]
fn a_peer_hears_of_a_chunk_that_the_disk_lost() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    assert!(matches!(w.grants("a", Class::Prefetch), Offer::Later(_)));
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert!(matches!(w.next(), Effect::Granted { granted: Granted::NotHeld, .. }));
    assert!(w.is_at_rest());
}

#[test]
fn what_the_disk_lost_is_found_no_more() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    let request = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert_eq!(w.leased(request).chunks, 0);
    w.lookup("a");
    assert!(matches!(w.next(), Effect::Found { found, .. } if found.tokens == 0));
}

#[test]
fn what_is_in_line_for_the_disk_leaves_it_with_the_session_that_wanted_it() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Busy });
    w.tell(Event::Closed(w.session));
    w.pass(Duration::from_millis(50));
    assert!(w.is_at_rest());
}

/// Looks up three chunks of a new namespace.
fn look_up_three(w: &mut World, flat: bool) {
    let spec = NamespaceSpec { flat, layout: "flat".into(), ..spec(1) };
    let known = w.core.register(w.session, &spec, &[0], &[BLOCK]).unwrap();
    let hashes = ["a", "b", "c"].map(name).to_vec();
    let chain = match flat {
        true => Chain::flat(known.root, hashes),
        false => Chain::from_root(known.root, hashes),
    };
    let ask = Lookup { namespace: known.namespace, chain, ..w.ask("") };
    w.asks(w.session, Request::Lookup(ask));
}

#[test]
fn a_chunk_of_which_the_object_store_said_nothing_is_asked_for_again_and_no_other() {
    let mut w = World::new(Sources { disk: None, ..BELOW });
    look_up_three(&mut w, true);
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true), None, Some(false)] });
    let Effect::Found { .. } = w.next() else { panic!("it is answered") };
    look_up_three(&mut w, true);
    let asked = match w.next() {
        Effect::FindStored { chunks, .. } => chunks.iter().map(|chunk| chunk.hash).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(asked, [name("b")]);
}

#[test]
fn chunks_behind_a_hole_in_the_object_store_are_found_only_in_a_flat_namespace() {
    let positions = |flat: bool| {
        let mut w = World::new(Sources { disk: None, ..BELOW });
        look_up_three(&mut w, flat);
        let question = w.stored();
        w.tell(Event::StoredFound { question, found: vec![Some(true), Some(false), Some(true)] });
        let Effect::Found { found, .. } = w.next() else { panic!("it is known") };
        found.spans.iter().flat_map(|span| span.from..span.to).collect::<Vec<u32>>()
    };
    assert_eq!(positions(true), [0, 2]);
    assert_eq!(positions(false), [0]);
}

#[test]
fn a_chunk_that_another_nodes_engine_waits_for_is_read_before_what_is_prefetched() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("abc");
    let offer = |w: &mut World, word, class| {
        assert!(matches!(w.grants(word, class), Offer::Later(_)));
    };
    offer(&mut w, "a", Class::Prefetch);
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Busy });
    for (word, class) in [("ab", Class::Prefetch), ("abc", Class::Prefetch), ("abc", Class::Decode)] {
        offer(&mut w, word, class);
    }
    w.pass(Duration::from_millis(50));
    let mut read = || match w.next() {
        Effect::Read { chunk, .. } => w.core.wanted(chunk).unwrap().1.chunk.hash,
        other => panic!("{other:?}"),
    };
    assert_eq!([read(), read(), read()], [name("a"), name("abc"), name("ab")]);
}

#[test]
fn no_further_part_is_read_for_a_lease_whose_time_is_up() {
    let object = limits().object.map(|object| ObjectStoreLimits { max_reading_bytes: 8 * BLOCK, ..object });
    let limits = StoreLimits { object, disk: None, ..limits() };
    let mut w = World::with(limits, Sources { disk: None, ..BELOW });
    let request = w.lease("abcdefghij");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true); 10] });
    let mut reads = Vec::new();
    while let Some(Effect::Read { read, .. }) = w.poll() {
        reads.push(read);
    }
    assert!(reads.len() < 10, "the rest has no room yet");
    w.now += DEADLINE;
    reads.iter().for_each(|&read| w.tell(Event::ReadEnded { read, answer: read_here() }));
    assert_eq!(w.leased(request).chunks as usize, reads.len());
    assert!(w.is_at_rest());
}

#[test]
fn an_object_store_that_has_too_much_to_do_is_asked_for_the_next_chunk_at_once() {
    let mut w = World::new(Sources { disk: None, ..BELOW });
    for (word, answer, chunks) in [("a", ReadAnswer::Busy, 0), ("b", read_here(), 1)] {
        let request = w.lease(word);
        let question = w.stored();
        w.tell(Event::StoredFound { question, found: vec![Some(true)] });
        let (read, _) = w.read();
        w.tell(Event::ReadEnded { read, answer });
        assert_eq!(w.leased(request).chunks, chunks);
    }
}

#[test]
fn what_a_silent_disk_turns_out_to_lack_is_found_no_more() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    let early = w.lease("a");
    let (read, _) = w.read();
    w.tell(Event::DiskSilent(true));
    assert_eq!(w.leased(early).chunks, 0);
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    w.tell(Event::DiskSilent(false));
    let request = w.lease("a");
    assert_eq!(w.leased(request).chunks, 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_peer_hears_at_once_that_a_chunk_is_on_a_silent_disk() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    w.tell(Event::DiskSilent(true));
    assert!(matches!(w.grants("a", Class::Decode), Offer::Now(Granted::NotHeld)));
    assert!(w.is_at_rest());
}

#[test]
fn what_was_purged_is_not_believed_to_be_in_the_object_store() {
    let mut w = World::new(Sources { disk: None, ..BELOW });
    w.lookup("a");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true)] });
    assert!(matches!(w.next(), Effect::Found { .. }));
    let scope = PurgeScope::Tenant(TENANTS[0].to_owned());
    w.tell(Event::Purge(PurgeStep::Begin(1, scope.clone())));
    w.tell(Event::Purge(PurgeStep::Page { purge: 1, scope, mode: PurgeMode::Remove, from: 0 }));
    assert!(matches!(w.next(), Effect::Purged { .. }));
    w.tell(Event::Purge(PurgeStep::End(1)));
    w.lookup("a");
    w.stored();
}

#[test]
fn a_lookup_counts_on_nothing_that_is_on_a_silent_disk() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    for (is_silent, tokens) in [(true, 0), (false, 16)] {
        w.tell(Event::DiskSilent(is_silent));
        w.lookup("a");
        let Effect::Found { found, .. } = w.next() else { panic!("it is answered") };
        assert_eq!(found.tokens, tokens);
    }
}

#[test]
fn the_object_store_is_asked_for_the_blocks_that_every_chunk_has() {
    let mut w = World::new(Sources { disk: None, ..BELOW });
    let mut spec = spec(1);
    spec.pools.push(PoolSpec { name: "state".into(), hit: HitPolicy::Last, ..spec.pools[0].clone() });
    let registered = w.core.register(w.session, &spec, &[0], &[BLOCK; 2]).unwrap();
    (w.namespace, w.root) = (registered.namespace, registered.root);
    w.lookup("a");
    let Effect::FindStored { blocks, .. } = w.next() else { panic!("the object store") };
    assert_eq!(blocks, [(0, 0)], "a chunk need not have a state");
}

#[test]
fn an_object_that_turned_out_to_be_missing_is_not_asked_for_at_once() {
    let mut w = World::new(Sources { disk: None, ..BELOW });
    let request = w.lease("a");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true)] });
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Missing });
    assert_eq!(w.leased(request).chunks, 0);
    w.lookup("a");
    assert!(matches!(w.next(), Effect::Found { found, .. } if found.tokens == 0));
    w.pass(Duration::from_secs(1));
    w.lookup("a");
    w.stored();
}

#[test]
fn a_new_life_of_the_store_knows_what_the_object_store_has() {
    let mut w = World::new(Sources { disk: None, ..BELOW });
    w.lookup("a");
    let question = w.stored();
    w.tell(Event::StoredFound { question, found: vec![Some(true)] });
    assert!(matches!(w.next(), Effect::Found { .. }));
    w.core.begin_anew();
    w.session = w.core.open_session(TenantId(0), ProcessId(1), 1 << 20);
    w.core.register(w.session, &spec(1), &[0], &[BLOCK]).unwrap();
    w.lookup("a");
    assert!(matches!(w.next(), Effect::Found { found, .. } if found.tokens == 16));
}

#[test]
fn a_peer_hears_that_a_chunk_on_disk_could_not_be_read() {
    let mut w = World::new(Sources { object: None, ..BELOW });
    w.on_disk("a");
    assert!(matches!(w.grants("a", Class::Decode), Offer::Later(_)));
    let (read, _) = w.read();
    w.tell(Event::ReadEnded { read, answer: ReadAnswer::Impossible });
    assert!(matches!(w.next(), Effect::Granted { granted: Granted::NotHeld, .. }));
    assert!(w.is_at_rest());
}
