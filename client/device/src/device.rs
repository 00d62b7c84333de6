//! The trait of a device; only its thread calls it.

use std::os::fd::OwnedFd;

use crate::layout::{LayoutError, PagedLayout};
use crate::memory::HostMemory;
use crate::order::{Order, OrderError, OrderNumber, RegionId, TensorsId};

/// A GPU, or its stand-in in tests.
///
/// Orders end in any sequence. Each accepted order has exactly one [`Event::Done`], unless the device is lost: then its work
/// is unknown until it is closed.
pub trait Device {
    /// Its name, for people.
    fn name(&self) -> String;

    /// Makes host memory ready for copies: pinned and mapped.
    ///
    /// # Errors
    /// [`DeviceError`] if the device refuses.
    fn attach(&mut self, memory: HostMemory) -> Result<RegionId, DeviceError>;

    /// Takes `bytes` bytes of the device's own memory.
    ///
    /// # Errors
    /// [`DeviceError`] if there is too little.
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
    /// [`DeviceError::Order`] if the order is refused: nothing was begun. [`DeviceError::Lost`] if the device failed: its
    /// work is unknown until it is closed.
    fn start(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError>;

    /// Ends an order that was given up before it began, as [`Device::cancel`] ends an order that waits.
    ///
    /// # Errors
    /// As [`Device::start`].
    fn refuse(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError>;

    /// Cancels an order whose flag is not reached: it ends as refused, and raises its own flag as a failed order does. An
    /// order that has begun goes on; an unknown order is ignored.
    fn cancel(&mut self, number: OrderNumber);

    /// Reports the events since the last call. Never waits.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] if the device failed.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), DeviceError>;

    /// Closes the device, with all its memory. It waits for running work.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] if its work may still touch some memory.
    fn close(self: Box<Self>) -> Result<(), DeviceError>;

    /// The ways in which copies are made and the rate of each, one line each; for people.
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
        number: OrderNumber,
        /// How many layers are done.
        done: u32,
    },
    /// An order has ended, and the device no longer touches its memory.
    Done {
        /// The order.
        number: OrderNumber,
        /// Whether all its bytes are where they should be.
        result: Result<(), CopyError>,
    },
}

/// Why a copy did not come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The copy was refused before anything was begun.
    #[error("the copy was refused")]
    Refused,
    /// The copy failed and has ended: the contents of its targets are unknown.
    #[error("the copy failed")]
    Failed,
    /// The device failed under it. Its memory may be touched until the device is gone.
    #[error("the device was lost")]
    Lost,
}

/// Memory that an engine has on a device.
#[derive(Debug)]
pub enum EngineMemory {
    /// Memory of `cudaMalloc`, by its IPC handle. The allocation may be larger than its used part.
    Ipc {
        /// The driver's handle.
        handle: [u8; 64],
        /// Offset of the used part in the allocation.
        offset: u64,
        /// Bytes used.
        bytes: u64,
    },
    /// Memory of the virtual memory interface, by a descriptor.
    Descriptor {
        /// The engine's exported descriptor.
        descriptor: OwnedFd,
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// Memory of this very process: the lane runs in the engine.
    Own {
        /// Its address on the device.
        address: u64,
        /// Its bytes.
        bytes: u64,
    },
}

/// The refusal or failure of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no device here, and why.
    #[error("{0}")]
    Absent(String),
    /// The device cannot do the request; it goes on.
    #[error("{what}: {reason}")]
    Refused {
        /// The request.
        what: &'static str,
        /// The driver's reason.
        reason: String,
    },
    /// No such region or tensors.
    #[error("there are no such regions or tensors")]
    Unknown,
    /// Orders or tensors use the region, or orders use the tensors.
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
