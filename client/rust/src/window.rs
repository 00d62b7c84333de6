//! The write window of a session: memory from which the node copies committed bytes.

mod ranges;

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;

use crate::lock;
use larder_ipc::Mapping;
use ranges::FreeRanges;

/// The window, shared by all reservations of a session.
pub(crate) struct Window {
    mapping: Arc<Mapping>,
    /// `None` once the session is over: the node still carries out commits that it did not answer, so no part of the window may be
    /// written again.
    free: Mutex<Option<FreeRanges>>,
    /// Wakes the async caller that waits for room.
    freed: Notify,
    /// Wakes the threads that wait for room.
    freed_threads: Condvar,
    /// Held by the async caller that is next, so that small requests do not starve a large one.
    turn: tokio::sync::Mutex<()>,
}

/// A part of the window that belongs to one chunk; dropping it frees the part.
pub(crate) struct WindowRange {
    window: Arc<Window>,
    offset: u64,
    bytes: u64,
}

impl Window {
    pub(crate) fn new(mapping: Mapping) -> Self {
        let free = Mutex::new(Some(FreeRanges::new(mapping.len())));
        Self {
            mapping: Arc::new(mapping),
            free,
            freed: Notify::new(),
            freed_threads: Condvar::new(),
            turn: tokio::sync::Mutex::new(()),
        }
    }

    /// Bytes of the whole window.
    pub(crate) fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Waits for pieces of these sizes, together at most the whole window, and takes all of them at once: a caller that
    /// held some of them while it waits would keep others from theirs. First come, first served. `None` if the session is over.
    ///
    /// Cancel safe: nothing is taken if the future is dropped.
    pub(crate) async fn take(self: &Arc<Self>, sizes: &[u64]) -> Option<Vec<WindowRange>> {
        let _turn = self.turn.lock().await;
        loop {
            let freed = self.freed.notified();
            let ranges = self.try_take(&mut lock(&self.free), sizes);
            match ranges {
                Poll::Ready(ranges) => return ranges,
                Poll::Pending => freed.await,
            }
        }
    }

    /// Waits for pieces as [`Self::take`] does, at most for `patience`: `Pending` if there are none by then. Threads have no turns:
    /// the first whose pieces fit takes them.
    pub(crate) fn take_within(
        self: &Arc<Self>,
        sizes: &[u64],
        patience: Duration,
    ) -> Poll<Option<Vec<WindowRange>>> {
        let mut ranges = Poll::Pending;
        let free = lock(&self.free);
        let none_yet = |free: &mut Option<FreeRanges>| {
            ranges = self.try_take(free, sizes);
            ranges.is_pending()
        };
        drop(
            self.freed_threads
                .wait_timeout_while(free, patience, none_yet)
                .unwrap_or_else(PoisonError::into_inner),
        );
        ranges
    }

    /// Ends the use of the window with its session: nobody gets a part of it any more.
    pub(crate) fn close(&self) {
        *lock(&self.free) = None;
        self.wake();
    }

    fn wake(&self) {
        // At most one async caller waits. If none waits, the permit stays, and costs the next caller one look.
        self.freed.notify_one();
        self.freed_threads.notify_all();
    }

    fn try_take(
        self: &Arc<Self>,
        free: &mut Option<FreeRanges>,
        sizes: &[u64],
    ) -> Poll<Option<Vec<WindowRange>>> {
        let Some(free) = free else { return Poll::Ready(None) };
        let mut taken = Vec::with_capacity(sizes.len());
        for &bytes in sizes {
            let Some(offset) = free.take(bytes) else {
                taken.into_iter().for_each(|(offset, bytes)| free.give_back(offset, bytes));
                return Poll::Pending;
            };
            taken.push((offset, bytes));
        }
        let range = |(offset, bytes)| WindowRange { window: Arc::clone(self), offset, bytes };
        Poll::Ready(Some(taken.into_iter().map(range).collect()))
    }
}

impl WindowRange {
    /// The offset at which the range starts in the window.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.window.mapping
    }
}

impl Drop for WindowRange {
    fn drop(&mut self) {
        if let Some(free) = &mut *lock(&self.window.free) {
            free.give_back(self.offset, self.bytes);
        }
        self.window.wake();
    }
}
