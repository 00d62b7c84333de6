//! The event queue: the next event by virtual time, then by the order of planning.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The planned events. The heap moves numbers, since events may be large.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    heap: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    planned: Vec<Option<T>>,
    free: Vec<usize>,
    last_number: u64,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        Self { heap: BinaryHeap::new(), planned: Vec::new(), free: Vec::new(), last_number: 0 }
    }

    pub(crate) fn plan(&mut self, at: Duration, what: T) {
        self.last_number += 1;
        let place = self.free.pop().unwrap_or_else(|| {
            self.planned.push(None);
            self.planned.len() - 1
        });
        self.planned[place] = Some(what);
        self.heap.push(Reverse((at, self.last_number, place)));
    }

    /// When the next event happens.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.heap.peek().map(|&Reverse((at, ..))| at)
    }

    /// The next event, and its time.
    pub(crate) fn next(&mut self) -> Option<(Duration, T)> {
        let Reverse((at, _, place)) = self.heap.pop()?;
        self.free.push(place);
        Some((at, self.planned[place].take()?))
    }
}
