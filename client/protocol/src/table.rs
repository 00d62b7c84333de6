//! The partition table: names the home of each part of the chunk-hash space.
//!
//! The coordinator makes the table, and numbers every version with an epoch; nodes and clients only read it.

mod pages;

use std::collections::HashSet;
use std::fmt;
use std::net::SocketAddr;

use rkyv::{Archive, Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::chunk::{ChunkHash, ChunkRef};
use crate::limits::MAX_INCARNATION;
use crate::namespace::Fingerprint;

pub use pages::{NewHome, TablePage, TableReader, WrongPage, pages};

/// Partitions of the chunk-hash space: enough for each of [`MAX_MEMBERS`](crate::limits::MAX_MEMBERS) nodes to be home to one.
pub const PARTITIONS: u16 = 1 << PARTITION_BITS;

/// The version of a table. An epoch of a later term is later than all epochs of earlier terms.
#[derive(
    Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
pub struct Epoch {
    /// Grows with each start of a coordinator, and with each change of the leader.
    pub term: u64,
    /// Grows with each table of a term.
    pub number: u64,
}

/// A node's number. The coordinator gives each name a number. When all numbers have been given out, a new name gets the number of
/// the node that left longest ago. No node has the number 0.
#[derive(
    Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
)]
pub struct NodeNumber(pub u16);

impl NodeNumber {
    /// The number that stands for the own node, among its own actors. No member has this number.
    pub const THIS_NODE: Self = Self(u16::MAX);
}

/// One actor of one node, as the holder of blocks.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    /// The node.
    pub node: NodeNumber,
    /// The actor of the node.
    pub device: u16,
}

/// The cluster's facts about one node.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The node's number.
    pub number: NodeNumber,
    /// The node's name, as in its certificate.
    pub name: String,
    /// The node's incarnation: microseconds since 1970 at its start, or more. Claims of earlier incarnations are void.
    pub incarnation: u64,
    /// Address for peers (QUIC).
    pub peer: SocketAddr,
    /// Address of the node's HTTP server.
    pub http: SocketAddr,
    /// The number of the node's GPU actors that share chunks; 0 for a node that shares none and answers no other node: it is home
    /// to no partition.
    pub devices: u16,
    /// The node's share of the partitions, relative to the weights of the other nodes: usually its capacity in bytes. At least 1.
    pub weight: u64,
    /// The node's state.
    pub state: MemberState,
}

/// The state of a member.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemberState {
    /// The coordinator hears the node.
    Alive,
    /// The node has been silent for some time: ask other nodes first.
    Suspect,
    /// The node leaves soon: it keeps no new chunks, and is home to no partition.
    Draining,
}

/// Members and homes.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The table's version.
    pub epoch: Epoch,
    /// The members, ascending by number.
    pub members: Vec<Member>,
    /// The home of each partition: [`PARTITIONS`] numbers of members, or none at all if there is no member.
    pub homes: Vec<NodeNumber>,
}

/// A run of chunks in the directory: a digest of the run's namespace and anchor. 128 bits without defense against attackers are
/// enough, since the directory is a hint: two runs with one key cost a round trip, never wrong bytes.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunKey(pub u128);

/// A chunk in the directory: its run, and eight bytes that distinguish it from the run's other chunks.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// The run.
    pub run: RunKey,
    /// The chunk in the run.
    pub chunk: u64,
}

impl Table {
    /// The home of a partition; `None` if the cluster has no member.
    #[must_use]
    pub fn home(&self, partition: u16) -> Option<NodeNumber> {
        self.homes.get(usize::from(partition)).copied()
    }

    /// A member by number.
    #[must_use]
    pub fn member(&self, number: NodeNumber) -> Option<&Member> {
        let at = self.members.binary_search_by_key(&number, |member| member.number).ok()?;
        Some(&self.members[at])
    }

    /// Whether a coordinator can have made the table: members ascending, with numbers, names and incarnations that members have,
    /// every home a member, all partitions or none.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        let ascending = self.members.windows(2).all(|pair| pair[0].number < pair[1].number);
        let names: HashSet<&str> = self.members.iter().map(|member| member.name.as_str()).collect();
        let is_possible =
            |member: &Member| member.number != NodeNumber::THIS_NODE && member.incarnation <= MAX_INCARNATION;
        let are_possible = names.len() == self.members.len() && self.members.iter().all(is_possible);
        let homes = if self.members.is_empty() { 0 } else { usize::from(PARTITIONS) };
        ascending
            && are_possible
            && self.homes.len() == homes
            && self.homes.iter().all(|&home| self.member(home).is_some())
    }
}

impl RunKey {
    /// The run of `anchor`.
    #[must_use]
    pub fn new(fingerprint: &Fingerprint, anchor: &ChunkHash) -> Self {
        let mut name = [0; 64];
        name[..32].copy_from_slice(&fingerprint.0);
        name[32..].copy_from_slice(&anchor.0);
        Self(xxh3_128(&name))
    }

    /// The partition that the run belongs to: its first 14 bits.
    #[must_use]
    pub fn partition(self) -> u16 {
        (self.0 >> (128 - PARTITION_BITS)) as u16
    }
}

impl RowKey {
    /// The row of a chunk.
    #[must_use]
    pub fn new(fingerprint: &Fingerprint, chunk: &ChunkRef) -> Self {
        Self { run: RunKey::new(fingerprint, &chunk.anchor), chunk: chunk.hash.short() }
    }

    /// Eight bytes that stand for the row, the same on every node. A home and a holder compare sums of them to find out whether
    /// both know the same rows.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut name = [0; 24];
        name[..16].copy_from_slice(&self.run.0.to_le_bytes());
        name[16..].copy_from_slice(&self.chunk.to_le_bytes());
        xxh3_64(&name)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.term, self.number)
    }
}

impl fmt::Display for NodeNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.device)
    }
}

impl fmt::Debug for RunKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

const PARTITION_BITS: u32 = 14;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_keys_and_partitions_are_what_they_always_were() {
        let run = RunKey::new(&Fingerprint([1; 32]), &ChunkHash([2; 32]));
        assert_eq!(format!("{run:?}"), GOLDEN_RUN);
        assert_eq!(u16::from_str_radix(&GOLDEN_RUN[..4], 16), Ok(run.partition() << 2));
        assert!((0..=255).all(|byte| {
            RunKey::new(&Fingerprint([byte; 32]), &ChunkHash([byte; 32])).partition() < PARTITIONS
        }));
    }

    #[test]
    fn digests_of_rows_are_what_they_always_were() {
        let row = RowKey { run: RunKey(1 << 100 | 7), chunk: 42 };
        assert_eq!(row.digest(), 3_384_703_983_843_301_248);
    }

    const GOLDEN_RUN: &str = "cd001d484db7b3923e83182b03cdbc51";
}
