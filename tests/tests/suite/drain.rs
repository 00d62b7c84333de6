//! Nodes that drain: their warm chunks go to other nodes, and they leave or come back.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use larder_tests::cluster::{Cluster, issue_admin};
use larder_tests::content::prompt;
use larder_tests::replay::{Replay, write_generated};
use larder_tests::wait;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{Engine, LARDER};

/// Runs a command as an admin of the cluster. Returns its status, its JSON, and its messages.
pub(super) fn admin(cluster: &Cluster, arguments: &[&str]) -> (Option<i32>, Value, String) {
    let output = ask(cluster, "admin", arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or(Value::Null), said)
}

fn ask(cluster: &Cluster, name: &str, arguments: &[&str]) -> Output {
    command(cluster, name, arguments).output().unwrap()
}

fn command(cluster: &Cluster, name: &str, arguments: &[&str]) -> Command {
    let file = |ending: &str| cluster.dir().join(ending).display().to_string();
    let mut command = Command::new(LARDER);
    command
        .args(arguments)
        .args(["--json", "--coordinator", cluster.coordinator_http()])
        .args(["--ca", &file("ca.pem"), "--certificate", &file(&format!("{name}.pem"))])
        .args(["--key", &file(&format!("{name}.key"))]);
    command
}

pub(super) fn cluster(nodes: usize, more: &str) -> Cluster {
    let cluster = Cluster::start_with(LARDER, nodes, 3_000, more).unwrap();
    issue_admin(&cluster, "admin").unwrap();
    cluster
}

/// Has the coordinator call silent nodes suspect and lost far sooner than by default.
pub(super) fn quick_times(cluster: &mut Cluster) {
    let members = cluster.members().len();
    cluster.kill_coordinator();
    let config = cluster.dir().join("coordinator.toml");
    let times = "heartbeat_ms = 100\nsuspect_after_ms = 300\nremove_after_ms = 1500\n";
    std::fs::write(&config, std::fs::read_to_string(&config).unwrap() + times).unwrap();
    cluster.start_coordinator().unwrap();
    // The coordinator's file has the nodes as members before the coordinator hears them.
    wait::until("the nodes follow the coordinator that started again", || {
        (0..members).all(|node| cluster.node(node).log().contains("a new table epoch=2.")).then_some(())
    });
    cluster.wait_for_members(members);
}

fn state(cluster: &Cluster, name: &str) -> Option<String> {
    let member = cluster.members().into_iter().find(|member| member["name"] == name)?;
    member["state"].as_str().map(str::to_owned)
}

#[test]
fn a_node_that_drains_leaves_its_chunks_to_the_others_and_ends() {
    let mut cluster = cluster(3, "");
    let hashes = prompt(b'a', 200);
    assert_eq!(Engine::connect(&cluster.socket(2)).put(&hashes), 200);
    let (status, drained, said) = admin(&cluster, &["drain", "node-2"]);
    assert_eq!(status, Some(0), "{drained} {said}");
    let drained = &drained["nodes"][0];
    assert_eq!((&drained["outcome"], &drained["moved_chunks"]), (&"left".into(), &200.into()), "{drained}");
    assert_eq!(cluster.wait_for_end_of_last_node().unwrap().code(), Some(0));
    // The takers announce the moved chunks a moment later.
    let other = Engine::connect(&cluster.socket(0));
    wait::until("the other node has its chunks", || (other.get(&hashes) == 200).then_some(()));
    let coordinator = cluster.coordinator().get("/status").unwrap();
    let coordinator: Value = serde_json::from_str(&coordinator).unwrap();
    assert_eq!(coordinator["lost"], Value::Array(Vec::new()), "it left in order");
}

#[test]
fn a_node_that_restarts_ends_with_the_status_that_its_supervisor_waits_for() {
    let mut cluster = cluster(2, "");
    let hashes = prompt(b'a', 20);
    Engine::connect(&cluster.socket(1)).put(&hashes);
    let (status, drained, said) = admin(&cluster, &["restart", "node-1", "--back-within", "1s"]);
    assert_eq!(status, Some(1), "nobody starts it again here: {drained}");
    let reason = drained["nodes"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("did not come back within 1 s"), "{reason}");
    assert!(said.contains("node-1: it did not come back within 1 s"), "a table has no room for it: {said}");
    assert_eq!(cluster.wait_for_end_of_last_node().unwrap().code(), Some(75));
    // The takers announce the moved chunks a moment later.
    let other = Engine::connect(&cluster.socket(0));
    wait::until("the other node has its chunks", || (other.get(&hashes) == 20).then_some(()));
}

#[test]
fn a_draining_node_is_not_ready_keeps_nothing_new_and_goes_on_when_that_is_cancelled() {
    let cluster = cluster(2, "");
    let engine = Engine::connect(&cluster.socket(1));
    let hashes = prompt(b'a', 50);
    engine.put(&hashes);
    let slowly = ["drain", "node-1", "--no-wait", "--bytes-per-second", "1KiB", "--within", "10m"];
    let (status, drained, said) = admin(&cluster, &slowly);
    assert_eq!(status, Some(0), "{drained} {said}");
    wait::until("the coordinator knows", || (state(&cluster, "node-1")? == "draining").then_some(()));
    wait::until("its partitions moved", || {
        let table = cluster.table().ok()?;
        let own = table.members.iter().find(|member| member.name == "node-1")?.number;
        table.homes.iter().all(|&home| home != own).then_some(())
    });
    assert!(cluster.node(1).get("/readyz").is_err());
    assert_eq!(engine.put(&prompt(b'b', 4)), 0, "it wants nothing new");
    wait::until("it serves what it has, or has moved", || (engine.get(&hashes) == 50).then_some(()));
    let (status, again, said) = admin(&cluster, &["drain", "node-1"]);
    assert_eq!((status, again), (Some(1), Value::Null));
    assert!(said.contains("the node drains already"), "{said}");
    let (status, ..) = admin(&cluster, &["drain", "node-1", "--cancel"]);
    assert_eq!(status, Some(0));
    wait::until("it is a member as before", || (state(&cluster, "node-1")? == "alive").then_some(()));
    wait::until("it is ready again", || cluster.node(1).get("/readyz").ok());
    assert_eq!(engine.put(&prompt(b'c', 4)), 4);
    let (_, _, said) = admin(&cluster, &["drain", "node-1", "--cancel"]);
    assert!(said.contains("the node does not drain"), "{said}");
}

#[test]
fn a_drain_goes_on_when_the_command_is_stopped_and_the_command_says_so() {
    let cluster = cluster(2, "");
    Engine::connect(&cluster.socket(1)).put(&prompt(b'a', 50));
    for (name, node) in [("drain", "node-1"), ("restart", "NODE")] {
        let slowly = [name, "node-1", "--bytes-per-second", "1KiB", "--within", "10m"];
        let drain = command(&cluster, "admin", &slowly).stderr(Stdio::piped()).spawn().unwrap();
        wait::until("the coordinator knows", || (state(&cluster, "node-1")? == "draining").then_some(()));
        kill_process(Pid::from_child(&drain), Signal::INT).unwrap();
        let output = drain.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("goes on: `larder drain {node} --watch`")), "{said}");
        assert_eq!(admin(&cluster, &["drain", "node-1", "--cancel"]).0, Some(0), "it still drained");
        wait::until("it is a member as before", || (state(&cluster, "node-1")? == "alive").then_some(()));
    }
}

#[test]
fn a_drain_is_told_to_a_coordinator_that_starts_again_meanwhile() {
    let mut cluster = cluster(2, "");
    Engine::connect(&cluster.socket(1)).put(&prompt(b'a', 50));
    let slowly = ["drain", "node-1", "--no-wait", "--bytes-per-second", "1KiB", "--within", "10m"];
    assert_eq!(admin(&cluster, &slowly).0, Some(0));
    wait::until("the coordinator knows", || (state(&cluster, "node-1")? == "draining").then_some(()));
    cluster.kill_coordinator();
    std::fs::remove_file(cluster.dir().join("coordinator.redb")).unwrap();
    cluster.start_coordinator().unwrap();
    wait::until("another coordinator knows", || (state(&cluster, "node-1")? == "draining").then_some(()));
}

#[test]
fn a_drain_is_refused_for_the_last_node_for_an_unknown_node_and_without_an_admins_certificate() {
    let cluster = cluster(1, "");
    let (status, _, said) = admin(&cluster, &["drain", "node-0"]);
    assert_eq!(status, Some(1));
    assert!(said.contains("no other node would take its chunks"), "{said}");
    let (status, _, said) = admin(&cluster, &["drain", "node-7"]);
    assert_eq!(status, Some(2));
    assert!(said.contains("the coordinator knows no node `node-7`"), "{said}");
    let output = ask(&cluster, "node-0", &["drain", "node-0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("only an admin may do this"), "{said}");
}

#[test]
fn the_only_two_nodes_never_leave_by_draining_at_once() {
    let cluster = cluster(2, "");
    for node in 0..2 {
        Engine::connect(&cluster.socket(node)).put(&prompt(b'a' + node as u8, 50));
    }
    let slowly = |name| ["drain", name, "--no-wait", "--bytes-per-second", "1KiB", "--within", "10m"];
    assert_eq!(admin(&cluster, &slowly("node-0")).0, Some(0));
    // The drain is refused or given up, depending on the order of the messages.
    _ = admin(&cluster, &slowly("node-1"));
    wait::until("node-1 goes on", || (state(&cluster, "node-1")? == "alive").then_some(()));
    wait::until("node-1 is ready", || cluster.node(1).get("/readyz").ok());
}

#[test]
fn of_two_nodes_that_drain_at_once_one_leaves_their_common_chunks_to_the_third() {
    let cluster = cluster(3, "");
    let [one, other, third] = [0, 1, 2].map(|node| Engine::connect(&cluster.socket(node)));
    let hashes = prompt(b'a', 100);
    one.put(&hashes);
    wait::until("two nodes have the chunks", || (other.get(&hashes) == 100).then_some(()));
    drop((one, other));
    let drains = ["node-0", "node-1"].map(|node| {
        command(&cluster, "admin", &["drain", node])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    });
    for mut drain in drains {
        assert!(drain.wait().unwrap().success());
    }
    wait::until("the third node has the chunks", || (third.get(&hashes) == 100).then_some(()));
}

#[test]
fn a_drain_outlives_a_moment_in_which_the_only_other_node_is_suspect() {
    let mut cluster = cluster(2, "");
    quick_times(&mut cluster);
    // More than one batch of chunks: the first batch goes at once.
    Engine::connect(&cluster.socket(1)).put(&prompt(b'a', 200));
    let slowly = ["drain", "node-1", "--no-wait", "--bytes-per-second", "1KiB", "--within", "10m"];
    assert_eq!(admin(&cluster, &slowly).0, Some(0));
    cluster.node(0).signal(Signal::STOP).unwrap();
    wait::until("node-0 is suspect", || (state(&cluster, "node-0")? == "suspect").then_some(()));
    wait::through(Duration::from_millis(300), || {});
    cluster.node(0).signal(Signal::CONT).unwrap();
    wait::until("node-0 is back", || (state(&cluster, "node-0")? == "alive").then_some(()));
    // On a busy machine node-1 may be suspect for a moment, too.
    wait::until("node-1 drains on", || (state(&cluster, "node-1")? == "draining").then_some(()));
    assert!(!cluster.node(1).log().contains("the drain is given up"));
}

#[test]
fn watching_a_node_that_does_not_drain_is_an_error() {
    let cluster = cluster(1, "");
    let (status, _, said) = admin(&cluster, &["drain", "node-0", "--watch"]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("node-0 does not drain"), "{said}");
}

#[test]
fn a_node_that_dies_while_it_drains_is_reported() {
    let mut cluster = cluster(2, "");
    Engine::connect(&cluster.socket(1)).put(&prompt(b'a', 50));
    let slowly = ["drain", "node-1", "--no-wait", "--bytes-per-second", "1KiB", "--within", "10m"];
    assert_eq!(admin(&cluster, &slowly).0, Some(0));
    let dir = cluster.dir().to_owned();
    let http = cluster.coordinator_http().to_owned();
    let watching = std::thread::spawn(move || {
        let file = |name: &str| dir.join(name).display().to_string();
        Command::new(LARDER)
            .args(["drain", "node-1", "--watch", "--json", "--coordinator", &http])
            .args(["--ca", &file("ca.pem"), "--certificate", &file("admin.pem"), "--key", &file("admin.key")])
            .output()
            .unwrap()
    });
    wait::until("somebody watches", || {
        let requests = cluster.node(1).metric("larder_peer_requests_total{request=\"drain\"");
        (requests > 2.0).then_some(())
    });
    cluster.kill_node(1).unwrap();
    let output = watching.join().unwrap();
    assert_eq!(output.status.code(), Some(1));
    // The coordinator removes the node after a while; until then the command says that the node does not answer.
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("died") || said.contains("does not answer"), "{said}");
}

#[test]
fn a_node_that_is_told_to_stop_drains_first_where_its_configuration_says_so() {
    let mut cluster = cluster(2, "drain_ms = 20000\n");
    let hashes = prompt(b'a', 100);
    Engine::connect(&cluster.socket(1)).put(&hashes);
    assert_eq!(cluster.stop_last_node().unwrap().code(), Some(0));
    // The takers announce the moved chunks a moment later.
    let other = Engine::connect(&cluster.socket(0));
    wait::until("the other node has its chunks", || (other.get(&hashes) == 100).then_some(()));
}

#[test]
fn a_replay_survives_a_rolling_restart_of_all_nodes_without_a_failed_request() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    write_generated(&trace, 7, 1_500).unwrap();
    let undisturbed = rate(&trace, &[]);
    let restarted = rate(&trace, &["--restart-at", "300"]);
    println!("token hit rate undisturbed {undisturbed:.4}, with a rolling restart {restarted:.4}");
    assert!(restarted > undisturbed - 0.05, "{restarted} against {undisturbed}");
}

/// The token hit rate of a replay through three nodes; no request fails.
fn rate(trace: &Path, more: &[&str]) -> f64 {
    let trace = trace.display().to_string();
    let arguments = [&[&trace, "--dev", "3", "--in-flight", "1", "--block-bytes", "4KiB"], more].concat();
    let (report, status) = Replay::start(LARDER, &arguments).unwrap().finish().unwrap();
    assert_eq!((status, &report["failed_requests"], &report["wrong_bytes"]), (Some(0), &0.into(), &0.into()));
    for node in report["upkeep"].as_array().into_iter().flatten() {
        assert!(node["outcome"] == "left" && node["back_after_seconds"].as_f64().is_some(), "{node}");
    }
    report["token_hit_rate"].as_f64().unwrap()
}
