//! Tests of how much one peer is asked for at a time, and which request goes first.

use super::*;

#[test]
fn a_peer_is_asked_on_so_many_streams_at_a_time_and_each_peer_by_itself() {
    let mut node = Node::new(LIMITS);
    for number in 2..10 {
        let peer = node.peer(number);
        let all: Vec<_> = (0..4).map(|_| node.fetch(peer, 1, Class::Decode)).collect();
        assert_eq!(node.turns(), all[..2]);
        node.leave(all[1]);
        assert_eq!(node.turns(), all[2..3]);
        node.leave(all[0]);
        assert_eq!(node.turns(), all[3..]);
        assert_eq!(node.exchange.bytes_under_way(peer), 2 * UNIT);
    }
}

#[test]
fn credits_bound_the_bytes_that_are_asked_for_and_come_back() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let first = node.fetch(peer, 5, Class::Decode);
    let second = node.fetch(peer, 4, Class::Decode);
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![first], 5 * UNIT));
    node.leave(first);
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![second], 4 * UNIT));
    let third = node.fetch(peer, 4, Class::Decode);
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![third], 8 * UNIT));
    [first, second, second, third].into_iter().for_each(|request| node.leave(request));
    assert_eq!(node.exchange.bytes_under_way(peer), 0, "each gives back once");
}

#[test]
fn a_fetch_of_more_than_all_credits_goes_alone_and_one_of_nothing_needs_one() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let small = node.fetch(peer, 0, Class::Decode);
    let large = node.fetch(peer, 100, Class::Decode);
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![small], UNIT));
    node.leave(small);
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![large], 8 * UNIT));
    node.leave(large);
    assert_eq!(node.exchange.bytes_under_way(peer), 0);
}

#[test]
fn a_fetch_that_needs_much_is_passed_by_none_that_needs_little_until_it_gives_its_place_up() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let first = node.fetch(peer, 2, Class::Decode);
    let large = node.fetch(peer, 8, Class::Decode);
    let small = node.fetch(peer, 1, Class::Decode);
    assert_eq!(node.turns(), [first]);
    node.leave(large);
    assert_eq!(node.turns(), [small]);
    [first, small].into_iter().for_each(|request| node.leave(request));
    assert_eq!((node.turns(), node.exchange.bytes_under_way(peer)), (vec![], 0));
}

#[test]
fn a_tenant_with_many_fetches_leaves_the_next_stream_to_another_tenant() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let many: Vec<_> = (0..9).map(|_| node.fetch(peer, 4, Class::Decode)).collect();
    assert_eq!(node.turns(), many[..2]);
    // Much later than the head start of a fetch that an engine waits for.
    node.pass(ms(500));
    let of_other: Vec<_> = (0..2).map(|_| node.fetch_of(TenantId(1), peer, 1, Class::Prefetch)).collect();
    node.leave(many[0]);
    assert_eq!(node.turns(), of_other[..1]);
    node.leave(of_other[0]);
    assert_eq!(node.turns(), of_other[1..]);
    node.leave(many[1]);
    assert_eq!(node.turns(), many[2..3], "the first tenant has nothing under way, and came before");
}

/// Begins two fetches that take all streams, then lines up one fetch of each class.
fn lined_up(node: &mut Node) -> (PeerId, [RequestId; 4]) {
    let peer = node.peer(2);
    let [first, second] = [(); 2].map(|()| node.fetch(peer, 1, Class::Decode));
    node.pass(ms(1));
    let prefetch = node.fetch(peer, 1, Class::Prefetch);
    node.pass(ms(1));
    let decode = node.fetch(peer, 1, Class::Decode);
    assert_eq!(node.turns(), [first, second]);
    (peer, [first, second, prefetch, decode])
}

#[test]
fn what_an_engine_waits_for_goes_before_what_is_only_prefetched() {
    let mut node = Node::new(LIMITS);
    let (_, [first, second, prefetch, decode]) = lined_up(&mut node);
    node.leave(first);
    assert_eq!(node.turns(), [decode]);
    node.leave(second);
    assert_eq!(node.turns(), [prefetch]);
}

#[test]
fn a_prefetch_that_an_engine_comes_to_wait_for_counts_from_when_it_lined_up() {
    let mut node = Node::new(LIMITS);
    let (_, [first, _, prefetch, _]) = lined_up(&mut node);
    node.exchange.change_class(node.now, prefetch, Class::Decode);
    node.pass(ms(7));
    node.leave(first);
    let turn = Turn { class: Class::Decode, waited: ms(8), until: Some(node.now + DEADLINE) };
    assert_eq!(node.effects(), [Effect::Turn(prefetch, turn)]);
}

#[test]
fn a_small_fetch_whose_class_changes_before_a_large_one_goes_at_once() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let first = node.fetch(peer, 4, Class::Decode);
    let large = node.fetch(peer, 8, Class::Prefetch);
    let small = node.fetch(peer, 1, Class::Prefetch);
    assert_eq!(node.turns(), [first]);
    node.exchange.change_class(node.now, small, Class::Decode);
    assert_eq!(node.turns(), [small]);
    [first, small].into_iter().for_each(|request| node.leave(request));
    assert_eq!(node.turns(), [large]);
}

#[test]
fn batches_are_as_large_as_may_be_and_have_a_chunk_each() {
    let exchange = Exchange::new(LIMITS, 1);
    let batches = |sizes: &[u64]| exchange.batches(sizes.iter().map(|size| size * UNIT));
    assert_eq!(batches(&[]), [0; 0]);
    assert_eq!(batches(&[2, 2, 1, 3, 9, 1, 1]), [0, 2, 4, 5]);
    let many = vec![0; 2 * larder_protocol::limits::MAX_FETCH_CHUNKS + 1];
    let most = larder_protocol::limits::MAX_FETCH_CHUNKS;
    assert_eq!(batches(&many), [0, most, 2 * most]);
}
