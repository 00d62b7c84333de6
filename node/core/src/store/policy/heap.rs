//! Chunks by key, the smallest first: for orders in which a chunk may enter anywhere.
//!
//! A binary heap of the chunks that may be evicted. An entry is stale if its chunk has left, changed its key or was blocked. A
//! stale entry is dropped when it comes up, or when stale entries outnumber the others. So every operation takes amortized O(log
//! n).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{Judge, Verdict};
use crate::store::ids::ChunkNumber;

/// A set of chunks with keys; some are blocked.
#[derive(Debug, Default)]
pub(super) struct Heap {
    states: Vec<State>,
    entries: BinaryHeap<Reverse<(u64, ChunkNumber)>>,
    len: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    key: u64,
    is_present: bool,
    is_blocked: bool,
    /// Whether an entry with this key is in the heap.
    is_entered: bool,
}

impl Heap {
    /// Adds a chunk. No two chunks have the same key.
    pub(super) fn push(&mut self, chunk: ChunkNumber, key: u64) {
        if self.states.len() <= chunk.position() {
            self.states.resize(chunk.position() + 1, State::default());
        }
        debug_assert!(!self.states[chunk.position()].is_present, "a chunk is inserted once");
        self.len += 1;
        self.states[chunk.position()] = State { key, is_present: true, is_blocked: false, is_entered: false };
        self.enter(chunk);
    }

    /// The key of a chunk.
    pub(super) fn key(&self, chunk: ChunkNumber) -> u64 {
        self.states[chunk.position()].key
    }

    /// Gives a chunk another key.
    pub(super) fn set_key(&mut self, chunk: ChunkNumber, key: u64) {
        let state = &mut self.states[chunk.position()];
        *state = State { key, is_entered: false, ..*state };
        self.enter(chunk);
    }

    /// Takes a chunk out.
    pub(super) fn remove(&mut self, chunk: ChunkNumber) {
        self.len -= 1;
        self.states[chunk.position()] = State::default();
    }

    /// Blocks a chunk: it may not be evicted.
    pub(super) fn block(&mut self, chunk: ChunkNumber) {
        self.states[chunk.position()].is_blocked = true;
    }

    /// Unblocks a chunk: it may be evicted.
    pub(super) fn unblock(&mut self, chunk: ChunkNumber) {
        self.states[chunk.position()].is_blocked = false;
        self.enter(chunk);
    }

    /// The chunk with the smallest key that may be evicted and that `judge` accepts.
    pub(super) fn first(&mut self, judge: Judge<'_>) -> Option<ChunkNumber> {
        let mut skipped = Vec::new();
        let mut first = None;
        while let Some(&Reverse((key, chunk))) = self.entries.peek() {
            let state = &mut self.states[chunk.position()];
            let is_current = state.is_entered && state.key == key;
            if !is_current || state.is_blocked {
                state.is_entered &= !is_current;
                self.entries.pop();
                continue;
            }
            match judge(chunk) {
                Verdict::Take => first = Some(chunk),
                Verdict::Skip => {
                    skipped.extend(self.entries.pop());
                    continue;
                }
                Verdict::Stop => {}
            }
            break;
        }
        self.entries.extend(skipped);
        first
    }

    /// Every chunk in the order of keys, blocked chunks included.
    pub(super) fn order(&self) -> Vec<ChunkNumber> {
        let present = (0..self.states.len())
            .map(ChunkNumber::at)
            .filter(|chunk| self.states[chunk.position()].is_present);
        let mut order: Vec<ChunkNumber> = present.collect();
        order.sort_unstable_by_key(|&chunk| self.key(chunk));
        order
    }

    fn enter(&mut self, chunk: ChunkNumber) {
        let state = &mut self.states[chunk.position()];
        if state.is_blocked || state.is_entered {
            return;
        }
        state.is_entered = true;
        self.entries.push(Reverse((state.key, chunk)));
        if self.entries.len() > 2 * self.len + LEAST_COMPACTED {
            let states = &mut self.states;
            self.entries.retain(|&Reverse((key, chunk))| {
                let state = &mut states[chunk.position()];
                let is_current = state.is_entered && state.key == key;
                state.is_entered &= !(is_current && state.is_blocked);
                is_current && !state.is_blocked
            });
        }
    }
}

/// A heap of at most this many entries is not compacted.
const LEAST_COMPACTED: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Push,
        SetKey,
        Remove,
        Block,
        Unblock,
        First { skip: bool },
    }

    fn steps() -> impl Strategy<Value = Vec<(Step, usize, u64)>> {
        let step = prop_oneof![
            4 => Just(Step::Push),
            6 => Just(Step::SetKey),
            1 => Just(Step::Remove),
            3 => Just(Step::Block),
            3 => Just(Step::Unblock),
            4 => any::<bool>().prop_map(|skip| Step::First { skip }),
        ];
        prop::collection::vec((step, 0..24_usize, 0..1_000_u64), 1..400)
    }

    proptest! {
        #[test]
        fn a_heap_behaves_like_a_sorted_vector(steps in steps()) {
            let mut heap = Heap::default();
            let mut model: Vec<(u64, ChunkNumber, bool)> = Vec::new();
            for (step, n, key) in steps {
                let chunk = ChunkNumber::at(n);
                let key = key * 24 + n as u64;
                let found = model.iter().position(|&(_, other, _)| other == chunk);
                match (step, found) {
                    (Step::Push, None) => {
                        heap.push(chunk, key);
                        model.push((key, chunk, false));
                    }
                    (Step::SetKey, Some(at)) => {
                        heap.set_key(chunk, key);
                        model[at].0 = key;
                    }
                    (Step::Remove, Some(at)) => {
                        heap.remove(chunk);
                        model.swap_remove(at);
                    }
                    (Step::Block, Some(at)) if !model[at].2 => {
                        heap.block(chunk);
                        model[at].2 = true;
                    }
                    (Step::Unblock, Some(at)) if model[at].2 => {
                        heap.unblock(chunk);
                        model[at].2 = false;
                    }
                    (Step::First { skip }, _) => {
                        let odd_ones = |chunk: ChunkNumber| skip && chunk.position().is_multiple_of(2);
                        let judge = |chunk| if odd_ones(chunk) { Verdict::Skip } else { Verdict::Take };
                        let first = heap.first(&mut { judge });
                        let expected =
                            model.iter().filter(|&&(_, chunk, blocked)| !blocked && !odd_ones(chunk)).min();
                        prop_assert_eq!(first, expected.map(|entry| entry.1));
                    }
                    _ => {}
                }
                model.sort_unstable();
                let order: Vec<ChunkNumber> = model.iter().map(|entry| entry.1).collect();
                prop_assert_eq!(heap.order(), order);
                prop_assert!(heap.entries.len() <= 2 * model.len() + LEAST_COMPACTED + 24);
            }
        }
    }
}
