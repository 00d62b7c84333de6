//! Tests of drains: which chunks move, to which takers, and when a drain is over; and which chunks a node takes.

use larder_protocol::drain::{DrainCounts, TakeChunk, TakeNamespace, Taken, WHOLE_RANK_PPM};
use larder_protocol::session::Reserve;

use super::*;
use crate::event::{OtherNodes, TakeNumber};
use crate::placement::{PlacementRule, Worth};
use crate::store::{Change, ChangeKind};
use crate::{DrainOrder, DrainProgress, TakeOrder, TakeReply};

fn order(seconds: u64) -> DrainOrder {
    DrainOrder { until: Duration::from_secs(seconds), keeps_disk: true, bytes_per_second: None }
}

/// The answer of a taker that keeps these chunks, and has so much room.
fn says(is_kept: &[bool], free_chunks: u64, rank_limit_ppm: u32) -> Option<Taken> {
    Some(Taken { is_kept: is_kept.to_vec(), free_chunks, free_bytes: free_chunks * BLOCK, rank_limit_ppm })
}

/// The takers are these; all others leave.
fn others(takers: Vec<Holder>) -> Event {
    let stay = takers.iter().map(|taker| taker.node).collect();
    Event::TakersAre(OtherNodes { takers, stay })
}

impl World {
    /// Begins a drain with these takers, and answers for each how many free chunks it has.
    fn drains(&mut self, takers: &[(u16, u64)]) {
        self.tell(others(takers.iter().map(|&(number, _)| node(number)).collect()));
        self.tell(Event::Drain(order(100)));
        let polls: Vec<TakeOrder> = takers.iter().map(|_| self.asks_to_take()).collect();
        for (poll, &(number, free)) in polls.into_iter().zip(takers) {
            assert_eq!((poll.taker, poll.namespace.is_none(), poll.chunks.len()), (node(number), true, 0));
            self.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], free, 0) });
        }
    }

    fn asks_to_take(&mut self) -> TakeOrder {
        match self.next() {
            Effect::AskToTake(order) => order,
            other => panic!("{other:?}"),
        }
    }

    /// Lets time pass, and gives this answer to each question for room, until the drain is over. Returns the number of questions.
    fn answer_polls(&mut self, taken: Option<Taken>) -> usize {
        let mut polls = 0;
        while !self.progress().is_over {
            self.now = self.now.max(self.core.next_deadline().expect("it is asked again soon"));
            self.tell(Event::Alarm);
            if self.progress().is_over {
                break;
            }
            let poll = self.asks_to_take();
            self.tell(Event::TakeAnswered { take: poll.take, taken: taken.clone() });
            polls += 1;
        }
        polls
    }

    /// Puts chunks of another tenant, in larger blocks.
    fn put_for_b(&mut self, word: &str) {
        let session = self.core.open_session(TenantId(1), ProcessId(7), 1 << 20);
        let registered = self.core.register(session, &spec(2), &[0], &[2 * BLOCK]).unwrap();
        let chain = Chain::from_root(registered.root, self.chain(word).hashes);
        self.put_in(session, registered.namespace, &chain);
    }

    /// Plays the other nodes until the drain is over: no node has the chunks yet, every taker has much room, and `serves` says
    /// whose chunks it keeps. Returns the offers, by taker and tenant.
    fn answer_offers(&mut self, serves: impl Fn(Holder, &str) -> bool) -> Vec<(Holder, String)> {
        let mut offers = Vec::new();
        while !self.progress().is_over {
            match self.poll() {
                Some(Effect::FindHolders { question, chunks, .. }) => {
                    let holders = chunks.iter().map(|_| of(&[])).collect();
                    self.tell(Event::HoldersFound { question, holders });
                }
                Some(Effect::AskToTake(TakeOrder { take, taker, namespace, chunks })) => {
                    let is_kept =
                        namespace.as_ref().is_some_and(|namespace| serves(taker, &namespace.tenant));
                    offers.extend(namespace.map(|namespace| (taker, namespace.tenant)));
                    let taken = says(&vec![is_kept; chunks.len()], 100, WHOLE_RANK_PPM);
                    self.tell(Event::TakeAnswered { take, taken });
                }
                Some(other) => panic!("{other:?}"),
                None => {
                    self.now = self.now.max(self.core.next_deadline().expect("it goes on"));
                    self.tell(Event::Alarm);
                }
            }
        }
        offers
    }

    fn progress(&self) -> DrainProgress {
        self.core.drain_progress().expect("it drains")
    }

    fn counts(&self) -> DrainCounts {
        self.progress().chunks
    }

    /// Offers the last chunks of a prompt, with these ranks, from another node that drains.
    fn is_offered(&mut self, from: u16, word: &str, ranks: &[u32]) -> TakeReply {
        let chain = self.chain(word);
        let first = word.len() - ranks.len();
        let chunks =
            (first..).zip(ranks).map(|(at, &rank_ppm)| TakeChunk { chunk: chain.chunk(at), rank_ppm });
        let chunks: Vec<TakeChunk> = chunks.collect();
        let namespace = TakeNamespace { tenant: "a".into(), spec: spec(1) };
        self.core.take(self.now, node(from), Some(&namespace), &chunks)
    }

    fn taken(&mut self) -> (TakeNumber, Taken) {
        match self.next() {
            Effect::Taken { take, taken } => (take, taken),
            other => panic!("{other:?}"),
        }
    }
}

fn names(order: &TakeOrder) -> Vec<ChunkHash> {
    order.chunks.iter().map(|taken| taken.chunk.hash).collect()
}

#[test]
fn the_warmest_chunks_are_offered_first_to_the_node_with_the_most_room() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.put("b");
    let request = w.lease("a");
    let leased = w.leased(request);
    w.core.store.release(w.session, leased.lease).unwrap();
    w.drains(&[(2, 1), (3, 5)]);
    assert_eq!(w.directory_says(&[&[], &[]]), 2);
    let offer = w.asks_to_take();
    assert_eq!((offer.taker, names(&offer)), (node(3), vec![name("a"), name("b")]));
    assert!(offer.chunks[0].rank_ppm < offer.chunks[1].rank_ppm);
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true, true], 3, 0) });
    assert!(w.progress().is_over);
    assert_eq!(
        w.counts(),
        DrainCounts { found: 2, moved: 2, moved_bytes: 2 * BLOCK, ..DrainCounts::default() }
    );
}

#[test]
fn a_chunk_that_another_node_holds_is_not_moved() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.drains(&[(2, 9)]);
    w.directory_says(&[&[2], &[]]);
    let offer = w.asks_to_take();
    assert_eq!(offer.chunks.len(), 1);
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true], 8, 0) });
    assert_eq!((w.counts().elsewhere, w.counts().moved), (1, 1));
}

#[test]
fn a_holder_that_leaves_too_does_not_count() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.drains(&[(2, 9)]);
    w.directory_says(&[&[7]]);
    assert_eq!(w.asks_to_take().chunks.len(), 1);
}

#[test]
fn a_holder_that_is_not_heard_for_a_moment_counts() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.drains(&[(2, 9)]);
    let stay = [2, 7].map(NodeNumber).into();
    w.tell(Event::TakersAre(OtherNodes { takers: vec![node(2)], stay }));
    w.directory_says(&[&[7]]);
    assert!(w.progress().is_over);
    assert_eq!(w.counts().elsewhere, 1);
}

#[test]
fn a_chunk_moves_after_all_if_its_other_holder_leaves_too() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.drains(&[(2, 9), (3, 5)]);
    w.directory_says(&[&[2], &[3]]);
    assert!(w.progress().is_over);
    assert_eq!(w.counts().elsewhere, 2);
    // A node that is not heard for a moment is no taker, and still has its chunks.
    let stay = [2, 3].map(NodeNumber).into();
    w.tell(Event::TakersAre(OtherNodes { takers: vec![node(3)], stay }));
    assert!(w.progress().is_over && w.is_idle());
    w.tell(others(vec![node(3)]));
    assert_eq!(w.directory_says(&[&[2]]), 1, "the other one still has a holder");
    let offer = w.asks_to_take();
    assert_eq!((offer.taker, offer.chunks.len()), (node(3), 1));
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true], 4, 0) });
    assert!(w.progress().is_over);
    assert_eq!((w.counts().found, w.counts().elsewhere, w.counts().moved), (2, 1, 1));
}

#[test]
fn what_the_disk_keeps_stays_if_the_node_comes_back_and_moves_if_it_does_not() {
    for keeps_disk in [true, false] {
        let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
        w.on_disk("a");
        w.put("a");
        w.tell(others(vec![node(2)]));
        w.tell(Event::Drain(DrainOrder { keeps_disk, ..order(100) }));
        let poll = w.asks_to_take();
        w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
        assert_eq!(w.progress().is_over, keeps_disk);
        assert_eq!(w.counts().kept_below, u64::from(keeps_disk));
    }
}

#[test]
fn without_free_room_chunks_move_as_long_as_their_rank_beats_what_goes_for_them() {
    let mut w = World::new(PEERS);
    w.put("abcd");
    w.tell(others(vec![node(2)]));
    w.tell(Event::Drain(order(100)));
    let poll = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 0, WHOLE_RANK_PPM / 2) });
    w.directory_says(&[&[], &[]]);
    let offer = w.asks_to_take();
    assert_eq!(offer.chunks.len(), 2, "the better half");
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true, true], 0, 400_000) });
    assert!(w.progress().is_over);
    assert_eq!((w.counts().moved, w.counts().left), (2, 2));
}

#[test]
fn a_taker_that_does_not_answer_is_asked_no_more_while_there_is_another_and_its_chunks_go_to_another() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.drains(&[(2, 9), (3, 5)]);
    w.directory_says(&[&[]]);
    let first = w.asks_to_take();
    assert_eq!(first.taker, node(2));
    w.tell(Event::TakeAnswered { take: first.take, taken: None });
    w.directory_says(&[&[]]);
    let second = w.asks_to_take();
    assert_eq!(second.taker, node(3));
    w.tell(Event::TakeAnswered { take: second.take, taken: says(&[true], 4, 0) });
    assert_eq!((w.counts().moved, w.counts().left), (1, 0));
}

#[test]
fn an_answer_that_never_comes_ends_neither_the_drain_nor_its_deadline() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.drains(&[(2, 9)]);
    w.directory_says(&[&[]]);
    let lost = w.asks_to_take();
    w.pass(Duration::from_secs(8));
    w.tell(Event::TakeAnswered { take: lost.take, taken: says(&[true], 8, 0) });
    assert_eq!(w.counts().moved, 0, "it comes too late");
    let since = w.now;
    w.answer_polls(None);
    let waited = w.now - since;
    assert!((5..6).contains(&waited.as_secs()), "nobody else is there: {waited:?}");
    assert_eq!(w.counts().left, 1);
}

#[test]
fn the_only_taker_that_stood_still_for_seconds_is_asked_again() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.tell(others(vec![node(2)]));
    w.tell(Event::Drain(order(100)));
    let mut poll = w.asks_to_take();
    while w.now < Duration::from_secs(4) {
        w.tell(Event::TakeAnswered { take: poll.take, taken: None });
        w.now = w.core.next_deadline().expect("it is asked again soon");
        w.tell(Event::Alarm);
        poll = w.asks_to_take();
    }
    w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
    w.directory_says(&[&[]]);
    let offer = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true], 8, 0) });
    assert_eq!((w.counts().moved, w.progress().is_over), (1, true));
}

#[test]
fn a_drain_is_over_at_its_deadline_whatever_it_waits_for() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.drains(&[(2, 9)]);
    w.pass(Duration::from_secs(100));
    assert!(w.progress().is_over);
    assert_eq!(w.counts().left, 2);
}

#[test]
fn a_budget_spreads_batches_over_time() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.put("b");
    w.tell(others(vec![node(2)]));
    w.tell(Event::Drain(DrainOrder { bytes_per_second: Some(BLOCK), ..order(100) }));
    let poll = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
    w.directory_says(&[&[], &[]]);
    let offer = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true, false], 8, 0) });
    assert!(w.is_idle(), "the kept block takes a second, the other block nothing");
    w.pass(Duration::from_millis(3));
    assert!(w.is_idle(), "only the news were due");
    assert_eq!(w.core.next_deadline(), Some(Duration::from_secs(1)));
    w.pass(Duration::from_secs(1));
    assert_eq!(w.directory_says(&[&[]]), 1, "what was refused is offered again");
}

#[test]
fn a_draining_node_reserves_nothing_and_serves_what_it_has() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.drains(&[]);
    let (namespace, chain) = (w.namespace, w.chain("xyz"));
    let reserve = Reserve { namespace, chain, pools: Vec::new(), priority: 0, attempt: 0 };
    let request = w.asks(w.session, Request::Reserve(reserve));
    let Response::Reserved(reserved) = w.answered(request) else { panic!("reserved") };
    assert_eq!((reserved.reservation, reserved.chunks), (0, Vec::new()));
    let request = w.lease("a");
    assert_eq!(w.leased(request).chunks, 1);
    w.tell(Event::DrainCancelled);
    w.put("xyz");
    assert!(w.core.drain_progress().is_none());
}

#[test]
fn what_a_draining_node_fetches_passes() {
    let mut w = World::new(PEERS);
    w.drains(&[]);
    let request = w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.ended(asked.order, vec![here(9)]);
    let leased = w.leased(request);
    assert_eq!(leased.chunks, 1);
    w.core.store.release(w.session, leased.lease).unwrap();
    assert_eq!(w.core.store.cached_chunks(), 0);
}

#[test]
fn a_new_life_of_the_store_has_nothing_to_move() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.drains(&[(2, 9)]);
    w.core.begin_anew();
    assert!(w.progress().is_over);
}

#[test]
fn chunks_of_a_draining_node_are_fetched_and_kept_and_it_hears_when() {
    let mut w = World::new(PEERS);
    w.sees_news = true;
    let TakeReply::Later(number) = w.is_offered(4, "ab", &[0, 1]) else { panic!("they have to come") };
    let asked = w.fetch();
    assert_eq!((asked.holder, asked.chunks.len()), (node(4), 2));
    w.ended(asked.order, vec![here(1), FAILED]);
    let (take, taken) = w.taken();
    assert_eq!((take, taken.is_kept), (number, vec![true, false]));
    assert_eq!(w.core.store.cached_chunks(), 1);
    assert!(w.is_idle());
    w.pass(Duration::from_millis(3));
    let Effect::Changed { changes, .. } = w.next() else { panic!("the news") };
    let chunk = w.chain("ab").chunk(0);
    let fingerprint = w.fingerprint;
    assert_eq!(changes, [Change { fingerprint, chunk, kind: ChangeKind::MovedFrom(node(4)), evicted: None }]);
    w.sees_news = false;
    assert!(w.is_at_rest());
}

#[test]
fn a_chunk_that_is_on_the_disk_of_the_draining_node_is_written_to_disk_here() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
    w.sees_writes = true;
    let TakeReply::Later(_) = w.is_offered(4, "a", &[0]) else { panic!("it has to come") };
    let asked = w.fetch();
    let Arrival::Here { checksums, pools, reads, .. } = here(1) else { unreachable!("it is here") };
    w.ended(asked.order, vec![Arrival::Here { checksums, pools, reads, is_on_disk: true }]);
    assert_eq!(w.taken().1.is_kept, [true]);
    assert!(matches!(w.next(), Effect::Describe { .. }), "its namespace, before it");
}

#[test]
fn a_chunk_that_is_here_is_kept_without_a_fetch() {
    let mut w = World::new(PEERS);
    w.put("a");
    let TakeReply::Now(taken) = w.is_offered(4, "a", &[0]) else { panic!("it is here") };
    assert_eq!(taken.is_kept, [true]);
}

#[test]
fn of_a_full_store_the_first_to_be_evicted_goes_for_a_chunk_of_better_rank_and_no_other() {
    let mut w = World::new(PEERS);
    for word in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"] {
        w.put(word);
    }
    let TakeReply::Later(_) = w.is_offered(4, "xyz", &[0, 900_000, 999_999]) else {
        panic!("some are taken")
    };
    let asked = w.fetch();
    assert_eq!(asked.chunks.len(), 2, "beyond 15 of 16 nothing is better than what is here");
    w.ended(asked.order, vec![here(1), here(1)]);
    let (_, taken) = w.taken();
    assert_eq!(taken.is_kept, [true, true, false]);
    assert_eq!(taken.rank_limit_ppm, WHOLE_RANK_PPM / 16 * 14);
    let request = w.lookup("a");
    assert_eq!(w.directory_says(&[&[]]), 1, "the coldest went");
    let Effect::Found { request: of, .. } = w.next() else { panic!("found") };
    assert_eq!(of, request);
}

#[test]
fn a_taker_without_room_for_fetches_is_busy_and_gives_up_nothing_for_what_does_not_come() {
    let mut w = World::new(PEERS);
    let TakeReply::Later(_) = w.is_offered(4, "abcdefghijklmnop", &[0; 16]) else { panic!("most come") };
    let asked = w.fetch();
    assert!(
        matches!(w.is_offered(4, "wxyz", &[0; 4]), TakeReply::Busy),
        "{} are on their way",
        asked.chunks.len()
    );
    let came = asked.chunks.iter().map(|_| here(1)).collect();
    w.ended(asked.order, came);
    let (_, taken) = w.taken();
    assert!(taken.free_chunks > 0 || taken.rank_limit_ppm > WHOLE_RANK_PPM / 2, "{taken:?}");
    assert!(matches!(w.is_offered(4, "z", &[0]), TakeReply::Later(_)));
}

#[test]
fn takers_that_refuse_now_and_then_are_asked_as_long_as_chunks_move() {
    let mut w = World::new(PEERS);
    for word in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        w.put(word);
    }
    w.drains(&[(2, 99)]);
    let mut offers = 0;
    while !w.progress().is_over {
        match w.poll() {
            Some(Effect::FindHolders { question, chunks, .. }) => {
                let holders = chunks.iter().map(|_| of(&[])).collect();
                w.tell(Event::HoldersFound { question, holders });
            }
            Some(Effect::AskToTake(TakeOrder { take, chunks, .. })) => {
                // Of every second offer it keeps one chunk, of the others none.
                offers += usize::from(!chunks.is_empty());
                let keeps = |at: usize| at == 0 && offers % 2 == 0;
                let is_kept: Vec<bool> = (0..chunks.len()).map(keeps).collect();
                w.tell(Event::TakeAnswered { take, taken: says(&is_kept, 99, WHOLE_RANK_PPM) });
            }
            Some(other) => panic!("{other:?}"),
            None => {
                w.now = w.now.max(w.core.next_deadline().expect("it goes on"));
                w.tell(Event::Alarm);
            }
        }
    }
    assert_eq!((w.counts().moved, w.counts().left), (8, 0));
}

#[test]
fn a_node_that_drains_takes_no_evicted_chunks_and_attracts_none() {
    let peers = limits().peers.map(|peers| PeerStoreLimits { placement: PlacementRule::Worth, ..peers });
    for drains in [false, true] {
        let mut w = World::with(StoreLimits { peers: peers.clone(), disk: None, ..limits() }, PEERS);
        let (fingerprint, chunk) = (w.fingerprint, w.chain("a").chunk(0));
        if drains {
            w.drains(&[(2, 9)]);
        }
        let wanted = w.core.take_in(w.now, node(2), fingerprint, &[chunk], Worth(u64::MAX / 8));
        let least = if drains { Worth(u64::MAX) } else { Worth::NOTHING };
        assert_eq!((wanted, w.core.least_worth()), (vec![!drains], least));
    }
}

#[test]
fn a_node_that_drains_itself_takes_nothing() {
    let mut w = World::new(PEERS);
    w.drains(&[]);
    let TakeReply::Now(taken) = w.is_offered(4, "ab", &[0, 1]) else { panic!("nothing comes") };
    assert_eq!(taken, Taken { is_kept: vec![false, false], ..Taken::default() });
}

#[test]
fn chunks_of_a_tenant_that_is_not_here_are_refused() {
    let mut w = World::new(PEERS);
    let chunk = w.chain("a").chunk(0);
    let namespace = TakeNamespace { tenant: "somebody".into(), spec: spec(1) };
    let reply = w.core.take(w.now, node(4), Some(&namespace), &[TakeChunk { chunk, rank_ppm: 0 }]);
    assert!(matches!(reply, TakeReply::Now(taken) if taken.is_kept == [false]));
}

#[test]
fn a_namespace_that_no_engine_named_yet_is_made_known() {
    let mut w = World::new(PEERS);
    let namespace = TakeNamespace { tenant: "b".into(), spec: spec(2) };
    let root = spec(2).fingerprint("b").root();
    let chain = Chain::from_root(root, vec![name("a")]);
    let chunks = [TakeChunk { chunk: chain.chunk(0), rank_ppm: 0 }];
    let TakeReply::Later(_) = w.core.take(w.now, node(4), Some(&namespace), &chunks) else {
        panic!("it comes")
    };
    let asked = w.fetch();
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.taken().1.is_kept, [true]);
}

#[test]
fn a_taker_that_refuses_a_tenant_is_passed_over_for_the_next_and_no_chunk_is_lost() {
    let mut w = World::new(PEERS);
    w.put("abc");
    w.put_for_b("xyz");
    // Most takers have much room, and do not serve the tenant.
    w.drains(&[(2, 99), (3, 98), (4, 97), (5, 96), (6, 9)]);
    let offers = w.answer_offers(|taker, tenant| tenant == "b" || taker == node(6));
    let tried: Vec<u16> =
        offers.iter().filter(|(_, tenant)| tenant == "a").map(|(taker, _)| taker.node.0).collect();
    assert_eq!(tried, [2, 3, 4, 5, 6], "each is asked once");
    assert_eq!((w.counts().moved, w.counts().left), (6, 0));
}

#[test]
fn chunks_that_nobody_takes_hold_up_no_others() {
    let mut w = World::new(PEERS);
    w.put_for_b("xyz");
    w.put("abc");
    w.drains(&[(2, 99), (3, 98)]);
    w.answer_offers(|_, tenant| tenant == "b");
    assert_eq!((w.counts().moved, w.counts().left), (3, 3));
    assert!(w.now < Duration::from_secs(5), "{:?}", w.now);
}

#[test]
fn a_refused_batch_costs_no_budget() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.tell(others(vec![node(2), node(3)]));
    w.tell(Event::Drain(DrainOrder { bytes_per_second: Some(BLOCK), ..order(100) }));
    for _ in 0..2 {
        let poll = w.asks_to_take();
        w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
    }
    w.answer_offers(|taker, _| taker == node(3));
    assert_eq!((w.counts().moved, w.now), (2, Duration::from_secs(2)), "two blocks take two seconds");
}

#[test]
fn a_taker_that_does_not_know_the_node_yet_is_asked_again() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.tell(others(vec![node(2)]));
    w.tell(Event::Drain(order(100)));
    let poll = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 0, 0) });
    assert!(!w.progress().is_over, "it may only have joined just now");
    w.now = w.core.next_deadline().expect("it is asked again soon");
    w.tell(Event::Alarm);
    let poll = w.asks_to_take();
    assert!(poll.chunks.is_empty());
    w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
    w.directory_says(&[&[], &[]]);
    let offer = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true, true], 7, 0) });
    assert_eq!((w.counts().moved, w.progress().is_over), (2, true));
}

#[test]
fn a_taker_that_never_takes_anything_holds_up_no_drain() {
    let mut w = World::new(PEERS);
    w.put("ab");
    w.tell(others(vec![node(2)]));
    w.tell(Event::Drain(order(100)));
    let poll = w.asks_to_take();
    w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 0, 0) });
    let polls = w.answer_polls(says(&[], 0, 0));
    assert_eq!((polls, w.counts().left), (4, 2));
    assert!(w.now < Duration::from_secs(5), "{:?}", w.now);
}

/// A world that is full, with chunks of one letter.
fn full() -> World {
    let mut w = World::new(PEERS);
    ('a'..='p').for_each(|letter| w.put(&letter.to_string()));
    w
}

#[test]
fn for_a_chunk_that_two_draining_nodes_have_one_chunk_makes_way() {
    let mut w = full();
    assert!(matches!(w.is_offered(4, "x", &[0]), TakeReply::Later(_)));
    let asked = w.fetch();
    assert!(matches!(w.is_offered(5, "x", &[0]), TakeReply::Later(_)));
    assert!(w.is_idle(), "it is fetched once");
    w.ended(asked.order, vec![here(1)]);
    for taken in [w.taken().1, w.taken().1] {
        assert_eq!((taken.is_kept, taken.rank_limit_ppm), (vec![true], WHOLE_RANK_PPM / 16 * 15));
    }
}

#[test]
fn room_that_a_chunk_on_its_way_will_take_is_no_room_for_another() {
    let mut w = World::new(PEERS);
    ('a'..='o').for_each(|letter| w.put(&letter.to_string()));
    assert!(matches!(w.is_offered(4, "xy", &[0, 0]), TakeReply::Later(_)));
    let asked = w.fetch();
    assert_eq!(asked.chunks.len(), 2);
    w.ended(asked.order, vec![here(1), here(1)]);
    assert_eq!(w.taken().1.rank_limit_ppm, WHOLE_RANK_PPM / 16 * 15, "one of them had no free room");
}

#[test]
fn a_taker_without_room_for_fetches_tells_which_chunks_it_has() {
    let mut w = World::new(PEERS);
    w.put("w");
    assert!(matches!(w.is_offered(4, "abcdefghijklmnop", &[0; 16]), TakeReply::Later(_)));
    let TakeReply::Now(taken) = w.is_offered(5, "wxyz", &[0; 4]) else { panic!("nothing comes") };
    assert_eq!(taken.is_kept, [true, false, false, false]);
}

#[test]
fn chunks_that_made_way_count_as_long_as_the_draining_node_goes_on_asking() {
    let mut w = full();
    for (word, pause) in [("x", 2), ("y", 2)] {
        assert!(matches!(w.is_offered(4, word, &[0]), TakeReply::Later(_)));
        let asked = w.fetch();
        w.ended(asked.order, vec![here(1)]);
        w.taken();
        w.now += Duration::from_secs(pause);
    }
    assert!(matches!(w.is_offered(5, "z", &[900_000]), TakeReply::Now(_)), "fourteen of sixteen are its own");
    w.now += Duration::from_secs(1);
    assert!(matches!(w.is_offered(5, "z", &[900_000]), TakeReply::Later(_)), "the first node is gone");
}

#[test]
fn a_new_life_of_the_store_keeps_no_takes_of_the_life_before() {
    let mut w = World::new(PEERS);
    assert!(matches!(w.is_offered(4, "ab", &[0, 1]), TakeReply::Later(_)));
    let asked = w.fetch();
    w.core.begin_anew();
    assert_eq!(w.core.takes_under_way(), 0);
    w.ended(asked.order, vec![here(1), here(1)]);
    assert!(w.is_at_rest());
}

#[test]
fn a_drain_under_way_obeys_a_later_order() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.drains(&[(2, 9)]);
    w.tell(Event::Drain(order(5)));
    w.pass(Duration::from_secs(5));
    assert_eq!((w.progress().is_over, w.counts().left), (true, 1));
}

#[test]
fn chunks_that_wait_are_offered_before_those_whose_other_holder_leaves() {
    let mut w = World::new(PEERS);
    ["a", "b", "c"].iter().for_each(|word| w.put(word));
    w.tell(others(vec![node(2), node(3)]));
    w.tell(Event::Drain(DrainOrder { bytes_per_second: Some(BLOCK), ..order(100) }));
    for _ in 0..2 {
        let poll = w.asks_to_take();
        w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
    }
    w.directory_says(&[&[3], &[], &[]]);
    let offer = w.asks_to_take();
    assert_eq!(names(&offer), ["b", "a"].map(name), "another node has the warmest");
    w.tell(Event::TakeAnswered { take: offer.take, taken: says(&[true, false], 8, 0) });
    w.tell(others(vec![node(2)]));
    assert!(w.is_idle(), "the chunk that moved takes a second");
    w.pass(Duration::from_secs(1));
    w.directory_says(&[&[], &[]]);
    assert_eq!(names(&w.asks_to_take()), ["a", "c"].map(name));
}

#[test]
fn a_taker_that_does_not_tell_its_room_holds_up_no_drain_and_of_equal_takers_the_first_is_asked() {
    let mut w = World::new(PEERS);
    w.put("a");
    w.tell(others(vec![node(2), node(3), node(4)]));
    w.tell(Event::Drain(order(100)));
    let polls = [w.asks_to_take(), w.asks_to_take(), w.asks_to_take()];
    for poll in &polls[1..] {
        w.tell(Event::TakeAnswered { take: poll.take, taken: says(&[], 9, 0) });
    }
    assert!(w.is_idle());
    w.pass(Duration::from_secs(1));
    w.directory_says(&[&[]]);
    assert_eq!(w.asks_to_take().taker, node(3));
}

#[test]
fn a_draining_node_refuses_the_chains_that_others_refuse() {
    let mut w = World::new(PEERS);
    w.drains(&[]);
    let mut chain = w.chain("ab");
    chain.hashes[1] = chain.hashes[0];
    let ask = Reserve { namespace: w.namespace, chain, pools: Vec::new(), priority: 0, attempt: 0 };
    let request = w.asks(w.session, Request::Reserve(ask));
    assert!(matches!(w.refused(request), Refused::Chain(_)));
}
