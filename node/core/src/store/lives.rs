//! A new store over the memory of a store whose decisions can no longer be relied on.
//!
//! Every extent is *secluded* at first: it counts as quarantined and holds nothing. The caller returns an extent once nobody can
//! touch the old store's bytes, or gives it new memory. The extents of a first store are secluded too, until their memory is
//! there.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::Store;
use super::ids::ProcessId;
use super::sessions::Sessions;

/// Memory that an earlier store gave out.
#[derive(Debug, Default)]
pub(super) struct Seclusion {
    /// Extents that are out of use, and the living processes that were shown each.
    extents: BTreeMap<u32, HashSet<ProcessId>>,
    /// Extents among them that wait for new memory.
    renewing: HashSet<u32>,
    /// Living processes that memory of extents was left to, with the last life in which this happened.
    keepers: HashMap<ProcessId, u64>,
    /// The number of stores before this one.
    life: u64,
}

impl Store {
    /// Makes an empty store that takes the place of this store and goes on with its numbers. No extent is in use before
    /// [`Store::extent_returned`] or [`Store::extent_renewed`].
    #[must_use]
    pub fn begin_anew(&self) -> Self {
        let mut next = Self::new(self.limits.clone());
        next.journal.keep_as(&self.journal);
        next.last_number = self.last_number;
        (next.tenths, next.now) = (self.tenths, self.now);
        next.sessions = Sessions::after(&self.sessions);
        next.remembered = self.remembered.after();
        next.purges = self.purges.after();
        next.slab.seclude_all(&self.slab);
        let shown = |extent| {
            let before = self.seclusion.extents.get(&extent).into_iter().flatten().copied();
            (extent, before.chain(self.sessions.shown(extent)).collect())
        };
        next.seclusion.extents = (0..self.limits.extents).map(shown).collect();
        next.seclusion.keepers.clone_from(&self.seclusion.keepers);
        next.seclusion.life = self.seclusion.life + 1;
        next
    }

    /// Takes every extent of an empty store out of use, until [`Store::extent_renewed`] says that its memory is there.
    pub fn wait_for_memory(&mut self) {
        self.slab.wait_for_memory();
        self.seclusion.extents = (0..self.limits.extents).map(|extent| (extent, HashSet::new())).collect();
    }

    /// Counts leases, reservations, pins and orders from a number on, so that a number of an earlier life names none of them. Only
    /// for an empty store.
    pub fn count_from(&mut self, first: u64) {
        self.last_number = first;
    }

    /// Extents that are out of use, without those that already wait for new memory.
    pub fn secluded(&self) -> Vec<u32> {
        let Seclusion { extents, renewing, .. } = &self.seclusion;
        extents.keys().copied().filter(|extent| !renewing.contains(extent)).collect()
    }

    /// Whether every process that was shown a secluded extent is gone.
    pub fn is_left_by_all(&self, extent: u32) -> bool {
        self.seclusion.extents.get(&extent).is_none_or(HashSet::is_empty)
    }

    /// Notes that nobody can touch an earlier store's bytes in this extent: the extent is in use again, with its old memory.
    pub fn extent_returned(&mut self, extent: u32) {
        if self.seclusion.extents.remove(&extent).is_some() {
            self.seclusion.renewing.remove(&extent);
            self.slab.include(extent, true);
        }
    }

    /// Leaves the memory of a secluded extent to the engines that were shown it: the caller gives the extent other memory and
    /// calls [`Store::extent_renewed`]. Returns false, and does nothing, if one of these engines keeps memory of an earlier
    /// life too.
    pub fn leave_to_engines(&mut self, extent: u32) -> bool {
        let Seclusion { extents, renewing, keepers, life } = &mut self.seclusion;
        let Some(shown) = extents.get(&extent) else { return false };
        if shown.iter().any(|process| keepers.get(process).is_some_and(|left| left < life)) {
            return false;
        }
        keepers.extend(shown.iter().map(|&process| (process, *life)));
        renewing.insert(extent);
        true
    }

    /// Notes that a secluded extent has new memory; returns whether the extent was secluded.
    pub(super) fn secluded_is_renewed(&mut self, extent: u32) -> bool {
        let was_secluded = self.seclusion.extents.remove(&extent).is_some();
        if was_secluded {
            self.seclusion.renewing.remove(&extent);
            self.slab.include(extent, false);
        }
        was_secluded
    }

    /// Notes that a process is gone, and touches nothing any more.
    pub(super) fn process_left_seclusion(&mut self, process: ProcessId) {
        let Seclusion { extents, keepers, .. } = &mut self.seclusion;
        extents.values_mut().for_each(|shown| _ = shown.remove(&process));
        keepers.remove(&process);
    }
}
