//! The options of a development cluster.

use std::num::NonZeroU32;
use std::path::PathBuf;

use larder_core::placement::PlacementRule;
use larder_core::store::policy::PolicyName;
use larder_net::trace::TracingConfig;

use super::disk::DevDisk;
use super::error::DevError;
use super::this_program;
use crate::replay::USUAL_REQUESTS_IN_FLIGHT;

/// The options of a development cluster.
#[derive(Debug, Clone)]
pub struct DevOptions {
    /// The program that is started as `PROGRAM node --config FILE --parent PID` and `PROGRAM coordinator ...`.
    pub program: PathBuf,
    /// Number of nodes.
    pub nodes: u16,
    /// Bytes of each node's host arena; `None`: enough for the chunks, or [`super::DEFAULT_ARENA_BYTES`].
    pub arena_bytes: Option<u64>,
    /// Limit of chunks that each node keeps, over all its actors; `None`: as many as the arena holds.
    pub chunks_per_node: Option<u64>,
    /// Limit of chunks of the last node, if it differs.
    pub chunks_of_last_node: Option<u64>,
    /// Bytes of one chunk's block, if all blocks will have one size.
    pub block_bytes: Option<u64>,
    /// Bytes of the pieces in which engines map the arena; `None`: what suits the block, or the node's own choice.
    pub extent_bytes: Option<u64>,
    /// Each node's disk tier, in the cluster's directory.
    pub disk: Option<DevDisk>,
    /// The address of the object store that all nodes share.
    pub object_store: Option<String>,
    /// The eviction policy.
    pub policy: PolicyName,
    /// Whether nodes share their chunks.
    pub share: bool,
    /// The rule by which nodes place chunks.
    pub placement: PlacementRule,
    /// Most bytes of blocks that a node sends to others in a second.
    pub send_bytes_per_second: Option<u64>,
    /// Threads of each node that move blocks, beside the thread between nodes; `None`: the node's own choice.
    pub block_threads: Option<u8>,
    /// Whether blocks move between nodes over TCP.
    pub blocks_over_tcp: bool,
    /// Factor by which the ages of chunks grow faster than time.
    pub age_speed: NonZeroU32,
    /// The folder with tokenizers of models, for the console.
    pub tokenizers: Option<PathBuf>,
    /// The collector of spans, and the fraction of traced requests.
    pub tracing: TracingConfig,
    /// Requests in flight of a replay for which the arena has room.
    pub requests_in_flight: u16,
    /// Folder for configuration files, sockets and logs; `None`: a temporary folder, removed when the cluster ends.
    pub dir: Option<PathBuf>,
    /// Folder in which the cluster is announced; `None`: the user's runtime directory.
    pub runtime_dir: Option<PathBuf>,
}

impl DevOptions {
    /// One node with all the defaults, started from this program.
    ///
    /// # Errors
    /// The system does not tell the path of this program.
    pub fn new() -> Result<Self, DevError> {
        Ok(Self {
            program: this_program()?,
            nodes: 1,
            arena_bytes: None,
            chunks_per_node: None,
            chunks_of_last_node: None,
            block_bytes: None,
            extent_bytes: None,
            disk: None,
            object_store: None,
            policy: PolicyName::default(),
            share: true,
            placement: PlacementRule::default(),
            send_bytes_per_second: None,
            block_threads: None,
            blocks_over_tcp: false,
            age_speed: NonZeroU32::MIN,
            tokenizers: None,
            tracing: TracingConfig::default(),
            requests_in_flight: USUAL_REQUESTS_IN_FLIGHT,
            dir: None,
            runtime_dir: None,
        })
    }

    /// The options of one of the nodes.
    pub(super) fn of_node(&self, number: u16) -> Self {
        let is_last = number + 1 == self.nodes;
        let chunks_per_node = self.chunks_of_last_node.filter(|_| is_last).or(self.chunks_per_node);
        Self { chunks_per_node, ..self.clone() }
    }

    pub(super) fn check(&self) -> Result<(), DevError> {
        let refuse = |what: String| Err(DevError::Options { what });
        if !(1..=MAX_NODES).contains(&self.nodes) {
            return refuse(format!("a development cluster has 1 to {MAX_NODES} nodes, not {}", self.nodes));
        }
        if self.chunks_per_node == Some(0) || self.block_bytes == Some(0) || self.arena_bytes == Some(0) {
            return refuse(
                "a node that keeps nothing is of no use: chunks, block and arena are at least 1".into(),
            );
        }
        Ok(())
    }
}

/// Most nodes of a development cluster.
pub const MAX_NODES: u16 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_clusters_are_refused_with_what_is_possible() {
        let options = DevOptions::new().unwrap();
        let none = DevOptions { nodes: 0, ..options.clone() };
        assert_eq!(none.check().unwrap_err().to_string(), "a development cluster has 1 to 64 nodes, not 0");
        assert!(DevOptions { chunks_per_node: Some(0), ..options }.check().is_err());
    }
}
