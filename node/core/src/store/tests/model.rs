//! The model that random histories are compared with: the same rules, in the simplest and slowest form.

use std::collections::{BTreeMap, BTreeSet};

use crate::store::policy::PolicyName;

/// Chunks by the word that names them; every prefix of a word is its ancestor.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) chunks: BTreeMap<String, ModelChunk>,
    pub(super) slots: usize,
    pub(super) quarantined_slots: usize,
    pub(super) capacity: usize,
    pub(super) policy: PolicyName,
    /// The words that the store has after the step. Where the model cannot predict the policy, the words missing here were
    /// evicted.
    pub(super) present: BTreeSet<String>,
    stamp: u64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct ModelChunk {
    pub(super) cached: bool,
    pub(super) claims: u32,
    pub(super) pins: u32,
    stamp: u64,
}

impl Model {
    pub(super) fn new(slots: usize, capacity: usize, policy: PolicyName) -> Self {
        Self {
            chunks: BTreeMap::new(),
            slots,
            quarantined_slots: 0,
            capacity,
            policy,
            present: BTreeSet::new(),
            stamp: 0,
        }
    }

    /// Chunks of the longest prefix of `word` that is cached.
    pub(super) fn prefix(&self, word: &str) -> Vec<String> {
        let cached = |word: &String| self.chunks.get(word).is_some_and(|chunk| chunk.cached);
        prefixes(word).into_iter().take_while(cached).collect()
    }

    pub(super) fn lease(&mut self, word: &str) -> Vec<String> {
        let leased = self.prefix(word);
        for word in leased.iter().rev() {
            let stamp = self.next_stamp();
            let chunk = self.chunk(word);
            chunk.claims += 1;
            if self.policy != PolicyName::Fifo {
                self.chunk(word).stamp = stamp;
            }
        }
        leased
    }

    pub(super) fn unclaim(&mut self, words: &[String]) {
        words.iter().for_each(|word| self.chunk(word).claims -= 1);
        self.evict_above_capacity();
    }

    /// Reserves the words to write and returns them; `None` if there is no room for all.
    pub(super) fn reserve(&mut self, word: &str) -> Option<Vec<String>> {
        let before = self.clone();
        let wanted: Vec<String> =
            prefixes(word).into_iter().filter(|word| !self.chunks.contains_key(word)).collect();
        for word in &wanted {
            self.chunks.insert(word.clone(), ModelChunk { claims: 1, ..ModelChunk::default() });
        }
        while self.chunks.len() + self.quarantined_slots > self.slots {
            if !self.evict_one() {
                // The evictions remain, but the reservation is undone.
                wanted.iter().for_each(|word| _ = self.chunks.remove(word));
                self.stamp = before.stamp;
                return None;
            }
        }
        Some(wanted)
    }

    /// Notes that the words are cached from now on.
    pub(super) fn keep(&mut self, words: &[String]) {
        while self.cached() + words.len() > self.capacity && self.evict_one() {}
        for word in words.iter().rev() {
            let stamp = self.next_stamp();
            let chunk = self.chunk(word);
            chunk.claims -= 1;
            chunk.cached = true;
            chunk.stamp = stamp;
        }
        self.evict_above_capacity();
    }

    /// Notes that the words will not be written.
    pub(super) fn discard(&mut self, words: &[String]) {
        words.iter().for_each(|word| _ = self.chunks.remove(word));
        self.evict_above_capacity();
    }

    pub(super) fn evict_above_capacity(&mut self) {
        while self.cached() > self.capacity && self.evict_one() {}
    }

    pub(super) fn cached(&self) -> usize {
        self.chunks.values().filter(|chunk| chunk.cached).count()
    }

    pub(super) fn chunk(&mut self, word: &str) -> &mut ModelChunk {
        self.chunks.get_mut(word).expect("the model knows the chunk")
    }

    fn evict_one(&mut self) -> bool {
        let is_leaf = |word: &str| {
            let child = |other: &String| other.len() == word.len() + 1 && other.starts_with(word);
            !self.chunks.keys().any(child)
        };
        let free = self
            .chunks
            .iter()
            .filter(|(word, chunk)| chunk.cached && chunk.claims == 0 && chunk.pins == 0 && is_leaf(word));
        let victim = match self.policy {
            PolicyName::Fifo | PolicyName::Lru => free.min_by_key(|(_, chunk)| chunk.stamp),
            _ => {
                let free: Vec<_> = free.collect();
                let gone = free.iter().copied().find(|(word, _)| !self.present.contains(*word));
                assert!(gone.is_some() || free.is_empty(), "the store had to evict one of {free:?}");
                gone
            }
        };
        let Some(victim) = victim.map(|(word, _)| word.clone()) else { return false };
        self.chunks.remove(&victim);
        true
    }

    /// Cached words in the order of eviction.
    pub(super) fn order(&self) -> Vec<String> {
        let mut order: Vec<_> = self.chunks.iter().filter(|(_, chunk)| chunk.cached).collect();
        order.sort_by_key(|(_, chunk)| chunk.stamp);
        order.into_iter().map(|(word, _)| word.clone()).collect()
    }

    /// Notes that another policy takes the words over in this order.
    pub(super) fn switch(&mut self, policy: PolicyName, order: &[String]) {
        self.policy = policy;
        for word in order {
            let stamp = self.next_stamp();
            self.chunk(word).stamp = stamp;
        }
    }

    fn next_stamp(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }
}

pub(super) fn prefixes(word: &str) -> Vec<String> {
    (1..=word.len()).map(|end| word[..end].to_owned()).collect()
}
