//! What a device's thread was asked for, as the asking side accounts for it. Pure: it takes the time as an argument.

use std::collections::BTreeMap;

use crate::device::CopyError;
use crate::order::Ticket;
use crate::slots::{Context, SlotId, Slots};

/// Orders under way, and the slots that they touch.
///
/// Each order's caller is told exactly once how it ended, at its deadline at the latest. Its slots are free only when the device
/// let go of them, however long that takes.
#[derive(Debug)]
pub struct Ledger {
    slots: Slots,
    orders: BTreeMap<Ticket, Entry>,
    limits: LedgerLimits,
    next: u64,
}

/// Bounds of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerLimits {
    /// Orders under way at a time.
    pub orders: usize,
    /// How long a caller waits for a copy, in milliseconds.
    pub timeout_ms: u64,
}

/// How an order ended for its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyFailure {
    /// The device says so.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The device did not say anything in time. It may still be copying.
    #[error("the device is stalled")]
    Stalled,
}

/// Word for a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Which order.
    pub ticket: Ticket,
    /// Whether all its bytes are where they should be.
    pub result: Result<(), CopyFailure>,
}

#[derive(Debug)]
struct Entry {
    context: Context,
    fills: Vec<SlotId>,
    reads: Vec<SlotId>,
    deadline_ms: u64,
    is_told: bool,
}

impl Ledger {
    /// An account of these slots.
    #[must_use]
    pub fn new(slots: Slots, limits: LedgerLimits) -> Self {
        Self { slots, orders: BTreeMap::new(), limits, next: 0 }
    }

    /// The slots.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// So many free slots more.
    pub fn add_slots(&mut self, slots: u32) {
        self.slots.add(slots);
    }

    /// A slot to fill; `None` where none is free.
    pub fn reserve(&mut self) -> Option<SlotId> {
        self.slots.reserve()
    }

    /// A slot whose owner needs it no more.
    ///
    /// # Panics
    /// Where nobody has it.
    pub fn give_up(&mut self, slot: SlotId) {
        self.slots.give_up(slot);
    }

    /// Begins an order of `context` that fills reserved slots and reads filled ones. `None` where too many are under way: then
    /// nothing changed.
    ///
    /// # Panics
    /// Where a slot is not reserved, or not filled.
    pub fn begin(
        &mut self,
        now_ms: u64,
        context: Context,
        fills: Vec<SlotId>,
        reads: Vec<SlotId>,
    ) -> Option<Ticket> {
        if self.orders.len() >= self.limits.orders {
            return None;
        }
        self.next += 1;
        let ticket = Ticket(self.next);
        fills.iter().for_each(|&slot| self.slots.begin_fill(slot, ticket, context));
        reads.iter().for_each(|&slot| self.slots.begin_read(slot, ticket, context));
        let deadline_ms = now_ms.saturating_add(self.limits.timeout_ms);
        self.orders.insert(ticket, Entry { context, fills, reads, deadline_ms, is_told: false });
        Some(ticket)
    }

    /// The device says how an order ended. `None` where its caller was told already: what it brought late is no hit.
    pub fn ended(&mut self, ticket: Ticket, result: Result<(), CopyError>) -> Option<Outcome> {
        if result == Err(CopyError::Lost) {
            return self.tell(ticket, CopyFailure::Copy(CopyError::Lost));
        }
        let entry = self.orders.remove(&ticket)?;
        for &slot in &entry.fills {
            self.slots.end(slot, ticket, result.is_ok() && !entry.is_told);
        }
        for &slot in &entry.reads {
            self.slots.end(slot, ticket, true);
        }
        let result = result.map_err(CopyFailure::Copy);
        (!entry.is_told).then_some(Outcome { ticket, result })
    }

    /// Orders whose callers have waited long enough. Their slots stay where they are.
    pub fn overdue(&mut self, now_ms: u64) -> Vec<Outcome> {
        let due = |entry: &Entry| !entry.is_told && entry.deadline_ms <= now_ms;
        let tickets: Vec<_> =
            self.orders.iter().filter(|(_, entry)| due(entry)).map(|(&ticket, _)| ticket).collect();
        tickets.into_iter().filter_map(|ticket| self.tell(ticket, CopyFailure::Stalled)).collect()
    }

    /// When the next caller has waited long enough.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.orders.values().filter(|entry| !entry.is_told).map(|entry| entry.deadline_ms).min()
    }

    /// A context is gone: nothing of it touches any slot.
    pub fn context_gone(&mut self, context: Context) -> Vec<Outcome> {
        let tickets: Vec<_> =
            self.orders.iter().filter(|(_, entry)| entry.context == context).map(|(&t, _)| t).collect();
        let told = tickets.iter().filter_map(|&ticket| self.tell(ticket, CopyFailure::Copy(CopyError::Lost)));
        let told = told.collect();
        self.orders.retain(|_, entry| entry.context != context);
        self.slots.context_gone(context);
        told
    }

    /// Orders under way, those with callers that gave up included.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.orders.len()
    }

    /// Tells a caller that its order failed while the device may still be at it. What it fills belongs to nobody any more.
    fn tell(&mut self, ticket: Ticket, failure: CopyFailure) -> Option<Outcome> {
        let entry = self.orders.get_mut(&ticket).filter(|entry| !entry.is_told)?;
        entry.is_told = true;
        for &slot in &entry.fills {
            self.slots.give_up(slot);
        }
        Some(Outcome { ticket, result: Err(failure) })
    }
}

#[cfg(test)]
mod tests;
