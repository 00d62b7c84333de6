//! SIEVE: a hand goes from old to new, takes the first chunk that was not used since it last passed, and spares the
//! others once.
//!
//! Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU" (NSDI 2024). The queue is kept in two lists: chunks that
//! the hand has yet to reach, with new chunks at the end, and chunks that it has passed. A chunk that may not be evicted stays
//! where the hand met it. So the ancestors of cached chunks are spared without a mark. If only chunks in use were blocked, a hand
//! that passes over them instead would hit up to 1.5 points more in small caches.

use super::queued::Rule;
use super::queues::Queues;
use super::{Facts, Judge};
use crate::store::ids::ChunkNumber;

/// SIEVE.
#[derive(Debug, Default)]
pub(super) struct Sieve {
    /// The list that the hand has yet to reach. The other list has the chunks that it has passed.
    ahead: usize,
}

impl Rule for Sieve {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, _: Facts) {
        queues.push(chunk, self.ahead);
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        queues.set_mark(chunk, VISITED);
    }

    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        for _ in 0..3 {
            while let Some(chunk) = queues.first(self.ahead, judge) {
                if queues.mark(chunk) != VISITED {
                    return Some(chunk);
                }
                queues.set_mark(chunk, 0);
                queues.move_to_end(chunk, 1 - self.ahead);
            }
            self.ahead = 1 - self.ahead;
        }
        None
    }
}

const VISITED: u8 = 1;
