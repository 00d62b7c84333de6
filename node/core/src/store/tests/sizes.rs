//! Tests of blocks of several sizes in one arena: room moves from seldom used sizes to used ones.

use super::super::Refused;
use super::*;

/// A namespace with blocks of so many slots' bytes, in so many slices.
fn of_size(name: &str, blocks: u64, slices: u16) -> NamespaceSpec {
    let mut spec = NamespaceSpec { model: name.into(), slices, ..spec() };
    spec.pools[0] = PoolSpec { layers: 1, layer_bytes: blocks * BLOCK, ..spec.pools[0].clone() };
    spec
}

/// 32 extents of 64 slots for one tenant, with watermarks at 95 % and 93 %.
fn of_one_tenant(policy: PolicyName) -> Fixture {
    let bytes = 32 * 64 * BLOCK;
    Fixture::new(StoreLimits {
        policy,
        extents: 32,
        extent_bytes: 64 * BLOCK,
        capacity_chunks: None,
        high_watermark_bytes: bytes / 100 * 95,
        low_watermark_bytes: bytes / 100 * 93,
        max_reserved_bytes: bytes,
        max_pin_ms: u64::MAX,
        tenant_bytes: vec![u64::MAX],
        ..limits(0, 0)
    })
}

struct Model {
    spec: NamespaceSpec,
    namespace: u32,
    root: ChunkHash,
}

impl Model {
    fn new(f: &mut Fixture, spec: NamespaceSpec) -> Self {
        let slices: Vec<u16> = (0..spec.slices).collect();
        let bytes = [spec.pools[0].block_bytes()];
        let registered = f.store.register(f.session, "a", &spec, &slices, &bytes).unwrap();
        Self { spec, namespace: registered.namespace, root: registered.root }
    }

    /// The prompt of one chunk with this number.
    fn prompt(&self, number: u32) -> Chain {
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&number.to_le_bytes());
        Chain::from_root(self.root, vec![ChunkHash(hash)])
    }

    /// Reads a prompt of one chunk, and puts it if it is not there; says whether it was there.
    fn use_one(&self, f: &mut Fixture, number: u32) -> bool {
        let chain = self.prompt(number);
        let leased = f.store.lease(f.session, self.namespace, &chain).unwrap();
        if leased.chunks > 0 {
            f.store.release(f.session, leased.lease).unwrap();
            return true;
        }
        if let Ok(reserved) = f.store.reserve(f.session, self.namespace, &chain, 0, NOW) {
            let sources = vec![0; usize::from(self.spec.slices)];
            let order = f.store.begin_commit(f.session, reserved.reservation, &[0], &sources).unwrap();
            f.store.finish_commit(order.order, Some(sums(&order)));
        }
        false
    }

    /// Uses these prompts in turn, one every 10 ms; returns the number of hits.
    fn use_all(&self, f: &mut Fixture, numbers: std::ops::Range<u32>) -> usize {
        let mut hits = 0;
        for number in numbers {
            let now = f.store.now + 10;
            f.store.tick(now);
            hits += usize::from(self.use_one(f, number));
        }
        hits
    }
}

#[test]
fn the_chunks_of_a_model_that_nobody_asks_for_make_way_for_one_with_blocks_of_another_size() {
    // By the rules of these three, new chunks go first.
    let is_against_new = [PolicyName::Filo, PolicyName::Mru, PolicyName::WTinyLfu];
    let keeps_new = |policy: &&PolicyName| !is_against_new.contains(policy);
    for &policy in PolicyName::ALL.iter().filter(keeps_new) {
        for (old, new) in [(4, 5), (5, 4), (1, 16), (16, 1)] {
            let mut f = of_one_tenant(policy);
            let before = Model::new(&mut f, of_size("old", old, 1));
            before.use_all(&mut f, 0..3_000 / old as u32);
            let an_hour_later = f.store.now + 3_600_000;
            f.store.tick(an_hour_later);
            let now = Model::new(&mut f, of_size("new", new, 1));
            // A third of the arena.
            let working_set = 0..(700 / new) as u32;
            let rounds: Vec<usize> = (0..12).map(|_| now.use_all(&mut f, working_set.clone())).collect();
            f.store.slab.assert_consistent();
            assert!(rounds[11] * 100 >= working_set.len() * 95, "{policy} {old} {new}: {rounds:?}");
        }
    }
}

#[test]
fn two_models_with_blocks_of_different_sizes_that_are_both_used_keep_what_fits() {
    for policy in [PolicyName::Adaptive, PolicyName::Lru] {
        let mut f = of_one_tenant(policy);
        let (first, second) =
            (Model::new(&mut f, of_size("first", 4, 1)), Model::new(&mut f, of_size("second", 5, 1)));
        first.use_all(&mut f, 10_000..10_700);
        let mut hits = (0, 0);
        for _ in 0..15 {
            hits = (first.use_all(&mut f, 0..160), second.use_all(&mut f, 0..128));
        }
        assert!(hits.0 >= 152 && hits.1 >= 121, "{policy}: {hits:?} of 160 and 128");
    }
}

#[test]
fn chunks_that_are_held_in_nearly_empty_extents_keep_nobody_from_other_extents() {
    let mut f = of_one_tenant(PolicyName::Lru);
    let old = Model::new(&mut f, of_size("old", 1, 1));
    old.use_all(&mut f, 0..512);
    // One chunk in each of eight extents stays.
    let held: Vec<Chain> = (0..8).map(|extent| old.prompt(extent * 64)).collect();
    for chain in &held {
        f.store.pin(f.session, old.namespace, chain, u64::MAX, NOW).unwrap();
    }
    let busy = Model::new(&mut f, of_size("busy", 2, 1));
    busy.use_all(&mut f, 0..2_000);
    let other = Model::new(&mut f, of_size("other", 3, 1));
    other.use_all(&mut f, 0..40);
    assert_eq!(other.use_all(&mut f, 0..40), 40);
    let found = held.iter().filter(|chain| f.store.checksums(old.namespace, &chain.hashes[0]).is_some());
    assert_eq!(found.count(), 8);
}

#[test]
fn a_tenant_whose_part_shrinks_gives_back_what_it_can_though_some_extents_are_held() {
    let mut f = of_one_tenant(PolicyName::Lru);
    let model = Model::new(&mut f, of_size("m", 1, 1));
    model.use_all(&mut f, 0..1_900);
    for extent in 0..6 {
        f.store.pin(f.session, model.namespace, &model.prompt(1_899 - extent * 64), u64::MAX, NOW).unwrap();
    }
    let less = StoreLimits { tenant_bytes: vec![8 * 64 * BLOCK], ..f.store.limits.clone() };
    f.store.change_limits(&less);
    for _ in 0..40 {
        let now = f.store.now + 100;
        f.store.tick(now);
    }
    assert!(f.store.tenant_bytes()[0].0 <= 8 * 64 * BLOCK, "{:?}", f.store.tenant_bytes());
}

#[test]
fn a_reservation_larger_than_the_tenant_may_hold_is_refused_and_evicts_nothing() {
    let mut f = of_one_tenant(PolicyName::Lru);
    let limits = StoreLimits { tenant_bytes: vec![2 * 64 * BLOCK], ..f.store.limits.clone() };
    f.store.change_limits(&limits);
    let model = Model::new(&mut f, of_size("m", 1, 1));
    model.use_all(&mut f, 0..100);
    let long: Vec<ChunkHash> = (1..130_u8).map(|byte| ChunkHash([byte; 32])).collect();
    let chain = Chain::from_root(model.root, long);
    let refused = f.store.reserve(f.session, model.namespace, &chain, 0, NOW).unwrap_err();
    assert!(matches!(refused, Refused::TooLarge { most, .. } if most == 128 * BLOCK), "{refused:?}");
    assert_eq!(f.store.usage().cached_chunks, 100);
}

#[test]
fn a_namespace_whose_chunks_the_tenant_can_never_hold_is_refused() {
    let mut f = of_one_tenant(PolicyName::Lru);
    let limits = StoreLimits { tenant_bytes: vec![2 * 64 * BLOCK], ..f.store.limits.clone() };
    f.store.change_limits(&limits);
    let large = of_size("m", 33, 3);
    let refused = f.store.register(f.session, "a", &large, &[0], &[33 * BLOCK]).unwrap_err();
    let (bytes, most) = (3 * 64 * BLOCK, 2 * 64 * BLOCK);
    assert_eq!(refused, Refused::ChunkTooLarge { bytes, most });
    assert!(f.store.register(f.session, "a", &of_size("m", 33, 2), &[0], &[33 * BLOCK]).is_ok());
}

#[test]
fn a_chunk_of_more_blocks_than_a_message_has_descriptors_is_leased_if_they_share_extents() {
    let mut f = of_one_tenant(PolicyName::Lru);
    let model = Model::new(&mut f, of_size("m", 1, 200));
    assert!(!model.use_one(&mut f, 0));
    let leased = f.store.lease(f.session, model.namespace, &model.prompt(0)).unwrap();
    assert_eq!((leased.chunks, leased.places.len()), (1, 200));
    assert!(leased.new_extents.len() <= 5, "{:?}", leased.new_extents);
}

#[test]
fn a_lease_of_more_blocks_than_the_session_may_have_is_of_as_many_chunks_as_it_may_have() {
    let mut f = Fixture::new(StoreLimits { max_leased_blocks: 3, ..limits(16, 16) });
    f.put("abcdef");
    let leased = f.lease("abcdef");
    assert_eq!(leased.chunks, 3);
    let chain = f.chain("abcdef");
    let full = f.store.lease(f.session, f.namespace, &chain).unwrap_err();
    assert!(matches!(full, Refused::Busy { .. }), "{full:?}");
    f.store.release(f.session, leased.lease).unwrap();
    assert_eq!(f.lease("abcdef").chunks, 3);
}
