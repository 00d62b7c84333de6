//! Blocks that Python may read.

use std::sync::{Arc, Mutex, PoisonError};

use larder_client::LeaseGuard;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::{damaged, released};
use crate::memory::{Memory, Target, copy_parts};
use crate::namespace::check_block;
use crate::process::Own;
use crate::view::BlockView;
use crate::waiting::Task;

/// The right to read the first `chunks` chunks of a chain; `chunks` is 0 on a miss. While the lease lives, the node keeps the
/// chunks in place. Give the lease back with `release()` or `close()`, as a context manager, or by dropping it.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Lease {
    /// None once it was released. Views hold the guard too.
    slot: Own<Mutex<Option<Arc<LeaseGuard>>>>,
}

impl Lease {
    pub(crate) fn new(guard: LeaseGuard) -> Self {
        Self::of(Arc::new(guard))
    }

    /// A lease that shares its guard with others.
    pub(crate) fn of(guard: Arc<LeaseGuard>) -> Self {
        Self { slot: Own::new(Mutex::new(Some(guard))) }
    }

    /// # Errors
    /// `ReleasedError` if the lease was released; `ForkedError`.
    pub(crate) fn guard(&self) -> PyResult<Arc<LeaseGuard>> {
        let slot = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| released("lease"))
    }
}

/// # Errors
/// `IndexError` or `ValueError` if block `block` of the chunk at `position` may not be read.
fn check_readable(guard: &LeaseGuard, position: usize, block: usize) -> PyResult<()> {
    if position >= guard.chunks() {
        let text = format!("{} chunks are leased, there is none at {position}", guard.chunks());
        return Err(PyIndexError::new_err(text));
    }
    check_block(guard.namespace(), block)?;
    if !guard.has_block(position, block) {
        let text = format!("block {block} of the chunk at {position} is not needed to restore this prefix");
        return Err(PyValueError::new_err(text));
    }
    Ok(())
}

#[pymethods]
impl Lease {
    /// Chunks leased, from the chain's first on.
    #[getter]
    fn chunks(&self) -> PyResult<usize> {
        Ok(self.guard()?.chunks())
    }

    /// Tokens of these chunks.
    #[getter]
    fn tokens(&self) -> PyResult<u64> {
        let guard = self.guard()?;
        Ok(guard.chunks() as u64 * u64::from(guard.namespace().chunk_tokens()))
    }

    /// Whether block `block` of the chunk at `position` may be read. If the namespace needs all pools of every chunk, all blocks
    /// may be read.
    #[pyo3(signature = (position, block = 0))]
    fn has_block(&self, position: usize, block: usize) -> PyResult<bool> {
        let guard = self.guard()?;
        check_block(guard.namespace(), block)?;
        Ok(position < guard.chunks() && guard.has_block(position, block))
    }

    /// Copies block `block` of the chunk at `position` into `out`: a writable, contiguous buffer of exactly the block's
    /// size. Other threads run meanwhile; none may touch `out`.
    ///
    /// Raises `DamagedError` if the session verified the block and it is wrong.
    #[pyo3(signature = (position, out, block = 0))]
    fn copy_block(
        &self,
        py: Python<'_>,
        position: usize,
        out: &Bound<'_, PyAny>,
        block: usize,
    ) -> PyResult<()> {
        self.copy_blocks(py, vec![out.clone()], position, block)
    }

    /// Copies block `block` of the chunks from position `first` on, one to each of `outs`, as `copy_block` does. The session's
    /// `copy_threads` share large copies.
    ///
    /// Raises `DamagedError` if a verified block is wrong: the blocks of the chunks before its `position` are copied.
    #[pyo3(signature = (outs, *, first = 0, block = 0))]
    fn copy_blocks(
        &self,
        py: Python<'_>,
        outs: Vec<Bound<'_, PyAny>>,
        first: usize,
        block: usize,
    ) -> PyResult<()> {
        let guard = self.guard()?;
        if outs.is_empty() {
            return Ok(());
        }
        check_readable(&guard, first, block)?;
        let mut memories = Vec::with_capacity(outs.len());
        for (position, out) in (first..).zip(&outs) {
            check_readable(&guard, position, block)?;
            let (out, bytes) = (Memory::writable(out)?, guard.namespace().block_bytes(block));
            if out.len() != bytes {
                let text = format!("the block has {bytes} bytes, `out` has {}", out.len());
                return Err(PyValueError::new_err(text));
            }
            memories.push(out);
        }
        let targets = (first..).zip(&memories).map(|(position, memory)| Target {
            memory,
            range: 0..memory.len(),
            position,
            block,
            offset: 0,
        });
        let bytes = memories.iter().map(Memory::len).sum();
        py.detach(|| copy_parts(&guard, bytes, targets)).map_err(|error| damaged(&error))
    }

    /// A read-only view of block `block` of the chunk at `position`, without a copy: pass it to `memoryview`, `numpy.frombuffer`
    /// or `torch.frombuffer`. The view, and everything made from it, keeps the lease, even after the lease itself was released. A
    /// forked child must not touch the view: the memory is not there.
    ///
    /// Raises `DamagedError` if the session verified the block and it is wrong.
    #[pyo3(signature = (position, block = 0))]
    fn view(&self, py: Python<'_>, position: usize, block: usize) -> PyResult<BlockView> {
        let guard = self.guard()?;
        check_readable(&guard, position, block)?;
        BlockView::new(py, guard, position, block)
    }

    /// Gives the lease back, at once and without waiting; views of it keep it until they are gone.
    fn release(&self) -> PyResult<()> {
        let guard = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(guard);
        Ok(())
    }

    /// The same as `release`.
    fn close(&self) -> PyResult<()> {
        self.release()
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release()
    }

    fn __aenter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        Task::known(slf.into_any())
    }

    #[pyo3(signature = (*_error))]
    fn __aexit__<'py>(&self, py: Python<'py>, _error: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        self.release()?;
        Task::known(py.None().into_bound(py))
    }

    fn __repr__(&self) -> String {
        match self.guard() {
            Ok(guard) => format!("<larder_kv.Lease of {} chunks>", guard.chunks()),
            Err(_) => "<larder_kv.Lease, given back>".into(),
        }
    }
}
