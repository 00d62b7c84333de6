//! The holders that announce to a home, with the position of each stream.

use std::collections::HashMap;

use larder_protocol::limits::MAX_MEMBERS;
use larder_protocol::table::{Holder, Table};

/// The number of a holder in its home's rows.
pub(super) type HolderIndex = u16;

/// The holders that announce to this home.
#[derive(Debug, Default)]
pub(super) struct KnownHolders {
    slots: Vec<Option<HolderState>>,
    by_holder: HashMap<Holder, HolderIndex>,
    free: Vec<HolderIndex>,
}

/// The state of one holder.
#[derive(Debug)]
pub(super) struct HolderState {
    /// The holder.
    pub(super) holder: Holder,
    incarnation: u64,
    stream: u64,
    /// Number of the next batch; `None` if the stream must start anew.
    next: Option<u64>,
    /// The sum of the digests of all rows that the holder announced.
    pub(super) digest: u64,
    /// Rows that the home keeps for the holder.
    pub(super) rows: u64,
    /// Announced rows for which there was no room.
    pub(super) missing: u64,
}

/// The place of a batch in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// The batch is the next one.
    Takes,
    /// The batch is the first of a new stream.
    Anew,
    /// The batch is known already, as are all batches up to this number.
    Known(u64),
    /// An earlier batch is missing.
    Missing,
}

impl KnownHolders {
    /// The number of holders.
    pub(super) fn len(&self) -> usize {
        self.by_holder.len()
    }

    /// Announced rows of all holders for which there was no room.
    pub(super) fn missing(&self) -> u64 {
        self.slots.iter().flatten().map(|state| state.missing).sum()
    }

    /// The slot of a holder, if the holder is known.
    pub(super) fn find(&self, holder: Holder) -> Option<HolderIndex> {
        self.by_holder.get(&holder).copied()
    }

    /// The slot of a holder; a new holder gets a new slot. `None` if there are too many holders.
    pub(super) fn slot(&mut self, holder: Holder, incarnation: u64) -> Option<HolderIndex> {
        if let Some(slot) = self.find(holder) {
            return Some(slot);
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < MAX_HOLDERS => {
                self.slots.push(None);
                (self.slots.len() - 1) as HolderIndex
            }
            None => return None,
        };
        let state =
            HolderState { holder, incarnation, stream: 0, next: None, digest: 0, rows: 0, missing: 0 };
        self.slots[usize::from(slot)] = Some(state);
        self.by_holder.insert(holder, slot);
        Some(slot)
    }

    pub(super) fn get(&self, slot: HolderIndex) -> &HolderState {
        self.slots[usize::from(slot)].as_ref().expect("a row's holder has a slot as long as the row")
    }

    pub(super) fn get_mut(&mut self, slot: HolderIndex) -> &mut HolderState {
        self.slots[usize::from(slot)].as_mut().expect("a row's holder has a slot as long as the row")
    }

    /// The holders whose node is no longer a member, or is a member in another life.
    pub(super) fn gone(&self, table: &Table) -> Vec<HolderIndex> {
        let is_gone = |state: &HolderState| {
            table.member(state.holder.node).is_none_or(|member| member.incarnation != state.incarnation)
        };
        let slots = (0..).zip(&self.slots);
        slots.filter(|(_, state)| state.as_ref().is_some_and(is_gone)).map(|(slot, _)| slot).collect()
    }

    /// Frees slots that have no rows.
    pub(super) fn remove(&mut self, slots: &[HolderIndex]) {
        for &slot in slots {
            if let Some(state) = self.slots[usize::from(slot)].take() {
                debug_assert_eq!(state.rows, 0, "a slot outlives its rows");
                self.by_holder.remove(&state.holder);
                self.free.push(slot);
            }
        }
    }

    /// A mask of these slots.
    pub(super) fn mask(&self, slots: &[HolderIndex]) -> Vec<bool> {
        let mut mask = vec![false; self.slots.len()];
        slots.iter().for_each(|&slot| mask[usize::from(slot)] = true);
        mask
    }
}

impl HolderState {
    /// The place of a batch in the stream; the next batch counts as taken.
    pub(super) fn next(&mut self, stream: u64, sequence: u64) -> Next {
        if stream > self.stream && sequence == 0 {
            (self.stream, self.next) = (stream, Some(1));
            return Next::Anew;
        }
        match self.next {
            Some(next) if stream == self.stream && sequence < next => Next::Known(next - 1),
            Some(next) if stream == self.stream && sequence == next => {
                self.next = Some(next + 1);
                Next::Takes
            }
            _ => Next::Missing,
        }
    }

    /// Takes no more batches of the present stream.
    pub(super) fn distrust(&mut self) {
        self.next = None;
    }

    /// Forgets a row whose partition has another home now.
    pub(super) fn forget(&mut self, digest: u64) {
        self.digest = self.digest.wrapping_sub(digest);
        self.rows -= 1;
    }

    /// Notes that all rows of the holder are gone.
    pub(super) fn forget_all(&mut self) {
        (self.digest, self.rows, self.missing) = (0, 0, 0);
    }
}

/// Holders of one home: every node of the largest cluster with four actors each.
const MAX_HOLDERS: usize = MAX_MEMBERS * 4;
