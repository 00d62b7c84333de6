//! Reads the kernel's lists of this process's mappings.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// Bytes in transparent huge pages of the mappings that begin at `starts`, as `/proc/self/smaps` says.
pub(super) fn transparent_bytes(starts: &BTreeSet<u64>) -> io::Result<u64> {
    transparent_bytes_in(BufReader::new(File::open("/proc/self/smaps")?), starts)
}

/// Bytes on each NUMA node of the mappings that begin at `starts`, as `/proc/self/numa_maps` says.
pub(super) fn node_bytes(starts: &BTreeSet<u64>) -> io::Result<BTreeMap<u32, u64>> {
    node_bytes_in(BufReader::new(File::open("/proc/self/numa_maps")?), starts)
}

/// Reads `smaps`: each mapping has a line that begins with `START-END`, then one line for each number.
fn transparent_bytes_in(smaps: impl BufRead, starts: &BTreeSet<u64>) -> io::Result<u64> {
    let (mut is_ours, mut bytes) = (false, 0);
    for line in smaps.lines() {
        let line = line?;
        let start = line.split_once('-').and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
        if let Some(start) = start {
            is_ours = starts.contains(&start);
        } else if is_ours && let Some(kibibytes) = line.strip_prefix("ShmemPmdMapped:") {
            let number = kibibytes.trim().trim_end_matches("kB").trim().parse::<u64>();
            bytes += number.unwrap_or(0) * 1024;
        }
    }
    Ok(bytes)
}

/// Reads `numa_maps`: each mapping has one line, `START POLICY file=... N0=PAGES N1=PAGES kernelpagesize_kB=SIZE`.
fn node_bytes_in(numa_maps: impl BufRead, starts: &BTreeSet<u64>) -> io::Result<BTreeMap<u32, u64>> {
    let mut bytes = BTreeMap::new();
    for line in numa_maps.lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let start = words.next().and_then(|start| u64::from_str_radix(start, 16).ok());
        if !start.is_some_and(|start| starts.contains(&start)) {
            continue;
        }
        let pairs: Vec<(&str, u64)> = words
            .filter_map(|word| word.split_once('=').and_then(|(key, n)| Some((key, n.parse().ok()?))))
            .collect();
        let page = pairs.iter().find(|(key, _)| *key == "kernelpagesize_kB").map_or(4, |(_, size)| *size);
        for (key, pages) in pairs {
            if let Some(node) = key.strip_prefix('N').and_then(|node| node.parse().ok()) {
                *bytes.entry(node).or_default() += pages * page * 1024;
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_asked_mappings_count() {
        let smaps = "7f00-8f00 rw-s 0 00:01 5 /memfd:larder-arena (deleted)\nSize: 4 kB\nShmemPmdMapped:     2048 kB\n\
                     VmFlags: rd wr\na000-b000 rw-s 0 00:01 6 /memfd:x\nShmemPmdMapped: 4096 kB\n";
        assert_eq!(transparent_bytes_in(smaps.as_bytes(), &[0x7f00].into()).unwrap(), 2 << 20);
        let numa_maps = "7f00 bind:1 file=/memfd:larder-arena\\040(deleted) dirty=5 N0=1 N1=4 kernelpagesize_kB=2048\n\
                         8000 default N0=7\na000 default file=/x anon=3 N1=512 kernelpagesize_kB=4\n";
        let found = node_bytes_in(numa_maps.as_bytes(), &[0x7f00, 0xa000].into()).unwrap();
        assert_eq!(found, [(0, 2 << 20), (1, 10 << 20)].into());
    }

    #[test]
    fn the_kernel_of_this_machine_lists_mappings() {
        assert_eq!(transparent_bytes(&BTreeSet::new()).unwrap(), 0);
    }
}
