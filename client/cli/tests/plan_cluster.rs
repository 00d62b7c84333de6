//! The planner against the cluster that it models: four real nodes, one request after the other.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

use larder_cli::generator::Generator;
use larder_cli::trace::Request;
use serde_json::Value;

fn larder(args: &[&str]) -> Value {
    let output =
        Command::new(env!("CARGO_BIN_EXE_larder")).args(args).env_remove("LARDER_LOG").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {text}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{args:?} prints no JSON: {text}"))
}

/// A trace whose requests come two a second.
fn trace(requests: usize) -> String {
    let line = |(number, request): (u64, Request)| {
        format!(
            "{{\"timestamp\":{},\"input_length\":{},\"output_length\":{},\"hash_ids\":{:?}}}\n",
            number * 500,
            request.input_tokens,
            request.output_tokens,
            request.block_ids
        )
    };
    (0..).zip(Generator::new(3).take(requests)).map(line).collect()
}

#[test]
fn four_real_nodes_hit_what_the_plan_says_within_half_a_point() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.jsonl");
    std::fs::write(&file, trace(600)).unwrap();
    let file = file.to_str().unwrap();
    for (sharing, route) in [("shared", "load"), ("routed-shared", "cache")] {
        let planned = larder(&[
            "plan",
            file,
            "--json",
            "--quiet",
            "--policies",
            "lru",
            "--nodes",
            "4",
            "--capacities",
            "250",
            "--sharing",
            sharing,
            "--full-blocks-only",
        ]);
        let replayed = larder(&[
            "replay",
            file,
            "--json",
            "--quiet",
            "--dev",
            "4",
            "--chunks-per-node",
            "250",
            "--policy",
            "lru",
            "--block-bytes",
            "4096",
            "--speed",
            "10",
            "--in-flight",
            "1",
            "--route",
            route,
        ]);
        assert_eq!((&replayed["wrong_bytes"], &replayed["failed_requests"]), (&0.into(), &0.into()));
        let planned = planned[0]["token_hit_rate"].as_f64().unwrap() * 100.0;
        let replayed =
            replayed["tokens_hit"].as_f64().unwrap() * 100.0 / replayed["tokens_asked"].as_f64().unwrap();
        println!("{sharing}: {planned:.2} % planned, {replayed:.2} % replayed");
        assert!(
            (planned - replayed).abs() <= 0.5,
            "{sharing}: {planned:.2} % planned, {replayed:.2} % replayed"
        );
    }
}
