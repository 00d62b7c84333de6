//! The actors of other nodes that may keep the chunks of a draining actor, with their room as far as it is known.

use larder_protocol::drain::{Taken, WHOLE_RANK_PPM};
use larder_protocol::table::{Holder, NodeNumber};

/// All takers.
#[derive(Debug, Default)]
pub(super) struct Takers(Vec<(Holder, Room)>);

/// A taker's last answer about its room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    free_chunks: u64,
    free_bytes: u64,
    rank_limit_ppm: u32,
    has_failed: bool,
}

impl Room {
    /// The room of a taker that has not answered yet: the taker is asked, and its answer says how much it keeps.
    const UNKNOWN: Self =
        Self { free_chunks: 0, free_bytes: 0, rank_limit_ppm: WHOLE_RANK_PPM, has_failed: false };

    /// The taker does not keep chunks of this rank or more.
    pub(super) fn rank_limit_ppm(&self) -> u32 {
        match self {
            Self { has_failed: true, .. } => 0,
            // With free room, no chunk has to make way.
            Self { free_chunks: 1.., free_bytes: 1.., .. } => u32::MAX,
            Self { rank_limit_ppm, .. } => *rank_limit_ppm,
        }
    }
}

impl Takers {
    /// Sets the actors that may take chunks from now on. The room of all other actors is forgotten.
    pub(super) fn are(&mut self, takers: &[Holder]) {
        let known = std::mem::take(&mut self.0);
        let room =
            |taker| known.iter().find(|(known, _)| known == taker).map_or(Room::UNKNOWN, |&(_, room)| room);
        self.0 = takers.iter().map(|taker| (*taker, room(taker))).collect();
    }

    /// All takers, in order.
    pub(super) fn all(&self) -> impl Iterator<Item = Holder> {
        self.0.iter().map(|&(taker, _)| taker)
    }

    /// Takers that keep nothing at all, or did not answer.
    pub(super) fn unwilling(&self) -> impl Iterator<Item = Holder> {
        let unwilling = self.0.iter().filter(|(_, room)| room.rank_limit_ppm() == 0);
        unwilling.map(|&(taker, _)| taker)
    }

    /// Whether a taker did not answer.
    pub(super) fn has_silent(&self) -> bool {
        self.0.iter().any(|(_, room)| room.has_failed)
    }

    /// Whether an actor of this node is among the takers.
    pub(super) fn has_node(&self, node: NodeNumber) -> bool {
        self.0.iter().any(|(taker, _)| taker.node == node)
    }

    /// The taker to ask next: the taker with the most free room, or else the taker with the highest rank limit.
    pub(super) fn best(&self) -> Option<(Holder, Room)> {
        let worth = |room: &Room| {
            let limit = room.rank_limit_ppm();
            let free = if limit == u32::MAX { room.free_chunks.min(room.free_bytes) } else { 0 };
            (limit, free)
        };
        let willing = self.0.iter().filter(|(_, room)| room.rank_limit_ppm() > 0);
        // Of equal takers, the first one is asked.
        willing.rev().max_by_key(|(_, room)| worth(room)).copied()
    }

    /// Takes a taker's answer.
    pub(super) fn answered(&mut self, taker: Holder, taken: &Taken) {
        let &Taken { free_chunks, free_bytes, rank_limit_ppm, .. } = taken;
        self.set(taker, Room { free_chunks, free_bytes, rank_limit_ppm, has_failed: false });
    }

    /// Notes that a taker did not answer. It is not asked again while another taker takes something.
    pub(super) fn failed(&mut self, taker: Holder) {
        self.set(taker, Room { has_failed: true, ..Room::UNKNOWN });
    }

    fn set(&mut self, taker: Holder, room: Room) {
        self.0.iter_mut().filter(|(known, _)| *known == taker).for_each(|(_, known)| *known = room);
    }
}
