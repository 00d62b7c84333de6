//! The device lane's values in the form of messages.

use std::os::fd::OwnedFd;

use larder_device::layout::{Dim, LayoutSpec, Plane};
use larder_device::{EngineMemory, PagedLayout};
use larder_protocol::lane::{
    self, CopyWords, IpcMemory, TensorDim, TensorLayout, TensorMemory, TensorPlane, Word,
};

use super::SavePages;
use crate::engine_lane::{CopyFlags, LoadPages};

/// Memory in the form of messages, with its descriptors. `None` if some of it cannot be shared with another process.
pub(super) fn shared(memory: Vec<EngineMemory>) -> Option<(Vec<TensorMemory>, Vec<OwnedFd>)> {
    let mut descriptors = Vec::new();
    let shared = memory.into_iter().map(|memory| match memory {
        EngineMemory::Ipc { handle, offset, bytes } => {
            Some(TensorMemory::Ipc(IpcMemory { handle, offset, bytes }))
        }
        EngineMemory::Descriptor { descriptor, bytes } => {
            descriptors.push(descriptor);
            Some(TensorMemory::Descriptor(bytes))
        }
        EngineMemory::Own { .. } => None,
    });
    let shared = shared.collect::<Option<_>>()?;
    Some((shared, descriptors))
}

pub(super) fn load(tensors: u32, lease: u64, load: &LoadPages, flags: CopyFlags) -> lane::LoadPages {
    lane::LoadPages {
        lease,
        tensors,
        pages: load.pages.clone(),
        first_page: load.first_page,
        from_layer: load.layers.start,
        to_layer: load.layers.end,
        by_layer: load.by_layer,
        words: words(flags),
    }
}

pub(super) fn save(tensors: u32, reservation: u64, save: &SavePages, flags: CopyFlags) -> lane::SavePages {
    lane::SavePages {
        reservation,
        chunks: save.positions.clone(),
        tensors,
        pages: save.pages.clone(),
        from_layer: save.layers.start,
        to_layer: save.layers.end,
        words: words(flags),
    }
}

fn words(CopyFlags { after, then }: CopyFlags) -> CopyWords {
    let word = |(word, value)| Word { word, value };
    CopyWords { after: after.map(word), then: then.map(word) }
}

/// A layout in the form of messages.
#[must_use]
pub fn layout_message(layout: &PagedLayout) -> TensorLayout {
    let LayoutSpec { planes, planes_per_layer, pages, pages_per_chunk, dims, run_bytes } = layout.spec();
    let plane = |&Plane { region, offset, page_stride }: &Plane| TensorPlane { region, offset, page_stride };
    TensorLayout {
        planes: planes.iter().map(plane).collect(),
        planes_per_layer: *planes_per_layer,
        pages: *pages,
        pages_per_chunk: *pages_per_chunk,
        dims: dims.iter().map(|&Dim { count, stride }| TensorDim { count, stride }).collect(),
        run_bytes: *run_bytes,
    }
}
