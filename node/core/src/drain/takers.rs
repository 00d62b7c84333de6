//! The actors of other nodes that may keep the chunks of a draining one, and what is known of their room.

use larder_protocol::drain::{Taken, WHOLE_RANK_PPM};
use larder_protocol::table::{Holder, NodeNumber};

/// All takers.
#[derive(Debug, Default)]
pub(super) struct Takers(Vec<(Holder, Room)>);

/// What a taker said last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    free_chunks: u64,
    free_bytes: u64,
    rank_limit_ppm: u32,
    has_failed: bool,
}

impl Room {
    /// A taker that said nothing yet: it is asked, and says how much it keeps.
    const UNKNOWN: Self =
        Self { free_chunks: 0, free_bytes: 0, rank_limit_ppm: WHOLE_RANK_PPM, has_failed: false };

    /// Chunks of this rank or more it does not keep.
    pub(super) fn rank_limit_ppm(&self) -> u32 {
        match self {
            Self { has_failed: true, .. } => 0,
            // Nothing has to go for them.
            Self { free_chunks: 1.., free_bytes: 1.., .. } => u32::MAX,
            Self { rank_limit_ppm, .. } => *rank_limit_ppm,
        }
    }
}

impl Takers {
    /// These actors may take chunks from now on. What is known of the others is forgotten.
    pub(super) fn are(&mut self, takers: &[Holder]) {
        let known = std::mem::take(&mut self.0);
        let room =
            |taker| known.iter().find(|(known, _)| known == taker).map_or(Room::UNKNOWN, |&(_, room)| room);
        self.0 = takers.iter().map(|taker| (*taker, room(taker))).collect();
    }

    /// Every taker, the first first.
    pub(super) fn all(&self) -> impl Iterator<Item = Holder> {
        self.0.iter().map(|&(taker, _)| taker)
    }

    /// Takers that keep nothing at all, or did not answer.
    pub(super) fn unwilling(&self) -> impl Iterator<Item = Holder> {
        let unwilling = self.0.iter().filter(|(_, room)| room.rank_limit_ppm() == 0);
        unwilling.map(|&(taker, _)| taker)
    }

    /// Whether an actor of this node is among them.
    pub(super) fn has_node(&self, node: NodeNumber) -> bool {
        self.0.iter().any(|(taker, _)| taker.node == node)
    }

    /// The taker to ask next: the one with the most free room, or else the one that keeps most beyond it.
    pub(super) fn best(&self) -> Option<(Holder, Room)> {
        let worth = |room: &Room| {
            let limit = room.rank_limit_ppm();
            let free = if limit == u32::MAX { room.free_chunks.min(room.free_bytes) } else { 0 };
            (limit, free)
        };
        let willing = self.0.iter().filter(|(_, room)| room.rank_limit_ppm() > 0);
        // Among equals the first.
        willing.rev().max_by_key(|(_, room)| worth(room)).copied()
    }

    /// A taker answered.
    pub(super) fn answered(&mut self, taker: Holder, taken: &Taken) {
        let &Taken { free_chunks, free_bytes, rank_limit_ppm, .. } = taken;
        self.set(taker, Room { free_chunks, free_bytes, rank_limit_ppm, has_failed: false });
    }

    /// A taker did not answer: it is asked no more while another takes something.
    pub(super) fn failed(&mut self, taker: Holder) {
        self.set(taker, Room { has_failed: true, ..Room::UNKNOWN });
    }

    fn set(&mut self, taker: Holder, room: Room) {
        self.0.iter_mut().filter(|(known, _)| *known == taker).for_each(|(_, known)| *known = room);
    }
}
