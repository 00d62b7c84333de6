//! A membership that is one of several: it follows, is elected, gathers, and leads only while its right lasts.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use larder_coordinator::membership::{Beat, DurableState, JoinRefused, Membership, Patience};
use larder_protocol::limits::MAX_INCARNATION;
use larder_protocol::membership::{Heartbeat, Join};
use larder_protocol::table::{Epoch, MemberState, NodeNumber, Table};

const PATIENCE: Patience = Patience { remember_lost_ms: 60_000, ..Patience::USUAL };

fn join(incarnation: u64, epoch: Epoch) -> Join {
    let address = ([10, 0, 0, incarnation as u8], 1).into();
    Join { incarnation, epoch, peer: address, http: address, devices: 1, weight: 1 }
}

fn candidate(state: DurableState) -> Membership {
    Membership::candidate(PATIENCE, state, 0)
}

/// A leader of term 1 with the nodes `a`, `b` and `c`, and its table.
fn leader() -> (Membership, Arc<Table>) {
    let mut leader = candidate(DurableState::default());
    leader.lead(1, 10_000, 0);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        leader.join(name, &join(incarnation, Epoch::default()), 0).unwrap();
    }
    let table = leader.tick(PATIENCE.grace_ms).unwrap();
    (leader, table)
}

#[test]
fn a_coordinator_that_does_not_lead_lets_nobody_join_and_makes_no_table() {
    let mut follower = candidate(DurableState::default());
    assert_eq!(follower.join("a", &join(1, Epoch::default()), 0), Err(JoinRefused::NotLeading));
    let (_, table) = leader();
    assert!(follower.follow(&table, 10));
    assert!(!follower.follow(&table, 20), "it is no news");
    assert_eq!((follower.table(), follower.report(30).len()), (table, 3));
    let beat = Heartbeat { epoch: Epoch::default(), silent: Vec::new() };
    assert_eq!(follower.heartbeat(NodeNumber(1), 1, &beat, 40), Beat::NotLeading);
    assert_eq!(follower.tick(60_000), None, "and it removes nobody");
    assert_eq!(follower.report(60_000).len(), 3);
}

#[test]
fn a_member_that_the_leader_removed_is_lost_for_the_next_leader_too_and_one_that_left_is_not() {
    let (mut leader, table) = leader();
    let lost = |membership: &Membership, now| -> Vec<String> {
        membership.lost(now).into_iter().map(|(lost, _)| lost.member.name).collect()
    };
    let mut follower = candidate(DurableState::default());
    follower.follow(&table, 3_000);
    let beat = Heartbeat { epoch: table.epoch, silent: Vec::new() };
    leader.leave(NodeNumber(2), 2);
    for now in (3_500..=40_000).step_by(500) {
        leader.lead(1, now + 1_000, now);
        leader.heartbeat(NodeNumber(1), 1, &beat, now);
        if let Some(table) = leader.tick(now) {
            follower.follow(&table, now);
        }
    }
    assert_eq!(
        (lost(&leader, 40_000), lost(&follower, 40_000)),
        (vec!["c".to_owned()], vec!["c".to_owned()])
    );
    follower.lead(2, 50_000, 41_000);
    assert_eq!(lost(&follower, 41_000), ["c"]);
    // It comes back to a leader that this coordinator follows.
    let mut third = candidate(follower.state());
    third.lead(3, 60_000, 42_000);
    third.join("c", &join(4, Epoch::default()), 42_000).unwrap();
    let back = third.tick(50_000).unwrap();
    assert!(follower.follow(&back, 50_000));
    assert_eq!(lost(&follower, 50_000), Vec::<String>::new());
}

#[test]
fn a_member_that_was_removed_while_a_coordinator_was_away_is_lost_for_it_too() {
    let (mut leader, table) = leader();
    leader.lead(1, 100_000, 3_100);
    leader.drains(NodeNumber(2), 2, true);
    let draining = leader.tick(3_100).unwrap();
    let mut away = candidate(DurableState::default());
    away.follow(&draining, 3_100);
    leader.leave(NodeNumber(2), 2);
    let beat = Heartbeat { epoch: table.epoch, silent: Vec::new() };
    for now in (3_500..=40_000).step_by(500) {
        leader.heartbeat(NodeNumber(1), 1, &beat, now);
        leader.tick(now);
    }
    let lost = |membership: &Membership| -> Vec<String> {
        membership.lost(41_000).into_iter().map(|(lost, _)| lost.member.name).collect()
    };
    // It follows again; or it leads, and a node brings the last table, also if the former leader has answered it all the time.
    let mut next = candidate(away.state());
    let mut in_touch = candidate(DurableState::default());
    in_touch.follow(&draining, 3_100);
    (3_500..=41_000).step_by(500).for_each(|now| in_touch.hears_leader(now));
    assert!(away.follow(&leader.table(), 41_000));
    for next in [&mut next, &mut in_touch] {
        next.lead(2, 100_000, 41_000);
        assert!(next.adopt(&leader.table(), 41_000));
    }
    assert_eq!([lost(&away), lost(&next), lost(&in_touch)], [["c"], ["c"], ["c"]], "`b` has drained");
}

#[test]
fn a_node_that_leaves_between_two_tables_or_leaders_is_not_lost() {
    let (mut leader, table) = leader();
    leader.lead(1, 100_000, 3_100);
    let mut follower = candidate(DurableState::default());
    follower.follow(&table, 3_100);
    // The leader answers for long without a new table. Then two tables come as one.
    for now in (3_500..=60_000).step_by(1_000) {
        follower.hears_leader(now);
    }
    for (member, now) in [(2, 60_100), (3, 60_200)] {
        leader.leave(NodeNumber(member), u64::from(member));
        leader.tick(now).unwrap();
    }
    assert_eq!(leader.table().epoch.number, table.epoch.number + 2);
    let mut next = candidate(DurableState::default());
    assert!(follower.follow(&leader.table(), 60_300) && next.follow(&leader.table(), 60_300));
    assert!(follower.lost(60_300).is_empty());
    // The last node says goodbye to a new leader before its first table.
    next.lead(2, 100_000, 63_000);
    next.join("d", &join(4, leader.table().epoch), 63_100).unwrap();
    next.join("a", &join(1, leader.table().epoch), 63_100).unwrap();
    next.leave(NodeNumber(1), 1);
    let first = next.tick(63_000 + PATIENCE.grace_ms).unwrap();
    follower.hears_leader(64_000);
    assert!(follower.follow(&first, 66_100));
    assert_eq!((first.members.len(), follower.lost(66_100).len(), next.lost(66_100).len()), (1, 0, 0));
    // A coordinator that starts again and finds nothing new knows as much as the others.
    let mut again = candidate(follower.state());
    again.follow(&first, 100);
    let gone = Table { epoch: Epoch { term: 3, number: 2 }, members: Vec::new(), homes: Vec::new() };
    assert!(again.follow(&Arc::new(gone), 200) && again.lost(200).is_empty());
}

#[test]
fn a_leader_that_is_brought_a_table_remembers_the_later_life_that_joined_it() {
    let (_, table) = leader();
    let mut next = candidate(DurableState::default());
    next.lead(2, 100_000, 0);
    let number = next.join("a", &join(9, Epoch::default()), 10).unwrap().number;
    assert!(next.adopt(&table, 20));
    next.leave(number, 9);
    assert_eq!(next.join("a", &join(5, table.epoch), 30), Err(JoinRefused::Outdated(10)));
}

#[test]
fn a_leader_whose_right_is_over_makes_no_table_until_it_is_prolonged() {
    let (mut leader, table) = leader();
    leader.join("d", &join(4, Epoch::default()), 9_999).unwrap();
    assert_eq!(leader.tick(10_000), None);
    assert_eq!(leader.join("e", &join(5, Epoch::default()), 10_000), Err(JoinRefused::NotLeading));
    leader.lead(1, 20_000, 10_100);
    let next = leader.tick(10_100).unwrap();
    assert_eq!((next.epoch.term, next.epoch.number), (1, table.epoch.number + 1));
    // A table that was made too late is made again, under another number.
    leader.join("e", &join(5, Epoch::default()), 10_200).unwrap();
    let late = leader.tick(10_200).unwrap();
    leader.resign();
    assert_eq!(leader.tick(10_300), None);
    leader.lead(1, 20_000, 10_400);
    assert!(leader.tick(10_400).unwrap().epoch > late.epoch);
}

#[test]
fn a_new_leader_waits_for_the_members_and_then_moves_no_partition() {
    let (first, table) = leader();
    let mut next = candidate(first.state());
    next.lead(2, 100_000, 0);
    for (name, incarnation) in [("a", 1), ("b", 2)] {
        next.join(name, &join(incarnation, table.epoch), 100).unwrap();
        assert_eq!(next.tick(100), None, "not all are back");
    }
    next.join("c", &join(3, table.epoch), 200).unwrap();
    let after = next.tick(200).unwrap();
    assert_eq!((&after.homes, &after.members), (&table.homes, &table.members));
    assert_eq!(after.epoch, Epoch { term: 2, number: 1 });
}

#[test]
fn a_new_leader_waits_no_longer_than_its_grace_time_and_removes_nobody_in_it() {
    let (first, table) = leader();
    let mut next = candidate(first.state());
    next.lead(2, 100_000, 50_000);
    assert_eq!(next.tick(50_000 + PATIENCE.grace_ms - 1), None);
    let after = next.tick(50_000 + PATIENCE.grace_ms).unwrap();
    assert_eq!((&after.homes, &after.members), (&table.homes, &table.members));
    assert_eq!((next.counts().removals, next.counts().moved_partitions), (0, 0));
}

#[test]
fn a_leader_without_state_adopts_the_highest_table_of_an_earlier_term() {
    let (mut first, older) = leader();
    first.join("d", &join(4, Epoch::default()), 4_000).unwrap();
    let table = first.tick(4_000).unwrap();
    let mut next = candidate(DurableState::default());
    next.lead(2, 100_000, 0);
    // A new node comes before the nodes that know the table, and is given a number that is another node's.
    let new = next.join("new", &join(9, Epoch::default()), 10).unwrap();
    // So is a member that comes back before the table.
    let early = next.join("c", &join(3, Epoch::default()), 15).unwrap();
    assert!(next.wants(older.epoch) && next.wants(table.epoch));
    assert!(next.adopt(&older, 20) && next.adopt(&table, 30) && !next.adopt(&older, 40));
    let beat = Heartbeat { epoch: Epoch::default(), silent: Vec::new() };
    for (number, incarnation) in [(new.number, 9), (early.number, 3)] {
        assert_eq!(next.heartbeat(number, incarnation, &beat, 50), Beat::Removed, "it joins again");
    }
    let own = Table { epoch: Epoch { term: 2, number: 9 }, ..Table::clone(&table) };
    assert!(!next.adopt(&Arc::new(own), 60), "nobody else has tables of its term");
    for member in &table.members {
        let join = Join { peer: member.peer, http: member.http, ..join(member.incarnation, table.epoch) };
        assert_eq!(next.join(&member.name, &join, 70).unwrap().number, member.number);
    }
    let after = next.tick(80).unwrap();
    assert_eq!((&after.homes, &after.members), (&table.homes, &table.members));
    assert!(!next.wants(table.epoch) && !next.adopt(&table, 90), "it has made its first table");
}

#[test]
fn a_leader_without_state_waits_for_the_first_node_however_late_it_comes_with_its_table() {
    let (_, table) = leader();
    let mut next = candidate(DurableState::default());
    next.lead(2, 1_000_000, 0);
    let late = 10 * PATIENCE.grace_ms;
    assert_eq!(next.tick(late), None, "a table without members tells nobody anything");
    next.join("c", &join(3, table.epoch), late).unwrap();
    assert!(next.wants(table.epoch));
    assert_eq!(next.tick(late + 100), None, "it may bring its table");
    assert!(next.adopt(&table, late + 200));
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        next.join(name, &join(incarnation, table.epoch), late + 300).unwrap();
    }
    let after = next.tick(late + 300).unwrap();
    assert_eq!((&after.homes, &after.members), (&table.homes, &table.members));
    // If no node knows a table, the leader waits for nobody.
    let mut first = candidate(DurableState::default());
    first.lead(1, 1_000_000, 0);
    first.join("a", &join(1, Epoch::default()), late).unwrap();
    assert!(first.tick(late).is_some());
}

#[test]
fn a_leader_that_hears_of_a_later_table_than_its_own_says_so_and_a_follower_takes_no_earlier_one() {
    let (mut leader, table) = leader();
    let later = Epoch { term: 7, number: 1 };
    assert_eq!(leader.join("d", &join(4, later), 4_000), Err(JoinRefused::LaterTerm(7)));
    let beat = |epoch| Heartbeat { epoch, silent: Vec::new() };
    assert_eq!(leader.heartbeat(NodeNumber(1), 1, &beat(later), 4_000), Beat::LaterTerm(7));
    assert_eq!(leader.heartbeat(NodeNumber(1), 1, &beat(table.epoch), 4_000), Beat::Heard);
    leader.resign();
    let newer = Table { epoch: later, ..Table::clone(&table) };
    assert!(leader.follow(&Arc::new(newer), 5_000));
    let older = Table { epoch: Epoch { term: 1, number: 99 }, ..Table::clone(&table) };
    assert!(!leader.follow(&Arc::new(older), 5_100));
    assert_eq!(leader.table().epoch, later);
}

#[test]
fn a_node_that_knows_ever_later_terms_is_believed_once_in_a_while() {
    let (mut leader, _) = leader();
    let beat = |term| Heartbeat { epoch: Epoch { term, number: 0 }, silent: Vec::new() };
    let mut lead = |term: u64, now| {
        leader.resign();
        leader.lead(term, 1_000_000, now);
        [(1, 1), (2, 2), (3, 3)].map(|(number, incarnation)| {
            // Each knows a table that is later than this leader's term.
            leader.heartbeat(NodeNumber(number), incarnation, &beat(term + u64::from(number)), now)
        })
    };
    assert_eq!(lead(1, 4_000), [Beat::LaterTerm(2), Beat::LaterTerm(3), Beat::LaterTerm(4)]);
    assert_eq!(lead(5, 5_000), [Beat::Heard; 3], "the new term was after the terms that they knew");
    assert!(leader.tick(5_000).is_some(), "so the table comes");
    assert_eq!(
        leader.join("a", &join(1, Epoch { term: 9, number: 0 }), 6_000).map(|joined| joined.number),
        Ok(NodeNumber(1))
    );
    let beat = leader.heartbeat(NodeNumber(1), 1, &beat(9), 64_000);
    assert_eq!(beat, Beat::LaterTerm(9), "a minute later it counts again");
}

#[test]
fn a_table_that_no_coordinator_can_have_made_is_not_taken_from_a_node() {
    let (_, table) = leader();
    let other = |change: fn(&mut Table)| {
        let mut other = Table::clone(&table);
        change(&mut other);
        Arc::new(other)
    };
    let adopts = |table: &Arc<Table>| {
        let mut next = candidate(DurableState::default());
        next.lead(2, 1_000_000, 0);
        next.adopt(table, 10).then_some(next)
    };
    for wrong in [
        other(|table| table.members[0].incarnation = MAX_INCARNATION + 1),
        other(|table| table.members[2].number = NodeNumber::THIS_NODE),
        other(|table| table.members[1].name = table.members[0].name.clone()),
    ] {
        assert!(adopts(&wrong).is_none());
    }
    // A node that lies about the life of another one does not lock it out.
    let mut next = adopts(&other(|table| table.members[0].incarnation = MAX_INCARNATION)).unwrap();
    (100..3_000).step_by(100).for_each(|now| _ = next.tick(now));
    assert_eq!(next.join("a", &join(1, table.epoch), 3_000).map(|joined| joined.number), Ok(NodeNumber(1)));
}

#[test]
fn a_member_whose_drain_ended_while_nobody_led_has_left_and_is_not_lost() {
    let (mut first, _) = leader();
    first.drains(NodeNumber(2), 2, true);
    let table = first.tick(4_000).unwrap();
    let mut next = candidate(DurableState::default());
    next.follow(&table, 4_000);
    let mut follower = candidate(DurableState::default());
    follower.follow(&table, 4_000);
    // The node leaves while nobody leads, and its goodbye is lost. Another node dies meanwhile.
    next.lead(2, 1_000_000, 10_000);
    next.join("a", &join(1, table.epoch), 10_000).unwrap();
    let beat = Heartbeat { epoch: Epoch::default(), silent: Vec::new() };
    let mut left_at = None;
    for now in (10_000..=60_000).step_by(500) {
        next.heartbeat(NodeNumber(1), 1, &beat, now);
        if let Some(table) = next.tick(now) {
            follower.follow(&table, now);
            if table.member(NodeNumber(2)).is_none() {
                left_at = left_at.or(Some(now));
            }
        }
    }
    assert_eq!(left_at, Some(10_000 + PATIENCE.grace_ms + PATIENCE.suspect_after_ms));
    assert_eq!((next.counts().leaves, next.counts().removals), (1, 1));
    for (who, membership) in [("leader", &next), ("follower", &follower)] {
        let lost: Vec<String> =
            membership.lost(60_000).into_iter().map(|(lost, _)| lost.member.name).collect();
        assert_eq!(lost, ["c"], "for the {who}");
    }
}

#[test]
fn a_member_that_drains_and_comes_back_to_a_new_leader_stays() {
    let (mut first, _) = leader();
    first.drains(NodeNumber(2), 2, true);
    let table = first.tick(4_000).unwrap();
    let mut next = candidate(first.state());
    next.lead(2, 1_000_000, 10_000);
    next.join("b", &join(2, table.epoch), 10_000).unwrap();
    next.drains(NodeNumber(2), 2, true);
    for now in (10_000..=30_000).step_by(500) {
        let beat = Heartbeat { epoch: Epoch::default(), silent: Vec::new() };
        next.heartbeat(NodeNumber(2), 2, &beat, now);
        next.tick(now);
    }
    assert_eq!(next.table().member(NodeNumber(2)).unwrap().state, MemberState::Draining);
}
