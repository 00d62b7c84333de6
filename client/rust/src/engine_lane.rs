//! Copies between an engine's GPU memory and blocks, made by the engine's own process: the arena lane for GPUs.
//!
//! The session has mapped the node's memory. The first copy that needs a mapping pins it, on the device's thread. A caller that
//! asks for a copy never waits for the device. The memory that a copy touches is kept from everybody else until the device has
//! let go of it, even if nobody waits for the copy any more.

mod copies;

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use larder_device::order::MAX_COPIES;
use larder_device::thread::{Busy, EndWord};
use larder_device::{
    Device, DeviceError, DeviceThread, Direction, EngineMemory, HostMemory, Order, OrderNumber, PageCopy,
    PagedLayout, RegionId, RegionOffset, TensorsId, Work,
};

pub use copies::{Copied, CopyHandle};

use crate::error::Damaged;
use crate::lease::LeaseGuard;
use crate::lock;
use crate::regions::{FLAG_BYTES, Pinning};
use crate::reservation::{StagedChunk, StagedLayers};
use copies::{Copies, CopyClaims};
use larder_ipc::Mapping;

/// A GPU of this process, and the only thread that calls it. Shared by reference.
pub struct EngineLane {
    pinning: Arc<Pinning>,
    copies: Arc<Copies>,
    /// Words by which the engine's streams and copies wait for each other.
    flags: HostMemory,
    next: AtomicU64,
}

/// Tensors that were registered with a lane.
#[derive(Debug, Clone)]
pub struct EngineTensors {
    id: TensorsId,
    layout: PagedLayout,
    regions: Vec<RegionId>,
}

/// The pages to load of a leased prefix.
#[derive(Debug, Clone)]
pub struct LoadPages {
    /// The block of each chunk.
    pub block: usize,
    /// Consecutive pages of the prompt.
    pub pages: Vec<u32>,
    /// The number of the first page, counted from the lease's first chunk.
    pub first_page: u64,
    /// The layers to load.
    pub layers: Range<u32>,
    /// Whether the copy reports each layer as soon as it is done.
    pub by_layer: bool,
}

/// The pages of an engine to save as a chunk.
#[derive(Debug, Clone)]
pub struct SavePages {
    /// The block of the chunk.
    pub block: usize,
    /// All pages of the chunk, in order.
    pub pages: Vec<u32>,
    /// The layers to save.
    pub layers: Range<u32>,
}

/// Words of the flag page that a copy waits for and raises.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyFlags {
    /// Word and value: the copy begins when the word reaches the value.
    pub after: Option<(u32, u32)>,
    /// Word and value: the copy raises the word by one for each layer that is done. A copy that fails, is refused or lost raises it
    /// to the end.
    pub then: Option<(u32, u32)>,
}

/// Why a copy was not begun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaneError {
    /// Too many copies are under way: try again when one has ended, or copy by other means.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// The device cannot do the copy.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The pages are not those of the lease, the layout is not that of the namespace, or the order is too long.
    #[error("{0}")]
    Mismatch(String),
    /// A block that was to be loaded is damaged.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// The device is lost.
    #[error("the device is gone")]
    Gone,
}

impl EngineLane {
    /// Starts the device's thread, on which `open` makes the device. At most `orders` copies are under way at a time.
    ///
    /// # Errors
    /// [`LaneError::Device`] if there is no device.
    pub fn start(
        orders: usize,
        open: impl FnOnce() -> Result<Box<dyn Device>, DeviceError> + Send + 'static,
    ) -> Result<Self, LaneError> {
        let os = |error: io::Error| {
            LaneError::Device(DeviceError::Refused { what: "a thread", reason: error.to_string() })
        };
        let copies = Arc::new(Copies::default());
        let hear = Arc::clone(&copies);
        let thread = DeviceThread::start("larder-engine-gpu", orders, open, move |report| hear.hear(report));
        let flags = HostMemory::allocate(FLAG_BYTES).map_err(os)?;
        let lane = Self {
            pinning: Arc::new(Pinning { thread: thread.map_err(os)?, regions: Arc::default() }),
            copies,
            flags: flags.clone(),
            next: AtomicU64::new(1),
        };
        let regions = Arc::clone(&lane.pinning.regions);
        lane.ask(move |device| lock(&regions).attach_flags(device, flags))?;
        Ok(lane)
    }

    /// Registers an engine's tensors: the regions that the layout names, in order. Waits for the device.
    ///
    /// # Errors
    /// [`LaneError::Device`] if the device refuses a region or the layout.
    pub fn register(
        &self,
        layout: PagedLayout,
        memory: Vec<EngineMemory>,
    ) -> Result<EngineTensors, LaneError> {
        let of_device = layout.clone();
        let (id, regions) = self.ask(move |device| {
            let regions = memory.into_iter().map(|memory| device.import(memory));
            let regions: Vec<RegionId> = regions.collect::<Result<_, _>>()?;
            Ok((device.register(of_device, regions.clone())?, regions))
        })?;
        Ok(EngineTensors { id, layout, regions })
    }

    /// Makes tensors of some layers of other tensors; their block has only these layers. Waits for the device.
    ///
    /// # Errors
    /// [`LaneError::Mismatch`] if there are no such layers; [`LaneError::Device`] if the device refuses.
    pub fn part(&self, tensors: &EngineTensors, layers: &Range<u32>) -> Result<EngineTensors, LaneError> {
        tensors.check_layers(layers)?;
        let layout = tensors.layout.part(layers);
        let (of_device, regions) = (layout.clone(), tensors.regions.clone());
        let id = self.ask(move |device| device.register(of_device, regions))?;
        Ok(EngineTensors { id, layout, regions: tensors.regions.clone() })
    }

    /// Begins to copy leased blocks into pages. The lease is kept until the device has let go of the blocks. Blocks that the
    /// session verifies are verified first, on the caller's thread.
    ///
    /// # Errors
    /// [`LaneError`], with nothing begun.
    ///
    /// # Panics
    /// Panics if the namespace has no such block.
    pub fn load(
        &self,
        tensors: &EngineTensors,
        lease: &Arc<LeaseGuard>,
        load: &LoadPages,
        flags: CopyFlags,
    ) -> Result<CopyHandle<()>, LaneError> {
        tensors.check_block(lease.namespace().block_bytes(load.block))?;
        tensors.check_layers(&load.layers)?;
        let per_chunk = u64::from(tensors.layout.spec().pages_per_chunk);
        let end = load.first_page.checked_add(load.pages.len() as u64);
        if load.pages.is_empty() || end.is_none_or(|end| end > lease.chunks() as u64 * per_chunk) {
            return Err(LaneError::Mismatch(format!(
                "{} pages from {} on are not those of a lease of {} chunks",
                load.pages.len(),
                load.first_page,
                lease.chunks()
            )));
        }
        let page_bytes = tensors.layout.block_bytes() / per_chunk;
        let layer_bytes = tensors.layout.layer_bytes();
        let bytes = u64::from(load.layers.start) * layer_bytes..u64::from(load.layers.end) * layer_bytes;
        let mut copies = Vec::with_capacity(load.pages.len());
        let mut verified = None;
        for (number, &page) in (load.first_page..).zip(&load.pages) {
            let (position, in_chunk) = ((number / per_chunk) as usize, (number % per_chunk) as u32);
            if verified != Some(position) {
                if !lease.has_block(position, load.block) {
                    let text = format!("the chunk at {position} has no such block leased");
                    return Err(LaneError::Mismatch(text));
                }
                lease.verify_bytes(position, load.block, &bytes)?;
                verified = Some(position);
            }
            let (memory, offset) = lease.block_memory(position, load.block, page_bytes);
            copies.push((memory, offset, in_chunk, page));
        }
        let held = CopyClaims::Lease(Arc::clone(lease));
        self.begin(tensors, Direction::Load, copies, load.layers.clone(), load.by_layer, flags, held)
    }

    /// Begins to copy the pages of a chunk into its staged room. The end of the copy returns the staged chunk: commit it when all
    /// layers of all its blocks were saved. A copy that fails gives the staged chunk up.
    ///
    /// # Errors
    /// [`LaneError`], with nothing begun; the staged chunk is given up.
    ///
    /// # Panics
    /// Panics if the chunk has no such block to write.
    pub fn save(
        &self,
        tensors: &EngineTensors,
        staged: StagedChunk,
        save: &SavePages,
        flags: CopyFlags,
    ) -> Result<CopyHandle<StagedChunk>, LaneError> {
        tensors.check_block(staged.namespace().block_bytes(save.block))?;
        tensors.check_pages(save.pages.len(), 1)?;
        tensors.check_layers(&save.layers)?;
        let bytes = tensors.layout.layer_bytes() * u64::from(save.layers.end - save.layers.start);
        let (memory, offset) = staged.block_memory(save.block, bytes);
        let copies = (0..).zip(&save.pages);
        let copies = copies.map(|(in_chunk, &page)| (Arc::clone(&memory), offset, in_chunk, page)).collect();
        let held = CopyClaims::Staged(staged);
        self.begin(tensors, Direction::Save, copies, save.layers.clone(), false, flags, held)
    }

    /// Begins to copy pages into some layers of staged chunks, chunk by chunk, in a session of one slice. `tensors` is the
    /// [`EngineLane::part`] with just these layers. The end of the copy returns the staged layers, to be handed over. A copy that
    /// fails gives them up.
    ///
    /// # Errors
    /// [`LaneError`], with nothing begun; the staged layers are given up.
    pub fn save_layers(
        &self,
        tensors: &EngineTensors,
        staged: StagedLayers,
        pages: &[u32],
        flags: CopyFlags,
    ) -> Result<CopyHandle<StagedLayers>, LaneError> {
        tensors.check_block(staged.bytes())?;
        tensors.check_pages(pages.len(), staged.positions().len())?;
        if staged.slices() != 1 {
            // The other slices would be handed over with the bytes that their room in the window had before.
            return Err(LaneError::Mismatch(format!("the chunks have {} slices, not 1", staged.slices())));
        }
        let per_chunk = tensors.layout.spec().pages_per_chunk as usize;
        let mut copies = Vec::with_capacity(pages.len());
        for (chunk, pages) in pages.chunks_exact(per_chunk).enumerate() {
            let (memory, offset) = staged.layers_memory(chunk);
            copies.extend(
                (0..).zip(pages).map(|(in_chunk, &page)| (Arc::clone(&memory), offset, in_chunk, page)),
            );
        }
        let layers = 0..tensors.layout.layers();
        self.begin(tensors, Direction::Save, copies, layers, false, flags, CopyClaims::Layers(staged))
    }

    /// The device's name. Waits for the device.
    ///
    /// # Errors
    /// [`LaneError`] if the device is lost, or has too much to do.
    pub fn device_name(&self) -> Result<String, LaneError> {
        self.ask(|device| Ok(device.name()))
    }

    /// The ways in which copies are made and the rate of each, one line each; for people. Waits for the device.
    ///
    /// # Errors
    /// [`LaneError`] if the device is lost, or has too much to do.
    pub fn choices(&self) -> Result<Vec<String>, LaneError> {
        self.ask(|device| Ok(device.choices()))
    }

    /// The flag page. Its words are at multiples of 4; a device waits for them and raises them as [`CopyFlags`] says.
    #[must_use]
    pub fn flags(&self) -> &HostMemory {
        &self.flags
    }

    /// Number of copies whose memory the device still holds.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.copies.under_way()
    }

    #[expect(clippy::too_many_arguments, reason = "one place for both directions")]
    fn begin<T>(
        &self,
        tensors: &EngineTensors,
        direction: Direction,
        copies: Vec<(Arc<Mapping>, u64, u32, u32)>,
        layers: Range<u32>,
        by_layer: bool,
        flags: CopyFlags,
        held: CopyClaims,
    ) -> Result<CopyHandle<T>, LaneError>
    where
        CopyHandle<T>: From<Arc<Copied>>,
    {
        if copies.len() > MAX_COPIES {
            return Err(LaneError::Mismatch(format!("{} pages are too many for one copy", copies.len())));
        }
        let number = OrderNumber(self.next.fetch_add(1, Ordering::Relaxed));
        let (regions, tensors) = (Arc::clone(&self.pinning.regions), tensors.id);
        held.link().pinners.add(&self.pinning);
        let copied = self.copies.begin(number, held).ok_or(LaneError::Gone)?;
        let of_copy = Arc::clone(&copied);
        let end_word = flags.then.and_then(|(word, value)| {
            let value = value.wrapping_add(layers.end - layers.start);
            EndWord::new(self.flags.clone(), u64::from(word) * 4, value)
        });
        let make = move |device: &mut dyn Device| {
            let order = || {
                let mut regions = lock(&regions);
                let mut pages = Vec::with_capacity(copies.len());
                for (memory, offset, in_chunk, page) in &copies {
                    let block = RegionOffset { region: regions.find(device, memory)?, offset: *offset };
                    pages.push(PageCopy { block, in_chunk: *in_chunk, page: *page });
                }
                let (after, then) = (regions.flag(flags.after)?, regions.flag(flags.then)?);
                let work = Work::Pages { tensors, pages, layers, by_layer };
                Ok(Order { direction, work, after, then })
            };
            order().inspect_err(|error: &DeviceError| of_copy.refused(error.clone()))
        };
        if let Err(busy) = self.pinning.thread.submit_made(number, end_word, make) {
            self.copies.forget(number);
            return Err(busy.into());
        }
        Ok(copied.into())
    }

    /// Has the device do something, and waits for its answer.
    fn ask<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut dyn Device) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<T, LaneError> {
        let (answer, answered) = sync_channel(1);
        self.pinning.thread.call(move |device| drop(answer.send(what(device))))?;
        let lost = || self.copies.why_lost().map_or(LaneError::Gone, LaneError::Device);
        Ok(answered.recv().map_err(|_| lost())??)
    }
}

impl EngineTensors {
    fn check_block(&self, bytes: u64) -> Result<(), LaneError> {
        let own = self.layout.block_bytes();
        if own == bytes {
            return Ok(());
        }
        Err(LaneError::Mismatch(format!("a chunk's pages have {own} bytes, its block {bytes}")))
    }

    fn check_layers(&self, layers: &Range<u32>) -> Result<(), LaneError> {
        if !layers.is_empty() && layers.end <= self.layout.layers() {
            return Ok(());
        }
        Err(LaneError::Mismatch(format!("there are no layers {layers:?}")))
    }

    fn check_pages(&self, pages: usize, chunks: usize) -> Result<(), LaneError> {
        let own = self.layout.spec().pages_per_chunk as usize * chunks;
        if own == pages {
            return Ok(());
        }
        Err(LaneError::Mismatch(format!("{chunks} chunks have {own} pages, not {pages}")))
    }
}
