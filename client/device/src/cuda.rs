//! A CUDA device: orders become launches of a kernel and copies, on a stream for loads and one for saves.
#![expect(unsafe_code, reason = "hands addresses to the copy engine")]

mod driver;
mod enqueue;
mod forms;
mod lane;
mod pieces;
mod tables;

use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt;

use crate::device::{CopyError, Device, DeviceError, EngineMemory, Event};
use crate::layout::PagedLayout;
use crate::memory::HostMemory;
use crate::order::{Direction, Flag, Order, OrderNumber, RegionId, RegionOffset, TensorsId};
use crate::registry::{Region, Registry};

pub use forms::Form;

use driver::{Context, CudaError, DeviceMemory, Kernel, Module, NoCuda, PinnedMemory};
use enqueue::Begun;
use forms::{Forms, OrderShape};
use lane::{KernelTable, Streams};
use tables::{ENTRY_BYTES, plane_bytes};

/// A GPU. It stays on the thread that opened it.
pub struct CudaDevice {
    registry: Registry<CudaRegion, DeviceMemory>,
    /// Orders whose flag is not reached.
    waiting: VecDeque<(OrderNumber, Order)>,
    /// Orders that were given up while they waited, not reported yet.
    cancelled: Vec<OrderNumber>,
    running: Vec<Running>,
    /// Resources of orders whose end could not even be marked: they stay until the device is closed.
    limbo: Vec<Begun>,
    loads: Streams,
    saves: Streams,
    tables: Vec<KernelTable>,
    spare_events: Vec<driver::Event>,
    forms: Forms,
    gather: Kernel,
    scatter: Kernel,
    options: CudaOptions,
    context: Context,
    is_lost: bool,
}

/// How a GPU is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaOptions {
    /// The GPU's number in the driver's order.
    pub ordinal: u32,
    /// Bytes of each half of each lane's staging buffer. Large enough that the copy engine's start does not count, small enough
    /// that the first half is soon full. The buffers take four times as much of the GPU's memory.
    pub half_bytes: u64,
    /// Thread blocks of a kernel whose bytes cross the bus: enough to fill it, few enough to leave the GPU to the engine.
    pub bus_blocks: u32,
    /// Thread blocks of a kernel between pages and a staging buffer: enough to be faster than the bus.
    pub staged_blocks: u32,
    /// Whether other processes compute on the GPU, and this one only copies. Each kernel then takes the whole GPU from them for its
    /// time: forms without kernels are preferred by far. And the context is the device's own: a device that failed ends it.
    pub only_copies: bool,
    /// The form of every copy that can have it. With `None`, measurements choose the form.
    pub form: Option<Form>,
}

/// A place on the PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciPlace {
    /// Its domain.
    pub domain: u32,
    /// The bus.
    pub bus: u32,
    /// The device there.
    pub device: u32,
}

enum CudaRegion {
    Host(PinnedMemory),
    Device(DeviceMemory),
}

/// An order that the GPU has.
struct Running {
    number: OrderNumber,
    order: Order,
    /// Layers, with the events that mark their ends.
    layers: VecDeque<(u32, driver::Event)>,
    end: driver::Event,
    table: Option<KernelTable>,
    measured: Option<Measured>,
    /// Some part of the order could not be begun.
    has_failed: bool,
}

/// A measurement of an order's time.
struct Measured {
    start: driver::Event,
    shape: OrderShape,
    form: Form,
    bytes: u64,
}

/// Looks for the CUDA driver's library and all functions that this crate calls, without touching a GPU.
///
/// # Errors
/// [`DeviceError::Absent`] if it is missing or too old.
pub fn find_driver() -> Result<(), DeviceError> {
    driver::check_library().map_err(|error| DeviceError::Absent(error.to_string()))
}

/// The number of the GPU at a place on the bus; the number of the driver's first GPU if `place` is `None`.
///
/// # Errors
/// [`DeviceError::Absent`] if there is no such GPU, or no driver.
pub fn ordinal_at(place: Option<PciPlace>) -> Result<u32, DeviceError> {
    driver::ordinal_at(place).map_err(|error| DeviceError::Absent(error.to_string()))
}

impl fmt::Display for PciPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}", self.domain, self.bus, self.device)
    }
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            ordinal: 0,
            half_bytes: 16 << 20,
            bus_blocks: 16,
            staged_blocks: 32,
            only_copies: false,
            form: None,
        }
    }
}

impl CudaDevice {
    /// Opens a GPU, on the thread that will use it.
    ///
    /// # Errors
    /// [`DeviceError::Absent`] if there is no driver, an old one, or no such GPU.
    pub fn open(options: CudaOptions) -> Result<Self, DeviceError> {
        let absent = |error: NoCuda| DeviceError::Absent(error.to_string());
        let context = Context::open(options.ordinal).map_err(absent)?;
        Self::with(context, options).map_err(|error| DeviceError::Absent(error.to_string()))
    }

    fn with(context: Context, options: CudaOptions) -> Result<Self, CudaError> {
        let module = Module::load(&context, PTX)?;
        Ok(Self {
            registry: Registry::new(),
            waiting: VecDeque::new(),
            cancelled: Vec::new(),
            running: Vec::new(),
            limbo: Vec::new(),
            loads: Streams::new(&context, options.half_bytes)?,
            saves: Streams::new(&context, options.half_bytes)?,
            tables: Vec::new(),
            spare_events: Vec::new(),
            forms: Forms::new(options.only_copies),
            gather: module.kernel("larder_pages_to_blocks")?,
            scatter: module.kernel("larder_blocks_to_pages")?,
            options,
            context,
            is_lost: false,
        })
    }

    fn address(&self, place: RegionOffset) -> u64 {
        self.registry.region_of(place.region).address() + place.offset
    }

    fn lane(&self, direction: Direction) -> &Streams {
        match direction {
            Direction::Load => &self.loads,
            Direction::Save => &self.saves,
        }
    }

    fn event(&mut self) -> Result<driver::Event, CudaError> {
        self.spare_events.pop().map_or_else(|| driver::Event::new(&self.context), Ok)
    }

    /// A table with room for `entries` entries.
    fn table(&mut self, entries: usize) -> Result<KernelTable, CudaError> {
        let bytes = entries as u64 * ENTRY_BYTES;
        let fitting = self.tables.iter().enumerate().filter(|(_, table)| table.bytes() >= bytes);
        match fitting.min_by_key(|(_, table)| table.bytes()) {
            Some((number, _)) => Ok(self.tables.swap_remove(number)),
            None => KernelTable::new(&self.context, bytes.next_power_of_two().max(SMALLEST_TABLE)),
        }
    }

    /// Reports an order's progress; `true` if the order has ended.
    fn look_at(&mut self, number: usize, events: &mut Vec<Event>) -> Result<bool, CudaError> {
        let running = &mut self.running[number];
        while let Some((done, event)) = running.layers.front() {
            if !event.is_done()? {
                return Ok(false);
            }
            events.push(Event::Layers { number: running.number, done: *done });
            self.spare_events.extend(running.layers.pop_front().map(|(_, event)| event));
        }
        running.end.is_done()
    }

    fn finish(&mut self, running: Running, events: &mut Vec<Event>) {
        let Running { number, order, end, table, measured, has_failed, .. } = running;
        if let Some(Measured { start, shape, form, bytes }) = measured {
            if !has_failed && let Ok(took_ms) = end.since_ms(&start) {
                let change = self.forms.measured(shape, form, bytes, took_ms.into());
                if let Some(line) = change {
                    tracing::info!(gpu = self.context.name(), "how copies are made: {line}");
                }
            }
            self.spare_events.push(start);
        }
        self.spare_events.push(end);
        // The driver frees memory only when everything in the context has ended, the engine's kernels too.
        let kept: u64 = self.tables.iter().map(KernelTable::bytes).sum();
        self.tables.extend(table.filter(|table| kept + table.bytes() <= KEPT_TABLES_BYTES));
        if has_failed {
            self.release_waiters(&order);
        }
        self.registry.end(&order);
        let result = if has_failed { Err(CopyError::Failed) } else { Ok(()) };
        events.push(Event::Done { number, result });
    }

    /// Raises a failed order's flag, so that its waiters go on.
    fn release_waiters(&self, order: &Order) {
        if let Some(then) = order.then
            && let CudaRegion::Host(pinned) = self.registry.region_of(then.word.region)
        {
            pinned.memory().set_word(then.word.offset, then.raised(order.work.layers()).value);
        }
    }

    fn is_reached(&self, flag: Flag) -> bool {
        match self.registry.region_of(flag.word.region) {
            CudaRegion::Host(pinned) => flag.is_reached_by(pinned.memory().word(flag.word.offset)),
            CudaRegion::Device(_) => false,
        }
    }

    fn poll_orders(&mut self, events: &mut Vec<Event>) -> Result<(), DeviceError> {
        for _ in 0..self.waiting.len() {
            let Some((number, order)) = self.waiting.pop_front() else { break };
            if order.after.is_none_or(|flag| self.is_reached(flag)) {
                self.enqueue(number, order)?;
            } else {
                self.waiting.push_back((number, order));
            }
        }
        let mut number = 0;
        while number < self.running.len() {
            if self.look_at(number, events).map_err(|error| self.lose(&error))? {
                let running = self.running.swap_remove(number);
                self.finish(running, events);
            } else {
                number += 1;
            }
        }
        Ok(())
    }

    fn lose(&mut self, error: &CudaError) -> DeviceError {
        self.is_lost = true;
        self.running.iter().for_each(|running| self.release_waiters(&running.order));
        self.waiting.iter().for_each(|(_, order)| self.release_waiters(order));
        DeviceError::Lost(error.to_string())
    }

    /// Turns a driver's refusal into an error: the device is lost only if its context is.
    fn refused(&mut self, what: &'static str, error: &CudaError) -> DeviceError {
        if error.is_fatal() {
            self.lose(error)
        } else {
            DeviceError::Refused { what, reason: error.to_string() }
        }
    }

    fn alive(&self) -> Result<(), DeviceError> {
        if self.is_lost { Err(DeviceError::Lost("the device failed before".into())) } else { Ok(()) }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        self.context.name()
    }

    fn attach(&mut self, memory: HostMemory) -> Result<RegionId, DeviceError> {
        const WHAT: &str = "pinning host memory";
        self.alive()?;
        let can =
            memory.is_writable() || self.context.pins_read_only().map_err(|e| self.refused(WHAT, &e))?;
        if !can {
            let reason = "this GPU pins no memory that may only be read: map it writable".into();
            return Err(DeviceError::Refused { what: WHAT, reason });
        }
        let pinned = PinnedMemory::pin(&self.context, memory).map_err(|error| self.refused(WHAT, &error))?;
        Ok(self.registry.add_region(CudaRegion::Host(pinned)))
    }

    fn allocate(&mut self, bytes: u64) -> Result<RegionId, DeviceError> {
        self.alive()?;
        let memory = DeviceMemory::allocate(&self.context, bytes);
        let memory = memory.map_err(|error| self.refused("GPU memory", &error))?;
        Ok(self.registry.add_region(CudaRegion::Device(memory)))
    }

    fn import(&mut self, memory: EngineMemory) -> Result<RegionId, DeviceError> {
        const WHAT: &str = "mapping an engine's GPU memory";
        self.alive()?;
        let memory = match memory {
            EngineMemory::Ipc { handle, offset, bytes } => {
                DeviceMemory::open_ipc(&self.context, handle, offset, bytes)
            }
            EngineMemory::Descriptor { descriptor, bytes } => {
                if !self.context.shares_descriptors().map_err(|error| self.refused(WHAT, &error))? {
                    let reason =
                        "this GPU shares no memory by descriptor: have the engine use cudaMalloc".into();
                    return Err(DeviceError::Refused { what: WHAT, reason });
                }
                DeviceMemory::map_descriptor(&self.context, &descriptor, bytes)
            }
            EngineMemory::Own { address, bytes } => DeviceMemory::borrow(&self.context, address, bytes),
        };
        let memory = memory.map_err(|error| self.refused(WHAT, &error))?;
        Ok(self.registry.add_region(CudaRegion::Device(memory)))
    }

    fn detach(&mut self, region: RegionId) -> Result<(), DeviceError> {
        self.registry.remove_region(region).map(drop)
    }

    fn register(&mut self, layout: PagedLayout, regions: Vec<RegionId>) -> Result<TensorsId, DeviceError> {
        const WHAT: &str = "a table of planes";
        self.alive()?;
        self.registry.check_tensors(&layout, &regions)?;
        if regions.iter().any(|&region| !self.registry.region_of(region).address().is_multiple_of(ALIGNMENT))
        {
            let reason = format!("the address of a region is no multiple of {ALIGNMENT} bytes");
            return Err(DeviceError::Refused { what: "an engine's tensors", reason });
        }
        let starts: Vec<u64> =
            regions.iter().map(|&region| self.registry.region_of(region).address()).collect();
        let bytes = plane_bytes(&layout, &starts);
        let uploaded = KernelTable::new(&self.context, bytes.len() as u64).and_then(|table| {
            // SAFETY: the table lives until the copy has ended, for which `synchronize` waits.
            unsafe { table.fill(&self.loads, &bytes)? };
            self.loads.kernels.synchronize()?;
            Ok(table.into_device())
        });
        let table = uploaded.map_err(|error| self.refused(WHAT, &error))?;
        // Kernels of both lanes may read the table: the copy into it has ended.
        Ok(self.registry.add_tensors(layout, regions, table))
    }

    fn unregister(&mut self, tensors: TensorsId) -> Result<(), DeviceError> {
        self.registry.remove_tensors(tensors).map(drop)
    }

    fn start(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError> {
        self.alive()?;
        self.registry.begin(&order)?;
        if order.after.is_none_or(|flag| self.is_reached(flag)) {
            return self.enqueue(number, order);
        }
        self.waiting.push_back((number, order));
        Ok(())
    }

    fn refuse(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError> {
        self.alive()?;
        self.registry.begin(&order)?;
        self.waiting.push_back((number, order));
        self.cancel(number);
        Ok(())
    }

    fn cancel(&mut self, number: OrderNumber) {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.0 == number) else { return };
        let Some((_, order)) = self.waiting.remove(at) else { return };
        self.release_waiters(&order);
        self.registry.end(&order);
        self.cancelled.push(number);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), DeviceError> {
        self.alive()?;
        let refused = |number| Event::Done { number, result: Err(CopyError::Refused) };
        events.extend(self.cancelled.drain(..).map(refused));
        self.poll_orders(events)
    }

    fn close(mut self: Box<Self>) -> Result<(), DeviceError> {
        let ended = [&self.loads, &self.saves].into_iter().try_for_each(Streams::synchronize);
        let Err(error) = ended else { return Ok(()) };
        if !self.is_lost {
            self.lose(&error);
        }
        // In an engine the context is the engine's too, whose own threads may use it now. Only a fatal error has broken all that
        // others of a process have in it.
        let may_reset = self.options.only_copies && error.is_fatal();
        let reset = if may_reset { self.context.reset() } else { Err(error) };
        if reset.is_ok() {
            self.registry.take_regions().for_each(CudaRegion::abandon);
        }
        // The driver's values ended with the context, and must not be ended again. Else host memory stays where it is.
        std::mem::forget(self);
        reset.map_err(|error| DeviceError::Lost(error.to_string()))
    }

    fn choices(&self) -> Vec<String> {
        self.forms.lines()
    }
}

impl CudaRegion {
    /// Lets go of host memory after the end of the context. The context's own memory ended with it.
    fn abandon(self) {
        match self {
            Self::Host(pinned) => pinned.abandon(),
            Self::Device(memory) => std::mem::forget(memory),
        }
    }

    /// The address at which the device sees it.
    fn address(&self) -> u64 {
        match self {
            Self::Host(pinned) => pinned.address(),
            Self::Device(memory) => memory.address(),
        }
    }
}

impl Region for CudaRegion {
    fn bytes(&self) -> u64 {
        match self {
            Self::Host(pinned) => pinned.memory().bytes(),
            Self::Device(memory) => memory.bytes(),
        }
    }

    fn is_writable(&self) -> bool {
        match self {
            Self::Host(pinned) => pinned.memory().is_writable(),
            Self::Device(_) => true,
        }
    }

    fn is_host(&self) -> bool {
        matches!(self, Self::Host(_))
    }
}

/// The kernels, as `kernels/build` makes them from `kernels/pages.cu`.
const PTX: &CStr = match CStr::from_bytes_with_nul(
    concat!(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/pages.ptx")), "\0").as_bytes(),
) {
    Ok(ptx) => ptx,
    Err(_) => panic!("PTX has no zero byte"),
};

const ALIGNMENT: u64 = crate::layout::ALIGNMENT;

/// Room for 4,096 pages.
const SMALLEST_TABLE: u64 = 64 << 10;

/// Bytes of all tables that are kept for later orders, until the device is closed.
const KEPT_TABLES_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests;
