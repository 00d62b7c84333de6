//! The worth of each node's next victim: this node's own actors say theirs, and the others' answers bear theirs.
//!
//! An answer between nodes bears it in a message before it ([`PeerResponse::Room`]); without one, the node has free room.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use larder_core::placement::Worth;
use larder_net::quic::{MessageError, read_message, write_message};
use larder_protocol::peer::PeerResponse;
use larder_protocol::table::NodeNumber;
use larder_protocol::version::Version;
use quinn::{RecvStream, SendStream};

/// What all threads of a node know of that. Cloning shares.
#[derive(Debug, Clone, Default)]
pub struct Rooms(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    own: Mutex<BTreeMap<u16, u64>>,
    heard: Mutex<BTreeMap<NodeNumber, Heard>>,
    /// Grows with all that is told on.
    news: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Heard {
    worth: Worth,
    news: u64,
    /// Answers since it was told on.
    answers: u32,
}

impl Rooms {
    /// An actor's next victim is worth this.
    pub fn is_worth(&self, device: u16, least: Worth) {
        self.0.own.lock().unwrap_or_else(PoisonError::into_inner).insert(device, least.0);
    }

    /// The actor of this node whose next victim is worth least, and that worth.
    #[must_use]
    pub fn cheapest_actor(&self) -> Option<(u16, Worth)> {
        let own = self.0.own.lock().unwrap_or_else(PoisonError::into_inner);
        own.iter().min_by_key(|&(_, &least)| least).map(|(&device, &least)| (device, Worth(least)))
    }

    /// A node answered, on a connection of this version: one of version 1 says no worth, and takes no chunks. What differs
    /// little from what was told is told on after some answers.
    pub fn heard(&self, node: NodeNumber, least: Worth, version: Version) {
        if version < Version::SECOND {
            return;
        }
        let mut heard = self.0.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = heard.get_mut(&node)
            && last.worth.0.abs_diff(least.0) <= last.worth.0 / SAME_SHARE
            && last.answers < MOST_UNTOLD
        {
            last.answers += 1;
            return;
        }
        let news = self.0.news.fetch_add(1, Ordering::AcqRel) + 1;
        heard.insert(node, Heard { worth: least, news, answers: 0 });
    }

    /// What was heard since a number of news, which becomes the last.
    #[must_use]
    pub fn since(&self, seen: &mut u64) -> Vec<(NodeNumber, Worth)> {
        let last = self.0.news.load(Ordering::Acquire);
        if last == *seen {
            return Vec::new();
        }
        let heard = self.0.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let newer = heard.iter().filter(|(_, heard)| heard.news > *seen);
        let newer: Vec<_> = newer.map(|(&node, heard)| (node, heard.worth)).collect();
        *seen = last;
        newer
    }

    /// Writes what stands before an answer to another node.
    pub(super) async fn write_before(
        &self,
        send: &mut SendStream,
        version: Version,
    ) -> Result<(), MessageError> {
        match self.cheapest_actor() {
            Some((_, least)) if least > Worth::NOTHING && version >= Version::SECOND => {
                write_message(send, &PeerResponse::Room(least.0)).await
            }
            _ => Ok(()),
        }
    }
}

/// Reads an answer of a node, and the worth of its next victim; `None` if the stream ended before it.
pub(super) async fn read_answer(
    receive: &mut RecvStream,
) -> Result<Option<(Worth, PeerResponse)>, MessageError> {
    let least = match read_message(receive).await? {
        Some(PeerResponse::Room(least)) => Worth(least),
        answer => return Ok(answer.map(|answer| (Worth::NOTHING, answer))),
    };
    Ok(read_message(receive).await?.map(|answer| (least, answer)))
}

/// A worth that differs by one part in so many at most counts as the same.
const SAME_SHARE: u64 = 8;

/// Answers of one node that say the same before one is told on: it shows that the node still answers.
const MOST_UNTOLD: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_heard_is_told_once_to_each_who_asks() {
        let (rooms, mut one, mut other) = (Rooms::default(), 0, 0);
        rooms.heard(NodeNumber(2), Worth(7), Version::LATEST);
        rooms.heard(NodeNumber(3), Worth(5), Version::LATEST);
        rooms.heard(NodeNumber(4), Worth::NOTHING, Version::FIRST);
        let both = [(NodeNumber(2), Worth(7)), (NodeNumber(3), Worth(5))];
        assert_eq!(rooms.since(&mut one), both);
        assert_eq!(rooms.since(&mut one), []);
        rooms.heard(NodeNumber(2), Worth(1), Version::LATEST);
        assert_eq!(rooms.since(&mut one), [(NodeNumber(2), Worth(1))]);
        assert_eq!(rooms.since(&mut other), [(NodeNumber(2), Worth(1)), both[1]]);
    }

    #[test]
    fn the_actor_with_the_least_worth_takes_what_is_offered() {
        let rooms = Rooms::default();
        assert_eq!(rooms.cheapest_actor(), None);
        rooms.is_worth(0, Worth(9));
        rooms.is_worth(1, Worth(4));
        assert_eq!(rooms.cheapest_actor(), Some((1, Worth(4))));
        rooms.is_worth(1, Worth(10));
        assert_eq!(rooms.cheapest_actor(), Some((0, Worth(9))));
    }
}
