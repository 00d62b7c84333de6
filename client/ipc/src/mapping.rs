//! Memory that another process shares as a sealed memory file.
#![expect(unsafe_code, reason = "maps shared memory and copies through raw pointers")]

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use larder_device::HostMemory;
use larder_protocol::checksum::{BlockSummer, Stores};
use rustix::fs::{FileType, SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A whole memory file in this process's address space, for as long as the value lives.
///
/// Another process may write to it at any time. So there are never references into it, only copies: a copy that races
/// with a writer has unspecified bytes. Forked children do not inherit it.
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    writable: bool,
    /// What devices have of it.
    lent: Mutex<Weak<Lent>>,
}

/// A mapping as it is lent to devices: all of them hold it once.
struct Lent {
    _mapping: Arc<Mapping>,
}

/// The reason why a descriptor cannot be mapped as memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MappingError {
    /// Not a regular file: a pipe, a socket, a device.
    #[error("the descriptor for memory is no memory file")]
    NotAFile,
    /// The owner of the memory file may still shrink it; reading it could then end in `SIGBUS`.
    #[error("the memory file is not sealed against shrinking")]
    Unsealed,
    /// The memory has another size than announced, or is empty.
    #[error("the memory file has {found} bytes, but {announced} were announced")]
    WrongSize {
        /// The size announced.
        announced: u64,
        /// The size found.
        found: u64,
    },
    /// The system refused.
    #[error("cannot {what} shared memory: {source}{}", advice(source))]
    Os {
        /// The failed operation.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::OutOfMemory => {
            ". This process may map no more memory: raise its limit of the address space (ulimit -v) or of mappings (vm.max_map_count)"
        }
        _ => "",
    }
}

impl Mapping {
    /// Maps the file behind `descriptor`, which has `bytes` bytes, for reading.
    ///
    /// # Errors
    /// [`MappingError`] if the descriptor is no memory file of this size that is sealed against shrinking.
    pub fn read_only(descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, MappingError> {
        Self::new(descriptor, bytes, false)
    }

    /// Maps the file behind `descriptor`, which has `bytes` bytes, for reading and writing.
    ///
    /// # Errors
    /// [`MappingError`] if the descriptor is no memory file of this size that is sealed against shrinking, or may not
    /// be written.
    pub fn writable(descriptor: BorrowedFd<'_>, bytes: u64) -> Result<Self, MappingError> {
        Self::new(descriptor, bytes, true)
    }

    /// Copies `out.len()` bytes from `offset` on into `out`.
    ///
    /// # Panics
    /// Panics if these bytes do not lie within the mapping.
    pub fn copy_to(&self, offset: u64, out: &mut [u8]) {
        let from = self.checked(offset, out.len());
        // SAFETY: `checked` proved that the source lies within the mapping; the mapping lives as long as `self`. `out` is this
        // process's own memory and nothing else maps there, so the two do not overlap. Every byte pattern is a `u8`. The lease
        // that the caller holds keeps off writers in other processes; a writer that breaks the lease changes which bytes arrive,
        // nothing more, as no reference to the source exists.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Copies `out.len()` bytes from `offset` on into `out`, and adds the bytes that arrived to `sum`.
    ///
    /// # Panics
    /// Panics if these bytes do not lie within the mapping.
    pub fn copy_to_summed(&self, offset: u64, out: &mut [u8], sum: &mut BlockSummer) {
        let from = self.checked(offset, out.len());
        // SAFETY: as in `copy_to`.
        unsafe { sum.copy(from, out.as_mut_ptr(), out.len(), Stores::Cached) }
    }

    /// Passes the `bytes` bytes from `offset` on to `each`, in order, one piece at a time. The pieces are copies, since no
    /// reference into the mapping may exist.
    ///
    /// # Panics
    /// Panics if these bytes do not lie within the mapping.
    pub fn visit(&self, offset: u64, bytes: u64, mut each: impl FnMut(&[u8])) {
        let mut piece = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX).min(VISITED_PIECE_BYTES)];
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let most = usize::try_from(end - at).unwrap_or(usize::MAX).min(piece.len());
            self.copy_to(at, &mut piece[..most]);
            each(&piece[..most]);
            at += most as u64;
        }
    }

    /// Copies `bytes` to `offset` on.
    ///
    /// # Panics
    /// Panics if the bytes do not fit within the mapping, or the mapping is read-only.
    pub fn copy_from(&self, offset: u64, bytes: &[u8]) {
        assert!(self.writable, "the mapping is read-only");
        let to = self.checked(offset, bytes.len());
        // SAFETY: `checked` proved that the target lies within the mapping, which lives as long as `self` and is mapped
        // writable. `bytes` is this process's own memory, so the two do not overlap. Within this process the owners of
        // places (`StagedChunk`, by `&mut self`) keep two threads from writing to the same bytes; no reference to the
        // target exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// The address of the first byte, for copies by a device. Valid as long as the mapping lives. Write through it only if
    /// [`Mapping::is_writable`].
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The mapping as memory for copies by a device. It stays mapped as long as the result lives. All such values together hold the
    /// mapping once.
    #[must_use]
    pub fn host_memory(self: &Arc<Self>) -> HostMemory {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let owner = lent.upgrade().unwrap_or_else(|| Arc::new(Lent { _mapping: Arc::clone(self) }));
        *lent = Arc::downgrade(&owner);
        // SAFETY: the mapping stays as it is for as long as `owner` lives, and nobody makes references into it.
        unsafe { HostMemory::from_raw(self.start, self.len(), self.writable, owner) }
    }

    /// Bytes mapped; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether the mapping may be written to.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether `bytes` bytes from `offset` on lie within the mapping.
    #[must_use]
    pub fn contains(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.len())
    }

    fn new(descriptor: BorrowedFd<'_>, bytes: u64, writable: bool) -> Result<Self, MappingError> {
        let os = |what| move |error: rustix::io::Errno| MappingError::Os { what, source: error.into() };
        let status = fstat(descriptor).map_err(os("examine"))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(MappingError::NotAFile);
        }
        if !fcntl_get_seals(descriptor).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(MappingError::Unsealed);
        }
        let found = u64::try_from(status.st_size).unwrap_or(0);
        let length = usize::try_from(bytes).unwrap_or(0);
        if found != bytes || length == 0 {
            return Err(MappingError::WrongSize { announced: bytes, found });
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the kernel chooses the address, so no memory of this process is replaced.
        let start = unsafe { mmap(ptr::null_mut(), length, protection, MapFlags::SHARED, descriptor, 0) };
        let start = start.map_err(os("map"))?;
        let start = NonNull::new(start.cast()).ok_or(MappingError::NotAFile)?;
        let mapping = Self { start, bytes: length, writable, lent: Mutex::default() };
        // SAFETY: the range is the mapping made above. The advice changes nothing in this process. A forked child lacks the
        // mapping; code there may make only async-signal-safe calls, so it does not use this value.
        unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxDontFork) }
            .map_err(os("keep children from"))?;
        Ok(mapping)
    }

    /// The address of `offset`, if `bytes` bytes from there on lie within the mapping.
    fn checked(&self, offset: u64, bytes: usize) -> *mut u8 {
        let end = self.bytes;
        assert!(
            self.contains(offset, bytes as u64),
            "{bytes} bytes at {offset} are beyond the mapping's {end}"
        );
        // SAFETY: `offset` is at most the length of the mapping, which is one allocation.
        unsafe { self.start.as_ptr().add(offset as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` for this value alone, and no reference into it was ever made. The docs of
        // `as_ptr` say that its address is valid no longer than the value.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a mapping can be unmapped once");
    }
}

// SAFETY: the mapping belongs to the process, not to a thread; any thread may unmap it.
unsafe impl Send for Mapping {}

// SAFETY: `&Mapping` gives no references into the memory, only copies; its methods describe the races of copies.
unsafe impl Sync for Mapping {}

/// The size of a piece that fits into a core's first cache beside its source.
const VISITED_PIECE_BYTES: usize = 16 << 10;
