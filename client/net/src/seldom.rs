//! Decides which lines of a flood are logged: neither strangers nor a failing drive may fill a disk with lines.

use std::time::Duration;

/// Lines with one cause, of which at most one is logged in a while.
#[derive(Debug)]
pub struct Seldom {
    every: Duration,
    said_at: Option<Duration>,
    unsaid: u64,
    /// Lines of each minute that are logged in any case.
    free: u64,
    /// The present minute, and its lines.
    minute: (u64, u64),
}

impl Seldom {
    /// At most one line is logged in this time.
    pub fn new(every: Duration) -> Self {
        Self { every, said_at: None, unsaid: 0, free: 0, minute: (0, 0) }
    }

    /// Logs the first `free` lines of each minute in any case.
    #[must_use]
    pub fn after(self, free: u64) -> Self {
        Self { free, ..self }
    }

    /// The number of lines that were left out before this line; `None` if it is left out too.
    pub fn says(&mut self, now: Duration) -> Option<u64> {
        let minute = now.as_secs() / 60;
        let lines = if self.minute.0 == minute { self.minute.1 + 1 } else { 1 };
        self.minute = (minute, lines);
        if lines > self.free && self.said_at.is_some_and(|at| now.saturating_sub(at) < self.every) {
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

    #[test]
    fn the_first_lines_of_a_minute_are_logged_though_they_come_at_once() {
        let second = Duration::from_secs(1);
        let mut seldom = Seldom::new(second).after(3);
        assert_eq!([(); 5].map(|()| seldom.says(second)), [Some(0), Some(0), Some(0), None, None]);
        assert_eq!([(); 2].map(|()| seldom.says(2 * second)), [Some(2), None]);
        assert_eq!([(); 4].map(|()| seldom.says(60 * second)), [Some(1), Some(0), Some(0), None]);
    }
}
