//! The places of an engine's paged KV memory, by strides, and the order of its bytes in a block.
//!
//! A *plane* is one layer's memory of one kind: keys and values together as vLLM keeps them, or keys alone as SGLang does. All
//! pages of all planes have the same shape: [`Dim`]s around a contiguous *run*. The block of a chunk has its planes one after the
//! other; each plane has the chunk's pages in order; each page has its runs in the order of the dims, outermost first. Copies
//! that the CPU makes have the same order.

mod check;
mod engines;

use std::ops::Range;

pub use engines::{Shape, VllmOrder, sglang_latent, sglang_split, vllm};

/// An engine's description of its memory; a [`PagedLayout`] once it was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutSpec {
    /// The planes, layer by layer.
    pub planes: Vec<Plane>,
    /// Planes that belong to one layer.
    pub planes_per_layer: u32,
    /// Pages of each plane.
    pub pages: u32,
    /// Pages whose bytes make one block, in each plane.
    pub pages_per_chunk: u32,
    /// The number of runs in a page and their distances, dimension by dimension; outermost first, at most [`MAX_DIMS`].
    pub dims: Vec<Dim>,
    /// Bytes of one run, which is contiguous.
    pub run_bytes: u64,
}

/// The place of one plane's pages. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// Number of the allocation in which it lies.
    pub region: u32,
    /// Offset of page 0 in the region.
    pub offset: u64,
    /// From one page to the next.
    pub page_stride: u64,
}

/// A dimension of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dim {
    /// Number of steps.
    pub count: u32,
    /// Bytes from one step to the next.
    pub stride: u64,
}

/// Paged memory whose every byte is known to lie within its region, aligned, and at most once in its plane.
///
/// Planes may share bytes: an engine may lay the layers of several groups over each other, and give each block to one group. A load
/// of several such planes writes the shared bytes more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagedLayout {
    spec: LayoutSpec,
    page_bytes: u64,
    block_bytes: u64,
}

/// One contiguous piece of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRun {
    /// Number of the allocation.
    pub region: u32,
    /// Its bytes there.
    pub range: Range<u64>,
    /// Its place in the page's bytes in a block.
    pub in_page: u64,
}

/// The reason why paged memory is refused. Nothing of it was used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Something required is missing.
    #[error("there are no {0}")]
    Empty(&'static str),
    /// More than the description can hold, or than can be addressed.
    #[error("there are too many {0}")]
    TooMany(&'static str),
    /// Not every layer has all its planes.
    #[error("{planes} planes are no whole number of layers of {per_layer} planes")]
    BrokenLayer {
        /// Planes there are.
        planes: usize,
        /// Planes of a layer.
        per_layer: u32,
    },
    /// A GPU thread moves 16 bytes at a time.
    #[error("the {what} of {bytes} bytes is no multiple of {ALIGNMENT} bytes")]
    Unaligned {
        /// The unaligned value.
        what: &'static str,
        /// Its bytes.
        bytes: u64,
    },
    /// A plane reaches beyond its region, or its region does not exist.
    #[error("plane {plane} needs {needed} bytes of region {region}, which has {found}")]
    OutOfRegion {
        /// Number of the plane.
        plane: usize,
        /// The region it names.
        region: u32,
        /// The bytes it needs there.
        needed: u64,
        /// The bytes there are.
        found: u64,
    },
    /// Pages or runs of a plane overlap.
    #[error("the pages of plane {0} overlap")]
    PagesOverlap(usize),
    /// An order of dimensions that nobody knows.
    #[error("unknown KV cache layout {0:?}")]
    UnknownOrder(String),
}

impl PagedLayout {
    /// Checks an engine's description against the sizes of its regions.
    ///
    /// # Errors
    /// [`LayoutError`] if anything is missing, unaligned or beyond its region, or pages or runs of a plane overlap.
    pub fn new(spec: LayoutSpec, region_bytes: &[u64]) -> Result<Self, LayoutError> {
        let page_bytes = check::check(&spec, region_bytes)?;
        let pages = u64::from(spec.pages_per_chunk) * spec.planes.len() as u64;
        let block_bytes = page_bytes.checked_mul(pages).ok_or(LayoutError::TooMany("bytes"))?;
        Ok(Self { spec, page_bytes, block_bytes })
    }

    /// The checked description.
    #[must_use]
    pub fn spec(&self) -> &LayoutSpec {
        &self.spec
    }

    /// Layers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.spec.planes.len() as u32 / self.spec.planes_per_layer
    }

    /// The planes of some layers.
    #[must_use]
    pub fn planes_of(&self, layers: &Range<u32>) -> Range<u32> {
        layers.start * self.spec.planes_per_layer..layers.end * self.spec.planes_per_layer
    }

    /// A layout of some of its layers.
    ///
    /// # Panics
    /// Panics if there are no such layers.
    #[must_use]
    pub fn part(&self, layers: &Range<u32>) -> Self {
        let planes = self.planes_of(layers);
        let planes = self.spec.planes[planes.start as usize..planes.end as usize].to_vec();
        assert!(!planes.is_empty(), "there are no layers {layers:?}");
        let block_bytes = self.plane_bytes() * planes.len() as u64;
        Self { spec: LayoutSpec { planes, ..self.spec.clone() }, page_bytes: self.page_bytes, block_bytes }
    }

    /// Bytes of one page in one plane.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes that a block has of one plane.
    #[must_use]
    pub fn plane_bytes(&self) -> u64 {
        self.page_bytes * u64::from(self.spec.pages_per_chunk)
    }

    /// Bytes that a block has of one layer.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        self.plane_bytes() * u64::from(self.spec.planes_per_layer)
    }

    /// Bytes of one chunk in all planes.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The place in a block of one plane's bytes of page number `in_chunk`.
    #[must_use]
    pub fn in_block(&self, plane: u32, in_chunk: u32) -> u64 {
        u64::from(plane) * self.plane_bytes() + u64::from(in_chunk) * self.page_bytes
    }

    /// The contiguous pieces of a page, in the order of a block.
    ///
    /// # Panics
    /// Panics if there is no such plane.
    pub fn runs(&self, plane: u32, page: u32) -> impl Iterator<Item = PageRun> {
        let Plane { region, offset, page_stride } = self.spec.planes[plane as usize];
        let start = offset + u64::from(page) * page_stride;
        let run_bytes = self.spec.run_bytes;
        (0..self.page_bytes / run_bytes).map(move |run| {
            let (mut left, mut at) = (run, start);
            for dim in self.spec.dims.iter().rev() {
                at += left % u64::from(dim.count) * dim.stride;
                left /= u64::from(dim.count);
            }
            PageRun { region, range: at..at + run_bytes, in_page: run * run_bytes }
        })
    }
}

/// Bytes that a thread of a kernel moves at a time.
pub const ALIGNMENT: u64 = 16;

/// Dimensions of a page beside its runs: heads, tokens.
pub const MAX_DIMS: usize = 2;

/// Limit of planes of one layout: far more than engines have layers.
pub const MAX_PLANES: usize = 1_024;

#[cfg(test)]
mod tests;
