//! Membership: knows the cluster's members, and makes the table that names them.
//!
//! Pure: it takes `now` and returns tables. A node is a member from its join on, with an incarnation that grows with every start.
//! A node that is silent for a while is suspect, and four members ask it for a sign of life. A node that is silent for long is
//! removed, and much earlier if two members get no answer from it, either. A node that comes back is another incarnation, and all
//! facts of the earlier one are void at once. Every change makes a new table with a higher epoch; changes that come together
//! share one table. A coordinator that starts opens a new term, removes nobody for its grace time, and refuses to fall behind an
//! epoch that nodes have seen. One of several coordinators leads while it is elected ([`crate::election`]), in the term of the
//! election. Of two processes with one name, the one that is heard stays: the other may join when the first has missed
//! [`MISSED_HEARTBEATS`].

mod known;
mod lost;
mod patience;
mod reign;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use larder_protocol::limits::{MAX_INCARNATION, MAX_MEMBERS, MAX_TERM};
use larder_protocol::membership::{Heartbeat, Join, Joined};
use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, Table};
use larder_protocol::v1;
use larder_protocol::version::Version;
use rkyv::{Archive, Deserialize, Serialize};

pub use self::known::REPORTERS;
use self::known::{KnownMember, Rival};
use self::lost::LostMembers;
pub use self::lost::{Lost, MAX_LOST};
pub use self::patience::Patience;
use self::reign::Office;
use crate::ring::{Weighted, assign, assign_for_v1, bound};

/// Milliseconds of the coordinator's clock.
pub type Millis = u64;

/// The state that a coordinator must not forget.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
pub struct DurableState {
    /// The last table.
    pub table: Table,
    /// The numbers that were given out, by node name. Nodes that left come before the members; among them, the node that left
    /// first comes first.
    pub numbers: Vec<(String, NodeNumber)>,
    /// The members that were removed after silence and did not come back. No part of the archive: files of earlier versions lack
    /// it.
    #[rkyv(with = rkyv::with::Skip)]
    pub lost: Vec<Lost>,
    /// The lives of nodes that were removed, by node name, unless a later life is known. No part of the archive, either.
    #[rkyv(with = rkyv::with::Skip)]
    pub void: Vec<(String, u64)>,
}

/// The members of the cluster.
#[derive(Debug)]
pub struct Membership {
    patience: Patience,
    epoch: Epoch,
    table: Arc<Table>,
    numbers: BTreeMap<String, Given>,
    /// The number of departures so far: later ones are higher.
    leavings: u64,
    members: BTreeMap<NodeNumber, KnownMember>,
    lost: LostMembers,
    started: Millis,
    last_tick: Millis,
    /// No silence changes anything before this time, so most ticks look at no member.
    judge_at: Millis,
    /// The time of the next look at who is not reached.
    judge_reach_at: Millis,
    published: Option<Millis>,
    is_changed: bool,
    /// Whether the state file lacks something that no table brings.
    is_unwritten: bool,
    counts: EventCounts,
    office: Office,
    /// When this coordinator led last, or heard the leader.
    in_touch: Millis,
    /// Whether a loss may have passed unseen since the last table: this coordinator did not run, or did not hear the leader.
    was_away: bool,
    /// Whether the homes of the last table that it made have the form that nodes of version 1 know.
    served_v1: bool,
    /// The nodes that lately knew a table of a later term than this leader's, that term, and when they said so.
    claims: BTreeMap<String, (u64, Millis)>,
    /// Nodes that were asked for their table in this term.
    bringers: u32,
    /// Whether one of these nodes has not answered.
    awaits_table: bool,
    /// A new leader waits from this time on for its members, and for a table that they bring.
    gathers_from: Millis,
}

/// The counts of events so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCounts {
    /// Nodes that joined, again or for the first time.
    pub joins: u64,
    /// Nodes that left in order.
    pub leaves: u64,
    /// Nodes that became suspect.
    pub suspects: u64,
    /// Nodes that were removed.
    pub removals: u64,
    /// Partitions that changed their home.
    pub moved_partitions: u64,
    /// Joins that were refused because another process of that name lives.
    pub contests: u64,
    /// Numbers that were given to another name, since no unused number was left.
    pub reused_numbers: u64,
    /// Nodes that began to drain.
    pub drains: u64,
}

/// Why a node is no member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JoinRefused {
    /// A newer incarnation was a member: the node may join again as this incarnation.
    #[error("a newer incarnation of this node was a member; the node may join as incarnation {0}")]
    Outdated(u64),
    /// Another process of this name lives.
    #[error("another process of this name lives at {address}; try again in {retry_after_ms} ms")]
    InUse {
        /// That process's address for peers.
        address: SocketAddr,
        /// The time after which it has missed its heartbeats, unless it is heard before.
        retry_after_ms: u64,
        /// Whether this rival was not reported lately.
        is_news: bool,
    },
    /// This coordinator does not lead.
    #[error("this coordinator does not lead")]
    NotLeading,
    /// The node knows a table of a later term: this coordinator may lead on only in an even later term.
    #[error("the node knows a table of term {0}, and this coordinator leads in an earlier one")]
    LaterTerm(u64),
    /// The cluster is full.
    #[error("the cluster has {MAX_MEMBERS} nodes, the limit: stop one of them first")]
    Full,
    /// The node's numbers are impossible: neither time nor a coordinator can have led to them.
    #[error(
        "the node names incarnation {incarnation} and term {term}, which are impossible: restart the node, and check its clock"
    )]
    Implausible {
        /// The value that the node sent.
        incarnation: u64,
        /// The value that the node sent.
        term: u64,
    },
}

/// A node of that name is a member, so it is not lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is a member of the cluster, so it cannot be forgotten: a node that stops properly needs no forgetting"
)]
pub struct IsMember(String);

/// The result of a node's heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beat {
    /// The node was heard.
    Heard,
    /// The node was heard. Another process of its name, at this address, wants to join.
    Contested(SocketAddr),
    /// The node is not a member, or not any more.
    Removed,
    /// This coordinator does not lead.
    NotLeading,
    /// The node knows a table of this later term.
    LaterTerm(u64),
}

/// A member, for reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberReport {
    /// The member, as the table shows it.
    pub member: Member,
    /// Partitions whose home it is.
    pub partitions: usize,
    /// The version that it speaks, if it has said so to this coordinator.
    pub version: Option<Version>,
    /// Milliseconds since it was last heard.
    pub silent_ms: u64,
}

/// A number that was given out.
#[derive(Debug)]
struct Given {
    number: NodeNumber,
    /// The node's last departure, in the count of departures.
    left: u64,
    /// The node's last life that is known, also after it left; 0 if none is.
    incarnation: u64,
    /// Whether that life was removed. A table without it went round, so the others have dropped its claims.
    is_void: bool,
}

impl Membership {
    /// Continues from an earlier coordinator's state, or from nothing.
    pub fn new(patience: Patience, state: DurableState, now: Millis) -> Self {
        let DurableState { table, numbers, lost, void } = state;
        let is_member = |name: &str| table.members.iter().any(|member| member.name == name);
        let again = lost.into_iter().filter(|lost| !is_member(&lost.member.name));
        // The clock may have been set back.
        let again = again.map(|lost| Lost { removed: lost.removed.min(now), ..lost });
        let mut numbers = given(numbers, &table);
        void.iter().for_each(|(name, incarnation)| note_void(&mut numbers, name, *incarnation));
        // Files of earlier versions lack the lives.
        let again =
            again.inspect(|Lost { member, .. }| note_void(&mut numbers, &member.name, member.incarnation));
        let mut lost = LostMembers::default();
        lost.add(again, now, patience.remember_lost_ms);
        let known = |member: &Member| {
            let drains = member.state == MemberState::Draining;
            let member = Member { state: well(drains), ..member.clone() };
            (member.number, KnownMember { is_awaited: true, drains, ..KnownMember::new(member, now) })
        };
        let members: BTreeMap<_, _> = table.members.iter().map(known).collect();
        Self {
            patience,
            epoch: next_term(table.epoch),
            is_changed: !members.is_empty(),
            is_unwritten: false,
            members,
            lost,
            leavings: numbers.len() as u64,
            numbers,
            table: Arc::new(table),
            started: now,
            last_tick: now,
            judge_at: 0,
            judge_reach_at: 0,
            published: None,
            counts: EventCounts::default(),
            office: Office::Alone,
            in_touch: now,
            was_away: true,
            served_v1: false,
            claims: BTreeMap::new(),
            bringers: 0,
            awaits_table: false,
            gathers_from: now,
        }
    }

    /// Makes a node a member. Its earlier life, if there is one, ends here, once that life is not heard any more.
    ///
    /// # Errors
    /// [`JoinRefused`]
    pub fn join(&mut self, name: &str, join: &Join, now: Millis) -> Result<Joined, JoinRefused> {
        self.wake(now);
        let Join { incarnation, epoch, peer, .. } = *join;
        if incarnation > MAX_INCARNATION || !self.is_plausible(epoch) {
            return Err(JoinRefused::Implausible { incarnation, term: epoch.term });
        }
        if !self.leads(now) {
            return Err(JoinRefused::NotLeading);
        }
        if self.takes_claim(name, epoch, now) {
            return Err(JoinRefused::LaterTerm(epoch.term));
        }
        self.end_earlier_life(name, incarnation, peer, now)?;
        let number = self.number_of(name)?;
        // The nodes of a coordinator that lost its state tell it how far it had come. Its own tables are no news.
        if self.office == Office::Alone && epoch > self.epoch {
            self.epoch = next_term(epoch);
            self.is_changed = true;
        }
        let member = Member {
            number,
            name: name.to_owned(),
            incarnation,
            peer,
            http: join.http,
            devices: join.devices,
            weight: join.weight.max(1),
            state: MemberState::Alive,
        };
        let mut before = self.current(number, incarnation);
        let drains = before.as_ref().is_some_and(|known| known.drains);
        let same_place = before.as_mut().filter(|known| known.member.peer == peer);
        // A new stream does not make it reached.
        let (is_unreached, unanswered) = same_place
            .map(|known| (known.is_unreached, std::mem::take(&mut known.unanswered)))
            .unwrap_or_default();
        let member = Member { state: well(drains), ..member };
        let is_new = self.members.get(&number).is_none_or(|known| known.member != member);
        if is_new {
            self.counts.joins += 1;
            self.is_changed = true;
        }
        if self.members.is_empty() && epoch > self.table.epoch {
            // The node knows members that this leader does not: there is time to bring them.
            self.gathers_from = now;
        }
        if let Some(given) = self.numbers.get_mut(name) {
            (given.incarnation, given.is_void) = (incarnation, false);
        }
        let known = KnownMember { drains, is_unreached, unanswered, ..KnownMember::new(member, now) };
        self.members.insert(number, known);
        // It reports anew whom it does not reach.
        self.members.values_mut().for_each(|known| _ = known.unanswered.remove(&number));
        self.judge_at = 0;
        self.lost.forget(name);
        Ok(Joined { number, heartbeat_ms: self.patience.heartbeat_ms })
    }

    /// Notes that a node lives. Of the silent members that it names, the first [`MAX_MEMBERS`] count.
    pub fn heartbeat(
        &mut self,
        number: NodeNumber,
        incarnation: u64,
        heartbeat: &Heartbeat,
        now: Millis,
    ) -> Beat {
        self.wake(now);
        if !self.leads(now) {
            return Beat::NotLeading;
        }
        if self.is_outdone_by(heartbeat.epoch) && self.is_plausible(heartbeat.epoch) {
            let name = self.current(number, incarnation).map(|known| known.member.name.clone());
            if name.is_some_and(|name| self.takes_claim(&name, heartbeat.epoch, now)) {
                return Beat::LaterTerm(heartbeat.epoch.term);
            }
        }
        let Some(known) = self.current(number, incarnation) else { return Beat::Removed };
        (known.heard, known.is_awaited) = (now, false);
        let beat = match &mut known.rival {
            Some(rival) if !rival.is_told => {
                rival.is_told = true;
                Beat::Contested(rival.address)
            }
            _ => Beat::Heard,
        };
        known.reports.clear();
        let silent: BTreeSet<NodeNumber> = heartbeat.silent.iter().take(MAX_MEMBERS).copied().collect();
        let reported = std::mem::replace(&mut known.reported, silent.clone());
        if known.member.state == MemberState::Suspect {
            known.member.state = well(known.drains);
            (self.is_changed, self.judge_at) = (true, 0);
        }
        for answers in reported.difference(&silent) {
            if let Some(known) = self.members.get_mut(answers) {
                known.unanswered.remove(&number);
            }
        }
        for silent in &silent {
            if let Some(known) = self.members.get_mut(silent).filter(|_| *silent != number) {
                known.unanswered.entry(number).or_insert(now);
                let is_news = known.reports.insert(number, now).is_none();
                if is_news && known.is_reported() {
                    self.judge_at = 0;
                }
            }
        }
        beat
    }

    /// Changes the patience from now on. Members keep the heartbeat that they were told. Lost members that need not be remembered
    /// any more are forgotten for good.
    pub fn change_patience(&mut self, patience: Patience) {
        let lost = self.lost.all().len();
        self.lost.add(std::iter::empty(), self.last_tick, patience.remember_lost_ms);
        // The state file follows with the next table.
        self.is_changed |= self.lost.all().len() < lost;
        self.patience = patience;
        self.judge_at = 0;
    }

    /// Forgets a lost node that will never come back; returns whether it was lost.
    ///
    /// # Errors
    /// [`IsMember`], with nothing changed.
    pub fn forget(&mut self, name: &str) -> Result<bool, IsMember> {
        if self.members.values().any(|known| known.member.name == name) {
            return Err(IsMember(name.to_owned()));
        }
        let was_lost = self.lost.forget(name);
        self.is_unwritten |= was_lost;
        Ok(was_lost)
    }

    /// Whether the state has changed since it was last taken, apart from tables.
    pub fn take_unwritten(&mut self) -> bool {
        std::mem::take(&mut self.is_unwritten)
    }

    /// Notes whether a node leaves soon, and returns whether that is news. Its partitions move now, so that others know their new
    /// homes before it leaves.
    pub fn drains(&mut self, number: NodeNumber, incarnation: u64, drains: bool) -> bool {
        let Some(known) = self.current(number, incarnation).filter(|known| known.drains != drains) else {
            return false;
        };
        known.drains = drains;
        if known.member.state != MemberState::Suspect {
            known.member.state = well(drains);
        }
        self.is_changed = true;
        self.counts.drains += u64::from(drains);
        true
    }

    /// Notes the version that a node speaks. Versions of members that have not come back are not known.
    pub fn speaks(&mut self, number: NodeNumber, incarnation: u64, version: Version) {
        if let Some(known) = self.current(number, incarnation).filter(|known| known.version != version) {
            known.version = version;
            self.is_changed = true;
        }
    }

    /// Notes that a node has another address than when it joined. It may join again at once.
    pub fn moves(&mut self, number: NodeNumber, incarnation: u64) {
        self.current(number, incarnation).into_iter().for_each(|known| known.has_moved = true);
    }

    /// Removes a node that leaves in order.
    pub fn leave(&mut self, number: NodeNumber, incarnation: u64) {
        if self.current(number, incarnation).is_some() {
            self.members.remove(&number);
            self.counts.leaves += 1;
            self.is_changed = true;
            self.note_left(&[number]);
        }
    }

    /// Judges silence. Returns a new table if something changed and the last table is old enough. Call it often. A coordinator
    /// that does not lead makes no tables.
    pub fn tick(&mut self, now: Millis) -> Option<Arc<Table>> {
        self.stays_awake(now);
        if !self.leads(now) {
            return None;
        }
        if now >= self.judge_at && now.saturating_sub(self.started) >= self.patience.grace_ms {
            self.judge(now);
        }
        if now >= self.judge_reach_at {
            self.judge_reach_at = now + REACH_EVERY_MS;
            self.judge_reach(now);
        }
        self.is_changed |= self.served_v1 && !self.serves_v1();
        let is_due = self.published.is_none_or(|then| now.saturating_sub(then) >= BATCH_MS);
        if !(self.is_changed && is_due && self.has_gathered(now)) {
            return None;
        }
        self.is_changed = false;
        let serves_v1 = self.serves_v1();
        self.served_v1 = serves_v1;
        self.published = Some(now);
        self.was_away = false;
        self.epoch.number += 1;
        let members: Vec<Member> = self.members.values().map(|known| known.member.clone()).collect();
        let mut weights: Vec<Weighted> = self
            .homes()
            .map(|KnownMember { member, .. }| Weighted { node: member.number, weight: member.weight })
            .collect();
        bound(&mut weights);
        let assign = if serves_v1 { assign_for_v1 } else { assign };
        let homes = assign(&self.table.homes, &weights);
        let moved = homes.iter().zip(&self.table.homes).filter(|(now, before)| now != before).count();
        self.counts.moved_partitions += moved as u64;
        self.table = Arc::new(Table { epoch: self.epoch, members, homes });
        Some(Arc::clone(&self.table))
    }

    /// Judges which members most others do not reach, though they are heard here: their address may be wrong, or a firewall may let
    /// them out and nobody in.
    fn judge_reach(&mut self, now: Millis) {
        // A node that shares no chunks asks no others, so it cannot report.
        let sharing = self.members.iter().filter(|(_, known)| known.member.devices > 0);
        let reporters: BTreeSet<NodeNumber> = sharing.map(|(&number, _)| number).collect();
        let patience = self.patience.remove_reported_after_ms;
        for known in
            self.members.values_mut().filter(|known| known.is_unreached || !known.unanswered.is_empty())
        {
            known.unanswered.retain(|by, _| reporters.contains(by));
            let is_long = |since: &&Millis| now.saturating_sub(**since) >= patience;
            let by = known.unanswered.values().filter(is_long).count();
            let others = reporters.len() - usize::from(reporters.contains(&known.member.number));
            let is_unreached = by * 2 > others;
            self.is_changed |= is_unreached != known.is_unreached;
            known.is_unreached = is_unreached;
        }
    }

    /// The members that may be home to partitions: those that share chunks, that the others reach, and that do not drain. Without
    /// such members, also those that drain; without those, also those that are not reached; without those, all.
    fn homes(&self) -> impl Iterator<Item = &KnownMember> {
        let rank = |known: &KnownMember| (known.member.devices > 0, !known.is_unreached, !known.drains);
        let best = self.members.values().map(rank).max();
        self.members.values().filter(move |known| Some(rank(known)) == best)
    }

    /// The last table that was published.
    pub fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table)
    }

    /// Whether a table of this term was published, or a table of the leader is known.
    pub fn is_serving(&self, now: Millis) -> bool {
        let follows = !self.leads(now) && self.table.epoch.number > 0;
        follows || self.published.is_some() || now.saturating_sub(self.started) >= self.patience.grace_ms
    }

    /// The counts of events so far.
    pub fn counts(&self) -> EventCounts {
        self.counts
    }

    /// The state to keep.
    pub fn state(&self) -> DurableState {
        let void = self.numbers.iter().filter(|(_, given)| given.is_void);
        let void = void.map(|(name, given)| (name.clone(), given.incarnation)).collect();
        let mut numbers: Vec<_> = self.numbers.iter().collect();
        numbers.sort_by_key(|(_, given)| (self.members.contains_key(&given.number), given.left));
        let numbers = numbers.into_iter().map(|(name, given)| (name.clone(), given.number)).collect();
        DurableState { table: (*self.table).clone(), numbers, lost: self.lost.all(), void }
    }

    /// The time for which members of the last table may still come back before their silence counts.
    pub fn grace_left(&self, now: Millis) -> Millis {
        self.patience.grace_ms.saturating_sub(now.saturating_sub(self.started))
    }

    /// The members that are heard.
    pub fn heard_members(&self) -> Vec<NodeNumber> {
        let heard = self.members.values().filter(|known| known.member.state != MemberState::Suspect);
        heard.filter(|known| !known.is_awaited).map(|known| known.member.number).collect()
    }

    /// Every member.
    pub fn report(&self, now: Millis) -> Vec<MemberReport> {
        let mut partitions = BTreeMap::<NodeNumber, usize>::new();
        self.table.homes.iter().for_each(|&home| *partitions.entry(home).or_default() += 1);
        let report = |known: &KnownMember| MemberReport {
            member: known.member.clone(),
            partitions: partitions.get(&known.member.number).copied().unwrap_or(0),
            version: Some(known.version).filter(|_| !known.is_awaited && self.leads(now)),
            // A coordinator that follows hears no member.
            silent_ms: if self.leads(now) { now.saturating_sub(known.heard) } else { 0 },
        };
        self.members.values().map(report).collect()
    }

    /// The members, those that no table names yet included.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values().map(|known| &known.member)
    }

    /// Every member that was removed lately and did not come back, and how long it has been silent.
    pub fn lost(&self, now: Millis) -> Vec<(Lost, Millis)> {
        self.lost.since(now, self.patience.remember_lost_ms)
    }

    /// Whether homes must have the form that nodes of version 1 know: there is such a node, or one that has not come back yet may
    /// be.
    fn serves_v1(&self) -> bool {
        let mut members = self.members.values();
        let before = &self.table.homes;
        members.clone().any(|known| known.version < Version::SECOND)
            || (members.any(|known| known.is_awaited) && v1::is_merged(before))
    }

    /// Whether an elected coordinator must not lead on in its term, since there is a later table that it cannot have made.
    fn is_outdone_by(&self, epoch: Epoch) -> bool {
        let is_own = epoch.term < self.epoch.term || epoch <= self.table.epoch;
        self.office != Office::Alone && !is_own
    }

    /// Whether a node's word of a later table makes this leader lead on in a term after that. One word of a node is enough for a
    /// while, since the new term is after it: a node that lies each time must not keep the cluster without a table.
    fn takes_claim(&mut self, name: &str, epoch: Epoch, now: Millis) -> bool {
        if !self.is_outdone_by(epoch) {
            return false;
        }
        self.claims.retain(|_, (_, at)| now.saturating_sub(*at) < CLAIM_COUNTS_FOR_MS);
        let (term, _) = *self.claims.entry(name.to_owned()).or_insert((epoch.term, now));
        epoch.term <= term
    }

    /// Whether a coordinator of this cluster can have made this epoch. A node that lies about its term must not bring the cluster
    /// near the last term, after which no coordinator could lead.
    fn is_plausible(&self, epoch: Epoch) -> bool {
        epoch.term <= self.epoch.term.saturating_add(MOST_TERMS_AHEAD).min(MAX_TERM)
    }

    fn current(&mut self, number: NodeNumber, incarnation: u64) -> Option<&mut KnownMember> {
        self.members.get_mut(&number).filter(|known| known.member.incarnation == incarnation)
    }

    /// Notes that this process runs. As long as it cannot tick, it must say so.
    pub fn stays_awake(&mut self, now: Millis) {
        self.wake(now);
        self.last_tick = now;
    }

    /// Notes whether this process itself stood still. Then it could hear nobody: neither the silence counts, nor the time since
    /// members said that they do not reach another.
    fn wake(&mut self, now: Millis) {
        let stalled = now.saturating_sub(self.last_tick);
        if stalled > STALL_MS {
            let shift = |time: &mut Millis| *time = (*time + stalled).min(now);
            for known in self.members.values_mut() {
                shift(&mut known.heard);
                known.unanswered.values_mut().for_each(shift);
            }
            self.last_tick = now;
        }
    }

    /// Removes a member for another incarnation of its node, if the member has missed its heartbeats.
    fn end_earlier_life(
        &mut self,
        name: &str,
        incarnation: u64,
        address: SocketAddr,
        now: Millis,
    ) -> Result<(), JoinRefused> {
        let Some(given) = self.numbers.get(name) else { return Ok(()) };
        let Some(known) = self.members.get_mut(&given.number) else {
            // It left in order, and its clock was set back since; or it was removed, and must make its claims anew.
            let is_over = incarnation < given.incarnation + u64::from(given.is_void);
            let is_outdated = is_over && given.incarnation < MAX_INCARNATION;
            return if is_outdated { Err(JoinRefused::Outdated(given.incarnation + 1)) } else { Ok(()) };
        };
        let is_same = known.member.peer == address || known.has_moved;
        if known.member.incarnation == incarnation && is_same {
            return Ok(());
        }
        let patience_ms = MISSED_HEARTBEATS * self.patience.heartbeat_ms;
        let silent_ms = now.saturating_sub(known.heard);
        if silent_ms < patience_ms {
            self.counts.contests += 1;
            let lately = |rival: &Rival| {
                rival.address == address && now.saturating_sub(rival.since) < RIVAL_IS_NEWS_MS
            };
            let is_news = !known.rival.as_ref().is_some_and(lately);
            if is_news {
                known.rival = Some(Rival { address, since: now, is_told: false });
            }
            let retry_after_ms = patience_ms - silent_ms;
            return Err(JoinRefused::InUse { address: known.member.peer, retry_after_ms, is_news });
        }
        if known.member.incarnation > incarnation && known.member.incarnation < MAX_INCARNATION {
            return Err(JoinRefused::Outdated(known.member.incarnation + 1));
        }
        Ok(())
    }

    /// The number of the node with this name. A node that comes back needs a place as a new one does.
    fn number_of(&mut self, name: &str) -> Result<NodeNumber, JoinRefused> {
        let given = self.numbers.get(name).map(|given| given.number);
        let is_member = given.is_some_and(|number| self.members.contains_key(&number));
        if !is_member && self.members.len() >= MAX_MEMBERS {
            return Err(JoinRefused::Full);
        }
        if let Some(number) = given {
            return Ok(number);
        }
        let last = self.numbers.values().map(|given| given.number.0).max().unwrap_or(0);
        let next = last.checked_add(1).map(NodeNumber).filter(|&next| next < NodeNumber::THIS_NODE);
        let number = next.or_else(|| self.unused()).or_else(|| self.take_back()).ok_or(JoinRefused::Full)?;
        self.numbers.insert(name.to_owned(), Given { number, left: 0, incarnation: 0, is_void: false });
        Ok(number)
    }

    /// The lowest number that no known node has. An elected coordinator does not know the nodes that left before its first table,
    /// so the highest number may be in use while most others are free.
    fn unused(&self) -> Option<NodeNumber> {
        let used: BTreeSet<NodeNumber> = self.numbers.values().map(|given| given.number).collect();
        (1..NodeNumber::THIS_NODE.0).map(NodeNumber).find(|number| !used.contains(number))
    }

    /// The number of the node that left longest ago, for use when no unused number is left. By then all other numbers, some
    /// 60,000, were given to nodes that left later or are members, so no current table names this one. A node with an old table
    /// finds another name and incarnation at it.
    fn take_back(&mut self) -> Option<NodeNumber> {
        let gone = self.numbers.iter().filter(|(_, given)| !self.members.contains_key(&given.number));
        let name = gone.min_by_key(|(_, given)| given.left)?.0.clone();
        self.counts.reused_numbers += 1;
        self.numbers.remove(&name).map(|given| given.number)
    }

    fn note_left(&mut self, gone: &[NodeNumber]) {
        for given in self.numbers.values_mut().filter(|given| gone.contains(&given.number)) {
            self.leavings += 1;
            given.left = self.leavings;
        }
    }

    fn judge(&mut self, now: Millis) {
        let patience = &self.patience;
        let graced = self.started + patience.grace_ms;
        for known in self.members.values_mut() {
            known.reports.retain(|_, &mut then| now.saturating_sub(then) < patience.suspect_after_ms);
        }
        let is_gone = |known: &KnownMember| known.removed_at(patience, graced) <= now;
        let gone: Vec<NodeNumber> =
            self.members.iter().filter(|(_, known)| is_gone(known)).map(|(&number, _)| number).collect();
        let removed = gone.iter().filter_map(|number| self.members.remove(number));
        let removed = removed
            .inspect(|known| note_void(&mut self.numbers, &known.member.name, known.member.incarnation));
        let (left, lost): (Vec<_>, Vec<_>) = removed.partition(KnownMember::may_have_left);
        self.counts.leaves += left.len() as u64;
        self.counts.removals += lost.len() as u64;
        let lost =
            lost.into_iter().map(|KnownMember { member, heard, .. }| Lost { member, heard, removed: now });
        self.lost.add(lost, now, patience.remember_lost_ms);
        self.is_changed |= !gone.is_empty();
        self.judge_at = Millis::MAX;
        for known in self.members.values_mut() {
            let suspect_at = known.suspect_at(patience, graced);
            let is_suspect = known.member.state == MemberState::Suspect;
            if !is_suspect && suspect_at <= now {
                known.member.state = MemberState::Suspect;
                self.counts.suspects += 1;
                self.is_changed = true;
            } else if !is_suspect {
                self.judge_at = self.judge_at.min(suspect_at);
            }
            self.judge_at = self.judge_at.min(known.removed_at(patience, graced));
        }
        if !gone.is_empty() {
            self.note_left(&gone);
        }
    }
}

/// Interval of looks at who is not reached.
const REACH_EVERY_MS: Millis = 500;

/// The state of a member that is heard.
fn well(drains: bool) -> MemberState {
    if drains { MemberState::Draining } else { MemberState::Alive }
}

/// Numbers that an earlier coordinator gave out, in the order in which their nodes left, and its last table.
fn given(numbers: Vec<(String, NodeNumber)>, table: &Table) -> BTreeMap<String, Given> {
    let incarnation = |number| table.member(number).map_or(0, |member| member.incarnation);
    let given = (1..).zip(numbers).map(|(left, (name, number))| {
        let incarnation = incarnation(number);
        (name, Given { number, left, incarnation, is_void: false })
    });
    given.collect()
}

/// Notes that this life of a node was removed.
fn note_void(numbers: &mut BTreeMap<String, Given>, name: &str, incarnation: u64) {
    if let Some(given) = numbers.get_mut(name).filter(|given| given.incarnation <= incarnation) {
        (given.incarnation, given.is_void) = (incarnation, true);
    }
}

/// The first epoch of the term after this one. The last term has no next: it goes on.
fn next_term(epoch: Epoch) -> Epoch {
    match epoch.term.checked_add(1) {
        Some(term) => Epoch { term, number: 0 },
        None => epoch,
    }
}

/// How far a node's term may be ahead of a coordinator that lost its state: each start of a coordinator and each election makes one
/// term.
const MOST_TERMS_AHEAD: u64 = 1 << 20;

/// The time after which a node's word of an even later term counts again.
const CLAIM_COUNTS_FOR_MS: u64 = 60_000;

/// Heartbeats that an incarnation must have missed before another process may take its name. A node that crashes and starts
/// again at once is a member again this many heartbeats, and one round trip, after its last heartbeat.
pub const MISSED_HEARTBEATS: u64 = 2;

/// The time after which the log names the same rival again.
const RIVAL_IS_NEWS_MS: u64 = 60_000;

/// How long a change waits for further changes, so that many nodes that start together make few tables.
const BATCH_MS: u64 = 50;

/// A longer pause between two ticks means that the process stood still.
const STALL_MS: u64 = 1_000;

#[cfg(test)]
mod tests;
