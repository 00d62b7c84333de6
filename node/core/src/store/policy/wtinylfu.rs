//! W-TinyLFU: a small window by recency; what it lets go replaces the next victim of the rest only if it was used more
//! often.
//!
//! Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (TOS 2017): the window is 1 %, the
//! rest a segmented LRU of which four fifths are protected. The window is not resized. Counts are those of a sketch, which
//! counts too much where most chunks come once: with exact counts the same rules hit up to 2.5 points more. A chunk that loses the contest
//! when it may not go yet stands in a list of its own, which goes before all others.

use super::ghosts::ShortHashes;
use super::queues::Queues;
use super::sketch::Sketch;
use super::{Facts, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;

/// W-TinyLFU.
#[derive(Debug)]
pub(super) struct WTinyLfu {
    queues: Queues,
    hashes: ShortHashes,
    sketch: Sketch,
    /// Whether a chunk has had to go yet: before, nobody contests.
    is_full: bool,
}

impl Default for WTinyLfu {
    fn default() -> Self {
        Self {
            queues: Queues::new(4),
            hashes: ShortHashes::default(),
            sketch: Sketch::default(),
            is_full: false,
        }
    }
}

impl Policy for WTinyLfu {
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        self.queues.push(chunk, WINDOW);
        self.sketch.fit(self.queues.len());
        self.sketch.add(hash);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
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
        let window = self.queues.len().div_ceil(WINDOW_PART);
        while self.queues.list_len(WINDOW) > window
            && let Some(candidate) = self.queues.head(WINDOW)
        {
            let list = if self.is_full && self.loses(candidate) { REJECTED } else { PROBATION };
            self.queues.move_to_end(candidate, list);
        }
        self.is_full = true;
        [REJECTED, PROBATION, PROTECTED, WINDOW].into_iter().find_map(|list| self.queues.first(list, judge))
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.queues.order()
    }
}

impl WTinyLfu {
    /// Whether a chunk that leaves the window was not used more often than the one that would have to go for it.
    fn loses(&mut self, candidate: ChunkNumber) -> bool {
        let take = &mut |_| Verdict::Take;
        let victim = self.queues.first(PROBATION, take).or_else(|| self.queues.first(PROTECTED, take));
        let count = |chunk| self.sketch.count(self.hashes.get(chunk));
        victim.is_some_and(|victim| count(candidate) <= count(victim))
    }
}

const REJECTED: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;
const WINDOW: usize = 3;

/// The window is one of so many parts.
const WINDOW_PART: usize = 100;
