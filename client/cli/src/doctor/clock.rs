//! The kernel's clock: whether something keeps it right.
#![expect(unsafe_code, reason = "adjtimex has no wrapper")]

use std::mem::MaybeUninit;

/// The state of the kernel's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClockState {
    /// Something keeps the clock right, to within this many microseconds.
    Synchronised {
        /// Limit of the clock's error.
        error_us: u64,
    },
    /// Nothing keeps the clock right.
    Unsynchronised,
}

impl ClockState {
    /// Asks the kernel; `None` if it does not say.
    pub(super) fn read() -> Option<Self> {
        // SAFETY: zeros are a valid `timex`: no pointers, and `modes` of 0 asks without changing anything.
        let mut state: libc::timex = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: `state` is a live `timex` of this thread's own, which the kernel fills.
        let result = unsafe { libc::adjtimex(&raw mut state) };
        if result < 0 {
            return None;
        }
        if result == libc::TIME_ERROR || state.status & libc::STA_UNSYNC != 0 {
            return Some(Self::Unsynchronised);
        }
        Some(Self::Synchronised { error_us: state.maxerror.unsigned_abs() })
    }
}
