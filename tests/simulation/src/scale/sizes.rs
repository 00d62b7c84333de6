//! The bytes of messages, with their heads. Each kind is measured once, since each row adds the same number of bytes.

use larder_protocol::peer::{
    Announce, Announced, Chunks, Class, Fetch, Find, Message, PeerRequest, PeerResponse, Repair, RowChange,
    RowSpan, Rows,
};
use larder_protocol::table::{Epoch, Holder, NodeNumber, RowKey, RunKey};
use larder_protocol::{ChunkHash, Fingerprint};

/// The bytes of every kind of message.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) find: Size,
    pub(super) rows: Size,
    pub(super) announce: Size,
    pub(super) announced: u64,
    pub(super) repair: Size,
    pub(super) fetch: Size,
}

/// The bytes of a message without rows, and of each row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    head: f64,
    each: f64,
}

impl Size {
    fn new(message: impl Fn(usize) -> u64) -> Self {
        let (few, many) = (message(16) as f64, message(16 + MANY) as f64);
        let each = (many - few) / MANY as f64;
        Self { head: few - 16.0 * each, each }
    }

    /// The bytes of a message with this many rows.
    pub(super) fn of(self, rows: usize) -> u64 {
        (self.head + self.each * rows as f64).round() as u64
    }
}

impl Sizes {
    pub(super) fn new() -> Self {
        Self {
            find: Size::new(|rows| bytes(&find(rows))),
            rows: Size::new(|rows| bytes(&found(rows))),
            announce: Size::new(|rows| bytes(&announce(rows))),
            announced: bytes(&PeerResponse::Announced(vec![Announced::Known(1)])),
            repair: Size::new(|rows| {
                bytes(&PeerRequest::Repair(Repair { holder: HOLDER, rows: vec![ROW; rows] }))
            }),
            fetch: Size::new(|rows| {
                let (chunks, block_bytes) = (chunks(rows), vec![1]);
                bytes(&PeerRequest::Fetch(Fetch { chunks, block_bytes, class: Class::Decode }))
            }),
        }
    }
}

/// A message's bytes on its stream.
pub(super) fn bytes(message: &impl Message) -> u64 {
    HEAD_BYTES + message.encode().len() as u64
}

fn find(rows: usize) -> PeerRequest {
    PeerRequest::Find(Find { epoch: EPOCH, rows: vec![ROW; rows] })
}

fn found(rows: usize) -> PeerResponse {
    PeerResponse::Rows(Rows { epoch: EPOCH, spans: vec![RowSpan { from: 0, to: 1, holder: HOLDER }; rows] })
}

fn announce(rows: usize) -> PeerRequest {
    let changes = vec![RowChange { row: ROW, is_held: true }; rows];
    let (epoch, digest) = (EPOCH, Some(1));
    PeerRequest::Announce(vec![Announce {
        holder: HOLDER,
        incarnation: 1,
        epoch,
        stream: 1,
        sequence: 1,
        digest,
        changes,
    }])
}

fn chunks(rows: usize) -> Chunks {
    Chunks { device: 0, fingerprint: Fingerprint([1; 32]), hashes: vec![ChunkHash([1; 32]); rows] }
}

const EPOCH: Epoch = Epoch { term: 1, number: 1 };
const HOLDER: Holder = Holder { node: NodeNumber(1), device: 0 };
const ROW: RowKey = RowKey { run: RunKey(1), chunk: 1 };

/// The length and the zeros before each message.
pub(super) const HEAD_BYTES: u64 = 8;

/// Rows by which the two measured messages differ.
const MANY: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_any_length_has_the_bytes_that_are_counted() {
        let sizes = Sizes::new();
        for rows in [0, 1, 2, 7, 100, 8_000] {
            let near = |counted: u64, real: u64| counted.abs_diff(real) <= 16;
            assert!(near(sizes.find.of(rows), bytes(&find(rows))), "find of {rows}");
            assert!(near(sizes.rows.of(rows), bytes(&found(rows))), "rows of {rows}");
            assert!(near(sizes.announce.of(rows), bytes(&announce(rows))), "announce of {rows}");
        }
    }
}
