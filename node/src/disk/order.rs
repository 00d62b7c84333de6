//! Orders to a disk tier, and its answers.

use std::sync::Arc;

use larder_core::Written;
use larder_core::store::ids::ChunkKey;
use larder_core::store::{BlockMove, Checksums, PurgedKeys};
use larder_protocol::checksum::{BlockKey, block_checksum};
use larder_protocol::purge::PurgeMode;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet};

use super::format::{BlockEntry, MAX_HEADER_PAGES, PAGE_BYTES, RecordHeader};
use crate::arena::{Arena, ExtentMemory, OutOfBounds, Pages};

/// A block's place in the arena.
#[derive(Debug, Clone)]
pub struct BlockPlace {
    /// The part of the chunk that one engine rank holds.
    pub slice: u16,
    /// The kind of state.
    pub pool: u8,
    /// The extent of the place.
    pub memory: Arc<ExtentMemory>,
    /// Offset of the block in the extent.
    pub offset: u64,
    /// Size of the block.
    pub bytes: u64,
    /// Bytes that share one checksum: whole layers.
    pub range_bytes: u64,
}

impl BlockPlace {
    /// The place of a block.
    pub(crate) fn of(arena: &Arena, block: &BlockMove) -> Self {
        let BlockMove { place, bytes, range_bytes, key, .. } = *block;
        let memory = Arc::clone(arena.extent(place.extent));
        Self { slice: key.slice, pool: key.pool, memory, offset: place.offset, bytes, range_bytes }
    }
}

/// A block to be written.
#[derive(Debug, Clone)]
pub struct Source {
    /// The block's place. The caller lets nobody write there until the answer.
    pub place: BlockPlace,
    /// The checksums of the block's commit. The tier does not compute them again; a reader of the block does.
    pub checksums: Checksums,
}

/// A chunk to be written, with all blocks that its record is to hold.
#[derive(Debug)]
pub struct WriteOrder {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) chunk: ChunkRef,
    pub(crate) sources: Vec<Source>,
    pub(crate) entries: Vec<BlockEntry>,
    pub(super) replaces: bool,
}

/// A chunk to be read.
#[derive(Debug)]
pub struct ReadOrder {
    pub(crate) key: ChunkKey,
    pub(crate) chunk: ChunkRef,
    pub(crate) destinations: Vec<BlockPlace>,
}

/// Why an order cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// A place is not within its extent.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
    /// There are no blocks, a block has no bytes, or its number of checksums differs from its number of layer ranges.
    #[error(
        "a chunk has at least one block, and each block bytes and a checksum for each of its layer ranges"
    )]
    Blocks,
    /// The checksum of a block is that of a block with another name.
    #[error("the checksum of slice {slice}, pool {pool} belongs to another block")]
    Misnamed {
        /// The block's slice.
        slice: u16,
        /// The block's pool.
        pool: u8,
    },
    /// The order has more blocks and layer ranges than a record's header holds.
    #[error("a record's header has at most {MAX_HEADER_PAGES} pages, this one would have {pages}")]
    Header {
        /// Pages that the header would have.
        pages: u32,
    },
}

/// The result of a write. As a text, this is its name in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum WriteAnswer {
    /// The chunk is on disk, and would survive a loss of power.
    #[strum(serialize = "written")]
    Durable,
    /// The chunk was on disk already: nothing was written.
    AlreadyThere,
    /// The chunk is larger than a segment.
    TooLarge,
    /// The tier is closed.
    Closed,
}

impl From<WriteAnswer> for Written {
    fn from(answer: WriteAnswer) -> Self {
        match answer {
            WriteAnswer::Durable | WriteAnswer::AlreadyThere => Self::There,
            WriteAnswer::TooLarge | WriteAnswer::Closed => Self::Failed,
        }
    }
}

/// The result of a read. As a text, this is its name in metrics. Nothing is written to the order's places any more.
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ReadAnswer {
    /// The blocks are in their places, and right.
    #[strum(serialize = "read")]
    Here {
        /// The pools of these blocks. A disk reads all requested blocks, or answers [`ReadAnswer::OtherBlocks`]. A chunk in an
        /// object store may lack some pools.
        pools: PoolSet,
        /// Checksums of the blocks of these pools, in the order of the destinations.
        checksums: Vec<Checksums>,
    },
    /// The chunk is not there.
    NotHeld,
    /// The record lacks a requested block, or has a block of another size.
    OtherBlocks,
    /// The record was damaged, or could not be read, and is forgotten. The bytes in the places are undefined.
    Damaged,
    /// The record of this hash has another parent or index. The contents of the places are undefined.
    Disagrees,
    /// The tier is closed.
    Closed,
}

impl From<ReadAnswer> for larder_core::ReadAnswer {
    fn from(answer: ReadAnswer) -> Self {
        match answer {
            ReadAnswer::Here { checksums, pools, .. } => Self::Here { checksums, pools },
            ReadAnswer::NotHeld | ReadAnswer::OtherBlocks | ReadAnswer::Damaged | ReadAnswer::Disagrees => {
                Self::Missing
            }
            ReadAnswer::Closed => Self::Closed,
        }
    }
}

/// Some of the chunks on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotPage {
    /// Each chunk with its namespace and the pools of its blocks.
    pub held: Vec<(Fingerprint, ChunkRef, PoolSet)>,
    /// Position of the next page; `None` after the last.
    pub next: Option<u64>,
}

/// Chunks to purge.
#[derive(Debug, Clone)]
pub struct DiskPurge {
    /// The names of the chunks.
    pub keys: Arc<PurgedKeys>,
    /// Whether the chunks are removed, or only counted.
    pub mode: PurgeMode,
}

/// The purge of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PurgedSegment {
    /// Chunks of the purge that were in the segment.
    pub records: u64,
    /// Pages of the segment that could not be read: chunks of the purge may be there.
    pub unreadable: u32,
    /// Position of the next segment; `None` after the last.
    pub next: Option<u64>,
}

/// Chunks that are no longer on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gone {
    /// The chunks.
    pub chunks: Vec<ChunkKey>,
    /// Why they are gone.
    pub why: Why,
}

/// Why chunks are no longer on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The chunks' segment was given up.
    Evicted,
    /// The chunks' bytes were wrong.
    Damaged,
    /// The tier is closed: no chunk can be read any more. The list of chunks is empty.
    Closed,
}

impl WriteOrder {
    /// The order to write a chunk.
    ///
    /// # Errors
    /// Fails if there can be no such record: no blocks, checksums that do not fit the sizes or belong to another block, a
    /// place outside its memory.
    pub fn new(fingerprint: Fingerprint, chunk: ChunkRef, sources: Vec<Source>) -> Result<Self, OrderError> {
        let mut entries = Vec::with_capacity(sources.len());
        for Source { place, checksums } in &sources {
            place.check()?;
            if place.bytes.div_ceil(place.range_bytes) != checksums.ranges.len() as u64 {
                return Err(OrderError::Blocks);
            }
            let BlockPlace { slice, pool, bytes, range_bytes, .. } = *place;
            let key = BlockKey { fingerprint, hash: chunk.hash, slice, pool };
            if block_checksum(&key, &checksums.ranges) != checksums.whole {
                return Err(OrderError::Misnamed { slice, pool });
            }
            entries.push(BlockEntry { slice, pool, bytes, range_bytes, checksums: checksums.clone() });
        }
        let pages = RecordHeader::pages_for(&entries);
        if pages > MAX_HEADER_PAGES {
            return Err(OrderError::Header { pages });
        }
        if entries.is_empty() {
            return Err(OrderError::Blocks);
        }
        Ok(Self { fingerprint, chunk, sources, entries, replaces: false })
    }

    /// An order that replaces the chunk's present record, which may lack blocks: the old record is forgotten once the new one
    /// is durable.
    #[must_use]
    pub fn replacing(self) -> Self {
        Self { replaces: true, ..self }
    }

    /// The key of the chunk.
    pub fn key(&self) -> ChunkKey {
        ChunkKey { fingerprint: self.fingerprint, hash: self.chunk.hash }
    }

    /// Bytes of all blocks.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}

impl ReadOrder {
    /// Bytes that are wanted.
    pub(super) fn bytes(&self) -> u64 {
        self.destinations.iter().map(|place| place.bytes).sum()
    }

    /// The order to read a chunk: all its blocks, or some. The places belong to the order until its answer.
    ///
    /// # Errors
    /// Fails if a place is outside its memory, or if there are no places.
    pub fn new(
        fingerprint: Fingerprint,
        chunk: ChunkRef,
        destinations: Vec<BlockPlace>,
    ) -> Result<Self, OrderError> {
        destinations.iter().try_for_each(BlockPlace::check)?;
        if destinations.is_empty() {
            return Err(OrderError::Blocks);
        }
        let key = ChunkKey { fingerprint, hash: chunk.hash };
        Ok(Self { key, chunk, destinations })
    }
}

impl BlockPlace {
    /// Whether the block moves between its place and byte `offset` of the file without a copy. It does so only from huge pages,
    /// since drives take few small pages a request (see [`super::io::Buffer`]). Small blocks share transfers instead.
    pub(super) fn goes_direct(&self, offset: u64) -> bool {
        let is_aligned = |number: u64| number.is_multiple_of(PAGE_BYTES);
        let is_fit = self.memory.pages() == Pages::Huge || cfg!(test);
        is_fit
            && self.bytes >= MIN_DIRECT_BYTES
            && is_aligned(self.bytes)
            && is_aligned(self.offset)
            && is_aligned(offset)
    }

    /// Copies bytes into the block's place, from the block's byte `at` on.
    pub(crate) fn copy_in(&self, at: u64, bytes: &[u8]) {
        let copied = self.memory.copy_in(self.offset + at, bytes);
        debug_assert!(copied.is_ok(), "places are checked when the order is made");
    }

    fn check(&self) -> Result<(), OrderError> {
        if self.bytes == 0 || self.range_bytes == 0 {
            return Err(OrderError::Blocks);
        }
        Ok(self.memory.check(self.offset, self.bytes)?)
    }
}

/// Bytes of the smallest block that is worth transfers of its own. In tests this is a page, so that their blocks move in both
/// ways.
const MIN_DIRECT_BYTES: u64 = if cfg!(test) { PAGE_BYTES } else { 128 << 10 };
