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
    /// Where the coordinator serves HTTP, if there is one.
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
    /// Its session sockets, by tenant.
    pub sockets: BTreeMap<String, PathBuf>,
}

/// What of a node's `GET /status` leads to its sessions.
#[derive(Deserialize)]
struct NodeSockets {
    name: String,
    sockets: BTreeMap<String, PathBuf>,
}

impl Addresses {
    /// Asks a coordinator for its nodes, and each node for its session sockets.
    ///
    /// # Errors
    /// The coordinator or one of its nodes does not answer.
    pub fn discover(coordinator: SocketAddr) -> anyhow::Result<Self> {
        let status: Status =
            http::get_json(coordinator, "/status").context("cannot ask the coordinator for its nodes")?;
        let ask = |node: larder_coordinator::NodeStatus| {
            NodeAddress::discover(node.http)
                .with_context(|| format!("cannot ask {} for its sockets", node.name))
        };
        let nodes = status.nodes.into_iter().map(ask).collect::<anyhow::Result<_>>()?;
        Ok(Self { coordinator: Some(coordinator), nodes })
    }
}

impl NodeAddress {
    /// Asks a node for its name and session sockets.
    ///
    /// # Errors
    /// The node does not answer.
    pub fn discover(http: SocketAddr) -> anyhow::Result<Self> {
        let NodeSockets { name, sockets } = http::get_json(http, "/status")?;
        Ok(Self { name, http, sockets })
    }
}
