//! Duels between what was learned and recency: which of two chunks should go?
//!
//! From time to time a search draws some chunks, and compares the one that is worth least by what was learned with the one that
//! was not used for the longest time. The chunk of the two that is used first should have stayed, as the optimal policy (Belady,
//! IBM Systems Journal 1966) keeps it. So each duel says who would have chosen better now, whoever chooses the victims. The
//! [`Rival`](super::rival::Rival) counts hits instead, and cannot tell a loss that is over from one that goes on.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::past::spread;

/// The duels that are not decided yet, and the balance of the others.
#[derive(Debug, Default)]
pub(super) struct Duels {
    duels: Vec<Option<Duel>>,
    /// The place of the next duel, if as many are open as may be.
    next: usize,
    /// The duel of each chunk, by hash.
    table: HashTable<(u32, u32)>,
    /// Duels whose chunks the request under way uses.
    touched: Vec<u32>,
    /// The duels that what was learned, and that recency has won; both fade.
    won: [f64; 2],
}

/// A duel that is not decided.
#[derive(Debug, Clone, Copy)]
struct Duel {
    /// The hash of the chunk that what was learned would evict, then of the chunk that recency would evict.
    hashes: [u32; 2],
    /// Whether the request under way uses these chunks.
    used: [bool; 2],
}

impl Duels {
    /// Starts a duel between two chunks, unless one of them has a duel already.
    pub(super) fn start(&mut self, by_lessons: u32, by_recency: u32) {
        let hashes = [by_lessons, by_recency];
        if by_lessons == by_recency || hashes.iter().any(|&hash| self.duel_of(hash).is_some()) {
            return;
        }
        if self.duels.len() < MOST {
            self.next = self.duels.len();
            self.duels.push(None);
        }
        let at = self.next;
        self.next = (at + 1) % self.duels.len();
        self.end(at);
        self.duels[at] = Some(Duel { hashes, used: [false; 2] });
        for hash in hashes {
            let entry = self.table.entry(spread(hash), |entry| entry.0 == hash, |entry| spread(entry.0));
            if let Entry::Vacant(entry) = entry {
                entry.insert((hash, at as u32));
            }
        }
    }

    /// Notes that the request under way uses a chunk, cached or not.
    pub(super) fn used(&mut self, hash: u32) {
        let Some(at) = self.duel_of(hash) else { return };
        if let Some(duel) = &mut self.duels[at as usize] {
            duel.used[usize::from(duel.hashes[1] == hash)] = true;
            self.touched.push(at);
        }
    }

    /// Notes the end of a request: it decides the duels of which it uses one chunk.
    pub(super) fn request_ends(&mut self) {
        while let Some(at) = self.touched.pop() {
            // A duel that took the place of a forgotten one goes on.
            let Some(Duel { used, .. }) = self.duels[at as usize].filter(|duel| duel.used != [false; 2])
            else {
                continue;
            };
            self.end(at as usize);
            if used[0] != used[1] {
                self.won.iter_mut().for_each(|won| *won *= KEPT);
                self.won[usize::from(used[0])] += 1.0;
            }
        }
    }

    /// How far recency is ahead, in standard deviations of equal rivals; negative if what was learned is ahead.
    pub(super) fn lead_of_recency(&self) -> f64 {
        let [lessons, recency] = self.won;
        (recency - lessons) / (recency + lessons + 1.0).sqrt()
    }

    fn duel_of(&self, hash: u32) -> Option<u32> {
        self.table.find(spread(hash), |entry| entry.0 == hash).map(|entry| entry.1)
    }

    fn end(&mut self, at: usize) -> Option<Duel> {
        let duel = self.duels[at].take()?;
        for hash in duel.hashes {
            if let Ok(entry) = self.table.find_entry(spread(hash), |entry| entry.0 == hash) {
                entry.remove();
            }
        }
        Some(duel)
    }
}

/// The most open duels. They take a quarter of a megabyte.
const MOST: usize = 8_192;

/// The part of the earlier duels that counts after another duel.
const KEPT: f64 = 0.998;

#[cfg(test)]
mod tests {
    use super::*;

    /// The lead of recency after duels between the chunks 1 and 2; `used` are the requests of each.
    fn lead_after(used: &[&[u32]]) -> f64 {
        let mut duels = Duels::default();
        for _ in 0..100 {
            duels.start(1, 2);
            for request in used {
                request.iter().for_each(|&hash| duels.used(hash));
                duels.request_ends();
            }
        }
        duels.lead_of_recency()
    }

    #[test]
    fn who_would_have_evicted_the_chunk_that_is_used_first_loses() {
        assert!(lead_after(&[&[1], &[2]]) > 5.0);
        assert!(lead_after(&[&[2], &[1]]) < -5.0);
    }

    #[test]
    fn a_request_that_uses_both_chunks_decides_nothing() {
        assert_eq!(lead_after(&[&[1, 2]]), 0.0);
        assert_eq!(lead_after(&[&[7]]), 0.0);
    }

    #[test]
    fn the_oldest_duels_are_forgotten_and_all_others_stay() {
        let mut duels = Duels::default();
        let most = MOST as u32;
        (0..most + 3).for_each(|n| duels.start(2 * n, 2 * n + 1));
        assert_eq!((duels.table.len(), duels.duels.len()), (2 * MOST, MOST));
        duels.used(0);
        duels.used(2 * 3);
        duels.used(2 * (most + 2));
        duels.request_ends();
        assert_eq!(duels.table.len(), 2 * (MOST - 2), "the first three are forgotten, two are decided");
        duels.start(2 * 9, 5);
        assert_eq!(duels.table.len(), 2 * (MOST - 2), "a chunk has one duel at a time");
    }
}
