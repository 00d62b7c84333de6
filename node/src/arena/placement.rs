//! Where an arena's memory really is.

use std::collections::BTreeMap;
use std::io;

use super::extent::{ExtentMemory, Pages};
use super::numa;

/// Where an arena's memory is, as the kernel says of a sample of its pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    /// The NUMA node asked for.
    pub asked: Option<u32>,
    /// Bytes of the arena.
    pub bytes: u64,
    /// Those of them that are in huge pages.
    pub huge_bytes: u64,
    /// Sampled pages on each NUMA node.
    pub pages_on: BTreeMap<u32, u64>,
    /// Sampled pages that were not there.
    pub absent_pages: u64,
}

impl Placement {
    pub(super) fn new(asked: Option<u32>) -> Self {
        Self { asked, ..Self::default() }
    }

    pub(super) fn add(&mut self, extent: &ExtentMemory) -> io::Result<()> {
        self.bytes += extent.bytes();
        if extent.pages() == Pages::Huge {
            self.huge_bytes += extent.bytes();
        }
        for node in numa::nodes_of(extent.mapping(), SAMPLES_PER_EXTENT)? {
            match node {
                Some(node) => *self.pages_on.entry(node).or_default() += 1,
                None => self.absent_pages += 1,
            }
        }
        Ok(())
    }

    /// Pages sampled.
    #[must_use]
    pub fn sampled_pages(&self) -> u64 {
        self.pages_on.values().sum::<u64>() + self.absent_pages
    }

    /// Sampled pages that are on another node than asked for, or nowhere.
    #[must_use]
    pub fn misplaced_pages(&self) -> u64 {
        let right = self.asked.map(|node| self.pages_on.get(&node).copied().unwrap_or(0));
        right.map_or(self.absent_pages, |right| self.sampled_pages() - right)
    }

    /// Bytes of the arena on NUMA node `node`, projected from the sample.
    #[must_use]
    pub fn bytes_on(&self, node: u32) -> u64 {
        let pages = self.pages_on.get(&node).copied().unwrap_or(0);
        (u128::from(self.bytes) * u128::from(pages) / u128::from(self.sampled_pages().max(1))) as u64
    }

    pub(super) fn warn_if_wrong(&self) {
        if self.misplaced_pages() > 0 {
            let (asked, sampled, misplaced) = (self.asked, self.sampled_pages(), self.misplaced_pages());
            tracing::warn!(asked, sampled, misplaced, on = ?self.pages_on, "the arena is not where it was asked for");
        }
    }
}

/// Pages asked for in each extent: enough to see a node that ran out of memory on the way.
const SAMPLES_PER_EXTENT: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_elsewhere_are_misplaced_and_bytes_are_projected() {
        let mut placement = Placement { bytes: 1000, ..Placement::new(Some(1)) };
        placement.pages_on.extend([(0, 1), (1, 8)]);
        placement.absent_pages = 1;
        assert_eq!((placement.sampled_pages(), placement.misplaced_pages()), (10, 2));
        assert_eq!((placement.bytes_on(1), placement.bytes_on(0), placement.bytes_on(2)), (800, 100, 0));
        assert_eq!(Placement { asked: None, ..placement }.misplaced_pages(), 1);
        assert_eq!(Placement::new(Some(0)).misplaced_pages(), 0);
    }
}
