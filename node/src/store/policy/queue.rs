//! Chunks in the order in which they were last put at the end: what `fifo` and `lru` share.
//!
//! Every operation takes constant time but one: a blocked chunk that the search for a victim meets is parked, and
//! comes back into its old place through a sorted map when it may go again. A chunk is parked at most once between two
//! moves, and the map holds only chunks older than the whole queue, so it stays small.

use std::collections::BTreeMap;

use super::Verdict;
use crate::store::ids::ChunkId;

/// An ordered set of chunks of which some are blocked.
#[derive(Debug, Default)]
pub(super) struct Queue {
    nodes: Vec<Node>,
    head: Option<ChunkId>,
    tail: Option<ChunkId>,
    next_stamp: u64,
    /// Parked chunks that may go again, by stamp.
    returned: BTreeMap<u64, ChunkId>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Node {
    /// When the chunk was put at the end, in the upper 62 bits; where it is, in the lowest two.
    stamp_and_place: u64,
    previous: Option<ChunkId>,
    next: Option<ChunkId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Absent = 0,
    Listed = 1,
    ListedBlocked = 2,
    /// Out of the list. Blocked, or else in `returned`.
    Parked = 3,
}

impl Queue {
    /// Puts a new chunk at the end.
    pub(super) fn push(&mut self, chunk: ChunkId) {
        if self.nodes.len() <= chunk.position() {
            self.nodes.resize(chunk.position() + 1, Node::default());
        }
        debug_assert_eq!(self.place(chunk), Place::Absent, "a chunk is inserted once");
        self.append(chunk, Place::Listed);
    }

    /// Moves a chunk to the end.
    pub(super) fn move_to_end(&mut self, chunk: ChunkId) {
        let place = self.take_out(chunk);
        self.append(chunk, place);
    }

    /// Takes a chunk out.
    pub(super) fn remove(&mut self, chunk: ChunkId) {
        self.take_out(chunk);
        self.set(chunk, 0, Place::Absent);
    }

    /// Marks a chunk as one that may not go.
    pub(super) fn block(&mut self, chunk: ChunkId) {
        let stamp = self.stamp(chunk);
        match self.place(chunk) {
            Place::Listed => self.set(chunk, stamp, Place::ListedBlocked),
            Place::Parked => _ = self.returned.remove(&stamp),
            place => debug_assert!(false, "a chunk is blocked once, this is {place:?}"),
        }
    }

    /// Marks a chunk as one that may go.
    pub(super) fn unblock(&mut self, chunk: ChunkId) {
        let stamp = self.stamp(chunk);
        match self.place(chunk) {
            Place::ListedBlocked => self.set(chunk, stamp, Place::Listed),
            Place::Parked => _ = self.returned.insert(stamp, chunk),
            place => debug_assert!(false, "a chunk is unblocked after it was blocked, this is {place:?}"),
        }
    }

    /// The first chunk in order that may go and that `judge` takes.
    pub(super) fn first(&mut self, judge: &mut dyn FnMut(ChunkId) -> Verdict) -> Option<ChunkId> {
        // Returned chunks are older than everything listed: they were parked from the head of the list.
        for &chunk in self.returned.values() {
            match judge(chunk) {
                Verdict::Take => return Some(chunk),
                Verdict::Skip => {}
                Verdict::Stop => return None,
            }
        }
        let mut at_head = true;
        let mut cursor = self.head;
        while let Some(chunk) = cursor {
            cursor = self.nodes[chunk.position()].next;
            if self.place(chunk) == Place::ListedBlocked {
                // Only from the head, so that what is parked is always older than what is listed.
                if at_head {
                    let stamp = self.stamp(chunk);
                    self.unlink(chunk);
                    self.set(chunk, stamp, Place::Parked);
                }
                continue;
            }
            at_head = false;
            match judge(chunk) {
                Verdict::Take => return Some(chunk),
                Verdict::Skip => {}
                Verdict::Stop => return None,
            }
        }
        None
    }

    /// Every chunk, first to last.
    pub(super) fn order(&self) -> Vec<ChunkId> {
        let present =
            (0..self.nodes.len()).map(ChunkId::at).filter(|&chunk| self.place(chunk) != Place::Absent);
        let mut order: Vec<ChunkId> = present.collect();
        order.sort_unstable_by_key(|&chunk| self.stamp(chunk));
        order
    }

    /// Takes a chunk out of where it is, and says where it goes when it comes to the end of the list.
    fn take_out(&mut self, chunk: ChunkId) -> Place {
        match self.place(chunk) {
            Place::Parked => {
                let was_free = self.returned.remove(&self.stamp(chunk)).is_some();
                if was_free { Place::Listed } else { Place::ListedBlocked }
            }
            place => {
                self.unlink(chunk);
                place
            }
        }
    }

    fn append(&mut self, chunk: ChunkId, place: Place) {
        self.next_stamp += 1;
        self.set(chunk, self.next_stamp, place);
        let node = &mut self.nodes[chunk.position()];
        node.previous = self.tail;
        node.next = None;
        match self.tail.replace(chunk) {
            Some(old) => self.nodes[old.position()].next = Some(chunk),
            None => self.head = Some(chunk),
        }
    }

    fn unlink(&mut self, chunk: ChunkId) {
        let Node { previous, next, .. } = self.nodes[chunk.position()];
        match previous {
            Some(previous) => self.nodes[previous.position()].next = next,
            None => self.head = next,
        }
        match next {
            Some(next) => self.nodes[next.position()].previous = previous,
            None => self.tail = previous,
        }
    }

    fn place(&self, chunk: ChunkId) -> Place {
        match self.nodes[chunk.position()].stamp_and_place & 3 {
            0 => Place::Absent,
            1 => Place::Listed,
            2 => Place::ListedBlocked,
            _ => Place::Parked,
        }
    }

    fn stamp(&self, chunk: ChunkId) -> u64 {
        self.nodes[chunk.position()].stamp_and_place >> 2
    }

    fn set(&mut self, chunk: ChunkId, stamp: u64, place: Place) {
        self.nodes[chunk.position()].stamp_and_place = stamp << 2 | place as u64;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Push,
        Move,
        Remove,
        Block,
        Unblock,
        First { skip: bool },
    }

    fn steps() -> impl Strategy<Value = Vec<(Step, usize)>> {
        let step = prop_oneof![
            4 => Just(Step::Push),
            3 => Just(Step::Move),
            1 => Just(Step::Remove),
            3 => Just(Step::Block),
            3 => Just(Step::Unblock),
            4 => any::<bool>().prop_map(|skip| Step::First { skip }),
        ];
        prop::collection::vec((step, 0..24_usize), 1..200)
    }

    proptest! {
        /// The model: a vector in order, searched from the front.
        #[test]
        fn a_queue_behaves_like_a_sorted_vector(steps in steps()) {
            let mut queue = Queue::default();
            let mut model: Vec<(ChunkId, bool)> = Vec::new();
            for (step, n) in steps {
                let chunk = ChunkId::at(n);
                let found = model.iter().position(|&(other, _)| other == chunk);
                match (step, found) {
                    (Step::Push, None) => {
                        queue.push(chunk);
                        model.push((chunk, false));
                    }
                    (Step::Move, Some(at)) => {
                        queue.move_to_end(chunk);
                        let entry = model.remove(at);
                        model.push(entry);
                    }
                    (Step::Remove, Some(at)) => {
                        queue.remove(chunk);
                        model.remove(at);
                    }
                    (Step::Block, Some(at)) if !model[at].1 => {
                        queue.block(chunk);
                        model[at].1 = true;
                    }
                    (Step::Unblock, Some(at)) if model[at].1 => {
                        queue.unblock(chunk);
                        model[at].1 = false;
                    }
                    (Step::First { skip }, _) => {
                        let odd_ones = |chunk: ChunkId| skip && chunk.position().is_multiple_of(2);
                        let judge = |chunk| if odd_ones(chunk) { Verdict::Skip } else { Verdict::Take };
                        let first = queue.first(&mut { judge });
                        let expected = model.iter().find(|&&(chunk, blocked)| !blocked && !odd_ones(chunk));
                        prop_assert_eq!(first, expected.map(|entry| entry.0));
                    }
                    _ => {}
                }
                let order: Vec<ChunkId> = model.iter().map(|entry| entry.0).collect();
                prop_assert_eq!(queue.order(), order);
            }
        }
    }
}
