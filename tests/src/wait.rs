//! Waits for the work of other processes.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Asks again and again until there is an answer.
///
/// # Panics
/// Panics if there is no answer for [`DEADLINE`]; `what` names the awaited event.
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

/// Lets real time pass, for tests about time, and checks something all the while.
pub fn through(time: Duration, mut check: impl FnMut()) {
    let start = now();
    while start.elapsed() < time {
        check();
        sleep(Duration::from_millis(20));
    }
}

#[expect(clippy::disallowed_methods, reason = "tests of whole processes live in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Far more than anything takes on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(30);
