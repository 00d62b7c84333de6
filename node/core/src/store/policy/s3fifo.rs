//! S3-FIFO: a small queue that new chunks must survive, a main queue that spares what was used, and ghosts.
//!
//! Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023): a tenth is the small
//! queue; what was hit more than once there, or comes back while its ghost is remembered, enters the main queue. There are
//! as many ghosts as chunks are cached. A chunk is judged when it has become a leaf, so the ancestors of a long prompt pass
//! the small queue later than there.

use super::ghosts::{Ghosts, ShortHashes};
use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// S3-FIFO.
#[derive(Debug)]
pub(super) struct S3Fifo {
    queues: Queues,
    hashes: ShortHashes,
    ghosts: Ghosts,
}

impl Default for S3Fifo {
    fn default() -> Self {
        Self { queues: Queues::new(2), hashes: ShortHashes::default(), ghosts: Ghosts::default() }
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        let came_back = self.ghosts.take(hash).is_some();
        self.queues.push(chunk, if came_back { MAIN } else { SMALL });
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.queues.set_mark(chunk, (self.queues.mark(chunk) + 1).min(MOST_HITS));
    }

    fn remove(&mut self, chunk: ChunkNumber, why: Removal) {
        if why == Removal::Evicted && self.queues.list(chunk) == SMALL {
            self.ghosts.insert(0, self.hashes.get(chunk), self.queues.len());
        }
        self.queues.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkNumber) {
        self.queues.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkNumber) {
        self.queues.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkNumber) -> Verdict) -> Option<ChunkNumber> {
        let small_is_full = self.queues.list_len(SMALL) * SMALL_PART >= self.queues.len();
        if small_is_full {
            self.victim_of_small(judge).or_else(|| self.victim_of_main(judge))
        } else {
            self.victim_of_main(judge).or_else(|| self.victim_of_small(judge))
        }
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.queues.order()
    }
}

impl S3Fifo {
    fn victim_of_small(&mut self, judge: &mut dyn FnMut(ChunkNumber) -> Verdict) -> Option<ChunkNumber> {
        loop {
            let chunk = self.queues.first(SMALL, judge)?;
            if self.queues.mark(chunk) <= 1 {
                return Some(chunk);
            }
            self.queues.set_mark(chunk, 0);
            self.queues.move_to_end(chunk, MAIN);
        }
    }

    fn victim_of_main(&mut self, judge: &mut dyn FnMut(ChunkNumber) -> Verdict) -> Option<ChunkNumber> {
        loop {
            let chunk = self.queues.first(MAIN, judge)?;
            let Some(hits) = self.queues.mark(chunk).checked_sub(1) else { return Some(chunk) };
            self.queues.set_mark(chunk, hits);
            self.queues.move_to_end(chunk, MAIN);
        }
    }
}

const SMALL: usize = 0;
const MAIN: usize = 1;

/// The small queue is one of so many parts.
const SMALL_PART: usize = 10;

/// Hits that count.
const MOST_HITS: u8 = 3;
