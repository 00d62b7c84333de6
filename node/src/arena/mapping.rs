//! Memory files mapped into this process: the node's only raw pointers.
#![expect(unsafe_code, reason = "mmap, and copies between memory that other processes see")]

use std::any::Any;
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use larder_device::HostMemory;
use larder_protocol::checksum::{RangeChecksum, Stores};
use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;

use super::{MemoryError, OutOfBounds};

/// A memory file, mapped shared for as long as the value lives. The file must be sealed against shrinking before anybody else
/// gets it. Otherwise a page could be gone when this process touches it.
///
/// Other processes may see the memory, and some write it. So nothing here forms a reference to it, except
/// [`Mapping::slice`], whose caller promises that nobody writes. The store keeps threads apart: it gives a place to one writer,
/// and to readers only after this writer is done.
pub(crate) struct Mapping {
    memory: MmapRaw,
    access: Access,
}

/// This process's rights to mapped memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Read.
    Read,
    /// Read and write.
    Write,
}

/// A new memory file of `bytes` zeros that can be sealed, and its mapping.
///
/// # Errors
/// Fails if the system does not give it.
pub(crate) fn memory_file(
    name: &str,
    flags: MemfdFlags,
    bytes: u64,
    access: Access,
) -> Result<(OwnedFd, Mapping), MemoryError> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(name, flags).map_err(MemoryError::Create)?;
    ftruncate(&file, bytes).map_err(|source| MemoryError::Size { bytes, source })?;
    let mapping = Mapping::new(file.as_fd(), bytes, access);
    Ok((file, mapping.map_err(|source| MemoryError::Map { bytes, source })?))
}

/// Seals a memory file: from now on nobody can change its size or seals, or do what `more` forbids.
///
/// # Errors
/// Fails if the kernel refuses.
pub(crate) fn seal(file: &OwnedFd, more: SealFlags) -> Result<(), MemoryError> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | more;
    fcntl_add_seals(file, seals).map_err(MemoryError::Seal)
}

impl Mapping {
    /// Maps the first `bytes` of `file`. Children of this process do not get the mapping, core files do not contain it.
    pub(crate) fn new(file: BorrowedFd<'_>, bytes: u64, access: Access) -> Result<Self, Errno> {
        let mut options = MmapOptions::new();
        options.len(usize::try_from(bytes).map_err(|_| Errno::NOMEM)?);
        let memory = match access {
            Access::Read => options.map_raw_read_only(&file),
            Access::Write => options.map_raw(&file),
        };
        let mapping = Self { memory: memory.map_err(|error| errno(&error))?, access };
        mapping.advise(Advice::DontFork)?;
        if let Err(error) = mapping.advise(Advice::DontDump) {
            tracing::debug!(%error, "core files will contain cached blocks");
        }
        Ok(mapping)
    }

    /// The memory for copies by a device; it stays mapped as long as the result lives.
    pub(crate) fn host_memory(self: &Arc<Self>) -> HostMemory {
        // SAFETY: the owner is the mapping itself.
        unsafe { self.owned_by(Arc::<Self>::clone(self)) }
    }

    /// The memory, for copies by a device, kept by `owner`.
    ///
    /// # Safety
    /// `owner` keeps this mapping, and nobody makes references to bytes that a device may write.
    pub(crate) unsafe fn owned_by(&self, owner: Arc<dyn Any + Send + Sync>) -> HostMemory {
        let is_writable = self.access == Access::Write;
        // SAFETY: the mapping does not change while it lives, and `owner` keeps it alive. The caller promises the rest.
        unsafe { HostMemory::from_raw(self.start(), self.bytes(), is_writable, owner) }
    }

    /// Faults in every page, so that no copy waits for the kernel later.
    ///
    /// # Errors
    /// `NOMEM` or `FAULT` if there is not enough memory, or not enough on the NUMA node of the binding; `INVAL` if the kernel is
    /// older than 5.14 and cannot tell (see [`Self::touch`]).
    pub(crate) fn populate(&self) -> Result<(), Errno> {
        self.advise(Advice::PopulateWrite)
    }

    /// Lets the kernel back the memory with transparent huge pages, if it does so for memory files.
    pub(crate) fn prefer_huge_pages(&self) {
        if let Err(error) = self.advise(Advice::HugePage) {
            tracing::debug!(%error, "the kernel has no transparent huge pages");
        }
    }

    /// Faults in every page by writing a zero into it: for fresh files on older kernels. If memory is short, the kernel kills the
    /// process.
    pub(crate) fn touch(&self) {
        assert_eq!(self.access, Access::Write, "only fresh memory is touched");
        for offset in (0..self.memory.len()).step_by(PAGE_BYTES) {
            // SAFETY: the address is within the mapping, which is writable and not yet known to anybody else.
            unsafe { self.start().add(offset).write_volatile(0) };
        }
    }

    /// Copies `bytes` bytes at `source_offset` of `source` to `offset`, past the caches, and adds the copied bytes to `sum`.
    pub(crate) fn copy_from(
        &self,
        source: &Self,
        source_offset: u64,
        offset: u64,
        bytes: u64,
        sum: &mut RangeChecksum,
    ) -> Result<(), OutOfBounds> {
        assert_eq!(self.access, Access::Write, "only memory that the node maps writable is written");
        let from = source.place(source_offset, bytes)?;
        let to = self.place(offset, bytes)?;
        // SAFETY: both places are within their mappings, and stay mapped as long as the values are borrowed. Two mappings do
        // not overlap. Another process may write `from` meanwhile (an engine its window). The copied bytes are then arbitrary,
        // but any byte is valid, and no reference to the memory exists.
        unsafe { sum.copy(from.as_ptr(), to.as_ptr(), bytes as usize, Stores::Streamed) };
        Ok(())
    }

    /// Copies `bytes`, which are this process's own, to `offset`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        assert_eq!(self.access, Access::Write, "only memory that the node maps writable is written");
        let to = self.place(offset, bytes.len() as u64)?;
        // SAFETY: `to` is within a mapping that stays as long as it is borrowed; `bytes` is private memory, so the two do not
        // overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies `bytes`, which are this process's own, to `offset`, and adds them to `sum`.
    pub(crate) fn write_summed(
        &self,
        offset: u64,
        bytes: &[u8],
        stores: Stores,
        sum: &mut RangeChecksum,
    ) -> Result<(), OutOfBounds> {
        assert_eq!(self.access, Access::Write, "only memory that the node maps writable is written");
        let to = self.place(offset, bytes.len() as u64)?;
        // SAFETY: as in `write`.
        unsafe { sum.copy(bytes.as_ptr(), to.as_ptr(), bytes.len(), stores) };
        Ok(())
    }

    /// Copies the bytes from `offset` on into `out`.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.place(offset, out.len() as u64)?;
        // SAFETY: `from` is within the mapping, `out` is private memory of this process; as in `copy_from`, no reference to
        // the mapped bytes exists.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// The bytes at a place, in place.
    ///
    /// # Safety
    /// Nobody, in this process or another, writes the place while the slice lives.
    pub(crate) unsafe fn slice(&self, offset: u64, bytes: u64) -> Result<&[u8], OutOfBounds> {
        let place = self.place(offset, bytes)?;
        // SAFETY: the place is within the mapping, which lives as long as the borrow. The caller promises that nobody writes.
        Ok(unsafe { std::slice::from_raw_parts(place.as_ptr(), bytes as usize) })
    }

    /// Whether a place lies within the mapping.
    pub(crate) fn check(&self, offset: u64, bytes: u64) -> Result<(), OutOfBounds> {
        self.place(offset, bytes).map(|_| ())
    }

    /// The address of the mapping, for system calls.
    pub(super) fn address(&self) -> *mut c_void {
        self.memory.as_mut_ptr().cast()
    }

    /// The address of a place, for system calls.
    pub(super) fn address_of(&self, offset: u64, bytes: u64) -> Result<*mut u8, OutOfBounds> {
        self.place(offset, bytes).map(NonNull::as_ptr)
    }

    /// Bytes mapped.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.memory.as_mut_ptr()).expect("nothing is mapped at address 0")
    }

    fn place(&self, offset: u64, bytes: u64) -> Result<NonNull<u8>, OutOfBounds> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes()) {
            return Err(OutOfBounds { offset, bytes, size: self.bytes() });
        }
        // SAFETY: `offset` was just found to be at most the mapping's size.
        Ok(unsafe { self.start().add(offset as usize) })
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        self.memory.advise(advice).map_err(|error| errno(&error))
    }
}

/// The system's error number. An error that the system did not cause counts as a lack of memory.
fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::NOMEM)
}

const PAGE_BYTES: usize = 4096;

#[cfg(test)]
impl Mapping {
    /// Tries to make a read-only mapping writable.
    pub(crate) fn make_writable(&self) -> Result<(), Errno> {
        use rustix::mm::{MprotectFlags, mprotect};
        // SAFETY: the mapping keeps its pages and its size; only this process may do more with it.
        unsafe { mprotect(self.address(), self.memory.len(), MprotectFlags::READ | MprotectFlags::WRITE) }
    }
}
