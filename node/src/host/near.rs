//! Nearness: the CPUs and memory near a NUMA node, the network interface near a GPU.

use std::cmp::Reverse;
use std::net::IpAddr;

use super::{CpuSet, HostFacts, Interface, NumaNode, PciAddress};

impl HostFacts {
    /// The NUMA node of the device at `address`. If the firmware does not say: the only NUMA node, or `None` if there are
    /// several.
    pub fn numa_node_of(&self, address: Option<PciAddress>) -> Option<u32> {
        let only = || self.numa_nodes.keys().copied().next().filter(|_| self.numa_nodes.len() == 1);
        let told = address.and_then(|address| self.pci.get(&address)?.numa_node);
        told.filter(|node| self.numa_nodes.contains_key(node)).or_else(only)
    }

    /// The CPUs near a NUMA node: its own CPUs, or those of the nearest node that has CPUs. All CPUs if no node is given.
    pub fn cpus_near(&self, numa_node: Option<u32>) -> &CpuSet {
        let node = self.node_with_cpus(numa_node).and_then(|node| self.numa_nodes.get(&node));
        node.map_or(&self.cpus, |node| &node.cpus)
    }

    /// The NUMA node whose CPUs are nearest to `numa_node`: `numa_node` itself, if this process may run there.
    pub fn node_with_cpus(&self, numa_node: Option<u32>) -> Option<u32> {
        self.nearest(numa_node?, |node| !node.cpus.is_empty())
    }

    /// The NUMA node whose memory is nearest to `numa_node`: `numa_node` itself, if this process may have memory there. Nodes
    /// without CPUs have slower memory, and come last.
    pub fn node_with_memory(&self, numa_node: Option<u32>) -> Option<u32> {
        let has_memory = |node: &NumaNode| node.memory_bytes > 0 && node.may_hold_memory;
        let own = numa_node?;
        if self.numa_nodes.get(&own).is_some_and(has_memory) {
            return Some(own);
        }
        let beside_cpus = self.nearest(own, |node| has_memory(node) && !node.cpus.is_empty());
        beside_cpus.or_else(|| self.nearest(own, has_memory))
    }

    /// How far two NUMA nodes are from each other; `None` if the kernel does not say.
    pub fn distance(&self, from: u32, to: u32) -> Option<u32> {
        self.numa_nodes.get(&from)?.distances.get(&to).copied()
    }

    /// The network interface nearest to the device at `address`: below the same switch or root port of the PCI bus, else on the
    /// nearest NUMA node. Interfaces that are up come before interfaces that are down. `None` if no distance is known.
    pub fn interface_near(&self, address: PciAddress) -> Option<&str> {
        let device = self.pci.get(&address)?;
        let node = self.numa_node_of(Some(address));
        let farness = |(name, interface): (&'_ String, &Interface)| {
            let pci = interface.pci?;
            let shared = self.pci.get(&pci).map_or(0, |nic| shared_steps(&device.path, &nic.path));
            let apart = self.numa_node_of(Some(pci)).zip(node).map(|(nic, gpu)| {
                if nic == gpu { 0 } else { self.distance(gpu, nic).unwrap_or(UNKNOWN_DISTANCE) }
            });
            if shared == 0 && apart.is_none() {
                return None;
            }
            Some((!interface.is_up, Reverse(shared), apart.unwrap_or(UNKNOWN_DISTANCE), name.clone()))
        };
        let nearest = self.interfaces.iter().filter_map(farness).min()?;
        self.interfaces.get_key_value(&nearest.3).map(|(name, _)| name.as_str())
    }

    /// The interface that sends packets to `address`, or that has the address itself. The most specific route decides.
    pub fn interface_to(&self, address: IpAddr) -> Option<&str> {
        let address = address.to_canonical();
        if address.is_loopback() {
            return self.interfaces.get_key_value("lo").map(|(name, _)| name.as_str());
        }
        let routes =
            self.routes.iter().filter(|route| route.interface != "lo" && route.network.contains(&address));
        // Of equally specific routes the first counts, as in the kernel.
        let best = routes.rev().max_by_key(|route| route.network.prefix_len())?;
        Some(&best.interface)
    }

    /// The NUMA node of an interface. For a bond or VLAN: the node of the first interface below it that has a known node.
    pub fn numa_node_of_interface(&self, name: &str) -> Option<u32> {
        let interface = self.interfaces.get(name)?;
        if interface.pci.is_some() {
            return self.numa_node_of(interface.pci);
        }
        let lower = interface.lower.iter().filter_map(|lower| self.interfaces.get(lower)?.pci);
        lower.filter_map(|pci| self.numa_node_of(Some(pci))).next()
    }

    /// The nearest NUMA node that `suits`. Of equally near nodes, the lowest number wins.
    fn nearest(&self, from: u32, suits: impl Fn(&NumaNode) -> bool) -> Option<u32> {
        let fit = self.numa_nodes.iter().filter(|(_, node)| suits(node)).map(|(&number, _)| number);
        let farness = |&to: &u32| {
            if to == from { (0, to) } else { (self.distance(from, to).unwrap_or(UNKNOWN_DISTANCE), to) }
        };
        fit.min_by_key(farness)
    }
}

/// How many steps from the root two places on the PCI bus have in common.
fn shared_steps(a: &[String], b: &[String]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Farther than any distance that the kernel tells: its largest, 255, means that there is no path.
const UNKNOWN_DISTANCE: u32 = 1_000;
