//! Tells silent peers from slow ones, and decides when a silent peer is asked for a sign of life.
//!
//! A peer that sends no packet for half a second is left out until it answers a probe. A peer that is only late is not left out.
//! If the coordinator has not heard a member for a while, a few other members, its [`witnesses`], ask it for a sign of life. In a
//! quiet cluster no other member would notice that it is gone, and the coordinator removes a member early only if two others get
//! no answer.

use std::sync::Arc;
use std::time::Duration;

use larder_protocol::table::{Member, MemberState, NodeNumber, Table};

use super::fetch::LATE_FETCHES;
use super::gate::Gate;
use super::{Alarm, Effect, Exchange, ExchangeLimits, PeerId};
use crate::fair::FairPlaces;
use crate::store::ids::TenantId;

/// The state of a peer in one of its incarnations.
#[derive(Debug)]
pub(super) struct PeerHealth {
    standing: Hearing,
    /// The number of fetches in a row that the peer did not answer in time, though it was heard.
    pub(super) late_fetches: u32,
    /// The time at which the last of these fetches was late.
    pub(super) late_at: Duration,
    pub(super) gate: Gate,
    pub(super) follows: FairPlaces<TenantId>,
}

/// Whether a peer is heard. `Doubted`: the peer was not heard for a moment. `Silent`: the peer is left out. `probe` is the number
/// of the last probe.
#[derive(Debug)]
enum Hearing {
    Well,
    Doubted { probe: u64 },
    Silent { probe: u64, pause: Duration },
}

impl PeerHealth {
    pub(super) fn new(limits: &ExchangeLimits) -> Self {
        let (late_fetches, late_at) = (0, Duration::ZERO);
        let (gate, follows) = (Gate::new(limits), FairPlaces::default());
        Self { standing: Hearing::Well, late_fetches, late_at, gate, follows }
    }

    pub(super) fn is_silent(&self) -> bool {
        matches!(self.standing, Hearing::Silent { .. })
    }
}

impl Exchange {
    /// Notes that a peer sent a chunk, or said that it has none.
    pub fn heard(&mut self, peer: PeerId) {
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.late_fetches = 0;
        }
    }

    /// Notes that a request, sent at `asked`, got no answer in time. A peer that sent any packet since then (`was_heard`) is only
    /// slow. A peer that sent no packet for half a second is silent. After a shorter silence the peer is asked for a sign of
    /// life.
    pub fn is_late(&mut self, now: Duration, peer: PeerId, asked: Duration, was_heard: bool) {
        if was_heard {
            return;
        }
        if now.saturating_sub(asked) >= SILENCE {
            return self.falls_silent(now, peer);
        }
        self.doubt(peer, SILENCE);
    }

    /// Asks those suspect members for a sign of life for which this node is a witness.
    pub(super) fn witness(&mut self) {
        let (table, own) = (Arc::clone(&self.table), self.own);
        let suspects = table.members.iter().filter(|member| is_suspect(member) && member.number != own);
        for &Member { number: node, incarnation, .. } in suspects {
            if witnesses(&table, node).any(|witness| witness == own) {
                let peer = PeerId { node, incarnation };
                self.peers.entry(peer).or_insert_with(|| PeerHealth::new(&self.limits));
                self.doubt(peer, PROBE_DEADLINE);
            }
        }
    }

    /// Asks a peer that is well so far for a sign of life within this time.
    fn doubt(&mut self, peer: PeerId, deadline: Duration) {
        let probe = self.next_number();
        let state = self.peers.get_mut(&peer);
        if let Some(state) = state.filter(|state| matches!(state.standing, Hearing::Well)) {
            state.standing = Hearing::Doubted { probe };
            self.effects.push_back(Effect::Probe { peer, probe, deadline });
        }
    }

    /// Notes that a peer does not answer, or cannot be connected to: nobody waits for it until it answers a probe.
    pub fn falls_silent(&mut self, now: Duration, peer: PeerId) {
        let Some(state) = self.peers.get_mut(&peer).filter(|state| !state.is_silent()) else { return };
        state.standing = Hearing::Silent { probe: 0, pause: FIRST_PROBE_PAUSE };
        self.effects.push_back(Effect::Silent(peer));
        // A peer that answers probes at once, but not requests for blocks, is not asked for blocks again at once.
        if state.late_fetches >= LATE_FETCHES {
            self.alarms.insert((now + LATE_PAUSE, Alarm::Probe(peer)));
        } else {
            self.probe(peer);
        }
    }

    /// Takes the result of a probe: whether the peer answered, and whether it sent any packet meanwhile.
    pub fn probed(&mut self, now: Duration, peer: PeerId, probe: u64, answers: bool, was_heard: bool) {
        let chance = self.chance();
        let Some(state) = self.peers.get_mut(&peer) else { return };
        match &mut state.standing {
            Hearing::Doubted { probe: last } if *last == probe => {
                state.standing = Hearing::Well;
                if !answers && !was_heard {
                    self.falls_silent(now, peer);
                }
            }
            Hearing::Silent { probe: last, .. } if *last == probe && answers => {
                state.standing = Hearing::Well;
                // The peer gets one more try: after one late fetch it is left out again.
                state.late_fetches = state.late_fetches.min(LATE_FETCHES - 1);
                self.effects.push_back(Effect::Answers(peer));
            }
            Hearing::Silent { probe: last, pause } if *last == probe => {
                self.alarms.insert((now + pause.mul_f64(1.0 + chance / 2.0), Alarm::Probe(peer)));
                *pause = (*pause * 2).min(LAST_PROBE_PAUSE);
            }
            _ => {}
        }
    }

    /// Asks a silent peer for a sign of life.
    pub(super) fn probe(&mut self, peer: PeerId) {
        let number = self.next_number();
        if let Some(PeerHealth { standing: Hearing::Silent { probe, .. }, .. }) = self.peers.get_mut(&peer) {
            *probe = number;
            self.effects.push_back(Effect::Probe { peer, probe: number, deadline: PROBE_DEADLINE });
        }
    }
}

/// The members that find out whether a suspect member lives: the next members by number that are not suspect.
pub fn witnesses(table: &Table, suspect: NodeNumber) -> impl Iterator<Item = NodeNumber> + '_ {
    let (before, after) = table.members.split_at(table.members.partition_point(|is| is.number <= suspect));
    let others = after.iter().chain(before).filter(|member| !is_suspect(member));
    others.map(|member| member.number).filter(move |&number| number != suspect).take(WITNESSES)
}

fn is_suspect(member: &Member) -> bool {
    member.state == MemberState::Suspect
}

/// A peer that was asked for something and sends no packet for this time counts as absent. Even a process that is scheduled late
/// on a busy machine is heard sooner.
const SILENCE: Duration = Duration::from_millis(500);

/// How long at least a peer is left out that is heard but does not answer fetches.
const LATE_PAUSE: Duration = Duration::from_secs(1);

/// How long a silent peer may take to answer a probe.
pub const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// The first pause between probes.
const FIRST_PROBE_PAUSE: Duration = Duration::from_millis(20);
const LAST_PROBE_PAUSE: Duration = Duration::from_secs(1);

/// The number of witnesses: twice as many as the coordinator needs to believe them.
const WITNESSES: usize = 4;
