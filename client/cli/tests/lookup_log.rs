//! The lookups that a node recorded are planned like the trace that was played through it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use larder_cli::cluster::NodeAddress;
use larder_cli::generator::Generator;
use larder_cli::replay::link::LinkSettings;
use larder_cli::replay::progress::Progress;
use larder_cli::replay::{Driver, Load, Report};
use larder_cli::trace::Request;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const CAPACITY: u64 = 600;

/// A node that records its lookups, in files so small that they rotate.
struct Node {
    child: Child,
    address: NodeAddress,
}

impl Node {
    fn start(dir: &Path) -> Self {
        let config = format!(
            "name = \"node\"\n[http]\nlisten = \"127.0.0.1:0\"\n\
             [host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\ncapacity_chunks = {CAPACITY}\npolicy = \"lru\"\n\
             [[tenants]]\nname = \"default\"\nsocket = \"{0}/default.sock\"\n\
             [record]\npath = \"{0}/lookups.jsonl\"\nmax_bytes = \"32KiB\"\nold_files = 90\n",
            dir.display()
        );
        std::fs::write(dir.join("node.toml"), config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.args(["node", "--config"]).arg(dir.join("node.toml")).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap();
        let address = NodeAddress {
            name: "node".into(),
            http: ready["http"].as_str().unwrap().parse().unwrap(),
            sockets: serde_json::from_value(ready["sockets"].clone()).unwrap(),
        };
        Self { child, address }
    }

    /// Plays a trace, one request after the other.
    fn play(&self, trace: &[Request]) -> Report {
        let settings = LinkSettings {
            block_bytes: 4_096,
            in_flight: 1,
            prefills: 1,
            deadline: Duration::from_secs(30),
            prefill_tokens_per_s: 1e4,
            load: Load::All,
            computes: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let driver = Driver::connect(std::slice::from_ref(&self.address), settings).await.unwrap();
            driver.play(trace, None, &Progress::new(0, true)).await;
            driver.report(Duration::ZERO, 0)
        })
    }

    fn stop(mut self) {
        kill_process(Pid::from_raw(self.child.id().cast_signed()).unwrap(), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

/// The one row of a plan for `lru`.
fn planned(files: &[PathBuf], more: &[&str]) -> Value {
    let capacity = CAPACITY.to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.arg("plan").args(files).args(["--json", "--policies", "lru", "--nodes", "1"]);
    let output = command.args(["--capacities", &capacity]).args(more).output().unwrap();
    let rows: Result<Vec<Value>, _> = serde_json::from_slice(&output.stdout);
    let rows = rows.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert_eq!(rows.len(), 1);
    rows[0].clone()
}

fn written(dir: &Path, trace: &[Request]) -> PathBuf {
    let line = |request: &Request| {
        let Request { timestamp_ms, input_tokens, output_tokens, block_ids } = request;
        format!(
            "{{\"timestamp\":{timestamp_ms},\"input_length\":{input_tokens},\"output_length\":{output_tokens},\"hash_ids\":{block_ids:?}}}\n"
        )
    };
    let path = dir.join("trace.jsonl");
    std::fs::write(&path, trace.iter().map(line).collect::<String>()).unwrap();
    path
}

#[test]
fn a_plan_over_what_a_node_recorded_equals_one_over_the_trace_and_what_the_node_hit() {
    let dir = tempfile::tempdir().unwrap();
    let trace: Vec<Request> = Generator::new(11).take(400).collect();
    let node = Node::start(dir.path());
    let report = node.play(&trace);
    node.stop();

    let files = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
    let log: Vec<PathBuf> = files.filter(|path| path.to_str().unwrap().contains("lookups.jsonl")).collect();
    assert!(log.len() > 2, "the log has rotated: {log:?}");
    let of_log = planned(&log, &[]);
    let of_trace = planned(&[written(dir.path(), &trace)], &["--full-blocks-only"]);
    for rate in ["block_hit_rate", "token_hit_rate"] {
        assert_eq!(of_log[rate], of_trace[rate], "{rate}");
    }
    let found = serde_json::to_value(&report).unwrap()["token_hit_rate"].as_f64().unwrap();
    let planned = of_log["token_hit_rate"].as_f64().unwrap();
    println!("planned {planned:.4}, replayed {found:.4}");
    assert!(planned > 0.1 && (planned - found).abs() < 0.005, "planned {planned}, replayed {found}");
}
