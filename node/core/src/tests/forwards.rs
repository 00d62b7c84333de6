//! Tests of placement by worth: of fetched chunks, and of chunks that other nodes evict and offer.

use larder_protocol::peer::Room;

use super::*;
use crate::placement::{FORWARD_READS, Placement, PlacementRule, Saves, Stake, Worth};
use crate::store::{Change, ChangeKind, Offered};

fn by_worth(capacity_chunks: u64) -> World {
    let peers = limits().peers.map(|peers| PeerStoreLimits { placement: PlacementRule::Worth, ..peers });
    let limits = StoreLimits { peers, disk: None, capacity_chunks: Some(capacity_chunks), ..limits() };
    World::with(limits, PEERS)
}

impl World {
    /// Reads a chunk that another node has; returns its placement.
    fn reads(&mut self, word: &str) -> Placement {
        self.reads_from(word, &[2])
    }

    /// Reads a chunk that these nodes have; returns its placement.
    fn reads_from(&mut self, word: &str, holders: &[u16]) -> Placement {
        let request = self.lease(word);
        self.directory_says(&[holders]);
        let asked = self.fetch();
        self.ended(asked.order, vec![here(1)]);
        let placed = loop {
            match self.core.poll_effect() {
                Some(Effect::Count(Counted::Placed(Some(placement)))) => break placement,
                Some(_) => {}
                None => panic!("it was not placed"),
            }
        };
        let leased = self.leased(request);
        self.core.store.release(self.session, leased.lease).unwrap();
        placed
    }

    /// Computes a chunk, and reads it as often as a chunk must be read to be forwarded.
    fn put_and_use(&mut self, word: &str) {
        self.put(word);
        let chain = self.chain(word);
        for _ in 0..FORWARD_READS {
            let leased = self.core.store.lease(self.session, self.namespace, &chain).unwrap();
            self.core.store.release(self.session, leased.lease).unwrap();
        }
    }

    fn offer(&mut self) -> Offered {
        match self.next() {
            Effect::Offer(offered) => offered,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn in_free_room_a_copy_is_kept_and_its_holder_keeps_its_own() {
    let mut w = by_worth(4);
    assert_eq!(w.reads("a"), Placement::Replicate);
    let changes = w.core.store.take_changes();
    assert!(changes.iter().all(|&Change { kind, .. }| kind == ChangeKind::Gained), "{changes:?}");
}

#[test]
fn a_holder_of_a_chunk_behind_a_hole_hears_when_the_chunk_is_computed_again() {
    let gained = |holders: [&[u16]; 4]| {
        let mut w = by_worth(8);
        w.lookup("abcd");
        w.directory_says(&holders);
        let Effect::Found { .. } = w.next() else { panic!("the answer") };
        w.put("abcd");
        // The last chunk comes first.
        w.core.store.take_changes().into_iter().rev().map(|change| change.kind).collect::<Vec<_>>()
    };
    let (gained_here, moved) = (ChangeKind::Gained, ChangeKind::MovedFrom(node(3)));
    assert_eq!(gained([&[2], &[], &[3], &[]]), [gained_here, gained_here, moved, gained_here]);
    assert_eq!(gained([&[2], &[2], &[3], &[]]), [gained_here; 4], "all but the last can be read");
}

#[test]
fn a_chunk_passes_until_it_is_read_far_more_often_than_what_goes_for_it() {
    let mut w = by_worth(2);
    w.put("x");
    w.pass(Duration::from_secs(10));
    w.put("y");
    w.put("z");
    assert_eq!(w.reads("a"), Placement::Pass, "nobody knows how often it is read");
    w.pass(Duration::from_secs(5));
    assert_eq!(w.reads("a"), Placement::Pass, "it is read as often as what would go");
    w.pass(Duration::from_millis(100));
    assert_eq!(w.reads("a"), Placement::Pass);
    w.pass(Duration::from_millis(100));
    assert_eq!(w.reads("a"), Placement::Replicate, "its mean gap is a tenth of that by now");
}

/// A core whose copies earn no place. Node 2 serves twice as much as the mean, node 3 a third more.
fn beside_busy_nodes() -> World {
    let mut w = by_worth(2);
    w.put("x");
    w.pass(Duration::from_secs(10));
    w.put("y");
    w.put("z");
    for (node, served) in [(2, 1_200), (3, 800), (4, 400)] {
        w.core.neighbour_says(w.now, NodeNumber(node), Room { least: u64::MAX, served });
    }
    w.core.store.take_changes();
    w
}

#[test]
fn chunks_of_an_overloaded_node_are_kept_and_no_chunk_moves() {
    let mut w = beside_busy_nodes();
    assert_eq!(w.reads_from("a", &[2]), Placement::Replicate);
    let kinds: Vec<_> = w.core.store.take_changes().iter().map(|change| change.kind).collect();
    assert!(!kinds.iter().any(|kind| matches!(kind, ChangeKind::MovedFrom(_))), "{kinds:?}");
}

#[test]
fn a_chunk_of_a_busy_node_is_kept_though_it_is_read_only_four_times_as_often_as_what_goes_for_it() {
    let mut w = beside_busy_nodes();
    assert_eq!(w.reads_from("a", &[3]), Placement::Pass, "nobody knows how often it is read");
    w.pass(Duration::from_secs(8));
    assert_eq!(w.reads_from("a", &[3]), Placement::Pass);
    w.pass(Duration::from_secs(1));
    assert_eq!(
        w.reads_from("a", &[3]),
        Placement::Replicate,
        "its mean gap is 4.5 s, and what goes was idle for 19 s"
    );
}

#[test]
fn a_node_that_serves_as_much_keeps_no_more_than_elsewhere_and_where_all_serve_alike_nobody_does() {
    let mut w = beside_busy_nodes();
    assert_eq!(w.reads_from("a", &[4]), Placement::Pass);
    w.core.this_node_serves(1_200);
    assert_eq!(w.reads_from("b", &[2]), Placement::Pass);
    w.core.this_node_serves(1_100);
    w.core.neighbour_says(w.now, NodeNumber(4), Room { least: u64::MAX, served: 1_200 });
    assert_eq!(w.reads_from("c", &[2]), Placement::Pass);
}

#[test]
fn of_two_holders_the_one_that_serves_less_is_asked() {
    for holders in [[2, 4], [4, 2]] {
        let mut w = beside_busy_nodes();
        w.lease("a");
        w.directory_says(&[&holders]);
        assert_eq!(w.fetch().holder, node(4));
    }
}

#[test]
fn what_another_node_took_over_stays_as_a_copy_and_goes_first() {
    let mut w = by_worth(2);
    w.put("a");
    w.pass(Duration::from_secs(1));
    w.put("b");
    w.tell(Event::Moved { fingerprint: w.fingerprint, hashes: vec![name("b")] });
    assert_eq!(w.core.store.usage().cached_chunks, 2);
    w.core.store.take_changes();
    w.put("c");
    let changes = w.core.store.take_changes();
    let lost: Vec<_> = changes.iter().filter(|change| change.kind == ChangeKind::Lost).collect();
    assert_eq!(lost.iter().map(|change| change.chunk.hash).collect::<Vec<_>>(), [name("b")]);
}

#[test]
fn an_offered_chunk_is_fetched_and_moves_here() {
    let mut w = by_worth(4);
    let chunks = [w.chain("a").chunk(0), w.chain("b").chunk(0)];
    w.put("b");
    let worth = Stake { tokens: 16, bytes: BLOCK }.worth(Saves::Prefill, 1_000);
    let wanted = w.core.take_in(w.now, node(2), w.fingerprint, &chunks, worth);
    assert_eq!(wanted, [true, false], "the second is here");
    let asked = w.fetch();
    assert_eq!(
        (asked.holder, asked.chunks.len(), asked.class),
        (node(2), 1, larder_protocol::peer::Class::Prefetch)
    );
    w.core.store.take_changes();
    w.ended(asked.order, vec![here(1)]);
    let kinds: Vec<_> = w.core.store.take_changes().iter().map(|change| change.kind).collect();
    assert_eq!(kinds, [ChangeKind::MovedFrom(node(2))], "its holder hears of it and gives its own up");
    assert_eq!(w.core.store.forwards().taken_in, 1);
    assert!(w.is_at_rest());
}

#[test]
fn an_offered_chunk_that_does_not_come_is_asked_of_nobody_else() {
    for came in [Arrival::NotHeld, FAILED, Arrival::Damaged, Arrival::Busy { retry_after_ms: 5 }] {
        let mut w = by_worth(4);
        let chunk = w.chain("a").chunk(0);
        w.core.take_in(w.now, node(2), w.fingerprint, &[chunk], Worth(u64::MAX / 8));
        let asked = w.fetch();
        let is_stale = came == Arrival::NotHeld;
        w.ended(asked.order, vec![came]);
        if is_stale {
            assert!(matches!(w.next(), Effect::Stale { .. }));
        }
        assert!(w.is_at_rest());
    }
}

#[test]
fn an_offered_chunk_that_does_not_come_is_no_failed_read() {
    let mut w = by_worth(4);
    let chunk = w.chain("a").chunk(0);
    w.core.take_in(w.now, node(2), w.fingerprint, &[chunk], Worth(u64::MAX / 8));
    let asked = w.fetch();
    w.ended(asked.order, vec![FAILED]);
    let placed = |effect: &Effect| matches!(effect, Effect::Count(Counted::Placed(_)));
    assert!(
        !std::iter::from_fn(|| w.core.poll_effect()).any(|effect| placed(&effect)),
        "nobody asked for it"
    );
}

#[test]
fn what_is_evicted_is_offered_to_a_node_with_room_and_goes_when_it_has_it() {
    let mut w = by_worth(1);
    w.put_and_use("a");
    w.pass(Duration::from_secs(1));
    w.core.neighbour_says(w.now, NodeNumber(2), Room::default());
    w.put_and_use("b");
    w.tell(Event::Alarm);
    let offered = w.offer();
    assert_eq!((offered.to, offered.fingerprint, offered.chunks.len()), (NodeNumber(2), w.fingerprint, 1));
    w.tell(Event::OfferEnded { offer: offered.number, wanted: vec![true] });
    assert_eq!(w.core.store.departing_chunks(), 1);
    w.tell(Event::Moved { fingerprint: w.fingerprint, hashes: vec![name("a")] });
    assert_eq!(w.core.store.departing_chunks(), 0);
    assert!(w.is_at_rest());
}

#[test]
fn a_node_that_does_not_answer_an_offer_gets_no_other_before_it_is_heard_again() {
    let mut w = by_worth(1);
    w.put_and_use("a");
    w.pass(Duration::from_secs(1));
    w.core.neighbour_says(w.now, NodeNumber(2), Room::default());
    w.put_and_use("b");
    w.tell(Event::Alarm);
    let offered = w.offer();
    w.tell(Event::OfferEnded { offer: offered.number, wanted: Vec::new() });
    assert!(w.is_at_rest());
    w.put_and_use("c");
    w.tell(Event::Alarm);
    assert!(w.is_at_rest());
    w.tell(Event::OfferEnded { offer: offered.number, wanted: vec![true] });
    assert!(w.is_at_rest(), "an answer that comes twice means nothing");
}
