//! Tests of single behaviors of the store.

use larder_protocol::chain::{Links, Start};
use larder_protocol::session::{Scarce, Span, Tier};
use larder_protocol::{Chain, ChainError, Fingerprint};

use larder_protocol::HitPolicy;

use super::*;
use crate::store::{Keeper, Leased, Refused, slab::Bytes};

const BUSY: Refused = Refused::Busy { what: Scarce::Memory, retry_after_ms: 5 };

#[test]
fn a_lookup_answers_the_longest_prefix_and_leaves_a_token_to_compute() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("abcd");
    assert_eq!((f.found("abcd"), f.found("abxy"), f.found("x")), (4, 2, 0));
    let chain = f.chain("abcd");
    let mut tokens = |prompt_tokens| {
        let options = LookupOptions {
            elsewhere: &[],
            prompt_tokens,
            skip_read: false,
            tiers: &[Tier::Host],
            pin_ms: None,
        };
        f.store.lookup(f.session, f.namespace, &chain, options, NOW).unwrap().tokens
    };
    assert_eq!([0, 1, 16, 17, 64, 65].map(&mut tokens), [0, 0, 0, 16, 48, 64]);
}

#[test]
fn a_tail_of_a_prompt_is_capped_like_the_whole() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("abcd");
    let chain = f.chain("abcd").tail(2);
    let options =
        LookupOptions { elsewhere: &[], prompt_tokens: 64, skip_read: false, tiers: &[], pin_ms: None };
    let found = f.store.lookup(f.session, f.namespace, &chain, options, NOW).unwrap();
    assert_eq!((found.tokens, found.spans), (16, vec![Span { from: 0, to: 1, tier: Tier::Host }]));
}

#[test]
fn a_request_that_cannot_use_a_hit_is_told_nothing() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("ab");
    let chain = f.chain("ab");
    let options =
        LookupOptions { elsewhere: &[], prompt_tokens: 100, skip_read: true, tiers: &[], pin_ms: Some(5) };
    let found = f.store.lookup(f.session, f.namespace, &chain, options, NOW).unwrap();
    assert_eq!((found.tokens, found.pin, f.store.usage().pins), (0, None, 0));
}

#[test]
fn a_chunk_is_seen_only_when_it_is_committed() {
    let mut f = Fixture::new(limits(16, 16));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0], &[0]).unwrap();
    assert_eq!(f.found("ab"), 0);
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 1);
    assert_eq!(f.found("ab"), 1);
    let again = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    assert_eq!((again.reservation, again.chunks), (0, vec![]), "one is here, the other is being written");
}

#[test]
fn leaves_go_before_their_parents() {
    let mut f = Fixture::new(limits(16, 3));
    f.put("abc");
    f.lease("abc");
    let lease = f.lease("abc").lease;
    f.put("x");
    assert_eq!(
        (f.found("abc"), f.found("x")),
        (3, 0),
        "the new leaf goes: the others are leased or have a child"
    );
    f.store.release(f.session, lease).unwrap();
    f.store.release(f.session, lease - 1).unwrap();
    f.put("y");
    assert_eq!((f.found("abc"), f.found("y")), (2, 1));
}

#[test]
fn eviction_says_how_long_chunks_had_been_cached() {
    let mut f = Fixture::new(limits(16, 2));
    f.store.tick(Millis(5_000));
    f.put("a");
    f.store.tick(Millis(6_000));
    f.put("b");
    assert_eq!(f.store.usage().evictions.resided_ms, 0);
    f.store.tick(Millis(9_500));
    f.put("x");
    f.put("y");
    assert_eq!(f.store.usage().evictions.resided_ms, 4_500 + 3_500);
}

#[test]
fn a_reservation_is_whole_or_not_at_all() {
    let mut f = Fixture::new(limits(4, 4));
    f.put("ab");
    let lease = f.lease("ab");
    let chain = f.chain("wxyz");
    assert_eq!(f.store.reserve(f.session, f.namespace, &chain, 0, NOW), Err(BUSY));
    f.store.assert_consistent();
    assert_eq!(f.store.usage().bytes.used, 2 * BLOCK);
    assert_eq!(f.store.index.len(), 2, "nothing of the failed reservation is left");
    f.store.release(f.session, lease.lease).unwrap();
    assert!(f.store.reserve(f.session, f.namespace, &chain, 0, NOW).is_ok());
}

#[test]
fn a_reservation_past_its_deadline_cannot_be_committed_and_its_room_is_free() {
    let mut f = Fixture::new(limits(4, 4));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    f.store.tick(Millis(999));
    assert_eq!(f.store.usage().reservations, 1);
    f.store.tick(Millis(1_000));
    assert_eq!(f.store.usage().bytes.free, 4 * BLOCK);
    let late = f.store.begin_commit(f.session, reserved.reservation, &[0], &[0]);
    assert_eq!(late, Err(Refused::Unknown { what: "reservation", number: reserved.reservation }));
}

#[test]
fn a_session_that_ends_while_its_bytes_are_copied_commits_nothing() {
    let mut f = Fixture::new(limits(4, 4));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0, 1], &[0, 0]).unwrap();
    f.store.close_session(f.session);
    assert_eq!(f.store.usage().bytes.used, 2 * BLOCK, "the copy still writes there");
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 0);
    assert_eq!(f.store.usage().bytes.free, 4 * BLOCK);
}

#[test]
fn a_copy_that_failed_is_no_hit() {
    let mut f = Fixture::new(limits(4, 4));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0, 1], &[0, 0]).unwrap();
    assert_eq!(f.store.finish_commit(order.order, None), 0);
    assert_eq!((f.found("ab"), f.store.usage().bytes.free, f.store.usage().reservations), (0, 4 * BLOCK, 0));
}

#[test]
fn what_a_vanished_session_had_leased_is_quarantined_until_its_process_is_gone() {
    let mut f = Fixture::new(limits(4, 2));
    f.put("ab");
    let reader = f.join(0, 7);
    let chain = f.chain("ab");
    f.store.lease(reader, f.namespace, &chain).unwrap();
    f.store.close_session(reader);
    let expected = Bytes { total: 4 * BLOCK, free: 2 * BLOCK, used: 0, quarantined: 2 * BLOCK };
    assert_eq!(f.store.usage().bytes, expected);
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (2, 0), "nothing of it is evicted, and others may read it");
    f.store.process_gone(ProcessId(7));
    f.put("xy");
    f.store.assert_consistent();
    assert_eq!((f.found("xy"), f.store.usage().bytes.quarantined), (2, 0));
}

#[test]
fn sessions_that_a_process_opens_again_and_again_leave_each_chunk_to_it_once() {
    let mut f = Fixture::new(limits(4, 4));
    f.put("ab");
    let chain = f.chain("ab");
    for _ in 0..1_000 {
        let reader = f.join(0, 7);
        f.store.lease(reader, f.namespace, &chain).unwrap();
        f.store.close_session(reader);
    }
    let held = |f: &Fixture| {
        let chunks = f.store.index.iter_from(0).map(|(_, _, chunk)| (chunk.claims, chunk.orphaned_leases));
        (chunks.collect::<Vec<_>>(), f.store.usage().bytes.quarantined)
    };
    assert_eq!(held(&f), (vec![(1, 1); 2], 2 * BLOCK));
    f.store.process_gone(ProcessId(7));
    assert_eq!(held(&f), (vec![(0, 0); 2], 0));
}

#[test]
fn a_trusted_writer_that_vanishes_leaves_its_slots_quarantined() {
    let mut f = Fixture::new(StoreLimits { trust_engines: true, ..limits(4, 4) });
    let writer = f.join(0, 7);
    let chain = f.chain("ab");
    let reserved = f.store.reserve(writer, f.namespace, &chain, 0, NOW).unwrap();
    assert_eq!((reserved.places.len(), reserved.new_extents), (2, vec![0]));
    f.store.begin_commit(writer, reserved.reservation, &[0], &[]).unwrap();
    f.store.close_session(writer);
    let bytes = f.store.usage().bytes;
    assert_eq!((bytes.quarantined, bytes.used), (BLOCK, BLOCK), "the second is still being summed");
    let order = crate::store::ids::OrderId(reserved.reservation + 1);
    f.store.finish_commit(order, Some(vec![Checksums::default()]));
    assert_eq!(f.store.usage().bytes.quarantined, 2 * BLOCK);
    f.store.process_gone(ProcessId(7));
    f.store.assert_consistent();
    assert_eq!(f.store.usage().bytes.free, 4 * BLOCK);
}

#[test]
fn pins_outlive_their_session_and_end_at_their_deadline() {
    let mut f = Fixture::new(limits(8, 2));
    f.put("ab");
    let pinner = f.join(0, 7);
    let chain = f.chain("abc");
    let pinned = f.store.pin(pinner, f.namespace, &chain, 99_999, NOW).unwrap();
    assert_eq!((pinned.chunks, pinned.duration_ms), (2, 10_000));
    f.store.close_session(pinner);
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (2, 0));
    f.store.tick(Millis(10_000));
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (0, 2));
}

#[test]
fn an_admin_pins_for_the_tenant_and_ends_any_pin() {
    let mut f = Fixture::new(limits(8, 2));
    f.put("ab");
    let fingerprint = f.store.namespaces().next().unwrap().fingerprint;
    let chain = f.chain("abc");
    let pinned = f.store.pin_for_admin(&fingerprint, &chain, 99_999, NOW).unwrap();
    assert_eq!((pinned.chunks, pinned.duration_ms), (2, 10_000));
    assert_eq!(f.store.pin_facts(NOW).next().unwrap().tenant, f.store.tenant(f.session).unwrap());
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (2, 0));
    f.store.unpin_for_admin(pinned.pin).unwrap();
    assert_eq!(f.store.unpin_for_admin(pinned.pin), Err(Refused::UnknownPin(pinned.pin)));
    f.put("xy");
    assert_eq!((f.found("ab"), f.found("xy")), (0, 2));
    let strange = f.store.pin_for_admin(&Fingerprint([9; 32]), &chain, 5, NOW).unwrap();
    assert_eq!((strange.pin, strange.chunks), (0, 0), "nothing is known of it");
}

#[test]
fn another_tenant_can_neither_unpin_nor_release_nor_see() {
    let mut f = Fixture::new(limits(8, 8));
    f.put("ab");
    let chain = f.chain("ab");
    let pin = f.store.pin(f.session, f.namespace, &chain, 5, NOW).unwrap().pin;
    let lease = f.lease("ab").lease;
    let stranger = f.join(1, 9);
    assert_eq!(f.store.unpin(stranger, pin), Err(Refused::UnknownPin(pin)));
    assert_eq!(f.store.release(stranger, lease), Err(Refused::Unknown { what: "lease", number: lease }));
    let foreign = f.store.lease(stranger, f.namespace, &chain);
    assert_eq!(foreign, Err(Refused::Unknown { what: "namespace", number: f.namespace.into() }));
}

#[test]
fn chains_that_disagree_with_what_is_cached_are_refused() {
    let mut f = Fixture::new(limits(8, 8));
    f.put("abc");
    let swapped = Chain::from_root(f.root, vec![name("a"), name("abc")]);
    assert!(matches!(
        f.store.lease(f.session, f.namespace, &swapped),
        Err(Refused::Chain(ChainError::Disagrees { .. }))
    ));
    let twice = Chain::from_root(f.root, vec![name("x"), name("y"), name("x")]);
    let refused = f.store.reserve(f.session, f.namespace, &twice, 0, NOW);
    assert_eq!(refused, Err(Refused::Chain(ChainError::Duplicate { hash: name("x") })));
    let start = Start { index: 2, parent: name("q"), anchor: name("q") };
    let foreign_parent =
        Chain { links: Links::Linked(start), hashes: vec![name("abc")], anchor_before: None };
    let refused = f.store.reserve(f.session, f.namespace, &foreign_parent, 0, NOW);
    assert!(matches!(refused, Err(Refused::Chain(ChainError::Disagrees { .. }))));
    assert_eq!(f.store.index.len(), 3);
}

#[test]
fn a_block_size_that_disagrees_with_the_namespace_is_refused() {
    let mut f = Fixture::new(limits(8, 8));
    let refused = f.store.register(f.session, "a", &spec(), &[0], &[BLOCK / 2]).unwrap_err();
    assert!(refused.to_string().contains("2048 bytes, but 2 layers of 2048 bytes make 4096"), "{refused}");
    let large = NamespaceSpec {
        pools: vec![PoolSpec { name: "kv".into(), layers: 1, layer_bytes: 1 << 20, hit: HitPolicy::All }],
        ..spec()
    };
    let refused = f.store.register(f.session, "a", &large, &[0], &[1 << 20]).unwrap_err();
    assert_eq!(refused, Refused::BlockTooLarge { block_bytes: 1 << 20, extent_bytes: 4 * BLOCK });
    assert!(matches!(f.store.register(f.session, "a", &spec(), &[1], &[BLOCK]), Err(Refused::Slices { .. })));
}

#[test]
fn a_chunk_is_complete_only_when_every_slice_of_it_is_here() {
    let two = NamespaceSpec { slices: 2, tensor_parallel: 2, ..spec() };
    let mut f = Fixture::with_spec(limits(8, 1), &two);
    let other = f.store.open_session(TenantId(0), ProcessId(1), 1 << 20);
    f.store.register(other, "a", &two, &[1], &[BLOCK]).unwrap();
    f.put("a");
    assert_eq!((f.found("a"), f.store.usage().cached_chunks), (0, 1));
    let chain = f.chain("a");
    let reserved = f.store.reserve(other, f.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_commit(other, reserved.reservation, &[0], &[0]).unwrap();
    f.store.finish_commit(order.order, Some(sums(&order)));
    assert_eq!(
        (f.found("a"), f.store.usage().cached_chunks),
        (1, 1),
        "one chunk counts once, whatever its slices"
    );
    f.store.assert_consistent();
}

#[test]
fn a_multi_pool_reservation_takes_room_for_every_pool() {
    let pool =
        |name: &str| PoolSpec { name: name.into(), layers: 1, layer_bytes: BLOCK, hit: HitPolicy::All };
    let two = NamespaceSpec { pools: vec![pool("kv"), pool("mamba")], ..spec() };
    let mut f = Fixture::with_spec(limits(4, 4), &two);
    let chain = f.chain("abc");
    let too_large = Refused::TooLarge { blocks: 6, bytes: 6 * BLOCK, most: 4 * BLOCK };
    assert_eq!(f.store.reserve(f.session, f.namespace, &chain, 0, NOW), Err(too_large));
    assert_eq!(f.store.usage().bytes.free, 4 * BLOCK);
    let reserved = f.store.reserve(f.session, f.namespace, &f.chain("ab"), 0, NOW).unwrap();
    assert_eq!(reserved.places.len(), 4);
}

#[test]
fn blocks_of_another_size_get_an_extent_cleared_for_them() {
    // With two tenants, one of the two extents would be kept for the other.
    let mut f = Fixture::new(StoreLimits { tenant_bytes: vec![u64::MAX], ..limits(8, 8) });
    f.put("abcdefgh");
    let large = NamespaceSpec {
        pools: vec![PoolSpec { name: "kv".into(), layers: 1, layer_bytes: 4 * BLOCK, hit: HitPolicy::All }],
        ..spec()
    };
    let registered = f.store.register(f.session, "a", &large, &[0], &[4 * BLOCK]).unwrap();
    let chain = Chain::from_root(registered.root, vec![name("z")]);
    f.store.reserve(f.session, registered.namespace, &chain, 0, NOW).unwrap();
    f.store.slab.assert_consistent();
    assert_eq!((f.found("abcdefgh"), f.store.usage().evictions.clearing), (4, 4));
}

#[test]
fn the_policy_can_be_changed_without_losing_a_chunk() {
    let mut f = Fixture::new(limits(8, 3));
    "abc".chars().for_each(|letter| f.put(&letter.to_string()));
    let lease = f.lease("a").lease;
    f.store.set_policy(PolicyName::Fifo);
    assert_eq!(f.store.usage().cached_chunks, 3);
    f.store.release(f.session, lease).unwrap();
    f.lease("b");
    f.put("d");
    assert_eq!(
        ["a", "b", "c", "d"].map(|word| f.found(word)),
        [1, 1, 0, 1],
        "b is leased, so c was the oldest"
    );
    f.store.assert_consistent();
}

#[test]
fn keys_of_a_flat_namespace_stand_for_themselves() {
    let flat = NamespaceSpec { flat: true, ..spec() };
    let mut f = Fixture::with_spec(limits(8, 8), &flat);
    let keys = |words: &[&str]| Chain::flat(f.root, words.iter().map(|word| name(word)).collect());
    let (stored, asked) = (keys(&["a", "c", "d"]), keys(&["a", "b", "c", "d"]));
    let reserved = f.store.reserve(f.session, f.namespace, &stored, 0, NOW).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0, 1, 2], &[0, 0, 0]).unwrap();
    f.store.finish_commit(order.order, Some(sums(&order)));
    let options =
        LookupOptions { elsewhere: &[], prompt_tokens: 1, skip_read: false, tiers: &[], pin_ms: None };
    let found = f.store.lookup(f.session, f.namespace, &asked, options, NOW).unwrap();
    let span = |from, to| Span { from, to, tier: Tier::Host };
    assert_eq!(found.spans, [span(0, 1), span(2, 4)]);
}

#[test]
fn a_session_holds_no_more_than_it_may() {
    let mut f = Fixture::new(StoreLimits {
        max_leased_blocks: 2,
        max_reserved_bytes: 3 * BLOCK,
        max_pinned_bytes: 2 * BLOCK,
        ..limits(8, 8)
    });
    f.put("abc");
    let chain = f.chain("abc");
    let claims =
        |result: Result<(), Refused>| matches!(result, Err(Refused::Busy { what: Scarce::Claims, .. }));
    assert_eq!(f.lease("abc").chunks, 2);
    assert!(claims(f.store.lease(f.session, f.namespace, &chain).map(drop)));
    assert!(claims(f.store.pin(f.session, f.namespace, &chain, 1, NOW).map(drop)));
    let long = f.chain("vwxyz");
    let refused = f.store.reserve(f.session, f.namespace, &long, 0, NOW);
    assert_eq!(refused, Err(Refused::TooLarge { blocks: 5, bytes: 5 * BLOCK, most: 3 * BLOCK }));
}

#[test]
fn a_block_outside_the_write_window_is_refused_and_can_be_committed_again() {
    let mut f = Fixture::new(limits(8, 8));
    let chain = f.chain("ab");
    let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
    for source in [(1 << 20) - BLOCK + 1, u64::MAX] {
        let refused = f.store.begin_commit(f.session, reserved.reservation, &[0, 1], &[0, source]);
        assert!(
            matches!(refused, Err(Refused::OutsideWindow { source_offset, .. }) if source_offset == source)
        );
    }
    let refused = f.store.begin_commit(f.session, reserved.reservation, &[0, 2], &[0, 0]);
    assert_eq!(refused, Err(Refused::NotOpen { reservation: reserved.reservation, position: 2 }));
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0, 1], &[0, BLOCK]).unwrap();
    f.store.postpone_commit(order.order);
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0, 1], &[0, BLOCK]).unwrap();
    assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 2);
}

#[test]
fn a_search_for_a_namespace_that_may_go_is_not_repeated_at_once_when_it_found_none() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("a");
    let chain = f.chain("a");
    let pinned = f.store.pin(f.session, f.namespace, &chain, 60_000, NOW).unwrap();
    f.store.close_session(f.session);
    let mut number = 0;
    let mut register = |f: &mut Fixture| {
        number += 1;
        let session = f.store.open_session(TenantId(0), ProcessId(number), 0);
        let spec = NamespaceSpec { layout: format!("l{number}"), ..spec() };
        f.store.register(session, "a", &spec, &[0], &[BLOCK]).map(drop)
    };
    let refused = loop {
        if let Err(refused) = register(&mut f) {
            break refused;
        }
    };
    assert!(matches!(refused, Refused::TooManyNamespaces { .. }), "the only unused one has a pinned chunk");
    f.store.unpin_for_admin(pinned.pin).unwrap();
    assert_eq!(register(&mut f), Err(refused.clone()));
    f.store.tick(NOW + 1_000);
    assert_eq!(register(&mut f), Ok(()));
    assert_eq!(register(&mut f), Err(refused), "all are in use now");
}

#[test]
fn no_tenant_can_leave_another_without_pins_or_namespaces() {
    let mut f = Fixture::new(StoreLimits { max_pinned_bytes: 4 * BLOCK, ..limits(16, 16) });
    f.put("abcd");
    let pin = |f: &mut Fixture, session, namespace, chain: &Chain| {
        f.store.pin(session, namespace, chain, 1_000, NOW).map(|pinned| pinned.chunks)
    };
    let (session, namespace) = (f.session, f.namespace);
    let (most, all) = (f.chain("abc"), f.chain("abcd"));
    assert!(matches!(pin(&mut f, session, namespace, &all), Err(Refused::Busy { .. })));
    assert_eq!(pin(&mut f, session, namespace, &most), Ok(3));
    let other = f.store.open_session(TenantId(1), ProcessId(9), 1 << 20);
    let theirs = f.store.register(other, "b", &spec(), &[0], &[BLOCK]).unwrap();
    let chain = Chain::from_root(theirs.root, vec![name("x")]);
    let reserved = f.store.reserve(other, theirs.namespace, &chain, 0, NOW).unwrap();
    let order = f.store.begin_commit(other, reserved.reservation, &[0], &[0]).unwrap();
    f.store.finish_commit(order.order, Some(sums(&order)));
    assert_eq!(pin(&mut f, other, theirs.namespace, &chain), Ok(1), "a part is kept for the other tenant");
    let mut refused = None;
    for number in 0..600 {
        // Each session may have few namespaces, but together the sessions may have the tenant's part.
        let session = f.store.open_session(TenantId(0), ProcessId(number), 0);
        let spec = NamespaceSpec { layout: format!("l{number}"), ..spec() };
        refused = f.store.register(session, "a", &spec, &[0], &[BLOCK]).err();
    }
    assert_eq!(refused, Some(Refused::TooManyNamespaces { most: 512 }));
    let session = f.store.open_session(TenantId(1), ProcessId(9), 0);
    let mut register = |number| {
        let spec = NamespaceSpec { layout: format!("l{number}"), ..spec() };
        f.store.register(session, "b", &spec, &[0], &[BLOCK]).err()
    };
    let refusals: Vec<_> = (0..17).filter_map(&mut register).collect();
    assert_eq!(refusals, [Refused::TooManySessionNamespaces]);
    let spec = NamespaceSpec { layout: "another".into(), ..spec() };
    assert!(f.store.register(other, "b", &spec, &[0], &[BLOCK]).is_ok());
}

#[test]
fn a_session_registers_a_namespace_with_one_list_of_slices() {
    let mut f = Fixture::new(limits(8, 8));
    let session = f.store.open_session(TenantId(0), ProcessId(7), 0);
    let spec = NamespaceSpec { slices: 2, tensor_parallel: 2, layout: "two".into(), ..spec() };
    let mut register = |slices: &[u16]| f.store.register(session, "a", &spec, slices, &[BLOCK]);
    let first = register(&[0, 1]).unwrap();
    for slices in [&[0][..], &[1], &[1, 0]] {
        let refused = Refused::OtherSlices { registered: vec![0, 1], slices: slices.to_vec() };
        assert_eq!(register(slices), Err(refused));
    }
    assert_eq!(register(&[0, 1]), Ok(first), "the same again");
}

#[test]
fn a_reservation_of_which_its_session_was_not_told_counts_no_more() {
    let mut f = Fixture::new(StoreLimits { max_reserved_bytes: 2 * BLOCK, ..limits(8, 8) });
    for _ in 0..3 {
        let chain = f.chain("ab");
        let reserved = f.store.reserve(f.session, f.namespace, &chain, 0, NOW).unwrap();
        f.store.withdraw(f.session, reserved.reservation).unwrap();
    }
    assert_eq!(f.store.usage().bytes.used, 0);
    f.store.assert_consistent();
}

#[test]
fn a_chunk_has_the_priority_with_which_it_was_reserved() {
    let mut f = Fixture::new(StoreLimits { policy: PolicyName::Priority, ..limits(8, 2) });
    for (word, priority) in [("a", 1), ("b", 0), ("c", 0)] {
        if word == "c" {
            let leased = f.lease("a");
            f.store.release(f.session, leased.lease).unwrap();
        }
        let chain = f.chain(word);
        let reserved = f.store.reserve(f.session, f.namespace, &chain, priority, NOW).unwrap();
        let order = f.store.begin_commit(f.session, reserved.reservation, &[0], &[0]).unwrap();
        assert_eq!(f.store.finish_commit(order.order, Some(sums(&order))), 1);
    }
    assert_eq!(["a", "b", "c"].map(|word| f.found(word)), [1, 0, 1]);
}

#[test]
fn a_process_that_was_gone_before_its_last_session_is_forgotten_with_it() {
    let mut f = Fixture::new(limits(8, 8));
    f.store.process_gone(ProcessId(0));
    f.store.close_session(f.session);
    assert_eq!(f.store.usage().lingering_processes, 0);
}

#[test]
fn room_is_made_for_new_chunks_below_the_low_watermark() {
    let mut f = Fixture::new(StoreLimits {
        capacity_chunks: None,
        high_watermark_bytes: 8 * BLOCK,
        low_watermark_bytes: 4 * BLOCK,
        tenant_bytes: vec![u64::MAX],
        ..limits(16, 16)
    });
    ('a'..='h').for_each(|letter| f.put(&letter.to_string()));
    assert_eq!(f.store.usage().cached_chunks, 8);
    f.put("xy");
    assert_eq!(f.store.usage().cached_chunks, 4);
    f.store.assert_consistent();
}

#[test]
fn a_session_that_may_lease_no_more_hears_that_there_is_nothing_to_lease() {
    let mut f = Fixture::new(StoreLimits { max_leased_blocks: 1, ..limits(8, 8) });
    f.put("a");
    assert_eq!(f.lease("a").chunks, 1);
    assert_eq!(f.lease("x"), Leased::default());
    let chain = f.chain("a");
    let refused = f.store.lease(f.session, f.namespace, &chain);
    assert!(matches!(refused, Err(Refused::Busy { what: Scarce::Claims, .. })), "{refused:?}");
}

#[test]
fn a_key_comes_once_in_a_flat_chain_whether_it_is_known_or_not() {
    let flat = NamespaceSpec { flat: true, ..spec() };
    let mut f = Fixture::with_spec(limits(8, 8), &flat);
    let twice = Chain::flat(f.root, vec![name("a"), name("a")]);
    let refused = Some(Refused::Chain(ChainError::Duplicate { hash: name("a") }));
    assert_eq!(f.store.find(f.session, f.namespace, &twice).err(), refused);
    let once = Chain::flat(f.root, vec![name("a")]);
    let reserved = f.store.reserve(f.session, f.namespace, &once, 0, NOW).unwrap();
    let order = f.store.begin_commit(f.session, reserved.reservation, &[0], &[0]).unwrap();
    f.store.finish_commit(order.order, Some(sums(&order)));
    assert_eq!(f.store.find(f.session, f.namespace, &twice).err(), refused);
}

#[test]
fn a_chunk_stays_as_long_as_its_longest_pin() {
    let mut f = Fixture::new(limits(8, 8));
    f.put("a");
    let chain = f.chain("a");
    for duration_ms in [5_000, 2_000] {
        f.store.pin(f.session, f.namespace, &chain, duration_ms, NOW).unwrap();
    }
    let stays = f.store.stays(&f.fingerprint(), &chain.hashes);
    assert_eq!(stays[0].keeper, Keeper::Pin(5_000));
}
