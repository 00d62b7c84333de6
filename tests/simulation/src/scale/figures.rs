//! The figures of one size of a cluster, and the goals beside them.

use std::time::Duration;

use larder_protocol::limits::MAX_MEMBERS;
use serde::{Deserialize, Serialize};

use super::Load;
use super::cluster::Cluster;
use super::tally::{Kind, skew};
use super::watch::Change;

/// The figures that depend only on the load.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct Figures {
    /// Nodes of the cluster.
    pub nodes: usize,
    /// Nodes that play requests.
    pub players: usize,
    /// Chunks per node.
    pub chunks: usize,
    /// Bytes of a chunk's blocks.
    pub block_bytes: u64,
    /// Requests per second and node.
    pub rate: f64,
    /// Seconds of requests before anything counted.
    #[serde(default)]
    pub warm_up: u64,
    /// Seconds of requests that counted.
    pub seconds: u64,
    /// The seed.
    pub seed: u64,
    /// Copies of the traces.
    pub copies: usize,
    /// The traces.
    pub traces: Vec<String>,
    /// Requests that were served.
    pub requests: u64,
    /// Chunks per request.
    pub request_chunks: f64,
    /// Seconds from the start of all nodes until homes know all chunks.
    pub start_seconds: f64,
    /// Homes that a lookup asks.
    pub homes_mean: f64,
    /// The 99th percentile of homes that a lookup asks.
    pub homes_p99: usize,
    /// Lookup messages that a node sends, per second.
    pub finds_a_second: f64,
    /// Announcements that a node sends, per second.
    pub announces_a_second: f64,
    /// Comparisons of sums that a node sends, per second.
    pub compares_a_second: f64,
    /// Repairs, moves and heads of fetches that a node sends, per second.
    pub others_a_second: f64,
    /// Bytes of all these messages with their answers, per second and node.
    pub metadata_bytes_a_second: f64,
    /// Bytes of blocks that a node gets from others, per second.
    pub block_bytes_a_second: f64,
    /// The ratio of the metadata bytes to the block bytes.
    pub metadata_share: f64,
    /// Rows at the busiest home, as a multiple of the mean.
    pub skew_rows: f64,
    /// Directory messages to the busiest node, as a multiple of the mean.
    pub skew_requests: f64,
    /// Bytes of blocks that the busiest node served, as a multiple of the mean.
    pub skew_served: f64,
    /// The share of wrong rows among the used ones.
    pub stale_share: f64,
    /// Connections of a node at the end of the load.
    pub connections_open: f64,
    /// The most connections that a node had open under load.
    pub connections_most: usize,
    /// Handshakes that a node begins, per second.
    pub handshakes_a_second: f64,
    /// The share of lookups that waited for a handshake.
    pub handshake_share: f64,
    /// Nodes that a node spoke with in the last ten seconds of the load.
    pub connections_used: f64,
    /// Bytes to and from the coordinator under load, per second.
    pub coordinator_bytes_a_second: f64,
    /// Bytes of the last table.
    pub table_bytes: u64,
    /// Found tokens, of all requested tokens, with the shared cache.
    pub hit_rate_shared: f64,
    /// The same for each node by itself, behind a router that knows the chunks of each node.
    pub hit_rate_routed: f64,
    /// The same for each node by itself, with requests in turn.
    pub hit_rate_local: f64,
    /// The effects of a node that joined.
    pub join: Change,
    /// The effects of a node that left in order.
    pub leave: Change,
    /// The effects of a crash of one node in twenty.
    pub crash: Change,
}

/// Measurements of a run: they differ a little from run to run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Measured {
    /// CPU share of the coordinator under load, without the network's part.
    pub coordinator_cpu: f64,
    /// CPU of one table for all nodes: the ring, and one encoding for each node.
    pub coordinator_cpu_a_table: f64,
    /// Bytes of a playing node's directory, including a table of its own; 0 if nobody counts.
    pub directory_bytes: usize,
    /// The outbox's part of these bytes, with everything that the node holds.
    pub outbox_bytes: usize,
    /// The part of these bytes in the rows of which the node is home.
    pub shard_bytes: usize,
    /// Bytes that the whole simulation had allocated at the end.
    pub allocated_bytes: usize,
    /// CPU of the whole run.
    pub cpu_seconds: f64,
}

/// A goal, with the figure beside it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Goal {
    /// The name of the figure.
    pub name: String,
    /// The figure.
    pub is: f64,
    /// The largest figure that meets the goal.
    pub at_most: f64,
    /// Whether the goal is met.
    pub is_met: bool,
}

impl Figures {
    pub(super) fn new(load: &Load) -> Self {
        Self {
            nodes: load.nodes,
            players: load.playing(),
            chunks: load.chunks,
            block_bytes: load.block_bytes,
            rate: load.rate,
            warm_up: load.warm_up,
            seconds: load.seconds,
            seed: load.seed,
            copies: load.copies(),
            traces: load.trace.names.clone(),
            ..Self::default()
        }
    }

    /// Takes the counts under load.
    pub(super) fn take_load(&mut self, cluster: &Cluster<'_>) {
        let tally = &cluster.tally;
        let each = (self.players as f64 * self.seconds as f64).max(1.0);
        let messages = |kind: Kind| tally.messages[kind as usize] as f64 / each;
        (self.requests, self.request_chunks) =
            (tally.requests, tally.chunks as f64 / tally.requests.max(1) as f64);
        (self.homes_mean, self.homes_p99) = (tally.homes_mean(), tally.homes_p99());
        (self.finds_a_second, self.announces_a_second) = (messages(Kind::Find), messages(Kind::Announce));
        self.compares_a_second = messages(Kind::Compare);
        self.others_a_second = messages(Kind::Repair) + messages(Kind::Fetch);
        self.metadata_bytes_a_second = tally.bytes.iter().sum::<u64>() as f64 / each;
        self.block_bytes_a_second = tally.served.iter().sum::<u64>() as f64 / each;
        self.metadata_share = self.metadata_bytes_a_second / self.block_bytes_a_second.max(1.0);
        let nodes = &cluster.nodes;
        self.skew_rows = skew(nodes.iter().map(|node| node.shard.len()));
        self.skew_requests = skew(tally.received.iter().take(nodes.len()).copied());
        self.skew_served = skew(tally.served.iter().take(self.players).copied());
        self.stale_share = tally.stale as f64 / (tally.stale + tally.fetched).max(1) as f64;
        let open: usize = nodes.iter().take(self.players).map(|node| node.ends.connections.len()).sum();
        self.connections_open = open as f64 / self.players.max(1) as f64;
        self.connections_most = tally.most_open;
        self.handshakes_a_second = tally.dials as f64 / each;
        self.handshake_share = tally.waited();
        let then = cluster.now.saturating_sub(Duration::from_secs(10));
        let used: Vec<usize> = nodes.iter().filter_map(|node| node.contacts.since(then)).collect();
        self.connections_used = used.iter().sum::<usize>() as f64 / used.len().max(1) as f64;
        self.table_bytes = cluster.coordinator.table_bytes();
        self.hit_rate_shared = tally.rate.rate();
    }
}

impl Measured {
    /// Takes the cluster apart, and counts the bytes that each part gives back.
    pub(super) fn take_memory(&mut self, mut cluster: Cluster<'_>, allocated: Option<fn() -> usize>) {
        let Some(allocated) = allocated else { return };
        self.allocated_bytes = allocated();
        let table = cluster.coordinator.table();
        // A real node has a table of its own; here all nodes share one.
        let names: usize = table.members.iter().map(|member| member.name.capacity()).sum();
        let table = size_of_val(&table.members[..]) + size_of_val(&table.homes[..]) + names;
        let is_whole = |node: &super::cluster::Node| node.is_alive && node.player.is_some();
        let nodes: Vec<_> = cluster.nodes.drain(..).filter(is_whole).take(PARTED).collect();
        let count = nodes.len().max(1);
        let (mut outboxes, mut shards, mut caches) = (0, 0, 0);
        for node in nodes {
            let Some(player) = node.player else { continue };
            let freed = |part: &mut usize, drops: &mut dyn FnMut()| {
                let before = allocated();
                drops();
                *part += before.saturating_sub(allocated());
            };
            let (mut outbox, mut shard, mut cache) =
                (Some(player.outbox), Some(node.shard), Some(player.cache));
            freed(&mut outboxes, &mut || drop(outbox.take()));
            freed(&mut shards, &mut || drop(shard.take()));
            freed(&mut caches, &mut || drop(cache.take()));
        }
        (self.outbox_bytes, self.shard_bytes) = (outboxes / count, shards / count);
        self.directory_bytes = (outboxes + shards + caches) / count + table;
    }
}

/// The goals of a cluster of any size.
pub fn goals(figures: &Figures, measured: &Measured) -> Vec<Goal> {
    let goal = |name: &str, is: f64, at_most: f64| Goal {
        name: name.to_owned(),
        is,
        at_most,
        is_met: is <= at_most,
    };
    vec![
        goal("homes a lookup asks", figures.homes_mean, 3.0),
        goal("busiest node, rows", figures.skew_rows, 1.5),
        goal("busiest node, requests", figures.skew_requests, 1.5),
        goal("busiest node, served bytes", figures.skew_served, 1.5),
        goal("open connections a node", figures.connections_most as f64, 100.0),
        goal("metadata of block bytes", figures.metadata_share, 0.01),
        goal("seconds from a crash to the removal", figures.crash.table_after_seconds, 10.0),
        goal("seconds from the removal to a repaired directory", figures.crash.repaired_after_seconds, 10.0),
        goal("cores of the coordinator", measured.coordinator_cpu, 0.1),
        goal("nodes that may join", figures.nodes as f64, MAX_MEMBERS as f64),
    ]
}

/// Nodes that are taken apart to count their memory.
const PARTED: usize = 64;
