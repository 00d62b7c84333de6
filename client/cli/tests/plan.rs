//! `larder plan` and `larder size` as a shell sees them, and the planner's numbers on published traces.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Output};

use larder_cli::plan::{Outcome, PlanPolicy, Sharing, Workload, sweep};
use larder_cli::trace::TraceReader;
use serde_json::Value;

fn larder(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder")).args(args).env_remove("LARDER_LOG").output().unwrap()
}

fn refusal(args: &[&str]) -> String {
    let output = larder(args);
    assert!(output.stdout.is_empty(), "errors go to standard error");
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}

fn file(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Two prompts that share their first block, again and again.
fn small_trace() -> String {
    let line = |i: u64| {
        let ids = [1, 2 + i % 2];
        format!(
            "{{\"timestamp\":{},\"input_length\":1024,\"output_length\":1,\"hash_ids\":{ids:?}}}\n",
            i * 1_000
        )
    };
    (0..20).map(line).collect()
}

/// A published trace, where this machine has it.
fn published(name: &str) -> Option<Workload> {
    let file = File::open(larder_skips::published_trace(name)?).unwrap();
    Some(Workload::new(&TraceReader::new(BufReader::new(file)).read_all(None).unwrap(), true))
}

fn planned(workload: &Workload, policies: &[&str], nodes: u16, capacities: &[u64]) -> Vec<Outcome> {
    let policies: Vec<PlanPolicy> = policies.iter().map(|name| name.parse().unwrap()).collect();
    let grid = sweep::Grid {
        cluster_policies: policies.clone(),
        policies,
        capacities: capacities.to_vec(),
        nodes: vec![nodes],
        sharing: vec![Sharing::Local, Sharing::Routed, Sharing::Shared],
    };
    sweep::run(workload, &grid.scenarios(workload.distinct_blocks), true)
}

fn block_rates(outcomes: &[Outcome]) -> Vec<String> {
    outcomes.iter().map(|outcome| format!("{:.2}", outcome.block_hit_rate * 100.0)).collect()
}

#[test]
fn the_ceiling_and_lru_hit_what_the_published_traces_say() {
    if let Some(workload) = published("conversation") {
        let capacities = [1_000, 3_000, 10_000, 30_000, 50_000];
        let opt = planned(&workload, &["opt"], 1, &capacities);
        assert_eq!(block_rates(&opt), ["19.07", "29.45", "36.64", "36.64", "36.64"]);
        let lru = planned(&workload, &["lru"], 1, &capacities);
        assert_eq!(block_rates(&lru), ["4.45", "6.53", "21.16", "32.57", "35.46"]);
    }
    if let Some(workload) = published("synthetic") {
        let capacities = [1_000, 3_000, 10_000, 30_000];
        let opt = planned(&workload, &["opt"], 1, &capacities);
        assert_eq!(block_rates(&opt), ["27.67", "44.67", "61.80", "63.96"]);
        let lru = planned(&workload, &["lru"], 1, &capacities);
        assert_eq!(block_rates(&lru), ["8.41", "19.06", "42.39", "62.42"]);
        let infinite = &planned(&workload, &["infinite"], 1, &capacities)[0];
        assert_eq!(
            format!("{:.1} {:.1}", infinite.block_hit_rate * 1e2, infinite.token_hit_rate * 1e2),
            "64.0 65.1"
        );
    }
}

#[test]
fn clusters_of_sixteen_save_what_the_published_traces_say() {
    for (name, expected) in [("conversation", [7.6, 29.7, 36.0]), ("synthetic", [10.4, 62.3, 65.1])] {
        let Some(workload) = published(name) else { continue };
        let outcomes = planned(&workload, &["lru"], 16, &[3_000]);
        for (outcome, expected) in outcomes.iter().zip(expected) {
            let found = outcome.token_hit_rate * 100.0;
            assert!((found - expected).abs() < 0.1, "{name}, {}: {found:.2}", outcome.scenario.sharing);
        }
    }
}

#[test]
fn a_plan_prints_tables_and_writes_a_report_that_stands_alone() {
    let dir = tempfile::tempdir().unwrap();
    let trace = file(dir.path(), "trace.jsonl", &small_trace());
    let report = dir.path().join("report.html");
    let output = larder(&[
        "plan",
        &trace,
        "--out",
        report.to_str().unwrap(),
        "--nodes",
        "1,2",
        "--capacities",
        "1,2,3",
    ]);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains("opt") && table.contains("Recommended: one node of"), "{table}");
    let html = std::fs::read_to_string(report).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.contains("<svg") && html.ends_with("</html>\n"));
}

#[test]
fn json_is_one_array_with_fractions_and_no_report_unless_asked() {
    let dir = tempfile::tempdir().unwrap();
    let trace = file(dir.path(), "trace.jsonl", &small_trace());
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["plan", &trace, "--json", "--policies", "lru,opt", "--capacities", "2,3k", "--nodes", "1,2"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rows.len(), (2 + 2 * 3) + (2 + 2));
    assert!(rows.iter().all(|row| (0.0..=1.0).contains(&row["token_hit_rate"].as_f64().unwrap())));
    assert_eq!(rows[1]["capacity_chunks"], 3_000);
    assert!(!dir.path().join("plan.html").exists());
}

#[test]
fn what_cannot_be_planned_is_refused_with_what_could() {
    let dir = tempfile::tempdir().unwrap();
    let trace = file(dir.path(), "trace.jsonl", &small_trace());
    assert!(
        refusal(&["plan", &trace, "--policies", "lru,lfru"])
            .contains("there is no policy `lfru`; there are: ")
    );
    assert!(refusal(&["plan", &trace, "--capacities", "0"]).contains("the least is 1"));
    assert!(refusal(&["plan", &trace, "--nodes", "0"]).contains("1..=64"));
    assert!(
        refusal(&["plan", &trace, "--out", "/nowhere/plan.html"]).contains("name another file with --out")
    );
    let broken = file(dir.path(), "broken.jsonl", &format!("{}{{\"timestamp\":5}}\n", small_trace()));
    assert!(
        refusal(&["plan", &broken])
            .contains("line 21, column 15: not a request: missing field `input_length`")
    );
    let empty = file(dir.path(), "empty.jsonl", "\n");
    assert!(refusal(&["plan", &empty]).contains("the trace is empty"));
}

#[test]
fn sizes_are_printed_as_a_table_or_as_one_object() {
    let dir = tempfile::tempdir().unwrap();
    let qwen = r#"{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "torch_dtype": "bfloat16"}"#;
    let config = file(dir.path(), "config.json", qwen);
    let table = larder(&["size", &config, "--tp", "2", "--chunk-tokens", "16"]).stdout;
    let table = String::from_utf8(table).unwrap();
    assert!(table.contains("458,752 B") && table.contains("times as fast as computing it"), "{table}");

    let args =
        ["size", dir.path().to_str().unwrap(), "--tp", "2", "--chunk-tokens", "16", "--memory", "1GiB"];
    let output = larder(&[&args[..], &["--link", "100", "--json"]].concat());
    let sizes: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(sizes["bytes_per_token_per_layer_per_rank"], 16_384 / 16);
    assert_eq!(sizes["bytes_per_chunk"], 2 * 28 * 16_384);
    assert_eq!(sizes["memory"]["chunks"], (1 << 30) / (2 * 28 * 16_384));
    assert_eq!(sizes["tokens_per_gib"], (1 << 30) / (2 * 28 * 1_024));
}

#[test]
fn a_field_that_a_config_lacks_can_be_given() {
    let dir = tempfile::tempdir().unwrap();
    let config = file(
        dir.path(),
        "config.json",
        r#"{"hidden_size": 64, "num_attention_heads": 4, "dtype": "float16"}"#,
    );
    assert!(
        refusal(&["size", &config])
            .contains("has no `num_hidden_layers`: pass --set num_hidden_layers=VALUE")
    );
    assert!(larder(&["size", &config, "--set", "num_hidden_layers=2"]).status.success());
    let text = refusal(&["size", &file(dir.path(), "text", "hello")]);
    assert!(text.contains("is not a model's config.json"), "{text}");
}
