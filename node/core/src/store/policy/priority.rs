//! Lowest priority of the caller goes first; among equals the least recently used (SGLang's radix cache has it by this
//! name).

use super::heap::Heap;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// By the caller's priority.
#[derive(Debug, Default)]
pub(super) struct Priority {
    heap: Heap,
    uses: u64,
}

impl Policy for Priority {
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        self.uses += 1;
        let rank = u64::from(facts.priority.wrapping_sub(i8::MIN) as u8);
        self.heap.push(chunk, rank << TIME_BITS | self.uses);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.uses += 1;
        let rank = self.heap.key(chunk) >> TIME_BITS;
        self.heap.set_key(chunk, rank << TIME_BITS | self.uses);
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
