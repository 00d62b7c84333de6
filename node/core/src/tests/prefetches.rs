//! Tests of prefetches: collected, canceled, overtaken by a lease.

use larder_protocol::peer::Class;
use larder_protocol::session::{Collect, Wait};

use super::*;

impl World {
    /// Begins to prefetch a prompt whose chunks other nodes hold; returns the ticket and the order.
    fn prefetch(&mut self, word: &str, holders: &[&[u16]]) -> (u64, Asked) {
        self.asks(self.session, Request::Prefetch(self.ask(word)));
        self.directory_says(holders);
        let asked = self.fetch();
        let Effect::Prefetching { started: Ok(started), .. } = self.next() else { panic!("it has begun") };
        (started.ticket, asked)
    }

    fn collect(&mut self, ticket: u64, wait: Wait) -> RequestId {
        self.asks(self.session, Request::Collect(Collect { ticket, wait }))
    }
}

#[test]
fn a_prefetch_is_collected_when_it_has_come() {
    let mut w = World::new(PEERS);
    let (ticket, asked) = w.prefetch("ab", &[&[2], &[2]]);
    assert_eq!(asked.class, Class::Prefetch);
    w.ended(asked.order, vec![here(1), here(1)]);
    assert!(w.is_idle(), "nobody has collected it");
    let request = w.collect(ticket, Wait::Complete);
    assert_eq!(w.leased(request).chunks, 2);
}

#[test]
fn a_prefetch_that_is_collected_early_becomes_urgent_and_then_a_lease() {
    let mut w = World::new(PEERS);
    let (ticket, asked) = w.prefetch("a", &[&[2]]);
    let request = w.collect(ticket, Wait::Complete);
    assert!(matches!(w.next(), Effect::Hurry(order) if order == asked.order));
    assert!(w.is_idle());
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(request).chunks, 1);
    let late = w.collect(ticket, Wait::Complete);
    assert!(matches!(w.next(), Effect::Refused { request, .. } if request == late), "a ticket ends once");
}

#[test]
fn whoever_does_not_wait_gets_what_is_here_and_the_rest_is_not_brought() {
    let mut w = World::new(PEERS);
    w.put("a");
    let (ticket, asked) = w.prefetch("ab", &[&[2]]);
    let request = w.collect(ticket, Wait::BestEffort);
    assert_eq!(w.leased(request).chunks, 1);
    assert!(matches!(w.next(), Effect::CancelOrder(order) if order == asked.order));
    w.ended(asked.order, Vec::new());
    assert!(w.is_at_rest());
}

#[test]
fn whoever_waits_for_a_while_gets_what_is_here_by_then() {
    let mut w = World::new(PEERS);
    let (ticket, _) = w.prefetch("a", &[&[2]]);
    let request = w.collect(ticket, Wait::TimeoutMs(10));
    assert!(matches!(w.next(), Effect::Hurry(_)));
    w.pass(Duration::from_millis(9));
    assert!(w.is_idle());
    w.pass(Duration::from_millis(1));
    assert_eq!(w.leased(request).chunks, 0);
}

#[test]
fn a_prefetch_that_is_cancelled_is_stopped_and_leaves_nothing() {
    let mut w = World::new(PEERS);
    let (ticket, asked) = w.prefetch("ab", &[&[2], &[2]]);
    let stranger = w.core.store.open_session(TenantId(0), ProcessId(1), 1 << 20);
    w.cancel(stranger, ticket);
    assert!(w.is_idle(), "it is not its own");
    w.cancel(w.session, ticket);
    assert!(matches!(w.next(), Effect::CancelOrder(order) if order == asked.order));
    w.ended(asked.order, vec![FAILED, FAILED]);
    assert!(w.is_at_rest());
}

#[test]
fn an_order_goes_on_as_long_as_somebody_waits_for_a_chunk_of_it() {
    let mut w = World::new(PEERS);
    let (ticket, asked) = w.prefetch("ab", &[&[2], &[2]]);
    let request = w.lease("a");
    w.directory_says(&[&[2]]);
    assert!(matches!(w.next(), Effect::Hurry(order) if order == asked.order), "a lease is more urgent");
    w.cancel(w.session, ticket);
    assert!(w.is_idle(), "the lease waits for one of its chunks");
    w.ended(asked.order, vec![here(1), FAILED]);
    assert_eq!(w.leased(request).chunks, 1);
}

#[test]
fn a_session_that_ends_leaves_nothing_of_what_it_asked_for() {
    let mut w = World::new(PEERS);
    let (_, asked) = w.prefetch("ab", &[&[2], &[2]]);
    let session = w.session;
    w.lease("c");
    w.tell(Event::Closed(session));
    let Effect::FindHolders { question, .. } = w.next() else { panic!("the directory") };
    assert!(matches!(w.next(), Effect::CancelOrder(order) if order == asked.order));
    w.tell(Event::HoldersFound { question, holders: vec![of(&[2])] });
    assert!(w.is_idle(), "nobody waits for the lease any more");
    w.ended(asked.order, vec![here(1), here(1)]);
    w.core.store.process_gone(ProcessId(0));
    let usage = w.core.store.usage();
    assert_eq!((usage.fetches, usage.leases), (0, 0));
}

#[test]
fn what_is_computed_sooner_than_it_comes_is_not_brought() {
    let mut w = World::new(PEERS);
    let request = w.lease("a");
    w.directory_says(&[&[2]]);
    let asked = w.fetch();
    w.now += Duration::from_secs(1);
    w.ended(asked.order, vec![here(1)]);
    w.leased(request);
    // Node 2 delivers a block a second; a chunk of 16 tokens is computed in a millisecond.
    let ask = Lookup { prefill_tokens_per_second: Some(16_000.0), ..w.ask("abc") };
    w.asks(w.session, Request::Prefetch(ask));
    w.directory_says(&[&[2], &[2]]);
    let Effect::Prefetching { started: Ok(started), .. } = w.next() else { panic!("it has begun") };
    assert_eq!((started.tokens, started.tokens_to_recompute), (16, 32));
    assert!(w.is_idle());
}

#[test]
fn a_prefetch_that_somebody_waits_for_is_collected_by_nobody_else() {
    let mut w = World::new(PEERS);
    let (ticket, asked) = w.prefetch("a", &[&[2]]);
    let first = w.collect(ticket, Wait::Complete);
    assert!(matches!(w.next(), Effect::Hurry(_)));
    let second = w.collect(ticket, Wait::Complete);
    assert!(matches!(w.next(), Effect::Refused { request, .. } if request == second));
    w.ended(asked.order, vec![here(1)]);
    assert_eq!(w.leased(first).chunks, 1);
}

#[test]
fn what_was_ordered_and_did_not_come_counts_for_nothing_when_loading_is_weighed() {
    let is_refused = |w: &mut World, order| w.tell(Event::OrderRefused(order));
    let fails = |w: &mut World, order| {
        w.ended(order, vec![FAILED; 7]);
        w.directory_says(&[&[][..]; 7]);
    };
    let ends: [fn(&mut World, OrderNumber); 2] = [is_refused, fails];
    for end in ends {
        let mut w = World::new(PEERS);
        let request = w.lease("a");
        w.directory_says(&[&[2]]);
        let asked = w.fetch();
        w.now += Duration::from_millis(100);
        w.ended(asked.order, vec![here(1)]);
        w.leased(request);
        let request = w.lease("bcdefgh");
        w.directory_says(&[&[2][..]; 7]);
        let asked = w.fetch();
        end(&mut w, asked.order);
        w.leased(request);
        // Node 2 delivers a block in 0.1 s; a chunk of 16 tokens is computed in 0.2 s.
        let ask = Lookup { prefill_tokens_per_second: Some(80.0), ..w.ask("xy") };
        w.asks(w.session, Request::Prefetch(ask));
        w.directory_says(&[&[2], &[2]]);
        w.fetch();
        let Effect::Prefetching { started: Ok(started), .. } = w.next() else { panic!("it has begun") };
        assert_eq!((started.tokens, started.tokens_to_recompute), (32, 0));
    }
}

#[test]
fn a_collection_that_is_given_up_is_answered() {
    let mut w = World::new(PEERS);
    let (ticket, asked) = w.prefetch("a", &[&[2]]);
    let request = w.collect(ticket, Wait::Complete);
    assert!(matches!(w.next(), Effect::Hurry(_)));
    w.cancel(w.session, ticket);
    assert!(matches!(w.refused(request), Refused::Unknown { what: "ticket", .. }));
    assert!(matches!(w.next(), Effect::CancelOrder(order) if order == asked.order));
    w.ended(asked.order, vec![FAILED]);
    assert!(w.is_at_rest());
}

#[test]
fn a_long_prefetch_comes_in_parts_whether_somebody_collects_it_or_not() {
    let peers = limits().peers.map(|peers| PeerStoreLimits { passing_bytes: 8 * BLOCK, ..peers });
    let mut w = World::with(StoreLimits { peers, disk: None, ..limits() }, PEERS);
    let (ticket, first) = w.prefetch("abcdefghij", &[&[2][..]; 10]);
    let mut came = first.chunks.len();
    assert!(came < 10);
    w.ended(first.order, first.chunks.iter().map(|_| here(1)).collect());
    let next = w.fetch();
    assert_eq!(next.class, Class::Prefetch);
    let request = w.collect(ticket, Wait::Complete);
    assert!(matches!(w.next(), Effect::Hurry(order) if order == next.order));
    came += next.chunks.len();
    w.ended(next.order, next.chunks.iter().map(|_| here(1)).collect());
    while came < 10 {
        let next = w.fetch();
        assert_eq!(next.class, Class::Decode, "somebody waits");
        came += next.chunks.len();
        w.ended(next.order, next.chunks.iter().map(|_| here(1)).collect());
    }
    let leased = w.leased(request);
    assert_eq!(leased.chunks, 10);
    w.core.store.release(w.session, leased.lease).unwrap();
    assert!(w.is_at_rest());
}

#[test]
fn nobody_waits_for_a_prefetch_for_longer_than_for_a_lease() {
    let mut w = World::new(PEERS);
    let (ticket, _) = w.prefetch("a", &[&[2]]);
    let request = w.collect(ticket, Wait::TimeoutMs(u64::MAX));
    assert!(matches!(w.next(), Effect::Hurry(_)));
    w.pass(DEADLINE);
    assert_eq!(w.leased(request).chunks, 0);
}

#[test]
fn what_is_in_memory_waits_for_no_slow_disk_when_loading_is_weighed() {
    let mut w = World::new(Sources { disk: Some(DEADLINE), ..PEERS });
    w.on_disk("x");
    let request = w.lease("x");
    let (read, _) = w.read();
    w.now += Duration::from_secs(1);
    w.tell(Event::ReadEnded { read, answer: read_here() });
    w.leased(request);
    w.put("a");
    // The disk delivers a block a second; a chunk of 16 tokens is computed in a millisecond.
    let ask = Lookup { prefill_tokens_per_second: Some(16_000.0), ..w.ask("a") };
    w.asks(w.session, Request::Prefetch(ask));
    let Effect::Prefetching { started: Ok(started), .. } = w.next() else { panic!("it has begun") };
    assert_eq!((started.tokens, started.tokens_to_recompute), (16, 0));
}

#[test]
fn a_prefetch_that_found_no_room_yet_is_not_done_and_whoever_collects_it_waits() {
    let peers = limits().peers.map(|peers| PeerStoreLimits { passing_bytes: 8 * BLOCK, ..peers });
    let mut w = World::with(StoreLimits { peers, disk: None, ..limits() }, PEERS);
    let first = w.lease("abcdefg");
    w.directory_says(&[&[2][..]; 7]);
    let asked = w.fetch();
    w.asks(w.session, Request::Prefetch(w.ask("xy")));
    w.directory_says(&[&[2], &[2]]);
    let Effect::Prefetching { started: Ok(started), .. } = w.next() else { panic!("it has begun") };
    let progress = w.asks(w.session, Request::Progress(started.ticket));
    let Response::Progress(progress) = w.answered(progress) else { panic!("the progress") };
    assert!(!progress.is_done, "nothing of it has come");
    let request = w.collect(started.ticket, Wait::Complete);
    assert!(w.is_idle());
    w.ended(asked.order, vec![here(1); asked.chunks.len()]);
    for asked in [w.fetch(), w.fetch()] {
        w.ended(asked.order, vec![here(1); asked.chunks.len()]);
    }
    assert_eq!((w.leased(first).chunks, w.leased(request).chunks), (7, 2));
}

#[test]
fn a_prefetch_that_finds_room_for_nothing_leaves_no_ticket() {
    let mut w = World::with(
        StoreLimits { extents: 1, object: None, ..limits() },
        Sources { disk: Some(DEADLINE), ..PEERS },
    );
    w.on_disk("x");
    w.put("abcd");
    let request = w.lease("abcd");
    assert_eq!(w.leased(request).chunks, 4, "all memory is leased");
    for _ in 0..10 {
        w.asks(w.session, Request::Prefetch(w.ask("x")));
        let Effect::Prefetching { started: Ok(started), .. } = w.next() else { panic!("it has begun") };
        assert_eq!((started.ticket, started.tokens), (0, 0));
    }
    w.core.bring.assert_is_at_rest();
}
