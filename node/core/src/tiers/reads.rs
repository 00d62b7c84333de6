//! Reads that wait for a tier: ordered by class, bounded by bytes in flight.

use std::time::Duration;

use crate::priority::Turns;
use crate::store::FetchId;
use larder_protocol::peer::Class;

/// The line before one tier. A chunk that nobody waits for when its turn comes is not read.
#[derive(Debug)]
pub(crate) struct ReadLine {
    turns: Turns<FetchId>,
    most_bytes: u64,
    bytes_under_way: u64,
}

impl ReadLine {
    /// Allows `most_bytes` of reads in flight; the last read may exceed it.
    pub(crate) fn new(most_bytes: u64) -> Self {
        Self { turns: Turns::default(), most_bytes, bytes_under_way: 0 }
    }

    /// Lines up a chunk from `now` on.
    pub(crate) fn wait(&mut self, id: FetchId, class: Class, now: Duration) {
        self.turns.wait(id, class, now);
    }

    /// Notes that an engine waits for this chunk.
    pub(crate) fn hurry(&mut self, id: FetchId) {
        self.turns.change_class(id, Class::Decode);
    }

    /// Takes a chunk out of the line; returns whether it was there.
    pub(crate) fn leave(&mut self, id: FetchId) -> bool {
        self.turns.leave(id)
    }

    /// Takes the next chunk out of the line, if the bytes in flight allow another read.
    pub(crate) fn next(&mut self) -> Option<FetchId> {
        let id = self.turns.next().filter(|_| self.bytes_under_way < self.most_bytes)?;
        self.turns.leave(id);
        Some(id)
    }

    /// Puts a chunk back that could not be ordered at its turn: it is first in the line again.
    pub(crate) fn put_off(&mut self, id: FetchId) {
        self.turns.wait(id, Class::Decode, Duration::ZERO);
    }

    /// Notes that a read of `bytes` bytes was ordered.
    pub(crate) fn began(&mut self, bytes: u64) {
        self.bytes_under_way += bytes;
    }

    /// Notes that a read of `bytes` bytes has ended.
    pub(crate) fn ended(&mut self, bytes: u64) {
        self.bytes_under_way -= bytes;
    }
}
