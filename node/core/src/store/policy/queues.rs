//! Ordered lists of chunks, which most policies share: a chunk enters at the end.
//!
//! Every operation takes constant time, except the search for a victim. The search parks the chunks at the head of a list that
//! are blocked or that nobody takes. A sorted map holds the parked chunks that may be evicted, in their old order. A chunk is
//! parked at most once between two moves, and the map holds only chunks older than the whole list.

use std::collections::BTreeMap;

use super::{Judge, Verdict};
use crate::store::ids::ChunkNumber;

/// An ordered set of chunks, in one list or several; some are blocked.
#[derive(Debug)]
pub(super) struct Queues {
    nodes: Vec<QueueLink>,
    lists: Vec<List>,
    next_stamp: u64,
    len: usize,
}

#[derive(Debug, Default)]
struct List {
    head: Option<ChunkNumber>,
    tail: Option<ChunkNumber>,
    /// Parked chunks included.
    len: usize,
    /// Parked chunks that may be evicted, by stamp.
    returned: BTreeMap<u64, ChunkNumber>,
}

/// The links of one chunk. 16 bytes.
#[derive(Debug, Clone, Copy, Default)]
struct QueueLink {
    /// The stamp of the chunk's move to an end, in the upper 47 bits; then 6 bits for the policy, 9 for the list, and 2 for the
    /// chunk's position.
    bits: u64,
    previous: Option<ChunkNumber>,
    next: Option<ChunkNumber>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    Absent = 0,
    Listed = 1,
    ListedBlocked = 2,
    /// Not in the list: either blocked, or in `returned`.
    Parked = 3,
}

impl Queues {
    /// `lists` empty lists, at most 512.
    pub(super) fn new(lists: usize) -> Self {
        assert!(lists <= 1 << LIST_BITS, "a node has room for the number of its list");
        let lists = (0..lists).map(|_| List::default()).collect();
        Self { nodes: Vec::new(), lists, next_stamp: 0, len: 0 }
    }

    /// Puts a new chunk at the end of a list, marked 0.
    pub(super) fn push(&mut self, chunk: ChunkNumber, list: usize) {
        if self.nodes.len() <= chunk.position() {
            self.nodes.resize(chunk.position() + 1, QueueLink::default());
        }
        debug_assert_eq!(self.place(chunk), Position::Absent, "a chunk is inserted once");
        self.len += 1;
        self.next_stamp += 1;
        self.append(chunk, list, bits(self.next_stamp, 0, list, Position::Listed));
    }

    /// Moves a chunk to the end of a list.
    pub(super) fn move_to_end(&mut self, chunk: ChunkNumber, list: usize) {
        let place = self.take_out(chunk);
        self.next_stamp += 1;
        self.append(chunk, list, bits(self.next_stamp, self.mark(chunk), list, place));
    }

    /// Takes a chunk out.
    pub(super) fn remove(&mut self, chunk: ChunkNumber) {
        self.take_out(chunk);
        self.len -= 1;
        self.nodes[chunk.position()] = QueueLink::default();
    }

    /// Blocks a chunk: it may not be evicted.
    pub(super) fn block(&mut self, chunk: ChunkNumber) {
        let (list, stamp) = (self.list(chunk), self.stamp(chunk));
        match self.place(chunk) {
            Position::Listed => self.set_place(chunk, Position::ListedBlocked),
            Position::Parked => _ = self.lists[list].returned.remove(&stamp),
            place => debug_assert!(false, "a chunk is blocked once, this is {place:?}"),
        }
    }

    /// Unblocks a chunk: it may be evicted.
    pub(super) fn unblock(&mut self, chunk: ChunkNumber) {
        let (list, stamp) = (self.list(chunk), self.stamp(chunk));
        match self.place(chunk) {
            Position::ListedBlocked => self.set_place(chunk, Position::Listed),
            Position::Parked => _ = self.lists[list].returned.insert(stamp, chunk),
            place => debug_assert!(false, "a chunk is unblocked after it was blocked, this is {place:?}"),
        }
    }

    /// The first chunk of a list that may be evicted and that `judge` takes.
    pub(super) fn first(&mut self, list: usize, judge: Judge<'_>) -> Option<ChunkNumber> {
        // Parked chunks are older than everything listed: they were parked from the head of the list.
        for &chunk in self.lists[list].returned.values() {
            match judge(chunk) {
                Verdict::Take => return Some(chunk),
                Verdict::Skip => {}
                Verdict::Stop => return None,
            }
        }
        while let Some(chunk) = self.lists[list].head {
            let is_free = self.place(chunk) == Position::Listed;
            let verdict = if is_free { judge(chunk) } else { Verdict::Skip };
            match verdict {
                Verdict::Take => return Some(chunk),
                Verdict::Skip => {}
                Verdict::Stop => return None,
            }
            // No later search passes over this chunk again until it is free.
            self.unlink(chunk);
            self.set_place(chunk, Position::Parked);
            if is_free {
                let stamp = self.stamp(chunk);
                self.lists[list].returned.insert(stamp, chunk);
            }
        }
        None
    }

    /// The first chunk of a list, without the blocked chunks that a search has passed.
    pub(super) fn head(&self, list: usize) -> Option<ChunkNumber> {
        let List { head, returned, .. } = &self.lists[list];
        returned.first_key_value().map(|(_, &chunk)| chunk).or(*head)
    }

    /// Every chunk, list by list, first to last.
    pub(super) fn order(&self) -> Vec<ChunkNumber> {
        let present =
            (0..self.nodes.len()).map(ChunkNumber::at).filter(|&chunk| self.place(chunk) != Position::Absent);
        let mut order: Vec<ChunkNumber> = present.collect();
        order.sort_unstable_by_key(|&chunk| (self.list(chunk), self.stamp(chunk)));
        order
    }

    /// The number of chunks in all lists, blocked chunks included.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The number of chunks in a list, blocked chunks included.
    pub(super) fn list_len(&self, list: usize) -> usize {
        self.lists[list].len
    }

    /// The list of a chunk.
    pub(super) fn list(&self, chunk: ChunkNumber) -> usize {
        (self.nodes[chunk.position()].bits >> PLACE_BITS) as usize & ((1 << LIST_BITS) - 1)
    }

    /// The policy's mark on a chunk.
    pub(super) fn mark(&self, chunk: ChunkNumber) -> u8 {
        (self.nodes[chunk.position()].bits >> (PLACE_BITS + LIST_BITS)) as u8 & MOST_MARK
    }

    /// Marks a chunk with a number of at most [`MOST_MARK`]. The mark stays until the chunk leaves.
    pub(super) fn set_mark(&mut self, chunk: ChunkNumber, mark: u8) {
        debug_assert!(mark <= MOST_MARK, "a mark of {mark} would spoil the stamp");
        let bits = bits(self.stamp(chunk), mark, self.list(chunk), self.place(chunk));
        self.nodes[chunk.position()].bits = bits;
    }

    /// Takes a chunk out of its place, and returns the position that it gets at the end of a list.
    fn take_out(&mut self, chunk: ChunkNumber) -> Position {
        let list = self.list(chunk);
        self.lists[list].len -= 1;
        match self.place(chunk) {
            Position::Parked => {
                let stamp = self.stamp(chunk);
                let was_free = self.lists[list].returned.remove(&stamp).is_some();
                if was_free { Position::Listed } else { Position::ListedBlocked }
            }
            place => {
                self.unlink(chunk);
                place
            }
        }
    }

    fn append(&mut self, chunk: ChunkNumber, list: usize, bits: u64) {
        let List { head, tail, len, .. } = &mut self.lists[list];
        *len += 1;
        let previous = tail.replace(chunk);
        match previous {
            Some(old) => self.nodes[old.position()].next = Some(chunk),
            None => *head = Some(chunk),
        }
        self.nodes[chunk.position()] = QueueLink { bits, previous, next: None };
    }

    fn unlink(&mut self, chunk: ChunkNumber) {
        let QueueLink { previous, next, .. } = self.nodes[chunk.position()];
        let list = self.list(chunk);
        match previous {
            Some(previous) => self.nodes[previous.position()].next = next,
            None => self.lists[list].head = next,
        }
        match next {
            Some(next) => self.nodes[next.position()].previous = previous,
            None => self.lists[list].tail = previous,
        }
    }

    fn place(&self, chunk: ChunkNumber) -> Position {
        match self.nodes[chunk.position()].bits & 3 {
            0 => Position::Absent,
            1 => Position::Listed,
            2 => Position::ListedBlocked,
            _ => Position::Parked,
        }
    }

    fn set_place(&mut self, chunk: ChunkNumber, place: Position) {
        let bits = &mut self.nodes[chunk.position()].bits;
        *bits = *bits & !3 | place as u64;
    }

    /// The number of the chunk's last move to an end, counted over all such moves.
    fn stamp(&self, chunk: ChunkNumber) -> u64 {
        self.nodes[chunk.position()].bits >> (PLACE_BITS + LIST_BITS + MARK_BITS)
    }
}

/// The packed value of [`QueueLink::bits`].
fn bits(stamp: u64, mark: u8, list: usize, place: Position) -> u64 {
    let stamp_and_mark = stamp << MARK_BITS | u64::from(mark);
    (stamp_and_mark << LIST_BITS | list as u64) << PLACE_BITS | place as u64
}

const PLACE_BITS: u32 = 2;
const LIST_BITS: u32 = 9;
const MARK_BITS: u32 = 6;

/// The largest mark.
pub(super) const MOST_MARK: u8 = (1 << MARK_BITS) - 1;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Push { list: usize },
        Move { list: usize },
        Remove,
        Block,
        Unblock,
        First { list: usize, skip: bool },
    }

    fn steps() -> impl Strategy<Value = Vec<(Step, usize)>> {
        let list = || 0..LISTS;
        let step = prop_oneof![
            4 => list().prop_map(|list| Step::Push { list }),
            3 => list().prop_map(|list| Step::Move { list }),
            1 => Just(Step::Remove),
            3 => Just(Step::Block),
            3 => Just(Step::Unblock),
            4 => (list(), any::<bool>()).prop_map(|(list, skip)| Step::First { list, skip }),
        ];
        prop::collection::vec((step, 0..24_usize), 1..200)
    }

    proptest! {
        /// The model: for each list a vector in order, searched from the front.
        #[test]
        fn queues_behave_like_sorted_vectors(steps in steps()) {
            let mut queues = Queues::new(LISTS);
            let mut model: [Vec<(ChunkNumber, bool)>; LISTS] = Default::default();
            for (step, n) in steps {
                let chunk = ChunkNumber::at(n);
                let found = model.iter().enumerate().find_map(|(list, entries)| {
                    Some((list, entries.iter().position(|&(other, _)| other == chunk)?))
                });
                match (step, found) {
                    (Step::Push { list }, None) => {
                        queues.push(chunk, list);
                        queues.set_mark(chunk, n as u8);
                        model[list].push((chunk, false));
                    }
                    (Step::Move { list: to }, Some((list, at))) => {
                        queues.move_to_end(chunk, to);
                        let entry = model[list].remove(at);
                        model[to].push(entry);
                    }
                    (Step::Remove, Some((list, at))) => {
                        queues.remove(chunk);
                        model[list].remove(at);
                    }
                    (Step::Block, Some((list, at))) if !model[list][at].1 => {
                        queues.block(chunk);
                        model[list][at].1 = true;
                    }
                    (Step::Unblock, Some((list, at))) if model[list][at].1 => {
                        queues.unblock(chunk);
                        model[list][at].1 = false;
                    }
                    (Step::First { list, skip }, _) => {
                        let odd_ones = |chunk: ChunkNumber| skip && chunk.position().is_multiple_of(2);
                        let judge = |chunk| if odd_ones(chunk) { Verdict::Skip } else { Verdict::Take };
                        let first = queues.first(list, &mut { judge });
                        let expected = model[list].iter().find(|&&(chunk, blocked)| !blocked && !odd_ones(chunk));
                        prop_assert_eq!(first, expected.map(|entry| entry.0));
                        let oldest_free = model[list].iter().find(|&&(_, blocked)| !blocked).map(|entry| entry.0);
                        let head = queues.head(list);
                        let is_blocked = |head| model[list].contains(&(head, true));
                        let may_be_blocked = queues.lists[list].returned.is_empty();
                        prop_assert!(head == oldest_free || may_be_blocked && head.is_some_and(is_blocked));
                    }
                    _ => {}
                }
                let order: Vec<ChunkNumber> = model.iter().flatten().map(|entry| entry.0).collect();
                prop_assert!(order.iter().all(|&chunk| usize::from(queues.mark(chunk)) == chunk.position()));
                prop_assert!((0..LISTS).all(|list| queues.list_len(list) == model[list].len()));
                prop_assert_eq!(queues.len(), order.len());
                prop_assert_eq!(queues.order(), order);
            }
        }
    }

    const LISTS: usize = 3;
}
