//! Membership in virtual time.

use std::net::SocketAddr;

use super::*;

fn patience() -> Patience {
    Patience { heartbeat_ms: 1_000, suspect_after_ms: 3_000, remove_after_ms: 30_000, grace_ms: 3_000 }
}

fn join(incarnation: u64) -> Join {
    let address: SocketAddr = ([127, 0, 0, 1], 1).into();
    Join { incarnation, epoch: Epoch::default(), peer: address, http: address, devices: 1, weight: 1 }
}

fn beat() -> Heartbeat {
    Heartbeat { epoch: Epoch::default(), silent: Vec::new() }
}

/// Ticks every 100 ms until `end`; the last table, if any came.
fn run(membership: &mut Membership, from: Millis, end: Millis) -> Option<Arc<Table>> {
    (from..=end).step_by(100).filter_map(|now| membership.tick(now)).last()
}

fn cluster(nodes: u64) -> (Membership, Vec<NodeNumber>) {
    let mut membership = Membership::new(patience(), State::default(), 0);
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
fn nobody_gets_the_number_by_which_a_node_calls_itself() {
    let last = NodeNumber(NodeNumber::THIS_NODE.0 - 2);
    let numbers = vec![("gone".to_owned(), last)];
    let mut membership = Membership::new(patience(), State { numbers, ..State::default() }, 0);
    assert_eq!(membership.join("a", &join(1), 0).unwrap().number.0, last.0 + 1);
    assert!(matches!(membership.join("b", &join(1), 0), Err(JoinRefused::Full)));
}

#[test]
fn a_silent_node_is_suspect_then_removed_and_its_partitions_go_to_others() {
    let (mut membership, numbers) = cluster(3);
    membership.tick(10);
    let mut states = Vec::new();
    for now in (1_000..=35_000).step_by(500) {
        for &living in &numbers[..2] {
            assert!(membership.heartbeat(living, 1, &beat(), now));
        }
        if let Some(table) = membership.tick(now) {
            states.push((now, table.members.len(), table.member(numbers[2]).map(|member| member.state)));
        }
    }
    assert_eq!(states, [(3_000, 3, Some(MemberState::Suspect)), (30_000, 2, None)]);
    assert!(membership.table().homes.iter().all(|home| numbers[..2].contains(home)));
    assert!(!membership.heartbeat(numbers[2], 1, &beat(), 36_000), "it has to join again");
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
fn a_node_that_comes_back_has_its_number_and_its_new_incarnation_at_once() {
    let (mut membership, numbers) = cluster(2);
    run(&mut membership, 0, 100);
    assert_eq!(membership.join("node-1", &join(7), 200).unwrap().number, numbers[1]);
    let table = run(&mut membership, 200, 300).unwrap();
    assert_eq!(table.member(numbers[1]).unwrap().incarnation, 7);
    assert!(!membership.heartbeat(numbers[1], 1, &beat(), 400), "its earlier life counts no more");
    assert_eq!(membership.join("node-1", &join(3), 500), Err(JoinRefused::Outdated(8)));
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
    let mut membership = Membership::new(patience(), State::default(), 0);
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

/// Nodes over a network that loses, doubles and reorders messages, and that die and come back.
#[test]
fn in_the_end_the_members_are_the_living_nodes() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut membership = Membership::new(patience(), State::default(), 0);
        // Each node: its incarnation, 0 where it is dead.
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
                let number = membership.numbers.get(&name).copied().unwrap_or_default();
                if is_join || !membership.heartbeat(number, incarnation, &beat(), now) {
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
