//! Tests of which peers are left out, and when they are tried again.

use super::*;
use crate::store::ids::TenantId;

const TENANT: TenantId = TenantId(0);

/// Plays a fetch that gets no answer within its deadline.
fn is_late(node: &mut Node, peer: PeerId, was_heard: bool) {
    let fetch = node.fetch(peer, 1, Class::Decode);
    node.pass(DEADLINE);
    node.exchange.fetch_is_late(node.now, fetch, was_heard);
    node.leave(fetch);
}

/// Plays a small request whose answer is late after `waited`.
fn small_is_late(node: &mut Node, peer: PeerId, waited: Duration, was_heard: bool) {
    let asked = node.now;
    node.pass(waited);
    node.exchange.is_late(node.now, peer, asked, was_heard);
}

#[test]
fn small_answers_that_are_late_take_no_peer_out_of_fetching_that_is_heard() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    for waited in [1, 50, 600, 5_000, 60_000] {
        small_is_late(&mut node, peer, ms(waited), true);
    }
    assert_eq!(node.effects(), []);
    let fetch = node.fetch(peer, 1, Class::Decode);
    assert_eq!(node.turns(), [fetch]);
}

#[test]
fn a_peer_of_which_nothing_at_all_is_heard_for_long_is_silent_and_asked_for_a_sign_of_life() {
    let mut node = Node::new(LIMITS);
    let [peer, other] = [2, 3].map(|number| node.peer(number));
    small_is_late(&mut node, peer, ms(500), false);
    let effects = node.effects();
    let [Effect::Silent(silent), Effect::Probe { peer: probed, .. }] = effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!((silent, probed), (peer, peer));
    assert!(node.is_left_out(peer) && !node.is_left_out(other));
}

#[test]
fn a_fetch_of_which_nothing_is_heard_makes_a_peer_silent_at_once() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    is_late(&mut node, peer, false);
    assert!(node.effects().contains(&Effect::Silent(peer)) && node.is_left_out(peer));
}

#[test]
fn a_short_silence_makes_a_peer_doubted_and_it_is_asked_for_a_sign_of_life_once() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    small_is_late(&mut node, peer, ms(499), false);
    small_is_late(&mut node, peer, ms(10), false);
    let probe = node.probe();
    assert!(!node.is_left_out(peer), "it may be scheduled late");
    node.probed(probe, true, true);
    assert_eq!((node.effects(), node.is_left_out(peer)), (vec![], false), "it answers");

    small_is_late(&mut node, peer, ms(50), false);
    let probe = node.probe();
    node.probed(probe, false, true);
    assert_eq!((node.effects(), node.is_left_out(peer)), (vec![], false), "it is heard");

    small_is_late(&mut node, peer, ms(50), false);
    let probe = node.probe();
    node.probed(probe, false, false);
    assert_eq!(node.effects()[0], Effect::Silent(peer));
    assert!(node.is_left_out(peer));
}

#[test]
fn a_peer_that_falls_silent_while_it_is_doubted_comes_back_by_the_answer_to_another_probe() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    small_is_late(&mut node, peer, ms(50), false);
    let doubt = node.probe();
    node.exchange.falls_silent(node.now, peer);
    let probe = node.probe();
    node.probed(doubt, true, true);
    node.probed(doubt, false, false);
    assert!(node.is_left_out(peer));
    node.probed(probe, true, true);
    assert_eq!((node.effects(), node.is_left_out(peer)), (vec![Effect::Answers(peer)], false));
}

#[test]
fn a_silent_peer_is_asked_again_and_again_with_longer_pauses_until_it_answers() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    node.exchange.falls_silent(node.now, peer);
    for pause_ms in [20, 40, 80, 160, 320, 640, 1_000, 1_000] {
        let probe = node.probe();
        // Packets that come do not count as an answer.
        node.probed(probe, false, true);
        node.pass(ms(pause_ms - 1));
        assert_eq!(node.effects(), [], "before {pause_ms} ms");
        node.pass(ms(pause_ms / 2 + 1));
        assert!(node.is_left_out(peer));
    }
    let probe = node.probe();
    node.probed(probe, true, true);
    node.probed(probe, true, true);
    assert_eq!((node.effects(), node.is_left_out(peer)), (vec![Effect::Answers(peer)], false));
}

#[test]
fn late_fetches_in_a_row_leave_a_peer_out_that_is_heard_and_it_is_tried_again_later() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    for late in 0..3 {
        assert!(!node.is_left_out(peer), "after {late}");
        is_late(&mut node, peer, true);
    }
    assert!(node.is_left_out(peer) && node.effects().contains(&Effect::Silent(peer)));
    node.pass(ms(999));
    assert_eq!(node.effects(), [], "it would answer at once");
    node.pass(ms(1));
    let probe = node.probe();
    node.probed(probe, true, true);
    assert!(!node.is_left_out(peer));
    is_late(&mut node, peer, true);
    assert!(node.is_left_out(peer), "it had one more try");
}

#[test]
fn a_chunk_that_comes_begins_the_row_of_late_fetches_anew() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    for _ in 0..5 {
        is_late(&mut node, peer, true);
        is_late(&mut node, peer, true);
        node.exchange.heard(peer);
    }
    assert!(!node.is_left_out(peer));
}

#[test]
fn fetches_that_are_late_together_count_as_one() {
    let mut node = Node::new(ExchangeLimits { streams_per_peer: 8, ..LIMITS });
    let peer = node.peer(2);
    let together = [(); 8].map(|()| node.fetch(peer, 1, Class::Decode));
    for fetch in together {
        node.pass(DEADLINE);
        node.exchange.fetch_is_late(node.now, fetch, true);
    }
    assert!(!node.is_left_out(peer));
}

#[test]
fn what_was_asked_shortly_before_its_end_says_nothing_of_a_peer() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    for _ in 0..5 {
        let fetch = node.fetch(peer, 1, Class::Decode);
        node.pass(DEADLINE / 2 - ms(1));
        node.exchange.fetch_is_late(node.now, fetch, true);
        node.leave(fetch);
    }
    assert!(!node.is_left_out(peer));
}

#[test]
fn what_waits_for_its_turn_at_a_silent_peer_hears_that_it_cannot_be_asked() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let all: Vec<_> = (0..4).map(|_| node.fetch(peer, 1, Class::Decode)).collect();
    assert_eq!(node.turns(), all[..2]);
    node.exchange.falls_silent(node.now, peer);
    all.iter().take(3).for_each(|&request| node.leave(request));
    let effects = node.effects();
    let untold = |effect: &Effect| match effect {
        Effect::Turn(request, Turn { until: None, .. }) => Some(*request),
        _ => None,
    };
    assert_eq!(effects.iter().filter_map(untold).collect::<Vec<_>>(), all[2..], "{effects:?}");
}

#[test]
fn a_peer_that_comes_back_in_another_life_begins_anew() {
    let mut node = Node::new(LIMITS);
    let before = node.peer(2);
    let [asked, other, waits] = [(); 3].map(|()| node.fetch(before, 4, Class::Decode));
    assert_eq!(node.turns(), [asked, other]);
    let follow = node.exchange.follow(before, TENANT).unwrap();
    node.exchange.falls_silent(node.now, before);
    let probe = node.probe();

    node.exchange.set_table(table([(1, 10), (2, 11), (3, 10)]), NodeNumber(1));
    let turn = Turn { class: Class::Decode, waited: ms(0), until: None };
    assert_eq!(node.effects(), [Effect::Turn(waits, turn), Effect::Gone(before)]);
    assert!(!node.exchange.follows_on(follow, true));

    let after = node.peer(2);
    assert_eq!(after.incarnation, 11);
    let fetches = [(); 3].map(|()| node.fetch(after, 4, Class::Decode));
    assert_eq!(node.turns(), fetches[..2], "it has all its streams and credits");
    [asked, other, waits, follow].into_iter().for_each(|request| node.leave(request));
    node.probed(probe, false, false);
    node.exchange.is_late(node.now, before, ms(0), false);
    node.exchange.fetch_is_late(node.now, asked, false);
    let late = node.fetch(before, 1, Class::Decode);
    assert_eq!(node.effects(), [Effect::Turn(late, turn)], "the other life is nobody");
    assert_eq!(node.exchange.bytes_under_way(after), 8 * UNIT, "and gives back nothing to this one");
    assert_eq!(node.exchange.peer(NodeNumber(4)), Err(NoPeer::NotAMember));
    assert_eq!(node.exchange.peer(NodeNumber(1)), Err(NoPeer::NotAMember), "nobody asks himself");
}

#[test]
fn the_same_life_in_a_new_table_keeps_what_it_has_and_one_that_is_forgotten_begins_anew() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let fetch = node.fetch(peer, 4, Class::Decode);
    node.exchange.falls_silent(node.now, peer);
    node.exchange.set_table(table([(1, 10), (2, 10)]), NodeNumber(1));
    assert!(node.is_left_out(peer) && node.exchange.bytes_under_way(peer) == 4 * UNIT);
    node.exchange.begin_anew();
    assert!(node.effects().contains(&Effect::Gone(peer)));
    assert!(!node.is_left_out(peer));
    node.leave(fetch);
    assert_eq!(node.exchange.bytes_under_way(peer), 0);
}

#[test]
fn a_follow_ends_after_some_late_answers_in_a_row_or_when_its_peer_is_silent() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let follow = node.exchange.follow(peer, TENANT).unwrap();
    let go_on = [true, false, false, true, false, false, false];
    let goes_on: Vec<_> = go_on.iter().map(|&answers| node.exchange.follows_on(follow, answers)).collect();
    assert_eq!(goes_on, [true, true, true, true, true, true, false]);
    let other = node.exchange.follow(peer, TENANT).unwrap();
    assert!(node.exchange.follows_on(other, true));
    node.exchange.falls_silent(node.now, peer);
    assert!(!node.exchange.follows_on(other, true));
}

#[test]
fn follows_of_one_peer_are_bounded_and_keep_no_fetch_from_passing() {
    let mut node = Node::new(LIMITS);
    let [peer, other] = [2, 3].map(|number| node.peer(number));
    let follows = follow_all(&mut node, peer, TENANT);
    assert_eq!(follows.len(), 64);
    assert!(node.exchange.follow(other, TENANT).is_some());
    let fetch = node.fetch(peer, 1, Class::Decode);
    assert_eq!(node.turns(), [fetch]);
    node.leave(follows[5]);
    node.leave(follows[5]);
    assert_eq!(follow_all(&mut node, peer, TENANT).len(), 1);
}

#[test]
fn a_tenant_that_follows_all_it_can_leaves_places_for_the_others() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    let follows = [1, 2, 3].map(|tenant| follow_all(&mut node, peer, TenantId(tenant)));
    assert_eq!(follows.each_ref().map(Vec::len), [64, 32, 16]);
    follows[0].iter().for_each(|&follow| node.leave(follow));
    assert_eq!(follow_all(&mut node, peer, TenantId(1)).len(), 40, "as many as are left");
    assert_eq!(follow_all(&mut node, peer, TenantId(4)).len(), 20);
}

/// Follows a peer's chunks for a tenant, as many as the tenant may.
fn follow_all(node: &mut Node, peer: PeerId, tenant: TenantId) -> Vec<RequestId> {
    std::iter::from_fn(|| node.exchange.follow(peer, tenant)).collect()
}

/// A table of nodes 1 to 9; these of them are suspect.
fn with_suspects(suspects: &[u16]) -> Arc<Table> {
    let mut table = Table::clone(&table((1..10).map(|node| (node, 10))));
    for member in &mut table.members {
        if suspects.contains(&member.number.0) {
            member.state = MemberState::Suspect;
        }
    }
    Arc::new(table)
}

#[test]
fn the_witnesses_of_a_suspect_are_the_next_four_members_that_are_not_suspect() {
    let of = |suspects: &[u16], suspect| {
        let table = with_suspects(suspects);
        witnesses(&table, NodeNumber(suspect)).map(|node| node.0).collect::<Vec<_>>()
    };
    assert_eq!(of(&[3], 3), [4, 5, 6, 7]);
    assert_eq!(of(&[8, 1, 2], 8), [9, 3, 4, 5], "others that are suspect say nothing");
    assert_eq!(of(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 3), [0; 0]);
    assert_eq!(of(&[1, 2, 3, 4, 5, 6, 7, 8], 3), [9]);
}

#[test]
fn a_witness_asks_a_suspect_for_a_sign_of_life_and_finds_it_silent() {
    let mut node = Node::new(LIMITS);
    let own = NodeNumber(1);
    node.exchange.set_table(with_suspects(&[3]), own);
    assert_eq!(node.effects(), [], "four others stand nearer");
    node.exchange.set_table(with_suspects(&[8]), own);
    let probe = node.probe();
    assert_eq!(probe.0, PeerId { node: NodeNumber(8), incarnation: 10 });
    node.exchange.set_table(with_suspects(&[8]), own);
    assert_eq!(node.effects(), [], "one question is enough");
    node.probed(probe, false, false);
    assert!(node.effects().contains(&Effect::Silent(probe.0)) && node.is_left_out(probe.0));
}

#[test]
fn a_suspect_that_answers_its_witness_is_not_left_out_and_asked_again_with_the_next_table() {
    let mut node = Node::new(LIMITS);
    node.exchange.set_table(with_suspects(&[8]), NodeNumber(1));
    let probe = node.probe();
    node.probed(probe, true, true);
    assert!(!node.is_left_out(probe.0));
    assert_eq!(node.effects(), []);
    node.exchange.set_table(with_suspects(&[8, 9]), NodeNumber(1));
    let probes = node.effects();
    assert_eq!(probes.len(), 2, "{probes:?}");
}

#[test]
fn connections_to_a_node_that_left_are_closed() {
    let mut node = Node::new(LIMITS);
    let open = |node: &mut Node, peer: &str| node.exchange.connections.opened(node.now, peer, Dialler::Here);
    let (gone, _) = (open(&mut node, "node-3"), open(&mut node, "node-2"));
    node.exchange.set_table(table([(1, 10), (2, 10)]), NodeNumber(1));
    assert_eq!(node.exchange.connections.poll_close(), Some((gone, Closing::Gone)));
    assert_eq!(node.exchange.connections.poll_close(), None);
}

#[test]
fn a_peer_that_answered_again_is_asked_at_once_when_it_cannot_be_reached() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    (0..3).for_each(|_| is_late(&mut node, peer, true));
    node.effects();
    node.pass(ms(1_000));
    let probe = node.probe();
    node.probed(probe, true, true);
    node.effects();
    node.exchange.falls_silent(node.now, peer);
    assert_eq!(node.probe().0, peer, "it was late before, but it is not late now");
}

#[test]
fn a_late_answer_to_an_earlier_question_says_nothing_of_a_doubted_peer() {
    let mut node = Node::new(LIMITS);
    let peer = node.peer(2);
    small_is_late(&mut node, peer, ms(50), false);
    let first = node.probe();
    node.probed(first, true, true);
    small_is_late(&mut node, peer, ms(50), false);
    let second = node.probe();
    node.probed(first, false, false);
    assert_eq!((node.effects(), node.is_left_out(peer)), (vec![], false));
    node.probed(second, false, false);
    assert!(node.is_left_out(peer));
}
