//! ARC: chunks used once and chunks used again share the room, as the ghosts of both say.
//!
//! Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). Where the store evicts for
//! several new chunks at once, the ghosts among them are seen only after that, which changes next to nothing.

use super::ghosts::{Ghosts, ShortHashes};
use super::queues::Queues;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// Adaptive replacement cache.
#[derive(Debug)]
pub(super) struct Arc {
    queues: Queues,
    hashes: ShortHashes,
    ghosts: Ghosts,
    /// How many chunks used once should stay.
    target: f64,
    /// Chunks that were cached when one had to go.
    capacity: usize,
}

impl Default for Arc {
    fn default() -> Self {
        Self {
            queues: Queues::new(2),
            hashes: ShortHashes::default(),
            ghosts: Ghosts::default(),
            target: 0.0,
            capacity: 0,
        }
    }
}

impl Policy for Arc {
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        let ghosts = [self.ghosts.len(ONCE), self.ghosts.len(AGAIN)].map(|len| len.max(1) as f64);
        let came_back = self.ghosts.take(hash);
        match came_back {
            Some(ONCE) => self.target += (ghosts[AGAIN] / ghosts[ONCE]).max(1.0),
            Some(_) => self.target -= (ghosts[ONCE] / ghosts[AGAIN]).max(1.0),
            None => {}
        }
        self.target = self.target.clamp(0.0, self.capacity as f64);
        self.queues.push(chunk, if came_back.is_some() { AGAIN } else { ONCE });
        self.ghosts.limit(ONCE, self.capacity.saturating_sub(self.queues.list_len(ONCE)));
        self.ghosts.limit(AGAIN, self.capacity.saturating_sub(self.ghosts.len(ONCE)));
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.queues.move_to_end(chunk, AGAIN);
    }

    fn remove(&mut self, chunk: ChunkNumber, why: Removal) {
        let list = self.queues.list(chunk);
        if why == Removal::Evicted {
            let most = self.capacity.saturating_sub(if list == ONCE {
                self.queues.list_len(ONCE)
            } else {
                self.ghosts.len(ONCE)
            });
            self.ghosts.insert(list, self.hashes.get(chunk), most);
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
        self.capacity = self.queues.len();
        let first = if self.queues.list_len(ONCE) as f64 > self.target { ONCE } else { AGAIN };
        self.queues.first(first, judge).or_else(|| self.queues.first(ONCE + AGAIN - first, judge))
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.queues.order()
    }
}

const ONCE: usize = 0;
const AGAIN: usize = 1;
