//! SIEVE: a hand goes from old to new, takes the first chunk that was not used since it last passed, and spares the
//! others once.
//!
//! Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU" (NSDI 2024). The queue is kept in two lists:
//! chunks that the hand has yet to reach, with the new ones at their end, and chunks that it has passed. A chunk that
//! may not go waits where the hand met it, which spares the ancestors of what is cached without marking them; where only
//! what is in use may not go, a hand that passes over it instead hits up to 1.5 points more in small caches.

use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// SIEVE.
#[derive(Debug)]
pub(super) struct Sieve {
    queues: Queues,
    /// The list that the hand is in; the other one it has passed.
    ahead: usize,
}

impl Default for Sieve {
    fn default() -> Self {
        Self { queues: Queues::new(2), ahead: 0 }
    }
}

impl Policy for Sieve {
    fn insert(&mut self, chunk: ChunkNumber, _: Facts) {
        self.queues.push(chunk, self.ahead);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.queues.set_mark(chunk, VISITED);
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
        for _ in 0..3 {
            while let Some(chunk) = self.queues.first(self.ahead, judge) {
                if self.queues.mark(chunk) != VISITED {
                    return Some(chunk);
                }
                self.queues.set_mark(chunk, 0);
                self.queues.move_to_end(chunk, 1 - self.ahead);
            }
            self.ahead = 1 - self.ahead;
        }
        None
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.queues.order()
    }
}

const VISITED: u8 = 1;
