//! Connections with other nodes, from the handshake to their end, whichever side dialed them.
//!
//! [`larder_core::exchange::Connections`] decides which connection is used and which is closed. A connection that a peer dialed
//! also serves for requests to the peer if it comes from the peer's address in the table. Then it is as good as a connection that
//! was dialed here. In both cases TLS tells the peer's name, and each request is judged by this name.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::ops::Deref;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_core::exchange::{Closing, ConnectionId, Dialler, PeerId};
use larder_net::quic::Connection;
use larder_protocol::identity::Role;
use larder_protocol::table::{Member, Table};
use larder_protocol::version::Version;
use quinn::VarInt;
use tokio::time::timeout;

use super::peers::Peers;
use super::serve::Server;

/// The open connections of a node.
#[derive(Default)]
pub(super) struct Carrying {
    open: RefCell<HashMap<ConnectionId, Connection>>,
    connected: ConnectedPeers,
    /// Serves peers on the connections that were dialed here.
    server: RefCell<Weak<Server>>,
}

/// Names of the nodes with which there is a connection, and their numbers of connections. The directory reads this.
#[derive(Debug, Clone, Default)]
pub struct ConnectedPeers(Arc<Mutex<BTreeMap<String, usize>>>);

/// A connection with another node that this node serves. Dropping this closes the connection.
pub(super) struct Carried {
    peers: Peers,
    id: ConnectionId,
}

/// A connection that a request of either side uses. As long as this value lives, the connection is not idle.
pub(super) struct InUse {
    peers: Peers,
    id: ConnectionId,
    connection: Connection,
    rides: Cell<bool>,
}

/// The way to one other node, in one incarnation.
pub(super) struct Link {
    pub(super) peer: PeerId,
    pub(super) name: String,
    /// Held by the one task that dials.
    dialling: tokio::sync::Mutex<()>,
    /// The time at which the last dial failed.
    dial_failed_at: Cell<Option<Duration>>,
    /// The time until which block threads are not asked to reach the node.
    avoids_block_threads_until: Cell<Duration>,
}

/// Counts how often a request met a connection that the other side was just closing.
#[derive(Debug, Default)]
pub(super) struct AskedAgain(u32);

impl ConnectedPeers {
    /// Whether a request to this node needs no handshake.
    pub fn contains(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    fn count(&self, name: &str, opens: bool) {
        let mut connected = self.lock();
        let connections = connected.entry(name.to_owned()).or_default();
        *connections = if opens { *connections + 1 } else { connections.saturating_sub(1) };
        if *connections == 0 {
            connected.remove(name);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, usize>> {
        larder_net::lock(&self.0)
    }
}

impl Carrying {
    pub(super) fn new(connected: ConnectedPeers) -> Self {
        Self { connected, ..Self::default() }
    }

    /// Serves peers with this server from now on, also on connections that are dialed here.
    pub(super) fn serve_with(&self, server: &Rc<Server>) {
        self.server.replace(Rc::downgrade(server));
    }

    /// Performs a decision to close.
    pub(super) fn close(&self, id: ConnectionId, why: Closing) {
        let Some(connection) = self.forget(id) else { return };
        tracing::debug!(peer = %connection.peer(), ?why, "a connection is closed");
        if why.is_idle() {
            connection.close_as_idle();
        } else {
            connection.quic().close(CLOSED, b"not a member any more");
        }
    }

    fn forget(&self, id: ConnectionId) -> Option<Connection> {
        let connection = self.open.borrow_mut().remove(&id)?;
        self.connected.count(&connection.peer().name, false);
        Some(connection)
    }
}

impl Peers {
    /// Adds an open connection with another node.
    pub(super) fn carry(&self, connection: &Connection, dialler: Dialler) -> Carried {
        let name = &connection.peer().name;
        self.metrics().opened(dialler);
        self.watch(connection);
        let id = self.decide(|exchange, now| exchange.connections.opened(now, name, dialler));
        self.carrying().open.borrow_mut().insert(id, connection.clone());
        self.carrying().connected.count(name, true);
        if dialler == Dialler::There && is_at_home(&self.table(), connection) {
            self.decide(|exchange, _| exchange.connections.is_at_home(id));
        }
        Carried { peers: self.clone(), id }
    }

    /// Finds the peers' connections that come from the addresses of a new table.
    pub(super) fn place_connections(&self) {
        let table = self.table();
        let unknown: Vec<_> = self.decide(|exchange, _| exchange.connections.unknown().collect());
        for id in unknown {
            let connection = self.carrying().open.borrow().get(&id).cloned();
            if connection.is_some_and(|connection| is_at_home(&table, &connection)) {
                self.decide(|exchange, _| exchange.connections.is_at_home(id));
            }
        }
    }

    /// The connection to a node, dialed if there is none. A node that cannot be reached counts as silent.
    pub(super) async fn connection(&self, link: &Rc<Link>) -> Option<InUse> {
        let connection = self.dial(link).await;
        if connection.is_none() {
            self.decide(|exchange, now| exchange.falls_silent(now, link.peer));
        }
        connection
    }

    /// The address of a link's node, if the node is a member in the same life.
    pub(super) fn address_of(&self, link: &Link) -> Option<SocketAddr> {
        member_of(&self.table(), link).map(|member| member.peer)
    }

    /// The connection to a node, dialed if there is none. A dial that fails answers all who waited for it.
    pub(super) async fn dial(&self, link: &Rc<Link>) -> Option<InUse> {
        if let Some(connection) = self.open_connection(link) {
            return Some(connection);
        }
        let came_at = self.now();
        let _dialling = link.dialling.lock().await;
        if let Some(connection) = self.open_connection(link) {
            return Some(connection);
        }
        if link.dial_failed_at.get() >= Some(came_at) {
            return None;
        }
        let (table, node) = (self.table(), link.peer.node);
        let &Member { peer: address, ref name, .. } = member_of(&table, link)?;
        match timeout(DIAL_DEADLINE, self.endpoint().connect(address, Role::Node, Some(name))).await {
            Ok(Ok(connection)) => {
                tracing::debug!(%node, name, %address, "connected");
                self.serve_dialled(connection);
            }
            Ok(Err(error)) => {
                if let Some(more) = self.says("unconnected") {
                    tracing::warn!(%node, name, %address, %error, more, "cannot connect to a node");
                }
            }
            Err(_) => {}
        }
        // If both sides have dialed, this may be the peer's connection.
        let connection = self.open_connection(link);
        if connection.is_none() {
            link.dial_failed_at.set(Some(self.now()));
        }
        connection
    }

    /// The connection for requests to a node, if it is open.
    fn open_connection(&self, link: &Link) -> Option<InUse> {
        // A connection belongs to a name, whatever the life of its node, so the life is checked first.
        member_of(&self.table(), link)?;
        loop {
            let id = self.decide(|exchange, _| exchange.connections.used(&link.name))?;
            let connection = self.carrying().open.borrow().get(&id).cloned();
            match connection.filter(|connection| connection.quic().close_reason().is_none()) {
                Some(connection) => return Some(self.in_use(id, connection)),
                None => self.is_closed(id),
            }
        }
    }

    fn in_use(&self, id: ConnectionId, connection: Connection) -> InUse {
        self.decide(|exchange, _| exchange.connections.begins(id));
        InUse { peers: self.clone(), id, connection, rides: Cell::new(false) }
    }

    /// Serves the peer on a connection that was dialed here, until it closes.
    fn serve_dialled(&self, connection: Connection) {
        let carried = self.carry(&connection, Dialler::Here);
        let (peers, server) = (self.clone(), self.carrying().server.borrow().upgrade());
        actix_rt::spawn(async move {
            let served = async {
                match server {
                    Some(server) => server.serve_dialled(connection, carried).await,
                    // This node serves nobody yet.
                    None => _ = (connection.quic().closed().await, carried),
                }
            };
            peers.watched("serve", None, served).await;
        });
    }

    fn is_closed(&self, id: ConnectionId) {
        if let Some(connection) = self.carrying().forget(id) {
            connection.quic().close(CLOSED, b"nobody serves it any more");
        }
        self.decide(|exchange, _| exchange.connections.closed(id));
    }
}

impl Carried {
    /// Notes that a request of the other side begins.
    pub(super) fn serves(&self, connection: &Connection) -> InUse {
        self.peers.in_use(self.id, connection.clone())
    }
}

impl InUse {
    /// Notes that the request is no reason to keep the connection open.
    pub(super) fn rides(&self) {
        self.rides.set(true);
    }
}

impl Link {
    pub(super) fn new(peer: PeerId, name: String) -> Self {
        let (dialling, dial_failed_at) = (tokio::sync::Mutex::default(), Cell::default());
        Self { peer, name, dialling, dial_failed_at, avoids_block_threads_until: Cell::default() }
    }

    /// Notes that a block thread cannot reach the node: the node has no block threads, or a firewall is in the way. No block
    /// thread tries for a while.
    pub(super) fn avoid_block_threads(&self, now: Duration) {
        self.avoids_block_threads_until.set(now + AVOIDED);
    }

    pub(super) fn avoids_block_threads(&self, now: Duration) -> bool {
        now < self.avoids_block_threads_until.get()
    }
}

impl AskedAgain {
    /// Whether a request that failed on this connection is tried again on another connection.
    pub(super) fn may(&mut self, connection: &InUse) -> bool {
        self.0 += 1;
        self.0 <= MOST_TIMES && connection.was_closed_as_idle()
    }
}

impl Deref for InUse {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let (id, rides) = (self.id, self.rides.get());
        self.peers.decide(|exchange, now| exchange.connections.ends(now, id, rides));
    }
}

impl Drop for Carried {
    fn drop(&mut self) {
        self.peers.is_closed(self.id);
    }
}

/// The member to which a link leads, if the member is in the same life.
fn member_of<'a>(table: &'a Table, link: &Link) -> Option<&'a Member> {
    table.member(link.peer.node).filter(|member| member.incarnation == link.peer.incarnation)
}

/// Whether a connection comes from its node's address in the table. Never for a node of version 1, which serves nobody on
/// connections that it dialed.
fn is_at_home(table: &Table, connection: &Connection) -> bool {
    if connection.version() < Version::SECOND {
        return false;
    }
    let canonical = |address: SocketAddr| (address.ip().to_canonical(), address.port());
    let from = canonical(connection.quic().remote_address());
    let mut members = table.members.iter().filter(|member| canonical(member.peer) == from);
    members.any(|member| member.name == connection.peer().name)
}

/// How long block threads leave out a node that one of them could not reach.
const AVOIDED: Duration = Duration::from_secs(60);

/// How long a handshake may take.
pub(super) const DIAL_DEADLINE: Duration = Duration::from_secs(1);

/// The number of closing connections that a request may meet before it fails.
const MOST_TIMES: u32 = 4;

const CLOSED: VarInt = VarInt::from_u32(0);
