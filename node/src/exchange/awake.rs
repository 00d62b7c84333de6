//! Keeps the thread between nodes awake while a packet is due in a moment: waking up takes longer than that moment.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rustix::thread::sched_yield;
use tokio::sync::Notify;

use crate::clock::Clock;

/// Looks for packets without sleeping while an answer is awaited or a request is expected, for at most [`SPIN`] after the last
/// sign of packets. Other tasks and threads run meanwhile. If nothing came in that time, the attempt was vain, and the thread
/// sleeps the next times. Each vain attempt doubles the number of these times. Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct Awake(Rc<State>);

#[derive(Debug)]
struct State {
    clock: Clock,
    may_look: bool,
    /// The number of waiters, and the time until which the thread stays awake for them.
    waiting: Cell<u32>,
    for_waiting: Cell<Duration>,
    /// The time until which the thread stays awake for a request that may follow.
    for_next: Cell<Duration>,
    /// Whether the thread looks for packets now.
    looks: Cell<bool>,
    begin: Notify,
    backoff: Backoff,
}

/// Somebody waits for an answer as long as this value lives.
#[derive(Debug)]
pub(super) struct Waiting(Awake);

/// Decides when staying awake is worth it.
#[derive(Debug, Default)]
struct Backoff {
    /// Vain attempts in a row.
    vain: Cell<u32>,
    /// Times that the thread sleeps through before the next attempt.
    skip: Cell<u32>,
}

impl Awake {
    pub(super) fn new(clock: Clock) -> Self {
        Self::of(clock, true)
    }

    /// For a thread that always sleeps while it waits: a block takes a block thread longer than waking up.
    pub(super) fn never(clock: Clock) -> Self {
        Self::of(clock, false)
    }

    fn of(clock: Clock, may_look: bool) -> Self {
        Self(Rc::new(State {
            clock,
            may_look,
            waiting: Cell::new(0),
            for_waiting: Cell::default(),
            for_next: Cell::default(),
            looks: Cell::new(false),
            begin: Notify::new(),
            backoff: Backoff::default(),
        }))
    }

    /// Notes that somebody waits from now on.
    pub(super) fn wait(&self) -> Waiting {
        let waiting = Waiting(self.clone());
        self.0.waiting.update(|waiting| waiting + 1);
        self.0.stays(&self.0.for_waiting);
        waiting
    }

    /// Notes that a request was served: another one may follow.
    pub(super) fn expects_next(&self) {
        self.0.stays(&self.0.for_next);
    }

    /// Notes that a request came. If the thread stayed awake for it, the attempt paid.
    pub(super) fn came(&self) {
        if self.0.looks.get() {
            self.0.backoff.paid();
        }
    }

    /// Keeps the thread awake whenever it should look for packets.
    pub(super) async fn keep(self) {
        let State { looks, begin, backoff, .. } = &*self.0;
        loop {
            looks.set(false);
            begin.notified().await;
            while self.0.is_asked_for() {
                // The thread whose answer is awaited may need this very CPU.
                sched_yield();
                tokio::task::yield_now().await;
            }
            backoff.ended();
        }
    }
}

impl State {
    fn stays(&self, until: &Cell<Duration>) {
        if !self.looks.get() {
            if !self.may_look || !self.backoff.is_worth_it() {
                return;
            }
            self.looks.set(true);
            self.begin.notify_one();
        }
        until.set(self.clock.elapsed() + SPIN);
    }

    fn is_asked_for(&self) -> bool {
        let now = self.clock.elapsed();
        now < self.for_next.get() || self.waiting.get() > 0 && now < self.for_waiting.get()
    }
}

impl Waiting {
    /// Notes that a part of the awaited bytes came, and more is on its way.
    pub(super) fn goes_on(&self) {
        self.0.came();
        let State { looks, for_waiting, clock, .. } = &*self.0.0;
        if looks.get() {
            for_waiting.set(clock.elapsed() + SPIN);
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.0.waiting.update(|waiting| waiting - 1);
    }
}

impl Backoff {
    fn is_worth_it(&self) -> bool {
        match self.skip.get().checked_sub(1) {
            None => true,
            Some(rest) => {
                self.skip.set(rest);
                false
            }
        }
    }

    fn paid(&self) {
        self.vain.set(0);
    }

    /// Notes that the thread goes to sleep. The first time after something came, no attempt is skipped.
    fn ended(&self) {
        self.skip.set((1 << self.vain.get()) - 1);
        self.vain.set((self.vain.get() + 1).min(MOST_VAIN));
    }
}

/// How long the thread looks for packets after the last sign of them. Waking the thread takes 20 to 50 us, a small request and
/// its answer about as long.
const SPIN: Duration = Duration::from_micros(150);

/// Vain attempts in a row after which only one time in 64 is tried.
const MOST_VAIN: u32 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `times` times are tried if each attempt is vain.
    fn tried(backoff: &Backoff, times: u32) -> u32 {
        let is_tried = |_: &u32| {
            backoff.is_worth_it() && {
                backoff.ended();
                true
            }
        };
        (0..times).filter(is_tried).count() as u32
    }

    #[test]
    fn a_thread_that_stays_awake_in_vain_soon_sleeps_nearly_always_until_something_comes() {
        let backoff = Backoff::default();
        assert_eq!(tried(&backoff, 2), 2, "the first vain time may be the end of a run");
        assert!(tried(&backoff, 64) <= 6);
        assert!((90..=100).contains(&tried(&backoff, 6_400)));
        while !backoff.is_worth_it() {}
        backoff.paid();
        backoff.ended();
        assert_eq!(tried(&backoff, 1), 1, "what comes in time is stayed awake for");
    }

    async fn with_thread(test: impl AsyncFnOnce(&Awake)) {
        let awake = Awake::new(Clock::start());
        tokio::select! {
            () = awake.clone().keep() => unreachable!("it never ends"),
            () = async {
                tokio::task::yield_now().await;
                test(&awake).await;
            } => {}
        }
    }

    #[tokio::test]
    async fn a_thread_that_expects_a_request_looks_for_it_for_a_moment_and_sleeps_then() {
        with_thread(async |awake| {
            assert!(!awake.0.looks.get());
            awake.expects_next();
            let until = awake.0.for_next.get();
            while awake.0.looks.get() {
                tokio::task::yield_now().await;
            }
            assert!(awake.0.clock.elapsed() >= until);
        })
        .await;
    }

    #[tokio::test]
    async fn a_thread_sleeps_as_soon_as_nobody_waits() {
        with_thread(async |awake| {
            let waiting = [awake.wait(), awake.wait()];
            // Far more than the test takes.
            awake.0.for_waiting.set(Duration::from_secs(1_000));
            for one in waiting {
                tokio::task::yield_now().await;
                assert!(awake.0.looks.get(), "somebody waits");
                drop(one);
            }
            while awake.0.looks.get() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}
