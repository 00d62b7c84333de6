//! Blocks that an engine may read, and their places.

use rkyv::{Archive, Deserialize, Serialize};

/// The answer to a request to read: the blocks may be read.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// The number of the lease, to be released; 0 if nothing is leased.
    pub lease: u64,
    /// Chunks leased, from the chain's first on.
    pub chunks: u32,
    /// The places of the blocks that are needed to restore these chunks: for each chunk, for each slice of the session, for each
    /// pool of [`PoolRules::needed`](crate::PoolRules::needed).
    pub places: Vec<Place>,
    /// The checksum of each of these blocks, over its bytes and its name
    /// ([`block_checksum`](crate::checksum::block_checksum)).
    pub checksums: Vec<u64>,
    /// Extents that the session sees for the first time; their descriptors come with the message, in this order.
    pub extents: Vec<Extent>,
}

/// The place of one block in the arena.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the extent.
    pub extent: u32,
    /// Offset in the extent, in bytes.
    pub offset: u64,
}

/// A piece of the arena: one sealed memory file.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The extent's number. A renewed extent has the same number and other memory.
    pub extent: u32,
    /// The extent's size.
    pub bytes: u64,
}
