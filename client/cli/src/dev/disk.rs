//! The size of a node's disk tier.

use larder_node::arena::PAGE_BYTES;
use larder_node::disk::DEFAULT_SEGMENT_BYTES;

/// A disk tier, as a node's config file has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevDisk {
    /// Bytes that it takes.
    pub capacity_bytes: u64,
    /// Bytes of a segment.
    pub segment_bytes: u64,
}

impl DevDisk {
    /// A tier of this many bytes.
    pub fn of_bytes(capacity_bytes: u64) -> Self {
        let part = (capacity_bytes / SEGMENTS).next_multiple_of(PAGE_BYTES);
        Self { capacity_bytes, segment_bytes: part.clamp(SMALLEST_SEGMENT_BYTES, DEFAULT_SEGMENT_BYTES) }
    }

    /// A tier that holds this many chunks of one block each, and few more chunks.
    pub fn of_chunks(chunks: u64, block_bytes: u64) -> Self {
        let record_bytes = PAGE_BYTES + block_bytes.next_multiple_of(PAGE_BYTES);
        let part = Self::of_bytes(chunks.saturating_mul(record_bytes)).segment_bytes;
        let segment_bytes = part.max(record_bytes * LEAST_RECORDS);
        // A segment begins with a page and ends with its footer. Some segments are kept free.
        let records = segment_bytes * 63 / 64 / record_bytes;
        let segments = chunks.div_ceil(records) + FREE_SEGMENTS;
        Self { capacity_bytes: segments.saturating_mul(segment_bytes), segment_bytes }
    }
}

/// Segments of a small tier.
const SEGMENTS: u64 = 64;

/// The smallest segment that is worth a sync of its own.
const SMALLEST_SEGMENT_BYTES: u64 = 1 << 20;

/// Records of a segment at least.
const LEAST_RECORDS: u64 = 16;

/// Segments that hold nothing: two free segments, and the segment that is written.
const FREE_SEGMENTS: u64 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_for_chunks_is_a_number_of_segments_with_room_for_them() {
        for (chunks, block_bytes) in [(1, 1), (30_000, 4_096), (30_000, 5_000), (100, 4 << 20)] {
            let DevDisk { capacity_bytes, segment_bytes } = DevDisk::of_chunks(chunks, block_bytes);
            let record_bytes = 4_096 + block_bytes.next_multiple_of(4_096);
            assert!(capacity_bytes.is_multiple_of(segment_bytes) && segment_bytes.is_multiple_of(4_096));
            assert!(capacity_bytes / segment_bytes >= 4, "{capacity_bytes} in {segment_bytes}");
            assert!(capacity_bytes - 3 * segment_bytes >= chunks * record_bytes);
        }
    }
}
