//! NUMA nodes: their CPUs, their memory, and the distances between them.

use std::collections::BTreeMap;
use std::path::Path;

use super::{CpuSet, HostError, HugePool, Source};

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// The node's CPUs on which this process may run; none on nodes that have only memory.
    pub cpus: CpuSet,
    /// The node's memory; 0 on nodes that have only CPUs.
    pub memory_bytes: u64,
    /// Whether this process may have memory on the node.
    pub may_hold_memory: bool,
    /// The node's memory that is reserved as huge pages.
    pub huge: HugePool,
    /// Distances to all nodes, this node included, as the firmware gives them: 10 is local. Empty if the kernel does not say.
    pub distances: BTreeMap<u32, u32>,
}

/// The NUMA nodes that sysfs below `root` lists; none if the kernel does not know of any.
pub(super) fn numa_nodes(root: &Path, allowed: &CpuSet) -> Result<BTreeMap<u32, NumaNode>, HostError> {
    let Ok(entries) = std::fs::read_dir(root.join("sys/devices/system/node")) else {
        return Ok(BTreeMap::new());
    };
    let memory_allowed = allowed_memory_nodes(root)?;
    let mut nodes = BTreeMap::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok());
        let Some(number) = number else { continue };
        let list = Source(entry.path().join("cpulist"));
        let cpus = list.cpus(&list.text()?)?.intersection(allowed);
        let meminfo = Source(entry.path().join("meminfo"));
        let memory_bytes = meminfo.kibibytes(&meminfo.text()?, "MemTotal:")?;
        let may_hold_memory = memory_allowed.as_ref().is_none_or(|allowed| allowed.contains(number));
        let huge = HugePool::read(&entry.path().join("hugepages"));
        let distances = BTreeMap::new();
        nodes.insert(number, NumaNode { cpus, memory_bytes, may_hold_memory, huge, distances });
    }
    let numbers: Vec<u32> = nodes.keys().copied().collect();
    for (number, node) in &mut nodes {
        node.distances = distances(root, *number, &numbers);
    }
    Ok(nodes)
}

/// The distances of a node, by node. The kernel lists them for all online nodes, in the order of their numbers.
fn distances(root: &Path, node: u32, numbers: &[u32]) -> BTreeMap<u32, u32> {
    let path = root.join(format!("sys/devices/system/node/node{node}/distance"));
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let found: Vec<u32> = text.split_whitespace().filter_map(|distance| distance.parse().ok()).collect();
    if found.len() == numbers.len() { numbers.iter().copied().zip(found).collect() } else { BTreeMap::new() }
}

/// The NUMA nodes on which this process may have memory; `None` if the kernel does not say.
fn allowed_memory_nodes(root: &Path) -> Result<Option<CpuSet>, HostError> {
    let status = Source::new(root, "proc/self/status");
    let Ok(text) = status.text() else { return Ok(None) };
    let list = text.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    // The list has the same notation as a list of CPUs.
    list.map(|list| status.cpus(list)).transpose()
}
