//! Hand-over as Python sees it: layers that are given and taken while their chunks are being written.

use std::sync::{Arc, Mutex, PoisonError};

use larder_client::SessionError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::released;
use crate::lease::Lease;
use crate::memory::Memory;
use crate::process::Own;

/// Room for some layers of some chunks of a reservation, to be filled and handed over. Dropping it frees the room.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct StagedLayers {
    /// None once it was handed over or dropped.
    slot: Own<Shelf>,
    /// Bytes of the layers of one chunk.
    bytes: u64,
}

type Shelf = Arc<Mutex<Option<larder_client::StagedLayers>>>;

/// Layers that were taken out to be handed over, with their slot.
pub(crate) struct TakenLayers {
    layers: larder_client::StagedLayers,
    slot: Shelf,
}

/// Chunks that are followed: their layers may be read as they come. Let them go with `release()`, or by dropping it.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Follow {
    /// None once it was released.
    slot: Own<Mutex<Option<Arc<larder_client::Follow>>>>,
}

/// How much of the followed chunks is in place.
#[pyclass(frozen, get_all, module = "larder_kv")]
#[derive(Debug)]
pub(crate) struct InPlace {
    /// Chunks, from the first on, that have come or may still come. The chunk after them will not come.
    chunks: u32,
    /// Layers that are in place in every one of them, from the first on.
    layers: u32,
    /// Whether nothing more will come: all of these chunks are committed.
    is_whole: bool,
}

impl StagedLayers {
    pub(crate) fn new(staged: larder_client::StagedLayers) -> Self {
        Self { bytes: staged.bytes(), slot: Own::new(Arc::new(Mutex::new(Some(staged)))) }
    }

    /// Takes the layers out, to be handed over.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(crate) fn take_out(&self) -> PyResult<TakenLayers> {
        Ok(TakenLayers { layers: self.take()?, slot: Arc::clone(self.slot.get()?) })
    }

    /// Takes the layers out.
    ///
    /// # Errors
    /// `ReleasedError` if they were handed over or dropped; `ForkedError`.
    fn take(&self) -> PyResult<larder_client::StagedLayers> {
        let taken = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| released("staged layers"))
    }

    /// Fills the layers with the interpreter's lock released; `write` copies.
    pub(crate) fn fill(
        &self,
        py: Python<'_>,
        write: impl FnOnce(&mut larder_client::StagedLayers) -> PyResult<()> + Send,
    ) -> PyResult<()> {
        let slot = self.slot.get()?;
        py.detach(|| {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            write(slot.as_mut().ok_or_else(|| released("staged layers"))?)
        })
    }
}

impl TakenLayers {
    /// Hands the layers over. If the node has no time for them, puts them back: their caller may hand them over again.
    ///
    /// # Errors
    /// As [`larder_client::Session::hand_over`].
    pub(crate) async fn hand_over(self, session: larder_client::Session) -> Result<(), SessionError> {
        let result = session.hand_over_staged(&self.layers).await;
        if let Err(SessionError::Busy { .. }) = result {
            *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.layers);
        }
        result
    }
}

impl StagedLayers {
    /// Lends the layers to `copy`, which gives them back. If `copy` fails, they are dropped.
    pub(crate) fn lend(
        &self,
        copy: impl FnOnce(larder_client::StagedLayers) -> PyResult<larder_client::StagedLayers>,
    ) -> PyResult<()> {
        let staged = copy(self.take()?)?;
        *self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner) = Some(staged);
        Ok(())
    }
}

impl Follow {
    pub(crate) fn new(follow: larder_client::Follow) -> Self {
        Self { slot: Own::new(Mutex::new(Some(Arc::new(follow)))) }
    }

    /// # Errors
    /// `ReleasedError` if the follow was released; `ForkedError`.
    pub(crate) fn share(&self) -> PyResult<Arc<larder_client::Follow>> {
        let slot = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| released("follow"))
    }
}

impl From<larder_client::InPlace> for InPlace {
    fn from(in_place: larder_client::InPlace) -> Self {
        let larder_client::InPlace { chunks, layers, is_whole } = in_place;
        Self { chunks, layers, is_whole }
    }
}

#[pymethods]
impl StagedLayers {
    /// Copies `data`, any contiguous buffer, to these layers of the `chunk`-th staged chunk in the `part`-th slice of the
    /// session, `offset` bytes from the layers' start. All bytes of all chunks must be written before they are handed over. Other
    /// threads run meanwhile; none may change `data`.
    #[pyo3(signature = (chunk, data, *, part = 0, offset = 0))]
    fn copy_from(
        &self,
        py: Python<'_>,
        chunk: usize,
        data: &Bound<'_, PyAny>,
        part: usize,
        offset: u64,
    ) -> PyResult<()> {
        let data = Memory::readable(data)?;
        if offset.checked_add(data.len()).is_none_or(|end| end > self.bytes) {
            let text = format!("{} bytes at {offset} do not fit in layers of {}", data.len(), self.bytes);
            return Err(PyValueError::new_err(text));
        }
        self.fill(py, |staged| {
            if chunk >= staged.positions().len() || part >= staged.slices() {
                return Err(PyValueError::new_err(format!("there is no chunk {chunk}, or no slice {part}")));
            }
            data.copy_to_layers(0..data.len(), staged, (chunk, part), offset);
            Ok(())
        })
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.StagedLayers of {} bytes a chunk>", self.bytes)
    }
}

#[pymethods]
impl Follow {
    /// The layers that were in place at the node's last news. `Session.wait_for_layers` asks for news.
    #[getter]
    fn in_place(&self) -> PyResult<InPlace> {
        Ok(self.share()?.in_place().into())
    }

    /// The lease of the blocks; None before the first layer is in place. Reading a layer that has not come raises `DamagedError`.
    /// The chunks are kept until both the lease and the follow are released.
    #[getter]
    fn lease(&self) -> PyResult<Option<Lease>> {
        Ok(self.share()?.lease().map(Lease::of))
    }

    /// Lets the chunks go, at once and without waiting.
    fn release(&self) -> PyResult<()> {
        let follow = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(follow);
        Ok(())
    }

    fn __repr__(&self) -> String {
        match self.share() {
            Ok(follow) => format!("<larder_kv.Follow of {} chunks>", follow.asked()),
            Err(_) => "<larder_kv.Follow, given back>".into(),
        }
    }
}

repr!(InPlace(chunks, layers, is_whole));
