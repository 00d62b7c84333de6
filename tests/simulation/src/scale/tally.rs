//! The counts of a cluster under load.

use std::collections::HashMap;
use std::time::Duration;

use super::alone::Rate;

/// All counts.
#[derive(Debug)]
pub(super) struct Tally {
    /// Whether messages and lookups count.
    pub(super) is_on: bool,
    /// For each number of homes, how many lookups asked this many.
    homes: Vec<u64>,
    /// Lookups that waited for a handshake.
    waited: u64,
    pub(super) dials: u64,
    /// The most connections that a node had open.
    pub(super) most_open: usize,
    pub(super) messages: [u64; Kind::ALL.len()],
    pub(super) bytes: [u64; Kind::ALL.len()],
    /// By node: messages of metadata to it, and bytes of blocks that it served.
    pub(super) received: Vec<u64>,
    pub(super) served: Vec<u64>,
    pub(super) rate: Rate,
    pub(super) requests: u64,
    pub(super) chunks: u64,
    pub(super) local_chunks: u64,
    pub(super) fetched: u64,
    pub(super) stale: u64,
    pub(super) restarts: u64,
    /// Changes that homes know, and when a home took the last of them.
    pub(super) known: u64,
    pub(super) known_at: Duration,
}

/// A kind of message between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Find,
    Announce,
    Compare,
    Repair,
    /// Only the head of a fetch: its blocks count as blocks.
    Fetch,
}

/// The nodes that a node has spoken with.
#[derive(Debug)]
pub(super) struct Contacts {
    /// For watched nodes: when each other node was last spoken with.
    last: Option<HashMap<usize, Duration>>,
}

impl Kind {
    pub(super) const ALL: [Self; 5] = [Self::Find, Self::Announce, Self::Compare, Self::Repair, Self::Fetch];
}

impl Tally {
    pub(super) fn new(nodes: usize) -> Self {
        Self {
            is_on: false,
            homes: Vec::new(),
            waited: 0,
            dials: 0,
            most_open: 0,
            messages: [0; Kind::ALL.len()],
            bytes: [0; Kind::ALL.len()],
            received: vec![0; nodes],
            served: vec![0; nodes],
            rate: Rate::default(),
            requests: 0,
            chunks: 0,
            local_chunks: 0,
            fetched: 0,
            stale: 0,
            restarts: 0,
            known: 0,
            known_at: Duration::ZERO,
        }
    }

    /// Begins to count anew; the knowledge of homes stays.
    pub(super) fn begin(&mut self) {
        let (known, known_at) = (self.known, self.known_at);
        *self = Self { is_on: true, known, known_at, ..Self::new(self.received.len()) };
    }

    pub(super) fn message(&mut self, to: usize, kind: Kind, bytes: u64) {
        if self.is_on {
            self.messages[kind as usize] += 1;
            self.bytes[kind as usize] += bytes;
            self.received[to] += 1;
        }
    }

    pub(super) fn served(&mut self, node: usize, bytes: u64) {
        if self.is_on {
            self.served[node] += bytes;
        }
    }

    pub(super) fn open(&mut self, connections: usize) {
        if self.is_on {
            self.most_open = self.most_open.max(connections);
        }
    }

    pub(super) fn lookup(&mut self, homes: usize, waits: bool) {
        if self.is_on {
            self.waited += u64::from(waits);
            self.homes.resize(self.homes.len().max(homes + 1), 0);
            self.homes[homes] += 1;
        }
    }

    /// The share of lookups that waited for a handshake.
    pub(super) fn waited(&self) -> f64 {
        self.waited as f64 / self.homes.iter().sum::<u64>().max(1) as f64
    }

    pub(super) fn homes_mean(&self) -> f64 {
        let asked: u64 = (0..).zip(&self.homes).map(|(homes, lookups): (u64, &u64)| homes * lookups).sum();
        asked as f64 / self.homes.iter().sum::<u64>().max(1) as f64
    }

    /// The 99th percentile of homes that a lookup asks.
    pub(super) fn homes_p99(&self) -> usize {
        let lookups: u64 = self.homes.iter().sum();
        let mut seen = 0;
        let is_far = |count: &u64| {
            seen += count;
            seen * 100 >= lookups * 99
        };
        self.homes.iter().position(is_far).unwrap_or(0)
    }
}

impl Contacts {
    pub(super) fn new(index: usize) -> Self {
        Self { last: (index < WATCHED).then(HashMap::new) }
    }

    pub(super) fn add(&mut self, node: usize, now: Duration) {
        if let Some(last) = &mut self.last {
            last.insert(node, now);
        }
    }

    /// Number of nodes that it has spoken with since `then`; `None` if it is not watched.
    pub(super) fn since(&self, then: Duration) -> Option<usize> {
        Some(self.last.as_ref()?.values().filter(|&&at| at >= then).count())
    }
}

/// The busiest of some nodes, as a multiple of their mean.
pub(super) fn skew(of: impl IntoIterator<Item = u64>) -> f64 {
    let (mut most, mut all, mut count) = (0, 0, 0);
    for one in of {
        (most, all, count) = (most.max(one), all + one, count + 1);
    }
    if all == 0 { 0.0 } else { most as f64 * f64::from(count) / all as f64 }
}

/// Nodes whose contacts are kept.
const WATCHED: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_is_a_multiple_of_the_mean() {
        assert!((skew([1, 1, 4]) - 2.0).abs() < 1e-9);
        assert!((skew([0, 0]) - 0.0).abs() < 1e-9);
    }

    #[test]
    fn homes_are_counted_by_lookup() {
        let mut tally = Tally::new(1);
        tally.lookup(9, true);
        tally.is_on = true;
        (0..99).for_each(|_| tally.lookup(2, false));
        tally.lookup(102, true);
        assert!((tally.homes_mean() - 3.0).abs() < 1e-9);
        assert_eq!(tally.homes_p99(), 2);
        assert!((tally.waited() - 0.01).abs() < 1e-9);
    }
}
