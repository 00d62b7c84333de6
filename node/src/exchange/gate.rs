//! The gate before each peer: so many streams of blocks and so many bytes at a time, and who waits goes in by class.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use larder_core::priority::Turns;
use larder_protocol::peer::Class;
use tokio::sync::{oneshot, watch};

use super::{CREDIT_UNIT_BYTES, ExchangeLimits};
use crate::clock::Clock;

/// What one peer may be asked for at a time.
pub(super) struct Gate {
    state: RefCell<State>,
    clock: Clock,
    all_credits: u64,
}

struct State {
    streams: usize,
    /// In units of [`CREDIT_UNIT_BYTES`].
    credits: u64,
    turns: Turns<u64>,
    waiting: HashMap<u64, Request>,
    last_number: u64,
}

struct Request {
    credits: u64,
    admit: oneshot::Sender<Pass>,
}

/// A stream and the credits for what comes on it, until it is dropped.
pub(super) struct Pass {
    gate: Rc<Gate>,
    credits: u64,
}

/// A place in the line, given up when it is dropped.
struct Place<'a> {
    gate: &'a Rc<Gate>,
    number: u64,
}

impl Gate {
    pub(super) fn new(limits: &ExchangeLimits, clock: Clock) -> Rc<Self> {
        let all_credits = limits.credit_bytes / CREDIT_UNIT_BYTES;
        let state = State {
            streams: limits.streams_per_peer,
            credits: all_credits,
            turns: Turns::default(),
            waiting: HashMap::new(),
            last_number: 0,
        };
        Rc::new(Self { state: RefCell::new(state), clock, all_credits })
    }

    /// Waits until so many bytes may be asked for; more than there are credits for count as all of them. `class` may change
    /// meanwhile. Dropping the future gives the place up.
    pub(super) async fn enter(self: &Rc<Self>, bytes: u64, mut class: watch::Receiver<Class>) -> Pass {
        let credits = bytes.div_ceil(CREDIT_UNIT_BYTES).clamp(1, self.all_credits.max(1));
        let (admit, mut admitted) = oneshot::channel();
        let place = self.line_up(Request { credits, admit }, *class.borrow_and_update());
        self.admit();
        loop {
            tokio::select! {
                pass = &mut admitted => match pass {
                    Ok(pass) => return pass,
                    // The request stands in the gate until it is admitted, or this future is dropped.
                    Err(_) => std::future::pending().await,
                },
                changed = class.changed() => match changed {
                    Ok(()) => place.change_class(*class.borrow_and_update()),
                    // Whoever ordered is gone; the order is ended from elsewhere.
                    Err(_) => std::future::pending().await,
                }
            }
        }
    }

    /// Bytes that are asked for and have not come.
    pub(super) fn bytes_under_way(&self) -> u64 {
        (self.all_credits - self.state.borrow().credits) * CREDIT_UNIT_BYTES
    }

    fn line_up(self: &Rc<Self>, request: Request, class: Class) -> Place<'_> {
        let state = &mut *self.state.borrow_mut();
        state.last_number += 1;
        let number = state.last_number;
        state.turns.wait(number, class, self.clock.elapsed());
        state.waiting.insert(number, request);
        Place { gate: self, number }
    }

    /// Lets in whose turn it is, as long as there is room for them: who needs much is not passed by who needs little.
    fn admit(self: &Rc<Self>) {
        while let Some(Request { credits, admit }) = self.state.borrow_mut().next() {
            // Who waited may have gone away: the pass comes back then, and lets the next one in.
            let _ = admit.send(Pass { gate: Rc::clone(self), credits });
        }
    }
}

impl State {
    fn next(&mut self) -> Option<Request> {
        let number = self.turns.next()?;
        let needs = self.waiting.get(&number).map_or(0, |request| request.credits);
        if self.streams == 0 || self.credits < needs {
            return None;
        }
        self.turns.leave(number);
        let request = self.waiting.remove(&number)?;
        self.streams -= 1;
        self.credits -= request.credits;
        Some(request)
    }
}

impl Place<'_> {
    fn change_class(&self, class: Class) {
        self.gate.state.borrow_mut().turns.change_class(self.number, class);
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let state = &mut *self.gate.state.borrow_mut();
        state.turns.leave(self.number);
        state.waiting.remove(&self.number);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        {
            let state = &mut *self.gate.state.borrow_mut();
            state.streams += 1;
            state.credits += self.credits;
        }
        self.gate.admit();
    }
}
