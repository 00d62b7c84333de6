//! Chunks that the nodes of a cluster share: between engines, and over whole traces.

use std::process::Command;

use larder_skips::published_trace;
use larder_tests::cluster::Cluster;
use larder_tests::content::{CHUNK_TOKENS, prompt};
use larder_tests::replay::Replay;
use larder_tests::wait;
use serde_json::Value;

use super::{Engine, LARDER};

/// Nodes that are so small that they evict, and blocks that are so small that their bytes cost little.
pub(super) const SMALL: [&str; 6] = ["--chunks-per-node", "3000", "--block-bytes", "4096", "--policy", "lru"];

/// Plays a replay to its end, and checks that no byte was wrong and no request failed.
pub(super) fn play(arguments: &[&str]) -> Value {
    well_ended(Replay::start(LARDER, arguments).unwrap())
}

/// Waits for the end of a replay, and checks the same.
pub(super) fn well_ended(replay: Replay) -> Value {
    let (report, status) = replay.finish().unwrap();
    let failures = [&report["wrong_bytes"], &report["failed_requests"]];
    assert_eq!((status, failures), (Some(0), [&Value::from(0); 2]), "{report}");
    report
}

pub(super) fn number(report: &Value, field: &str) -> f64 {
    report[field].as_f64().unwrap_or_else(|| panic!("no `{field}` in {report}"))
}

/// The same trace over four nodes that share, and over four nodes that do not.
fn shared_and_alone(trace: &[&str]) -> [Value; 2] {
    let cluster = [trace, &["--dev", "4"], &SMALL].concat();
    let reports = [play(&cluster), play(&[&cluster[..], &["--no-share"]].concat())];
    for (report, how) in reports.iter().zip(["shared", "alone"]) {
        println!(
            "{how}: {:.2} % of {:.2} %, {:.2} chunks a request from peers",
            100.0 * number(report, "token_hit_rate"),
            100.0 * number(report, "token_hit_rate_infinite"),
            number(report, "peer_chunks_per_request"),
        );
    }
    let [shared, alone] = &reports;
    assert_eq!(number(alone, "peer_chunks_per_request"), 0.0, "{alone}");
    assert_eq!(alone["tokens_hit_by_tier"]["peer"], 0, "{alone}");
    assert!(shared["tokens_hit_by_tier"]["peer"].as_u64() > Some(0), "{shared}");
    assert!(number(shared, "token_hit_rate") > number(alone, "token_hit_rate") + 0.02, "{reports:?}");
    assert!(reports.iter().all(|report| report["recomputed_after_failure"] == 0), "{reports:?}");
    reports
}

#[test]
fn a_generated_trace_hits_more_where_nodes_share() {
    shared_and_alone(&["--requests", "3000", "--seed", "7"]);
}

#[test]
fn the_conversation_trace_hits_what_was_foretold_shared_and_alone() {
    let Some(trace) = published_trace("conversation") else { return };
    // One request at a time: then the number of chunks saved before the next request does not depend on time.
    let [shared, alone] = shared_and_alone(&[trace.to_str().unwrap(), "--in-flight", "1"]);
    let near = |found: f64, expected: f64, tolerance: f64| {
        assert!((found - expected).abs() <= tolerance, "{found}, not {expected}: {shared} {alone}");
    };
    near(100.0 * number(&shared, "token_hit_rate"), 24.1, 0.8);
    near(100.0 * number(&alone, "token_hit_rate"), 9.8, 0.7);
    near(100.0 * number(&shared, "token_hit_rate_infinite"), 37.3, 0.1);
    // Three quarters of all chunks that hit would be 4.2, as three quarters lie on other nodes. Copies that were made while there
    // was free room are read at home.
    near(number(&shared, "peer_chunks_per_request"), 3.8, 0.6);
}

#[test]
fn the_synthetic_trace_hits_more_where_nodes_share() {
    if let Some(trace) = published_trace("synthetic") {
        shared_and_alone(&[trace.to_str().unwrap()]);
    }
}

/// Waits until an engine finds this number of a prompt's chunks.
fn wait_until_found(engine: &Engine, hashes: &[larder_protocol::ChunkHash], chunks: u32) {
    let (all, expected) = (hashes.len() as u64 * u64::from(CHUNK_TOKENS), chunks * CHUNK_TOKENS);
    wait::until(&format!("{chunks} chunks are found"), || {
        (engine.find(hashes, all + 1) == u64::from(expected)).then_some(())
    });
}

#[test]
fn what_one_node_was_given_the_others_serve() {
    let cluster = Cluster::start(LARDER, 3).unwrap();
    let hashes = prompt(b'a', 40);
    assert_eq!(Engine::connect(&cluster.socket(0)).put(&hashes), 40);
    for reader in [1, 2] {
        let engine = Engine::connect(&cluster.socket(reader));
        wait_until_found(&engine, &hashes, 40);
        assert_eq!(engine.get(&hashes), 40, "{}", cluster.node(reader).log());
        assert!(cluster.node(reader).metric("larder_peer_received_bytes_total") > 0.0);
    }
}

#[test]
fn what_a_node_lost_with_its_life_is_found_no_more() {
    let mut cluster = Cluster::start(LARDER, 2).unwrap();
    let reader = Engine::connect(&cluster.socket(1));
    let hashes = prompt(b'a', 40);
    assert_eq!(Engine::connect(&cluster.socket(0)).put(&hashes), 40);
    wait_until_found(&reader, &hashes, 40);
    let before = cluster.member("node-0");
    cluster.restart_node(0).unwrap();
    wait::until("it is a member as somebody new", || {
        (cluster.member("node-0").incarnation > before.incarnation).then_some(())
    });
    wait_until_found(&reader, &hashes, 0);
    assert_eq!(cluster.member("node-0").number, before.number, "numbers stay with names");

    let writer = Engine::connect(&cluster.socket(0));
    assert_eq!(writer.put(&hashes), 40);
    wait_until_found(&reader, &hashes, 40);
    assert_eq!(reader.get(&hashes), 40);
}

#[test]
fn nodes_whose_coordinator_is_gone_say_so_until_it_is_back() {
    let health = |cluster: &Cluster, node: usize| {
        let node = ["health", "--json", "--node", cluster.node(node).http()];
        let output = Command::new(LARDER).args(node).output().unwrap();
        (String::from_utf8(output.stdout).unwrap(), output.status.code())
    };
    let mut cluster = Cluster::start(LARDER, 2).unwrap();
    cluster.kill_coordinator();
    cluster.restart_node(1).unwrap();
    for (node, says) in [(0, "node-0 goes on with its last table: "), (1, "node-1 is no member: ")] {
        wait::until("the node says that it finds no coordinator", || {
            let (said, code) = health(&cluster, node);
            let reason = format!("{says}the coordinator at {}", cluster.coordinator_peer());
            (said.contains(&reason) && code == Some(1)).then_some(())
        });
    }
    wait::until("the log says so, too", || {
        cluster.node(1).log().contains("no leading coordinator is found").then_some(())
    });

    cluster.start_coordinator().unwrap();
    cluster.wait_for_members(2);
    for node in [0, 1] {
        wait::until("all is well", || (health(&cluster, node).1 == Some(0)).then_some(()));
    }
}

#[test]
fn a_node_that_does_not_share_serves_and_is_asked_for_nothing() {
    let report = play(&[&["--dev", "2", "--no-share", "--requests", "500"], &SMALL[..]].concat());
    assert_eq!(report["requests"], 500);
    assert!(number(&report, "token_hit_rate") > 0.0);
    assert_eq!(report["lease_shortfalls"], 0);
}
