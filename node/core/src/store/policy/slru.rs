//! Segmented LRU: what was not yet used twice goes first, by recency; then the others, by recency.
//!
//! After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (Computer, 1994), in the form
//! that SGLang gave it: a count of uses parts the segments, and nothing returns to the first one.
//!
//! What counts is uses, not hits: storing a chunk is its first use, so that with the threshold of 2 the first hit protects
//! it. Published figures of SLRU(2) on prompts are about this rule; a threshold of two hits would protect less.

use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// Segmented LRU.
#[derive(Debug)]
pub(super) struct Slru {
    queues: Queues,
}

impl Default for Slru {
    fn default() -> Self {
        Self { queues: Queues::new(2) }
    }
}

impl Policy for Slru {
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.queues.push(chunk, PROBATION);
        self.queues.set_mark(chunk, 1);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        let uses = (self.queues.mark(chunk) + 1).min(PROTECTED_THRESHOLD);
        self.queues.set_mark(chunk, uses);
        self.queues.move_to_end(chunk, if uses < PROTECTED_THRESHOLD { PROBATION } else { PROTECTED });
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
        self.queues.first(PROBATION, judge).or_else(|| self.queues.first(PROTECTED, judge))
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.queues.order()
    }
}

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

/// Uses that make a chunk protected, the storing included.
const PROTECTED_THRESHOLD: u8 = 2;
