//! Connections between nodes, kept and closed by the real decision. A handshake takes one more round trip.

use std::collections::HashMap;
use std::time::Duration;

use larder_core::exchange::{ConnectionId, Connections, Dialler};
use larder_protocol::table::NodeNumber;

use super::cluster::{Cluster, Happening, ONE_WAY, index};

/// The connections of a node.
#[derive(Default)]
pub(super) struct Ends {
    pub(super) connections: Connections,
    /// For each connection, the node at its other end, and the connection's name there.
    others: HashMap<ConnectionId, (usize, ConnectionId)>,
}

impl Cluster<'_> {
    /// Sends a request to another node. Returns its travel time.
    pub(super) fn send(&mut self, from: usize, to: NodeNumber, rides: bool) -> Duration {
        if self.node(to).is_none() {
            return ONE_WAY;
        }
        let to = index(to);
        let (id, took) = match self.nodes[from].ends.connections.used(&name(to)) {
            Some(id) => (id, ONE_WAY),
            None => (self.dial(from, to), 3 * ONE_WAY),
        };
        let Some(&(_, there)) = self.nodes[from].ends.others.get(&id) else { return took };
        for (node, id) in [(from, id), (to, there)] {
            let connections = &mut self.nodes[node].ends.connections;
            connections.begins(id);
            connections.ends(self.now, id, rides);
            self.close_idle(node);
        }
        took
    }

    /// Whether a request to a node needs a handshake first.
    pub(super) fn is_far(&self, from: usize, to: NodeNumber) -> bool {
        self.nodes[from].ends.connections.used(&name(index(to))).is_none()
    }

    fn dial(&mut self, from: usize, to: usize) -> ConnectionId {
        self.tally.dials += u64::from(self.tally.is_on);
        let here = self.nodes[from].ends.connections.opened(self.now, &name(to), Dialler::Here);
        let at_peer = &mut self.nodes[to].ends.connections;
        let there = at_peer.opened(self.now, &name(from), Dialler::There);
        at_peer.is_at_home(there);
        self.nodes[from].ends.others.insert(here, (to, there));
        self.nodes[to].ends.others.insert(there, (from, here));
        here
    }

    /// Lets time pass for all connections.
    pub(super) fn connections_tick(&mut self) {
        self.plan(TICK, Happening::ConnectionsTick);
        for node in 0..self.nodes.len() {
            let connections = &mut self.nodes[node].ends.connections;
            if connections.next_deadline().is_some_and(|due| due <= self.now) {
                connections.tick(self.now);
                self.close_idle(node);
            }
            let open = self.nodes[node].ends.connections.len();
            self.tally.open(open);
        }
    }

    /// Closes the connections that a node does not keep.
    fn close_idle(&mut self, node: usize) {
        while let Some((id, _)) = self.nodes[node].ends.connections.poll_close() {
            let Some((other, there)) = self.nodes[node].ends.others.remove(&id) else { continue };
            self.nodes[other].ends.others.remove(&there);
            self.nodes[other].ends.connections.closed(there);
        }
    }
}

/// A node's name for its peers.
pub(super) fn name(node: usize) -> String {
    format!("node-{node}")
}

/// The interval at which connections are checked.
const TICK: Duration = Duration::from_millis(100);
