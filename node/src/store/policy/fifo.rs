//! First in, first out: the oldest insertion goes first.

use super::queue::Queue;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkId;

/// First in, first out.
#[derive(Debug, Default)]
pub(super) struct Fifo {
    queue: Queue,
}

impl Policy for Fifo {
    fn insert(&mut self, chunk: ChunkId, _: Facts) {
        self.queue.push(chunk);
    }

    fn touch(&mut self, _: ChunkId) {}

    fn remove(&mut self, chunk: ChunkId, _: Removal) {
        self.queue.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkId) {
        self.queue.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkId) {
        self.queue.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) -> Option<ChunkId> {
        self.queue.first(judge)
    }

    fn order(&self) -> Vec<ChunkId> {
        self.queue.order()
    }
}
