//! Slots whose writing ended without a commit: they wait for the readers that may have seen them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Reader, take_range};
use crate::store::ids::Slot;

/// Slots that wait for their readers.
#[derive(Debug, Default)]
pub(super) struct Limbo {
    /// By number, the slots of one chunk, and the number of their readers.
    slots: BTreeMap<u64, (Vec<Slot>, usize)>,
    /// Each reader, with the numbers of such slots.
    readers: BTreeSet<(Reader, u64)>,
    last_number: u64,
}

impl Limbo {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.readers.is_empty()
    }

    /// Keeps slots until all of these readers have let go. There is at least one reader.
    pub(super) fn keep(&mut self, slots: Vec<Slot>, readers: BTreeSet<Reader>) {
        self.last_number += 1;
        self.slots.insert(self.last_number, (slots, readers.len()));
        self.readers.extend(readers.into_iter().map(|reader| (reader, self.last_number)));
    }

    /// Replaces the reader `from` by `to`.
    pub(super) fn hand_on(&mut self, from: Reader, to: Reader) {
        for number in self.take(from) {
            if !self.readers.insert((to, number))
                && let Some((_, readers)) = self.slots.get_mut(&number)
            {
                *readers -= 1;
            }
        }
    }

    /// Notes that a reader has let go; returns the slots that wait for nobody any more.
    pub(super) fn leave(&mut self, reader: Reader) -> Vec<Slot> {
        let mut left = Vec::new();
        for number in self.take(reader) {
            let Some((_, readers)) = self.slots.get_mut(&number) else { continue };
            *readers -= 1;
            if *readers == 0 {
                left.extend(self.slots.remove(&number).into_iter().flat_map(|(slots, _)| slots));
            }
        }
        left
    }

    fn take(&mut self, reader: Reader) -> Vec<u64> {
        let all = (reader, 0)..=(reader, u64::MAX);
        take_range(&mut self.readers, all).into_iter().map(|(_, number)| number).collect()
    }
}
