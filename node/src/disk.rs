//! The disk tier: keeps chunks when memory is needed, and when the node restarts.
//!
//! A tier is independent: one preallocated, locked file of segments per actor. Its thread ([`tier`]) takes orders that name
//! places in the arena, and answers each order when the bytes are in place: a write after its sync, a read after key, length
//! and checksums were right. [`format`](mod@format) describes the bytes on disk. [`log`] decides which segment takes a record
//! and which is freed. One sync serves all writes that were waiting.
//!
//! | fault | result |
//! | --- | --- |
//! | the node is killed, or power is lost | acknowledged records are there at the next start |
//! | bytes are damaged | a miss, counted and told for an hour; the record is forgotten |
//! | the description of a namespace is damaged | told for an hour; its chunks are found when an engine comes |
//! | a read fails | a miss, counted and told for an hour; the record is forgotten, the other records of its segment can still be read |
//! | reads fail again and again | the tier closes itself: the drive is broken |
//! | a write or sync fails, or the device is full | the tier closes itself, later orders get `Closed`, the node goes on |
//! | the folder or the file is removed | the tier closes itself |
//! | the drive does not answer | orders get `Silent` until it does (`drive`); the places of earlier orders are kept |
//! | more orders than the queue holds | `Busy` |
//! | two processes want one folder | the second is refused |
//! | the tier cannot be opened, or its drive does not answer at the start | the node serves from memory and says so |

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use larder_net::failure::Failure;

use crate::host::CpuSet;

pub(crate) mod damage;
pub(crate) mod drive;
pub mod format;
pub mod io;
pub mod log;
pub mod metrics;
pub mod namespaces;
pub mod order;
pub mod owners;
pub mod tier;
pub mod volume;

use io::IoMethod;
use log::{Geometry, MIN_SEGMENTS};

pub use metrics::DiskMetrics;
pub use order::{
    BlockPlace, DiskPurge, Gone, PurgedSegment, ReadAnswer, ReadOrder, SnapshotPage, Source, Why,
    WriteAnswer, WriteOrder,
};
pub use tier::{DiskTier, OnGone, Refused};

/// The options of a tier.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskOptions {
    /// The folder of the tier's file. It is made if missing; nothing else should be in it.
    pub folder: PathBuf,
    /// Bytes that the tier takes on disk, in whole segments.
    pub capacity_bytes: u64,
    /// Bytes of a segment, the unit in which room is freed. No chunk may be larger. Fixed when the tier is made.
    pub segment_bytes: u64,
    /// Orders that wait; more are refused with `Busy`.
    pub queue_orders: usize,
    /// Bytes that the scrubber verifies a second, while there are no orders; 0 for none.
    pub scrub_bytes_per_second: u64,
    /// How long the drive may take for an operation. Then it counts as silent, and is asked for nothing until it answers.
    pub silent_after: Duration,
    /// The CPUs of the tier's thread.
    pub cpus: CpuSet,
    /// How bytes move; `None` for the best way that the kernel allows.
    pub lane: Option<IoMethod>,
}

impl DiskOptions {
    /// How the tier is divided into segments.
    ///
    /// # Errors
    /// Fails if no tier can be that size.
    pub fn geometry(&self) -> Result<Geometry, Failure> {
        let Self { capacity_bytes, segment_bytes, .. } = *self;
        Geometry::of(capacity_bytes, segment_bytes).ok_or_else(|| {
            Failure::new(format!(
                "a disk tier of {} in segments of {}: it needs at least {MIN_SEGMENTS} segments, each a multiple of 4 KiB, from {} to {}",
                ByteSize(capacity_bytes), ByteSize(segment_bytes), ByteSize(MIN_SEGMENT_BYTES), ByteSize(MAX_SEGMENT_BYTES)
            ))
        })
    }
}

/// The failure of a drive that answers with an error.
pub(crate) fn unusable(path: &Path, error: std::io::Error) -> Failure {
    let text = format!("the disk tier's {} cannot be read or written: check the drive", path.display());
    Failure::because(error, text)
}

impl Geometry {
    /// The layout of a tier of `capacity_bytes` bytes in segments of `segment_bytes`; `None` if no tier can have that size.
    pub fn of(capacity_bytes: u64, segment_bytes: u64) -> Option<Self> {
        let is_possible = (MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&segment_bytes)
            && segment_bytes.is_multiple_of(format::PAGE_BYTES);
        let segments = if is_possible { capacity_bytes / segment_bytes } else { 0 };
        let segments = u32::try_from(segments).ok()?;
        let segment_pages = (segment_bytes / format::PAGE_BYTES) as u32;
        (MIN_SEGMENTS..=MAX_SEGMENTS).contains(&segments).then_some(Self { segments, segment_pages })
    }
}

/// A good size for segments: 64 blocks of 4 MiB. Small segments waste space at their ends, and large segments give up much at
/// once.
pub const DEFAULT_SEGMENT_BYTES: u64 = 256 << 20;

/// Bytes of the smallest segment: tests use them.
pub const MIN_SEGMENT_BYTES: u64 = 64 << 10;

/// Bytes of the largest segment.
pub const MAX_SEGMENT_BYTES: u64 = 16 << 30;

/// Segments of the largest tier: a start reads their heads and footers one by one.
pub const MAX_SEGMENTS: u32 = 65_536;

#[cfg(test)]
pub(crate) mod tests;
