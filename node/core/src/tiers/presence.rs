//! Remembers which objects the store has. Other nodes write and delete objects too.
//!
//! The memory is pure, and only a hint: a caller that trusts an outdated fact asks the store for an absent object, or writes a
//! present object again. An absence is remembered for [`ABSENT_FOR`] only, damage for [`DAMAGED_FOR`].

use std::time::Duration;

use std::hash::Hash;

use hashbrown::HashMap;

/// The known fact about one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fact {
    /// The object was written, read or found.
    Present,
    /// The object was not there a short time ago.
    Absent,
    /// The object's bytes are wrong: the next write replaces it.
    Damaged,
}

/// The facts about the most recent keys, in two generations of at most half of `most` facts each. When the younger is full, the
/// older is forgotten. A fact takes about 100 bytes.
#[derive(Debug)]
pub struct PresenceCache<K> {
    half: usize,
    lifetimes: Lifetimes,
    younger: HashMap<K, Remembered>,
    older: HashMap<K, Remembered>,
}

/// How long facts are believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    /// How long a presence is trusted: others may delete objects.
    pub present: Duration,
    /// How long an absence is trusted: others may write the object a moment later.
    pub absent: Duration,
    /// How long an object counts as damaged: a store that lost the right to decrypt refuses objects that are right, and a right
    /// object may come from another node.
    pub damaged: Duration,
}

/// A fact, and the time until which it is believed.
#[derive(Debug, Clone, Copy)]
struct Remembered {
    fact: Fact,
    until: Duration,
}

impl<K: Eq + Hash> PresenceCache<K> {
    /// Remembers at most `most` facts, and at least the latest half of them.
    pub fn new(most: usize, lifetimes: Lifetimes) -> Self {
        Self { half: (most / 2).max(1), lifetimes, younger: HashMap::new(), older: HashMap::new() }
    }

    /// The fact at `now`.
    pub fn get(&self, key: &K, now: Duration) -> Option<Fact> {
        let remembered = self.younger.get(key).or_else(|| self.older.get(key))?;
        (now < remembered.until).then_some(remembered.fact)
    }

    /// Learns a fact at `now`.
    pub fn set(&mut self, key: K, fact: Fact, now: Duration) {
        if self.younger.len() >= self.half && !self.younger.contains_key(&key) {
            self.older = std::mem::take(&mut self.younger);
        }
        let lifetime = match fact {
            Fact::Present => self.lifetimes.present,
            Fact::Absent => self.lifetimes.absent,
            Fact::Damaged => self.lifetimes.damaged,
        };
        let remembered = Remembered { fact, until: now.saturating_add(lifetime) };
        self.younger.insert(key, remembered);
    }

    /// Forgets the facts about these keys.
    pub fn forget(&mut self, is_one: impl Fn(&K) -> bool) {
        self.younger.retain(|key, _| !is_one(key));
        self.older.retain(|key, _| !is_one(key));
    }

    /// The number of remembered facts.
    pub fn len(&self) -> usize {
        self.younger.len() + self.older.len()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How long an absent object counts as absent: another node may write it a moment later.
pub const ABSENT_FOR: Duration = Duration::from_secs(10);

/// How long an object counts as damaged, or as refused by the store.
pub const DAMAGED_FOR: Duration = Duration::from_secs(600);

/// How long the tier's thread trusts its facts: a read notices that an object has gone.
pub const LIFETIMES: Lifetimes =
    Lifetimes { present: Duration::MAX, absent: ABSENT_FOR, damaged: DAMAGED_FOR };

#[cfg(test)]
mod tests {
    use larder_protocol::{ChunkHash, Fingerprint};

    use super::*;
    use crate::store::ids::ChunkKey;

    fn key(number: u8) -> ChunkKey {
        ChunkKey { fingerprint: Fingerprint([1; 32]), hash: ChunkHash([number; 32]) }
    }

    #[test]
    fn what_was_absent_is_asked_for_again_after_a_while_and_what_is_there_is_not() {
        let mut known = PresenceCache::new(10, LIFETIMES);
        known.set(key(1), Fact::Absent, Duration::ZERO);
        known.set(key(2), Fact::Present, Duration::ZERO);
        let before = ABSENT_FOR - Duration::from_millis(1);
        assert_eq!((known.get(&key(1), before), known.get(&key(1), ABSENT_FOR)), (Some(Fact::Absent), None));
        assert_eq!(known.get(&key(2), 100 * ABSENT_FOR), Some(Fact::Present));
    }

    #[test]
    fn the_cache_has_a_bound_and_always_keeps_the_recent_half() {
        let mut known = PresenceCache::new(20, LIFETIMES);
        for number in 0..200 {
            known.set(key(number), Fact::Present, Duration::ZERO);
            assert!(known.len() <= 20);
            for recent in number.saturating_sub(9)..=number {
                assert_eq!(known.get(&key(recent), Duration::ZERO), Some(Fact::Present));
            }
        }
    }
}
