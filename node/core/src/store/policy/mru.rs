//! Most recently used goes first (SGLang's radix cache has it by this name).
//!
//! Leaf-first it is nearly `filo`: what was used last, the head of a prompt, is what has children.

use super::heap::Heap;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// Most recently used.
#[derive(Debug, Default)]
pub(super) struct Mru {
    heap: Heap,
    uses: u64,
}

impl Policy for Mru {
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.uses += 1;
        self.heap.push(chunk, u64::MAX - self.uses);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.uses += 1;
        self.heap.set_key(chunk, u64::MAX - self.uses);
    }

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
