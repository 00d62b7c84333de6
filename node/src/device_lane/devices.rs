//! Opens the devices of a node.

use std::fmt;
use std::sync::Arc;

use larder_device::cuda::{CudaDevice, CudaOptions, ordinal_at};
use larder_device::{Device, DeviceError};

use crate::host::PciAddress;

/// Opens a device for an actor, on the thread that will use it.
#[derive(Clone)]
pub struct Devices {
    open: Arc<OpenDevice>,
    find: fn(Option<PciAddress>) -> Result<(), DeviceError>,
}

type OpenDevice = dyn Fn(u16, Option<PciAddress>) -> Result<Box<dyn Device>, DeviceError> + Send + Sync;

impl Devices {
    /// Opens GPUs with CUDA: the actor's own GPU, or the driver's first GPU if the configuration names none.
    pub fn cuda() -> Self {
        let open: Arc<OpenDevice> = Arc::new(|_, pci| {
            let ordinal = ordinal_at(pci.map(PciAddress::place))?;
            Ok(Box::new(CudaDevice::open(CudaOptions {
                ordinal,
                only_copies: true,
                ..CudaOptions::default()
            })?))
        });
        Self { open, find: |pci| ordinal_at(pci.map(PciAddress::place)).map(drop) }
    }

    /// Opens stand-ins for GPUs, for tests; no configuration leads here. `open` gets the actor's number.
    pub fn stand_in(
        open: impl Fn(u16) -> Result<Box<dyn Device>, DeviceError> + Send + Sync + 'static,
    ) -> Self {
        Self { open: Arc::new(move |device, _| open(device)), find: |_| Ok(()) }
    }

    pub(super) fn open(&self, device: u16, pci: Option<PciAddress>) -> Result<Box<dyn Device>, DeviceError> {
        (self.open)(device, pci)
    }

    /// Checks that the driver knows the GPU at `pci`, or any GPU if `pci` is `None`. Opens nothing. Takes seconds if the driver
    /// must wake its GPUs.
    ///
    /// # Errors
    /// [`DeviceError::Absent`] if the driver is missing or too old, or if there is no such GPU.
    pub(crate) fn find(&self, pci: Option<PciAddress>) -> Result<(), DeviceError> {
        (self.find)(pci)
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}
