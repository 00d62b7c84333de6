//! Joins, leaves and crashes, and the time until all is right again.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use larder_core::directory::MAX_FOUND_HOLDERS;
use larder_protocol::peer::Find;
use larder_protocol::table::{Holder, RowKey};

use super::cluster::{Cluster, NAMESPACE, index};
use crate::directory::millis;

/// The effects of a change of the members.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq)]
pub struct Change {
    /// From the event to the first table that reflects it.
    pub table_after_seconds: f64,
    /// From that table to the moment when the last node has it.
    pub everywhere_after_seconds: f64,
    /// From that table to the moment when the last home knows its rows.
    pub repaired_after_seconds: f64,
    /// Partitions that have another home.
    pub moved_partitions: u64,
    /// Rows that homes received.
    pub told_rows: u64,
    /// Bytes of the tables for one node.
    pub table_bytes: u64,
    /// Of a thousand chunks that nodes hold, the number that their home does not know in the end.
    pub unknown_of_1000: usize,
}

impl Cluster<'_> {
    /// Runs until homes get no news and all nodes have the last table. Returns how long that took.
    pub(super) fn settle(&mut self) -> f64 {
        let from = self.now;
        loop {
            self.run_until(self.now + Duration::from_millis(500));
            let last = self.tally.known_at.max(self.coordinator.arrived_at).max(from);
            if self.now > last + QUIET || self.now > from + LONGEST {
                return (last - from).as_secs_f64();
            }
        }
    }

    /// A node joins that already has chunks.
    pub(super) fn join(&mut self) -> Change {
        self.add_node();
        self.watch(self.nodes.len())
    }

    /// A node leaves in order.
    pub(super) fn leave(&mut self) -> Change {
        let members = self.coordinator.table().members.len();
        let which = self.random.usize(..self.load.nodes);
        self.leaves(which);
        self.watch(members - 1)
    }

    /// One node in twenty crashes, all at once.
    pub(super) fn crash(&mut self) -> Change {
        let members = self.coordinator.table().members.len();
        let mut alive: Vec<usize> = (0..self.nodes.len()).filter(|&node| self.nodes[node].is_alive).collect();
        self.random.shuffle(&mut alive);
        let crashed = (self.load.nodes / 20).max(1);
        alive.iter().take(crashed).for_each(|&node| self.nodes[node].is_alive = false);
        self.watch(members - crashed)
    }

    /// Waits for a table with this many members, and for its effects.
    fn watch(&mut self, members: usize) -> Change {
        let (began, tables, known) = (self.now, self.coordinator.published.len(), self.tally.known);
        while self.coordinator.table().members.len() != members && self.now < began + LONGEST {
            self.run_until(self.now + Duration::from_millis(100));
        }
        self.settle();
        let published = &self.coordinator.published[tables..];
        let there = published.iter().find(|table| table.members == members).map_or(began, |table| table.at);
        let after = |then: Duration| then.saturating_sub(there).as_secs_f64();
        Change {
            table_after_seconds: (there - began).as_secs_f64(),
            everywhere_after_seconds: after(self.coordinator.arrived_at),
            repaired_after_seconds: after(self.tally.known_at),
            moved_partitions: published.iter().map(|table| table.moved).sum(),
            told_rows: self.tally.known - known,
            table_bytes: published.iter().map(|table| table.bytes).sum(),
            unknown_of_1000: self.unknown(),
        }
    }

    /// Of a thousand chunks that nodes hold, the number that their home does not know.
    fn unknown(&mut self) -> usize {
        let now = millis(self.now);
        let players: Vec<usize> = (0..self.nodes.len())
            .filter(|&node| self.nodes[node].is_alive && self.nodes[node].player.is_some())
            .collect();
        let mut unknown = 0;
        for _ in 0..1_000 {
            let node = &self.nodes[players[self.random.usize(..players.len())]];
            let holder = Holder { node: node.number, device: 0 };
            let held = node
                .player
                .as_ref()
                .and_then(|player| player.blocks.iter().nth(self.random.usize(..player.blocks.len().max(1))));
            let Some((id, anchor)) = held else { continue };
            let row = RowKey::new(&NAMESPACE, &id.chunk(anchor));
            let table = self.coordinator.table();
            let Some(home) = table.home(row.run.partition()) else { continue };
            let rows = self.nodes[index(home)].shard.find(&Find { epoch: table.epoch, rows: vec![row] }, now);
            // If many nodes hold a chunk, a home names only some of them.
            let is_known = rows.spans.iter().any(|span| span.holder == holder);
            unknown += usize::from(!is_known && rows.spans.len() < MAX_FOUND_HOLDERS);
        }
        unknown
    }
}

/// After this time without an event, nothing more happens.
const QUIET: Duration = Duration::from_secs(6);

/// The longest wait for a change.
const LONGEST: Duration = Duration::from_secs(300);
