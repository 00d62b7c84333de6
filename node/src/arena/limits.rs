//! The numbers of an arena.

use serde::{Deserialize, Serialize};

use super::ExtentSpec;
use crate::host::CpuSet;

/// The numbers of one arena.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArenaLimits {
    /// Number of extents; at least 2.
    pub extents: u32,
    /// The wanted memory of each extent. Its size is a multiple of 4 KiB, and at least 2 MiB.
    pub extent: ExtentSpec,
    /// Threads that fault the memory in at start.
    pub fault_threads: usize,
    /// The CPUs of these threads.
    pub cpus: CpuSet,
}

/// How memory is bound to a NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// Memory comes from this node alone; other pages there make room.
    Strict,
    /// Memory comes from this node as long as it has any, then from others.
    Preferred,
}

/// Whether the arena uses huge pages.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// For each extent: reserved huge pages (`vm.nr_hugepages`) as long as there are any, then transparent ones if the system
    /// gives them to memory files.
    Auto,
    /// Never.
    Never,
}

impl ArenaLimits {
    /// Bytes of the whole arena.
    pub fn bytes(&self) -> u64 {
        self.extent.bytes * u64::from(self.extents)
    }
}

/// The smallest extent: one huge page.
pub const MIN_EXTENT_BYTES: u64 = 2 << 20;

/// Extents are multiples of this.
pub const PAGE_BYTES: u64 = 4096;
