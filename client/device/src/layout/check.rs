//! Checks whether paged memory is as its engine described it.

use super::{ALIGNMENT, LayoutError, LayoutSpec, MAX_DIMS, MAX_PLANES, Plane};

/// Checks a description; returns the bytes of one page.
pub(super) fn check(spec: &LayoutSpec, region_bytes: &[u64]) -> Result<u64, LayoutError> {
    counts(spec)?;
    alignment(spec)?;
    let page_bytes =
        spec.dims.iter().try_fold(spec.run_bytes, |bytes, dim| bytes.checked_mul(dim.count.into()));
    let page_bytes =
        page_bytes.filter(|&bytes| bytes <= MAX_PAGE_BYTES).ok_or(LayoutError::TooMany("bytes"))?;
    for (number, plane) in spec.planes.iter().enumerate() {
        let axes = axes(spec, plane);
        let extent = extent(&axes, spec.run_bytes).ok_or(LayoutError::TooMany("bytes"))?;
        let needed = plane.offset.checked_add(extent).ok_or(LayoutError::TooMany("bytes"))?;
        let found = region_bytes.get(plane.region as usize).copied().unwrap_or(0);
        if needed > found {
            return Err(LayoutError::OutOfRegion { plane: number, region: plane.region, needed, found });
        }
        if !is_nested(&axes, spec.run_bytes) {
            return Err(LayoutError::PagesOverlap(number));
        }
    }
    Ok(page_bytes)
}

fn counts(spec: &LayoutSpec) -> Result<(), LayoutError> {
    let per_layer = spec.planes_per_layer;
    for (what, count) in [
        ("planes", spec.planes.len() as u64),
        ("planes in a layer", per_layer.into()),
        ("pages", spec.pages.into()),
        ("pages in a chunk", spec.pages_per_chunk.into()),
        ("bytes in a run", spec.run_bytes),
        ("runs in a page", spec.dims.iter().map(|dim| u64::from(dim.count)).min().unwrap_or(1)),
    ] {
        if count == 0 {
            return Err(LayoutError::Empty(what));
        }
    }
    if spec.dims.len() > MAX_DIMS {
        return Err(LayoutError::TooMany("dimensions"));
    }
    if spec.planes.len() > MAX_PLANES {
        return Err(LayoutError::TooMany("planes"));
    }
    if !spec.planes.len().is_multiple_of(per_layer as usize) {
        return Err(LayoutError::BrokenLayer { planes: spec.planes.len(), per_layer });
    }
    Ok(())
}

fn alignment(spec: &LayoutSpec) -> Result<(), LayoutError> {
    let aligned = |what, bytes: u64| {
        if bytes.is_multiple_of(ALIGNMENT) { Ok(()) } else { Err(LayoutError::Unaligned { what, bytes }) }
    };
    aligned("run", spec.run_bytes)?;
    spec.dims.iter().try_for_each(|dim| aligned("distance of runs", dim.stride))?;
    for plane in &spec.planes {
        aligned("offset of a plane", plane.offset)?;
        aligned("distance of pages", plane.page_stride)?;
    }
    Ok(())
}

/// The dimensions in which a plane repeats its run, from the smallest stride to the largest.
fn axes(spec: &LayoutSpec, plane: &Plane) -> Vec<(u64, u64)> {
    let mut axes: Vec<(u64, u64)> = spec.dims.iter().map(|dim| (dim.stride, dim.count.into())).collect();
    axes.push((plane.page_stride, spec.pages.into()));
    axes.retain(|&(_, count)| count > 1);
    axes.sort_unstable();
    axes
}

/// Bytes from the first byte to the end of the last run.
fn extent(axes: &[(u64, u64)], run_bytes: u64) -> Option<u64> {
    axes.iter()
        .try_fold(run_bytes, |bytes, &(stride, count)| bytes.checked_add(stride.checked_mul(count - 1)?))
}

/// Whether each dimension steps over all that the smaller ones span: then no two runs share a byte.
fn is_nested(axes: &[(u64, u64)], run_bytes: u64) -> bool {
    let mut inner = run_bytes;
    axes.iter().all(|&(stride, count)| {
        let steps_over = stride >= inner;
        inner += stride * (count - 1);
        steps_over
    })
}

/// Limit of a page, so that a kernel can count with 32 bits.
const MAX_PAGE_BYTES: u64 = 1 << 30;
