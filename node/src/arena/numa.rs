//! NUMA placement of memory: asks the kernel for a node, and reads the result back.
#![expect(unsafe_code, reason = "mbind and move_pages have no wrapper")]

use std::ffi::c_void;
use std::io;
use std::ptr;

use super::Binding;
use super::mapping::Mapping;

/// Binds a mapping's memory to `node`, if given. Pages that are not there yet then come only from this node, or first from this
/// node, as `binding` says. If the kernel refuses, they come from any node.
pub(crate) fn bind(mapping: &Mapping, node: Option<u32>, binding: Binding) {
    if let Some(node) = node
        && let Err(error) = try_bind(mapping, node, binding)
    {
        tracing::debug!(%error, node, "memory cannot be bound");
    }
}

fn try_bind(mapping: &Mapping, node: u32, binding: Binding) -> io::Result<()> {
    let mode = match binding {
        Binding::Strict => libc::MPOL_BIND,
        Binding::Preferred => libc::MPOL_PREFERRED,
    };
    let mut mask = [0_u64; NODE_MASK_WORDS];
    let word = mask.get_mut(node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node % 64);
    // SAFETY: the range is a live mapping. The kernel reads one bit less than it is told, so it reads exactly the mask.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            mapping.address(),
            mapping.bytes() as usize,
            mode,
            mask.as_ptr(),
            mask.len() * 64 + 1,
            0,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The NUMA nodes of `samples` evenly spread pages of a mapping; `None` for a page that is not there.
pub(super) fn nodes_of(mapping: &Mapping, samples: usize) -> io::Result<Vec<Option<u32>>> {
    let pages = mapping.bytes() as usize / PAGE_BYTES;
    let samples = samples.min(pages);
    let addresses: Vec<*mut c_void> =
        (0..samples).map(|i| mapping.address().wrapping_byte_add(i * pages / samples * PAGE_BYTES)).collect();
    let mut nodes = vec![i32::MIN; samples];
    // SAFETY: without nodes to move to, the call moves nothing and writes the place of each page (or an error) into
    // `nodes`, which has as many entries as there are addresses.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            samples,
            addresses.as_ptr(),
            ptr::null::<i32>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(nodes.into_iter().map(|node| u32::try_from(node).ok()).collect())
}

/// Words of a mask of NUMA nodes: the kernel knows at most 1,024 nodes.
const NODE_MASK_WORDS: usize = 16;

const PAGE_BYTES: usize = 4096;
