//! How long somebody waits who was told that there is too much to do.

use std::hash::{BuildHasher as _, Hasher as _};
use std::time::Duration;

use larder_protocol::peer::RetryAfter;

/// Pauses of somebody who is told to ask again: as long as is said, and longer each time.
#[derive(Debug, Default)]
pub(super) struct BusyPause(Duration);

impl BusyPause {
    /// The next pause: half of it is chance, so that those who were told together do not come back together.
    pub(super) fn next(&mut self, RetryAfter { retry_after_ms }: RetryAfter) -> Duration {
        let said = Duration::from_millis(retry_after_ms.clamp(1, LONGEST_BUSY_PAUSE_MS));
        self.0 = said.max(self.0 * 2).min(Duration::from_millis(LONGEST_BUSY_PAUSE_MS));
        self.0.mul_f64(0.75 + chance() / 2.0)
    }
}

/// At least 0, and less than 1.
pub(super) fn chance() -> f64 {
    // Its keys are chance, and nothing else is wanted of it.
    let bits = std::collections::hash_map::RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// The longest pause.
const LONGEST_BUSY_PAUSE_MS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_as_long_as_is_said_and_longer_each_time_up_to_a_bound() {
        let mut pause = BusyPause::default();
        for longest_ms in [5, 10, 20, 40, 80, 100, 100] {
            let pause = pause.next(RetryAfter { retry_after_ms: 5 }).as_secs_f64() * 1e3;
            let longest_ms = f64::from(longest_ms);
            assert!((longest_ms * 0.75..longest_ms * 1.25).contains(&pause), "{pause} of {longest_ms} ms");
        }
        assert!(pause.next(RetryAfter { retry_after_ms: u64::MAX }) < Duration::from_millis(126));
    }

    #[test]
    fn chance_differs_each_time_and_stays_below_one() {
        let some: Vec<f64> = (0..100).map(|_| chance()).collect();
        assert!(some.iter().all(|chance| (0.0..1.0).contains(chance)));
        assert!(some.windows(2).any(|pair| pair[0] != pair[1]));
    }
}
