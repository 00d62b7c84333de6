//! Memory for transfers: aligned for O_DIRECT, on huge pages if the kernel has any.
//!
//! Drives take a bounded number of pieces of memory per request. With pages of 4 KiB, requests are small: on a virtual drive
//! that allows 254 pieces, blocks of 4 MiB moved at a third of the rate of huge pages. io_uring registers the buffers at the
//! start, where memory may be locked, so their pages are looked up once.
#![expect(unsafe_code, reason = "memory with a size and alignment of its own")]

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::{fmt, slice};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Memory that begins at a huge page's boundary. It is zeros at first.
pub struct Buffer {
    /// The mapping, which is larger than the buffer by a huge page.
    mapping: NonNull<c_void>,
    mapped: usize,
    start: usize,
    bytes: usize,
    /// The number under which a device knows it.
    pub(super) number: Option<u16>,
}

// SAFETY: the memory belongs to the value alone, and no thread is special to it.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Memory from the system.
    ///
    /// # Panics
    /// Panics if the system has none left.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let mapped = bytes + HUGE_PAGE_BYTES;
        // SAFETY: without an address asked for, a new mapping touches no memory that is in use.
        let mapping = unsafe {
            mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mapping = mapping.ok().and_then(NonNull::new).expect("the system gives memory for a buffer");
        let start = mapping.as_ptr().cast::<u8>().align_offset(HUGE_PAGE_BYTES);
        // SAFETY: the range is this mapping; the advice changes which pages it gets, not what is in them.
        if let Err(error) = unsafe { madvise(mapping.as_ptr(), mapped, Advice::LinuxHugepage) } {
            tracing::debug!(%error, "no huge pages for the disk tier's buffers");
        }
        Self { mapping, mapped, start, bytes, number: None }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: within the mapping, which lives as long as the value, is initialised by the kernel, and is nobody else's:
        // while the kernel has it, the value is in a transfer, and whoever has that does not call this.
        unsafe { slice::from_raw_parts(self.address(), self.bytes) }
    }

    /// Its bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; that nobody else reads is the borrow's promise.
        unsafe { slice::from_raw_parts_mut(self.address(), self.bytes) }
    }

    pub(super) fn address(&self) -> *mut u8 {
        // SAFETY: `start` is less than a huge page, by which the mapping is larger than the buffer.
        unsafe { self.mapping.as_ptr().cast::<u8>().add(self.start) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the value made the mapping and is its only owner; whoever borrowed from it is gone.
        if let Err(error) = unsafe { munmap(self.mapping.as_ptr(), self.mapped) } {
            tracing::error!(%error, bytes = self.mapped, "a buffer cannot be given back");
        }
    }
}

const HUGE_PAGE_BYTES: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_zeroed_and_its_own() {
        let (mut one, two) = (Buffer::new(8192), Buffer::new(3 << 20));
        assert!(one.bytes().as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
        one.bytes_mut().fill(7);
        assert!(two.bytes().iter().all(|&byte| byte == 0) && two.bytes().len() == 3 << 20);
        assert!(one.bytes().iter().all(|&byte| byte == 7) && one.bytes().len() == 8192);
    }
}
