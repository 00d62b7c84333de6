//! Replays of whole traces, compared with a model that is computed here.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use larder_skips::published_trace;
use larder_tests::cluster::Cluster;
use larder_tests::flip::flip_a_bit_in_every_page;
use larder_tests::model::{leaf_lru, two_tiers};
use larder_tests::replay::write_generated;
use serde_json::Value;

use super::LARDER;

/// Runs `larder replay` with these arguments. Returns its JSON and its output.
fn replay(arguments: &[&str]) -> (Value, Output) {
    let output = Command::new(LARDER).arg("replay").args(arguments).arg("--json").output().unwrap();
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (report, output)
}

/// Plays a trace on one node at each capacity, with `in_flight` requests at a time, and compares every hit rate with the model's.
/// The model plays one request after the other.
fn hold_against_the_model(trace: &Path, capacities: &[usize], in_flight: &str, tolerance: f64) {
    let requests = requests(trace);
    for &capacity in capacities {
        let model = leaf_lru(&requests, capacity);
        let chunks = capacity.to_string();
        let path = trace.to_str().unwrap();
        let capacity_options = ["--chunks-per-node", &chunks, "--block-bytes", "4096", "--policy", "lru"];
        let (report, output) =
            replay(&[&[path, "--dev", "1", "--in-flight", in_flight], &capacity_options[..]].concat());
        assert_eq!(output.status.code(), Some(0), "{report}");
        assert_eq!((&report["wrong_bytes"], &report["failed_requests"]), (&Value::from(0), &Value::from(0)));
        assert_eq!(report["requests"], requests.len());
        let rate = report["token_hit_rate"].as_f64().unwrap();
        let infinite = report["token_hit_rate_infinite"].as_f64().unwrap();
        println!(
            "{capacity} chunks: {:.2} %, model {:.2} %, infinite {:.2} %",
            100.0 * rate,
            100.0 * model.token_hit_rate,
            100.0 * infinite
        );
        assert!(
            (rate - model.token_hit_rate).abs() <= tolerance,
            "{capacity} chunks: {rate} against {model:?}"
        );
        assert!((infinite - model.token_hit_rate_infinite).abs() < 1e-9, "{infinite} against {model:?}");
    }
}

fn requests(trace: &Path) -> Vec<(u64, Vec<u64>)> {
    let lines = std::fs::read_to_string(trace).unwrap();
    let request = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let ids = line["hash_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
        (line["input_length"].as_u64().unwrap(), ids.collect())
    };
    lines.lines().map(request).collect()
}

/// A generated trace, in the format of trace files.
fn generated(folder: &Path, count: usize) -> PathBuf {
    let path = folder.join("generated.jsonl");
    write_generated(&path, 7, count).unwrap();
    path
}

#[test]
fn a_generated_trace_played_one_by_one_hits_exactly_what_the_model_says() {
    let folder = tempfile::tempdir().unwrap();
    hold_against_the_model(&generated(folder.path(), 1_500), &[500, 2_000, 10_000], "1", 1e-9);
}

#[test]
fn the_conversation_trace_hits_what_the_model_says() {
    if let Some(trace) = published_trace("conversation") {
        hold_against_the_model(&trace, &[3_000, 10_000, 30_000], "1", 1e-9);
        hold_against_the_model(&trace, &[3_000, 10_000, 30_000], "4", 0.005);
        // Requests in flight save their chunks late, the later the busier the machine is: this bounds the effect.
        hold_against_the_model(&trace, &[3_000], "16", 0.03);
    }
}

#[test]
fn the_synthetic_trace_hits_what_the_model_says() {
    if let Some(trace) = published_trace("synthetic") {
        hold_against_the_model(&trace, &[3_000, 10_000], "1", 1e-9);
        hold_against_the_model(&trace, &[3_000, 10_000], "16", 0.03);
    }
}

/// Plays a trace on a node with room for 1,000 chunks in memory and 30,000 on disk. The node is killed and started again before
/// each part but the first. Returns the token hit rate. If the drive is too busy to take all evicted chunks, which the model's
/// drive never is, plays the trace again, slower.
fn replay_above_a_disk(parts: &[&[String]]) -> f64 {
    for speed in ["100", "30", "10"] {
        let (rate, shed) = replay_above_a_disk_at(parts, speed);
        if shed <= 0.01 {
            return rate;
        }
        println!(
            "at {speed} times the trace's speed, {:.1} % of what was computed was not written",
            100.0 * shed
        );
    }
    panic!("the drive takes too little in a second for this test");
}

/// Plays the trace at one speed. Returns the token hit rate, and the fraction of the computed chunks that were not written.
fn replay_above_a_disk_at(parts: &[&[String]], speed: &str) -> (f64, f64) {
    let disk = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"260MiB\"\nsegment_bytes = \"4MiB\"\n";
    let mut cluster = Cluster::start_with(LARDER, 1, 1_000, disk).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut asked, mut hit, mut computed, mut shed) = (0.0, 0.0, 0.0, 0.0);
    for (number, part) in parts.iter().enumerate() {
        if number > 0 {
            larder_tests::wait::until("what waits is on disk", || {
                let node = cluster.node(0);
                let is_known = node.get("/status").is_ok();
                (is_known && node.metric("larder_disk_waiting_bytes") == 0.0).then_some(())
            });
            let known = cluster.node(0).metric("larder_disk_records");
            let before = cluster.members().first().map(|member| member["incarnation"].clone());
            cluster.restart_node(0).unwrap();
            larder_tests::wait::until("the coordinator knows the new life", || {
                let now = cluster.members().first().map(|member| member["incarnation"].clone());
                (now.is_some() && now != before).then_some(())
            });
            let recovered = || {
                cluster.node(0).get("/status").is_ok_and(|_| {
                    cluster.node(0).metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}") >= 0.95 * known
                })
            };
            larder_tests::wait::until(
                "the disk is known again, but for what it gives up to have segments free",
                || recovered().then_some(()),
            );
        }
        let path = folder.path().join(format!("part-{number}.jsonl"));
        // Every part begins with the first request of the trace, since that names the chunks.
        let first = parts[0].first().filter(|_| number > 0);
        let lines: Vec<&str> = first.into_iter().chain(*part).map(String::as_str).collect();
        std::fs::write(&path, lines.join("\n")).unwrap();
        let path = path.to_str().unwrap();
        let options =
            ["--coordinator", cluster.coordinator_http(), "--block-bytes", "4096", "--speed", speed];
        let (report, output) = replay(&[&[path], &options[..]].concat());
        assert_eq!(output.status.code(), Some(0), "{report}");
        assert_eq!((&report["wrong_bytes"], &report["failed_requests"]), (&Value::from(0), &Value::from(0)));
        asked += report["tokens_asked"].as_f64().unwrap();
        hit += report["tokens_hit"].as_f64().unwrap();
        computed += report["tokens_computed"].as_f64().unwrap();
        shed += cluster.node(0).metric("larder_disk_shed");
        println!("part {number}: {}, not written so far {shed}", report["tokens_hit_by_tier"]);
    }
    (hit / asked, shed / (computed / 512.0))
}

#[test]
fn a_node_with_a_disk_hits_what_a_model_of_the_same_two_tiers_hits() {
    let Some(trace) = published_trace("conversation") else { return };
    let lines: Vec<String> = std::fs::read_to_string(&trace).unwrap().lines().map(str::to_owned).collect();
    let model = two_tiers(&requests(&trace), 1_000, 30_000);
    let rate = replay_above_a_disk(&[&lines]);
    println!("{:.2} %, model {:.2} %", 100.0 * rate, 100.0 * model);
    assert!((rate - model).abs() <= 0.01, "{rate} against {model}");
}

#[test]
fn a_node_that_is_killed_half_way_loses_no_hit_that_its_disk_should_give() {
    let Some(trace) = published_trace("conversation") else { return };
    let lines: Vec<String> =
        std::fs::read_to_string(&trace).unwrap().lines().take(6_000).map(str::to_owned).collect();
    let (first, second) = lines.split_at(3_000);
    let model = two_tiers(&requests(&trace)[..6_000], 1_000, 30_000);
    let rate = replay_above_a_disk(&[first, second]);
    println!("{:.2} %, model without the kill {:.2} %", 100.0 * rate, 100.0 * model);
    assert!((rate - model).abs() <= 0.01, "{rate} against {model}");
}

#[test]
fn every_token_that_was_not_hit_has_a_reason_and_a_router_that_knows_moves_fewer_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let trace = generated(folder.path(), 600);
    let shared = [trace.to_str().unwrap(), "--dev", "3", "--chunks-per-node", "200", "--block-bytes", "4096"];
    let moved = ["load", "cache"].map(|route| {
        let (report, output) = replay(&[&shared[..], &["--in-flight", "8", "--route", route]].concat());
        assert_eq!((output.status.code(), &report["wrong_bytes"]), (Some(0), &Value::from(0)), "{report}");
        let lost = report["tokens_lost"].as_object().unwrap();
        let reasons: u64 = lost.values().filter_map(Value::as_u64).sum();
        assert_eq!(report["tokens_computed"], reasons, "{lost:?}");
        assert!(lost["evicted"].as_u64() > Some(0) && lost["never_seen"].as_u64() > Some(0), "{lost:?}");
        report["peer_chunks_per_request"].as_f64().unwrap()
    });
    assert!(moved[1] < moved[0], "{moved:?}");
}

#[test]
fn engines_compute_the_found_chunks_that_requests_do_not_wait_for() {
    let folder = tempfile::tempdir().unwrap();
    let trace = generated(folder.path(), 300);
    let play = |load: &str, tokens_per_second: &str| {
        let cluster = ["--dev", "2", "--chunks-per-node", "100", "--disk-chunks-per-node", "1000"];
        let engines = ["--block-bytes", "64KiB", "--load", load, "--prefill-tokens-per-s", tokens_per_second];
        let path = trace.to_str().unwrap();
        let (report, output) = replay(&[&[path, "--compute"], &cluster[..], &engines].concat());
        assert_eq!((output.status.code(), &report["wrong_bytes"]), (Some(0), &Value::from(0)), "{report}");
        let lost = report["tokens_lost"].as_object().unwrap();
        let reasons: u64 = lost.values().filter_map(Value::as_u64).sum();
        assert_eq!(report["tokens_computed"], reasons, "{lost:?}");
        // At most two engines compute at a time.
        let least = reasons as f64 / tokens_per_second.parse::<f64>().unwrap() / 2.0;
        assert!(report["seconds"].as_f64().unwrap() >= least, "{report}");
        let hit = &report["tokens_hit_by_tier"];
        let elsewhere = hit["disk"].as_u64().unwrap() + hit["peer"].as_u64().unwrap();
        (elsewhere, lost.get("not_loaded").and_then(Value::as_u64).unwrap_or(0))
    };
    let (loaded, not_loaded) = play("all", "1000000");
    assert!(loaded > 0 && not_loaded == 0, "{loaded}, {not_loaded}");
    let (loaded, not_loaded) = play("in-place", "1000000");
    assert!(loaded == 0 && not_loaded > 0, "{loaded}, {not_loaded}");
    // A chunk takes this engine half a nanosecond: nothing that was measured is faster.
    let (loaded, not_loaded) = play("worth", "1000000000000");
    assert!(not_loaded > loaded, "{loaded}, {not_loaded}");
}

#[test]
fn a_flipped_bit_in_the_arena_fails_the_replay_and_names_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let trace = generated(folder.path(), 200);
    let path = trace.to_str().unwrap();
    let cluster = Cluster::start(LARDER, 1).unwrap();
    let arguments = [path, "--coordinator", cluster.coordinator_http(), "--block-bytes", "4096"];
    let (first, output) = replay(&arguments);
    assert_eq!((output.status.code(), &first["wrong_bytes"]), (Some(0), &Value::from(0)), "{first}");
    let (second, output) = replay(&arguments);
    assert_eq!((output.status.code(), &second["wrong_bytes"]), (Some(0), &Value::from(0)), "{second}");
    assert!(second["token_hit_rate"].as_f64() > first["token_hit_rate"].as_f64());

    let pages = flip_a_bit_in_every_page(cluster.node(0).pid()).unwrap();
    assert_eq!(pages, (64 << 20) / 4_096);
    let (third, output) = replay(&arguments);
    assert_eq!(output.status.code(), Some(1), "{third}");
    assert!(third["wrong_bytes"].as_u64() > Some(0), "{third}");
    let text = third.to_string() + &String::from_utf8_lossy(&output.stderr);
    let played =
        larder_cli::trace::TraceReader::new(std::io::BufReader::new(std::fs::File::open(&trace).unwrap()))
            .read_all(Some(1))
            .unwrap();
    let name = larder_cli::content::TraceName::of(&played[0]);
    let first_key = name.chunk(requests(&trace)[0].1[0]).to_string();
    assert!(text.contains(&first_key), "the wrong key is named: {text}");
}

#[test]
fn a_replay_plays_through_the_nodes_that_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let trace = generated(folder.path(), 100);
    let mut cluster = Cluster::start(LARDER, 2).unwrap();
    cluster.kill_node(1).unwrap();
    let path = trace.to_str().unwrap();
    let (report, output) =
        replay(&[path, "--coordinator", cluster.coordinator_http(), "--block-bytes", "4096"]);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!((&report["requests"], &report["failed_requests"]), (&Value::from(100), &Value::from(0)));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("a node cannot be asked for its sockets") && text.contains("node-1"), "{text}");
}

#[test]
fn capacity_options_are_refused_where_the_cluster_runs_already() {
    for option in [["--chunks-per-node", "10"], ["--policy", "lru"]] {
        let output = Command::new(LARDER)
            .args(["replay", "--coordinator", "127.0.0.1:1"])
            .args(option)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("cannot be used with"), "{text}");
    }
}

#[test]
fn a_drain_or_a_restart_beyond_the_last_request_is_refused() {
    for option in ["--drain-at", "--restart-at"] {
        let replay = ["replay", "--dev", "2", "--requests", "50", option, "51"];
        let output = Command::new(LARDER).args(replay).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(option) && text.contains("the trace has 50 requests"), "{text}");
    }
}

#[test]
fn a_replay_through_nodes_that_move_blocks_in_different_ways_gets_right_bytes_only() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster =
        Cluster::start_with(LARDER, 1, 200, "block_threads = 2\nblocks_over_tcp = true\n").unwrap();
    cluster.add_node(200, "block_threads = 1\n").unwrap();
    cluster.add_node(200, "block_threads = 0\nblocks_over_tcp = true\n").unwrap();
    cluster.wait_for_members(3);
    let trace = generated(folder.path(), 300);
    // Prompts of many megabytes, so that a fetch has several batches.
    let path = trace.to_str().unwrap();
    let (report, output) =
        replay(&[path, "--coordinator", cluster.coordinator_http(), "--block-bytes", "256KiB"]);
    assert_eq!(output.status.code(), Some(0), "{report}");
    assert_eq!((&report["wrong_bytes"], &report["failed_requests"]), (&Value::from(0), &Value::from(0)));
    let [two, one, none] =
        [0, 1, 2].map(|node| cluster.node(node).metric("larder_peer_block_thread_bytes_total"));
    assert!(two > 0.0 && one > 0.0 && none == 0.0, "{two}, {one}, {none}");
    let over_tcp = [0, 1, 2].map(|node| cluster.node(node).metric("larder_peer_tcp_received_bytes_total"));
    assert!(over_tcp[0] > 0.0 && over_tcp[1] == 0.0 && over_tcp[2] > 0.0, "{over_tcp:?}");
}
