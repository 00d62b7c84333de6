//! First in, first out: the oldest insertion goes first (Belady, "A study of replacement algorithms for a virtual-storage
//! computer", IBM Systems Journal 1966).

use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

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
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.queues.push(chunk, 0);
    }

    fn touch(&mut self, _: ChunkNumber) {}

    fn remove(&mut self, chunk: ChunkNumber, _: Removal) {
        self.queues.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkNumber) {
        self.queues.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkNumber) {
        self.queues.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkNumber) -> Verdict) -> Option<ChunkNumber> {
        self.queues.first(0, judge)
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.queues.order()
    }
}
