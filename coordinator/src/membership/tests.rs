//! Membership in virtual time.

use std::net::SocketAddr;

use super::*;

fn patience() -> Patience {
    Patience { remember_lost_ms: 100_000, ..Patience::USUAL }
}

fn join(incarnation: u64) -> Join {
    let address: SocketAddr = ([127, 0, 0, 1], 1).into();
    Join { incarnation, epoch: Epoch::default(), peer: address, http: address, devices: 1, weight: 1 }
}

fn beat() -> Heartbeat {
    Heartbeat { epoch: Epoch::default(), silent: Vec::new() }
}

/// Ticks every 100 ms until `end`; returns the last table, if any came.
fn run(membership: &mut Membership, from: Millis, end: Millis) -> Option<Arc<Table>> {
    (from..=end).step_by(100).filter_map(|now| membership.tick(now)).last()
}

fn cluster(nodes: u64) -> (Membership, Vec<NodeNumber>) {
    let mut membership = Membership::new(patience(), DurableState::default(), 0);
    let names = (0..nodes).map(|node| format!("node-{node}"));
    let numbers = names.map(|name| membership.join(&name, &join(1), 0).unwrap().number).collect();
    (membership, numbers)
}

#[test]
fn nodes_that_join_together_make_one_table() {
    let (mut membership, numbers) = cluster(3);
    let table = membership.tick(10).unwrap();
    assert_eq!(table.epoch, Epoch { term: 1, number: 1 });
    assert_eq!(table.members.iter().map(|member| member.number).collect::<Vec<_>>(), numbers);
    assert!(table.is_consistent());
    assert!(membership.tick(1_000).is_none(), "nothing changed");
}

#[test]
fn a_table_that_was_written_too_late_stays_at_home_and_is_made_again() {
    let mut membership = Membership::candidate(patience(), DurableState::default(), 0);
    membership.lead(3, 10_000, 0);
    membership.join("a", &join(1), 0).unwrap();
    let table = run(&mut membership, 100, 5_000).unwrap();
    assert!(membership.may_publish(&table, 9_000));
    membership.lead(4, 30_000, 9_100);
    assert!(!membership.may_publish(&table, 9_200), "a later term began meanwhile");
    membership.lead(4, 30_000, 9_300);
    let again = run(&mut membership, 9_300, 29_000).unwrap();
    assert_eq!(again.epoch.term, 4);
    assert!(!membership.may_publish(&again, 30_000), "its time is over");
    assert!(Membership::new(patience(), DurableState::default(), 0).may_publish(&table, 90_000));
}

#[test]
fn silence_counts_while_a_table_is_written() {
    let (mut membership, numbers) = cluster(2);
    let Patience { suspect_after_ms, grace_ms, .. } = patience();
    let silent_from = grace_ms + 1_000;
    for now in (0..=silent_from + suspect_after_ms).step_by(100) {
        membership.heartbeat(numbers[0], 1, &beat(), now);
        if now <= silent_from {
            membership.heartbeat(numbers[1], 1, &beat(), now);
            membership.tick(now);
        } else {
            membership.stays_awake(now);
        }
    }
    let table = membership.tick(silent_from + suspect_after_ms + 100).unwrap();
    assert_eq!(table.member(numbers[1]).unwrap().state, MemberState::Suspect);
}

#[test]
fn numbers_are_given_again_once_there_are_no_others_and_the_longest_unused_goes_first() {
    let last = NodeNumber::THIS_NODE.0 - 1;
    let numbers = (1..last).map(|number| (format!("gone-{number}"), NodeNumber(number))).collect();
    let mut membership = Membership::new(patience(), DurableState { numbers, ..DurableState::default() }, 0);
    let mut joins = |name: &str, now| membership.join(name, &join(1), now).unwrap().number.0;
    assert_eq!(
        joins("a", 0),
        last,
        "one was never given out; nobody gets the one by which a node calls itself"
    );
    assert_eq!(joins("gone-1", 0), 1, "it came back before anybody needed its number");
    assert_eq!((joins("b", 0), joins("c", 0)), (2, 3));
    membership.tick(0);
    membership.leave(NodeNumber(1), 1);
    assert_eq!(membership.join("d", &join(1), 100).unwrap().number.0, 4);
    // Another coordinator goes on with that order.
    run(&mut membership, 100, 200);
    let state = membership.state();
    assert_eq!(state.numbers.len(), usize::from(last));
    let mut next = Membership::new(patience(), state, 0);
    assert_eq!(next.join("e", &join(1), 0).unwrap().number.0, 5);
    assert_eq!(next.join("gone-2", &join(1), 0).unwrap().number.0, 6, "its number is another's");
    assert_eq!(next.join("gone-1", &join(1), 0).unwrap().number.0, 1);
    assert_eq!(next.counts().reused_numbers, 2);
}

#[test]
fn a_full_cluster_says_so_and_what_to_do() {
    let (mut membership, _) = cluster(MAX_MEMBERS as u64);
    let refused = membership.join("one-more", &join(1), 0).unwrap_err();
    assert_eq!(refused, JoinRefused::Full);
    assert!(refused.to_string().contains("stop one of them"), "{refused}");
    membership.leave(NodeNumber(1), 1);
    assert!(membership.join("one-more", &join(1), 0).is_ok());
}

#[test]
fn a_node_that_comes_back_to_a_full_cluster_waits_for_a_place() {
    let (mut membership, _) = cluster(MAX_MEMBERS as u64);
    membership.leave(NodeNumber(1), 1);
    membership.join("one-more", &join(1), 0).unwrap();
    assert_eq!(membership.join("node-0", &join(1), 0), Err(JoinRefused::Full));
    assert!(membership.join("node-1", &join(1), 0).is_ok(), "a member may join again");
    assert_eq!(membership.tick(0).unwrap().members.len(), MAX_MEMBERS);
    membership.leave(NodeNumber(2), 1);
    assert_eq!(membership.join("node-0", &join(1), 100).unwrap().number, NodeNumber(1));
}

#[test]
fn a_silent_node_is_suspect_then_removed_and_its_partitions_go_to_others() {
    let (mut membership, numbers) = cluster(3);
    membership.tick(10);
    let mut states = Vec::new();
    for now in (1_000..=35_000).step_by(500) {
        for &living in &numbers[..2] {
            assert_eq!(membership.heartbeat(living, 1, &beat(), now), Beat::Heard);
        }
        if let Some(table) = membership.tick(now) {
            states.push((now, table.members.len(), table.member(numbers[2]).map(|member| member.state)));
        }
    }
    assert_eq!(states, [(3_000, 3, Some(MemberState::Suspect)), (30_000, 2, None)]);
    assert!(membership.table().homes.iter().all(|home| numbers[..2].contains(home)));
    assert_eq!(membership.heartbeat(numbers[2], 1, &beat(), 36_000), Beat::Removed, "it has to join again");
}

#[test]
fn a_suspect_that_is_heard_again_is_alive() {
    let (mut membership, numbers) = cluster(1);
    let suspect = run(&mut membership, 0, 4_000).unwrap();
    assert_eq!(suspect.members[0].state, MemberState::Suspect);
    membership.heartbeat(numbers[0], 1, &beat(), 4_100);
    assert_eq!(run(&mut membership, 4_100, 4_500).unwrap().members[0].state, MemberState::Alive);
}

#[test]
fn silence_that_is_judged_when_it_is_due_is_judged_as_at_every_tick() {
    let (mut suspects, mut removals) = (0, 0);
    for seed in 0..6 {
        let mut random = fastrand::Rng::with_seed(seed);
        let [mut when_due, mut always] = [cluster(6).0, cluster(6).0];
        let (mut now, mut looks) = (0, 0);
        for step in 0..2_000 {
            now += random.u64(1..=100);
            let name = random.u64(..6);
            let (number, incarnation) = (NodeNumber(name as u16 + 1), random.u64(1..=3));
            let silent = (1..=6).map(NodeNumber).filter(|_| random.u8(..8) == 0).collect();
            let (deed, beat) = (random.u8(..100), Heartbeat { silent, ..beat() });
            // Now and then one node or all nodes are silent for long.
            let is_mute = (now / 10_000 + seed) % 7 == name || (now / 1_000 + seed) % 40 < 9;
            let impatient = Patience { suspect_after_ms: random.u64(500..5_000), ..patience() };
            for membership in [&mut when_due, &mut always] {
                match deed {
                    0 => membership.leave(number, incarnation),
                    1 => _ = membership.drains(number, incarnation, step % 2 == 0),
                    2 if step % 10 == 0 => membership.change_patience(impatient.clone()),
                    3..10 => _ = membership.join(&format!("node-{name}"), &join(incarnation), now),
                    _ if is_mute => {}
                    _ => _ = membership.heartbeat(number, incarnation, &beat, now),
                }
            }
            looks += u64::from(now >= when_due.judge_at);
            always.judge_at = 0;
            let tables = [when_due.tick(now), always.tick(now)];
            assert_eq!(tables[0], tables[1], "seed {seed}, step {step}, {now} ms");
            assert_eq!(when_due.counts(), always.counts(), "seed {seed}, step {step}, {now} ms");
        }
        assert!(looks < 1_500, "seed {seed}: {looks} of 2,000 ticks looked at all members");
        (suspects, removals) = (suspects + always.counts().suspects, removals + always.counts().removals);
    }
    assert!(suspects > 20 && removals > 2, "{suspects} suspects, {removals} removals");
}

#[test]
fn two_who_get_no_answer_make_a_node_suspect_early() {
    let (mut membership, numbers) = cluster(3);
    run(&mut membership, 0, 3_000);
    for &number in &numbers {
        membership.heartbeat(number, 1, &beat(), 4_000);
    }
    let silent = |node| Heartbeat { silent: vec![node], ..beat() };
    run(&mut membership, 4_000, 6_000);
    membership.heartbeat(numbers[0], 1, &silent(numbers[2]), 6_000);
    run(&mut membership, 6_050, 6_100);
    assert_eq!(membership.table().member(numbers[2]).unwrap().state, MemberState::Alive, "one is not enough");
    membership.heartbeat(numbers[1], 1, &silent(numbers[2]), 6_100);
    let table = run(&mut membership, 6_200, 6_400).unwrap();
    assert_eq!(table.member(numbers[2]).unwrap().state, MemberState::Suspect);
}

#[test]
fn two_who_get_no_answer_have_a_silent_node_removed_early_and_one_alone_does_not() {
    let (mut membership, numbers) = cluster(4);
    let mut removed = BTreeMap::new();
    for now in (1_000..=40_000).step_by(500) {
        for &living in &numbers[..2] {
            // Both miss the third node; one alone misses the fourth.
            let silent = [&numbers[2..3], &numbers[2..4]][usize::from(living == numbers[0])].to_vec();
            membership.heartbeat(living, 1, &Heartbeat { silent, ..beat() }, now);
        }
        membership.tick(now);
        for number in numbers.iter().filter(|&&number| membership.table().member(number).is_none()) {
            removed.entry(*number).or_insert(now);
        }
    }
    assert_eq!(removed, BTreeMap::from([(numbers[2], 8_000), (numbers[3], 30_000)]));
}

#[test]
fn however_many_silent_members_a_heartbeat_names_no_more_count_than_there_can_be() {
    let (mut membership, numbers) = cluster(2);
    let kept = |membership: &mut Membership, silent| {
        membership.heartbeat(numbers[0], 1, &Heartbeat { silent, ..beat() }, 10);
        membership.members[&numbers[0]].reported.len()
    };
    assert_eq!(kept(&mut membership, (0..60_000).map(NodeNumber).collect()), MAX_MEMBERS);
    assert_eq!(kept(&mut membership, vec![numbers[1]; 60_000]), 1);
}

#[test]
fn a_node_that_the_coordinator_hears_stays_whatever_others_say() {
    let (mut membership, numbers) = cluster(3);
    for now in (1_000..=40_000).step_by(500) {
        membership.heartbeat(numbers[2], 1, &beat(), now);
        for &other in &numbers[..2] {
            membership.heartbeat(other, 1, &Heartbeat { silent: vec![numbers[2]], ..beat() }, now);
        }
        membership.tick(now);
    }
    assert_eq!(membership.table().members.len(), 3);
}

#[test]
fn a_node_that_comes_back_has_its_number_and_its_new_incarnation_once_its_heartbeats_are_missed() {
    let (mut membership, numbers) = cluster(2);
    run(&mut membership, 0, 100);
    run(&mut membership, 200, 1_000);
    membership.heartbeat(numbers[1], 1, &beat(), 1_000);
    let refused = membership.join("node-1", &join(7), 1_300);
    let address = join(7).peer;
    assert_eq!(refused, Err(JoinRefused::InUse { address, retry_after_ms: 1_700, is_news: true }));
    run(&mut membership, 1_300, 2_900);
    assert_eq!(membership.join("node-1", &join(7), 3_000).unwrap().number, numbers[1]);
    let table = run(&mut membership, 3_000, 3_100).unwrap();
    assert_eq!(table.member(numbers[1]).unwrap().incarnation, 7);
    assert_eq!(
        membership.heartbeat(numbers[1], 1, &beat(), 3_200),
        Beat::Removed,
        "that life counts no more"
    );
    run(&mut membership, 3_200, 5_000);
    assert_eq!(membership.join("node-1", &join(3), 5_000), Err(JoinRefused::Outdated(8)));
}

#[test]
fn of_two_processes_with_one_name_the_first_stays_and_hears_of_the_other() {
    let (mut membership, numbers) = cluster(1);
    membership.tick(0);
    let other: SocketAddr = ([127, 0, 0, 1], 2).into();
    let clone = Join { peer: other, ..join(9) };
    let (mut refused, mut told) = (0, Vec::new());
    for now in (100..20_000).step_by(100) {
        if now % 1_000 == 0 {
            told.push(membership.heartbeat(numbers[0], 1, &beat(), now));
        }
        refused +=
            u64::from(matches!(membership.join("node-0", &clone, now), Err(JoinRefused::InUse { .. })));
        assert!(membership.tick(now).is_none(), "nobody is evicted, and no table is made");
    }
    assert_eq!((refused, membership.counts().contests), (199, 199));
    assert_eq!(
        told.iter().filter(|&&beat| beat == Beat::Contested(other)).count(),
        1,
        "once a while is enough"
    );
    // The first one leaves in order: its name is free at once.
    membership.leave(numbers[0], 1);
    assert_eq!(membership.join("node-0", &clone, 20_000).unwrap().number, numbers[0]);
}

#[test]
fn a_copy_of_a_process_with_its_very_incarnation_is_another_process() {
    let (mut membership, _) = cluster(1);
    let clone = Join { peer: ([127, 0, 0, 1], 2).into(), ..join(1) };
    assert!(matches!(membership.join("node-0", &clone, 500), Err(JoinRefused::InUse { .. })));
    assert!(membership.join("node-0", &join(1), 500).is_ok(), "the same one, on a new connection");
}

#[test]
fn a_coordinator_that_stood_still_does_not_take_that_for_silence_of_a_member() {
    let (mut membership, _) = cluster(1);
    run(&mut membership, 0, 1_000);
    let joined = membership.join("node-0", &join(9), 61_000);
    assert!(matches!(joined, Err(JoinRefused::InUse { .. })), "{joined:?}");
}

#[test]
fn who_joins_again_at_the_same_coordinator_raises_no_term_and_makes_no_table() {
    let (mut membership, numbers) = cluster(2);
    let epoch = membership.tick(10).unwrap().epoch;
    let again = membership.join("node-0", &Join { epoch, ..join(1) }, 200).unwrap();
    assert_eq!(again.number, numbers[0]);
    assert!(run(&mut membership, 200, 1_000).is_none());
    assert_eq!(membership.table().epoch, epoch);
}

#[test]
fn no_weight_makes_a_node_home_to_nearly_all_partitions() {
    let mut membership = Membership::new(patience(), DurableState::default(), 0);
    let mut numbers = Vec::new();
    for (name, weight) in [("a", 5), ("b", 3), ("liar", u64::MAX), ("c", 4)] {
        numbers.push(membership.join(name, &Join { weight, ..join(1) }, 0).unwrap().number);
    }
    let table = membership.tick(0).unwrap();
    let share = |number: NodeNumber| {
        table.homes.iter().filter(|&&home| home == number).count() as f64 / table.homes.len() as f64
    };
    // Four times the lower median, of 28 in all.
    assert!((0.5..0.65).contains(&share(numbers[2])), "{}", share(numbers[2]));
    assert!(share(numbers[1]) > 0.08);
}

#[test]
fn no_node_makes_terms_or_incarnations_wrap() {
    let mut membership = Membership::new(patience(), DurableState::default(), 0);
    let last = |number| Epoch { term: u64::MAX, number };
    let refused = membership.join("a", &Join { epoch: last(7), ..join(1) }, 0);
    assert_eq!(refused, Err(JoinRefused::Implausible { incarnation: 1, term: u64::MAX }));
    assert!(matches!(membership.join("a", &join(u64::MAX), 0), Err(JoinRefused::Implausible { .. })));
    let far = Epoch { term: MOST_TERMS_AHEAD + 2, number: 1 };
    let refused = membership.join("a", &Join { epoch: far, ..join(1) }, 0);
    assert_eq!(refused, Err(JoinRefused::Implausible { incarnation: 1, term: far.term }));
    membership.join("a", &join(1), 0).unwrap();
    assert_eq!(membership.tick(0).unwrap().epoch, Epoch { term: 1, number: 1 }, "nobody learns from it");

    // A state that an earlier version wrote.
    let mut state = membership.state();
    state.table.epoch = last(3);
    let mut membership = Membership::new(patience(), state, 0);
    assert_eq!(
        membership.tick(0).unwrap().epoch,
        last(4),
        "its tables are newer than those before all the same"
    );
}

#[test]
fn members_that_a_coordinator_took_over_have_its_grace_time_to_come_back() {
    let (mut before, numbers) = cluster(2);
    run(&mut before, 0, 100);
    let mut membership = Membership::new(patience(), before.state(), 0);
    membership.tick(0);
    // One comes back late; the other is gone.
    assert!(run(&mut membership, 100, 5_800).is_none(), "nobody is suspect within the time to come back");
    membership.join("node-0", &join(1), 5_900).unwrap();
    let table = run(&mut membership, 5_900, 6_100).unwrap();
    let states: Vec<_> = table.members.iter().map(|member| (member.number, member.state)).collect();
    assert_eq!(states, [(numbers[0], MemberState::Alive), (numbers[1], MemberState::Suspect)]);
}

#[test]
fn a_coordinator_that_starts_again_keeps_numbers_and_members_under_a_new_term() {
    let (mut membership, numbers) = cluster(3);
    run(&mut membership, 0, 100);
    let mut next = Membership::new(patience(), membership.state(), 0);
    let table = next.tick(1).unwrap();
    assert_eq!(table.epoch, Epoch { term: 2, number: 1 });
    assert_eq!(table.homes, membership.table().homes, "nothing moves");
    assert_eq!(next.join("node-2", &join(1), 10).unwrap().number, numbers[2]);
    assert_eq!(next.join("new", &join(1), 10).unwrap().number, NodeNumber(4));
}

#[test]
fn a_coordinator_that_lost_its_state_learns_its_term_from_the_nodes() {
    let mut membership = Membership::new(patience(), DurableState::default(), 0);
    membership.join("a", &Join { epoch: Epoch { term: 9, number: 4 }, ..join(1) }, 0).unwrap();
    assert_eq!(membership.tick(0).unwrap().epoch, Epoch { term: 10, number: 1 });
}

#[test]
fn a_coordinator_that_stood_still_blames_nobody() {
    let (mut membership, numbers) = cluster(2);
    run(&mut membership, 0, 5_000);
    numbers.iter().for_each(|&number| _ = membership.heartbeat(number, 1, &beat(), 5_000));
    run(&mut membership, 5_000, 5_100);
    assert!(membership.tick(95_100).is_none());
    assert_eq!(membership.table().members.len(), 2);
}

#[test]
fn who_leaves_is_gone_at_once() {
    let (mut membership, numbers) = cluster(2);
    run(&mut membership, 0, 100);
    membership.leave(numbers[0], 99);
    assert!(run(&mut membership, 200, 300).is_none(), "that was another life");
    membership.leave(numbers[0], 1);
    assert_eq!(run(&mut membership, 400, 500).unwrap().members.len(), 1);
}

#[test]
fn a_node_that_left_in_order_comes_back_as_a_later_life_even_if_its_clock_was_set_back() {
    let (mut membership, numbers) = cluster(2);
    membership.leave(numbers[0], 1);
    let number = membership.join("node-0", &join(9), 100).unwrap().number;
    membership.leave(number, 9);
    membership.tick(200);
    assert_eq!(membership.join("node-0", &join(5), 300), Err(JoinRefused::Outdated(10)));
    assert!(membership.join("node-0", &join(10), 300).is_ok());
    membership.leave(number, 10);
    membership.join("node-0", &join(MAX_INCARNATION), 400).unwrap();
    membership.leave(number, MAX_INCARNATION);
    assert!(membership.join("node-0", &join(11), 500).is_ok(), "after the last life there is no later one");
}

#[test]
fn a_node_gets_a_number_that_nobody_has_while_the_highest_number_is_in_use() {
    let (mut membership, numbers) = cluster(2);
    let highest = NodeNumber(NodeNumber::THIS_NODE.0 - 1);
    let gone = Given { number: highest, left: 0, incarnation: 1, is_void: false };
    membership.numbers.insert("gone".to_owned(), gone);
    let next = membership.join("new", &join(1), 100).unwrap().number;
    assert_eq!(next, NodeNumber(numbers.len() as u16 + 1));
    assert_eq!(membership.counts().reused_numbers, 0, "the node that left keeps its number");
}

#[test]
fn a_node_that_comes_back_is_lost_or_a_member_at_any_time() {
    let (mut membership, _) = cluster(1);
    run(&mut membership, 0, 40_000);
    let is_known = |membership: &Membership| {
        let is_member = membership.members().any(|member| member.name == "node-0");
        (is_member, membership.lost(40_000).iter().any(|(lost, _)| lost.member.name == "node-0"))
    };
    assert_eq!(is_known(&membership), (false, true));
    membership.join("node-0", &join(2), 40_000).unwrap();
    assert_eq!(is_known(&membership), (true, false), "though no table names it yet");
    assert!(membership.table().members.is_empty());
}

#[test]
fn a_removed_member_is_lost_until_it_comes_back_or_is_forgotten_and_one_that_left_is_not() {
    let (mut membership, numbers) = cluster(3);
    let lost = |membership: &Membership, now| -> Vec<(String, Millis)> {
        membership.lost(now).into_iter().map(|(lost, silent)| (lost.member.name, silent)).collect()
    };
    membership.leave(numbers[2], 1);
    run(&mut membership, 0, 29_900);
    assert!(lost(&membership, 29_900).is_empty(), "they are suspect");
    run(&mut membership, 30_000, 31_000);
    let both = [("node-0".to_owned(), 31_000), ("node-1".to_owned(), 31_000)];
    assert_eq!(lost(&membership, 31_000), both);
    let same = membership.join("node-0", &join(1), 31_000);
    assert_eq!(same, Err(JoinRefused::Outdated(2)), "the others have dropped what that life announced");
    membership.join("node-0", &join(2), 31_000).unwrap();
    assert_eq!(lost(&membership, 31_000), [("node-1".to_owned(), 31_000)]);
    let mut next = Membership::new(patience(), membership.state(), 100_000);
    let silent = [("node-1".to_owned(), 100_000)];
    assert_eq!(lost(&next, 100_000), silent, "a coordinator that starts again knows it, and since when");
    for membership in [&membership, &next] {
        assert!(lost(membership, 130_000).is_empty(), "after remember_lost_ms");
    }
    next.change_patience(Patience { remember_lost_ms: 1_000, ..patience() });
    next.change_patience(patience());
    assert!(lost(&next, 100_000).is_empty(), "an operator has it forgotten");
    let set_back = Membership::new(patience(), membership.state(), 10);
    assert_eq!(lost(&set_back, 10), [("node-1".to_owned(), 10)]);
    assert!(lost(&set_back, 100_010).is_empty(), "a clock that was set back makes it no longer");
}

#[test]
fn an_admin_has_a_lost_node_forgotten_for_good_and_no_member() {
    let (mut membership, _) = cluster(2);
    run(&mut membership, 0, 31_000);
    membership.join("node-0", &join(2), 31_000).unwrap();
    assert_eq!(membership.lost(31_000).len(), 1);
    assert!(membership.forget("node-0").is_err(), "it is a member");
    assert_eq!(membership.forget("node-7"), Ok(false), "nobody knows it");
    assert_eq!(membership.forget("node-1"), Ok(true));
    assert_eq!(membership.forget("node-1"), Ok(false));
    assert!(membership.take_unwritten() && !membership.take_unwritten(), "the state file follows, once");
    let mut next = Membership::new(patience(), membership.state(), 33_000);
    assert!(next.lost(33_000).is_empty());
    for membership in [&mut membership, &mut next] {
        let same_life = membership.join("node-1", &join(1), 34_000);
        assert_eq!(same_life, Err(JoinRefused::Outdated(2)), "the others have dropped its claims");
    }
    assert!(membership.join("node-1", &join(2), 34_000).is_ok(), "it may come back nevertheless");
}

#[test]
fn no_more_lost_members_are_kept_than_may_be_and_the_longest_lost_go_first() {
    let mut membership = Membership::new(patience(), DurableState::default(), 0);
    for node in 0..=MAX_LOST {
        let joined = if node == 0 { 0 } else { 1_000 };
        membership.tick(joined);
        membership.join(&format!("node-{node:03}"), &join(1), joined).unwrap();
    }
    run(&mut membership, 1_000, 40_000);
    let lost = membership.lost(40_000);
    assert_eq!((lost.len(), lost[0].0.member.name.as_str()), (MAX_LOST, "node-001"));
    let same_life = membership.join("node-000", &join(1), 40_000);
    assert_eq!(same_life, Err(JoinRefused::Outdated(2)), "the others have dropped its claims all the same");
}

#[test]
fn a_life_that_was_removed_is_over_however_short_lost_nodes_are_shown() {
    let (mut membership, numbers) = cluster(2);
    membership.change_patience(Patience { remember_lost_ms: 0, ..patience() });
    membership.tick(10);
    let mut follower = Membership::candidate(patience(), membership.state(), 0);
    for now in (0..=40_000).step_by(500) {
        membership.heartbeat(numbers[1], 1, &beat(), now);
        let Some(table) = membership.tick(now) else { continue };
        follower.follow(&table, now);
    }
    assert!(membership.lost(40_000).is_empty());
    let same_life = membership.join("node-0", &join(1), 40_000);
    assert_eq!(same_life, Err(JoinRefused::Outdated(2)));
    follower.lead(9, 60_000, 40_000);
    assert_eq!(
        follower.join("node-0", &join(1), 40_000),
        Err(JoinRefused::Outdated(2)),
        "nor for the next leader"
    );
    assert!(follower.join("node-0", &join(2), 40_000).is_ok());
}

/// Nodes over a network that loses, doubles and reorders messages, and that die and come back.
#[test]
fn in_the_end_the_members_are_the_living_nodes() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut membership = Membership::new(patience(), DurableState::default(), 0);
        // Each node: its incarnation, 0 if it is dead.
        let mut nodes = [0_u64; 6];
        let mut network: Vec<(Millis, usize, u64, bool)> = Vec::new();
        let mut last_epoch = Epoch::default();
        for now in (0..120_000).step_by(100) {
            let is_calm = now > 80_000;
            for (node, incarnation) in nodes.iter_mut().enumerate() {
                if !is_calm && random.u32(..300) == 0 {
                    *incarnation = if *incarnation == 0 || random.bool() { now + 1 } else { 0 };
                }
                if *incarnation > 0 && now % 1_000 == 0 {
                    for _ in 0..if is_calm { 1 } else { random.usize(..3) } {
                        let delay = if is_calm { 0 } else { random.u64(..2_500) };
                        network.push((now + delay, node, *incarnation, random.bool()));
                    }
                }
            }
            let (due, later) = network.into_iter().partition(|message| message.0 <= now);
            network = later;
            let mut due: Vec<_> = due;
            random.shuffle(&mut due);
            for (_, node, incarnation, is_join) in due {
                let name = format!("node-{node}");
                let number = membership.numbers.get(&name).map_or(NodeNumber(0), |given| given.number);
                if is_join || membership.heartbeat(number, incarnation, &beat(), now) == Beat::Removed {
                    // A message of an earlier life is refused, whenever it comes.
                    let _ = membership.join(&name, &join(incarnation), now);
                }
            }
            if let Some(table) = membership.tick(now) {
                assert!(table.epoch > last_epoch && table.is_consistent(), "seed {seed}");
                last_epoch = table.epoch;
            }
        }
        let table = membership.table();
        let members: Vec<(&str, u64)> =
            table.members.iter().map(|member| (member.name.as_str(), member.incarnation)).collect();
        let names: Vec<String> = (0..nodes.len()).map(|node| format!("node-{node}")).collect();
        let mut living: Vec<(&str, u64)> = names
            .iter()
            .zip(nodes)
            .filter(|(_, incarnation)| *incarnation > 0)
            .map(|(name, incarnation)| (name.as_str(), incarnation))
            .collect();
        let mut members_by_name = members.clone();
        members_by_name.sort_unstable();
        living.sort_unstable();
        assert_eq!(members_by_name, living, "seed {seed}");
    }
}

#[test]
fn a_node_that_drains_is_home_to_nothing_until_it_drains_no_more() {
    let (mut membership, numbers) = cluster(3);
    membership.tick(10);
    let homes = |table: &Table, node| table.homes.iter().filter(|&&home| home == node).count();
    membership.drains(numbers[1], 1, true);
    let table = membership.tick(100).unwrap();
    assert_eq!(table.member(numbers[1]).unwrap().state, MemberState::Draining);
    assert_eq!(homes(&table, numbers[1]), 0);
    membership.drains(numbers[1], 1, true);
    assert!(membership.tick(200).is_none(), "that is no news");
    membership.drains(numbers[1], 1, false);
    let table = membership.tick(300).unwrap();
    assert_eq!(table.member(numbers[1]).unwrap().state, MemberState::Alive);
    assert!(homes(&table, numbers[1]) > 1_000);
    assert_eq!(membership.counts().drains, 1);
}

#[test]
fn a_node_that_shares_no_chunks_is_home_to_nothing_unless_all_share_none() {
    let mut membership = Membership::new(patience(), DurableState::default(), 0);
    let join_as = |membership: &mut Membership, name, devices| {
        membership.join(name, &Join { devices, ..join(1) }, 0).unwrap().number
    };
    let alone = join_as(&mut membership, "alone", 0);
    assert!(membership.tick(10).unwrap().homes.iter().all(|&home| home == alone));
    let sharing = join_as(&mut membership, "sharing", 1);
    assert!(membership.tick(200).unwrap().homes.iter().all(|&home| home == sharing));
    membership.drains(sharing, 1, true);
    let table = membership.tick(400).unwrap();
    assert!(table.homes.iter().all(|&home| home == sharing), "it still answers, the other never does");
}

#[test]
fn a_node_that_is_heard_here_but_that_most_others_do_not_reach_is_home_to_nothing_until_they_do() {
    let (mut membership, numbers) = cluster(3);
    let lost = numbers[2];
    let homes =
        |membership: &Membership| membership.table().homes.iter().filter(|&&home| home == lost).count();
    let beats = |membership: &mut Membership, reporters: usize, from: Millis, end: Millis| {
        for now in (from..end).step_by(500) {
            for (at, &number) in numbers.iter().enumerate() {
                let silent = if at < reporters { vec![lost] } else { Vec::new() };
                membership.heartbeat(number, 1, &Heartbeat { silent, ..beat() }, now);
            }
            membership.tick(now);
        }
    };
    beats(&mut membership, 1, 0, 20_000);
    assert!(homes(&membership) > 1_000, "one of two does not decide");
    beats(&mut membership, 2, 20_000, 27_500);
    assert!(homes(&membership) > 1_000, "it may be a moment");
    beats(&mut membership, 2, 27_500, 30_000);
    assert_eq!(homes(&membership), 0);
    assert!(membership.table().member(lost).is_some(), "it stays a member");
    beats(&mut membership, 0, 30_000, 31_000);
    assert!(homes(&membership) > 1_000, "they reach it again");
}

#[test]
fn the_time_in_which_a_coordinator_stood_still_does_not_count_against_a_node_that_was_not_reached_for_a_moment()
 {
    let (mut membership, numbers) = cluster(3);
    let lost = numbers[2];
    membership.tick(10);
    for &number in &numbers[..2] {
        membership.heartbeat(number, 1, &Heartbeat { silent: vec![lost], ..beat() }, 100);
    }
    membership.tick(200);
    assert!(membership.tick(60_000).is_none());
    assert!(membership.table().homes.contains(&lost));
}

#[test]
fn nodes_that_share_no_chunks_have_no_say_in_who_is_reached() {
    let (mut membership, numbers) = cluster(3);
    let lost = numbers[2];
    for name in ["tool-0", "tool-1", "tool-2"] {
        membership.join(name, &Join { devices: 0, ..join(1) }, 0).unwrap();
    }
    for now in (0..20_000).step_by(500) {
        for number in (1..=6).map(NodeNumber) {
            let silent = if numbers[..2].contains(&number) { vec![lost] } else { Vec::new() };
            membership.heartbeat(number, 1, &Heartbeat { silent, ..beat() }, now);
        }
        membership.tick(now);
    }
    let table = membership.table();
    assert_eq!((table.members.len(), table.homes.contains(&lost)), (6, false));
}

#[test]
fn reports_of_a_node_that_joins_again_count_no_more() {
    let (mut membership, numbers) = cluster(2);
    let before = membership.tick(10).unwrap();
    membership.heartbeat(numbers[0], 1, &Heartbeat { silent: vec![numbers[1]], ..beat() }, 100);
    membership.join("node-0", &join(1), 200).unwrap();
    for now in (200..30_000).step_by(500) {
        numbers.iter().for_each(|&number| _ = membership.heartbeat(number, 1, &beat(), now));
        membership.tick(now);
    }
    assert_eq!(membership.table().homes, before.homes);
}

#[test]
fn a_node_that_is_not_reached_stays_home_to_nothing_when_the_same_life_joins_again() {
    let (mut membership, numbers) = cluster(4);
    let lost = numbers[0];
    for now in (0..20_000).step_by(500) {
        for &number in &numbers {
            let silent = if number == lost { Vec::new() } else { vec![lost] };
            membership.heartbeat(number, 1, &Heartbeat { silent, ..beat() }, now);
        }
        membership.tick(now);
    }
    assert!(!membership.table().homes.contains(&lost));
    membership.join("node-0", &join(1), 20_000).unwrap();
    membership.join("node-4", &join(1), 20_000).unwrap();
    let table = membership.tick(20_100).unwrap();
    assert_eq!((table.members.len(), table.homes.contains(&lost)), (5, false));
}

#[test]
fn where_nobody_reaches_anybody_the_homes_stay() {
    let (mut membership, numbers) = cluster(3);
    let before = membership.tick(10).unwrap();
    for now in (0..20_000).step_by(500) {
        for &number in &numbers {
            let silent = numbers.iter().copied().filter(|&other| other != number).collect();
            membership.heartbeat(number, 1, &Heartbeat { silent, ..beat() }, now);
        }
        membership.tick(now);
    }
    assert_eq!(membership.table().homes, before.homes);
}

#[test]
fn a_node_that_drained_leaves_and_is_not_lost() {
    let (mut membership, numbers) = cluster(2);
    membership.tick(10);
    membership.drains(numbers[1], 1, true);
    membership.tick(100);
    membership.leave(numbers[1], 1);
    assert_eq!(membership.tick(200).unwrap().members.len(), 1);
    assert_eq!((membership.lost(300), membership.counts().removals), (Vec::new(), 0));
}

#[test]
fn where_every_node_drains_partitions_stay_where_they_are() {
    let (mut membership, numbers) = cluster(2);
    let before = membership.tick(10).unwrap();
    numbers.iter().for_each(|&number| _ = membership.drains(number, 1, true));
    assert_eq!(membership.tick(100).unwrap().homes, before.homes);
}

#[test]
fn a_coordinator_that_starts_again_knows_who_drains_and_a_new_life_does_not() {
    let (mut membership, numbers) = cluster(2);
    membership.tick(10);
    membership.drains(numbers[0], 1, true);
    membership.tick(100);
    let mut next = Membership::new(patience(), membership.state(), 0);
    assert_eq!(next.join("node-0", &join(1), 0).map(|joined| joined.number), Ok(numbers[0]));
    let table = next.tick(10).unwrap();
    assert_eq!(table.member(numbers[0]).unwrap().state, MemberState::Draining);
    let later = 3 * patience().heartbeat_ms;
    run(&mut next, 100, later);
    next.join("node-0", &join(2), later).unwrap();
    let table = run(&mut next, later, later + 100).unwrap();
    assert_eq!(table.member(numbers[0]).unwrap().state, MemberState::Alive);
    next.drains(numbers[0], 1, true);
    assert!(next.tick(later + 200).is_none(), "the life before has no say");
}

#[test]
fn a_draining_node_that_falls_silent_is_suspect_and_drains_again_when_it_is_heard() {
    let (mut membership, numbers) = cluster(2);
    membership.tick(10);
    membership.drains(numbers[1], 1, true);
    for now in (1_000..=7_000).step_by(500) {
        membership.heartbeat(numbers[0], 1, &beat(), now);
        membership.tick(now);
    }
    assert_eq!(membership.table().member(numbers[1]).unwrap().state, MemberState::Suspect);
    membership.heartbeat(numbers[1], 1, &beat(), 7_100);
    let table = membership.tick(7_200).unwrap();
    assert_eq!(table.member(numbers[1]).unwrap().state, MemberState::Draining);
}
