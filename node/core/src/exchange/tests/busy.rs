//! Tests of fetches whose peer is busy.

use super::*;

const RETRY: RetryAfter = RetryAfter { retry_after_ms: 40 };

/// Begins a fetch of 4 credits, which gets its turn at once.
fn asked(node: &mut Node) -> (PeerId, RequestId) {
    let peer = node.peer(2);
    let fetch = node.fetch(peer, 4, Class::Prefetch);
    assert_eq!(node.turns(), [fetch]);
    (peer, fetch)
}

#[test]
fn a_busy_peer_is_asked_again_after_a_pause_that_holds_neither_stream_nor_credits() {
    let mut node = Node::new(LIMITS);
    let (peer, fetch) = asked(&mut node);
    assert!(node.exchange.is_busy(node.now, fetch, UNIT, RETRY));
    assert_eq!(node.exchange.bytes_under_way(peer), 0);
    node.pass(ms(29));
    assert_eq!(node.effects(), [], "the pause is three quarters of what was said at least");
    node.pass(ms(22));
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![fetch], UNIT), "the rest of it");
    node.leave(fetch);
    assert_eq!(node.exchange.bytes_under_way(peer), 0);
}

#[test]
fn nobody_waits_for_a_busy_peer_of_what_others_have() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let (tenant, class) = (TenantId(0), Class::Decode);
    let wanted = Wanted { tenant, bytes: 1, class, deadline: DEADLINE, has_others: true };
    let fetch = node.exchange.fetch(node.now, peer, wanted);
    assert!(!node.exchange.is_busy(node.now, fetch, 1, RETRY));
    node.leave(fetch);
    node.pass(DEADLINE);
    assert_eq!(node.turns(), [fetch], "once");
}

#[test]
fn the_deadline_counts_from_the_first_time_that_a_peer_is_asked_and_ends_the_pauses() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let before = [(); 2].map(|()| node.fetch(peer, 1, Class::Decode));
    let fetch = node.fetch(peer, 1, Class::Decode);
    node.pass(3 * DEADLINE);
    assert_eq!(node.turns(), before);
    before.into_iter().for_each(|request| node.leave(request));
    let until = node.now + DEADLINE;
    let mut times = 0;
    loop {
        let effects = node.effects();
        let [Effect::Turn(_, turn)] = effects[..] else { panic!("{effects:?}") };
        assert_eq!(turn.until, Some(until));
        times += 1;
        if !node.exchange.is_busy(node.now, fetch, UNIT, RETRY) {
            break;
        }
        node.pass(ms(126));
    }
    assert!((6..=12).contains(&times), "{times}");
    assert!(until < node.now + ms(126));
}

#[test]
fn a_class_changed_during_a_pause_counts_when_the_fetch_lines_up_again() {
    let mut node = Node::new(LIMITS);
    let (peer, fetch) = asked(&mut node);
    assert!(node.exchange.is_busy(node.now, fetch, UNIT, RETRY));
    let others = [(); 2].map(|()| node.fetch(peer, 1, Class::Decode));
    let prefetch = node.fetch(peer, 1, Class::Prefetch);
    node.exchange.change_class(node.now, fetch, Class::Decode);
    node.pass(ms(51));
    assert_eq!(node.turns(), others);
    node.leave(others[0]);
    assert_eq!(node.turns(), [fetch]);
    node.leave(fetch);
    assert_eq!(node.turns(), [prefetch]);
}

#[test]
fn a_fetch_that_leaves_in_its_pause_has_no_other_turn() {
    let mut node = Node::new(LIMITS);
    let (peer, fetch) = asked(&mut node);
    assert!(node.exchange.is_busy(node.now, fetch, UNIT, RETRY));
    node.leave(fetch);
    node.pass(DEADLINE);
    assert_eq!((node.effects(), node.exchange.bytes_under_way(peer)), (vec![], 0));
}

#[test]
fn pauses_are_as_long_as_is_said_and_longer_each_time_up_to_a_bound() {
    let mut exchange = Exchange::new(LIMITS, 1);
    let mut pause = BusyPause::default();
    let mut next = |retry_after_ms| {
        let retry = RetryAfter { retry_after_ms };
        exchange.pause(ms(0), &mut pause, retry, Duration::MAX).unwrap().as_secs_f64() * 1e3
    };
    for longest_ms in [5, 10, 20, 40, 80, 100, 100] {
        let (pause, longest_ms) = (next(5), f64::from(longest_ms));
        assert!((longest_ms * 0.75..longest_ms * 1.25).contains(&pause), "{pause} of {longest_ms} ms");
    }
    assert!(next(u64::MAX) < 126.0);
    let over = exchange.pause(ms(90), &mut BusyPause::default(), RETRY, ms(120));
    assert_eq!(over, None, "it would be over by then");
}

#[test]
fn chance_differs_each_time_and_stays_below_one() {
    let mut exchange = Exchange::new(LIMITS, 1);
    let some: Vec<f64> = (0..100).map(|_| exchange.chance()).collect();
    assert!(some.iter().all(|chance| (0.0..1.0).contains(chance)));
    assert!(some.windows(2).any(|pair| pair[0] != pair[1]));
}
