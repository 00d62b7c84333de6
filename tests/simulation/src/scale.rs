//! A large cluster without payload, in virtual time: the costs of directory, tables and coordinator as it grows.
//!
//! The decisions are the product's own: membership and ring of the coordinator; outbox, shard, cache and lookup of each node's
//! directory; placement. A light list of names in the order of their use stands in for the store, since a real store takes 250
//! bytes a chunk. A node has one actor. Every node is a home. In a large cluster only some nodes play requests and hold chunks,
//! as [`Load::players`] says; figures per node are then figures of these nodes.
//!
//! There is one source of chance and one queue of events: the same load gives the same figures, except CPU and memory, which are
//! measured ([`Measured`]).
//!
//! A run begins with all nodes at once, full of chunks that nobody asks for. Then engines play copies of traces, each copy with
//! its own names. Then requests stop, and a node joins, a node leaves, and one node in twenty crashes.

mod alone;
mod arrivals;
mod blocks;
mod cluster;
mod connections;
mod coordinator;
mod directory;
mod figures;
mod options;
mod pictures;
mod requests;
mod sizes;
mod table;
mod tally;
mod trace;
mod watch;

pub use figures::{Figures, Goal, Measured, goals};
pub use options::{Options, Played};
pub use trace::Trace;
pub use watch::Change;

use std::time::Duration;

use cluster::Cluster;
use coordinator::thread_cpu;

/// The load of a cluster.
#[derive(Debug, Clone)]
pub struct Load {
    /// The source of all chance.
    pub seed: u64,
    /// Nodes of the cluster.
    pub nodes: usize,
    /// The most nodes that play requests.
    pub players: usize,
    /// Chunks that a node has room for.
    pub chunks: usize,
    /// Bytes of the blocks of one chunk.
    pub block_bytes: u64,
    /// Requests per second and node.
    pub rate: f64,
    /// Seconds of requests before anything counts, so that a steady state is counted.
    pub warm_up: u64,
    /// Seconds of requests that count.
    pub seconds: u64,
    /// The requests to play.
    pub trace: Trace,
}

impl Load {
    /// Nodes that play requests.
    fn playing(&self) -> usize {
        self.players.min(self.nodes)
    }

    /// The whole time in which requests come.
    fn lasts(&self) -> Duration {
        Duration::from_secs(self.warm_up + self.seconds)
    }

    /// Copies of the traces: one for each sixteen nodes.
    fn copies(&self) -> usize {
        self.playing().div_ceil(NODES_A_COPY)
    }
}

/// Plays one cluster. `allocated` returns the bytes that the process has allocated, if the caller counts them.
#[must_use]
pub fn run(load: &Load, allocated: Option<fn() -> usize>) -> (Figures, Measured) {
    let began = thread_cpu();
    let mut figures = Figures::new(load);
    figures.hit_rate_local = alone::local(load);
    figures.hit_rate_routed = alone::routed(load);
    let mut cluster = Cluster::new(load);
    figures.start_seconds = cluster.settle();
    let lasts = Duration::from_secs(load.seconds);
    cluster.begin_load();
    cluster.run_until(cluster.now + Duration::from_secs(load.warm_up));
    let before = (cluster.coordinator.bytes, cluster.coordinator.beats_cpu);
    cluster.tally.begin();
    cluster.run_until(cluster.now + lasts);
    cluster.tally.is_on = false;
    figures.take_load(&cluster);
    figures.coordinator_bytes_a_second = (cluster.coordinator.bytes - before.0) as f64 / lasts.as_secs_f64();
    let mut measured = Measured {
        coordinator_cpu: (cluster.coordinator.beats_cpu - before.1).as_secs_f64() / lasts.as_secs_f64(),
        ..Measured::default()
    };
    cluster.settle();
    let tables_cpu = cluster.coordinator.tables_cpu;
    figures.join = cluster.join();
    measured.coordinator_cpu_a_table = (cluster.coordinator.tables_cpu - tables_cpu).as_secs_f64();
    figures.leave = cluster.leave();
    figures.crash = cluster.crash();
    measured.take_memory(cluster, allocated);
    measured.cpu_seconds = (thread_cpu() - began).as_secs_f64();
    (figures, measured)
}

/// Nodes that play one copy of the traces together.
const NODES_A_COPY: usize = 16;

#[cfg(test)]
mod tests;
