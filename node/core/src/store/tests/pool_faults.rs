//! Tests of reservations over pools and slices that fail at any step: nothing of them is left.

use larder_protocol::limits::MAX_FRAME_DESCRIPTORS;
use larder_protocol::session::Scarce;

use super::super::ids::NamespaceId;
use super::super::{Refused, StoreLimits};
use super::pools::hybrid;
use super::*;

/// Two slices and three pools: a whole chunk has six blocks.
fn wide() -> NamespaceSpec {
    hybrid(&[HitPolicy::All, HitPolicy::Last, HitPolicy::All], 2)
}

fn wide_fixture(limits: StoreLimits) -> Fixture {
    // The only tenant may fill the whole arena.
    let mut f = Fixture::with_spec(StoreLimits { tenant_bytes: vec![u64::MAX], ..limits }, &wide());
    f.store.close_session(f.session);
    f.session = f.store.open_session(TenantId(0), ProcessId(0), 1 << 20);
    f.store.register(f.session, "a", &wide(), &[0, 1], &[BLOCK; 3]).unwrap();
    f
}

#[test]
fn a_reservation_that_finds_no_slot_at_any_step_leaks_nothing() {
    // Chunks a and b are here without their state; c, d and e are not here. So 2 + 2 + 6 + 4 + 6 slots are needed.
    let pools = [2, 2, 2, 0, 2];
    for free in 0..=20_u32 {
        let mut f = wide_fixture(StoreLimits { extent_bytes: BLOCK, extents: 28, ..limits(0, 64) });
        f.put_pools("ab", &[0, 0]);
        let number = NamespaceId::of(f.namespace);
        let held = ["a", "ab"].map(|word| f.store.index.find(number, &name(word)).unwrap());
        let class = f.store.namespaces.get(number).pools[0].class;
        for _ in free..20 {
            f.store.slab.take(class, held[0].number(), |_| true).unwrap();
        }
        let before = f.store.usage();
        assert_eq!(before.bytes.free, u64::from(free) * BLOCK);
        // A pin keeps the chunks that are here from eviction.
        let pin = f.store.pin_chunks(f.session, number, held.into(), 9, NOW).unwrap().pin;
        let reserved = f.try_reserve("abcde", &pools);
        if free == 20 {
            assert_eq!(reserved.unwrap().places.len(), 20);
            continue;
        }
        assert_eq!(reserved, Err(Refused::Busy { what: Scarce::Memory, retry_after_ms: 5 }), "{free} slots");
        f.store.assert_consistent();
        f.store.unpin(f.session, pin).unwrap();
        assert_eq!((f.store.usage(), f.store.index.len()), (before, 2), "{free} slots");
    }
}

#[test]
fn a_reservation_with_too_many_extents_to_announce_leaks_nothing() {
    let extents = MAX_FRAME_DESCRIPTORS as u32 + 8;
    let limits = StoreLimits { extent_bytes: BLOCK, extents, trust_engines: true, ..limits(0, 1_000) };
    let mut f = wide_fixture(limits);
    let before = f.store.usage();
    let word = "abcdefghijklmnopqrstuv";
    assert!(matches!(f.try_reserve(word, &[]), Err(Refused::TooLarge { blocks: 132, .. })));
    f.store.assert_consistent();
    assert_eq!((f.store.usage(), f.store.index.len()), (before, 0));
    assert_eq!(f.try_reserve(&word[..21], &[]).unwrap().new_extents.len(), 126);
}

/// A session adds pools to two chunks and writes two more. At every step it may vanish, or the copy of its bytes may fail.
#[test]
fn a_session_that_ends_at_any_step_of_a_reservation_leaks_nothing() {
    for trusted in [false, true] {
        for step in 0..6 {
            let mut f = wide_fixture(StoreLimits { trust_engines: trusted, ..limits(64, 64) });
            let setup = f.try_reserve("ab", &[0, 0]).unwrap();
            let sources = |blocks: usize| vec![0; if trusted { 0 } else { blocks }];
            let order = f.store.begin_commit(f.session, setup.reservation, &[0, 1], &sources(8)).unwrap();
            f.store.finish_commit(order.order, Some(sums(&order)));
            let before = f.store.usage();
            let writer = f.store.open_session(TenantId(0), ProcessId(7), 1 << 20);
            f.store.register(writer, "a", &wide(), &[0, 1], &[BLOCK; 3]).unwrap();
            let reader = std::mem::replace(&mut f.session, writer);
            let reserved = f.try_reserve("abcd", &[2, 2, 2, 2]).unwrap();
            assert_eq!(reserved.places.len(), 2 + 2 + 6 + 6);
            let begin = |f: &mut Fixture, chunks: &[u32], blocks| {
                f.store.begin_commit(writer, reserved.reservation, chunks, &sources(blocks)).unwrap()
            };
            let mut kept = 0;
            match step {
                0 => f.store.close_session(writer),
                1 => f.store.tick(Millis(1_000)),
                2 => f.store.abort(writer, reserved.reservation).unwrap(),
                3 => {
                    let order = begin(&mut f, &[1, 2], 8);
                    f.store.close_session(writer);
                    kept = f.store.finish_commit(order.order, Some(sums(&order)));
                }
                4 => {
                    let order = begin(&mut f, &[0, 3], 8);
                    kept = f.store.finish_commit(order.order, None);
                    f.store.close_session(writer);
                }
                _ => {
                    let order = begin(&mut f, &[0, 1, 2, 3], 16);
                    f.store.postpone_commit(order.order);
                    f.store.close_session(writer);
                }
            }
            assert_eq!(kept, 0);
            f.store.assert_consistent();
            f.store.close_session(writer);
            f.store.process_gone(ProcessId(7));
            f.store.assert_consistent();
            f.session = reader;
            assert_eq!((f.store.usage(), f.store.index.len()), (before, 2), "trusted {trusted}, step {step}");
            assert_eq!(f.found("ab"), 0);
        }
    }
}
