//! What a node knows of the objects in the store, which others write and delete too.
//!
//! Pure, and a hint: who trusts it too much asks the store for something that is not there, or writes what is.

use std::time::Duration;

use hashbrown::HashMap;

use crate::disk::ChunkKey;

/// What is known of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fact {
    /// It was written, read or found.
    Present,
    /// It was not there, not long ago.
    Absent,
    /// Its object is wrong: the next write replaces it.
    Damaged,
}

/// What is known of the most recent chunks, in two generations of at most half of `most` each: when the younger is
/// full, the older is forgotten. About 100 bytes a chunk.
#[derive(Debug)]
pub struct Known {
    half: usize,
    younger: HashMap<ChunkKey, Remembered>,
    older: HashMap<ChunkKey, Remembered>,
}

#[derive(Debug, Clone, Copy)]
enum Remembered {
    Present,
    AbsentUntil(Duration),
    Damaged,
}

impl Known {
    /// Remembers at most `most` chunks, and at least half as many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { half: (most / 2).max(1), younger: HashMap::new(), older: HashMap::new() }
    }

    /// What is known at `now`.
    #[must_use]
    pub fn get(&self, key: &ChunkKey, now: Duration) -> Option<Fact> {
        match *self.younger.get(key).or_else(|| self.older.get(key))? {
            Remembered::Present => Some(Fact::Present),
            Remembered::Damaged => Some(Fact::Damaged),
            Remembered::AbsentUntil(until) => (now < until).then_some(Fact::Absent),
        }
    }

    /// Learns something at `now`.
    pub fn set(&mut self, key: ChunkKey, fact: Fact, now: Duration) {
        if self.younger.len() >= self.half && !self.younger.contains_key(&key) {
            self.older = std::mem::take(&mut self.younger);
        }
        let remembered = match fact {
            Fact::Present => Remembered::Present,
            Fact::Absent => Remembered::AbsentUntil(now + ABSENT_FOR),
            Fact::Damaged => Remembered::Damaged,
        };
        self.younger.insert(key, remembered);
    }

    /// Chunks that are remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.younger.len() + self.older.len()
    }

    /// Whether nothing is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How long what was not there is taken to be absent still: another node may have written it a moment later.
pub const ABSENT_FOR: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use larder_protocol::{ChunkHash, Fingerprint};

    use super::*;

    fn key(number: u8) -> ChunkKey {
        ChunkKey { fingerprint: Fingerprint([1; 32]), hash: ChunkHash([number; 32]) }
    }

    #[test]
    fn what_was_absent_is_asked_for_again_after_a_while_and_what_is_there_is_not() {
        let mut known = Known::new(10);
        known.set(key(1), Fact::Absent, Duration::ZERO);
        known.set(key(2), Fact::Present, Duration::ZERO);
        let before = ABSENT_FOR - Duration::from_millis(1);
        assert_eq!((known.get(&key(1), before), known.get(&key(1), ABSENT_FOR)), (Some(Fact::Absent), None));
        assert_eq!(known.get(&key(2), 100 * ABSENT_FOR), Some(Fact::Present));
    }

    #[test]
    fn it_never_remembers_more_than_it_may_and_the_recent_half_for_certain() {
        let mut known = Known::new(20);
        for number in 0..200 {
            known.set(key(number), Fact::Present, Duration::ZERO);
            assert!(known.len() <= 20);
            for recent in number.saturating_sub(9)..=number {
                assert_eq!(known.get(&key(recent), Duration::ZERO), Some(Fact::Present));
            }
        }
    }
}
