//! The coordinator's clock.

use std::time::{Duration, Instant};

use crate::membership::Millis;

/// The coordinator's clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Uptime(Instant);

impl Uptime {
    #[expect(clippy::disallowed_methods, reason = "the server is the shell: its clock is the system's")]
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    pub(crate) fn now(self) -> Millis {
        u64::try_from(self.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
