//! Membership: who is in the cluster, and the table that says so.
//!
//! Pure: it takes `now` and returns tables. A node is a member from its join on; silent for a while it is suspect, for long
//! it is removed. Every change makes a new table with a higher epoch, several at once where they come together. A
//! coordinator that starts opens a new term and removes nobody for its grace time.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_protocol::limits::MAX_MEMBERS;
use larder_protocol::membership::{Heartbeat, Join, Joined};
use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, Table};
use rkyv::{Archive, Deserialize, Serialize};

use crate::ring::{Weighted, assign};

/// Milliseconds of the coordinator's clock.
pub type Millis = u64;

/// How patient the coordinator is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patience {
    /// How often nodes send a heartbeat.
    pub heartbeat_ms: u64,
    /// Silence after which a node is suspect.
    pub suspect_after_ms: u64,
    /// Silence after which it is removed.
    pub remove_after_ms: u64,
    /// How long after its start the coordinator suspects and removes nobody.
    pub grace_ms: u64,
}

/// What a coordinator must not forget.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// The last table.
    pub table: Table,
    /// Every number ever given out, by node name.
    pub numbers: Vec<(String, NodeNumber)>,
}

/// Who is in the cluster.
#[derive(Debug)]
pub struct Membership {
    patience: Patience,
    epoch: Epoch,
    table: Arc<Table>,
    numbers: BTreeMap<String, NodeNumber>,
    members: BTreeMap<NodeNumber, Known>,
    started: Millis,
    last_tick: Millis,
    published: Option<Millis>,
    is_changed: bool,
    counts: Counts,
}

/// What has happened so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
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
}

/// Why a node is no member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JoinRefused {
    /// Another life of it is newer: it may join again as this incarnation.
    #[error("another life of the node is newer; it may join as incarnation {0}")]
    Outdated(u64),
    /// The cluster is full.
    #[error("a cluster has at most {MAX_MEMBERS} nodes")]
    Full,
}

/// A member, for reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberReport {
    /// What all know of it.
    pub member: Member,
    /// Partitions it is home to.
    pub partitions: usize,
    /// Since it was last heard of.
    pub silent_ms: u64,
}

#[derive(Debug)]
struct Known {
    member: Member,
    heard: Millis,
    /// Who said when that it does not answer.
    reports: BTreeMap<NodeNumber, Millis>,
}

impl Membership {
    /// Goes on from what an earlier coordinator left, or from nothing.
    #[must_use]
    pub fn new(patience: Patience, state: State, now: Millis) -> Self {
        let State { table, numbers } = state;
        let known = |member: &Member| {
            let member = Member { state: MemberState::Alive, ..member.clone() };
            (member.number, Known { member, heard: now, reports: BTreeMap::new() })
        };
        let members: BTreeMap<_, _> = table.members.iter().map(known).collect();
        Self {
            patience,
            epoch: Epoch { term: table.epoch.term + 1, number: 0 },
            is_changed: !members.is_empty(),
            members,
            table: Arc::new(table),
            numbers: numbers.into_iter().collect(),
            started: now,
            last_tick: now,
            published: None,
            counts: Counts::default(),
        }
    }

    /// A node wants to be a member. Its earlier life, if there is one, ends here.
    ///
    /// # Errors
    /// [`JoinRefused`]
    pub fn join(&mut self, name: &str, join: &Join, now: Millis) -> Result<Joined, JoinRefused> {
        // A coordinator that lost its state is told by its nodes how far it had come.
        if join.epoch.term >= self.epoch.term {
            self.epoch = Epoch { term: join.epoch.term + 1, number: 0 };
            self.is_changed = true;
        }
        let number = self.number_of(name, join)?;
        let member = Member {
            number,
            name: name.to_owned(),
            incarnation: join.incarnation,
            peer: join.peer,
            http: join.http,
            devices: join.devices,
            weight: join.weight.max(1),
            state: MemberState::Alive,
        };
        let is_new = self.members.get(&number).is_none_or(|known| known.member != member);
        if is_new {
            self.counts.joins += 1;
            self.is_changed = true;
        }
        self.members.insert(number, Known { member, heard: now, reports: BTreeMap::new() });
        Ok(Joined { number, heartbeat_ms: self.patience.heartbeat_ms })
    }

    /// A node lives; whether it is (still) a member.
    pub fn heartbeat(
        &mut self,
        number: NodeNumber,
        incarnation: u64,
        heartbeat: &Heartbeat,
        now: Millis,
    ) -> bool {
        let Some(known) = self.current(number, incarnation) else { return false };
        known.heard = now;
        known.reports.clear();
        if known.member.state == MemberState::Suspect {
            known.member.state = MemberState::Alive;
            self.is_changed = true;
        }
        for silent in &heartbeat.silent {
            if let Some(known) = self.members.get_mut(silent).filter(|_| *silent != number) {
                known.reports.insert(number, now);
            }
        }
        true
    }

    /// A node goes, in order.
    pub fn leave(&mut self, number: NodeNumber, incarnation: u64) {
        if self.current(number, incarnation).is_some() {
            self.members.remove(&number);
            self.counts.leaves += 1;
            self.is_changed = true;
        }
    }

    /// Judges silence; a new table where something changed, and the last one is old enough. Call it often.
    pub fn tick(&mut self, now: Millis) -> Option<Arc<Table>> {
        let stalled = now.saturating_sub(self.last_tick);
        if stalled > STALL_MS {
            // This process stood still itself: nobody could be heard.
            self.members.values_mut().for_each(|known| known.heard += stalled);
        }
        self.last_tick = now;
        if now.saturating_sub(self.started) >= self.patience.grace_ms {
            self.judge(now);
        }
        let is_due = self.published.is_none_or(|then| now.saturating_sub(then) >= BATCH_MS);
        if !(self.is_changed && is_due) {
            return None;
        }
        self.is_changed = false;
        self.published = Some(now);
        self.epoch.number += 1;
        let members: Vec<Member> = self.members.values().map(|known| known.member.clone()).collect();
        let weights: Vec<Weighted> =
            members.iter().map(|member| Weighted { node: member.number, weight: member.weight }).collect();
        let homes = assign(&self.table.homes, &weights);
        let moved = homes.iter().zip(&self.table.homes).filter(|(now, before)| now != before).count();
        self.counts.moved_partitions += moved as u64;
        self.table = Arc::new(Table { epoch: self.epoch, members, homes });
        Some(Arc::clone(&self.table))
    }

    /// The last table that was published.
    #[must_use]
    pub fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table)
    }

    /// Whether a table of this term was published.
    #[must_use]
    pub fn is_serving(&self, now: Millis) -> bool {
        self.published.is_some() || now.saturating_sub(self.started) >= self.patience.grace_ms
    }

    /// What has happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What must not be forgotten.
    #[must_use]
    pub fn state(&self) -> State {
        let numbers = self.numbers.iter().map(|(name, &number)| (name.clone(), number)).collect();
        State { table: (*self.table).clone(), numbers }
    }

    /// Every member.
    #[must_use]
    pub fn report(&self, now: Millis) -> Vec<MemberReport> {
        let partitions = |number| self.table.homes.iter().filter(|&&home| home == number).count();
        let report = |known: &Known| MemberReport {
            member: known.member.clone(),
            partitions: partitions(known.member.number),
            silent_ms: now.saturating_sub(known.heard),
        };
        self.members.values().map(report).collect()
    }

    fn current(&mut self, number: NodeNumber, incarnation: u64) -> Option<&mut Known> {
        self.members.get_mut(&number).filter(|known| known.member.incarnation == incarnation)
    }

    fn number_of(&mut self, name: &str, join: &Join) -> Result<NodeNumber, JoinRefused> {
        if let Some(&number) = self.numbers.get(name) {
            let known = self.members.get(&number).map_or(0, |known| known.member.incarnation);
            if known > join.incarnation {
                return Err(JoinRefused::Outdated(known + 1));
            }
            return Ok(number);
        }
        if self.members.len() >= MAX_MEMBERS {
            return Err(JoinRefused::Full);
        }
        let last = self.numbers.values().max().map_or(0, |number| number.0);
        let next = last.checked_add(1).map(NodeNumber);
        let number = next.filter(|&next| next < NodeNumber::THIS_NODE).ok_or(JoinRefused::Full)?;
        self.numbers.insert(name.to_owned(), number);
        Ok(number)
    }

    fn judge(&mut self, now: Millis) {
        let Patience { heartbeat_ms, suspect_after_ms, remove_after_ms, .. } = self.patience;
        let before = self.members.len();
        self.members.retain(|_, known| now.saturating_sub(known.heard) < remove_after_ms);
        let removed = before - self.members.len();
        self.counts.removals += removed as u64;
        self.is_changed |= removed > 0;
        for known in self.members.values_mut() {
            let silent_ms = now.saturating_sub(known.heard);
            known.reports.retain(|_, &mut then| now.saturating_sub(then) < suspect_after_ms);
            let is_reported = known.reports.len() >= REPORTERS && silent_ms > 2 * heartbeat_ms;
            if known.member.state == MemberState::Alive && (silent_ms >= suspect_after_ms || is_reported) {
                known.member.state = MemberState::Suspect;
                self.counts.suspects += 1;
                self.is_changed = true;
            }
        }
    }
}

/// How long changes wait for others, so that many nodes that start together make few tables.
const BATCH_MS: u64 = 50;

/// A pause between two ticks that only a process makes that stood still.
const STALL_MS: u64 = 1_000;

/// Members whose word makes another one suspect early.
const REPORTERS: usize = 2;

#[cfg(test)]
mod tests;
