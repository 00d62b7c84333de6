//! Opens the devices of a node.

use std::fmt;
use std::sync::Arc;

use larder_device::cuda::{CudaDevice, CudaOptions, ordinal_at};
use larder_device::{Device, DeviceError};

use crate::host::PciAddress;

/// Opens a device for an actor, on the thread that will use it.
#[derive(Clone)]
pub struct Devices(Arc<Open>);

type Open = dyn Fn(u16, Option<PciAddress>) -> Result<Box<dyn Device>, DeviceError> + Send + Sync;

impl Devices {
    /// GPUs by CUDA: the actor's own; the driver's first where the configuration names none.
    #[must_use]
    pub fn cuda() -> Self {
        Self(Arc::new(|_, pci| {
            let ordinal = pci.map(|pci| ordinal_at(pci.place())).transpose()?.unwrap_or(0);
            let device = CudaDevice::open(CudaOptions { ordinal, ..CudaOptions::default() })?;
            Ok(Box::new(device))
        }))
    }

    /// Something that stands for GPUs, for tests: no configuration leads here. `open` gets the actor's number.
    #[must_use]
    pub fn stand_in(
        open: impl Fn(u16) -> Result<Box<dyn Device>, DeviceError> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(move |device, _| open(device)))
    }

    pub(super) fn open(&self, device: u16, pci: Option<PciAddress>) -> Result<Box<dyn Device>, DeviceError> {
        (self.0)(device, pci)
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Devices").finish_non_exhaustive()
    }
}
