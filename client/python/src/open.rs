//! An open session, and its opening.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use larder_client::{CallFuture, Session, SessionOptions, UnknownVerify};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::errors::released;
use crate::process::{Own, runtime};
use crate::requests::seconds;

/// An open session and the runtime that it lives on.
pub(crate) struct Open {
    /// None once the session was closed.
    session: Own<Mutex<Option<Session>>>,
    runtime: Handle,
}

/// The arguments to open a session.
pub(crate) struct Opening {
    pub(crate) path: PathBuf,
    pub(crate) client: Option<String>,
    pub(crate) device: Option<u16>,
    pub(crate) window_bytes: u64,
    pub(crate) timeout: f64,
    pub(crate) verify: String,
    pub(crate) verify_seed: Option<u64>,
    pub(crate) copy_threads: usize,
}

impl Opening {
    /// The runtime, and the session that opens on it.
    ///
    /// # Errors
    /// `ValueError` for an impossible timeout or `verify`; `OSError` if the system gives no thread.
    pub(crate) fn start(self) -> PyResult<(Handle, CallFuture<Session>)> {
        let options = SessionOptions {
            client: self.client.unwrap_or_else(|| concat!("larder-kv ", env!("CARGO_PKG_VERSION")).into()),
            device: self.device,
            window_bytes: self.window_bytes,
            timeout: seconds(self.timeout)?,
            verify: self
                .verify
                .parse()
                .map_err(|error: UnknownVerify| PyValueError::new_err(error.to_string()))?,
            verify_seed: self.verify_seed,
            copy_threads: self.copy_threads,
        };
        Ok((runtime()?, Session::connect(self.path, options).into_future()))
    }
}

impl Open {
    pub(crate) fn new(session: Session, runtime: Handle) -> Self {
        Self { session: Own::new(Mutex::new(Some(session))), runtime }
    }

    /// # Errors
    /// `ReleasedError` if the session was closed; `ForkedError` in another process than the one that opened the session.
    pub(crate) fn session(&self) -> PyResult<Session> {
        let session = self.session.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        session.clone().ok_or_else(|| released("session"))
    }

    /// Whether the session was not closed, and its node has not ended it.
    ///
    /// # Errors
    /// `ForkedError`.
    pub(crate) fn is_open(&self) -> PyResult<bool> {
        let session = self.session.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(session.as_ref().is_some_and(Session::is_open))
    }

    /// # Errors
    /// `ForkedError`.
    pub(crate) fn close(&self) -> PyResult<()> {
        let session = self.session.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(session);
        Ok(())
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}
