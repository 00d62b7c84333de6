//! Messages between the coordinator and its followers.
//!
//! A follower opens one bidirectional QUIC stream to the coordinator and keeps it. Both sides write messages on it, framed as in
//! [`crate::peer`]. A node (role `node` in its certificate) starts with `Join`; a process that only wants tables (an engine, an
//! admin or another coordinator) starts with `Watch`. The coordinator's first message is `Standing`. This message fences all
//! later messages on the stream: one stream belongs to one coordinator, in this term or later terms.

use std::net::SocketAddr;

use rkyv::{Archive, Deserialize, Serialize};

use crate::reload::Reloaded;
use crate::table::{Epoch, NodeNumber, TablePage};

/// A message of a follower.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum FollowerMessage {
    /// A node wants to be a member; the node's name is in its certificate.
    Join(Join),
    /// The node lives.
    Heartbeat(Heartbeat),
    /// The node leaves, in order.
    Leave,
    /// The process wants tables.
    Watch,
    /// Whether the node drains from now on. The node sends this again after each join.
    Drains(bool),
    /// A page of the table that the node knows, since the coordinator asked for the table ([`CoordinatorMessage::Bring`]).
    Brings(TablePage),
    /// Another coordinator leads too, at this address for peers. The coordinator that hears this asks the other, and one of the
    /// two stops.
    Rival(SocketAddr),
    /// Asks which coordinator leads; the only message of its stream. A coordinator that asks tells its own standing.
    Who(Option<Standing>),
    /// Makes the coordinator read its configuration again; the only message of its stream. Only an admin may send it.
    Reload,
    /// Makes the coordinator forget the lost node of this name; the only message of its stream. Only an admin may send it.
    /// [`CoordinatorMessage::Forgot`] answers, or a refusal if the node is a member.
    Forget(String),
}

/// A coordinator's term, and whether it leads.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The term of the coordinator's tables.
    pub term: u64,
    /// The number of this coordinator's life: no other life of any coordinator has it.
    pub life: u64,
    /// Whether the coordinator leads. A coordinator that does not lead passes its leader's tables on, and lets nobody join.
    pub leads: bool,
    /// The leader's address for nodes, as `HOST:PORT`, if another coordinator leads.
    pub leader: Option<String>,
}

/// A node wants to be a member.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The node's incarnation (see [`crate::table::Member::incarnation`]).
    pub incarnation: u64,
    /// The latest table that the node knows: a coordinator that lost its state learns from it.
    pub epoch: Epoch,
    /// Address for peers.
    pub peer: SocketAddr,
    /// Address of its HTTP server.
    pub http: SocketAddr,
    /// The number of the node's GPU actors.
    pub devices: u16,
    /// Its share of the partitions.
    pub weight: u64,
}

/// A node lives.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// The latest table that the node knows.
    pub epoch: Epoch,
    /// Members that do not answer the node.
    pub silent: Vec<NodeNumber>,
}

/// A message of the coordinator.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum CoordinatorMessage {
    /// The node is a member, or will be with the next table.
    Joined(Joined),
    /// The node is not a member, since a newer incarnation of it was a member. If the node knows that this is impossible (a clock
    /// was set back), it joins again with this incarnation.
    Outdated(u64),
    /// The node is no longer a member, after long silence: it joins again.
    Removed,
    /// A page of the table that is in force from now on.
    Table(TablePage),
    /// A heartbeat was heard.
    Heard,
    /// The node is not a member: another live process with the node's name is a member.
    InUse(InUse),
    /// A heartbeat was heard. Another process with the node's name, at this address, wanted to join.
    Contested(SocketAddr),
    /// The node cannot be a member, for this reason. Asking again may help once the reason is gone.
    Refused(String),
    /// The coordinator's standing. A follower that knows a later term obeys nothing on this stream.
    Standing(Standing),
    /// Asks the node for its table: the node knows a later table than this new leader, and the leader has made no table yet.
    Bring,
    /// The result of reading the configuration again.
    Reloaded(Box<Reloaded>),
    /// The coordinator does not remember a lost node of that name; whether it did before.
    Forgot(bool),
}

impl Standing {
    /// Whether this coordinator stops if it and `other` both lead without knowing of each other. Exactly one of the two stops.
    #[must_use]
    pub fn yields_to(&self, other: &Self) -> bool {
        self.leads
            && other.leads
            && self.life != other.life
            && (self.term, self.life) < (other.term, other.life)
    }
}

/// Another process has the node's name.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse {
    /// That process's address for peers.
    pub address: SocketAddr,
    /// The time after which the node may take the place of that process, if that process is silent until then.
    pub retry_after_ms: u64,
}

/// The node is a member.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its number from now on.
    pub number: NodeNumber,
    /// Milliseconds between the node's heartbeats.
    pub heartbeat_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leader(term: u64, life: u64) -> Standing {
        Standing { term, life, leads: true, leader: None }
    }

    #[test]
    fn exactly_one_of_two_leaders_yields_and_none_to_itself_or_to_a_follower() {
        for (one, other) in [((1, 1), (1, 2)), ((1, 9), (2, 1)), ((3, 4), (7, 5))] {
            let (one, other) = (leader(one.0, one.1), leader(other.0, other.1));
            assert!(one.yields_to(&other) && !other.yields_to(&one));
        }
        assert!(!leader(1, 1).yields_to(&leader(2, 1)), "it heard of itself, in a later term");
        assert!(!leader(1, 1).yields_to(&Standing { leads: false, ..leader(9, 9) }));
    }
}
