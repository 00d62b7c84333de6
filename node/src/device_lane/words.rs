//! The page of words by which copies and an engine's streams wait for each other. Each session has its own page.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use larder_device::HostMemory;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::arena::MemoryError;
use crate::arena::mapping::{Access, Mapping, memory_file, seal};

/// A page that one engine, the node and the node's device write. It holds only words, and only this engine's copies wait by them.
pub(crate) struct Words {
    mapping: Arc<Mapping>,
    file: OwnedFd,
}

impl Words {
    /// A page of zeros. Nobody can change its size.
    ///
    /// # Errors
    /// Fails if the system gives no memory.
    pub(crate) fn create() -> Result<Self, MemoryError> {
        let (file, mapping) = memory_file("larder-words", MemfdFlags::empty(), WORD_BYTES, Access::Write)?;
        seal(&file, SealFlags::empty())?;
        Ok(Self { mapping: Arc::new(mapping), file })
    }

    /// The page's file, for the engine to map.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The page's memory, for the device to pin.
    pub(crate) fn host_memory(&self) -> HostMemory {
        self.mapping.host_memory()
    }
}

pub(crate) const WORD_BYTES: u64 = 4 * larder_core::SESSION_WORDS;
