//! Checksums of blocks: xxh3-64 of each layer range, and a checksum over these and the key.
//!
//! A layer range is as many whole layers as fit in [`CHECKSUM_RANGE_BYTES`], at least one layer. So a reader may use the first
//! layers of a block before the last layers have come. The checksum of a range is the xxh3-64 (seed 0) of its bytes. The checksum
//! of a block is the xxh3-64 (seed 0) of
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..16 | `"larder block 1"`, then two zeros |
//! | 16..48 | fingerprint of the namespace |
//! | 48..80 | chunk hash |
//! | 80..82 | `u16` slice |
//! | 82..83 | `u8` pool |
//! | 83..84 | zero |
//! | 84..88 | `u32` ranges that follow |
//! | 88.. | the checksums of the ranges as `u64`, first to last |
//!
//! Layers that are read before their block is whole have a checksum that covers the block's name too ([`layers_checksum`]): the
//! xxh3-64 (seed 0) of
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..16 | `"larder layers 1"`, then a zero |
//! | 16..84 | as above |
//! | 84..88 | zeros |
//! | 88..96 | `u64` offset in the block at which the layers begin |
//! | 96..104 | `u64` their bytes |
//! | 104..112 | `u64` xxh3-64 of these |
//!
//! All numbers are little-endian. The checksum guards against accident (a torn write, a wrong offset, a bad disk), not against
//! attack: anybody can make bytes that fit a checksum.

mod xxh3;

use std::ops::Range;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

pub use self::xxh3::Stores;
use self::xxh3::Wide;
use crate::chunk::ChunkHash;
use crate::namespace::Fingerprint;
use crate::pools::PoolSpec;

/// Up to this number of bytes, whole layers share one checksum.
///
/// Smaller ranges let a reader start earlier, and stay in the processor's cache between copy and checksum. Each range costs eight
/// bytes.
pub const CHECKSUM_RANGE_BYTES: u64 = 1 << 20;

/// From this number of bytes on, summing with wide registers is faster, though it needs more preparation.
const WIDE_BYTES: usize = 1 << 10;

/// The name of a block. The checksum covers it, so that right bytes under a wrong key are found too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The namespace, tenant included.
    pub fingerprint: Fingerprint,
    /// The chunk.
    pub hash: ChunkHash,
    /// The part of the chunk that one engine rank holds.
    pub slice: u16,
    /// The kind of state: position in the namespace's list of pools.
    pub pool: u8,
}

/// Computes the checksum of one range piece by piece; the pieces' boundaries do not matter.
#[derive(Clone)]
pub struct RangeChecksum(Sum);

#[derive(Clone)]
enum Sum {
    Wide(Wide),
    /// For processors without the registers that `Wide` uses.
    Plain(Xxh3),
}

impl RangeChecksum {
    /// Starts a range.
    #[must_use]
    pub fn new() -> Self {
        Self(Wide::new().map_or_else(|| Sum::Plain(Xxh3::new()), Sum::Wide))
    }

    /// Adds the bytes that follow.
    pub fn update(&mut self, piece: &[u8]) {
        match &mut self.0 {
            Sum::Wide(sum) => sum.update(piece),
            Sum::Plain(sum) => sum.update(piece),
        }
    }

    /// The checksum of the bytes so far.
    #[must_use]
    pub fn finish(&self) -> u64 {
        match &self.0 {
            Sum::Wide(sum) => sum.finish(),
            Sum::Plain(sum) => sum.digest(),
        }
    }
}

impl Default for RangeChecksum {
    fn default() -> Self {
        Self::new()
    }
}

/// Computes the checksum of a block from its bytes, first to last, in pieces of any size.
#[derive(Clone)]
pub struct BlockSummer {
    range_bytes: u64,
    /// Bytes of the range that is being summed.
    filled: u64,
    range: RangeChecksum,
    ranges: Vec<u64>,
}

impl BlockSummer {
    /// Starts a block whose layer ranges have `range_bytes` bytes each; the last range may be shorter.
    ///
    /// # Panics
    /// Panics if `range_bytes` is 0.
    #[must_use]
    pub fn new(range_bytes: u64) -> Self {
        assert!(range_bytes > 0, "a layer range has at least one layer");
        Self { range_bytes, filled: 0, range: RangeChecksum::new(), ranges: Vec::new() }
    }

    /// Adds the bytes that follow.
    pub fn update(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let (now, later) = piece.split_at(piece.len().min(self.left_of_range()));
            self.range.update(now);
            self.has_added(now.len());
            piece = later;
        }
    }

    /// The checksum of the block with these bytes under the name `key`.
    #[must_use]
    pub fn finish(mut self, key: &BlockKey) -> u64 {
        if self.filled > 0 {
            self.end_range();
        }
        block_checksum(key, &self.ranges)
    }

    fn left_of_range(&self) -> usize {
        usize::try_from(self.range_bytes - self.filled).unwrap_or(usize::MAX)
    }

    fn has_added(&mut self, bytes: usize) {
        self.filled += bytes as u64;
        if self.filled == self.range_bytes {
            self.end_range();
        }
    }

    fn end_range(&mut self) {
        self.filled = 0;
        self.ranges.push(std::mem::take(&mut self.range).finish());
    }
}

/// Bytes of each layer range of a block of `pool`; the last range may be shorter.
#[must_use]
pub fn range_bytes(pool: &PoolSpec) -> u64 {
    let layer_bytes = pool.layer_bytes.max(1);
    (CHECKSUM_RANGE_BYTES / layer_bytes).max(1) * layer_bytes
}

/// The layer ranges of a block of `pool`, first to last, as bytes of the block.
pub fn layer_ranges(pool: &PoolSpec) -> impl Iterator<Item = Range<u64>> + use<> {
    block_ranges(pool.block_bytes(), range_bytes(pool))
}

/// The ranges of `range_bytes` each (the last may be shorter) of a block of `block_bytes`.
///
/// # Panics
/// Panics if `range_bytes` is 0.
pub fn block_ranges(block_bytes: u64, range_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..block_bytes.div_ceil(range_bytes)).map(move |range| {
        let start = range * range_bytes;
        start..block_bytes.min(start.saturating_add(range_bytes))
    })
}

/// The checksum of one layer range.
#[must_use]
pub fn range_checksum(range: &[u8]) -> u64 {
    if range.len() < WIDE_BYTES {
        return xxh3_64(range);
    }
    let mut sum = RangeChecksum::new();
    sum.update(range);
    sum.finish()
}

/// The checksum of a block whose layer ranges have the checksums `ranges`.
#[must_use]
pub fn block_checksum(key: &BlockKey, ranges: &[u64]) -> u64 {
    let mut hasher = named(b"larder block 1\0\0", key);
    hasher.update(&(ranges.len() as u32).to_le_bytes());
    for range in ranges {
        hasher.update(&range.to_le_bytes());
    }
    hasher.digest()
}

/// The checksum of some layers of a block: the bytes `place` of the block, with the checksum `sum`.
#[must_use]
pub fn layers_checksum(key: &BlockKey, place: &Range<u64>, sum: u64) -> u64 {
    let mut hasher = named(b"larder layers 1\0", key);
    hasher.update(&[0; 4]);
    hasher.update(&place.start.to_le_bytes());
    hasher.update(&(place.end - place.start).to_le_bytes());
    hasher.update(&sum.to_le_bytes());
    hasher.digest()
}

fn named(what: &[u8; 16], key: &BlockKey) -> Xxh3 {
    let mut hasher = Xxh3::new();
    hasher.update(what);
    hasher.update(&key.fingerprint.0);
    hasher.update(&key.hash.0);
    hasher.update(&key.slice.to_le_bytes());
    hasher.update(&[key.pool, 0]);
    hasher
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pools::HitPolicy;

    const KEY: BlockKey =
        BlockKey { fingerprint: Fingerprint([1; 32]), hash: ChunkHash([2; 32]), slice: 3, pool: 4 };

    fn pool(layers: u32, layer_bytes: u64) -> PoolSpec {
        PoolSpec { name: "kv".into(), layers, layer_bytes, hit: HitPolicy::All }
    }

    #[test]
    fn checksums_are_what_they_always_were() {
        let bytes: Vec<u8> = (0..1000_u32).map(|i| i as u8).collect();
        assert_eq!(range_checksum(&bytes), GOLDEN_RANGE);
        assert_eq!(block_checksum(&KEY, &[1, 2, 3]), GOLDEN_BLOCK);
    }

    #[test]
    fn the_checksum_of_a_block_is_that_of_the_byte_table() {
        let mut table = b"larder block 1\0\0".to_vec();
        table.extend([1; 32]);
        table.extend([2; 32]);
        table.extend([3, 0, 4, 0, 1, 0, 0, 0]);
        table.extend(7_u64.to_le_bytes());
        assert_eq!(block_checksum(&KEY, &[7]), range_checksum(&table));
    }

    #[test]
    fn ranges_are_whole_layers_up_to_a_mebibyte() {
        let ranges: Vec<_> = layer_ranges(&pool(5, 400 << 10)).collect();
        assert_eq!(ranges, [0..800 << 10, 800 << 10..1600 << 10, 1600 << 10..2000 << 10]);
        let large_layers: Vec<_> = layer_ranges(&pool(2, 3 << 20)).collect();
        assert_eq!(large_layers, [0..3 << 20, 3 << 20..6 << 20]);
        assert!(layer_ranges(&pool(64, 1 << 10)).eq(std::iter::once(0..64 << 10)));
    }

    #[test]
    fn ranges_cover_every_block_without_gap_or_overlap() {
        for layers in [1, 2, 7, 32, 61] {
            for layer_bytes in [1, 1000, 16_384, 1 << 20, (1 << 20) + 1, 5 << 20] {
                let pool = pool(layers, layer_bytes);
                let mut end = 0;
                for range in layer_ranges(&pool) {
                    assert_eq!(range.start, end);
                    assert!(range.end > range.start && (range.end - range.start).is_multiple_of(layer_bytes));
                    end = range.end;
                }
                assert_eq!(end, pool.block_bytes());
            }
        }
    }

    #[test]
    fn pieces_add_up_to_the_range() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|i| (i * 7) as u8).collect();
        let mut checksum = RangeChecksum::new();
        bytes.chunks(4099).for_each(|piece| checksum.update(piece));
        assert_eq!(checksum.finish(), range_checksum(&bytes));
    }

    #[test]
    fn a_block_that_comes_in_pieces_has_the_checksum_of_its_ranges() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i * 7) as u8).collect();
        for range_bytes in [1_000, 3_000, 10_000, 20_000] {
            let ranges: Vec<u64> = bytes.chunks(range_bytes).map(range_checksum).collect();
            let mut summer = BlockSummer::new(range_bytes as u64);
            bytes.chunks(701).for_each(|piece| summer.update(piece));
            assert_eq!(summer.finish(&KEY), block_checksum(&KEY, &ranges), "ranges of {range_bytes}");
        }
    }

    #[test]
    fn layers_have_another_checksum_under_another_name_or_at_another_place() {
        let mut table = b"larder layers 1\0".to_vec();
        table.extend([1; 32]);
        table.extend([2; 32]);
        table.extend([3, 0, 4, 0, 0, 0, 0, 0]);
        [5_u64, 1, 7].iter().for_each(|number| table.extend(number.to_le_bytes()));
        let right = layers_checksum(&KEY, &(5..6), 7);
        assert_eq!(right, range_checksum(&table));
        assert_ne!(right, layers_checksum(&BlockKey { hash: ChunkHash([9; 32]), ..KEY }, &(5..6), 7));
        assert_ne!(right, layers_checksum(&KEY, &(4..5), 7));
    }

    #[test]
    fn right_bytes_under_a_wrong_key_have_another_checksum() {
        let right = block_checksum(&KEY, &[1]);
        assert_ne!(right, block_checksum(&BlockKey { slice: 4, ..KEY }, &[1]));
        assert_ne!(right, block_checksum(&BlockKey { pool: 5, ..KEY }, &[1]));
        assert_ne!(right, block_checksum(&BlockKey { hash: ChunkHash([9; 32]), ..KEY }, &[1]));
        assert_ne!(right, block_checksum(&BlockKey { fingerprint: Fingerprint([9; 32]), ..KEY }, &[1]));
    }

    const GOLDEN_RANGE: u64 = 0xd33dd80b46f60e50;
    const GOLDEN_BLOCK: u64 = 0x82df6b1c2639c26a;
}
