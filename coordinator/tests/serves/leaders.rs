//! Several coordinators of one cluster: one leads, and the next goes on from its table.

use super::*;

#[test]
fn of_three_coordinators_one_leads_and_the_others_answer_reads_and_name_it() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let all = ["1", "2", "3"].map(|state| place.start_elected(state, cable.another()));
        until("one leads", || all.iter().filter(|one| !one.status().follows).count() == 1).await;
        let leader = all.iter().find(|one| !one.status().follows).unwrap();
        let follower = all.iter().find(|one| one.status().follows).unwrap();
        until("it is named", || follower.status().leader == Some(leader.ready.http.to_string())).await;

        // A node that knows only the follower is sent to the leader; a watcher may stay.
        let mut node = place.node("a", 1, follower);
        node.sees("itself", members(1)).await;
        let watcher = place.endpoint(&Identity::engine("red", "vllm-0"));
        let mut watcher = Follower::start(watcher, follower.ready.peer, FollowAs::Watcher);
        let seen = watcher.sees("the node", members(1)).await.table;
        assert_eq!(seen, node.known.borrow().table);
        assert_eq!(follower.status().nodes[0].name, "a");
        assert!(follower.get("/metrics").contains("larder_coordinator_leads 0\n"));
        leader.counted("larder_coordinator_leads 1\n").await;
    });
}

#[test]
fn a_follower_that_starts_again_publishes_the_table_that_it_knows() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let all = ["1", "2"].map(|state| (state, place.start_elected(state, cable.another())));
        let mut node = place.node_of("a", 1, all.iter().map(|(_, one)| one.ready.peer).collect());
        node.sees("itself", members(1)).await;
        until("one follows", || all.iter().filter(|(_, one)| one.status().follows).count() == 1).await;
        let [first, second] = all;
        let ((state, follower), _leader) =
            if first.1.status().follows { (first, second) } else { (second, first) };
        until("it knows the node", || follower.status().nodes.len() == 1).await;
        follower.stop();
        let again = place.start_elected(state, cable.another());
        let watcher = place.endpoint(&Identity::engine("red", "vllm-0"));
        let mut watcher = Follower::start(watcher, again.ready.peer, FollowAs::Watcher);
        watcher.sees("the node, though no table has changed", members(1)).await;
        assert!(again.status().follows);
    });
}

#[test]
fn a_leader_that_is_cut_off_stops_and_the_next_one_moves_no_partition() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let cables = [(); 3].map(|()| cable.another());
        let all = [0, 1, 2].map(|at| place.start_elected(&at.to_string(), cables[at].clone()));
        let addresses: Vec<SocketAddr> = all.iter().map(|one| one.ready.peer).collect();
        let mut nodes = ["a", "b", "c"].map(|name| place.node_of(name, 1, addresses.clone()));
        let mut before = Known::default();
        for node in &mut nodes {
            before = node.sees("all three", members(3)).await;
        }
        let leader = all.iter().position(|one| !one.status().follows).unwrap();
        cables[leader].cut(true);
        for node in &mut nodes {
            let after =
                node.sees("a later term", |known| known.table.epoch.term > before.table.epoch.term).await;
            assert_eq!(
                (&after.table.homes, &after.table.members),
                (&before.table.homes, &before.table.members)
            );
        }
        assert!(all[leader].status().follows);
        cables[leader].cut(false);
        let epoch = nodes[0].known.borrow().table.epoch.to_string();
        until("it follows the new leader", || all[leader].status().epoch == epoch).await;
        let calm = all
            .iter()
            .map(|one| one.get("/metrics"))
            .filter(|text| text.contains("event=\"remove\"} 0") && text.contains("event=\"suspect\"} 0"));
        assert_eq!(calm.count(), 3, "nobody was removed or suspect");
    });
}

#[test]
fn a_leader_without_any_state_goes_on_from_the_table_that_nodes_bring() {
    on_one_thread(async {
        let (place, cable) = (Place::new(), Cable::default());
        let first = place.start_elected("first", cable.another());
        // The second coordinator takes the first one's place, and was never told a table.
        let second = place.start_elected("second", cable.another());
        let addresses = vec![first.ready.peer, second.ready.peer];
        let mut nodes = ["a", "b", "c"].map(|name| place.node_of(name, 1, addresses.clone()));
        for node in &mut nodes {
            node.sees("all three", members(3)).await;
        }
        let before = nodes[0].known.borrow().clone();
        first.stop();
        second.stop();
        let third = place.start_elected("third", cable.another());
        let mut addresses = addresses;
        addresses[0] = third.ready.peer;
        for node in &nodes {
            node.task.abort();
        }
        let mut late = place.node_of("d", 9, addresses.clone());
        // Followers live as long as they are kept.
        let mut back = Vec::new();
        for (name, node) in ["a", "b", "c"].iter().zip(&nodes) {
            back.push(place.node_that_knows(name, 1, addresses.clone(), node.known.borrow().clone()));
        }
        let after = late.sees("all four", members(4)).await.table;
        for member in &before.table.members {
            let again = after.member(member.number).unwrap();
            assert_eq!(again, &Member { peer: again.peer, ..member.clone() }, "numbers stay with names");
        }
        let moved = before.table.homes.iter().zip(&after.homes).filter(|(then, now)| then != now).count();
        assert!(moved <= usize::from(PARTITIONS) / 4 + 1, "{moved} partitions moved for one new node");
    });
}

#[test]
fn a_new_leader_asks_a_node_for_its_table_although_nodes_of_version_1_came_first() {
    on_one_thread(async {
        let place = Place::new();
        let leader = place.start_elected("leader", Cable::default());
        let at = vec![leader.ready.peer];
        let number = NodeNumber(77);
        let member = Member {
            number,
            name: "late".to_owned(),
            incarnation: 1,
            peer: any_port(),
            http: any_port(),
            devices: 1,
            weight: 1,
            state: MemberState::Alive,
        };
        let epoch = Epoch { term: 0, number: 5 };
        let table = Table { epoch, members: vec![member], homes: vec![number; usize::from(PARTITIONS)] };
        let before = Known { table: Arc::new(table), ..Known::default() };
        let early = ["a", "b", "c"].map(|name| {
            let endpoint = place.endpoint_of_v1(&Identity::new(Role::Node, name));
            place.node_at(endpoint, 1, at.clone(), before.clone())
        });
        until("those of version 1 have joined", || leader.status().nodes.len() == 3).await;
        let mut late = place.node_that_knows("late", 1, at, before);
        let after = late.sees("all four", members(4)).await;
        assert_eq!(after.own, number, "it keeps its number, which only its table says");
        drop(early);
        leader.stop();
    });
}

#[test]
fn a_node_obeys_no_coordinator_of_an_earlier_term() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let mut node = place.node("a", 1, &coordinator);
        let before = node.sees("itself", members(1)).await;
        node.task.abort();
        // A coordinator that stood still since an earlier term.
        let old = place.endpoint(&Identity::new(Role::Coordinator, "c"));
        let address = old.local_address();
        let (told, mut tells) = tokio::sync::mpsc::channel(1);
        tokio::task::spawn_local(async move {
            while let Some(incoming) = old.accept().await {
                let connection = incoming.accept().await.unwrap();
                let Ok((mut send, mut receive)) = connection.quic().accept_bi().await else { continue };
                let _: Result<Option<FollowerMessage>, _> = read_message(&mut receive).await;
                let standing = Standing { term: 0, life: 1, leads: true, leader: None };
                let joined = Joined { number: NodeNumber(77), heartbeat_ms: 1 };
                for message in [CoordinatorMessage::Standing(standing), CoordinatorMessage::Joined(joined)] {
                    let _ = write_message(&mut send, &message).await;
                }
                connection.quic().closed().await;
                let _ = told.send(()).await;
            }
        });
        let node = place.node_that_knows("a", 1, vec![address], before.clone());
        for _ in 0..3 {
            tells.recv().await.unwrap();
        }
        assert_eq!(node.known.borrow().own, before.own);
    });
}
