//! The disk tier's format: the meaning of each byte of its file.
//!
//! All numbers are little-endian, checksums are xxh3-64 with seed 0, a page has 4,096 bytes. Nothing else in the tree knows
//! these tables. `testdata/golden.hex` pins them; a change of the tables raises [`VERSION`].
//!
//! The file:
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..4096 | superblock |
//! | 4096..8192 | superblock, second copy |
//! | 8192..1 MiB | zeros |
//! | 1 MiB.. | segments, each as long as the superblock says |
//!
//! Superblock:
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..8 | `"LARDDISK"` |
//! | 8..10 | `u16` version |
//! | 10..16 | zeros |
//! | 16..32 | storage identity: random, made with the file, known to nobody outside |
//! | 32..40 | `u64` bytes of a segment |
//! | 40..44 | `u32` segments |
//! | 44..48 | zeros |
//! | 48..56 | checksum of the bytes before |
//!
//! Segment: a header page, records without gaps, free space, and, once it is sealed, a footer that ends with the segment.
//!
//! | bytes of the header page | what |
//! | --- | --- |
//! | 0..8 | `"LARDSEGM"` |
//! | 8..10 | `u16` version |
//! | 10..12 | zeros |
//! | 12..16 | `u32` number of the segment |
//! | 16..32 | storage identity |
//! | 32..40 | `u64` sequence of the segment: grows each time any segment is begun anew |
//! | 40..48 | checksum of the bytes before |
//!
//! Record: a header of whole pages, the blocks one after the other, zeros up to a whole page.
//!
//! | bytes of a record's header | what |
//! | --- | --- |
//! | 0..8 | `"LARDRECO"` |
//! | 8..10 | `u16` version |
//! | 10..12 | zeros |
//! | 12..16 | `u32` pages of the header |
//! | 16..32 | storage identity |
//! | 32..40 | `u64` sequence of the segment |
//! | 40..44 | `u32` number of the segment |
//! | 44..48 | `u32` page of the segment at which the record begins |
//! | 48..56 | `u64` sequence of the record |
//! | 56..88 | fingerprint of the namespace |
//! | 88..120 | chunk hash |
//! | 120..152 | hash of the parent |
//! | 152..184 | hash of the anchor |
//! | 184..188 | `u32` index of the chunk |
//! | 188..192 | `u32` blocks |
//! | 192..200 | `u64` bytes of all blocks |
//! | 200..208 | checksum of the whole header, these eight bytes taken as zeros |
//! | 208.. | for each block the table below; zeros up to a whole page |
//!
//! | bytes of a block's entry | what |
//! | --- | --- |
//! | 0..2 | `u16` slice |
//! | 2..3 | `u8` pool |
//! | 3..4 | zero |
//! | 4..8 | `u32` layer ranges |
//! | 8..16 | `u64` bytes |
//! | 16..24 | `u64` bytes of a layer range |
//! | 24..32 | checksum of the block, as [`larder_protocol::checksum`] has it |
//! | 32.. | `u64` checksums of the layer ranges |
//!
//! Where a purged record began, there is one page instead. A purge also makes it the last page of each free segment, and writes
//! zeros over the segment's header; while a segment takes records, its last page is zeros.
//!
//! | bytes of the page | what |
//! | --- | --- |
//! | 0..8 | `"LARDGONE"` |
//! | 8..10 | `u16` version |
//! | 10..16 | zeros |
//! | 16..32 | storage identity |
//! | 32..40 | checksum of the bytes before |
//!
//! A record names its own place and the storage identity. So neither the remains of an earlier use of the segment, nor the
//! bytes that an engine wrote into a block, are ever taken for a record. The blocks' checksums tell whether the payload landed.
//!
//! Footer: entries, zeros up to the last 64 bytes of a page, a tail. It is written only after all its records are synced.
//!
//! | bytes of an entry | what |
//! | --- | --- |
//! | 0..32 | fingerprint of the namespace |
//! | 32..64 | chunk hash |
//! | 64..96 | hash of the parent |
//! | 96..128 | hash of the anchor |
//! | 128..132 | `u32` index of the chunk |
//! | 132..136 | `u32` page of the segment at which the record begins |
//! | 136..140 | `u32` pages of the record |
//! | 140..141 | `u8` a bit for each pool of the record, the first the lowest |
//! | 141..144 | zeros |
//! | 144..152 | `u64` sequence of the record |
//!
//! | bytes of the tail | what |
//! | --- | --- |
//! | 0..8 | `"LARDFOOT"` |
//! | 8..10 | `u16` version |
//! | 10..12 | zeros |
//! | 12..16 | `u32` number of the segment |
//! | 16..32 | storage identity |
//! | 32..40 | `u64` sequence of the segment |
//! | 40..44 | `u32` entries |
//! | 44..48 | `u32` page of the segment at which the records end |
//! | 48..56 | checksum of the entries |
//! | 56..64 | checksum of the tail's bytes before |

use larder_core::store::{Checksums, Ranges};
use larder_protocol::checksum::{BlockKey, block_checksum};
use larder_protocol::limits::{MAX_BLOCK_BYTES, MAX_CHUNK_INDEX, MAX_POOLS, MAX_SLICES};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

mod bytes;

use bytes::{Reader, Writer};

/// Version of the format. A tier of another version is refused.
pub const VERSION: u16 = 1;

/// Bytes of a page, the unit of drives and O_DIRECT.
pub const PAGE_BYTES: u64 = 4_096;

/// Offset of the first segment.
pub const SEGMENTS_START: u64 = 1 << 20;

/// Pages of the largest header. A chunk whose blocks and layer ranges need more stays in memory.
pub const MAX_HEADER_PAGES: u32 = 256;

/// A number that is unique to one storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StorageId(pub [u8; 16]);

/// The head of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// The storage.
    pub storage: StorageId,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Segments.
    pub segments: u32,
}

/// The head of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The segment's number.
    pub segment: u32,
    /// Number of this use of a segment: the largest is the newest.
    pub sequence: u64,
}

/// The head of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// The segment, and the number of its use.
    pub segment: SegmentHeader,
    /// The record's page in the segment.
    pub page: u32,
    /// Grows with every record.
    pub sequence: u64,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunk.
    pub chunk: ChunkRef,
    /// The chunk's blocks, in the order of the payload.
    pub blocks: Vec<BlockEntry>,
}

/// A block of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockEntry {
    /// The part of the chunk that one engine rank holds.
    pub slice: u16,
    /// The kind of state.
    pub pool: u8,
    /// Size of the block in bytes.
    pub bytes: u64,
    /// Bytes of a layer range, which share a checksum. The last range may be shorter.
    pub range_bytes: u64,
    /// The checksums that the block's bytes must have.
    pub checksums: Checksums,
}

/// The contents of a sealed segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    /// The segment, and the number of its use.
    pub segment: SegmentHeader,
    /// The page at which the segment's records end.
    pub end_page: u32,
    /// The segment's records, in their order.
    pub entries: Vec<FooterEntry>,
}

/// A record of a sealed segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FooterEntry {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunk.
    pub chunk: ChunkRef,
    /// The record's page in the segment.
    pub page: u32,
    /// Pages of the record.
    pub pages: u32,
    /// The pools of the record's blocks.
    pub pools: PoolSet,
    /// The record's sequence.
    pub sequence: u64,
}

/// The last bytes of a sealed segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FooterTail {
    segment: SegmentHeader,
    entries: u32,
    end_page: u32,
    checksum: u64,
}

/// Why bytes are not the expected structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Something else is there, or nothing yet.
    #[error("there is no such structure")]
    Magic,
    /// Another version wrote the bytes.
    #[error("format version {found}; this build reads version {VERSION}")]
    Version {
        /// The version found.
        found: u16,
    },
    /// The structure belongs to another storage, another place, or an earlier use of the segment.
    #[error("the structure belongs to another storage or another place")]
    Foreign,
    /// The bytes are damaged.
    #[error("the checksum is wrong")]
    Checksum,
    /// The checksum is right, but a field is impossible.
    #[error("a field has an impossible value")]
    Field,
}

impl Superblock {
    /// Encodes one copy, a page long.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(SUPERBLOCK_MAGIC);
        out.u16(VERSION).zeros(6).bytes(&self.storage.0).u64(self.segment_bytes).u32(self.segments).zeros(4);
        out.checksum().pad_to(PAGE_BYTES as usize);
        out.done()
    }

    /// Reads one copy.
    ///
    /// # Errors
    /// Fails if the page holds no such structure.
    pub fn decode(page: &[u8]) -> Result<Self, FormatError> {
        let mut from = Reader::new(page, SUPERBLOCK_MAGIC)?;
        from.skip(6)?;
        let storage = StorageId(from.bytes()?);
        let (segment_bytes, segments) = (from.u64()?, from.u32()?);
        from.skip(4)?;
        from.checksum()?;
        Ok(Self { storage, segment_bytes, segments })
    }
}

impl SegmentHeader {
    /// The header page.
    pub fn encode(&self, storage: StorageId) -> Vec<u8> {
        let mut out = Writer::new(SEGMENT_MAGIC);
        out.u16(VERSION).zeros(2).u32(self.segment).bytes(&storage.0).u64(self.sequence);
        out.checksum().pad_to(PAGE_BYTES as usize);
        out.done()
    }

    /// Reads the header page of segment `segment`.
    ///
    /// # Errors
    /// Fails if the page holds no such structure.
    pub fn decode(page: &[u8], storage: StorageId, segment: u32) -> Result<Self, FormatError> {
        let mut from = Reader::new(page, SEGMENT_MAGIC)?;
        from.skip(2)?;
        let (found, of) = (from.u32()?, StorageId(from.bytes()?));
        let sequence = from.u64()?;
        from.checksum()?;
        if (found, of) != (segment, storage) {
            return Err(FormatError::Foreign);
        }
        Ok(Self { segment, sequence })
    }
}

/// The page that stands where a purged record began.
pub fn wiped_record(storage: StorageId) -> Vec<u8> {
    let mut out = Writer::new(WIPED_MAGIC);
    out.u16(VERSION).zeros(6).bytes(&storage.0).checksum().pad_to(PAGE_BYTES as usize);
    out.done()
}

impl RecordHeader {
    /// Pages of the header of a record with these blocks.
    pub fn pages_for(blocks: &[BlockEntry]) -> u32 {
        Self::pages_of(blocks.iter().map(|block| block.checksums.ranges.len() as u64))
    }

    /// Pages of a record's header, from the numbers of its blocks' layer ranges.
    pub fn pages_of(ranges: impl Iterator<Item = u64>) -> u32 {
        let bytes = ranges.fold(RECORD_FIXED_BYTES as u64, |bytes, ranges| {
            bytes.saturating_add(ranges.saturating_mul(8)).saturating_add(BLOCK_FIXED_BYTES)
        });
        u32::try_from(bytes.div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
    }

    /// Pages of a whole record with these blocks.
    pub fn record_pages_for(blocks: &[BlockEntry]) -> u64 {
        let payload: u64 = blocks.iter().map(|block| block.bytes).sum();
        u64::from(Self::pages_for(blocks)) + payload.div_ceil(PAGE_BYTES)
    }

    /// Pages of the whole record.
    pub fn record_pages(&self) -> u64 {
        Self::record_pages_for(&self.blocks)
    }

    /// Bytes of all blocks.
    pub fn payload_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.bytes).sum()
    }

    /// The name of a block.
    pub fn block_key(&self, block: &BlockEntry) -> BlockKey {
        let BlockEntry { slice, pool, .. } = *block;
        BlockKey { fingerprint: self.fingerprint, hash: self.chunk.hash, slice, pool }
    }

    /// The record's entry in the segment's footer.
    pub fn footer_entry(&self) -> FooterEntry {
        FooterEntry {
            fingerprint: self.fingerprint,
            chunk: self.chunk,
            page: self.page,
            pages: u32::try_from(self.record_pages()).unwrap_or(u32::MAX),
            pools: self.blocks.iter().fold(PoolSet::default(), |pools, block| pools.with(block.pool.into())),
            sequence: self.sequence,
        }
    }

    /// Encodes the header as whole pages.
    pub fn encode(&self, storage: StorageId) -> Vec<u8> {
        let pages = Self::pages_for(&self.blocks);
        let mut out = Writer::new(RECORD_MAGIC);
        out.u16(VERSION).zeros(2).u32(pages).bytes(&storage.0);
        out.u64(self.segment.sequence).u32(self.segment.segment).u32(self.page).u64(self.sequence);
        out.bytes(&self.fingerprint.0).chunk(&self.chunk);
        out.u32(self.blocks.len() as u32).u64(self.payload_bytes()).zeros(8);
        for block in &self.blocks {
            out.u16(block.slice).u8(block.pool).zeros(1).u32(block.checksums.ranges.len() as u32);
            out.u64(block.bytes).u64(block.range_bytes).u64(block.checksums.whole);
            for &range in block.checksums.ranges.iter() {
                out.u64(range);
            }
        }
        out.pad_to(pages as usize * PAGE_BYTES as usize);
        let mut bytes = out.done();
        let checksum = xxh3_64(&bytes).to_le_bytes();
        bytes[RECORD_CHECKSUM_AT..][..8].copy_from_slice(&checksum);
        bytes
    }

    /// The number of the header's pages, read from its first page. Nothing else of the header can be trusted yet.
    ///
    /// # Errors
    /// Fails if no header begins there.
    pub fn peek_pages(first_page: &[u8]) -> Result<u32, FormatError> {
        let mut from = Reader::new(first_page, RECORD_MAGIC)?;
        from.skip(2)?;
        let pages = from.u32()?;
        if (1..=MAX_HEADER_PAGES).contains(&pages) { Ok(pages) } else { Err(FormatError::Field) }
    }

    /// The chunk that a header names, read from its first page. Nothing of it can be trusted yet.
    ///
    /// # Errors
    /// Fails if no header begins there.
    pub fn peek_chunk(first_page: &[u8]) -> Result<ChunkRef, FormatError> {
        let mut from = Reader::new(first_page, RECORD_MAGIC)?;
        from.skip(RECORD_CHUNK_AT - AFTER_VERSION)?;
        from.chunk()
    }

    /// Reads a header of as many pages as [`Self::peek_pages`] says.
    ///
    /// # Errors
    /// Fails if the pages hold no record header of this storage.
    pub fn decode(pages: &[u8], storage: StorageId) -> Result<Self, FormatError> {
        let mut from = Reader::new(pages, RECORD_MAGIC)?;
        let (before, rest) = pages.split_at_checked(RECORD_CHECKSUM_AT).ok_or(FormatError::Field)?;
        let (said, after) = rest.split_first_chunk().ok_or(FormatError::Field)?;
        let mut checksum = Xxh3::new();
        checksum.update(before);
        checksum.update(&[0; 8]);
        checksum.update(after);
        if checksum.digest() != u64::from_le_bytes(*said) {
            return Err(FormatError::Checksum);
        }
        from.skip(6)?;
        if StorageId(from.bytes()?) != storage {
            return Err(FormatError::Foreign);
        }
        let sequence = from.u64()?;
        let segment = SegmentHeader { segment: from.u32()?, sequence };
        let (page, sequence) = (from.u32()?, from.u64()?);
        let fingerprint = Fingerprint(from.bytes()?);
        let chunk = from.chunk()?;
        let (count, payload_bytes) = (from.u32()?, from.u64()?);
        from.skip(8)?;
        if count == 0 || count as usize > usize::from(MAX_SLICES) * MAX_POOLS || chunk.index > MAX_CHUNK_INDEX
        {
            return Err(FormatError::Field);
        }
        let blocks = (0..count).map(|_| BlockEntry::decode(&mut from)).collect::<Result<Vec<_>, _>>()?;
        let header = Self { segment, page, sequence, fingerprint, chunk, blocks };
        let is_whole = Self::pages_for(&header.blocks) as u64 * PAGE_BYTES == pages.len() as u64;
        if !is_whole || header.payload_bytes() != payload_bytes || !header.checksums_agree() {
            return Err(FormatError::Field);
        }
        Ok(header)
    }

    /// Whether each block's checksum follows from its name and its layer ranges' checksums.
    fn checksums_agree(&self) -> bool {
        self.blocks.iter().all(|block| {
            block_checksum(&self.block_key(block), &block.checksums.ranges) == block.checksums.whole
        })
    }
}

impl BlockEntry {
    fn decode(from: &mut Reader<'_>) -> Result<Self, FormatError> {
        let (slice, pool) = (from.u16()?, from.u8()?);
        from.skip(1)?;
        let ranges = from.u32()?;
        let (bytes, range_bytes, whole) = (from.u64()?, from.u64()?, from.u64()?);
        let is_possible = (1..=MAX_BLOCK_BYTES).contains(&bytes)
            && range_bytes > 0
            && bytes.div_ceil(range_bytes) == u64::from(ranges);
        if !is_possible {
            return Err(FormatError::Field);
        }
        let ranges = (0..ranges).map(|_| from.u64()).collect::<Result<Ranges, _>>()?;
        Ok(Self { slice, pool, bytes, range_bytes, checksums: Checksums { whole, ranges } })
    }
}

impl Footer {
    /// Pages of a footer with this many entries.
    pub fn pages_for(entries: usize) -> u32 {
        ((entries * ENTRY_BYTES + TAIL_BYTES) as u64).div_ceil(PAGE_BYTES) as u32
    }

    /// Encodes the footer as whole pages. The footer ends where the segment ends.
    pub fn encode(&self, storage: StorageId) -> Vec<u8> {
        let mut out = Writer::default();
        for entry in &self.entries {
            out.bytes(&entry.fingerprint.0).chunk(&entry.chunk);
            out.u32(entry.page).u32(entry.pages).u8(entry.pools.0).zeros(3).u64(entry.sequence);
        }
        let mut out = out.done();
        let checksum = xxh3_64(&out);
        let mut tail = Writer::new(FOOTER_MAGIC);
        tail.u16(VERSION).zeros(2).u32(self.segment.segment).bytes(&storage.0).u64(self.segment.sequence);
        tail.u32(self.entries.len() as u32).u32(self.end_page).u64(checksum).checksum();
        let bytes = Self::pages_for(self.entries.len()) as usize * PAGE_BYTES as usize;
        out.resize(bytes - TAIL_BYTES, 0);
        out.extend(tail.done());
        out
    }

    /// Reads the footer whose tail is `tail` from all its pages.
    ///
    /// # Errors
    /// Fails if the entries are damaged.
    pub fn decode(pages: &[u8], tail: &FooterTail) -> Result<Self, FormatError> {
        let entries = pages.get(..tail.entries as usize * ENTRY_BYTES).ok_or(FormatError::Field)?;
        if xxh3_64(entries) != tail.checksum {
            return Err(FormatError::Checksum);
        }
        let entries = entries.chunks_exact(ENTRY_BYTES).map(FooterEntry::decode).collect::<Result<_, _>>()?;
        Ok(Self { segment: tail.segment, end_page: tail.end_page, entries })
    }
}

impl FooterTail {
    /// Reads the last page of the segment that `segment` is the header of.
    ///
    /// # Errors
    /// Fails if the page ends no footer, or the footer of another use of the segment.
    pub fn decode(last_page: &[u8], storage: StorageId, segment: SegmentHeader) -> Result<Self, FormatError> {
        let start = last_page.len().checked_sub(TAIL_BYTES).ok_or(FormatError::Field)?;
        let mut from = Reader::new(&last_page[start..], FOOTER_MAGIC)?;
        from.skip(2)?;
        let (number, of) = (from.u32()?, StorageId(from.bytes()?));
        let found = SegmentHeader { segment: number, sequence: from.u64()? };
        let (entries, end_page, checksum) = (from.u32()?, from.u32()?, from.u64()?);
        from.checksum()?;
        if (found, of) != (segment, storage) {
            return Err(FormatError::Foreign);
        }
        Ok(Self { segment, entries, end_page, checksum })
    }

    /// Pages of the whole footer.
    pub fn pages(&self) -> u32 {
        Footer::pages_for(self.entries as usize)
    }
}

impl FooterEntry {
    /// Whether the record ends within a segment of `segment_pages` pages.
    pub fn is_within(&self, segment_pages: u32) -> bool {
        self.pages > 0 && self.page.checked_add(self.pages).is_some_and(|end| end <= segment_pages)
    }

    fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let mut from = Reader::bare(bytes);
        let fingerprint = Fingerprint(from.bytes()?);
        let chunk = from.chunk()?;
        let (page, pages, pools) = (from.u32()?, from.u32()?, PoolSet(from.u8()?));
        from.skip(3)?;
        Ok(Self { fingerprint, chunk, page, pages, pools, sequence: from.u64()? })
    }
}

impl Writer {
    fn chunk(&mut self, chunk: &ChunkRef) -> &mut Self {
        self.bytes(&chunk.hash.0).bytes(&chunk.parent.0).bytes(&chunk.anchor.0).u32(chunk.index)
    }
}

impl Reader<'_> {
    fn chunk(&mut self) -> Result<ChunkRef, FormatError> {
        let (hash, parent) = (ChunkHash(self.bytes()?), ChunkHash(self.bytes()?));
        let anchor = ChunkHash(self.bytes()?);
        Ok(ChunkRef { hash, parent, index: self.u32()?, anchor })
    }
}

const SUPERBLOCK_MAGIC: &[u8; 8] = b"LARDDISK";
const SEGMENT_MAGIC: &[u8; 8] = b"LARDSEGM";
const RECORD_MAGIC: &[u8; 8] = b"LARDRECO";
const FOOTER_MAGIC: &[u8; 8] = b"LARDFOOT";
const WIPED_MAGIC: &[u8; 8] = b"LARDGONE";

const AFTER_VERSION: usize = 10;
const RECORD_CHUNK_AT: usize = 88;
const RECORD_CHECKSUM_AT: usize = 200;
const RECORD_FIXED_BYTES: usize = 208;
const BLOCK_FIXED_BYTES: u64 = 32;
const ENTRY_BYTES: usize = 152;
const TAIL_BYTES: usize = 64;

#[cfg(test)]
mod tests;
