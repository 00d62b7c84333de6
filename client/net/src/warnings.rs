//! Decides which warnings of a fault that lasts are logged.

use std::collections::BTreeMap;
use std::time::Duration;

/// The subjects of warnings, each with the time of its last warning. A subject is logged once a minute, whatever others are logged
/// meanwhile.
#[derive(Debug, Default)]
pub struct Warnings(BTreeMap<String, Duration>);

impl Warnings {
    /// Whether to log a warning about this subject now: the first time, and again after a minute. Beyond 1,024 subjects in a
    /// minute, new subjects are not logged.
    pub fn may_warn(&mut self, now: Duration, about: &str) -> bool {
        self.0.retain(|_, said| now.saturating_sub(*said) < WARN_AGAIN);
        if self.0.contains_key(about) || self.0.len() >= MOST_SUBJECTS {
            return false;
        }
        self.0.insert(about.to_owned(), now);
        true
    }

    /// The faults are over: the next warning of each is logged at once.
    pub fn are_over(&mut self) {
        self.0.clear();
    }
}

const WARN_AGAIN: Duration = Duration::from_secs(60);

const MOST_SUBJECTS: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_that_alternate_are_logged_once_a_minute_each() {
        let mut warnings = Warnings::default();
        let logged = |warnings: &mut Warnings, seconds: std::ops::Range<u64>, about| {
            seconds.filter(|&at| warnings.may_warn(Duration::from_secs(at), about)).count()
        };
        let mut both = [0, 0];
        for at in 0..120 {
            both[0] += logged(&mut warnings, at..at + 1, "the cluster is full");
            both[1] += logged(&mut warnings, at..at + 1, "no coordinator leads");
        }
        assert_eq!(both, [2, 2]);
        warnings.are_over();
        assert_eq!(logged(&mut warnings, 120..125, "the cluster is full"), 1);
    }

    #[test]
    fn a_flood_of_subjects_is_bounded() {
        let mut warnings = Warnings::default();
        let logged = |warnings: &mut Warnings, at| {
            (0..5_000).filter(|subject| warnings.may_warn(at, &subject.to_string())).count()
        };
        assert_eq!(logged(&mut warnings, Duration::ZERO), MOST_SUBJECTS);
        assert_eq!(logged(&mut warnings, WARN_AGAIN), MOST_SUBJECTS);
    }
}
