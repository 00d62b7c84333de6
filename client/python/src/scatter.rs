//! Copies between blocks and an engine's memory, whose pages are pieces at addresses that the engine gives.

use larder_client::{LeaseGuard, Namespace};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::damaged;
use crate::lease::Lease;
use crate::memory::{Memory, Target, copy_parts};
use crate::reservation::StagedChunk;

/// An engine's memory, in which a block is one or more pieces, each given by its address.
///
/// `regions` are writable, contiguous buffers. Every piece must lie within one of them: an address outside is refused, never
/// read or written.
#[pyclass(frozen, module = "larder_kv")]
pub(crate) struct ScatteredMemory {
    regions: Vec<Memory>,
}

/// One piece of a copy, within a region and within a block.
struct PageRun {
    region: usize,
    /// The piece's start in the region.
    start: u64,
    bytes: u64,
    /// Number of its block, counted from the first of the call.
    block: usize,
    /// The piece's start in that block.
    offset: u64,
}

impl ScatteredMemory {
    /// The pieces that make up `blocks` blocks of `block_bytes` bytes, one after the other.
    ///
    /// # Errors
    /// `ValueError` if a piece lies outside of the regions, or across the end of a block, or there are more or fewer bytes.
    fn pieces(
        &self,
        addresses: &[u64],
        sizes: &[u64],
        blocks: usize,
        block_bytes: u64,
    ) -> PyResult<Vec<PageRun>> {
        if addresses.len() != sizes.len() {
            let text = format!("there are {} addresses and {} sizes", addresses.len(), sizes.len());
            return Err(PyValueError::new_err(text));
        }
        let mut pieces = Vec::with_capacity(addresses.len());
        let (mut block, mut offset) = (0, 0);
        for (&address, &bytes) in addresses.iter().zip(sizes) {
            if bytes > block_bytes - offset || block == blocks {
                let text = format!("the pieces do not make up {blocks} blocks of {block_bytes} bytes");
                return Err(PyValueError::new_err(text));
            }
            let (region, start) = self.find(address, bytes)?;
            pieces.push(PageRun { region, start, bytes, block, offset });
            offset += bytes;
            if offset == block_bytes {
                (block, offset) = (block + 1, 0);
            }
        }
        if (block, offset) != (blocks, 0) {
            let text = format!("the pieces make up {block} blocks and {offset} bytes, not {blocks} blocks");
            return Err(PyValueError::new_err(text));
        }
        Ok(pieces)
    }

    /// The region of a piece, and the piece's offset there.
    fn find(&self, address: u64, bytes: u64) -> PyResult<(usize, u64)> {
        let places = self.regions.iter().enumerate();
        let mut places = places.filter_map(|(region, memory)| Some((region, memory.place(address, bytes)?)));
        places.next().ok_or_else(|| {
            PyValueError::new_err(format!("{bytes} bytes at {address:#x} lie in none of the regions"))
        })
    }
}

#[pymethods]
impl ScatteredMemory {
    #[new]
    fn new(regions: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let regions = regions.iter().map(Memory::writable).collect::<PyResult<Vec<_>>>()?;
        Ok(Self { regions })
    }

    /// Copies block `block` of the first `chunks` leased chunks (all if not given) to pieces: the pieces in order make up the
    /// blocks in order. Other threads run meanwhile; none may touch these pieces.
    ///
    /// Raises `DamagedError` if a verified chunk is wrong: the chunks before its `position` are loaded.
    #[pyo3(signature = (lease, addresses, sizes, *, chunks = None, block = 0))]
    fn load(
        &self,
        py: Python<'_>,
        lease: &Lease,
        addresses: Vec<u64>,
        sizes: Vec<u64>,
        chunks: Option<usize>,
        block: usize,
    ) -> PyResult<()> {
        let guard = lease.guard()?;
        let chunks = chunks.unwrap_or(guard.chunks());
        check_leased(&guard, chunks, block)?;
        let pieces = self.pieces(&addresses, &sizes, chunks, guard.namespace().block_bytes(block))?;
        let targets = pieces.iter().map(|piece| Target {
            memory: &self.regions[piece.region],
            range: piece.start..piece.start + piece.bytes,
            position: piece.block,
            block,
            offset: piece.offset,
        });
        let copied = py.detach(|| copy_parts(&guard, sizes.iter().sum(), targets));
        copied.map_err(|error| damaged(&error))
    }

    /// Copies pieces to block `block` of staged chunks: the pieces in order make up the blocks in order. Other threads run
    /// meanwhile; none may change these pieces.
    #[pyo3(signature = (staged, addresses, sizes, *, block = 0))]
    fn save(
        &self,
        py: Python<'_>,
        staged: Vec<PyRef<'_, StagedChunk>>,
        addresses: Vec<u64>,
        sizes: Vec<u64>,
        block: usize,
    ) -> PyResult<()> {
        let Some(first) = staged.first() else { return Ok(()) };
        let block_bytes = first.block_bytes(block)?;
        for chunk in &staged {
            chunk.check(block, 0, block_bytes)?;
            if chunk.block_bytes(block)? != block_bytes {
                return Err(PyValueError::new_err("the staged chunks have blocks of several sizes"));
            }
        }
        let pieces = self.pieces(&addresses, &sizes, staged.len(), block_bytes)?;
        let bytes = block_bytes * staged.len() as u64;
        StagedChunk::fill(py, staged.iter().map(|chunk| &**chunk), bytes, |number, chunk| {
            let first = pieces.partition_point(|piece| piece.block < number);
            for PageRun { region, start, bytes, offset, .. } in
                pieces[first..].iter().take_while(|piece| piece.block == number)
            {
                self.regions[*region].copy_to(*start..start + bytes, chunk, block, *offset);
            }
        })
    }

    fn __repr__(&self) -> String {
        let bytes: u64 = self.regions.iter().map(Memory::len).sum();
        format!("<larder_kv.ScatteredMemory of {} regions, {bytes} bytes>", self.regions.len())
    }
}

/// # Errors
/// `ValueError` if block `block` of each of the first `chunks` chunks may not be read.
fn check_leased(guard: &LeaseGuard, chunks: usize, block: usize) -> PyResult<()> {
    let namespace: &Namespace = guard.namespace();
    crate::namespace::check_block(namespace, block)?;
    if chunks > guard.chunks() {
        let text = format!("{chunks} chunks are not leased: {} are", guard.chunks());
        return Err(PyValueError::new_err(text));
    }
    if (0..chunks).any(|position| !guard.has_block(position, block)) {
        return Err(PyValueError::new_err(format!("block {block} is not leased of every chunk")));
    }
    Ok(())
}
