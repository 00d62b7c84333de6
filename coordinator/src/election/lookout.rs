//! Lookout: tells since when the leader has not answered this coordinator.

use crate::membership::Millis;

/// A coordinator's watch over the leader.
#[derive(Debug, Default)]
pub(super) struct Lookout {
    /// The leader that is asked, in one reign.
    asks: AskedLeader,
    /// Whether it has answered in this reign. A leader that was never heard is not missed.
    has_answered: bool,
    /// The time since which no question was answered; `None` after an answer.
    unanswered_since: Option<Millis>,
    /// When the next question is due.
    next: Millis,
}

/// A leader in one reign.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct AskedLeader {
    pub(super) life: u64,
    pub(super) term: u64,
}

impl Lookout {
    /// Whether this leader is to be asked now. The next question is due `every` later.
    pub(super) fn poll(&mut self, leader: AskedLeader, now: Millis, every: u64) -> bool {
        if self.asks != leader {
            *self = Self { asks: leader, next: now, ..Self::default() };
        }
        let is_due = now >= self.next;
        if is_due {
            self.next = now + every;
            self.unanswered_since = self.unanswered_since.or(Some(now));
        }
        is_due
    }

    /// Notes that this life says that it leads.
    pub(super) fn hear(&mut self, life: u64) {
        if self.asks.life == life {
            (self.has_answered, self.unanswered_since) = (true, None);
        }
    }

    /// Notes that the asker itself stood still: answers may wait to be read, so the silence counts from now on.
    pub(super) fn forgive(&mut self, now: Millis) {
        self.unanswered_since = self.unanswered_since.map(|_| now);
    }

    /// The time since which a leader that used to answer in this reign has been silent.
    pub(super) fn silent_since(&self, leader: AskedLeader) -> Option<Millis> {
        self.unanswered_since.filter(|_| self.has_answered && self.asks == leader)
    }

    /// When the next question is due.
    pub(super) fn next(&self) -> Millis {
        self.next
    }
}
