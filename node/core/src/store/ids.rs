//! Numbers that stand for things inside one store.
//!
//! A chunk's id is a place in the index and the place's generation. Places are used again, but never with the same generation: an
//! id that outlived its chunk finds nothing.

use std::num::NonZeroU32;

use larder_protocol::{ChunkHash, Fingerprint};

/// The number of a session with this actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u32);

/// The number of an engine process; a process may have several sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u32);

/// A tenant: its place in the node's configuration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u16);

/// A namespace that the store knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u16);

impl NamespaceId {
    /// The namespace with this number; a number that is too large gives a namespace that does not exist.
    pub fn of(number: u32) -> Self {
        Self(u16::try_from(number).unwrap_or(u16::MAX))
    }
}

/// A commit whose bytes are being copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OrderId(pub u64);

/// The key by which a chunk is found outside a store: on disk, in the object store, at another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    /// The namespace, tenant included.
    pub fingerprint: Fingerprint,
    /// The chunk.
    pub hash: ChunkHash,
}

/// The place of a chunk in the index. Places are small and used again, so policies keep their state in plain vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkNumber(NonZeroU32);

impl ChunkNumber {
    /// The chunk at `position` of a vector of chunks.
    ///
    /// # Panics
    /// Panics from position 2^32 - 1 on; no index is that large.
    pub fn at(position: usize) -> Self {
        let number = u32::try_from(position + 1).ok().and_then(NonZeroU32::new);
        Self(number.expect("an index holds fewer than 2^32 chunks"))
    }

    /// The chunk's position in a vector of chunks.
    pub fn position(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A chunk that the index knows, or knew: its place, and how many chunks had that place before it. No other chunk ever has
/// the same id, so an id that outlived its chunk names nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    number: ChunkNumber,
    generation: u32,
}

impl ChunkId {
    /// The chunk of this generation at a place.
    pub fn new(number: ChunkNumber, generation: u32) -> Self {
        Self { number, generation }
    }

    /// The chunk's place in the index.
    pub fn number(self) -> ChunkNumber {
        self.number
    }

    /// How many chunks had the place before it.
    pub fn generation(self) -> u32 {
        self.generation
    }
}

/// The place of one block: a slot of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The extent.
    pub extent: u32,
    /// The slot in it.
    pub number: u32,
}

/// A tier below memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Below {
    /// This actor's disk.
    Disk,
    /// The object store that all nodes share.
    Object,
}
