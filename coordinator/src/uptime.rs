//! The coordinator's clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::membership::Millis;

/// The coordinator's clock. Its times outlive the process, and it is steady: the system's clock counts at the start only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uptime {
    started: Instant,
    /// The time from 1970 to the start.
    before: Duration,
}

impl Uptime {
    #[expect(clippy::disallowed_methods, reason = "the server is the shell: its clock is the system's")]
    pub(crate) fn start() -> Self {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), before }
    }

    pub(crate) fn elapsed(self) -> Duration {
        self.started.elapsed()
    }

    /// Milliseconds since 1970.
    pub(crate) fn now(self) -> Millis {
        u64::try_from((self.before + self.elapsed()).as_millis()).unwrap_or(u64::MAX)
    }
}
