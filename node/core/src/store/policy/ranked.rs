//! Policies that give each chunk a rank; the chunk of the smallest rank goes first. SGLang's radix cache has all four under the
//! same names.

use super::heap::Heap;
use super::{Facts, Judge, Policy, Removal};
use crate::store::ids::ChunkNumber;

/// Chunks by rank. A rank ends with the number of the use that gave it, so no two ranks are equal.
#[derive(Debug)]
pub(super) struct Ranked {
    heap: Heap,
    uses: u64,
    /// The rank of a new chunk, by its facts and the number of this use.
    enters: fn(Facts, u64) -> u64,
    /// The rank after a use, from the rank before and the number of this use.
    used: fn(u64, u64) -> u64,
}

impl Ranked {
    fn new(enters: fn(Facts, u64) -> u64, used: fn(u64, u64) -> u64) -> Self {
        Self { heap: Heap::default(), uses: 0, enters, used }
    }

    /// First in, last out: the newest insertion goes first.
    pub(super) fn filo() -> Self {
        Self::new(|_, now| u64::MAX - now, |rank, _| rank)
    }

    /// Most recently used goes first. As only leaves go, it is nearly `filo`: the head of a prompt, which was used last, has
    /// children.
    pub(super) fn mru() -> Self {
        Self::new(|_, now| u64::MAX - now, |_, now| u64::MAX - now)
    }

    /// The chunk with the fewest hits goes first; among equals, the least recently used chunk. Hits never age, and stop counting
    /// at 65,535.
    pub(super) fn lfu() -> Self {
        let used = |rank: u64, now| ((rank >> TIME_BITS) + 1).min(u16::MAX.into()) << TIME_BITS | now;
        Self::new(|_, now| now, used)
    }

    /// The chunk with the caller's lowest priority goes first; among equals, the least recently used chunk.
    pub(super) fn priority() -> Self {
        let enters =
            |facts: Facts, now| u64::from(facts.priority.wrapping_sub(i8::MIN) as u8) << TIME_BITS | now;
        Self::new(enters, |rank, now| rank >> TIME_BITS << TIME_BITS | now)
    }
}

impl Policy for Ranked {
    fn insert(&mut self, chunk: ChunkNumber, facts: Facts) {
        self.uses += 1;
        self.heap.push(chunk, (self.enters)(facts, self.uses));
    }

    fn touch(&mut self, chunk: ChunkNumber) {
        let before = self.heap.key(chunk);
        let rank = (self.used)(before, self.uses + 1);
        if rank != before {
            self.uses += 1;
            self.heap.set_key(chunk, rank);
        }
    }

    fn remove(&mut self, chunk: ChunkNumber, _: Removal) {
        self.heap.remove(chunk);
    }

    fn block(&mut self, chunk: ChunkNumber) {
        self.heap.block(chunk);
    }

    fn unblock(&mut self, chunk: ChunkNumber) {
        self.heap.unblock(chunk);
    }

    fn victim(&mut self, judge: Judge<'_>) -> Option<ChunkNumber> {
        self.heap.first(judge)
    }

    fn order(&self) -> Vec<ChunkNumber> {
        self.heap.order()
    }
}

/// The lower bits of a rank, which hold the number of the use.
const TIME_BITS: u32 = 48;
