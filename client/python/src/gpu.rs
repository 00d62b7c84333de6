//! Copies between an engine's memory on a GPU and blocks, made by this process on the GPU itself.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use larder_client::EngineLane;
use larder_client::engine_lane::{CopyFlags, CopyHandle, EngineTensors, LaneError, LoadPages, SavePages};
use larder_device::cuda::{CudaDevice, CudaOptions};
use larder_device::layout::{Dim, LayoutSpec, Plane};
use larder_device::{CopyError, Device, EngineMemory, PagedLayout};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{GpuError, damaged, lane_exception};
use crate::handoff::StagedLayers;
use crate::lease::Lease;
use crate::pages::{Layer, check_page_count, find_layer};
use crate::process::Own;
use crate::reservation::StagedChunk;

/// A GPU of this process, in PyTorch's context there. Only one thread of its own calls the GPU, and copies on streams of its own.
///
/// `ordinal` is the GPU's number in this process's CUDA order. At most `copies` copies are under way at a time.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct Gpu {
    lane: Own<Arc<EngineLane>>,
    name: String,
    saves_at_once: usize,
}

/// An engine's KV memory on a GPU: pages of a fixed number of tokens, each layer's addressed by strides.
///
/// `regions` are allocations, each given by its address on the GPU and its bytes; they must live as long as this object. `layers`
/// has, as for `PagedMemory`, the places of each layer's pages in the regions. Sizes and strides are multiples of 16 bytes.
/// Copies begin at once: the engine's streams must have finished their work on these pages. When a copy returns, any stream may
/// read the copied bytes.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct GpuPagedMemory {
    lane: Own<Arc<EngineLane>>,
    /// The most saves of one call that are under way at a time.
    saves_at_once: usize,
    layout: PagedLayout,
    tensors: EngineTensors,
    /// Tensors of some layers only: layers that are handed over are copied from these.
    parts: Mutex<HashMap<Range<u32>, EngineTensors>>,
}

#[pymethods]
impl Gpu {
    #[new]
    #[pyo3(signature = (ordinal = 0, *, copies = 256))]
    fn new(py: Python<'_>, ordinal: u32, copies: usize) -> PyResult<Self> {
        let open = move || {
            let options = CudaOptions { ordinal, ..CudaOptions::default() };
            CudaDevice::open(options).map(|device| Box::new(device) as Box<dyn Device>)
        };
        let (lane, name) = py
            .detach(|| {
                let lane = EngineLane::start(copies, open)?;
                let name = lane.device_name()?;
                Ok((Arc::new(lane), name))
            })
            .map_err(lane_exception)?;
        // Other threads copy too.
        let saves_at_once = (copies / 8).clamp(1, SAVES_AT_ONCE);
        Ok(Self { lane: Own::new(lane), name, saves_at_once })
    }

    /// The driver's name of the GPU.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// How copies of each shape are made, and how fast each way was; for people.
    fn choices(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let lane = self.lane.get()?;
        py.detach(|| lane.choices()).map_err(lane_exception)
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.Gpu {}>", self.name)
    }
}

#[pymethods]
impl GpuPagedMemory {
    #[new]
    #[pyo3(signature = (gpu, regions, layers, *, pages_per_chunk))]
    fn new(
        py: Python<'_>,
        gpu: &Gpu,
        regions: Vec<(u64, u64)>,
        layers: Vec<Bound<'_, PyAny>>,
        pages_per_chunk: u32,
    ) -> PyResult<Self> {
        let region_bytes: Vec<u64> = regions.iter().map(|&(_, bytes)| bytes).collect();
        let layout = read_layout(&layers, pages_per_chunk, &region_bytes)?;
        let memory =
            regions.into_iter().map(|(address, bytes)| EngineMemory::Own { address, bytes }).collect();
        let (lane, of_tensors) = (Arc::clone(gpu.lane.get()?), layout.clone());
        let tensors = py.detach(|| lane.register(of_tensors, memory)).map_err(lane_exception)?;
        let saves_at_once = gpu.saves_at_once;
        Ok(Self { lane: Own::new(lane), saves_at_once, layout, tensors, parts: Mutex::default() })
    }

    /// Layers.
    #[getter]
    fn layers(&self) -> u32 {
        self.layout.layers()
    }

    /// Bytes of one page in one layer.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.layout.page_bytes()
    }

    /// Bytes of one chunk over all layers: a block of the namespace must have this size.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.layout.block_bytes()
    }

    /// As `PagedMemory.load`; returns when the pages are on the GPU.
    #[pyo3(signature = (lease, pages, *, first_page = 0, layer = None, block = 0))]
    fn load(
        &self,
        py: Python<'_>,
        lease: &Lease,
        pages: Vec<u32>,
        first_page: u64,
        layer: Option<usize>,
        block: usize,
    ) -> PyResult<()> {
        let guard = lease.guard()?;
        crate::namespace::check_block(guard.namespace(), block)?;
        let layers = self.layer_range(layer)?;
        self.check_pages(&pages)?;
        if pages.is_empty() {
            return Ok(());
        }
        let mut load = LoadPages { block, pages, first_page, layers, by_layer: false };
        let lane = self.lane.get()?;
        let begun = py.detach(|| lane.load(&self.tensors, &guard, &load, CopyFlags::default()));
        let (copy, wrong) = match begun {
            Err(LaneError::Damaged(wrong)) => {
                let before = wrong.position as u64 * u64::from(self.layout.spec().pages_per_chunk);
                load.pages.truncate(before.saturating_sub(first_page) as usize);
                if load.pages.is_empty() {
                    return Err(damaged(&wrong));
                }
                (lane.load(&self.tensors, &guard, &load, CopyFlags::default()), Some(wrong))
            }
            copy => (copy, None),
        };
        let copy = copy.map_err(lane_exception)?;
        ended(py, &copy, || copy.wait(SIGNALS_EVERY))?;
        wrong.map_or(Ok(()), |wrong| Err(damaged(&wrong)))
    }

    /// As `PagedMemory.save`; returns when the blocks have the bytes. After a failure the staged chunks that failed are dropped.
    #[pyo3(signature = (staged, pages, *, layer = None, block = 0))]
    fn save(
        &self,
        py: Python<'_>,
        staged: Vec<PyRef<'_, StagedChunk>>,
        pages: Vec<u32>,
        layer: Option<usize>,
        block: usize,
    ) -> PyResult<()> {
        let layers = self.layer_range(layer)?;
        for chunk in &staged {
            chunk.check(block, 0, self.layout.block_bytes())?;
        }
        self.check_pages(&pages)?;
        self.check_chunks(pages.len(), staged.len())?;
        let pages = pages.chunks(self.layout.spec().pages_per_chunk as usize);
        let (mut under_way, mut result) = (VecDeque::new(), Ok(()));
        for (chunk, pages) in staged.iter().zip(pages) {
            if under_way.len() == self.saves_at_once {
                result = under_way.pop_front().map_or(Ok(()), |begun| saved(py, begun));
            }
            let save = SavePages { block, pages: pages.to_vec(), layers: layers.clone() };
            let begun = result.and_then(|()| self.begin_save(chunk, &save));
            result = begun.map(|copy| under_way.push_back((&**chunk, copy)));
            if result.is_err() {
                break;
            }
        }
        // All that began are waited for, also after a failure: their chunks stay usable.
        under_way.into_iter().fold(result, |result, begun| result.and(saved(py, begun)))
    }

    /// As `PagedMemory.save_layers`; returns when the layers have the bytes. After a failure the staged layers are dropped.
    #[pyo3(signature = (staged, pages))]
    fn save_layers(&self, py: Python<'_>, staged: &StagedLayers, pages: Vec<u32>) -> PyResult<()> {
        let lane = self.lane.get()?;
        self.check_pages(&pages)?;
        staged.lend(|staged| {
            let part = py.detach(|| self.part(lane, staged.layers())).map_err(lane_exception)?;
            let copy =
                lane.save_layers(&part, staged, &pages, CopyFlags::default()).map_err(lane_exception)?;
            ended(py, &copy, || copy.wait(SIGNALS_EVERY))
        })
    }

    fn __repr__(&self) -> String {
        format!("<larder_kv.GpuPagedMemory of {} layers>", self.layout.layers())
    }
}

impl GpuPagedMemory {
    fn begin_save(
        &self,
        chunk: &StagedChunk,
        save: &SavePages,
    ) -> PyResult<CopyHandle<larder_client::StagedChunk>> {
        let lane = self.lane.get()?;
        lane.save(&self.tensors, chunk.take_out()?, save, CopyFlags::default()).map_err(lane_exception)
    }

    fn layer_range(&self, layer: Option<usize>) -> PyResult<Range<u32>> {
        let range = find_layer(layer, self.layout.layers() as usize)?;
        Ok(range.start as u32..range.end as u32)
    }

    fn check_pages(&self, pages: &[u32]) -> PyResult<()> {
        let own = self.layout.spec().pages;
        match pages.iter().find(|&&page| page >= own) {
            Some(page) => Err(PyValueError::new_err(format!("there is no page {page}, only {own}"))),
            None => Ok(()),
        }
    }

    /// Checks that there are exactly the pages of this many chunks.
    fn check_chunks(&self, pages: usize, chunks: usize) -> PyResult<()> {
        check_page_count(pages, self.layout.spec().pages_per_chunk as usize, chunks)
    }

    fn part(&self, lane: &EngineLane, layers: Range<u32>) -> Result<EngineTensors, LaneError> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = parts.get(&layers) {
            return Ok(part.clone());
        }
        let part = lane.part(&self.tensors, &layers)?;
        parts.insert(layers, part.clone());
        Ok(part)
    }
}

/// The layout that `larder_kv.LayerPages` describe, in regions of these sizes.
///
/// # Errors
/// `ValueError` if no GPU can copy between these pages and blocks.
pub(crate) fn read_layout(
    layers: &[Bound<'_, PyAny>],
    pages_per_chunk: u32,
    region_bytes: &[u64],
) -> PyResult<PagedLayout> {
    let layers = layers.iter().map(|layer| layer.extract::<Layer>()).collect::<PyResult<Vec<_>>>()?;
    PagedLayout::new(layout_spec(&layers, pages_per_chunk)?, region_bytes)
        .map_err(|error| PyValueError::new_err(error.to_string()))
}

/// The layers as planes of one shape.
fn layout_spec(layers: &[Layer], pages_per_chunk: u32) -> PyResult<LayoutSpec> {
    let first = layers.first().ok_or_else(|| PyValueError::new_err("there is no layer"))?;
    if let Some(number) = layers.iter().position(|layer| !layer.has_shape_of(first)) {
        let text = format!("pages of layer {number} have another shape than those of layer 0");
        return Err(PyValueError::new_err(text));
    }
    let number = |what: &str, number: u64| {
        u32::try_from(number).map_err(|_| PyValueError::new_err(format!("there are too many {what}")))
    };
    let planes = layers.iter().map(|layer| {
        let region = number("regions", layer.region as u64)?;
        Ok(Plane { region, offset: layer.offset, page_stride: layer.page_stride })
    });
    let dims = first.dims.iter().map(|&(count, stride)| Ok(Dim { count: number("runs", count)?, stride }));
    Ok(LayoutSpec {
        planes: planes.collect::<PyResult<_>>()?,
        planes_per_layer: 1,
        pages: number("pages", first.pages)?,
        pages_per_chunk,
        dims: dims.collect::<PyResult<_>>()?,
        run_bytes: first.run_bytes,
    })
}

/// Waits for the end of a copy without the interpreter's lock. A stalled GPU keeps this thread waiting, as it does the engine.
///
/// # Errors
/// `GpuError`; the error of a signal's handler, after which the copy goes on.
fn ended<T: Send, H>(
    py: Python<'_>,
    copy: &CopyHandle<H>,
    mut wait: impl FnMut() -> Option<Result<T, CopyError>> + Send,
) -> PyResult<T> {
    loop {
        match py.detach(&mut wait) {
            Some(Ok(given)) => return Ok(given),
            Some(Err(error)) => {
                let reason = copy.reason().map_or_else(String::new, |reason| format!(": {reason}"));
                return Err(GpuError::new_err(format!("{error}{reason}")));
            }
            None => py.check_signals()?,
        }
    }
}

/// Waits for the end of a save, and puts its chunk back.
fn saved(
    py: Python<'_>,
    (chunk, copy): (&StagedChunk, CopyHandle<larder_client::StagedChunk>),
) -> PyResult<()> {
    chunk.put_back(ended(py, &copy, || copy.wait(SIGNALS_EVERY))?)
}

/// Saves of one call that are under way at a time, if the GPU takes many copies: the bus never waits for the next one.
const SAVES_AT_ONCE: usize = 16;

/// How often a thread that waits for a copy looks for signals.
const SIGNALS_EVERY: Duration = Duration::from_millis(200);
