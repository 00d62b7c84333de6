//! The account of copies by a device: who asked for them, which slots they keep, who hears of their end.
//!
//! A copy has three ends, at three times. Its caller hears of the end, at the deadline at the latest. Its memory is free only
//! when the device has let go of it. Its number is valid until the caller has heard.

use std::collections::BTreeMap;

use larder_protocol::lane::{AskCopy, CopyEnd, CopyProgress};

use super::slots::{SlotId, Slots};
use crate::event::{DeviceCopyNumber, DeviceFailure, RequestId};
use crate::store::ids::SessionId;

/// Running copies and the slots that they touch. `H` names the other resources that a copy keeps from reuse.
#[derive(Debug)]
pub(super) struct Account<H> {
    pub(super) slots: Slots,
    /// Copies that the device has not let go of.
    copies: BTreeMap<DeviceCopyNumber, Copy<H>>,
    /// Callers that have not heard of their copy's end yet.
    callers: BTreeMap<DeviceCopyNumber, Caller>,
    /// Answers that are due.
    news: Vec<(RequestId, CopyProgress)>,
    limits: AccountLimits,
    last_number: u64,
}

/// Bounds of an account.
#[derive(Debug, Clone, Copy)]
pub(super) struct AccountLimits {
    /// Copies under way at a time.
    pub(super) copies: usize,
    /// Copies of one session.
    pub(super) of_session: usize,
    /// How long a caller waits for a copy.
    pub(super) deadline_ms: u64,
}

/// The resources that the device let go of.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ended<H> {
    /// The device no longer touches these resources.
    pub(super) held: H,
    /// Whether all bytes are in place, and a caller waits for them: [`Account::finish`] reports it.
    pub(super) is_whole: bool,
}

#[derive(Debug)]
struct Copy<H> {
    /// The session of the copy; `None` for a copy that no session asked for.
    session: Option<SessionId>,
    fills: Vec<SlotId>,
    reads: Vec<SlotId>,
    deadline_ms: u64,
    /// Whether the copy failed for its caller while the device may still be copying.
    is_told: bool,
    held: H,
}

#[derive(Debug)]
struct Caller {
    session: SessionId,
    /// The layers of the copy.
    of: u32,
    layers: u32,
    end: Option<CopyEnd>,
    asks: Vec<Asks>,
}

#[derive(Debug)]
struct Asks {
    request: RequestId,
    layers: u32,
    until_ms: u64,
}

impl<H> Account<H> {
    /// An account without copies and slots.
    pub(super) fn new(limits: AccountLimits) -> Self {
        Self {
            slots: Slots::default(),
            copies: BTreeMap::new(),
            callers: BTreeMap::new(),
            news: Vec::new(),
            limits,
            last_number: 0,
        }
    }

    /// Begins a copy of `layers` layers that reads these slots of the device tier. If the device or the session has reached its
    /// limit of copies, the error returns the copy's resources.
    pub(super) fn begin(
        &mut self,
        now_ms: u64,
        session: SessionId,
        layers: u32,
        reads: Vec<SlotId>,
        held: H,
    ) -> Result<DeviceCopyNumber, H> {
        // A copy that a session gave up counts for the session until the device has let go.
        let under_way = self.copies.values().filter(|copy| copy.session == Some(session)).count();
        let is_untold = |(number, caller): &(&DeviceCopyNumber, &Caller)| {
            caller.session == session && !self.copies.contains_key(number)
        };
        if under_way + self.callers.iter().filter(is_untold).count() >= self.limits.of_session {
            return Err(held);
        }
        let number = self.start(now_ms, Some(session), (Vec::new(), reads), held)?;
        self.callers.insert(number, Caller { session, of: layers, layers: 0, end: None, asks: Vec::new() });
        Ok(number)
    }

    /// Begins a copy without a caller, which fills reserved slots. The error is as in [`Self::begin`].
    pub(super) fn begin_own(
        &mut self,
        now_ms: u64,
        fills: Vec<SlotId>,
        held: H,
    ) -> Result<DeviceCopyNumber, H> {
        self.start(now_ms, None, (fills, Vec::new()), held)
    }

    fn start(
        &mut self,
        now_ms: u64,
        session: Option<SessionId>,
        (fills, reads): (Vec<SlotId>, Vec<SlotId>),
        held: H,
    ) -> Result<DeviceCopyNumber, H> {
        if self.copies.len() >= self.limits.copies {
            return Err(held);
        }
        self.last_number += 1;
        let number = DeviceCopyNumber(self.last_number);
        fills.iter().for_each(|&slot| self.slots.begin_fill(slot, number));
        reads.iter().for_each(|&slot| self.slots.begin_read(slot, number));
        let deadline_ms = now_ms.saturating_add(self.limits.deadline_ms);
        self.copies.insert(number, Copy { session, fills, reads, deadline_ms, is_told: false, held });
        Ok(number)
    }

    /// Whether copies with such resources take half of all places.
    pub(super) fn takes_half(&self, is_meant: impl Fn(&H) -> bool) -> bool {
        self.copies.values().filter(|copy| is_meant(&copy.held)).count() >= self.limits.copies.div_ceil(2)
    }

    /// Withdraws a copy that was not begun; returns its resources.
    pub(super) fn withdraw(&mut self, number: DeviceCopyNumber) -> Option<H> {
        self.callers.remove(&number);
        self.let_go(number, false).map(|ended| ended.held)
    }

    /// Notes how many layers of a copy the device has done.
    pub(super) fn layers(&mut self, number: DeviceCopyNumber, done: u32) {
        let Some(caller) = self.callers.get_mut(&number).filter(|caller| caller.end.is_none()) else {
            return;
        };
        caller.layers = done;
        self.answer(number, |asks| done >= asks.layers);
    }

    /// Takes the end of a copy from the device. Finish a successful copy by [`Account::finish`]; the caller of any other copy has
    /// been told. `None` if the device may still be copying.
    pub(super) fn ended(
        &mut self,
        number: DeviceCopyNumber,
        result: Result<(), DeviceFailure>,
    ) -> Option<Ended<H>> {
        if let Err(failure) = result {
            self.fail(number, end_of(failure));
        }
        if result == Err(DeviceFailure::Lost) {
            return None;
        }
        self.let_go(number, result.is_ok())
    }

    /// Tells the callers of copies that took too long, and returns these copies. Their resources stay held.
    pub(super) fn overdue(&mut self, now_ms: u64) -> Vec<DeviceCopyNumber> {
        let is_due = |copy: &Copy<H>| !copy.is_told && copy.deadline_ms <= now_ms;
        let due = self.copies.iter().filter(|(_, copy)| is_due(copy)).map(|(&number, _)| number);
        let overdue: Vec<DeviceCopyNumber> = due.collect();
        overdue.iter().for_each(|&number| self.fail(number, CopyEnd::Stalled));
        overdue
    }

    /// Notes that nothing of the device is left, and returns all resources.
    pub(super) fn gone(&mut self) -> Vec<H> {
        let all: Vec<DeviceCopyNumber> = self.copies.keys().copied().collect();
        all.iter().for_each(|&number| self.fail(number, CopyEnd::Lost));
        all.iter().filter_map(|&number| self.let_go(number, false)).map(|ended| ended.held).collect()
    }

    /// The resources of a copy that the device may still touch.
    pub(super) fn held(&self, number: DeviceCopyNumber) -> Option<&H> {
        self.copies.get(&number).map(|copy| &copy.held)
    }

    /// The resources of all copies.
    pub(super) fn all_held(&mut self) -> impl Iterator<Item = &mut H> {
        self.copies.values_mut().map(|copy| &mut copy.held)
    }

    /// Takes a session's question about the progress of a copy; [`Account::take_news`] gives the answer. Several questions may wait:
    /// the bound of a session's requests is theirs too. `false` if the session has no such copy, or was told the copy's end.
    pub(super) fn ask(
        &mut self,
        now_ms: u64,
        AskCopy { copy, layers, wait_ms }: AskCopy,
        request: RequestId,
    ) -> bool {
        let number = DeviceCopyNumber(copy);
        if self.callers.get(&number).is_none_or(|caller| caller.session != request.session) {
            return false;
        }
        let Some(caller) = self.callers.get_mut(&number) else { return false };
        caller.asks.push(Asks { request, layers, until_ms: now_ms.saturating_add(wait_ms) });
        if caller.end.is_some() || caller.layers >= layers || wait_ms == 0 {
            self.answer(number, |asks| asks.request == request);
        }
        true
    }

    /// Answers the requests whose wait is over.
    pub(super) fn answer_late(&mut self, now_ms: u64) {
        let is_late = |asks: &Asks| asks.until_ms <= now_ms;
        let late = self.callers.iter().filter(|(_, caller)| caller.asks.iter().any(is_late));
        let late: Vec<DeviceCopyNumber> = late.map(|(&number, _)| number).collect();
        late.into_iter().for_each(|number| self.answer(number, is_late));
    }

    /// Answers that are due since the last call.
    pub(super) fn take_news(&mut self) -> Vec<(RequestId, CopyProgress)> {
        std::mem::take(&mut self.news)
    }

    /// Notes that a session no longer wants news of a copy, and answers its waiting requests. Returns whether the session had
    /// such a copy.
    pub(super) fn forget(&mut self, session: SessionId, number: DeviceCopyNumber) -> bool {
        let is_its = self.callers.get(&number).is_some_and(|caller| caller.session == session);
        if is_its {
            self.answer(number, |_| true);
            self.callers.remove(&number);
        }
        is_its
    }

    /// Notes the end of a session, and returns its copies under way.
    pub(super) fn close(&mut self, session: SessionId) -> Vec<DeviceCopyNumber> {
        self.callers.retain(|_, caller| caller.session != session);
        self.numbers(|of| of == session)
    }

    /// Notes the end of all sessions, and returns their copies under way.
    pub(super) fn close_all(&mut self) -> Vec<DeviceCopyNumber> {
        self.callers.clear();
        self.news.clear();
        self.numbers(|_| true)
    }

    fn numbers(&self, is_meant: impl Fn(SessionId) -> bool) -> Vec<DeviceCopyNumber> {
        let of_sessions = self.copies.iter().filter(|(_, copy)| copy.session.is_some_and(&is_meant));
        of_sessions.map(|(&number, _)| number).collect()
    }

    /// Copies that the device has not let go of.
    pub(super) fn under_way(&self) -> usize {
        self.copies.len()
    }

    /// Notes that a copy failed for its caller while the device may still be copying. The slots that it fills belong to nobody
    /// any more.
    fn fail(&mut self, number: DeviceCopyNumber, end: CopyEnd) {
        let Some(copy) = self.copies.get_mut(&number).filter(|copy| !copy.is_told) else { return };
        copy.is_told = true;
        copy.fills.iter().for_each(|&slot| self.slots.give_up(slot));
        self.finish(number, end);
    }

    /// Notes that the device touches nothing of a copy any more. Its bytes are no hit if its caller was told of a failure.
    fn let_go(&mut self, number: DeviceCopyNumber, is_well: bool) -> Option<Ended<H>> {
        let Copy { fills, reads, is_told, held, .. } = self.copies.remove(&number)?;
        let is_whole = is_well && !is_told;
        fills.into_iter().for_each(|slot| self.slots.end(slot, number, is_whole));
        reads.into_iter().for_each(|slot| self.slots.end(slot, number, true));
        Some(Ended { held, is_whole })
    }

    /// Notes the end of a copy for its caller, unless the caller was told an end before.
    pub(super) fn finish(&mut self, number: DeviceCopyNumber, end: CopyEnd) {
        let Some(caller) = self.callers.get_mut(&number).filter(|caller| caller.end.is_none()) else {
            return;
        };
        caller.end = Some(end);
        if end == CopyEnd::Done {
            caller.layers = caller.of;
        }
        self.answer(number, |_| true);
    }

    /// Answers requests that wait for news of a copy.
    fn answer(&mut self, number: DeviceCopyNumber, is_due: impl Fn(&Asks) -> bool) {
        let Some(caller) = self.callers.get_mut(&number) else { return };
        let progress = CopyProgress { layers: caller.layers, end: caller.end };
        let due = caller.asks.extract_if(.., |asks| is_due(asks));
        let before = self.news.len();
        self.news.extend(due.map(|Asks { request, .. }| (request, progress)));
        if progress.end.is_some() && self.news.len() > before {
            self.callers.remove(&number);
        }
    }
}

fn end_of(failure: DeviceFailure) -> CopyEnd {
    match failure {
        DeviceFailure::Refused | DeviceFailure::NoTier => CopyEnd::Refused,
        DeviceFailure::Failed => CopyEnd::Failed,
        DeviceFailure::Lost => CopyEnd::Lost,
    }
}

#[cfg(test)]
mod tests;
