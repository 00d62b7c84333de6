//! Fetches: decides when a fetch may ask its peer, and whether it asks a busy peer again.

use std::time::Duration;

use larder_protocol::limits::MAX_FETCH_CHUNKS;
use larder_protocol::peer::{Class, RetryAfter};

use super::{Alarm, BusyPause, Effect, Exchange, PeerId, RequestId};
use crate::store::ids::TenantId;

/// A fetch's request to one peer on one stream.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// The tenant whose blocks are wanted.
    pub tenant: TenantId,
    /// Bytes of the blocks. A fetch of more bytes than all credits takes all credits.
    pub bytes: u64,
    /// The urgency of the requests that wait for the blocks.
    pub class: Class,
    /// Time limit, from the moment when the peer is asked for the first time.
    pub deadline: Duration,
    /// Whether other peers have all of the blocks too: then the fetch does not wait for a busy peer.
    pub has_others: bool,
}

/// A fetch's turn: it has a stream and credits until it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// The urgency of the request.
    pub class: Class,
    /// How long the fetch waited in the line.
    pub waited: Duration,
    /// The time by which the blocks must have come; `None` if the peer can no longer be asked.
    pub until: Option<Duration>,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) peer: PeerId,
    wanted: Wanted,
    /// The time by which the blocks must have come; known once the peer is asked for the first time.
    until: Option<Duration>,
    pause: BusyPause,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    Waits { since: Duration },
    Asked { at: Duration },
    Pauses,
    Follows { tenant: TenantId, late: u32 },
}

impl Exchange {
    /// Adds a fetch, which waits for its turn.
    pub fn fetch(&mut self, now: Duration, peer: PeerId, wanted: Wanted) -> RequestId {
        let request = self.begin(peer, wanted, Stage::Pauses);
        self.line_up(now, request);
        request
    }

    /// Changes the class of a fetch. Its waiting time still counts, and it may get its turn at once.
    pub fn change_class(&mut self, now: Duration, request: RequestId, class: Class) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some(peer) = self.peers.get_mut(&state.peer) else { return };
        state.wanted.class = class;
        peer.gate.turns.change_class(request, class);
        let peer = state.peer;
        self.admit(now, peer);
    }

    /// Notes that a fetch's peer is too busy for `bytes` bytes. Returns whether the fetch gets another turn after a pause;
    /// otherwise the fetch is over.
    pub fn is_busy(&mut self, now: Duration, request: RequestId, bytes: u64, retry: RetryAfter) -> bool {
        let chance = self.chance();
        self.give_back(now, request);
        let Some(state) = self.requests.get_mut(&request) else { return false };
        state.wanted.bytes = bytes;
        let again = now + state.pause.next(retry, chance);
        if state.wanted.has_others || state.until.is_none_or(|until| again >= until) {
            return false;
        }
        self.alarms.insert((again, Alarm::LineUp(request)));
        true
    }

    /// Notes that a fetch did not come in time. A peer that is heard, but leaves several fetches in a row without an answer, is
    /// left out too.
    pub fn fetch_is_late(&mut self, now: Duration, request: RequestId, was_heard: bool) {
        let Some(&Request { peer, wanted, stage: Stage::Asked { at }, .. }) = self.requests.get(&request)
        else {
            return;
        };
        self.is_late(now, peer, at, was_heard);
        let Some(state) = self.peers.get_mut(&peer).filter(|_| was_heard) else { return };
        // Fetches that wait at the same time count as one. A fetch that asked the peer only shortly before its deadline does not
        // count.
        if at >= state.late_at && now.saturating_sub(at) >= wanted.deadline / 2 {
            state.late_at = now;
            state.late_fetches += 1;
            if state.late_fetches >= LATE_FETCHES {
                self.falls_silent(now, peer);
            }
        }
    }

    /// Begins a follow for a tenant. A follow takes as long as a prefill, and would keep fetches from passing the gate, so follows
    /// have a bound of their own, and each tenant has one. `None` at these bounds, or if the peer is gone.
    pub fn follow(&mut self, peer: PeerId, tenant: TenantId) -> Option<RequestId> {
        if !self.peers.get_mut(&peer)?.follows.take(tenant, 1, FOLLOWS_PER_PEER) {
            return None;
        }
        let (class, deadline) = (Class::Decode, Duration::MAX);
        let wanted = Wanted { tenant, bytes: 0, class, deadline, has_others: false };
        Some(self.begin(peer, wanted, Stage::Follows { tenant, late: 0 }))
    }

    /// Takes a place for a tenant's follow of a node that is no member yet: nobody knows how many of these nodes will come. Returns
    /// whether there was one; [`Self::stops_waiting`] gives it back.
    #[must_use]
    pub fn waits_for_member(&mut self, tenant: TenantId) -> bool {
        self.waiting_follows.take(tenant, 1, FOLLOWS_PER_PEER)
    }

    /// Gives the place of a tenant's follow back that waited for a node.
    pub fn stops_waiting(&mut self, tenant: TenantId) {
        self.waiting_follows.give_back(tenant, 1);
    }

    /// Whether a follow goes on after a probe of its peer; `answers` says whether the peer answered. One late answer is no reason
    /// to give up.
    pub fn follows_on(&mut self, request: RequestId, answers: bool) -> bool {
        let Some(Request { peer, stage: Stage::Follows { late, .. }, .. }) = self.requests.get_mut(&request)
        else {
            return false;
        };
        *late = if answers { 0 } else { *late + 1 };
        *late < LATE_ANSWERS && self.peers.get(peer).is_some_and(|peer| !peer.is_silent())
    }

    /// Ends a fetch or follow, in whatever stage it is.
    pub fn leave(&mut self, now: Duration, request: RequestId) {
        self.give_back(now, request);
        self.requests.remove(&request);
    }

    /// Bytes that are requested from a peer and have not come, in credits.
    pub fn bytes_under_way(&self, peer: PeerId) -> u64 {
        self.peers.get(&peer).map_or(0, |peer| peer.gate.bytes_under_way())
    }

    /// Splits chunks of these sizes into batches, one for each stream, with at least one chunk each. Returns the position of each
    /// batch's first chunk.
    pub fn batches(&self, sizes: impl Iterator<Item = u64>) -> Vec<usize> {
        let (mut firsts, mut bytes) = (Vec::<usize>::new(), 0);
        for (at, size) in sizes.enumerate() {
            let is_full = |first| at - first >= MAX_FETCH_CHUNKS || bytes + size > self.limits.batch_bytes;
            if firsts.last().is_none_or(|&first| is_full(first)) {
                firsts.push(at);
                bytes = 0;
            }
            bytes += size;
        }
        firsts
    }

    fn begin(&mut self, peer: PeerId, wanted: Wanted, stage: Stage) -> RequestId {
        let request = RequestId(self.next_number());
        let state = Request { peer, wanted, until: None, pause: BusyPause::default(), stage };
        self.requests.insert(request, state);
        request
    }

    pub(super) fn line_up(&mut self, now: Duration, request: RequestId) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some(peer) = self.peers.get_mut(&state.peer) else {
            return self.effects.extend(state.is_over(request));
        };
        state.stage = Stage::Waits { since: now };
        peer.gate.turns.wait(state.wanted.tenant, request, state.wanted.class, now);
        let peer = state.peer;
        self.admit(now, peer);
    }

    /// Gives back a request's stream and credits, and lets the next request in.
    fn give_back(&mut self, now: Duration, request: RequestId) {
        let Some(state) = self.requests.get_mut(&request) else { return };
        let Some(peer) = self.peers.get_mut(&state.peer) else { return };
        match std::mem::replace(&mut state.stage, Stage::Pauses) {
            Stage::Waits { .. } => _ = peer.gate.turns.leave(request),
            Stage::Asked { .. } => peer.gate.give_back(state.wanted.tenant, state.wanted.bytes),
            Stage::Follows { tenant, .. } => peer.follows.give_back(tenant, 1),
            Stage::Pauses => {}
        }
        let peer = state.peer;
        self.admit(now, peer);
    }

    fn admit(&mut self, now: Duration, peer: PeerId) {
        let Some(peer) = self.peers.get_mut(&peer) else { return };
        while let Some(request) = peer.gate.turns.next() {
            let Some(state) = self.requests.get_mut(&request) else { return };
            if !peer.gate.admit(request, state.wanted.tenant, state.wanted.bytes) {
                return;
            }
            let Stage::Waits { since } = std::mem::replace(&mut state.stage, Stage::Asked { at: now }) else {
                return;
            };
            let until = *state.until.get_or_insert(now + state.wanted.deadline);
            let until = (!peer.is_silent()).then_some(until);
            let turn = Turn { class: state.wanted.class, waited: now.saturating_sub(since), until };
            self.effects.push_back(Effect::Turn(request, turn));
        }
    }
}

impl Request {
    /// The answer to a request that waits for its turn at a peer that is gone.
    pub(super) fn is_over(&self, request: RequestId) -> Option<Effect> {
        let waits = matches!(self.stage, Stage::Waits { .. } | Stage::Pauses);
        let turn = Turn { class: self.wanted.class, waited: Duration::ZERO, until: None };
        waits.then_some(Effect::Turn(request, turn))
    }
}

/// After this many fetches in a row without an answer, a peer is left out although it is heard.
pub(super) const LATE_FETCHES: u32 = 3;

/// Time between probes of a peer whose writer is followed, and the time limit of each answer.
pub const FOLLOW_PROBE: Duration = Duration::from_secs(1);

/// After this many late answers in a row, a follow ends.
const LATE_ANSWERS: u32 = 3;

/// Follows of one peer at a time, and follows that wait for nodes that are no members yet. Each follow of a peer has a stream; a
/// connection carries 256.
const FOLLOWS_PER_PEER: u64 = 128;
