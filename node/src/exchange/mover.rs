//! Moves blocks on one thread: the thread between nodes, or a block thread.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_core::exchange::{ExchangeLimits, Outgoing};
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
    outgoing: Arc<Mutex<Outgoing>>,
    members: Arc<Mutex<BTreeSet<String>>>,
}

/// One thread's hands: they send blocks (`send.rs`) and receive blocks (`receive.rs`). Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct Mover {
    pub(super) common: Common,
    pub(super) awake: Awake,
}

impl Common {
    /// The parts of a node that moves nothing yet.
    #[must_use]
    pub fn new(limits: &ExchangeLimits, metrics: ExchangeMetrics, clock: Clock, rooms: Rooms) -> Self {
        let outgoing = Arc::new(Mutex::new(Outgoing::new(limits)));
        Self { metrics, clock, rooms, outgoing, members: Arc::default() }
    }

    /// The clock from which all times here count.
    #[must_use]
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// The bounds on what this node sends.
    pub(super) fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the node started.
    pub(super) fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    /// From now on, metrics name the members of this table.
    pub(super) fn set_table(&self, table: &Table) {
        let members = table.members.iter().map(|member| member.name.clone()).collect();
        *self.members.lock().unwrap_or_else(PoisonError::into_inner) = members;
    }

    /// The name of a node in metrics.
    pub(super) fn metrics_name<'a>(&self, name: &'a str) -> &'a str {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if members.contains(name) { name } else { OTHER }
    }
}

impl Mover {
    /// The hands of the thread between nodes.
    pub(super) fn new(common: Common) -> Self {
        let awake = Awake::new(common.clock);
        Self { common, awake }
    }

    /// The hands of a block thread.
    pub(super) fn of_block_thread(common: Common) -> Self {
        let awake = Awake::never(common.clock);
        Self { common, awake }
    }
}
