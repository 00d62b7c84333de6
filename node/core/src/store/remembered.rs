//! The memory of evictions: when chunks left this node, by which rule, and their worth.
//!
//! An eviction takes 16 bytes and a few nanoseconds: it is only appended to a log of segments. A caller that asks why a chunk is
//! missing gets a [`RememberedEvictions`]. It shares the segments, so the caller can search it on another thread.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use larder_protocol::{ChunkHash, Fingerprint};

use super::Store;
use super::ids::ChunkId;
use super::index::OnDisk;
use crate::placement::{Saves, Worth};

/// Why a chunk left a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[repr(u8)]
pub enum EvictionRule {
    /// More was cached than the capacity or the high watermark allows.
    Watermark,
    /// A reservation found no free slot.
    Need,
    /// An extent was cleared for blocks of another size or tenant, or an unused model made way for a new one.
    Clearing,
    /// The disk had no room for it any more, could not read it, or was closed.
    Disk,
    /// The chunk moved to another actor, which keeps it.
    Moved,
    /// An admin had it purged, or its tenant left.
    Purged,
    /// The chunk's bytes were wrong.
    Damaged,
}

/// One eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RememberedEviction {
    /// The time, in tenths of a second since the node started.
    pub at_tenths: u32,
    /// The rule.
    pub rule: EvictionRule,
    /// The worth of the chunk at the time, to about seven digits.
    pub worth: Worth,
}

/// The last evictions of a store, shared with it.
#[derive(Debug, Clone, Default)]
pub struct RememberedEvictions {
    segments: Vec<Arc<[Entry]>>,
    newest: Vec<Entry>,
    /// The number of evictions before the first remembered eviction.
    forgotten: u64,
    is_cut: bool,
}

/// The evictions of some chunks, each with its number among the store's evictions.
#[derive(Debug)]
pub struct FoundEvictions(HashMap<u64, Vec<(u64, Entry)>>);

/// An eviction in 16 bytes.
#[derive(Debug, Clone, Copy)]
struct Entry {
    key: u64,
    at_tenths: u32,
    /// The worth as a float, its last three bits replaced by the rule.
    worth_and_rule: u32,
}

/// The last evictions.
#[derive(Debug, Clone)]
pub(super) struct EvictionMemory {
    full: VecDeque<Arc<[Entry]>>,
    newest: Vec<Entry>,
    /// Entries of a segment.
    segment: usize,
    /// Segments that are kept, the newest included.
    most_segments: usize,
    forgotten: u64,
    /// Whether an earlier life of the store ended: its chunks are not remembered as evicted.
    has_died: bool,
}

impl EvictionRule {
    /// The rule's name in answers and on the command line.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    const ALL: [Self; 7] =
        [Self::Watermark, Self::Need, Self::Clearing, Self::Disk, Self::Moved, Self::Purged, Self::Damaged];
}

impl Entry {
    fn new(key: u64, at_tenths: u32, rule: EvictionRule, Worth(worth): Worth) -> Self {
        let worth_and_rule = ((worth as f32).to_bits() & !RULE_BITS) | rule as u32;
        Self { key, at_tenths, worth_and_rule }
    }

    fn eviction(self) -> RememberedEviction {
        let rule = (self.worth_and_rule & RULE_BITS) as usize;
        RememberedEviction {
            at_tenths: self.at_tenths,
            // Only rules of this list were written.
            rule: EvictionRule::ALL.get(rule).copied().unwrap_or(EvictionRule::Watermark),
            worth: Worth(f32::from_bits(self.worth_and_rule & !RULE_BITS) as u64),
        }
    }
}

impl EvictionMemory {
    /// Remembers at most `most` evictions, in memory that grows with them.
    pub(super) fn new(most: usize) -> Self {
        let segment = (most / 2).clamp(1, MOST_SEGMENT);
        Self {
            full: VecDeque::new(),
            newest: Vec::new(),
            segment,
            most_segments: most / segment,
            forgotten: 0,
            has_died: false,
        }
    }

    /// The memory for the next life of the store.
    pub(super) fn after(&self) -> Self {
        Self { has_died: true, ..self.clone() }
    }

    fn note(&mut self, entry: Entry) {
        if self.most_segments == 0 {
            self.forgotten += 1;
            return;
        }
        if self.newest.len() == self.segment {
            let full = std::mem::take(&mut self.newest);
            self.full.push_back(full.into());
            if self.full.len() == self.most_segments
                && let Some(oldest) = self.full.pop_front()
            {
                self.forgotten += oldest.len() as u64;
            }
            self.newest.reserve_exact(self.segment);
        }
        self.newest.push(entry);
    }

    fn so_far(&self) -> u64 {
        self.forgotten + (self.full.len() * self.segment + self.newest.len()) as u64
    }

    fn snapshot(&self) -> RememberedEvictions {
        RememberedEvictions {
            segments: self.full.iter().cloned().collect(),
            newest: self.newest.clone(),
            forgotten: self.forgotten,
            is_cut: self.forgotten > 0 || self.has_died,
        }
    }

    fn bytes(&self) -> u64 {
        ((self.full.len() * self.segment + self.newest.capacity()) * size_of::<Entry>()) as u64
    }
}

impl FoundEvictions {
    /// The last eviction of a chunk among the first `before` of the store, and no later than a time.
    pub fn last(
        &self,
        fingerprint: &Fingerprint,
        hash: &ChunkHash,
        before: u64,
        until_tenths: u32,
    ) -> Option<RememberedEviction> {
        let evictions = self.0.get(&key_of(fingerprint, hash))?.iter().rev();
        let mut earlier = evictions.filter(|(number, at)| *number < before && at.at_tenths <= until_tenths);
        earlier.next().map(|(_, entry)| entry.eviction())
    }
}

impl RememberedEvictions {
    /// Whether chunks may have left without a remembered eviction: some evictions are forgotten, or an earlier life of the store
    /// ended.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// The last eviction of each of these chunks of a namespace, by place in `hashes`: among the first `before` evictions of the
    /// store ([`Store::evictions_so_far`]), and no later than a time.
    ///
    /// This reads the whole memory: a million evictions take some milliseconds.
    pub fn last(
        &self,
        fingerprint: &Fingerprint,
        hashes: &[ChunkHash],
        before: u64,
        until_tenths: u32,
    ) -> Vec<Option<RememberedEviction>> {
        let found = self.search(hashes.iter().map(|hash| (fingerprint, hash)));
        hashes.iter().map(|hash| found.last(fingerprint, hash, before, until_tenths)).collect()
    }

    /// All evictions of these chunks. This reads the memory once, for any number of chunks.
    pub fn search<'a>(
        &self,
        chunks: impl IntoIterator<Item = (&'a Fingerprint, &'a ChunkHash)>,
    ) -> FoundEvictions {
        let keys = chunks.into_iter().map(|(fingerprint, hash)| (key_of(fingerprint, hash), Vec::new()));
        let mut found: HashMap<u64, Vec<(u64, Entry)>> = keys.collect();
        if !found.is_empty() {
            let entries = self.segments.iter().flat_map(|segment| segment.iter()).chain(&self.newest);
            for (number, entry) in (self.forgotten..).zip(entries) {
                if let Some(evictions) = found.get_mut(&entry.key) {
                    evictions.push((number, *entry));
                }
            }
        }
        FoundEvictions(found)
    }
}

impl Store {
    /// The last evictions.
    pub fn remembered_evictions(&self) -> RememberedEvictions {
        self.remembered.snapshot()
    }

    /// Evictions that were noted so far, remembered or not.
    pub fn evictions_so_far(&self) -> u64 {
        self.remembered.so_far()
    }

    /// Bytes of the memory of evictions.
    pub fn remembered_bytes(&self) -> u64 {
        self.remembered.bytes()
    }

    /// Remembers that a readable chunk leaves the node.
    pub(super) fn remember(&mut self, id: ChunkId, rule: EvictionRule) {
        let chunk = self.index.get(id);
        let idle_ms = self.age_ms().saturating_sub(self.used_ms(chunk.used));
        let saves =
            if chunk.is_copy() || chunk.disk != OnDisk::Nowhere { Saves::Transfer } else { Saves::Prefill };
        let worth = self.stake(chunk.namespace).worth(saves, idle_ms);
        let key = key_of(&self.namespaces.get(chunk.namespace).fingerprint, &chunk.hash);
        self.remembered.note(Entry::new(key, self.tenths, rule, worth));
    }
}

/// The log's key of a chunk. Two of many millions of chunks may share a key. Then a reader may see the other chunk's eviction,
/// but nothing else goes wrong.
fn key_of(Fingerprint(namespace): &Fingerprint, hash: &ChunkHash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *namespace;
    hash.short() ^ u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The most entries of a segment. A snapshot copies at most one segment.
const MOST_SEGMENT: usize = 4_096;

/// The bits of an entry's worth that stand for its rule.
const RULE_BITS: u32 = 0b111;

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: Fingerprint = Fingerprint([7; 32]);

    fn hash(number: u64) -> ChunkHash {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        ChunkHash(hash)
    }

    fn noted(memory: &mut EvictionMemory, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            let key = key_of(&NAMESPACE, &hash(number));
            memory.note(Entry::new(key, number as u32, EvictionRule::Need, Worth(number * 1_000)));
        }
    }

    #[test]
    fn an_eviction_takes_sixteen_bytes_and_keeps_its_rule_and_worth() {
        assert_eq!(size_of::<Entry>(), 16);
        for rule in EvictionRule::ALL {
            for worth in [0, 1, 32_768_000_000, u64::MAX / 4] {
                let eviction = Entry::new(1, 2, rule, Worth(worth)).eviction();
                assert_eq!((eviction.rule, eviction.at_tenths), (rule, 2));
                assert!(eviction.worth.0.abs_diff(worth) as f64 <= worth as f64 * 1e-6, "{worth}");
            }
        }
    }

    #[test]
    fn the_oldest_are_forgotten_and_the_memory_is_bounded() {
        let mut memory = EvictionMemory::new(8);
        noted(&mut memory, 0..8);
        assert!(!memory.snapshot().is_cut());
        noted(&mut memory, 8..100);
        let evictions = memory.snapshot();
        assert!(evictions.is_cut() && memory.bytes() <= 8 * 16);
        let last = evictions.last(&NAMESPACE, &[hash(3), hash(99)], memory.so_far(), u32::MAX);
        assert_eq!(last[0], None);
        assert_eq!(last[1].unwrap().at_tenths, 99);
        assert_eq!(memory.so_far(), 100);
    }

    #[test]
    fn of_several_evictions_the_last_before_the_question_counts() {
        let mut memory = EvictionMemory::new(100);
        noted(&mut memory, [5]);
        let before = memory.so_far();
        memory.note(Entry::new(key_of(&NAMESPACE, &hash(5)), 9, EvictionRule::Purged, Worth(1)));
        let evictions = memory.snapshot();
        let rule = |before| evictions.last(&NAMESPACE, &[hash(5)], before, u32::MAX)[0].map(|one| one.rule);
        assert_eq!(
            [rule(0), rule(before), rule(before + 1)],
            [None, Some(EvictionRule::Need), Some(EvictionRule::Purged)]
        );
        assert_eq!(
            evictions.last(&Fingerprint([8; 32]), &[hash(5)], 9, u32::MAX),
            [None],
            "another namespace"
        );
    }

    #[test]
    fn a_memory_of_nothing_remembers_nothing() {
        let mut memory = EvictionMemory::new(0);
        noted(&mut memory, 0..3);
        assert_eq!((memory.bytes(), memory.so_far(), memory.snapshot().is_cut()), (0, 3, true));
    }
}
