//! Trees of files that stand in for a machine's `/proc` and `/sys`.

use std::path::Path;

/// A machine made of files.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    /// A machine without NUMA nodes or devices.
    pub(crate) fn machine(memory_kib: u64, cpus: &str) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        tree.file("proc/meminfo", &format!("MemTotal: {memory_kib} kB\nMemAvailable: {memory_kib} kB\n"));
        tree.file("proc/sys/kernel/hostname", "fixture\n");
        tree.file("sys/devices/system/cpu/online", cpus);
        tree
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn numa_node(&self, node: u32, cpus: &str, memory_kib: u64) -> &Self {
        let path = format!("sys/devices/system/node/node{node}");
        self.file(&format!("{path}/cpulist"), cpus);
        self.file(&format!("{path}/meminfo"), &format!("Node {node} MemTotal:  {memory_kib} kB\n"))
    }

    pub(crate) fn device(&self, address: &str, numa_node: i32, class: &str) -> &Self {
        let path = format!("sys/bus/pci/devices/{address}");
        self.file(&format!("{path}/class"), class);
        self.file(&format!("{path}/numa_node"), &format!("{numa_node}\n"))
    }

    pub(crate) fn file(&self, path: &str, content: &str) -> &Self {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
        self
    }

    pub(crate) fn remove(&self, path: &str) {
        std::fs::remove_file(self.root().join(path)).unwrap();
    }
}
