//! Patience: the heartbeat, and how long the coordinator waits for nodes.

use serde::{Deserialize, Serialize};

/// The heartbeat, and how long the coordinator waits for silent nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Patience {
    /// How often nodes send a heartbeat. A node that crashed may join again when it has missed two.
    pub heartbeat_ms: u64,
    /// Silence after which a node is suspect: other nodes are asked before it.
    pub suspect_after_ms: u64,
    /// Silence after which a node is removed: other nodes become home to its partitions.
    pub remove_after_ms: u64,
    /// Silence after which a node is removed if [`REPORTERS`](super::REPORTERS) other nodes get no answer from it, either.
    pub remove_reported_after_ms: u64,
    /// Grace period after a start, for members to come back: their silence counts from its end.
    pub grace_ms: u64,
    /// How long `larder status` shows a removed node as lost, if it does not come back.
    pub remember_lost_ms: u64,
}

impl Patience {
    /// The patience of a coordinator whose configuration says nothing about it.
    pub const USUAL: Self = Self {
        heartbeat_ms: 1_000,
        suspect_after_ms: 3_000,
        remove_after_ms: 30_000,
        remove_reported_after_ms: 8_000,
        grace_ms: 3_000,
        remember_lost_ms: 86_400_000,
    };
}

impl Default for Patience {
    fn default() -> Self {
        Self::USUAL
    }
}
