//! Decides which lines of a flood are logged: neither strangers nor a failing drive may fill a disk with lines.

use std::time::Duration;

/// Lines with one cause, of which at most one is logged in a while.
#[derive(Debug)]
pub struct Seldom {
    every: Duration,
    said_at: Option<Duration>,
    unsaid: u64,
}

impl Seldom {
    /// At most one line is logged in this time.
    pub fn new(every: Duration) -> Self {
        Self { every, said_at: None, unsaid: 0 }
    }

    /// The number of lines that were left out before this line; `None` if it is left out too.
    pub fn says(&mut self, now: Duration) -> Option<u64> {
        if self.said_at.is_some_and(|at| now.saturating_sub(at) < self.every) {
            self.unsaid += 1;
            return None;
        }
        self.said_at = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_flood_one_line_a_second_is_logged_and_counts_the_others() {
        let second = Duration::from_secs(1);
        let mut seldom = Seldom::new(second);
        let now = Duration::from_secs(7);
        assert_eq!(seldom.says(now), Some(0));
        assert_eq!([1, 500, 999].map(|ms| seldom.says(now + Duration::from_millis(ms))), [None; 3]);
        assert_eq!(seldom.says(now + second), Some(3));
        assert_eq!(seldom.says(now + 3 * second), Some(0));
    }
}
