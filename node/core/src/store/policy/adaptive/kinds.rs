//! The kinds of chunks: all known facts of a chunk except its age.
//!
//! A session is a prompt that grows from turn to turn. The policy is not told of sessions: it recognizes them by their chunks. A
//! chunk that is stored behind an earlier used chunk belongs to the next turn. The time since the earlier chunk's last use is the
//! session's gap between turns. All chunks of one request inherit the turn and the gap.

/// The known facts of a chunk, in 16 bits: its turn, its session's gap, its number of uses, whether it was the last of its
/// prompt, and the band of its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Kind(u16);

impl Kind {
    /// A chunk of a session's first turn that was used once.
    pub(super) const FIRST: Self = Self(1 | 1 << USES_BITS);

    pub(super) fn uses(self) -> u8 {
        (self.0 & MOST_USES) as u8
    }

    fn turn(self) -> u16 {
        self.0 >> USES_BITS & MOST_TURNS
    }

    fn gap(self) -> u16 {
        self.0 >> GAP_AT & 7
    }

    fn is_last(self) -> bool {
        self.0 >> LAST_AT & 1 == 1
    }

    /// The band of the kind's cost; see [`Costs`](super::costs::Costs).
    pub(super) fn cost_band(self) -> usize {
        usize::from(self.0 >> COST_AT)
    }

    /// The kind after one more use. The chunk is no longer the last of its prompt.
    pub(super) fn used(self, gap: Gap) -> Self {
        let uses = (u16::from(self.uses()) + 1).min(MOST_USES);
        Self(self.0 & !(MOST_USES | 7 << GAP_AT | 1 << LAST_AT) | uses | gap.0 << GAP_AT)
    }

    /// The kind of a new chunk behind this one, in the same request or in the request that used this chunk again.
    pub(super) fn behind(self) -> Self {
        let turn = if self.uses() > 1 { (self.turn() + 1).min(MOST_TURNS) } else { self.turn() };
        Self(1 | turn << USES_BITS | self.gap() << GAP_AT)
    }

    /// This kind, moved to the turn after `ghost`'s turn if that is later. An evicted chunk of the session comes back after this
    /// gap.
    pub(super) fn after(self, ghost: Self, gap: Gap) -> Self {
        let turn = self.turn().max((ghost.turn() + 1).min(MOST_TURNS));
        Self(self.0 & !(MOST_TURNS << USES_BITS | 7 << GAP_AT) | turn << USES_BITS | gap.0 << GAP_AT)
    }

    /// This kind with one use more than the `uses` that the chunk had before its eviction.
    pub(super) fn used_before(self, uses: u8) -> Self {
        Self(self.0 & !MOST_USES | (u16::from(uses) + 1).min(MOST_USES))
    }

    pub(super) fn with_last(self, is_last: bool) -> Self {
        Self(self.0 & !(1 << LAST_AT) | u16::from(is_last) << LAST_AT)
    }

    pub(super) fn with_cost_band(self, band: usize) -> Self {
        Self(self.0 & !(3 << COST_AT) | (band as u16) << COST_AT)
    }

    /// The kind's class, a number below [`CLASSES`].
    #[inline]
    pub(super) fn class(self) -> usize {
        let turn = match self.turn() {
            0 | 1 => 0,
            2 => 1,
            3 | 4 => 2,
            _ => 3,
        };
        let uses = match self.uses() {
            0 | 1 => 0,
            2 => 1,
            3 | 4 => 2,
            5..=8 => 3,
            9..=16 => 4,
            _ => 5,
        };
        ((turn * GAPS + usize::from(self.gap())) * USES + uses) * 2 + usize::from(self.is_last())
    }
}

/// A session's time between turns: unknown (0), or in one of five bands: below 8 s, 30 s, 2 min or 10 min, or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gap(u16);

impl Gap {
    pub(super) fn of_ms(ms: u64) -> Self {
        Self(match ms {
            0..8_000 => 1,
            8_000..30_000 => 2,
            30_000..120_000 => 3,
            120_000..600_000 => 4,
            _ => 5,
        })
    }
}

/// The turn of a class. The next three functions give its other parts.
pub(super) fn turn_of(class: usize) -> usize {
    class / (2 * USES * GAPS)
}

pub(super) fn gap_of(class: usize) -> usize {
    class / (2 * USES) % GAPS
}

pub(super) fn uses_of(class: usize) -> usize {
    class / 2 % USES
}

pub(super) fn last_of(class: usize) -> usize {
    class % 2
}

pub(super) const TURNS: usize = 4;
pub(super) const GAPS: usize = 6;
pub(super) const USES: usize = 6;

/// The number of classes.
pub(super) const CLASSES: usize = TURNS * GAPS * USES * 2;

const USES_BITS: u32 = 5;
const MOST_USES: u16 = (1 << USES_BITS) - 1;
const MOST_TURNS: u16 = 15;
const GAP_AT: u32 = USES_BITS + 4;
const LAST_AT: u32 = GAP_AT + 3;
const COST_AT: u32 = LAST_AT + 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_behind_one_that_was_used_again_is_of_the_next_turn() {
        let first = Kind::FIRST;
        assert_eq!((first.behind().turn(), first.behind().gap()), (1, 0), "a prompt stored piece by piece");
        let again = first.used(Gap::of_ms(20_000));
        assert_eq!((again.uses(), again.turn(), again.gap()), (2, 1, 2));
        assert_eq!((again.behind().uses(), again.behind().turn(), again.behind().gap()), (1, 2, 2));
        assert_eq!(again.behind().behind().turn(), 2);
    }

    #[test]
    fn an_evicted_chunk_tells_the_turn_and_the_gap_when_it_comes_back() {
        let third = Kind::FIRST.used(Gap::of_ms(0)).behind().used(Gap::of_ms(0)).behind();
        let back = Kind::FIRST.after(third, Gap::of_ms(3_600_000)).used_before(third.uses());
        assert_eq!((back.turn(), back.gap(), back.uses()), (4, 5, 2));
    }

    #[test]
    fn each_count_stops_at_its_maximum_and_leaves_the_others_alone() {
        let mut kind = Kind::FIRST.with_last(true).with_cost_band(3);
        for _ in 0..100 {
            kind = kind.behind().with_cost_band(3);
            (0..100).for_each(|_| kind = kind.used(Gap::of_ms(9_000)));
        }
        assert_eq!((kind.uses(), kind.turn(), kind.gap(), kind.cost_band()), (31, 15, 2, 3));
        assert!(!kind.is_last() && kind.class() < CLASSES);
    }

    #[test]
    fn the_parts_of_a_class_are_read_back() {
        let kind = Kind::FIRST.used(Gap::of_ms(40_000)).behind().with_last(true);
        let class = kind.class();
        assert_eq!((turn_of(class), gap_of(class), uses_of(class), last_of(class)), (1, 3, 0, 1));
    }
}
