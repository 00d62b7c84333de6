//! A clock that may go fast or slow, and never jumps.

use std::time::Duration;

/// The clock of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    /// When the clock's rate last changed, and what the clock showed then.
    since: Duration,
    shown: Duration,
    rate: f64,
}

impl Clock {
    /// A clock that shows zero at `now`.
    pub(crate) fn new(now: Duration, rate: f64) -> Self {
        Self { since: now, shown: Duration::ZERO, rate }
    }

    /// The time that the clock shows.
    pub(crate) fn shows(&self, now: Duration) -> Duration {
        self.shown + (now - self.since).mul_f64(self.rate)
    }

    /// The time until the clock shows `after` more.
    pub(crate) fn takes(&self, after: Duration) -> Duration {
        after.div_f64(self.rate)
    }

    /// Changes the clock's rate from now on.
    pub(crate) fn drift(&mut self, now: Duration, rate: f64) {
        *self = Self { since: now, shown: self.shows(now), rate };
    }
}
