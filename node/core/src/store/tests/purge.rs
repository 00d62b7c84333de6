//! Tests of purges, and of tenants that come or go.

use larder_protocol::purge::{NamespaceName, PurgeCounts, PurgeMode, PurgeScope};

use super::gathers::shared;
use super::object::with_objects;
use super::pools::hybrid;
use super::*;
use crate::store::ids::ChunkKey;
use crate::store::{MAX_NAMESPACES, MOST_FORGOTTEN, PurgedKeys, Refused, WritePolicy};

impl Fixture {
    fn whole(&self) -> PurgeScope {
        PurgeScope::Namespace(self.name_of_namespace())
    }

    fn name_of_namespace(&self) -> NamespaceName {
        let fingerprint = self.store.fingerprint(self.namespace).unwrap();
        NamespaceName(std::array::from_fn(|at| fingerprint.0[at]))
    }

    /// Purges, and ends the purge.
    pub(super) fn purge(&mut self, scope: &PurgeScope) -> PurgeCounts {
        self.store.begin_purge(1, scope.clone());
        let page = self.store.purge_page(scope, PurgeMode::Remove, 0);
        assert_eq!(page.next, None);
        self.store.end_purge(1);
        self.store.assert_consistent();
        page.counts
    }

    fn used(&self) -> u64 {
        self.store.slab.bytes().used / BLOCK
    }

    fn reserve(&mut self, word: &str) -> crate::store::Reserved {
        let chain = self.chain(word);
        self.store.reserve(self.session, self.namespace, &chain, 0, NOW).unwrap()
    }

    fn holds(&self, word: &str) -> bool {
        let fingerprint = self.store.fingerprint(self.namespace).unwrap();
        self.store.holds(&ChunkKey { fingerprint, hash: name(word) })
    }
}

#[test]
fn purged_chunks_are_found_no_more_and_can_be_written_anew() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("abc");
    f.put("x");
    let counted = f.store.purge_page(&f.whole(), PurgeMode::Count, 0).counts;
    assert_eq!((f.found("abc"), f.used()), (3, 4), "to count takes nothing");
    let purged = f.purge(&f.whole());
    assert_eq!((purged.memory_chunks, purged.memory_bytes, purged.read_chunks), (4, 4 * BLOCK, 0));
    assert_eq!(counted, purged);
    assert_eq!((f.found("abc"), f.found("x"), f.used()), (0, 0, 0));
    f.put("abc");
    assert_eq!(f.found("abc"), 3);
}

#[test]
fn what_is_read_stays_in_place_until_it_is_released() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let leased = f.lease("ab");
    assert_eq!(f.purge(&f.whole()).read_chunks, 2);
    assert_eq!((f.found("ab"), f.used()), (0, 2));
    assert!(f.reserve("ab").chunks.is_empty(), "the readers' places are not written over");
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.used(), 0);
    f.put("ab");
    assert_eq!(f.found("ab"), 2);
    f.store.assert_consistent();
}

#[test]
fn what_was_being_written_is_not_committed_and_what_is_begun_later_is() {
    let mut f = Fixture::new(limits(16, 16));
    let (reserved, copied) = (f.reserve("a"), f.reserve("b"));
    let order = f.store.begin_commit(f.session, copied.reservation, &copied.chunks, &[0]).unwrap();
    f.purge(&f.whole());
    let late = f.store.begin_commit(f.session, reserved.reservation, &reserved.chunks, &[0]).unwrap();
    assert_eq!(f.store.finish_commit(late.order, Some(sums(&late))), 0);
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 0);
    assert_eq!((f.found("a"), f.found("b"), f.used()), (0, 0, 0));
    // A purge that is still open takes nothing from a session that reserves after it began.
    let whole = f.whole();
    f.store.begin_purge(2, whole.clone());
    let anew = f.reserve("a");
    f.store.purge_page(&whole, PurgeMode::Remove, 0);
    let order = f.store.begin_commit(f.session, anew.reservation, &anew.chunks, &[0]).unwrap();
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 1);
    assert_eq!(f.found("a"), 1);
    f.store.assert_consistent();
}

#[test]
fn what_is_on_its_way_comes_to_nothing_and_nothing_is_brought_before_the_end() {
    let mut f = shared(16, 16, 16);
    let gathered = f.gather("ab", &[PEER, PEER]);
    let whole = f.whole();
    f.store.begin_purge(1, whole.clone());
    f.store.purge_page(&whole, PurgeMode::Remove, 0);
    let refused = f.gather("xy", &[PEER, PEER]);
    assert!(refused.wanted.is_empty());
    f.store.finish_gather(refused.gather).unwrap();
    f.come(&gathered, Some(crate::store::ChangeKind::Gained));
    assert_eq!(f.store.finish_gather(gathered.gather).unwrap().chunks, 0);
    assert_eq!((f.found("ab"), f.holds("a"), f.used()), (0, false, 0));
    f.store.end_purge(1);
    let again = f.gather("ab", &[PEER, PEER]);
    assert_eq!(again.wanted.len(), 2);
}

#[test]
fn a_purge_keeps_the_names_of_chunks_that_came_meanwhile_and_whose_parents_are_gone() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let scope = PurgeScope::Chunks(f.name_of_namespace(), vec![name("a")]);
    f.store.begin_purge(1, scope.clone());
    f.put("ac");
    f.store.keys_of_purge(1, &scope);
    assert_eq!(f.store.purge_page(&scope, PurgeMode::Remove, 0).removed, 3);
    let keys = f.store.keys_of_purge(1, &scope);
    assert!(["a", "ab", "ac"].iter().all(|word| keys.hashes().unwrap().contains(&name(word))));
    f.store.end_purge(1);
    assert!(!f.store.keys_of_purge(1, &scope).hashes().unwrap().contains(&name("ab")));
}

#[test]
fn a_purge_that_is_open_stays_open_in_the_next_life_of_the_store() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let scope = PurgeScope::Chunks(f.name_of_namespace(), vec![name("a")]);
    f.store.begin_purge(1, scope.clone());
    f.store = f.store.begin_anew();
    f.session = f.join(0, 0);
    assert!(!f.store.may_bring(f.namespace));
    assert!(f.store.keys_of_purge(1, &scope).hashes().unwrap().contains(&name("ab")));
    f.store.end_purge(1);
    assert!(f.store.may_bring(f.namespace));
}

#[test]
fn a_chunk_goes_with_all_that_continue_it_and_its_neighbours_stay() {
    let mut f = Fixture::new(limits(16, 16));
    ["abcd", "abx", "ay", "z"].into_iter().for_each(|word| f.put(word));
    let scope = PurgeScope::Chunks(f.name_of_namespace(), vec![name("ab"), name("nowhere")]);
    assert!(f.store.purged_keys(&scope).hashes().unwrap().contains(&name("abcd")));
    assert_eq!(f.purge(&scope).memory_chunks, 4);
    assert_eq!((f.found("abcd"), f.found("ay"), f.found("z")), (1, 2, 1));
}

#[test]
fn the_names_of_all_actors_are_those_that_each_knows_and_no_more() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let fingerprint = f.store.fingerprint(f.namespace).unwrap();
    let key = |word: &str| ChunkKey { fingerprint, hash: name(word) };
    let of = |word: &str| f.store.purged_keys(&PurgeScope::Chunks(f.name_of_namespace(), vec![name(word)]));
    // An actor that did not answer knows no names.
    let mut all = PurgedKeys::default();
    all.add_all(&of("ab"));
    all.add_all(&PurgedKeys::default());
    all.add_all(&of("elsewhere"));
    assert!(all.has(&key("ab")) && all.has(&key("elsewhere")));
    assert!(!all.has(&key("a")), "the rest of the namespace stays");
}

#[test]
fn pins_of_purged_chunks_keep_nothing() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let chain = f.chain("ab");
    let short = f.chain("a");
    let pinned = f.store.pin(f.session, f.namespace, &chain, 1_000, NOW).unwrap();
    f.store.pin(f.session, f.namespace, &short, 1_000, NOW).unwrap();
    let facts = |f: &Fixture| -> Vec<_> {
        f.store
            .pin_facts(NOW)
            .map(|pin| (pin.chunks, pin.bytes))
            .chain([(0, f.store.usage().pinned_bytes)])
            .collect()
    };
    f.purge(&PurgeScope::Chunks(f.name_of_namespace(), vec![chain.hashes[1]]));
    assert_eq!(
        facts(&f),
        [(1, BLOCK), (1, BLOCK), (0, 2 * BLOCK)],
        "the chunk before it stays pinned, by both"
    );
    f.purge(&f.whole());
    assert_eq!(f.used(), 0);
    assert_eq!(facts(&f), [(0, 0), (0, 0), (0, 0)], "other chunks may be pinned");
    f.store.unpin(f.session, pinned.pin).unwrap();
    f.store.assert_consistent();
}

#[test]
fn a_tenant_that_leaves_leaves_nothing_and_its_memory_serves_others_only_when_it_is_new() {
    let mut f = Fixture::new(limits(8, 8));
    f.put("abcd");
    let leased = f.lease("ab");
    let chain = f.chain("cd");
    f.store.tenants_are(&[0, u64::MAX], &[]);
    let is_unknown = |refused: &Refused| matches!(refused, Refused::Unknown { .. });
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW);
    assert!(reserved.as_ref().is_err_and(is_unknown), "{reserved:?}");
    let registered = f.store.register(f.session, "a", &spec(), &[0], &[BLOCK]);
    assert!(registered.as_ref().is_err_and(is_unknown), "{registered:?}");
    assert!(!f.holds("abcd") && !f.holds("a"));
    f.store.tick(Millis(50));
    assert_eq!(f.used(), 2, "its engine still reads");
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.used(), 0);
    // The engine may still have the memory mapped: another tenant gets new memory.
    let other = f.join(1, 7);
    let namespace = f.store.register(other, "b", &spec(), &[0], &[BLOCK]).unwrap();
    let of_other = Chain::from_root(namespace.root, (1..=8).map(|end| name(&"bbbbbbbb"[..end])).collect());
    let all = f.store.reserve(other, namespace.namespace, &of_other, 0, NOW);
    assert!(matches!(all, Err(Refused::Busy { .. })), "{all:?}");
    let renewed = f.store.take_renewals();
    assert_eq!(renewed.len(), 1);
    renewed.into_iter().for_each(|extent| f.store.extent_renewed(extent));
    let all = f.store.reserve(other, namespace.namespace, &of_other, 0, NOW).unwrap();
    assert_eq!(all.chunks.len(), 8);
    assert_eq!(all.new_extents.len(), 0, "a reservation shows nothing");
    f.store.assert_consistent();
}

#[test]
fn leases_that_an_engine_never_ends_hold_no_memory_of_a_tenant_that_left() {
    for session_ends_first in [true, false] {
        let mut f = Fixture::new(limits(8, 8));
        f.put("abcd");
        f.lease("ab");
        if session_ends_first {
            f.store.close_session(f.session);
            assert_eq!(f.store.usage().bytes.quarantined, 2 * BLOCK, "its process may still read");
        }
        f.store.tenants_are(&[0, u64::MAX], &[]);
        f.store.close_session(f.session);
        f.store.tick(Millis(50));
        assert_eq!((f.used(), f.store.usage().bytes.quarantined), (0, 0));
        f.store.assert_consistent();
        f.store.process_gone(ProcessId(0));
        f.store.assert_consistent();
    }
}

#[test]
fn a_tenant_that_comes_again_by_the_same_name_begins_anew() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let leased = f.lease("ab");
    f.store.tenants_are(&[0, u64::MAX, u64::MAX], &["a"]);
    assert_eq!(f.used(), 2, "what its engine reads stays as it is");
    let session = f.store.open_session(TenantId(2), ProcessId(9), 1 << 20);
    let registered = f.store.register(session, "a", &spec(), &[0], &[BLOCK]).unwrap();
    assert_ne!(registered.namespace, f.namespace);
    let before = std::mem::replace(&mut f.session, session);
    let namespace = std::mem::replace(&mut f.namespace, registered.namespace);
    assert_eq!(f.found("ab"), 0);
    f.put("ab");
    assert_eq!((f.found("ab"), f.used()), (2, 4));
    f.store.release(before, leased.lease).unwrap();
    assert_eq!((f.found("ab"), f.used()), (2, 2));
    let chain = f.chain("ab");
    assert!(f.store.lookup(before, namespace, &chain, OPTIONS, NOW).is_err());
    f.store.close_session(before);
    f.store.assert_consistent();
}

const OPTIONS: LookupOptions<'static> =
    LookupOptions { elsewhere: &[], prompt_tokens: u64::MAX, skip_read: false, tiers: &[], pin_ms: None };

#[test]
fn a_purge_takes_all_chunks_that_continue_a_chunk_which_is_not_here() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    f.put("ac");
    let fingerprint = f.store.fingerprint(f.namespace).unwrap();
    assert!(f.store.give_up(&fingerprint, &[name("a")]).is_empty());
    let scope = PurgeScope::Chunks(f.name_of_namespace(), vec![name("a")]);
    assert_eq!(f.purge(&scope).memory_chunks, 2);
    assert_eq!((f.holds("ab"), f.holds("ac"), f.used()), (false, false, 0));
}

#[test]
fn a_purged_chunk_to_which_a_pool_was_being_added_is_not_kept() {
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let mut f = Fixture::with_spec(limits(16, 16), &spec);
    f.put_pools("a", &[0]);
    let whole = f.whole();
    f.store.begin_purge(1, whole.clone());
    let state = f.try_reserve("a", &[2]).unwrap();
    let removed = f.store.purge_page(&whole, PurgeMode::Remove, 0);
    assert_eq!(removed.counts.memory_chunks, 1);
    let order = f.store.begin_commit(f.session, state.reservation, &state.chunks, &[0]).unwrap();
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 0);
    assert_eq!((f.holds("a"), f.used()), (false, 0));
}

#[test]
fn what_is_uploaded_while_objects_are_purged_is_uploaded_again_when_it_is_evicted() {
    let mut f = Fixture::new(with_objects(16, 3, Some(WritePolicy::WriteThrough)));
    let whole = f.whole();
    f.store.begin_purge(1, whole.clone());
    f.store.purge_page(&whole, PurgeMode::Remove, 0);
    f.put("abc");
    assert_eq!(f.upload_all().len(), 3);
    assert!(f.store.end_purge(1).is_some());
    f.put("xyz");
    let uploaded = f.upload_all();
    assert!(["a", "ab", "abc"].iter().all(|word| uploaded.contains(&name(word))), "{uploaded:?}");
    f.store.assert_consistent();
}

#[test]
fn a_purge_of_a_tenant_names_namespaces_whose_numbers_others_have_now() {
    let mut f = Fixture::new(limits(16, 16));
    let model = |number: u32| NamespaceSpec { layout: format!("l{number}"), ..spec() };
    for number in 0..MAX_NAMESPACES as u32 + 100 {
        let session = f.store.open_session(TenantId(0), ProcessId(number + 1), 1 << 20);
        f.store.register(session, "a", &model(number), &[0], &[BLOCK]).unwrap();
        f.store.close_session(session);
    }
    let keys = f.store.purged_keys(&PurgeScope::Tenant("a".to_owned()));
    let others = f.store.purged_keys(&PurgeScope::Tenant("b".to_owned()));
    for number in [0, 1, 50, MAX_NAMESPACES as u32 + 99] {
        let fingerprint = model(number).fingerprint("a");
        assert!(keys.has_namespace(&fingerprint) && !others.has_namespace(&fingerprint), "{number}");
    }
    assert!(!keys.lack_namespaces());
    for number in 0..=MOST_FORGOTTEN as u32 {
        let session = f.store.open_session(TenantId(0), ProcessId(1_000_000 + number), 1 << 20);
        f.store.register(session, "a", &model(1_000_000 + number), &[0], &[BLOCK]).unwrap();
        f.store.close_session(session);
    }
    let lack_namespaces =
        |tenant: &str| f.store.purged_keys(&PurgeScope::Tenant(tenant.to_owned())).lack_namespaces();
    assert_eq!(["a", "b"].map(lack_namespaces), [true, false], "another tenant's are all known");
}

#[test]
fn a_purge_of_a_tenant_that_left_and_came_back_names_its_earlier_namespaces() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let fingerprint = spec().fingerprint("a");
    f.store.tenants_are(&[0, u64::MAX], &[]);
    f.store.tenants_are(&[0, u64::MAX, u64::MAX], &["a"]);
    let named =
        |f: &Fixture| f.store.purged_keys(&PurgeScope::Tenant("a".to_owned())).has_namespace(&fingerprint);
    assert!(named(&f), "objects of the namespace may be left");
    let session = f.store.open_session(TenantId(2), ProcessId(9), 1 << 20);
    f.store.register(session, "a", &spec(), &[0], &[BLOCK]).unwrap();
    assert!(named(&f), "by its new number");
}
