//! The object store beside the store: which chunks are written to it.
//!
//! What is there alone is not in the index: nobody holds it, so nobody is told of it. A chunk that is to be written is claimed
//! until it is.

use std::collections::VecDeque;

use larder_protocol::PoolSet;

use super::Store;
use super::disk::{ChunkWrite, WriteId, WritePolicy};
use super::hand_out::Named;
use super::ids::{ChunkId, NamespaceId};
use super::index::{Chunk, Standing, Stored};
use crate::store::admission::Admission;

/// What a store needs to know of the object store beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectStoreLimits {
    /// When chunks are written; never where `None`.
    pub write: Option<WritePolicy>,
    /// For [`WritePolicy::WriteThroughSelective`]: from which use on, the commit included.
    pub write_after_uses: u32,
    /// Bytes of chunks that wait to be written or are being written; what is beyond it is not written.
    pub max_waiting_bytes: u64,
    /// Bytes of slots into which chunks are being read.
    pub max_reading_bytes: u64,
}

/// What a store knows of the object store beside it.
#[derive(Debug)]
pub(super) struct Objects {
    limits: ObjectStoreLimits,
    admission: Admission,
    /// Claimed.
    waiting: VecDeque<Named>,
    waiting_bytes: u64,
    shed: u64,
}

/// What goes to the object store, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ObjectUsage {
    /// Bytes of chunks that wait to be written, or are being written.
    pub waiting_bytes: u64,
    /// Chunks that were not written because too many waited.
    pub shed: u64,
}

impl Objects {
    pub(super) fn new(limits: ObjectStoreLimits) -> Self {
        let admission = Admission::new(REMEMBERED_CHUNKS, limits.write_after_uses);
        Self { limits, admission, waiting: VecDeque::new(), waiting_bytes: 0, shed: 0 }
    }

    pub(super) fn max_reading_bytes(&self) -> u64 {
        self.limits.max_reading_bytes
    }

    pub(super) fn usage(&self) -> ObjectUsage {
        ObjectUsage { waiting_bytes: self.waiting_bytes, shed: self.shed }
    }

    /// Takes a chunk of so many bytes out of what waits to be written; whether it was there.
    pub(super) fn forget_waiting(&mut self, id: ChunkId, bytes: u64) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) else { return false };
        self.waiting.remove(at);
        self.waiting_bytes -= bytes;
        true
    }

    /// Whether a chunk that is evicted is to be written: what was shed when it was committed has another chance.
    pub(super) fn wants_evicted(&self, chunk: &Chunk) -> bool {
        let policy = self.limits.write;
        matches!(policy, Some(WritePolicy::WriteThrough | WritePolicy::WriteBack)) && may_be_written(chunk)
    }
}

impl Store {
    /// The blocks (slice, pool) that no chunk of a namespace is without, and whether each of its chunks stands by itself.
    #[must_use]
    pub fn blocks_of(&self, namespace: u32) -> (Vec<(u16, u8)>, bool) {
        let Some(known) = self.namespaces.find(NamespaceId::of(namespace)) else {
            return (Vec::new(), false);
        };
        let pools = known.rules.obligatory();
        let blocks = (0..known.slices).flat_map(|slice| pools.iter().map(move |pool| (slice, pool as u8)));
        (blocks.collect(), known.flat)
    }

    /// The next chunk to be written to the object store, if one waits.
    pub fn next_upload(&mut self) -> Option<ChunkWrite> {
        loop {
            let named = self.object.as_mut()?.waiting.pop_front()?;
            if self.may_leave(&named) {
                return Some(self.chunk_write(named.id));
            }
            if self.index.known(named.id).is_some() {
                self.uploaded(WriteId(named.id, PoolSet::default()), false);
            }
        }
    }

    /// The upload cannot be ordered now: it is the next again.
    pub fn postpone_upload(&mut self, WriteId(id, _): WriteId) {
        let named = self.name_now(id);
        if let Some(object) = &mut self.object {
            object.waiting.push_front(named);
        }
    }

    /// An upload has ended; whether the object store has the chunk.
    pub fn uploaded(&mut self, WriteId(id, pools): WriteId, is_stored: bool) {
        let bytes = self.whole_chunk_bytes(self.index.get(id).namespace);
        if let Some(object) = &mut self.object {
            object.waiting_bytes -= bytes;
        }
        let chunk = self.index.get_mut(id);
        // It may have got another pool meanwhile.
        let is_whole = pools.has_all(chunk.pools);
        chunk.stored = if is_stored && is_whole { Stored::There } else { Stored::Unknown };
        if is_stored && !is_whole {
            self.committed(id);
        }
        self.unclaim(&[id]);
        self.evict_above_watermark();
    }

    /// A chunk was committed here.
    pub(super) fn committed(&mut self, id: ChunkId) {
        match self.object.as_ref().and_then(|object| object.limits.write) {
            Some(WritePolicy::WriteThrough) if may_be_written(self.index.get(id)) => {
                self.wait_for_upload(id);
            }
            Some(WritePolicy::WriteThroughSelective) => self.used_for_upload(id),
            _ => {}
        }
    }

    /// A chunk was fetched; `is_stored` where it came from the object store. What another node wrote there it may have shed: it
    /// is asked for when the chunk is evicted here.
    pub(super) fn came_stored(&mut self, id: ChunkId, is_stored: bool) {
        if is_stored {
            self.index.get_mut(id).stored = Stored::There;
        }
    }

    /// A chunk that can be read was used.
    pub(super) fn used_for_upload(&mut self, id: ChunkId) {
        let Some(object) = &mut self.object else { return };
        let chunk = self.index.get(id);
        if object.limits.write == Some(WritePolicy::WriteThroughSelective)
            && may_be_written(chunk)
            && object.admission.used(&chunk.hash)
        {
            self.wait_for_upload(id);
        }
    }

    /// Has a chunk written, if there is room among those that wait; whether it will be.
    pub(super) fn wait_for_upload(&mut self, id: ChunkId) -> bool {
        let named = self.name_now(id);
        let bytes = self.whole_chunk_bytes(named.namespace);
        let Some(object) = &mut self.object else { return false };
        if object.waiting_bytes + bytes > object.limits.max_waiting_bytes {
            object.shed += 1;
            return false;
        }
        object.waiting_bytes += bytes;
        object.waiting.push_back(named);
        self.change(id, |chunk| {
            chunk.claims += 1;
            chunk.stored = Stored::Coming;
        });
        true
    }
}

/// Whether all of a chunk that others could read can be written, and is not there as far as is known.
fn may_be_written(chunk: &Chunk) -> bool {
    chunk.is_complete() && chunk.stored == Stored::Unknown && chunk.standing != Standing::Passing
}

/// Chunks whose uses are remembered after they left memory, for [`WritePolicy::WriteThroughSelective`].
const REMEMBERED_CHUNKS: usize = 1 << 20;
