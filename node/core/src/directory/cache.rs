//! Recent answers of homes.
//!
//! So the head of a system prompt does not go to its home with every lookup, and a lease right after a lookup asks nobody
//! again. Two generations bound the cache by age and by number, without an ordered list.

use std::collections::HashMap;

use larder_protocol::table::{Holder, RowKey, Table};

use super::Holders;
use crate::Millis;

/// Answers of homes, for a moment.
#[derive(Debug, Default)]
pub struct Cache {
    young: HashMap<RowKey, Answer>,
    old: HashMap<RowKey, Answer>,
    turned_at: Millis,
}

#[derive(Debug)]
struct Answer {
    holders: Holders,
    at: Millis,
}

impl Cache {
    /// The holders of a chunk, if they were asked for lately. Empty if there is none.
    #[must_use]
    pub fn get(&self, key: &RowKey, now: Millis) -> Option<&Holders> {
        let answer = self.young.get(key).or_else(|| self.old.get(key))?;
        let lasts_ms = if answer.holders.is_empty() { NOBODY_MS } else { HOLDERS_MS };
        (now.since(answer.at) < lasts_ms).then_some(&answer.holders)
    }

    /// Keeps an answer.
    pub fn insert(&mut self, key: RowKey, holders: Holders, now: Millis) {
        if now.since(self.turned_at) >= HOLDERS_MS || self.young.len() >= MAX_ANSWERS / 2 {
            self.old = std::mem::take(&mut self.young);
            self.turned_at = now;
        }
        self.young.insert(key, Answer { holders, at: now });
    }

    /// Forgets that a holder has these chunks.
    pub fn not_held(&mut self, holder: Holder, keys: &[RowKey]) {
        for key in keys {
            for answers in [&mut self.young, &mut self.old] {
                if let Some(answer) = answers.get_mut(key) {
                    answer.holders.retain(|other| *other != holder);
                    // Nobody is left that the home spoke of; it may know others by now.
                    if answer.holders.is_empty() {
                        answers.remove(key);
                    }
                }
            }
        }
    }

    /// Forgets the answers for partitions that have another home now.
    pub fn new_table(&mut self, old: &Table, new: &Table) {
        for answers in [&mut self.young, &mut self.old] {
            answers.retain(|key, _| {
                let partition = key.run.partition();
                old.home(partition) == new.home(partition)
            });
        }
    }

    /// Answers in it, the outdated ones included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }
}

/// How long a holder's name is good for. A stale one costs a round trip.
pub const HOLDERS_MS: u64 = 1_000;

/// How long it is good to know that nobody holds a chunk: from a lookup to its lease, since a chunk that is computed
/// meanwhile would be missed.
pub const NOBODY_MS: u64 = 20;

/// Answers at a time: at about 80 bytes each, 5 MiB.
pub const MAX_ANSWERS: usize = 65_536;

#[cfg(test)]
mod tests {
    use larder_protocol::table::{NodeNumber, PARTITIONS, RunKey};
    use smallvec::smallvec;

    use super::*;

    const HOLDER: Holder = Holder { node: NodeNumber(1), device: 0 };
    const OTHER: Holder = Holder { node: NodeNumber(2), device: 0 };

    fn key(number: u64) -> RowKey {
        RowKey { run: RunKey(u128::from(number) << 116), chunk: number }
    }

    #[test]
    fn an_answer_is_good_for_a_moment() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER], Millis(5));
        assert_eq!(cache.get(&key(1), Millis(4 + HOLDERS_MS)).map(|found| found[0]), Some(HOLDER));
        assert_eq!(cache.get(&key(1), Millis(5 + HOLDERS_MS)), None);
        assert_eq!(cache.get(&key(2), Millis(5)), None);
    }

    #[test]
    fn that_nobody_holds_a_chunk_is_soon_forgotten() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![], Millis(0));
        assert_eq!(cache.get(&key(1), Millis(NOBODY_MS - 1)).map(|found| found.len()), Some(0));
        assert_eq!(cache.get(&key(1), Millis(NOBODY_MS)), None);
    }

    #[test]
    fn a_holder_that_has_nothing_is_forgotten_at_once() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER, OTHER], Millis(0));
        cache.insert(key(2), smallvec![HOLDER], Millis(0));
        cache.not_held(HOLDER, &[key(1), key(2)]);
        assert_eq!(cache.get(&key(1), Millis(0)).map(|found| found.to_vec()), Some(vec![OTHER]));
        assert_eq!(cache.get(&key(2), Millis(0)), None);
    }

    #[test]
    fn it_never_grows_past_its_bound() {
        let mut cache = Cache::default();
        for number in 0..3 * MAX_ANSWERS as u64 {
            cache.insert(key(number), smallvec![HOLDER], Millis(number / 1_000));
        }
        assert!(cache.len() <= MAX_ANSWERS);
    }

    #[test]
    fn a_new_table_clears_what_moved() {
        let mut cache = Cache::default();
        cache.insert(key(1), smallvec![HOLDER], Millis(0));
        cache.insert(key(2), smallvec![HOLDER], Millis(0));
        let old = Table { homes: vec![NodeNumber(1); usize::from(PARTITIONS)], ..Table::default() };
        let mut new = old.clone();
        new.homes[usize::from(key(2).run.partition())] = NodeNumber(2);
        cache.new_table(&old, &new);
        assert!(cache.get(&key(1), Millis(0)).is_some());
        assert_eq!(cache.get(&key(2), Millis(0)), None);
    }
}
