//! The checksums of a block.

use std::ops::Deref;

use larder_protocol::checksum::{BlockKey, block_checksum};
use smallvec::SmallVec;

/// Checksums of one block. 24 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checksums {
    /// The checksum over the ranges' checksums and the key.
    pub whole: u64,
    /// The checksums of the layer ranges.
    pub ranges: Ranges,
}

impl Checksums {
    /// Builds the checksums of the block `key` from the checksums of its layer ranges.
    pub fn of(key: &BlockKey, ranges: impl IntoIterator<Item = u64>) -> Self {
        let ranges: Ranges = ranges.into_iter().collect();
        Self { whole: block_checksum(key, &ranges), ranges }
    }
}

/// Checksums of a block's layer ranges, first to last. Most blocks of small models have one range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ranges {
    /// There is one range.
    One(u64),
    /// There are several ranges, behind one thin pointer, so that a block of one range still takes 32 bytes.
    Many(Box<Box<[u64]>>),
}

impl Default for Ranges {
    fn default() -> Self {
        Self::One(0)
    }
}

impl FromIterator<u64> for Ranges {
    fn from_iter<I: IntoIterator<Item = u64>>(ranges: I) -> Self {
        match ranges.into_iter().collect::<SmallVec<[u64; 1]>>() {
            ranges if ranges.len() == 1 => Self::One(ranges[0]),
            ranges => Self::Many(Box::new(ranges.into_vec().into())),
        }
    }
}

impl Deref for Ranges {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        match self {
            Self::One(range) => std::slice::from_ref(range),
            Self::Many(ranges) => ranges,
        }
    }
}
