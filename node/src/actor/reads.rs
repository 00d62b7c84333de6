//! Reads that wait for the disk or the object store: by class, and so many bytes at a time.

use std::time::Duration;

use larder_core::priority::Turns;
use larder_core::store::FetchId;
use larder_protocol::peer::Class;

/// The line before one of them. What nobody waits for any more by the time that its turn comes is not read.
#[derive(Debug)]
pub(super) struct ReadLine {
    turns: Turns<FetchId>,
    most_bytes: u64,
    bytes_under_way: u64,
}

impl ReadLine {
    /// One that has reads of `most_bytes` under way, and of what the last of them has more.
    pub(super) fn new(most_bytes: u64) -> Self {
        Self { turns: Turns::default(), most_bytes, bytes_under_way: 0 }
    }

    /// Lines up a chunk from `now` on.
    pub(super) fn wait(&mut self, id: FetchId, class: Class, now: Duration) {
        self.turns.wait(id, class, now);
    }

    /// An engine stands still until this chunk is there.
    pub(super) fn hurry(&mut self, id: FetchId) {
        self.turns.change_class(id, Class::Decode);
    }

    /// Takes chunks out of the line; which of them were in it.
    pub(super) fn leave(&mut self, ids: &[FetchId]) -> Vec<FetchId> {
        ids.iter().copied().filter(|&id| self.turns.leave(id)).collect()
    }

    /// Takes the chunk whose turn it is out of the line, if more may be under way.
    pub(super) fn next(&mut self) -> Option<FetchId> {
        let id = self.turns.next().filter(|_| self.bytes_under_way < self.most_bytes)?;
        self.turns.leave(id);
        Some(id)
    }

    /// A chunk whose turn it was could not be ordered: it is the first again.
    pub(super) fn put_off(&mut self, id: FetchId) {
        self.turns.wait(id, Class::Decode, Duration::ZERO);
    }

    /// A read of so many bytes was ordered.
    pub(super) fn began(&mut self, bytes: u64) {
        self.bytes_under_way += bytes;
    }

    /// It has ended.
    pub(super) fn ended(&mut self, bytes: u64) {
        self.bytes_under_way -= bytes;
    }
}
