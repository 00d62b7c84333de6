//! The actors of other nodes that may keep the chunks of a draining actor, with their room as far as it is known.

use std::collections::HashMap;

use larder_protocol::Fingerprint;
use larder_protocol::drain::{Taken, WHOLE_RANK_PPM};
use larder_protocol::table::Holder;

/// All takers.
#[derive(Debug, Default)]
pub(super) struct Takers(Vec<Taker>);

/// A taker, with what it said about its room.
#[derive(Debug)]
struct Taker {
    holder: Holder,
    has_failed: bool,
    /// Its room for any chunk: an upper bound, since a tenant or a size of chunks may have less.
    common: Room,
    /// Its room for the namespaces of which it was offered chunks; `None` for a namespace that it refuses.
    rooms: HashMap<Fingerprint, Option<Room>>,
}

/// A taker's room for chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Room {
    free_chunks: u64,
    free_bytes: u64,
    rank_limit_ppm: u32,
}

impl Room {
    /// The room of a taker that has not answered yet: the taker is asked, and its answer says how much it keeps.
    const UNKNOWN: Self = Self { free_chunks: 0, free_bytes: 0, rank_limit_ppm: WHOLE_RANK_PPM };

    fn of(taken: &Taken) -> Self {
        let &Taken { free_chunks, free_bytes, rank_limit_ppm, .. } = taken;
        Self { free_chunks, free_bytes, rank_limit_ppm }
    }

    /// The taker does not keep chunks of this rank or more.
    fn rank_limit_ppm(&self) -> u32 {
        match self {
            // With free room, no chunk has to make way.
            Self { free_chunks: 1.., free_bytes: 1.., .. } => u32::MAX,
            Self { rank_limit_ppm, .. } => *rank_limit_ppm,
        }
    }

    /// Orders takers: by free room, or else by the rank limit.
    fn worth(&self) -> (u32, u64) {
        let limit = self.rank_limit_ppm();
        (limit, if limit == u32::MAX { self.free_chunks.min(self.free_bytes) } else { 0 })
    }

    fn shrink(&mut self, chunks: u64, bytes: u64) {
        self.free_chunks = self.free_chunks.saturating_sub(chunks);
        self.free_bytes = self.free_bytes.saturating_sub(bytes);
    }
}

impl Taker {
    fn room(&self, namespace: &Fingerprint) -> Room {
        if self.has_failed {
            return Room::default();
        }
        self.rooms.get(namespace).map_or(self.common, |room| room.unwrap_or_default())
    }

    /// Whether it keeps nothing of some namespace, or did not answer.
    fn is_unwilling(&self) -> bool {
        self.has_failed || self.common.rank_limit_ppm() == 0 || self.rooms.values().any(Option::is_none)
    }
}

impl Takers {
    /// Sets the actors that may take chunks from now on. The room of all other actors is forgotten.
    pub(super) fn are(&mut self, takers: &[Holder]) {
        let mut known: HashMap<Holder, Taker> = self.0.drain(..).map(|taker| (taker.holder, taker)).collect();
        let new = |holder| Taker { holder, has_failed: false, common: Room::UNKNOWN, rooms: HashMap::new() };
        self.0 = takers.iter().map(|taker| known.remove(taker).unwrap_or_else(|| new(*taker))).collect();
    }

    /// All takers, in order.
    pub(super) fn all(&self) -> impl Iterator<Item = Holder> {
        self.0.iter().map(|taker| taker.holder)
    }

    /// Takers that keep nothing at all or nothing of a namespace, or did not answer.
    pub(super) fn unwilling(&self) -> impl Iterator<Item = Holder> {
        self.0.iter().filter(|taker| taker.is_unwilling()).map(|taker| taker.holder)
    }

    /// Whether a taker did not answer.
    pub(super) fn has_silent(&self) -> bool {
        self.0.iter().any(|taker| taker.has_failed)
    }

    /// The taker to ask next to keep chunks of a namespace: the taker with the most free room, or else the taker with the highest
    /// rank limit.
    pub(super) fn best(&self, namespace: &Fingerprint) -> Option<Holder> {
        let willing = self.0.iter().map(|taker| (taker.holder, taker.room(namespace)));
        let willing = willing.filter(|(_, room)| room.rank_limit_ppm() > 0);
        // Of equal takers, the first one is asked.
        willing.rev().max_by_key(|(_, room)| room.worth()).map(|(holder, _)| holder)
    }

    /// No taker keeps chunks of this namespace that have this rank or more.
    pub(super) fn rank_limit_ppm(&self, namespace: &Fingerprint) -> u32 {
        self.0.iter().map(|taker| taker.room(namespace).rank_limit_ppm()).max().unwrap_or(0)
    }

    /// Takes the room that a taker named when it was only asked for its room. It is offered refused namespaces again.
    pub(super) fn answered(&mut self, taker: Holder, taken: &Taken) {
        if let Some(taker) = self.get(taker) {
            (taker.has_failed, taker.common) = (false, Room::of(taken));
            taker.rooms.clear();
        }
    }

    /// Takes a taker's answer to an offer of chunks, and returns whether the taker refuses the whole namespace: it keeps nothing of
    /// it, though it has room for chunks of this rank. It may not serve the tenant, or the namespace may not fit.
    pub(super) fn took(
        &mut self,
        taker: Holder,
        namespace: Fingerprint,
        taken: &Taken,
        (kept, bytes): (u64, u64),
        best_rank_ppm: u32,
    ) -> bool {
        let Some(taker) = self.get(taker) else { return false };
        taker.has_failed = false;
        let room = Room::of(taken);
        if room == Room::default() {
            // It keeps nothing of anybody.
            taker.common = room;
            taker.rooms.clear();
            return false;
        }
        let known = taker.rooms.values_mut().flatten().chain([&mut taker.common]);
        known.for_each(|known| {
            known.shrink(kept, bytes);
            known.rank_limit_ppm = room.rank_limit_ppm;
        });
        let is_refused = kept == 0 && room.rank_limit_ppm() > best_rank_ppm;
        taker.rooms.insert(namespace, Some(room).filter(|_| !is_refused));
        is_refused
    }

    /// Notes that a taker did not answer. It is not asked again while another taker takes something.
    pub(super) fn failed(&mut self, taker: Holder) {
        if let Some(taker) = self.get(taker) {
            (taker.has_failed, taker.common) = (true, Room::UNKNOWN);
        }
    }

    fn get(&mut self, taker: Holder) -> Option<&mut Taker> {
        self.0.iter_mut().find(|known| known.holder == taker)
    }
}
