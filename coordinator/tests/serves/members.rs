//! Members: who joins, leaves, dies, comes back, or is turned away.

use super::*;

#[test]
fn a_coordinator_serves_health_metrics_and_status_until_it_is_told_to_stop() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        assert_eq!(coordinator.get("/healthz"), "ok\n");
        until("ready after the grace time", || {
            ureq::get(format!("http://{}/readyz", coordinator.ready.http)).call().is_ok()
        })
        .await;
        assert!(coordinator.get("/metrics").contains("larder_coordinator_members{state=\"alive\"} 0"));
        let mut node = place.node("node-0", 5, &coordinator);
        node.sees("itself", members(1)).await;
        let status: Status = serde_json::from_str(&coordinator.get("/status")).unwrap();
        let [shown] = &status.nodes[..] else { panic!("{status:?}") };
        assert_eq!(
            (shown.name.as_str(), shown.incarnation, shown.partitions),
            ("node-0", 5, usize::from(PARTITIONS))
        );
        let http = coordinator.ready.http;
        coordinator.stop();
        assert!(ureq::get(format!("http://{http}/healthz")).call().is_err());
    });
}

#[test]
fn a_node_that_the_coordinator_does_not_trust_learns_why() {
    on_one_thread(async {
        let (place, other) = (Place::new(), Place::new());
        let coordinator = place.start(None);
        let issued = other.authority.issue(&Identity::new(Role::Node, "a"), Validity::days(1)).unwrap();
        let ca = std::fs::read(place.file("ca.pem")).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let credentials = Credentials::from_pem(&ca, certificate, key).unwrap();
        let endpoint = Endpoint::bind(any_port(), &credentials, &TransportSettings::default()).unwrap();
        let at = coordinator.ready.peer;
        let mut node = place.node_at(endpoint, 1, vec![at], Known::default());
        let why = node.sees("why", |known| known.leaderless.is_some()).await.leaderless.unwrap();
        assert!(
            why.starts_with(&format!("the coordinator at {at}: ")) && why.contains("certificate"),
            "{why}"
        );
        coordinator.stop();
    });
}

#[test]
fn nodes_and_watchers_see_who_joins_leaves_dies_and_comes_back() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let watcher = place.endpoint(&Identity::engine("red", "vllm-0"));
        let mut watcher = Follower::start(watcher, coordinator.ready.peer, FollowAs::Watcher);
        let mut nodes: Vec<Follower> =
            ["a", "b", "c"].map(|name| place.node(name, 1, &coordinator)).into_iter().collect();
        for node in &mut nodes {
            let known = node.sees("all three", members(3)).await;
            assert!(known.table.member(known.own).is_some() && known.table.is_consistent());
        }
        watcher.sees("all three", members(3)).await;
        nodes.pop().unwrap().leave().await;
        watcher.sees("two after one left", members(2)).await;

        // One dies without a word: its heartbeats end.
        let dead = nodes.pop().unwrap();
        let number = dead.known.borrow().own;
        dead.task.abort();
        let state = |known: &Known| known.table.member(number).map(|member| member.state);
        watcher.sees("a suspect", |known| state(known) == Some(MemberState::Suspect)).await;
        watcher.sees("its removal", |known| state(known).is_none()).await;
        let back = place.node("b", 2, &coordinator);
        watcher
            .sees("it back, with its number", |known| {
                known.table.member(number).is_some_and(|member| member.incarnation == 2)
            })
            .await;
        coordinator.counted("larder_coordinator_events_total{event=\"remove\"} 1").await;
        back.leave().await;
    });
}

#[test]
fn a_second_process_of_one_name_waits_until_the_first_is_silent_and_both_are_told() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let mut first = place.node("a", 1, &coordinator);
        let epoch = first.sees("itself", members(1)).await.table.epoch;
        let mut second = place.node("a", 2, &coordinator);
        let known = second.sees("why it may not join", |known| known.refused.is_some()).await;
        let address = first.known.borrow().table.members[0].peer.to_string();
        assert!(known.refused.as_ref().is_some_and(|reason| reason.contains(&address)), "{known:?}");
        // The second one asks again and again, in vain.
        coordinator.counted("larder_coordinator_rejected_total{reason=\"in_use\"} 3").await;
        assert_eq!(first.known.borrow().table.epoch, epoch, "the first one is not evicted");
        coordinator.counted("larder_coordinator_events_total{event=\"join\"} 1").await;

        // When the first one is killed, the next one gets its place within some heartbeats.
        first.task.abort();
        let known =
            second.sees("itself", |known| known.own != NodeNumber(0) && known.refused.is_none()).await;
        assert_eq!(known.incarnation, 2);
        second.sees("its table", members(1)).await;
        second.leave().await;
    });
}

#[test]
fn a_coordinator_that_comes_back_goes_on_where_it_was() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let peer = coordinator.ready.peer;
        let (mut a, mut b) = (place.node("a", 1, &coordinator), place.node("b", 1, &coordinator));
        let before = a.sees("both", members(2)).await;
        b.sees("both", members(2)).await;
        coordinator.stop();
        let coordinator = place.start(Some(peer));
        let after = a.sees("a new term", |known| known.table.epoch.term == 2).await;
        assert_eq!((after.own, &after.table.homes), (before.own, &before.table.homes));
        assert_eq!(after.table.members, before.table.members, "nobody was removed");
        coordinator.stop();

        // The coordinator's state is lost: the nodes tell how far it had come.
        std::fs::remove_file(place.file("state.redb")).unwrap();
        let _coordinator = place.start(Some(peer));
        a.sees("a later term", |known| known.table.epoch.term > 2 && known.table.members.len() == 2).await;
    });
}

#[test]
fn a_node_that_is_stopped_before_it_follows_a_coordinator_that_came_back_says_goodbye() {
    on_one_thread(async {
        let place = Place::new();
        let first = place.start(None);
        let address = first.ready.peer;
        let (mut stays, mut leaves) = (place.node("node-0", 1, &first), place.node("node-1", 2, &first));
        stays.sees("both", members(2)).await;
        leaves.sees("both", members(2)).await;
        first.stop();
        // The node has dialled in vain so often that it waits for a second before it dials again.
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        let second = place.start(Some(address));
        leaves.leave().await;
        stays.sees("only itself", members(1)).await;
        assert!(second.status().lost.is_empty(), "{:?}", second.status());
    });
}

#[test]
fn who_may_not_follow_is_turned_away_and_counted() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let garbage = UdpSocket::bind(any_port()).await.unwrap();
        garbage.send_to(&[0x5a; 1_200], coordinator.ready.peer).await.unwrap();

        let stranger = Place::new().endpoint(&Identity::new(Role::Node, "a"));
        let dialled = stranger.connect(coordinator.ready.peer, Role::Coordinator, None).await;
        assert!(dialled.is_err(), "neither trusts the other");
        coordinator.counted("larder_coordinator_rejected_total{reason=\"certificate\"} 1").await;

        // An engine may watch, but not join.
        let engine = place.endpoint(&Identity::engine("red", "vllm-0"));
        let connection = engine.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
        let (mut send, mut receive) = connection.quic().open_bi().await.unwrap();
        let join = Join {
            incarnation: 1,
            epoch: Epoch::default(),
            peer: any_port(),
            http: any_port(),
            devices: 1,
            weight: 1,
        };
        write_message(&mut send, &FollowerMessage::Join(join)).await.unwrap();
        let answer = read_message::<CoordinatorMessage>(&mut receive).await;
        assert!(!matches!(answer, Ok(Some(_))), "{answer:?}");
        coordinator.counted("larder_coordinator_rejected_total{reason=\"not_allowed\"} 1").await;

        let connection = engine.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
        let (mut send, _receive) = connection.quic().open_bi().await.unwrap();
        send.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        coordinator.counted("larder_coordinator_rejected_total{reason=\"malformed\"} 1").await;
        let mut node = place.node("a", 1, &coordinator);
        node.sees("itself: the others did no harm", members(1)).await;
    });
}

#[test]
fn a_node_that_brings_a_table_unasked_is_turned_away() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let (_endpoint, mut send, _receive) = place.joined(&coordinator).await;
        let page = pages(&Table::default(), &Table::default()).remove(0);
        write_message(&mut send, &FollowerMessage::Brings(page)).await.unwrap();
        coordinator.counted("larder_coordinator_rejected_total{reason=\"out_of_order\"} 1").await;
    });
}

/// Passes packets between a node and the coordinator, which sees the address of one of two sockets.
async fn relay(near: UdpSocket, far: [UdpSocket; 2], coordinator: SocketAddr, second: Arc<AtomicBool>) {
    let (mut node, mut packet) = (any_port(), [[0; 2_048]; 3]);
    let [from_node, from_first, from_second] = &mut packet;
    loop {
        let (bytes, is_from_node) = tokio::select! {
            Ok((bytes, from)) = near.recv_from(from_node) => {
                node = from;
                (&from_node[..bytes], true)
            }
            Ok((bytes, _)) = far[0].recv_from(from_first) => (&from_first[..bytes], false),
            Ok((bytes, _)) = far[1].recv_from(from_second) => (&from_second[..bytes], false),
        };
        let (through, to) = match is_from_node {
            true => (&far[usize::from(second.load(Ordering::Relaxed))], coordinator),
            false => (&near, node),
        };
        // A lost packet is sent again.
        let _ = through.send_to(bytes, to).await;
    }
}

#[test]
fn a_node_whose_host_has_another_address_is_a_member_at_that_address() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let near = UdpSocket::bind(any_port()).await.unwrap();
        let [first, second] =
            [[127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| UdpSocket::bind((IpAddr::from(ip), 0)));
        let (address, moved) = (near.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let far = [first.await.unwrap(), second.await.unwrap()];
        tokio::task::spawn_local(relay(near, far, coordinator.ready.peer, Arc::clone(&moved)));
        let anywhere = ([0, 0, 0, 0], 9_441).into();
        let facts = NodeFacts {
            candidate: Candidate { incarnation: 1, peer: anywhere, http: anywhere, devices: 1, weight: 1 },
            silent: Box::new(Vec::new),
            drains: watch::channel(false).1,
        };
        let endpoint = place.endpoint(&Identity::new(Role::Node, "a"));
        let mut node = Follower::start(endpoint, address, FollowAs::Node(facts));
        let is_at = |ip: [u8; 4]| {
            let at = SocketAddr::from((ip, 9_441));
            move |known: &Known| known.table.members.first().is_some_and(|member| member.peer == at)
        };
        node.sees("itself", is_at([127, 0, 0, 1])).await;
        moved.store(true, Ordering::Relaxed);
        let known = node.sees("its new address", is_at([127, 0, 0, 2])).await;
        assert_eq!((known.table.members[0].incarnation, known.refused), (1, None));
        assert!(coordinator.get("/metrics").contains("event=\"contest\"} 0"), "it is no rival of itself");
        node.leave().await;
        coordinator.stop();
    });
}

#[test]
fn a_router_is_told_how_much_of_a_prefix_each_node_holds() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let identity = Identity::new(Role::Node, "home");
        let home = place.endpoint(&identity);
        let peer = home.local_address();
        let facts = NodeFacts {
            candidate: Candidate { incarnation: 1, peer, http: any_port(), devices: 1, weight: 1 },
            silent: Box::new(Vec::new),
            drains: watch::channel(false).1,
        };
        let mut node = Follower::start(home.clone(), coordinator.ready.peer, FollowAs::Node(facts));
        let own = node.sees("itself", members(1)).await.own;
        // The home says that it holds the first two of three chunks.
        tokio::task::spawn_local(async move {
            let connection = home.accept().await.unwrap().accept().await.unwrap();
            let (mut send, mut receive) = connection.quic().accept_bi().await.unwrap();
            let Ok(Some(PeerRequest::Find(find))) = read_message(&mut receive).await else {
                panic!("a find")
            };
            assert_eq!(find.rows.len(), 3);
            let holder = Holder { node: own, device: 0 };
            let spans = vec![RowSpan { from: 0, to: 2, holder }];
            let rows = PeerResponse::Rows(Rows { epoch: find.epoch, spans });
            write_message(&mut send, &rows).await.unwrap();
            send.finish().unwrap();
            connection.quic().closed().await;
        });
        let url = format!("http://{}/v1/prefix", coordinator.ready.http);
        let ask = move |body: String| {
            let url = url.clone();
            tokio::task::spawn_blocking(move || {
                let mut answer = ureq::post(url)
                    .header("content-type", "application/json")
                    .config()
                    .http_status_as_error(false)
                    .build()
                    .send(body)
                    .unwrap();
                answer.body_mut().read_to_string().unwrap()
            })
        };
        let hash = |byte: &str| format!("\"{}\"", byte.repeat(32));
        let body = |fingerprint: &str| {
            let hashes = [hash("11"), hash("22"), hash("33")].join(",");
            format!("{{\"fingerprint\": {fingerprint}, \"chunk_tokens\": 256, \"hashes\": [{hashes}]}}")
        };
        let answer = ask(body(&hash("ab"))).await.unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["cluster"], serde_json::json!({"chunks": 2, "tokens": 512}));
        let held = serde_json::json!(
            [{"name": "home", "chunks": 2, "tokens": 512, "held_tokens": 512, "cost_tokens": 256}]
        );
        assert_eq!(answer["nodes"], held, "the third chunk must be computed");
        let wrong = ask(body("\"ab\"")).await.unwrap();
        assert!(wrong.contains("fingerprint: a chunk hash has 64"), "{wrong}");
        assert_ne!(own, NodeNumber(0));
    });
}

#[test]
fn a_node_that_dials_all_addresses_of_a_coordinator_keeps_its_stream() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let (endpoint, mut send, mut receive) = place.joined(&coordinator).await;
        let mut others = Vec::new();
        for _ in 0..MAX_ADDRESSES {
            let other = endpoint.connect(coordinator.ready.peer, Role::Coordinator, None).await.unwrap();
            others.push(other);
        }
        is_heard(&mut send, &mut receive).await;
    });
}

#[test]
fn a_node_that_follows_a_coordinator_gives_up_its_other_dials() {
    on_one_thread(async {
        let place = Place::new();
        let coordinator = place.start(None);
        let slow = place.endpoint(&Identity::new(Role::Coordinator, "c"));
        let addresses = vec![coordinator.ready.peer, slow.local_address()];
        let mut node = place.node_of("a", 1, addresses);
        let dialled = slow.accept().await.unwrap();
        node.sees("itself", members(1)).await;
        let given_up = async {
            if let Ok(connection) = dialled.accept().await {
                connection.quic().closed().await;
            }
        };
        tokio::time::timeout(DEADLINE, given_up).await.unwrap();
    });
}
