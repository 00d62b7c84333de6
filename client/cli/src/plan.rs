//! Plans a cache: the hit rates of a trace by policy, capacity and number of nodes.
//!
//! All decisions come from the code that runs in production, driven by [`larder_core::what_if::cluster`]; only the ceiling,
//! [`opt`], is a model of its own, because it looks into the future.

pub mod advice;
pub mod cluster;
pub mod html;
pub mod opt;
pub mod policy;
pub mod prices;
pub mod sweep;
pub mod table;
pub mod wait;
pub mod workload;

use std::fmt;

use clap::ValueEnum;
use larder_core::what_if::cluster::Counts;
use serde::{Serialize, Serializer};

pub use policy::PlanPolicy;
pub use prices::Prices;
pub use wait::{Speeds, Wait};
pub use workload::Workload;

/// A run of the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Scenario {
    /// The eviction policy.
    #[serde(serialize_with = "as_text")]
    pub policy: PlanPolicy,
    /// Number of nodes.
    pub nodes: u16,
    /// The way in which the nodes work together.
    pub sharing: Sharing,
    /// Chunks that each node keeps in memory.
    pub capacity_chunks: u64,
    /// The tiers below the nodes' memory.
    #[serde(flatten)]
    pub tiers: Tiers,
}

/// The tiers below the memory of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tiers {
    /// Chunks that each node keeps on its disk; 0 without a disk.
    pub disk_chunks: u64,
    /// Whether all nodes share an object store; it keeps everything.
    pub object_store: bool,
}

/// The way in which the nodes of a cluster work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, ValueEnum, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Sharing {
    /// Nodes share nothing; each request goes to the node that recomputed the fewest tokens lately
    Local,
    /// Nodes share nothing; each request goes to the node that recomputed the fewest tokens lately, those of this request included
    Routed,
    /// Each node reads the chunks of all others; each request goes to the node that recomputed the fewest tokens lately
    Shared,
    /// Each node reads the chunks of all others; each request goes to the node where it costs least
    RoutedShared,
}

/// A run and its result. Serialised, it is one element of the output of `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The run.
    #[serde(flatten)]
    pub scenario: Scenario,
    /// Blocks hit of blocks asked.
    pub block_hit_rate: f64,
    /// Tokens hit of tokens asked.
    pub token_hit_rate: f64,
    /// CPU time of one operation of the whole store (a chunk leased or committed, with its evictions), including the replay's
    /// own bookkeeping; the policy is a part of it.
    pub ns_per_op: f64,
    /// Price of the memory, disks and objects for an hour.
    pub cost_per_hour: f64,
    /// Chunks that the object store has at the end.
    pub stored_chunks: u64,
    /// Chunks that a node read from another node.
    pub chunks_moved: u64,
    /// Evicted chunks that another node took.
    pub chunks_forwarded: u64,
    /// How long requests wait for their first token.
    #[serde(flatten)]
    pub wait: Wait,
    /// The counts behind the rates.
    #[serde(skip)]
    pub counts: Counts,
}

/// The counts of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Played {
    /// Blocks and tokens.
    pub counts: Counts,
    /// How long requests wait for their first token.
    pub wait: Wait,
    /// Chunks that the object store has at the end.
    pub stored_chunks: u64,
}

impl Outcome {
    /// A run that took `seconds` of CPU time.
    pub fn new(scenario: Scenario, run: Played, seconds: f64, prices: &Prices) -> Self {
        let Played { counts, wait, stored_chunks } = run;
        Self {
            scenario,
            cost_per_hour: prices.cost_per_hour(&scenario, stored_chunks),
            stored_chunks,
            wait,
            block_hit_rate: counts.blocks_hit as f64 / counts.blocks_asked.max(1) as f64,
            token_hit_rate: counts.tokens_hit as f64 / counts.tokens_asked.max(1) as f64,
            ns_per_op: seconds * 1e9 / counts.operations.max(1) as f64,
            chunks_moved: counts.chunks_moved,
            chunks_forwarded: counts.chunks_forwarded,
            counts,
        }
    }

    /// Chunks that nodes sent to each other, because they read them or took them when they were evicted.
    #[must_use]
    pub fn chunks_sent(&self) -> u64 {
        self.chunks_moved + self.chunks_forwarded
    }
}

impl Scenario {
    /// Chunks that all nodes keep in memory together.
    pub fn total_chunks(&self) -> u64 {
        self.capacity_chunks * u64::from(self.nodes)
    }

    /// Chunks that all disks keep together.
    pub fn disk_chunks(&self) -> u64 {
        self.tiers.disk_chunks * u64::from(self.nodes)
    }
}

impl Sharing {
    /// Whether nodes read each other's chunks.
    pub fn shares(self) -> bool {
        matches!(self, Self::Shared | Self::RoutedShared)
    }
}

fn as_text<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

#[cfg(test)]
mod tests {
    use larder_core::store::policy::PolicyName;

    use super::*;

    #[test]
    fn a_row_of_the_json_array_has_the_promised_fields_and_rates_are_fractions() {
        let policy = PlanPolicy::Store(PolicyName::Lru);
        let tiers = Tiers { disk_chunks: 500, object_store: true };
        let scenario =
            Scenario { policy, nodes: 16, sharing: Sharing::RoutedShared, capacity_chunks: 3_000, tiers };
        let counts = Counts {
            blocks_asked: 8,
            blocks_hit: 2,
            tokens_asked: 4,
            tokens_hit: 2,
            operations: 10,
            chunks_moved: 3,
            chunks_forwarded: 5,
        };
        let wait = Wait { ttft_mean_ms: 5.0, ttft_p50_ms: 4.0, ttft_p99_ms: 9.0 };
        let run = Played { counts, wait, stored_chunks: 7 };
        let prices = Prices { price_per_gib_hour: 0.5, ..Prices::of(1 << 20) };
        let row = serde_json::to_value(Outcome::new(scenario, run, 1e-6, &prices)).unwrap();
        let expected = serde_json::json!({
            "policy": "lru", "nodes": 16, "sharing": "routed-shared", "capacity_chunks": 3000,
            "disk_chunks": 500, "object_store": true,
            "block_hit_rate": 0.25, "token_hit_rate": 0.5, "ns_per_op": 100.0,
            "cost_per_hour": prices.cost_per_hour(&scenario, 7), "stored_chunks": 7,
            "chunks_moved": 3, "chunks_forwarded": 5,
            "ttft_mean_ms": 5.0, "ttft_p50_ms": 4.0, "ttft_p99_ms": 9.0,
        });
        assert_eq!(row, expected);
    }
}
