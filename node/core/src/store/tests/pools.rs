//! Tests of chunks with several pools: which blocks are reserved, and where a prefix ends.

use larder_protocol::limits::MAX_FRAME_DESCRIPTORS;
use larder_protocol::{Chain, PoolSet};

use super::super::{Refused, Reserved, StoreLimits};
use super::*;

const KV: PoolSet = PoolSet(1);

pub(super) fn hybrid(hits: &[HitPolicy], slices: u16) -> NamespaceSpec {
    let names = ["kv", "one", "two", "three"];
    let pool =
        |(&hit, name): (&HitPolicy, &str)| PoolSpec { name: name.into(), layers: 1, layer_bytes: BLOCK, hit };
    NamespaceSpec {
        slices,
        tensor_parallel: slices,
        pools: hits.iter().zip(names).map(pool).collect(),
        ..spec()
    }
}

/// A namespace with attention, a recurrent state, and a window of two chunks.
fn three() -> NamespaceSpec {
    hybrid(&[HitPolicy::All, HitPolicy::Last, HitPolicy::Window(2)], 1)
}

impl Fixture {
    pub(super) fn try_reserve(&mut self, word: &str, pools: &[u8]) -> Result<Reserved, Refused> {
        let (chain, pools) = (self.chain(word), pools.iter().copied().map(PoolSet).collect::<Vec<_>>());
        self.store.reserve_pools(self.session, self.namespace, &chain, &pools, 0, NOW)
    }

    pub(super) fn commit(&mut self, reserved: &Reserved) {
        if reserved.reservation == 0 {
            return;
        }
        let sources = vec![0; reserved.places.len()];
        let order =
            self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources).unwrap();
        let kept = self.store.finish_commit(order.order, Some(sums(&order)));
        assert_eq!(kept as usize, reserved.chunks.len());
    }

    /// Writes a prompt whose chunks have attention and these pools.
    pub(super) fn put_pools(&mut self, word: &str, pools: &[u8]) -> Reserved {
        let reserved = self.try_reserve(word, pools).unwrap();
        self.commit(&reserved);
        reserved
    }

    /// Leases a prompt and releases the lease. Returns the numbers of chunks and of places.
    pub(super) fn leased(&mut self, word: &str) -> (u32, usize) {
        let leased = self.lease(word);
        if leased.lease > 0 {
            self.store.release(self.session, leased.lease).unwrap();
        }
        (leased.chunks, leased.places.len())
    }
}

#[test]
fn a_hybrid_prefix_is_found_and_leased_up_to_the_last_state_that_was_saved() {
    let mut f = Fixture::with_spec(limits(64, 64), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
    let reserved = f.put_pools("abcdef", &[0, 0, 2, 0, 2, 0]);
    assert_eq!((reserved.pools[2], reserved.pools[3], reserved.places.len()), (PoolSet(3), KV, 8));
    assert_eq!(["abcdef", "abcd", "abc", "ab"].map(|word| f.found(word)), [5, 3, 3, 0]);
    assert_eq!(f.leased("abcdef"), (5, 6), "five of attention, one state");
    assert_eq!((f.leased("abcd"), f.leased("ab")), ((3, 4), (0, 0)));
    let chain = f.chain("abcdef");
    assert_eq!(f.store.pin(f.session, f.namespace, &chain, 5, NOW).unwrap().chunks, 5);
}

#[test]
fn every_pool_must_be_restorable_at_the_boundary() {
    let mut f = Fixture::with_spec(limits(64, 64), &three());
    // The state is there after c and e, the window's pool for b, c and d.
    f.put_pools("abcdef", &[0, 4, 6, 4, 2, 0]);
    assert_eq!((f.found("abcdef"), f.leased("abcdef")), (3, (3, 6)), "the window of e has a hole");
    f.put_pools("abcdef", &[0, 0, 0, 0, 6, 0]);
    assert_eq!((f.found("abcdef"), f.leased("abcdef")), (5, (5, 8)));
    f.store.assert_consistent();
}

#[test]
fn a_hit_capped_by_the_prompt_ends_at_a_legal_boundary() {
    let mut f = Fixture::with_spec(limits(64, 64), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
    f.put_pools("abcd", &[0, 2, 0, 2]);
    let chain = f.chain("abcd");
    let mut tokens = |prompt_tokens| {
        let options =
            LookupOptions { elsewhere: &[], prompt_tokens, skip_read: false, tiers: &[], pin_ms: None };
        f.store.lookup(f.session, f.namespace, &chain, options, NOW).unwrap().tokens / 16
    };
    assert_eq!([65, 64, 49, 33, 32].map(&mut tokens), [4, 2, 2, 2, 0]);
}

#[test]
fn a_lookup_pins_what_it_found_in_memory() {
    let mut f = Fixture::with_spec(limits(64, 2), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
    f.put_pools("ab", &[0, 2]);
    let chain = f.chain("ab");
    let options = LookupOptions {
        elsewhere: &[],
        prompt_tokens: 99,
        skip_read: false,
        tiers: &[],
        pin_ms: Some(1_000),
    };
    assert!(f.store.lookup(f.session, f.namespace, &chain, options, NOW).unwrap().pin.is_some());
    f.put_pools("xy", &[0, 2]);
    assert_eq!((f.found("ab"), f.found("xy")), (2, 0));
}

#[test]
fn a_pool_is_added_to_a_chunk_that_is_here_and_not_twice() {
    let mut f = Fixture::with_spec(limits(64, 64), &three());
    f.put_pools("abc", &[0, 0, 0]);
    assert_eq!((f.found("abc"), f.store.usage().cached_chunks), (0, 3));
    let first = f.try_reserve("abc", &[0, 4, 6]).unwrap();
    assert_eq!((&first.chunks[..], &first.pools[..]), (&[1, 2][..], &[PoolSet(4), PoolSet(6)][..]));
    let second = f.try_reserve("abc", &[6, 6, 6]).unwrap();
    assert_eq!((second.chunks, second.pools), (vec![0], vec![PoolSet(6)]), "the others are being written");
    f.store.abort(f.session, second.reservation).unwrap();
    f.commit(&first);
    assert_eq!((f.found("abc"), f.store.usage().cached_chunks), (3, 3));
    assert_eq!(f.store.usage().cached_bytes, 6 * BLOCK);
    assert_eq!(f.try_reserve("abc", &[0, 6, 6]).unwrap().chunks, [1], "the state after b");
    f.store.assert_consistent();
}

#[test]
fn a_pool_that_is_not_committed_leaves_the_chunk_as_it_was() {
    let mut f = Fixture::with_spec(limits(64, 64), &three());
    f.put_pools("ab", &[0, 6]);
    let used = f.store.usage().bytes.used;
    let reserved = f.try_reserve("ab", &[6, 0]).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0], &[0, BLOCK]).unwrap();
    f.store.finish_commit(order.order, None);
    assert_eq!((f.found("ab"), f.store.usage().bytes.used), (0, used), "its window is not whole");
    f.put_pools("ab", &[6, 0]);
    assert_eq!(f.found("ab"), 2);
    f.store.assert_consistent();
}

#[test]
fn sets_of_pools_that_do_not_fit_are_refused_with_what_to_do() {
    let mut f = Fixture::with_spec(limits(64, 64), &three());
    let refused = f.try_reserve("abc", &[0, 0]).unwrap_err();
    assert_eq!(refused, Refused::Pools { found: 2, chunks: 3, of: 3 });
    assert!(refused.to_string().contains("name one for each chunk, or none at all"));
    assert_eq!(f.try_reserve("a", &[8]).unwrap_err(), Refused::Pools { found: 1, chunks: 1, of: 3 });
    let reserved = f.try_reserve("ab", &[2, 0]).unwrap();
    let refused = f.store.begin_commit(f.session, reserved.reservation, &[0, 1], &[0; 2]);
    assert_eq!(refused, Err(Refused::Sources { found: 2, blocks: 3 }));
    f.commit(&reserved);
}

#[test]
fn a_pool_added_beside_a_vanished_reader_is_quarantined_with_the_rest() {
    let mut f = Fixture::with_spec(limits(64, 64), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
    f.put_pools("ab", &[0, 2]);
    let reader = f.store.open_session(TenantId(0), ProcessId(7), 0);
    f.store.register(reader, "a", &hybrid(&[HitPolicy::All, HitPolicy::Last], 1), &[0], &[BLOCK; 2]).unwrap();
    let chain = f.chain("ab");
    assert_eq!(f.store.lease(reader, f.namespace, &chain).unwrap().chunks, 2);
    let given_up = f.try_reserve("ab", &[2, 0]).unwrap();
    f.store.close_session(reader);
    assert_eq!(f.store.usage().bytes.quarantined, 3 * BLOCK);
    f.store.abort(f.session, given_up.reservation).unwrap();
    f.store.assert_consistent();
    f.put_pools("ab", &[2, 0]);
    assert_eq!(f.store.usage().bytes.quarantined, 4 * BLOCK);
    f.store.process_gone(ProcessId(7));
    f.store.assert_consistent();
    assert_eq!((f.store.usage().bytes.quarantined, f.store.usage().bytes.used), (0, 4 * BLOCK));
}

#[test]
fn a_lease_that_may_announce_no_more_extents_ends_at_a_legal_boundary_before() {
    let extents = 2 * MAX_FRAME_DESCRIPTORS as u32;
    let spec = hybrid(&[HitPolicy::All, HitPolicy::Last], 1);
    let limits = StoreLimits { extent_bytes: BLOCK, extents, ..limits(0, 1_000) };
    let mut f = Fixture::with_spec(limits, &spec);
    let hashes = (0..140_u8).map(|n| ChunkHash([n; 32])).collect();
    let chain = Chain::from_root(f.root, hashes);
    let pools: Vec<PoolSet> = (0..140).map(|n| PoolSet(if n % 10 == 9 { 2 } else { 0 })).collect();
    let reserved = f.store.reserve_pools(f.session, f.namespace, &chain, &pools, 0, NOW).unwrap();
    f.commit(&reserved);
    let leased = f.store.lease(f.session, f.namespace, &chain).unwrap();
    assert_eq!((leased.chunks, leased.places.len()), (110, 111), "128 extents: 117 chunks and 11 states");
    let next = f.store.lease(f.session, f.namespace, &chain).unwrap();
    assert_eq!((next.chunks, next.places.len()), (140, 141), "what was announced before need not be again");
}

#[test]
fn no_pool_is_added_to_a_chunk_that_is_being_verified_and_none_is_verified_while_a_pool_is_added() {
    let mut f = Fixture::with_spec(limits(16, 16), &hybrid(&[HitPolicy::All, HitPolicy::Last], 1));
    f.put_pools("a", &[0]);
    let verify =
        |f: &mut Fixture| f.store.begin_verify(&f.store.fingerprint(f.namespace).unwrap(), &name("a"));
    let order = verify(&mut f).expect("it is whole");
    assert!(f.try_reserve("a", &[2]).unwrap().chunks.is_empty());
    f.store.finish_verify(order.verify, Some(&[0]));
    let state = f.try_reserve("a", &[2]).unwrap();
    assert_eq!(state.chunks, [0]);
    assert!(verify(&mut f).is_none());
    f.commit(&state);
    assert_eq!(verify(&mut f).map(|order| order.blocks.len()), Some(2));
}
