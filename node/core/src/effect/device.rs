//! Orders for a device, in plain numbers. The shell knows the memory, and translates each into the device's own order.

use std::ops::Range;

use larder_protocol::lane::CopyWords;

use crate::event::DeviceCopyNumber;
use crate::store::Place;
use crate::store::ids::SessionId;

/// A copy for a device to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceOrder {
    /// Its number.
    pub number: DeviceCopyNumber,
    /// Bytes of the device tier's pool, to which [`BlockAt::Pool`] refers.
    pub pool_bytes: u64,
    /// The copies to make.
    pub work: DeviceWork,
}

/// The copies of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceWork {
    /// Between pages and blocks.
    Pages(PagesCopy),
    /// Blocks into the device tier.
    Promote(Vec<Promoted>),
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyDirection {
    /// From blocks into pages.
    Load,
    /// From pages into blocks.
    Save,
}

/// Copies between pages and the blocks of consecutive chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagesCopy {
    /// The direction.
    pub way: CopyDirection,
    /// The session of the pages and words.
    pub session: SessionId,
    /// The device's own number of the tensors.
    pub tensors: u32,
    /// The block of each chunk.
    pub blocks: Vec<BlockAt>,
    /// Pages of a chunk.
    pub pages_per_chunk: u32,
    /// The first page's number, counted from the first of these chunks.
    pub first_page: u64,
    /// The pages.
    pub pages: Vec<u32>,
    /// The layers.
    pub layers: Range<u32>,
    /// Whether the device reports layers one by one.
    pub by_layer: bool,
    /// The words that the copy waits for and raises.
    pub words: CopyWords,
}

/// The place of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockAt {
    /// In an extent.
    Host(Place),
    /// At this offset in the device tier's pool.
    Pool(u64),
}

/// A block that is copied into the device tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promoted {
    /// The block's place in an extent.
    pub from: Place,
    /// The target offset in the tier's pool.
    pub to: u64,
    /// The block's bytes.
    pub bytes: u64,
}
