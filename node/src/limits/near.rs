//! Chooses CPUs, memory and a network interface near a thread's work, and lists the parts that cannot be near.
//!
//! A part that cannot be near is taken from the nearest NUMA node that has it. Fixtures of one to eight NUMA nodes test this.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use bytesize::ByteSize;

use super::ActorLimits;
use crate::arena::{Binding, HugePages};
use crate::config::ClusterConfig;
use crate::host::{CpuSet, HUGE_PAGE_BYTES, HostFacts, HugePool, PciAddress};

/// The CPUs, memory and interface near an actor's GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ActorPlace {
    /// The NUMA node of the actor's GPU.
    pub numa_node: Option<u32>,
    /// The nearest NUMA node with memory, where the actor's arena belongs.
    pub memory_node: Option<u32>,
    /// The CPUs of the actor's threads.
    pub cpus: CpuSet,
    /// The network interface nearest to the actor's GPU.
    pub interface: Option<String>,
}

/// The place of the peer thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerPlace {
    /// The interface of the address where peers reach the node; `None` if the configuration does not give the address.
    pub interface: Option<String>,
    /// The NUMA node of that interface, or else of the first GPU.
    pub numa_node: Option<u32>,
    /// The rate of that interface, if it is known.
    pub megabits_per_second: Option<u32>,
    /// The CPUs of the thread. Never empty.
    pub cpus: CpuSet,
}

/// A part that cannot be in its best place. The node runs anyway. `&str::from` gives the kind's name in metrics.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Mismatch {
    /// The firmware does not say where a GPU is.
    #[error(
        "the firmware does not tell the NUMA node of GPU {pci}: its memory and threads may be on any node"
    )]
    UnplacedGpu {
        /// The GPU.
        pci: PciAddress,
    },
    /// The NUMA node of a GPU has no CPU that this process may use.
    #[error(
        "NUMA node {numa_node} has no CPU that this process may use: threads run {}",
        instead.map_or("anywhere".to_owned(), |node| format!("on NUMA node {node}"))
    )]
    NoCpus {
        /// The NUMA node.
        numa_node: u32,
        /// The NUMA node whose CPUs are used instead.
        instead: Option<u32>,
    },
    /// The NUMA node of a GPU has no memory that this process may use.
    #[error(
        "NUMA node {numa_node} has no memory that this process may use: the arena uses memory of {}",
        instead.map_or("any NUMA node".to_owned(), |node| format!("NUMA node {node}"))
    )]
    NoMemory {
        /// The NUMA node.
        numa_node: u32,
        /// The NUMA node whose memory is used instead.
        instead: Option<u32>,
    },
    /// The arenas that belong on a NUMA node do not fit into its memory.
    #[error(
        "the arenas for NUMA node {numa_node} take {}, the NUMA node has {}: other NUMA nodes give the rest; to have all \
         memory near, lower [host] arena_bytes",
        ByteSize(*arena_bytes).display().iec(), ByteSize(*memory_bytes).display().iec()
    )]
    ArenasTooLarge {
        /// The NUMA node.
        numa_node: u32,
        /// Bytes of the arenas.
        arena_bytes: u64,
        /// Bytes that the arenas can have on this node.
        memory_bytes: u64,
    },
}

impl ActorPlace {
    /// Finds the parts near the GPU at `pci` on this machine. Adds each part that cannot be near to `mismatches`, once.
    pub(super) fn find(host: &HostFacts, pci: Option<PciAddress>, mismatches: &mut Vec<Mismatch>) -> Self {
        let numa_node = host.numa_node_of(pci);
        let memory_node = host.node_with_memory(numa_node);
        let mut found = Vec::new();
        match (numa_node, pci) {
            (Some(numa_node), _) => {
                let instead = host.node_with_cpus(Some(numa_node));
                if instead != Some(numa_node) {
                    found.push(Mismatch::NoCpus { numa_node, instead });
                }
                if memory_node != Some(numa_node) {
                    found.push(Mismatch::NoMemory { numa_node, instead: memory_node });
                }
            }
            (None, Some(pci)) if host.numa_nodes.len() > 1 => found.push(Mismatch::UnplacedGpu { pci }),
            (None, _) => {}
        }
        for mismatch in found {
            if !mismatches.contains(&mismatch) {
                mismatches.push(mismatch);
            }
        }
        let interface = pci.and_then(|pci| host.interface_near(pci)).map(str::to_owned);
        Self { numa_node, memory_node, cpus: host.cpus_near(numa_node).clone(), interface }
    }
}

impl PeerPlace {
    /// Finds a place near the interface with the address where peers find this node. If the configuration gives no address, or
    /// the place of its interface is unknown, the place is near the first GPU.
    pub(super) fn find(host: &HostFacts, cluster: &ClusterConfig, first_gpu: Option<PciAddress>) -> Self {
        let says = |address: &SocketAddr| !address.ip().is_unspecified();
        let address = Some(cluster.listen).filter(says).or(cluster.advertise).filter(says);
        let interface = address.and_then(|address| host.interface_to(address.ip()));
        let numa_node = interface.and_then(|name| host.numa_node_of_interface(name));
        let numa_node = numa_node.or_else(|| host.numa_node_of(first_gpu));
        let cpus = host.cpus_near(numa_node).clone();
        let megabits_per_second = interface.and_then(|name| host.interfaces.get(name)?.megabits_per_second);
        Self { interface: interface.map(str::to_owned), numa_node, megabits_per_second, cpus }
    }

    /// The default number of block threads: as many as the link keeps busy, and no more than a quarter of the CPUs. On a link of
    /// 20 Gbit/s or less, the thread between nodes does everything.
    pub fn block_threads(&self) -> usize {
        let wanted = match self.megabits_per_second {
            Some(rate) if rate <= THREAD_MEGABITS => 0,
            Some(rate) => rate.div_ceil(THREAD_MEGABITS) as usize,
            None => usize::MAX,
        };
        wanted.min(self.cpus.len() / 4).min(MOST_BLOCK_THREADS)
    }
}

/// Maximum number of block threads of a node.
pub(super) const MOST_BLOCK_THREADS: usize = 8;

/// The rate that one thread keeps up with, in Mbit/s.
const THREAD_MEGABITS: u32 = 20_000;

/// Lets arenas that do not fit onto their NUMA node spread: their memory is preferred, but not forced, to be on this node.
pub(super) fn loosen_what_does_not_fit(
    actors: &mut [ActorLimits],
    host: &HostFacts,
    mismatches: &mut Vec<Mismatch>,
) {
    for (numa_node, arena_bytes) in bytes_on_nodes(actors) {
        let Some(node) = host.numa_nodes.get(&numa_node) else { continue };
        let huge = huge_bytes(actors, Some(numa_node));
        let with = |pages: u64| node.memory_bytes.saturating_sub(node.huge.total_bytes) + huge.min(pages);
        let memory_bytes = with(node.huge.allowed_bytes);
        if arena_bytes > memory_bytes {
            mismatches.push(Mismatch::ArenasTooLarge { numa_node, arena_bytes, memory_bytes });
        }
        // Pages that others hold now are not there for an arena that must be here.
        if arena_bytes > with(node.huge.free_bytes) {
            let there = actors.iter_mut().filter(|actor| actor.arena.extent.numa_node == Some(numa_node));
            there.for_each(|actor| actor.arena.extent.binding = Binding::Preferred);
        }
    }
}

/// Bytes of the arenas that will be in huge pages, as far as huge pages are free now.
pub(super) fn expected_huge_bytes(actors: &[ActorLimits], host: &HostFacts) -> u64 {
    huge_bytes_from(actors, host, |pool| pool.free_bytes)
}

/// Bytes of the arenas that can be in huge pages, as far as huge pages are reserved. The node's own pages are among them while it
/// runs, and those that engines keep from its life before.
pub(super) fn possible_huge_bytes(actors: &[ActorLimits], host: &HostFacts) -> u64 {
    huge_bytes_from(actors, host, |pool| pool.allowed_bytes)
}

fn huge_bytes_from(actors: &[ActorLimits], host: &HostFacts, bytes_of: fn(&HugePool) -> u64) -> u64 {
    let mut anywhere = huge_bytes(actors, None);
    for &numa_node in bytes_on_nodes(actors).keys() {
        let there = host.numa_nodes.get(&numa_node).map_or(0, |node| bytes_of(&node.huge));
        anywhere += huge_bytes(actors, Some(numa_node)).min(there);
    }
    anywhere.min(bytes_of(&host.huge))
}

/// Bytes of the arenas, by the NUMA node where they belong.
fn bytes_on_nodes(actors: &[ActorLimits]) -> BTreeMap<u32, u64> {
    let mut on_node = BTreeMap::new();
    for arena in actors.iter().map(|actor| &actor.arena) {
        if let Some(node) = arena.extent.numa_node {
            *on_node.entry(node).or_default() += arena.bytes();
        }
    }
    on_node
}

/// Bytes of the arenas that can be in huge pages and belong on this NUMA node; `None` means arenas without a node.
fn huge_bytes(actors: &[ActorLimits], numa_node: Option<u32>) -> u64 {
    let arenas = actors.iter().map(|actor| &actor.arena).filter(|arena| arena.extent.numa_node == numa_node);
    let can = arenas.filter(|arena| {
        arena.extent.huge_pages == HugePages::Auto && arena.extent.bytes.is_multiple_of(HUGE_PAGE_BYTES)
    });
    can.map(super::ArenaLimits::bytes).sum()
}

#[cfg(test)]
mod tests;
