//! Chunks on disk: they outlive memory and the process, peers get them, and no fault of the disk stops the node.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Instant;

use larder_protocol::ChunkHash;
use larder_tests::cluster::Cluster;
use larder_tests::content::{BLOCK_BYTES, CHUNK_TOKENS, block, prompt};
use larder_tests::node::{NodeProcess, ONE_TENANT};
use larder_tests::wait;

use super::{Engine, LARDER};

/// Room for 8 chunks in memory and for 500 on disk.
const SMALL: &str = "[http]\nlisten = \"127.0.0.1:0\"\n\
                     [host]\narena_bytes = \"16MiB\"\nextent_bytes = \"2MiB\"\ncapacity_chunks = 8\npolicy = \"lru\"\n";

const DISK: &str = "[disk]\nfolder = \"{dir}/disk\"\ncapacity_bytes = \"8MiB\"\nsegment_bytes = \"512KiB\"\n";

fn node() -> NodeProcess {
    NodeProcess::start(LARDER, &format!("{SMALL}{ONE_TENANT}{DISK}")).unwrap()
}

fn on_disk(node: &NodeProcess) -> f64 {
    node.metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}")
}

fn wait_for_chunks_on_disk(node: &NodeProcess, chunks: u32) {
    let there = || (node.get("/status").is_ok() && on_disk(node) >= f64::from(chunks)).then_some(());
    wait::until(&format!("{chunks} chunks are on disk: {}", node.log()), there);
}

#[test]
fn what_leaves_memory_is_read_from_disk() {
    let node = node();
    let engine = Engine::connect(&node.socket("default"));
    let prompts: Vec<Vec<ChunkHash>> = (0..10).map(|name| prompt(b'a' + name, 8)).collect();
    for hashes in &prompts {
        assert_eq!(engine.put(hashes), 8);
    }
    wait_for_chunks_on_disk(&node, 80);
    for hashes in &prompts {
        assert_eq!(engine.find(hashes, 1_000), 8 * u64::from(CHUNK_TOKENS), "{}", node.log());
        assert_eq!(engine.get(hashes), 8);
    }
    assert!(node.metric("larder_tokens_hit_total{namespace") >= 10.0 * 8.0 * f64::from(CHUNK_TOKENS));
    assert!(node.metric("larder_disk_read_bytes_total") > 0.0);
    let status: serde_json::Value = serde_json::from_str(&node.get("/status").unwrap()).unwrap();
    let disk = &status["actors"][0]["disk"];
    let (used, capacity) = (disk["used_bytes"].as_u64().unwrap(), disk["capacity_bytes"].as_u64().unwrap());
    assert_eq!((disk["chunks"].as_u64(), capacity), (Some(80), 8 << 20));
    assert!((80 * BLOCK_BYTES as u64..=capacity).contains(&used), "{disk}");
}

#[test]
fn a_killed_node_serves_what_it_had_on_disk_when_it_is_started_again() {
    let mut node = node();
    let hashes = prompt(b'a', 20);
    assert_eq!(Engine::connect(&node.socket("default")).put(&hashes), 20);
    wait_for_chunks_on_disk(&node, 20);
    node.restart(|_| ()).unwrap();
    wait_for_chunks_on_disk(&node, 20);
    let engine = Engine::connect(&node.socket("default"));
    assert_eq!(engine.get(&hashes), 20, "{}", node.log());
}

#[test]
fn a_restarted_node_serves_its_disk_to_a_peer_before_any_engine_comes() {
    let disk = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"8MiB\"\nsegment_bytes = \"512KiB\"\n";
    let mut cluster = Cluster::start_with(LARDER, 2, 3_000, disk).unwrap();
    let hashes = prompt(b'a', 20);
    assert_eq!(Engine::connect(&cluster.socket(0)).put(&hashes), 20);
    let written = || cluster.node(0).metric("larder_cached_chunks{device=\"0\",tier=\"disk\"}");
    wait::until("all is on disk", || {
        (cluster.node(0).get("/status").is_ok() && written() >= 20.0).then_some(())
    });
    cluster.restart_node(0).unwrap();
    #[expect(clippy::disallowed_methods, reason = "it is printed, not judged")]
    let started = Instant::now();
    let reader = Engine::connect(&cluster.socket(1));
    wait::until("the other node finds all of it", || {
        (reader.find(&hashes, 1_000) == 20 * u64::from(CHUNK_TOKENS)).then_some(())
    });
    assert_eq!(reader.get(&hashes), 20, "{}", cluster.node(1).log());
    println!("served to a peer {:.3} s after the node said that it serves", started.elapsed().as_secs_f64());
    assert_eq!(cluster.node(0).metric("larder_chunks_given_up_total"), 0.0, "the disk keeps its copy");
}

#[test]
fn damaged_bytes_on_disk_are_a_miss_that_is_counted() {
    let mut node = node();
    let hashes = prompt(b'a', 20);
    assert_eq!(Engine::connect(&node.socket("default")).put(&hashes), 20);
    wait_for_chunks_on_disk(&node, 20);
    node.restart(|dir| flip_in(&dir.join("disk/device-0/larder.disk"), &hashes[4])).unwrap();
    wait_for_chunks_on_disk(&node, 19);
    let engine = Engine::connect(&node.socket("default"));
    assert_eq!(engine.get(&hashes), 4, "the prefix before it: {}", node.log());
    assert!(node.metric("larder_disk_checksum_failures_total") >= 1.0);
    assert_eq!(engine.put(&hashes[..5]), 1, "it is computed again");
    assert_eq!(engine.get(&hashes), 20);
}

/// Flips a bit of a chunk's block in a file.
fn flip_in(path: &Path, hash: &ChunkHash) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut bytes = fs::read(path).unwrap();
    let block = block(hash);
    let at = bytes.windows(block.len()).position(|window| window == block).expect("the block is there");
    bytes[at] ^= 1;
    file.write_all_at(&bytes[at..=at], at as u64).unwrap();
    file.sync_all().unwrap();
}

/// Starts a node on a folder with a fault: the node serves without its disk, and names the remedy.
fn serves_without_its_disk(config: &str, prepare: impl FnOnce(&Path), says: &str) {
    let mut node = NodeProcess::start(LARDER, &format!("{SMALL}{ONE_TENANT}{config}")).unwrap();
    node.restart(prepare).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    assert_eq!((engine.put(&prompt(b'a', 4)), engine.get(&prompt(b'a', 4))), (4, 4));
    assert_eq!(node.metric("larder_disk_closed"), 1.0, "{}", node.log());
    assert!(node.log().contains(says), "no `{says}` in: {}", node.log());
}

#[test]
fn a_node_serves_without_a_disk_of_another_version_and_says_so() {
    let newer = |dir: &Path| {
        let file = File::options().write(true).open(dir.join("disk/device-0/larder.disk")).unwrap();
        for copy in [0, 4_096] {
            file.write_all_at(&99_u16.to_le_bytes(), copy + 8).unwrap();
        }
    };
    serves_without_its_disk(DISK, newer, "format version 99");
}

#[test]
fn a_node_serves_without_a_disk_that_is_something_else() {
    let other = |dir: &Path| fs::write(dir.join("disk/device-0/larder.disk"), vec![7; 1 << 20]).unwrap();
    serves_without_its_disk(DISK, other, "is no disk tier of Larder");
}

#[test]
fn a_node_serves_without_a_disk_that_does_not_fit() {
    let config = DISK.replace("8MiB", "900TiB").replace("512KiB", "16GiB");
    serves_without_its_disk(&config, |_| (), "lower the capacity or free space");
}

#[test]
fn a_node_serves_without_a_disk_that_belongs_to_another_one() {
    let owner = node();
    let folder = owner.dir().join("disk");
    let config = DISK.replace("{dir}/disk", &folder.to_string_lossy());
    serves_without_its_disk(&config, |_| (), "give each node a folder of its own");
}
