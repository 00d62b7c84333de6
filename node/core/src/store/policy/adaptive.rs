//! Adaptive: the chunk that promises the fewest hits for the room it takes goes first, as learned from every use.
//!
//! Time is counted in uses. A chunk has a class, by how often it was used, and an age, the time since its last use. For
//! each class [`curves`] learn how likely a use is at every age, from what is cached and from what was evicted and not
//! forgotten yet. From that follows what a chunk of a class and an age is worth: the most hits for each chunk and unit
//! of time that it can bring if kept for the best span from now on, however long that is. This is the index of Gittins
//! ("Bandit processes and dynamic allocation indices", JRSS B 1979); hit density (Beckmann, Chen and Cidon, LHD, NSDI
//! 2018) and economic value added (Beckmann and Sanchez, HPCA 2017) are near to it. Having no parameter such as the
//! cache's lifetime, it fits small caches and large ones alike: where all that is cached would go before it is used
//! again, some of it is kept for longer, at the cost of the rest.
//!
//! Chunks stand in cells by class and age, where ages double; the oldest of a cell stands for it, and cells are
//! ranked from time to time. [`duel`] counts what `lru` would have hit, and takes over where that was more.
//!
//! Where the configuration says how the cost of recomputing grows with position, a hit is worth what it saves, and cells
//! stand for one of the bands of [`costs`] too.
//!
//! 20 bytes a cached chunk, and 10 to 20 for each ghost, of which there are half as many: 39 in all at a million chunks, as
//! measured.

mod costs;
mod curves;
mod duel;
mod past;

use std::num::NonZeroU32;

use super::ghosts::ShortHashes;
use super::queued::{Queued, Rule};
use super::queues::{MOST_MARK, Queues};
use super::{Facts, Judge, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;
use costs::Costs;
use curves::{Ages, CLASSES, Curves};
use duel::Duel;
use past::{Past, Seen};

/// Learns which chunk is worth the least. It has one list a cell; a chunk's stamp is the time of its last use, its mark the number
/// of uses.
#[derive(Debug)]
pub(super) struct Adaptive {
    costs: Costs,
    hashes: ShortHashes,
    past: Past,
    curves: Curves,
    duel: Duel,
    /// The worth of the oldest chunk of each cell.
    worth: Vec<f32>,
    /// Cells, the one whose oldest chunk is worth the least first.
    ranking: Vec<usize>,
    /// Victims until they are ranked again.
    until_ranked: usize,
    learned_at: u64,
}

impl Adaptive {
    /// An empty policy. Recomputing a chunk costs twice as much as the first of a prompt behind this many chunks, or always
    /// the same.
    pub(super) fn policy(recompute_doubles_at: Option<NonZeroU32>) -> Box<dyn Policy> {
        let costs = Costs::new(recompute_doubles_at);
        let cells = CELLS * costs.bands();
        let rule = Self {
            costs,
            hashes: ShortHashes::default(),
            past: Past::default(),
            curves: Curves::default(),
            duel: Duel::default(),
            worth: vec![0.0; cells],
            ranking: (0..cells).collect(),
            until_ranked: 0,
            learned_at: 0,
        };
        Box::new(Queued::new(cells, rule))
    }
}

impl Rule for Adaptive {
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, facts: Facts) {
        let hash = self.hashes.note(chunk, facts);
        let seen = self.past.take(hash, queues.now() + 1);
        let uses = seen.map_or(0, |Seen { uses, age }| {
            self.curves.used(uses, age);
            self.duel.used(age, false);
            uses
        });
        queues.push(chunk, self.costs.band(facts.index) * CELLS + first_cell(uses + 1));
        queues.set_mark(chunk, uses + 1);
        self.learn(queues);
    }

    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber) {
        let uses = queues.mark(chunk);
        let age = queues.now() + 1 - queues.stamp(chunk);
        self.curves.used(uses, age);
        self.duel.used(age, true);
        let uses = (uses + 1).min(MOST_MARK);
        queues.set_mark(chunk, uses);
        let cost_band = queues.list(chunk) / CELLS;
        queues.move_to_end(chunk, cost_band * CELLS + first_cell(uses));
    }

    fn leaves(&mut self, queues: &Queues, chunk: ChunkNumber, why: Removal) {
        if why == Removal::Evicted {
            self.past.add(self.hashes.get(chunk), queues.mark(chunk), queues.stamp(chunk));
        }
    }

    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        match self.until_ranked.checked_sub(1) {
            Some(left) => self.until_ranked = left,
            None => self.rank(queues),
        }
        self.ranking.iter().find_map(|&cell| queues.first(cell, judge))
    }

    fn order(&self, queues: &Queues) -> Vec<ChunkNumber> {
        let mut order = queues.order();
        order.sort_unstable_by_key(|&chunk| queues.stamp(chunk));
        order
    }
}

impl Adaptive {
    /// Puts chunks that have become too old for their cells into the next ones, and ranks the cells.
    fn rank(&mut self, queues: &mut Queues) {
        let now = queues.now();
        self.until_ranked = queues.len() / RANKINGS_A_LIFETIME;
        for cell in (0..self.worth.len()).filter(|cell| cell % BANDS < BANDS - 1) {
            let oldest = now.saturating_sub(FIRST_BAND << (cell % BANDS));
            queues.shift_older(oldest, cell, cell + 1);
        }
        let follows_lru = self.duel.follows_lru(now);
        for (cell, worth) in self.worth.iter_mut().enumerate() {
            let oldest = queues.first(cell, &mut |_| Verdict::Take);
            let age = oldest.map_or(FIRST_BAND << (cell % BANDS) >> 1, |oldest| now - queues.stamp(oldest));
            let cost = Costs::of_band(cell / CELLS);
            *worth = if follows_lru {
                -(age as f32) / cost
            } else {
                self.curves.worth(cell % CELLS / BANDS, age) * cost
            };
        }
        self.ranking.sort_by(|&a, &b| self.worth[a].total_cmp(&self.worth[b]));
    }

    /// Counts the ages of all that is cached or remembered, and learns from it, from time to time.
    fn learn(&mut self, queues: &Queues) {
        let (now, cached) = (queues.now(), queues.len());
        let since = now - self.learned_at;
        if since < ((cached + self.past.len()) as u64 / LOOKS_A_LIFETIME).max(LEAST_INTERVAL) {
            return;
        }
        self.learned_at = now;
        let mut ages = Ages::default();
        queues.for_each(|stamp, uses| ages.add(uses, now - stamp));
        self.past.look(now, cached, &mut ages);
        self.curves.learn(&ages, since);
        self.duel.learn(now, since, ages.newest(cached), cached);
    }
}

/// The cell of chunks used so often just now that cost the least.
fn first_cell(uses: u8) -> usize {
    curves::class(uses) * BANDS
}

/// Cells of chunks that cost alike.
const CELLS: usize = CLASSES * BANDS;

/// Cells of a class. The first one is for ages up to [`FIRST_BAND`], each other for twice the one before.
const BANDS: usize = 25;
const FIRST_BAND: u64 = 64;

/// How often cells are ranked while as many chunks go as are cached.
const RANKINGS_A_LIFETIME: usize = 4_096;

/// How often the policy learns while as many uses pass as chunks are cached or remembered, and after how many uses at
/// the least.
const LOOKS_A_LIFETIME: u64 = 8;
const LEAST_INTERVAL: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;

    /// The first to go of two chunks that were used once each, one after the other, the first of which is dear.
    fn first_to_go(recompute_doubles_at: Option<NonZeroU32>, uses: usize) -> usize {
        let mut policy = Adaptive::policy(recompute_doubles_at);
        for (chunk, index) in [(ChunkNumber::at(DEAR), 1_000), (ChunkNumber::at(CHEAP), 0)] {
            policy.insert(chunk, Facts { short_hash: chunk.position() as u64, index, priority: 0 });
        }
        for _ in 0..uses {
            [DEAR, CHEAP].into_iter().for_each(|chunk| policy.touch(ChunkNumber::at(chunk)));
        }
        policy.victim(&mut |_| Verdict::Take).unwrap().position()
    }

    #[test]
    fn of_two_equally_likely_chunks_the_one_that_costs_less_to_recompute_goes_first_where_asked() {
        for uses in [0, 1, 5, 300] {
            assert_eq!(first_to_go(None, uses), DEAR, "by age alone");
            assert_eq!(first_to_go(NonZeroU32::new(128), uses), CHEAP);
        }
    }

    const DEAR: usize = 0;
    const CHEAP: usize = 1;
}
