//! Values that belong to one process: a forked child may neither use nor give back its parent's values.

use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process;
use std::sync::{Mutex, PoisonError};

use pyo3::PyResult;
use pyo3::exceptions::PyOSError;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::errors::ForkedError;

/// A value that only the process that made it may use. A forked child never drops it either: the child shares the parent's
/// socket, and would give back grants that the parent still holds.
pub(crate) struct Own<T> {
    process: u32,
    /// Taken only by `drop`.
    value: Option<T>,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: process::id(), value: Some(value) }
    }

    /// The value.
    ///
    /// # Errors
    /// `ForkedError` in another process than the one that made it.
    pub(crate) fn get(&self) -> PyResult<&T> {
        let value = self.value.as_ref().filter(|_| self.process == process::id());
        value.ok_or_else(|| {
            ForkedError::new_err(
                "this belongs to the parent process: connect a session of your own after the fork",
            )
        })
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            mem::forget(self.value.take());
        }
    }
}

/// The runtime of this process, made with the first session.
///
/// # Errors
/// `OSError` if the system gives no thread.
pub(crate) fn runtime() -> PyResult<Handle> {
    // Callers hold the interpreter's lock, so nobody forks while another thread has this one.
    let mut current = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    match &*current {
        Some((process, runtime)) if *process == process::id() => Ok(runtime.handle().clone()),
        _ => {
            // One thread moves small messages; bytes are copied by the callers' own threads.
            let mut builder = Builder::new_multi_thread();
            let builder = builder.worker_threads(1).thread_name("larder-kv").enable_all();
            // Where the system gives no thread, the library panics.
            let built = catch_unwind(AssertUnwindSafe(|| builder.build()));
            let runtime =
                built.unwrap_or_else(|_| Err(io::Error::other("the system gives this process no thread")));
            let runtime = runtime.map_err(|error| PyOSError::new_err(error.to_string()))?;
            let handle = runtime.handle().clone();
            // A parent's runtime has no threads in this process and can only be forgotten.
            mem::forget(current.replace((process::id(), runtime)));
            Ok(handle)
        }
    }
}

static RUNTIME: Mutex<Option<(u32, Runtime)>> = Mutex::new(None);
