//! Estimates the hits of an infinite cache in a namespace, beside the real hits, over sliding windows.
//!
//! A chunk that no node has, and that comes for the first time within the window, is a miss even for an infinite cache. Every
//! later lookup of the chunk would be a hit, since a chunk's hash names its whole prefix. So an infinite cache misses only the
//! distinct missed chunks, which HyperLogLog counts (Flajolet et al. 2007). If its hit rate is close to the real hit rate, more
//! memory buys nothing.
//!
//! A node counts its own lookups, and a chunk that it finds at another node counts as a hit. So the tokens of all nodes can be
//! added: the sum is the cluster's, and never less than the real hits. A chunk that is missed at two nodes counts twice as new,
//! so the sum may be too low.
//!
//! Time is cut into slots. A window is the present slot and a number of whole slots before it.

use std::collections::VecDeque;
use std::ops::AddAssign;

use cardinality_estimator::CardinalityEstimator;
use larder_core::Millis;
use larder_protocol::ChunkHash;

/// The lookups of one namespace, slot by slot.
#[derive(Debug, Default)]
pub struct ReuseWindows {
    slots: VecDeque<TimeSlot>,
}

/// The tokens of a window's lookups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tokens {
    /// Tokens of all prompts.
    pub asked: u64,
    /// Tokens that this cache had.
    pub hit: u64,
    /// Estimate of the tokens that an infinite cache would have had.
    pub reusable: u64,
}

/// A lookup, as the statistics see it.
#[derive(Debug, Clone, Copy)]
pub struct Lookup<'a> {
    /// The chunks that could have been hit: the prompt's full chunks, but always with a token left to compute.
    pub usable: &'a [ChunkHash],
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of the prompt.
    pub tokens_asked: u64,
    /// Tokens of the first chunks that were found, wherever they were.
    pub tokens_hit: u64,
}

struct TimeSlot {
    number: u64,
    tokens_asked: u64,
    tokens_hit: u64,
    /// Tokens of the usable chunks.
    tokens_usable: u64,
    chunk_tokens: u32,
    /// The chunks that were missed.
    missed: CardinalityEstimator<[u8; 32]>,
}

impl ReuseWindows {
    /// Counts a lookup.
    pub fn record(&mut self, lookup: Lookup<'_>, now: Millis) {
        let number = now.0 / SPAN_MS;
        self.forget(number);
        if self.slots.back().is_none_or(|slot| slot.number < number) {
            self.slots.push_back(TimeSlot::new(number, lookup.chunk_tokens));
        }
        let Some(slot) = self.slots.back_mut() else { return };
        slot.tokens_asked += lookup.tokens_asked;
        slot.tokens_hit += lookup.tokens_hit;
        slot.tokens_usable += lookup.usable.len() as u64 * u64::from(lookup.chunk_tokens);
        let chunks_hit = (lookup.tokens_hit / u64::from(lookup.chunk_tokens.max(1))) as usize;
        lookup.usable.iter().skip(chunks_hit).for_each(|hash| slot.missed.insert(&hash.0));
    }

    /// The tokens of a window's lookups.
    pub fn tokens(&mut self, window: Period, now: Millis) -> Tokens {
        let number = now.0 / SPAN_MS;
        self.forget(number);
        let oldest = (number + 1).saturating_sub(window.slots());
        let slots = || self.slots.iter().filter(|slot| slot.number >= oldest);
        let Some(first) = slots().next() else { return Tokens::default() };
        let mut missed = CardinalityEstimator::<[u8; 32]>::new();
        slots().for_each(|slot| missed.merge(&slot.missed));
        let usable: u64 = slots().map(|slot| slot.tokens_usable).sum();
        let fresh = missed.estimate() as u64 * u64::from(first.chunk_tokens);
        let hit = slots().map(|slot| slot.tokens_hit).sum();
        Tokens {
            asked: slots().map(|slot| slot.tokens_asked).sum(),
            hit,
            // The count of distinct chunks is an estimate, and may be too high.
            reusable: usable.saturating_sub(fresh).max(hit),
        }
    }

    /// Drops the slots that no window reaches any more.
    fn forget(&mut self, number: u64) {
        while self.slots.front().is_some_and(|slot| slot.number + Period::Hour.slots() <= number) {
            self.slots.pop_front();
        }
    }
}

impl Tokens {
    /// The fraction of all tokens that were hit; 0 if nothing was asked.
    pub fn hit_rate(&self) -> f64 {
        self.hit as f64 / self.asked.max(1) as f64
    }

    /// The fraction of all tokens that an infinite cache would have hit.
    pub fn infinite_hit_rate(&self) -> f64 {
        self.reusable as f64 / self.asked.max(1) as f64
    }
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, more: Self) {
        self.asked += more.asked;
        self.hit += more.hit;
        self.reusable += more.reusable;
    }
}

/// A sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Period {
    /// The last ten minutes.
    TenMinutes,
    /// The last hour.
    Hour,
}

impl Period {
    /// All windows.
    pub const ALL: [Self; 2] = [Self::TenMinutes, Self::Hour];

    /// The window's name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TenMinutes => "10m",
            Self::Hour => "1h",
        }
    }

    fn slots(self) -> u64 {
        match self {
            Self::TenMinutes => 600_000 / SPAN_MS,
            Self::Hour => 3_600_000 / SPAN_MS,
        }
    }
}

impl TimeSlot {
    fn new(number: u64, chunk_tokens: u32) -> Self {
        Self {
            number,
            tokens_asked: 0,
            tokens_hit: 0,
            tokens_usable: 0,
            chunk_tokens,
            missed: CardinalityEstimator::new(),
        }
    }
}

impl std::fmt::Debug for TimeSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TimeSlot")
            .field("number", &self.number)
            .field("asked", &self.tokens_asked)
            .finish_non_exhaustive()
    }
}

/// Two minutes: windows slide in steps of a fifth of the shortest window.
const SPAN_MS: u64 = 120_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(range: std::ops::Range<u64>) -> Vec<ChunkHash> {
        range.map(|n| ChunkHash(std::array::from_fn(|i| (n >> (8 * (i % 8))) as u8))).collect()
    }

    fn record(windows: &mut ReuseWindows, range: std::ops::Range<u64>, hit_chunks: u64, minute: u64) {
        let usable = hashes(range);
        let tokens_asked = usable.len() as u64 * 16;
        let lookup = Lookup { usable: &usable, chunk_tokens: 16, tokens_asked, tokens_hit: hit_chunks * 16 };
        windows.record(lookup, Millis(minute * 60_000));
    }

    fn close(left: f64, right: f64) -> bool {
        (left - right).abs() < 0.02
    }

    #[test]
    fn without_lookups_no_tokens_are_counted() {
        assert_eq!(ReuseWindows::default().tokens(Period::Hour, Millis(0)), Tokens::default());
    }

    #[test]
    fn what_comes_again_would_have_been_hit() {
        let mut windows = ReuseWindows::default();
        record(&mut windows, 0..20_000, 0, 0);
        record(&mut windows, 10_000..30_000, 1_000, 1);
        let tokens = windows.tokens(Period::TenMinutes, Millis(60_000));
        assert!(close(tokens.infinite_hit_rate(), 0.25), "{tokens:?}");
        assert!(close(tokens.hit_rate(), 0.025), "{tokens:?}");
    }

    #[test]
    fn chunks_that_another_node_had_would_have_been_hit_and_no_real_hit_is_beyond_an_infinite_cache() {
        let mut windows = ReuseWindows::default();
        record(&mut windows, 0..10_000, 7_400, 0);
        let tokens = windows.tokens(Period::TenMinutes, Millis(0));
        assert!(close(tokens.hit_rate(), 0.74) && close(tokens.infinite_hit_rate(), 0.74), "{tokens:?}");
        for seed in 0..50 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut windows = ReuseWindows::default();
            for _ in 0..random.u64(1..20) {
                let (start, chunks) = (random.u64(..1_000), random.u64(1..300));
                record(&mut windows, start..start + chunks, random.u64(..=chunks), 0);
            }
            let tokens = windows.tokens(Period::Hour, Millis(0));
            assert!(
                tokens.reusable >= tokens.hit && tokens.reusable <= tokens.asked,
                "seed {seed}: {tokens:?}"
            );
        }
    }

    #[test]
    fn a_window_forgets_what_lies_before_it() {
        let mut windows = ReuseWindows::default();
        record(&mut windows, 0..10_000, 0, 0);
        record(&mut windows, 0..10_000, 0, 30);
        let at = |minute: u64| Millis(minute * 60_000);
        let mut infinite = |window, minute| windows.tokens(window, at(minute)).infinite_hit_rate();
        assert!(close(infinite(Period::Hour, 31), 0.5));
        assert!(close(infinite(Period::TenMinutes, 31), 0.0));
        assert!(close(infinite(Period::Hour, 70), 0.0), "the first is over an hour ago");
        assert_eq!(windows.tokens(Period::Hour, at(200)), Tokens::default());
        assert!(windows.slots.is_empty());
    }

    #[test]
    fn tokens_beyond_the_usable_chunks_can_never_be_hit() {
        let mut windows = ReuseWindows::default();
        for _ in 0..2 {
            let usable = hashes(0..100);
            let lookup = Lookup { usable: &usable, chunk_tokens: 16, tokens_asked: 3_200, tokens_hit: 0 };
            windows.record(lookup, Millis(0));
        }
        assert!(close(windows.tokens(Period::Hour, Millis(0)).infinite_hit_rate(), 0.25));
    }
}
