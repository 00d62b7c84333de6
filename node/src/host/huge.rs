//! Huge pages that the system has reserved.

use std::path::Path;

/// Reserved huge pages of 2 MiB, of the machine or one NUMA node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HugePool {
    /// Bytes of all these pages.
    pub total_bytes: u64,
    /// Bytes of the pages that this process may have, whoever has them now: as many as its control groups allow.
    pub allowed_bytes: u64,
    /// Bytes of the pages that nobody has and that are promised to nobody.
    pub free_bytes: u64,
}

impl HugePool {
    /// Reads a folder that has a pool for each page size: `/sys/kernel/mm/hugepages`, or the folder of a NUMA node.
    pub(super) fn read(folder: &Path) -> Self {
        let pages = |file: &str| -> u64 {
            let text = std::fs::read_to_string(folder.join("hugepages-2048kB").join(file));
            text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        let bytes = |pages: u64| pages.saturating_mul(HUGE_PAGE_BYTES);
        let free = pages("free_hugepages").saturating_sub(pages("resv_hugepages"));
        let total_bytes = bytes(pages("nr_hugepages"));
        Self { total_bytes, allowed_bytes: total_bytes, free_bytes: bytes(free) }
    }
}

/// Bytes of one huge page.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;
