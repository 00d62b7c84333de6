//! What a node tells those who follow its events.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};

use larder_protocol::ChunkHash;
use larder_tests::content::prompt;
use larder_tests::node::{NodeProcess, ONE_TENANT, SMALL_HOST};
use serde_json::Value;

use super::{Engine, LARDER};

/// A follower, as a router would be one.
struct Follower {
    lines: std::io::Lines<BufReader<ureq::BodyReader<'static>>>,
    held: BTreeSet<String>,
    /// Sequence number that must come next, once one came.
    next: Option<u64>,
}

impl Follower {
    fn new(node: &NodeProcess) -> Self {
        let response = ureq::get(format!("http://{}/events", node.http())).call().unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let lines = BufReader::new(response.into_body().into_reader()).lines();
        Self { lines, held: BTreeSet::new(), next: None }
    }

    /// Reads events until one of this kind was applied and `enough` is content with what is held.
    fn read_until(&mut self, last: &str, enough: impl Fn(&BTreeSet<String>) -> bool) {
        let mut event = String::new();
        loop {
            let line = self.lines.next().expect("the stream goes on").unwrap();
            if let Some(name) = line.strip_prefix("event: ") {
                name.clone_into(&mut event);
            } else if let Some(id) = line.strip_prefix("id: 0:") {
                let sequence = id.parse().unwrap();
                assert_eq!(self.next.unwrap_or(sequence), sequence, "no gaps");
                self.next = Some(sequence + 1);
            } else if let Some(data) = line.strip_prefix("data: ") {
                let data: Value = serde_json::from_str(data).unwrap();
                let hash = data["hash"].as_str().unwrap_or_default().to_owned();
                match event.as_str() {
                    "held" | "admit" => _ = self.held.insert(hash),
                    "evict" => _ = self.held.remove(&hash),
                    _ => {}
                }
                if event == last && enough(&self.held) {
                    return;
                }
            }
        }
    }
}

fn texts(hashes: &[ChunkHash]) -> impl Iterator<Item = String> {
    hashes.iter().map(ToString::to_string)
}

#[test]
fn a_follower_knows_what_a_node_holds_from_its_snapshot_and_what_follows() {
    let host = format!("{SMALL_HOST}capacity_chunks = 6\npolicy = \"lru\"\n{ONE_TENANT}");
    let node = NodeProcess::start(LARDER, &host).unwrap();
    let engine = Engine::connect(&node.socket("default"));
    let [first, second] = [prompt(b'a', 4), prompt(b'b', 5)];
    engine.put(&first);
    let mut follower = Follower::new(&node);
    follower.read_until("live", |_| true);
    assert_eq!(follower.held, texts(&first).collect());
    engine.put(&second);
    let expected: BTreeSet<String> = texts(&first[..1]).chain(texts(&second)).collect();
    follower.read_until("admit", |held| *held == expected);
    let mut late = Follower::new(&node);
    late.read_until("live", |_| true);
    assert_eq!(late.held, expected, "whoever comes later gets the same as a snapshot");
}
