//! Replays over clusters whose processes die, hang and come back.
//!
//! Each replay has enough requests that the fault and its end lie well within it. `tests/run heavy` makes them longer.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_skips::published_trace;
use larder_tests::cluster::{Cluster, members};
use larder_tests::replay::Replay;
use larder_tests::server::{self, signal};
use larder_tests::wait;
use rustix::process::Signal;
use serde_json::Value;

use super::LARDER;
use super::cluster::{SMALL, number, play, well_ended};

/// How long a fault lasts: a little, or in heavy tests as long as a cluster must endure it.
fn fault_seconds(usual: u64, heavy: u64) -> u64 {
    if std::env::var_os("LARDER_HEAVY_TESTS").is_some() { heavy } else { usual }
}

/// A replay that lasts about this long on this machine.
pub(super) fn replay_lasting(seconds: u64, arguments: &[&str]) -> (Replay, u64) {
    let trial = || number(&play(&[arguments, &["--requests", "2000"]].concat()), "seconds");
    // The quicker of two: one that others held up would make the replay too short.
    let requests = (seconds as f64 * 2_000.0 / trial().min(trial())) as u64;
    let replay = Replay::start(LARDER, &[arguments, &["--requests", &requests.to_string()]].concat());
    (replay.unwrap(), requests)
}

/// Prompt tokens that a node was asked for in its present life; `None` if it does not answer.
fn tokens_asked(http: &str) -> Option<u64> {
    let status: Value = serde_json::from_str(&server::get(http, "/status").ok()?).ok()?;
    status["actors"][0]["tokens_asked"].as_u64()
}

/// Waits until a node is asked for more tokens than before.
fn wait_until_asked(http: &str) {
    let before = tokens_asked(http).unwrap_or_default();
    wait::until("the node is asked", || tokens_asked(http).filter(|&asked| asked > before));
}

/// Chunks that the nodes have requested from each other and that have not come.
fn fetches_in_flight(nodes: &[String]) -> f64 {
    let metrics = nodes.iter().filter_map(|node| server::get(node, "/metrics").ok());
    metrics.map(|text| server::sum(&text, "larder_peer_fetches_in_flight")).sum()
}

fn incarnation(coordinator: &str, name: &str) -> Option<u64> {
    let member = members(coordinator).into_iter().find(|member| member["name"] == name)?;
    member["incarnation"].as_u64()
}

#[test]
fn a_node_killed_in_the_middle_fails_no_request_and_serves_again() {
    let (replay, requests) = replay_lasting(fault_seconds(8, 40), &IN_FLIGHT_128);
    kill_in_the_middle(replay, 1.0, requests);
}

#[test]
fn a_node_killed_with_a_hundred_fetches_under_way_fails_no_request_either() {
    let Some(trace) = published_trace("conversation") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (trace, requests) = repeated(&trace, folder.path(), fault_seconds(4, 12));
    let arguments = [&[trace.to_str().unwrap()], &IN_FLIGHT_128[..]].concat();
    kill_in_the_middle(Replay::start(LARDER, &arguments).unwrap(), 100.0, requests);
}

const IN_FLIGHT_128: [&str; 12] = [
    "--dev",
    "4",
    "--in-flight",
    "128",
    "--prefills",
    "128",
    SMALL[0],
    SMALL[1],
    SMALL[2],
    SMALL[3],
    SMALL[4],
    SMALL[5],
];

/// The trace `times` times, one after the other, each time with different prompts.
fn repeated(trace: &Path, folder: &Path, times: u64) -> (PathBuf, u64) {
    let lines = std::fs::read_to_string(trace).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lasts = lines.iter().filter_map(|line| line["timestamp"].as_u64()).max().unwrap() + 1;
    let path = folder.join("repeated.jsonl");
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    for (time, line) in (0..times).flat_map(|time| lines.iter().map(move |line| (time, line))) {
        let mut line = line.clone();
        line["timestamp"] = (line["timestamp"].as_u64().unwrap() + time * lasts).into();
        for id in line["hash_ids"].as_array_mut().unwrap() {
            *id = (id.as_u64().unwrap() + time * 10_000_000).into();
        }
        writeln!(file, "{line}").unwrap();
    }
    file.flush().unwrap();
    (path, times * lines.len() as u64)
}

/// Kills a node of a replay's cluster while `fetches` fetches between nodes are under way, and checks that no request fails and
/// the node is back before the end.
fn kill_in_the_middle(mut replay: Replay, fetches: f64, requests: u64) {
    let addresses = replay.addresses();
    let [coordinator, nodes @ ..] = &addresses[..] else { panic!("{addresses:?}") };
    nodes.iter().for_each(|node| wait_until_asked(node));
    let before = incarnation(coordinator, "node-1").expect("it is a member");
    let victim = replay.server("node-1").expect("it runs");
    wait::until("so many fetches are under way", || (fetches_in_flight(nodes) >= fetches).then_some(()));

    signal(victim.pid, Signal::KILL).unwrap();

    wait::until("the node is started again", || {
        replay.server("node-1").filter(|started| started.pid != victim.pid)
    });
    wait::until("it is a member in a new life", || {
        incarnation(coordinator, "node-1").filter(|&now| now > before)
    });
    wait_until_asked(&nodes[1]);
    assert!(replay.is_under_way().unwrap(), "the replay was over too early to show anything");
    let report = well_ended(replay);
    assert_eq!(report["requests"], requests, "every request came to its end");
    assert!(number(&report, "recomputed_after_failure") > 0.0, "{report}");
    assert!(number(&report, "sessions_reconnected") >= 1.0, "{report}");
}

#[test]
fn requests_go_on_while_the_coordinator_is_down() {
    let mut cluster = Cluster::start(LARDER, 3).unwrap();
    let http = cluster.coordinator_http().to_owned();
    let down = fault_seconds(3, 20);
    let arguments = ["--coordinator", &http, "--block-bytes", "4096", "--in-flight", "32", "--prefills", "8"];
    let (mut replay, requests) = replay_lasting(3 * down, &arguments);
    (0..3).for_each(|node| wait_until_asked(cluster.node(node).http()));
    let (term, before) = (cluster.table().unwrap().epoch.term, lives(&cluster));

    cluster.kill_coordinator();
    wait::through(Duration::from_secs(down), || {
        (0..3).for_each(|node| assert!(tokens_asked(cluster.node(node).http()).is_some()));
    });
    (0..3).for_each(|node| wait_until_asked(cluster.node(node).http()));
    cluster.start_coordinator().unwrap();

    wait::until("all nodes are members again", || (cluster.members().len() == 3).then_some(()));
    wait::until("a table of a new term", || cluster.table().ok().filter(|table| table.epoch.term > term));
    assert_eq!(lives(&cluster), before, "they are the same as before");
    assert!(replay.is_under_way().unwrap(), "the replay was over too early to show anything");
    let report = well_ended(replay);
    assert_eq!(report["requests"], requests);
    assert_eq!(report["recomputed_after_failure"], 0, "{report}");
}

/// Numbers and incarnations of the members.
fn lives(cluster: &Cluster) -> Vec<(u16, u64)> {
    let table = cluster.table().unwrap();
    table.members.iter().map(|member| (member.number.0, member.incarnation)).collect()
}

/// The coordinator's count of events of a kind.
fn events(cluster: &Cluster, event: &str) -> f64 {
    cluster.coordinator().metric(&format!("larder_coordinator_events_total{{event=\"{event}\"}}"))
}

#[test]
fn a_second_process_of_a_nodes_name_evicts_nobody_and_takes_its_place_once_it_is_gone() {
    let mut cluster = Cluster::start(LARDER, 2).unwrap();
    let (epoch, first) = (cluster.table().unwrap().epoch, cluster.member("node-1"));
    let config = cluster.dir().join("node-1.toml");
    let text = std::fs::read_to_string(config).unwrap().replace("node-1.sock", "clone.sock");
    let config = cluster.dir().join("clone.toml");
    std::fs::write(&config, text).unwrap();
    let clone = server::Server::start(LARDER, "node", &config).unwrap();

    wait::until("it has asked again", || (events(&cluster, "contest") >= 3.0).then_some(()));
    assert_eq!(cluster.table().unwrap().epoch, epoch, "no table was made");
    assert_eq!(events(&cluster, "join"), 2.0);
    let status: Value = serde_json::from_str(&clone.get("/status").unwrap()).unwrap();
    let refused = status["cluster"]["refused"].as_str().expect("it says why");
    assert!(refused.contains(&first.peer.to_string()), "{refused}");
    assert!(clone.get("/readyz").is_err(), "it was never a member: a rollout stops here");
    wait::until("the first one has heard of it", || {
        cluster.node(1).log().contains("another process").then_some(())
    });
    assert!(cluster.coordinator().log().contains(&first.peer.to_string()), "both addresses are in the log");

    cluster.kill_node(1).unwrap();
    let killed = std::time::SystemTime::now();
    wait::until("the other one is a member", || {
        (cluster.member("node-1").incarnation > first.incarnation).then_some(())
    });
    println!("a member {} ms after the first was killed", killed.elapsed().unwrap().as_millis());
    assert_eq!(cluster.member("node-1").number, first.number);
    wait::until("it is ready", || clone.get("/readyz").ok());
    let status: Value = serde_json::from_str(&clone.get("/status").unwrap()).unwrap();
    assert_eq!(status["cluster"]["refused"], Value::Null);
}

#[test]
fn a_stopped_node_whose_place_was_taken_takes_it_from_nobody_when_it_goes_on() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let first = cluster.member("node-1");
    let text = std::fs::read_to_string(cluster.dir().join("node-1.toml")).unwrap();
    let config = cluster.dir().join("clone.toml");
    std::fs::write(&config, text.replace("node-1.sock", "clone.sock")).unwrap();
    cluster.node(1).signal(Signal::STOP).unwrap();
    let _clone = server::Server::start(LARDER, "node", &config).unwrap();
    let taken = wait::until("the other one is a member", || {
        Some(cluster.member("node-1").incarnation).filter(|&now| now > first.incarnation)
    });
    cluster.node(1).signal(Signal::CONT).unwrap();
    let contests = events(&cluster, "contest");
    wait::until("the first one was refused", || {
        (events(&cluster, "contest") >= contests + 3.0).then_some(())
    });
    assert_eq!(cluster.member("node-1").incarnation, taken);
}

#[test]
fn no_node_is_suspect_because_the_coordinator_started_again() {
    let mut cluster = Cluster::start(LARDER, 3).unwrap();
    let before = lives(&cluster);
    cluster.kill_coordinator();
    cluster.start_coordinator().unwrap();
    // As long as a member may be silent, and some time more.
    wait::through(Duration::from_secs(5), || {
        assert_eq!(events(&cluster, "suspect"), 0.0);
    });
    assert_eq!(events(&cluster, "remove"), 0.0);
    assert_eq!(lives(&cluster), before);
}

#[test]
fn nobody_waits_for_a_stopped_node_longer_than_a_fetch_may_take() {
    let deadlines = ["--node-deadline-ms", "1000"];
    let arguments =
        [&["--dev", "4", "--in-flight", "64", "--prefills", "16"], &deadlines[..], &SMALL[..]].concat();
    let stopped = fault_seconds(3, 10);
    let (mut replay, requests) = replay_lasting(3 * stopped, &arguments);
    let addresses = replay.addresses();
    let [_, nodes @ ..] = &addresses[..] else { panic!("{addresses:?}") };
    nodes.iter().for_each(|node| wait_until_asked(node));
    let victim = replay.server("node-2").expect("it runs");

    signal(victim.pid, Signal::STOP).unwrap();
    wait::through(Duration::from_secs(stopped), || {
        [0, 1, 3].iter().for_each(|&node| wait_until_asked(&nodes[node]));
    });
    signal(victim.pid, Signal::CONT).unwrap();

    wait_until_asked(&nodes[2]);
    assert!(replay.is_under_way().unwrap(), "the replay was over too early to show anything");
    let report = well_ended(replay);
    assert_eq!(report["requests"], requests);
    assert!(number(&report, "recomputed_after_failure") > 0.0, "{report}");
    let longest_ms = number(&report, "longest_fetch_us") / 1_000.0;
    assert!(longest_ms < FETCH_DEADLINE_MS + SLACK_MS, "{longest_ms} ms: {report}");
}

/// How long a lease of a development cluster's node waits for blocks from peers.
const FETCH_DEADLINE_MS: f64 = 2_000.0;

/// Extra time on a busy machine.
const SLACK_MS: f64 = 1_500.0;
