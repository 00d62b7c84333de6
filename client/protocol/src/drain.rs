//! Messages about drains: an admin's to a node, and a draining node's to other nodes.
//!
//! A draining node asks a peer to *take* some of its chunks ([`Take`]). The peer fetches the chunks for which it has room, like
//! any other chunks, and answers when it keeps them ([`Taken`]).

use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::ChunkRef;
use crate::namespace::NamespaceSpec;

/// An admin's command to a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainCommand {
    /// Move the warm chunks to others, then leave the cluster and end.
    Start(DrainStart),
    /// End the drain: the node goes on. Chunks that have moved stay where they are.
    Cancel,
    /// Only report the progress of the drain.
    Report,
}

/// How a node is to drain.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainStart {
    /// Time for the drain, in milliseconds: then the node leaves, whatever has moved.
    pub within_ms: u64,
    /// Limit of the bytes of blocks that move in a second; if `None`, the node's own limit.
    pub bytes_per_second: Option<u64>,
    /// The node's last step.
    pub then: AfterDrain,
}

/// The last step of a node that has drained.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterDrain {
    /// The node ends, and does not come back. Chunks that are both on its disk and in memory move too.
    Stop,
    /// The node ends, and its supervisor starts it again. Chunks on its disk stay there.
    Restart,
}

/// The progress of a drain.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Whether the node drains.
    pub is_draining: bool,
    /// Whether all moves have ended: the node leaves now.
    pub is_over: bool,
    /// The node's last step, if it drains.
    pub then: Option<AfterDrain>,
    /// Milliseconds until the node leaves at the latest.
    pub left_ms: u64,
    /// Why the last drain was given up, if it was.
    pub trouble: Option<String>,
    /// The counts of the drain's chunks.
    pub chunks: DrainCounts,
}

/// The chunks of a drain so far, counted by their fate.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainCounts {
    /// Chunks that were in memory at the start.
    pub found: u64,
    /// Chunks that moved to other nodes.
    pub moved: u64,
    /// Bytes of the chunks that moved.
    pub moved_bytes: u64,
    /// Chunks that another node holds anyway.
    pub elsewhere: u64,
    /// Chunks that the node's disk or the object store keeps.
    pub kept_below: u64,
    /// Lost chunks: refused, or worth less than the chunks of all other nodes.
    pub left: u64,
}

impl DrainCounts {
    /// The sums of two actors' counts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            found: self.found + other.found,
            moved: self.moved + other.moved,
            moved_bytes: self.moved_bytes + other.moved_bytes,
            elsewhere: self.elsewhere + other.elsewhere,
            kept_below: self.kept_below + other.kept_below,
            left: self.left + other.left,
        }
    }
}

/// Asks an actor of another node to keep chunks of the asking node, because the asking node leaves soon.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Take {
    /// The asking node's actor that has the chunks.
    pub from: u16,
    /// The asked actor.
    pub to: u16,
    /// The chunks' namespace; `None` if there are no chunks, since the asker only wants to know the room.
    pub namespace: Option<TakeNamespace>,
    /// The chunks; at most [`MAX_FETCH_CHUNKS`](crate::limits::MAX_FETCH_CHUNKS). The most worth first.
    pub chunks: Vec<TakeChunk>,
}

/// A namespace that the asked node may not know yet.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct TakeNamespace {
    /// The tenant's name.
    pub tenant: String,
    /// The namespace's description.
    pub spec: NamespaceSpec,
}

/// A chunk to keep.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakeChunk {
    /// The chunk's name.
    pub chunk: ChunkRef,
    /// Its rank among the chunks of the actor that drains, in millionths: a chunk of rank 0 would be evicted last there, a chunk
    /// of rank one million first.
    pub rank_ppm: u32,
}

/// The answer to [`Take`].
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// For each chunk, in the order of the request, whether it is kept from now on.
    pub is_kept: Vec<bool>,
    /// Chunks for which there is room before a chunk has to be evicted.
    pub free_chunks: u64,
    /// Bytes of slots for these chunks.
    pub free_bytes: u64,
    /// Beyond this room, chunks below this rank are kept, in millionths; with 0 none are kept.
    pub rank_limit_ppm: u32,
}

/// The whole of a rank: ranks are in millionths.
pub const WHOLE_RANK_PPM: u32 = 1_000_000;
