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

    /// Sets the distances of `node` to all nodes, in the order of their numbers.
    pub(crate) fn distances(&self, node: u32, distances: &str) -> &Self {
        self.file(&format!("sys/devices/system/node/node{node}/distance"), distances)
    }

    /// Adds reserved huge pages of the machine or of a NUMA node.
    pub(crate) fn huge_pages(&self, node: Option<u32>, total: u64, free: u64) -> &Self {
        let folder = match node {
            Some(node) => format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB"),
            None => "sys/kernel/mm/hugepages/hugepages-2048kB".to_owned(),
        };
        self.file(&format!("{folder}/nr_hugepages"), &total.to_string());
        self.file(&format!("{folder}/free_hugepages"), &free.to_string())
    }

    /// Adds a device at the end of `path`, such as `pci0000:15/0000:15:01.0/0000:17:00.0`.
    pub(crate) fn device_at(&self, path: &str, numa_node: i32, class: &str) -> &Self {
        let (_, address) = path.rsplit_once('/').unwrap();
        self.file(&format!("sys/devices/{path}/class"), class);
        self.file(&format!("sys/devices/{path}/numa_node"), &format!("{numa_node}\n"));
        self.link(&format!("sys/bus/pci/devices/{address}"), &format!("../../../devices/{path}"))
    }

    /// Adds a device at the end of `path`, with its network interface.
    pub(crate) fn nic_at(&self, path: &str, numa_node: i32, name: &str) -> &Self {
        self.device_at(path, numa_node, "0x020000").interface(&format!("{path}/net/{name}"), 9_000, "up")
    }

    /// Adds a network interface at `path` below `sys/devices`.
    pub(crate) fn interface(&self, path: &str, mtu: u32, state: &str) -> &Self {
        let (_, name) = path.rsplit_once('/').unwrap();
        self.file(&format!("sys/devices/{path}/mtu"), &format!("{mtu}\n"));
        self.file(&format!("sys/devices/{path}/operstate"), &format!("{state}\n"));
        self.link(&format!("sys/class/net/{name}"), &format!("../../devices/{path}"))
    }

    pub(crate) fn link(&self, path: &str, target: &str) -> &Self {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
        self
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
