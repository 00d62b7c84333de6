//! Watches a drive: how long it has not answered.
//!
//! A drive that hangs fails nothing, so nothing but the time tells. Each operation counts by itself: long work of many operations
//! is no silence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::io::{Buffer, DiskDevice, Finished, Transfer};
use crate::clock::Clock;
use crate::threads::Joined;

/// A drive, as the thread that waits for it finds it. Cloning shares.
#[derive(Debug, Clone)]
pub(crate) struct Drive(Arc<Seen>);

#[derive(Debug)]
struct Seen {
    clock: Clock,
    /// When the operation under way began, in milliseconds since the clock's start, plus 1; 0 if none is under way.
    since: AtomicU64,
}

/// A device whose drive is watched.
pub(super) struct Watched {
    device: Box<dyn DiskDevice>,
    drive: Drive,
}

/// Says whether a tier's drive is silent. Cloning shares.
#[derive(Debug, Clone)]
pub(crate) struct DriveWatch {
    drive: Drive,
    silent_after: Duration,
}

/// Waits for the tier's thread when dropped, unless the drive is silent.
pub(super) struct Ending {
    pub(super) thread: Option<Joined>,
    pub(super) watch: DriveWatch,
}

/// An operation under way. It ends when dropped.
pub(crate) struct UnderWay<'a>(&'a Drive);

impl Drive {
    /// A drive that was asked for nothing yet.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Seen { clock: Clock::start(), since: AtomicU64::new(0) }))
    }

    /// How long the operation under way has had no answer; zero if none is under way.
    pub(crate) fn silent_for(&self) -> Duration {
        match self.0.since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self.0.clock.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }

    fn begin(&self) {
        self.0.since.store(self.0.clock.elapsed().as_millis() as u64 + 1, Ordering::Relaxed);
    }

    /// Notes that the drive is asked for something, until the value is dropped.
    pub(crate) fn asked(&self) -> UnderWay<'_> {
        self.begin();
        UnderWay(self)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.0.since.store(0, Ordering::Relaxed);
    }
}

impl Watched {
    pub(super) fn new(device: Box<dyn DiskDevice>, drive: Drive) -> Self {
        Self { device, drive }
    }

    pub(super) fn drive(&self) -> &Drive {
        &self.drive
    }
}

impl DiskDevice for Watched {
    fn buffers(&mut self, count: usize, bytes: usize) -> std::io::Result<Vec<Buffer>> {
        self.device.buffers(count, bytes)
    }

    fn start(&mut self, transfer: Transfer) {
        let _under_way = self.drive.asked();
        self.device.start(transfer);
    }

    fn wait(&mut self) -> Option<Finished> {
        let _under_way = self.drive.asked();
        self.device.wait()
    }

    fn sync(&mut self) -> std::io::Result<()> {
        let _under_way = self.drive.asked();
        self.device.sync()
    }

    fn look(&self) -> std::io::Result<()> {
        let _under_way = self.drive.asked();
        self.device.look()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Dropping the device waits for its transfers.
        self.drive.begin();
    }
}

impl DriveWatch {
    pub(super) fn new(drive: &Drive, silent_after: Duration) -> Self {
        Self { drive: drive.clone(), silent_after }
    }

    /// How long the drive has been silent; `None` if it answers.
    pub(crate) fn silent_for(&self) -> Option<Duration> {
        Some(self.drive.silent_for()).filter(|silent| *silent >= self.silent_after)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let patience = self.watch.silent_after.min(MOST_PATIENCE);
        thread.join_unless(|| {
            let silent = self.watch.drive.silent_for();
            let gives_up = silent >= patience;
            if gives_up {
                tracing::warn!(
                    ?silent,
                    "the drive does not answer: the disk tier ends without its last orders"
                );
            }
            gives_up
        });
    }
}

/// The longest wait for a drive's answer when the tier ends.
const MOST_PATIENCE: Duration = Duration::from_secs(10);
