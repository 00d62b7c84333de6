//! A development cluster starts whole or not at all, and leaves nothing behind.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use larder_cli::dev::{DevCluster, DevError, DevOptions};
use tempfile::TempDir;

/// Nodes are played by a shell script; so is the coordinator, unless `dir` holds the real program.
fn options(runtime_dir: &TempDir) -> DevOptions {
    DevOptions {
        program: Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fake-server"),
        runtime_dir: Some(runtime_dir.path().join("larder")),
        ..DevOptions::new().unwrap()
    }
}

fn in_dir(runtime_dir: &TempDir, node_0_does: &str) -> DevOptions {
    let dir = runtime_dir.path().join("dev");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("node-0.does"), node_0_does).unwrap();
    DevOptions { dir: Some(dir), nodes: 2, ..options(runtime_dir) }
}

fn announced(runtime_dir: &TempDir) -> Option<String> {
    fs::read_to_string(runtime_dir.path().join("larder/dev.json")).ok()
}

#[tokio::test]
async fn a_cluster_is_found_while_it_runs_and_leaves_nothing_behind() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let cluster = DevCluster::start(DevOptions { nodes: 3, ..options(&runtime_dir) }).await.unwrap();
    let names: Vec<_> = cluster.addresses().nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["node-0", "node-1", "node-2"]);
    assert!(announced(&runtime_dir).unwrap().contains("node-2.sock"));
    assert_eq!(cluster.logs().count(), 4);

    let dir = cluster.dir().to_owned();
    assert!(dir.join("node-1.toml").exists());
    cluster.stop().await.unwrap();
    assert!(!dir.exists() && announced(&runtime_dir).is_none());
}

#[tokio::test]
async fn every_process_has_a_certificate_that_only_its_owner_reads() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let cluster = DevCluster::start(in_dir(&runtime_dir, "")).await.unwrap();
    for name in ["coordinator", "node-0", "node-1"] {
        let [certificate, key] = ["pem", "key"].map(|kind| cluster.dir().join(name).with_extension(kind));
        assert!(fs::read_to_string(certificate).unwrap().contains("BEGIN CERTIFICATE"));
        assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o777, 0o600);
        let config = fs::read_to_string(cluster.dir().join(name).with_extension("toml")).unwrap();
        assert!(config.contains(&format!("{name}.key")), "{config}");
    }
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn a_cluster_does_not_remember_the_nodes_of_the_cluster_before_in_its_folder() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let options = in_dir(&runtime_dir, "");
    let state = options.dir.as_ref().unwrap().join("coordinator.redb");
    fs::write(&state, "the members before").unwrap();
    let cluster = DevCluster::start(options).await.unwrap();
    assert!(!state.exists());
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn two_clusters_run_side_by_side_and_the_newer_one_is_announced() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let older = DevCluster::start(options(&runtime_dir)).await.unwrap();
    let newer = DevCluster::start(options(&runtime_dir)).await.unwrap();
    assert_ne!(older.dir(), newer.dir());
    older.stop().await.unwrap();
    assert!(announced(&runtime_dir).unwrap().contains(newer.dir().to_str().unwrap()));
    newer.stop().await.unwrap();
}

#[tokio::test]
async fn a_node_that_dies_while_starting_is_told_with_the_end_of_its_log() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let error = DevCluster::start(in_dir(&runtime_dir, "die-at-once")).await.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("node-0 died (exit status: 3)"), "{text}");
    assert!(text.ends_with("the arena is larger than the memory"), "{text}");
    assert!(announced(&runtime_dir).is_none());
}

#[tokio::test]
async fn a_node_that_dies_is_started_again_on_its_old_address() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let options = in_dir(&runtime_dir, "die-once");
    let does = options.dir.as_ref().unwrap().join("node-0.does");
    let mut cluster = DevCluster::start(options).await.unwrap();
    let again = async {
        while does.exists() || cluster_log(&does).lines().count() < 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        gave_up = cluster.supervise() => panic!("{gave_up}"),
        () = again => {}
    }
    let config = fs::read_to_string(does.with_file_name("node-0.toml")).unwrap();
    assert!(config.contains("[http]\nlisten = \"127.0.0.1:9\""), "{config}");
    cluster.stop().await.unwrap();
}

fn cluster_log(does: &Path) -> String {
    fs::read_to_string(does.with_extension("log")).unwrap_or_default()
}

#[tokio::test]
async fn a_node_that_dies_again_and_again_is_told_with_the_end_of_its_log() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let mut cluster = DevCluster::start(in_dir(&runtime_dir, "die-later")).await.unwrap();
    let gave_up = cluster.supervise().await;
    assert_eq!(gave_up.died.name, "node-0");
    assert!(gave_up.died.log.lines.ends_with("a slot is lost\na slot is lost"), "{gave_up}");
    let text = gave_up.to_string();
    assert!(text.lines().next().unwrap().contains("it is not started again"), "{text}");
    cluster.stop().await.unwrap();
}

#[tokio::test]
async fn a_program_that_is_no_server_is_told() {
    let runtime_dir = tempfile::tempdir().unwrap();
    let error = DevCluster::start(in_dir(&runtime_dir, "say-nonsense")).await.unwrap_err();
    assert_eq!(error.to_string(), "node-0 printed `hello` instead of its addresses");

    let missing = DevOptions { program: "/nowhere/larder".into(), ..options(&runtime_dir) };
    assert!(matches!(DevCluster::start(missing).await, Err(DevError::Spawn { .. })));
}
