//! The account of copies by a device: who asked for them, what they keep from reuse, who hears how they ended.
//!
//! Pure. Three things of a copy end apart from each other: its caller hears of it at the deadline at the latest, what it touches is
//! free only when the device let go of it, and its number means something until its caller was told.

use std::collections::{BTreeMap, HashMap};

use larder_core::store::ids::SessionId;
use larder_device::ledger::{Ledger, LedgerLimits};
use larder_device::slots::{Context, SlotId, Slots};
use larder_device::{CopyError, Ticket};
use larder_protocol::lane::{AskCopy, CopyEnd, CopyProgress};

/// Copies under way. `H` is what a copy keeps from reuse, `A` who waits for news of one.
#[derive(Debug)]
pub struct Account<H, A> {
    ledger: Ledger,
    held: HashMap<Ticket, (SessionId, H)>,
    callers: BTreeMap<Ticket, Caller<A>>,
    /// Answers that are due.
    news: Vec<(A, CopyProgress)>,
    most_of_session: usize,
}

/// What the device let go of.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended<H> {
    /// It touches this no more.
    pub held: H,
    /// All bytes are where they should be, and somebody counts on it: it is for [`Account::finish`] to say so.
    pub is_whole: bool,
}

#[derive(Debug)]
struct Caller<A> {
    session: SessionId,
    /// Layers that it asked for.
    of: u32,
    layers: u32,
    end: Option<CopyEnd>,
    asks: Option<Asks<A>>,
}

#[derive(Debug)]
struct Asks<A> {
    asker: A,
    layers: u32,
    until_ms: u64,
}

impl<H, A> Account<H, A> {
    /// An account of so many copies at a time, of which one session may have so many.
    #[must_use]
    pub fn new(orders: usize, most_of_session: usize, deadline_ms: u64) -> Self {
        let limits = LedgerLimits { orders, timeout_ms: deadline_ms };
        Self {
            ledger: Ledger::new(Slots::new(0), limits),
            held: HashMap::new(),
            callers: BTreeMap::new(),
            news: Vec::new(),
            most_of_session,
        }
    }

    /// Begins a copy of so many layers, which reads these slots of the device's own.
    ///
    /// # Errors
    /// What it would have held, where the device or the session has as many copies as it may.
    pub fn begin(
        &mut self,
        now_ms: u64,
        session: SessionId,
        layers: u32,
        reads: Vec<SlotId>,
        held: H,
    ) -> Result<Ticket, H> {
        // Whoever gives a copy up has it until the device let go of it.
        let under_way = self.held.values().filter(|(of, _)| *of == session).count();
        let untold = self
            .callers
            .iter()
            .filter(|(ticket, caller)| caller.session == session && !self.held.contains_key(ticket));
        if under_way + untold.count() >= self.most_of_session {
            return Err(held);
        }
        let Some(ticket) = self.ledger.begin(now_ms, DEVICE, Vec::new(), reads) else { return Err(held) };
        self.held.insert(ticket, (session, held));
        self.callers.insert(ticket, Caller { session, of: layers, layers: 0, end: None, asks: None });
        Ok(ticket)
    }

    /// Begins a copy that nobody asked for and nobody hears of, which fills reserved slots.
    ///
    /// # Errors
    /// What it would have held, where the device has as many copies as it may.
    pub fn begin_own(&mut self, now_ms: u64, fills: Vec<SlotId>, held: H) -> Result<Ticket, H> {
        let Some(ticket) = self.ledger.begin(now_ms, DEVICE, fills, Vec::new()) else { return Err(held) };
        self.held.insert(ticket, (NOBODY, held));
        Ok(ticket)
    }

    /// The device has so many slots of its own more.
    pub fn add_slots(&mut self, slots: u32) {
        self.ledger.add_slots(slots);
    }

    /// A slot of the device's own, to be filled; `None` where none is free.
    pub fn reserve_slot(&mut self) -> Option<SlotId> {
        self.ledger.reserve()
    }

    /// What is in a slot is wanted no more. It is free when no copy touches it.
    pub fn give_up_slot(&mut self, slot: SlotId) {
        self.ledger.give_up(slot);
    }

    /// A copy was not begun after all; what it would have held.
    pub fn withdraw(&mut self, ticket: Ticket) -> Option<H> {
        self.ledger.ended(ticket, Err(CopyError::Refused));
        self.callers.remove(&ticket);
        self.held.remove(&ticket).map(|(_, held)| held)
    }

    /// The device has done so many layers of a copy.
    pub fn layers(&mut self, ticket: Ticket, done: u32) {
        let Some(caller) = self.callers.get_mut(&ticket).filter(|caller| caller.end.is_none()) else {
            return;
        };
        caller.layers = done;
        if caller.asks.as_ref().is_some_and(|asks| done >= asks.layers) {
            self.answer(ticket);
        }
    }

    /// The device says how a copy ended. One that went well is to be finished by [`Account::finish`]; the caller of any other was
    /// told. `None` where the device may still be at it.
    pub fn ended(&mut self, ticket: Ticket, result: Result<(), CopyError>) -> Option<Ended<H>> {
        let outcome = self.ledger.ended(ticket, result);
        if let Err(error) = result {
            self.tell(ticket, end_of(error));
        }
        if result == Err(CopyError::Lost) {
            return None;
        }
        let is_whole = outcome.is_some_and(|outcome| outcome.result.is_ok());
        self.held.remove(&ticket).map(|(_, held)| Ended { held, is_whole })
    }

    /// A copy that went well has come to this end.
    pub fn finish(&mut self, ticket: Ticket, end: CopyEnd) {
        self.tell(ticket, end);
    }

    /// Tells the callers of copies that took too long, and says which these are. What they touch stays held.
    pub fn overdue(&mut self, now_ms: u64) -> Vec<Ticket> {
        let overdue: Vec<Ticket> =
            self.ledger.overdue(now_ms).into_iter().map(|outcome| outcome.ticket).collect();
        overdue.iter().for_each(|&ticket| self.tell(ticket, CopyEnd::Stalled));
        overdue
    }

    /// Nothing of the device is left: it touches nothing any more.
    pub fn gone(&mut self) -> Vec<H> {
        let told = self.ledger.context_gone(DEVICE);
        told.into_iter().for_each(|outcome| self.tell(outcome.ticket, CopyEnd::Lost));
        self.held.drain().map(|(_, (_, held))| held).collect()
    }

    /// What a copy holds that the device may still touch.
    #[must_use]
    pub fn held(&self, ticket: Ticket) -> Option<&H> {
        self.held.get(&ticket).map(|(_, held)| held)
    }

    /// Somebody asks how far a copy is. Answers are in [`Account::take_news`]. Of two askers the first is answered at once.
    ///
    /// # Errors
    /// The asker, where the session has no such copy, or was told its end.
    pub fn ask(&mut self, now_ms: u64, session: SessionId, ask: AskCopy, asker: A) -> Result<(), A> {
        let AskCopy { copy, layers, wait_ms } = ask;
        let ticket = Ticket(copy);
        if self.callers.get(&ticket).is_none_or(|caller| caller.session != session) {
            return Err(asker);
        }
        self.answer(ticket);
        let Some(caller) = self.callers.get_mut(&ticket) else { return Err(asker) };
        let until_ms = now_ms.saturating_add(wait_ms);
        caller.asks = Some(Asks { asker, layers, until_ms });
        if caller.end.is_some() || caller.layers >= layers || wait_ms == 0 {
            self.answer(ticket);
        }
        Ok(())
    }

    /// Answers those who have waited as long as they wanted to.
    pub fn answer_late(&mut self, now_ms: u64) {
        let late = |caller: &Caller<A>| caller.asks.as_ref().is_some_and(|asks| asks.until_ms <= now_ms);
        let late: Vec<Ticket> =
            self.callers.iter().filter(|(_, caller)| late(caller)).map(|(&ticket, _)| ticket).collect();
        late.into_iter().for_each(|ticket| self.answer(ticket));
    }

    /// Answers that are due since the last call.
    pub fn take_news(&mut self) -> Vec<(A, CopyProgress)> {
        std::mem::take(&mut self.news)
    }

    /// A session asks for a copy no more, and who asked is answered; whether it had such a one.
    pub fn forget(&mut self, session: SessionId, ticket: Ticket) -> bool {
        let is_its = self.callers.get(&ticket).is_some_and(|caller| caller.session == session);
        if is_its {
            self.answer(ticket);
            self.callers.remove(&ticket);
        }
        is_its
    }

    /// A session ended: its copies under way.
    pub fn close(&mut self, session: SessionId) -> Vec<Ticket> {
        self.callers.retain(|_, caller| caller.session != session);
        let of_session = self.held.iter().filter(|(_, (of, _))| *of == session);
        of_session.map(|(&ticket, _)| ticket).collect()
    }

    /// Copies that the device has not let go of.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.ledger.under_way()
    }

    fn tell(&mut self, ticket: Ticket, end: CopyEnd) {
        let Some(caller) = self.callers.get_mut(&ticket).filter(|caller| caller.end.is_none()) else {
            return;
        };
        caller.end = Some(end);
        if end == CopyEnd::Done {
            caller.layers = caller.of;
        }
        self.answer(ticket);
    }

    /// Answers whoever waits for news of a copy.
    fn answer(&mut self, ticket: Ticket) {
        let Some(caller) = self.callers.get_mut(&ticket) else { return };
        let Some(Asks { asker, .. }) = caller.asks.take() else { return };
        let Caller { layers, end, .. } = *caller;
        self.news.push((asker, CopyProgress { layers, end }));
        if end.is_some() {
            self.callers.remove(&ticket);
        }
    }
}

fn end_of(error: CopyError) -> CopyEnd {
    match error {
        CopyError::Refused => CopyEnd::Refused,
        CopyError::Lost => CopyEnd::Lost,
        _ => CopyEnd::Failed,
    }
}

/// All copies are made by the node's own context: an engine's process takes none of them along when it ends.
const DEVICE: Context = Context(0);

/// No session has this number.
const NOBODY: SessionId = SessionId(0);

#[cfg(test)]
mod tests;
