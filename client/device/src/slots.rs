//! The life of slots that devices copy into and out of. Pure: it hears what happened and says what may be reused.

use crate::order::Ticket;

/// The number of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// Whoever makes copies, and takes them along when it ends: a device of the node, or an engine's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Context(pub u32);

/// All slots of a tier.
///
/// ```text
/// free ──reserve──► reserved ──fill──► filling ──done──► filled
///  ▲                   │                  │ failed          │ ▲ reads begin and end
///  ├───── give up ─────┘                  ▼                 │ │
///  ├────────────────────────────────────(free)              │ │
///  │                                   give up ◄────────────┘
///  └── last copy ended, or its context gone ── quarantined
/// ```
#[derive(Debug, Clone)]
pub struct Slots {
    slots: Vec<Slot>,
    free: Vec<SlotId>,
}

/// Where a slot is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    /// Anybody may have it, and nothing touches it.
    Free,
    /// Promised to somebody.
    Reserved,
    /// Being copied into.
    Filling,
    /// Its bytes are whole.
    Filled,
    /// Given up while copies may still touch it: nobody may have it.
    Quarantined,
}

/// How many slots are where in their life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "the names are those of `Life`")]
pub struct SlotCounts {
    pub free: u32,
    pub reserved: u32,
    pub filling: u32,
    pub filled: u32,
    pub quarantined: u32,
}

#[derive(Debug, Clone)]
struct Slot {
    life: Life,
    /// Copies that touch it: few at a time.
    copies: Vec<(Ticket, Context)>,
}

impl Slots {
    /// So many free slots.
    #[must_use]
    pub fn new(slots: u32) -> Self {
        let slot = Slot { life: Life::Free, copies: Vec::new() };
        Self { slots: vec![slot; slots as usize], free: (0..slots).rev().map(SlotId).collect() }
    }

    /// So many free slots more, numbered behind those that there are.
    pub fn add(&mut self, slots: u32) {
        let first = self.slots.len() as u32;
        self.slots.extend((0..slots).map(|_| Slot { life: Life::Free, copies: Vec::new() }));
        self.free.splice(0..0, (first..first + slots).rev().map(SlotId));
    }

    /// A free slot, which is then reserved; `None` where there is none.
    ///
    /// # Panics
    /// Where a copy touches a free slot: a bug.
    pub fn reserve(&mut self) -> Option<SlotId> {
        let id = self.free.pop()?;
        let slot = self.slot(id);
        assert!(slot.life == Life::Free && slot.copies.is_empty(), "a free slot is touched by nothing");
        slot.life = Life::Reserved;
        Some(id)
    }

    /// A copy into a reserved slot begins.
    ///
    /// # Panics
    /// Where the slot is not reserved.
    pub fn begin_fill(&mut self, id: SlotId, ticket: Ticket, context: Context) {
        let slot = self.slot(id);
        assert_eq!(slot.life, Life::Reserved, "only a reserved slot is filled");
        slot.life = Life::Filling;
        slot.copies.push((ticket, context));
    }

    /// A copy out of a filled slot begins.
    ///
    /// # Panics
    /// Where the slot is not filled.
    pub fn begin_read(&mut self, id: SlotId, ticket: Ticket, context: Context) {
        let slot = self.slot(id);
        assert_eq!(slot.life, Life::Filled, "only a filled slot is read");
        slot.copies.push((ticket, context));
    }

    /// A copy has ended, and touches the slot no more. One that failed to fill it leaves it free.
    pub fn end(&mut self, id: SlotId, ticket: Ticket, is_whole: bool) {
        self.let_go(id, |copy| copy.0 == ticket, is_whole);
    }

    /// Whoever had the slot needs it no more. What still touches it keeps it from others.
    ///
    /// # Panics
    /// Where nobody had it.
    pub fn give_up(&mut self, id: SlotId) {
        let slot = self.slot(id);
        assert!(!matches!(slot.life, Life::Free | Life::Quarantined), "nobody has the slot");
        slot.life = Life::Quarantined;
        self.free_if_untouched(id);
    }

    /// A context is gone, and its copies with it.
    pub fn context_gone(&mut self, context: Context) {
        for id in (0..self.slots.len() as u32).map(SlotId) {
            self.let_go(id, |copy| copy.1 == context, false);
        }
    }

    /// Where a slot is in its life.
    #[must_use]
    pub fn life(&self, id: SlotId) -> Life {
        self.slots[id.0 as usize].life
    }

    /// Whether a copy may touch it.
    #[must_use]
    pub fn is_touched(&self, id: SlotId) -> bool {
        !self.slots[id.0 as usize].copies.is_empty()
    }

    /// How many slots are where. Their sum is the number of slots.
    #[must_use]
    pub fn counts(&self) -> SlotCounts {
        let mut counts = SlotCounts::default();
        for slot in &self.slots {
            *match slot.life {
                Life::Free => &mut counts.free,
                Life::Reserved => &mut counts.reserved,
                Life::Filling => &mut counts.filling,
                Life::Filled => &mut counts.filled,
                Life::Quarantined => &mut counts.quarantined,
            } += 1;
        }
        counts
    }

    fn let_go(&mut self, id: SlotId, ended: impl Fn(&(Ticket, Context)) -> bool, is_whole: bool) {
        let slot = self.slot(id);
        let before = slot.copies.len();
        slot.copies.retain(|copy| !ended(copy));
        if slot.copies.len() == before {
            return;
        }
        if slot.life == Life::Filling {
            slot.life = if is_whole { Life::Filled } else { Life::Quarantined };
        }
        self.free_if_untouched(id);
    }

    fn free_if_untouched(&mut self, id: SlotId) {
        let slot = self.slot(id);
        if slot.life == Life::Quarantined && slot.copies.is_empty() {
            slot.life = Life::Free;
            self.free.push(id);
        }
    }

    fn slot(&mut self, id: SlotId) -> &mut Slot {
        &mut self.slots[id.0 as usize]
    }
}
