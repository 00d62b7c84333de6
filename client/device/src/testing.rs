//! Helpers for tests of devices: paged memory with a reference, and orders over it.

use crate::device::Device;
use crate::layout::{PagedLayout, Shape, VllmOrder, sglang_latent, sglang_split, vllm};
use crate::memory::HostMemory;
use crate::order::{Direction, Order, PageCopy, RegionId, RegionOffset, TensorsId, Work};

/// Every layout of every engine, small.
pub(crate) fn layouts() -> Vec<(String, PagedLayout, Vec<u64>)> {
    let heads = Shape { layers: 4, pages: 12, heads: 4, tokens: 4, content_bytes: 32, pages_per_chunk: 2 };
    let latent = Shape { heads: 1, content_bytes: 1_152, ..heads };
    let mut all = Vec::new();
    for order in VllmOrder::ALL {
        all.push((order.name().to_owned(), vllm(order, &heads)));
        all.push((format!("{}, latent", order.name()), vllm(order, &latent)));
    }
    all.push(("SGLang".into(), sglang_split(&heads)));
    all.push(("SGLang, latent".into(), sglang_latent(&latent)));
    let checked = |(name, (spec, regions)): (String, (_, Vec<u64>))| {
        (name, PagedLayout::new(spec, &regions).unwrap(), regions)
    };
    all.into_iter().map(checked).collect()
}

/// An engine's memory and an arena, both seen by a device and by the test.
pub(crate) struct Paged {
    pub(crate) layout: PagedLayout,
    pub(crate) engine: Vec<HostMemory>,
    pub(crate) arena: HostMemory,
    pub(crate) arena_region: RegionId,
    pub(crate) tensors: TensorsId,
}

impl Paged {
    /// Random bytes everywhere. `import` makes the device see an engine's memory.
    pub(crate) fn new(
        device: &mut dyn Device,
        layout: PagedLayout,
        regions: &[u64],
        random: &mut fastrand::Rng,
        import: impl Fn(&mut dyn Device, HostMemory) -> RegionId,
    ) -> Self {
        let engine: Vec<HostMemory> =
            regions.iter().map(|&bytes| HostMemory::allocate(bytes).unwrap()).collect();
        let arena = HostMemory::allocate(CHUNKS * layout.block_bytes() + 4_096).unwrap();
        let ids = engine.iter().map(|memory| import(device, memory.clone())).collect();
        let arena_region = device.attach(arena.clone()).unwrap();
        let tensors = device.register(layout.clone(), ids).unwrap();
        let paged = Self { layout, engine, arena, arena_region, tensors };
        paged.engine.iter().chain([&paged.arena]).for_each(|memory| randomise(memory, random));
        paged
    }

    /// The place of a chunk's block.
    pub(crate) fn block(&self, chunk: u64) -> RegionOffset {
        RegionOffset { region: self.arena_region, offset: chunk * self.layout.block_bytes() }
    }

    /// The word of a flag, behind the blocks.
    pub(crate) fn word(&self) -> RegionOffset {
        RegionOffset { region: self.arena_region, offset: CHUNKS * self.layout.block_bytes() }
    }

    /// Copies of all chunks, to or from pages in a random order.
    pub(crate) fn order(&self, direction: Direction, by_layer: bool, pages: &[u32]) -> Order {
        let per_chunk = self.layout.spec().pages_per_chunk;
        let copies = pages.iter().enumerate().map(|(number, &page)| PageCopy {
            block: self.block(number as u64 / u64::from(per_chunk)),
            in_chunk: number as u32 % per_chunk,
            page,
        });
        let layers = 0..self.layout.layers();
        let work = Work::Pages { tensors: self.tensors, pages: copies.collect(), layers, by_layer };
        Order { direction, work, after: None, then: None }
    }

    /// Pages in a random order, as many as the chunks have.
    pub(crate) fn pages(&self, random: &mut fastrand::Rng) -> Vec<u32> {
        let mut pages: Vec<u32> = (0..self.layout.spec().pages).collect();
        random.shuffle(&mut pages);
        pages.truncate(CHUNKS as usize * self.layout.spec().pages_per_chunk as usize);
        pages
    }

    /// All bytes.
    pub(crate) fn image(&self) -> Image {
        let bytes = |memory: &HostMemory| {
            let mut bytes = vec![0; memory.bytes() as usize];
            memory.read(0, &mut bytes);
            bytes
        };
        Image { engine: self.engine.iter().map(bytes).collect(), arena: bytes(&self.arena) }
    }
}

/// All bytes at one time.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) engine: Vec<Vec<u8>>,
    pub(crate) arena: Vec<u8>,
}

impl Image {
    /// The plain reference: the bytes after some layers of an order.
    pub(crate) fn after(mut self, paged: &Paged, order: &Order, done: u32) -> Self {
        let Work::Pages { pages, layers, .. } = &order.work else { return self };
        for plane in paged.layout.planes_of(&(layers.start..layers.start + done)) {
            for copy in pages {
                let start = copy.block.offset + paged.layout.in_block(plane, copy.in_chunk);
                for run in paged.layout.runs(plane, copy.page) {
                    let bytes = run.range.end - run.range.start;
                    let block = &mut self.arena[(start + run.in_page) as usize..][..bytes as usize];
                    let engine = &mut self.engine[run.region as usize]
                        [run.range.start as usize..run.range.end as usize];
                    match order.direction {
                        Direction::Load => engine.copy_from_slice(block),
                        Direction::Save => block.copy_from_slice(engine),
                    }
                }
            }
        }
        self
    }
}

fn randomise(memory: &HostMemory, random: &mut fastrand::Rng) {
    let mut bytes = vec![0; memory.bytes() as usize];
    random.fill(&mut bytes);
    memory.write(0, &bytes);
}

/// Chunks of an order.
pub(crate) const CHUNKS: u64 = 5;
