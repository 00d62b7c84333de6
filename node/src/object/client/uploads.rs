//! The line of uploads: as many at a time as their pace allows.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};

use super::super::pace::Pace;

/// Uploads that wait for their turn, and uploads that are under way.
pub(super) struct Uploads {
    pub(super) pace: RefCell<Pace>,
    /// The first of those who wait has its permit.
    line: Semaphore,
    under_way: Cell<usize>,
    ended: Notify,
}

/// The turn of an upload, until it is dropped.
pub(super) struct UploadTurn<'a>(&'a Uploads);

impl Uploads {
    pub(super) fn new(most: usize) -> Self {
        let pace = RefCell::new(Pace::new(most));
        Self { pace, line: Semaphore::new(1), under_way: Cell::new(0), ended: Notify::new() }
    }

    /// Waits for a turn. `None`: never, since the line is not closed.
    ///
    /// Cancel safe.
    pub(super) async fn turn(&self) -> Option<UploadTurn<'_>> {
        let _first = self.line.acquire().await.ok()?;
        while self.under_way.get() >= self.pace.borrow().allowed() {
            self.ended.notified().await;
        }
        self.under_way.set(self.under_way.get() + 1);
        Some(UploadTurn(self))
    }

    /// Notes that an upload took `took` of the time that it had.
    pub(super) fn succeeded(&self, took: Duration, had: Duration) {
        self.pace.borrow_mut().succeeded(took, had, self.under_way.get());
    }
}

impl Drop for UploadTurn<'_> {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
        self.0.ended.notify_one();
    }
}
