//! The size of a node's arena.

use larder_node::arena::{MIN_EXTENT_BYTES, PAGE_BYTES};
use larder_node::limits::RESERVED_SHARE;

use super::options::DevOptions;
use crate::replay::part_chunks;

/// Default size of a node's arena in bytes.
pub const DEFAULT_ARENA_BYTES: u64 = 256 << 20;

/// An arena, as a node's config file has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ArenaSize {
    pub(super) arena_bytes: u64,
    /// `None`: the node chooses.
    pub(super) extent_bytes: Option<u64>,
    /// Low and high, as fractions of the arena; `None`: the node's own.
    pub(super) watermarks: Option<(f64, f64)>,
    /// Bytes for blocks of other nodes that only pass through; `None`: the node's own.
    pub(super) staging_bytes: Option<u64>,
}

impl ArenaSize {
    /// The requested arena, or one that holds exactly the requested chunks.
    ///
    /// An arena for chunks has a slot for each chunk, slots for the blocks that pass through from other nodes, and
    /// [`SPARE_EXTENTS`] more extents. It also has slots for writes, enough that one session may reserve all chunks that a
    /// replay's requests write at a time. Extents hold whole slots, so nothing is lost at their ends. The watermarks are at the
    /// top, so the number of chunks alone decides what is evicted.
    pub(super) fn of(options: &DevOptions) -> Self {
        let slot_bytes = options
            .block_bytes
            .map(|bytes| bytes.max(1).saturating_add(PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES);
        let fitting = |slot_bytes: u64, slots: u64| {
            let slots = slots.div_ceil(EXTENTS).max(MIN_EXTENT_BYTES.div_ceil(slot_bytes));
            slots.saturating_mul(slot_bytes)
        };
        match (options.arena_bytes, options.chunks_per_node, options.block_bytes, slot_bytes) {
            (None, Some(chunks), Some(block_bytes), Some(slot_bytes)) => {
                let in_flight = options.requests_in_flight;
                let written = u64::from(in_flight) * part_chunks(block_bytes, in_flight) * RESERVED_SHARE;
                let passing = u64::from(in_flight) * part_chunks(block_bytes, in_flight);
                let slots = chunks.saturating_add(written).saturating_add(passing);
                let extent_bytes = fitting(slot_bytes, slots);
                let extents = slots.div_ceil(extent_bytes / slot_bytes).saturating_add(SPARE_EXTENTS);
                Self {
                    arena_bytes: extents.saturating_mul(extent_bytes),
                    extent_bytes: Some(extent_bytes),
                    watermarks: Some((0.99, 1.0)),
                    staging_bytes: Some(passing.saturating_mul(slot_bytes)),
                }
            }
            (asked, ..) => {
                let arena_bytes = asked.unwrap_or(DEFAULT_ARENA_BYTES);
                let of_blocks = slot_bytes.map(|slot_bytes| fitting(slot_bytes, arena_bytes / slot_bytes));
                let extent_bytes = options.extent_bytes.or(of_blocks);
                Self { arena_bytes, extent_bytes, watermarks: None, staging_bytes: None }
            }
        }
    }
}

/// Extents that an arena is divided into: few enough that one message carries all their descriptors.
const EXTENTS: u64 = 32;

/// Extents beyond the filled ones: an extent that is only partly free cannot serve other blocks.
const SPARE_EXTENTS: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn size(chunks: u64, block_bytes: u64) -> ArenaSize {
        let options = DevOptions::new().unwrap();
        ArenaSize::of(&DevOptions {
            chunks_per_node: Some(chunks),
            block_bytes: Some(block_bytes),
            ..options
        })
    }

    #[test]
    fn the_arena_is_as_large_as_asked_or_as_the_chunks_need() {
        let options = DevOptions::new().unwrap();
        assert_eq!(ArenaSize::of(&options).arena_bytes, DEFAULT_ARENA_BYTES);
        let asked = DevOptions { arena_bytes: Some(7), chunks_per_node: Some(3), ..options };
        let as_asked =
            ArenaSize { arena_bytes: 7, extent_bytes: None, watermarks: None, staging_bytes: None };
        assert_eq!(ArenaSize::of(&asked), as_asked);
        assert_eq!(size(u64::MAX, 1 << 20).arena_bytes, u64::MAX, "the node says that this is too much");
    }

    #[test]
    fn every_extent_holds_whole_slots_and_there_is_room_beside_the_chunks() {
        for (chunks, block_bytes) in
            [(3_000, 4_096), (30_000, 4_096), (1, 1), (3_000, 5_000), (50, 4 << 20), (9, 3 << 20)]
        {
            let size = size(chunks, block_bytes);
            let slot_bytes = block_bytes.next_multiple_of(4_096);
            let extent_bytes = size.extent_bytes.unwrap();
            assert!(extent_bytes >= 2 << 20 && extent_bytes.is_multiple_of(slot_bytes), "{size:?}");
            assert!(size.arena_bytes.is_multiple_of(extent_bytes));
            let slots = size.arena_bytes / slot_bytes;
            assert!(slots >= chunks + 2 * 16 * part_chunks(block_bytes, 16), "{size:?}");
            assert!(size.arena_bytes / extent_bytes <= EXTENTS + 1 + SPARE_EXTENTS, "{size:?}");
        }
    }

    #[test]
    fn a_session_may_reserve_what_all_requests_write() {
        let small = size(1, 4_096);
        let written = 16 * part_chunks(4_096, 16) * 4_096;
        assert!(written <= small.arena_bytes / RESERVED_SHARE);
    }
}
