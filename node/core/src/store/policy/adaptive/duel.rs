//! Counts the hits that `lru` would have had, beside the real hits: the net under the learned order.

/// Chooses between the learned order and `lru`.
#[derive(Debug)]
pub(super) struct Duel {
    /// The age below which `lru` would have a chunk: as many chunks as are cached were used since.
    lru_lifetime: u64,
    /// Hits more than `lru` would have had, and all uses; both fade.
    lead: f64,
    uses: f64,
    /// `lru` is followed until then, and next time for so long.
    resumes_at: u64,
    pause: u64,
}

impl Default for Duel {
    fn default() -> Self {
        Self { lru_lifetime: u64::MAX, lead: 0.0, uses: 0.0, resumes_at: 0, pause: 0 }
    }
}

impl Duel {
    /// A chunk was used again at this age, and was cached or not.
    pub(super) fn used(&mut self, age: u64, was_hit: bool) {
        let lru_hits = age < self.lru_lifetime;
        self.lead += f64::from(i8::from(was_hit) - i8::from(lru_hits));
    }

    /// Whether the learned order has done worse than `lru` lately.
    pub(super) fn follows_lru(&self, now: u64) -> bool {
        now < self.resumes_at
    }

    /// Decides for the next interval.
    pub(super) fn learn(&mut self, now: u64, since: u64, lru_lifetime: u64, cached: usize) {
        self.lru_lifetime = lru_lifetime;
        let kept = (-(since as f64) / (MEMORY * cached.max(1)) as f64).exp();
        self.lead *= kept;
        self.uses = self.uses * kept + since as f64;
        if self.follows_lru(now) {
            // What is still cached from before counts for nobody.
            self.lead = 0.0;
        } else if self.lead < -MOST_LOST * self.uses {
            self.pause = (self.pause * 2).clamp(PAUSE * cached as u64, LONGEST_PAUSE * cached as u64);
            self.resumes_at = now + self.pause;
            self.lead = 0.0;
        } else if self.lead > MOST_LOST * self.uses {
            self.pause = 0;
        }
    }
}

/// Evidence fades after this multiple of the uses that pass as chunks are cached.
const MEMORY: usize = 16;

/// The part of all uses that may be lost to `lru` before it is followed.
const MOST_LOST: f64 = 0.02;

/// For how many times the uses that pass as chunks are cached it is followed at first, and at most.
const PAUSE: u64 = 16;
const LONGEST_PAUSE: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_loses_hits_follows_lru_for_longer_each_time() {
        let mut duel = Duel::default();
        let mut lose = |from: u64| {
            duel.learn(from, 100, 1_000, 10);
            (0..50).for_each(|_| duel.used(500, false));
            duel.learn(from + 100, 100, 1_000, 10);
            (from..).find(|&now| now > from + 100 && !duel.follows_lru(now)).map(|now| now - from - 100)
        };
        assert_eq!([lose(0), lose(1_000)], [Some(160), Some(320)]);
    }

    #[test]
    fn whoever_wins_hits_does_not() {
        let mut duel = Duel::default();
        duel.learn(100, 100, 1_000, 10);
        (0..50).for_each(|_| duel.used(5_000, true));
        (0..50).for_each(|_| duel.used(500, true));
        duel.learn(200, 100, 1_000, 10);
        assert!(!duel.follows_lru(201));
    }
}
