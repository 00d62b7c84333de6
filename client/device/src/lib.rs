//! Copies between an engine's paged KV memory on a GPU and contiguous blocks.
//!
//! [`PagedLayout`] says where an engine's bytes stand, [`Order`] what is to be copied, [`Device`] is who does it: CUDA
//! ([`cuda`]), or for tests host memory ([`host`]). One [`DeviceThread`] a GPU alone calls its device.

pub mod cuda;
pub mod device;
pub mod host;
pub mod layout;
pub mod memory;
pub mod order;
mod registry;
#[cfg(test)]
mod testing;
pub mod thread;

pub use device::{CopyError, Device, DeviceError, EngineMemory, Event};
pub use layout::{LayoutError, LayoutSpec, PagedLayout};
pub use memory::HostMemory;
pub use order::{
    BlockMove, Direction, Flag, Order, OrderError, PageCopy, Place, RegionId, TensorsId, Ticket, Work,
};
pub use thread::DeviceThread;
