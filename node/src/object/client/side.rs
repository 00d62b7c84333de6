//! The separate health of reading and of writing: when the store was heard last, and when it is left alone.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::super::breaker::Breaker;
use super::super::metrics::Side;
use super::super::trouble::{Trouble, TroubleKind};
use super::Client;

/// The state of one side of the store.
pub(super) struct SideState {
    breaker: RefCell<Breaker>,
    /// When the store was heard last.
    heard: Cell<Instant>,
    /// Requests that are under way.
    under_way: Cell<u32>,
    /// Since when a request has been under way without a sign from the store.
    waits_since: Cell<Instant>,
    /// Notified when a trial may be due.
    opened: Notify,
    /// Tells running requests that the store is silent.
    silent: Notify,
}

/// A request that is under way.
pub(super) struct Asked<'a>(&'a SideState);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
    }
}

impl Default for SideState {
    fn default() -> Self {
        let now = Cell::new(Instant::now());
        Self {
            breaker: RefCell::default(),
            heard: now.clone(),
            under_way: Cell::new(0),
            waits_since: now,
            opened: Notify::new(),
            silent: Notify::new(),
        }
    }
}

impl Client {
    /// Leaves the store alone from the beginning.
    pub(in super::super) fn leave_alone(&self, trouble: &Trouble) {
        let sides =
            [Side::Reading, Side::Writing].into_iter().filter(|side| self.writes || *side == Side::Reading);
        sides.for_each(|side| while !self.failed(side, trouble) {});
    }

    /// Waits until a side that is left alone is to be tried again.
    ///
    /// Cancel safe.
    pub(in super::super) async fn trial(&self, side: Side) {
        loop {
            let due = self.side(side).breaker.borrow().trial_at();
            match due.map(|at| self.start + at) {
                Some(at) if at <= Instant::now() => return,
                Some(at) => sleep_until(at).await,
                None => self.side(side).opened.notified().await,
            }
        }
    }

    /// Notes that a trial failed: the next trial is due later.
    pub(super) fn trial_failed(&self, side: Side) {
        self.side(side).breaker.borrow_mut().trial_failed(self.now());
        self.put_off(side);
    }

    /// Puts the next trial off if the store asked for it.
    fn put_off(&self, side: Side) {
        if let Some(until) = self.said.pause.until() {
            self.side(side).breaker.borrow_mut().waits_until(until - self.start);
        }
    }

    pub(in super::super) fn is_open(&self, side: Side) -> bool {
        self.side(side).breaker.borrow().is_open()
    }

    /// Notes that the store was heard.
    pub(super) fn heard(&self, side: Side) {
        let (side, now) = (self.side(side), Instant::now());
        side.heard.set(now);
        side.waits_since.set(now);
    }

    /// Notes that a request is under way, as long as the result lives.
    pub(super) fn asked(&self, side: Side) -> Asked<'_> {
        let side = self.side(side);
        if side.under_way.get() == 0 {
            side.waits_since.set(Instant::now());
        }
        side.under_way.set(side.under_way.get() + 1);
        Asked(side)
    }

    /// Whether the store has let requests wait for at least this time, and was not heard meanwhile.
    pub(super) fn is_silent_for(&self, side: Side, time: Duration) -> bool {
        let side = self.side(side);
        side.under_way.get() > 0 && side.waits_since.get().elapsed() >= time
    }

    /// Whether the store was heard after `since`.
    pub(super) fn has_heard_since(&self, side: Side, since: Instant) -> bool {
        self.side(side).heard.get() > since
    }

    /// Waits until the store has been silent for as long as one request may take, counted from `start` at the earliest. Also ends
    /// when another request has waited that long.
    ///
    /// Cancel safe.
    pub(super) async fn silence(&self, side: Side, start: Instant) {
        let state = self.side(side);
        let by_others = self.went_silent_by_others(side);
        let own = async {
            loop {
                let since = state.heard.get().max(start);
                sleep_until(since + self.patience).await;
                if !self.has_heard_since(side, since) {
                    return state.silent.notify_waiters();
                }
            }
        };
        tokio::select! {
            () = own => {}
            () = by_others => {}
        }
    }

    /// Waits until a request has waited for the store for as long as anybody waits.
    ///
    /// Cancel safe.
    pub(super) async fn went_silent_by_others(&self, side: Side) {
        self.side(side).silent.notified().await;
    }

    /// Notes that the store did its work, or refused properly.
    pub(super) fn succeeded(&self, side: Side) {
        if self.side(side).breaker.borrow_mut().succeeded() {
            tracing::info!(side = side.name(), "the object store answers again");
            self.said.closed[side as usize].store(false, Ordering::Release);
            self.metrics.reopened(side);
        }
    }

    /// Notes that the store failed. Returns whether it is left alone from now on.
    pub(super) fn failed(&self, side: Side, trouble: &Trouble) -> bool {
        let may_be_one_object = trouble.kind == TroubleKind::Denied || trouble.is_of_archive();
        let note = if may_be_one_object { Breaker::refused } else { Breaker::failed };
        self.note(side, trouble, note)
    }

    /// Notes that the store is silent: it is left alone, and tried again at once.
    pub(super) fn went_silent(&self, side: Side, trouble: &Trouble) {
        self.note(side, trouble, Breaker::went_silent);
    }

    fn note(&self, side: Side, trouble: &Trouble, note: fn(&mut Breaker, Duration) -> bool) -> bool {
        let opens = note(&mut self.side(side).breaker.borrow_mut(), self.now());
        if opens {
            self.put_off(side);
            let name = side.name();
            tracing::error!(%trouble, side = name, "the object store fails: the node leaves it alone, and tries again later");
            *larder_net::lock(&self.said.trouble) = Some(trouble.clone());
            self.said.closed[side as usize].store(true, Ordering::Release);
            self.metrics.closed(side);
            self.side(side).opened.notify_one();
        }
        opens
    }

    fn side(&self, side: Side) -> &SideState {
        &self.sides[side as usize]
    }
}
