//! S3-FIFO: a small queue that new chunks must survive, a main queue that spares used chunks, and ghosts.
//!
//! Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023): the small queue is a tenth
//! of the cache; a chunk that was hit more than once there, or comes back while its ghost is remembered, enters the main queue.
//! There are as many ghosts as cached chunks. A chunk is judged when it has become a leaf, so the ancestors of a long prompt pass
//! the small queue later than in the paper.

use super::ghosts::{Ghosts, ShortHashes};
use super::queued::Rule;
use super::queues::Queues;
use super::{Facts, Judge, Removal};
use crate::store::ids::ChunkNumber;

/// S3-FIFO.
#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    hashes: ShortHashes,
    ghosts: Ghosts,
}

impl Rule for S3Fifo {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        let came_back = self.ghosts.take(hash).is_some();
        queues.push(chunk, if came_back { MAIN } else { SMALL });
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        queues.set_mark(chunk, (queues.mark(chunk) + 1).min(MOST_HITS));
    }

    fn leaves(&mut self, queues: &Queues, chunk: ChunkNumber, why: Removal) {
        if why == Removal::Evicted && queues.list(chunk) == SMALL {
            self.ghosts.insert(0, self.hashes.get(chunk), queues.len());
        }
    }

    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        let small_is_full = queues.list_len(SMALL) * SMALL_PART >= queues.len();
        if small_is_full {
            victim_of_small(queues, judge).or_else(|| victim_of_main(queues, judge))
        } else {
            victim_of_main(queues, judge).or_else(|| victim_of_small(queues, judge))
        }
    }
}

fn victim_of_small(queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
    loop {
        let chunk = queues.first(SMALL, judge)?;
        if queues.mark(chunk) <= 1 {
            return Some(chunk);
        }
        queues.set_mark(chunk, 0);
        queues.move_to_end(chunk, MAIN);
    }
}

fn victim_of_main(queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
    loop {
        let chunk = queues.first(MAIN, judge)?;
        let Some(hits) = queues.mark(chunk).checked_sub(1) else { return Some(chunk) };
        queues.set_mark(chunk, hits);
        queues.move_to_end(chunk, MAIN);
    }
}

const SMALL: usize = 0;
const MAIN: usize = 1;

/// The small queue is one part in `SMALL_PART`.
const SMALL_PART: usize = 10;

/// The most hits that are counted.
const MOST_HITS: u8 = 3;
