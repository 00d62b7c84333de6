//! An `lru` cache of hashes alone, beside the real cache: it counts the hits that `lru` would have had.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::past::spread;

/// Counts how many more or fewer hits the policy has than `lru` would have had, among the chunks of the sample.
#[derive(Debug, Default)]
pub(super) struct Rival {
    entries: Vec<Used>,
    vacant: Vec<u32>,
    /// Entries by hash.
    table: HashTable<u32>,
    newest: Option<u32>,
    oldest: Option<u32>,
    /// Hits of the request under way. They become newer than the request's new chunks, since no chunk leaves before its children.
    hits: Vec<u32>,
    /// The policy's hits minus those of `lru`, and the number of uses; both fade.
    lead: f64,
    uses: f64,
}

/// An entry of the list by last use.
#[derive(Debug, Clone, Copy)]
struct Used {
    hash: u32,
    newer: Option<u32>,
    older: Option<u32>,
}

impl Rival {
    /// Whether `lru` would have a chunk.
    pub(super) fn has(&self, hash: u32) -> bool {
        self.table.find(spread(hash), |&at| self.entries[at as usize].hash == hash).is_some()
    }

    /// Counts a use: whether it was a hit here, and whether it would have been a hit with `lru`.
    pub(super) fn count(&mut self, was_hit: bool, lru_hit: bool) {
        self.lead += f64::from(i8::from(was_hit) - i8::from(lru_hit));
        self.uses += 1.0;
    }

    /// Notes that the request under way found a chunk here.
    pub(super) fn hit(&mut self, hash: u32) {
        self.hits.push(hash);
    }

    /// Notes the end of a request. Then `lru` evicts its oldest chunks, as far as it has more than `most`.
    pub(super) fn request_ends(&mut self, most: usize) {
        let mut hits = std::mem::take(&mut self.hits);
        hits.drain(..).for_each(|hash| self.used(hash));
        self.hits = hits;
        while self.table.len() > most
            && let Some(oldest) = self.oldest
        {
            self.forget(oldest);
        }
    }

    /// Makes a chunk the newest.
    pub(super) fn used(&mut self, hash: u32) {
        let entries = &self.entries;
        let place = self.vacant.last().copied().unwrap_or(entries.len() as u32);
        let is_it = |&at: &u32| entries[at as usize].hash == hash;
        let at = match self.table.entry(spread(hash), is_it, |&at| spread(entries[at as usize].hash)) {
            Entry::Occupied(entry) => {
                let at = *entry.get();
                self.unlink(at);
                at
            }
            Entry::Vacant(entry) => {
                entry.insert(place);
                if self.vacant.pop().is_none() {
                    self.entries.push(Used { hash, newer: None, older: None });
                }
                place
            }
        };
        let older = self.newest.replace(at);
        self.entries[at as usize] = Used { hash, newer: None, older };
        match older {
            Some(older) => self.entries[older as usize].newer = Some(at),
            None => self.oldest = Some(at),
        }
    }

    /// Forgets the chunks that are not in the sample any more.
    pub(super) fn retain(&mut self, is_sampled: impl Fn(u32) -> bool) {
        let mut next = self.oldest;
        while let Some(at) = next {
            next = self.entries[at as usize].newer;
            if !is_sampled(self.entries[at as usize].hash) {
                self.forget(at);
            }
        }
    }

    /// Lets counts fade by `since` uses of the sample; `cached` chunks of the sample are cached. Returns the policy's hits minus
    /// those of `lru`, as a share of all uses; negative if `lru` had more hits.
    pub(super) fn lead(&mut self, since: f64, cached: usize) -> f64 {
        let kept = (-since / (MEMORY * cached.max(1)) as f64).exp();
        self.lead *= kept;
        self.uses *= kept;
        self.lead / (self.uses + (LEAST_LIFETIMES * cached) as f64 + LEAST_USES)
    }

    fn forget(&mut self, at: u32) {
        let hash = self.entries[at as usize].hash;
        if let Ok(entry) = self.table.find_entry(spread(hash), |&other| other == at) {
            entry.remove();
        }
        self.unlink(at);
        self.vacant.push(at);
    }

    fn unlink(&mut self, at: u32) {
        let Used { newer, older, .. } = self.entries[at as usize];
        match newer {
            Some(newer) => self.entries[newer as usize].older = older,
            None => self.newest = older,
        }
        match older {
            Some(older) => self.entries[older as usize].newer = newer,
            None => self.oldest = newer,
        }
    }
}

/// Counts fade to 1/e during this many uses for each cached chunk.
const MEMORY: usize = 16;

/// The policy and `lru` start as if they had been equal for `LEAST_USES` uses, and for `LEAST_LIFETIMES` uses for each cached
/// chunk.
const LEAST_USES: f64 = 1_000.0;
const LEAST_LIFETIMES: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rival_has_the_chunks_that_were_used_last() {
        let (mut rival, mut rng) = (Rival::default(), fastrand::Rng::with_seed(2));
        let mut model: Vec<u32> = Vec::new();
        for n in 0..5_000 {
            let (hash, most) = (rng.u32(..40), rng.usize(10..14));
            assert_eq!(rival.has(hash), model.contains(&hash));
            rival.hit(hash);
            rival.request_ends(most);
            model.retain(|&other| other != hash);
            model.insert(0, hash);
            model.truncate(most);
            if n % 97 == 0 {
                rival.retain(|hash| hash % 5 != 0);
                model.retain(|hash| hash % 5 != 0);
            }
        }
        assert!(rival.entries.len() <= 15);
    }

    #[test]
    fn a_chunk_leaves_after_the_new_chunks_behind_it() {
        let mut rival = Rival::default();
        // A request finds chunk 1 and adds chunk 2 behind it.
        rival.hit(1);
        rival.used(2);
        rival.request_ends(2);
        rival.used(3);
        rival.request_ends(2);
        assert!(rival.has(1) && rival.has(3) && !rival.has(2));
    }

    #[test]
    fn the_lead_over_lru_is_the_difference_in_hits_and_fades() {
        let mut rival = Rival::default();
        (0..9_000).for_each(|n| rival.count(n % 10 == 0, false));
        assert!((rival.lead(0.0, 0) - 0.09).abs() < 1e-9);
        assert!(rival.lead(0.0, 10_000) < 0.03, "little evidence for so many chunks");
        (0..1_800).for_each(|_| rival.count(false, true));
        assert!(rival.lead(0.0, 100) < 0.0);
        assert!(rival.lead(1e6, 100).abs() < 1e-9);
    }
}
