//! The bytes that a session has moved.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a session copied so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes copied out of leased blocks; a block whose pointer was taken counts as a whole.
    pub bytes_read: u64,
    /// Bytes copied into staged chunks; a block whose pointer was taken counts as a whole.
    pub bytes_written: u64,
    /// Bytes that were verified.
    pub bytes_verified: u64,
    /// Blocks that had other bytes than were committed under their names.
    pub blocks_damaged: u64,
}

/// The running counts behind [`Counters`].
#[derive(Default)]
pub(crate) struct Traffic {
    read: AtomicU64,
    written: AtomicU64,
    verified: AtomicU64,
    damaged: AtomicU64,
}

impl Traffic {
    pub(crate) fn count_read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_verified(&self, bytes: u64) {
        self.verified.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_damaged(&self) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            bytes_read: self.read.load(Ordering::Relaxed),
            bytes_written: self.written.load(Ordering::Relaxed),
            bytes_verified: self.verified.load(Ordering::Relaxed),
            blocks_damaged: self.damaged.load(Ordering::Relaxed),
        }
    }
}
