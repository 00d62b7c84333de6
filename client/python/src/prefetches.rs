//! Prefetches whose outcome is asked for later: a scheduler has no time to wait.

use std::mem;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Waker};
use std::time::Duration;

use larder_client::{LeaseGuard, SessionError};
use larder_protocol::session::Wait;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::answers::Found;
use crate::errors::{exception, released};
use crate::lease::Lease;
use crate::namespace::{Chain, Namespace};
use crate::process::{Own, runtime};
use crate::requests::{Asking, seconds};
use crate::session::Session;
use crate::waiting::SIGNALS_EVERY;

/// Starts prefetches of one session: `Prefetches(session, at_most)`. At most `at_most` are under way at the same time; others
/// wait in the order of their start. This object keeps the session open.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Prefetches {
    session: Own<larder_client::Session>,
    under_way: Arc<Semaphore>,
}

/// The lease at the end of a prefetch, once it is there. Dropping this object cancels the prefetch.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct PendingLease {
    own: Own<(Arc<Outcome>, Option<AbortHandle>)>,
}

/// The found chunks and the lease of those that came, or the error that ended the prefetch.
type LeaseResult = Result<(Found, LeaseGuard), SessionError>;

/// The end of a prefetch, for the thread that waits for it.
#[derive(Default)]
struct Outcome {
    state: Mutex<Ending>,
    ended: Condvar,
}

#[derive(Default)]
enum Ending {
    #[default]
    UnderWay,
    Ended(Box<LeaseResult>),
    Taken,
}

impl Outcome {
    /// Ends the prefetch with this result. If it was cancelled meanwhile, the result's lease is given back.
    fn end(&self, result: LeaseResult) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, Ending::UnderWay) {
            *state = Ending::Ended(Box::new(result));
        }
        drop(state);
        self.ended.notify_all();
    }

    fn cancel(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = Ending::Taken;
        self.ended.notify_all();
    }

    /// Takes the result, if the prefetch ends within `patience`.
    ///
    /// # Errors
    /// `ReleasedError` if the result was taken before.
    fn take(&self, patience: Duration) -> PyResult<Option<LeaseResult>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_under_way = |state: &mut Ending| matches!(state, Ending::UnderWay);
        let waited = self.ended.wait_timeout_while(state, patience, is_under_way);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if is_under_way(&mut state) {
            return Ok(None);
        }
        match mem::replace(&mut *state, Ending::Taken) {
            Ending::Ended(result) => Ok(Some(*result)),
            _ => Err(released("pending lease")),
        }
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
impl Prefetches {
    #[new]
    #[pyo3(signature = (session: "Session", at_most: "int"))]
    fn new(session: &Session, at_most: usize) -> PyResult<Self> {
        if at_most == 0 {
            return Err(PyValueError::new_err("`at_most` is 0: no prefetch would ever begin"));
        }
        let session = Own::new(session.share()?);
        Ok(Self { session, under_way: Arc::new(Semaphore::new(at_most.min(Semaphore::MAX_PERMITS))) })
    }

    /// Asks how much of a prompt can be served, has the node bring these chunks, and leases those that have come after `patience`
    /// seconds at the latest, as `lookup_and_prefetch` and `collect` do. The request is sent before this returns, unless
    /// `at_most` prefetches are under way. This never waits.
    #[pyo3(signature = (namespace: "Namespace", chain: "Chain", *, patience: "float", prompt_tokens: "int | None" = None,
        preempted: "bool" = false, prefill_tokens_per_second: "float | None" = None,
        request: "str | None" = None) -> "PendingLease")]
    fn start(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        patience: f64,
        prompt_tokens: Option<u64>,
        preempted: bool,
        prefill_tokens_per_second: Option<f64>,
        request: Option<String>,
    ) -> PyResult<PendingLease> {
        let asking = Asking { prompt_tokens, preempted, prefill_tokens_per_second, ..Asking::default() };
        let options = asking.options(namespace, chain)?;
        let patience = u64::try_from(seconds(patience)?.as_millis()).unwrap_or(u64::MAX);
        let session = self.session.get()?;
        let session = request.map_or_else(|| session.clone(), |request| session.named(&request));
        let prefetch = session.prefetch(&namespace.inner, &chain.inner, options);
        let under_way = Arc::clone(&self.under_way);
        let outcome = Arc::new(Outcome::default());
        let told = Arc::clone(&outcome);
        let bring = async move {
            let _permit = under_way.acquire_owned().await;
            let ticket = prefetch.await?;
            let found = Found::from(ticket.found());
            Ok((found, session.collect(ticket, Wait::TimeoutMs(patience)).await?))
        };
        let mut task = Box::pin(async move { told.end(bring.await) });
        // Sends the request here and now: a task would have to wake its thread first.
        let runtime = runtime()?;
        let _entered = runtime.enter();
        let has_ended = task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        let task = (!has_ended).then(|| runtime.spawn(task).abort_handle());
        Ok(PendingLease { own: Own::new((outcome, task)) })
    }
}

#[pymethods]
impl PendingLease {
    /// The found chunks and the lease of those that came; None if the prefetch has not ended within `seconds`. The lease is given
    /// once.
    ///
    /// Raises the errors of `lookup_and_prefetch` and `collect`; `ReleasedError` if the lease was given before.
    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<(Found, Lease)>> {
        let (outcome, _) = self.own.get()?;
        let mut left = crate::requests::seconds(seconds)?;
        loop {
            let now = left.min(SIGNALS_EVERY);
            left -= now;
            match py.detach(|| outcome.take(now))? {
                None if left.is_zero() => return Ok(None),
                None => py.check_signals()?,
                Some(Ok((found, guard))) => return Ok(Some((found, Lease::new(guard)))),
                Some(Err(error)) => return Err(exception(&error)),
            }
        }
    }

    /// Stops the prefetch, at once and without waiting; the chunks that have come are given back.
    fn cancel(&self) -> PyResult<()> {
        let (outcome, task) = self.own.get()?;
        if let Some(task) = task {
            task.abort();
        }
        outcome.cancel();
        Ok(())
    }
}

impl Drop for PendingLease {
    fn drop(&mut self) {
        // In a forked child, the task is the parent's.
        if let Ok((_, Some(task))) = self.own.get() {
            task.abort();
        }
    }
}
