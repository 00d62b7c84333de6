//! Plans a cache: what policies, capacities and node counts would make of a trace.
//!
//! Evictions are those of the store that runs in production, driven by [`larder_core::store::replay`] for one node and
//! by [`larder_core::what_if::cluster`] for several; only the ceiling, [`opt`], is a model of its own, because it looks into the future.

pub mod advice;
pub mod cluster;
pub mod html;
pub mod opt;
pub mod policy;
pub mod sweep;
pub mod table;
pub mod workload;

use std::fmt;

use clap::ValueEnum;
use larder_core::what_if::cluster::Counts;
use serde::{Serialize, Serializer};

pub use policy::PlanPolicy;
pub use workload::Workload;

/// A run of the planner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Scenario {
    /// The eviction policy.
    #[serde(serialize_with = "as_text")]
    pub policy: PlanPolicy,
    /// How many nodes.
    pub nodes: u16,
    /// The way in which the nodes work together.
    pub sharing: Sharing,
    /// Chunks that each node keeps.
    pub capacity_chunks: u64,
}

/// The way in which the nodes of a cluster work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Nodes share nothing; each request goes to the node that recomputed least lately
    Local,
    /// Nodes share nothing; the router knows their chunks and sends each request where least has to be recomputed
    Routed,
    /// Each node reads the chunks of all others
    Shared,
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
    /// The counts behind the rates.
    #[serde(skip)]
    pub counts: Counts,
}

impl Outcome {
    /// A run that took so many seconds of CPU time.
    #[must_use]
    pub fn new(scenario: Scenario, counts: Counts, seconds: f64) -> Self {
        Self {
            scenario,
            block_hit_rate: counts.blocks_hit as f64 / counts.blocks_asked.max(1) as f64,
            token_hit_rate: counts.tokens_hit as f64 / counts.tokens_asked.max(1) as f64,
            ns_per_op: seconds * 1e9 / counts.operations.max(1) as f64,
            counts,
        }
    }
}

impl Scenario {
    /// Chunks that all nodes keep together.
    #[must_use]
    pub fn total_chunks(&self) -> u64 {
        self.capacity_chunks * u64::from(self.nodes)
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Routed => "routed",
            Self::Shared => "shared",
        })
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
        let scenario = Scenario { policy, nodes: 16, sharing: Sharing::Routed, capacity_chunks: 3_000 };
        let counts = Counts {
            blocks_asked: 8,
            blocks_hit: 2,
            tokens_asked: 4,
            tokens_hit: 2,
            operations: 10,
            ..Counts::default()
        };
        let row = serde_json::to_value(Outcome::new(scenario, counts, 1e-6)).unwrap();
        let expected = serde_json::json!({
            "policy": "lru", "nodes": 16, "sharing": "routed", "capacity_chunks": 3000,
            "block_hit_rate": 0.25, "token_hit_rate": 0.5, "ns_per_op": 100.0,
        });
        assert_eq!(row, expected);
    }
}
