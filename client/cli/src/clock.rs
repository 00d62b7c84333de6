//! The command line's clock.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

/// Now.
#[expect(clippy::disallowed_methods, reason = "the command line is a shell: its clock is the system's")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// CPU time that this thread has used, in seconds: the same on a busy machine.
pub(crate) fn thread_seconds() -> f64 {
    seconds(ClockId::ThreadCPUTime)
}

/// CPU seconds of all threads of this process.
pub(crate) fn process_seconds() -> f64 {
    seconds(ClockId::ProcessCPUTime)
}

fn seconds(clock: ClockId) -> f64 {
    let used = clock_gettime(clock);
    used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
}
