//! First in, last out: the newest insertion goes first (SGLang's radix cache has it by this name).

use super::heap::Heap;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// First in, last out.
#[derive(Debug, Default)]
pub(super) struct Filo {
    heap: Heap,
    inserted: u64,
}

impl Policy for Filo {
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.inserted += 1;
        self.heap.push(chunk, u64::MAX - self.inserted);
    }

    fn touch(&mut self, _: ChunkNumber) {}

    fn remove(&mut self, chunk: ChunkNumber, _: Removal) {
        self.heap.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkNumber) {
        self.heap.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkNumber) {
        self.heap.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkNumber) -> Verdict) -> Option<ChunkNumber> {
        self.heap.first(judge)
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.heap.order()
    }
}
