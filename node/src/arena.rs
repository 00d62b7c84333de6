//! The memory of the host tier: extents that engines map.
//!
//! Each extent is a memory file of its own (memfd). The node maps it, binds it to the NUMA node and faults it in. Engines map
//! it read-only: after the node has mapped the file, it is sealed against new writable mappings, writes and changes of size
//! (with `trust_engines`, against changes of size alone). An extent goes from one tenant to another only with new memory
//! ([`Arena::vacate`]), so that an old mapping never shows another tenant's bytes.

mod extent;
mod limits;
pub(crate) mod mapping;
mod maps;
pub(crate) mod numa;
mod placement;

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use larder_core::store::BlockMove;
use larder_net::blocking::no_thread;
use larder_protocol::checksum::BlockKey;
use rustix::io::Errno;

pub use extent::{ExtentMemory, ExtentSpec, Pages, Renewal};
pub use limits::{ArenaLimits, Binding, HugePages, MIN_EXTENT_BYTES, PAGE_BYTES};
pub use placement::{ArenaPlacement, PlacementSource};

use crate::threads;

/// The extents of one actor.
#[derive(Debug)]
pub struct Arena {
    spec: ExtentSpec,
    /// `None` while an extent has no memory: before [`Arena::occupy`], and after [`Arena::vacate`].
    extents: Vec<Option<Arc<ExtentMemory>>>,
}

/// A slot that waits for a block. Until the task that fills the slot ends, nobody else reads or writes it.
#[derive(Debug, Clone)]
pub struct Destination {
    /// The slot's memory.
    pub memory: Arc<ExtentMemory>,
    /// Offset of the slot in `memory`.
    pub offset: u64,
    /// Size of the slot in bytes.
    pub bytes: u64,
    /// Bytes that share one checksum: whole layers.
    pub range_bytes: u64,
    /// The block's name.
    pub key: BlockKey,
}

/// Why the system gives no memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No memory file can be made.
    #[error("cannot create a memory file{}", if *.0 == Errno::MFILE { ": raise the limit of open files" } else { "" })]
    Create(#[source] Errno),
    /// The file cannot have that size.
    #[error("cannot make a memory file of {bytes} bytes: lower [host] extent_bytes")]
    Size {
        /// The size.
        bytes: u64,
        /// The system's error.
        source: Errno,
    },
    /// The system has no addresses, or no huge pages, for the mapping.
    #[error(
        "cannot map {bytes} bytes of memory: lower [host] arena_bytes, or raise the limit of address space"
    )]
    Map {
        /// The size.
        bytes: u64,
        /// The system's error.
        source: Errno,
    },
    /// The system has no memory for the mapping, or none on the NUMA node that the mapping is bound to.
    #[error("cannot get {bytes} bytes of memory: lower [host] arena_bytes")]
    Fault {
        /// The size.
        bytes: u64,
        /// The system's error.
        source: Errno,
    },
    /// There is no memory for a write window.
    #[error(
        "cannot get {bytes} bytes of memory for a write window: free memory on the host, or lower [session] max_window_bytes"
    )]
    Window {
        /// The size.
        bytes: u64,
        /// The system's error.
        source: Errno,
    },
    /// The file cannot be sealed.
    #[error("cannot seal memory: the kernel must be Linux 5.1 or newer")]
    Seal(#[source] Errno),
    /// A thread that takes memory cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// A place that does not lie within its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes at {offset} do not lie within {size} bytes")]
pub struct OutOfBounds {
    /// The start of the place.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
    /// How large the memory is.
    pub size: u64,
}

impl Arena {
    /// An arena whose extents have no memory yet. [`fill`] takes memory from the system; [`Arena::occupy`] puts it into the
    /// arena.
    pub fn planned(limits: &ArenaLimits) -> Self {
        Self { spec: limits.extent, extents: vec![None; limits.extents as usize] }
    }

    /// An arena with all its memory.
    ///
    /// # Errors
    /// As [`fill`].
    #[cfg(test)]
    pub(crate) fn create(limits: &ArenaLimits) -> Result<Self, MemoryError> {
        let arena = std::sync::Mutex::new(Self::planned(limits));
        fill(limits, &|extent, memory| {
            arena.lock().unwrap().occupy(extent, memory);
            true
        })?;
        Ok(arena.into_inner().unwrap())
    }

    /// The memory of extent `extent`.
    ///
    /// # Panics
    /// Panics if there is no such extent, or if it has no memory: such an extent has no slots either, so nobody may ask.
    pub fn extent(&self, extent: u32) -> &Arc<ExtentMemory> {
        self.extents[extent as usize].as_ref().expect("a vacated extent has no slots")
    }

    /// The slot of a block.
    pub fn destination(&self, block: &BlockMove) -> Destination {
        let BlockMove { place, bytes, range_bytes, key, .. } = *block;
        let memory = Arc::clone(self.extent(place.extent));
        Destination { memory, offset: place.offset, bytes, range_bytes, key }
    }

    /// Whether extent `extent` has memory that nobody but the arena holds: no copy, send or device. Engines may map it.
    pub fn is_unshared(&self, extent: u32) -> bool {
        self.extents[extent as usize].as_ref().is_some_and(|memory| Arc::strong_count(memory) == 1)
    }

    /// Takes the memory of extent `extent` away, to replace it. Any thread may perform the renewal; its result goes to
    /// [`Self::occupy`]. May be called again after a failed renewal.
    ///
    /// # Panics
    /// Panics if there is no such extent.
    pub fn vacate(&mut self, extent: u32) -> Renewal {
        Renewal { extent, spec: self.spec, old: self.extents[extent as usize].take() }
    }

    /// Gives extent `extent` its new memory.
    ///
    /// # Panics
    /// Panics if there is no such extent, it has memory, or the new memory is of another arena.
    pub fn occupy(&mut self, extent: u32, memory: Arc<ExtentMemory>) {
        assert_eq!(memory.bytes(), self.spec.bytes, "extents of an arena have one size");
        let before = self.extents[extent as usize].replace(memory);
        assert!(before.is_none(), "only a vacated extent can be occupied");
    }

    /// The real place of the memory, and its pages, as the kernel says.
    #[cfg(test)]
    pub(crate) fn placement(&self) -> ArenaPlacement {
        ArenaPlacement::read(self.spec.numa_node, self.extents.iter().flatten())
    }
}

/// Takes the memory of all extents from the system, on as many threads as `limits` says, and waits until it is there. Any of
/// these threads calls `each` with an extent's number and memory. When `each` returns `false`, the threads take no more
/// extents.
///
/// # Errors
/// Fails if the system does not give all memory.
pub fn fill(
    limits: &ArenaLimits,
    each: &(dyn Fn(u32, Arc<ExtentMemory>) -> bool + Sync),
) -> Result<(), MemoryError> {
    let (next, failed) = (AtomicU32::new(0), OnceLock::new());
    let work = || {
        threads::pin_or_warn(&limits.cpus);
        loop {
            let extent = next.fetch_add(1, Ordering::Relaxed);
            if extent >= limits.extents || failed.get().is_some() {
                return;
            }
            match limits.extent.create().map(Arc::new) {
                Ok(memory) => {
                    if !each(extent, memory) {
                        return;
                    }
                }
                // An error of `set`: another thread has failed before.
                Err(error) => {
                    _ = failed.set(error);
                    return;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..limits.fault_threads.min(limits.extents as usize) {
            let thread = std::thread::Builder::new().name("larder-fault".into());
            thread.spawn_scoped(scope, work).map_err(|error| MemoryError::Thread(no_thread(error)))?;
        }
        Ok(())
    })?;
    failed.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
pub(crate) mod tests;
