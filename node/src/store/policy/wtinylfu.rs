//! W-TinyLFU: a small window by recency; what it lets go replaces the next victim of the rest only if it was used more
//! often.
//!
//! Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (TOS 2017): the window is 1 %, the
//! rest a segmented LRU of which four fifths are protected. The window is not resized. Where the store evicts for more new
//! chunks at once than the window holds, some of the rest goes without a contest.

use super::ghosts::ShortHashes;
use super::queues::Queues;
use super::sketch::Sketch;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkId;

/// W-TinyLFU.
#[derive(Debug)]
pub(super) struct WTinyLfu {
    queues: Queues,
    hashes: ShortHashes,
    sketch: Sketch,
    /// Chunks that were cached when one had to go.
    capacity: usize,
}

impl Default for WTinyLfu {
    fn default() -> Self {
        Self {
            queues: Queues::new(3),
            hashes: ShortHashes::default(),
            sketch: Sketch::default(),
            capacity: 0,
        }
    }
}

impl Policy for WTinyLfu {
    fn insert(&mut self, chunk: ChunkId, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        self.queues.push(chunk, WINDOW);
        self.sketch.fit(self.queues.len());
        self.sketch.add(hash);
    }

    fn touch(&mut self, chunk: ChunkId) {
        self.sketch.add(self.hashes.get(chunk));
        if self.queues.list(chunk) == WINDOW {
            self.queues.move_to_end(chunk, WINDOW);
            return;
        }
        self.queues.move_to_end(chunk, PROTECTED);
        let main = self.queues.len() - self.queues.list_len(WINDOW);
        if self.queues.list_len(PROTECTED) * 5 > main * 4
            && let Some(oldest) = self.queues.first(PROTECTED, &mut |_| Verdict::Take)
        {
            self.queues.move_to_end(oldest, PROBATION);
        }
    }

    fn remove(&mut self, chunk: ChunkId, _: Removal) {
        self.queues.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkId) {
        self.queues.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkId) {
        self.queues.unblock(chunk);
    }

    fn victim(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) -> Option<ChunkId> {
        self.capacity = self.capacity.max(self.queues.len());
        self.fill_main(judge);
        // Whatever comes next pushes the oldest out of the window.
        let candidate = self.queues.first(WINDOW, judge);
        let victim = self.queues.first(PROBATION, judge).or_else(|| self.queues.first(PROTECTED, judge));
        let (Some(candidate), Some(victim)) = (candidate, victim) else {
            return candidate.or(victim);
        };
        let count = |chunk| self.sketch.count(self.hashes.get(chunk));
        if count(candidate) <= count(victim) {
            return Some(candidate);
        }
        self.queues.move_to_end(candidate, PROBATION);
        Some(victim)
    }

    fn order(&self) -> Vec<ChunkId> {
        self.queues.order()
    }
}

impl WTinyLfu {
    /// Room of the window.
    fn window(&self) -> usize {
        self.capacity.div_ceil(100)
    }

    /// What the window has too much of enters the rest without a contest for as long as that has room.
    fn fill_main(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) {
        while self.queues.list_len(WINDOW) > self.window()
            && self.queues.len() - self.queues.list_len(WINDOW) < self.capacity - self.window()
            && let Some(oldest) = self.queues.first(WINDOW, judge)
        {
            self.queues.move_to_end(oldest, PROBATION);
        }
    }
}

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;
