//! Decides when a failing store is left alone, reading and writing apart.
//!
//! Pure: it is told the results of requests, and says whether the next may be made.

use std::time::Duration;

/// Counts failures in a row. After [`MOST_FAILURES`] of them, or one silence, it is open: nothing is asked of the store but one
/// trial every [`RETRY_EVERY`], and the first that succeeds closes it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Breaker {
    failures: u32,
    trial_at: Option<Duration>,
}

impl Breaker {
    /// Whether the store is left alone.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.trial_at.is_some()
    }

    /// When the next trial is due; `None` if it is closed.
    #[must_use]
    pub fn trial_at(&self) -> Option<Duration> {
        self.trial_at
    }

    /// The store did its work, or said properly that it has no such object. Returns whether this closed the breaker.
    pub fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.trial_at.take().is_some()
    }

    /// The store failed at `now`. Whether this opened the breaker.
    pub fn failed(&mut self, now: Duration) -> bool {
        self.failures = self.failures.saturating_add(1);
        // What was under way when it opened, and fails later, puts no trial off.
        let opens = self.failures >= MOST_FAILURES && !self.is_open();
        if opens {
            self.trial_at = Some(now + RETRY_EVERY);
        }
        opens
    }

    /// The store said nothing at all for as long as anybody waits for it: it is left alone from `now` on, and tried again at
    /// once. Whether this opened the breaker.
    pub fn went_silent(&mut self, now: Duration) -> bool {
        let opens = !self.is_open();
        if opens {
            self.failures = MOST_FAILURES;
            self.trial_at = Some(now);
        }
        opens
    }

    /// A trial failed at `now`: the next is due later.
    pub fn trial_failed(&mut self, now: Duration) {
        if self.is_open() {
            self.trial_at = Some(now + RETRY_EVERY);
        }
    }
}

/// Failures in a row, each after all its retries, that open it.
pub const MOST_FAILURES: u32 = 4;

/// Between two trials of a store that is left alone.
pub const RETRY_EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_in_a_row_open_it_and_a_success_between_them_does_not() {
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            (1..MOST_FAILURES).for_each(|_| assert!(!breaker.failed(Duration::ZERO)));
            assert!(!breaker.succeeded());
        }
        (1..MOST_FAILURES).for_each(|_| assert!(!breaker.failed(Duration::ZERO)));
        assert!(breaker.failed(Duration::from_secs(1)), "opened once");
        assert!(!breaker.failed(Duration::from_secs(3)), "and not again");
        assert_eq!(breaker.trial_at(), Some(Duration::from_secs(1) + RETRY_EVERY));
    }

    #[test]
    fn one_silence_opens_it_and_the_first_trial_is_due_at_once() {
        let mut breaker = Breaker::default();
        let now = Duration::from_secs(9);
        assert!(breaker.went_silent(now) && !breaker.went_silent(now + RETRY_EVERY));
        assert_eq!(breaker.trial_at(), Some(now));
        breaker.trial_failed(now);
        assert_eq!(breaker.trial_at(), Some(now + RETRY_EVERY));
    }

    #[test]
    fn a_trial_that_succeeds_closes_it_and_one_that_fails_puts_the_next_off() {
        let mut breaker = Breaker::default();
        (0..MOST_FAILURES).for_each(|_| assert!(breaker.failed(Duration::ZERO) == breaker.is_open()));
        breaker.trial_failed(RETRY_EVERY);
        assert_eq!(breaker.trial_at(), Some(2 * RETRY_EVERY));
        assert!(breaker.succeeded());
        assert!(!breaker.is_open());
        assert!(!breaker.failed(Duration::ZERO), "it counts from the beginning");
    }
}
