//! Waiting for what another process does.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Asks again and again until there is an answer.
///
/// # Panics
/// Where there is none for [`DEADLINE`]; `what` says what was waited for.
pub fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        sleep(Duration::from_millis(2));
    }
}

#[expect(clippy::disallowed_methods, reason = "tests of whole processes live in real time")]
fn now() -> Instant {
    Instant::now()
}

/// Far more than anything takes on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(30);
