//! Tests of announcements of gained and lost chunks, and of the end of chunks that moved.

use super::*;
use crate::directory::{Changes, Page};
use crate::store::{Change, ChangeKind};
use crate::{Announced, NextPage};

/// The time until a message is due.
const SOON: Duration = Duration::from_millis(3);

fn world(sources: Sources) -> World {
    World { sees_news: true, ..World::new(sources) }
}

/// The next message: the number of its first change, the count of changes that followers know, the changes, and whether the
/// directory hears of them.
fn changed(w: &mut World) -> (u64, usize, Vec<Change>, bool) {
    match w.next() {
        Effect::Changed { sequence, told, changes, to_directory } => (sequence, told, changes, to_directory),
        other => panic!("{other:?}"),
    }
}

fn names(changes: &[Change]) -> Vec<ChunkHash> {
    changes.iter().map(|change| change.chunk.hash).collect()
}

fn page(w: &mut World) -> (Page, NextPage) {
    match w.next() {
        Effect::AnnouncePage { page, next } => (page, next),
        other => panic!("{other:?}"),
    }
}

fn due(w: &mut World) {
    assert!(w.is_idle());
    w.now += SOON;
    assert!(w.core.next_deadline().is_some_and(|at| at <= w.now));
    w.tell(Event::Alarm);
}

#[test]
fn what_changes_within_a_few_milliseconds_is_one_message() {
    let mut w = world(PEERS);
    w.put("a");
    assert!(w.is_idle());
    w.now += Duration::from_millis(1);
    w.put("ab");
    assert!(w.is_idle(), "it is not put off either");
    w.now += Duration::from_millis(2);
    w.tell(Event::Alarm);
    let (sequence, told, changes, to_directory) = changed(&mut w);
    assert_eq!((sequence, told, names(&changes), to_directory), (0, 0, vec![name("a"), name("ab")], true));
    w.tell(Event::Announced(Announced::Taken));
    assert!(w.is_idle());
    assert_eq!(w.core.next_deadline(), None);
    w.put("c");
    due(&mut w);
    assert_eq!(changed(&mut w).0, 2, "numbers go on");
}

#[test]
fn a_directory_that_has_too_much_to_do_is_told_again_and_followers_are_not() {
    let mut w = world(PEERS);
    w.put("a");
    due(&mut w);
    let (.., changes, _) = changed(&mut w);
    w.put("b");
    w.tell(Event::Announced(Announced::Full(Changes::Since(changes))));
    due(&mut w);
    let (sequence, told, changes, to_directory) = changed(&mut w);
    assert_eq!((sequence, told, names(&changes), to_directory), (1, 1, vec![name("a"), name("b")], true));
}

#[test]
fn a_directory_that_lost_something_is_told_all_that_is_held() {
    for has_restarted in [false, true] {
        let mut w = world(PEERS);
        w.put("a");
        due(&mut w);
        changed(&mut w);
        match has_restarted {
            true => w.core.directory_began_again(),
            false => w.tell(Event::Announced(Announced::Lost)),
        }
        w.put("b");
        due(&mut w);
        assert!(!changed(&mut w).3, "the page has it");
        let (told, _) = page(&mut w);
        assert_eq!((told.is_first, told.is_last, told.chunks.len()), (true, true, 2));
        w.tell(Event::Announced(Announced::Full(Changes::Page(told))));
        due(&mut w);
        let (told, next) = page(&mut w);
        assert!(told.is_first);
        w.tell(Event::PageAnnounced { next });
        assert!(w.is_idle());
        w.put("c");
        due(&mut w);
        assert!(changed(&mut w).3);
        w.tell(Event::Announced(Announced::Taken));
        assert!(w.is_idle());
    }
}

/// A core that holds more chunks than a page, and has told the directory of them.
fn with_more_than_a_page() -> World {
    let most = StoreLimits { extents: 600, capacity_chunks: None, ..limits() };
    let limits = StoreLimits { disk: None, object: None, ..most };
    let mut w = World { sees_news: true, ..World::with(limits, PEERS) };
    let word =
        |at: usize| format!("{}{}", char::from(b'!' + (at / 90) as u8), char::from(b'!' + (at % 90) as u8));
    // Each word of two letters has two chunks: one for its first letter, one for both.
    (0..1_100).for_each(|at| w.put(&word(at)));
    due(&mut w);
    changed(&mut w);
    w
}

#[test]
fn a_directory_that_begins_again_while_it_is_told_a_page_is_told_the_first_page() {
    let begins_again: [fn(&mut Core); 2] = [Core::directory_began_again, Core::begin_anew];
    for (pages_before, begins_again) in
        [0, 1].into_iter().flat_map(|pages| begins_again.map(|how| (pages, how)))
    {
        let mut w = with_more_than_a_page();
        w.tell(Event::Announced(Announced::Lost));
        due(&mut w);
        for _ in 0..pages_before {
            let (_, next) = page(&mut w);
            w.tell(Event::PageAnnounced { next });
            w.tell(Event::Announced(Announced::Taken));
        }
        let (_, next) = page(&mut w);
        begins_again(&mut w.core);
        w.tell(Event::PageAnnounced { next });
        w.tell(Event::Announced(Announced::Taken));
        assert!(page(&mut w).0.is_first, "after {pages_before} pages");
    }
}

#[test]
fn what_changes_between_two_pages_is_told_between_them() {
    let mut w = with_more_than_a_page();
    w.tell(Event::Announced(Announced::Lost));
    due(&mut w);
    let (first, next) = page(&mut w);
    assert_eq!((first.is_first, first.is_last, first.chunks.len()), (true, false, 1_024));
    w.tell(Event::PageAnnounced { next });
    w.put("~~");
    due(&mut w);
    assert!(changed(&mut w).3);
    w.tell(Event::Announced(Announced::Taken));
    let (last, next) = page(&mut w);
    assert_eq!((last.is_first, last.is_last), (false, true));
    w.tell(Event::PageAnnounced { next });
    assert!(w.is_idle());
}

#[test]
fn without_other_nodes_followers_alone_are_told() {
    let mut w = world(Sources { siblings: Some(DEADLINE), ..Sources::default() });
    w.put("a");
    assert!(matches!(w.next(), Effect::TellSiblings(changes) if names(&changes) == [name("a")]));
    due(&mut w);
    let (sequence, _, changes, to_directory) = changed(&mut w);
    assert_eq!((sequence, changes[0].kind, to_directory), (0, ChangeKind::Gained, false));
    assert!(w.is_idle());
    assert_eq!(w.core.next_deadline(), None);
}

#[test]
fn a_new_store_tells_the_directory_that_it_has_nothing() {
    let mut w = world(PEERS);
    w.put("a");
    due(&mut w);
    changed(&mut w);
    w.core.begin_anew();
    w.tell(Event::Announced(Announced::Taken));
    let (told, next) = page(&mut w);
    assert_eq!((told.is_first, told.is_last, told.chunks.len()), (true, true, 0));
    w.tell(Event::PageAnnounced { next });
    assert!(w.is_idle());
}

/// A core that leases a chunk which has moved to another actor, and the lease.
fn moved_while_leased() -> (World, u64) {
    let mut w = World::new(PEERS);
    w.put("a");
    let request = w.lease("a");
    let lease = w.leased(request).lease;
    let (fingerprint, hashes) = (w.fingerprint, vec![name("a")]);
    w.tell(Event::Moved { fingerprint, hashes });
    (w, lease)
}

#[test]
fn what_moved_is_given_up_when_nobody_uses_it_any_more() {
    let (mut w, lease) = moved_while_leased();
    let held = |w: &World| w.core.store.usage().cached_chunks;
    for _ in 0..2 {
        w.now += Duration::from_millis(20);
        w.tell(Event::Alarm);
        assert_eq!(held(&w), 1);
    }
    w.core.store.release(w.session, lease).unwrap();
    w.now += Duration::from_millis(20);
    w.tell(Event::Alarm);
    assert_eq!(held(&w), 0);
}

#[test]
fn what_moved_and_is_used_for_long_stays() {
    let (mut w, lease) = moved_while_leased();
    for _ in 0..4 {
        w.now += Duration::from_millis(20);
        w.tell(Event::Alarm);
    }
    w.core.store.release(w.session, lease).unwrap();
    w.pass(Duration::from_secs(1));
    assert_eq!(w.core.store.usage().cached_chunks, 1);
}

#[test]
fn the_numbers_of_events_go_on_in_a_new_life_of_the_store() {
    let mut w = world(PEERS);
    w.put("ab");
    due(&mut w);
    assert_eq!(changed(&mut w).0, 0);
    w.core.begin_anew();
    for extent in w.core.store.secluded() {
        w.tell(Event::ExtentLeft { extent, may_renew: false });
    }
    w.session = w.core.open_session(TenantId(0), ProcessId(1), 1 << 20);
    w.core.register(w.session, &spec(1), &[0], &[BLOCK]).unwrap();
    w.put("c");
    due(&mut w);
    assert_eq!(changed(&mut w).0, 2);
}

#[test]
fn a_directory_that_takes_nothing_for_long_is_told_all_that_is_held() {
    let mut w = world(PEERS);
    w.put("a");
    due(&mut w);
    let (.., changes, _) = changed(&mut w);
    w.tell(Event::Announced(Announced::Full(Changes::Since(changes.repeat(65_537)))));
    due(&mut w);
    assert!(!changed(&mut w).3, "so many changes are more than a page");
    let (told, _) = page(&mut w);
    assert_eq!((told.is_first, told.is_last, told.chunks.len()), (true, true, 1));
}
