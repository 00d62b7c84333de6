//! Policies give their published figures where they are asked as there: without the rule that only leaves go.
//!
//! The model is that of the published traces' figures: a request hits its longest cached prefix, uses what is cached of it
//! and stores the rest, block by block, from one end to the other; before each block that is stored one goes, if the cache
//! is full; what the request uses does not go meanwhile. The store differs in that only leaves go, and that room for all
//! of a request's blocks is made before the first of them is stored.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;

use larder_core::store::ids::ChunkNumber;
use larder_core::store::policy::{Facts, Policy, PolicyName, Removal, Verdict};
use serde::Deserialize;

/// Which block of a request is touched or stored first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Head,
    Tail,
}

/// A cache without a tree.
struct Cache {
    policy: Box<dyn Policy>,
    capacity: usize,
    cached: HashMap<u64, ChunkNumber>,
    /// By chunk.
    names: Vec<u64>,
    vacant: Vec<ChunkNumber>,
}

impl Cache {
    fn new(policy: PolicyName, capacity: usize) -> Self {
        let policy = policy.build(None);
        Self { policy, capacity, cached: HashMap::new(), names: Vec::new(), vacant: Vec::new() }
    }

    /// Plays a request; how many of its blocks it hits.
    fn play(&mut self, blocks: &[u64], first: First) -> usize {
        let hit = blocks.iter().take_while(|name| self.cached.contains_key(name)).count();
        let mut order = blocks.to_vec();
        if first == First::Tail {
            order.reverse();
        }
        order.iter().filter_map(|name| self.cached.get(name)).for_each(|&chunk| self.policy.block(chunk));
        for &name in &order {
            match self.cached.get(&name) {
                Some(&chunk) => self.policy.touch(chunk),
                None => self.store(name),
            }
        }
        order.iter().filter_map(|name| self.cached.get(name)).for_each(|&chunk| self.policy.unblock(chunk));
        hit
    }

    /// Stores a block that may not go yet.
    fn store(&mut self, name: u64) {
        if self.cached.len() >= self.capacity
            && let Some(victim) = self.policy.victim(&mut |_| Verdict::Take)
        {
            self.policy.remove(victim, Removal::Evicted);
            self.cached.remove(&self.names[victim.position()]);
            self.vacant.push(victim);
        }
        let chunk = self.vacant.pop().unwrap_or_else(|| ChunkNumber::at(self.names.len()));
        if chunk.position() == self.names.len() {
            self.names.push(name);
        }
        self.names[chunk.position()] = name;
        self.cached.insert(name, chunk);
        // A hash, of which every bit is as good as another.
        let short_hash = fastrand::Rng::with_seed(name).u64(..);
        self.policy.insert(chunk, Facts { short_hash, index: 0, priority: 0, parent: None });
        self.policy.block(chunk);
    }
}

/// Blocks hit in %, at each of [`CAPACITIES`].
fn rates(trace: &[Vec<u64>], policy: PolicyName, first: First) -> [f64; 4] {
    CAPACITIES.map(|capacity| {
        let mut cache = Cache::new(policy, capacity);
        let hit: usize = trace.iter().map(|blocks| cache.play(blocks, first)).sum();
        100.0 * hit as f64 / trace.iter().map(Vec::len).sum::<usize>() as f64
    })
}

/// Policy, order, published rates on both traces, and how far ours may be from them in points.
type Row = (PolicyName, First, [[f64; 4]; 2], [f64; 2]);

const CAPACITIES: [usize; 4] = [1_000, 3_000, 10_000, 30_000];

const TRACES: [&str; 2] = ["conversation", "synthetic"];

/// One in the last digit.
const EXACT: [f64; 2] = [0.015; 2];

const PUBLISHED: [Row; 8] = [
    (PolicyName::Lru, First::Head, [[4.45, 6.50, 21.12, 32.57], [8.25, 18.77, 42.35, 62.42]], EXACT),
    (PolicyName::Lru, First::Tail, [[4.45, 6.53, 21.16, 32.57], [8.41, 19.06, 42.39, 62.42]], EXACT),
    (PolicyName::Fifo, First::Head, [[4.45, 6.32, 18.14, 29.34], [8.19, 18.31, 39.70, 59.41]], EXACT),
    (PolicyName::Filo, First::Head, [[4.47, 5.34, 8.35, 13.63], [3.39, 6.54, 19.18, 51.08]], EXACT),
    (PolicyName::Mru, First::Head, [[4.38, 4.83, 6.24, 10.54], [3.21, 6.75, 17.14, 44.21]], EXACT),
    // Where the hand meets a chunk in use, ours waits, and the published one goes on.
    (
        PolicyName::Sieve,
        First::Tail,
        [[4.81, 7.50, 13.17, 27.59], [7.74, 16.15, 38.66, 62.60]],
        [EXACT[0], 1.5],
    ),
    // How many ghosts there are is estimated.
    (PolicyName::Arc, First::Tail, [[5.29, 8.59, 22.26, 31.09], [9.39, 19.57, 43.57, 62.60]], [0.1, 0.5]),
    (PolicyName::S3Fifo, First::Tail, [[5.80, 9.29, 19.80, 30.38], [8.66, 18.69, 41.76, 61.16]], [0.1, 0.25]),
];

#[test]
fn policies_without_the_leaf_rule_give_the_published_rates() {
    let traces = TRACES.map(trace);
    for (policy, first, published, tolerances) in PUBLISHED {
        for (which, published) in published.into_iter().enumerate() {
            let (name, tolerance) = (TRACES[which], tolerances[which]);
            let Some(trace) = &traces[which] else { continue };
            let found = rates(trace, policy, first);
            println!("{name:12} {policy:8} {first:?} first: {found:6.2?}, published {published:6.2?}");
            let differ = found.iter().zip(published).any(|(found, there)| (found - there).abs() > tolerance);
            assert!(!differ, "{name}, {policy}, {first:?} first: {found:.2?}, published {published:.2?}");
        }
    }
}

/// The blocks of each request of a published trace, where this machine has it.
fn trace(name: &str) -> Option<Vec<Vec<u64>>> {
    #[derive(Deserialize)]
    struct Line {
        hash_ids: Vec<u64>,
    }
    let text = std::fs::read_to_string(larder_skips::published_trace(name)?).unwrap();
    Some(text.lines().map(|line| serde_json::from_str::<Line>(line).unwrap().hash_ids).collect())
}
