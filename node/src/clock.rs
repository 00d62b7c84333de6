//! Time as the node counts it.

use std::time::{Duration, Instant};

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
