//! The order in which answers with blocks go out on a connection.
//!
//! QUIC sends streams of one priority in turns, a packet of each. Then blocks that are requested together come together, as late
//! as the last of them. The asker has nothing to do until then, and requests the next blocks when the holder has nothing to send.
//! So the streams of blocks have priorities by which the piece that was written first goes first. A node that requests one block
//! at a time gets it no sooner; four at a time took 9 % longer without this.

use std::cell::Cell;
use std::mem;

/// The order of the pieces that are sent on one connection.
#[derive(Debug)]
pub(in crate::exchange) struct SendOrder {
    /// The number of the next piece.
    next: Cell<i32>,
    /// Answers that are being sent.
    answers: Cell<usize>,
}

/// The turns of one answer, as long as this value lives.
#[derive(Debug)]
pub(in crate::exchange) struct SendTurns<'a> {
    order: &'a SendOrder,
    is_first: bool,
    /// Bytes that the present piece may still have.
    left: usize,
}

impl SendOrder {
    /// Begins an answer.
    pub(in crate::exchange) fn join(&self) -> SendTurns<'_> {
        self.answers.set(self.answers.get() + 1);
        SendTurns { order: self, is_first: true, left: 0 }
    }
}

impl Default for SendOrder {
    fn default() -> Self {
        Self { next: Cell::new(AHEAD), answers: Cell::new(0) }
    }
}

impl SendTurns<'_> {
    /// The priority of the answer's stream from the next `bytes` bytes on, if it changes.
    ///
    /// A piece goes before pieces with later numbers. The first piece of an answer also goes before [`AHEAD`] others, so that a
    /// small block does not wait for a large one. No piece waits forever, since every piece raises the number.
    pub(super) fn priority(&mut self, bytes: usize) -> Option<i32> {
        if let Some(left) = self.left.checked_sub(bytes) {
            self.left = left;
            return None;
        }
        self.left = PIECE_BYTES.saturating_sub(bytes);
        let number = self.order.next.get();
        self.order.next.set(number.saturating_add(1));
        let ahead = if mem::take(&mut self.is_first) { AHEAD } else { 0 };
        Some(BEFORE_BLOCKS + ahead - number)
    }
}

impl Drop for SendTurns<'_> {
    fn drop(&mut self) {
        let answers = self.order.answers.get() - 1;
        self.order.answers.set(answers);
        if answers == 0 {
            self.order.next.set(AHEAD);
        }
    }
}

/// The priority of messages before blocks: no piece has a higher priority.
pub(in crate::exchange) const BEFORE_BLOCKS: i32 = 0;

/// Bytes of a piece: a few pieces are under way in the shortest time that timers know.
pub(super) const PIECE_BYTES: usize = 256 << 10;

/// Pieces that may be written but not sent: those of a connection's whole window.
const AHEAD: i32 = 32;

#[cfg(test)]
mod tests {
    use super::super::super::peers::SMALL_FIRST;
    use super::*;

    const SMALL: usize = 4 << 10;

    #[test]
    fn blocks_go_in_the_order_in_which_they_are_written() {
        let order = SendOrder::default();
        let mut answers: Vec<_> = (0..100).map(|_| order.join()).collect();
        let priorities: Vec<_> =
            answers.iter_mut().map(|answer| answer.priority(PIECE_BYTES).unwrap()).collect();
        assert!(priorities.is_sorted_by(|one, next| one > next), "{priorities:?}");
        assert!(priorities[0] <= BEFORE_BLOCKS && BEFORE_BLOCKS < SMALL_FIRST, "small requests go first");
    }

    #[test]
    fn a_small_block_passes_pieces_of_a_large_one_for_a_bounded_time() {
        let order = SendOrder::default();
        let mut large = order.join();
        let pieces: Vec<_> = (0..AHEAD).map(|_| large.priority(PIECE_BYTES).unwrap()).collect();
        let small = order.join().priority(SMALL).unwrap();
        assert!(small < pieces[0] && pieces[1..].iter().all(|&piece| small >= piece), "{small}: {pieces:?}");
        let waits = large.priority(PIECE_BYTES).unwrap();
        let passing = (0..1_000).map(|_| order.join().priority(SMALL).unwrap());
        assert_eq!(passing.filter(|&small| small >= waits).count(), AHEAD as usize);
    }

    #[test]
    fn blocks_of_one_answer_share_a_piece_as_long_as_they_fit() {
        let order = SendOrder::default();
        let mut answer = order.join();
        let changes = (0..200).filter(|_| answer.priority(SMALL).is_some()).count();
        assert_eq!(changes, (200 * SMALL).div_ceil(PIECE_BYTES));
    }

    #[test]
    fn numbers_begin_again_when_nothing_is_sent() {
        let order = SendOrder::default();
        let (mut one, mut other) = (order.join(), order.join());
        let first = one.priority(SMALL);
        (0..10).for_each(|_| _ = other.priority(PIECE_BYTES));
        drop(one);
        assert!(order.join().priority(SMALL) < first);
        drop(other);
        assert_eq!(order.join().priority(SMALL), first);
    }
}
