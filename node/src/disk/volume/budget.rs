//! Bounds how many reads may fail before the drive counts as broken.
//!
//! Pure. Every drive loses a sector now and then. A broken drive fails again and again, and may take seconds for each read.

use std::time::Duration;

/// Counts failed reads, and forgives one every [`FORGIVEN_EVERY`].
#[derive(Debug, Default)]
pub(super) struct ReadBudget {
    failed: u32,
    /// The time up to which failures were forgiven.
    counted: Duration,
}

impl ReadBudget {
    /// Notes that a record or page could not be read at `now`; returns whether the drive is still good for others.
    pub(super) fn failed(&mut self, now: Duration) -> bool {
        let forgiven = now.saturating_sub(self.counted).div_duration_f64(FORGIVEN_EVERY) as u32;
        self.failed = self.failed.saturating_sub(forgiven);
        self.counted = if self.failed == 0 { now } else { self.counted + FORGIVEN_EVERY * forgiven };
        self.failed += 1;
        self.failed <= MOST_FAILED
    }
}

/// Unreadable records and pages before the tier closes itself. A bad block of a drive's flash costs at most 16 (8 when its
/// segment is searched, 8 when the segment is cleared), so the tier bears four bad blocks at a time. A drive that takes 2 s to
/// fail each read delays the node's reads by two minutes at most.
pub(super) const MOST_FAILED: u32 = 64;

/// The time after which one failure is forgotten: a drive with more than 144 failures a day is failing.
const FORGIVEN_EVERY: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_failures_at_a_time_are_too_many_and_as_many_over_days_are_not() {
        let mut budget = ReadBudget::default();
        assert!((0..MOST_FAILED).all(|_| budget.failed(Duration::ZERO)));
        assert!(!budget.failed(FORGIVEN_EVERY / 2));
        let mut budget = ReadBudget::default();
        assert!((0..10 * MOST_FAILED).all(|number| budget.failed(FORGIVEN_EVERY * number)));
    }

    #[test]
    fn a_quiet_month_forgives_what_was_and_nothing_that_comes() {
        let mut budget = ReadBudget::default();
        assert!((0..MOST_FAILED).all(|_| budget.failed(Duration::ZERO)));
        let later = FORGIVEN_EVERY * 5_000;
        assert!((0..MOST_FAILED).all(|_| budget.failed(later)));
        assert!(!budget.failed(later));
    }
}
