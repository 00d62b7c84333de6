//! Growing runs: groups of consecutive chunks of a chain that share a home.
//!
//! The runs of a chain are chunks 0; 1-7; 8-63; 64-127; 128-191; ... Growing runs spread the branches behind one system prompt
//! over many homes. A lookup of an ordinary prompt asks three homes.

/// The longest run, in chunks.
pub const LONGEST_RUN: u32 = 64;

/// The index of the first chunk (the anchor) of the run that holds chunk `index`.
#[must_use]
pub fn run_start(index: u32) -> u32 {
    match index {
        0 => 0,
        1..LONGEST_RUN => 1 << (index.ilog2() / 3 * 3),
        _ => index - index % LONGEST_RUN,
    }
}

/// The index of the run's first chunk in version 1. Its runs are the chunks 0; 1; 2-3; 4-7; 8-15; 16-31; 32-47; ...
#[must_use]
pub fn run_start_before(index: u32) -> u32 {
    match index {
        0 | 1 => index,
        2..16 => 1 << index.ilog2(),
        _ => index - index % 16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_grow_as_documented() {
        let starts: Vec<u32> = (0..200).filter(|&i| run_start(i) == i).collect();
        assert_eq!(starts, [0, 1, 8, 64, 128, 192]);
        assert!((0..10_000).all(|i| run_start(run_start(i)) == run_start(i) && run_start(i) <= i));
        assert_eq!(run_start(u32::MAX), u32::MAX - 63);
        let before: Vec<u32> = (0..50).filter(|&i| run_start_before(i) == i).collect();
        assert_eq!(before, [0, 1, 2, 4, 8, 16, 32, 48]);
    }
}
