//! Connections to the nodes, opened on demand and kept.

use std::cell::RefCell;
use std::collections::BTreeMap;

use larder_net::quic::{Connection, Endpoint};
use larder_protocol::identity::Role;
use larder_protocol::table::{NodeNumber, Table};

/// The connections. Lives on the endpoint's thread.
pub(crate) struct Nodes {
    endpoint: Endpoint,
    connections: RefCell<BTreeMap<NodeNumber, (u64, Connection)>>,
}

impl Nodes {
    pub(crate) fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, connections: RefCell::default() }
    }

    /// The connection to a member's present life; `None` if the member is not reached.
    pub(crate) async fn connection(&self, table: &Table, node: NodeNumber) -> Option<Connection> {
        let member = table.member(node)?;
        let known = self.connections.borrow().get(&node).cloned();
        if let Some((incarnation, connection)) = known
            && incarnation == member.incarnation
            && connection.quic().close_reason().is_none()
        {
            return Some(connection);
        }
        let connection = self.endpoint.connect(member.peer, Role::Node, Some(&member.name)).await.ok()?;
        self.connections.borrow_mut().insert(node, (member.incarnation, connection.clone()));
        Some(connection)
    }

    /// A node did not answer: the next question dials it anew.
    pub(crate) fn forget(&self, node: NodeNumber) {
        self.connections.borrow_mut().remove(&node);
    }
}
