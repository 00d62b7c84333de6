//! Rooms: the worth of each node's next victim, and the bytes that the node serves. This node knows its own room, and the
//! answers of other nodes bear theirs.
//!
//! An answer between nodes bears both in a message before it ([`PeerResponse::Room`]). Without this message, the node has free
//! room and serves nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_core::placement::{Served, Worth};
use larder_net::quic::{MessageError, read_message, write_message};
use larder_protocol::peer::{PeerResponse, Room};
use larder_protocol::table::NodeNumber;
use larder_protocol::version::Version;
use tokio::io::{AsyncRead, AsyncWrite};

/// The rooms of nodes, known to all threads of a node. Cloning shares.
#[derive(Debug, Clone, Default)]
pub struct Rooms(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    own: Mutex<BTreeMap<u16, u64>>,
    served: Mutex<Served>,
    heard: Mutex<BTreeMap<NodeNumber, Heard>>,
    /// Grows with each room that is passed on.
    news: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Heard {
    room: Room,
    news: u64,
    /// When the room was passed on, and the answers since.
    at: Duration,
    answers: u32,
}

impl Rooms {
    /// Notes the worth of an actor's next victim.
    pub fn is_worth(&self, device: u16, least: Worth) {
        larder_net::lock(&self.0.own).insert(device, least.0);
    }

    /// The actor of this node whose next victim is worth least, and that worth.
    pub fn cheapest_actor(&self) -> Option<(u16, Worth)> {
        let own = larder_net::lock(&self.0.own);
        own.iter().min_by_key(|&(_, &least)| least).map(|(&device, &least)| (device, Worth(least)))
    }

    /// Counts bytes of blocks that this node sends to others.
    pub fn sends(&self, bytes: u64, now: Duration) {
        let mut served = larder_net::lock(&self.0.served);
        served.sent(bytes, now.as_millis() as u64);
    }

    /// Bytes of blocks a second that this node has sent to others lately.
    pub fn served(&self, now: Duration) -> u64 {
        let served = larder_net::lock(&self.0.served);
        served.bytes_a_second(now.as_millis() as u64)
    }

    /// Notes the room in a node's answer, on a connection of this version. A node of version 1 says nothing of its room, and
    /// takes no chunks. A room that differs little from the one passed on last is passed on only after some answers or
    /// some time.
    pub fn heard(&self, node: NodeNumber, room: Room, version: Version, now: Duration) {
        if version < Version::SECOND {
            return;
        }
        let is_like = |one: u64, other: u64| one.abs_diff(other) <= one / SAME_SHARE;
        let mut heard = larder_net::lock(&self.0.heard);
        if let Some(last) = heard.get_mut(&node)
            && is_like(last.room.least, room.least)
            && is_like(last.room.served, room.served)
            && last.answers < MOST_UNTOLD
            && now.saturating_sub(last.at) < TOLD_AGAIN
        {
            last.answers += 1;
            return;
        }
        let news = self.0.news.fetch_add(1, Ordering::AcqRel) + 1;
        heard.insert(node, Heard { room, news, at: now, answers: 0 });
    }

    /// The rooms heard since news number `seen`, which becomes the last number.
    #[must_use]
    pub fn since(&self, seen: &mut u64) -> Vec<(NodeNumber, Room)> {
        let last = self.0.news.load(Ordering::Acquire);
        if last == *seen {
            return Vec::new();
        }
        let heard = larder_net::lock(&self.0.heard);
        let newer = heard.iter().filter(|(_, heard)| heard.news > *seen);
        let newer: Vec<_> = newer.map(|(&node, heard)| (node, heard.room)).collect();
        *seen = last;
        newer
    }

    /// Writes the room that comes before an answer to another node.
    pub(super) async fn write_before(
        &self,
        send: &mut (impl AsyncWrite + Unpin),
        version: Version,
        now: Duration,
    ) -> Result<(), MessageError> {
        let least = self.cheapest_actor().map_or(0, |(_, Worth(least))| least);
        let room = Room { least, served: self.served(now) };
        if room == Room::default() || version < Version::SECOND {
            return Ok(());
        }
        write_message(send, &PeerResponse::Room(room)).await
    }
}

/// Reads a node's answer, and the room before it; `None` if the stream ended before the answer.
pub(super) async fn read_answer(
    receive: &mut (impl AsyncRead + Unpin),
) -> Result<Option<(Room, PeerResponse)>, MessageError> {
    let room = match read_message(receive).await? {
        Some(PeerResponse::Room(room)) => room,
        answer => return Ok(answer.map(|answer| (Room::default(), answer))),
    };
    Ok(read_message(receive).await?.map(|answer| (room, answer)))
}

/// A figure that differs by at most one part in this many counts as the same.
const SAME_SHARE: u64 = 8;

/// The number of like answers of one node before one is passed on.
const MOST_UNTOLD: u32 = 16;

/// After this time an answer is passed on whatever it says, to show that the node still answers: cores offer chunks only to nodes
/// that they heard in the last ten seconds.
const TOLD_AGAIN: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_heard_is_told_once_to_each_who_asks() {
        let (rooms, mut one, mut other) = (Rooms::default(), 0, 0);
        let heard_at = |node, room, second| {
            let now = Duration::from_secs(second);
            rooms.heard(NodeNumber(node), room, Version::LATEST, now);
        };
        let heard = |node, room| heard_at(node, room, 0);
        let [large, small, busy] = [(7, 0), (5, 0), (7, 9)].map(|(least, served)| Room { least, served });
        heard(2, large);
        heard(3, small);
        rooms.heard(NodeNumber(4), large, Version::FIRST, Duration::ZERO);
        let both = [(NodeNumber(2), large), (NodeNumber(3), small)];
        assert_eq!(rooms.since(&mut one), both);
        assert_eq!(rooms.since(&mut one), []);
        heard(2, large);
        assert_eq!(rooms.since(&mut one), [], "it is as it was");
        heard_at(2, large, 2);
        assert_eq!(rooms.since(&mut one), [(NodeNumber(2), large)], "it still answers");
        heard(2, busy);
        assert_eq!(rooms.since(&mut one), [(NodeNumber(2), busy)]);
        assert_eq!(rooms.since(&mut other), [(NodeNumber(2), busy), both[1]]);
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
