//! Network interfaces, their places in the machine, and the destinations that they lead to.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use ipnet::IpNet;

use super::PciAddress;

/// The facts of a network interface in sysfs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// The interface's device on the PCI bus; `None` for software interfaces.
    pub pci: Option<PciAddress>,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// The interface's rate; `None` if the driver does not tell.
    pub megabits_per_second: Option<u32>,
    /// Whether the interface can carry packets now.
    pub is_up: bool,
    /// The interfaces below this one: the members of a bond, or the interface below a VLAN.
    pub lower: Vec<String>,
}

/// A route to a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The network.
    pub network: IpNet,
    /// The interface.
    pub interface: String,
}

/// The interfaces that sysfs below `root` lists, by name.
pub(super) fn interfaces(root: &Path) -> BTreeMap<String, Interface> {
    let Ok(entries) = std::fs::read_dir(root.join("sys/class/net")) else { return BTreeMap::new() };
    let describe = |entry: std::fs::DirEntry| {
        let path = entry.path();
        let attribute = |name| std::fs::read_to_string(path.join(name)).ok();
        let state = attribute("operstate");
        let interface = Interface {
            pci: pci_of(&path),
            mtu: attribute("mtu")?.trim().parse().ok()?,
            // Drivers that do not know the speed say -1, or fail.
            megabits_per_second: attribute("speed").and_then(|speed| speed.trim().parse().ok()),
            // Some drivers do not tell the state.
            is_up: state.is_none_or(|state| matches!(state.trim(), "up" | "unknown")),
            lower: lower_interfaces(&path),
        };
        Some((entry.file_name().into_string().ok()?, interface))
    };
    entries.flatten().filter_map(describe).collect()
}

/// The routes that procfs below `root` lists, of both families.
pub(super) fn routes(root: &Path) -> Vec<Route> {
    let lines = |path| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let v4 = lines("proc/net/route");
    let v6 = lines("proc/net/ipv6_route");
    v4.lines().filter_map(route_v4).chain(v6.lines().filter_map(route_v6)).collect()
}

/// The PCI device of an interface: the last PCI address in its path, such as `.../0000:00:03.0/virtio2/net/eth0`.
fn pci_of(interface: &Path) -> Option<PciAddress> {
    let real = interface.canonicalize().ok()?;
    real.iter().rev().find_map(|part| part.to_str()?.parse().ok())
}

fn lower_interfaces(interface: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(interface).into_iter().flatten().flatten();
    let name =
        |entry: std::fs::DirEntry| Some(entry.file_name().to_str()?.strip_prefix("lower_")?.to_owned());
    let mut lower: Vec<String> = entries.filter_map(name).collect();
    lower.sort();
    lower
}

/// Reads a line of `/proc/net/route`: interface, destination, gateway, flags, ..., metric, mask. Addresses are in the byte order
/// of memory.
fn route_v4(line: &str) -> Option<Route> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [interface, network, _, _, _, _, _, mask, ..] = fields[..] else { return None };
    let bits = |hex: &str| Some(u32::from_be_bytes(u32::from_str_radix(hex, 16).ok()?.to_ne_bytes()));
    let prefix_bits = bits(mask)?.leading_ones() as u8;
    let network = IpNet::new(Ipv4Addr::from_bits(bits(network)?).into(), prefix_bits).ok()?;
    Some(Route { network, interface: interface.to_owned() })
}

/// Reads a line of `/proc/net/ipv6_route`: destination, its prefix length, ..., interface.
fn route_v6(line: &str) -> Option<Route> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (network, prefix, interface) = (fields.first()?, fields.get(1)?, fields.get(9)?);
    let network = Ipv6Addr::from_bits(u128::from_str_radix(network, 16).ok()?);
    let network = IpNet::new(network.into(), u8::from_str_radix(prefix, 16).ok()?).ok()?;
    Some(Route { network, interface: (*interface).to_owned() })
}
