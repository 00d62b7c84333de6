//! A policy over queues: one rule, and the bookkeeping that all such rules share.

use std::fmt;

use super::queues::Queues;
use super::{Facts, Judge, Policy, Removal};
use crate::store::ids::ChunkNumber;

/// The rule for a chunk's place in the queues, and for the queue of the next victim.
pub(super) trait Rule: fmt::Debug + Send {
    /// Puts a new chunk into a queue; see [`Policy::insert`].
    fn insert(&mut self, queues: &mut Queues, chunk: ChunkNumber, facts: Facts);

    /// Notes that a chunk was used.
    fn touch(&mut self, queues: &mut Queues, chunk: ChunkNumber);

    /// Notes that a chunk leaves. It is still in its queue.
    fn leaves(&mut self, _: &Queues, _: ChunkNumber, _: Removal) {}

    /// The chunk that should be evicted next; see [`Policy::victim`].
    fn victim(&mut self, queues: &mut Queues, judge: Judge<'_>) -> Option<ChunkNumber> {
        queues.first(0, judge)
    }

    /// Every chunk, in the order of eviction.
    fn order(&self, queues: &Queues) -> Vec<ChunkNumber> {
        queues.order()
    }
}

/// Queues and the rule over them.
#[derive(Debug)]
pub(super) struct Queued<R> {
    queues: Queues,
    rule: R,
}

impl<R: Rule> Queued<R> {
    /// A rule over `queues` queues.
    pub(super) fn new(queues: usize, rule: R) -> Self {
        Self { queues: Queues::new(queues), rule }
    }
}

impl<R: Rule> Policy for Queued<R> {
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        self.rule.insert(&mut self.queues, chunk, facts);
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        self.rule.touch(&mut self.queues, chunk);
    }

    fn remove(&mut self, chunk: ChunkNumber, why: Removal) {
        self.rule.leaves(&self.queues, chunk, why);
        self.queues.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkNumber) {
        self.queues.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkNumber) {
        self.queues.unblock(chunk);
    }

    fn victim(&mut self, judge: Judge<'_>) -> Option<ChunkNumber> {
        self.rule.victim(&mut self.queues, judge)
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.rule.order(&self.queues)
    }
}
