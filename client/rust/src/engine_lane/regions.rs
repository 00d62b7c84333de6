//! The mappings of the node's memory that a device has pinned.

use std::sync::{Arc, Weak};

use larder_device::{Device, DeviceError, Flag, HostMemory, OrderError, RegionId, RegionOffset};

use larder_ipc::Mapping;

/// Pinned memory. Only the device's thread uses it.
#[derive(Default)]
pub(super) struct Regions {
    pinned: Vec<Pinned>,
    flags: Option<RegionId>,
}

struct Pinned {
    mapping: Weak<Mapping>,
    region: RegionId,
}

impl Regions {
    /// Pins the flag page.
    pub(super) fn attach_flags(
        &mut self,
        device: &mut dyn Device,
        flags: HostMemory,
    ) -> Result<(), DeviceError> {
        self.flags = Some(device.attach(flags)?);
        Ok(())
    }

    /// The region of a mapping. Pins the mapping if it is not pinned yet.
    pub(super) fn find(
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
    pub(super) fn flag(&self, flag: Option<(u32, u32)>) -> Result<Option<Flag>, DeviceError> {
        let place = |(word, value)| {
            let region = self.flags.ok_or(DeviceError::Unknown)?;
            let offset = u64::from(word) * 4;
            if offset >= super::FLAG_BYTES {
                let place = RegionOffset { region, offset };
                return Err(DeviceError::Order(OrderError::NoPlace { place, bytes: 4 }));
            }
            Ok(Flag { word: RegionOffset { region, offset }, value })
        };
        flag.map(place).transpose()
    }

    /// Unpins the mappings that nobody else holds any more: the node has renewed their extents, perhaps for other tenants.
    fn forget_unused(&mut self, device: &mut dyn Device) {
        self.pinned.retain(|Pinned { mapping, region }| {
            mapping.strong_count() > 1 || device.detach(*region).is_err()
        });
    }
}
