//! Messages between the coordinator and its followers.
//!
//! A follower opens one bidirectional QUIC stream to the coordinator and keeps it. Both sides write messages on it, framed as
//! in [`crate::peer`]. A node (role `node` in its certificate) starts with `Join`; a process that only wants tables (an
//! engine or admin) starts with `Watch`.

use std::net::SocketAddr;

use rkyv::{Archive, Deserialize, Serialize};

use crate::table::{Epoch, NodeNumber, TablePage};

/// A message of a follower.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum FollowerMessage {
    /// A node wants to be a member; its name stands in its certificate.
    Join(Join),
    /// The node lives.
    Heartbeat(Heartbeat),
    /// The node goes, in order.
    Leave,
    /// Somebody wants to know tables.
    Watch,
    /// The node drains from now on, or does no more. Said again after each join.
    Drains(bool),
}

/// A node wants to be a member.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The node's incarnation (see [`crate::table::Member::incarnation`]).
    pub incarnation: u64,
    /// The latest table it knows: a coordinator that lost its state learns from it.
    pub epoch: Epoch,
    /// Address for peers.
    pub peer: SocketAddr,
    /// Address of its HTTP server.
    pub http: SocketAddr,
    /// GPU actors it has.
    pub devices: u16,
    /// Its share of the partitions.
    pub weight: u64,
}

/// A node lives.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// The latest table it knows.
    pub epoch: Epoch,
    /// Members that do not answer it.
    pub silent: Vec<NodeNumber>,
}

/// A message of the coordinator.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum CoordinatorMessage {
    /// The node is a member, or will be with the next table.
    Joined(Joined),
    /// The node is not a member, since a newer incarnation was. If that is impossible (a clock was set back), the node joins
    /// again as this incarnation.
    Outdated(u64),
    /// The node is no member any more, after long silence: it joins again.
    Removed,
    /// Some of the table that counts from now on.
    Table(TablePage),
    /// A heartbeat was heard.
    Heard,
    /// The node is not a member: another process of its name is, and is heard of.
    InUse(InUse),
    /// A heartbeat was heard; and another process of the node's name, at this address, wanted to join.
    Contested(SocketAddr),
    /// The node cannot be a member, for this reason. Asking again may help once that is mended.
    Refused(String),
}

/// Another process has the node's name.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse {
    /// That process's address for peers.
    pub address: SocketAddr,
    /// When the node may take its place, if that process is silent until then.
    pub retry_after_ms: u64,
}

/// The node is a member.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its number from now on.
    pub number: NodeNumber,
    /// How often to send a heartbeat.
    pub heartbeat_ms: u64,
}
