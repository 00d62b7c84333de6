//! The pauses after connections that could not be accepted, as when the process has no descriptor left.

use std::fmt::Display;
use std::time::Duration;

use larder_net::seldom::Seldom;

use crate::clock::Clock;

/// Connections to one address that could not be accepted.
pub(crate) struct NotAccepted {
    clock: Clock,
    said: Seldom,
    pause: Duration,
}

impl NotAccepted {
    pub(crate) fn new() -> Self {
        Self { clock: Clock::start(), said: Seldom::new(QUIET), pause: LEAST_PAUSE }
    }

    /// Notes that a connection to `place` could not be accepted: logs it, unless a line came lately, and returns the time to wait
    /// before the next try.
    pub(crate) fn failed(&mut self, place: &str, error: impl Display) -> Duration {
        if let Some(more) = self.said.says(self.clock.elapsed()) {
            tracing::warn!(place, %error, more, "cannot accept a connection");
        }
        let longer = (self.pause * 2).min(LONGEST_PAUSE);
        std::mem::replace(&mut self.pause, longer)
    }

    /// Notes that a connection was accepted.
    pub(crate) fn accepted(&mut self) {
        self.pause = LEAST_PAUSE;
    }
}

/// The first pause. Each further one lasts twice as long.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause: an engine that connects waits for it when there are descriptors again.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// At most one line comes in this time.
const QUIET: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pauses_grow_until_a_connection_is_accepted() {
        let mut not_accepted = NotAccepted::new();
        let mut pauses = || [(); 7].map(|()| not_accepted.failed("a socket", "no file left").as_millis());
        assert_eq!(pauses(), [100, 200, 400, 800, 1_600, 2_000, 2_000]);
        not_accepted.accepted();
        assert_eq!(not_accepted.failed("a socket", "no file left"), LEAST_PAUSE);
        assert_eq!(
            not_accepted.said.says(not_accepted.clock.elapsed() + QUIET),
            Some(7),
            "one line was logged"
        );
    }
}
