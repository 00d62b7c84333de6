//! Which chunks are worth a write to disk: most are used once, and drives wear.

use std::collections::HashSet;

use larder_protocol::ChunkHash;

/// `write_through_selective`: a chunk is written from its second use on, or where its parent is on disk already.
///
/// Uses are remembered for longer than chunks stay in memory, in two generations of at most `most` chunks each: when the
/// younger is full, the older is forgotten. Takes about 16 bytes a remembered chunk.
#[derive(Debug)]
pub struct Admission {
    most: usize,
    younger: HashSet<u64>,
    older: HashSet<u64>,
}

/// What is known of a chunk's parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parent {
    /// Its record is on disk.
    OnDisk,
    /// It has none on disk, or none at all.
    Elsewhere,
}

impl Admission {
    /// Remembers at least the last `most` chunks that were used, at most twice as many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), younger: HashSet::new(), older: HashSet::new() }
    }

    /// Notes a use (a commit or a hit) of a chunk; whether it is worth writing now.
    ///
    /// `uses` is how many uses the caller knows of besides, for instance of a chunk's life in memory.
    pub fn used(&mut self, chunk: &ChunkHash, uses: u32, parent: Parent) -> bool {
        let short = chunk.short();
        let was_used = self.younger.contains(&short) || self.older.contains(&short);
        if self.younger.len() >= self.most {
            self.older = std::mem::take(&mut self.younger);
        }
        self.younger.insert(short);
        is_worth_writing(uses.saturating_add(1 + u32::from(was_used)), parent)
    }
}

/// Whether a chunk that was used `uses` times is worth writing.
#[must_use]
pub fn is_worth_writing(uses: u32, parent: Parent) -> bool {
    uses >= MIN_USES || parent == Parent::OnDisk
}

/// Uses from which on a chunk is worth writing.
pub const MIN_USES: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(number: u64) -> ChunkHash {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChunkHash(bytes)
    }

    #[test]
    fn a_chunk_is_written_from_its_second_use_on() {
        let mut admission = Admission::new(10);
        assert!(!admission.used(&chunk(1), 0, Parent::Elsewhere));
        assert!(admission.used(&chunk(1), 0, Parent::Elsewhere));
        assert!(admission.used(&chunk(2), 1, Parent::Elsewhere), "the caller knew of another use");
    }

    #[test]
    fn a_chunk_follows_its_parent_to_disk() {
        assert!(Admission::new(10).used(&chunk(1), 0, Parent::OnDisk));
    }

    #[test]
    fn uses_are_remembered_for_as_many_chunks_as_promised_and_no_more_than_twice_as_many() {
        let mut admission = Admission::new(100);
        for number in 0..1_000 {
            assert!(!admission.used(&chunk(number), 0, Parent::Elsewhere));
            assert!(admission.younger.len() + admission.older.len() <= 200);
        }
        assert!((900..1_000).all(|number| admission.used(&chunk(number), 0, Parent::Elsewhere)));
        assert!(!admission.used(&chunk(3), 0, Parent::Elsewhere));
    }
}
