//! The device lane: turns the core's copies into orders for the device, and tells the core the device's answers.
//!
//! Engines' memory is registered here, since it comes with descriptors. The actor never waits for the device: it asks through
//! the thread's bounded ring, and repeats a refused request at its tick.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use actix::prelude::*;
use larder_core::store::ids::SessionId;
use larder_core::store::{Place as HostPlace, Refused};
use larder_core::{
    BlockAt, CopyDirection, DeviceEvent, DeviceFailure, DeviceOrder, DeviceWork, Event, PagesCopy, Promoted,
    Tensors,
};
use larder_device::layout::{Dim, LayoutSpec, Plane};
use larder_device::thread::{Busy, DeviceReport};
use larder_device::{
    BlockMove, CopyError, Device, DeviceError, Direction, EngineMemory, Order, OrderNumber, PageCopy,
    PagedLayout, RegionOffset, TensorsId, Work,
};
use larder_protocol::lane::{
    IpcMemory, RegisterTensors, TensorDim, TensorLayout, TensorMemory, TensorPlane, TensorsRegistered,
};
use larder_protocol::limits::MAX_TENSOR_REGIONS;
use larder_protocol::session::{Response, Scarce};

use super::answer::Asked;
use super::{Answer, GpuActor};
use crate::arena::ExtentMemory;
use crate::device_lane::{DeviceCopyRefused, Regions, WORD_BYTES, Words};

/// The memory in which the places of an order are.
struct Memory {
    extents: HashMap<u32, Arc<ExtentMemory>>,
    pool_bytes: u64,
}

impl GpuActor {
    /// Registers an engine's tensors with the device. An error is the answer to a request that is refused at once.
    #[expect(clippy::result_large_err, reason = "it is an answer, made once for each of an engine's tensors")]
    pub(super) fn register_tensors(
        &mut self,
        session: SessionId,
        ask: RegisterTensors,
        descriptors: Vec<OwnedFd>,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<(), Answer> {
        let RegisterTensors { namespace, block, layout, memory } = ask;
        let block = usize::from(block);
        let facts = self.core.may_know_tensors(session, namespace, block)?;
        let lane = &mut self.device_lane;
        let prepared =
            engine_memory(&memory, descriptors).and_then(|memory| Ok((memory, lane.words(session)?)));
        let (memory, words) = prepared.map_err(Response::from)?;
        let shared = words.host_memory();
        let answered = lane.call(move |device, regions: &mut Regions| {
            let check = |bytes: &[u64]| {
                let layout = PagedLayout::new(layout_of(layout), bytes).map_err(DeviceError::from)?;
                let (pages_bytes, layers) = (layout.block_bytes(), layout.layers());
                if (pages_bytes, layers) == (facts.bytes, facts.layers) {
                    return Ok(layout);
                }
                let (block_bytes, block_layers) = (facts.bytes, facts.layers);
                Err(DeviceCopyRefused::Block { pages_bytes, layers, block_bytes, block_layers })
            };
            let (TensorsId(id), layout) = regions.register(device, session, shared, check, memory)?;
            let LayoutSpec { pages, pages_per_chunk, .. } = *layout.spec();
            Ok(Tensors { id, namespace, block, facts, pages, pages_per_chunk })
        });
        let Ok(answered) = answered else { return Err(Answer::from(TOO_MUCH_WAITS)) };
        let finish = answered.into_actor(self).map(move |known, actor: &mut Self, _| {
            let lost = |_| Err(DeviceCopyRefused::from(actor.device_lane.why_lost()));
            let answer = match known.unwrap_or_else(lost) {
                Ok(tensors) => actor.know_tensors(session, tensors, &words).unwrap_or_else(Answer::from),
                Err(refused) => Answer::from(Response::from(refused)),
            };
            actor.reply(asked, answer);
        });
        self.spawn(ctx, finish);
        Ok(())
    }

    /// The device knows a session's tensors. If the session ended meanwhile, the device hears of that afterwards.
    fn know_tensors(
        &mut self,
        session: SessionId,
        tensors: Tensors,
        words: &Words,
    ) -> Result<Answer, Refused> {
        let descriptor = words.descriptor().try_clone_to_owned().map_err(|error| {
            tracing::error!(%error, "no descriptor left for words: raise the limit of open files");
            Refused::Internal
        })?;
        let tensors = self.core.know_tensors(session, tensors)?;
        let known = TensorsRegistered { tensors, word_bytes: WORD_BYTES };
        Ok(Answer { response: Some(Response::TensorsRegistered(known)), descriptors: vec![descriptor] })
    }

    /// Hands an order to the device's thread, which finds the memory there.
    pub(super) fn copy_by_device(&mut self, order: DeviceOrder) {
        let DeviceOrder { number, pool_bytes, work } = order;
        let submitted = match work {
            DeviceWork::Pages(copy) => self.copy_pages(OrderNumber(number.0), pool_bytes, copy),
            DeviceWork::Promote(moves) => self.copy_blocks(OrderNumber(number.0), pool_bytes, moves),
        };
        let is_taken = submitted.is_ok();
        self.tell(Event::Device(DeviceEvent::Took { number, is_taken }));
    }

    fn copy_pages(&self, number: OrderNumber, pool_bytes: u64, copy: PagesCopy) -> Result<(), Busy> {
        let in_extent = |block: &BlockAt| match *block {
            BlockAt::Host(place) => Some(place),
            BlockAt::Pool(_) => None,
        };
        let memory = self.memory(copy.blocks.iter().filter_map(in_extent), pool_bytes);
        self.device_lane.submit(number, move |device, regions| {
            let find = |&block: &BlockAt| memory.find(device, regions, block);
            let places = copy.blocks.iter().map(find).collect::<Result<Vec<_>, _>>()?;
            let after = regions.flag(copy.session, copy.words.after)?;
            let then = regions.flag(copy.session, copy.words.then)?;
            let per_chunk = u64::from(copy.pages_per_chunk);
            let page = |(number, &page): (u64, &u32)| PageCopy {
                block: places[(number / per_chunk) as usize],
                in_chunk: (number % per_chunk) as u32,
                page,
            };
            let pages = (copy.first_page..).zip(&copy.pages).map(page).collect();
            let direction = match copy.way {
                CopyDirection::Load => Direction::Load,
                CopyDirection::Save => Direction::Save,
            };
            let (tensors, layers, by_layer) = (TensorsId(copy.tensors), copy.layers, copy.by_layer);
            Ok(Order { direction, work: Work::Pages { tensors, pages, layers, by_layer }, after, then })
        })
    }

    fn copy_blocks(&self, number: OrderNumber, pool_bytes: u64, moves: Vec<Promoted>) -> Result<(), Busy> {
        let memory = self.memory(moves.iter().map(|block| block.from), pool_bytes);
        self.device_lane.submit(number, move |device, regions| {
            let block = |&Promoted { from, to, bytes }: &Promoted| {
                let from = memory.find(device, regions, BlockAt::Host(from))?;
                let to = memory.find(device, regions, BlockAt::Pool(to))?;
                Ok::<_, DeviceError>(BlockMove { from, to, bytes })
            };
            let moves = moves.iter().map(block).collect::<Result<Vec<_>, _>>()?;
            Ok(Order { direction: Direction::Load, work: Work::Blocks(moves), after: None, then: None })
        })
    }

    fn memory(&self, places: impl Iterator<Item = HostPlace>, pool_bytes: u64) -> Memory {
        let shared = |HostPlace { extent, .. }| (extent, Arc::clone(self.arena.extent(extent)));
        Memory { extents: places.map(shared).collect(), pool_bytes }
    }
}

impl StreamHandler<DeviceReport> for GpuActor {
    /// Takes a report of the device's thread.
    fn handle(&mut self, report: DeviceReport, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| {
            let event = actor.device_reports(report);
            actor.decide(Event::Device(event), ctx);
        });
    }

    /// The lane holds a sender itself: the stream ends only with the actor.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl GpuActor {
    fn device_reports(&mut self, report: DeviceReport) -> DeviceEvent {
        let of = |OrderNumber(number): OrderNumber| larder_core::DeviceCopyNumber(number);
        match report {
            DeviceReport::Layers { number, done } => DeviceEvent::Layers { number: of(number), done },
            // The place is free for another order.
            DeviceReport::Done { number, result, place: _ } => {
                let failure = |error| match error {
                    CopyError::Refused => DeviceFailure::Refused,
                    CopyError::Lost => DeviceFailure::Lost,
                    _ => DeviceFailure::Failed,
                };
                DeviceEvent::Ended { number: of(number), result: result.map_err(failure) }
            }
            DeviceReport::Lost(error) => {
                if matches!(error, DeviceError::Absent(_)) {
                    self.device_lane.gone();
                }
                DeviceEvent::Lost
            }
            DeviceReport::Gone => {
                self.device_lane.gone();
                DeviceEvent::Gone
            }
        }
    }
}

impl Memory {
    /// The place of a block in the device's memory.
    fn find(
        &self,
        device: &mut dyn Device,
        regions: &mut Regions,
        block: BlockAt,
    ) -> Result<RegionOffset, DeviceError> {
        match block {
            BlockAt::Host(HostPlace { extent, offset }) => {
                let memory = self.extents.get(&extent).ok_or(DeviceError::Unknown)?;
                Ok(RegionOffset { region: regions.find(device, memory)?, offset })
            }
            BlockAt::Pool(offset) => {
                Ok(RegionOffset { region: regions.pool(device, self.pool_bytes)?, offset })
            }
        }
    }
}

/// An engine's memory, each piece with its bytes.
fn engine_memory(
    memory: &[TensorMemory],
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<(EngineMemory, u64)>, DeviceCopyRefused> {
    if memory.len() > MAX_TENSOR_REGIONS {
        return Err(DeviceCopyRefused::TooManyRegions { most: MAX_TENSOR_REGIONS });
    }
    let regions = memory.iter().filter(|memory| matches!(memory, TensorMemory::Descriptor(_))).count();
    if descriptors.len() != regions {
        return Err(DeviceCopyRefused::Descriptors { found: descriptors.len(), regions });
    }
    let mut descriptors = descriptors.into_iter();
    let one = |memory: &TensorMemory| match *memory {
        TensorMemory::Ipc(IpcMemory { handle, offset, bytes }) => {
            Some((EngineMemory::Ipc { handle, offset, bytes }, bytes))
        }
        TensorMemory::Descriptor(bytes) => {
            descriptors.next().map(|descriptor| (EngineMemory::Descriptor { descriptor, bytes }, bytes))
        }
    };
    Ok(memory.iter().filter_map(one).collect())
}

/// The layout in a session's message, unchecked.
fn layout_of(message: TensorLayout) -> LayoutSpec {
    let TensorLayout { planes, planes_per_layer, pages, pages_per_chunk, dims, run_bytes } = message;
    let plane = |TensorPlane { region, offset, page_stride }| Plane { region, offset, page_stride };
    LayoutSpec {
        planes: planes.into_iter().map(plane).collect(),
        planes_per_layer,
        pages,
        pages_per_chunk,
        dims: dims.into_iter().map(|TensorDim { count, stride }| Dim { count, stride }).collect(),
        run_bytes,
    }
}

/// Asking again helps as soon as the device's thread has taken something.
const TOO_MUCH_WAITS: Refused = Refused::Busy { what: Scarce::Copies, retry_after_ms: REGISTER_RETRY_MS };

/// About the time of one copy among many.
const REGISTER_RETRY_MS: u64 = 5;
