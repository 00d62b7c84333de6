//! Prefetches under way, as Python sees them.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::answers::Found;
use crate::errors::released;
use crate::process::Own;

/// A prefetch: the node brings the found chunks of a prompt into its memory. `collect` the ticket to read the chunks that have
/// come; cancel it if the prompt is gone. Dropping the ticket cancels it too.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Ticket {
    /// None once the ticket was collected or cancelled.
    slot: Own<Mutex<Option<Arc<larder_client::Ticket>>>>,
}

impl Ticket {
    pub(crate) fn new(ticket: larder_client::Ticket) -> Self {
        Self { slot: Own::new(Mutex::new(Some(Arc::new(ticket)))) }
    }

    /// # Errors
    /// `ReleasedError` if the ticket was collected or cancelled; `ForkedError`.
    pub(crate) fn share(&self) -> PyResult<Arc<larder_client::Ticket>> {
        let slot = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| released("ticket"))
    }

    /// Takes the ticket out, to be collected.
    ///
    /// # Errors
    /// As [`Self::share`]; `RuntimeError` while somebody asks for the ticket's progress.
    pub(crate) fn take(&self) -> PyResult<larder_client::Ticket> {
        let mut slot = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = slot.take().ok_or_else(|| released("ticket"))?;
        Arc::try_unwrap(ticket).map_err(|ticket| {
            *slot = Some(ticket);
            PyRuntimeError::new_err("another call uses this ticket: collect it when that has ended")
        })
    }
}

#[pymethods]
impl Ticket {
    /// The found chunks, as in the answer of a lookup.
    #[getter]
    fn found(&self) -> PyResult<Found> {
        Ok(self.share()?.found().into())
    }

    /// Tokens of the prefix that is being brought.
    #[getter]
    fn tokens(&self) -> PyResult<u64> {
        Ok(self.share()?.tokens())
    }

    /// Found tokens that are not brought because the engine computes them sooner.
    #[getter]
    fn tokens_to_recompute(&self) -> PyResult<u64> {
        Ok(self.share()?.tokens_to_recompute())
    }

    /// Stops the prefetch, at once and without waiting. Nothing happens if it was collected or cancelled before.
    fn cancel(&self) -> PyResult<()> {
        let ticket = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(ticket);
        Ok(())
    }

    fn __repr__(&self) -> String {
        match self.share() {
            Ok(ticket) => format!("<larder_kv.Ticket for {} tokens>", ticket.tokens()),
            Err(_) => "<larder_kv.Ticket, ended>".into(),
        }
    }
}
