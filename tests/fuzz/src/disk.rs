//! The records on a disk: superblocks, headers of segments and records, footers.
//!
//! Checksums hide everything behind them from a fuzzer, so each target reads its bytes twice: unchanged, and with right
//! checksums.

use larder_core::store::Checksums;
use larder_node::disk::format::{
    BlockEntry, Footer, FooterEntry, FooterTail, MAX_HEADER_PAGES, PAGE_BYTES, RecordHeader, SegmentHeader,
    StorageId, Superblock,
};
use larder_node::disk::log::{Geometry, Log, RecordPlace, Recovered};
use larder_protocol::checksum::{BlockKey, block_checksum};
use larder_protocol::limits::{MAX_BLOCK_BYTES, MAX_CHUNK_INDEX};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use xxhash_rust::xxh3::xxh3_64;

/// Tests the headers of a file, a segment and a record.
///
/// - Values that were read are encoded, and read again as the same values.
/// - A header is as long as it says, and its blocks lie in its bytes; their sizes are within the limits.
///
/// Returns whether the unchanged bytes are one of the three.
///
/// # Panics
/// Panics if a property does not hold.
pub fn disk_records(bytes: &[u8]) -> bool {
    let is_right = [hold_superblock(bytes), hold_segment(bytes), hold_record(bytes)].contains(&true);
    hold_superblock(&with_checksum(bytes, SUPERBLOCK_CHECKSUM_AT));
    hold_segment(&with_checksum(bytes, SEGMENT_CHECKSUM_AT));
    hold_record(&record_with_checksums(bytes));
    is_right
}

/// Tests the footer of a segment, and the log that a start makes from it.
///
/// - Values that were read are encoded, and read again as the same values.
/// - No more entries are read than the bytes contain.
/// - An entry that is within its segment ends in it, and a log finds it there.
///
/// Returns whether the unchanged bytes are a footer.
///
/// # Panics
/// Panics if a property does not hold.
pub fn disk_footers(bytes: &[u8]) -> bool {
    let is_right = hold_footer(bytes);
    hold_footer(&footer_with_checksums(bytes));
    is_right
}

fn hold_superblock(bytes: &[u8]) -> bool {
    let Ok(superblock) = Superblock::decode(bytes) else { return false };
    assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
    true
}

fn hold_segment(bytes: &[u8]) -> bool {
    let storage = storage_of(bytes);
    let segment = u32::from_le_bytes(at(bytes, 12));
    let Ok(header) = SegmentHeader::decode(bytes, storage, segment) else { return false };
    assert_eq!(SegmentHeader::decode(&header.encode(storage), storage, segment), Ok(header));
    assert!(SegmentHeader::decode(bytes, storage, segment ^ 1).is_err(), "it stands in another segment");
    true
}

fn hold_record(bytes: &[u8]) -> bool {
    let Ok(pages) = RecordHeader::peek_pages(bytes) else { return false };
    assert!((1..=MAX_HEADER_PAGES).contains(&pages));
    let storage = storage_of(bytes);
    let Ok(header) = RecordHeader::decode(bytes, storage) else { return false };
    assert_eq!(RecordHeader::pages_for(&header.blocks) as usize * PAGE_BYTES as usize, bytes.len());
    assert_eq!(RecordHeader::decode(&header.encode(storage), storage).as_ref(), Ok(&header));
    assert!(header.chunk.index <= MAX_CHUNK_INDEX);
    let ranges: usize = header.blocks.iter().map(|block| block.checksums.ranges.len()).sum();
    assert!(header.blocks.len() * 32 + ranges * 8 <= bytes.len(), "it stands in its bytes");
    assert!(header.blocks.iter().all(|block| (1..=MAX_BLOCK_BYTES).contains(&block.bytes)));
    assert!(header.payload_bytes().div_ceil(PAGE_BYTES) < header.record_pages());
    let entry = header.footer_entry();
    assert!(
        header.blocks.iter().all(|block| usize::from(block.pool) >= 8 || entry.pools.has(block.pool.into()))
    );
    true
}

fn hold_footer(bytes: &[u8]) -> bool {
    let Some(start) = bytes.len().checked_sub(TAIL_BYTES) else { return false };
    let tail = &bytes[start..];
    let storage = storage_of(tail);
    let sequence = u64::from_le_bytes(at(tail, 32));
    let segment = SegmentHeader { segment: u32::from_le_bytes(at(tail, 12)), sequence };
    let Ok(tail) = FooterTail::decode(bytes, storage, segment) else { return false };
    let pages = tail.pages();
    let Ok(footer) = Footer::decode(bytes, &tail) else { return false };
    assert_eq!(Footer::pages_for(footer.entries.len()), pages);
    assert!(footer.entries.len() * ENTRY_BYTES <= bytes.len(), "it stands in its bytes");
    let encoded = footer.encode(storage);
    let tail = FooterTail::decode(&encoded, storage, segment).expect("what was encoded is read");
    assert_eq!(Footer::decode(&encoded, &tail).as_ref(), Ok(&footer));
    hold_log(&footer);
    // With another number of pages the footer is right, but does not end where it should.
    bytes.len() == encoded.len()
}

/// Tests the log that a start makes from a footer.
fn hold_log(footer: &Footer) {
    let geometry = Geometry { segments: 1, segment_pages: SEGMENT_PAGES };
    let is_within = |entry: &&FooterEntry| entry.is_within(geometry.segment_pages);
    let entries: Vec<FooterEntry> = footer.entries.iter().filter(is_within).copied().collect();
    let segment = SegmentHeader { segment: 0, ..footer.segment };
    let log = Log::restore(geometry, vec![Recovered { segment, entries: entries.clone(), open_at: None }]);
    assert!(log.records() <= entries.len());
    for entry in &entries {
        let RecordPlace { page, pages, .. } = log.find(&entry.key()).expect("it is there under its name");
        assert!(u64::from(page) + u64::from(pages) <= u64::from(SEGMENT_PAGES), "it ends in its segment");
    }
}

fn storage_of(bytes: &[u8]) -> StorageId {
    StorageId(at(bytes, 16))
}

/// Bytes from `from` on; zeros beyond the end.
fn at<const COUNT: usize>(bytes: &[u8], from: usize) -> [u8; COUNT] {
    bytes.get(from..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; COUNT])
}

/// The same bytes, with the checksum of the bytes before `at` written at `at`.
fn with_checksum(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.len() >= at + 8 {
        let checksum = xxh3_64(&bytes[..at]).to_le_bytes();
        bytes[at..at + 8].copy_from_slice(&checksum);
    }
    bytes
}

/// The same bytes as whole pages, with right checksums of blocks and header.
fn record_with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(PAGE_BYTES as usize).max(PAGE_BYTES as usize), 0);
    let (fingerprint, hash) = (Fingerprint(at(&bytes, 56)), ChunkHash(at(&bytes, 88)));
    let blocks = u32::from_le_bytes(at(&bytes, 188));
    let (mut entry, mut payload_bytes) = (RECORD_FIXED_BYTES, 0_u64);
    for _ in 0..blocks {
        let Some(fixed) = bytes.get(entry..entry + 32) else { break };
        let key = BlockKey { fingerprint, hash, slice: u16::from_le_bytes(at(fixed, 0)), pool: fixed[2] };
        payload_bytes = payload_bytes.wrapping_add(u64::from_le_bytes(at(fixed, 8)));
        let ranges = u32::from_le_bytes(at(fixed, 4)) as usize;
        let Some(ranges) = bytes.get(entry + 32..).and_then(|behind| behind.get(..ranges * 8)) else { break };
        let ranges: Vec<u64> = ranges.chunks_exact(8).map(|range| u64::from_le_bytes(at(range, 0))).collect();
        bytes[entry + 24..entry + 32].copy_from_slice(&block_checksum(&key, &ranges).to_le_bytes());
        entry += 32 + ranges.len() * 8;
    }
    bytes[192..200].copy_from_slice(&payload_bytes.to_le_bytes());
    bytes[RECORD_CHECKSUM_AT..][..8].fill(0);
    let checksum = xxh3_64(&bytes).to_le_bytes();
    bytes[RECORD_CHECKSUM_AT..][..8].copy_from_slice(&checksum);
    bytes
}

/// The same bytes, with the right checksums of entries and tail.
fn footer_with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let Some(tail) = bytes.len().checked_sub(TAIL_BYTES) else { return bytes };
    let entries = u32::from_le_bytes(at(&bytes, tail + 40)) as usize * ENTRY_BYTES;
    if let Some(entries) = bytes[..tail].get(..entries) {
        let checksum = xxh3_64(entries).to_le_bytes();
        bytes[tail + 48..tail + 56].copy_from_slice(&checksum);
    }
    let checksum = xxh3_64(&bytes[tail..tail + 56]).to_le_bytes();
    bytes[tail + 56..].copy_from_slice(&checksum);
    bytes
}

const SUPERBLOCK_CHECKSUM_AT: usize = 48;
const SEGMENT_CHECKSUM_AT: usize = 40;
const RECORD_CHECKSUM_AT: usize = 200;
const RECORD_FIXED_BYTES: usize = 208;
const ENTRY_BYTES: usize = 152;
const TAIL_BYTES: usize = 64;
const SEGMENT_PAGES: u32 = 1_024;

const STORAGE: StorageId = StorageId([0xa5; 16]);
const SEGMENT: SegmentHeader = SegmentHeader { segment: 0, sequence: 7 };

/// A superblock, the header of a segment, headers of records with one block and with several.
pub(crate) fn records() -> Vec<Vec<u8>> {
    let superblock = Superblock { storage: STORAGE, segment_bytes: 256 << 20, segments: 80 };
    let small = [(0, 0, 100, 1 << 20)];
    let large = [(0, 0, 10_000, 4_000), (0, 1, 77, 77), (1, 0, 10_000, 4_000)];
    vec![
        superblock.encode(),
        SEGMENT.encode(STORAGE),
        header(&small, 1).encode(STORAGE),
        header(&large, 9).encode(STORAGE),
    ]
}

/// Footers without an entry and with some.
pub(crate) fn footers() -> Vec<Vec<u8>> {
    let footer = |count: u32| {
        let entries = (1..=count).map(|page| header(&[(0, 0, 4_096, 4_096)], 2 * page).footer_entry());
        Footer { segment: SEGMENT, end_page: 2 * count + 2, entries: entries.collect() }.encode(STORAGE)
    };
    vec![footer(0), footer(1), footer(30)]
}

/// The header of a record at `page`; blocks are given by slice, pool, bytes, and bytes of a range.
pub(crate) fn header(blocks: &[(u16, u8, u64, u64)], page: u32) -> RecordHeader {
    let (fingerprint, hash) = (Fingerprint([1; 32]), ChunkHash([page as u8; 32]));
    let chunk = ChunkRef { hash, parent: ChunkHash([3; 32]), index: 4, anchor: ChunkHash([5; 32]) };
    let entry = |&(slice, pool, bytes, range_bytes): &(u16, u8, u64, u64)| {
        let key = BlockKey { fingerprint, hash, slice, pool };
        let checksums = Checksums::of(&key, 0..bytes.div_ceil(range_bytes));
        BlockEntry { slice, pool, bytes, range_bytes, checksums }
    };
    let blocks = blocks.iter().map(entry).collect();
    RecordHeader { segment: SEGMENT, page, sequence: u64::from(page), fingerprint, chunk, blocks }
}
