//! The free parts of a write window.

use std::collections::BTreeMap;

/// Free ranges of an address space that starts at 0: first fit, neighbors merged.
pub(crate) struct FreeRanges {
    /// Length by start; no two touch.
    free: BTreeMap<u64, u64>,
}

impl FreeRanges {
    /// An address space of `bytes` bytes, all of them free.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { free: BTreeMap::from_iter((bytes > 0).then_some((0, bytes))) }
    }

    /// Takes `bytes` bytes from the first free range that is long enough.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&start, &length) = self.free.iter().find(|&(_, &length)| length >= bytes)?;
        self.free.remove(&start);
        if length > bytes {
            self.free.insert(start + bytes, length - bytes);
        }
        Some(start)
    }

    /// Gives back a range that `take` returned.
    pub(crate) fn give_back(&mut self, start: u64, mut bytes: u64) {
        if let Some(after) = self.free.remove(&(start + bytes)) {
            bytes += after;
        }
        if let Some((&before, length)) = self.free.range_mut(..start).next_back()
            && before + *length == start
        {
            *length += bytes;
            return;
        }
        self.free.insert(start, bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_given_back_in_any_order_is_one_piece_again() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut ranges = FreeRanges::new(192);
            let taken = [(); 3].map(|()| ranges.take(64).unwrap());
            assert_eq!((taken, ranges.take(1)), ([0, 64, 128], None));
            for i in order {
                ranges.give_back(taken[i], 64);
            }
            assert_eq!(ranges.take(192), Some(0));
        }
    }

    proptest! {
        #[test]
        fn taken_ranges_never_overlap(steps in prop::collection::vec((any::<bool>(), 1..40_u64, any::<usize>()), 1..200)) {
            let mut ranges = FreeRanges::new(100);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (give_back, bytes, which) in steps {
                if give_back && !taken.is_empty() {
                    let (start, bytes) = taken.swap_remove(which % taken.len());
                    ranges.give_back(start, bytes);
                } else if let Some(start) = ranges.take(bytes) {
                    prop_assert!(start + bytes <= 100);
                    prop_assert!(taken.iter().all(|&(other, length)| start + bytes <= other || other + length <= start));
                    taken.push((start, bytes));
                }
            }
            for (start, bytes) in taken {
                ranges.give_back(start, bytes);
            }
            prop_assert_eq!(ranges.take(100), Some(0));
        }
    }
}
