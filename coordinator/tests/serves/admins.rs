//! Changes by admins, over QUIC and from the console, and the audit log.

use super::*;

#[test]
fn the_audit_log_says_who_changed_what() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let file = place.file("coordinator.toml");
        std::fs::write(&file, toml::to_string(&config).unwrap()).unwrap();
        let served = Some((file.clone(), config.clone()));
        // As `--advertise` does.
        let election = ElectionConfig { advertise: Some("127.0.0.1".to_owned()), ..config.election.clone() };
        let config = Config { election, ..config };
        let coordinator = Coordinator::start(move |ready, stop| {
            actix_rt::System::new().block_on(run_from(config, served, ready, stop))
        });
        let (drains, drained) = watch::channel(false);
        let candidate =
            Candidate { incarnation: 1, peer: any_port(), http: any_port(), devices: 1, weight: 1 };
        let facts = NodeFacts { candidate, silent: Box::new(Vec::new), drains: drained };
        let endpoint = place.endpoint(&Identity::new(Role::Node, "node-0"));
        let mut node = Follower::start(endpoint, coordinator.ready.peer, FollowAs::Node(facts));
        node.sees("itself", members(1)).await;
        drains.send_replace(true);
        let is_draining = |known: &Known| known.table.members[0].state == MemberState::Draining;
        node.sees("that it drains", is_draining).await;

        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace("suspect_after_ms = 300", "suspect_after_ms = 400")).unwrap();
        let CoordinatorMessage::Reloaded(reloaded) = place.reload(&coordinator, "me").await else {
            panic!("it reloads");
        };
        assert_eq!(reloaded.at_restart, [""; 0], "only what changed in the file");
        std::fs::write(&file, "no configuration").unwrap();
        place.reload(&coordinator, "me").await;

        let policy = r#"{"action": "policy", "node": "node-0", "policy": "sieve"}"#;
        coordinator.change(policy).await;
        let unknown = coordinator.change(&policy.replace("node-0", "node-9")).await;
        assert_eq!(unknown, (400, "the coordinator knows no node `node-9`\n".to_owned()));
        node.leave().await;
        coordinator.stop();

        let text = std::fs::read_to_string(place.file("audit")).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(lines.iter().all(|line| line["coordinator"] == "c" && line["time"].is_string()), "{text}");
        let has = |by: &str, action: &str, what: &str, outcome: &str| {
            lines.iter().any(|line| {
                let outcome_is = line["outcome"].as_str().is_some_and(|said| said.contains(outcome));
                let what_is = line["what"].as_str().unwrap_or_default() == what;
                line["by"] == by && line["action"] == action && what_is && outcome_is
            })
        };
        assert!(has("node node-0", "drain", "node-0", "done"), "{text}");
        // The coordinator may have seen the changed file first.
        let new = "membership.suspect_after_ms = 400";
        assert!(lines.iter().any(|line| line["action"] == "reload" && line["what"] == new), "{text}");
        assert!(has("admin me", "reload", "", "coordinator.toml"), "{text}");
        assert!(has("console of admin web", "set_policy", "sieve at node-0", "does not reach"), "{text}");
    });
}

#[test]
fn the_audit_log_has_a_line_for_each_change_of_a_drain_however_often_the_node_says_it() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let (_endpoint, mut send, mut receive) = place.joined(&coordinator).await;
        for drains in [false, true, true, false, false] {
            write_message(&mut send, &FollowerMessage::Drains(drains)).await.unwrap();
        }
        is_heard(&mut send, &mut receive).await;
        coordinator.stop();
        let audit = std::fs::read_to_string(place.file("audit")).unwrap();
        let lines = |action: &str| audit.matches(&format!(r#""action":"{action}""#)).count();
        assert_eq!((lines("drain"), lines("cancel_drain")), (1, 1), "{audit}");
    });
}

#[test]
fn a_coordinator_ends_although_its_audit_log_stalls() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let _reader = full_pipe(&place.file("audit"));
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        place.reload(&coordinator, "me").await;
        coordinator.stop();
    });
}

/// Makes a pipe that takes no byte more, and returns its reader.
fn full_pipe(path: &Path) -> std::fs::File {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let mut options = std::fs::File::options();
    let mut pipe = options.read(true).write(true).custom_flags(nonblocking).open(path).unwrap();
    while pipe.write(&[b'\n'; 4_096]).is_ok() {}
    pipe
}

#[test]
fn a_file_that_is_missing_may_come_and_a_wrong_one_must_be_changed() {
    let place = Place::new();
    let (config, missing) = (place.config("state.redb", None), place.file("missing/file"));
    let with = |certificate: &Path| PeerConfig { certificate: certificate.to_owned(), ..config.peer.clone() };
    let audit = Some(RecordConfig::to(missing.clone()));
    for (config, is_the_askers) in [
        (Config { audit, ..config.clone() }, false),
        (Config { peer: with(&missing), ..config.clone() }, false),
        (Config { peer: with(&place.file("ca.pem")), ..config.clone() }, true),
    ] {
        let error =
            actix_rt::System::new().block_on(run(config, |_| (), std::future::pending())).unwrap_err();
        assert_eq!(error.is_the_askers(), is_the_askers, "{error}");
    }
}

#[test]
fn purges_that_take_long_hold_up_no_other_change() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let endpoint = place.endpoint(&Identity::new(Role::Node, "node-0"));
        let (begun, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        tokio::task::spawn_local(purge_slowly(endpoint.clone(), (Arc::clone(&begun), Arc::clone(&is_over))));
        let mut node = place.node_at(endpoint, 1, vec![coordinator.ready.peer], Known::default());
        node.sees("itself", members(1)).await;
        let purge = r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": false}"#;
        let policy = async {
            until("four purges are under way", || begun.load(Ordering::Relaxed) == 4).await;
            let (_, fifth) = coordinator.change(purge).await;
            assert!(fifth.contains("other purges are under way"), "{fifth}");
            let changed = coordinator.change(r#"{"action": "policy", "policy": "sieve"}"#);
            let changed = tokio::time::timeout(DEADLINE, changed).await;
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(changed.unwrap().0, 200);
        };
        let purges = || coordinator.change(purge);
        tokio::join!(purges(), purges(), purges(), purges(), policy);
        node.leave().await;
        coordinator.stop();
    });
}

/// Answers an admin's requests as a node: purges are over when `is_over` says so.
async fn purge_slowly(endpoint: Endpoint, (begun, is_over): (Arc<AtomicU64>, Arc<AtomicBool>)) {
    while let Some(incoming) = endpoint.accept().await {
        let (begun, is_over) = (Arc::clone(&begun), Arc::clone(&is_over));
        tokio::task::spawn_local(async move {
            let connection = incoming.accept().await.unwrap();
            while let Ok((mut send, mut receive)) = connection.quic().accept_bi().await {
                let answer = match read_message::<PeerRequest>(&mut receive).await {
                    Ok(Some(PeerRequest::Purge(command))) => {
                        begun
                            .fetch_add(matches!(*command, PurgeCommand::Start(..)).into(), Ordering::Relaxed);
                        let is_over = is_over.load(Ordering::Relaxed);
                        PeerResponse::Purges(Box::new(PurgeReport { is_over, ..PurgeReport::default() }))
                    }
                    _ => PeerResponse::Done,
                };
                write_message(&mut send, &answer).await.unwrap();
                send.finish().unwrap();
            }
        });
    }
}

#[test]
fn the_console_changes_all_nodes_only_if_there_are_any() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        for change in [
            r#"{"action": "policy", "policy": "sieve"}"#,
            r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": false}"#,
        ] {
            let refused = (400, "the coordinator knows no nodes\n".to_owned());
            assert_eq!(coordinator.change(change).await, refused, "{change}");
        }
        coordinator.stop();
    });
}

#[test]
fn a_purge_from_the_console_names_the_lost_nodes() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let mut node = place.node("node-0", 1, &coordinator);
        node.sees("itself", members(1)).await;
        node.task.abort();
        until("it is lost", || coordinator.status().lost.len() == 1).await;
        let purge = r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": false}"#;
        let (status, said) = coordinator.change(purge).await;
        assert!(status == 200 && said.contains("node-0") && said.contains("it is lost"), "{status} {said}");
        coordinator.stop();
    });
}

#[test]
fn an_admin_has_a_lost_node_forgotten_by_certificate_or_from_the_console() {
    on_one_thread(async {
        let place = Place::new();
        let config = place.config_with_console();
        let coordinator =
            Coordinator::start(move |ready, stop| actix_rt::System::new().block_on(run(config, ready, stop)));
        let names = ["node-0", "node-1", "node-2"];
        let mut nodes = names.map(|name| place.node(name, 1, &coordinator));
        for node in &mut nodes {
            node.sees("all", members(3)).await;
        }
        nodes[1..].iter().for_each(|node| node.task.abort());
        until("two are lost", || coordinator.status().lost.len() == 2).await;
        let forget = |name: &str| FollowerMessage::Forget(name.to_owned());
        let answer = place.admin_asks(&coordinator, "me", forget("node-0")).await;
        assert!(matches!(answer, CoordinatorMessage::Refused(why) if why.contains("is a member")));
        let longest = "n".repeat(MAX_NAME_BYTES);
        for (name, was_lost) in [("node-1", true), ("node-1", false), ("node-9", false), (&longest, false)] {
            let answer = place.admin_asks(&coordinator, "me", forget(name)).await;
            assert_eq!(answer, CoordinatorMessage::Forgot(was_lost), "{name}");
        }
        let forget = |name: &str| format!(r#"{{"action": "forget", "node": "{name}"}}"#);
        assert_eq!(coordinator.change(&forget("node-2")).await, (200, "[]".to_owned()));
        let (status, said) = coordinator.change(&forget("node-9")).await;
        assert!(status == 400 && said.contains("no lost node `node-9`"), "{status} {said}");
        assert!(coordinator.status().lost.is_empty());
        coordinator.stop();
        let audit = std::fs::read_to_string(place.file("audit")).unwrap();
        let line = r#""by":"admin me","action":"forget","what":"node-1","outcome":"done""#;
        assert!(audit.contains(line), "{audit}");
    });
}
