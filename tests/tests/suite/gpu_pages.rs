//! The pages of an engine with memory on a device, and their expected contents.

use std::ops::Range;
use std::time::Duration;

use larder_client::engine_lane::LoadPages;
use larder_device::layout::{Shape, VllmOrder, vllm};
use larder_device::{HostMemory, PagedLayout};
use larder_protocol::{ChunkHash, NamespaceSpec};
use larder_tests::content::{BLOCK_BYTES, block, namespace};

/// Pages with a separate run for each head.
pub(super) const SHAPE: Shape =
    Shape { layers: 4, pages: 24, heads: 2, tokens: 4, content_bytes: 64, pages_per_chunk: PAGES_PER_CHUNK };
const PAGES_PER_CHUNK: u32 = 2;

/// Longer than any copy takes that does not stall.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// The namespace of all tests, with a block of four layers.
pub(super) fn layered() -> NamespaceSpec {
    let mut spec = namespace();
    spec.pools[0].layers = SHAPE.layers;
    spec.pools[0].layer_bytes = BLOCK_BYTES as u64 / u64::from(SHAPE.layers);
    spec
}

/// The layout of the pages in one region, and the region's bytes.
pub(super) fn layout() -> (PagedLayout, u64) {
    let (spec, regions) = vllm(VllmOrder::Lhbnc, &SHAPE);
    (PagedLayout::new(spec, &regions).unwrap(), regions[0])
}

/// The memory of an engine's device.
pub(super) struct GpuPages(pub(super) HostMemory);

impl GpuPages {
    /// The pages of chunk number `position`: scattered, and not in order.
    pub(super) fn of(position: u32) -> Vec<u32> {
        (0..PAGES_PER_CHUNK).map(|page| (position * PAGES_PER_CHUNK + page) * 7 % SHAPE.pages).collect()
    }

    /// A load of all pages of `chunks` chunks.
    pub(super) fn load(chunks: u32) -> LoadPages {
        let pages = (0..chunks).flat_map(Self::of).collect();
        LoadPages { block: 0, pages, first_page: 0, layers: 0..SHAPE.layers, by_layer: true }
    }

    /// Passes each contiguous piece of these layers of a chunk's pages to `each`, with its place in the block.
    fn for_each_run(position: u32, layers: Range<u32>, mut each: impl FnMut(u64, Range<usize>)) {
        let (layout, _) = layout();
        for (in_chunk, page) in (0..).zip(Self::of(position)) {
            for plane in layout.planes_of(&layers) {
                for run in layout.runs(plane, page) {
                    let start = (layout.in_block(plane, in_chunk) + run.in_page) as usize;
                    each(run.range.start, start..start + (run.range.end - run.range.start) as usize);
                }
            }
        }
    }

    /// Fills the pages as if the engine computed the chunk.
    pub(super) fn compute(&self, position: u32, hash: &ChunkHash) {
        let bytes = block(hash);
        Self::for_each_run(position, 0..SHAPE.layers, |at, range| self.0.write(at, &bytes[range]));
    }

    /// Whether these layers of a chunk's pages have the expected contents.
    pub(super) fn has(&self, position: u32, hash: &ChunkHash, layers: Range<u32>) -> bool {
        let (expected, mut is_right) = (block(hash), true);
        Self::for_each_run(position, layers, |at, range| {
            let mut bytes = vec![0; range.len()];
            self.0.read(at, &mut bytes);
            is_right &= bytes == expected[range];
        });
        is_right
    }
}
