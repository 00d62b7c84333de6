//! How Python waits for a request: a thread without the interpreter's lock, or a coroutine on its event loop.

use std::future::Future;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use larder_client::SessionError;
use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, spawn_blocking};

use crate::errors::exception;
use crate::process::Own;
use crate::requests::{PinOnTheWay, Reply, Request};

/// Waits on a thread.
pub(crate) struct Thread;

/// Awaits in a coroutine.
pub(crate) struct Task;

impl Thread {
    /// # Errors
    /// As [`wait`].
    pub(crate) fn answer<'py, T>(
        py: Python<'py>,
        runtime: &Handle,
        request: impl Request<T>,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        T: for<'a> IntoPyObject<'a> + Send,
    {
        wait(py, runtime, request)?.keep().into_bound_py_any(py)
    }

    /// Returns an answer that is known already.
    pub(crate) fn known(answer: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
        Ok(answer)
    }
}

impl Task {
    /// # Errors
    /// As [`awaitable`].
    pub(crate) fn answer<'py, T>(
        py: Python<'py>,
        runtime: &Handle,
        request: impl Request<T>,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        T: for<'a> IntoPyObject<'a> + Send + 'static,
    {
        awaitable(py, runtime, request)
    }

    /// Returns an answer that is known already.
    ///
    /// # Errors
    /// As [`awaitable`].
    pub(crate) fn known(answer: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
        let event_loop = answer.py().import("asyncio")?.call_method0("get_running_loop")?;
        let promise = event_loop.call_method0("create_future")?;
        promise.call_method1("set_result", (answer,))?;
        Ok(promise)
    }
}

/// Waits on this thread, without the interpreter's lock.
///
/// # Errors
/// The request's error; `KeyboardInterrupt` or another error of a signal handler, after which the request is dropped.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    runtime: &Handle,
    request: impl Future<Output = Result<T, SessionError>> + Send,
) -> PyResult<T> {
    let mut request = Box::pin(request);
    loop {
        let part = async { tokio::time::timeout(SIGNALS_EVERY, request.as_mut()).await };
        match py.detach(|| runtime.block_on(part)) {
            Ok(result) => return result.map_err(|error| exception(&error)),
            Err(_) => py.check_signals()?,
        }
    }
}

/// A future of the running event loop. Cancelling it drops the request; grants in a late answer are given back.
///
/// # Errors
/// `RuntimeError` if no event loop runs on this thread, or the interpreter ends.
pub(crate) fn awaitable<'py, T>(
    py: Python<'py>,
    runtime: &Handle,
    request: impl Future<Output = Result<Reply<T>, SessionError>> + Send + 'static,
) -> PyResult<Bound<'py, PyAny>>
where
    T: for<'a> IntoPyObject<'a> + Send + 'static,
{
    if Visit::begin().is_none() {
        return Err(PyRuntimeError::new_err(
            "the interpreter ends, so nothing would settle this future: use a Session in exit handlers",
        ));
    }
    let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
    let promise = event_loop.call_method0("create_future")?;
    let (to_loop, to_promise) = (event_loop.unbind(), promise.clone().unbind());
    let request = Box::pin(request);
    let task = runtime.spawn(async move {
        let result = request.await;
        // Settles on a thread of its own, which may wait for the interpreter's lock: answers of other sessions must not wait for
        // it.
        spawn_blocking(move || {
            // If the interpreter is going down, nobody waits any more.
            let Some(_visit) = Visit::begin() else { return };
            Python::try_attach(|py| {
                let settled = settle_soon(py, &to_loop, &to_promise, result);
                // An error: the loop was closed, and nobody waits any more.
                drop(settled);
            });
        });
    });
    promise.call_method1("add_done_callback", (Canceller { task: task.abort_handle() },))?;
    Ok(promise)
}

/// Ends the request of a future that was cancelled.
#[pyclass(frozen)]
struct Canceller {
    task: AbortHandle,
}

#[pymethods]
impl Canceller {
    fn __call__(&self, promise: &Bound<'_, PyAny>) -> PyResult<()> {
        if promise.call_method0("cancelled")?.extract()? {
            self.task.abort();
        }
        Ok(())
    }
}

/// Has the event loop's thread settle the future.
fn settle_soon<T>(
    py: Python<'_>,
    event_loop: &Py<PyAny>,
    promise: &Py<PyAny>,
    result: Result<Reply<T>, SessionError>,
) -> PyResult<()>
where
    T: for<'a> IntoPyObject<'a>,
{
    let result = result.map_err(|error| exception(&error)).and_then(|Reply { value, pin }| {
        let pin = pin.map(|pin| Py::new(py, UnkeptPin { pin })).transpose()?;
        Ok((value.into_py_any(py)?, pin))
    });
    let (value, pin, is_error) = match result {
        Ok((value, pin)) => (value, pin, false),
        Err(error) => (error.into_value(py).into_any(), None, true),
    };
    let settle = wrap_pyfunction!(settle, py)?;
    event_loop.call_method1(py, "call_soon_threadsafe", (settle, promise, value, is_error, pin))?;
    Ok(())
}

/// The pin of a result that no future has got yet. Dropping this ends the pin, unless it was kept.
#[pyclass(frozen)]
struct UnkeptPin {
    pin: Own<PinOnTheWay>,
}

/// Settles a future that was not cancelled meanwhile. The pin of a cancelled future's result ends.
#[pyfunction]
#[pyo3(signature = (promise, value, is_error, pin))]
fn settle(
    promise: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
    is_error: bool,
    pin: Option<Bound<'_, UnkeptPin>>,
) -> PyResult<()> {
    if !promise.call_method0("done")?.extract::<bool>()? {
        promise.call_method1(if is_error { "set_exception" } else { "set_result" }, (value,))?;
        if let Some(pin) = pin {
            pin.get().pin.get()?.keep();
        }
    }
    Ok(())
}

/// A visit of one of our threads to the interpreter. An interpreter that goes down ends each thread that waits for its lock, and
/// native code does not survive that: so it waits for the visits under way first.
struct Visit;

/// The process, whether its interpreter is going down, and the number of its visits under way. A forked child has none of its
/// parent's visits. It gets no lock either, since a parent's thread that held one would never let it go in the child.
static VISITS: AtomicU64 = AtomicU64::new(0);

impl Visit {
    fn begin() -> Option<Self> {
        let begin = |visits| {
            Some(of_this_process(visits)).filter(|visits| visits & IS_OVER == 0).map(|visits| visits + 1)
        };
        VISITS.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin).ok().map(|_| Self)
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        VISITS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Ends visits: waits for those under way, and lets no other begin. Called by `atexit`.
#[pyfunction]
pub(crate) fn end_visits(py: Python<'_>) {
    let end = |visits| Some(of_this_process(visits) | IS_OVER);
    // The update always yields a value.
    let _ = VISITS.fetch_update(Ordering::AcqRel, Ordering::Acquire, end);
    py.detach(|| {
        while VISITS.load(Ordering::Acquire) & COUNT > 0 {
            thread::sleep(LOOK_EVERY);
        }
    });
}

/// The visits of this process, of which a forked child has none at first.
fn of_this_process(visits: u64) -> u64 {
    let process = u64::from(process::id()) << PROCESS_SHIFT;
    if visits >> PROCESS_SHIFT << PROCESS_SHIFT == process { visits } else { process }
}

const PROCESS_SHIFT: u32 = 32;
const IS_OVER: u64 = 1 << 31;
const COUNT: u64 = IS_OVER - 1;

/// The time between two looks whether visits have ended: about as long as one takes.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// How often a waiting thread looks for signals.
pub(crate) const SIGNALS_EVERY: Duration = Duration::from_millis(100);
