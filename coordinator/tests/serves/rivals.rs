//! Coordinators that do not know of each other, or belong to two clusters.

use super::*;

#[test]
fn two_coordinators_that_do_not_know_of_each_other_are_noticed_and_the_lower_one_stops() {
    on_one_thread(async {
        let place = Place::new();
        let first = place.start(None);
        let mut node = place.node("a", 1, &first);
        node.sees("itself", members(1)).await;
        node.leave().await;
        first.stop();
        std::fs::copy(place.file("state.redb"), place.file("copied.redb")).unwrap();
        let copied = place.config("copied.redb", None);
        let [one, other] = [
            place.start(None),
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(copied, ready, stop))),
        ];
        let addresses = vec![one.ready.peer, other.ready.peer];
        let mut node = place.node_of("a", 2, addresses);
        node.sees("itself", members(1)).await;
        until("one of them stops", || one.thread.is_finished() || other.thread.is_finished()).await;
        let (lower, higher) = if one.thread.is_finished() { (one, other) } else { (other, one) };
        let error = lower.thread.join().unwrap().unwrap_err();
        assert!(error.is_the_askers() && error.to_string().contains("another coordinator leads"), "{error}");
        node.sees("the other one's table", |known| {
            known.table.epoch.to_string() == higher.status().epoch && known.table.members.len() == 1
        })
        .await;
        higher.stop();
    });
}

#[test]
fn a_node_is_heard_while_the_coordinator_meets_a_rival() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let (_endpoint, mut send, mut receive) = place.joined(&coordinator).await;
        let rival = place.endpoint(&Identity::new(Role::Coordinator, "c"));
        write_message(&mut send, &FollowerMessage::Rival(rival.local_address())).await.unwrap();
        // The rival lets the question wait.
        let met = rival.accept().await.unwrap().accept().await.unwrap();
        is_heard(&mut send, &mut receive).await;
        assert!(met.quic().close_reason().is_none());
    });
}

#[test]
fn a_node_that_names_the_coordinators_of_two_clusters_ends_neither() {
    on_one_thread(async {
        let place = Place::new();
        let other = place.config("other.redb", None);
        let [one, other] = [
            place.start(None),
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(other, ready, stop))),
        ];
        let mut nodes = Vec::new();
        for (name, coordinator) in [("a", &one), ("b", &one), ("c", &other), ("d", &other)] {
            nodes.push(place.node(name, 1, coordinator));
        }
        for node in &mut nodes {
            node.sees("both nodes of its cluster", members(2)).await;
        }
        let mut strange = place.node_of("e", 1, vec![one.ready.peer, other.ready.peer]);
        strange.sees("a cluster", members(3)).await;
        // It looks for other leaders at once, and its coordinator asks these at once.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!one.thread.is_finished() && !other.thread.is_finished());
        one.stop();
        other.stop();
    });
}

#[test]
fn a_coordinator_that_starts_again_waits_for_its_nodes_before_it_yields_to_another_clusters() {
    on_one_thread(async {
        let place = Place::new();
        let stranger = place.endpoint(&Identity::new(Role::Coordinator, "other"));
        let standing = Standing { term: 99, life: 7, leads: true, leader: None };
        let start = |grace_ms| {
            let mut config = place.config("state.redb", None);
            config.membership.grace_ms = grace_ms;
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)))
        };
        // A busy machine may let nodes wait.
        let grace_ms = 2_000;
        let again = start(grace_ms);
        who(&stranger, again.ready.peer, Some(standing.clone())).await.unwrap();
        let mut node = place.node("a", 1, &again);
        node.sees("itself", members(1)).await;
        tokio::time::sleep(Duration::from_millis(grace_ms)).await;
        assert!(!again.thread.is_finished());
        node.leave().await;
        again.stop();

        let alone = start(0);
        who(&stranger, alone.ready.peer, Some(standing)).await.unwrap();
        until("without nodes it yields", || alone.thread.is_finished()).await;
    });
}

#[test]
fn a_certificate_of_another_role_is_no_coordinators() {
    let place = Place::new();
    let issued = place.authority.issue(&Identity::new(Role::Node, "n"), Validity::days(1)).unwrap();
    std::fs::write(place.file("n.pem"), issued.certificate_pem).unwrap();
    std::fs::write(place.file("n.key"), issued.key_pem).unwrap();
    let config = |certificate: &Path, key: &Path| Config {
        http: HttpConfig { listen: any_port(), ..HttpConfig::default() },
        peer: PeerConfig {
            listen: any_port(),
            ca: place.file("ca.pem"),
            certificate: certificate.to_owned(),
            key: key.to_owned(),
        },
        ..Config::default()
    };
    let start = |config| actix_rt::System::new().block_on(run(config, |_| {}, async {})).unwrap_err();
    let error = start(config(&place.file("n.pem"), &place.file("n.key"))).to_string();
    assert!(error.contains("larder://node/n") && error.contains("larder ca issue coordinator"), "{error}");
    let missing = start(config(&place.file("nowhere.pem"), &place.file("n.key")));
    let source = std::error::Error::source(&missing).unwrap().to_string();
    assert!(source.contains("nowhere.pem") && source.contains("larder ca"), "{source}");
}
