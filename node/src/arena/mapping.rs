//! Memory files mapped into this process: the node's only raw pointers.
#![expect(unsafe_code, reason = "mmap, and copies between memory that other processes see")]

use std::any::Any;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use larder_device::HostMemory;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::OutOfBounds;

/// A memory file, mapped shared for as long as the value lives. Its file must be sealed against shrinking before anybody
/// else gets it: else a touched page could be gone.
///
/// Other processes may see the memory, and some write it. So nothing here forms a reference to it, except
/// [`Mapping::slice`], whose caller promises that nobody writes.
pub(crate) struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
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

// SAFETY: the mapping belongs to the process, not to a thread; the value alone unmaps it.
unsafe impl Send for Mapping {}

// SAFETY: through a shared value, bytes are only copied to and from places that the caller names, and `slice` is unsafe:
// that two threads do not use one place at a time is upheld by the store, which gives a place to one writer, and to readers
// only once that writer is done.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of `file`. Children of this process do not get the mapping, core files do not contain it.
    pub(crate) fn new(file: BorrowedFd<'_>, bytes: u64, access: Access) -> Result<Self, Errno> {
        let bytes = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: without an address asked for, a new mapping touches no memory that is in use.
        let address = unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0)? };
        let address = NonNull::new(address.cast()).ok_or(Errno::NOMEM)?;
        let mapping = Self { address, bytes, access };
        mapping.advise(Advice::LinuxDontFork)?;
        if let Err(error) = mapping.advise(Advice::LinuxDontDump) {
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
        // SAFETY: the mapping stays as it is for as long as it lives, which `owner` sees to; the rest is the caller's promise.
        unsafe { HostMemory::from_raw(self.address, self.bytes as u64, is_writable, owner) }
    }

    /// Makes every page be there, so that no copy waits for the kernel later.
    ///
    /// # Errors
    /// `NOMEM` or `FAULT` if there is not enough memory, where the mapping is bound; `INVAL` where the kernel is older
    /// than 5.14 and cannot tell (see [`Self::touch`]).
    pub(crate) fn populate(&self) -> Result<(), Errno> {
        self.advise(Advice::LinuxPopulateWrite)
    }

    /// Lets the kernel back the memory with transparent huge pages, where it does so for memory files.
    pub(crate) fn prefer_huge_pages(&self) {
        if let Err(error) = self.advise(Advice::LinuxHugepage) {
            tracing::debug!(%error, "the kernel has no transparent huge pages");
        }
    }

    /// Makes every page be there by writing a zero into each: for fresh files and older kernels. Where memory is short, the
    /// process is killed.
    pub(crate) fn touch(&self) {
        assert_eq!(self.access, Access::Write, "only fresh memory is touched");
        for offset in (0..self.bytes).step_by(PAGE_BYTES) {
            // SAFETY: within the mapping, which is writable and not yet known to anybody else.
            unsafe { self.address.add(offset).write_volatile(0) };
        }
    }

    /// Copies `bytes` bytes from `source`, from `source_offset` on, to `offset`.
    pub(crate) fn copy_from(
        &self,
        source: &Self,
        source_offset: u64,
        offset: u64,
        bytes: u64,
    ) -> Result<(), OutOfBounds> {
        assert_eq!(self.access, Access::Write, "only memory that the node maps writable is written");
        let from = source.place(source_offset, bytes)?;
        let to = self.place(offset, bytes)?;
        // SAFETY: both places are within their mappings, and stay mapped as long as the values are borrowed. Two mappings
        // do not overlap. Another process may write `from` meanwhile (an engine its window): then what is copied is
        // undefined to the engine, but bytes are bytes, and no reference to them exists.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), bytes as usize) };
        Ok(())
    }

    /// Copies `bytes`, which are this process's own, to `offset`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        assert_eq!(self.access, Access::Write, "only memory that the node maps writable is written");
        let to = self.place(offset, bytes.len() as u64)?;
        // SAFETY: within a mapping that stays as long as it is borrowed; `bytes` is private memory, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
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
        // SAFETY: within the mapping, which lives as long as the borrow; that nobody writes is the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts(place.as_ptr(), bytes as usize) })
    }

    /// Whether a place lies within the mapping.
    pub(crate) fn check(&self, offset: u64, bytes: u64) -> Result<(), OutOfBounds> {
        self.place(offset, bytes).map(|_| ())
    }

    /// The address of the mapping, for system calls.
    pub(super) fn address(&self) -> *mut c_void {
        self.address.as_ptr().cast()
    }

    /// The address of a place, for system calls.
    pub(super) fn address_of(&self, offset: u64, bytes: u64) -> Result<*mut u8, OutOfBounds> {
        self.place(offset, bytes).map(NonNull::as_ptr)
    }

    /// Bytes mapped.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    fn place(&self, offset: u64, bytes: u64) -> Result<NonNull<u8>, OutOfBounds> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes()) {
            return Err(OutOfBounds { offset, bytes, size: self.bytes() });
        }
        // SAFETY: `offset` was just found to be at most the mapping's size.
        Ok(unsafe { self.address.add(offset as usize) })
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this mapping; none of the advice given here drops or replaces its pages.
        unsafe { madvise(self.address(), self.bytes, advice) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the value made the mapping and is its only owner; whoever borrowed from it is gone.
        if let Err(error) = unsafe { munmap(self.address(), self.bytes) } {
            tracing::error!(%error, bytes = self.bytes, "a mapping cannot be taken down");
        }
    }
}

const PAGE_BYTES: usize = 4096;

#[cfg(test)]
impl Mapping {
    /// Tries to make a read-only mapping writable.
    pub(crate) fn make_writable(&self) -> Result<(), Errno> {
        use rustix::mm::{MprotectFlags, mprotect};
        // SAFETY: the mapping keeps its pages and its size; only this process may do more with it.
        unsafe { mprotect(self.address(), self.bytes, MprotectFlags::READ | MprotectFlags::WRITE) }
    }
}
