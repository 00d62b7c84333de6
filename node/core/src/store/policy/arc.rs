//! ARC: chunks used once and chunks used again share the room; a ghost that returns enlarges the share of its group.
//!
//! Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). If the store evicts for several new
//! chunks at once, their ghosts are seen only after the evictions; this changes next to nothing.

use super::ghosts::{Ghosts, ShortHashes};
use super::queued::Rule;
use super::queues::Queues;
use super::{Facts, Judge, Removal};
use crate::store::ids::ChunkNumber;

/// Adaptive replacement cache.
#[derive(Debug, Default)]
pub(super) struct Arc {
    hashes: ShortHashes,
    ghosts: Ghosts,
    /// The number of chunks used once that should stay.
    target: f64,
    /// The number of cached chunks at the last search for a victim.
    capacity: usize,
}

impl Rule for Arc {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        let ghosts = [self.ghosts.len(ONCE), self.ghosts.len(AGAIN)].map(|len| len.max(1) as f64);
        let came_back = self.ghosts.take(hash);
        match came_back {
            Some(ONCE) => self.target += (ghosts[AGAIN] / ghosts[ONCE]).max(1.0),
            Some(_) => self.target -= (ghosts[ONCE] / ghosts[AGAIN]).max(1.0),
            None => {}
        }
        self.target = self.target.clamp(0.0, self.capacity as f64);
        queues.push(chunk, if came_back.is_some() { AGAIN } else { ONCE });
        self.ghosts.limit(ONCE, self.capacity.saturating_sub(queues.list_len(ONCE)));
        self.ghosts.limit(AGAIN, self.capacity.saturating_sub(self.ghosts.len(ONCE)));
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        queues.move_to_end(chunk, AGAIN);
    }

    fn leaves(&mut self, queues: &Queues, chunk: ChunkNumber, why: Removal) {
        let list = queues.list(chunk);
        if why == Removal::Evicted {
            let most = self.capacity.saturating_sub(if list == ONCE {
                queues.list_len(ONCE)
            } else {
                self.ghosts.len(ONCE)
            });
            self.ghosts.insert(list, self.hashes.get(chunk), most);
        }
    }

    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        self.capacity = queues.len();
        let first = if queues.list_len(ONCE) as f64 > self.target { ONCE } else { AGAIN };
        queues.first(first, judge).or_else(|| queues.first(ONCE + AGAIN - first, judge))
    }
}

const ONCE: usize = 0;
const AGAIN: usize = 1;
