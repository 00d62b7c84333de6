//! The coordinator, with its real membership and ring, and the transfer of its tables to the nodes.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use larder_coordinator::Published;
use larder_coordinator::membership::{DurableState, Membership, Patience};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, Join};
use larder_protocol::peer::Message;
use larder_protocol::table::{Epoch, NodeNumber, Table};
use rustix::time::{ClockId, clock_gettime};

use super::cluster::{Cluster, HEARTBEAT, Happening, ONE_WAY};
use super::sizes::HEAD_BYTES;

/// The coordinator, and the progress of its followers.
pub(super) struct Coordinator {
    membership: Membership,
    last: Published,
    /// By node: the last table that was sent to it.
    sent: Vec<Epoch>,
    waiting: VecDeque<usize>,
    is_sending: bool,
    /// Every table, with the time of its publication.
    pub(super) published: Vec<PublishedAt>,
    /// When a node last took a table.
    pub(super) arrived_at: Duration,
    /// Bytes to and from the coordinator.
    pub(super) bytes: u64,
    /// CPU time of heartbeats, and of tables.
    pub(super) beats_cpu: Duration,
    pub(super) tables_cpu: Duration,
}

/// A table.
#[derive(Debug, Clone, Copy)]
pub(super) struct PublishedAt {
    pub(super) at: Duration,
    pub(super) members: usize,
    /// Partitions that have another home than before.
    pub(super) moved: u64,
    /// Bytes of the changes since the table before.
    pub(super) bytes: u64,
}

impl Coordinator {
    pub(super) fn new() -> Self {
        Self {
            membership: Membership::new(Patience::USUAL, DurableState::default(), 0),
            last: Published::default(),
            sent: Vec::new(),
            waiting: VecDeque::new(),
            is_sending: false,
            published: Vec::new(),
            arrived_at: Duration::ZERO,
            bytes: 0,
            beats_cpu: Duration::ZERO,
            tables_cpu: Duration::ZERO,
        }
    }

    /// The last table.
    pub(super) fn table(&self) -> &Arc<Table> {
        self.last.table()
    }

    /// The bytes of the whole last table.
    pub(super) fn table_bytes(&self) -> u64 {
        bytes(self.last.messages(Epoch::default()))
    }
}

impl Cluster<'_> {
    /// A node joins.
    pub(super) fn joins(&mut self, node: usize) {
        let address = SocketAddr::from((Ipv4Addr::from(0x0a00_0000 + node as u32), 7_400));
        let join = Join {
            incarnation: 1_700_000_000_000_000 + node as u64,
            epoch: Epoch::default(),
            peer: address,
            http: address,
            devices: 1,
            weight: 1,
        };
        let now = self.now.as_millis() as u64;
        let joined = self.coordinator.membership.join(&format!("node-{node:05}"), &join, now);
        self.coordinator.sent.push(Epoch::default());
        assert_eq!(joined.map(|joined| joined.number), Ok(NodeNumber(node as u16 + 1)), "numbers grow");
    }

    /// A node leaves in order.
    pub(super) fn leaves(&mut self, node: usize) {
        self.nodes[node].is_alive = false;
        self.coordinator.membership.leave(NodeNumber(node as u16 + 1), 1_700_000_000_000_000 + node as u64);
    }

    /// A node sends a heartbeat.
    pub(super) fn beats(&mut self, node: usize) {
        let own = &self.nodes[node];
        if !own.is_alive {
            return;
        }
        let silent: Vec<NodeNumber> = own.silent.iter().copied().collect();
        let message = FollowerMessage::Heartbeat(Heartbeat { epoch: own.table.epoch, silent }).encode();
        let (number, now) = (own.number, self.now.as_millis() as u64);
        let coordinator = &mut self.coordinator;
        let cpu = thread_cpu();
        if let Ok(FollowerMessage::Heartbeat(beat)) = FollowerMessage::decode(&message) {
            let incarnation = 1_700_000_000_000_000 + node as u64;
            coordinator.membership.heartbeat(number, incarnation, &beat, now);
        }
        let answer = CoordinatorMessage::Heard.encode();
        coordinator.beats_cpu += thread_cpu() - cpu;
        coordinator.bytes += (message.len() + answer.len() + 16) as u64;
        self.plan(HEARTBEAT, Happening::Beat(node));
    }

    /// The coordinator checks its members, and publishes a table if something changed.
    pub(super) fn coordinator_ticks(&mut self) {
        self.plan(TICK, Happening::CoordinatorTick);
        let now = self.now.as_millis() as u64;
        let coordinator = &mut self.coordinator;
        let cpu = thread_cpu();
        let before = coordinator.membership.counts().moved_partitions;
        let table = coordinator.membership.tick(now);
        let moved = coordinator.membership.counts().moved_partitions - before;
        let took = thread_cpu() - cpu;
        let Some(table) = table else {
            coordinator.beats_cpu += took;
            return;
        };
        let cpu = thread_cpu();
        let (at, members, before) = (self.now, table.members.len(), Arc::clone(coordinator.last.table()));
        coordinator.last = Published::new(&before, table);
        coordinator.tables_cpu += took + (thread_cpu() - cpu);
        let bytes = bytes(coordinator.last.messages(before.epoch));
        coordinator.published.push(PublishedAt { at, members, moved, bytes });
        coordinator.waiting.extend(0..self.nodes.len());
        if !std::mem::replace(&mut coordinator.is_sending, true) {
            self.plan(Duration::ZERO, Happening::SendTable);
        }
    }

    /// The next node that lacks the last table gets it.
    pub(super) fn sends_table(&mut self) {
        let coordinator = &mut self.coordinator;
        let epoch = coordinator.last.table().epoch;
        while let Some(node) = coordinator.waiting.pop_front() {
            if !self.nodes[node].is_alive || coordinator.sent[node] == epoch {
                continue;
            }
            let before = std::mem::replace(&mut coordinator.sent[node], epoch);
            let cpu = thread_cpu();
            let sent = bytes(coordinator.last.messages(before));
            coordinator.tables_cpu += thread_cpu() - cpu;
            coordinator.bytes += sent;
            let took = Duration::from_secs_f64(sent as f64 / TABLE_BYTES_A_SECOND);
            let table = Arc::clone(coordinator.last.table());
            self.plan(took, Happening::SendTable);
            return self.plan(took + ONE_WAY, Happening::Table(node, table));
        }
        coordinator.is_sending = false;
    }
}

/// Bytes of messages on a stream.
fn bytes(messages: &[impl AsRef<[u8]>]) -> u64 {
    messages.iter().map(|message| message.as_ref().len() as u64 + HEAD_BYTES).sum()
}

/// CPU time that this thread has used.
pub(super) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The interval at which the coordinator checks its deadlines.
const TICK: Duration = Duration::from_millis(20);

/// The rate at which one coordinator sends tables: that of QUIC on one core.
const TABLE_BYTES_A_SECOND: f64 = 1e9;
