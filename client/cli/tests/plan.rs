//! `larder plan` and `larder size` as a shell sees them, and the planner's numbers on published traces.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::File;
use std::io::{BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;
use larder_cli::plan::{Outcome, PlanPolicy, Prices, Sharing, Tiers, Workload, sweep};
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

/// A published trace, if this machine has it.
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
        tiers: vec![Tiers::default()],
    };
    let conditions = sweep::Conditions { in_flight: 1, prices: Prices::of(64 << 20), quiet: true };
    sweep::run(workload, &grid.scenarios(workload.distinct_blocks), &conditions)
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
            // One pool of all memory is the bound of what nodes share.
            let is_shared = outcome.scenario.sharing == Sharing::Shared;
            let less = if is_shared { 1.3 } else { 0.1 };
            assert!(
                (-less..0.1).contains(&(found - expected)),
                "{name}, {}: {found:.2}",
                outcome.scenario.sharing
            );
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
    assert_eq!(rows.len(), (2 + 2 * 4) + (2 + 2));
    assert!(rows.iter().all(|row| (0.0..=1.0).contains(&row["token_hit_rate"].as_f64().unwrap())));
    assert_eq!(rows[1]["capacity_chunks"], 3_000);
    let recommended: Vec<&Value> = rows.iter().filter(|row| row["recommended"] == true).collect();
    assert!(recommended.len() == 1 && recommended[0]["policy"] == "lru", "{recommended:?}");
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
fn a_packed_trace_is_planned_and_replayed_as_it_is_and_its_errors_name_lines_of_the_unpacked_file() {
    let dir = tempfile::tempdir().unwrap();
    let packed = |name: &str, text: &str| {
        let path = dir.path().join(name);
        let mut file = GzEncoder::new(File::create(&path).unwrap(), Compression::default());
        file.write_all(text.as_bytes()).unwrap();
        file.finish().unwrap();
        path.to_str().unwrap().to_owned()
    };
    let args = ["--json", "--policies", "lru", "--nodes", "1", "--capacities", "2"];
    let plain = larder(&[&["plan", &file(dir.path(), "plain", &small_trace())], &args[..]].concat());
    let named_otherwise = larder(&[&["plan", &packed("trace.jsonl", &small_trace())], &args[..]].concat());
    let rate = |output: Output| {
        let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        rows[0]["token_hit_rate"].as_f64().unwrap()
    };
    assert!((rate(plain) - rate(named_otherwise)).abs() < 1e-12);
    let broken = packed("broken.gz", &format!("{}{{\"timestamp\":5}}\n", small_trace()));
    let wrong = "line 21, column 15: not a request: missing field `input_length`";
    assert!(refusal(&["plan", &broken]).contains(wrong));
    assert!(refusal(&["replay", &broken]).contains(wrong));
    let whole = std::fs::read(&broken).unwrap();
    let cut = dir.path().join("cut.gz");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let text = refusal(&["replay", cut.to_str().unwrap()]);
    assert!(
        text.contains("cannot be read") && text.contains("packed by gzip, and damaged or cut off"),
        "{text}"
    );
}

#[test]
fn a_packed_file_that_unpacks_to_a_thousand_times_its_size_is_refused_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bomb.gz");
    let mut packed = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
    let zeros = vec![b'0'; 1 << 20];
    (0..256).for_each(|_| packed.write_all(&zeros).unwrap());
    packed.finish().unwrap();
    // Less data than it unpacks to: no heap may grow beyond 160 MiB.
    let script = "ulimit -d 163840; exec \"$0\" plan \"$1\"";
    let larder = env!("CARGO_BIN_EXE_larder");
    let output = Command::new("sh").args(["-c", script, larder]).arg(&path).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("line 1: longer than"), "{text}");
}

#[test]
fn results_of_benches_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    // As `vllm bench serve --save-result --save-detailed` writes it: one object, longer than any request.
    let texts = vec!["\"a word and another one\""; 60_000].join(", ");
    let vllm = format!(
        "{{\"date\": \"20260101-000000\", \"endpoint_type\": \"openai\", \"model_id\": \"m\", \"num_prompts\": 2, \
         \"request_rate\": \"inf\", \"duration\": 1.5, \"completed\": 2, \"request_throughput\": 1.3, \
         \"input_lens\": [9, 8], \"output_lens\": [1, 1], \"ttfts\": [0.1, 0.2], \"generated_texts\": [{texts}]}}"
    );
    let long = file(dir.path(), "vllm.json", &vllm);
    let text = refusal(&["plan", &long]);
    assert!(text.contains("line 1: the result of `vllm bench serve`"), "{text}");
    assert!(text.contains("no ids") && text.contains("--record FILE"), "{text}");
    let record = "{\"metadata\":{\"session_num\":0,\"conversation_id\":\"c\",\"turn_index\":0,\"request_start_ns\":1},\
                  \"metrics\":{\"input_sequence_length\":{\"value\":550,\"unit\":\"tokens\"}},\"error\":null}\n";
    let text = refusal(&["plan", &file(dir.path(), "profile_export.jsonl", record)]);
    assert!(text.contains("the records of an AIPerf run") && text.contains("--input-file"), "{text}");
}

#[test]
fn an_input_of_aiperf_is_planned_with_its_sessions_and_rows_without_times_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let rows = "{\"session_id\":\"a\",\"timestamp\":0,\"input_length\":1024,\"output_length\":512,\"hash_ids\":[1,2]}\n\
                {\"session_id\":\"a\",\"delay\":900,\"input_length\":512,\"output_length\":9,\"hash_ids\":[2]}\n\
                {\"input_length\":1024,\"output_length\":9,\"hash_ids\":[1,2]}\n";
    let trace = file(dir.path(), "aiperf.jsonl", rows);
    let output = larder(&["plan", &trace, "--json", "--policies", "infinite", "--quiet"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("1 of 3 requests have no time"), "{text}");
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    // The second turn has 2,048 tokens, of which 1,024 were there before; the last prompt is there whole.
    let expected = (1_024.0 + 1_024.0) / (1_024.0 + 2_048.0 + 1_024.0);
    assert!((rows[0]["token_hit_rate"].as_f64().unwrap() - expected).abs() < 1e-9, "{rows:?}");
}

#[test]
fn tiers_below_memory_are_charged_and_the_cheapest_cluster_for_a_hit_rate_uses_them() {
    let dir = tempfile::tempdir().unwrap();
    // Eight prompts of one block in turn: memory for two keeps none of them until it is used again.
    let line = |i: u64| {
        let id = i % 8;
        format!(
            "{{\"timestamp\":{},\"input_length\":512,\"output_length\":1,\"hash_ids\":[{id}]}}\n",
            i * 60_000
        )
    };
    let trace = file(dir.path(), "loop.jsonl", &(0..80).map(line).collect::<String>());
    let args = ["--policies", "lru", "--nodes", "1", "--capacities", "2,8", "--disk-chunks-per-node", "0,30"];
    let output = larder(&[&["plan", &trace, "--json", "--object-store"], &args[..]].concat());
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found = |capacity: u64, disk: u64, objects: bool| {
        let wanted = |row: &&Value| {
            (&row["capacity_chunks"], &row["disk_chunks"], &row["object_store"])
                == (&capacity.into(), &disk.into(), &objects.into())
        };
        let row = rows.iter().find(wanted).unwrap();
        let number = |name: &str| row[name].as_f64().unwrap();
        (number("token_hit_rate"), number("cost_per_hour"), number("ttft_mean_ms"))
    };
    let (memory, small, disk, objects) =
        (found(8, 0, false), found(2, 0, false), found(2, 30, false), found(2, 0, true));
    assert!(
        small.0 < 0.01 && [memory, disk, objects].iter().all(|found| (found.0 - 0.9).abs() < 1e-9),
        "{rows:?}"
    );
    assert!(small.1 < objects.1 && objects.1 < disk.1 && disk.1 < memory.1, "{rows:?}");
    assert!(memory.2 < disk.2 && disk.2 < small.2, "{rows:?}");
    let html = dir.path().join("plan.html");
    let html = html.to_str().unwrap();
    let output = larder(&[&["plan", &trace, "--hit-rate", "50", "--out", html], &args[..]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("Recommended: one node of 2 chunks (128.0 MiB) with disks"), "{text}");
    assert!(text.contains("mean ms") && text.contains("price"), "{text}");
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
    let text = refusal(&["size", &config, "--set", "num_hidden_layers=2", "--set", "typo=1"]);
    assert!(text.contains("--set typo: the size of this model does not depend on this field"), "{text}");
    let text = refusal(&["size", &file(dir.path(), "text", "hello")]);
    assert!(text.contains("is not a model's config.json"), "{text}");
}
