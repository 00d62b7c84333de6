//! Moves blocks on one thread: the thread between nodes, or a block thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use larder_core::exchange::{ExchangeLimits, Outgoing};
use larder_net::seldom::Seldom;
use larder_net::tcp::{TcpEndpoint, TcpPort};
use larder_protocol::table::Table;

use super::awake::Awake;
use super::metrics::{ExchangeMetrics, OTHER};
use super::rooms::Rooms;
use crate::clock::Clock;

/// The parts that all threads that move blocks share. Cloning shares.
#[derive(Debug, Clone)]
pub struct Common {
    pub(super) metrics: ExchangeMetrics,
    pub(super) clock: Clock,
    pub(super) rooms: Rooms,
    /// `None` if blocks move over QUIC alone.
    pub(super) tcp: Option<Tcp>,
    outgoing: Arc<Mutex<Outgoing>>,
    members: Arc<Mutex<BTreeSet<String>>>,
    /// Lines about the faults of other nodes, by kind.
    faults: Arc<Mutex<BTreeMap<&'static str, Seldom>>>,
    /// Bytes that came over TCP, by node.
    over_tcp: Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>,
}

/// The second way of blocks, over TCP. Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct Tcp {
    pub(super) endpoint: TcpEndpoint,
    pub(super) port: Arc<TcpPort>,
}

/// Sends blocks (`send.rs`) and receives blocks (`receive.rs`) on one thread. Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct Mover {
    pub(super) common: Common,
    pub(super) awake: Awake,
}

impl Common {
    /// The parts of a node that moves nothing yet.
    pub fn new(limits: &ExchangeLimits, metrics: ExchangeMetrics, clock: Clock, rooms: Rooms) -> Self {
        let outgoing = Arc::new(Mutex::new(Outgoing::new(limits)));
        let (members, faults, over_tcp) = (Arc::default(), Arc::default(), Arc::default());
        Self { metrics, clock, rooms, tcp: None, outgoing, members, faults, over_tcp }
    }

    /// The same for a node that fetches blocks over TCP too, and sends them to those who connect to `port`.
    #[must_use]
    pub fn with_tcp(self, endpoint: TcpEndpoint, port: TcpPort) -> Self {
        Self { tcp: Some(Tcp { endpoint, port: Arc::new(port) }), ..self }
    }

    /// The clock from which all times here count.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The bounds on what this node sends.
    pub(super) fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        larder_net::lock(&self.outgoing)
    }

    /// The number of lines about faults of this kind that were left out before this line; `None` if it is left out too.
    pub(super) fn says(&self, fault: &'static str) -> Option<u64> {
        let mut faults = larder_net::lock(&self.faults);
        faults.entry(fault).or_insert_with(|| Seldom::new(QUIET)).says(self.now())
    }

    /// Time since the node started.
    pub(super) fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    /// The counter of bytes that come from a node over TCP.
    pub(super) fn came_over_tcp(&self, name: &str) -> Arc<AtomicU64> {
        let mut over_tcp = larder_net::lock(&self.over_tcp);
        Arc::clone(over_tcp.entry(name.to_owned()).or_default())
    }

    /// Bytes that came from a node over TCP so far. While their number grows, the node's process is alive.
    pub(super) fn bytes_over_tcp(&self, name: &str) -> u64 {
        let over_tcp = larder_net::lock(&self.over_tcp);
        over_tcp.get(name).map_or(0, |came| came.load(Ordering::Relaxed))
    }

    /// From now on, metrics name the members of this table.
    pub(super) fn set_table(&self, table: &Table) {
        let members: BTreeSet<String> = table.members.iter().map(|member| member.name.clone()).collect();
        let mut over_tcp = larder_net::lock(&self.over_tcp);
        over_tcp.retain(|name, came| members.contains(name) || Arc::strong_count(came) > 1);
        drop(over_tcp);
        *larder_net::lock(&self.members) = members;
    }

    /// The name of a node in metrics.
    pub(super) fn metrics_name<'a>(&self, name: &'a str) -> &'a str {
        let members = larder_net::lock(&self.members);
        if members.contains(name) { name } else { OTHER }
    }
}

impl Mover {
    /// The mover of the thread between nodes.
    pub(super) fn new(common: Common) -> Self {
        let awake = Awake::new(common.clock);
        Self { common, awake }
    }

    /// The mover of a block thread.
    pub(super) fn of_block_thread(common: Common) -> Self {
        let awake = Awake::never(common.clock);
        Self { common, awake }
    }
}

/// At most one line about a kind of faults of other nodes comes in this time.
const QUIET: Duration = Duration::from_secs(1);
