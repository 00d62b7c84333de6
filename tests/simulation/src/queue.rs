//! The event queue: what happens next, by virtual time, then by the order of planning.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// What is planned to happen.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    heap: BinaryHeap<Reverse<Planned<T>>>,
    last_number: u64,
}

#[derive(Debug)]
struct Planned<T> {
    at: Duration,
    number: u64,
    what: T,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        Self { heap: BinaryHeap::new(), last_number: 0 }
    }

    pub(crate) fn plan(&mut self, at: Duration, what: T) {
        self.last_number += 1;
        self.heap.push(Reverse(Planned { at, number: self.last_number, what }));
    }

    /// When the next thing happens.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.heap.peek().map(|Reverse(planned)| planned.at)
    }

    /// The next thing that happens, and when.
    pub(crate) fn next(&mut self) -> Option<(Duration, T)> {
        self.heap.pop().map(|Reverse(planned)| (planned.at, planned.what))
    }
}

impl<T> PartialEq for Planned<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<T> Eq for Planned<T> {}

impl<T> PartialOrd for Planned<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Planned<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
