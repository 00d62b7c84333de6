//! The nodes that hold each block.

use std::collections::HashMap;

use larder_protocol::ChunkHash;

/// Nodes that fit into one row.
pub(super) const MAX_NODES: usize = 64;

/// One row for each block: the nodes that announced it, one bit for each node.
#[derive(Debug)]
pub(super) struct Directory {
    rows: Vec<u64>,
    numbers: HashMap<ChunkHash, u32>,
}

impl Directory {
    /// A directory in which nobody holds any of these blocks.
    pub(super) fn new(hashes: &[ChunkHash]) -> Self {
        let numbers = (0..).zip(hashes).map(|(number, &hash)| (hash, number)).collect();
        Self { rows: vec![0; hashes.len()], numbers }
    }

    /// Notes that a node has gained or lost a block.
    pub(super) fn set(&mut self, hash: &ChunkHash, node: usize, is_held: bool) {
        if let Some(&block) = self.numbers.get(hash) {
            let row = &mut self.rows[block as usize];
            *row = *row & !(1 << node) | u64::from(is_held) << node;
        }
    }

    /// The nodes that hold a block.
    pub(super) fn holders(&self, block: u32) -> u64 {
        self.rows[block as usize]
    }
}

/// The set of all `nodes` nodes.
pub(super) fn all(nodes: usize) -> u64 {
    u64::MAX >> (MAX_NODES - nodes)
}

/// The nodes of a set, in order.
pub(super) fn members(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let first = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_the_members_they_should_up_to_the_last_bit() {
        assert_eq!(members(all(3)).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(members(all(MAX_NODES)).count(), MAX_NODES);
    }

    #[test]
    fn a_row_has_the_nodes_that_told_so_last() {
        let hashes = [ChunkHash([1; 32]), ChunkHash([2; 32])];
        let mut directory = Directory::new(&hashes);
        directory.set(&hashes[1], 63, true);
        directory.set(&hashes[1], 0, true);
        directory.set(&hashes[1], 0, false);
        directory.set(&ChunkHash([9; 32]), 0, true);
        assert_eq!((directory.holders(0), directory.holders(1)), (0, 1 << 63));
    }
}
