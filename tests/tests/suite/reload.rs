//! Nodes that read their configuration again while they run.

use std::fs;
use std::time::Duration;

use larder_tests::cluster::Cluster;
use larder_tests::server::signal;
use larder_tests::wait;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::Engine;
use super::drain::{admin, cluster};

/// Changes a node's configuration file.
fn edit(cluster: &Cluster, name: &str, change: impl FnOnce(String) -> String) {
    let file = cluster.dir().join(name).with_extension("toml");
    let text = fs::read_to_string(&file).unwrap();
    let changed = change(text.clone());
    assert_ne!(text, changed);
    // As people's editors and Kubernetes do: there is never half a file.
    let new = file.with_extension("new");
    fs::write(&new, changed).unwrap();
    fs::rename(new, file).unwrap();
}

fn actor(cluster: &Cluster) -> Value {
    let status: Value = serde_json::from_str(&cluster.node(0).get("/status").unwrap()).unwrap();
    status["actors"][0].clone()
}

fn with_policy(text: String) -> String {
    text.replace("policy = \"lru\"", "policy = \"sieve\"")
}

#[test]
fn settings_that_can_change_do_so_when_their_file_changes() {
    let cluster = cluster(1, "");
    assert_eq!(actor(&cluster)["policy"], "lru");
    edit(&cluster, "node-0", with_policy);
    wait::until("it has the other policy", || (actor(&cluster)["policy"] == "sieve").then_some(()));
}

#[test]
fn a_node_reads_its_configuration_again_at_sighup() {
    let cluster = cluster(1, "");
    edit(&cluster, "node-0", with_policy);
    signal(cluster.node(0).pid(), Signal::HUP).unwrap();
    wait::until("it has the other policy", || (actor(&cluster)["policy"] == "sieve").then_some(()));
}

#[test]
fn an_admin_hears_what_has_changed_and_what_waits_for_a_restart() {
    let cluster = cluster(1, "");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'a', 40);
    assert_eq!(engine.put(&hashes), 40);
    edit(&cluster, "node-0", |text| {
        let text = text.replace("capacity_chunks = 3000", "capacity_chunks = 10");
        format!("trust_engines = true\n{text}")
    });
    let (status, report, said) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(0), "{said}");
    let node = &report["nodes"][0];
    // The node may have seen the changed file first.
    let changed = json!([{ "key": "host.capacity_chunks", "before": "3000", "after": "10" }]);
    assert!(node["applied"] == changed || node["applied"] == json!([]), "{report}");
    assert_eq!(node["at_restart"], json!(["trust_engines"]));
    wait::until("what is too much is evicted", || (engine.get(&hashes) == 10).then_some(()));
}

#[test]
fn a_file_with_a_fault_changes_nothing() {
    let cluster = cluster(1, "");
    edit(&cluster, "node-0", |text| with_policy(text) + "\n[hots]\nx = 1\n");
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1));
    let error = report["nodes"][0]["error"].as_str().unwrap();
    assert!(error.contains("hots"), "{error}");
    assert_eq!(actor(&cluster)["policy"], "lru");
    edit(&cluster, "node-0", |text| text.replace("\n[hots]\nx = 1\n", "").replace("sieve", "fancy"));
    let (status, report, _) = admin(&cluster, &["reload"]);
    assert_eq!(status, Some(1));
    assert!(report["nodes"][0]["error"].as_str().unwrap().contains("fancy"), "{report}");
    assert_eq!(actor(&cluster)["policy"], "lru");
}

#[test]
fn only_an_admin_has_a_node_read_its_configuration() {
    let cluster = cluster(1, "");
    let file = |ending: &str| cluster.dir().join(ending).display().to_string();
    let output = std::process::Command::new(super::LARDER)
        .args(["reload", "--coordinator", cluster.coordinator_http(), "--ca", &file("ca.pem")])
        .args(["--certificate", &file("node-0.pem"), "--key", &file("node-0.key")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("only an admin may do this"));
}

#[test]
fn the_audit_log_says_who_changed_what() {
    let cluster = cluster(1, "[audit]\npath = \"{name}.audit\"\n");
    let engine = Engine::connect(&cluster.socket(0));
    let hashes = larder_tests::content::prompt(b'a', 5);
    engine.put(&hashes);
    let chain = engine.namespace.chain(hashes.clone());
    engine.session.pin(&engine.namespace, &chain, Duration::from_secs(5)).wait().unwrap();
    assert_eq!(admin(&cluster, &["policy", "sieve"]).0, Some(0));
    edit(&cluster, "node-0", |text| text.replace("capacity_chunks = 3000", "capacity_chunks = 10"));
    assert_eq!(admin(&cluster, &["reload"]).0, Some(0));
    assert_eq!(admin(&cluster, &["drain", "node-0"]).0, Some(1), "it is the only node");
    let file = cluster.dir().join("node-0.audit");
    let lines = wait::until("all lines are there", || {
        let text = fs::read_to_string(&file).ok()?;
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        lines.iter().any(|line| line["action"] == "drain").then_some(lines)
    });
    let of = |action: &str| lines.iter().find(|line| line["action"] == action).unwrap();
    let pin = of("pin");
    let by = pin["by"].as_str().unwrap();
    assert!(by.contains("of tenant default pid "), "{by}");
    assert!(pin["what"].as_str().unwrap().contains("5 chunks for "), "{pin}");
    let policy = of("set_policy");
    assert_eq!((&policy["by"], &policy["what"]), (&"admin admin".into(), &"sieve".into()));
    assert_eq!((&policy["node"], &policy["outcome"]), (&"node-0".into(), &"done".into()));
    let changed = lines.iter().filter(|line| line["action"] == "reload").map(|line| line["what"].clone());
    assert!(changed.collect::<Vec<_>>().contains(&"host.capacity_chunks = 10".into()), "{lines:?}");
    assert!(of("drain")["outcome"].as_str().unwrap().contains("nobody would take its chunks"));
}
