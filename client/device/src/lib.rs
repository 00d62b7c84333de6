//! Copies between an engine's paged KV memory on a GPU and contiguous blocks.
//!
//! [`PagedLayout`] says where an engine's bytes are. [`Order`] says which bytes to copy; it is checked before a byte moves.
//! [`Device`] copies: on CUDA ([`cuda`]), or in tests in host memory ([`host`]). One [`DeviceThread`] per GPU is the only
//! caller of its device. The bytes of a block equal those of copies by the CPU, so engines of both kinds share blocks.
//!
//! Flags, not event handles, order streams: words in pinned memory, which an engine's stream raises before a save and waits
//! for after a load, layer by layer. The device's thread looks at the word before it gives the order to the GPU, so an engine
//! that never raises its word delays no other order. A failed copy raises its flag: waiters go on, and the copy's end says
//! why.
//!
//! Memory is reused on positive knowledge. A caller is told of a stalled copy at its deadline, but the memory stays quarantined
//! until the device says that the copy ended, or is closed. After a device failed, only the end of its context proves that nothing
//! goes on. If that fails too, or if the context is an engine's own, the memory is never used again.

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
    BlockMove, Direction, Flag, Order, OrderError, OrderNumber, PageCopy, RegionId, RegionOffset, TensorsId,
    Work,
};
pub use thread::DeviceThread;
