//! Adaptive: evicts the chunk that promises the fewest hits for the room it takes. It learns from every use.
//!
//! A chunk has a kind ([`kinds`]: the turn of its session, the session's gap between turns, how often it was used, whether it is
//! the last of its prompt) and an age: the time since its last use, on two clocks. One clock is wall time, the other counts uses.
//! For each kind [`clocks`] learn the chance of a use at every age, from a sample of the cached chunks and of the evicted chunks
//! that are still remembered. The worth of a chunk follows from its kind and age. It is the rate of hits, for each chunk and unit
//! of time, that the chunk can bring if it is kept from now on for the best span of any length. This is the index of Gittins
//! ("Bandit processes and dynamic allocation indices", JRSS B 1979); hit density (Beckmann, Chen and Cidon, LHD, NSDI 2018) and
//! economic value added (Beckmann and Sanchez, HPCA 2017) are close to it. The policy has no parameter such as the cache's
//! lifetime, so it fits small caches and large ones: if all chunks would be evicted before their next use, it keeps some chunks
//! longer, at the cost of the rest. [`lessons`] weigh both clocks by the quality of their predictions.
//!
//! A use is only recorded. A search for a victim looks at a few chunks drawn at random, and at the worst chunks that earlier
//! searches saw ([`candidates`]). A [`rival`] counts the hits that `lru` would have had. If these were more, recency gets weight,
//! unless [`duels`] say that what was learned is better now.
//!
//! If the configuration tells how the cost of recomputing grows with position, a hit is worth the cost that it saves ([`costs`]).
//!
//! Memory: at most 24 bytes a cached chunk, 20 to 30 bytes a ghost (with half as many ghosts as chunks), and a megabyte.

mod candidates;
mod clocks;
mod costs;
mod duels;
mod kinds;
mod lessons;
mod past;
mod rival;
mod state;

use std::num::NonZeroU32;

use super::{Facts, Judge, Policy, Removal, Verdict};
use crate::store::ids::ChunkNumber;
use candidates::Candidates;
use costs::Costs;
use duels::Duels;
use kinds::{Gap, Kind};
use lessons::{Idle, Lessons};
use past::{Ghost, Past};
use rival::Rival;
use state::{ChunkState, Moment, State, UNIT_MS};

/// Learns the worth of chunks, and evicts the chunk with the least.
#[derive(Debug)]
pub(super) struct Adaptive {
    costs: Costs,
    state: State,
    past: Past,
    lessons: Lessons,
    rival: Rival,
    duels: Duels,
    /// Searches for victims since the last duel began.
    searches: usize,
    candidates: Candidates,
    /// The chunk that was unblocked last.
    unblocked: Option<ChunkNumber>,
    /// Chunks of one commit, last to first, whose kinds are not known yet.
    entering: Entering,
    /// The chunks of a prompt that are being used, last to first.
    streak: Option<Streak>,
    now: Moment,
    learned_at: Moment,
    /// The count of uses when the candidates were last appraised.
    appraised_at: u32,
    /// A chunk is in the sample of rival and duels if this many of the lowest bits of its hash are 0.
    rival_bits: u32,
    /// A chunk is in the sample if this many of the lowest bits of its hash are 0.
    sample_bits: u32,
    draws: Draws,
}

/// New chunks of one prompt.
#[derive(Debug, Default)]
struct Entering {
    chunks: Vec<ChunkNumber>,
    /// The chunk before the first entering chunk.
    behind: Option<ChunkNumber>,
}

/// Chunks of one prompt that are used one after the other.
#[derive(Debug, Clone, Copy)]
struct Streak {
    /// The index of the chunk that was used last.
    index: u16,
    wall: u32,
    gap: Gap,
}

/// A source of chance that always starts from the same seed (Marsaglia's xorshift, J. Stat. Soft. 2003).
#[derive(Debug)]
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * end as u128) >> 64) as usize
    }
}

impl Adaptive {
    /// An empty policy. Behind this many chunks, recomputing a chunk costs twice as much as recomputing the first chunk of a
    /// prompt. If `None`, all chunks cost the same.
    pub(super) fn policy(recompute_doubles_at: Option<NonZeroU32>) -> Box<dyn Policy> {
        Box::new(Self {
            costs: Costs::new(recompute_doubles_at),
            state: State::default(),
            past: Past::default(),
            lessons: Lessons::default(),
            rival: Rival::default(),
            duels: Duels::default(),
            searches: 0,
            candidates: Candidates::default(),
            unblocked: None,
            entering: Entering::default(),
            streak: None,
            now: Moment::default(),
            learned_at: Moment::default(),
            appraised_at: 0,
            sample_bits: 0,
            rival_bits: 0,
            draws: Draws(SEED),
        })
    }
}

impl Policy for Adaptive {
    fn is_now(&mut self, now_ms: u64) {
        let wall = (now_ms / UNIT_MS) as u32;
        if wall != self.now.wall {
            // The kinds of entered chunks depend on the time at which they entered.
            self.settle();
            self.now.wall = wall;
        }
    }

    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        let index = facts.index as u16;
        let goes_on = |&last: &ChunkNumber| self.state.node(last).index == index.wrapping_add(1);
        if !self.entering.chunks.last().is_some_and(goes_on) {
            self.settle();
        }
        self.count();
        let kind = Kind::FIRST.with_cost_band(self.costs.band(facts.index));
        let hash = facts.short_hash as u32;
        self.state.insert(chunk, ChunkState::new(self.now, hash, index, kind));
        self.entering.chunks.push(chunk);
        self.entering.behind = facts.parent;
        self.learn();
    }

    fn was_idle(&mut self, chunk: ChunkNumber, idle_ms: u64) {
        let ChunkState { hash, kind, .. } = *self.state.node(chunk);
        if self.entering.chunks.pop_if(|last| *last == chunk).is_some() {
            // The chunk was not used. So its ghost teaches nothing, but still tells the chunk's kind.
            let kind = self.past.take(hash).map_or(kind, |ghost| ghost.kind);
            self.state.node_mut(chunk).kind = kind;
            self.entering.behind = Some(chunk);
        }
        let wall = (idle_ms / UNIT_MS).min(u64::from(LONGEST_IDLE)) as u32;
        let uses = (f64::from(wall) * self.lessons.uses_in_a_unit()).min(f64::from(LONGEST_IDLE)) as u32;
        let used = Moment { wall: self.now.wall.wrapping_sub(wall), uses: self.now.uses.wrapping_sub(uses) };
        self.state.node_mut(chunk).used = used;
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.settle();
        self.count();
        let ChunkState { used, hash, index, kind, .. } = *self.state.node(chunk);
        let age = self.now.since(used);
        let gap = match self.streak {
            Some(run) if run.index == index.wrapping_add(1) && run.wall == self.now.wall => run.gap,
            _ => {
                self.request_ends();
                Gap::of_ms(u64::from(age.wall) * UNIT_MS)
            }
        };
        self.streak = Some(Streak { index, wall: self.now.wall, gap });
        self.used_again(hash, Ghost { kind, used });
        if self.is_rivals(hash) {
            self.rival.count(true, self.rival.has(hash));
            self.rival.hit(hash);
            self.duels.used(hash);
        }
        let node = self.state.node_mut(chunk);
        node.used = self.now;
        node.kind = kind.used(gap);
        self.learn();
    }

    fn remove(&mut self, chunk: ChunkNumber, why: Removal) {
        self.settle();
        let ChunkState { used, hash, kind, .. } = self.state.remove(chunk);
        if why == Removal::Evicted {
            self.past.add(hash, Ghost { kind, used }, self.now, self.state.len());
        }
    }

    fn block(&mut self, chunk: ChunkNumber) {
        self.state.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkNumber) {
        self.state.unblock(chunk);
        self.unblocked = Some(chunk);
    }

    fn victim(&mut self, judge: Judge<'_>) -> Option<ChunkNumber> {
        self.settle();
        self.search_for_a_duel();
        self.look();
        let mut seen = 0;
        while let Some(chunk) = self.candidates.worst(seen) {
            match judge(chunk) {
                Verdict::Take => return Some(chunk),
                Verdict::Skip => seen += 1,
                Verdict::Stop => return None,
            }
        }
        let mut others = self.state.free().iter().filter(|&&chunk| !self.candidates.has(chunk));
        let verdict = others.find_map(|&chunk| match judge(chunk) {
            Verdict::Take => Some(Some(chunk)),
            Verdict::Skip => None,
            Verdict::Stop => Some(None),
        });
        verdict.flatten()
    }

    fn order(&self) -> Vec<ChunkNumber> {
        let mut order: Vec<(u32, ChunkNumber)> =
            self.state.iter().map(|(chunk, node)| (self.now.since(node.used).uses, chunk)).collect();
        order.sort_unstable_by_key(|&(age, _)| std::cmp::Reverse(age));
        order.into_iter().map(|(_, chunk)| chunk).collect()
    }
}

impl Adaptive {
    /// Counts a use.
    fn count(&mut self) {
        self.now.uses = self.now.uses.wrapping_add(1);
    }

    /// Finds the kinds of the chunks that entered: for a whole commit at once, because its last chunk comes first.
    fn settle(&mut self) {
        let mut entering = std::mem::take(&mut self.entering.chunks);
        if entering.is_empty() {
            return;
        }
        self.streak = None;
        let behind = self.entering.behind.take().and_then(|chunk| self.state.known(chunk));
        let mut kind = behind.map_or(Kind::FIRST, |node| node.kind.behind());
        let ghost = entering.iter().find_map(|&chunk| self.past.get(self.state.node(chunk).hash));
        if let Some(Ghost { kind: ghost, used }) = ghost {
            kind = kind.after(ghost, Gap::of_ms(u64::from(self.now.since(used).wall) * UNIT_MS));
        }
        for &chunk in &entering {
            let hash = self.state.node(chunk).hash;
            if self.is_rivals(hash) {
                self.rival.count(false, self.rival.has(hash));
            }
        }
        for (place, &chunk) in entering.iter().enumerate() {
            let ChunkState { hash, kind: entered, .. } = *self.state.node(chunk);
            let mut kind = kind.with_last(place == 0).with_cost_band(entered.cost_band());
            if self.is_rivals(hash) {
                self.rival.used(hash);
                self.duels.used(hash);
            }
            if let Some(ghost) = self.past.take(hash) {
                self.used_again(hash, ghost);
                kind = kind.used_before(ghost.kind.uses());
            }
            self.state.node_mut(chunk).kind = kind;
        }
        self.request_ends();
        entering.clear();
        self.entering.chunks = entering;
    }

    /// Notes that the hits and the new chunks of a request are known.
    fn request_ends(&mut self) {
        self.rival.request_ends(self.most_sampled());
        self.duels.request_ends();
    }

    /// Notes another use of a chunk that was used before.
    fn used_again(&mut self, hash: u32, Ghost { kind, used }: Ghost) {
        if !self.is_sampled(hash) {
            return;
        }
        let age = self.now.since(used);
        self.expose(kind, age);
        self.lessons.used(kind, age, self.is_idle(age));
    }

    /// Notes that a chunk of this age was not used since the policy learned last.
    #[inline]
    fn expose(&mut self, kind: Kind, age: Moment) {
        let since = self.now.since(self.learned_at);
        let from = |age: u32, since: u32| age.saturating_sub(since);
        let from = Moment { wall: from(age.wall, since.wall), uses: from(age.uses, since.uses) };
        self.lessons.exposed(kind, from, age);
    }

    /// About the number of cached chunks that are in the rival's sample.
    fn most_sampled(&self) -> usize {
        self.state.len() >> self.rival_bits
    }

    fn is_rivals(&self, hash: u32) -> bool {
        hash.trailing_zeros() >= self.rival_bits
    }

    fn is_sampled(&self, hash: u32) -> bool {
        hash.trailing_zeros() >= self.sample_bits
    }

    /// Whether a chunk of this age is idle: since its last use, there were at least half as many uses as there are cached chunks.
    fn is_idle(&self, age: Moment) -> bool {
        age.uses as usize >= self.state.len() / 2
    }

    /// From time to time, counts the ages of a sample of cached and remembered chunks, and learns from them.
    fn learn(&mut self) {
        let known = self.state.len() + self.past.len();
        let passed = self.now.since(self.learned_at);
        if passed.uses < ((known / LOOKS_A_LIFETIME) as u32).max(LEAST_INTERVAL) {
            return;
        }
        self.settle();
        let mut sampled = Vec::new();
        let mut sample = |hash: u32, kind: Kind, used: Moment| {
            if self.is_sampled(hash) {
                sampled.push(Ghost { kind, used });
            }
        };
        self.state.iter().for_each(|(_, node)| sample(node.hash, node.kind, node.used));
        self.past.iter().for_each(|(hash, ghost)| sample(hash, ghost.kind, ghost.used));
        let mut idle = Idle::default();
        for Ghost { kind, used } in sampled {
            let age = self.now.since(used);
            self.expose(kind, age);
            if self.is_idle(age) {
                self.lessons.count_idle(kind, age, &mut idle);
            }
        }
        let lead = self.rival.lead(f64::from(passed.uses >> self.rival_bits), self.most_sampled());
        self.lessons.learn(passed, &idle, self.state.len(), lead, self.duels.lead_of_recency());
        self.learned_at = self.now;
        let bits = |chunks: usize| (chunks / SAMPLE).checked_ilog2().map_or(0, |bits| bits + 1);
        self.sample_bits = bits(known);
        let bits = bits(self.state.len());
        if bits != self.rival_bits {
            self.rival_bits = bits;
            self.rival.retain(|hash| hash.trailing_zeros() >= bits);
        }
        self.candidates.clear();
    }

    /// From time to time, draws chunks of the sample for a duel.
    fn search_for_a_duel(&mut self) {
        let free = self.state.free().len();
        self.searches += 1;
        if free < 2 || self.searches < (self.state.len() / DUELS_A_LIFETIME).max(LEAST_SEARCHES) {
            return;
        }
        self.searches = 0;
        let (mut least, mut oldest) = ((f32::MAX, 0), (0, 0));
        for _ in 0..DRAWN << self.rival_bits {
            let place = self.draws.below(free);
            let ChunkState { used, hash, kind, .. } = *self.state.node(self.state.free()[place]);
            if !self.is_rivals(hash) {
                continue;
            }
            let age = self.now.since(used);
            let worth = self.lessons.learned(kind, age);
            if worth < least.0 {
                least = (worth, hash);
            }
            if age.uses >= oldest.0 {
                oldest = (age.uses, hash);
            }
        }
        self.duels.start(least.1, oldest.1);
    }

    /// Looks for chunks that are worth little.
    fn look(&mut self) {
        let free = self.state.free().len();
        if free <= candidates::MOST {
            self.candidates.clear();
            (0..free).for_each(|place| self.see(self.state.free()[place]));
            return;
        }
        self.candidates.refresh(&self.state);
        let age = self.now.uses.wrapping_sub(self.appraised_at) as usize;
        if age * APPRAISALS_A_LIFETIME > self.state.len() {
            let mut candidates = std::mem::take(&mut self.candidates);
            candidates.appraise(|chunk| self.worth(chunk));
            self.candidates = candidates;
            self.appraised_at = self.now.uses;
        }
        if let Some(chunk) = self.unblocked.take()
            && self.state.known(chunk).is_some()
            && self.state.is_free(chunk)
        {
            self.see(chunk);
        }
        let looks = if self.candidates.len() < LOOKS { FIRST_LOOKS } else { LOOKS };
        for _ in 0..looks {
            let place = self.draws.below(free);
            self.see(self.state.free()[place]);
        }
    }

    fn see(&mut self, chunk: ChunkNumber) {
        self.candidates.see(chunk, self.state.node(chunk).used.uses, self.worth(chunk));
    }

    fn worth(&self, chunk: ChunkNumber) -> f32 {
        let ChunkState { used, kind, .. } = *self.state.node(chunk);
        self.lessons.worth(kind, self.now.since(used)) * Costs::of_band(kind.cost_band())
    }
}

/// How often the policy learns during as many uses as there are cached or remembered chunks, and the least number of uses between
/// two such times.
const LOOKS_A_LIFETIME: usize = 16;
const LEAST_INTERVAL: u32 = 1_024;

/// The most chunks in a sample.
const SAMPLE: usize = 40_000;

/// Number of times that candidates are appraised again during as many uses as there are cached chunks.
const APPRAISALS_A_LIFETIME: usize = 32;

/// The most duels that begin during as many evictions as there are cached chunks, the least number of searches between two duels,
/// and the number of chunks of the sample that are drawn for a duel.
const DUELS_A_LIFETIME: usize = 1_024;
const LEAST_SEARCHES: usize = 4;
const DRAWN: usize = 32;

/// Random chunks that a search looks at, beside the candidates that it knows. If it knows few, it looks at `FIRST_LOOKS`.
const LOOKS: usize = 8;
const FIRST_LOOKS: usize = 64;

/// The longest time for which a chunk counts as idle when it comes, on each clock: far below the time after which a clock wraps
/// around.
const LONGEST_IDLE: u32 = 1 << 30;

const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests;
