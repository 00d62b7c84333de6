//! The exchange: decides which peers this node asks for blocks, how much at a time, and how much it sends to each peer.
//!
//! One [`Exchange`] decides for all peers of a node. Its shell asks for a turn ([`Exchange::fetch`]) and asks the peer once
//! [`Effect::Turn`] comes. It reports the result ([`Exchange::is_busy`], [`Exchange::fetch_is_late`], [`Exchange::heard`]) and
//! always ends with [`Exchange::leave`]. After each call it performs the effects ([`Exchange::poll_effect`], until none is left).
//! At [`Exchange::next_deadline`] it reports that time has passed:
//!
//! ```
//! # use std::time::Duration;
//! # use larder_core::exchange::{Effect, Exchange, ExchangeLimits, NoPeer, Wanted};
//! # use larder_core::store::ids::TenantId;
//! # use larder_protocol::peer::Class;
//! # use larder_protocol::table::NodeNumber;
//! fn fetch(exchange: &mut Exchange, now: Duration, node: NodeNumber) -> Result<(), NoPeer> {
//!     let (class, deadline) = (Class::Decode, Duration::from_secs(1));
//!     let wanted = Wanted { tenant: TenantId(0), bytes: 2 << 20, class, deadline, has_others: false };
//!     let peer = exchange.peer(node)?;
//!     let fetch = exchange.fetch(now, peer, wanted);
//!     while let Some(effect) = exchange.poll_effect() {
//!         if let Effect::Turn(request, turn) = effect {
//!             assert_eq!((request, turn.until), (fetch, Some(now + deadline)));
//!             exchange.heard(peer); // The blocks came.
//!         }
//!     }
//!     exchange.leave(now, fetch);
//!     Ok(())
//! }
//! let mut exchange = Exchange::new(ExchangeLimits::default(), 1);
//! assert_eq!(fetch(&mut exchange, Duration::ZERO, NodeNumber(2)), Err(NoPeer::NotAMember));
//! ```
//!
//! A peer that is not heard is *doubted*, then *silent*: [`Effect::Probe`] asks it for a sign of life until it answers. All
//! threads that send blocks obey the node's one [`Outgoing`]. [`ThreadLoads`] chooses the thread that fetches.
//!
//! Credits and a number of streams bound the requests to one peer. A node that sends too much answers `Busy`; it is asked
//! again at the time that it named, unless others have the chunk. A fetch's deadline counts from the moment when its peer is
//! asked, since a long wait in line says nothing of the peer.

mod busy;
mod connections;
mod fetch;
mod gate;
mod pace;
mod patience;
mod sending;
mod silence;
mod thread_loads;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::peer::RetryAfter;
use larder_protocol::table::{NodeNumber, Table};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use busy::BusyPause;
pub use connections::{Closing, ConnectionId, Connections, Dialler, MAX_IDLE, MOST_CONNECTIONS};
pub use fetch::{FOLLOW_PROBE, Turn, Wanted};
pub use pace::Pace;
pub use patience::{Arriving, Frames, Stall};
pub use sending::Sending;
pub use silence::{PROBE_DEADLINE, witnesses};
pub use thread_loads::ThreadLoads;

use fetch::Request;
use silence::PeerHealth;

use crate::fair::FairPlaces;
use crate::store::ids::TenantId;

/// The limits of the exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeLimits {
    /// Streams of blocks at a time from one peer: with more, the slowest wait much longer.
    pub streams_per_peer: usize,
    /// Bytes of blocks that are asked of one peer and have not come.
    pub credit_bytes: u64,
    /// Bytes of blocks that are being sent, to all peers together; beyond this number, peers are told to ask again.
    pub sending_bytes: u64,
    /// Bytes of blocks on one stream; a single chunk may be larger.
    pub batch_bytes: u64,
    /// Limit of the bytes of blocks sent in a second, to all peers together; no limit if `None`.
    pub send_bytes_per_second: Option<NonZeroU64>,
    /// Connections with other nodes; beyond this number, idle connections are closed.
    pub connections: usize,
    /// A connection that nobody used for this time is closed.
    pub connection_idle: Duration,
}

/// A node's decisions about its peers.
#[derive(Debug)]
pub struct Exchange {
    limits: ExchangeLimits,
    table: Arc<Table>,
    own: NodeNumber,
    peers: BTreeMap<PeerId, PeerHealth>,
    requests: BTreeMap<RequestId, Request>,
    /// Follows of nodes that are no members yet.
    waiting_follows: FairPlaces<TenantId>,
    alarms: BTreeSet<(Duration, Alarm)>,
    /// The connections with other nodes. After each call, the shell closes the connections that [`Connections::poll_close`]
    /// names.
    pub connections: Connections,
    effects: VecDeque<Effect>,
    seed: u64,
    last_number: u64,
}

/// The bounds of all blocks that a node sends.
#[derive(Debug)]
pub struct Outgoing {
    /// The bytes in flight to each peer.
    pub sending: Sending,
    /// The rate at which this node sends.
    pub pace: Pace,
}

/// One incarnation of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId {
    /// The node.
    pub node: NodeNumber,
    /// The node's incarnation.
    pub incarnation: u64,
}

/// A fetch or follow, until it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(u64);

/// A task for the shell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// A fetch has its turn.
    Turn(RequestId, Turn),
    /// Ask a peer for a sign of life, and report the result once ([`Exchange::probed`]).
    Probe {
        /// The peer.
        peer: PeerId,
        /// The number of the probe.
        probe: u64,
        /// How long the answer may take.
        deadline: Duration,
    },
    /// A peer does not answer: it is left out until it answers.
    Silent(PeerId),
    /// A silent peer answers again.
    Answers(PeerId),
    /// The peer is no member any more, or its state was lost.
    Gone(PeerId),
}

/// Why a node cannot be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoPeer {
    /// Not in the table, or this node itself.
    #[error("the node is not a member")]
    NotAMember,
    /// Nothing was heard from the peer.
    #[error("the node has not answered lately")]
    Silent,
}

/// The purpose of an alarm. An alarm whose request or peer is gone means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Alarm {
    LineUp(RequestId),
    Probe(PeerId),
}

impl Exchange {
    /// An exchange without peers. Its pauses are random, and the same for the same seed.
    pub fn new(limits: ExchangeLimits, seed: u64) -> Self {
        Self {
            table: Arc::default(),
            own: NodeNumber::default(),
            peers: BTreeMap::new(),
            requests: BTreeMap::new(),
            waiting_follows: FairPlaces::default(),
            alarms: BTreeSet::new(),
            connections: Connections::new(limits.connections, limits.connection_idle),
            effects: VecDeque::new(),
            limits,
            seed,
            last_number: 0,
        }
    }

    /// The table in force.
    pub fn table(&self) -> &Arc<Table> {
        &self.table
    }

    /// Takes a new table. Peers that left it, or came back in another life, are forgotten. Suspect peers are asked for a sign of
    /// life if this node is one of their [`witnesses`].
    pub fn set_table(&mut self, table: Arc<Table>, own: NodeNumber) {
        let before = std::mem::replace(&mut self.table, table);
        self.own = own;
        for was in &before.members {
            let is = self.table.member(was.number);
            if is.is_none_or(|is| (was.incarnation, &was.name) != (is.incarnation, &is.name)) {
                self.connections.gone(&was.name);
                self.forget(PeerId { node: was.number, incarnation: was.incarnation });
            }
        }
        if let Some(own) = self.table.member(own) {
            self.connections.set_own(&own.name);
        }
        self.witness();
    }

    /// The present life of a member that is not silent.
    ///
    /// # Errors
    /// The reason why it cannot be asked.
    pub fn peer(&mut self, node: NodeNumber) -> Result<PeerId, NoPeer> {
        let member = self.table.member(node).filter(|_| node != self.own).ok_or(NoPeer::NotAMember)?;
        let peer = PeerId { node, incarnation: member.incarnation };
        let state = self.peers.entry(peer).or_insert_with(|| PeerHealth::new(&self.limits));
        if state.is_silent() { Err(NoPeer::Silent) } else { Ok(peer) }
    }

    /// Drops a peer's state. Its requests end; a request that waits for its turn is told so.
    pub fn forget(&mut self, peer: PeerId) {
        if let Some(member) = self.table.member(peer.node).filter(|now| now.incarnation == peer.incarnation) {
            self.connections.gone(&member.name);
        }
        if self.peers.remove(&peer).is_none() {
            return;
        }
        let ended = self.requests.iter().filter(|(_, state)| state.peer == peer);
        self.effects.extend(ended.filter_map(|(&request, state)| state.is_over(request)));
        self.requests.retain(|_, state| state.peer != peer);
        self.effects.push_back(Effect::Gone(peer));
    }

    /// Drops the state of all peers, after a fault.
    pub fn begin_anew(&mut self) {
        self.connections.close_all();
        self.peers.keys().copied().collect::<Vec<_>>().into_iter().for_each(|peer| self.forget(peer));
    }

    /// How long to pause before asking a busy peer again; `None` if the pause would end after `over`.
    pub fn pause(
        &mut self,
        now: Duration,
        pause: &mut BusyPause,
        retry: RetryAfter,
        over: Duration,
    ) -> Option<Duration> {
        Some(pause.next(retry, self.chance())).filter(|&pause| now + pause < over)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        while let Some(&(_, alarm)) = self.alarms.first().filter(|(due, _)| *due <= now) {
            self.alarms.pop_first();
            match alarm {
                Alarm::LineUp(request) => self.line_up(now, request),
                Alarm::Probe(peer) => self.probe(peer),
            }
        }
        self.connections.tick(now);
    }

    /// When [`Self::tick`] is due.
    pub fn next_deadline(&self) -> Option<Duration> {
        let alarm = self.alarms.first().map(|&(due, _)| due);
        alarm.into_iter().chain(self.connections.next_deadline()).min()
    }

    /// The next task for the shell.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Fetches and follows that have not left.
    pub fn under_way(&self) -> usize {
        self.requests.len()
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// A pseudorandom number, at least 0 and less than 1.
    fn chance(&mut self) -> f64 {
        let bits = xxh3_64_with_seed(&self.next_number().to_le_bytes(), self.seed);
        (bits >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl Outgoing {
    /// Bounds with nothing in flight.
    pub fn new(limits: &ExchangeLimits) -> Self {
        Self { sending: Sending::new(limits.sending_bytes), pace: Pace::new(limits.send_bytes_per_second) }
    }
}

impl Default for ExchangeLimits {
    fn default() -> Self {
        Self {
            streams_per_peer: 4,
            credit_bytes: 64 << 20,
            sending_bytes: 256 << 20,
            batch_bytes: 4 << 20,
            send_bytes_per_second: None,
            connections: MOST_CONNECTIONS,
            connection_idle: MAX_IDLE,
        }
    }
}

#[cfg(test)]
mod tests;
