//! Decides which chunks are worth a write to disk: most chunks are used once, and writes wear out drives.

use std::collections::HashMap;

use larder_protocol::ChunkHash;

/// Counts the uses of chunks, also of chunks that have left memory.
///
/// It has two generations of at most `most` chunks each: when the younger is full, the older is forgotten. A remembered chunk
/// takes about 24 bytes.
#[derive(Debug)]
pub(super) struct Admission {
    most: usize,
    after_uses: u32,
    younger: HashMap<u64, u32>,
    older: HashMap<u64, u32>,
}

impl Admission {
    /// Remembers the last `most` used chunks at least, and twice as many at most. A chunk that was used `after_uses` times is
    /// worth writing.
    pub(super) fn new(most: usize, after_uses: u32) -> Self {
        Self { most: most.max(1), after_uses, younger: HashMap::new(), older: HashMap::new() }
    }

    /// Whether a chunk was used often enough.
    pub(super) fn is_worth_writing(&self, chunk: &ChunkHash) -> bool {
        self.uses(chunk) >= self.after_uses
    }

    /// Notes a use (a commit or a hit) of a chunk; returns whether the chunk is worth writing now.
    pub(super) fn used(&mut self, chunk: &ChunkHash) -> bool {
        let short = chunk.short();
        let uses = self.uses(chunk) + 1;
        if self.younger.len() >= self.most && !self.younger.contains_key(&short) {
            self.older = std::mem::take(&mut self.younger);
        }
        self.younger.insert(short, uses);
        uses >= self.after_uses
    }

    fn uses(&self, chunk: &ChunkHash) -> u32 {
        let short = chunk.short();
        self.younger.get(&short).or_else(|| self.older.get(&short)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(number: u64) -> ChunkHash {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChunkHash(bytes)
    }

    #[test]
    fn a_chunk_is_worth_writing_from_the_use_on_that_was_asked_for() {
        for after_uses in 1..5 {
            let mut admission = Admission::new(10, after_uses);
            let worth: Vec<bool> = (0..5).map(|_| admission.used(&chunk(1))).collect();
            assert_eq!(worth, (1..=5).map(|uses| uses >= after_uses).collect::<Vec<_>>());
            assert!(admission.is_worth_writing(&chunk(1)) && !admission.is_worth_writing(&chunk(2)));
        }
    }

    #[test]
    fn uses_are_remembered_for_as_many_chunks_as_promised_and_no_more_than_twice_as_many() {
        let mut admission = Admission::new(100, 2);
        for number in 0..1_000 {
            assert!(!admission.used(&chunk(number)));
            assert!(admission.younger.len() + admission.older.len() <= 200);
        }
        assert!((900..1_000).all(|number| admission.used(&chunk(number))));
        assert!(!admission.used(&chunk(3)));
    }
}
