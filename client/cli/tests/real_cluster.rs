//! A development cluster of real nodes, through the program as a shell sees it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// A runtime directory of its own, and commands that use it.
struct Place {
    runtime: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { runtime: tempfile::tempdir().unwrap() }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .env_remove("LARDER_LOG")
            .env_remove("LARDER_COORDINATOR");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Starts a cluster and waits until it is ready.
    fn cluster(&self, args: &[&str]) -> Cluster {
        let mut command = self.command(&["dev", "--json"]);
        command.args(args);
        Self::start(command)
    }

    /// Starts a cluster by this command and waits until it is ready.
    fn start(mut command: Command) -> Cluster {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("`{line}` does not say where it is"));
        Cluster { child, ready }
    }

    /// What is left in the runtime directory.
    fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.runtime.path().join("larder")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// A running command that has started nodes. Dropping it kills the command, and so the nodes.
struct Cluster {
    child: Child,
    ready: Value,
}

impl Cluster {
    /// Processes that the cluster's own process started.
    fn children(&self) -> Vec<Pid> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let pids = std::fs::read_to_string(path).unwrap();
        pids.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()).collect()
    }

    fn node(&self) -> Option<Pid> {
        let named = |pid: &Pid| {
            // A process that has just ended has no file.
            let line = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_pid()));
            line.unwrap_or_default().split('\0').any(|word| word == "node")
        };
        self.children().into_iter().find(named)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id().cast_signed()).unwrap(), signal).unwrap();
    }

    fn end(mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.child.wait().unwrap().code(), text)
    }
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no JSON: {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn a_signal_stops_every_process_and_leaves_nothing_behind() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let place = Place::new();
        let cluster = place.cluster(&["--arena-bytes", "16MiB"]);
        assert!(cluster.ready["ready_after_seconds"].as_f64().unwrap() < 2.0, "{}", cluster.ready);
        let children = cluster.children();
        assert_eq!(children.len(), 2, "a node and a coordinator");
        cluster.signal(signal);
        assert_eq!(cluster.end().0, Some(0));
        assert!(children.into_iter().all(|pid| test_kill_process(pid).is_err()), "a child is left");
        assert!(place.left().is_empty(), "{:?}", place.left());
    }
}

#[test]
fn a_cluster_that_was_told_to_outlive_its_terminal_does() {
    let place = Place::new();
    let mut nohup = Command::new("nohup");
    nohup.args([env!("CARGO_BIN_EXE_larder"), "dev", "--json", "--arena-bytes", "16MiB"]);
    nohup.env("XDG_RUNTIME_DIR", place.runtime.path()).env_remove("LARDER_LOG");
    let cluster = Place::start(nohup);
    cluster.signal(Signal::HUP);
    assert!(place.run(&["status"]).status.success());
    cluster.signal(Signal::TERM);
    assert_eq!(cluster.end().0, Some(0));
}

#[test]
fn a_node_that_dies_comes_back_as_a_member_of_another_life() {
    let place = Place::new();
    let cluster = place.cluster(&["--arena-bytes", "16MiB", "--nodes", "2"]);
    let member = || {
        let status: Option<Value> = serde_json::from_slice(&place.run(&["status", "--json"]).stdout).ok();
        let nodes = status?["coordinator"]["nodes"].as_array()?.clone();
        nodes.into_iter().find(|node| node["name"] == "node-0")
    };
    let before = member().unwrap();
    kill_process(cluster.node().unwrap(), Signal::KILL).unwrap();
    let start = now();
    let after = loop {
        match member() {
            Some(after) if after["incarnation"].as_u64() > before["incarnation"].as_u64() => break after,
            _ => assert!(start.elapsed() < DEADLINE, "it does not come back"),
        }
    };
    assert_eq!((&after["number"], &after["http"]), (&before["number"], &before["http"]));
    cluster.signal(Signal::TERM);
    assert_eq!(cluster.end().0, Some(0));
    assert!(place.left().is_empty(), "{:?}", place.left());
}

#[test]
fn a_node_that_cannot_start_says_why_and_leaves_nothing_behind() {
    let place = Place::new();
    let output = place.run(&["dev", "--arena-bytes", "900TiB"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("node-0 died (exit status: 2)") && text.contains("or less"), "{text}");
    assert!(place.left().is_empty(), "{:?}", place.left());
}

#[test]
fn a_replay_through_the_nodes_of_a_coordinator_shows_in_status_and_lookup() {
    let place = Place::new();
    let cluster = place.cluster(&["--arena-bytes", "16MiB"]);
    let coordinator = cluster.ready["coordinator"].as_str().unwrap();
    let args =
        ["replay", "--coordinator", coordinator, "--requests", "50", "--block-bytes", "4096", "--json"];
    let output = place.run(&args);
    assert!(output.status.success());
    let report = json(&output);
    assert_eq!((&report["requests"], &report["wrong_bytes"]), (&50.into(), &0.into()));
    assert!(
        report["tokens_hit"].as_u64().unwrap() > 0 && report["bytes_moved"].as_u64().unwrap() > 0,
        "{report}"
    );

    let status = json(&place.run(&["status", "--json"]));
    let actor = &status["nodes"][0]["actors"][0];
    assert_eq!(actor["tokens_asked"], report["tokens_asked"]);
    assert_eq!(actor["tokens_hit"], report["tokens_hit"]);
    assert_eq!((&actor["sessions"], &actor["leases"]), (&0.into(), &0.into()), "{status}");
    let table = String::from_utf8(place.run(&["status", "-o", "wide"]).stdout).unwrap();
    assert!(
        table.contains("1 node, epoch 1.1\n") && table.contains("node-0") && table.contains("adaptive"),
        "{table}"
    );

    let looked_up = json(&place.run(&["lookup", "0", "1", "--block-bytes", "4096", "--json"]));
    assert_eq!(looked_up[0]["tokens_found"], 1_024, "the most popular head is there: {looked_up}");
    let capped =
        json(&place.run(&["lookup", "0", "1", "--prompt-tokens", "1024", "--block-bytes", "4096", "--json"]));
    assert_eq!(capped[0]["tokens_found"], 512, "a token is left to compute");
    let status = json(&place.run(&["status", "--json"]));
    let asked = &status["nodes"][0]["actors"][0]["tokens_asked"];
    assert_eq!(*asked, report["tokens_asked"], "the command is no engine");
    cluster.signal(Signal::TERM);
    assert_eq!(cluster.end().0, Some(0));
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Both fail only if the process has ended already.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Starts a replay that takes long, and waits until its node was asked for something.
fn replay_under_way(place: &Place) -> Cluster {
    let mut command = place.command(&["replay", "--requests", "100000", "--json"]);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let replay = Cluster { child, ready: Value::Null };
    let start = now();
    loop {
        let status: Option<Value> = serde_json::from_slice(&place.run(&["status", "--json"]).stdout).ok();
        let asked = |status: Value| status["nodes"][0]["actors"][0]["tokens_asked"].as_u64();
        if status.and_then(asked).is_some_and(|tokens| tokens > 0) {
            return replay;
        }
        assert!(start.elapsed() < DEADLINE, "the replay does not begin");
    }
}

#[test]
fn a_replay_whose_node_dies_computes_what_it_would_have_served_and_goes_on_when_it_is_back() {
    let place = Place::new();
    let mut replay = replay_under_way(&place);
    kill_process(replay.node().unwrap(), Signal::KILL).unwrap();
    let report: Value = serde_json::from_reader(replay.child.stdout.take().unwrap()).unwrap();
    assert_eq!(report["requests"], 100_000);
    assert_eq!((&report["failed_requests"], &report["wrong_bytes"]), (&0.into(), &0.into()), "{report}");
    assert!(report["recomputed_after_failure"].as_u64().unwrap() > 0, "{report}");
    assert!(report["sessions_reconnected"].as_u64().unwrap() > 0, "{report}");
    let (status, text) = replay.end();
    assert_eq!(status, Some(0), "{text}");
    assert!(place.left().is_empty(), "{:?}", place.left());
}

#[test]
fn a_replay_whose_node_dies_too_often_prints_what_it_reached_and_fails() {
    let place = Place::new();
    let mut replay = replay_under_way(&place);
    while replay.child.try_wait().unwrap().is_none() {
        // An error: the node has ended by itself.
        let _ = replay.node().map(|node| kill_process(node, Signal::KILL));
        std::thread::sleep(Duration::from_millis(10));
    }
    let report: Value = serde_json::from_reader(replay.child.stdout.take().unwrap()).unwrap();
    assert!(report["requests"].as_u64().unwrap() > 0, "{report}");
    let (status, text) = replay.end();
    assert!(status == Some(1) && text.contains("it is not started again"), "{text}");
}

#[test]
fn an_interrupted_replay_prints_what_it_reached_and_stops_its_nodes() {
    let place = Place::new();
    let mut replay = replay_under_way(&place);
    let children = replay.children();
    replay.signal(Signal::INT);
    let report: Value = serde_json::from_reader(replay.child.stdout.take().unwrap()).unwrap();
    let requests = report["requests"].as_u64().unwrap();
    assert!(requests < 100_000 && report["failed_requests"] == 0, "{report}");
    let (status, text) = replay.end();
    assert_eq!(
        (status, text),
        (Some(1), format!("error: interrupted after {requests} of 100000 requests\n"))
    );
    assert!(children.into_iter().all(|pid| test_kill_process(pid).is_err()), "a child is left");
    assert!(place.left().is_empty(), "{:?}", place.left());
}

#[test]
fn chunks_per_node_is_exact() {
    let place = Place::new();
    let cluster =
        place.cluster(&["--chunks-per-node", "100", "--block-bytes", "5000", "--dir", &dir_of(&place)]);
    let coordinator = cluster.ready["coordinator"].as_str().unwrap();
    let args =
        ["replay", "--coordinator", coordinator, "--requests", "100", "--block-bytes", "5000", "--json"];
    let output = place.run(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let status = json(&place.run(&["status", "--json"]));
    assert_eq!(status["nodes"][0]["actors"][0]["chunks"], 100, "{status}");
    cluster.signal(Signal::INT);
    assert_eq!(cluster.end().0, Some(0));
    assert!(Path::new(&dir_of(&place)).join("node-0.log").exists(), "a directory that was asked for stays");
}

fn dir_of(place: &Place) -> String {
    place.runtime.path().join("asked").to_str().unwrap().to_owned()
}

#[expect(clippy::disallowed_methods, reason = "tests of whole processes live in real time")]
fn now() -> Instant {
    Instant::now()
}

const DEADLINE: Duration = Duration::from_secs(30);
