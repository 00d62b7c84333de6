//! Nodes of two versions of the protocol in one cluster.

use super::*;

#[test]
fn nodes_of_version_1_and_2_are_members_of_one_cluster_whose_homes_both_know() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let before = place.endpoint_of_v1(&Identity::new(Role::Node, "before"));
        let at = vec![coordinator.ready.peer];
        let mut before = place.node_at(before, 5, at, Known::default());
        let mut others = [place.node("one", 6, &coordinator), place.node("other", 7, &coordinator)];
        let seen = before.sees("all three", members(3)).await;
        assert!(seen.table.is_consistent() && is_merged(&seen.table.homes));
        assert!(seen.lacks_drains, "its coordinator would not hear of drains");
        let is_same = |known: &Known| known.table == seen.table;
        others[0].sees("the same table", is_same).await;
        let watcher = place.endpoint_of_v1(&Identity::new(Role::Admin, "watcher"));
        let mut watcher = Follower::start(watcher, coordinator.ready.peer, FollowAs::Watcher);
        watcher.sees("the same table", is_same).await;
        let protocols = |coordinator: &Coordinator| -> Vec<(String, u8)> {
            coordinator.status().nodes.into_iter().map(|node| (node.name, node.protocol)).collect()
        };
        let shown = protocols(&coordinator);
        assert!(shown.contains(&("before".into(), 1)) && shown.contains(&("one".into(), 2)), "{shown:?}");

        before.leave().await;
        let is_fine = |known: &Known| members(2)(known) && !is_merged(&known.table.homes);
        for node in &mut others {
            node.sees("all partitions, since nobody needs the old ones", is_fine).await;
        }
        watcher.sees("both nodes", members(2)).await;
        coordinator.stop();
    });
}

#[test]
fn a_coordinator_that_starts_again_keeps_the_homes_that_nodes_of_version_1_may_know() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let peer = coordinator.ready.peer;
        let endpoint = place.endpoint_of_v1(&Identity::new(Role::Node, "before"));
        let mut before = place.node_at(endpoint, 5, vec![peer], Known::default());
        let mut others = [place.node("one", 6, &coordinator), place.node("other", 7, &coordinator)];
        let seen = before.sees("all three", members(3)).await;
        others[0].sees("the same", |known| known.table == seen.table).await;
        coordinator.stop();
        let coordinator = place.start(Some(peer));
        let later = |known: &Known| known.table.epoch.term > seen.table.epoch.term && members(3)(known);
        for node in others.iter_mut().chain([&mut before]) {
            let known = node.sees("a later term", later).await;
            assert_eq!(known.table.homes, seen.table.homes);
        }
        coordinator.stop();
    });
}
