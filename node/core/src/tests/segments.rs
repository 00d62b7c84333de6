//! Tests of visits to the whole disk: its chunks are listed, and chunks of tenants that left are purged, a segment at a time.

use larder_protocol::purge::{PurgeMode, PurgeScope};

use super::*;
use crate::tiers::described::MayWrite;
use crate::{Description, PurgeStep, SegmentVisit, Visited};

const DISK: Sources =
    Sources { siblings: None, peers: None, disk: Some(DEADLINE), object: None, known_chunks: 0 };

fn world() -> World {
    World { sees_news: true, ..World::new(DISK) }
}

fn visit(w: &mut World) -> (SegmentVisit, u64) {
    loop {
        match w.next() {
            Effect::VisitSegment { visit, after } => return (visit, after),
            Effect::Changed { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

fn visited(w: &mut World, (visit, after): (SegmentVisit, u64), result: Visited) {
    w.tell(Event::SegmentVisited { visit, after, result });
}

fn done(next: Option<u64>) -> Visited {
    Visited::Done { held: Vec::new(), next }
}

/// Tells the core the tenants `a`, `b` and `c`, each with its bytes.
fn tenants(w: &mut World, bytes: [u64; 3]) {
    w.tell(Event::TenantsAre(["a", "b", "c"].map(str::to_owned).into_iter().zip(bytes).collect()));
}

#[test]
fn the_disk_is_listed_segment_by_segment_and_a_busy_disk_is_asked_again() {
    let mut w = world();
    w.core.list_disk();
    let first = visit(&mut w);
    assert!(matches!(first, (SegmentVisit::List, 0)));
    let (fingerprint, chunk) = (w.fingerprint, w.chain("a").chunk(0));
    visited(&mut w, first, Visited::Done { held: vec![(fingerprint, chunk, PoolSet::ANY)], next: Some(7) });
    assert_eq!(w.core.store.usage().disk.map_or(0, |disk| disk.chunks), 1);
    let second = visit(&mut w);
    assert_eq!(second.1, 7);
    visited(&mut w, second, Visited::Busy);
    let is_visit = |effect| matches!(effect, Effect::VisitSegment { .. });
    assert!(!std::iter::from_fn(|| w.poll()).any(is_visit), "the disk is left alone for a while");
    w.now += Duration::from_millis(20);
    assert!(w.core.next_deadline().is_some_and(|due| due <= w.now), "the core wants to be woken");
    w.tell(Event::Alarm);
    let again = visit(&mut w);
    assert_eq!(again.1, 7);
    visited(&mut w, again, done(None));
    assert!(!std::iter::from_fn(|| w.poll()).any(is_visit), "that was all");
}

#[test]
fn a_purged_chunk_that_is_still_read_when_the_disk_lists_it_leaves_the_disk() {
    let mut w = world();
    w.put("a");
    let request = w.lease("a");
    let keeps_it = w.leased(request);
    let scope = PurgeScope::Tenant("a".to_owned());
    w.tell(Event::Purge(PurgeStep::Page { purge: 1, scope, mode: PurgeMode::Remove, from: 0 }));
    let (fingerprint, chunk) = (w.fingerprint, w.chain("a").chunk(0));
    let held = vec![(fingerprint, chunk, PoolSet::ANY)];
    visited(&mut w, (SegmentVisit::List, 0), Visited::Done { held, next: None });
    let is_removed = |effect| matches!(effect, Effect::Remove(key) if key.hash == chunk.hash);
    assert!(std::iter::from_fn(|| w.poll()).any(is_removed));
    assert_eq!(w.core.store.held().count(), 0);
    assert_eq!(keeps_it.chunks, 1);
}

#[test]
fn a_new_store_lists_its_disk_from_the_start_and_repeats_nothing_of_the_life_before() {
    let mut w = world();
    w.core.list_disk();
    let first = visit(&mut w);
    visited(&mut w, first, done(Some(3)));
    let second = visit(&mut w);
    visited(&mut w, second, Visited::Busy);
    w.core.begin_anew();
    assert!(matches!(visit(&mut w), (SegmentVisit::List, 0)));
    w.now += Duration::from_secs(1);
    w.tell(Event::Alarm);
    assert!(w.is_idle());
}

#[test]
fn a_new_store_hears_that_the_disk_had_closed() {
    let mut w = world();
    w.tell(Event::DiskClosed);
    w.core.begin_anew();
    let first = visit(&mut w);
    assert!(w.core.store().has_disk());
    visited(&mut w, first, Visited::Closed);
    assert!(!w.core.store().has_disk() && w.is_idle());
}

#[test]
fn a_silent_drive_is_visited_again_when_it_answers() {
    let mut w = world();
    w.core.list_disk();
    let first = visit(&mut w);
    w.tell(Event::DiskSilent(true));
    visited(&mut w, first, Visited::Busy);
    w.pass(Duration::from_secs(1));
    assert!(w.is_idle());
    w.tell(Event::DiskSilent(false));
    assert!(matches!(visit(&mut w), (SegmentVisit::List, 0)));
}

#[test]
fn chunks_that_a_list_passed_over_are_found_when_an_engine_names_their_namespace() {
    for is_listed in [true, false] {
        let mut w = world();
        w.core.list_disk();
        let first = visit(&mut w);
        let fingerprint = spec(2).fingerprint("a");
        let held = vec![(fingerprint, w.chain("ab").chunk(1), PoolSet::ANY)];
        let list = || Visited::Done { held: held.clone(), next: None };
        let chunks = |w: &World| w.core.store.usage().disk.map_or(0, |disk| disk.chunks);
        if is_listed {
            visited(&mut w, first, list());
        } else {
            visited(&mut w, first, Visited::Done { held: held.clone(), next: Some(7) });
        }
        assert_eq!((chunks(&w), w.core.lists_disk()), (0, !is_listed));
        w.core.register(w.session, &spec(2), &[0], &[2 * BLOCK]).unwrap();
        if !is_listed {
            let last = visit(&mut w);
            visited(&mut w, last, done(None));
        }
        let again = visit(&mut w);
        assert!(matches!(again, (SegmentVisit::List, 0)) && w.core.lists_disk());
        visited(&mut w, again, list());
        assert_eq!((chunks(&w), w.core.lists_disk()), (1, false));
        w.core.register(w.session, &spec(2), &[0], &[2 * BLOCK]).unwrap();
        assert!(w.is_idle(), "the disk is listed again once");
    }
}

#[test]
fn chunks_on_disk_of_a_tenant_that_left_are_purged_whether_it_was_served_before_or_not() {
    let mut w = world();
    let stranger = spec(2).fingerprint("c");
    assert_eq!(w.core.know("c".to_owned(), stranger, spec(2)), Ok(false), "nobody serves it");
    tenants(&mut w, [0, 1 << 30, 0]);
    let first = visit(&mut w);
    let (SegmentVisit::Purge(keys), 0) = &first else { panic!("{first:?}") };
    let key = |fingerprint| crate::store::ids::ChunkKey { fingerprint, hash: name("a") };
    assert!(keys.has(&key(w.fingerprint)) && !keys.has(&key(stranger)));
    assert!(matches!(w.next(), Effect::TenantLeft(name) if name == "a"));
    visited(&mut w, first, done(Some(2)));
    let second = visit(&mut w);
    assert!(matches!(second, (SegmentVisit::Purge(_), 2)));
    visited(&mut w, second, Visited::Closed);
    assert!(w.is_idle());
    assert!(w.core.purged_keys(&PurgeScope::Tenant("c".to_owned())).has(&key(stranger)), "an admin may");
}

#[test]
fn a_tenant_that_comes_back_while_its_chunks_on_disk_are_purged_writes_and_finds_none_there_before_the_end() {
    let mut w = world();
    w.core.description_is(w.fingerprint, Description::There);
    tenants(&mut w, [0, 1 << 30, 0]);
    let first = visit(&mut w);
    assert!(matches!(w.next(), Effect::TenantLeft(_)));
    tenants(&mut w, [1 << 30, 1 << 30, 0]);
    w.other_session();
    assert_eq!(w.core.may_write_to_disk(w.fingerprint), MayWrite::Never, "the purge would remove it");
    let held = vec![(w.fingerprint, w.chain("a").chunk(0), PoolSet::ANY)];
    visited(&mut w, (SegmentVisit::List, 0), Visited::Done { held: held.clone(), next: None });
    assert_eq!(
        w.core.store.usage().disk.map_or(0, |disk| disk.chunks),
        0,
        "the purge has not come to it yet"
    );
    visited(&mut w, first, done(None));
    assert_ne!(w.core.may_write_to_disk(w.fingerprint), MayWrite::Never);
}

#[test]
fn a_fault_does_not_end_a_purge_on_disk() {
    let mut w = world();
    tenants(&mut w, [0, 1 << 30, 0]);
    let first = visit(&mut w);
    visited(&mut w, first, done(Some(2)));
    w.core.begin_anew();
    let again = std::iter::from_fn(|| w.poll()).find_map(|effect| match effect {
        Effect::VisitSegment { visit: SegmentVisit::Purge(_), after } => Some(after),
        _ => None,
    });
    assert_eq!(again, Some(0));
}

#[test]
fn a_tenant_that_is_served_from_now_on_finds_its_chunks_on_disk() {
    let mut w = world();
    let stranger = spec(2).fingerprint("c");
    assert_eq!(w.core.know("c".to_owned(), stranger, spec(2)), Ok(false));
    w.core.list_disk();
    let at_start = visit(&mut w);
    visited(&mut w, at_start, done(None));
    tenants(&mut w, [1 << 30, 1 << 30, 0]);
    assert!(w.is_idle(), "it is still not served");
    tenants(&mut w, [1 << 30, 1 << 30, 1 << 30]);
    let first = visit(&mut w);
    assert!(matches!(first, (SegmentVisit::List, 0)));
    let chunk = Chain::from_root(stranger.root(), vec![name("z")]).chunk(0);
    visited(&mut w, first, Visited::Done { held: vec![(stranger, chunk, PoolSet::ANY)], next: None });
    assert_eq!(w.core.store.usage().disk.map_or(0, |disk| disk.chunks), 1);
}

#[test]
fn a_purge_finds_a_tenants_namespaces_that_do_not_fit_this_node() {
    let mut w = world();
    let mut large = spec(2);
    large.pools[0].layer_bytes = 1 << 40;
    let fingerprint = large.fingerprint("a");
    w.core.know("a".to_owned(), fingerprint, large).unwrap_err();
    let key = crate::store::ids::ChunkKey { fingerprint, hash: name("a") };
    assert!(w.core.purged_keys(&PurgeScope::Tenant("a".to_owned())).has(&key));
}

#[test]
fn the_description_of_a_tenant_that_comes_is_kept_while_its_chunks_on_disk_are_listed() {
    let mut w = world();
    visited(&mut w, (SegmentVisit::List, 0), Visited::Done { held: Vec::new(), next: None });
    assert_eq!(w.core.know("c".to_owned(), spec(2).fingerprint("c"), spec(2)), Ok(false));
    tenants(&mut w, [1 << 30, 1 << 30, 1 << 30]);
    let first = visit(&mut w);
    w.pass(Duration::from_secs(120));
    assert!(w.is_idle());
    visited(&mut w, first, Visited::Done { held: Vec::new(), next: None });
    w.pass(Duration::from_secs(120));
    assert!(matches!(w.next(), Effect::ForgetDescriptions(unused) if unused == [spec(2).fingerprint("c")]));
}

#[test]
fn a_tenant_that_is_served_while_the_disk_is_listed_has_it_listed_again() {
    let mut w = world();
    let stranger = spec(2).fingerprint("c");
    assert_eq!(w.core.know("c".to_owned(), stranger, spec(2)), Ok(false));
    w.core.list_disk();
    let first = visit(&mut w);
    tenants(&mut w, [1 << 30, 1 << 30, 1 << 30]);
    assert!(w.is_idle(), "the list under way goes on");
    visited(&mut w, first, done(None));
    assert!(w.core.lists_disk(), "it may have passed over the tenant's chunks");
    let again = visit(&mut w);
    assert!(matches!(again, (SegmentVisit::List, 0)));
    visited(&mut w, again, done(None));
    assert!(!w.core.lists_disk() && w.is_idle());
}
