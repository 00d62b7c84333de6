//! The pace: bounds the rate at which a node sends blocks, to all peers together.

use std::num::NonZeroU64;
use std::time::Duration;

/// A rate limit in bytes a second. Pieces pass in the order of asking, so that streams share the rate.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: Option<NonZeroU64>,
    /// The time at which all pieces that may go so far are sent, at this rate.
    over: Duration,
}

impl Pace {
    /// A pace; no limit if `None`.
    pub(super) fn new(bytes_per_second: Option<NonZeroU64>) -> Self {
        Self { bytes_per_second, over: Duration::ZERO }
    }

    /// Sets another limit, from the next piece on: it does not wait for the pieces that have their turns by the old limit.
    pub fn set(&mut self, bytes_per_second: Option<NonZeroU64>) {
        (self.bytes_per_second, self.over) = (bytes_per_second, Duration::ZERO);
    }

    /// The time for which a piece waits before it goes. A sender that stops waiting still uses its turn. Up to `MADE_UP` of the
    /// time in which nothing was sent is made up for, since timers are late.
    pub fn pause(&mut self, now: Duration, bytes: u64) -> Duration {
        let Some(bytes_per_second) = self.bytes_per_second else { return Duration::ZERO };
        let turn = self.over.max(now.saturating_sub(MADE_UP));
        let takes = u128::from(bytes) * NANOSECONDS / u128::from(bytes_per_second.get());
        self.over = turn.saturating_add(Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX)));
        turn.saturating_sub(now)
    }
}

const MADE_UP: Duration = Duration::from_millis(5);

const NANOSECONDS: u128 = 1_000_000_000;
