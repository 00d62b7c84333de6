//! A byte that changes in a node's arena behind its back.

use std::fs::{File, OpenOptions, read_to_string};
use std::os::unix::fs::FileExt;

use anyhow::Context as _;

/// Flips one bit in every page of the arena of the node process `pid`; how many pages that were. The node's own mapping
/// is the only writable one, so this goes through its memory as a debugger would.
///
/// # Errors
/// Where the process cannot be written to, or has no arena.
pub fn flip_a_bit_in_every_page(pid: u32) -> anyhow::Result<usize> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let maps = read_to_string(format!("/proc/{pid}/maps"))?;
    let mut flipped = 0;
    for line in maps.lines().filter(|line| line.contains("memfd:larder-arena")) {
        let (start, end) =
            line.split_once(' ').and_then(|(range, _)| range.split_once('-')).context("a range")?;
        let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
        for page in (start..end).step_by(4_096) {
            flip(&memory, page + 1_234)?;
            flipped += 1;
        }
    }
    anyhow::ensure!(flipped > 0, "the process has no arena");
    Ok(flipped)
}

fn flip(memory: &File, address: u64) -> anyhow::Result<()> {
    let mut byte = [0];
    memory.read_exact_at(&mut byte, address)?;
    byte[0] ^= 0x10;
    memory.write_all_at(&byte, address)?;
    Ok(())
}
