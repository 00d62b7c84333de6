//! The election: a register that all coordinators share over the network. The other coordinators follow the leader.

use std::time::Duration;

use larder_coordinator::election::{
    Candidate, Election, Record, RegisterAnswer, RegisterOp, Timing, Version,
};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::table::TableReader;

use super::{Follows, Stream};
use crate::network::Party;
use crate::world::{CoordinatorHappening, CoordinatorSays, Happening, World};

/// The record that the coordinators share, with the number of its version.
#[derive(Debug, Default)]
pub(crate) struct Register {
    kept: Option<(u64, Record)>,
    /// When the record was last written.
    written: Duration,
    /// When the record's present term began.
    begun: Duration,
}

impl Register {
    fn take(&mut self, ask: RegisterOp, now: Duration) -> RegisterAnswer {
        let version = |number: u64| Version(number.to_string());
        match ask {
            RegisterOp::Read => {
                RegisterAnswer::Found(self.kept.clone().map(|(number, record)| (version(number), record)))
            }
            RegisterOp::Write(record, over) => {
                let number = self.kept.as_ref().map(|(number, _)| *number);
                if over != number.map(version) {
                    return RegisterAnswer::Conflict;
                }
                let next = number.unwrap_or(0) + 1;
                if self.term() != record.term {
                    self.begun = now;
                }
                (self.kept, self.written) = (Some((next, record)), now);
                RegisterAnswer::Written(version(next))
            }
        }
    }

    fn term(&self) -> u64 {
        self.kept.as_ref().map_or(0, |(_, record)| record.term)
    }

    /// Whether this write would take the record from a leader that renewed it a moment ago.
    fn is_hasty(&self, ask: &RegisterOp, now: Duration) -> bool {
        let (RegisterOp::Write(record, over), Some((number, kept))) = (ask, &self.kept) else { return false };
        let is_taken = kept.holder.life != 0 && kept.holder.life != record.holder.life;
        let is_done = *over == Some(Version(number.to_string()));
        is_taken && is_done && now < self.written + LEAST_AGE
    }

    /// Whether a leader of this term must know by now that it no longer leads.
    pub(super) fn is_long_over(&self, term: u64, now: Duration) -> bool {
        term < self.term() && now > self.begun + LONGEST_RIGHT
    }
}

/// A coordinator's part in the election.
pub(super) fn takes_part(at: usize, life: u64, highest_term: u64) -> Election {
    let own = Candidate { life, peer: address(at), http: address(at) };
    Election::new(own, TIMING, highest_term)
}

/// The address of a coordinator.
fn address(at: usize) -> String {
    format!("10.0.1.{at}:7601")
}

/// The coordinator at an address.
pub(crate) fn at_address(address: &str) -> Option<usize> {
    address.strip_prefix("10.0.1.")?.strip_suffix(":7601")?.parse().ok()
}

impl World {
    /// Asks the register, if it is time. Leads or follows.
    pub(super) fn elect(&mut self, at: usize) {
        let number = self.next_number();
        let coordinator = &mut self.coordinators.all[at];
        let (now, life) = (coordinator.millis(self.now), coordinator.life);
        let Some(election) = &mut coordinator.election else { return };
        let leader = election.poll_leader(now).and_then(|leader| at_address(&leader.peer));
        if coordinator.asked.is_none()
            && let Some(ask) = election.poll(now)
        {
            if matches!(ask, RegisterOp::Write(..)) && election.misses_leader(now) {
                self.coverage.note(crate::coverage::LEADER_IS_SILENT);
            }
            coordinator.asked = Some(number);
            let (from, to) = (Party::Coordinator(at), Party::Register);
            if let Some(after) = self.arrival_on_stream(from, to, 200) {
                self.plan(after, Happening::Register { at, life, number, ask });
            }
            let answer = RegisterAnswer::Failed;
            let late = CoordinatorHappening::Answered { life, number, answer };
            self.plan(REGISTER_DEADLINE, Happening::Coordinator(at, late));
        }
        if let Some(leader) = leader {
            let stream = Stream { of: Follows::Coordinator(at, life), number: self.next_number() };
            self.say_on_stream(leader, stream, FollowerMessage::Who(None));
        }
        self.take_office(at);
    }

    /// A question arrives at the register, perhaps after its asker gave it up. The answer may be lost.
    pub(crate) fn register_hears(&mut self, at: usize, life: u64, number: u64, ask: RegisterOp) {
        if self.coordinators.register.is_hasty(&ask, self.now) {
            self.violate(|| format!("coordinator {at} takes the record from a leader that renews it"));
        }
        let answer = self.coordinators.register.take(ask, self.now);
        let (from, to) = (Party::Register, Party::Coordinator(at));
        if let Some(after) = self.arrival_on_stream(from, to, 200) {
            let answered = CoordinatorHappening::Answered { life, number, answer };
            self.plan(after, Happening::Coordinator(at, answered));
        }
    }

    pub(super) fn register_answered(&mut self, at: usize, number: u64, answer: RegisterAnswer) {
        let coordinator = &mut self.coordinators.all[at];
        if coordinator.asked.take_if(|asked| *asked == number).is_none() {
            return;
        }
        let now = coordinator.millis(self.now);
        self.coverage.note(crate::coverage::answer(&answer));
        if let Some(election) = &mut coordinator.election {
            election.answer(answer, now);
        }
        self.take_office(at);
        self.elect(at);
    }

    /// Notes that nodes know tables of a later term.
    pub(super) fn later_term(&mut self, at: usize, term: u64) {
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        if let Some(election) = &mut coordinator.election {
            election.heard_of(term, now);
        }
        self.take_office(at);
    }

    /// Lets the membership lead or follow, as the election says.
    fn take_office(&mut self, at: usize) {
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        let (Some(election), Some(membership)) = (&coordinator.election, &mut coordinator.membership) else {
            return;
        };
        let led = membership.leads(now);
        match election.reign(now) {
            Some(reign) => membership.lead(reign.term, reign.until, now),
            None => membership.resign(),
        }
        let (leads, term, life) = (membership.leads(now), membership.term(), coordinator.life);
        let must_watch = !leads && coordinator.watches.is_none() && election.leader(now).is_some();
        if led != leads {
            self.note("leads", &[at as u64, term, leads.into()]);
        }
        if must_watch {
            self.coordinator_happens(at, CoordinatorHappening::Watches(life));
        }
    }

    /// Follows the leader on a stream, as long as another coordinator leads. The stream is opened again and again, like a stream
    /// that breaks.
    pub(super) fn watch(&mut self, at: usize) {
        let number = self.next_number();
        let coordinator = &mut self.coordinators.all[at];
        let (now, life) = (coordinator.millis(self.now), coordinator.life);
        let leader = coordinator.election.as_ref().and_then(|election| election.leader(now));
        let Some(leader) = leader.and_then(|leader| at_address(&leader.peer)) else {
            coordinator.watches = None;
            return;
        };
        (coordinator.watches, coordinator.watched) = (Some(number), TableReader::default());
        let stream = Stream { of: Follows::Coordinator(at, life), number };
        self.say_on_stream(leader, stream, FollowerMessage::Watch);
        self.plan(WATCH_AGAIN, Happening::Coordinator(at, CoordinatorHappening::Watches(life)));
    }

    /// A message of the leader to a coordinator that follows it.
    pub(super) fn coordinator_follows(
        &mut self,
        at: usize,
        CoordinatorSays { stream, message }: CoordinatorSays,
    ) {
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        if let (CoordinatorMessage::Standing(standing), Some(election)) =
            (&message, &mut coordinator.election)
            && standing.leads
        {
            election.hear_leader(standing.life);
        }
        let Some(membership) = &mut coordinator.membership else { return };
        let CoordinatorMessage::Table(page) = message else { return };
        if coordinator.watches != Some(stream) {
            return;
        }
        let Ok(Some(table)) = coordinator.watched.take(page) else { return };
        if membership.follow(&table, now) {
            self.tell_all(at, table);
        }
    }
}

/// Short, so that a minute sees many takeovers. Clocks differ by less than these times allow.
const TIMING: Timing = Timing { lease_ms: 1_500, renew_within_ms: 1_000, retry_ms: 250, silence_ms: 450 };

/// No coordinator takes a younger record: by no clock is the leader's next renewal overdue yet.
const LEAST_AGE: Duration = Duration::from_millis(TIMING.retry_ms * 5 / 4);

/// The longest time that a leader leads beside its successor.
const LONGEST_RIGHT: Duration = Duration::from_millis(TIMING.renew_within_ms * 5 / 4);

/// Time in which the register must answer.
const REGISTER_DEADLINE: Duration = Duration::from_millis(500);

/// Pause before the leader is asked for its tables again.
const WATCH_AGAIN: Duration = Duration::from_secs(2);
