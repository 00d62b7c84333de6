//! Clusters of this release and the one before: nodes, coordinators and engines of both, upgraded in both orders under load.
//!
//! `tests/run heavy` builds the release before from the repository's history, once.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use larder_protocol::chain::{Links, Start};
use larder_protocol::limits::EARLIEST_SESSION_VERSION;
use larder_protocol::session::{Hello, Request, Reserve, Response};
use larder_protocol::v1::is_merged;
use larder_protocol::{Chain, ChunkHash};
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, prompt};
use larder_tests::node::{NodeProcess, ONE_TENANT};
use larder_tests::raw::{RawSession, register};
use larder_tests::replay::Replay;
use larder_tests::wait;
use serde_json::Value;

use super::{Engine, LARDER};

/// The last commit that speaks only `larder/1`.
const BEFORE: &str = "b31be62";

/// The program of this commit, built if it is not there yet; `None`, and a skipped test, if it cannot be built.
fn before() -> Option<String> {
    if std::env::var_os("LARDER_HEAVY_TESTS").is_none() {
        larder_skips::skip("builds the release before: `tests/run heavy` does");
        return None;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(root).args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
        command
    };
    let has = git(&["cat-file", "-e", &format!("{BEFORE}^{{commit}}")]).status();
    if !has.is_ok_and(|status| status.success()) {
        larder_skips::skip(&format!("the repository's history lacks {BEFORE}: fetch it"));
        return None;
    }
    let folder = root.join("target/before");
    let (source, target) = (folder.join("source"), folder.join("target"));
    let program = target.join("debug/larder");
    if !program.exists() {
        std::fs::create_dir_all(&source).unwrap();
        let archive = folder.join("source.tar");
        let archived = git(&["archive", "--output", path(&archive), BEFORE]).status().unwrap();
        assert!(archived.success());
        let unpacked =
            Command::new("tar").args(["xf", path(&archive), "-C", path(&source)]).status().unwrap();
        assert!(unpacked.success());
        let built = Command::new("cargo")
            .args(["build", "--quiet", "--locked", "-p", "larder-cli", "--bin", "larder"])
            .current_dir(&source)
            .env("CARGO_TARGET_DIR", &target)
            .status()
            .unwrap();
        assert!(built.success(), "the release before can be built");
    }
    Some(path(&program).to_owned())
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Replays over a cluster, one after the other, by engines of one release.
struct Load {
    stops: Arc<AtomicBool>,
    player: Option<thread::JoinHandle<Vec<Value>>>,
}

impl Load {
    fn start(program: &str, cluster: &Cluster) -> Self {
        let stops = Arc::new(AtomicBool::new(false));
        let (stop, program) = (Arc::clone(&stops), program.to_owned());
        let http = cluster.coordinator_http().to_owned();
        let player = thread::spawn(move || {
            let mut reports = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let arguments = ["--coordinator", &http, "--block-bytes", "4096", "--requests", "1500"];
                let (report, status) = match Replay::start(&program, &arguments).unwrap().finish() {
                    // The coordinator was down at that moment, so there was nothing to play on.
                    Err(error) if format!("{error:#}").contains("cannot ask the coordinator") => continue,
                    ended => ended.unwrap(),
                };
                assert_eq!(status, Some(0), "{report}");
                reports.push(report);
            }
            reports
        });
        Self { stops, player: Some(player) }
    }

    /// Waits for the replay that is under way, and checks that no replay had a failure.
    fn finish(mut self, whose: &str) {
        self.stops.store(true, Ordering::Relaxed);
        let reports = self.player.take().unwrap().join().unwrap();
        let sum = |field: &str| reports.iter().map(|report| report[field].as_u64().unwrap()).sum::<u64>();
        println!(
            "engines of {whose}: {} replays, {} failed requests, {} wrong bytes, token hit rates {:?}",
            reports.len(),
            sum("failed_requests"),
            sum("wrong_bytes"),
            reports.iter().map(|report| report["token_hit_rate"].as_f64().unwrap()).collect::<Vec<_>>()
        );
        assert_eq!((sum("failed_requests"), sum("wrong_bytes")), (0, 0));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
    }
}

const ONE_HOST: &str =
    "[http]\nlisten = \"127.0.0.1:0\"\n[host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\n";

const DISK: &str = "[disk]\nfolder = \"{name}\"\ncapacity_bytes = \"64MiB\"\nsegment_bytes = \"1MiB\"\n";

fn on_disk(cluster: &Cluster, node: usize, chunks: usize) {
    wait::until("the chunks are on disk", || {
        let text = cluster.node(node).get("/metrics").ok()?;
        let there = larder_tests::server::sum(&text, "larder_cached_chunks{device=\"0\",tier=\"disk\"}");
        (there >= chunks as f64).then_some(())
    });
}

/// Puts prompts in several parts, so that the later parts name chunks before them.
fn put_in_parts(cluster: &Cluster, node: usize, names: &[u8]) -> Vec<Vec<ChunkHash>> {
    let engine = Engine::connect(&cluster.socket(node));
    let put = |&name: &u8| {
        let hashes = prompt(name, 100);
        let chain = engine.namespace.chain(hashes.clone());
        for (from, to) in [(0, 6), (6, 7), (7, 29), (29, 100)] {
            assert_eq!(engine.put_chain(&chain.part(from, to)), to - from);
        }
        hashes
    };
    names.iter().map(put).collect()
}

fn serves(cluster: &Cluster, node: usize, prompts: &[Vec<ChunkHash>]) {
    for hashes in prompts {
        wait::until("the node serves all of it", || {
            (Engine::connect(&cluster.socket(node)).get(hashes) == hashes.len()).then_some(())
        });
    }
}

/// The number of chunks of these prompts that `node` gets; other nodes have put them.
fn shared(cluster: &Cluster, node: usize, prompts: &[Vec<ChunkHash>]) -> usize {
    let engine = Engine::connect(&cluster.socket(node));
    prompts.iter().map(|hashes| engine.get(hashes)).sum()
}

#[test]
fn an_engine_of_the_release_before_has_its_sessions_and_its_anchors_are_put_right() {
    let node = NodeProcess::start(LARDER, &format!("{ONE_HOST}{ONE_TENANT}")).unwrap();
    let hashes = prompt(b'a', 20);
    assert_eq!(Engine::connect(&node.socket("default")).put(&hashes[..7]), 7);
    let mut session = RawSession::connect(&node.socket("default")).unwrap();
    let hello = Hello {
        version: EARLIEST_SESSION_VERSION,
        client: "before".into(),
        device: None,
        window_bytes: 1 << 20,
    };
    let (Response::Welcome(welcome), _window) = session.ask(&Request::Hello(hello)).unwrap() else {
        panic!("no welcome");
    };
    assert_eq!(welcome.version, EARLIEST_SESSION_VERSION);
    let (Response::Registered(registered), _) = session.ask(&register(BLOCK_BYTES as u64)).unwrap() else {
        panic!("not registered");
    };
    let chain = Chain::from_root(registered.root, hashes).tail(7).for_session(EARLIEST_SESSION_VERSION);
    let Links::Linked(Start { anchor, .. }) = chain.links else { panic!("{chain:?}") };
    assert_eq!(anchor, prompt(b'a', 20)[4], "in runs of today it is number 1");
    let namespace = registered.namespace;
    let reserve = Reserve { namespace, chain, priority: 0, pools: Vec::new(), attempt: 0 };
    let answer = session.ask(&Request::Reserve(reserve)).unwrap().0;
    assert!(matches!(&answer, Response::Reserved(reserved) if reserved.chunks.len() == 13), "{answer:?}");
}

#[test]
fn the_nodes_of_a_cluster_are_upgraded_under_load_and_then_its_coordinator() {
    let Some(before) = before() else { return };
    let mut cluster = Cluster::start_with(&before, 3, 3_000, DISK).unwrap();
    cluster.keep_addresses().unwrap();
    let old: Vec<_> = (0..3).map(|node| put_in_parts(&cluster, node, &[b'a' + node as u8])).collect();
    (0..3).for_each(|node| on_disk(&cluster, node, 100));
    let loads = [Load::start(&before, &cluster), Load::start(LARDER, &cluster)];

    // A new node joins the old cluster, and is killed in it.
    cluster.run(LARDER);
    cluster.add_node(3_000, DISK).unwrap();
    cluster.keep_addresses().unwrap();
    cluster.wait_for_members(4);
    let mut new = put_in_parts(&cluster, 3, b"x");
    on_disk(&cluster, 3, 100);
    cluster.restart_node(3).unwrap();
    cluster.wait_for_members(4);
    serves(&cluster, 3, &new);
    // An old node is killed beside it.
    cluster.run(&before);
    cluster.restart_node(0).unwrap();
    cluster.wait_for_members(4);
    // The nodes are upgraded. Each serves what its disk had.
    cluster.run(LARDER);
    for (node, old) in old.iter().enumerate() {
        cluster.restart_node(node).unwrap();
        cluster.wait_for_members(4);
        serves(&cluster, node, old);
        println!("{} of 100 chunks of node-{node} come to node-3", shared(&cluster, 3, old));
    }
    assert!(is_merged(&cluster.table().unwrap().homes), "the old coordinator has 4,096 partitions");
    // The coordinator is upgraded last, and goes on from its file.
    let epoch = cluster.table().unwrap().epoch;
    cluster.kill_coordinator();
    cluster.start_coordinator().unwrap();
    cluster.wait_for_members(4);
    wait::until("a later term", || (cluster.table().ok()?.epoch.term > epoch.term).then_some(()));
    let is_fine = || (!is_merged(&cluster.table().ok()?.homes)).then_some(());
    wait::until("there are 16,384 partitions", is_fine);
    new.extend(put_in_parts(&cluster, 1, b"y"));
    wait::until("others have it", || (shared(&cluster, 0, &new[1..]) == 100).then_some(()));
    for (load, whose) in loads.into_iter().zip(["the release before", "this release"]) {
        load.finish(whose);
    }
}

#[test]
fn the_coordinator_of_a_cluster_is_upgraded_under_load_and_then_its_nodes() {
    let Some(before) = before() else { return };
    let mut cluster = Cluster::start_with(&before, 2, 3_000, DISK).unwrap();
    cluster.keep_addresses().unwrap();
    let mut old: Vec<_> = (0..2).map(|node| put_in_parts(&cluster, node, &[b'a' + node as u8])).collect();
    let loads = [Load::start(&before, &cluster), Load::start(LARDER, &cluster)];
    let homes = cluster.table().unwrap().homes;

    cluster.run(LARDER);
    cluster.kill_coordinator();
    cluster.start_coordinator().unwrap();
    cluster.wait_for_members(2);
    assert_eq!(cluster.table().unwrap().homes, homes, "no partition moves");
    // A new node and an old one join.
    cluster.add_node(3_000, DISK).unwrap();
    cluster.keep_addresses().unwrap();
    cluster.wait_for_members(3);
    cluster.run(&before);
    cluster.add_node(3_000, DISK).unwrap();
    cluster.keep_addresses().unwrap();
    cluster.wait_for_members(4);
    old.push(put_in_parts(&cluster, 2, b"x"));
    old.push(put_in_parts(&cluster, 3, b"y"));
    (0..4).for_each(|node| on_disk(&cluster, node, 100));
    assert!(is_merged(&cluster.table().unwrap().homes), "as old nodes know them");
    // Both are killed and come back, each in its own release.
    cluster.restart_node(3).unwrap();
    cluster.run(LARDER);
    cluster.restart_node(2).unwrap();
    cluster.wait_for_members(4);
    (0..4).for_each(|node| serves(&cluster, node, &old[node]));
    let versions = |cluster: &Cluster| -> Vec<u64> {
        cluster.members().iter().map(|member| member["protocol"].as_u64().unwrap()).collect()
    };
    assert_eq!(versions(&cluster), [1, 1, 2, 1]);
    // The old nodes are upgraded.
    for node in [0, 1, 3] {
        cluster.restart_node(node).unwrap();
        cluster.wait_for_members(4);
        serves(&cluster, node, &old[node]);
    }
    assert_eq!(versions(&cluster), [2; 4]);
    let is_fine = || (!is_merged(&cluster.table().ok()?.homes)).then_some(());
    wait::until("there are 16,384 partitions", is_fine);
    for (load, whose) in loads.into_iter().zip(["the release before", "this release"]) {
        load.finish(whose);
    }
    wait::until("all have all", || {
        (0..4).all(|node| old.iter().all(|prompts| shared(&cluster, node, prompts) == 100)).then_some(())
    });
}
