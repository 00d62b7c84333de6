//! Copies between the pages of an engine's paged memory and the blocks of chunks, by strides.

use std::ops::Range;

use larder_client::{Damaged, LeaseGuard, Namespace};
use larder_protocol::limits::MAX_BLOCK_BYTES;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::damaged;
use crate::handoff::StagedLayers;
use crate::lease::Lease;
use crate::memory::{Memory, Target, copy_parts};
use crate::reservation::StagedChunk;

/// An engine's KV memory: pages of a fixed number of tokens, each layer's addressed by strides.
///
/// `regions` are writable buffers; `layers` has, as `larder_kv.LayerPages`, the places of each layer's pages in the regions. All
/// pages have the same size. A block of a chunk has the layers one after the other; each layer has the chunk's pages in order;
/// each page has its runs in the order of `dims`.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct PagedMemory {
    regions: Vec<Memory>,
    layers: Vec<Layer>,
    page_bytes: u64,
    pages_per_chunk: u64,
    block_bytes: u64,
}

/// `larder_kv.LayerPages`, by its attributes.
#[derive(FromPyObject)]
pub(crate) struct Layer {
    /// Number of the region.
    pub(crate) region: usize,
    /// The offset of page 0, in bytes.
    pub(crate) offset: u64,
    /// From one page to the next, in bytes.
    pub(crate) page_stride: u64,
    pub(crate) pages: u64,
    /// Outermost first: the number of steps, and the bytes of each step.
    pub(crate) dims: Vec<(u64, u64)>,
    /// Bytes of one contiguous piece.
    pub(crate) run_bytes: u64,
}

/// One contiguous piece of a copy.
struct PageRun {
    region: usize,
    range: Range<u64>,
    /// The piece's offset in the block.
    offset: u64,
}

impl Layer {
    /// Whether both layers have the same number of pages of the same shape.
    pub(crate) fn has_shape_of(&self, other: &Self) -> bool {
        (self.pages, &self.dims, self.run_bytes) == (other.pages, &other.dims, other.run_bytes)
    }

    fn page_bytes(&self) -> Option<u64> {
        self.dims.iter().try_fold(self.run_bytes, |bytes, &(count, _)| bytes.checked_mul(count))
    }

    /// The end of the last page.
    fn end(&self) -> Option<u64> {
        let further =
            |at: u64, count: u64, stride: u64| at.checked_add(count.checked_sub(1)?.checked_mul(stride)?);
        let last = further(self.offset, self.pages, self.page_stride)?;
        let last = self.dims.iter().try_fold(last, |at, &(count, stride)| further(at, count, stride))?;
        last.checked_add(self.run_bytes)
    }

    /// The contiguous pieces of page `page`, in order.
    fn runs(&self, page: u64) -> impl Iterator<Item = Range<u64>> {
        let start = self.offset + page * self.page_stride;
        let runs: u64 = self.dims.iter().map(|&(count, _)| count).product();
        (0..runs).map(move |run| {
            let (mut left, mut at) = (run, start);
            for &(count, stride) in self.dims.iter().rev() {
                at += left % count * stride;
                left /= count;
            }
            at..at + self.run_bytes
        })
    }
}

impl PagedMemory {
    /// The pieces of page `page`, which is number `in_chunk` of its chunk, in some layers.
    fn pieces(&self, layers: Range<usize>, page: u64, in_chunk: u64) -> impl Iterator<Item = PageRun> {
        layers.flat_map(move |number| {
            let layer = &self.layers[number];
            let page_start = (number as u64 * self.pages_per_chunk + in_chunk) * self.page_bytes;
            layer.runs(page).enumerate().map(move |(run, range)| PageRun {
                region: layer.region,
                range,
                offset: page_start + run as u64 * layer.run_bytes,
            })
        })
    }

    fn check_pages(&self, pages: &[u64]) -> PyResult<()> {
        let fewest = self.layers.iter().map(|layer| layer.pages).min().unwrap_or(0);
        match pages.iter().find(|&&page| page >= fewest) {
            Some(page) => Err(PyValueError::new_err(format!("there is no page {page}, only {fewest}"))),
            None => Ok(()),
        }
    }

    fn check_block(&self, namespace: &Namespace, block: usize) -> PyResult<()> {
        crate::namespace::check_block(namespace, block)?;
        self.check_block_bytes(namespace.block_bytes(block))
    }

    fn check_block_bytes(&self, block_bytes: u64) -> PyResult<()> {
        if block_bytes == self.block_bytes {
            return Ok(());
        }
        let text = format!("a chunk's pages have {} bytes, its block {block_bytes}", self.block_bytes);
        Err(PyValueError::new_err(text))
    }

    /// Copies pages, without the interpreter's lock. The arguments were checked.
    fn copy_in(
        &self,
        guard: &LeaseGuard,
        block: usize,
        pages: &[u64],
        first_page: u64,
        layers: &Range<usize>,
    ) -> Result<(), Damaged> {
        let targets =
            (first_page..).zip(pages).flat_map(|(number, &page)| {
                let (position, in_chunk) =
                    ((number / self.pages_per_chunk) as usize, number % self.pages_per_chunk);
                self.pieces(layers.clone(), page, in_chunk).map(move |PageRun { region, range, offset }| {
                    Target { memory: &self.regions[region], range, position, block, offset }
                })
            });
        let bytes = pages.len() as u64 * layers.len() as u64 * self.page_bytes;
        copy_parts(guard, bytes, targets)
    }
}

#[pymethods]
impl PagedMemory {
    /// Checks that every page of every layer lies within its region.
    #[new]
    #[pyo3(signature = (regions, layers, *, pages_per_chunk))]
    fn new(
        regions: Vec<Bound<'_, PyAny>>,
        layers: Vec<Bound<'_, PyAny>>,
        pages_per_chunk: u64,
    ) -> PyResult<Self> {
        let regions = regions.iter().map(Memory::writable).collect::<PyResult<Vec<_>>>()?;
        let layers = layers.iter().map(|layer| layer.extract::<Layer>()).collect::<PyResult<Vec<_>>>()?;
        let page_bytes = layers.first().and_then(Layer::page_bytes).filter(|&bytes| bytes > 0);
        let page_bytes = page_bytes.ok_or_else(|| PyValueError::new_err("there is no layer with bytes"))?;
        if pages_per_chunk == 0 {
            return Err(PyValueError::new_err("a chunk has at least one page"));
        }
        for (number, layer) in layers.iter().enumerate() {
            if layer.page_bytes() != Some(page_bytes) {
                let text = format!("pages of layer {number} have other sizes than those of layer 0");
                return Err(PyValueError::new_err(text));
            }
            let region = regions.get(layer.region).ok_or_else(|| {
                PyValueError::new_err(format!("layer {number} names the missing region {}", layer.region))
            })?;
            let end = layer
                .end()
                .ok_or_else(|| PyValueError::new_err(format!("layer {number} has no pages, or too many")))?;
            region.check(&(layer.offset..end))?;
        }
        let chunk_pages = pages_per_chunk.checked_mul(layers.len() as u64);
        let block_bytes = chunk_pages.and_then(|pages| pages.checked_mul(page_bytes));
        let block_bytes = block_bytes.filter(|&bytes| bytes <= MAX_BLOCK_BYTES).ok_or_else(|| {
            PyValueError::new_err(format!(
                "a chunk has more than {MAX_BLOCK_BYTES} bytes, the most of a block"
            ))
        })?;
        Ok(Self { regions, layers, page_bytes, pages_per_chunk, block_bytes })
    }

    /// Layers.
    #[getter]
    fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of one page in one layer.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes of one chunk over all layers: a block of the namespace must have this size.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Copies leased blocks into `pages`: consecutive pages of the prompt, from number `first_page` on, counted from the lease's
    /// first chunk. `layer` is one layer, all layers if not given; `block` is the block of each chunk. Other threads run
    /// meanwhile; none may use these pages.
    ///
    /// Raises `DamagedError` if a verified chunk is wrong: the pages of the chunks before its `position` are loaded.
    #[pyo3(signature = (lease, pages, *, first_page = 0, layer = None, block = 0))]
    fn load(
        &self,
        py: Python<'_>,
        lease: &Lease,
        pages: Vec<u64>,
        first_page: u64,
        layer: Option<usize>,
        block: usize,
    ) -> PyResult<()> {
        let guard = lease.guard()?;
        self.check_pages(&pages)?;
        let layers = find_layer(layer, self.layers.len())?;
        self.check_block(guard.namespace(), block)?;
        let leased = guard.chunks() as u64 * self.pages_per_chunk;
        if first_page.checked_add(pages.len() as u64).is_none_or(|end| end > leased) {
            let text = format!("{} pages from {first_page} on are not leased: {leased} are", pages.len());
            return Err(PyValueError::new_err(text));
        }
        if pages.is_empty() {
            return Ok(());
        }
        // A pool that is not needed of every chunk, such as a sliding window, is leased only of the last chunks.
        let last_page = first_page + pages.len() as u64 - 1;
        let mut positions = first_page / self.pages_per_chunk..=last_page / self.pages_per_chunk;
        if positions.any(|position| !guard.has_block(position as usize, block)) {
            return Err(PyValueError::new_err(format!("block {block} is not leased of all these pages")));
        }
        let copied = py.detach(|| self.copy_in(&guard, block, &pages, first_page, &layers));
        copied.map_err(|error| damaged(&error))
    }

    /// Copies `pages`, which are the pages of the staged chunks in order, into these chunks. `layer` is one layer, all layers if
    /// not given. Other threads run meanwhile; none may change these pages.
    #[pyo3(signature = (staged, pages, *, layer = None, block = 0))]
    fn save(
        &self,
        py: Python<'_>,
        staged: Vec<PyRef<'_, StagedChunk>>,
        pages: Vec<u64>,
        layer: Option<usize>,
        block: usize,
    ) -> PyResult<()> {
        self.check_pages(&pages)?;
        let layers = find_layer(layer, self.layers.len())?;
        let pages_per_chunk = self.pages_per_chunk as usize;
        check_page_count(pages.len(), pages_per_chunk, staged.len())?;
        for chunk in &staged {
            // The rest of a larger block would have bytes of other chunks.
            self.check_block_bytes(chunk.block_bytes(block)?)?;
            chunk.check(block, 0, self.block_bytes)?;
        }
        let bytes = self.block_bytes() * staged.len() as u64;
        StagedChunk::fill(py, staged.iter().map(|chunk| &**chunk), bytes, |number, chunk| {
            let of_chunk = &pages[number * pages_per_chunk..][..pages_per_chunk];
            for (in_chunk, &page) in (0..).zip(of_chunk) {
                for PageRun { region, range, offset } in self.pieces(layers.clone(), page, in_chunk) {
                    self.regions[region].copy_to(range, chunk, block, offset);
                }
            }
        })
    }

    /// Copies `pages`, which are the pages of the staged chunks in order, into staged layers of a session with one slice
    /// (`StagedLayers.copy_from` writes any slice). Other threads run meanwhile; none may change these pages.
    #[pyo3(signature = (staged, pages))]
    fn save_layers(&self, py: Python<'_>, staged: &StagedLayers, pages: Vec<u64>) -> PyResult<()> {
        self.check_pages(&pages)?;
        staged.fill(py, |staged| {
            if staged.slices() != 1 {
                // The other slices would be handed over with the bytes that their room in the window had before.
                let text = format!("these layers have {} slices: copy_from writes one", staged.slices());
                return Err(PyValueError::new_err(text));
            }
            let layers = staged.layers();
            let (first, end) = (layers.start as usize, layers.end as usize);
            let chunk_bytes = (end - first) as u64 * self.pages_per_chunk * self.page_bytes;
            let expected = staged.positions().len() as u64 * self.pages_per_chunk;
            if end > self.layers.len() || staged.bytes() != chunk_bytes || pages.len() as u64 != expected {
                let text =
                    format!("{} pages of layers {first} to {end} do not fit the staged chunks", pages.len());
                return Err(PyValueError::new_err(text));
            }
            let skipped = first as u64 * self.pages_per_chunk * self.page_bytes;
            for (number, &page) in (0..).zip(&pages) {
                let (chunk, in_chunk) =
                    ((number / self.pages_per_chunk) as usize, number % self.pages_per_chunk);
                for PageRun { region, range, offset } in self.pieces(first..end, page, in_chunk) {
                    self.regions[region].copy_to_layers(range, staged, (chunk, 0), offset - skipped);
                }
            }
            Ok(())
        })
    }
}

/// # Errors
/// `ValueError` unless there are exactly the pages of `chunks` chunks.
pub(crate) fn check_page_count(pages: usize, pages_per_chunk: usize, chunks: usize) -> PyResult<()> {
    if Some(pages) == pages_per_chunk.checked_mul(chunks) {
        return Ok(());
    }
    let text = format!("a chunk has {pages_per_chunk} pages: {chunks} chunks do not have {pages}");
    Err(PyValueError::new_err(text))
}

/// The given layer, or all layers.
///
/// # Errors
/// `ValueError` if there is no such layer.
pub(crate) fn find_layer(layer: Option<usize>, layers: usize) -> PyResult<Range<usize>> {
    match layer {
        None => Ok(0..layers),
        Some(layer) if layer < layers => Ok(layer..layer + 1),
        Some(layer) => Err(PyValueError::new_err(format!("there is no layer {layer}, only {layers}"))),
    }
}
