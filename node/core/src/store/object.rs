//! The store's part for the object store. The index leaves out chunks that only the object store has: nobody holds them, so they
//! are not announced.

use super::Store;
use super::ids::{ChunkId, NamespaceId};
use super::index::Stored;
use super::writes::{WriteLine, WritePolicy};

/// A store's settings for the object store beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectStoreLimits {
    /// When chunks are written; never if `None`.
    pub write: Option<WritePolicy>,
    /// For [`WritePolicy::WriteThroughSelective`]: the number of uses, the commit included, from which a chunk is written.
    pub write_after_uses: u32,
    /// Limit of the bytes of chunks that wait to be written or are being written; further chunks are not written.
    pub max_waiting_bytes: u64,
    /// Limit of the bytes of slots into which chunks are being read.
    pub max_reading_bytes: u64,
}

/// A store's state for the object store beside it.
#[derive(Debug)]
pub(super) struct Objects {
    /// The chunks to write.
    pub(super) line: WriteLine,
    max_reading_bytes: u64,
}

/// The writes to the object store, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObjectUsage {
    /// Bytes of chunks that wait to be written, or are being written.
    pub waiting_bytes: u64,
    /// Chunks that were not written because too many waited.
    pub shed: u64,
}

impl Objects {
    pub(super) fn new(limits: &ObjectStoreLimits) -> Self {
        let line = WriteLine::new(limits.write, limits.write_after_uses, limits.max_waiting_bytes);
        Self { line, max_reading_bytes: limits.max_reading_bytes }
    }

    pub(super) fn max_reading_bytes(&self) -> u64 {
        self.max_reading_bytes
    }

    pub(super) fn usage(&self) -> ObjectUsage {
        let (waiting_bytes, shed) = self.line.usage();
        ObjectUsage { waiting_bytes, shed }
    }
}

impl Store {
    /// The blocks (slice, pool) that every chunk of a namespace has, and whether the namespace is flat.
    pub fn blocks_of(&self, namespace: u32) -> (Vec<(u16, u8)>, bool) {
        let Some(known) = self.namespaces.find(NamespaceId::of(namespace)) else {
            return (Vec::new(), false);
        };
        let pools = known.rules.obligatory();
        let blocks = (0..known.slices).flat_map(|slice| pools.iter().map(move |pool| (slice, pool as u8)));
        (blocks.collect(), known.flat)
    }

    /// Notes whether a fetched chunk came from the object store. A chunk from another node may be missing there, since that node
    /// may have shed the write. So the object store is asked when the chunk is evicted here.
    pub(super) fn came_stored(&mut self, id: ChunkId, is_stored: bool) {
        if is_stored {
            self.index.get_mut(id).stored = Stored::There;
        }
    }
}
