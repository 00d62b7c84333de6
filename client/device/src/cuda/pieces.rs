//! Divides an order: into one launch, a launch per layer, or pieces that pass through a staging buffer. Pure.

use std::ops::Range;

use super::forms::Form;
use crate::layout::PagedLayout;
use crate::order::{PageCopy, RegionOffset};

/// One launch of a kernel, with its copies if it is staged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Launch {
    /// Its pages, among those of the [`Division`].
    pub(super) pages: Range<usize>,
    /// Its planes.
    pub(super) planes: Range<u32>,
    /// The copies between its half of the staging buffer and blocks.
    pub(super) spans: Vec<StagedCopy>,
    /// Layers that are done when the launch is done; `None` if layers are not reported.
    pub(super) layers_done: Option<u32>,
}

/// A contiguous copy between a staging buffer and one or more adjacent blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StagedCopy {
    pub(super) place: RegionOffset,
    pub(super) staged: u64,
    pub(super) bytes: u64,
}

/// A page of a piece, and the place of its plane 0: in its block, or in its half of the staging buffer. If the piece lacks
/// plane 0, the place may be before the half: only sums with a plane's place are addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlacedPage {
    pub(super) page: u32,
    pub(super) at: At,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    Block(RegionOffset),
    Staged(u64),
}

/// An order, divided.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Division {
    pub(super) pages: Vec<PlacedPage>,
    pub(super) pieces: Vec<Launch>,
}

/// Whether all pages of every chunk are there: only then are blocks whole in a staging buffer.
pub(super) fn has_whole_chunks(layout: &PagedLayout, pages: &[PageCopy]) -> bool {
    let per_chunk = layout.spec().pages_per_chunk as usize;
    let whole = |chunk: &[PageCopy]| {
        chunk.len() == per_chunk
            && chunk.iter().all(|copy| copy.block == chunk[0].block)
            && chunk.iter().zip(0..).all(|(copy, number)| copy.in_chunk == number)
    };
    pages.chunks(per_chunk).all(whole)
}

/// Divides an order. `half_bytes` is the size of half the staging buffer.
///
/// # Panics
/// Panics if a staged order has a chunk that is not whole.
pub(super) fn divide(
    layout: &PagedLayout,
    pages: &[PageCopy],
    layers: Range<u32>,
    by_layer: bool,
    form: Form,
    half_bytes: u64,
) -> Division {
    let groups: Vec<Range<u32>> =
        if by_layer { layers.clone().map(|layer| layer..layer + 1).collect() } else { vec![layers.clone()] };
    let mut division = Division::default();
    for group in groups {
        let planes = layout.planes_of(&group);
        match form {
            Form::Direct | Form::Batched => division.add_direct(layout, pages, planes),
            Form::Staged => division.add_staged(layout, pages, planes, half_bytes),
        }
        if by_layer && let Some(last) = division.pieces.last_mut() {
            last.layers_done = Some(group.end - layers.start);
        }
    }
    division
}

impl Division {
    fn add_direct(&mut self, layout: &PagedLayout, pages: &[PageCopy], planes: Range<u32>) {
        // Every launch has the same pages: one table serves all.
        if self.pages.is_empty() {
            self.pages = pages.iter().map(|copy| place_in_block(layout, copy)).collect();
        }
        let piece = Launch { pages: 0..pages.len(), planes, spans: Vec::new(), layers_done: None };
        self.pieces.push(piece);
    }

    fn add_staged(&mut self, layout: &PagedLayout, pages: &[PageCopy], planes: Range<u32>, half_bytes: u64) {
        assert!(has_whole_chunks(layout, pages), "only whole chunks are staged");
        let per_chunk = layout.spec().pages_per_chunk as usize;
        // As many planes as fit, but at least one; then as many chunks of these planes as fit.
        let most = (half_bytes / layout.plane_bytes()).clamp(1, (planes.end - planes.start).into()) as u32;
        for first in planes.clone().step_by(most as usize) {
            let part = first..(first + most).min(planes.end);
            let bytes = u64::from(part.end - part.start) * layout.plane_bytes();
            let chunks = (half_bytes / bytes).max(1) as usize;
            for group in pages.chunks(chunks * per_chunk) {
                let piece = self.stage(layout, group, part.clone(), bytes);
                self.pieces.push(piece);
            }
        }
    }

    /// Places whole chunks one behind the other in a half of the staging buffer, `bytes` of each.
    fn stage(&mut self, layout: &PagedLayout, group: &[PageCopy], planes: Range<u32>, bytes: u64) -> Launch {
        let start = self.pages.len();
        let mut spans: Vec<StagedCopy> = Vec::new();
        let in_block = layout.in_block(planes.start, 0);
        for (chunk, number) in group.chunks(layout.spec().pages_per_chunk as usize).zip(0u64..) {
            let staged = number * bytes;
            for copy in chunk {
                let at = staged.wrapping_add(layout.in_block(0, copy.in_chunk)).wrapping_sub(in_block);
                self.pages.push(PlacedPage { page: copy.page, at: At::Staged(at) });
            }
            let block = chunk[0].block;
            let place = RegionOffset { offset: block.offset + in_block, ..block };
            match spans.last_mut() {
                Some(last)
                    if last.place.region == place.region
                        && last.place.offset + last.bytes == place.offset =>
                {
                    last.bytes += bytes;
                }
                _ => spans.push(StagedCopy { place, staged, bytes }),
            }
        }
        Launch { pages: start..self.pages.len(), planes, spans, layers_done: None }
    }
}

fn place_in_block(layout: &PagedLayout, copy: &PageCopy) -> PlacedPage {
    let offset = copy.block.offset + layout.in_block(0, copy.in_chunk);
    PlacedPage { page: copy.page, at: At::Block(RegionOffset { offset, ..copy.block }) }
}

#[cfg(test)]
mod tests;
