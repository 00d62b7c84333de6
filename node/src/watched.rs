//! Catches, counts and logs panics on the peer thread, and starts the panicked part again with empty state.
//!
//! A panic ends one request, connection or purge, or loses the directory's rows. It never ends the thread.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use futures_util::FutureExt as _;
use prometheus::IntCounterVec;

/// Watches tasks for panics. Cloning shares.
#[derive(Debug, Clone)]
pub struct Watch {
    panics: IntCounterVec,
}

impl Watch {
    /// Makes a watch that counts panics by task.
    pub(crate) fn new(panics: IntCounterVec) -> Self {
        Self { panics }
    }

    /// A watch that counts for a test.
    #[cfg(test)]
    pub(crate) fn in_test() -> Self {
        let options = prometheus::Opts::new("panics", "Panics of tasks");
        Self { panics: IntCounterVec::new(options, &["task"]).unwrap() }
    }

    /// The result of some work; `None` if the work panicked. Then the state that it worked on must not be used.
    pub(crate) fn catch<T>(&self, task: &'static str, work: impl FnOnce() -> T) -> Option<T> {
        catch_unwind(AssertUnwindSafe(work)).inspect_err(|panic| self.tell(task, &**panic)).ok()
    }

    /// The result of a future; `None` if it panicked.
    ///
    /// # Cancel safety
    /// The same as the future's.
    pub(crate) async fn catch_in<T>(&self, task: &'static str, work: impl Future<Output = T>) -> Option<T> {
        let ended = AssertUnwindSafe(work).catch_unwind().await;
        ended.inspect_err(|panic| self.tell(task, &**panic)).ok()
    }

    /// Runs the future that `begin` makes, and begins again whenever it panics, until it ends by itself.
    ///
    /// # Cancel safety
    /// The same as the future's.
    pub(crate) async fn keep<F: Future<Output = ()>>(self, task: &'static str, begin: impl Fn() -> F) {
        while self.catch_in(task, async { begin().await }).await.is_none() {
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn tell(&self, task: &'static str, panic: &(dyn Any + Send)) {
        tracing::error!(
            task,
            said = said(panic),
            "a task panicked: its work is dropped, and it begins again; a purge does not"
        );
        self.panics.with_label_values(&[task]).inc();
    }

    #[cfg(test)]
    pub(crate) fn panics(&self, task: &'static str) -> u64 {
        self.panics.with_label_values(&[task]).get()
    }
}

/// The message of a panic.
pub(crate) fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it says nothing")
}

/// A place where a test may plant a panic.
#[cfg(not(test))]
pub(crate) fn here(_: &'static str) {}

/// A place where a test may plant a panic.
#[cfg(test)]
pub(crate) fn here(place: &'static str) {
    PLANTED.with(|planted| {
        if planted.get() == Some(place) {
            planted.set(None);
            panic!("planted at {place}");
        }
    });
}

/// Plants a panic for the next code on this thread that reaches `place`.
#[cfg(test)]
pub(crate) fn plant(place: &'static str) {
    PLANTED.with(|planted| planted.set(Some(place)));
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<&'static str>> = const { std::cell::Cell::new(None) };
}

/// The pause before a restart: a task that panics at once keeps no thread busy.
const PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_as_it_begins_or_later_begins_again_until_it_ends() {
        let watch = Watch::in_test();
        let begun = Cell::new(0);
        let begin = || {
            begun.set(begun.get() + 1);
            assert!(begun.get() != 1, "as it begins");
            async {
                tokio::task::yield_now().await;
                assert!(begun.get() != 2, "later");
            }
        };
        watch.clone().keep("tables", begin).await;
        assert_eq!((begun.get(), watch.panics("tables")), (3, 2));
    }
}
