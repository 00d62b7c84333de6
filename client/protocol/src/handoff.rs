//! Messages of a hand-over: chunks that are read layer by layer while they are being written.
//!
//! The writer reserves as for any put, hands each layer over when it has it ([`HandOver`]), and commits. A reader on the same
//! node, or on another node, follows the chunks ([`Follow`]) and hears which layers are in place. A layer in place was summed
//! when it was copied, and verified at each node to which it was sent. Other readers find a chunk only once the whole chunk is
//! committed.

use rkyv::{Archive, Deserialize, Serialize};

use crate::chain::Chain;
use crate::lease::Leased;
#[cfg(doc)]
use crate::pools::PoolRules;

/// Hands over some layers of reserved chunks.
///
/// A chunk is either committed from the window, or handed over layer by layer, in any order, and committed when no layer is
/// missing. While a commit or hand-over of a chunk is under way, the node takes no other for this chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// The reservation.
    pub reservation: u64,
    /// Positions (in the reserved chain) of the chunks.
    pub chunks: Vec<u32>,
    /// The pool.
    pub pool: u8,
    /// The first layer, in the pool.
    pub from_layer: u32,
    /// The layer behind the last layer.
    pub to_layer: u32,
    /// Offsets of these layers in the write window: for each chunk, for each slice of the session. Empty if the node trusts
    /// its engines.
    pub sources: Vec<u64>,
}

/// Asks to read chunks while they are being written.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Follow {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunks. Of each chunk, only those pools are followed that are needed to restore all chunks ([`PoolRules::needed`]). If
    /// the last chunks need more pools than the others, all chunks are lost if one chunk does not come. The node takes room for
    /// all chunks from elsewhere at once, or for none.
    pub chain: Chain,
    /// The writer of the missing chunks; without one, the node asks nobody.
    pub writer: Option<Writer>,
    /// The earliest attempt whose layers are wanted; 0 for any attempt.
    pub attempt: u64,
    /// The longest silence before the reader gives up.
    pub patience_ms: u64,
}

/// The place of a prefill engine that hands layers over.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Writer {
    /// The name of the engine's node.
    pub node: String,
    /// The number of the actor there.
    pub device: u16,
}

/// Asks how many layers of followed chunks are in place.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct AskInPlace {
    /// The number of the follow.
    pub follow: u64,
    /// Chunks that the asker expects: fewer chunks are news.
    pub chunks: u32,
    /// Layers that the asker knows of: more layers are news.
    pub layers: u32,
    /// How long the answer may wait for news.
    pub wait_ms: u64,
}

/// How many layers of followed chunks are in place.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct InPlace {
    /// Chunks that have come or may still come, from the first on. A chunk behind these will not come: its writer ended or went
    /// silent.
    pub chunks: u32,
    /// Layers that are in place in all these chunks and every pool, counted from the first layer. Pools with fewer layers
    /// count as far as they go.
    pub layers: u32,
    /// Whether nothing more will come: all of these chunks are committed.
    pub is_whole: bool,
    /// The chunks' places, once each chunk has one; sent once. The lease has the number of the follow, and no checksums.
    pub leased: Option<Leased>,
    /// Checksums of the layers in place that the asker does not know of yet, up to `layers`; empty if all chunks are whole.
    pub sums: Vec<LayersSum>,
    /// The blocks' checksums, in the order of the lease's places, once all chunks are whole; empty before.
    pub checksums: Vec<u64>,
}

/// The checksum of layers of a block that are in place. The range may begin before the new layers and end behind them.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersSum {
    /// Position of the chunk in the follow.
    pub chunk: u32,
    /// The block, by slice of the session, then pool.
    pub block: u32,
    /// The first layer, in the pool.
    pub from_layer: u32,
    /// The layer behind the last layer.
    pub to_layer: u32,
    /// The checksum of the layers' bytes and the block's name ([`layers_checksum`](crate::checksum::layers_checksum)).
    pub checksum: u64,
}
