//! The changes that one actor has not told one home yet.

use std::collections::BTreeSet;

use larder_protocol::peer::Announce;

use super::held::PackedKey;
use crate::Millis;

/// The stream of one actor's announcements to one home.
#[derive(Debug)]
pub(super) struct Stream {
    /// The incarnation of the home that the stream speaks to.
    pub(super) home_incarnation: u64,
    number: u64,
    next_sequence: u64,
    /// Keys that the actor holds and the home does not know, or the reverse.
    pub(super) pending: BTreeSet<PackedKey>,
    /// Partitions whose chunks are still to be announced to the home.
    pub(super) unannounced: Vec<u16>,
    /// The sum of the digests of the actor's chunks in the home's partitions.
    pub(super) digest: u64,
    /// The time since which a change waits.
    waiting_since: Option<Millis>,
    flight: Flight,
    not_before: Millis,
    backoff_ms: u64,
}

/// The single batch that may be in flight.
#[derive(Debug)]
enum Flight {
    None,
    Sent(Batch),
    /// The batch was lost, or came too early; it is sent again.
    Waits(Batch),
}

/// A batch whose answer is not known.
#[derive(Debug)]
pub(super) struct Batch {
    /// The batch that was sent.
    pub(super) announce: Announce,
    /// The time since which the batch's oldest change had waited.
    pub(super) since: Millis,
}

/// The next task of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Send the lost batch again.
    Again(Announce),
    /// Send a new batch.
    Batch,
}

impl Stream {
    /// A stream without changes.
    pub(super) fn new(home_incarnation: u64, number: u64, now: Millis) -> Self {
        Self {
            home_incarnation,
            number,
            next_sequence: 0,
            pending: BTreeSet::new(),
            unannounced: Vec::new(),
            digest: 0,
            waiting_since: None,
            flight: Flight::None,
            not_before: now,
            backoff_ms: MIN_BACKOFF_MS,
        }
    }

    /// Begins again at batch 0 under a new number, after a pause. All held chunks are unannounced again.
    pub(super) fn restart(&mut self, number: u64, unannounced: Vec<u16>, now: Millis) {
        (self.number, self.next_sequence, self.flight) = (number, 0, Flight::None);
        self.pending.clear();
        self.unannounced = unannounced;
        self.waiting_since = Some(now);
        self.back_off(now);
    }

    /// Notes a gained or lost key whose partition is announced change by change.
    pub(super) fn toggle(&mut self, key: PackedKey, now: Millis) {
        // The key was gained and lost again before it was told: the home need not know.
        if !self.pending.remove(&key) {
            self.pending.insert(key);
            self.waiting_since.get_or_insert(now);
        }
    }

    /// Notes that whole partitions wait to be told, after a pause.
    pub(super) fn wait(&mut self, now: Millis, not_before: Millis) {
        self.waiting_since.get_or_insert(now);
        self.not_before = self.not_before.max(not_before);
    }

    /// The time of the next task; `None` if the stream waits for an answer or a change.
    pub(super) fn next_due(&self) -> Option<Millis> {
        let at = match self.flight {
            Flight::Sent(_) => return None,
            Flight::Waits(_) => self.not_before,
            Flight::None if self.pending.len() >= FLUSH_CHANGES => self.not_before,
            Flight::None => self.waiting_since? + FLUSH_MS,
        };
        Some(at.max(self.not_before))
    }

    /// The next task. A new batch carries all waiting changes; `probes` asks for a batch without changes too, so that home and
    /// holder compare their sums.
    pub(super) fn due(&mut self, now: Millis, probes: bool) -> Due {
        if now < self.not_before {
            return Due::Nothing;
        }
        match std::mem::replace(&mut self.flight, Flight::None) {
            Flight::Sent(batch) => {
                self.flight = Flight::Sent(batch);
                Due::Nothing
            }
            Flight::Waits(batch) => {
                let announce = batch.announce.clone();
                self.flight = Flight::Sent(batch);
                Due::Again(announce)
            }
            Flight::None if self.waiting_since.is_some() || probes => Due::Batch,
            Flight::None => Due::Nothing,
        }
    }

    /// The number of the stream, and the number of its next batch.
    pub(super) fn numbers(&self) -> (u64, u64) {
        (self.number, self.next_sequence)
    }

    /// Notes that a new batch is sent, with as many waiting changes as fit.
    pub(super) fn sent(&mut self, announce: Announce, now: Millis) {
        let since = self.waiting_since.take().unwrap_or(now);
        if !self.is_told() {
            self.waiting_since = Some(since);
        }
        self.next_sequence += 1;
        self.flight = Flight::Sent(Batch { announce, since });
    }

    /// Whether the home knows everything once the batch in flight arrives.
    pub(super) fn is_told(&self) -> bool {
        self.pending.is_empty() && self.unannounced.is_empty()
    }

    /// Whether the stream waits for the answer to this batch.
    pub(super) fn waits_for(&self, number: u64, sequence: u64) -> bool {
        let is_it = |batch: &Batch| (batch.announce.stream, batch.announce.sequence) == (number, sequence);
        match &self.flight {
            Flight::Sent(batch) | Flight::Waits(batch) => is_it(batch),
            Flight::None => false,
        }
    }

    /// Notes that the home knows the batch in flight, and returns the batch.
    pub(super) fn acknowledged(&mut self) -> Option<Batch> {
        match std::mem::replace(&mut self.flight, Flight::None) {
            Flight::Sent(batch) | Flight::Waits(batch) => {
                // A stream that starts anew again and again must slow down, even if its first batches are taken.
                if batch.announce.digest.is_some() {
                    self.backoff_ms = MIN_BACKOFF_MS;
                }
                Some(batch)
            }
            Flight::None => None,
        }
    }

    /// Notes that the batch in flight did not come, or came too early.
    pub(super) fn failed(&mut self, now: Millis) {
        if let Flight::Sent(batch) = std::mem::replace(&mut self.flight, Flight::None) {
            self.flight = Flight::Waits(batch);
            self.back_off(now);
        }
    }

    fn back_off(&mut self, now: Millis) {
        self.not_before = now + self.backoff_ms;
        self.backoff_ms = (self.backoff_ms * 2).min(MAX_BACKOFF_MS);
    }
}

/// How long a change waits for further changes.
pub const FLUSH_MS: u64 = 5;

/// With this many changes, a batch is sent without waiting for more.
pub(super) const FLUSH_CHANGES: usize = 1_024;

const MIN_BACKOFF_MS: u64 = 20;

/// The longest pause before a batch is sent again.
const MAX_BACKOFF_MS: u64 = 1_000;
