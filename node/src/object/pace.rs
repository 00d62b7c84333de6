//! Decides how many uploads may be under way, as congestion control does.
//!
//! Pure: the pace is told how uploads end.

use std::time::Duration;

/// Uploads share a link: if too many are under way, none of them ends in time, and all their bytes were sent in vain. So uploads
/// that take too long halve the number. A round of uploads that take less than half of their time adds one to it.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    most: f64,
    allowed: f64,
    /// When the number was halved last. Uploads from before say nothing of the present number.
    halved: Duration,
}

impl Pace {
    /// Allows `most` uploads at first, and never more.
    pub fn new(most: usize) -> Self {
        let most = most.max(1) as f64;
        Self { most, allowed: most, halved: Duration::ZERO }
    }

    /// How many uploads may be under way.
    pub fn allowed(&self) -> usize {
        self.allowed as usize
    }

    /// Notes that an upload took `took` of the time that it had, while `under_way` uploads were under way.
    pub fn succeeded(&mut self, took: Duration, had: Duration, under_way: usize) {
        // Fewer uploads than may be tell nothing of more.
        if took < had / 2 && under_way >= self.allowed() {
            self.allowed = (self.allowed + 1.0 / self.allowed).min(self.most);
        }
    }

    /// Notes that an upload that began at `began` came to no end in time, or that the store asked for fewer.
    pub fn was_too_slow(&mut self, began: Duration, now: Duration) {
        if began >= self.halved {
            self.allowed = (self.allowed / 2.0).max(1.0);
            self.halved = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn uploads_that_fail_together_halve_the_number_once() {
        let mut pace = Pace::new(16);
        (0..16).for_each(|_| pace.was_too_slow(SECOND, 6 * SECOND));
        assert_eq!(pace.allowed(), 8);
        pace.was_too_slow(6 * SECOND, 11 * SECOND);
        assert_eq!(pace.allowed(), 4);
        (11..20).for_each(|second| pace.was_too_slow(second * SECOND, (second + 1) * SECOND));
        assert_eq!(pace.allowed(), 1, "one may always be under way");
    }

    #[test]
    fn a_round_of_quick_uploads_adds_one_and_slow_or_few_uploads_add_none() {
        let mut pace = Pace::new(4);
        pace.was_too_slow(SECOND, 6 * SECOND);
        assert_eq!(pace.allowed(), 2);
        (0..100).for_each(|_| pace.succeeded(3 * SECOND, 5 * SECOND, 2));
        (0..100).for_each(|_| pace.succeeded(SECOND, 5 * SECOND, 1));
        assert_eq!(pace.allowed(), 2);
        (0..3).for_each(|_| pace.succeeded(SECOND, 5 * SECOND, 2));
        assert_eq!(pace.allowed(), 3);
        (0..100).for_each(|_| pace.succeeded(SECOND, 5 * SECOND, 9));
        assert_eq!(pace.allowed(), 4, "and never more than at first");
    }
}
