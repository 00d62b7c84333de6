//! Blocks in the node's arena as read-only Python buffers.
#![expect(unsafe_code, reason = "lends memory of the arena to Python by the buffer protocol")]

use std::ffi::c_int;
use std::sync::Arc;

use larder_client::LeaseGuard;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::damaged;
use crate::process::Own;

/// A block in the node's memory, read-only: a buffer of bytes that keeps its lease.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct BlockView {
    block: Own<Block>,
}

struct Block {
    start: *const u8,
    bytes: usize,
    /// Keeps the block in place and mapped.
    _guard: Arc<LeaseGuard>,
}

// SAFETY: `start` points into a mapping that belongs to the process, not to a thread, and that `_guard` keeps.
unsafe impl Send for Block {}

// SAFETY: a `Block` is never changed, and gives its pointer to readers only.
unsafe impl Sync for Block {}

impl BlockView {
    /// The view of a block that `guard` may read.
    ///
    /// # Errors
    /// `DamagedError`.
    pub(crate) fn new(
        py: Python<'_>,
        guard: Arc<LeaseGuard>,
        position: usize,
        block: usize,
    ) -> PyResult<Self> {
        // The pointer stays on this thread's stack meanwhile, as a number.
        let found =
            py.detach(|| guard.block_ptr(position, block).map(|(start, bytes)| (start as usize, bytes)));
        let (start, bytes) = found.map_err(|error| damaged(&error))?;
        Ok(Self { block: Own::new(Block { start: start as *const u8, bytes, _guard: guard }) })
    }
}

#[pymethods]
impl BlockView {
    /// # Safety
    /// Called by Python alone, with a view to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let block = slf.get().block.get()?;
        let (start, bytes) = (block.start.cast_mut().cast(), block.bytes as ffi::Py_ssize_t);
        // SAFETY: Python passes a view that may be filled. The memory stays as long as `slf`, to which the filled view holds
        // a reference, and read-only (1), so the mutable pointer is never written through.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, bytes, 1, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.block.get()?.bytes)
    }
}
