//! Election: decides when this coordinator leads, and in which term.
//!
//! Pure: it takes the time and the answers of a register, and returns the next question. All coordinators share the register: it
//! keeps one record and writes it only over a version that the writer names. The coordinator that wrote the record last holds it,
//! and renews it again and again. A leader leads for `renew_within_ms` after it *sent* the last renewal that was confirmed. The
//! others take over when they saw no change for `lease_ms`, which is longer. So no two lead at once by this rule, as long as no
//! clock runs faster than another by the factor `lease_ms / renew_within_ms`. Every coordinator judges by its own clock alone,
//! and no time is compared between hosts. Each taking of the record opens a higher term.
//!
//! A leader that dies is followed sooner. The others also ask it, again and again, whether it leads. If a leader that used to
//! answer has been silent for `silence_ms`, and a due renewal is missing from the record, a coordinator takes the record over. It
//! replaces only the version that it knows, so a renewal in the last moment wins. Silence alone moves nothing: a leader that
//! renews is never replaced, even if others cannot reach it. A coordinator that never heard a leader waits until the lease is
//! over, so that two coordinators that cannot reach each other do not take the record from each other. A leader that lives, but
//! reaches neither the record nor the others, may lead beside its successor until its own right ends, in the lower term. A leader
//! that stood still for `silence_ms` leads on only after the register has confirmed its next renewal.

mod lookout;

use serde::{Deserialize, Serialize};

use self::lookout::{AskedLeader, Lookout};
use crate::membership::Millis;

/// The times of an election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// The others take over after this time without a change of the record.
    pub lease_ms: u64,
    /// A leader leads for this time after it sent its last confirmed renewal; less than the lease.
    pub renew_within_ms: u64,
    /// Time between renewals, and between looks at the record.
    pub retry_ms: u64,
    /// The others may take over after this time without an answer or a renewal from the leader. A leader must be polled more
    /// often.
    pub silence_ms: u64,
}

/// One life of a coordinator, and its addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// A number that no other life has. 0 is nobody.
    pub life: u64,
    /// Its `HOST:PORT` for nodes and other coordinators.
    pub peer: String,
    /// Its `HOST:PORT` for HTTP.
    pub http: String,
}

/// The record that the register keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The coordinator that holds it.
    pub holder: Candidate,
    /// The term that the holder opened.
    pub term: u64,
    /// How often the holder renewed it: each renewal is a change that others can see.
    pub renewals: u64,
    /// The holder's lease.
    pub lease_ms: u64,
}

/// A version of the record, as the register names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version(pub String);

/// A question to the register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegisterOp {
    /// Reads the record.
    Read,
    /// Writes this record over this version; without a version, only if there is no record.
    Write(Record, Option<Version>),
}

/// The register's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegisterAnswer {
    /// The record and its version; `None` if there is none.
    Found(Option<(Version, Record)>),
    /// The record was written, and this is its version.
    Written(Version),
    /// The record was not written, since it has another version.
    Conflict,
    /// It is unknown whether the question was carried out.
    Failed,
}

/// A coordinator in an election.
#[derive(Debug)]
pub struct Election {
    own: Candidate,
    timing: Timing,
    /// The record as it was read or written last.
    seen: Option<Seen>,
    /// Whether the record may have changed since: then it is read before it is written.
    is_doubtful: bool,
    reign: Option<Reign>,
    /// The highest term that this coordinator has heard of.
    highest_term: u64,
    /// The time of the next question to the register.
    next: Millis,
    /// The question that waits for its answer, and when it was sent.
    asked: Option<(RegisterOp, Millis)>,
    lookout: Lookout,
    /// When this coordinator did something last.
    awake: Millis,
    /// When this coordinator woke up after it had stood still.
    awoke: Millis,
}

/// The right to lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reign {
    /// The term.
    pub term: u64,
    /// The end of the right, unless it is prolonged.
    pub until: Millis,
}

#[derive(Debug)]
struct Seen {
    version: Version,
    record: Record,
    /// The time since which the record is known to be unchanged.
    since: Millis,
}

impl Election {
    /// A coordinator that does not lead yet. The terms of its tables are at most `highest_term`.
    pub fn new(own: Candidate, timing: Timing, highest_term: u64) -> Self {
        Self {
            own,
            timing,
            seen: None,
            is_doubtful: true,
            reign: None,
            highest_term,
            next: 0,
            asked: None,
            lookout: Lookout::default(),
            awake: 0,
            awoke: 0,
        }
    }

    /// The next question to the register, if it is due. It must be answered before the next question comes.
    pub fn poll(&mut self, now: Millis) -> Option<RegisterOp> {
        self.wake(now);
        self.lapse(now);
        // After a failure the coordinator waits, even if the leader is silent.
        let misses_leader = !self.is_doubtful && self.misses_leader(now);
        if self.asked.is_some() || (now < self.next && !misses_leader) {
            return None;
        }
        let over = self.seen.as_ref().map(|seen| seen.version.clone());
        let ask = match self.reign {
            _ if self.is_doubtful => RegisterOp::Read,
            Some(Reign { term, .. }) => {
                let renewals = self.seen.as_ref().map_or(0, |seen| seen.record.renewals) + 1;
                RegisterOp::Write(self.record(term, renewals), over)
            }
            None if self.may_take(now) => RegisterOp::Write(self.record(self.highest_term + 1, 0), over),
            None => RegisterOp::Read,
        };
        self.asked = Some((ask.clone(), now));
        Some(ask)
    }

    /// Takes the answer to the last question.
    pub fn answer(&mut self, answer: RegisterAnswer, now: Millis) {
        self.wake(now);
        let Some((ask, sent)) = self.asked.take() else { return };
        let retry = now + self.timing.retry_ms;
        match (answer, ask) {
            (RegisterAnswer::Found(found), _) => {
                self.is_doubtful = false;
                self.found(found, now);
                self.lapse(now);
                self.next = if self.reign.is_some() || self.may_take(now) { now } else { retry };
            }
            (RegisterAnswer::Written(version), RegisterOp::Write(record, _)) => {
                self.highest_term = self.highest_term.max(record.term);
                let until = sent + self.timing.renew_within_ms;
                self.reign = Some(Reign { term: record.term, until }).filter(|_| record.holder == self.own);
                self.seen = Some(Seen { version, record, since: now });
                self.next = sent + self.timing.retry_ms;
            }
            (RegisterAnswer::Conflict, _) => (self.is_doubtful, self.next) = (true, now),
            (RegisterAnswer::Failed | RegisterAnswer::Written(_), _) => {
                self.is_doubtful = true;
                // A leader that has waited long in vain has no time to wait again.
                self.next = (sent + self.timing.retry_ms).max(now);
            }
        }
        self.lapse(now);
    }

    /// The leader, if it is time to ask it whether it leads. Nobody needs to wait for the answer.
    pub fn poll_leader(&mut self, now: Millis) -> Option<Candidate> {
        let leader = self.asked_leader()?;
        let is_due = self.lookout.poll(leader, now, self.timing.silence_ms / 3);
        self.seen.as_ref().filter(|_| is_due).map(|seen| seen.record.holder.clone())
    }

    /// Notes that this life of a coordinator says that it leads.
    pub fn hear_leader(&mut self, life: u64) {
        self.lookout.hear(life);
    }

    /// Whether the leader is silent, so that another coordinator may take over before the lease is over.
    pub fn misses_leader(&self, now: Millis) -> bool {
        self.silent_at().is_some_and(|at| now >= at)
    }

    /// Notes that tables of this term exist. A leader of an earlier term stops leading; it may open a later term.
    pub fn heard_of(&mut self, term: u64, now: Millis) {
        self.highest_term = self.highest_term.max(term);
        if self.reign.is_some_and(|reign| reign.term <= term) {
            (self.reign, self.is_doubtful, self.next) = (None, true, now);
        }
    }

    /// Stops leading. Returns the question that frees the record for the others, if this coordinator holds it.
    pub fn resign(&mut self) -> Option<RegisterOp> {
        let reign = self.reign.take()?;
        self.is_doubtful = true;
        let seen = self.seen.as_ref()?;
        let nobody = Candidate::default();
        let record = Record { holder: nobody, ..self.record(reign.term, seen.record.renewals + 1) };
        Some(RegisterOp::Write(record, Some(seen.version.clone())))
    }

    /// The right to lead, if this coordinator has it now. Without polls it ends sooner.
    pub fn reign(&self, now: Millis) -> Option<Reign> {
        let Reign { term, until } = self.reign?;
        // A renewal that was sent before the coordinator stood still says nothing about now.
        let is_confirmed = until >= self.awoke + self.timing.renew_within_ms;
        let until = until.min(self.awake + self.timing.silence_ms);
        (is_confirmed && now < until).then_some(Reign { term, until })
    }

    /// The other coordinator that holds the record, as far as is known.
    pub fn leader(&self, now: Millis) -> Option<&Candidate> {
        let seen = self.seen.as_ref().filter(|seen| !self.is_over(seen, now))?;
        Some(&seen.record.holder).filter(|holder| holder.life != self.own.life)
    }

    /// The time of the next poll, or of the next look whether the right to lead has ended.
    pub fn wakes(&self) -> Millis {
        let mut wakes = if self.asked.is_some() { Millis::MAX } else { self.next };
        if let Some(reign) = self.reign {
            wakes = wakes.min(reign.until).min(self.awake + self.timing.silence_ms / 3);
        }
        if self.asked_leader().is_some() {
            wakes = wakes.min(self.lookout.next());
        }
        let is_ready = self.asked.is_none() && !self.is_doubtful;
        self.silent_at().filter(|_| is_ready).map_or(wakes, |at| wakes.min(at))
    }

    fn found(&mut self, found: Option<(Version, Record)>, now: Millis) {
        let Some((version, record)) = found else {
            (self.seen, self.reign) = (None, None);
            return;
        };
        self.highest_term = self.highest_term.max(record.term);
        let is_own = record.holder == self.own;
        self.reign = self.reign.filter(|reign| is_own && reign.term == record.term);
        if self.seen.as_ref().is_none_or(|seen| seen.version != version) {
            self.seen = Some(Seen { version, record, since: now });
        }
    }

    fn lapse(&mut self, now: Millis) {
        self.reign = self.reign.filter(|reign| now < reign.until);
    }

    /// Notes that this coordinator is awake, and whether it has stood still.
    fn wake(&mut self, now: Millis) {
        let still_ms = now.saturating_sub(self.awake);
        self.awake = now;
        if still_ms >= self.timing.silence_ms {
            self.awoke = now;
            if self.reign.is_some() {
                (self.is_doubtful, self.next) = (true, now);
            }
        }
        if still_ms >= self.timing.silence_ms / 2 {
            self.lookout.forgive(now);
        }
    }

    /// The other coordinator that holds the record, whether or not its lease is over.
    fn asked_leader(&self) -> Option<AskedLeader> {
        let Record { holder, term, .. } = &self.seen.as_ref()?.record;
        (holder.life != 0 && holder.life != self.own.life)
            .then_some(AskedLeader { life: holder.life, term: *term })
    }

    /// The time at which a leader that no longer answers may be replaced. Until then it has time to renew the record.
    fn silent_at(&self) -> Option<Millis> {
        let since = self.lookout.silent_since(self.asked_leader()?)?;
        let seen = self.seen.as_ref()?;
        Some((since + self.timing.silence_ms).max(seen.since + self.timing.retry_ms * 3 / 2))
    }

    /// Whether no other coordinator has the right to lead, as far as is known. A coordinator may take its own record at once: the
    /// version shows whether another one was faster.
    fn may_take(&self, now: Millis) -> bool {
        let is_free = |seen: &Seen| seen.record.holder == self.own || self.is_over(seen, now);
        self.seen.as_ref().is_none_or(is_free) || self.misses_leader(now)
    }

    fn is_over(&self, seen: &Seen, now: Millis) -> bool {
        let lease_ms = seen.record.lease_ms.max(self.timing.lease_ms);
        seen.record.holder.life == 0 || now.saturating_sub(seen.since) >= lease_ms
    }

    fn record(&self, term: u64, renewals: u64) -> Record {
        Record { holder: self.own.clone(), term, renewals, lease_ms: self.timing.lease_ms }
    }
}
