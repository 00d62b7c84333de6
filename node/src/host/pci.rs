//! Devices on the PCI bus, as sysfs lists them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use larder_device::cuda::PciPlace;
use serde::{Deserialize, Serialize};

/// The place of a device on the PCI bus.
///
/// Reads the notations of sysfs (`0000:65:00.0`) and nvidia-smi (`00000000:65:00.0`), in upper or lower case. Writes the notation
/// of sysfs.
#[derive(Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// The facts of a device in sysfs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PciDevice {
    /// The device's NUMA node; `None` if the firmware does not say.
    pub numa_node: Option<u32>,
    /// Whether the device is a display controller, as most GPUs are.
    pub is_display: bool,
    /// The path to the device: root complex, bridges and switches, the device itself. Empty if sysfs does not say.
    pub path: Vec<String>,
}

/// A text that is no address on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no PCI address; it looks like `0000:65:00.0` (domain:bus:device.function, see `lspci -D`)")]
pub struct ParsePciError(String);

impl PciAddress {
    /// The place where a driver looks for a GPU. It leaves out the function: a GPU is one device on its bus, whatever its
    /// functions.
    pub fn place(self) -> PciPlace {
        PciPlace { domain: self.domain, bus: self.bus.into(), device: self.device.into() }
    }
}

impl FromStr for PciAddress {
    type Err = ParsePciError;

    fn from_str(text: &str) -> Result<Self, ParsePciError> {
        parse(text).ok_or_else(|| ParsePciError(text.into()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = ParsePciError;

    fn try_from(text: String) -> Result<Self, ParsePciError> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// The devices that sysfs below `root` lists; none if there is no PCI bus.
pub(super) fn devices(root: &Path) -> BTreeMap<PciAddress, PciDevice> {
    let Ok(entries) = std::fs::read_dir(root.join("sys/bus/pci/devices")) else { return BTreeMap::new() };
    let describe = |entry: std::fs::DirEntry| {
        let address = entry.file_name().to_str()?.parse().ok()?;
        let attribute = |name| std::fs::read_to_string(entry.path().join(name)).ok();
        let device = PciDevice {
            numa_node: attribute("numa_node").and_then(|node| node.trim().parse().ok()),
            is_display: attribute("class").is_some_and(|class| class.starts_with(DISPLAY_CLASS)),
            path: path_of(&entry.path()),
        };
        Some((address, device))
    };
    entries.flatten().filter_map(describe).collect()
}

/// The steps of the path to which a device's entry links, such as `/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0`.
fn path_of(entry: &Path) -> Vec<String> {
    let Ok(real) = entry.canonicalize() else { return Vec::new() };
    let steps = real.iter().filter_map(|step| step.to_str());
    steps.skip_while(|step| !is_root_complex(step)).map(str::to_owned).collect()
}

fn is_root_complex(step: &str) -> bool {
    step.strip_prefix("pci").is_some_and(|rest| rest.contains(':'))
}

fn parse(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let address = PciAddress {
        domain: u32::from_str_radix(domain, 16).ok()?,
        bus: u8::from_str_radix(bus, 16).ok()?,
        device: u8::from_str_radix(device, 16).ok()?,
        function: u8::from_str_radix(function, 16).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

/// The first digits of a display controller's class in sysfs.
const DISPLAY_CLASS: &str = "0x03";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_sysfs_and_as_nvidia_smi_write_it() {
        let address: PciAddress = "0000:e5:1f.7".parse().unwrap();
        assert_eq!(address.to_string(), "0000:e5:1f.7");
        assert_eq!("00000000:E5:1F.7".parse(), Ok(address));
        for text in ["", "65:00.0", "0000:65:00", "0000:65:20.0", "0000:65:00.8", "x:65:00.0"] {
            assert_eq!(text.parse::<PciAddress>(), Err(ParsePciError(text.into())));
        }
    }
}
