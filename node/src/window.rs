//! A session's write window: the memory through which an engine hands blocks over.
//!
//! Each window is separate memory, so a vanished engine's window needs no quarantine: the memory goes back to the system with the
//! session, even while somebody still maps it.

mod budget;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate};

pub use self::budget::{WindowBudget, WindowShare};

use crate::arena::mapping::{Access, Mapping, memory_file, seal};
use crate::arena::{Binding, MemoryError, OutOfBounds, PAGE_BYTES, numa};

/// Memory that one engine writes and the node reads. The engine cannot change the window's size, so no read of the node can fail.
/// The engine may write at any time.
///
/// All memory is taken at the start, and counts as the node's. Dropping the window gives the memory back to the system at
/// once, even while the engine keeps its mapping: pages that the engine touches afterwards are its own.
pub struct Window {
    mapping: Mapping,
    file: OwnedFd,
    /// The share goes back last, after the memory.
    _share: Option<WindowShare>,
}

impl Window {
    /// Makes a window of at least `bytes` (rounded up to whole pages) and takes its memory, from NUMA node `numa_node` as long as
    /// that node has memory. Blocks while the kernel clears the memory. `share` is the window's part of its tenant's budget.
    ///
    /// # Errors
    /// Fails if the system does not give the memory.
    pub fn create(
        bytes: u64,
        numa_node: Option<u32>,
        share: Option<WindowShare>,
    ) -> Result<Self, MemoryError> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        let (file, mapping) = memory_file("larder-window", MemfdFlags::empty(), bytes, Access::Read)?;
        numa::bind(&mapping, numa_node, Binding::Preferred);
        fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .map_err(|source| MemoryError::Window { bytes, source })?;
        seal(&file, SealFlags::empty())?;
        Ok(Self { mapping, file, _share: share })
    }

    /// Size of the window.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    /// The memory's file, for the engine to map.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Checks that a place lies within the window.
    ///
    /// # Errors
    /// Fails if the place does not lie within the window.
    pub fn check(&self, offset: u64, bytes: u64) -> Result<(), OutOfBounds> {
        self.mapping.check(offset, bytes)
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = fallocate(&self.file, hole, 0, self.mapping.bytes()) {
            tracing::warn!(%error, "the memory of a window stays until its engine unmaps it");
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{fcntl_add_seals, fstat, ftruncate};
    use rustix::io::Errno;

    use super::*;

    fn engines_mapping(window: &Window) -> Mapping {
        Mapping::new(window.descriptor(), window.bytes(), Access::Write).unwrap()
    }

    #[test]
    fn the_node_sees_what_the_engine_writes() {
        let window = Window::create(5000, Some(0), None).unwrap();
        assert_eq!(window.bytes(), 8192, "whole pages");
        engines_mapping(&window).write(8000, b"block").unwrap();
        let mut seen = [0; 5];
        window.mapping().read(8000, &mut seen).unwrap();
        assert_eq!(&seen, b"block");
    }

    /// Bytes of memory that a file takes.
    fn memory_bytes(file: impl AsFd) -> u64 {
        fstat(file).unwrap().st_blocks as u64 * 512
    }

    #[test]
    fn reading_pages_that_nobody_touched_takes_no_memory_that_was_not_taken_at_the_start() {
        let window = Window::create(1 << 20, Some(0), None).unwrap();
        assert_eq!(memory_bytes(window.descriptor()), 1 << 20);
        let mut seen = vec![1; 1 << 20];
        window.mapping().read(0, &mut seen).unwrap();
        assert_eq!(memory_bytes(window.descriptor()), 1 << 20);
        assert!(seen.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_window_that_is_dropped_has_no_memory_though_its_engine_keeps_it() {
        let window = Window::create(1 << 20, None, None).unwrap();
        let (kept, mapped) = (window.descriptor().try_clone_to_owned().unwrap(), engines_mapping(&window));
        mapped.write(0, b"block").unwrap();
        drop(window);
        assert_eq!(memory_bytes(&kept), 0);
    }

    #[test]
    fn the_engine_cannot_change_the_size_or_the_seals() {
        let window = Window::create(8192, None, None).unwrap();
        let file = window.descriptor();
        assert_eq!(ftruncate(file, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(file, 1 << 20), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(file, SealFlags::WRITE), Err(Errno::PERM));
    }

    #[test]
    fn a_window_whose_pages_the_engine_takes_away_reads_as_zeros() {
        let window = Window::create(8192, None, None).unwrap();
        engines_mapping(&window).write(0, b"block").unwrap();
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(window.descriptor(), hole, 0, 8192).unwrap();
        let mut seen = [1; 5];
        window.mapping().read(0, &mut seen).unwrap();
        assert_eq!(seen, [0; 5]);
    }

    #[test]
    fn a_window_larger_than_the_address_space_is_refused() {
        assert!(matches!(Window::create(1 << 62, None, None), Err(MemoryError::Map { .. })));
        assert!(matches!(Window::create(u64::MAX, None, None), Err(MemoryError::Size { .. })));
    }
}
