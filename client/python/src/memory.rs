//! Python's own memory, lent by the buffer protocol or by a descriptor, as source and target of copies.
#![expect(unsafe_code, reason = "copies between Python's buffers and blocks through raw pointers")]

use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::slice;

use larder_client::{BlockPart, Damaged, LeaseGuard, StagedChunk, StagedLayers};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyOSError, PyValueError};
use pyo3::prelude::*;

/// A contiguous buffer of Python's. It stays in place as long as this lives.
///
/// Its owner is told not to touch it during a copy; an owner that does so changes which bytes arrive.
pub(crate) struct Memory {
    start: *mut u8,
    bytes: u64,
    writable: bool,
    /// Keeps the memory.
    _buffer: PyUntypedBuffer,
}

/// A part of a leased block, and the part of a memory that it is copied to.
pub(crate) struct Target<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) range: Range<u64>,
    pub(crate) position: usize,
    pub(crate) block: usize,
    pub(crate) offset: u64,
}

// SAFETY: an exported buffer may be used from any thread until it is released, which `PyUntypedBuffer` does under the
// interpreter's lock.
unsafe impl Send for Memory {}

// SAFETY: as above; `&Memory` reads and writes the bytes through pointers only during a copy.
unsafe impl Sync for Memory {}

impl Memory {
    /// Borrows memory to read from.
    ///
    /// # Errors
    /// `BufferError` if the object is no contiguous buffer.
    pub(crate) fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the buffer is not contiguous"));
        }
        let (start, bytes) = (buffer.buf_ptr().cast(), buffer.len_bytes() as u64);
        Ok(Self { start, bytes, writable: !buffer.readonly(), _buffer: buffer })
    }

    /// Borrows memory to write to.
    ///
    /// # Errors
    /// `BufferError` if the object is no contiguous buffer, or read-only.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let memory = Self::readable(object)?;
        if !memory.writable {
            return Err(PyBufferError::new_err("the buffer is read-only"));
        }
        Ok(memory)
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes
    }

    /// # Errors
    /// `ValueError` if the bytes do not lie within the memory.
    pub(crate) fn check(&self, range: &Range<u64>) -> PyResult<()> {
        if range.start <= range.end && range.end <= self.bytes {
            return Ok(());
        }
        let text = format!("bytes {} to {} are beyond a memory of {}", range.start, range.end, self.bytes);
        Err(PyValueError::new_err(text))
    }

    /// The offset in this memory of `bytes` bytes at `address`; `None` if they do not lie within the memory.
    pub(crate) fn place(&self, address: u64, bytes: u64) -> Option<u64> {
        let start = address.checked_sub(self.start as u64)?;
        (start.checked_add(bytes)? <= self.bytes).then_some(start)
    }

    /// The target of one copy.
    ///
    /// # Panics
    /// Panics if the range is beyond the memory, or the memory is read-only.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's, whose owner is told not to touch it meanwhile"
    )]
    fn target(&self, range: &Range<u64>) -> &mut [u8] {
        assert!(self.writable && range.start <= range.end && range.end <= self.bytes);
        let bytes = (range.end - range.start) as usize;
        // SAFETY: the range lies within the buffer (asserted), which Python keeps in place while `_buffer` is exported, and
        // which it exported as writable. The slice lives for one copy; anybody who touches these bytes meanwhile breaks
        // the contract of the methods that call this. Slices that live at once share no byte: `copy_parts` checks it.
        unsafe { slice::from_raw_parts_mut(self.start.add(range.start as usize), bytes) }
    }

    /// Copies `range` into a block, to `offset` on.
    ///
    /// # Panics
    /// Panics if the range is beyond the memory or the block.
    pub(crate) fn copy_to(&self, range: Range<u64>, staged: &mut StagedChunk, block: usize, offset: u64) {
        assert!(range.start <= range.end && range.end <= self.bytes);
        let bytes = (range.end - range.start) as usize;
        // SAFETY: as in `target`, for reading.
        let bytes = unsafe { slice::from_raw_parts(self.start.add(range.start as usize), bytes) };
        staged.copy_from(block, offset, bytes);
    }

    /// Copies `range` into layers of the `chunk`-th chunk in the `part`-th slice, to `offset` on.
    ///
    /// # Panics
    /// Panics if the range is beyond the memory or the layers.
    pub(crate) fn copy_to_layers(
        &self,
        range: Range<u64>,
        staged: &mut StagedLayers,
        (chunk, part): (usize, usize),
        offset: u64,
    ) {
        assert!(range.start <= range.end && range.end <= self.bytes);
        let bytes = (range.end - range.start) as usize;
        // SAFETY: as in `target`, for reading.
        let bytes = unsafe { slice::from_raw_parts(self.start.add(range.start as usize), bytes) };
        staged.copy_from(chunk, part, offset, bytes);
    }
}

impl<'a> Target<'a> {
    fn part(&self) -> BlockPart<'a> {
        let &Self { memory, position, block, offset, .. } = self;
        BlockPart { position, block, offset, out: memory.target(&self.range) }
    }
}

/// Copies parts of leased blocks, with `bytes` bytes in all, by the session's copy threads unless two targets share memory.
///
/// # Errors
/// [`Damaged`]: the parts before it are copied.
///
/// # Panics
/// Panics if a range is beyond its memory or its block, or a memory is read-only.
pub(crate) fn copy_parts<'a>(
    guard: &LeaseGuard,
    bytes: u64,
    mut targets: impl Iterator<Item = Target<'a>>,
) -> Result<(), Damaged> {
    if guard.copy_threads(bytes) == 1 {
        return targets.try_for_each(|target| guard.copy_part(target.part()));
    }
    let targets: Vec<_> = targets.collect();
    if are_apart(&targets) {
        guard.copy_parts(targets.iter().map(Target::part))
    } else {
        targets.iter().try_for_each(|target| guard.copy_part(target.part()))
    }
}

/// Whether no two targets share a byte.
fn are_apart(targets: &[Target<'_>]) -> bool {
    let place = |Target { memory, range, .. }: &Target<'_>| {
        let start = memory.start as u64;
        (start + range.start, start + range.end)
    };
    let mut places: Vec<_> = targets.iter().map(place).collect();
    places.sort_unstable();
    places.windows(2).all(|two| two[0].1 <= two[1].0)
}

/// A duplicate of Python's descriptor, owned by Rust.
///
/// # Errors
/// `OSError` if it is no open descriptor.
pub(crate) fn duplicate(descriptor: RawFd) -> PyResult<OwnedFd> {
    let bad = || PyOSError::new_err(format!("{descriptor} is no open file descriptor"));
    if descriptor < 0 {
        return Err(bad());
    }
    // SAFETY: the descriptor is borrowed for one system call, which fails if it is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    borrowed.try_clone_to_owned().map_err(|_| bad())
}
