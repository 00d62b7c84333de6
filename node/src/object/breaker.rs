//! Decides when a failing store is left alone, separately for reading and for writing.
//!
//! Pure: the breaker is told the results of requests, and says whether the next request may be made.

use std::time::Duration;

/// Counts failures in a row. After [`MOST_FAILURES`] failures, or one silence, the breaker is open: the store gets only one
/// trial request every [`RETRY_EVERY`]. The first trial that succeeds closes the breaker. Failures are forgotten
/// when the last of them is [`FORGOTTEN_AFTER`] old: many answers prove neither that a store works nor that it fails.
#[derive(Debug, Clone, Copy, Default)]
pub struct Breaker {
    failures: u32,
    last_failure: Duration,
    trial_at: Option<Duration>,
}

impl Breaker {
    /// Whether the store is left alone.
    pub fn is_open(&self) -> bool {
        self.trial_at.is_some()
    }

    /// When the next trial is due; `None` if the breaker is closed.
    pub fn trial_at(&self) -> Option<Duration> {
        self.trial_at
    }

    /// Notes that the store did its work, or properly said that it has no such object. Returns whether this closed the breaker.
    pub fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.trial_at.take().is_some()
    }

    /// Notes that the store failed at `now`. Returns whether this opened the breaker.
    pub fn failed(&mut self, now: Duration) -> bool {
        if now.saturating_sub(self.last_failure) >= FORGOTTEN_AFTER {
            self.failures = 0;
        }
        self.last_failure = now;
        self.failures = self.failures.saturating_add(1);
        // Requests that were under way when the breaker opened, and fail later, do not postpone the trial.
        let opens = self.failures >= MOST_FAILURES && !self.is_open();
        if opens {
            self.trial_at = Some(now + RETRY_EVERY);
        }
        opens
    }

    /// As [`Breaker::failed`], of a store that refused a request: it may have refused one object, so the first trial is due at once.
    pub fn refused(&mut self, now: Duration) -> bool {
        let opens = self.failed(now);
        if opens {
            self.trial_at = Some(now);
        }
        opens
    }

    /// Notes that the store was silent for as long as anybody waits: it is left alone from `now` on, and tried again at once.
    /// Returns whether this opened the breaker.
    pub fn went_silent(&mut self, now: Duration) -> bool {
        let opens = !self.is_open();
        if opens {
            self.failures = MOST_FAILURES;
            self.trial_at = Some(now);
        }
        opens
    }

    /// Puts the next trial off until `until` at least, as the store asked.
    pub fn waits_until(&mut self, until: Duration) {
        self.trial_at = self.trial_at.map(|at| at.max(until));
    }

    /// Notes that a trial failed at `now`: the next trial is due later.
    pub fn trial_failed(&mut self, now: Duration) {
        if self.is_open() {
            self.trial_at = Some(now + RETRY_EVERY);
        }
    }
}

/// Failures in a row, each after all its retries, that open the breaker.
pub const MOST_FAILURES: u32 = 4;

/// The age of the last failure at which all are forgotten.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(300);

/// The time between two trials of a store that is left alone.
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
    fn failures_that_are_far_apart_do_not_open_it() {
        let mut breaker = Breaker::default();
        for number in 1..100 {
            assert!(!breaker.failed(number * FORGOTTEN_AFTER));
        }
        let last = 100 * FORGOTTEN_AFTER - Duration::from_secs(1);
        assert!(!breaker.failed(last) && !breaker.failed(last) && breaker.failed(last));
    }

    #[test]
    fn refusals_in_a_row_open_it_and_the_first_trial_is_due_at_once() {
        let mut breaker = Breaker::default();
        let now = Duration::from_secs(9);
        (1..MOST_FAILURES).for_each(|_| assert!(!breaker.refused(now)));
        assert!(breaker.refused(now) && !breaker.refused(now + RETRY_EVERY));
        assert_eq!(breaker.trial_at(), Some(now));
    }

    #[test]
    fn a_store_that_asks_for_a_pause_is_tried_after_it() {
        let mut breaker = Breaker::default();
        breaker.waits_until(9 * RETRY_EVERY);
        assert!(!breaker.is_open());
        (0..MOST_FAILURES).for_each(|_| _ = breaker.failed(Duration::ZERO));
        breaker.waits_until(9 * RETRY_EVERY);
        assert_eq!(breaker.trial_at(), Some(9 * RETRY_EVERY));
        breaker.waits_until(2 * RETRY_EVERY);
        assert_eq!(breaker.trial_at(), Some(9 * RETRY_EVERY));
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
