//! Registers engines' tensors: turns a session's message into calls of the device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use larder_core::Tensors;
use larder_core::store::BlockFacts;
use larder_core::store::ids::SessionId;
use larder_device::layout::{Dim, LayoutSpec, Plane};
use larder_device::{DeviceError, EngineMemory, PagedLayout, TensorsId};
use larder_net::blocking::aside;
use larder_protocol::lane::{IpcMemory, RegisterTensors, TensorDim, TensorLayout, TensorMemory, TensorPlane};
use larder_protocol::limits::MAX_TENSOR_REGIONS;
use larder_protocol::session::{Busy, Response, Scarce};
use tokio::sync::oneshot::Receiver;

use super::{DeviceCopyRefused, DeviceLane, Regions, Words};

/// Descriptors of an engine. If the registration is refused, they are closed on another thread: the last descriptor of memory
/// frees the memory, and that takes time.
pub(crate) struct ClosedAside<T: Send + 'static>(pub(crate) Vec<T>);

impl<T: Send + 'static> ClosedAside<T> {
    fn take(&mut self) -> Vec<T> {
        std::mem::take(&mut self.0)
    }
}

impl<T: Send + 'static> Drop for ClosedAside<T> {
    fn drop(&mut self) {
        let descriptors = self.take();
        if !descriptors.is_empty() {
            aside(move || drop(descriptors));
        }
    }
}

/// The device's answer to a registration.
type Registered = Receiver<Result<Tensors, DeviceCopyRefused>>;

impl DeviceLane {
    /// Registers an engine's tensors with the device, whose answer comes later. An error is the answer to a request that is refused
    /// at once.
    #[expect(clippy::result_large_err, reason = "it is an answer, made once for each of an engine's tensors")]
    pub(crate) fn register(
        &mut self,
        session: SessionId,
        ask: RegisterTensors,
        descriptors: ClosedAside<OwnedFd>,
        facts: BlockFacts,
    ) -> Result<(Registered, Arc<Words>), Response> {
        let RegisterTensors { namespace, block, layout, memory } = ask;
        let (mut memory, words) = (engine_memory(&memory, descriptors)?, self.words(session)?);
        let shared = words.host_memory();
        let answered = self.call(move |device, regions: &mut Regions| {
            let check = |bytes: &[u64]| {
                let layout = PagedLayout::new(layout_of(layout), bytes).map_err(DeviceError::from)?;
                let (pages_bytes, layers) = (layout.block_bytes(), layout.layers());
                if (pages_bytes, layers) == (facts.bytes, facts.layers) {
                    return Ok(layout);
                }
                let (block_bytes, block_layers) = (facts.bytes, facts.layers);
                Err(DeviceCopyRefused::Block { pages_bytes, layers, block_bytes, block_layers })
            };
            let (TensorsId(id), layout) = regions.register(device, session, shared, check, memory.take())?;
            let LayoutSpec { pages, pages_per_chunk, .. } = *layout.spec();
            Ok(Tensors { id, namespace, block: block.into(), facts, pages, pages_per_chunk })
        });
        // A retry succeeds once the device's thread has taken something from its queue.
        let busy = |_| Response::Busy(Busy { what: Scarce::Copies, retry_after_ms: REGISTER_RETRY_MS });
        Ok((answered.map_err(busy)?, words))
    }
}

/// An engine's memory, each piece with its size in bytes.
fn engine_memory(
    memory: &[TensorMemory],
    mut descriptors: ClosedAside<OwnedFd>,
) -> Result<ClosedAside<(EngineMemory, u64)>, DeviceCopyRefused> {
    if memory.len() > MAX_TENSOR_REGIONS {
        return Err(DeviceCopyRefused::TooManyRegions { most: MAX_TENSOR_REGIONS });
    }
    let regions = memory.iter().filter(|memory| matches!(memory, TensorMemory::Descriptor(_))).count();
    if descriptors.0.len() != regions {
        return Err(DeviceCopyRefused::Descriptors { found: descriptors.0.len(), regions });
    }
    let mut descriptors = descriptors.take().into_iter();
    let one = |memory: &TensorMemory| match *memory {
        TensorMemory::Ipc(IpcMemory { handle, offset, bytes }) => {
            Some((EngineMemory::Ipc { handle, offset, bytes }, bytes))
        }
        TensorMemory::Descriptor(bytes) => {
            descriptors.next().map(|descriptor| (EngineMemory::Descriptor { descriptor, bytes }, bytes))
        }
    };
    Ok(ClosedAside(memory.iter().filter_map(one).collect()))
}

/// The layout in a session's message, unchecked.
fn layout_of(message: TensorLayout) -> LayoutSpec {
    let TensorLayout { planes, planes_per_layer, pages, pages_per_chunk, dims, run_bytes } = message;
    let plane = |TensorPlane { region, offset, page_stride }| Plane { region, offset, page_stride };
    LayoutSpec {
        planes: planes.into_iter().map(plane).collect(),
        planes_per_layer,
        pages,
        pages_per_chunk,
        dims: dims.into_iter().map(|TensorDim { count, stride }| Dim { count, stride }).collect(),
        run_bytes,
    }
}

/// About the time that one copy takes while many run.
const REGISTER_RETRY_MS: u64 = 5;
