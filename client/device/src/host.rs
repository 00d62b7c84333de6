//! A device made of host memory, for tests: it ends orders in any order, and fails, stalls and is late on command.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::device::{CopyError, Device, DeviceError, EngineMemory, Event};
use crate::layout::PagedLayout;
use crate::memory::HostMemory;
use crate::order::{BlockMove, Direction, Order, OrderNumber, PageCopy, RegionId, TensorsId, Work};
use crate::registry::{Region, Registry};

/// The device. A seed decides the order of its work.
pub struct HostDevice {
    registry: Registry<HostRegion, ()>,
    running: Vec<Running>,
    random: fastrand::Rng,
    control: HostControl,
    is_lost: bool,
}

/// Plants faults in a [`HostDevice`], from any thread.
#[derive(Clone, Default)]
pub struct HostControl(Arc<HostState>);

/// A fault of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The order is refused.
    Refuse,
    /// The order fails after this many pieces.
    Fail {
        /// Pieces: a page of a plane, or a block.
        after: u32,
    },
    /// The order stalls for ever after this many pieces; the others go on.
    Stall {
        /// Pieces.
        after: u32,
    },
    /// The device is lost after this many pieces.
    Lose {
        /// Pieces.
        after: u32,
    },
}

#[derive(Default)]
struct HostState {
    script: Mutex<Script>,
    changed: Condvar,
}

#[derive(Default)]
struct Script {
    /// Faults of the next orders, one each; `None` for an order without a fault.
    faults: VecDeque<Option<Fault>>,
    /// Calls do not return, as of a driver that hangs.
    holds_calls: bool,
    /// Calls that wait now.
    held: u32,
    /// Polls between an order's end and its report.
    late_polls: u32,
    /// Devices that were closed.
    gone: u32,
    /// Closing a device fails.
    clings: bool,
    engine_memory: Vec<HostMemory>,
}

struct HostRegion {
    memory: HostMemory,
    is_host: bool,
}

struct Running {
    number: OrderNumber,
    order: Order,
    /// The remaining pieces, last first.
    pieces: Vec<CopyStep>,
    copied: u32,
    told_layers: u32,
    fault: Option<Fault>,
    /// The order has ended, and is reported after this many polls.
    ended: Option<(Result<(), CopyError>, u32)>,
}

/// A page of one plane, or a block, and the layer it belongs to, counted from the order's first.
#[derive(Clone, Copy)]
struct CopyStep {
    layer: u32,
    what: Copied,
}

#[derive(Clone, Copy)]
enum Copied {
    Page(PageCopy, u32),
    Block(BlockMove),
}

impl HostDevice {
    /// A device that decides by `seed`, with the faults of `control`.
    #[must_use]
    pub fn new(seed: u64, control: HostControl) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        Self { registry: Registry::new(), running: Vec::new(), random, control, is_lost: false }
    }

    /// The place at which a hanging driver would not return.
    fn call(&self) -> Result<(), DeviceError> {
        let mut script = self.control.script();
        script.held += 1;
        self.control.0.changed.notify_all();
        while script.holds_calls {
            script = self.control.0.changed.wait(script).unwrap_or_else(PoisonError::into_inner);
        }
        script.held -= 1;
        if self.is_lost { Err(DeviceError::Lost(LOST.into())) } else { Ok(()) }
    }

    fn pieces(&mut self, order: &Order) -> Vec<CopyStep> {
        let mut pieces = Vec::new();
        match &order.work {
            Work::Pages { tensors, pages, layers, by_layer } => {
                let layout = &self.registry.tensors_of(*tensors).layout;
                for layer in layers.clone() {
                    let planes = layout.planes_of(&(layer..layer + 1));
                    let layer = layer - layers.start;
                    let of_layer = pages.iter().flat_map(|page| planes.clone().map(|plane| (*page, plane)));
                    let start = pieces.len();
                    pieces.extend(
                        of_layer.map(|(page, plane)| CopyStep { layer, what: Copied::Page(page, plane) }),
                    );
                    self.random.shuffle(&mut pieces[start..]);
                }
                if *by_layer {
                    pieces.reverse();
                } else {
                    self.random.shuffle(&mut pieces);
                }
            }
            Work::Blocks(moves) => {
                pieces.extend(moves.iter().map(|copy| CopyStep { layer: 0, what: Copied::Block(*copy) }));
                self.random.shuffle(&mut pieces);
            }
        }
        pieces
    }

    /// Copies one piece of one order.
    fn step(&mut self, number: usize) -> Result<(), DeviceError> {
        let running = &mut self.running[number];
        let limit = match running.fault {
            Some(Fault::Fail { after } | Fault::Stall { after } | Fault::Lose { after }) => after,
            _ => u32::MAX,
        };
        if running.copied >= limit {
            match running.fault {
                Some(Fault::Fail { .. }) => self.end(number, Err(CopyError::Failed)),
                Some(Fault::Lose { .. }) => {
                    self.is_lost = true;
                    return Err(DeviceError::Lost(LOST.into()));
                }
                _ => {}
            }
            return Ok(());
        }
        let Some(piece) = running.pieces.pop() else {
            self.end(number, Ok(()));
            return Ok(());
        };
        running.copied += 1;
        copy(&self.registry, &running.order, piece);
        Ok(())
    }

    fn end(&mut self, number: usize, result: Result<(), CopyError>) {
        let running = &mut self.running[number];
        running.ended = Some((result, self.control.script().late_polls));
        if let Some(then) = running.order.then {
            let reached = then.raised(running.order.work.layers());
            self.registry.region_of(then.word.region).memory.set_word(then.word.offset, reached.value);
        }
    }

    /// Tells of layers that are done, from the first on.
    fn tell_layers(&mut self, number: usize, events: &mut Vec<Event>) {
        let running = &mut self.running[number];
        let Work::Pages { by_layer: true, .. } = running.order.work else { return };
        let done = running.pieces.last().map_or(running.order.work.layers(), |piece| piece.layer);
        if done > running.told_layers {
            running.told_layers = done;
            events.push(Event::Layers { number: running.number, done });
            if let Some(then) = running.order.then {
                let memory = &self.registry.region_of(then.word.region).memory;
                memory.set_word(then.word.offset, then.raised(done).value);
            }
        }
    }

    fn may_begin(&self, running: &Running) -> bool {
        running.order.after.is_none_or(|flag| {
            flag.is_reached_by(self.registry.region_of(flag.word.region).memory.word(flag.word.offset))
        })
    }
}

impl Device for HostDevice {
    fn name(&self) -> String {
        "host memory, for tests".into()
    }

    fn attach(&mut self, memory: HostMemory) -> Result<RegionId, DeviceError> {
        self.call()?;
        Ok(self.registry.add_region(HostRegion { memory, is_host: true }))
    }

    fn allocate(&mut self, bytes: u64) -> Result<RegionId, DeviceError> {
        self.call()?;
        let memory = HostMemory::allocate(bytes);
        let memory =
            memory.map_err(|error| DeviceError::Refused { what: "memory", reason: error.to_string() })?;
        Ok(self.registry.add_region(HostRegion { memory, is_host: false }))
    }

    /// Maps memory that comes as a descriptor; else takes the memory that was shared last ([`HostControl::share`]).
    fn import(&mut self, memory: EngineMemory) -> Result<RegionId, DeviceError> {
        self.call()?;
        let refused = |reason: String| DeviceError::Refused { what: "an engine's memory", reason };
        let memory = match memory {
            EngineMemory::Descriptor { descriptor, bytes } => {
                HostMemory::map(descriptor.as_fd(), bytes).map_err(|error| refused(error.to_string()))?
            }
            EngineMemory::Ipc { .. } | EngineMemory::Own { .. } => {
                let shared = self.control.script().engine_memory.pop();
                shared.ok_or_else(|| refused("none was shared".into()))?
            }
        };
        Ok(self.registry.add_region(HostRegion { memory, is_host: false }))
    }

    fn detach(&mut self, region: RegionId) -> Result<(), DeviceError> {
        self.call()?;
        self.registry.remove_region(region).map(|_| ())
    }

    fn register(&mut self, layout: PagedLayout, regions: Vec<RegionId>) -> Result<TensorsId, DeviceError> {
        self.call()?;
        self.registry.check_tensors(&layout, &regions)?;
        Ok(self.registry.add_tensors(layout, regions, ()))
    }

    fn unregister(&mut self, tensors: TensorsId) -> Result<(), DeviceError> {
        self.call()?;
        self.registry.remove_tensors(tensors)
    }

    fn start(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError> {
        self.call()?;
        self.registry.begin(&order)?;
        let fault = self.control.script().faults.pop_front().flatten();
        if fault == Some(Fault::Refuse) {
            self.registry.end(&order);
            return Err(DeviceError::Refused { what: "a copy", reason: "as it was told".into() });
        }
        let pieces = self.pieces(&order);
        self.running.push(Running { number, order, pieces, copied: 0, told_layers: 0, fault, ended: None });
        Ok(())
    }

    fn refuse(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError> {
        self.call()?;
        self.registry.begin(&order)?;
        let pieces = Vec::new();
        self.running.push(Running {
            number,
            order,
            pieces,
            copied: 0,
            told_layers: 0,
            fault: None,
            ended: None,
        });
        self.end(self.running.len() - 1, Err(CopyError::Refused));
        Ok(())
    }

    fn cancel(&mut self, number: OrderNumber) {
        let waits = |running: &Running| {
            let has_begun = running.copied > 0 || running.ended.is_some() || self.may_begin(running);
            running.number == number && !has_begun
        };
        if let Some(number) = self.running.iter().position(waits) {
            self.end(number, Err(CopyError::Refused));
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), DeviceError> {
        self.call()?;
        for _ in 0..self.random.u32(0..STEPS_PER_POLL) {
            if self.running.is_empty() {
                return Ok(());
            }
            let number = self.random.usize(0..self.running.len());
            if self.running[number].ended.is_none() && self.may_begin(&self.running[number]) {
                self.step(number)?;
                self.tell_layers(number, events);
            }
        }
        let mut number = 0;
        while number < self.running.len() {
            match &mut self.running[number].ended {
                Some((result, 0)) => {
                    let result = *result;
                    let Running { number, order, .. } = self.running.swap_remove(number);
                    self.registry.end(&order);
                    events.push(Event::Done { number, result });
                }
                Some((_, polls)) => {
                    *polls -= 1;
                    number += 1;
                }
                None => number += 1,
            }
        }
        Ok(())
    }

    /// After [`HostControl::cling`], the device cannot be closed.
    fn close(self: Box<Self>) -> Result<(), DeviceError> {
        let mut script = self.control.script();
        if script.clings {
            return Err(DeviceError::Lost(LOST.into()));
        }
        script.gone += 1;
        Ok(())
    }
}

impl HostControl {
    /// Plants a fault. Each further order gets the next planted fault.
    pub fn fail_next(&self, fault: Fault) {
        self.script().faults.push_back(Some(fault));
    }

    /// Plants no fault for an order: it goes well.
    pub fn spare_next(&self) {
        self.script().faults.push_back(None);
    }

    /// Calls no longer return, until [`HostControl::release_calls`].
    pub fn hold_calls(&self) {
        self.script().holds_calls = true;
    }

    /// Calls return again.
    pub fn release_calls(&self) {
        self.script().holds_calls = false;
        self.0.changed.notify_all();
    }

    /// Waits until a call is held.
    pub fn wait_until_held(&self) {
        let mut script = self.script();
        while !script.holds_calls || script.held == 0 {
            script = self.0.changed.wait(script).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// From now on, an order's end is reported this many polls late.
    pub fn be_late(&self, polls: u32) {
        self.script().late_polls = polls;
    }

    /// Shares memory for the next import.
    pub fn share(&self, memory: HostMemory) {
        self.script().engine_memory.push(memory);
    }

    /// From now on, a device cannot be closed.
    pub fn cling(&self) {
        self.script().clings = true;
    }

    /// Devices that were closed.
    #[must_use]
    pub fn gone(&self) -> u32 {
        self.script().gone
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.script.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Region for HostRegion {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn is_writable(&self) -> bool {
        self.memory.is_writable()
    }

    fn is_host(&self) -> bool {
        self.is_host
    }
}

fn copy(registry: &Registry<HostRegion, ()>, order: &Order, piece: CopyStep) {
    match (piece.what, &order.work) {
        (Copied::Page(page, plane), Work::Pages { tensors, .. }) => {
            let tensors = registry.tensors_of(*tensors);
            let layout = &tensors.layout;
            let block = &registry.region_of(page.block.region).memory;
            let in_block = page.block.offset + layout.in_block(plane, page.in_chunk);
            for run in layout.runs(plane, page.page) {
                let paged = &registry.region_of(tensors.regions[run.region as usize]).memory;
                let bytes = run.range.end - run.range.start;
                match order.direction {
                    Direction::Load => {
                        block.copy_to(in_block + run.in_page, paged, run.range.start, bytes);
                    }
                    Direction::Save => {
                        paged.copy_to(run.range.start, block, in_block + run.in_page, bytes);
                    }
                }
            }
        }
        (Copied::Block(BlockMove { from, to, bytes }), _) => {
            let (source, target) =
                (&registry.region_of(from.region).memory, &registry.region_of(to.region).memory);
            source.copy_to(from.offset, target, to.offset, bytes);
        }
        (Copied::Page(..), Work::Blocks(_)) => unreachable!("only orders of pages have pages"),
    }
}

/// The most pieces that are copied between two words to the caller.
const STEPS_PER_POLL: u32 = 24;

const LOST: &str = "as it was told";

#[cfg(test)]
mod tests;
