//! Finds out where an arena's memory really is, and in which pages.
//!
//! The kernel answers by `move_pages`, or by its list of mappings if a container refuses that call.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Once};

use bytesize::ByteSize;

use super::extent::{ExtentMemory, Pages};
use super::{HugePages, PAGE_BYTES};
use super::{maps, numa};
use crate::host::HUGE_PAGE_BYTES;

/// Where an arena's memory is and which pages it has, as the kernel says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArenaPlacement {
    /// The NUMA node asked for.
    pub asked: Option<u32>,
    /// Bytes of the arena.
    pub bytes: u64,
    /// Bytes in reserved huge pages.
    pub huge_bytes: u64,
    /// Bytes in transparent huge pages.
    pub transparent_bytes: u64,
    /// Who said where the pages are.
    pub source: PlacementSource,
    /// Examined pages on each NUMA node.
    pub pages_on: BTreeMap<u32, u64>,
    /// Examined pages that were not there.
    pub absent_pages: u64,
}

/// Who says where memory is. As a text, this is its name in the node's status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, strum::IntoStaticStr)]
pub enum PlacementSource {
    /// Nobody: the kernel was not asked, or refused to say.
    #[default]
    #[strum(serialize = "unknown")]
    Unknown,
    /// `move_pages`, for a sample of the pages.
    #[strum(serialize = "move_pages")]
    Sample,
    /// `/proc/self/numa_maps`, for all pages.
    #[strum(serialize = "numa_maps")]
    Maps,
}

impl ArenaPlacement {
    /// Asks the kernel for the whereabouts of these extents.
    pub(crate) fn read<'a>(
        asked: Option<u32>,
        extents: impl Iterator<Item = &'a Arc<ExtentMemory>> + Clone,
    ) -> Self {
        let mut placement = Self { asked, ..Self::default() };
        let mut ordinary = BTreeSet::new();
        for extent in extents.clone() {
            placement.bytes += extent.bytes();
            match extent.pages() {
                Pages::Huge => placement.huge_bytes += extent.bytes(),
                Pages::Ordinary => _ = ordinary.insert(extent.mapping().address() as u64),
            }
        }
        match maps::transparent_bytes(&ordinary) {
            Ok(bytes) => placement.transparent_bytes = bytes,
            Err(error) => tracing::debug!(%error, "the kernel does not say which pages are huge"),
        }
        if let Err(error) = placement.sample(extents.clone()) {
            let starts = extents.map(|extent| extent.mapping().address() as u64).collect();
            placement.read_maps(&starts, &error);
        }
        placement
    }

    fn sample<'a>(&mut self, extents: impl Iterator<Item = &'a Arc<ExtentMemory>>) -> io::Result<()> {
        for extent in extents {
            for node in numa::nodes_of(extent.mapping(), SAMPLES_PER_EXTENT)? {
                match node {
                    Some(node) => *self.pages_on.entry(node).or_default() += 1,
                    None => self.absent_pages += 1,
                }
            }
        }
        self.source = PlacementSource::Sample;
        Ok(())
    }

    /// Reads the list of mappings instead: most containers that forbid `move_pages` allow this.
    fn read_maps(&mut self, starts: &BTreeSet<u64>, refusal: &io::Error) {
        static SAID: Once = Once::new();
        (self.pages_on, self.absent_pages) = (BTreeMap::new(), 0);
        let found = maps::node_bytes(starts);
        SAID.call_once(|| match &found {
            Ok(_) => {
                tracing::info!(%refusal, "move_pages is refused: the node reads the places of memory from /proc/self/numa_maps")
            }
            Err(error) => tracing::warn!(
                %refusal, %error,
                "the kernel does not say where memory is: allow move_pages in the container's seccomp profile"
            ),
        });
        if let Ok(bytes_on) = found {
            self.source = PlacementSource::Maps;
            self.pages_on = bytes_on.into_iter().map(|(node, bytes)| (node, bytes / PAGE_BYTES)).collect();
            self.absent_pages = (self.bytes / PAGE_BYTES).saturating_sub(self.pages_on.values().sum());
        }
    }

    /// Examined pages.
    pub fn sampled_pages(&self) -> u64 {
        self.pages_on.values().sum::<u64>() + self.absent_pages
    }

    /// Examined pages that are on another node than asked for, or nowhere.
    pub fn misplaced_pages(&self) -> u64 {
        let right = self.asked.map(|node| self.pages_on.get(&node).copied().unwrap_or(0));
        right.map_or(self.absent_pages, |right| self.sampled_pages() - right)
    }

    /// Bytes of the arena on NUMA node `node`, projected from the examined pages.
    pub fn bytes_on(&self, node: u32) -> u64 {
        self.projected(self.pages_on.get(&node).copied().unwrap_or(0))
    }

    /// Bytes of the arena on another node than asked for, or nowhere, projected likewise.
    pub fn misplaced_bytes(&self) -> u64 {
        self.projected(self.misplaced_pages())
    }

    /// Bytes in pages of 4 KiB.
    pub fn ordinary_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.huge_bytes).saturating_sub(self.transparent_bytes)
    }

    /// A summary for people: page sizes, amounts, places.
    pub fn summary(&self) -> String {
        let kinds = [
            (self.huge_bytes, "in reserved huge pages of 2 MiB"),
            (self.transparent_bytes, "in transparent huge pages of 2 MiB"),
            (self.ordinary_bytes(), "in pages of 4 KiB"),
        ];
        let kinds = kinds
            .iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, kind)| format!("{} {kind}", size(*bytes)));
        let nodes =
            self.pages_on.keys().map(|&node| format!("{} on NUMA node {node}", size(self.bytes_on(node))));
        let nodes: Vec<String> = nodes.collect();
        let places =
            if nodes.is_empty() { "the kernel does not say where".to_owned() } else { nodes.join(", ") };
        format!("{}; {places}", kinds.collect::<Vec<_>>().join(", "))
    }

    /// Advice for more huge pages; `None` if the whole arena has them.
    pub fn advice(&self, huge_pages: HugePages) -> Option<String> {
        if self.ordinary_bytes() == 0 {
            return None;
        }
        if huge_pages == HugePages::Never {
            return Some("set [host] huge_pages = \"auto\" to have huge pages".to_owned());
        }
        let pages = (self.bytes - self.huge_bytes).div_ceil(HUGE_PAGE_BYTES);
        let pool = self.asked.map_or_else(
            || "/proc/sys/vm/nr_hugepages".to_owned(),
            |node| format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages"),
        );
        Some(format!(
            "reserve {pages} more huge pages before the node starts (raise the number in {pool}), or let memory files have \
             transparent ones (write `advise` to /sys/kernel/mm/transparent_hugepage/shmem_enabled)"
        ))
    }

    pub(crate) fn warn_if_wrong(&self) {
        if self.misplaced_pages() > 0 {
            let (asked, sampled, misplaced) = (self.asked, self.sampled_pages(), self.misplaced_pages());
            tracing::warn!(asked, sampled, misplaced, on = ?self.pages_on, "some pages of the arena are not on the requested NUMA node");
        }
    }

    fn projected(&self, pages: u64) -> u64 {
        (u128::from(self.bytes) * u128::from(pages) / u128::from(self.sampled_pages().max(1))) as u64
    }
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// Pages examined in each extent: enough to notice that a NUMA node ran out of memory midway.
const SAMPLES_PER_EXTENT: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_elsewhere_are_misplaced_and_bytes_are_projected() {
        let mut placement = ArenaPlacement { bytes: 1000, asked: Some(1), ..ArenaPlacement::default() };
        placement.pages_on.extend([(0, 1), (1, 8)]);
        placement.absent_pages = 1;
        assert_eq!((placement.sampled_pages(), placement.misplaced_pages()), (10, 2));
        assert_eq!((placement.bytes_on(1), placement.bytes_on(0), placement.bytes_on(2)), (800, 100, 0));
        assert_eq!(placement.misplaced_bytes(), 200);
        assert_eq!(ArenaPlacement { asked: None, ..placement }.misplaced_pages(), 1);
        assert_eq!(ArenaPlacement { asked: Some(0), ..ArenaPlacement::default() }.misplaced_pages(), 0);
    }

    #[test]
    fn what_was_got_is_said_with_what_to_do_for_more() {
        let (mib, gib) = (1 << 20, 1 << 30);
        let mut got =
            ArenaPlacement { asked: Some(1), bytes: 4 * gib, huge_bytes: gib, ..ArenaPlacement::default() };
        got.transparent_bytes = 2 * gib;
        assert!(
            got.summary().ends_with("1.0 GiB in pages of 4 KiB; the kernel does not say where"),
            "{}",
            got.summary()
        );
        got.pages_on.extend([(0, 1), (1, 3)]);
        let expected = "1.0 GiB in reserved huge pages of 2 MiB, 2.0 GiB in transparent huge pages of 2 MiB, \
                        1.0 GiB in pages of 4 KiB; 1.0 GiB on NUMA node 0, 3.0 GiB on NUMA node 1";
        assert_eq!(got.summary(), expected);
        let advice = got.advice(HugePages::Auto).unwrap();
        assert!(
            advice.starts_with("reserve 1536 more huge pages before") && advice.contains("/node1/"),
            "{advice}"
        );
        assert!(got.advice(HugePages::Never).unwrap().contains("huge_pages = \"auto\""));
        got.huge_bytes = 2 * gib - mib;
        assert!(got.advice(HugePages::Auto).is_some());
        got.huge_bytes = 2 * gib;
        assert_eq!(got.advice(HugePages::Auto), None);
    }

    #[test]
    fn where_move_pages_is_refused_the_list_of_mappings_says_as_much() {
        let arena = crate::arena::tests::arena(2);
        let sampled = arena.placement();
        let starts = (0..2).map(|extent| arena.extent(extent).mapping().address() as u64).collect();
        let mut listed = ArenaPlacement { asked: Some(0), bytes: sampled.bytes, ..ArenaPlacement::default() };
        listed.read_maps(&starts, &io::ErrorKind::PermissionDenied.into());
        if listed.source == PlacementSource::Maps {
            assert_eq!((listed.bytes_on(0), listed.misplaced_pages()), (sampled.bytes_on(0), 0));
        }
    }
}
