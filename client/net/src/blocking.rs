//! Work that takes its time, on threads of their own.
//!
//! Tokio's `spawn_blocking` panics if the system gives no thread, which happens at the limit of a control group (`pids.max`,
//! systemd's `TasksMax`) or of a user. Here the caller's thread does the work then: others wait for it, and nothing fails.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use tokio::sync::Semaphore;
use tokio::sync::oneshot;

use crate::lock;

/// The work panicked.
#[derive(Debug, thiserror::Error)]
#[error("the work panicked: the log says where")]
pub struct Panicked;

/// Does blocking work on another thread, or on this one if the system gives no other. At most [`MOST_AT_ONCE`] threads work at a
/// time. A panic of the work continues in the caller.
///
/// # Cancel safety
/// If dropped, the work goes on once it has begun.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    caught(work).await.unwrap_or_else(|panic| resume_unwind(panic))
}

/// As [`blocking`], for a caller that outlives a panic of the work.
///
/// # Errors
/// [`Panicked`].
pub async fn try_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Panicked> {
    caught(work).await.map_err(|_| Panicked)
}

/// The system gives no thread.
#[derive(Debug, thiserror::Error)]
#[error(
    "the system gives no more threads: raise the limit of the control group (pids.max, TasksMax= of a systemd unit), of the user (ulimit -u) or of the address space (ulimit -v)"
)]
pub struct NoThread(#[source] io::Error);

impl From<NoThread> for io::Error {
    fn from(refused: NoThread) -> Self {
        Self::new(refused.0.kind(), refused)
    }
}

/// Names the limit of threads in the error of a thread that did not start.
pub fn no_thread(error: io::Error) -> io::Error {
    NoThread(error).into()
}

/// Does work that nobody waits for on another thread, or on this one if the system gives no other.
pub fn aside(work: impl FnOnce() + Send + 'static) {
    on_thread(Builder::new().name("larder-work".to_owned()), work);
}

fn on_thread(thread: Builder, work: impl FnOnce() + Send + 'static) {
    let work = Arc::new(Mutex::new(Some(work)));
    let shared = Arc::clone(&work);
    let begin = move || {
        let work = lock(&shared).take();
        work.into_iter().for_each(|work| work());
    };
    if thread.spawn(begin).is_err()
        && let Some(work) = lock(&work).take()
    {
        work();
    }
}

async fn caught<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Box<dyn Any + Send>> {
    // Never an error: nobody closes the semaphore.
    let place = PLACES.acquire().await;
    let (done, result) = oneshot::channel();
    aside(move || {
        let _place = place;
        // An error: nobody waits any more.
        _ = done.send(catch_unwind(AssertUnwindSafe(work)));
    });
    result.await.unwrap_or_else(|_| Err(Box::new("the thread ended early")))
}

static PLACES: Semaphore = Semaphore::const_new(MOST_AT_ONCE);

/// The most threads that work at a time. All work of a process shares them: there are many, so that work on a folder that hangs
/// leaves room for other work.
pub const MOST_AT_ONCE: usize = 512;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn work_is_done_on_another_thread_and_its_panic_reaches_the_caller() {
        let here = std::thread::current().id();
        assert_ne!(blocking(|| std::thread::current().id()).await, here);
        assert!(try_blocking(|| panic!("on purpose")).await.is_err());
        assert_eq!(try_blocking(|| 7).await.ok(), Some(7));
    }

    #[test]
    fn without_a_thread_the_work_is_done_here() {
        let (done, by) = std::sync::mpsc::channel();
        // No address space has room for this stack.
        on_thread(Builder::new().stack_size(1 << 60), move || {
            done.send(std::thread::current().id()).unwrap()
        });
        assert_eq!(by.try_recv().ok(), Some(std::thread::current().id()));
    }

    #[tokio::test]
    async fn so_many_threads_work_at_a_time_and_the_others_wait() {
        static NOW: AtomicUsize = AtomicUsize::new(0);
        static MOST: AtomicUsize = AtomicUsize::new(0);
        let work = || {
            MOST.fetch_max(NOW.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(2));
            NOW.fetch_sub(1, Ordering::SeqCst);
        };
        let all = (0..MOST_AT_ONCE + 100).map(|_| tokio::spawn(blocking(work)));
        for one in all.collect::<Vec<_>>() {
            one.await.unwrap();
        }
        assert!(MOST.load(Ordering::SeqCst) <= MOST_AT_ONCE);
    }
}
