//! The worth of a chunk: the time that it saves, for each byte that it takes and each second that it is held.
//!
//! Engines of one model compute a token in about the same time. So tokens of prefill stand for that time, and a chunk whose
//! tokens need few bytes is worth more than a chunk whose tokens need many. A chunk that nobody used for a time is expected to be
//! used once in that time: its recency gives this estimate at no cost.

/// Millionths of a token of prefill saved for each GiB and second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Worth(pub u64);

/// The work that a use of a chunk saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saves {
    /// The chunk's prefill: no other node has the chunk.
    Prefill,
    /// The chunk's transfer: another node has the chunk, or the node's own disk.
    Transfer,
}

/// A chunk's tokens, and the bytes that they take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stake {
    /// The chunk's tokens.
    pub tokens: u32,
    /// Bytes of the chunk's blocks.
    pub bytes: u64,
}

/// How much a store needs room, smoothed over its last evictions.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pressure(Option<Evicted>);

#[derive(Debug, Clone, Copy)]
struct Evicted {
    /// Tokens that a use of the evicted chunks would save, for each GiB.
    tokens: f64,
    /// For how long nobody had used the evicted chunks.
    idle_ms: f64,
    /// When the last chunk was evicted.
    at_ms: u64,
}

impl Worth {
    /// The worth of free room.
    pub const NOTHING: Self = Self(0);

    fn of(tokens: f64, every_ms: f64) -> Self {
        Self((tokens * 1e9 / every_ms.max(1.0)) as u64)
    }
}

impl Stake {
    /// The worth of a chunk that is used once in `every_ms`.
    pub fn worth(self, saves: Saves, every_ms: u64) -> Worth {
        Worth::of(self.tokens(saves), every_ms as f64)
    }

    /// The time in which a chunk of this worth is used once.
    pub fn every_ms(self, saves: Saves, worth: Worth) -> u64 {
        (self.tokens(saves) * 1e9 / worth.0.max(1) as f64) as u64
    }

    fn tokens(self, saves: Saves) -> f64 {
        let share = match saves {
            Saves::Prefill => 1.0,
            Saves::Transfer => TRANSFER_SHARE,
        };
        f64::from(self.tokens) * share * GIB / self.bytes.max(1) as f64
    }
}

impl Pressure {
    /// Notes that a chunk was evicted that nobody used for `idle_ms`.
    pub fn evicted(&mut self, stake: Stake, saves: Saves, idle_ms: u64, now_ms: u64) {
        let (tokens, idle_ms) = (stake.tokens(saves), idle_ms as f64);
        let Some(Evicted { tokens: mean_tokens, idle_ms: mean_ms, at_ms }) = &mut self.0 else {
            self.0 = Some(Evicted { tokens, idle_ms, at_ms: now_ms });
            return;
        };
        *mean_tokens += (tokens - *mean_tokens) * NEWEST_SHARE;
        *mean_ms += (idle_ms - *mean_ms) * NEWEST_SHARE;
        *at_ms = now_ms;
    }

    /// How long the store keeps a chunk that nobody uses; `None` before the first eviction. The time grows while nothing is
    /// evicted.
    pub fn keeps_ms(&self, now_ms: u64) -> Option<u64> {
        self.0.map(|last| last.idle_ms as u64 + now_ms.saturating_sub(last.at_ms))
    }

    /// The worth of the chunk that goes next; `None` before the first eviction.
    pub fn least(&self, now_ms: u64) -> Option<Worth> {
        let keeps_ms = self.keeps_ms(now_ms)?;
        self.0.map(|last| Worth::of(last.tokens, keeps_ms as f64))
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

/// The time of a transfer, as a share of the time of the prefill of the same tokens: about a tenth, from the network and from a
/// drive. Routers give tokens that must be moved the same weight.
const TRANSFER_SHARE: f64 = 0.1;

/// The weight of the last eviction: one long prompt that displaces a fifth of a small cache shows at once.
const NEWEST_SHARE: f64 = 1.0 / 16.0;

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: Stake = Stake { tokens: 512, bytes: 16 << 20 };

    #[test]
    fn worth_grows_with_tokens_and_uses_and_falls_with_bytes() {
        let worth = CHUNK.worth(Saves::Prefill, 1_000);
        assert_eq!(worth, Worth(512 * 64 * 1_000_000));
        assert!(Stake { tokens: 1_024, ..CHUNK }.worth(Saves::Prefill, 1_000) > worth);
        assert!(Stake { bytes: 32 << 20, ..CHUNK }.worth(Saves::Prefill, 1_000) < worth);
        assert!(CHUNK.worth(Saves::Prefill, 500) > worth);
        assert_eq!(CHUNK.worth(Saves::Transfer, 100), worth);
    }

    #[test]
    fn a_worth_tells_how_often_its_chunk_is_used() {
        for every_ms in [1, 1_000, 3_600_000] {
            let worth = CHUNK.worth(Saves::Prefill, every_ms);
            assert!(CHUNK.every_ms(Saves::Prefill, worth).abs_diff(every_ms) <= 1);
        }
    }

    #[test]
    fn no_chunk_is_out_of_the_units_range() {
        let least = Stake { tokens: 16, bytes: 1 << 30 }.worth(Saves::Transfer, 1_000 * 3_600 * 24);
        assert!(least > Worth::NOTHING);
        let most = Stake { tokens: 512, bytes: 512 }.worth(Saves::Prefill, 0);
        assert!(most < Worth(u64::MAX / 4));
    }

    #[test]
    fn pressure_follows_the_last_evictions_and_falls_while_nothing_is_evicted() {
        let mut pressure = Pressure::default();
        assert_eq!((pressure.least(9), pressure.keeps_ms(9)), (None, None));
        pressure.evicted(CHUNK, Saves::Prefill, 1_000, 0);
        assert_eq!(pressure.least(0), Some(CHUNK.worth(Saves::Prefill, 1_000)));
        assert_eq!(pressure.least(1_000), Some(CHUNK.worth(Saves::Prefill, 2_000)));
        (0..100).for_each(|_| pressure.evicted(CHUNK, Saves::Prefill, 3_000, 0));
        assert!((2_950..=3_000).contains(&pressure.keeps_ms(0).unwrap()));
    }
}
