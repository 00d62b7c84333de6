//! Facts about the machine from the kernel's files: memory, CPUs, NUMA nodes, GPUs, networks.
//!
//! All files are read below a root that the caller names, so that a tree of fixtures can stand in for the machine.

pub mod cgroup;
mod cpus;
mod huge;
mod near;
mod network;
mod pci;
mod topology;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

pub use cpus::{CpuSet, ParseCpusError};
pub use huge::{HUGE_PAGE_BYTES, HugePool};
pub use network::{Interface, Route};
pub use pci::{ParsePciError, PciAddress, PciDevice};
pub use topology::NumaNode;

/// The machine's facts, against which a configuration is resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The host's name.
    pub name: String,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Memory that could be used now without swapping.
    pub available_bytes: u64,
    /// The memory limit of this process's control groups (version 1 or 2); `None` if they set no limit.
    pub cgroup_limit_bytes: Option<u64>,
    /// Reserved huge pages of the machine. Free pages count only as far as this process's control groups allow them.
    pub huge: HugePool,
    /// The CPUs on which this process may run.
    pub cpus: CpuSet,
    /// The NUMA nodes, by number; none if the kernel knows of none.
    pub numa_nodes: BTreeMap<u32, NumaNode>,
    /// The devices on the PCI bus.
    pub pci: BTreeMap<PciAddress, PciDevice>,
    /// The number of files that this process may have open; `u64::MAX` if there is no limit. The node raises its limit up to this
    /// number.
    pub open_files: u64,
    /// The network interfaces, by name.
    pub interfaces: BTreeMap<String, Interface>,
    /// The routes of packets.
    pub routes: Vec<Route>,
}

/// Why the machine's facts cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A file of the kernel cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file of the kernel says something unexpected.
    #[error("{} has no {what}: `{found}`", path.display())]
    Unexpected {
        /// The file.
        path: PathBuf,
        /// The expected fact.
        what: &'static str,
        /// The text found.
        found: String,
    },
}

impl HostFacts {
    /// Reads the facts below `root`: `/` for this machine.
    ///
    /// # Errors
    /// Fails if a file that every Linux has is missing or says something unexpected. Files that only some machines have (NUMA,
    /// PCI, control groups) may be missing.
    pub fn read(root: &Path) -> Result<Self, HostError> {
        let meminfo = Source::new(root, "proc/meminfo");
        let text = meminfo.text()?;
        let memory_bytes = meminfo.kibibytes(&text, "MemTotal:")?;
        let cpus = allowed_cpus(root)?;
        Ok(Self {
            name: Source::new(root, "proc/sys/kernel/hostname").text()?.trim().to_owned(),
            memory_bytes,
            available_bytes: meminfo.kibibytes(&text, "MemAvailable:")?,
            cgroup_limit_bytes: cgroup::memory_limit(root).filter(|&limit| limit < memory_bytes),
            huge: huge_pages(root),
            numa_nodes: topology::numa_nodes(root, &cpus)?,
            pci: pci::devices(root),
            open_files: open_files(root),
            interfaces: network::interfaces(root),
            routes: network::routes(root),
            cpus,
        })
    }

    /// The most memory in ordinary pages that this process can have. It does not include huge pages: the system has set them
    /// apart, and control groups count them separately.
    pub fn ordinary_bytes(&self) -> u64 {
        let ordinary = self.memory_bytes.saturating_sub(self.huge.total_bytes);
        self.cgroup_limit_bytes.unwrap_or(ordinary).min(ordinary)
    }
}

/// A file of the kernel.
struct Source(PathBuf);

impl Source {
    fn new(root: &Path, path: &str) -> Self {
        Self(root.join(path))
    }

    fn text(&self) -> Result<String, HostError> {
        std::fs::read_to_string(&self.0).map_err(|source| HostError::Read { path: self.0.clone(), source })
    }

    /// The number after `key`, in bytes. The key may be anywhere in a line, as in `... MemTotal: 24684092 kB`.
    fn kibibytes(&self, text: &str, key: &'static str) -> Result<u64, HostError> {
        text.lines()
            .find_map(|line| line.split_once(key)?.1.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .and_then(|kibibytes| kibibytes.checked_mul(1024))
            .ok_or_else(|| self.unexpected(key, text))
    }

    fn cpus(&self, text: &str) -> Result<CpuSet, HostError> {
        text.parse().map_err(|_| self.unexpected("a list of CPUs", text))
    }

    fn unexpected(&self, what: &'static str, found: &str) -> HostError {
        let found = found.chars().take(80).collect();
        HostError::Unexpected { path: self.0.clone(), what, found }
    }
}

fn huge_pages(root: &Path) -> HugePool {
    let HugePool { total_bytes, allowed_bytes, free_bytes } =
        HugePool::read(&root.join("sys/kernel/mm/hugepages"));
    let limit = cgroup::huge_page_limit(root).unwrap_or(u64::MAX);
    HugePool { total_bytes, allowed_bytes: allowed_bytes.min(limit), free_bytes: free_bytes.min(limit) }
}

/// The hard limit.
fn open_files(root: &Path) -> u64 {
    let limits = Source::new(root, "proc/self/limits").text().unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(u64::MAX)
}

/// The online CPUs on which the scheduler lets this process run.
fn allowed_cpus(root: &Path) -> Result<CpuSet, HostError> {
    let online = Source::new(root, "sys/devices/system/cpu/online");
    let online_cpus = online.cpus(&online.text()?)?;
    let status = Source::new(root, "proc/self/status");
    let Ok(text) = status.text() else { return Ok(online_cpus) };
    match text.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")) {
        Some(list) => Ok(online_cpus.intersection(&status.cpus(list)?)),
        None => Ok(online_cpus),
    }
}

#[cfg(test)]
pub(crate) mod tests;
