//! Gives an order to the GPU.
#![expect(unsafe_code, reason = "hands addresses to kernels and to the copy engine")]

use std::collections::VecDeque;

use super::driver::{self, CudaError, Runs};
use super::forms::{Form, OrderShape};
use super::lane::KernelTable;
use super::pieces::{self, At, Division, Launch};
use super::tables::{Copy, ENTRY_BYTES, Entry, THREADS, entry_bytes};
use super::{CudaDevice, Measured, Running};
use crate::device::DeviceError;
use crate::layout::PagedLayout;
use crate::order::{Direction, Flag, MAX_COPIES, Order, OrderNumber, PageCopy, TensorsId, Work};
use crate::registry::Region as _;

/// The begun part of an order.
#[derive(Default)]
pub(super) struct Begun {
    layers: VecDeque<(u32, driver::Event)>,
    table: Option<KernelTable>,
    measured: Option<Measured>,
}

impl CudaDevice {
    /// Gives the GPU an order whose flag is reached.
    pub(super) fn enqueue(&mut self, number: OrderNumber, order: Order) -> Result<(), DeviceError> {
        let mut begun = Begun::default();
        let copied = match &order.work {
            Work::Pages { .. } => self.enqueue_pages(&order, &mut begun),
            Work::Blocks(_) => self.enqueue_blocks(&order),
        };
        let result = copied.and_then(|()| self.raise_to_end(&order));
        let has_failed = result.is_err();
        let fatal = result.err().filter(|error| {
            tracing::error!(%error, "the beginning of a copy failed");
            error.is_fatal()
        });
        // Marked even after a failure: the end of what was begun must be known.
        match fatal.map_or_else(|| self.mark_end(order.direction), Err) {
            Ok(end) => {
                let Begun { layers, table, measured } = begun;
                self.running.push(Running { number, order, layers, end, table, measured, has_failed });
                Ok(())
            }
            Err(error) => {
                self.release_waiters(&order);
                self.limbo.push(begun);
                Err(self.lose(&error))
            }
        }
    }

    fn enqueue_pages(&mut self, order: &Order, begun: &mut Begun) -> Result<(), CudaError> {
        let Work::Pages { tensors, pages, layers, by_layer } = &order.work else { return Ok(()) };
        let layout = self.registry.tensors_of(*tensors).layout.clone();
        let (form, shape) = self.choose(order.direction, &layout, pages, layers.len(), *by_layer);
        let division =
            pieces::divide(&layout, pages, layers.clone(), *by_layer, form, self.options.half_bytes);
        if form == Form::Batched {
            self.measure(order.direction, form, shape, begun)?;
            return self.enqueue_runs(order, *tensors, &division, begun);
        }
        let entries = self.entries(order.direction, &division);
        let table = self.table(entries.len())?;
        // Behind what may take memory from the driver, which says nothing about the form.
        self.measure(order.direction, form, shape, begun)?;
        let lane = self.lane(order.direction);
        // SAFETY: table and staging buffers live until the order has ended: the table goes into `begun`, the buffers end with the
        // device, which waits in `close`.
        unsafe { table.fill(lane, &entry_bytes(&entries))? };
        let table_address = table.address();
        begun.table = Some(table);
        let crosses_bus = pages.iter().any(|copy| self.registry.region_of(copy.block.region).is_host());
        for (number, piece) in division.pieces.iter().enumerate() {
            let mut copy = Copy::of(&layout, self.registry.tensors_of(*tensors).own.address());
            copy.entries = table_address + piece.pages.start as u64 * ENTRY_BYTES;
            copy.entry_count = piece.pages.len() as u32;
            (copy.first_plane, copy.plane_count) =
                (piece.planes.start, piece.planes.end - piece.planes.start);
            self.enqueue_piece(order.direction, number % 2, piece, &copy, crosses_bus)?;
            self.mark_layers(order, piece, begun)?;
        }
        Ok(())
    }

    /// Has the copy engine copy each run of the pages.
    fn enqueue_runs(
        &mut self,
        order: &Order,
        tensors: TensorsId,
        division: &Division,
        begun: &mut Begun,
    ) -> Result<(), CudaError> {
        for piece in &division.pieces {
            let mut runs = self.runs(order.direction, tensors, piece, division);
            // SAFETY: the order was checked: its pages, planes and places lie within regions and tensors, which the registry keeps
            // until the order has ended.
            unsafe { self.lane(order.direction).kernels.copy_runs(&mut runs)? };
            self.mark_layers(order, piece, begun)?;
        }
        Ok(())
    }

    /// The runs of a piece's pages, with their places in blocks.
    fn runs(&self, direction: Direction, tensors: TensorsId, piece: &Launch, division: &Division) -> Runs {
        let mut runs = Runs::default();
        let tensors = self.registry.tensors_of(tensors);
        let regions: Vec<u64> =
            tensors.regions.iter().map(|&region| self.registry.region_of(region).address()).collect();
        for plane in piece.planes.clone() {
            for placed in &division.pages[piece.pages.clone()] {
                let At::Block(place) = placed.at else { continue };
                let block = self.address(place) + tensors.layout.in_block(plane, 0);
                for run in tensors.layout.runs(plane, placed.page) {
                    let (in_block, bytes) = (block + run.in_page, run.range.end - run.range.start);
                    let in_page = regions[run.region as usize] + run.range.start;
                    match direction {
                        Direction::Load => runs.add(in_block, in_page, bytes),
                        Direction::Save => runs.add(in_page, in_block, bytes),
                    }
                }
            }
        }
        runs
    }

    /// Marks the end of a piece whose layers are to be reported, and raises the order's flag behind it.
    fn mark_layers(&mut self, order: &Order, piece: &Launch, begun: &mut Begun) -> Result<(), CudaError> {
        let Some(layers) = piece.layers_done else { return Ok(()) };
        let event = self.event()?;
        let lane = self.lane(order.direction);
        if !piece.spans.is_empty() {
            lane.join()?;
        }
        event.record(&lane.kernels)?;
        begun.layers.push_back((layers, event));
        self.raise(order, order.then.map(|then| then.raised(layers)))
    }

    /// One launch, with the copies around it if it is staged.
    fn enqueue_piece(
        &mut self,
        direction: Direction,
        half: usize,
        piece: &Launch,
        copy: &Copy,
        crosses_bus: bool,
    ) -> Result<(), CudaError> {
        let limit = match (crosses_bus, piece.spans.is_empty()) {
            (true, true) => self.options.bus_blocks,
            (true, false) => self.options.staged_blocks,
            (false, _) => self.context.multiprocessors()? * 8,
        };
        let blocks = copy.tiles().min(limit.max(1).into()) as u32;
        let lane = self.lane(direction);
        let kernel = match direction {
            Direction::Load => &self.scatter,
            Direction::Save => &self.gather,
        };
        let spans: Vec<_> = piece.spans.iter().map(|span| (self.address(span.place), *span)).collect();
        // SAFETY: the order was checked: its pages, planes and places lie within regions and tensors, which the registry keeps
        // until the order has ended. `copy` is what the kernels expect. Staged addresses lie within the lane's half, which its
        // events keep from two pieces at a time.
        unsafe {
            match direction {
                Direction::Load => {
                    lane.bring(half, &spans)?;
                    lane.kernels.launch(kernel, blocks, THREADS, copy)?;
                    lane.scattered(half, !spans.is_empty())?;
                }
                Direction::Save => {
                    lane.before_gather(half, !spans.is_empty())?;
                    lane.kernels.launch(kernel, blocks, THREADS, copy)?;
                    lane.take(half, &spans)?;
                }
            }
        }
        Ok(())
    }

    fn enqueue_blocks(&mut self, order: &Order) -> Result<(), CudaError> {
        let Work::Blocks(moves) = &order.work else { return Ok(()) };
        for copy in moves {
            let (from, to) = (self.address(copy.from), self.address(copy.to));
            // SAFETY: the order was checked, and the registry keeps its regions until it has ended.
            unsafe { self.lane(order.direction).kernels.copy(from, to, copy.bytes)? };
        }
        Ok(())
    }

    /// Marks the end of all work that a lane has got.
    fn mark_end(&mut self, direction: Direction) -> Result<driver::Event, CudaError> {
        let event = self.event()?;
        self.lane(direction).join()?;
        event.record(&self.lane(direction).kernels)?;
        Ok(event)
    }

    /// Has the order's stream raise its flag to the end, after all that its lane has got.
    fn raise_to_end(&self, order: &Order) -> Result<(), CudaError> {
        let Some(then) = order.then else { return Ok(()) };
        self.lane(order.direction).join()?;
        self.raise(order, Some(then.raised(order.work.layers())))
    }

    /// Has the order's stream raise a flag after all that it has got.
    fn raise(&self, order: &Order, flag: Option<Flag>) -> Result<(), CudaError> {
        let Some(Flag { word, value }) = flag else { return Ok(()) };
        let lane = self.lane(order.direction);
        // SAFETY: the order was checked: the word lies within pinned memory that may be written.
        unsafe { lane.kernels.write_word(self.address(word), value) }
    }

    /// Chooses an order's form by measurement.
    fn choose(
        &mut self,
        direction: Direction,
        layout: &PagedLayout,
        pages: &[PageCopy],
        layers: usize,
        by_layer: bool,
    ) -> (Form, Option<(OrderShape, u64)>) {
        let is_host = |copy: &PageCopy| self.registry.region_of(copy.block.region).is_host();
        let fits = layout.plane_bytes() <= self.options.half_bytes
            && pages.len() * self.stages(layout, layers, by_layer) <= MOST_STAGED_ENTRIES;
        if !fits || !pages.iter().all(is_host) || !pieces::has_whole_chunks(layout, pages) {
            return (Form::Direct, None);
        }
        if let Some(form) = self.options.form {
            return (form, None);
        }
        let per_layer = layout.page_bytes() * u64::from(layout.spec().planes_per_layer);
        let order_bytes = per_layer * (pages.len() * layers) as u64;
        let run_bytes = layout.spec().run_bytes;
        let shape = OrderShape::new(direction, by_layer, run_bytes, layout.block_bytes(), order_bytes);
        // The time of an order that waits for other copies says nothing about its form.
        let is_alone = self.running.iter().all(|running| running.order.direction != direction);
        let form = self.forms.choose(shape, is_alone);
        (form, is_alone.then_some((shape, order_bytes)))
    }

    /// How often a staged order has an entry for each page: once for the planes that go through the staging buffer at a time.
    fn stages(&self, layout: &PagedLayout, layers: usize, by_layer: bool) -> usize {
        let per_layer = layout.spec().planes_per_layer as usize;
        let (groups, planes) = if by_layer { (layers, per_layer) } else { (1, layers * per_layer) };
        let at_a_time = (self.options.half_bytes / layout.plane_bytes()).clamp(1, planes as u64);
        groups * planes.div_ceil(at_a_time as usize)
    }

    fn measure(
        &mut self,
        direction: Direction,
        form: Form,
        shape: Option<(OrderShape, u64)>,
        begun: &mut Begun,
    ) -> Result<(), CudaError> {
        let Some((shape, bytes)) = shape else { return Ok(()) };
        let start = self.event()?;
        start.record(&self.lane(direction).kernels)?;
        begun.measured = Some(Measured { start, shape, form, bytes });
        Ok(())
    }

    fn entries(&self, direction: Direction, division: &Division) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::with_capacity(division.pages.len());
        entries.extend(division.pages.iter().map(|placed| match placed.at {
            At::Block(place) => Entry { block: self.address(place), page: placed.page },
            At::Staged(at) => Entry { block: at, page: placed.page },
        }));
        for (number, piece) in division.pieces.iter().enumerate().filter(|(_, piece)| !piece.spans.is_empty())
        {
            let half = self.lane(direction).half_address(number % 2);
            for entry in &mut entries[piece.pages.clone()] {
                entry.block = entry.block.wrapping_add(half);
            }
        }
        entries
    }
}

/// Entries of the largest staged order: 80 layers of 200,000 tokens. Its tables take 16 MiB on the GPU, and some 64 MiB here.
const MOST_STAGED_ENTRIES: usize = 16 * MAX_COPIES;
