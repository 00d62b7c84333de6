//! Fewest hits goes first; among equals the least recently used (SGLang's radix cache has it by this name).
//!
//! Hits never age, and stop counting at 65,535.

use super::heap::Heap;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// Least frequently used.
#[derive(Debug, Default)]
pub(super) struct Lfu {
    heap: Heap,
    uses: u64,
}

impl Policy for Lfu {
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.uses += 1;
        self.heap.push(chunk, self.uses);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.uses += 1;
        let hits = (self.heap.key(chunk) >> TIME_BITS) + 1;
        self.heap.set_key(chunk, hits.min(MOST_HITS) << TIME_BITS | self.uses);
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

const TIME_BITS: u32 = 48;
const MOST_HITS: u64 = u16::MAX as u64;
