//! Chunks that Python may write.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use larder_client::SessionError;
use larder_client::copies::by_threads;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::released;
use crate::memory::Memory;
use crate::namespace::check_block;
use crate::process::Own;
use crate::requests::check_reserved;
use crate::waiting::Task;

/// The right to write those chunks of a chain that are missing. Stage them, fill them, commit them, all at once or some at a
/// time. Uncommitted chunks are given back by `abort()` or `close()`, at the end of a `with`, or when the reservation is dropped,
/// as soon as no staged chunk is left that could be committed.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Reservation {
    /// None once the reservation was given back.
    slot: Own<Mutex<Option<Arc<larder_client::Reservation>>>>,
}

/// Room for one chunk of a reservation, to be filled and committed. Dropping it frees the room.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct StagedChunk {
    position: u32,
    namespace: larder_client::Namespace,
    /// Identifies the reservation without keeping it: a committed chunk keeps nothing.
    of: Own<Weak<larder_client::Reservation>>,
    /// None once the chunk was committed or dropped.
    slot: Own<Shelf<larder_client::StagedChunk>>,
}

/// A value that a request takes out, and puts back if nothing was done with it.
type Shelf<T> = Arc<Mutex<Option<T>>>;

/// Staged chunks that were taken out for a commit, with their slots.
pub(crate) struct Taken {
    chunks: Vec<larder_client::StagedChunk>,
    slots: Vec<Shelf<larder_client::StagedChunk>>,
}

impl Reservation {
    pub(crate) fn new(reservation: larder_client::Reservation) -> Self {
        Self { slot: Own::new(Mutex::new(Some(Arc::new(reservation)))) }
    }

    /// # Errors
    /// `ReleasedError` if the reservation was given back; `ForkedError`.
    pub(crate) fn share(&self) -> PyResult<Arc<larder_client::Reservation>> {
        let slot = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone().ok_or_else(|| released("reservation"))
    }

    /// As [`Self::share`], if the chunks at `positions` are to be written.
    ///
    /// # Errors
    /// As [`Self::share`]; `ValueError` if one of them is not.
    pub(crate) fn share_for(&self, positions: &[u32]) -> PyResult<Arc<larder_client::Reservation>> {
        let reservation = self.share()?;
        check_reserved(&reservation, positions)?;
        Ok(reservation)
    }
}

impl StagedChunk {
    pub(crate) fn new(of: &Arc<larder_client::Reservation>, staged: larder_client::StagedChunk) -> Self {
        Self {
            position: staged.position(),
            namespace: of.namespace().clone(),
            of: Own::new(Arc::downgrade(of)),
            slot: Own::new(Arc::new(Mutex::new(Some(staged)))),
        }
    }

    /// Fills chunks, with `bytes` bytes in all, by the session's copy threads. The interpreter's lock is released once for all
    /// of them. `write` copies to the chunk of that number.
    pub(crate) fn fill<'a>(
        py: Python<'_>,
        staged: impl IntoIterator<Item = &'a Self>,
        bytes: u64,
        write: impl Fn(usize, &mut larder_client::StagedChunk) + Sync + Send,
    ) -> PyResult<()> {
        let slots = staged.into_iter().map(|chunk| chunk.slot.get()).collect::<PyResult<Vec<_>>>()?;
        let Some(first) = slots.first() else { return Ok(()) };
        let is_released = AtomicBool::new(false);
        py.detach(|| {
            let threads = locked(first).as_ref().map_or(1, |chunk| chunk.copy_threads(bytes));
            by_threads(threads, slots.iter().enumerate(), |(number, slot)| match &mut *locked(slot) {
                Some(chunk) => write(number, chunk),
                None => is_released.store(true, Ordering::Relaxed),
            });
        });
        if is_released.into_inner() { Err(released("staged chunk")) } else { Ok(()) }
    }

    /// Takes the chunk out for a copy, after which it is [put back](Self::put_back). If the copy fails, the chunk is gone.
    pub(crate) fn take_out(&self) -> PyResult<larder_client::StagedChunk> {
        locked(self.slot.get()?).take().ok_or_else(|| released("staged chunk"))
    }

    /// Puts back a chunk that was [taken out](Self::take_out).
    pub(crate) fn put_back(&self, chunk: larder_client::StagedChunk) -> PyResult<()> {
        *locked(self.slot.get()?) = Some(chunk);
        Ok(())
    }

    /// Bytes of block `block`.
    ///
    /// # Errors
    /// `ValueError` if there is no such block.
    pub(crate) fn block_bytes(&self, block: usize) -> PyResult<u64> {
        check_block(&self.namespace, block)?;
        Ok(self.namespace.block_bytes(block))
    }

    /// # Errors
    /// `ValueError` if `bytes` bytes at `offset` of block `block` are not to be written.
    pub(crate) fn check(&self, block: usize, offset: u64, bytes: u64) -> PyResult<()> {
        let block_bytes = self.block_bytes(block)?;
        if offset.checked_add(bytes).is_none_or(|end| end > block_bytes) {
            let text = format!("{bytes} bytes at {offset} do not fit in a block of {block_bytes}");
            return Err(PyValueError::new_err(text));
        }
        if !self.blocks()?.contains(&block) {
            return Err(PyValueError::new_err(format!("block {block} of this chunk is there already")));
        }
        Ok(())
    }
}

impl Taken {
    /// Takes chunks out, to be committed with `reservation`: all of them or none.
    ///
    /// # Errors
    /// `ReleasedError` if a chunk was committed or dropped; `ValueError` if it is another reservation's; `ForkedError`.
    pub(crate) fn of(
        staged: &[PyRef<'_, StagedChunk>],
        reservation: &Arc<larder_client::Reservation>,
    ) -> PyResult<Self> {
        let mut taken = Self { chunks: Vec::new(), slots: Vec::new() };
        for chunk in staged {
            if let Err(error) = taken.take(chunk, reservation) {
                taken.put_back();
                return Err(error);
            }
        }
        Ok(taken)
    }

    fn take(&mut self, chunk: &StagedChunk, reservation: &Arc<larder_client::Reservation>) -> PyResult<()> {
        if chunk.of.get()?.as_ptr() != Arc::as_ptr(reservation) {
            return Err(PyValueError::new_err("a staged chunk is committed with its own reservation"));
        }
        let slot = Arc::clone(chunk.slot.get()?);
        self.chunks.push(chunk.take_out()?);
        self.slots.push(slot);
        Ok(())
    }

    /// Commits the chunks, and returns the number of chunks that the node keeps. If the node has no time for the first message,
    /// puts all chunks back: their caller may commit them again. Chunks of later messages are not kept then.
    ///
    /// # Errors
    /// As [`larder_client::Session::commit`].
    pub(crate) async fn commit(
        self,
        session: larder_client::Session,
        reservation: Arc<larder_client::Reservation>,
    ) -> Result<u32, SessionError> {
        let mut kept = 0;
        for (number, part) in self.chunks.chunks(reservation.chunks_per_commit()).enumerate() {
            match session.commit_staged(&reservation, part).await {
                Ok(more) => kept += more,
                Err(busy @ SessionError::Busy { .. }) if number == 0 => {
                    self.put_back();
                    return Err(busy);
                }
                Err(SessionError::Busy { .. }) => return Ok(kept),
                Err(error) => return Err(error),
            }
        }
        Ok(kept)
    }

    fn put_back(self) {
        for (chunk, slot) in self.chunks.into_iter().zip(self.slots) {
            *locked(&slot) = Some(chunk);
        }
    }
}

#[pymethods]
impl Reservation {
    /// Positions (in the chain) of the chunks to write, ascending; the others are there already or are being written.
    #[getter]
    fn chunks(&self) -> PyResult<Vec<u32>> {
        Ok(self.share()?.chunks().to_vec())
    }

    /// The pools to write of each of these chunks, by number.
    #[getter]
    fn pools(&self) -> PyResult<Vec<Vec<usize>>> {
        Ok(self.share()?.pools().iter().map(|pools| pools.iter().collect()).collect())
    }

    /// Seconds, from the answer on, in which chunks may be committed.
    #[getter]
    fn seconds(&self) -> PyResult<f64> {
        Ok(self.share()?.deadline().as_secs_f64())
    }

    /// Gives back the uncommitted chunks, at once and without waiting.
    fn abort(&self) -> PyResult<()> {
        let reservation = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(reservation);
        Ok(())
    }

    /// The same as `abort`.
    fn close(&self) -> PyResult<()> {
        self.abort()
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.abort()
    }

    fn __aenter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        Task::known(slf.into_any())
    }

    #[pyo3(signature = (*_error))]
    fn __aexit__<'py>(&self, py: Python<'py>, _error: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        self.abort()?;
        Task::known(py.None().into_bound(py))
    }

    fn __repr__(&self) -> String {
        match self.share() {
            Ok(reservation) => format!("<larder_kv.Reservation of {} chunks>", reservation.chunks().len()),
            Err(_) => "<larder_kv.Reservation, given back>".into(),
        }
    }
}

#[pymethods]
impl StagedChunk {
    /// The chunk's position in the chain.
    #[getter]
    fn position(&self) -> u32 {
        self.position
    }

    /// The blocks to write, ascending: all of the chunk, unless the node has some of them.
    #[getter]
    fn blocks(&self) -> PyResult<Vec<usize>> {
        let slot = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner);
        let staged = slot.as_ref().ok_or_else(|| released("staged chunk"))?;
        Ok(staged.blocks().collect())
    }

    /// Copies `data`, any contiguous buffer, into block `block`, `offset` bytes from its start. All bytes of all `blocks`
    /// must be written before the commit. Other threads run meanwhile; none may change `data`.
    #[pyo3(signature = (data, *, block = 0, offset = 0))]
    fn copy_from(&self, py: Python<'_>, data: &Bound<'_, PyAny>, block: usize, offset: u64) -> PyResult<()> {
        let data = Memory::readable(data)?;
        self.check(block, offset, data.len())?;
        Self::fill(py, [self], data.len(), |_, staged| data.copy_to(0..data.len(), staged, block, offset))
    }

    /// Copies `sources` to block `block` of `staged` chunks, one source to each: contiguous buffers of exactly the block's size.
    /// The session's `copy_threads` share large copies. Other threads run meanwhile; none may change the sources.
    #[staticmethod]
    #[pyo3(signature = (staged, sources, *, block = 0))]
    fn copy_all(
        py: Python<'_>,
        staged: Vec<PyRef<'_, Self>>,
        sources: Vec<Bound<'_, PyAny>>,
        block: usize,
    ) -> PyResult<()> {
        if staged.len() != sources.len() {
            let text = format!("there are {} staged chunks and {} sources", staged.len(), sources.len());
            return Err(PyValueError::new_err(text));
        }
        let sources = sources.iter().map(Memory::readable).collect::<PyResult<Vec<_>>>()?;
        for (chunk, source) in staged.iter().zip(&sources) {
            chunk.check(block, 0, source.len())?;
            let bytes = chunk.block_bytes(block)?;
            if source.len() != bytes {
                let text = format!("the block has {bytes} bytes, a source has {}", source.len());
                return Err(PyValueError::new_err(text));
            }
        }
        let bytes = sources.iter().map(Memory::len).sum();
        Self::fill(py, staged.iter().map(|chunk| &**chunk), bytes, |number, chunk| {
            let source = &sources[number];
            source.copy_to(0..source.len(), chunk, block, 0);
        })
    }

    /// Frees the room without a commit.
    fn drop(&self) -> PyResult<()> {
        let staged = self.slot.get()?.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(staged);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.StagedChunk at {}>", self.position)
    }
}

fn locked<T>(slot: &Mutex<T>) -> MutexGuard<'_, T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}
