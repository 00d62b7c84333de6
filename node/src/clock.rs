//! Time as the node counts it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use larder_core::Millis;

/// The clock of one node process; the only place that asks the operating system for the time.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "the one clock of the node")]
    pub fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The present moment.
    pub fn now(&self) -> Millis {
        Millis(self.elapsed().as_millis() as u64)
    }
}

/// Microseconds since 1970. A series of numbers that begins here at a start of the node names nothing of an earlier life of the
/// node, since no life uses a million numbers a second. Its numbers stay below 2^53, as JSON needs.
pub(crate) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
