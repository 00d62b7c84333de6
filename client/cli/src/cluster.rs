//! Where the processes of a cluster can be reached.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use larder_coordinator::Status;
use serde::{Deserialize, Serialize};

use crate::http;

/// The processes of one cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// HTTP address of the coordinator, if there is one.
    pub coordinator: Option<SocketAddr>,
    /// The nodes.
    pub nodes: Vec<NodeAddress>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAddress {
    /// Its name.
    pub name: String,
    /// Where it serves HTTP.
    pub http: SocketAddr,
    /// Its session sockets, by tenant; none as long as it has not told.
    pub sockets: BTreeMap<String, PathBuf>,
}

impl Addresses {
    /// Asks a coordinator for its nodes, and each node for its session sockets. A node that does not answer has none.
    ///
    /// # Errors
    /// The coordinator does not answer.
    pub fn discover(coordinator: SocketAddr) -> anyhow::Result<Self> {
        let status: Status =
            http::get_json(coordinator, "/status").context("cannot ask the coordinator for its nodes")?;
        let ask = |node: larder_coordinator::NodeStatus| {
            NodeAddress::discover(node.http).unwrap_or_else(|error| {
                tracing::warn!(node = node.name, "a node cannot be asked for its sockets: {error:#}");
                NodeAddress { name: node.name, http: node.http, sockets: BTreeMap::new() }
            })
        };
        Ok(Self { coordinator: Some(coordinator), nodes: status.nodes.into_iter().map(ask).collect() })
    }
}

impl NodeAddress {
    /// Asks a node for its name and session sockets.
    ///
    /// # Errors
    /// The node does not answer.
    pub fn discover(http: SocketAddr) -> anyhow::Result<Self> {
        let larder_node::Status { name, sockets, .. } = http::get_json(http, "/status")?;
        Ok(Self { name, http, sockets })
    }
}

/// The tenant of a development cluster.
pub const TENANT: &str = "default";
