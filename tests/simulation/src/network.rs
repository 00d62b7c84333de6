//! The network: it delays, loses, doubles, reorders and throttles packets, and cuts one way or both.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_protocol::membership::FollowerMessage;

use crate::coordinator::{Follows, Stream};
use crate::streams::Message;
use crate::world::{CoordinatorHappening, CoordinatorSays, Happening, Life, World};

/// A sender or receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Party {
    Host(usize),
    Coordinator(usize),
    /// The register of the coordinators' election.
    Register,
}

/// Something on its way to a host.
pub(crate) struct Packet {
    pub(crate) from: Party,
    pub(crate) to: Party,
    pub(crate) body: Packed,
}

/// The content of a packet.
pub(crate) enum Packed {
    /// Between nodes, on a stream.
    Peer(Message),
    /// The receiver's sign that a packet came, without content.
    Acknowledged,
    /// From the coordinator to one life.
    CoordinatorSays(Life, CoordinatorSays),
}

/// The state of the network.
#[derive(Debug)]
pub(crate) struct Network {
    hosts: usize,
    parties: usize,
    /// By sender, then receiver: whether packets are cut off.
    pub(crate) cuts: Vec<bool>,
    /// For each throttled way, when the packets sent before have passed.
    busy_until: Vec<Duration>,
    /// For each coordinator's stream and way, when its last message arrives; `None` once a message was lost for good.
    streams: BTreeMap<(usize, u64), Option<Duration>>,
    pub(crate) delay_us: u64,
    pub(crate) lost_per_mille: u32,
    pub(crate) doubled_per_mille: u32,
    pub(crate) reorder_us: u64,
    pub(crate) bytes_per_second: Option<u64>,
    /// A slow host, and the extra time of messages to and from it.
    pub(crate) slow: Option<(usize, u64)>,
}

impl Party {
    pub(crate) fn host(self) -> Option<usize> {
        match self {
            Self::Host(host) => Some(host),
            Self::Coordinator(_) | Self::Register => None,
        }
    }
}

impl Network {
    /// A network of hosts, of coordinators, and of their register.
    pub(crate) fn new(hosts: usize, coordinators: usize) -> Self {
        let parties = hosts + coordinators + 1;
        Self {
            hosts,
            parties,
            cuts: vec![false; parties * parties],
            busy_until: vec![Duration::ZERO; parties * parties],
            streams: BTreeMap::new(),
            delay_us: 0,
            lost_per_mille: 0,
            doubled_per_mille: 0,
            reorder_us: 0,
            bytes_per_second: None,
            slow: None,
        }
    }

    pub(crate) fn way(&self, from: Party, to: Party) -> usize {
        let number = |party| match party {
            Party::Host(host) => host,
            Party::Coordinator(at) => self.hosts + at,
            Party::Register => self.parties - 1,
        };
        number(from) * self.parties + number(to)
    }
}

impl World {
    /// The arrival times of a packet that is sent now: none, one, or two.
    pub(crate) fn arrivals(&mut self, from: Party, to: Party, bytes: u64) -> Vec<Duration> {
        let way = self.network.way(from, to);
        let lost = self.network.lost_per_mille;
        if self.network.cuts[way] || self.chance(lost) {
            return Vec::new();
        }
        let copies = if self.chance(self.network.doubled_per_mille) { 2 } else { 1 };
        let Network { delay_us, reorder_us, bytes_per_second, slow, .. } = self.network;
        let is_slow = |(host, _): &(usize, u64)| [from, to].contains(&Party::Host(*host));
        let slow_us = slow.filter(is_slow).map_or(0, |(_, us)| us);
        let mut after = Vec::new();
        for _ in 0..copies {
            let jitter = self.random.u64(..50 + reorder_us + slow_us / 4);
            let mut delay = Duration::from_micros(60 + delay_us + slow_us + jitter);
            if let Some(rate) = bytes_per_second {
                let takes = Duration::from_secs_f64(bytes as f64 / rate as f64);
                let start = self.network.busy_until[way].max(self.now);
                self.network.busy_until[way] = start + takes;
                delay += start + takes - self.now;
            }
            after.push(delay);
        }
        after
    }

    /// Tells a host that its packet arrived.
    pub(crate) fn acknowledge(&mut self, by: usize, to: usize) {
        let (from, to) = (Party::Host(by), Party::Host(to));
        if let Some(&after) = self.arrivals(from, to, 40).first() {
            self.plan(after, Happening::Packet(Packet { from, to, body: Packed::Acknowledged }));
        }
    }

    /// The arrival time of a message on a stream: lost packets are sent again, as long as there is a way.
    pub(crate) fn arrival_on_stream(&mut self, from: Party, to: Party, bytes: u64) -> Option<Duration> {
        (0..MOST_SENDINGS).find_map(|again| Some(RESEND * again + *self.arrivals(from, to, bytes).first()?))
    }

    /// The arrival time of a message on a coordinator's stream: after the messages before it, and never after a lost one.
    fn arrival_in_order(&mut self, from: Party, to: Party, stream: u64, bytes: u64) -> Option<Duration> {
        let key = (self.network.way(from, to), stream);
        let last = self.network.streams.get(&key).copied().unwrap_or(Some(Duration::ZERO));
        let arrives = last.and_then(|last| {
            let after = self.arrival_on_stream(from, to, bytes)?;
            Some(last.max(self.now + after))
        });
        self.network.streams.insert(key, arrives);
        Some(arrives? - self.now)
    }

    /// Sends a message to a coordinator.
    pub(crate) fn say_on_stream(&mut self, to: usize, stream: Stream, message: FollowerMessage) {
        let (from, to_party) = (stream.of.party(), Party::Coordinator(to));
        if let Some(after) = self.arrival_in_order(from, to_party, stream.number, 100) {
            self.plan(after, Happening::Coordinator(to, CoordinatorHappening::Said { stream, message }));
        }
    }

    /// Sends a message of a coordinator.
    pub(crate) fn tell_on_stream(&mut self, at: usize, follower: Follows, says: CoordinatorSays) {
        let (from, to) = (Party::Coordinator(at), follower.party());
        let Some(after) = self.arrival_in_order(from, to, says.stream, 10_000) else { return };
        let happening = match follower {
            Follows::Node(life) => {
                Happening::Packet(Packet { from, to, body: Packed::CoordinatorSays(life, says) })
            }
            Follows::Coordinator(other, life) => {
                Happening::Coordinator(other, CoordinatorHappening::Told { life, says })
            }
        };
        self.plan(after, happening);
    }
}

/// The most tries of a lost packet, and the pause between them.
const MOST_SENDINGS: u32 = 10;
const RESEND: Duration = Duration::from_millis(60);
