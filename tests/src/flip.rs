//! Bytes that change in a node's arena behind its back.

use std::fs::{File, OpenOptions, read_to_string};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::Context as _;

/// Flips one bit in every page of the arena of the node process `pid`. Returns the number of pages. The node's own mapping is the
/// only writable one, so this writes to the process's memory as a debugger would.
///
/// # Errors
/// Fails if the process cannot be written to, or has no arena.
pub fn flip_a_bit_in_every_page(pid: u32) -> anyhow::Result<usize> {
    let arena = Arena::of(pid)?;
    let mut flipped = 0;
    for page in arena.pages() {
        flip(&arena.memory, page + 1_234)?;
        flipped += 1;
    }
    Ok(flipped)
}

/// Writes `with` over every block in the arena of the node process `pid` that begins with the bytes `block`, at most a page.
/// Returns the number of replaced blocks.
///
/// # Errors
/// Fails if the process cannot be written to, has no arena, or no such block is there.
pub fn replace_block(pid: u32, block: &[u8], with: &[u8]) -> anyhow::Result<usize> {
    let arena = Arena::of(pid)?;
    let mut replaced = 0;
    let mut found = vec![0; block.len()];
    for page in arena.pages() {
        arena.memory.read_exact_at(&mut found, page)?;
        if found == block {
            arena.memory.write_all_at(with, page)?;
            replaced += 1;
        }
    }
    anyhow::ensure!(replaced > 0, "the arena has no such block");
    Ok(replaced)
}

/// The memory of a process, and the place of its arena in this memory.
struct Arena {
    memory: File,
    ranges: Vec<Range<u64>>,
}

impl Arena {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let maps = read_to_string(format!("/proc/{pid}/maps"))?;
        let mut ranges = Vec::new();
        for line in maps.lines().filter(|line| line.contains("memfd:larder-arena")) {
            let (start, end) = line
                .split_once(' ')
                .and_then(|(range, _)| range.split_once('-'))
                .context("the line has no range of addresses")?;
            ranges.push(u64::from_str_radix(start, 16)?..u64::from_str_radix(end, 16)?);
        }
        anyhow::ensure!(!ranges.is_empty(), "the process has no arena");
        Ok(Self { memory, ranges })
    }

    fn pages(&self) -> impl Iterator<Item = u64> {
        self.ranges.iter().flat_map(|range| range.clone().step_by(4_096))
    }
}

fn flip(memory: &File, address: u64) -> anyhow::Result<()> {
    let mut byte = [0];
    memory.read_exact_at(&mut byte, address)?;
    byte[0] ^= 0x10;
    memory.write_all_at(&byte, address)?;
    Ok(())
}
