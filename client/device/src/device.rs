//! The trait of a device; only its thread calls it.

use std::os::fd::OwnedFd;

use crate::layout::{LayoutError, PagedLayout};
use crate::memory::HostMemory;
use crate::order::{Order, OrderError, RegionId, TensorsId, Ticket};

/// One GPU, or what stands for it in tests.
///
/// Orders end in any order. Each that was taken has exactly one [`Event::Done`], unless the device is lost: then what it was
/// doing is unknown until it was closed.
pub trait Device {
    /// Its name, for people.
    fn name(&self) -> String;

    /// Makes host memory ready for copies: pinned and mapped.
    ///
    /// # Errors
    /// [`DeviceError`] if the device refuses.
    fn attach(&mut self, memory: HostMemory) -> Result<RegionId, DeviceError>;

    /// Takes so much of the device's own memory.
    ///
    /// # Errors
    /// [`DeviceError`] if there is not so much.
    fn allocate(&mut self, bytes: u64) -> Result<RegionId, DeviceError>;

    /// Maps memory that an engine has on this device.
    ///
    /// # Errors
    /// [`DeviceError::Refused`] if this kind of memory cannot be shared.
    fn import(&mut self, memory: EngineMemory) -> Result<RegionId, DeviceError>;

    /// Gives a region up.
    ///
    /// # Errors
    /// [`DeviceError::InUse`] while orders or tensors use it.
    fn detach(&mut self, region: RegionId) -> Result<(), DeviceError>;

    /// Makes tensors of regions of device memory, in the order in which the layout numbers them.
    ///
    /// # Errors
    /// [`DeviceError`] if a region is missing or smaller than the layout needs.
    fn register(&mut self, layout: PagedLayout, regions: Vec<RegionId>) -> Result<TensorsId, DeviceError>;

    /// Forgets tensors; their regions stay.
    ///
    /// # Errors
    /// [`DeviceError::InUse`] while orders use them.
    fn unregister(&mut self, tensors: TensorsId) -> Result<(), DeviceError>;

    /// Begins an order.
    ///
    /// # Errors
    /// [`DeviceError::Order`] if it is refused: nothing was begun. [`DeviceError::Lost`] if the device failed: what it did
    /// is unknown until it was closed.
    fn start(&mut self, ticket: Ticket, order: Order) -> Result<(), DeviceError>;

    /// Gives up an order whose flag is not reached: it ends as refused, and raises its own flag as one that failed. One that has
    /// begun goes on, and one that is not known is ignored.
    fn cancel(&mut self, ticket: Ticket);

    /// Tells what happened since the last call. Never waits.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] if the device failed.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), DeviceError>;

    /// Gives the device up, with all that it has. It waits for what is under way.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] if it cannot be known that nothing of it touches any memory.
    fn close(self: Box<Self>) -> Result<(), DeviceError>;

    /// How copies are made, and how fast each way was, a line each; for people.
    fn choices(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Something that a device did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Layers of an order are done, from its first on.
    Layers {
        /// The order.
        ticket: Ticket,
        /// How many are.
        done: u32,
    },
    /// An order has ended, and the device no longer touches its memory.
    Done {
        /// The order.
        ticket: Ticket,
        /// Whether all its bytes are where they should be.
        result: Result<(), CopyError>,
    },
}

/// Why a copy did not come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// It was refused before anything was begun.
    #[error("the copy was refused")]
    Refused,
    /// It failed, and is known to have ended: what is in its targets is unknown.
    #[error("the copy failed")]
    Failed,
    /// The device failed under it. Its memory may be touched until the device is gone.
    #[error("the device was lost")]
    Lost,
}

/// Memory that an engine has on a device.
#[derive(Debug)]
pub enum EngineMemory {
    /// Of `cudaMalloc`, by its IPC handle. The allocation may be larger than what is used of it.
    Ipc {
        /// The driver's handle.
        handle: [u8; 64],
        /// Where what is used begins in the allocation.
        offset: u64,
        /// Bytes used.
        bytes: u64,
    },
    /// Of the virtual memory interface, by a descriptor.
    Descriptor {
        /// What the engine exported.
        descriptor: OwnedFd,
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// Of this very process: the lane runs in the engine.
    Own {
        /// Its address on the device.
        address: u64,
        /// Its bytes.
        bytes: u64,
    },
}

/// What a device refused or failed at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no device here, and why.
    #[error("{0}")]
    Absent(String),
    /// What was asked for cannot be had; the device goes on.
    #[error("{what}: {reason}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// The driver's reason.
        reason: String,
    },
    /// No such region or tensors.
    #[error("there are no such regions or tensors")]
    Unknown,
    /// Orders or tensors use it.
    #[error("the region is in use")]
    InUse,
    /// The layout does not fit its regions.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// An order that cannot be carried out.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// The device failed, and does nothing any more.
    #[error("the device is lost: {0}")]
    Lost(String),
}
