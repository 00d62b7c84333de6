//! Tests of limits that change while the store is in use.

use super::*;
use crate::store::Refused;

#[test]
fn a_smaller_capacity_evicts_at_once_and_a_larger_one_gives_room() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("abcdefgh");
    f.store.change_limits(&limits(16, 3));
    f.store.assert_consistent();
    assert_eq!((f.store.usage().cached_chunks, f.found("abcdefgh")), (3, 3));
    f.store.change_limits(&limits(16, 16));
    f.put("abcdefgh");
    assert_eq!(f.found("abcdefgh"), 8);
}

#[test]
fn a_tenant_whose_part_shrinks_gives_back_what_it_has_beyond_it() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("abcdefghijkl");
    f.store.change_limits(&StoreLimits { tenant_bytes: vec![4 * BLOCK, u64::MAX], ..limits(16, 16) });
    let held = |f: &Fixture| f.store.tenant_bytes()[0].0 / BLOCK;
    assert_eq!(
        (held(&f), f.found("abcdefghijkl")),
        (8, 8),
        "one extent at a time, the ends of prompts first"
    );
    f.store.tick(Millis(1));
    f.store.assert_consistent();
    assert_eq!((held(&f), f.found("abcdefghijkl")), (4, 4));
    f.store.tick(Millis(2));
    assert_eq!(f.found("abcdefghijkl"), 4);
}

#[test]
fn what_is_leased_stays_until_it_is_let_go() {
    let mut f = Fixture::new(limits(16, 16));
    f.put("abcdefgh");
    let lease = f.lease("abcdefgh").lease;
    let less = StoreLimits { tenant_bytes: vec![4 * BLOCK, u64::MAX], ..limits(16, 16) };
    f.store.change_limits(&less);
    assert_eq!(f.found("abcdefgh"), 8);
    f.store.release(f.session, lease).unwrap();
    f.store.tick(Millis(1));
    f.store.assert_consistent();
    assert!(f.store.usage().bytes.used <= 4 * BLOCK);
}

#[test]
fn what_cannot_change_stays_as_it_is() {
    let mut f = Fixture::new(limits(16, 16));
    f.store.change_limits(&StoreLimits {
        extents: 1,
        extent_bytes: 1,
        tenant_bytes: vec![0],
        trust_engines: true,
        ..limits(16, 16)
    });
    f.put("abcdefghijkl");
    f.store.assert_consistent();
    assert_eq!(f.found("abcdefghijkl"), 12);
    assert!(!f.store.trusts_engines());
}

#[test]
fn limits_that_name_a_tenant_that_left_do_not_bring_it_back() {
    let mut f = Fixture::new(limits(16, 16));
    f.store.tenants_are(&[u64::MAX, 0], &[]);
    f.store.change_limits(&limits(16, 16));
    let session = f.store.open_session(TenantId(1), ProcessId(1), 1 << 20);
    let registered = f.store.register(session, "b", &spec(), &[0], &[BLOCK]);
    assert!(matches!(registered, Err(Refused::Unknown { what: "tenant", .. })), "{registered:?}");
}
