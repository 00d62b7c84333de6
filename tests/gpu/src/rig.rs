//! A GPU with an engine's paged memory on it, an arena beside it, and a pool.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use larder_device::cuda::{CudaDevice, CudaOptions, Form};
use larder_device::{
    BlockMove, Device, Direction, Event, HostMemory, LayoutSpec, Order, OrderNumber, PageCopy, PagedLayout,
    RegionId, RegionOffset, TensorsId, Work,
};

/// The GPU and its memory. Orders are carried out one after the other, or some together.
pub(crate) struct Rig {
    device: Box<CudaDevice>,
    pub(crate) layout: PagedLayout,
    pub(crate) arena: HostMemory,
    pub(crate) arena_region: RegionId,
    /// The engine's regions and their lengths.
    pub(crate) engine: Vec<(RegionId, u64)>,
    pub(crate) pool: RegionId,
    pub(crate) tensors: TensorsId,
    pub(crate) chunks: u64,
    numbers: u64,
}

/// Times of events since the start of the first order.
pub(crate) struct Times {
    pub(crate) first_layer: Option<Duration>,
    pub(crate) end: Duration,
}

impl Rig {
    /// Makes room for `chunks` chunks in arena and pool, and for the engine's memory.
    pub(crate) fn new(
        spec: LayoutSpec,
        regions: &[u64],
        chunks: u64,
        options: CudaOptions,
    ) -> anyhow::Result<Self> {
        let layout = PagedLayout::new(spec, regions)?;
        let mut device = Box::new(CudaDevice::open(options)?);
        let bytes = (chunks * layout.block_bytes()).max(regions.iter().copied().max().unwrap_or(0));
        let arena = HostMemory::allocate(bytes)?;
        let arena_region = device.attach(arena.clone())?;
        let pool = device.allocate(bytes)?;
        let engine = regions.iter().map(|&bytes| Ok((device.allocate(bytes)?, bytes)));
        let engine: Vec<_> = engine.collect::<anyhow::Result<_>>()?;
        let ids = engine.iter().map(|&(region, _)| region).collect();
        let tensors = device.register(layout.clone(), ids)?;
        Ok(Self { device, layout, arena, arena_region, engine, pool, tensors, chunks, numbers: 0 })
    }

    /// Options with a form, or with the choice by measurement.
    pub(crate) fn options(form: Option<Form>) -> CudaOptions {
        CudaOptions { form, ..CudaOptions::default() }
    }

    /// Copies of all chunks, between consecutive blocks in `region` and `pages`.
    pub(crate) fn order(
        &self,
        direction: Direction,
        by_layer: bool,
        region: RegionId,
        pages: &[u32],
    ) -> Order {
        let per_chunk = self.layout.spec().pages_per_chunk;
        let copy = |(number, &page): (usize, &u32)| PageCopy {
            block: RegionOffset {
                region,
                offset: number as u64 / u64::from(per_chunk) * self.layout.block_bytes(),
            },
            in_chunk: number as u32 % per_chunk,
            page,
        };
        let pages = pages.iter().enumerate().map(copy).collect();
        let work = Work::Pages { tensors: self.tensors, pages, layers: 0..self.layout.layers(), by_layer };
        Order { direction, work, after: None, then: None }
    }

    /// As many pages as the chunks have, in a random order.
    pub(crate) fn pages(&self, random: &mut fastrand::Rng) -> Vec<u32> {
        let mut pages: Vec<u32> = (0..self.layout.spec().pages).collect();
        random.shuffle(&mut pages);
        pages.truncate(self.chunks as usize * self.layout.spec().pages_per_chunk as usize);
        pages
    }

    /// Bytes that an order of all chunks moves.
    pub(crate) fn order_bytes(&self) -> u64 {
        self.chunks * self.layout.block_bytes()
    }

    /// One copy between the starts of two regions.
    pub(crate) fn block(from: RegionId, to: RegionId, bytes: u64, direction: Direction) -> Order {
        let place = |region| RegionOffset { region, offset: 0 };
        let work = Work::Blocks(vec![BlockMove { from: place(from), to: place(to), bytes }]);
        Order { direction, work, after: None, then: None }
    }

    /// Writes `bytes` into a region on the device, by way of the arena.
    pub(crate) fn write(&mut self, region: RegionId, bytes: &[u8]) -> anyhow::Result<()> {
        self.arena.write(0, bytes);
        let copy = Self::block(self.arena_region, region, bytes.len() as u64, Direction::Load);
        self.run(vec![copy]).map(drop)
    }

    /// Random bytes everywhere: zeros can be faster to move.
    pub(crate) fn randomise(&mut self, random: &mut fastrand::Rng) -> anyhow::Result<()> {
        let mut noise = vec![0; self.arena.bytes() as usize];
        random.fill(&mut noise);
        self.arena.write(0, &noise);
        let targets = self.engine.iter().copied().chain([(self.pool, self.arena.bytes())]);
        let host = self.arena_region;
        let orders = targets.map(|(region, bytes)| Self::block(host, region, bytes, Direction::Load));
        self.run(orders.collect()).map(drop)
    }

    /// Reads the content of a region on the device, by way of the arena.
    pub(crate) fn read(&mut self, region: RegionId, bytes: u64) -> anyhow::Result<Vec<u8>> {
        let copy = Self::block(region, self.arena_region, bytes, Direction::Save);
        self.run(vec![copy])?;
        let mut out = vec![0; bytes as usize];
        self.arena.read(0, &mut out);
        Ok(out)
    }

    /// Runs orders together, and waits for all.
    #[expect(clippy::disallowed_methods, reason = "a program that measures has a clock")]
    pub(crate) fn run(&mut self, orders: Vec<Order>) -> anyhow::Result<Times> {
        let mut left = orders.len();
        let (start, mut first_layer, mut events) = (Instant::now(), None, Vec::new());
        for order in orders {
            self.numbers += 1;
            self.device.start(OrderNumber(self.numbers), order).context("the device refused an order")?;
        }
        while left > 0 {
            self.device.poll(&mut events)?;
            for event in events.drain(..) {
                match event {
                    Event::Layers { .. } => first_layer = first_layer.or(Some(start.elapsed())),
                    Event::Done { result, .. } => {
                        result?;
                        left -= 1;
                    }
                }
            }
            if start.elapsed() > LONGEST {
                bail!("the GPU did not finish in {} s", LONGEST.as_secs());
            }
        }
        Ok(Times { first_layer, end: start.elapsed() })
    }

    pub(crate) fn device(&mut self) -> &mut CudaDevice {
        &mut self.device
    }

    pub(crate) fn close(self) -> anyhow::Result<()> {
        Ok(self.device.close()?)
    }
}

/// No order takes this long.
const LONGEST: Duration = Duration::from_secs(20);
