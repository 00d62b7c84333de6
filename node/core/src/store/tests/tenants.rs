//! Tests of several tenants in one arena.

use larder_protocol::ChunkRef;

use super::super::ids::{Below, NamespaceId};
use super::super::{DiskStoreLimits, PeerStoreLimits, WritePolicy};
use super::*;

const SLOTS: u64 = 400;

/// Limits of 400 slots with watermarks at 95 % and 90 %.
fn with_watermarks(policy: PolicyName) -> StoreLimits {
    StoreLimits {
        policy,
        capacity_chunks: None,
        high_watermark_bytes: SLOTS * BLOCK / 100 * 95,
        low_watermark_bytes: SLOTS * BLOCK / 100 * 90,
        ..limits(SLOTS as u32, 0)
    }
}

/// The prompt of one chunk with this number, in a session's namespace of `spec`.
fn prompt(f: &mut Fixture, session: SessionId, spec: &NamespaceSpec, number: u32) -> (u32, Chain) {
    let tenant = usize::from(f.store.tenant(session).unwrap().0);
    let bytes = [spec.pools[0].block_bytes()];
    let registered = f.store.register(session, ["a", "b"][tenant], spec, &[0], &bytes).unwrap();
    let mut hash = [0; 32];
    hash[..4].copy_from_slice(&number.to_le_bytes());
    (registered.namespace, Chain::from_root(registered.root, vec![ChunkHash(hash)]))
}

/// Puts a prompt of one chunk; says whether there was room.
fn put_one(f: &mut Fixture, session: SessionId, spec: &NamespaceSpec, number: u32) -> bool {
    let (namespace, chain) = prompt(f, session, spec, number);
    let reserved = f.store.reserve(session, namespace, &chain, 0, NOW);
    for extent in f.store.take_renewals() {
        f.store.extent_renewed(extent);
    }
    let Ok(reserved) = reserved else { return false };
    if reserved.chunks.is_empty() {
        return true;
    }
    let order = f.store.begin_commit(session, reserved.reservation, &[0], &[0]).unwrap();
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 1);
    true
}

/// Puts as many prompts; returns the number of those for which there was no room.
fn put_many(f: &mut Fixture, session: SessionId, numbers: std::ops::Range<u32>) -> usize {
    numbers.filter(|&number| !put_one(f, session, &spec(), number)).count()
}

/// The number of a session's prompts that are cached.
fn cached(f: &mut Fixture, session: SessionId, numbers: std::ops::Range<u32>) -> usize {
    let is_cached = |number: &u32| {
        let (namespace, chain) = prompt(f, session, &spec(), *number);
        let hash = chain.hashes[0];
        f.store.checksums(namespace, &hash).is_some()
    };
    numbers.filter(is_cached).count()
}

#[test]
fn an_idle_tenants_older_chunks_neither_go_for_a_busy_tenant_nor_keep_it_from_its_room() {
    for policy in PolicyName::ALL {
        let mut f = Fixture::new(with_watermarks(policy));
        let idle = f.join(1, 1);
        assert_eq!(put_many(&mut f, idle, 0..90), 0);
        let busy = f.session;
        assert_eq!(put_many(&mut f, busy, 0..1_000), 0, "{policy}");
        f.store.assert_consistent();
        assert_eq!(cached(&mut f, idle, 0..90), 90, "{policy}");
        // A quarter of the arena is kept for the other tenant.
        let of_busy = cached(&mut f, busy, 0..1_000);
        assert!((270..=285).contains(&of_busy), "{policy}: {of_busy} of the 300 that it can have");
        let evictions = f.store.evictions;
        assert_eq!((evictions.need, evictions.clearing), (0, 0), "{policy}: room is made ahead of need");
    }
}

#[test]
fn a_busy_tenants_chunks_are_written_to_disk_before_they_go() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteBack,
        write_after_uses: 2,
        max_waiting_bytes: 64 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    let mut f = Fixture::new(StoreLimits { disk: Some(disk), ..with_watermarks(PolicyName::Lru) });
    let (busy, _idle) = (f.session, f.join(1, 1));
    let mut written = 0;
    for number in 0..600 {
        assert_eq!(put_many(&mut f, busy, number..number + 1), 0);
        written += f.write_all().len();
    }
    let evicted = f.store.evictions.watermark as usize;
    assert_eq!((written, f.store.evictions.need), (evicted, 0));
    assert!(written >= 300, "{written}");
}

#[test]
fn blocks_that_leave_a_rest_in_each_extent_are_evicted_ahead_of_need() {
    // Three of an extent's four slots hold one block: a quarter of the arena can hold nothing.
    let mut spec = spec();
    spec.pools[0] = PoolSpec { layers: 1, layer_bytes: 3 * BLOCK, ..spec.pools[0].clone() };
    let mut f = Fixture::with_spec(with_watermarks(PolicyName::Lru), &spec);
    let session = f.session;
    assert!((0..300).all(|number| put_one(&mut f, session, &spec, number)));
    assert_eq!((f.store.evictions.need, f.store.evictions.clearing), (0, 0));
    assert!(f.store.evictions.watermark >= 200);
}

#[test]
fn a_tenant_whose_engines_are_gone_yields_what_it_has_beyond_the_others() {
    for policy in [PolicyName::Lru, PolicyName::Adaptive] {
        let mut f = Fixture::new(with_watermarks(policy));
        let gone = f.join(1, 1);
        assert_eq!(put_many(&mut f, gone, 0..300), 0);
        for number in 0..300 {
            let (namespace, chain) = prompt(&mut f, gone, &spec(), number);
            let leased = f.store.lease(gone, namespace, &chain).unwrap();
            _ = f.store.release(gone, leased.lease);
        }
        let busy = f.session;
        put_many(&mut f, busy, 0..300);
        assert!(cached(&mut f, busy, 0..300) <= 120, "{policy}: the other's engine has mapped the rest");
        f.store.close_session(gone);
        f.store.process_gone(ProcessId(1));
        put_many(&mut f, busy, 300..1_300);
        f.store.assert_consistent();
        let of_busy = cached(&mut f, busy, 300..1_300);
        assert!((170..=210).contains(&of_busy), "{policy}: {of_busy}, about half");
        let again = f.join(1, 2);
        let of_gone = cached(&mut f, again, 0..300);
        assert!((150..=210).contains(&of_gone), "{policy}: {of_gone}, about half");
    }
}

#[test]
fn a_second_tenant_comes_and_the_policy_changes_meanwhile() {
    let mut f =
        Fixture::new(StoreLimits { tenant_bytes: vec![u64::MAX], ..with_watermarks(PolicyName::Fifo) });
    let first = f.session;
    assert_eq!(put_many(&mut f, first, 0..700), 0);
    let before = f.store.tenants.order(TenantId(0));
    f.store.tenants_are(&[u64::MAX, u64::MAX], &[]);
    f.store.assert_consistent();
    let after = f.store.tenants.order(TenantId(0));
    assert_eq!(after, before[before.len() - after.len()..], "the oldest went, the order stays");
    let second = f.join(1, 1);
    for policy in PolicyName::ALL {
        f.store.set_policy(policy);
        f.store.assert_consistent();
        put_many(&mut f, first, 1_000..1_100);
        put_many(&mut f, second, 0..120);
        f.store.assert_consistent();
    }
    assert!(cached(&mut f, second, 0..120) >= 80, "it has at least its part");
}

#[test]
fn the_capacity_in_chunks_takes_from_the_tenant_that_has_the_most() {
    let mut f = Fixture::new(limits(400, 100));
    let (first, second) = (f.session, f.join(1, 1));
    assert_eq!(put_many(&mut f, first, 0..100), 0);
    assert_eq!(put_many(&mut f, second, 0..30), 0);
    assert_eq!((cached(&mut f, first, 0..100), cached(&mut f, second, 0..30)), (70, 30));
    assert_eq!(put_many(&mut f, second, 30..200), 0);
    let of_first = cached(&mut f, first, 0..100);
    assert!((49..=50).contains(&of_first) && cached(&mut f, second, 0..200) == 100 - of_first);
}

#[test]
fn a_tenant_that_commits_faster_than_the_drive_leaves_another_its_part_of_the_line() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteThrough,
        write_after_uses: 2,
        max_waiting_bytes: 40 * BLOCK,
        max_reading_bytes: 4 * BLOCK,
    };
    let mut f = Fixture::new(StoreLimits { disk: Some(disk), ..with_watermarks(PolicyName::Lru) });
    let (fast, slow) = (f.session, f.join(1, 1));
    assert_eq!(put_many(&mut f, fast, 0..100), 0);
    assert_eq!(put_many(&mut f, slow, 0..10), 0);
    let fingerprint = spec().fingerprint("b");
    let mut of_slow = 0;
    while let Some(write) = f.store.next_write(Below::Disk) {
        of_slow += usize::from(write.fingerprint == fingerprint);
        f.store.written(write.write, true);
    }
    assert_eq!(of_slow, 10, "a quarter of the line is kept for it");
}

#[test]
fn reads_from_disk_and_chunks_that_leave_take_no_room_of_fetches_from_peers() {
    let disk = DiskStoreLimits {
        write: WritePolicy::WriteBack,
        write_after_uses: 2,
        max_waiting_bytes: 64 * BLOCK,
        max_reading_bytes: 16 * BLOCK,
    };
    let placement = crate::placement::PlacementRule::Worth;
    let peers = PeerStoreLimits { passing_bytes: 4 * BLOCK, max_granted_chunks: 4, placement };
    let limits = StoreLimits {
        disk: Some(disk),
        peers: Some(peers),
        tenant_bytes: vec![u64::MAX],
        ..with_watermarks(PolicyName::Lru)
    };
    let mut f = Fixture::new(limits);
    let session = f.session;
    put_many(&mut f, session, 0..420);
    assert!(f.store.usage().passing_bytes >= 8 * BLOCK, "evicted chunks wait for their writes");
    let number = NamespaceId::of(f.namespace);
    let mut start = |number_of: u32, source| {
        let mut hash = [7; 32];
        hash[..4].copy_from_slice(&number_of.to_le_bytes());
        let name = ChunkRef { hash: ChunkHash(hash), parent: f.root, index: 0, anchor: f.root };
        f.store.start_fetch(number, name, source).is_some()
    };
    assert!((0..16).all(|chunk| start(chunk, Source::Disk)));
    assert!(!start(16, Source::Disk), "the disk's account is full");
    assert!((17..21).all(|chunk| start(chunk, Source::Peer)), "the peers' account is empty");
    assert!(!start(21, Source::Peer));
}

#[test]
fn a_tenant_that_left_takes_nothing_of_the_free_room_that_peers_are_told() {
    let mut f = Fixture::new(with_watermarks(PolicyName::Lru));
    let (first, second) = (f.session, f.join(1, 1));
    put_many(&mut f, first, 0..600);
    put_many(&mut f, second, 0..10);
    assert!(f.store.least().is_some(), "the first tenant has no free room");
    f.store.tenants_are(&[0, u64::MAX, u64::MAX], &["another name"]);
    assert!(f.store.usage().cached_chunks > 200, "nobody waits until all are gone");
    (0..10).for_each(|_| f.store.tick(NOW));
    assert_eq!(f.store.usage().cached_chunks, 10);
    assert_eq!(f.store.least(), None);
}

#[test]
fn a_new_model_takes_the_place_of_the_model_that_no_session_has_used_for_the_longest_time() {
    let mut f = Fixture::new(limits(2_000, 2_000));
    f.put("a");
    let model = |number: u32| NamespaceSpec { layout: format!("l{number}"), ..spec() };
    let put = |f: &mut Fixture, number: u32| {
        let session = f.store.open_session(TenantId(0), ProcessId(number + 1), 1 << 20);
        let registered = f.store.register(session, "a", &model(number), &[0], &[BLOCK]).unwrap();
        let chain = Chain::from_root(registered.root, vec![name("x")]);
        let reserved = f.store.reserve(session, registered.namespace, &chain, 0, NOW).unwrap();
        if !reserved.chunks.is_empty() {
            let order = f.store.begin_commit(session, reserved.reservation, &[0], &[0]).unwrap();
            f.store.finish_commit(order.order, Some(sums(&order)));
        }
        f.store.close_session(session);
    };
    (0..511).for_each(|number| put(&mut f, number));
    let session = f.store.open_session(TenantId(0), ProcessId(9_000), 0);
    let pinned = f.store.register(session, "a", &model(1), &[0], &[BLOCK]).unwrap();
    let chain = Chain::from_root(pinned.root, vec![name("x")]);
    assert_eq!(f.store.pin(session, pinned.namespace, &chain, 1_000, NOW).unwrap().chunks, 1);
    f.store.close_session(session);
    (2..511).chain([0]).for_each(|number| put(&mut f, number));
    assert_eq!(f.store.namespaces().count(), 512, "the most");
    put(&mut f, 600);
    let chunks = |f: &Fixture, number: u32| {
        let fingerprint = model(number).fingerprint("a");
        f.store.namespaces().find(|known| known.fingerprint == fingerprint).map(|known| known.chunks)
    };
    assert_eq!(
        [0, 1, 2, 600].map(|number| chunks(&f, number)),
        [Some(1), Some(1), None, Some(1)],
        "1 is pinned"
    );
    assert_eq!(f.store.namespaces().find(|known| known.sessions > 0).map(|known| known.chunks), Some(1));
}

#[test]
fn a_new_model_takes_the_place_of_no_model_of_another_tenant() {
    let mut f = Fixture::new(limits(2_000, 2_000));
    let model = |number: u32| NamespaceSpec { layout: format!("l{number}"), ..spec() };
    let put = |f: &mut Fixture, tenant: u16, number: u32| {
        let session = f.store.open_session(TenantId(tenant), ProcessId(number + 1), 1 << 20);
        let name_of_tenant = ["a", "b"][usize::from(tenant)];
        let registered = f.store.register(session, name_of_tenant, &model(number), &[0], &[BLOCK]).unwrap();
        let chain = Chain::from_root(registered.root, vec![name("x")]);
        let reserved = f.store.reserve(session, registered.namespace, &chain, 0, NOW).unwrap();
        let order = f.store.begin_commit(session, reserved.reservation, &[0], &[0]).unwrap();
        f.store.finish_commit(order.order, Some(sums(&order)));
        f.store.close_session(session);
    };
    put(&mut f, 1, 0);
    // One more than a tenant may have, with the namespace of the fixture.
    (0..512).for_each(|number| put(&mut f, 0, number));
    let has = |fingerprint| f.store.namespaces().any(|known| known.fingerprint == fingerprint);
    assert!(has(model(0).fingerprint("b")), "it is the oldest, and not this tenant's");
    assert!(!has(model(0).fingerprint("a")) && has(model(511).fingerprint("a")));
}
