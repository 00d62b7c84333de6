//! Copies that the node makes between an engine's GPU memory and chunks, as Python sees them.

use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;

use larder_client::device_lane::SavePages;
use larder_client::engine_lane::LoadPages;
use larder_device::{EngineMemory, PagedLayout};
use larder_protocol::lane;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::gpu::read_layout;
use crate::memory::duplicate;
use crate::process::Own;

/// An engine's GPU memory that the node knows, until the session ends.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct NodeTensors {
    inner: Own<larder_client::NodeTensors>,
}

/// A copy that the node makes. It goes on if this object is dropped; nobody else gets its memory while it may touch it.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct NodeCopy {
    inner: Own<Arc<larder_client::NodeCopy>>,
}

/// The progress of a copy.
#[pyclass(frozen, get_all, module = "larder_kv")]
#[derive(Debug)]
pub(crate) struct CopyProgress {
    /// Layers that are done, from the first requested layer on.
    layers: u32,
    /// How the copy ended: "done", "refused", "failed", "stalled" or "lost"; None while it goes on. Only after "done" are all
    /// bytes where they should be.
    end: Option<&'static str>,
}

/// `larder_kv.IpcMemory` or `larder_kv.DescriptorMemory`, by their attributes.
#[derive(FromPyObject)]
pub(crate) enum SharedMemory {
    Ipc { handle: Vec<u8>, offset: u64, size: u64 },
    Descriptor { descriptor: RawFd, size: u64 },
}

impl SharedMemory {
    fn resolve(self) -> PyResult<EngineMemory> {
        match self {
            Self::Ipc { handle, offset, size } => {
                let bytes = handle.len();
                let handle = handle.try_into().map_err(|_| {
                    PyValueError::new_err(format!("a CUDA IPC handle has 64 bytes, not {bytes}"))
                })?;
                Ok(EngineMemory::Ipc { handle, offset, bytes: size })
            }
            Self::Descriptor { descriptor, size } => {
                Ok(EngineMemory::Descriptor { descriptor: duplicate(descriptor)?, bytes: size })
            }
        }
    }
}

impl NodeTensors {
    pub(crate) fn new(inner: larder_client::NodeTensors) -> Self {
        Self { inner: Own::new(inner) }
    }

    /// # Errors
    /// `ForkedError`.
    pub(crate) fn get(&self) -> PyResult<&larder_client::NodeTensors> {
        self.inner.get()
    }

    /// The load of these pages.
    ///
    /// # Errors
    /// `ValueError` if there are no such layers; `ForkedError`.
    pub(crate) fn load(
        &self,
        pages: Vec<u32>,
        first_page: u64,
        layers: Option<(u32, u32)>,
    ) -> PyResult<LoadPages> {
        let layers = self.layer_range(layers)?;
        Ok(LoadPages { block: self.get()?.block(), pages, first_page, layers, by_layer: true })
    }

    /// The save of these pages.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(crate) fn save(
        &self,
        positions: Vec<u32>,
        pages: Vec<u32>,
        layers: Option<(u32, u32)>,
    ) -> PyResult<SavePages> {
        Ok(SavePages { positions, pages, layers: self.layer_range(layers)? })
    }

    fn layer_range(&self, layers: Option<(u32, u32)>) -> PyResult<Range<u32>> {
        let known = self.get()?.layout().layers();
        let (start, end) = layers.unwrap_or((0, known));
        if start < end && end <= known {
            return Ok(start..end);
        }
        Err(PyValueError::new_err(format!("there are no layers {start} to {end}, only {known}")))
    }
}

impl NodeCopy {
    pub(crate) fn new(inner: larder_client::NodeCopy) -> Self {
        Self { inner: Own::new(Arc::new(inner)) }
    }

    /// # Errors
    /// `ForkedError`.
    pub(crate) fn share(&self) -> PyResult<Arc<larder_client::NodeCopy>> {
        Ok(Arc::clone(self.inner.get()?))
    }
}

impl From<lane::CopyProgress> for CopyProgress {
    fn from(progress: lane::CopyProgress) -> Self {
        Self { layers: progress.layers, end: progress.end.map(lane::CopyEnd::name) }
    }
}

/// The layout and the memory of tensors that the node is to know.
///
/// # Errors
/// `ValueError` if they are impossible; `OSError` for a descriptor that is not open.
pub(crate) fn resolve(
    memory: Vec<SharedMemory>,
    layers: &[Bound<'_, PyAny>],
    pages_per_chunk: u32,
) -> PyResult<(PagedLayout, Vec<EngineMemory>)> {
    let bytes = memory.iter().map(|memory| match memory {
        SharedMemory::Ipc { size, .. } | SharedMemory::Descriptor { size, .. } => *size,
    });
    let layout = read_layout(layers, pages_per_chunk, &bytes.collect::<Vec<_>>())?;
    let memory = memory.into_iter().map(SharedMemory::resolve).collect::<PyResult<_>>()?;
    Ok((layout, memory))
}

#[pymethods]
impl NodeTensors {
    /// Layers.
    #[getter]
    fn layers(&self) -> PyResult<u32> {
        Ok(self.get()?.layout().layers())
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<larder_kv.NodeTensors of {} layers>", self.layers()?))
    }
}

#[pymethods]
impl NodeCopy {
    /// The progress at the node's last news. `Session.wait_for_copy` asks for news.
    #[getter]
    fn progress(&self) -> PyResult<CopyProgress> {
        Ok(self.share()?.progress().into())
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<larder_kv.NodeCopy, {:?}>", self.progress()?))
    }
}

#[pymethods]
impl CopyProgress {
    fn __repr__(&self) -> String {
        let Self { layers, end } = self;
        format!("CopyProgress(layers={layers}, end={})", end.map_or("None".into(), |end| format!("{end:?}")))
    }
}
