//! Decides how long to wait after the answer `Busy`.

use std::time::Duration;

use larder_protocol::peer::RetryAfter;

/// Pauses between repeated requests: at least as long as the answer says, and longer each time.
#[derive(Debug, Default)]
pub struct BusyPause(Duration);

impl BusyPause {
    /// The next pause. Half of it is random, so that requesters that were refused together do not return together.
    pub(crate) fn next(&mut self, RetryAfter { retry_after_ms }: RetryAfter, chance: f64) -> Duration {
        let said = Duration::from_millis(retry_after_ms.clamp(1, LONGEST_PAUSE_MS));
        self.0 = said.max(self.0 * 2).min(Duration::from_millis(LONGEST_PAUSE_MS));
        self.0.mul_f64(0.75 + chance / 2.0)
    }
}

const LONGEST_PAUSE_MS: u64 = 100;
