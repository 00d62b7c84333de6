//! The chunks that are worth the least, among those that searches looked at.
//!
//! A search looks at a few chunks drawn at random. The worst chunks that searches saw stay here, so that each search profits from
//! earlier ones.

use super::state::State;
use crate::store::ids::ChunkNumber;

/// The worst chunks that were seen and may still go.
#[derive(Debug, Default)]
pub(super) struct Candidates {
    seen: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    worth: f32,
    chunk: ChunkNumber,
    /// The count of uses at its last use. After another use, it is no longer a candidate.
    used: u32,
}

impl Candidates {
    /// Forgets all candidates.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
    }

    /// Forgets candidates that were used or may not be evicted.
    pub(super) fn refresh(&mut self, state: &State) {
        self.seen.retain(|candidate| {
            state.known(candidate.chunk).is_some_and(|node| node.used.uses == candidate.used)
                && state.is_free(candidate.chunk)
        });
    }

    /// Computes the worth of each candidate anew.
    pub(super) fn appraise(&mut self, worth: impl Fn(ChunkNumber) -> f32) {
        self.seen.iter_mut().for_each(|candidate| candidate.worth = worth(candidate.chunk));
    }

    /// The number of candidates.
    pub(super) fn len(&self) -> usize {
        self.seen.len()
    }

    /// Adds a chunk that was used last at `used`, if it is one of the worst.
    pub(super) fn see(&mut self, chunk: ChunkNumber, used: u32, worth: f32) {
        let new = Candidate { worth, chunk, used };
        if self.seen.iter().any(|candidate| candidate.chunk == chunk) {
            return;
        }
        if self.seen.len() < MOST {
            self.seen.push(new);
        } else if let Some(best) = self.seen.iter_mut().max_by(|a, b| a.worth.total_cmp(&b.worth))
            && best.worth > worth
        {
            *best = new;
        }
    }

    /// Finds the candidate of the least worth from the place `from` on, and moves it to this place.
    pub(super) fn worst(&mut self, from: usize) -> Option<ChunkNumber> {
        let rest = self.seen.get_mut(from..)?;
        let (place, _) = rest.iter().enumerate().min_by(|a, b| a.1.worth.total_cmp(&b.1.worth))?;
        rest.swap(0, place);
        Some(rest[0].chunk)
    }

    /// Whether a chunk is a candidate.
    pub(super) fn has(&self, chunk: ChunkNumber) -> bool {
        self.seen.iter().any(|candidate| candidate.chunk == chunk)
    }
}

/// The most candidates.
pub(super) const MOST: usize = 32;
