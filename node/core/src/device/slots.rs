//! The life of slots that a device copies into and out of: decides which slots may be reused.

use crate::event::DeviceCopyNumber;

/// The number of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SlotId(pub(crate) u32);

/// All slots of a tier.
///
/// ```text
/// free ──reserve──► reserved ──fill──► filling ──done──► filled
///  ▲                   │                  │ failed          │ ▲ reads begin and end
///  ├───── give up ─────┘                  ▼                 │ │
///  ├────────────────────────────────────(free)              │ │
///  │                                   give up ◄────────────┘
///  └────────── last copy ended ─────────── quarantined
/// ```
#[derive(Debug, Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<SlotId>,
}

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SlotState {
    /// Anybody may have the slot, and nothing touches it.
    Free,
    /// Promised to a copy that has not begun.
    Reserved,
    /// Being copied into.
    Filling,
    /// The slot's bytes are whole.
    Filled,
    /// Given up while copies may still touch the slot: nobody may have it.
    Quarantined,
}

#[derive(Debug)]
struct Slot {
    life: SlotState,
    /// Copies that touch the slot: few at a time.
    copies: Vec<DeviceCopyNumber>,
}

impl Slots {
    /// So many free slots.
    pub(super) fn of(slots: u32) -> Self {
        Self {
            slots: (0..slots).map(|_| Slot { life: SlotState::Free, copies: Vec::new() }).collect(),
            free: (0..slots).rev().map(SlotId).collect(),
        }
    }

    /// Whether nobody has any slot, and nothing touches one.
    pub(super) fn are_free(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Reserves a free slot; `None` if there is none.
    pub(super) fn reserve(&mut self) -> Option<SlotId> {
        let id = self.free.pop()?;
        let slot = self.slot(id);
        assert!(slot.life == SlotState::Free && slot.copies.is_empty(), "a free slot is touched by nothing");
        slot.life = SlotState::Reserved;
        Some(id)
    }

    /// Notes that a copy into a reserved slot begins.
    pub(super) fn begin_fill(&mut self, id: SlotId, number: DeviceCopyNumber) {
        let slot = self.slot(id);
        assert_eq!(slot.life, SlotState::Reserved, "only a reserved slot is filled");
        slot.life = SlotState::Filling;
        slot.copies.push(number);
    }

    /// Notes that a copy out of a filled slot begins.
    pub(super) fn begin_read(&mut self, id: SlotId, number: DeviceCopyNumber) {
        let slot = self.slot(id);
        assert_eq!(slot.life, SlotState::Filled, "only a filled slot is read");
        slot.copies.push(number);
    }

    /// Notes that a copy has ended, and no longer touches the slot. A copy that failed to fill the slot leaves it free.
    pub(super) fn end(&mut self, id: SlotId, number: DeviceCopyNumber, is_whole: bool) {
        let slot = self.slot(id);
        let Some(position) = slot.copies.iter().position(|&copy| copy == number) else { return };
        slot.copies.swap_remove(position);
        if slot.life == SlotState::Filling {
            slot.life = if is_whole { SlotState::Filled } else { SlotState::Quarantined };
        }
        self.free_if_untouched(id);
    }

    /// Gives up a slot that its owner no longer needs. The slot is not reused while copies still touch it.
    pub(super) fn give_up(&mut self, id: SlotId) {
        let slot = self.slot(id);
        assert!(!matches!(slot.life, SlotState::Free | SlotState::Quarantined), "nobody has the slot");
        slot.life = SlotState::Quarantined;
        self.free_if_untouched(id);
    }

    /// The state of a slot.
    #[cfg(test)]
    pub(super) fn life(&self, id: SlotId) -> SlotState {
        self.slots[id.0 as usize].life
    }

    /// The states of all slots.
    #[cfg(test)]
    pub(super) fn lives(&self) -> impl Iterator<Item = SlotState> {
        self.slots.iter().map(|slot| slot.life)
    }

    fn free_if_untouched(&mut self, id: SlotId) {
        let slot = self.slot(id);
        if slot.life == SlotState::Quarantined && slot.copies.is_empty() {
            slot.life = SlotState::Free;
            self.free.push(id);
        }
    }

    fn slot(&mut self, id: SlotId) -> &mut Slot {
        &mut self.slots[id.0 as usize]
    }
}
