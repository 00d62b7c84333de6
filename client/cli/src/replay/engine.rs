//! The queue of a node's engine: it prefills a limited number of requests at a time, in the scheduler's order.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::oneshot;

/// The engine of one node.
#[derive(Debug)]
pub(super) struct Engine {
    /// Prefills that may begin at once.
    free: Cell<u16>,
    /// Requests that wait, by key; of equal keys, the first that came.
    waiting: RefCell<BTreeMap<(Duration, u64), oneshot::Sender<()>>>,
    came: Cell<u64>,
}

/// The right to prefill a request. Dropping it passes the right on to the next request.
#[derive(Debug)]
pub(super) struct Prefill<'a>(&'a Engine);

impl Engine {
    /// An engine that prefills `prefills` requests at a time.
    pub(super) fn new(prefills: u16) -> Self {
        Self { free: Cell::new(prefills), waiting: RefCell::default(), came: Cell::new(0) }
    }

    /// Waits for a place; the least `key` goes first ([`larder_protocol::routing::queue_key`]).
    pub(super) async fn begin(&self, key: Duration) -> Prefill<'_> {
        match self.free.get().checked_sub(1) {
            Some(left) => self.free.set(left),
            None => {
                let (turn, comes) = oneshot::channel();
                self.came.set(self.came.get() + 1);
                self.waiting.borrow_mut().insert((key, self.came.get()), turn);
                // This never fails, since each place is handed on.
                let _ = comes.await;
            }
        }
        Prefill(self)
    }
}

impl Drop for Prefill<'_> {
    fn drop(&mut self) {
        let engine = self.0;
        while let Some((_, next)) = engine.waiting.borrow_mut().pop_first() {
            if next.send(()).is_ok() {
                return;
            }
        }
        engine.free.set(engine.free.get() + 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn the_least_key_goes_first_and_every_place_is_handed_on() {
        let engine = Engine::new(1);
        let first = engine.begin(Duration::from_secs(5)).now_or_never().unwrap();
        let mut late = Box::pin(engine.begin(Duration::from_secs(3)));
        let mut early = Box::pin(engine.begin(Duration::from_secs(2)));
        assert!((&mut late).now_or_never().is_none() && (&mut early).now_or_never().is_none());
        drop(first);
        assert!((&mut late).now_or_never().is_none());
        drop((&mut early).now_or_never().unwrap());
        drop((&mut late).now_or_never().unwrap());
        assert!(engine.begin(Duration::ZERO).now_or_never().is_some());
    }
}
