//! The requests of the device lane together with what their answers mean.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use larder_device::layout::{Dim, LayoutSpec, Plane};
use larder_device::{EngineMemory, PagedLayout};
use larder_protocol::lane::{
    self, AskCopy, CopyProgress, CopyWords, IpcMemory, RegisterTensors, TensorDim, TensorLayout,
    TensorMemory, TensorPlane, Word,
};
use larder_protocol::session::{Request, Response};

use super::{Known, NodeCopy, NodeTensors, SavePages};
use crate::engine_lane::{CopyFlags, LoadPages};
use crate::error::SessionError;
use crate::exchange::{Accept, Exchange};
use crate::lease::LeaseGuard;
use crate::namespace::Namespace;
use crate::reservation::Reservation;
use larder_ipc::Mapping;

pub(crate) fn register(
    namespace: &Namespace,
    block: usize,
    layout: &PagedLayout,
    memory: Vec<EngineMemory>,
) -> Result<Exchange<NodeTensors>, SessionError> {
    let blocks = namespace.blocks_per_chunk();
    assert!(block < blocks, "a chunk has {blocks} blocks, not {block}");
    let mut descriptors = Vec::new();
    let mut shared = Vec::with_capacity(memory.len());
    for memory in memory {
        shared.push(match memory {
            EngineMemory::Ipc { handle, offset, bytes } => {
                TensorMemory::Ipc(IpcMemory { handle, offset, bytes })
            }
            EngineMemory::Descriptor { descriptor, bytes } => {
                descriptors.push(descriptor);
                TensorMemory::Descriptor(bytes)
            }
            EngineMemory::Own { .. } => return Err(SessionError::NotShared),
        });
    }
    let request = Request::RegisterTensors(RegisterTensors {
        namespace: namespace.number(),
        block: block as u16,
        layout: layout_message(layout),
        memory: shared,
    });
    let (namespace, layout) = (namespace.clone(), layout.clone());
    let accept: Accept<_> = Box::new(move |link, response, descriptors| {
        let (Response::TensorsRegistered(known), [words]) = (response, descriptors.as_slice()) else {
            return Err(SessionError::wrong_answer("tensors come to be known, with a page of words"));
        };
        let mut mapped = crate::lock(&link.words);
        let words = match &*mapped {
            Some(words) => words,
            None => mapped.insert(Arc::new(Mapping::writable(words.as_fd(), known.word_bytes)?)),
        };
        let words = words.host_memory();
        Ok(NodeTensors(Arc::new(Known { number: known.tensors, namespace, block, layout, words })))
    });
    Ok(Exchange { request, accept, descriptors })
}

pub(crate) fn load(
    tensors: &NodeTensors,
    lease: &LeaseGuard,
    load: &LoadPages,
    flags: CopyFlags,
) -> Result<Exchange<NodeCopy>, SessionError> {
    assert_eq!(tensors.0.block, load.block, "tensors hold the block that is loaded into them");
    tensors.verify(lease, load)?;
    Ok(copying(Request::LoadPages(lane::LoadPages {
        lease: lease.number(),
        tensors: tensors.0.number,
        pages: load.pages.clone(),
        first_page: load.first_page,
        from_layer: load.layers.start,
        to_layer: load.layers.end,
        by_layer: load.by_layer,
        words: words(flags),
    })))
}

pub(crate) fn save(
    tensors: &NodeTensors,
    reservation: &Reservation,
    save: &SavePages,
    flags: CopyFlags,
) -> Exchange<NodeCopy> {
    copying(Request::SavePages(lane::SavePages {
        reservation: reservation.number(),
        chunks: save.positions.clone(),
        tensors: tensors.0.number,
        pages: save.pages.clone(),
        from_layer: save.layers.start,
        to_layer: save.layers.end,
        words: words(flags),
    }))
}

/// Asks how far a copy is.
pub(crate) fn ask(copy: &NodeCopy, layers: u32, wait_ms: u64) -> Exchange<CopyProgress> {
    let request = Request::AskCopy(AskCopy { copy: copy.number(), layers, wait_ms });
    let accept: Accept<_> = Box::new(|_, response, _| match response {
        Response::CopyProgress(progress) => Ok(progress),
        _ => Err(SessionError::wrong_answer("a copy has progress")),
    });
    Exchange::new(request, accept)
}

fn copying(request: Request) -> Exchange<NodeCopy> {
    let accept: Accept<_> = Box::new(|link, response, _| match response {
        Response::Copying(number) => Ok(NodeCopy::new(link, number)),
        _ => Err(SessionError::wrong_answer("a copy begins")),
    });
    Exchange::new(request, accept)
}

fn words(CopyFlags { after, then }: CopyFlags) -> CopyWords {
    let word = |(word, value)| Word { word, value };
    CopyWords { after: after.map(word), then: then.map(word) }
}

/// A layout as a session's message says it.
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
