//! How often a node reads chunks that others hold: the time between its reads of each chunk.
//!
//! Two generations bound the memory: while the younger fills, the older is kept.

use std::collections::HashMap;

use larder_protocol::ChunkHash;

/// The reads of an actor from other actors. Takes about 40 bytes for each chunk.
#[derive(Debug)]
pub struct Gaps {
    most: usize,
    young: HashMap<u64, Read>,
    old: HashMap<u64, Read>,
}

#[derive(Debug, Clone, Copy)]
struct Read {
    at_ms: u64,
    /// The mean time between the chunk's reads; 0 after its first read.
    gap_ms: u64,
}

impl Gaps {
    /// Remembers at least the last `most` chunks, and at most twice as many.
    pub fn new(most: usize) -> Self {
        Self { most: most.max(1), young: HashMap::new(), old: HashMap::new() }
    }

    /// Notes a read. Returns the mean time between the reads of the chunk, in which the last reads count most. `None` for a first
    /// read.
    pub fn read(&mut self, chunk: &ChunkHash, now_ms: u64) -> Option<u64> {
        let short = chunk.short();
        let last = self.young.get(&short).or_else(|| self.old.get(&short)).copied();
        let gap_ms = last.map(|last| {
            let gap_ms = now_ms.saturating_sub(last.at_ms).max(1);
            if last.gap_ms == 0 { gap_ms } else { last.gap_ms.midpoint(gap_ms).max(1) }
        });
        if self.young.len() >= self.most && !self.young.contains_key(&short) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(short, Read { at_ms: now_ms, gap_ms: gap_ms.unwrap_or(0) });
        gap_ms
    }

    /// Chunks that are remembered; some may count twice.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether nothing was read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for Gaps {
    fn default() -> Self {
        Self::new(REMEMBERED_CHUNKS)
    }
}

/// Chunks whose reads are remembered. A chunk that is read often is read again long before so many other chunks were read.
const REMEMBERED_CHUNKS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(number: u64) -> ChunkHash {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        ChunkHash(bytes)
    }

    #[test]
    fn the_first_read_has_no_gap_and_the_last_gaps_count_most() {
        let mut gaps = Gaps::new(8);
        assert_eq!(gaps.read(&chunk(1), 1_000), None);
        assert_eq!(gaps.read(&chunk(1), 3_000), Some(2_000));
        assert_eq!(gaps.read(&chunk(1), 4_000), Some(1_500));
        assert_eq!(gaps.read(&chunk(2), 4_000), None);
        assert_eq!(gaps.read(&chunk(2), 4_000), Some(1), "no gap is 0");
    }

    #[test]
    fn as_many_chunks_are_remembered_as_promised_and_no_more_than_twice_as_many() {
        let mut gaps = Gaps::new(100);
        for number in 0..1_000 {
            assert_eq!(gaps.read(&chunk(number), number), None);
            assert!(gaps.len() <= 200);
        }
        assert!((900..1_000).all(|number| gaps.read(&chunk(number), 2_000).is_some()));
        assert_eq!(gaps.read(&chunk(3), 2_000), None);
    }
}
