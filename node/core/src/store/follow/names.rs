//! The names of a follow's chunks, by position and by name.

use larder_protocol::ChunkHash;

/// The hashes of chunks.
#[derive(Debug)]
pub(super) struct Names {
    hashes: Box<[ChunkHash]>,
    /// The positions in the order of their hashes.
    sorted: Box<[u32]>,
}

impl Names {
    pub(super) fn new(hashes: &[ChunkHash]) -> Self {
        let mut sorted: Box<[u32]> = (0..hashes.len() as u32).collect();
        sorted.sort_by_key(|&position| hashes[position as usize]);
        Self { hashes: hashes.into(), sorted }
    }

    /// All hashes, in order.
    pub(super) fn all(&self) -> &[ChunkHash] {
        &self.hashes
    }

    /// The positions of a chunk, in order. A peer may name a chunk twice.
    pub(super) fn positions(&self, hash: &ChunkHash) -> impl Iterator<Item = usize> {
        let at = |&position: &u32| position as usize;
        let first = self.sorted.partition_point(|position| self.hashes[at(position)] < *hash);
        self.sorted[first..].iter().map(at).take_while(move |&position| self.hashes[position] == *hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_at_all_its_positions() {
        let hashes = [7, 3, 9, 3].map(|byte| ChunkHash([byte; 32]));
        let names = Names::new(&hashes);
        let found = |byte| names.positions(&ChunkHash([byte; 32])).collect::<Vec<_>>();
        assert_eq!([7, 3, 9, 5, 200].map(found), [vec![0], vec![1, 3], vec![2], vec![], vec![]]);
        assert_eq!(names.all(), hashes);
    }
}
