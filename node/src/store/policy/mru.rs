//! Most recently used goes first (SGLang's radix cache has it by this name).
//!
//! Leaf-first it is nearly `filo`: what was used last, the head of a prompt, is what has children.

use super::heap::Heap;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkId;

/// Most recently used.
#[derive(Debug, Default)]
pub(super) struct Mru {
    heap: Heap,
    uses: u64,
}

impl Policy for Mru {
    fn insert(&mut self, chunk: ChunkId, _: Facts) {
        self.uses += 1;
        self.heap.push(chunk, u64::MAX - self.uses);
    }

    fn touch(&mut self, chunk: ChunkId) {
        self.uses += 1;
        self.heap.set_key(chunk, u64::MAX - self.uses);
    }

    fn remove(&mut self, chunk: ChunkId, _: Removal) {
        self.heap.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkId) {
        self.heap.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkId) {
        self.heap.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) -> Option<ChunkId> {
        self.heap.first(judge)
    }

    fn order(&self) -> Vec<ChunkId> {
        self.heap.order()
    }
}
