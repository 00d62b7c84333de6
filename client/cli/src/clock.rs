//! The command line's clock.

use std::time::Instant;

/// Now.
#[expect(clippy::disallowed_methods, reason = "the command line is a shell: its clock is the system's")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
