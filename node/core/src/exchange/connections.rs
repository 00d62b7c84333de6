//! Decides which connections with other nodes are kept, and which connection a pair of nodes uses.
//!
//! Two nodes use one connection, in both directions, whichever of them dialed it. If both dial at once, both keep the connection
//! that the node with the lower name dialed. Of two connections that were not dialed at once, the newer one is kept, since a peer
//! that dials again no longer sees the older one. The connection that is not kept is a *double*: this node begins no request on
//! it, and closes it once it is idle.
//!
//! A connection is idle while no request of either side is in flight on it. Closing an idle connection loses no request: a
//! request that is on its way at that moment is not served, and its asker asks again on another connection. So each side closes
//! without asking the other. A connection closes after a minute without use. Beyond a number of connections, the one that was
//! unused for longest closes. Some requests only ride: they are sent if a connection is open, and do not keep it open.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The connections of a node with other nodes.
#[derive(Debug)]
pub struct Connections {
    own: Arc<str>,
    most: usize,
    max_idle: Duration,
    kept: BTreeMap<ConnectionId, Kept>,
    /// For each peer, all of its connections.
    by_peer: BTreeMap<Arc<str>, BTreeSet<ConnectionId>>,
    /// The idle connections, in the order of the times since which they are idle.
    idle: BTreeSet<(Duration, ConnectionId)>,
    /// Idle connections on which this node begins no request.
    idle_leaving: BTreeSet<(Duration, ConnectionId)>,
    closing: VecDeque<(ConnectionId, Closing)>,
    last_number: u64,
}

/// The number of a connection, which this process gives to no other connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

/// The side that dialed a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Dialler {
    /// This node.
    Here,
    /// The other node.
    There,
}

/// Why a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Closing {
    /// Nobody used it for a while.
    Idle,
    /// There are too many connections, and this one was used longest ago.
    Bound,
    /// The connection is idle, and another connection with the same node is used, or the node began another life.
    Double,
    /// The node is no longer a member, or its state was lost. Requests in flight are lost too.
    Gone,
}

impl Closing {
    /// Whether nothing was in flight when the connection closed, so that the other side may ask again.
    pub fn is_idle(self) -> bool {
        self != Self::Gone
    }
}

#[derive(Debug)]
struct Kept {
    peer: Arc<str>,
    dialler: Dialler,
    opened: Duration,
    /// The time of its last use, except by requests that ride.
    used: Duration,
    in_flight: usize,
    standing: ConnectionUse,
}

/// The use of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionUse {
    /// The other side dialed the connection, and nobody knows yet whether it leads to the peer's address: it carries only the
    /// peer's requests.
    Unknown,
    /// The connection for requests to the peer.
    Used,
    /// Another connection with the peer is used.
    Double,
    /// The connection leads to an earlier life of the peer.
    Left,
}

impl Connections {
    /// Begins without connections. A connection closes after `max_idle` without use. If there are more than `most`, idle
    /// connections close.
    pub fn new(most: usize, max_idle: Duration) -> Self {
        Self {
            own: Arc::from(""),
            most,
            max_idle,
            kept: BTreeMap::new(),
            by_peer: BTreeMap::new(),
            idle: BTreeSet::new(),
            idle_leaving: BTreeSet::new(),
            closing: VecDeque::new(),
            last_number: 0,
        }
    }

    /// Sets this node's name.
    pub fn set_own(&mut self, name: &str) {
        if *self.own != *name {
            self.own = Arc::from(name);
        }
    }

    /// Adds an open connection with a node of this name. If the other side dialed it, [`Self::is_at_home`] says later that it
    /// leads to the member.
    pub fn opened(&mut self, now: Duration, peer: &str, dialler: Dialler) -> ConnectionId {
        self.last_number += 1;
        let id = ConnectionId(self.last_number);
        let peer =
            self.by_peer.get_key_value(peer).map_or_else(|| Arc::from(peer), |(name, _)| Arc::clone(name));
        self.by_peer.entry(Arc::clone(&peer)).or_default().insert(id);
        // A request of the side that dialed is on its way.
        let used = if dialler == Dialler::There { now + SETTLES } else { now };
        let standing = ConnectionUse::Unknown;
        self.kept.insert(id, Kept { peer, dialler, opened: now, used, in_flight: 0, standing });
        self.idle.insert((used, id));
        if dialler == Dialler::Here {
            self.is_at_home(id);
        }
        self.settle(now);
        id
    }

    /// Notes that a connection leads to the peer's address: it is as good as a connection that was dialed here.
    pub fn is_at_home(&mut self, id: ConnectionId) {
        let Some(new) = self.kept.get(&id).filter(|kept| kept.standing == ConnectionUse::Unknown) else {
            return;
        };
        match self.used(&new.peer) {
            Some(old) if !self.goes_before(id, old) => self.set_standing(id, ConnectionUse::Double),
            old => {
                old.into_iter().for_each(|old| self.set_standing(old, ConnectionUse::Double));
                self.set_standing(id, ConnectionUse::Used);
            }
        }
    }

    /// Connections that the other side dialed, as long as nobody knows whether they lead to the peer's address.
    pub fn unknown(&self) -> impl Iterator<Item = ConnectionId> {
        self.kept.iter().filter(|(_, kept)| kept.standing == ConnectionUse::Unknown).map(|(&id, _)| id)
    }

    /// The connection for requests to a node.
    pub fn used(&self, peer: &str) -> Option<ConnectionId> {
        self.of(peer).find(|id| self.kept[id].standing == ConnectionUse::Used)
    }

    /// Notes that a request of either side begins on a connection.
    pub fn begins(&mut self, id: ConnectionId) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.in_flight += 1;
        if kept.in_flight == 1 {
            let (from, set) = self.rests_in(id);
            set.remove(&(from, id));
        }
    }

    /// Notes the end of a request. `rides` says that the request does not count as use.
    pub fn ends(&mut self, now: Duration, id: ConnectionId, rides: bool) {
        let Some(kept) = self.kept.get_mut(&id) else { return };
        if !rides {
            kept.used = now;
        }
        kept.in_flight = kept.in_flight.saturating_sub(1);
        if kept.in_flight == 0 {
            let (from, set) = self.rests_in(id);
            set.insert((from, id));
        }
        self.settle(now);
    }

    /// Forgets a connection that either side closed.
    pub fn closed(&mut self, id: ConnectionId) {
        let Some(Kept { peer, standing, .. }) = self.remove(id) else { return };
        if standing != ConnectionUse::Used {
            return;
        }
        // The other side may be using the double.
        let double = self.of(&peer).rfind(|id| self.kept[id].standing == ConnectionUse::Double);
        double.into_iter().for_each(|double| self.set_standing(double, ConnectionUse::Used));
    }

    /// Notes that a node is no longer a member, or began another life. Connections that were dialed here led to the earlier life.
    pub fn gone(&mut self, peer: &str) {
        for id in self.of(peer).collect::<Vec<_>>() {
            match self.kept[&id].dialler {
                Dialler::Here => self.close(id, Closing::Gone),
                Dialler::There => self.set_standing(id, ConnectionUse::Left),
            }
        }
    }

    /// Closes all connections, after a fault.
    pub fn close_all(&mut self) {
        self.kept
            .keys()
            .copied()
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|id| self.close(id, Closing::Gone));
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        self.settle(now);
    }

    /// When [`Self::tick`] is due.
    pub fn next_deadline(&self) -> Option<Duration> {
        let pause = if self.is_over() { SETTLES.min(self.max_idle) } else { self.max_idle };
        let idle = self.idle.first().map(|&(from, _)| from + pause);
        let leaving = self.idle_leaving.first().map(|&(from, _)| from + MAX_LEAVING);
        idle.into_iter().chain(leaving).min()
    }

    /// The next connection to close, with the reason. The connection is forgotten already.
    pub fn poll_close(&mut self) -> Option<(ConnectionId, Closing)> {
        self.closing.pop_front()
    }

    /// The number of open connections.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether no connection is open.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    fn of(&self, peer: &str) -> impl DoubleEndedIterator<Item = ConnectionId> + use<'_> {
        self.by_peer.get(peer).into_iter().flatten().copied()
    }

    fn is_over(&self) -> bool {
        self.kept.len() > self.most
    }

    /// Whether `one` is used rather than `other`.
    fn goes_before(&self, one: ConnectionId, other: ConnectionId) -> bool {
        let (one, other) = (&self.kept[&one], &self.kept[&other]);
        let is_by_lower = |kept: &Kept| (kept.dialler == Dialler::Here) == (*self.own < *kept.peer);
        let are_together = one.opened.abs_diff(other.opened) <= TOGETHER;
        if are_together && is_by_lower(one) != is_by_lower(other) {
            is_by_lower(one)
        } else {
            one.opened >= other.opened
        }
    }

    fn set_standing(&mut self, id: ConnectionId, standing: ConnectionUse) {
        let (from, set) = self.rests_in(id);
        let is_idle = set.remove(&(from, id));
        let Some(kept) = self.kept.get_mut(&id) else { return };
        kept.standing = standing;
        if is_idle {
            let (from, set) = self.rests_in(id);
            set.insert((from, id));
        }
    }

    /// The list for a connection while it is idle, and the time since which it is idle.
    fn rests_in(&mut self, id: ConnectionId) -> (Duration, &mut BTreeSet<(Duration, ConnectionId)>) {
        let kept = self.kept.get(&id);
        let from = kept.map_or(Duration::ZERO, |kept| kept.used);
        match kept.map(|kept| kept.standing) {
            Some(ConnectionUse::Double | ConnectionUse::Left) => (from, &mut self.idle_leaving),
            _ => (from, &mut self.idle),
        }
    }

    /// Closes connections that were idle for too long, and idle connections beyond the limit.
    fn settle(&mut self, now: Duration) {
        let is_over = |first: Option<&(Duration, ConnectionId)>, pause| {
            first.filter(|&&(from, _)| from + pause <= now).map(|&(_, id)| id)
        };
        while let Some(id) = is_over(self.idle_leaving.first(), MAX_LEAVING) {
            self.close(id, Closing::Double);
        }
        while let Some(id) = is_over(self.idle.first(), self.max_idle) {
            self.close(id, Closing::Idle);
        }
        while self.is_over()
            && let Some(id) = is_over(self.idle.first(), SETTLES)
        {
            self.close(id, Closing::Bound);
        }
    }

    fn close(&mut self, id: ConnectionId, why: Closing) {
        if self.remove(id).is_some() {
            self.closing.push_back((id, why));
        }
    }

    fn remove(&mut self, id: ConnectionId) -> Option<Kept> {
        let (from, set) = self.rests_in(id);
        set.remove(&(from, id));
        let kept = self.kept.remove(&id)?;
        if let Some(of_peer) = self.by_peer.get_mut(&kept.peer) {
            of_peer.remove(&id);
            if of_peer.is_empty() {
                self.by_peer.remove(&kept.peer);
            }
        }
        Some(kept)
    }
}

impl Default for Connections {
    fn default() -> Self {
        Self::new(MOST_CONNECTIONS, MAX_IDLE)
    }
}

/// The default limit of connections with other nodes: an idle connection costs its peer and this node a packet every two seconds
/// each.
pub const MOST_CONNECTIONS: usize = 96;

/// A connection that nobody used for this time is closed, by default.
pub const MAX_IDLE: Duration = Duration::from_secs(60);

/// A connection on which this node begins no request is closed after it was idle for this time.
const MAX_LEAVING: Duration = Duration::from_secs(1);

/// A connection that was used within this time stays, even if there are too many: a request may be about to begin on it.
const SETTLES: Duration = Duration::from_millis(250);

/// Two connections that were made within this time count as dialed at once.
const TOGETHER: Duration = Duration::from_secs(3);
