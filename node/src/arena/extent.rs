//! One extent of an arena: a sealed memory file, mapped by the node.
#![expect(unsafe_code, reason = "reads blocks in place where no engine can write")]

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use bytes::Bytes;
use larder_device::HostMemory;
use larder_protocol::checksum::{RangeChecksum, Stores, block_ranges};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;

use super::mapping::{Access, Mapping, memory_file, seal};
use super::{Binding, HugePages, MemoryError, OutOfBounds, numa};

/// The wanted memory of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentSpec {
    /// Size in bytes.
    pub bytes: u64,
    /// The NUMA node to bind the memory to; `None` binds it to none.
    pub numa_node: Option<u32>,
    /// How to bind the memory.
    pub binding: Binding,
    /// Whether to try for huge pages.
    pub huge_pages: HugePages,
    /// Whether engines may map the memory writable.
    pub trust_engines: bool,
}

/// The memory of one extent. It stays mapped here as long as the value lives, and exists as long as any process maps it.
pub struct ExtentMemory {
    mapping: Mapping,
    file: OwnedFd,
    spec: ExtentSpec,
    pages: Pages,
}

/// The pages that an extent is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// The system's ordinary pages. The system may join them to transparent huge pages.
    Ordinary,
    /// Reserved huge pages of 2 MiB.
    Huge,
}

/// The order to replace an extent's memory. Holds the old memory until then.
#[derive(Debug)]
pub struct Renewal {
    /// Number of the extent.
    pub extent: u32,
    pub(super) spec: ExtentSpec,
    pub(super) old: Option<Arc<ExtentMemory>>,
}

impl ExtentSpec {
    /// Takes memory from the system, faults it in and seals it. Takes about a second for each GiB.
    ///
    /// # Errors
    /// Fails if the system gives no memory. Missing huge pages and a refused binding are no errors.
    pub fn create(self) -> Result<ExtentMemory, MemoryError> {
        if self.huge_pages == HugePages::Auto {
            match self.create_from(Pages::Huge) {
                Ok(memory) => return Ok(memory),
                Err(error) => {
                    let reason = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::debug!(%error, reason, "no huge pages for an extent");
                }
            }
        }
        match self.create_from(Pages::Ordinary) {
            // Other NUMA nodes may have the memory that this one lacks.
            Err(MemoryError::Fault { .. }) if self.numa_node.is_some() && self.binding == Binding::Strict => {
                tracing::warn!(
                    numa_node = self.numa_node,
                    "the NUMA node is full: memory comes from others too"
                );
                Self { binding: Binding::Preferred, ..self }.create_from(Pages::Ordinary)
            }
            result => result,
        }
    }

    fn create_from(self, pages: Pages) -> Result<ExtentMemory, MemoryError> {
        let bytes = self.bytes;
        let flags = match pages {
            Pages::Ordinary => MemfdFlags::empty(),
            Pages::Huge => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        };
        let (file, mapping) = memory_file("larder-arena", flags, bytes, Access::Write)?;
        numa::bind(&mapping, self.numa_node, self.binding);
        if pages == Pages::Ordinary && self.huge_pages == HugePages::Auto {
            mapping.prefer_huge_pages();
        }
        match mapping.populate() {
            Ok(()) => {}
            // Touching a huge page that is not there kills the process. So only ordinary pages are touched on such an old kernel.
            Err(Errno::INVAL) if pages == Pages::Ordinary => mapping.touch(),
            Err(source) => return Err(MemoryError::Fault { bytes, source }),
        }
        // Sealed only now, so the node's own mapping, made before, stays writable.
        seal(&file, if self.trust_engines { SealFlags::empty() } else { SealFlags::FUTURE_WRITE })?;
        Ok(ExtentMemory { mapping, file, spec: self, pages })
    }
}

impl ExtentMemory {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    /// The kind of the memory's pages.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Whether engines may map the memory writable.
    pub fn is_writable_by_engines(&self) -> bool {
        self.spec.trust_engines
    }

    /// The memory's file, for engines to map.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether a place lies within the extent.
    ///
    /// # Errors
    /// Fails if it does not.
    pub fn check(&self, offset: u64, bytes: u64) -> Result<(), OutOfBounds> {
        self.mapping.check(offset, bytes)
    }

    /// Copies `bytes` bytes of a window, from `source` on, to `offset`, and adds the copied bytes to `sum`. The caller has that
    /// place to itself.
    ///
    /// # Errors
    /// Fails if either place is not within its memory: nothing is copied.
    pub(crate) fn copy_in_from(
        &self,
        window: &Mapping,
        source: u64,
        offset: u64,
        bytes: u64,
        sum: &mut RangeChecksum,
    ) -> Result<(), OutOfBounds> {
        self.mapping.copy_from(window, source, offset, bytes, sum)
    }

    /// Copies `bytes` to `offset`. The caller has that place to itself.
    ///
    /// # Errors
    /// Fails if the place is not within the extent: nothing is copied.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.mapping.write(offset, bytes)
    }

    /// Copies `bytes` to `offset`, and adds them to `sum`. The caller has that place to itself.
    ///
    /// # Errors
    /// Fails if the place is not within the extent: nothing is copied.
    pub(crate) fn copy_in_summed(
        &self,
        offset: u64,
        bytes: &[u8],
        stores: Stores,
        sum: &mut RangeChecksum,
    ) -> Result<(), OutOfBounds> {
        self.mapping.write_summed(offset, bytes, stores, sum)
    }

    /// The bytes at a place, without a copy. `lease` keeps the place from being written, and is dropped with the last reference
    /// to the bytes. Empty if the place is not within the extent.
    ///
    /// If engines can write the extent, the bytes are copied.
    #[must_use]
    pub fn share<L: Send + Sync + 'static>(
        self: &Arc<Self>,
        offset: u64,
        bytes: u64,
        lease: Arc<L>,
    ) -> Bytes {
        if self.check(offset, bytes).is_err() {
            return Bytes::new();
        }
        if self.is_writable_by_engines() {
            let mut copied = vec![0; bytes as usize];
            return if self.copy_out(offset, &mut copied).is_ok() { copied.into() } else { Bytes::new() };
        }
        Bytes::from_owner(SharedBytes { memory: Arc::clone(self), offset, bytes, _lease: lease })
    }

    /// Copies the bytes from `offset` on into `out`.
    ///
    /// # Errors
    /// Fails if the place is not within the extent: nothing is copied.
    pub fn copy_out(&self, offset: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.mapping.read(offset, out)
    }

    /// The bytes at a place, in place; `None` if engines can write there (use [`Self::copy_out`]).
    ///
    /// # Errors
    /// Fails if the place is not within the extent.
    ///
    /// # Safety
    /// While the slice lives, no copy goes to that place: the caller holds a lease on the place, or is its writer and has
    /// finished.
    pub unsafe fn bytes_at(&self, offset: u64, bytes: u64) -> Result<Option<&[u8]>, OutOfBounds> {
        if self.is_writable_by_engines() {
            return self.check(offset, bytes).map(|()| None);
        }
        // SAFETY: the file is sealed, so no other process writes. The caller promises that this process does not write either.
        unsafe { self.mapping.slice(offset, bytes) }.map(Some)
    }

    /// Adds the bytes of a place to a checksum. The caller is the place's only writer, and does not write meanwhile.
    ///
    /// # Errors
    /// Fails if the place is not within the extent.
    pub(crate) fn add_to(
        &self,
        checksum: &mut RangeChecksum,
        offset: u64,
        bytes: u64,
    ) -> Result<(), OutOfBounds> {
        // SAFETY: only one order at a time writes a place. That order calls this method, between its copies.
        if let Some(slice) = unsafe { self.bytes_at(offset, bytes)? } {
            checksum.update(slice);
            return Ok(());
        }
        let mut bounce = vec![0; bytes.min(BOUNCED_BYTES) as usize];
        for piece in block_ranges(bytes, BOUNCED_BYTES) {
            let bounced = &mut bounce[..(piece.end - piece.start) as usize];
            self.copy_out(offset + piece.start, bounced)?;
            checksum.update(bounced);
        }
        Ok(())
    }

    /// The address of a place in this process's memory, for transfers by the kernel. The caller keeps the extent, and uses
    /// the place as a reader or as its only writer.
    ///
    /// # Errors
    /// Fails if the place is not within the extent.
    pub(crate) fn address_of(&self, offset: u64, bytes: u64) -> Result<*mut u8, OutOfBounds> {
        self.mapping.address_of(offset, bytes)
    }

    /// The memory for copies by a device; it stays mapped as long as the result lives. The device uses a place as a reader or
    /// as its only writer.
    pub(crate) fn host_memory(self: &Arc<Self>) -> HostMemory {
        // SAFETY: the extent keeps its mapping. Only readers of a complete block make references to its place, and a device
        // writes only to places of incomplete blocks.
        unsafe { self.mapping.owned_by(Arc::clone(self) as Arc<dyn Any + Send + Sync>) }
    }

    pub(super) fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

/// A leased place, as bytes.
struct SharedBytes<L> {
    memory: Arc<ExtentMemory>,
    offset: u64,
    bytes: u64,
    _lease: Arc<L>,
}

impl<L> AsRef<[u8]> for SharedBytes<L> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the lease keeps the place from reuse, so nobody writes it as long as this value lives; `share` made it only
        // for an extent that no engine can write.
        let bytes = unsafe { self.memory.bytes_at(self.offset, self.bytes) };
        bytes.ok().flatten().unwrap_or_default()
    }
}

impl Renewal {
    /// Drops the old memory and takes new memory: all zeros, and unknown to every other process.
    ///
    /// The old memory returns to the system before the new memory is taken, unless somebody else holds it.
    ///
    /// # Errors
    /// Fails if the system gives no memory: the extent then has none. To try again, ask the arena to vacate it again.
    pub fn perform(self) -> Result<Arc<ExtentMemory>, MemoryError> {
        drop(self.old);
        self.spec.create().map(Arc::new)
    }
}

impl fmt::Debug for ExtentMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExtentMemory").field("spec", &self.spec).field("pages", &self.pages).finish()
    }
}

/// Bytes copied and summed at a time: a piece of this size stays in the CPU core's own cache.
const BOUNCED_BYTES: u64 = 128 << 10;

#[cfg(test)]
mod tests;
