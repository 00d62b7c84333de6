//! The arguments of kernels, byte for byte as `kernels/pages.cu` declares them.

use crate::layout::PagedLayout;

/// The place of a page in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// The page's place in the block's plane 0.
    pub(super) block: u64,
    pub(super) page: u32,
}

/// A kernel's copies; its only parameter.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) entries: u64,
    pub(super) planes: u64,
    plane_bytes: u64,
    outer_stride: u64,
    inner_stride: u64,
    pub(super) entry_count: u32,
    pub(super) first_plane: u32,
    pub(super) plane_count: u32,
    page_units: u32,
    run_units: u32,
    inner_count: u32,
}

impl Copy {
    /// The common part of a layout's copies.
    pub(super) fn of(layout: &PagedLayout, planes: u64) -> Self {
        let spec = layout.spec();
        let (outer_stride, inner_stride, inner_count) = match spec.dims[..] {
            [] => (0, 0, 1),
            [only] => (0, only.stride, only.count),
            [outer, inner, ..] => (outer.stride, inner.stride, inner.count),
        };
        Self {
            entries: 0,
            planes,
            plane_bytes: layout.plane_bytes(),
            outer_stride,
            inner_stride,
            entry_count: 0,
            first_plane: 0,
            plane_count: 0,
            page_units: (layout.page_bytes() / UNIT_BYTES) as u32,
            run_units: (spec.run_bytes / UNIT_BYTES) as u32,
            inner_count,
        }
    }

    /// Pieces that a thread block copies one at a time.
    pub(super) fn tiles(&self) -> u64 {
        let of_page = u64::from(self.page_units.div_ceil(TILE_UNITS));
        of_page * u64::from(self.entry_count) * u64::from(self.plane_count)
    }
}

/// Entries as the kernel reads them.
pub(super) fn entry_bytes(entries: &[Entry]) -> Vec<u8> {
    let bytes = |entry: &Entry| {
        let mut bytes = [0; ENTRY_BYTES as usize];
        bytes[..8].copy_from_slice(&entry.block.to_le_bytes());
        bytes[8..12].copy_from_slice(&entry.page.to_le_bytes());
        bytes
    };
    entries.iter().flat_map(bytes).collect()
}

/// The planes of a layout as the kernel reads them; `regions` are the addresses of the layout's regions.
pub(super) fn plane_bytes(layout: &PagedLayout, regions: &[u64]) -> Vec<u8> {
    let planes = layout.spec().planes.iter();
    let words = planes.flat_map(|plane| [regions[plane.region as usize] + plane.offset, plane.page_stride]);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Bytes of an [`Entry`] in a table.
pub(super) const ENTRY_BYTES: u64 = 16;

/// `THREADS` of the kernels.
pub(super) const THREADS: u32 = 256;

const UNIT_BYTES: u64 = 16;
const TILE_UNITS: u32 = THREADS * 4;
