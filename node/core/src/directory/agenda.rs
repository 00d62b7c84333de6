//! Decides which home gets a message next.
//!
//! A heap of due times finds the few homes that are due without a look at all homes. An outdated entry stays in the heap until
//! its time comes, and is then skipped.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use larder_protocol::table::NodeNumber;

use crate::Millis;

/// The times at which homes get their next messages.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    heap: BinaryHeap<Reverse<(Millis, NodeNumber)>>,
    planned: BTreeMap<NodeNumber, Millis>,
}

impl Agenda {
    /// Plans a home for this time, in place of an earlier plan.
    pub(super) fn plan(&mut self, home: NodeNumber, at: Millis) {
        if self.planned.insert(home, at) != Some(at) {
            self.heap.push(Reverse((at, home)));
        }
        if self.heap.len() > 2 * self.planned.len() + SLACK {
            self.heap = self.planned.iter().map(|(&home, &at)| Reverse((at, home))).collect();
        }
    }

    /// Plans a home for this time, unless an earlier time is planned.
    pub(super) fn plan_sooner(&mut self, home: NodeNumber, at: Millis) {
        if self.planned.get(&home).is_none_or(|&planned| at < planned) {
            self.plan(home, at);
        }
    }

    /// Forgets all but these homes.
    pub(super) fn retain(&mut self, stays: impl Fn(NodeNumber) -> bool) {
        self.planned.retain(|&home, _| stays(home));
    }

    /// The time at which the next home is due.
    pub(super) fn next_due(&mut self) -> Option<Millis> {
        while let Some(&Reverse((at, home))) = self.heap.peek() {
            if self.planned.get(&home) == Some(&at) {
                return Some(at);
            }
            self.heap.pop();
        }
        None
    }

    /// Takes a home whose time has come off the agenda.
    pub(super) fn take_due(&mut self, now: Millis) -> Option<NodeNumber> {
        self.next_due().filter(|&at| at <= now)?;
        let Reverse((_, home)) = self.heap.pop()?;
        self.planned.remove(&home);
        Some(home)
    }
}

/// The heap is built anew only if it has at least this many outdated entries.
const SLACK: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeNumber = NodeNumber(1);
    const TWO: NodeNumber = NodeNumber(2);

    #[test]
    fn homes_are_due_in_the_order_of_their_times_and_once() {
        let mut agenda = Agenda::default();
        agenda.plan(ONE, Millis(20));
        agenda.plan(TWO, Millis(10));
        assert_eq!((agenda.next_due(), agenda.take_due(Millis(9))), (Some(Millis(10)), None));
        assert_eq!(agenda.take_due(Millis(30)), Some(TWO));
        assert_eq!(agenda.take_due(Millis(30)), Some(ONE));
        assert_eq!(agenda.take_due(Millis(30)), None);
    }

    #[test]
    fn the_last_plan_counts() {
        let mut agenda = Agenda::default();
        agenda.plan(ONE, Millis(10));
        agenda.plan(ONE, Millis(20));
        agenda.plan_sooner(ONE, Millis(25));
        assert_eq!(agenda.take_due(Millis(19)), None);
        agenda.plan_sooner(ONE, Millis(15));
        assert_eq!((agenda.next_due(), agenda.take_due(Millis(15))), (Some(Millis(15)), Some(ONE)));
        assert_eq!((agenda.next_due(), agenda.take_due(Millis(30))), (None, None));
        agenda.plan(TWO, Millis(40));
        agenda.retain(|home| home != TWO);
        assert_eq!(agenda.take_due(Millis(40)), None);
    }

    #[test]
    fn plans_that_change_all_the_time_take_no_more_room() {
        let mut agenda = Agenda::default();
        for time in 0..10_000 {
            agenda.plan(ONE, Millis(100_000 - time));
        }
        assert!(agenda.heap.len() <= 2 + SLACK);
        assert_eq!(agenda.take_due(Millis(100_000)), Some(ONE));
    }
}
