//! A coordinator that is one of several: it follows, begins to lead, and leads only while its right lasts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, Table};

use super::{DurableState, Given, KnownMember, Lost, Membership, Millis, Patience, note_void, well};

/// The way in which a coordinator leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Office {
    /// There is no other coordinator.
    Alone,
    /// The coordinator was elected, and leads until this time.
    Elected(Millis),
}

impl Membership {
    /// A coordinator that is one of several. It follows until it is elected.
    pub fn candidate(patience: Patience, state: DurableState, now: Millis) -> Self {
        let mut candidate = Self::new(patience, state, now);
        candidate.epoch = candidate.table.epoch;
        candidate.office = Office::Elected(0);
        candidate.is_changed = false;
        candidate
    }

    /// Whether the coordinator leads: it makes tables and hears nodes.
    pub fn leads(&self, now: Millis) -> bool {
        match self.office {
            Office::Alone => true,
            Office::Elected(until) => now < until,
        }
    }

    /// The term of the coordinator's tables.
    pub fn term(&self) -> u64 {
        self.epoch.term
    }

    /// Leads in this term until this time. A new term begins with the members of the last table, who are awaited for the grace
    /// time.
    pub fn lead(&mut self, term: u64, until: Millis, now: Millis) {
        self.hears_leader(now);
        // A table that was made too late to be sent is made again.
        self.is_changed |= self.office == Office::Elected(0);
        self.office = Office::Elected(until);
        if self.epoch.term == term {
            return;
        }
        self.epoch = Epoch { term, number: 0 };
        (self.started, self.last_tick, self.published, self.bringers) = (now, now, None, 0);
        self.gathers_from = now;
        (self.judge_at, self.awaits_table) = (0, false);
        for known in self.members.values_mut() {
            *known = awaited(known, now);
        }
    }

    /// Whether the coordinator's own table may go out, now that it is on disk. A coordinator that no longer leads in the table's
    /// term resigns: if it leads again, it makes the table again.
    pub fn may_publish(&mut self, table: &Table, now: Millis) -> bool {
        let may = match self.office {
            Office::Alone => true,
            Office::Elected(until) => now < until && table.epoch.term == self.epoch.term,
        };
        if !may {
            self.resign();
        }
        may
    }

    /// Stops leading.
    pub fn resign(&mut self) {
        if self.office != Office::Alone {
            self.office = Office::Elected(0);
        }
    }

    /// Notes that this coordinator leads, or that the leader has answered it. If the absence is longer than the time from
    /// suspecting a node to removing it, a loss may have passed unseen.
    pub fn hears_leader(&mut self, now: Millis) {
        let Patience { suspect_after_ms, remove_after_ms, remove_reported_after_ms, .. } = self.patience;
        let unseen_ms = remove_reported_after_ms.min(remove_after_ms).saturating_sub(suspect_after_ms);
        self.was_away |= now.saturating_sub(self.in_touch) >= unseen_ms;
        self.in_touch = now;
    }

    /// Takes a table of the leader, if it is newer than the last one. Returns whether it did. A coordinator that leads takes
    /// none.
    pub fn follow(&mut self, table: &Arc<Table>, now: Millis) -> bool {
        if self.leads(now) {
            return false;
        }
        self.hears_leader(now);
        if table.epoch == self.table.epoch {
            // Nothing has changed while it was away.
            self.was_away = false;
        }
        if table.epoch <= self.table.epoch || !table.is_consistent() {
            return false;
        }
        self.members.clear();
        self.take_over(table, now);
        self.epoch = table.epoch;
        self.was_away = false;
        true
    }

    /// Whether a node that knows this table must bring it: the leader is new, and its own table is older. A few nodes are asked.
    pub fn wants(&mut self, epoch: Epoch) -> bool {
        let wants = self.is_gathering() && epoch > self.table.epoch && self.bringers < MAX_BRINGERS;
        self.bringers += u32::from(wants);
        self.awaits_table |= wants;
        wants
    }

    /// Takes a table that a node brings, if this leader is new and the table is newer than its own. Returns whether it did. Nodes
    /// that have joined meanwhile stay.
    pub fn adopt(&mut self, table: &Arc<Table>, now: Millis) -> bool {
        let is_earlier = table.epoch.term < self.epoch.term;
        if !self.is_gathering() || !is_earlier || table.epoch <= self.table.epoch || !table.is_consistent() {
            return false;
        }
        self.awaits_table = false;
        // It did not hear the tables between its own last one and this one.
        self.was_away = true;
        self.take_over(table, now);
        for known in self.members.values_mut().filter(|known| known.is_awaited) {
            *known = awaited(known, now);
        }
        true
    }

    /// Whether this is a new leader that still waits for the members of the last table. It must not move partitions only for lack
    /// of news.
    pub(super) fn is_gathering(&self) -> bool {
        self.office != Office::Alone && self.published.is_none()
    }

    /// Whether a new leader has waited long enough. A leader that knows no members waits for the first member, however late it
    /// comes. A table without members would be useless, and after it no node could bring its own table.
    pub(super) fn has_gathered(&self, now: Millis) -> bool {
        if self.is_gathering() && self.members.is_empty() {
            return false;
        }
        // A leader that knows no members may have forgotten them: it waits for nodes that bring them.
        let is_lost = self.table.members.is_empty() || self.awaits_table;
        let is_complete = !is_lost && self.members.values().all(|known| !known.is_awaited);
        !self.is_gathering() || is_complete || now.saturating_sub(self.gathers_from) >= self.patience.grace_ms
    }

    /// Continues from another coordinator's table. Members that joined this coordinator stay as they joined. If one of them was
    /// given a number that is another member's, it joins again.
    fn take_over(&mut self, table: &Arc<Table>, now: Millis) {
        let numbers: BTreeMap<&str, NodeNumber> =
            table.members.iter().map(|member| (member.name.as_str(), member.number)).collect();
        self.note_lost(table.epoch, &numbers, now);
        self.members.retain(|number, known| match numbers.get(known.member.name.as_str()) {
            Some(given) => given == number,
            None => !known.is_awaited,
        });
        let taken: BTreeSet<NodeNumber> = table.members.iter().map(|member| member.number).collect();
        let noted = |member: &Member| self.numbers.get(&member.name).map_or(0, |given| given.incarnation);
        let noted: Vec<u64> = table.members.iter().map(noted).collect();
        self.numbers.retain(|_, given| !taken.contains(&given.number));
        for (member, noted) in table.members.iter().zip(noted) {
            let has_joined = |known: &KnownMember| !known.is_awaited && known.member.name == member.name;
            if !self.members.get(&member.number).is_some_and(has_joined) {
                let known = KnownMember { is_awaited: true, ..KnownMember::new(member.clone(), now) };
                self.members.insert(member.number, known);
            }
            // It may have joined this leader as a later life than the table's.
            let incarnation = noted.max(member.incarnation);
            let (number, left) = (member.number, self.leavings);
            let given = Given { number, left, incarnation, is_void: false };
            self.numbers.insert(member.name.clone(), given);
        }
        self.table = Arc::clone(table);
        self.judge_at = 0;
    }

    /// Notes the members that another leader removed after silence, so that they stay lost if this coordinator leads next. They
    /// were suspect in the last table; a node that leaves is not suspect. If this coordinator was away meanwhile, every member that
    /// is gone may have been silent, but those that drained. `names` are those of the table of this epoch.
    fn note_lost(&mut self, epoch: Epoch, names: &BTreeMap<&str, NodeNumber>, now: Millis) {
        names.keys().for_each(|name| _ = self.lost.forget(name));
        let has_joined =
            |name: &str| self.members.values().any(|known| !known.is_awaited && known.member.name == name);
        let is_here = |name: &str| names.contains_key(name) || has_joined(name);
        for member in self.table.members.iter().filter(|member| !is_here(&member.name)) {
            note_void(&mut self.numbers, &member.name, member.incarnation);
        }
        let last = self.table.epoch;
        let is_next = epoch.term == last.term && epoch.number == last.number + 1;
        let was_away = self.was_away && !is_next;
        let may_be_lost = |member: &&Member| match member.state {
            MemberState::Suspect => true,
            MemberState::Alive => was_away,
            MemberState::Draining => false,
        };
        let gone = self.table.members.iter().filter(may_be_lost).filter(|member| !is_here(&member.name));
        let lost: Vec<_> =
            gone.map(|member| Lost { member: member.clone(), heard: now, removed: now }).collect();
        self.lost.add(lost.into_iter(), now, self.patience.remember_lost_ms);
    }
}

fn awaited(known: &KnownMember, now: Millis) -> KnownMember {
    let drains = known.drains || known.member.state == MemberState::Draining;
    let mut member = known.member.clone();
    member.state = well(drains);
    KnownMember { is_awaited: true, drains, ..KnownMember::new(member, now) }
}

/// Nodes that a new leader asks for their table: one may die before it answers.
const MAX_BRINGERS: u32 = 3;
