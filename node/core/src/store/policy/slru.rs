//! Segmented LRU: chunks that were not yet used twice go first, by recency; then the others, by recency.
//!
//! After Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (Computer, 1994), in the form that
//! SGLang gave it: a count of uses separates the segments, and no chunk returns to the first segment.
//!
//! The rule counts uses, not hits: storing a chunk is its first use, so that with the threshold of 2 the first hit protects it.
//! Published figures of SLRU(2) on prompts are about this rule; a threshold of two hits would protect less.

use super::queued::Rule;
use super::queues::Queues;
use super::{Facts, Judge};
use crate::store::ids::ChunkNumber;

/// Segmented LRU.
#[derive(Debug)]
pub(super) struct Slru;

impl Rule for Slru {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, _: Facts) {
        queues.push(chunk, PROBATION);
        queues.set_mark(chunk, 1);
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        let uses = (queues.mark(chunk) + 1).min(PROTECTED_THRESHOLD);
        queues.set_mark(chunk, uses);
        queues.move_to_end(chunk, if uses < PROTECTED_THRESHOLD { PROBATION } else { PROTECTED });
    }

    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        queues.first(PROBATION, judge).or_else(|| queues.first(PROTECTED, judge))
    }
}

const PROBATION: usize = 0;
const PROTECTED: usize = 1;

/// Uses that make a chunk protected, the storing included.
const PROTECTED_THRESHOLD: u8 = 2;
