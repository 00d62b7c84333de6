//! The requests with their times and nodes: the same for the cluster and for the models beside it.

use std::time::Duration;

use super::Load;
use super::blocks::Id;

/// All requests of a run, in order.
pub(super) struct Arrivals<'a> {
    load: &'a Load,
    random: fastrand::Rng,
    now: Duration,
    /// The next request of each copy of the traces.
    next: Vec<usize>,
    /// The order in which nodes are asked.
    turns: Vec<usize>,
    turn: usize,
}

/// A request that arrives.
#[derive(Debug)]
pub(super) struct Arrival {
    /// From the beginning of the load.
    pub(super) at: Duration,
    pub(super) node: usize,
    pub(super) tokens: u64,
    /// The request's whole chunks, with their anchors.
    pub(super) blocks: Vec<(Id, Id)>,
}

impl<'a> Arrivals<'a> {
    pub(super) fn new(load: &'a Load) -> Self {
        let mut random = fastrand::Rng::with_seed(load.seed);
        // Each copy begins anywhere in the first part of the traces, so that copies are not in step.
        let begins = load.trace.requests.len() / 4;
        let next = (0..load.copies()).map(|_| random.usize(..begins.max(1))).collect();
        let mut turns: Vec<usize> = (0..load.playing()).collect();
        random.shuffle(&mut turns);
        Self { load, random, now: Duration::ZERO, next, turns, turn: 0 }
    }
}

impl Iterator for Arrivals<'_> {
    type Item = Arrival;

    fn next(&mut self) -> Option<Arrival> {
        let each_second = self.load.rate * self.load.playing() as f64;
        let pause = -(1.0 - self.random.f64()).ln() / each_second;
        self.now += Duration::from_secs_f64(pause);
        if self.now >= self.load.lasts() {
            return None;
        }
        let copy = self.random.usize(..self.next.len());
        let requests = &self.load.trace.requests;
        let request = &requests[self.next[copy] % requests.len()];
        // A copy that was played to its end begins again under new names.
        let round = self.next[copy] / requests.len();
        self.next[copy] += 1;
        let name = (round * self.next.len() + copy) as u32;
        let node = self.turns[self.turn];
        self.turn = (self.turn + 1) % self.turns.len();
        let blocks = self.load.trace.blocks(name, request);
        Some(Arrival { at: self.now, node, tokens: request.tokens, blocks })
    }
}
