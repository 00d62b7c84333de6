//! Objects as an object store sends them: records of one block or more, in pieces of any size.

use larder_core::store::Checksums;
use larder_core::store::ids::ChunkKey;
use larder_node::disk::format::{BlockEntry, PAGE_BYTES, RecordHeader, SegmentHeader};
use larder_node::object::{STORAGE, read_object};
use larder_protocol::checksum::BlockKey;
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use xxhash_rust::xxh3::xxh3_64;

/// Tests the reader of objects.
///
/// - However the bytes are cut into pieces, the answer is the same.
/// - An object is as long as its header says, is the requested one, and is refused under another name.
/// - A record that is made from the bytes can be read; with any byte changed, it is refused or is the same record.
///
/// Returns whether the unchanged bytes are an object.
///
/// # Panics
/// Panics if a property does not hold.
pub fn object_records(bytes: &[u8]) -> bool {
    let is_right = read(key_in(bytes), bytes).is_some_and(|header| {
        assert_eq!(header.record_pages() * PAGE_BYTES, bytes.len() as u64);
        let other =
            ChunkKey { hash: ChunkHash([!header.chunk.hash.0[0]; 32]), fingerprint: header.fingerprint };
        assert!(read(other, bytes).is_none(), "it is read under another name");
        true
    });
    hold_made(bytes);
    is_right
}

/// Makes a record of a payload, reads it, and then damages it at a place taken from the last eight bytes.
fn hold_made(bytes: &[u8]) {
    let Some((payload, damage)) = bytes.split_last_chunk::<8>() else { return };
    let (Some(&first), true) = (payload.first(), payload.len() <= MOST_PAYLOAD_BYTES) else { return };
    let ranges = 1 + usize::from(first) % 8;
    let (header, mut object) = make(payload, payload.len().div_ceil(ranges) as u64);
    let key = ChunkKey { fingerprint: header.fingerprint, hash: header.chunk.hash };
    assert_eq!(read(key, &object).as_ref(), Some(&header), "what is made is read");
    let position = u64::from_le_bytes(*damage) >> 8;
    let at = (position % object.len() as u64) as usize;
    object[at] ^= damage[0];
    if let Some(found) = read(key, &object) {
        assert_eq!(found, header, "byte {at} was changed, and another record is read");
        let padding = header.encode(STORAGE).len() + payload.len();
        assert!(damage[0] == 0 || at >= padding, "byte {at} was changed, and the record is right");
    }
}

/// The result for the whole object, which must equal the result for pieces.
fn read(key: ChunkKey, object: &[u8]) -> Option<RecordHeader> {
    let whole = read_object(key, object.len() as u64, [object]);
    let piece_bytes = 1 + object.len() / 7;
    let pieces = read_object(key, object.len() as u64, object.chunks(piece_bytes));
    assert_eq!(whole, pieces, "pieces change the answer");
    whole
}

/// The name in the bytes.
fn key_in(bytes: &[u8]) -> ChunkKey {
    let at = |from: usize| bytes.get(from..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; 32]);
    ChunkKey { fingerprint: Fingerprint(at(56)), hash: ChunkHash(at(88)) }
}

/// A record with one block.
fn make(payload: &[u8], range_bytes: u64) -> (RecordHeader, Vec<u8>) {
    let (fingerprint, hash) = (Fingerprint([1; 32]), ChunkHash([2; 32]));
    let (slice, pool) = (0, 1);
    let ranges = payload.chunks(range_bytes as usize).map(xxh3_64);
    let checksums = Checksums::of(&BlockKey { fingerprint, hash, slice, pool }, ranges);
    let header = RecordHeader {
        segment: SegmentHeader { segment: 0, sequence: 0 },
        page: 0,
        sequence: 0,
        fingerprint,
        chunk: ChunkRef { hash, parent: ChunkHash([3; 32]), index: 4, anchor: ChunkHash([5; 32]) },
        blocks: vec![BlockEntry { slice, pool, bytes: payload.len() as u64, range_bytes, checksums }],
    };
    let mut object = header.encode(STORAGE);
    object.extend_from_slice(payload);
    object.resize(object.len().next_multiple_of(PAGE_BYTES as usize), 0);
    (header, object)
}

/// Longer payloads find nothing more.
const MOST_PAYLOAD_BYTES: usize = 64 << 10;

/// Objects of one page of payload, of several, and with several layer ranges.
pub(crate) fn examples() -> Vec<Vec<u8>> {
    let payload = |bytes: usize| (0..bytes).map(|at| (at % 251) as u8).collect::<Vec<u8>>();
    vec![make(&payload(100), 100).1, make(&payload(4_096), 1_000).1, make(&payload(10_000), 3_000).1]
}
