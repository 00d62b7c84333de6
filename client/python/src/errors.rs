//! Errors of a session as the exceptions of `larder_kv.errors`.

use larder_client::engine_lane::LaneError;
use larder_client::{Damaged, SessionError};
use pyo3::prelude::*;
use pyo3::{PyTypeInfo, import_exception};

import_exception!(larder_kv.errors, BusyError);
import_exception!(larder_kv.errors, ConnectError);
import_exception!(larder_kv.errors, DamagedError);
import_exception!(larder_kv.errors, EndedError);
import_exception!(larder_kv.errors, ForkedError);
import_exception!(larder_kv.errors, GpuError);
import_exception!(larder_kv.errors, RefusedError);
import_exception!(larder_kv.errors, ReleasedError);
import_exception!(larder_kv.errors, RequestTimeout);
import_exception!(larder_kv.errors, WindowError);

/// The exception that says what the caller can do about `error`.
pub(crate) fn exception(error: &SessionError) -> PyErr {
    let text = error.to_string();
    match error {
        SessionError::Connect { .. } => ConnectError::new_err(text),
        SessionError::Busy { what, retry_after } => {
            let seconds = retry_after.as_secs_f64();
            with_attributes::<BusyError>(text, &[("what", what.name())], &[("retry_after", seconds)])
        }
        SessionError::Refused(refusal) => {
            with_attributes::<RefusedError>(text, &[("code", refusal.code.name())], &[])
        }
        SessionError::Chain(_)
        | SessionError::OtherSession { .. }
        | SessionError::NotShared
        | SessionError::TooManyDescriptors { .. } => pyo3::exceptions::PyValueError::new_err(text),
        SessionError::WindowTooSmall { .. } => WindowError::new_err(text),
        SessionError::Damaged(error) => damaged(error),
        SessionError::Timeout => RequestTimeout::new_err(text),
        // The others, those of later versions included, end the session.
        _ => EndedError::new_err(text),
    }
}

/// The exception for a copy on a GPU that was not begun.
pub(crate) fn lane_exception(error: LaneError) -> PyErr {
    match error {
        LaneError::Busy(busy) => with_attributes::<BusyError>(
            busy.to_string(),
            &[("what", "copies")],
            &[("retry_after", COPY_SECONDS)],
        ),
        LaneError::Damaged(error) => damaged(&error),
        LaneError::Mismatch(text) => pyo3::exceptions::PyValueError::new_err(text),
        error => GpuError::new_err(error.to_string()),
    }
}

/// A block that was read is wrong.
pub(crate) fn damaged(damaged: &Damaged) -> PyErr {
    let (error, Damaged { position, block, .. }) = (DamagedError::new_err(damaged.to_string()), *damaged);
    Python::attach(|py| {
        let value = error.value(py);
        let set = || -> PyResult<()> {
            value.setattr("position", position)?;
            value.setattr("block", block)
        };
        match set() {
            Ok(()) => error,
            Err(failed) => failed,
        }
    })
}

/// The lease, ticket or reservation was given back.
pub(crate) fn released(what: &str) -> PyErr {
    ReleasedError::new_err(format!("this {what} was given back"))
}

fn with_attributes<E: PyTypeInfo>(text: String, texts: &[(&str, &str)], numbers: &[(&str, f64)]) -> PyErr {
    Python::attach(|py| {
        let error = PyErr::from_type(E::type_object(py), text);
        let value = error.value(py);
        let set = || -> PyResult<()> {
            texts.iter().try_for_each(|(name, text)| value.setattr(*name, *text))?;
            numbers.iter().try_for_each(|(name, number)| value.setattr(*name, *number))
        };
        match set() {
            Ok(()) => error,
            Err(failed) => failed,
        }
    })
}

/// About how long a copy takes.
const COPY_SECONDS: f64 = 0.005;
