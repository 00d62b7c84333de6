//! The mappings of the node's memory that a device has pinned.
//!
//! What is pinned stays mapped, and the node's memory exists as long as it is mapped. So the end of a session unpins its
//! mappings. Mappings that leases or reservations still use are unpinned when these end, whoever still has a handle of the
//! session.

use std::sync::{Arc, Mutex, Weak};

use larder_device::thread::Busy;
use larder_device::{
    Device, DeviceError, DeviceThread, Flag, HostMemory, OrderError, RegionId, RegionOffset,
};

use larder_ipc::Mapping;

use crate::lock;

/// A device's thread, and the memory that it has pinned.
pub(crate) struct Pinning {
    pub(crate) thread: DeviceThread,
    pub(crate) regions: Arc<Mutex<Regions>>,
}

/// The devices that may have pinned memory of a session.
#[derive(Default)]
pub(crate) struct Pinners(Mutex<Vec<Weak<Pinning>>>);

/// Pinned memory. Only the device's thread uses it.
#[derive(Default)]
pub(crate) struct Regions {
    pinned: Vec<Pinned>,
    flags: Option<RegionId>,
}

struct Pinned {
    mapping: Weak<Mapping>,
    region: RegionId,
}

impl Pinning {
    /// Has the device unpin the mappings that nobody else holds any more.
    fn let_go(&self) -> Result<(), Busy> {
        let regions = Arc::clone(&self.regions);
        self.thread.call(move |device| lock(&regions).forget_unused(device))
    }
}

impl Pinners {
    /// Notes that a device is about to pin memory of the session.
    pub(crate) fn add(&self, pinning: &Arc<Pinning>) {
        let mut known = lock(&self.0);
        if known.iter().all(|known| known.as_ptr() != Arc::as_ptr(pinning)) {
            known.push(Arc::downgrade(pinning));
        }
    }

    /// Has the devices unpin the session's mappings that nobody else holds any more.
    pub(crate) fn let_go(&self) {
        let pinning: Vec<Arc<Pinning>> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        for pinning in pinning {
            // A device that is busy unpins them before it pins other memory.
            let _ = pinning.let_go();
        }
    }
}

impl Drop for Pinners {
    fn drop(&mut self) {
        self.let_go();
    }
}

impl Regions {
    /// Pins the flag page.
    pub(crate) fn attach_flags(
        &mut self,
        device: &mut dyn Device,
        flags: HostMemory,
    ) -> Result<(), DeviceError> {
        self.flags = Some(device.attach(flags)?);
        Ok(())
    }

    /// The region of a mapping. Pins the mapping if it is not pinned yet.
    pub(crate) fn find(
        &mut self,
        device: &mut dyn Device,
        mapping: &Arc<Mapping>,
    ) -> Result<RegionId, DeviceError> {
        let known = self.pinned.iter().find(|pinned| pinned.mapping.as_ptr() == Arc::as_ptr(mapping));
        if let Some(pinned) = known {
            return Ok(pinned.region);
        }
        self.forget_unused(device);
        let region = device.attach(mapping.host_memory())?;
        self.pinned.push(Pinned { mapping: Arc::downgrade(mapping), region });
        Ok(region)
    }

    /// A word of the flag page.
    pub(crate) fn flag(&self, flag: Option<(u32, u32)>) -> Result<Option<Flag>, DeviceError> {
        let place = |(word, value)| {
            let region = self.flags.ok_or(DeviceError::Unknown)?;
            let offset = u64::from(word) * 4;
            if offset >= FLAG_BYTES {
                let place = RegionOffset { region, offset };
                return Err(DeviceError::Order(OrderError::NoPlace { place, bytes: 4 }));
            }
            Ok(Flag { word: RegionOffset { region, offset }, value })
        };
        flag.map(place).transpose()
    }

    /// Unpins the mappings that nobody else holds any more: the node has renewed their extents, perhaps for other tenants, or their
    /// session is over.
    fn forget_unused(&mut self, device: &mut dyn Device) {
        self.pinned.retain(|Pinned { mapping, region }| {
            mapping.strong_count() > 1 || device.detach(*region).is_err()
        });
    }
}

/// 1,024 words.
pub(crate) const FLAG_BYTES: u64 = 4_096;
