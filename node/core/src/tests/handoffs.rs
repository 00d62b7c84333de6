//! Tests of hand-overs: followers hear of each layer, wherever the writer is and whatever happens to it.

use larder_protocol::handoff::{AskInPlace, Follow, HandOver, InPlace, Writer};
use larder_protocol::session::{Commit, Reserve};

use super::*;
use crate::store::{FollowNews, News};
use crate::{CopyAnswer, FollowOrder, LayersArrived};

/// How long a follower waits for a silent writer in these tests.
const PATIENCE_MS: u64 = 5_000;

/// A world whose chunks have two layers.
fn world() -> World {
    let mut w = World::new(PEERS);
    w.namespace = register(&mut w.core, w.session);
    w.fingerprint = two_layers().fingerprint("a");
    w.root = w.fingerprint.root();
    w
}

fn two_layers() -> NamespaceSpec {
    let mut spec = spec(1);
    spec.pools[0].layers = 2;
    spec
}

fn register(core: &mut Core, session: SessionId) -> u32 {
    core.register(session, &two_layers(), &[0], &[2 * BLOCK]).unwrap().namespace
}

impl World {
    /// Follows chunks that an engine of another node writes, or of this node; returns the follow.
    fn follow(&mut self, word: &str, writer: Option<&str>) -> u64 {
        self.follow_attempt(word, writer, 1)
    }

    fn follow_attempt(&mut self, word: &str, writer: Option<&str>, attempt: u64) -> u64 {
        let writer = writer.map(|node| Writer { node: node.to_owned(), device: 3 });
        let (namespace, chain) = (self.namespace, self.chain(word));
        let ask = Follow { namespace, chain, writer, attempt, patience_ms: PATIENCE_MS };
        let request = self.asks(self.session, Request::Follow(ask));
        match self.answered(request) {
            Response::Following(follow) => follow,
            other => panic!("{other:?}"),
        }
    }

    fn order(&mut self) -> (OrderNumber, usize) {
        match self.next() {
            Effect::Follow(FollowOrder {
                order,
                writer,
                chunks,
                attempt: 1,
                patience_ms: PATIENCE_MS,
                ..
            }) => {
                assert_eq!(writer.device, 3);
                (order, chunks.len())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Takes the next effect, an order to follow: its number, the writer's node, and the number of its chunks.
    fn order_to(&mut self) -> (OrderNumber, String, usize) {
        match self.next() {
            Effect::Follow(FollowOrder { order, writer, chunks, .. }) => (order, writer.node, chunks.len()),
            other => panic!("{other:?}"),
        }
    }

    /// Ends an order to follow without its chunks.
    fn order_fails(&mut self, order: OrderNumber, chunks: usize) {
        for chunk in 0..chunks {
            self.tell(Event::FollowedCame { order, chunk, came: Arrival::Failed(FetchFailure::Deadline) });
        }
        self.tell(Event::FollowEnded(order));
    }

    fn ask_in_place(&mut self, follow: u64, knows: (u32, u32), wait_ms: u64) -> RequestId {
        let (chunks, layers) = knows;
        self.asks(self.session, Request::AskInPlace(AskInPlace { follow, chunks, layers, wait_ms }))
    }

    fn in_place(&mut self, of: RequestId) -> InPlace {
        match self.answered(of) {
            Response::InPlace(in_place) => in_place,
            other => panic!("{other:?}"),
        }
    }

    fn layers_come(&mut self, order: OrderNumber, chunk: usize, layer: u64) {
        let layers = LayersArrived { block: 0, offset: layer * BLOCK, bytes: BLOCK, checksum: layer };
        self.tell(Event::LayersCame { order, chunk, layers });
    }

    /// Makes a session of this node begin to write a chunk; returns the reservation.
    fn writes(&mut self, session: SessionId, word: &str) -> u64 {
        let ask = Reserve {
            namespace: self.namespace,
            chain: self.chain(word),
            pools: Vec::new(),
            priority: 0,
            attempt: 1,
        };
        let request = self.asks(session, Request::Reserve(ask));
        match self.answered(request) {
            Response::Reserved(reserved) => reserved.reservation,
            other => panic!("{other:?}"),
        }
    }

    fn hands_over(&mut self, session: SessionId, reservation: u64, layer: u32) {
        let (chunks, to_layer) = (vec![0], layer + 1);
        let ask = HandOver { reservation, chunks, pool: 0, from_layer: layer, to_layer, sources: vec![0] };
        let request = self.asks(session, Request::HandOver(ask));
        self.copies();
        assert_eq!(self.answered(request), Response::HandedOver);
    }

    fn commits(&mut self, session: SessionId, reservation: u64) {
        let ask = Commit { reservation, chunks: vec![0], sources: Vec::new() };
        let request = self.asks(session, Request::Commit(ask));
        self.copies();
        assert_eq!(self.answered(request), Response::Committed(1));
    }

    fn copies(&mut self) {
        let Effect::Copy { copy, moves, .. } = self.next() else { panic!("something to copy") };
        let sums = vec![Checksums::default(); moves.len()];
        self.tell(Event::Copied { copy, answer: CopyAnswer::Done(sums) });
    }

    fn told(&mut self) -> FollowNews {
        match self.next() {
            Effect::TellFollower(told) => told,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn chunks_that_another_node_writes_are_ordered_once_and_each_layer_is_news() {
    let mut w = world();
    let follow = w.follow("ab", Some("b"));
    let (order, chunks) = w.order();
    assert_eq!(chunks, 2);
    let waits = w.ask_in_place(follow, (2, 0), 500);
    assert!(w.is_idle(), "there are no news");
    w.layers_come(order, 0, 0);
    assert!(w.is_idle(), "the second chunk has none");
    w.layers_come(order, 1, 0);
    let InPlace { chunks, layers, is_whole, leased, .. } = w.in_place(waits);
    assert_eq!((chunks, layers, is_whole), (2, 1, false));
    assert_eq!(leased.map(|leased| leased.places.len()), Some(2), "its places are told once");
    let waits = w.ask_in_place(follow, (2, 1), 500);
    for chunk in 0..2 {
        w.tell(Event::FollowedCame { order, chunk, came: here(1) });
    }
    let InPlace { is_whole, leased, .. } = w.in_place(waits);
    assert!(is_whole && leased.is_none());
    w.tell(Event::FollowEnded(order));
    w.asks(w.session, Request::Release(follow));
    assert!(w.is_at_rest());
    let request = w.lease("ab");
    assert_eq!(w.leased(request).chunks, 2, "the next turn begins with it: it stays");
}

#[test]
fn places_of_followed_chunks_that_could_not_be_shown_are_told_again() {
    let mut w = world();
    let follow = w.follow("a", Some("b"));
    let (order, _) = w.order();
    w.layers_come(order, 0, 0);
    let request = w.ask_in_place(follow, (1, 0), 0);
    let answer = w.next();
    w.core.cannot_show(answer);
    assert!(matches!(w.refused(request), Refused::Busy { .. }));
    w.ask_in_place(follow, (1, 0), 0);
    let Effect::Answer { response: Response::InPlace(in_place), new_extents, .. } = w.next() else {
        panic!("news");
    };
    assert_eq!((in_place.layers, in_place.leased.map(|leased| leased.places.len())), (1, Some(1)));
    assert_eq!(new_extents.len(), 1);
}

#[test]
fn a_writer_that_dies_leaves_nothing_of_a_hand_over_under_way() {
    let mut w = world();
    let follow = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    let waits = w.ask_in_place(follow, (2, 0), 500);
    w.tell(Event::FollowEnded(OrderNumber(order.0 + 1)));
    w.layers_come(OrderNumber(order.0 + 1), 0, 0);
    w.layers_come(order, 7, 0);
    assert_eq!(w.core.store.usage().fetches, 2, "that is another order, or another chunk");
    w.tell(Event::FollowEnded(order));
    let InPlace { chunks, .. } = w.in_place(waits);
    assert_eq!((chunks, w.core.store.usage().fetches), (0, 0));
    w.layers_come(order, 0, 0);
    w.tell(Event::FollowedCame { order, chunk: 0, came: here(1) });
    w.asks(w.session, Request::Release(follow));
    assert!(w.is_at_rest());
}

#[test]
fn if_one_writer_fails_the_writer_that_another_follow_names_is_asked_once() {
    let mut w = world();
    let first = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    let second = w.follow("abc", Some("c"));
    let (rest, node, chunks) = w.order_to();
    assert_eq!((node.as_str(), chunks), ("c", 1), "what is on its way comes once");
    w.order_fails(order, 2);
    let (again, node, chunks) = w.order_to();
    assert_eq!((node.as_str(), chunks), ("c", 2));
    let request = w.ask_in_place(first, (2, 0), 0);
    assert_eq!(w.in_place(request).chunks, 0, "its writer failed");
    for (order, chunk) in [(again, 0), (rest, 0)] {
        w.tell(Event::FollowedCame { order, chunk, came: here(1) });
    }
    w.order_fails(rest, 0);
    w.tell(Event::FollowedCame { order: again, chunk: 1, came: Arrival::NotHeld });
    w.order_fails(again, 0);
    let request = w.ask_in_place(second, (3, 0), 0);
    let in_place = w.in_place(request);
    assert_eq!((in_place.chunks, in_place.is_whole), (1, true), "and nobody a third time");
    w.asks(w.session, Request::Release(first));
    w.asks(w.session, Request::Release(second));
    assert!(w.is_at_rest());
}

#[test]
fn a_later_attempt_waits_for_no_earlier_one() {
    let mut w = world();
    let first = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    let same = w.follow("ab", Some("c"));
    assert!(w.is_idle(), "the same attempt may be two requests with one prompt: the first comes to both");
    let second = w.follow_attempt("ab", Some("c"), 2);
    assert!(matches!(w.next(), Effect::CancelOrder(cancelled) if cancelled == order));
    w.order_fails(order, 2);
    let (again, node, chunks) = w.order_to();
    assert_eq!((node.as_str(), chunks), ("c", 2));
    for chunk in 0..2 {
        w.tell(Event::FollowedCame { order: again, chunk, came: here(1) });
    }
    w.order_fails(again, 0);
    for (follow, chunks) in [(first, 0), (same, 2), (second, 2)] {
        let request = w.ask_in_place(follow, (2, 0), 0);
        assert_eq!(w.in_place(request).chunks, chunks);
        w.asks(w.session, Request::Release(follow));
    }
    assert!(w.is_at_rest());
}

#[test]
fn a_later_attempt_at_another_prompt_shares_the_chunks_that_both_begin_with() {
    let mut w = world();
    let first = w.follow("abc", Some("b"));
    let (order, _) = w.order();
    let other = w.follow_attempt("abx", Some("c"), 2);
    let (rest, node, chunks) = w.order_to();
    assert_eq!((node.as_str(), chunks), ("c", 1), "the first order goes on");
    for chunk in 0..3 {
        w.tell(Event::FollowedCame { order, chunk, came: here(1) });
    }
    w.order_fails(order, 0);
    w.tell(Event::FollowedCame { order: rest, chunk: 0, came: here(1) });
    w.order_fails(rest, 0);
    for follow in [first, other] {
        let request = w.ask_in_place(follow, (3, 0), 0);
        let in_place = w.in_place(request);
        assert_eq!((in_place.chunks, in_place.is_whole), (3, true));
        w.asks(w.session, Request::Release(follow));
    }
    assert!(w.is_at_rest());
}

#[test]
fn a_prompt_whose_last_layer_was_read_stays_though_the_writer_commits_later() {
    let mut w = world();
    let follow = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    for (chunk, layer) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        w.layers_come(order, chunk, layer);
    }
    w.asks(w.session, Request::Release(follow));
    assert!(w.is_idle(), "the order goes on");
    for chunk in 0..2 {
        w.tell(Event::FollowedCame { order, chunk, came: here(1) });
    }
    w.tell(Event::FollowEnded(order));
    assert!(w.is_at_rest());
    let request = w.lease("ab");
    assert_eq!(w.leased(request).chunks, 2);
}

#[test]
fn a_follow_that_ends_before_all_layers_came_or_whose_writer_fails_leaves_nothing() {
    let mut w = world();
    let follow = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    [(0, 0), (1, 0), (0, 1)].into_iter().for_each(|(chunk, layer)| w.layers_come(order, chunk, layer));
    w.asks(w.session, Request::Release(follow));
    assert!(matches!(w.next(), Effect::CancelOrder(cancelled) if cancelled == order));
    w.order_fails(order, 2);
    assert!(w.is_at_rest());
    let follow = w.follow("c", Some("b"));
    let (order, _) = w.order();
    (0..2).for_each(|layer| w.layers_come(order, 0, layer));
    w.asks(w.session, Request::Release(follow));
    w.order_fails(order, 1);
    assert!(w.is_idle() && w.is_at_rest(), "nobody asks for it again");
}

#[test]
fn a_follow_that_begins_while_an_abandoned_order_ends_asks_anew() {
    let mut w = world();
    let first = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    w.asks(w.session, Request::Release(first));
    assert!(matches!(w.next(), Effect::CancelOrder(cancelled) if cancelled == order));
    let second = w.follow("ab", Some("b"));
    w.order_fails(order, 2);
    let (again, node, chunks) = w.order_to();
    assert_eq!((node.as_str(), chunks), ("b", 2));
    w.asks(w.session, Request::Release(second));
    assert!(matches!(w.next(), Effect::CancelOrder(cancelled) if cancelled == again));
    w.order_fails(again, 2);
    assert!(w.is_at_rest());
}

#[test]
fn places_that_were_shown_are_not_written_by_a_second_writer() {
    let mut w = world();
    let first = w.follow("a", Some("b"));
    let (order, _) = w.order();
    let second = w.follow("a", Some("c"));
    w.layers_come(order, 0, 0);
    for follow in [first, second] {
        let request = w.ask_in_place(follow, (1, 0), 0);
        assert!(w.in_place(request).leased.is_some());
    }
    w.order_fails(order, 1);
    assert!(w.is_idle());
    w.asks(w.session, Request::Release(first));
    w.asks(w.session, Request::Release(second));
    assert!(w.is_at_rest());
}

#[test]
fn a_chunk_that_fails_ends_the_follow_there_and_the_rest_of_the_order_goes_on() {
    let mut w = world();
    let follow = w.follow("ab", Some("b"));
    let (order, _) = w.order();
    w.tell(Event::FollowedCame { order, chunk: 1, came: Arrival::Damaged });
    let request = w.ask_in_place(follow, (2, 0), 500);
    assert_eq!(w.in_place(request).chunks, 1);
    w.tell(Event::FollowedCame { order, chunk: 1, came: here(1) });
    w.tell(Event::FollowedCame { order, chunk: 0, came: here(1) });
    let request = w.ask_in_place(follow, (1, 0), 500);
    let in_place = w.in_place(request);
    assert!(in_place.is_whole && in_place.chunks == 1);
    w.tell(Event::FollowEnded(order));
    w.tell(Event::Closed(w.session));
    assert!(w.is_at_rest());
}

#[test]
fn who_waits_for_news_is_answered_when_it_has_waited_as_long_as_it_wanted_and_a_second_at_most() {
    let mut w = world();
    let follow = w.follow("a", None);
    assert!(w.is_idle(), "an engine of this node writes it");
    let now = w.ask_in_place(follow, (1, 0), 0);
    assert_eq!(w.in_place(now).layers, 0);
    let (short, long) = (w.ask_in_place(follow, (1, 0), 200), w.ask_in_place(follow, (1, 0), 60_000));
    w.pass(Duration::from_millis(199));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    assert_eq!(w.in_place(short).chunks, 1);
    w.pass(Duration::from_millis(799));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    assert_eq!(w.in_place(long).chunks, 1);
    let stranger = w.other_session();
    let request =
        w.asks(stranger, Request::AskInPlace(AskInPlace { follow, chunks: 0, layers: 0, wait_ms: 9 }));
    assert!(matches!(w.refused(request), Refused::Unknown { .. }));
    w.ask_in_place(follow, (1, 0), 200);
    w.tell(Event::Closed(w.session));
    w.pass(DEADLINE);
    assert!(w.is_at_rest(), "nobody hears of an ended session's follow");
}

#[test]
fn what_an_engine_of_this_node_hands_over_is_followed_here_and_by_peers() {
    let mut w = world();
    let writer = w.other_session();
    let _ = register(&mut w.core, writer);
    let follow = w.follow("a", None);
    let hashes = [name("a")];
    let peer = w.core.follow_for_peer(w.now, &w.fingerprint, (&hashes, &[]), (1, 1_000)).unwrap();
    let reservation = w.writes(writer, "a");
    let waits = w.ask_in_place(follow, (1, 0), 500);
    w.hands_over_to(writer, reservation, waits, peer);
    w.hands_over(writer, reservation, 1);
    assert!(matches!(w.told(), FollowNews { follow, what: News::Layers(_), .. } if follow == peer));
    w.commits(writer, reservation);
    assert!(matches!(w.told(), FollowNews { follow, position: 0, what: News::Whole(_) } if follow == peer));
    w.tell(Event::GrantEnded(peer));
    let request = w.ask_in_place(follow, (1, 2), 500);
    assert!(w.in_place(request).is_whole);
    w.asks(w.session, Request::Release(follow));
    assert!(w.is_at_rest());
}

impl World {
    /// Hands over the first layer: the waiting request is answered, and a peer is told.
    fn hands_over_to(&mut self, writer: SessionId, reservation: u64, waits: RequestId, peer: u64) {
        self.hands_over(writer, reservation, 0);
        let InPlace { layers, leased, .. } = self.in_place(waits);
        assert_eq!((layers, leased.is_some()), (1, true));
        let told = self.told();
        assert!(matches!(told.what, News::Layers(layers) if layers.bytes == BLOCK && layers.offset == 0));
        assert_eq!((told.follow, told.position), (peer, 0));
    }
}

#[test]
fn a_writer_of_this_node_that_goes_is_news_to_all_that_follow() {
    let mut w = world();
    let writer = w.other_session();
    let _ = register(&mut w.core, writer);
    let peer = w.core.follow_for_peer(w.now, &w.fingerprint, (&[name("a")], &[]), (1, 1_000)).unwrap();
    let reservation = w.writes(writer, "a");
    let follow = w.follow("a", None);
    w.hands_over(writer, reservation, 0);
    w.told();
    let waits = w.ask_in_place(follow, (1, 1), 500);
    w.tell(Event::Closed(writer));
    assert_eq!(w.in_place(waits).chunks, 0);
    assert!(matches!(w.told(), FollowNews { what: News::Lost, .. }));
    w.tell(Event::GrantEnded(peer));
    w.tell(Event::Closed(w.session));
    assert!(w.is_at_rest());
}

#[test]
fn peers_follow_no_more_than_they_may() {
    let mut w = world();
    let hashes: Vec<ChunkHash> = (0..16).map(|byte| ChunkHash([byte; 32])).collect();
    let follow = |w: &mut World, chunks: &[ChunkHash]| {
        w.core.follow_for_peer(w.now, &w.fingerprint, (chunks, &[]), (1, u64::MAX))
    };
    let follows = [follow(&mut w, &hashes), follow(&mut w, &hashes)];
    assert!(follows.iter().all(Option::is_some));
    assert_eq!(follow(&mut w, &hashes[..1]), None, "a tenant takes no more than it leaves free");
    let other = Fingerprint([9; 32]);
    let of_other = w.core.follow_for_peer(w.now, &other, (&hashes, &[]), (1, u64::MAX));
    assert!(of_other.is_some(), "there is room for unknown namespaces");
    // After ten minutes without news a follow ends, however patient the peer says it is.
    w.pass(Duration::from_secs(601));
    assert!((0..48).all(|_| matches!(w.told().what, News::Lost)));
    follows.into_iter().chain([of_other]).for_each(|follow| w.tell(Event::GrantEnded(follow.unwrap())));
    assert!(follow(&mut w, &hashes[..1]).is_some());
}

#[test]
fn a_chunk_of_a_follow_that_is_on_disk_is_read_and_the_writer_is_asked_for_the_others() {
    let disk = Some(DEADLINE);
    let mut w = World::new(Sources { disk, ..PEERS });
    w.on_disk("a");
    w.namespace = w.core.register(w.session, &spec(1), &[0], &[BLOCK]).unwrap().namespace;
    let follow = w.follow("ab", Some("b"));
    let (read, tier) = w.read();
    assert_eq!(tier, Below::Disk);
    let (order, chunks) = w.order();
    assert_eq!(chunks, 1);
    w.tell(Event::ReadEnded { read, answer: read_here() });
    w.tell(Event::FollowedCame { order, chunk: 0, came: here(1) });
    let request = w.ask_in_place(follow, (2, 0), 500);
    assert!(w.in_place(request).is_whole);
    w.tell(Event::FollowEnded(order));
    w.tell(Event::Closed(w.session));
    assert!(w.is_at_rest());
}

#[test]
fn chunks_that_are_written_at_this_node_need_no_other_node() {
    for (node, orders) in [("n1", 0), ("n2", 1)] {
        let mut w = World::new(PEERS);
        w.core.is_at("n1".to_owned());
        let writer = Writer { node: node.to_owned(), device: 0 };
        let ask = Follow {
            namespace: w.namespace,
            chain: w.chain("ab"),
            writer: Some(writer),
            attempt: 0,
            patience_ms: 1_000,
        };
        w.asks(w.session, Request::Follow(ask));
        let ordered = std::iter::from_fn(|| w.poll()).filter(|effect| matches!(effect, Effect::Follow(_)));
        assert_eq!(ordered.count(), orders, "{node}");
    }
}

#[test]
fn a_later_attempt_ends_no_earlier_one_at_chunks_of_the_same_names_in_another_namespace() {
    let mut w = world();
    w.follow("ab", Some("b"));
    let (order, _) = w.order();
    let other = NamespaceSpec { model: "another".into(), ..two_layers() };
    let registered = w.core.register(w.session, &other, &[0], &[2 * BLOCK]).unwrap();
    (w.namespace, w.root) = (registered.namespace, registered.root);
    w.follow_attempt("ab", Some("c"), 2);
    let (later, node, chunks) = w.order_to();
    assert!(w.is_idle() && later.0 > order.0);
    assert_eq!((node.as_str(), chunks), ("c", 2));
}

#[test]
fn the_writers_node_hears_which_pools_of_each_chunk_are_followed() {
    let mut w = World::new(PEERS);
    let mut spec = spec(1);
    spec.pools.push(PoolSpec { name: "state".into(), hit: HitPolicy::Last, ..spec.pools[0].clone() });
    let registered = w.core.register(w.session, &spec, &[0], &[BLOCK; 2]).unwrap();
    (w.namespace, w.root) = (registered.namespace, registered.root);
    w.follow("abc", Some("b"));
    let Effect::Follow(order) = w.next() else { panic!("an order") };
    let attention = PoolSet::default().with(0);
    assert_eq!(order.pools, [attention, attention, attention.with(1)], "a prompt needs its last state");
}

#[test]
fn a_writer_whose_name_no_node_can_have_is_refused() {
    let mut w = world();
    for (bytes, is_taken) in [(256, true), (257, false)] {
        let writer = Some(Writer { node: "n".repeat(bytes), device: 0 });
        let chain = w.chain("");
        let ask = Follow { namespace: w.namespace, chain, writer, attempt: 0, patience_ms: PATIENCE_MS };
        let request = w.asks(w.session, Request::Follow(ask));
        match is_taken {
            true => assert!(matches!(w.answered(request), Response::Following(_))),
            false => assert_eq!(w.refused(request), Refused::WriterName { bytes }),
        }
    }
    assert_eq!(w.core.store.usage().follows, 1);
}
