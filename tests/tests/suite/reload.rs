//! Nodes that read their configuration again while they run.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use larder_tests::cluster::Cluster;
use larder_tests::server::signal;
use larder_tests::wait;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::Engine;
use super::drain::{admin, cluster};

/// Changes a node's configuration file.
fn edit(cluster: &Cluster, name: &str, change: impl FnOnce(String) -> String) {
    let file = cluster.dir().join(name).with_extension("toml");
    let text = fs::read_to_string(&file).unwrap();
    let changed = change(text.clone());
    assert_ne!(text, changed);
    // Replaces the file as editors and Kubernetes do: nobody ever sees half a file.
    let new = file.with_extension("new");
    fs::write(&new, changed).unwrap();
    fs::rename(new, file).unwrap();
}

fn actor(cluster: &Cluster) -> Value {
    let status: Value = serde_json::from_str(&cluster.node(0).get("/status").unwrap()).unwrap();
    status["actors"][0].clone()
}

fn with_policy(text: String) -> String {
    text.replace("policy = \"lru\"", "policy = \"sieve\"")
}

#[test]
fn settings_that_can_change_do_so_when_their_file_changes() {
    let cluster = cluster(1, "");
    assert_eq!(actor(&cluster)["policy"], "lru");
    edit(&cluster, "node-0", with_policy);
    wait::until("it has the other policy", || (actor(&cluster)["policy"] == "sieve").then_some(()));
}

#[test]
fn a_node_reads_its_configuration_again_at_sighup() {
    let cluster = cluster(1, "");
    edit(&cluster, "node-0", with_policy);
    signal(cluster.node(0).pid(), Signal::HUP).unwrap();
    wait::until("it has the other policy", || (actor(&cluster)["policy"] == "sieve").then_some(()));
}

#[test]
fn an_admin_hears_what_has_changed_and_what_waits_for_a_restart() {
    let cluster = cluster(1, "");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'a', 40);
    assert_eq!(engine.put(&hashes), 40);
    edit(&cluster, "node-0", |text| {
        let text = text.replace("capacity_chunks = 3000", "capacity_chunks = 10");
        format!("trust_engines = true\n{text}")
    });
    let (status, report, said) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(0), "{said}");
    let node = &report["nodes"][0];
    // The node may have seen the changed file first.
    let changed = json!([{ "key": "host.capacity_chunks", "before": "3000", "after": "10" }]);
    assert!(node["applied"] == changed || node["applied"] == json!([]), "{report}");
    assert_eq!(node["at_restart"], json!(["trust_engines"]));
    wait::until("what is too much is evicted", || (engine.get(&hashes) == 10).then_some(()));
}

#[test]
fn a_file_with_a_fault_changes_nothing() {
    let cluster = cluster(1, "");
    edit(&cluster, "node-0", |text| with_policy(text) + "\n[hots]\nx = 1\n");
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1));
    let error = report["nodes"][0]["error"].as_str().unwrap();
    assert!(error.contains("hots"), "{error}");
    assert_eq!(actor(&cluster)["policy"], "lru");
    edit(&cluster, "node-0", |text| text.replace("\n[hots]\nx = 1\n", "").replace("sieve", "fancy"));
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1));
    assert!(report["nodes"][0]["error"].as_str().unwrap().contains("fancy"), "{report}");
    assert_eq!(actor(&cluster)["policy"], "lru");
}

#[test]
fn only_an_admin_has_a_node_read_its_configuration() {
    let cluster = cluster(1, "");
    let file = |ending: &str| cluster.dir().join(ending).display().to_string();
    let output = std::process::Command::new(super::LARDER)
        .args(["reload", "--coordinator", cluster.coordinator_http(), "--ca", &file("ca.pem")])
        .args(["--certificate", &file("node-0.pem"), "--key", &file("node-0.key")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("only an admin may do this"));
}

#[test]
fn the_audit_log_says_who_changed_what() {
    let cluster = cluster(1, "[audit]\npath = \"{name}.audit\"\n");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'a', 5);
    engine.put(&hashes);
    let chain = engine.namespace.chain(hashes.clone());
    engine.session.pin(&engine.namespace, &chain, Duration::from_secs(5)).wait().unwrap();
    assert_eq!(admin(&cluster, &["policy", "sieve"]).0, Some(0));
    edit(&cluster, "node-0", |text| text.replace("capacity_chunks = 3000", "capacity_chunks = 10"));
    assert_eq!(admin(&cluster, &["reload"]).0, Some(0));
    assert_eq!(admin(&cluster, &["drain", "node-0"]).0, Some(1), "it is the only node");
    let file = cluster.dir().join("node-0.audit");
    let lines = wait::until("all lines are there", || {
        let text = fs::read_to_string(&file).ok()?;
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        lines.iter().any(|line| line["action"] == "drain").then_some(lines)
    });
    let of = |action: &str| lines.iter().find(|line| line["action"] == action).unwrap();
    let pin = of("pin");
    let by = pin["by"].as_str().unwrap();
    assert!(by.contains("of tenant default pid "), "{by}");
    assert!(pin["what"].as_str().unwrap().contains("5 chunks for "), "{pin}");
    let policy = of("set_policy");
    assert_eq!((&policy["by"], &policy["what"]), (&"admin admin".into(), &"sieve".into()));
    assert_eq!((&policy["node"], &policy["outcome"]), (&"node-0".into(), &"done".into()));
    let changed = lines.iter().filter(|line| line["action"] == "reload").map(|line| line["what"].clone());
    assert!(changed.collect::<Vec<_>>().contains(&"host.capacity_chunks = 10".into()), "{lines:?}");
    assert!(of("drain")["outcome"].as_str().unwrap().contains("no other node would take its chunks"));
}

#[test]
fn an_engine_that_pins_and_hangs_up_at_once_stands_in_the_audit_log() {
    let cluster = cluster(1, "[audit]\npath = \"{name}.audit\"\n");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for number in 1..=20 {
        let engine = Engine::connect(&cluster.socket(0));
        let chain = engine.namespace.chain(larder_tests::content::prompt(b'a', 5));
        let pin = engine.session.pin(&engine.namespace, &chain, Duration::from_secs(60)).into_future();
        // Sends the request, and does not wait for the answer.
        assert!(runtime.block_on(async { pin.now_or_never() }).is_none());
        drop(engine);
        wait::until("the pin is noted", || {
            let text = fs::read_to_string(cluster.dir().join("node-0.audit")).ok()?;
            (text.matches("\"action\":\"pin\"").count() == number).then_some(())
        });
    }
}

/// Adds a tenant to a node's configuration, or removes it.
fn with_guest(cluster: &Cluster, is_there: bool) {
    let guest =
        format!("[[tenants]]\nname = \"guest\"\nsocket = \"{}\"\n[cluster]", guest(cluster).display());
    edit(cluster, "node-0", |text| match is_there {
        true => text.replacen("[cluster]", &guest, 1),
        false => text.replacen(&guest, "[cluster]", 1),
    });
}

fn guest(cluster: &Cluster) -> PathBuf {
    cluster.dir().join("guest.sock")
}

fn reload(cluster: &Cluster) -> Value {
    let (status, report, said) = admin(cluster, &["reload"]);
    assert_eq!(status, Some(0), "{report} {said}");
    report
}

#[test]
fn a_tenant_that_is_removed_and_added_again_begins_without_chunks() {
    let cluster = cluster(1, "[audit]\npath = \"{name}.audit\"\n");
    let host = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'a', 30);
    host.put(&hashes);
    with_guest(&cluster, true);
    reload(&cluster);
    let first = Engine::connect(&guest(&cluster));
    assert_eq!((first.get(&hashes), first.put(&hashes), first.get(&hashes)), (0, 30, 30));
    let chain = first.namespace.chain(hashes.clone());
    first.session.pin(&first.namespace, &chain, Duration::from_secs(60)).wait().unwrap();
    with_guest(&cluster, false);
    reload(&cluster);
    let ended =
        wait::until("its session ends", || first.session.lease(&first.namespace, &chain).wait().err());
    assert!(format!("{ended:?} {ended}").contains("no longer serves this tenant"), "{ended:?}");
    assert!(!guest(&cluster).exists(), "its socket is gone");
    wait::until("its memory and pins are gone", || {
        let actor = actor(&cluster);
        (actor["chunks"] == 30 && actor["pins"] == 0).then_some(())
    });
    with_guest(&cluster, true);
    reload(&cluster);
    let second = Engine::connect(&guest(&cluster));
    assert_eq!((second.get(&hashes), second.put(&hashes), second.get(&hashes)), (0, 30, 30));
    assert_eq!(host.get(&hashes), 30, "the other tenant noticed nothing");
    wait::until("the audit log has both", || {
        let text = fs::read_to_string(cluster.dir().join("node-0.audit")).ok()?;
        (text.contains("\"add_tenant\"") && text.contains("\"remove_tenant\"")).then_some(())
    });
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_tenant_that_leaves_while_its_engine_saves_loses_nothing_but_its_own() {
    let cluster = cluster(1, "");
    let host = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'h', 20);
    host.put(&hashes);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (socket, is_over) = (guest(&cluster), &is_over);
        let saving = scope.spawn(move || {
            let mut sessions = 0;
            while !is_over.load(Ordering::Relaxed) {
                if !socket.exists() {
                    std::thread::yield_now();
                    continue;
                }
                let connected = std::panic::catch_unwind(|| Engine::connect(&socket));
                let Ok(engine) = connected else { continue };
                sessions += 1;
                // Until the engine is refused, because the tenant left. There is room for both tenants' chunks.
                _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    for name in (0..50).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                        let prompt = larder_tests::content::prompt(name, 40);
                        engine.put(&prompt);
                        assert!(engine.get(&prompt) <= 40);
                    }
                }));
            }
            sessions
        });
        // If this thread panics, the other one ends too.
        let _over = Over(is_over);
        for is_there in std::iter::repeat_n([true, false], 10).flatten() {
            with_guest(&cluster, is_there);
            reload(&cluster);
            assert_eq!(host.get(&hashes), 20);
        }
        is_over.store(true, Ordering::Relaxed);
        println!("{} sessions of the guest", saving.join().unwrap());
    });
    wait::until("only the host's chunks are left", || (actor(&cluster)["chunks"] == 20).then_some(()));
    assert!(!cluster.node(0).log().contains("panicked"), "{}", cluster.node(0).log());
}

#[test]
fn a_tenant_whose_socket_cannot_be_made_changes_nothing() {
    let cluster = cluster(1, "");
    fs::write(guest(&cluster), "in the way").unwrap();
    with_guest(&cluster, true);
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1), "{report}");
    let error = report["nodes"][0]["error"].as_str().unwrap();
    assert!(error.contains("of tenant `guest`"), "{error}");
    fs::remove_file(guest(&cluster)).unwrap();
    reload(&cluster);
    Engine::connect(&guest(&cluster));
}

#[test]
fn a_socket_whose_file_is_gone_is_made_again_and_its_sessions_go_on() {
    let cluster = cluster(1, "");
    let hashes = larder_tests::content::prompt(b'a', 4);
    let before = Engine::connect(&cluster.socket(0));
    assert_eq!(before.put(&hashes), 4);
    fs::remove_file(cluster.socket(0)).unwrap();
    reload(&cluster);
    assert_eq!((Engine::connect(&cluster.socket(0)).get(&hashes), before.get(&hashes)), (4, 4));
    // Another process has taken the path.
    fs::remove_file(cluster.socket(0)).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(cluster.socket(0)).unwrap();
    edit(&cluster, "node-0", with_policy);
    wait::until("other settings change", || (actor(&cluster)["policy"] == "sieve").then_some(()));
    let says = "another process serves this socket";
    wait::until("the node says why", || cluster.node(0).log().contains(says).then_some(()));
    assert_eq!(before.get(&hashes), 4);
}

#[test]
fn a_refused_exchange_of_sockets_leaves_each_tenant_its_own() {
    let cluster = cluster(1, "");
    let (own, blocked) = (cluster.socket(0).display().to_string(), cluster.dir().join("blocked.sock"));
    fs::write(&blocked, "in the way").unwrap();
    // The guest wants the host's socket, and the host a socket that cannot be made.
    with_guest(&cluster, true);
    edit(&cluster, "node-0", |text| {
        let text = text.replace(&own, &blocked.display().to_string());
        text.replace(&guest(&cluster).display().to_string(), &own)
    });
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1), "{report}");
    let hashes = larder_tests::content::prompt(b'a', 5);
    Engine::connect(&cluster.socket(0)).put(&hashes);
    assert_eq!(Engine::connect(&cluster.socket(0)).get(&hashes), 5, "the host's tenant has its socket again");
}

#[test]
fn a_tenant_moves_to_another_socket_and_its_sessions_go_on() {
    let cluster = cluster(1, "");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'a', 5);
    engine.put(&hashes);
    edit(&cluster, "node-0", |text| text.replace("/node-0.sock", "/moved.sock"));
    reload(&cluster);
    assert_eq!(engine.get(&hashes), 5);
    assert_eq!(Engine::connect(&cluster.dir().join("moved.sock")).get(&hashes), 5, "it is the same tenant");
    assert!(!cluster.socket(0).exists());
}

#[test]
fn forty_reloads_in_a_row_and_garbage_between_them_harm_nobody() {
    let cluster = cluster(1, "");
    let engine = Engine::connect(&cluster.socket(0));
    let file = cluster.dir().join("node-0.toml");
    let text = fs::read_to_string(&file).unwrap();
    for round in 0..40_u8 {
        let hashes = larder_tests::content::prompt(round, 40);
        engine.put(&hashes);
        assert_eq!(engine.get(&hashes), 40);
        let garbage = ["\u{0}\u{1}", "[\n", "name = 3\n", "tenants = 7\n"][usize::from(round % 4)];
        fs::write(&file, garbage).unwrap();
        assert_eq!(admin(&cluster, &["reload"]).0, Some(1), "{garbage:?}");
        let capacity = format!("capacity_chunks = {}", 100 + u64::from(round));
        fs::write(&file, text.replace("capacity_chunks = 3000", &capacity)).unwrap();
        reload(&cluster);
    }
    assert_eq!(actor(&cluster)["capacity_chunks"], 139);
}

#[test]
fn a_coordinator_reads_its_configuration_again_too() {
    let cluster = cluster(1, "");
    edit(&cluster, "coordinator", |text| text + "remove_after_ms = 60000\nheartbeat_ms = 900\n");
    let report = reload(&cluster);
    let coordinator = &report["coordinators"][0];
    let changed = json!([{ "key": "membership.remove_after_ms", "before": "30000", "after": "60000" }]);
    // The coordinator may have seen the changed file first.
    assert!(coordinator["applied"] == changed || coordinator["applied"] == json!([]), "{report}");
    assert_eq!(coordinator["at_restart"], json!(["membership.heartbeat_ms"]));
    edit(&cluster, "coordinator", |text| text.replace("60000", "7"));
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1), "{report}");
    let error = report["coordinators"][0]["error"].as_str().unwrap();
    assert!(error.contains("remove_after_ms (7)"), "{error}");
}
