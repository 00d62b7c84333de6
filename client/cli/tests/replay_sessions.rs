//! The sessions of a replay with the nodes of a cluster.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use larder_cli::dev::{DevCluster, DevOptions};
use larder_cli::generator::Generator;
use larder_cli::replay::link::{LinkError, LinkSettings};
use larder_cli::replay::progress::Progress;
use larder_cli::replay::{Driver, Load};
use tempfile::TempDir;

const SETTINGS: LinkSettings = LinkSettings {
    block_bytes: 4_096,
    in_flight: 1,
    prefills: 1,
    deadline: Duration::from_secs(30),
    prefill_tokens_per_s: 1e-3,
    load: Load::All,
    computes: false,
};

/// A cluster of two nodes; dropping it ends it.
async fn cluster(runtime_dir: &TempDir) -> DevCluster {
    let options = DevOptions {
        program: env!("CARGO_BIN_EXE_larder").into(),
        runtime_dir: Some(runtime_dir.path().join("larder")),
        nodes: 2,
        ..DevOptions::new().unwrap()
    };
    DevCluster::start(options).await.unwrap()
}

#[tokio::test]
async fn a_node_at_whose_socket_another_answers_does_not_count_as_two() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let cluster = cluster(&runtime_dir).await;
    let mut nodes = cluster.addresses().nodes.clone();
    nodes[1].sockets = nodes[0].sockets.clone();
    Driver::connect(&nodes, SETTINGS).await.unwrap();
    let error = Driver::connect(&nodes[1..], SETTINGS).await.unwrap_err();
    assert!(matches!(error, LinkError::AllDown), "the other node is left out: {error}");
}

#[tokio::test]
async fn an_interrupted_replay_has_asked_for_the_tokens_that_it_hit() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let cluster = cluster(&runtime_dir).await;
    let nodes = cluster.addresses().nodes.clone();
    let requests: Vec<_> = Generator::new(0).take(20).collect();
    let silent = Progress::new(0, true);
    Driver::connect(&nodes[..1], SETTINGS).await.unwrap().play(&requests, None, &silent).await;
    // Computing a token takes a quarter of an hour.
    let driver = Driver::connect(&nodes[..1], LinkSettings { computes: true, ..SETTINGS }).await.unwrap();
    let report = async {
        loop {
            let report = driver.report(Duration::ZERO, 0);
            if report.tokens_hit > 0 {
                return report;
            }
            tokio::task::yield_now().await;
        }
    };
    let report = tokio::select! {
        () = driver.play(&requests, None, &silent) => panic!("the replay has computed its prompts"),
        report = report => report,
    };
    let lost: u64 = report.tokens_lost.values().sum();
    assert_eq!((report.requests, report.tokens_asked), (1, report.tokens_hit + lost));
    assert_eq!(report.tokens_from_before, report.tokens_hit, "the first replay computed them");
}
