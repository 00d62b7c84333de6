//! First in, first out: the oldest insertion goes first (Belady, "A study of replacement algorithms for a virtual-storage
//! computer", IBM Systems Journal 1966).

use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkId;

/// First in, first out.
#[derive(Debug)]
pub(super) struct Fifo {
    queues: Queues,
}

impl Default for Fifo {
    fn default() -> Self {
        Self { queues: Queues::new(1) }
    }
}

impl Policy for Fifo {
    fn insert(&mut self, chunk: ChunkId, _: Facts) {
        self.queues.push(chunk, 0);
    }

    fn touch(&mut self, _: ChunkId) {}

    fn remove(&mut self, chunk: ChunkId, _: Removal) {
        self.queues.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkId) {
        self.queues.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkId) {
        self.queues.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) -> Option<ChunkId> {
        self.queues.first(0, judge)
    }

    fn order(&self) -> Vec<ChunkId> {
        self.queues.order()
    }
}
