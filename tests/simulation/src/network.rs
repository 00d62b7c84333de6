//! The network: it delays, loses, doubles, reorders, throttles, and cuts one way or both.

use std::time::Duration;

use crate::streams::Message;
use crate::world::{CoordinatorHappening, CoordinatorSays, Happening, Life, World};

/// Who sends and hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Party {
    Host(usize),
    Coordinator,
}

/// Something on its way to a host.
pub(crate) struct Packet {
    pub(crate) from: Party,
    pub(crate) to: Party,
    pub(crate) body: Packed,
}

/// What a packet carries.
pub(crate) enum Packed {
    /// Between nodes, on a stream.
    Peer(Message),
    /// A packet came: nothing else.
    Acknowledged,
    /// From the coordinator to one life.
    CoordinatorSays(Life, CoordinatorSays),
}

/// How the network does.
#[derive(Debug)]
pub(crate) struct Network {
    parties: usize,
    /// By sender, then receiver: whether nothing comes through.
    pub(crate) cuts: Vec<bool>,
    /// Until when a way is taken by what was sent before, where it is throttled.
    busy_until: Vec<Duration>,
    pub(crate) delay_us: u64,
    pub(crate) lost_per_mille: u32,
    pub(crate) doubled_per_mille: u32,
    pub(crate) reorder_us: u64,
    pub(crate) bytes_per_second: Option<u64>,
    /// A host that everything takes so much longer to and from.
    pub(crate) slow: Option<(usize, u64)>,
}

impl Party {
    pub(crate) fn host(self) -> Option<usize> {
        match self {
            Self::Host(host) => Some(host),
            Self::Coordinator => None,
        }
    }
}

impl Network {
    pub(crate) fn new(parties: usize) -> Self {
        Self {
            parties,
            cuts: vec![false; parties * parties],
            busy_until: vec![Duration::ZERO; parties * parties],
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
            Party::Coordinator => self.parties - 1,
        };
        number(from) * self.parties + number(to)
    }
}

impl World {
    /// When something arrives that is sent now: never, once, or twice.
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

    /// Tells a host that a packet of its came.
    pub(crate) fn acknowledge(&mut self, by: usize, to: usize) {
        let (from, to) = (Party::Host(by), Party::Host(to));
        if let Some(&after) = self.arrivals(from, to, 40).first() {
            self.plan(after, Happening::Packet(Packet { from, to, body: Packed::Acknowledged }));
        }
    }

    /// When something arrives that is said on a stream: what is lost is sent again, as long as there is a way.
    fn arrival_on_stream(&mut self, from: Party, to: Party, bytes: u64) -> Option<Duration> {
        (0..MOST_SENDINGS).find_map(|again| Some(RESEND * again + *self.arrivals(from, to, bytes).first()?))
    }

    /// Says something to the coordinator. What is said on one stream is in order.
    pub(crate) fn say(
        &mut self,
        life: Life,
        stream: u64,
        message: larder_protocol::membership::FollowerMessage,
    ) {
        if let Some(after) = self.arrival_on_stream(Party::Host(life.host), Party::Coordinator, 100) {
            self.plan(after, Happening::Coordinator(CoordinatorHappening::Said { life, stream, message }));
        }
    }

    /// The coordinator says something.
    pub(crate) fn tell_follower(&mut self, life: Life, told: CoordinatorSays) {
        let (from, to) = (Party::Coordinator, Party::Host(life.host));
        if let Some(after) = self.arrival_on_stream(from, to, 10_000) {
            self.plan(
                after,
                Happening::Packet(Packet { from, to, body: Packed::CoordinatorSays(life, told) }),
            );
        }
    }
}

/// How often a stream sends something that is lost, and after which time again.
const MOST_SENDINGS: u32 = 10;
const RESEND: Duration = Duration::from_millis(60);
