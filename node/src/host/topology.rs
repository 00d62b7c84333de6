//! NUMA nodes: which CPUs and how much memory are together.

use std::collections::BTreeMap;
use std::path::Path;

use super::{CpuSet, HostError, Source};

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Those of its CPUs on which this process may run; none on nodes that are memory alone.
    pub cpus: CpuSet,
    /// Its memory.
    pub memory_bytes: u64,
}

/// The NUMA nodes that sysfs below `root` lists; none where the kernel does not know of any.
pub(super) fn numa_nodes(root: &Path, allowed: &CpuSet) -> Result<BTreeMap<u32, NumaNode>, HostError> {
    let Ok(entries) = std::fs::read_dir(root.join("sys/devices/system/node")) else {
        return Ok(BTreeMap::new());
    };
    let mut nodes = BTreeMap::new();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok());
        let Some(number) = number else { continue };
        let list = Source(entry.path().join("cpulist"));
        let cpus = list.cpus(&list.text()?)?.intersection(allowed);
        let meminfo = Source(entry.path().join("meminfo"));
        let memory_bytes = meminfo.kibibytes(&meminfo.text()?, "MemTotal:")?;
        nodes.insert(number, NumaNode { cpus, memory_bytes });
    }
    Ok(nodes)
}
