//! Which nodes hold which block.

use larder_protocol::ChunkHash;

use super::node::Node;

/// Nodes that fit into one row.
pub(super) const MAX_NODES: usize = 64;

/// One row per block: the nodes that held it at the last look, one bit each.
///
/// A store does not report evictions; a row is compared with the stores whenever it is read, and so is exact.
#[derive(Debug)]
pub(super) struct Directory {
    rows: Vec<u64>,
}

impl Directory {
    /// Nobody holds anything.
    pub(super) fn new(blocks: u64) -> Self {
        Self { rows: vec![0; blocks as usize] }
    }

    /// A node holds a block from now on.
    pub(super) fn add(&mut self, block: u32, node: usize) {
        self.rows[block as usize] |= 1 << node;
    }

    /// The nodes that hold a block.
    pub(super) fn holders(&mut self, block: u32, hashes: &[ChunkHash], nodes: &[Node]) -> u64 {
        let hash = &hashes[block as usize];
        let row = &mut self.rows[block as usize];
        *row = members(*row).filter(|&node| nodes[node].holds(hash)).fold(0, |row, node| row | 1 << node);
        *row
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

/// The first of these nodes that is in a set; else the set's first.
///
/// # Panics
/// Panics if the set is empty.
pub(super) fn prefer(set: u64, wanted: [Option<usize>; 2]) -> usize {
    assert!(set != 0, "nobody is in the set");
    let wanted = wanted.into_iter().flatten().find(|node| set >> node & 1 == 1);
    wanted.unwrap_or(set.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_have_the_members_they_should_up_to_the_last_bit() {
        assert_eq!(members(all(3)).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(members(all(MAX_NODES)).count(), MAX_NODES);
        assert_eq!(prefer(0b1010, [Some(0), Some(3)]), 3);
        assert_eq!(prefer(0b1010, [None, Some(2)]), 1);
    }
}
