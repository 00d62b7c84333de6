//! One direction's streams and staging buffer.
#![expect(unsafe_code, reason = "hands addresses to the copy engine")]

use super::driver::{Context, CudaError, DeviceMemory, Event, PinnedMemory, Stream};
use super::pieces::StagedCopy;
use crate::memory::HostMemory;

/// Kernels on one stream, large copies on another; between them a staging buffer of two halves, so that one is filled while
/// the other is emptied.
pub(super) struct Streams {
    pub(super) kernels: Stream,
    copies: Stream,
    /// Marks the work of `copies`.
    copied: Event,
    halves: [Half; 2],
    half_bytes: u64,
    staging: DeviceMemory,
}

struct Half {
    /// Marks that the half is full.
    ready: Event,
    /// Marks that the half was emptied.
    drained: Event,
}

/// A table for kernels, and the pinned memory from which it is filled.
pub(super) struct KernelTable {
    pinned: PinnedMemory,
    device: DeviceMemory,
}

impl Streams {
    pub(super) fn new(context: &Context, half_bytes: u64) -> Result<Self, CudaError> {
        let half = || Ok(Half { ready: Event::new(context)?, drained: Event::new(context)? });
        Ok(Self {
            kernels: Stream::new(context)?,
            copies: Stream::new(context)?,
            copied: Event::new(context)?,
            halves: [half()?, half()?],
            half_bytes,
            staging: DeviceMemory::allocate(context, half_bytes * 2)?,
        })
    }

    pub(super) fn half_address(&self, half: usize) -> u64 {
        self.staging.address() + half as u64 * self.half_bytes
    }

    /// Copies blocks, each at its address, into a half, which a kernel may then empty. An event that was never recorded holds
    /// nothing back.
    ///
    /// # Safety
    /// The blocks may be read until the copies have ended.
    pub(super) unsafe fn bring(&self, half: usize, spans: &[(u64, StagedCopy)]) -> Result<(), CudaError> {
        if spans.is_empty() {
            return Ok(());
        }
        self.copies.wait(&self.halves[half].drained)?;
        for (address, span) in spans {
            // SAFETY: the caller's promise; the staged bytes lie within the half.
            unsafe { self.copies.copy(*address, self.half_address(half) + span.staged, span.bytes)? };
        }
        self.halves[half].ready.record(&self.copies)?;
        self.kernels.wait(&self.halves[half].ready)
    }

    /// Marks the end of a kernel that empties a half.
    pub(super) fn scattered(&self, half: usize, is_staged: bool) -> Result<(), CudaError> {
        if is_staged { self.halves[half].drained.record(&self.kernels) } else { Ok(()) }
    }

    /// Makes a kernel that fills a half wait until the half was emptied.
    pub(super) fn before_gather(&self, half: usize, is_staged: bool) -> Result<(), CudaError> {
        if is_staged { self.kernels.wait(&self.halves[half].drained) } else { Ok(()) }
    }

    /// Copies a half's bytes to the blocks at their addresses.
    ///
    /// # Safety
    /// The blocks may be written until the copies have ended.
    pub(super) unsafe fn take(&self, half: usize, spans: &[(u64, StagedCopy)]) -> Result<(), CudaError> {
        if spans.is_empty() {
            return Ok(());
        }
        self.halves[half].ready.record(&self.kernels)?;
        self.copies.wait(&self.halves[half].ready)?;
        for (address, span) in spans {
            // SAFETY: the caller's promise; the staged bytes lie within the half.
            unsafe { self.copies.copy(self.half_address(half) + span.staged, *address, span.bytes)? };
        }
        self.halves[half].drained.record(&self.copies)
    }

    /// Later work on `kernels` waits for the work of `copies`.
    pub(super) fn join(&self) -> Result<(), CudaError> {
        self.copied.record(&self.copies)?;
        self.kernels.wait(&self.copied)
    }

    /// Waits, on the calling thread, until all is done.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.copies.synchronize()?;
        self.kernels.synchronize()
    }
}

impl KernelTable {
    pub(super) fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        let memory = HostMemory::allocate(bytes).map_err(|_| CudaError::no_memory())?;
        Ok(Self {
            pinned: PinnedMemory::pin(context, memory)?,
            device: DeviceMemory::allocate(context, bytes)?,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.device.bytes()
    }

    pub(super) fn address(&self) -> u64 {
        self.device.address()
    }

    /// Fills the table, before later work on the lane's kernels.
    ///
    /// # Safety
    /// The table lives until the copy has ended, and is not filled again before.
    ///
    /// # Panics
    /// Panics if the table is too small.
    pub(super) unsafe fn fill(&self, lane: &Streams, bytes: &[u8]) -> Result<(), CudaError> {
        self.pinned.memory().write(0, bytes);
        // SAFETY: the caller's promise; both are at least as long as what was just written.
        unsafe { lane.kernels.copy(self.pinned.address(), self.device.address(), bytes.len() as u64) }
    }

    /// The table's memory on the device.
    pub(super) fn into_device(self) -> DeviceMemory {
        self.device
    }
}
