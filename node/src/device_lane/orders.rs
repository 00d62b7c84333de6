//! The core's copies as orders for the device, and the device's reports as the core's events.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_core::store::Place as HostPlace;
use larder_core::{
    BlockAt, CopyDirection, DeviceCopyNumber, DeviceEvent, DeviceFailure, DeviceOrder, DeviceWork, PagesCopy,
    Promoted,
};
use larder_device::thread::{Busy, DeviceReport, EndWord};
use larder_device::{
    BlockMove, CopyError, Device, DeviceError, Direction, Order, OrderNumber, PageCopy, RegionOffset,
    TensorsId, Work,
};
use larder_protocol::lane::Word;

use super::{DeviceLane, Regions};
use crate::arena::{Arena, ExtentMemory};

/// The memory that an order's places lie in.
struct Memory {
    extents: HashMap<u32, Arc<ExtentMemory>>,
    pool_bytes: u64,
}

impl DeviceLane {
    /// Hands an order to the device's thread, which finds the memory there.
    pub(crate) fn copy(&self, order: DeviceOrder, arena: &Arena) -> Result<(), Busy> {
        let DeviceOrder { number: DeviceCopyNumber(number), pool_bytes, work } = order;
        let shared = |HostPlace { extent, .. }| (extent, Arc::clone(arena.extent(extent)));
        let of_blocks = |block: &BlockAt| match *block {
            BlockAt::Host(place) => Some(place),
            BlockAt::Pool(_) => None,
        };
        let extents = match &work {
            DeviceWork::Pages(copy) => copy.blocks.iter().filter_map(of_blocks).map(shared).collect(),
            DeviceWork::Promote(moves) => moves.iter().map(|block| shared(block.from)).collect(),
        };
        let memory = Memory { extents, pool_bytes };
        let then = match &work {
            DeviceWork::Pages(copy) => self.end_word(copy),
            DeviceWork::Promote(_) => None,
        };
        self.submit(OrderNumber(number), then, move |device, regions| match work {
            DeviceWork::Pages(copy) => memory.pages(device, regions, &copy),
            DeviceWork::Promote(moves) => memory.blocks(device, regions, &moves),
        })
    }

    /// The word that a copy raises, at the end of the copy.
    fn end_word(&self, copy: &PagesCopy) -> Option<EndWord> {
        let Word { word, value } = copy.words.then?;
        let value = value.wrapping_add(copy.layers.end - copy.layers.start);
        EndWord::new(self.words.get(&copy.session)?.host_memory(), u64::from(word) * 4, value)
    }

    /// The core's event for a report.
    pub(crate) fn event_of(&mut self, report: DeviceReport) -> DeviceEvent {
        let of = |OrderNumber(number)| DeviceCopyNumber(number);
        match report {
            DeviceReport::Layers { number, done } => DeviceEvent::Layers { number: of(number), done },
            // The place is free for another order.
            DeviceReport::Done { number, result, place: _ } => {
                let failure = |error| match error {
                    CopyError::Refused if self.has_no_tier.load(Ordering::Acquire) => DeviceFailure::NoTier,
                    CopyError::Refused => DeviceFailure::Refused,
                    CopyError::Lost => DeviceFailure::Lost,
                    _ => DeviceFailure::Failed,
                };
                DeviceEvent::Ended { number: of(number), result: result.map_err(failure) }
            }
            DeviceReport::Lost(error) => {
                // Copies that still wait for the lost device end as refused too.
                self.has_no_tier.store(false, Ordering::Release);
                if matches!(error, DeviceError::Absent(_)) {
                    self.gone();
                }
                DeviceEvent::Lost
            }
            DeviceReport::Gone => {
                self.gone();
                DeviceEvent::Gone
            }
        }
    }
}

impl Memory {
    fn pages(
        &self,
        device: &mut dyn Device,
        regions: &mut Regions,
        copy: &PagesCopy,
    ) -> Result<Order, DeviceError> {
        let find = |&block: &BlockAt| self.find(device, regions, block);
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
        let (tensors, layers, by_layer) = (TensorsId(copy.tensors), copy.layers.clone(), copy.by_layer);
        Ok(Order { direction, work: Work::Pages { tensors, pages, layers, by_layer }, after, then })
    }

    fn blocks(
        &self,
        device: &mut dyn Device,
        regions: &mut Regions,
        moves: &[Promoted],
    ) -> Result<Order, DeviceError> {
        let block = |&Promoted { from, to, bytes }: &Promoted| {
            let from = self.find(device, regions, BlockAt::Host(from))?;
            let to = self.find(device, regions, BlockAt::Pool(to))?;
            Ok::<_, DeviceError>(BlockMove { from, to, bytes })
        };
        let moves = moves.iter().map(block).collect::<Result<Vec<_>, _>>()?;
        Ok(Order { direction: Direction::Load, work: Work::Blocks(moves), after: None, then: None })
    }

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
