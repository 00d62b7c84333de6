//! Chunks in the object store: they outlive their nodes, every node finds them, and no fault of the store stops a node.

use std::fs;
use std::path::{Path, PathBuf};

use larder_client::LookupOptions;
use larder_protocol::ChunkHash;
use larder_protocol::session::{Tier, Wait};
use larder_skips::skip;
use larder_tests::cluster::Cluster;
use larder_tests::content::{CHUNK_TOKENS, prompt};
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use larder_tests::s3::S3Server;
use larder_tests::wait;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::{Engine, LARDER};

fn tokens(chunks: u64) -> u64 {
    chunks * u64::from(CHUNK_TOKENS)
}

/// A store in a folder.
fn folder_config(folder: &Path) -> String {
    format!("[object]\nurl = \"file://{}\"\n", folder.display())
}

fn node(object: &str) -> NodeProcess {
    NodeProcess::start(LARDER, &format!("{SMALL_HOST}{ONE_TENANT}{object}")).unwrap()
}

fn wait_for_uploads(node: &NodeProcess, chunks: u32) {
    let written = || node.metric("larder_object_orders_total{outcome=\"written\"}") >= f64::from(chunks);
    wait::until(&format!("{chunks} chunks are written: {}", node.log()), || written().then_some(()));
}

fn object_status(node: &NodeProcess) -> Value {
    let status: Value = serde_json::from_str(&node.get("/status").unwrap()).unwrap();
    status["object"].clone()
}

fn tiers(engine: &Engine, hashes: &[ChunkHash]) -> Vec<Tier> {
    let chain = engine.namespace.chain(hashes.to_vec());
    let options = LookupOptions { prompt_tokens: 10_000, ..LookupOptions::default() };
    let found = engine.session.lookup(&engine.namespace, &chain, options).wait().unwrap();
    found.spans.iter().map(|span| span.tier).collect()
}

/// A node writes and is killed. Another node, which shares only the store with it, serves every byte.
fn what_a_killed_node_wrote_is_served_by_another(object: &str) {
    let hashes = prompt(b'a', 20);
    let first = node(object);
    assert_eq!(Engine::connect(&first.socket("default")).put(&hashes), 20);
    wait_for_uploads(&first, 20);
    drop(first);
    let other = node(object);
    let engine = Engine::connect(&other.socket("default"));
    assert_eq!(engine.find(&hashes, 10_000), tokens(20), "{}", other.log());
    assert_eq!(tiers(&engine, &hashes), [Tier::Object]);
    assert_eq!(engine.get(&hashes), 20, "{}", other.log());
    assert_eq!(tiers(&engine, &hashes), [Tier::Host], "what was leased stays in memory");
    assert!(other.metric("larder_tokens_hit_total{namespace") >= tokens(20) as f64);
    let read = other.metric("larder_object_orders_total{outcome=\"read\"}");
    assert_eq!((engine.get(&hashes), read), (20, 20.0));
    assert_eq!(
        other.metric("larder_object_requests_total{kind=\"put\",outcome=\"ok\"}"),
        1.0,
        "the probe alone"
    );
}

#[test]
fn what_a_killed_node_wrote_to_a_folder_is_served_by_another() {
    let folder = tempfile::tempdir().unwrap();
    what_a_killed_node_wrote_is_served_by_another(&folder_config(folder.path()));
}

#[test]
fn what_a_killed_node_wrote_to_a_real_s3_store_is_served_by_another() {
    let Some(server) = S3Server::start().unwrap() else {
        return skip("there is no moto_server");
    };
    what_a_killed_node_wrote_is_served_by_another(&server.config("larder"));
}

#[test]
fn peers_go_before_the_object_store_and_it_stands_in_for_a_peer_that_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::start_with(LARDER, 2, 3_000, &folder_config(folder.path())).unwrap();
    let hashes = prompt(b'a', 20);
    assert_eq!(Engine::connect(&cluster.socket(0)).put(&hashes), 20);
    let written = || cluster.node(0).metric("larder_object_orders_total{outcome=\"written\"}");
    wait::until("all is written", || (written() >= 20.0).then_some(()));
    let reader = Engine::connect(&cluster.socket(1));
    wait::until("the directory knows", || (tiers(&reader, &hashes) == [Tier::Peer]).then_some(()));
    cluster.node(0).signal(Signal::KILL).unwrap();
    // The directory may still name the node that is gone.
    wait::until("all of it comes", || (reader.get(&hashes) == 20).then_some(()));
    assert!(cluster.node(1).metric("larder_object_orders_total{outcome=\"read\"}") >= 20.0);
}

#[test]
fn what_is_evicted_is_read_back_from_the_object_store_under_write_back() {
    let folder = tempfile::tempdir().unwrap();
    let host = SMALL_HOST.replace("[host]", "[host]\ncapacity_chunks = 8\npolicy = \"lru\"");
    let object = folder_config(folder.path()) + "write = \"write_back\"\n";
    let node = NodeProcess::start(LARDER, &format!("{host}{ONE_TENANT}{object}")).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    let prompts: Vec<Vec<ChunkHash>> = (0..5).map(|name| prompt(b'a' + name, 8)).collect();
    for hashes in &prompts {
        assert_eq!(engine.put(hashes), 8);
    }
    wait_for_uploads(&node, 32);
    for hashes in &prompts {
        assert_eq!((engine.find(hashes, 10_000), engine.get(hashes)), (tokens(8), 8), "{}", node.log());
    }
}

#[test]
fn a_store_that_is_only_read_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let node = node(&(folder_config(folder.path()) + "write = \"off\"\n"));
    let engine = Engine::connect(&node.socket("default"));
    assert_eq!(engine.put(&prompt(b'a', 4)), 4);
    assert_eq!((engine.get(&prompt(b'a', 4)), engine.find(&prompt(b'b', 4), 10_000)), (4, 0));
    assert!(objects(folder.path()).is_empty());
}

#[test]
fn tenants_find_nothing_of_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let other = "[[tenants]]\nname = \"other\"\nsocket = \"{dir}/other.sock\"\n";
    let object = folder_config(folder.path());
    let node = NodeProcess::start(LARDER, &format!("{SMALL_HOST}{ONE_TENANT}{other}{object}")).unwrap();
    let hashes = prompt(b'a', 4);
    assert_eq!(Engine::connect(&node.socket("default")).put(&hashes), 4);
    wait_for_uploads(&node, 4);
    let stranger = Engine::connect(&node.socket("other"));
    assert_eq!((stranger.find(&hashes, 10_000), stranger.get(&hashes)), (0, 0));
    assert_eq!(stranger.put(&hashes), 4);
    wait_for_uploads(&node, 8);
    assert_eq!(objects(folder.path()).len(), 8, "an object for each");
}

/// The objects in a folder, without the probe that tests whether the folder can be written.
fn objects(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    let inside = |path: PathBuf| if path.is_dir() { objects(&path) } else { vec![path] };
    paths.flat_map(inside).filter(|path| !path.ends_with("probe")).collect()
}

#[test]
fn an_object_altered_behind_its_back_is_a_miss_that_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let object = folder_config(folder.path());
    let hashes = prompt(b'a', 20);
    let first = node(&object);
    assert_eq!(Engine::connect(&first.socket("default")).put(&hashes), 20);
    wait_for_uploads(&first, 20);
    let altered = objects(folder.path());
    let name = hashes[4].to_string();
    let altered =
        altered.iter().find(|path| path.to_string_lossy().contains(&name)).expect("it is named by its hash");
    let mut bytes = fs::read(altered).unwrap();
    bytes[5_000] ^= 1;
    fs::write(altered, bytes).unwrap();
    let other = node(&object);
    let engine = Engine::connect(&other.socket("default"));
    assert_eq!(engine.get(&hashes), 4, "the prefix before it: {}", other.log());
    assert_eq!(other.metric("larder_object_checksum_failures_total"), 1.0);
    assert_eq!(engine.put(&hashes[..5]), 1, "it is computed again");
    assert_eq!(engine.get(&hashes), 20);
}

/// A node whose store cannot be used serves without it, and says why.
fn serves_without_its_store(object: &str, says: &str) {
    let node = node(object);
    let engine = Engine::connect(&node.socket("default"));
    let hashes = prompt(b'a', 4);
    assert_eq!((engine.put(&hashes), engine.get(&hashes), engine.find(&prompt(b'b', 9), 10_000)), (4, 4, 0));
    let status = object_status(&node);
    assert_eq!((&status["reads"], &status["writes"]), (&Value::Bool(false), &Value::Bool(false)), "{status}");
    assert!(status["trouble"].as_str().unwrap().contains(says), "{status}");
    assert_eq!(node.metric("larder_object_closed{side="), 2.0);
    assert!(node.log().contains(says), "no `{says}` in: {}", node.log());
    assert!(!node.log().contains("confidential"));
}

#[test]
fn a_node_serves_without_a_bucket_that_refuses_and_says_so() {
    let Some(server) = S3Server::start().unwrap() else {
        return skip("there is no moto_server");
    };
    serves_without_its_store(&server.config("elsewhere"), "there is no such bucket");
}

#[test]
fn a_node_serves_without_a_store_that_cannot_be_reached_and_says_so() {
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let object = format!(
        "[object]\nurl = \"s3://larder/prefix\"\nendpoint = \"http://{nobody}\"\nallow_http = true\n\
         settings = {{ region = \"us-east-1\", access_key_id = \"id\", secret_access_key = \"confidential\" }}\n"
    );
    serves_without_its_store(&object, "check endpoint");
}

#[test]
fn a_store_that_goes_away_means_misses_within_the_deadline_and_the_node_serves_on() {
    let Some(mut server) = S3Server::start().unwrap() else {
        return skip("there is no moto_server");
    };
    let hashes = prompt(b'a', 10);
    let object = server.config("larder") + "read_deadline_ms = 2000\n";
    let (first, other) = (node(&object), node(&object));
    assert_eq!(Engine::connect(&first.socket("default")).put(&hashes), 10);
    wait_for_uploads(&first, 10);
    let engine = Engine::connect(&other.socket("default"));
    assert_eq!(engine.find(&hashes, 10_000), tokens(10));
    server.kill().unwrap();
    assert_eq!(engine.get(&hashes), 0, "it was found, and cannot be had");
    assert_eq!((engine.put(&hashes), engine.get(&hashes)), (10, 10));
    wait::until("the node says so", || object_status(&other)["trouble"].is_string().then_some(()));
    assert_eq!(engine.find(&prompt(b'b', 10), 10_000), 0);
    wait::until("nothing waits to be written", || nothing_is_held(&other).then_some(()));
}

fn nothing_is_held(node: &NodeProcess) -> bool {
    // The status brings the gauges up to date.
    node.get("/status").unwrap();
    let held = ["leases", "fetches"]
        .map(|what| node.metric(&format!("larder_held{{device=\"0\",what=\"{what}\"}}")));
    let arena = |state| node.metric(&format!("larder_arena_bytes{{device=\"0\",state=\"{state}\"}}"));
    let waiting = node.metric("larder_object_waiting_bytes");
    held == [0.0; 2] && arena("passing") == 0.0 && arena("quarantined") == 0.0 && waiting == 0.0
}

#[test]
fn tickets_that_are_cancelled_while_objects_load_leave_nothing_and_one_that_is_collected_has_all() {
    let folder: TempDir = tempfile::tempdir().unwrap();
    let object = folder_config(folder.path());
    let hashes = prompt(b'a', 60);
    let first = node(&object);
    assert_eq!(Engine::connect(&first.socket("default")).put(&hashes), 60);
    wait_for_uploads(&first, 60);
    let other = node(&object);
    let engine = Engine::connect(&other.socket("default"));
    let chain = engine.namespace.chain(hashes.clone());
    let options = || LookupOptions { prompt_tokens: 10_000, ..LookupOptions::default() };
    let near = LookupOptions { tiers: vec![Tier::Host, Tier::Disk, Tier::Peer], ..options() };
    let ticket = engine.session.prefetch(&engine.namespace, &chain, near).wait().unwrap();
    assert_eq!(ticket.tokens(), 0, "only named tiers are searched");
    drop(ticket);
    for _ in 0..20 {
        drop(engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap());
    }
    wait::until("nothing is held", || nothing_is_held(&other).then_some(()));
    let ticket = engine.session.prefetch(&engine.namespace, &chain, options()).wait().unwrap();
    assert_eq!(ticket.tokens(), tokens(60));
    let lease = engine.session.collect(ticket, Wait::Complete).wait().unwrap();
    assert_eq!(lease.chunks(), 60);
    drop(lease);
    assert_eq!(engine.get(&hashes), 60);
    wait::until("nothing is held", || nothing_is_held(&other).then_some(()));
}

#[test]
fn where_computing_is_faster_than_the_object_store_nothing_is_brought() {
    let folder = tempfile::tempdir().unwrap();
    let object = folder_config(folder.path());
    let first = node(&object);
    let (measured, asked) = (prompt(b'a', 20), prompt(b'b', 20));
    let writer = Engine::connect(&first.socket("default"));
    assert_eq!((writer.put(&measured), writer.put(&asked)), (20, 20));
    wait_for_uploads(&first, 40);
    let other = node(&object);
    let engine = Engine::connect(&other.socket("default"));
    assert_eq!(engine.get(&measured), 20);
    let chain = engine.namespace.chain(asked);
    let computing = |tokens_per_second| LookupOptions {
        prompt_tokens: 10_000,
        prefill_tokens_per_second: Some(tokens_per_second),
        ..LookupOptions::default()
    };
    let fast = engine.session.prefetch(&engine.namespace, &chain, computing(1e12)).wait().unwrap();
    assert_eq!((fast.found().tokens, fast.tokens(), fast.tokens_to_recompute()), (tokens(20), 0, tokens(20)));
    let slow = engine.session.prefetch(&engine.namespace, &chain, computing(1.0)).wait().unwrap();
    assert_eq!((slow.tokens(), slow.tokens_to_recompute()), (tokens(20), 0));
}
