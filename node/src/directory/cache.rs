//! Rows that were asked for a moment ago.
//!
//! A lease comes right after its lookup, and the head of a system prompt is asked for all the time: neither has to go to
//! the home again. Rows are kept for a moment only, since chunks move to their readers.

use hashbrown::HashMap;
use larder_protocol::table::{Holder, RowKey};

use super::Holders;
use crate::clock::Millis;

/// Rows in two generations: when the younger one is old, it becomes the older one, which goes.
#[derive(Debug, Default)]
pub struct RowCache {
    young: HashMap<RowKey, Holders>,
    old: HashMap<RowKey, Holders>,
    turned: Millis,
}

impl RowCache {
    /// Who was said to hold a chunk.
    pub fn get(&mut self, row: &RowKey, now: Millis) -> Option<&Holders> {
        self.turn(now);
        self.young.get(row).or_else(|| self.old.get(row))
    }

    /// Keeps what a home said. That nobody holds a chunk is not kept: somebody may have it in a moment.
    pub fn put(&mut self, row: RowKey, holders: &Holders, now: Millis) {
        self.turn(now);
        if !holders.is_empty() && self.young.len() < MAX_ROWS {
            self.young.insert(row, holders.clone());
        }
    }

    /// A holder did not have a chunk.
    pub fn remove(&mut self, row: &RowKey, holder: Holder) {
        for rows in [&mut self.young, &mut self.old] {
            if rows.get(row).is_some_and(|holders| holders.contains(&holder)) {
                rows.remove(row);
            }
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        (self.young.clear(), self.old.clear());
    }

    fn turn(&mut self, now: Millis) {
        let age_ms = now.since(self.turned);
        if age_ms >= GENERATION_MS {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            if age_ms >= 2 * GENERATION_MS {
                self.old.clear();
            }
            self.turned = now;
        }
    }
}

/// A row is kept for one to two of these.
const GENERATION_MS: u64 = 50;

/// Rows of one generation.
const MAX_ROWS: usize = 65_536;

#[cfg(test)]
mod tests {
    use larder_protocol::table::{NodeNumber, RunKey};
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn a_row_is_kept_for_a_moment_and_not_after_its_holder_did_not_have_it() {
        let row = |chunk| RowKey { run: RunKey(1), chunk };
        let holder = |node| Holder { node: NodeNumber(node), device: 0 };
        let mut cache = RowCache::default();
        cache.put(row(1), &smallvec![holder(1)], Millis(0));
        cache.put(row(2), &smallvec![holder(1), holder(2)], Millis(10));
        cache.put(row(3), &Holders::new(), Millis(10));
        assert!(cache.get(&row(1), Millis(60)).is_some() && cache.get(&row(3), Millis(60)).is_none());
        cache.remove(&row(1), holder(2));
        assert!(cache.get(&row(1), Millis(60)).is_some());
        cache.remove(&row(1), holder(1));
        assert!(cache.get(&row(1), Millis(60)).is_none());
        assert!(cache.get(&row(2), Millis(99)).is_some() && cache.get(&row(2), Millis(200)).is_none());
    }
}
