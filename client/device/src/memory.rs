//! Host memory that a device reads and writes on its own.
#![expect(unsafe_code, reason = "copies through raw pointers into memory that others write too")]

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::fstat;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// A piece of host memory, alive as long as any clone.
///
/// A device, and other processes if the memory is shared, may write to it at any time. So there are never references into it,
/// only copies; a copy that races with a writer has unspecified bytes.
#[derive(Clone)]
pub struct HostMemory {
    start: NonNull<u8>,
    bytes: u64,
    is_writable: bool,
    /// Keeps the memory where it is.
    _owner: Arc<dyn Any + Send + Sync>,
}

/// Pages that were mapped for one piece of memory.
struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

impl HostMemory {
    /// New memory, all zeros, on page boundaries. A forked child does not have it: else the first write after a fork would move the
    /// pages, and a device would go on with the old ones.
    ///
    /// # Errors
    /// Fails if there is no memory, or `bytes` is 0.
    pub fn allocate(bytes: u64) -> io::Result<Self> {
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the kernel chooses the address, so no memory of this process is replaced.
        let start = unsafe {
            mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let owner = Arc::new(Pages { start, bytes: length });
        // SAFETY: the pages were just mapped. A forked child never uses them.
        unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxDontFork) }?;
        Ok(Self { start, bytes, is_writable: true, _owner: owner })
    }

    /// Maps the first `bytes` bytes of a memory file, shared with its other owners. If somebody shrinks the file, touching
    /// the missing bytes ends this process: use it for sealed files, or files of one's own.
    ///
    /// # Errors
    /// Fails if the file is shorter, cannot be mapped, or `bytes` is 0.
    pub fn map(file: BorrowedFd<'_>, bytes: u64) -> io::Result<Self> {
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if u64::try_from(fstat(file)?.st_size).unwrap_or(0) < bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: the kernel chooses the address, so no memory of this process is replaced.
        let start = unsafe {
            mmap(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let owner = Arc::new(Pages { start, bytes: length });
        Ok(Self { start, bytes, is_writable: true, _owner: owner })
    }

    /// Memory that `owner` keeps where it is.
    ///
    /// # Safety
    /// The `bytes` bytes from `start` on are mapped, and writable where `is_writable`, for as long as `owner` lives, and nobody
    /// makes a reference into them.
    #[must_use]
    pub unsafe fn from_raw(
        start: NonNull<u8>,
        bytes: u64,
        is_writable: bool,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { start, bytes, is_writable, _owner: owner }
    }

    /// The address of the first byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The number of bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a device may write to it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Whether `bytes` bytes from `offset` on lie within it.
    #[must_use]
    pub fn contains(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }

    /// Copies the bytes from `offset` on.
    ///
    /// # Panics
    /// Panics if these bytes are beyond the memory.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let from = self.at(offset, out.len() as u64);
        // SAFETY: `at` proved that the source lies within the memory, which `_owner` keeps. `out` is a reference, and there are
        // none into this memory, so the two do not overlap. Every byte pattern is a `u8`.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) }
    }

    /// Copies `bytes` to `offset` on.
    ///
    /// # Panics
    /// Panics if the target is beyond the memory, or the memory is read-only.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(self.is_writable, "the memory is read-only");
        let to = self.at(offset, bytes.len() as u64);
        // SAFETY: as in `read`, with the directions exchanged; the memory is writable.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies `bytes` bytes from `offset` on to `to` of `target`, which may be the same memory.
    ///
    /// # Panics
    /// Panics if either range is beyond its memory, or the target is read-only.
    pub fn copy_to(&self, offset: u64, target: &Self, to: u64, bytes: u64) {
        assert!(target.is_writable, "the memory is read-only");
        let (from, to) = (self.at(offset, bytes), target.at(to, bytes));
        // SAFETY: `at` proved both ranges to lie within their memory, and both owners live. `ptr::copy` allows an overlap.
        unsafe { ptr::copy(from, to, bytes as usize) }
    }

    /// The word at `offset`. All bytes that were written before the word are visible too.
    ///
    /// # Panics
    /// Panics if the word is beyond the memory, or unaligned.
    #[must_use]
    pub fn word(&self, offset: u64) -> u32 {
        self.atomic(offset).load(Ordering::Acquire)
    }

    /// Writes the word at `offset`, after all bytes that were written before.
    ///
    /// # Panics
    /// Panics if the word is beyond the memory or unaligned, or the memory is read-only.
    pub fn set_word(&self, offset: u64, value: u32) {
        assert!(self.is_writable, "the memory is read-only");
        self.atomic(offset).store(value, Ordering::Release);
    }

    /// The values that keep the memory.
    #[cfg(test)]
    pub(crate) fn holders(&self) -> usize {
        Arc::strong_count(&self._owner)
    }

    fn atomic(&self, offset: u64) -> &AtomicU32 {
        let at = self.at(offset, 4).cast::<u32>();
        assert!(at.is_aligned(), "a word stands at a multiple of 4");
        // SAFETY: the word lies within the memory, is aligned, and lives as long as `self`. Words of flags are accessed by
        // atomic operations alone, here and by devices.
        unsafe { AtomicU32::from_ptr(at) }
    }

    fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        assert!(self.contains(offset, bytes), "{bytes} bytes at {offset} are beyond {}", self.bytes);
        // SAFETY: `offset` is at most the length of the memory, which is one allocation.
        unsafe { self.start.as_ptr().add(offset as usize) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value alone, and the last `HostMemory` of it is gone.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "memory can be unmapped once");
    }
}

// SAFETY: the memory belongs to the process, not to a thread; its owner is `Send + Sync`.
unsafe impl Send for HostMemory {}

// SAFETY: `&HostMemory` gives no references to bytes, only copies and atomic words.
unsafe impl Sync for HostMemory {}

// SAFETY: the pages belong to the process, not to a thread.
unsafe impl Send for Pages {}

// SAFETY: `&Pages` gives access to nothing.
unsafe impl Sync for Pages {}

/// Read-only access to the memory.
#[cfg(test)]
pub(crate) fn read_only(start: NonNull<u8>, memory: HostMemory) -> HostMemory {
    let bytes = memory.bytes;
    // SAFETY: the owner is the memory itself.
    unsafe { HostMemory::from_raw(start, bytes, false, Arc::new(memory)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_lacks_the_memory() {
        let memory = HostMemory::allocate(4_096).unwrap();
        let at = memory.as_ptr() as u64;
        let is_its_range = |line: &&str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let range = range.and_then(|(start, end)| {
                Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
            });
            range.is_some_and(|range| range.contains(&at))
        };
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !is_its_range(line));
        let flags = lines.find(|line| line.starts_with("VmFlags")).unwrap();
        assert!(flags.split(' ').any(|flag| flag == "dc"), "{flags}");
    }
}
