//! The memory that a device knows: extents that it pinned, and memory that sessions registered. Only its thread uses it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use larder_core::store::ids::SessionId;
use larder_device::{
    Device, DeviceError, EngineMemory, Flag, HostMemory, OrderError, PagedLayout, RegionId, RegionOffset,
    TensorsId,
};
use larder_protocol::lane::Word;

use super::WORD_BYTES;
use crate::arena::ExtentMemory;

/// A device's memory.
#[derive(Default)]
pub(crate) struct Regions {
    extents: Vec<Pinned>,
    /// The device tier's memory, or why there is none.
    pool: Option<Result<RegionId, DeviceError>>,
    sessions: HashMap<SessionId, OfSession>,
    /// Memory of ended sessions, and extents of an earlier life, that copies may still use.
    retired: Vec<OfSession>,
}

struct Pinned {
    memory: Weak<ExtentMemory>,
    region: RegionId,
}

#[derive(Default)]
struct OfSession {
    words: Option<RegionId>,
    tensors: Vec<TensorsId>,
    /// Regions of these tensors.
    regions: Vec<RegionId>,
}

impl Regions {
    /// The region of an extent, which is pinned first if it is not yet.
    pub(crate) fn find(
        &mut self,
        device: &mut dyn Device,
        memory: &Arc<ExtentMemory>,
    ) -> Result<RegionId, DeviceError> {
        let known = self.extents.iter().find(|pinned| pinned.memory.as_ptr() == Arc::as_ptr(memory));
        if let Some(pinned) = known {
            return Ok(pinned.region);
        }
        self.sweep(device);
        let region = device.attach(memory.host_memory())?;
        self.extents.push(Pinned { memory: Arc::downgrade(memory), region });
        Ok(region)
    }

    /// The device tier's memory, allocated at its first use. A GPU that refused is not asked again.
    pub(crate) fn pool(&mut self, device: &mut dyn Device, bytes: u64) -> Result<RegionId, DeviceError> {
        let pool = self.pool.get_or_insert_with(|| {
            device.allocate(bytes).inspect_err(|error| {
                tracing::warn!(%error, bytes, "a GPU has no memory for the device tier: lower [gpu] device_bytes");
            })
        });
        pool.clone()
    }

    /// Whether the GPU refused the device tier's memory.
    pub(crate) fn has_no_pool(&self) -> bool {
        matches!(self.pool, Some(Err(_)))
    }

    /// Makes a session's tensors known to the device, all of their regions or none.
    pub(crate) fn register(
        &mut self,
        device: &mut dyn Device,
        session: SessionId,
        words: HostMemory,
        layout: impl FnOnce(&[u64]) -> Result<PagedLayout, super::DeviceCopyRefused>,
        memory: Vec<(EngineMemory, u64)>,
    ) -> Result<(TensorsId, PagedLayout), super::DeviceCopyRefused> {
        self.sweep(device);
        let bytes: Vec<u64> = memory.iter().map(|&(_, bytes)| bytes).collect();
        let layout = layout(&bytes)?;
        let of_session = self.sessions.entry(session).or_default();
        if of_session.words.is_none() {
            of_session.words = Some(device.attach(words)?);
        }
        let mut regions = Vec::with_capacity(memory.len());
        match import(device, memory, &layout, &mut regions) {
            Ok(tensors) => {
                of_session.tensors.push(tensors);
                of_session.regions.append(&mut regions);
                Ok((tensors, layout))
            }
            Err(error) => {
                self.retired.push(OfSession { regions, ..OfSession::default() });
                self.sweep(device);
                Err(error.into())
            }
        }
    }

    /// The place and value of a word in a session's page.
    pub(crate) fn flag(&self, session: SessionId, word: Option<Word>) -> Result<Option<Flag>, DeviceError> {
        let flag = |Word { word, value }| {
            let words = self.sessions.get(&session).and_then(|of| of.words);
            let place =
                RegionOffset { region: words.ok_or(DeviceError::Unknown)?, offset: u64::from(word) * 4 };
            if place.offset >= WORD_BYTES {
                return Err(DeviceError::Order(OrderError::NoPlace { place, bytes: 4 }));
            }
            Ok(Flag { word: place, value })
        };
        word.map(flag).transpose()
    }

    /// Ends a session: the device gives up the session's memory as soon as no copy uses it.
    pub(crate) fn close(&mut self, device: &mut dyn Device, session: SessionId) {
        self.retired.extend(self.sessions.remove(&session));
        self.sweep(device);
    }

    /// Has the next sweeps give up all extents. An extent that is needed later is pinned anew.
    pub(crate) fn retire_extents(&mut self) {
        let regions = self.extents.drain(..).map(|pinned| pinned.region).collect();
        self.retired.push(OfSession { regions, ..OfSession::default() });
    }

    /// Gives up unused memory: retired memory, and extents that got new memory. Returns whether some retired memory is left,
    /// because copies still use it.
    pub(crate) fn sweep(&mut self, device: &mut dyn Device) -> bool {
        self.retired.retain_mut(|retired| !retired.give_up(device));
        // A count of 1 means that only the device still holds the extent.
        self.extents.retain(|Pinned { memory, region }| {
            memory.strong_count() > 1 || matches!(device.detach(*region), Err(DeviceError::InUse))
        });
        !self.retired.is_empty()
    }
}

impl OfSession {
    /// Gives up the unused memory; returns whether nothing is left.
    fn give_up(&mut self, device: &mut dyn Device) -> bool {
        let is_used = |result: Result<(), DeviceError>| matches!(result, Err(DeviceError::InUse));
        self.tensors.retain(|&tensors| is_used(device.unregister(tensors)));
        self.regions.retain(|&region| is_used(device.detach(region)));
        self.words = self.words.filter(|&words| is_used(device.detach(words)));
        self.tensors.is_empty() && self.regions.is_empty() && self.words.is_none()
    }
}

/// Maps an engine's memory and registers it as tensors. `regions` gets the mapped regions, also after a failure.
fn import(
    device: &mut dyn Device,
    memory: Vec<(EngineMemory, u64)>,
    layout: &PagedLayout,
    regions: &mut Vec<RegionId>,
) -> Result<TensorsId, DeviceError> {
    for (memory, _) in memory {
        regions.push(device.import(memory)?);
    }
    device.register(layout.clone(), regions.clone())
}
