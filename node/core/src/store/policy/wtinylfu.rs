//! W-TinyLFU: a small window by recency; a chunk that leaves the window replaces the next victim of the rest only if it was used
//! more often.
//!
//! Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (TOS 2017): the window is 1 %, the rest is
//! a segmented LRU with four fifths protected. The window is not resized. Counts come from a sketch, which counts too much if
//! most chunks come once: with exact counts the same rules hit up to 2.5 points more. A chunk that loses the contest but may not
//! go yet waits in a separate list, which is evicted before all others.

use super::ghosts::ShortHashes;
use super::queued::Rule;
use super::queues::Queues;
use super::sketch::Sketch;
use super::{Facts, Judge, Verdict};
use crate::store::ids::ChunkNumber;

/// W-TinyLFU.
#[derive(Debug, Default)]
pub(super) struct WTinyLfu {
    hashes: ShortHashes,
    sketch: Sketch,
    /// Whether a chunk has ever had to go. Before that, a chunk that leaves the window always enters the rest.
    is_full: bool,
}

impl Rule for WTinyLfu {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        queues.push(chunk, WINDOW);
        self.sketch.fit(queues.len());
        self.sketch.add(hash);
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        self.sketch.add(self.hashes.get(chunk));
        if queues.list(chunk) == WINDOW {
            queues.move_to_end(chunk, WINDOW);
            return;
        }
        queues.move_to_end(chunk, PROTECTED);
        let main = queues.len() - queues.list_len(WINDOW);
        if queues.list_len(PROTECTED) * 5 > main * 4
            && let Some(oldest) = queues.first(PROTECTED, &mut |_| Verdict::Take)
        {
            queues.move_to_end(oldest, PROBATION);
        }
    }

    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        let window = queues.len().div_ceil(WINDOW_PART);
        while queues.list_len(WINDOW) > window
            && let Some(candidate) = queues.head(WINDOW)
        {
            let list = if self.is_full && self.loses(queues, candidate) { REJECTED } else { PROBATION };
            queues.move_to_end(candidate, list);
        }
        self.is_full = true;
        [REJECTED, PROBATION, PROTECTED, WINDOW].into_iter().find_map(|list| queues.first(list, judge))
    }
}

impl WTinyLfu {
    /// Whether a chunk that leaves the window was used no more often than the chunk that it would replace.
    fn loses(&self, queues: &mut Queues, candidate: ChunkNumber) -> bool {
        let take = &mut |_| Verdict::Take;
        let victim = queues.first(PROBATION, take).or_else(|| queues.first(PROTECTED, take));
        let count = |chunk| self.sketch.count(self.hashes.get(chunk));
        victim.is_some_and(|victim| count(candidate) <= count(victim))
    }
}

const REJECTED: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;
const WINDOW: usize = 3;

/// The window is one part in `WINDOW_PART`.
const WINDOW_PART: usize = 100;
