//! Least recently used goes first (Mattson et al., "Evaluation techniques for storage hierarchies", IBM
//! Systems Journal 1970; SGLang's radix cache has it leaf-first, as here).

use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// Least recently used.
#[derive(Debug)]
pub(super) struct Lru {
    queues: Queues,
}

impl Default for Lru {
    fn default() -> Self {
        Self { queues: Queues::new(1) }
    }
}

impl Policy for Lru {
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.queues.push(chunk, 0);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.queues.move_to_end(chunk, 0);
    }

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
