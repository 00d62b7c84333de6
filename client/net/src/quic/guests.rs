//! Bounds on the clients of a server: connections of each identity, and bytes of requests in flight.
//!
//! Any certificate of the cluster opens connections. The bounds go by identity, tenant and role, so a process that asks for too
//! much, by fault or by will, hinders only itself: engines leave places for those of other tenants and for admins. Handshakes are
//! counted by address.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_protocol::identity::{Identity, Role};
use larder_protocol::peer::Message;
use quinn::VarInt;
use tokio::io::AsyncRead;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, timeout};

use super::endpoint::{Connection, Incoming};
use super::messages::{MessageError, read_body, read_header};
use crate::seldom::Seldom;

/// The limits of one identity at a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestLimits {
    /// Connections. For one more, a member's oldest connection is closed, since it may belong to an earlier life; other clients
    /// are turned away.
    pub connections: usize,
    /// Streams that the identity may have open on each connection.
    pub streams: u32,
    /// Bytes of the longest message that the identity may send.
    pub message_bytes: usize,
    /// Bytes of messages that are being read or answered at a time, on all connections together: further messages wait.
    pub waiting_bytes: usize,
}

/// The connections at a server, by identity. Cloning shares.
#[derive(Debug, Clone)]
pub struct Guests(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: fn(Role) -> GuestLimits,
    /// Connections of nodes and coordinators, however many they are.
    most_members: usize,
    started: Instant,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    handshakes: usize,
    handshakes_by_source: HashMap<IpAddr, usize>,
    by_identity: HashMap<Identity, Connected>,
    /// Connections of all nodes and coordinators, of all admins, and of all engines.
    members: usize,
    admins: usize,
    engines: usize,
    last: u64,
    turned_away: Seldom,
    refused: Seldom,
}

#[derive(Debug)]
struct Connected {
    /// The oldest first.
    connections: BTreeMap<u64, Counted>,
    waiting_bytes: Arc<Semaphore>,
}

/// A connection that counts, and a way to close it.
#[derive(Debug)]
pub(crate) enum Counted {
    Quic(quinn::Connection),
    /// Whether the connection over TCP is closed.
    Tcp(watch::Sender<bool>),
}

/// An admitted connection. It counts until it is dropped.
#[derive(Debug)]
pub struct Guest {
    connection: Connection,
    seat: Seat,
}

/// The seat of an admitted connection, which is taken until this value is dropped.
#[derive(Debug)]
pub struct Seat {
    guests: Guests,
    identity: Identity,
    number: u64,
    limits: GuestLimits,
    waiting_bytes: Arc<Semaphore>,
}

/// A message, which counts until it is answered.
#[derive(Debug)]
pub struct Asked<M> {
    /// The message.
    pub message: M,
    /// Its share of the sender's bytes in flight.
    pub bytes: OwnedSemaphorePermit,
}

/// Why a client is not let in.
#[derive(Debug, thiserror::Error)]
#[error("turned away: {reason}")]
pub struct TurnedAway {
    /// For metrics: that of [`Rejected`](super::Rejected), or `handshakes` or `connections` if there are too many.
    pub reason: &'static str,
    /// The cause, if one is known.
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// A place for a handshake.
pub(crate) struct Handshake {
    guests: Guests,
    source: IpAddr,
}

impl Known {
    fn new() -> Self {
        Self {
            handshakes: 0,
            handshakes_by_source: HashMap::new(),
            by_identity: HashMap::new(),
            members: 0,
            admins: 0,
            engines: 0,
            last: 0,
            turned_away: Seldom::new(QUIET),
            refused: Seldom::new(QUIET),
        }
    }

    /// The count of all connections with this role or its like.
    fn count(&mut self, role: Role) -> &mut usize {
        match role {
            Role::Node | Role::Coordinator => &mut self.members,
            Role::Admin => &mut self.admins,
            Role::Engine => &mut self.engines,
        }
    }

    /// Whether the engines of this identity's tenant have as many connections as one tenant may have.
    fn is_tenant_full(&self, engine: &Identity) -> bool {
        if engine.role != Role::Engine {
            return false;
        }
        let same = self.by_identity.iter().filter(|(other, _)| other.tenant == engine.tenant);
        let connections = same.map(|(_, connected)| connected.connections.len()).sum::<usize>();
        connections >= MAX_ENGINE_CONNECTIONS / 4
    }
}

impl Counted {
    fn is_open(&self) -> bool {
        match self {
            Self::Quic(quic) => quic.close_reason().is_none(),
            Self::Tcp(closed) => !*closed.borrow(),
        }
    }

    fn close(&self, reason: &str) {
        match self {
            Self::Quic(quic) => quic.close(CLOSED_FOR_NUMBER, reason.as_bytes()),
            Self::Tcp(closed) => _ = closed.send_replace(true),
        }
    }
}

impl Guests {
    /// No connections yet. `limits` gives the limits of each role. All nodes and coordinators together may have `most_members`
    /// connections.
    pub fn new(limits: fn(Role) -> GuestLimits, most_members: usize) -> Self {
        Self(Arc::new(Shared {
            limits,
            most_members,
            started: Instant::now(),
            known: Mutex::new(Known::new()),
        }))
    }

    /// Ends the handshake of a connection that came in, and lets a permitted client in. Logs connections that are turned away,
    /// at most one a second. `None` if the client must first prove that it receives at its address: then it connects again.
    ///
    /// # Errors
    /// [`TurnedAway`]: the connection is closed.
    ///
    /// # Cancel safety
    /// Dropped, the connection is closed.
    pub async fn receive(&self, incoming: Incoming) -> Result<Option<Guest>, TurnedAway> {
        let remote = incoming.remote();
        self.let_in(incoming).await.inspect_err(|turned_away| self.log(remote, turned_away))
    }

    pub(crate) fn log(&self, remote: SocketAddr, turned_away: &TurnedAway) {
        let now = self.0.started.elapsed();
        let Some(more) = crate::lock(&self.0.known).turned_away.says(now) else { return };
        let source = turned_away.source.as_deref().map(tracing::field::display);
        if turned_away.reason == "version" {
            // Not always a fault: a node's block threads dial to learn whether the other node has block threads. The dialling
            // side knows.
            tracing::info!(%remote, %turned_away, source, more, "a connection was turned away");
        } else {
            tracing::warn!(%remote, %turned_away, source, more, "a connection was turned away");
        }
    }

    async fn let_in(&self, incoming: Incoming) -> Result<Option<Guest>, TurnedAway> {
        let source = incoming.remote().ip().to_canonical();
        let (handshake, is_crowded) = self.begin_handshake(source)?;
        if is_crowded && !incoming.has_proved_its_address() {
            incoming.ask_to_come_back();
            return Ok(None);
        }
        let connection = match timeout(HANDSHAKE_DEADLINE, incoming.accept_stranger()).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(rejected)) => {
                return Err(TurnedAway { reason: rejected.reason, source: Some(rejected.source) });
            }
            Err(_) => return Err(TurnedAway { reason: "handshake", source: None }),
        };
        drop(handshake);
        let guest = self.welcome(connection)?;
        guest.connection.admit(guest.seat.limits.streams, is_member(guest.connection.peer().role));
        Ok(Some(guest))
    }

    /// Takes a place for a handshake with this address; also says whether many handshakes are under way, so that the address must
    /// be proved.
    pub(crate) fn begin_handshake(&self, source: IpAddr) -> Result<(Handshake, bool), TurnedAway> {
        let (mut known, source) = (crate::lock(&self.0.known), host_of(source));
        let of_source = known.handshakes_by_source.get(&source).copied().unwrap_or(0);
        if known.handshakes >= MAX_HANDSHAKES || of_source >= MAX_HANDSHAKES_OF_A_SOURCE {
            return Err(TurnedAway { reason: "handshakes", source: None });
        }
        known.handshakes += 1;
        known.handshakes_by_source.insert(source, of_source + 1);
        let is_crowded = known.handshakes > MANY_HANDSHAKES || of_source >= MANY_OF_A_SOURCE;
        Ok((Handshake { guests: self.clone(), source }, is_crowded))
    }

    /// Lets in the other side of a connection that this process made: it may send requests on the connection too.
    ///
    /// # Errors
    /// [`TurnedAway`]: the connection is closed.
    pub fn welcome(&self, connection: Connection) -> Result<Guest, TurnedAway> {
        let seat = self.seat_for(connection.peer(), Counted::Quic(connection.quic().clone()))?;
        Ok(Guest { connection, seat })
    }

    /// Counts a connection whose other side has proved this identity.
    ///
    /// # Errors
    /// [`TurnedAway`]: the connection is closed.
    pub(crate) fn seat_for(&self, identity: &Identity, connection: Counted) -> Result<Seat, TurnedAway> {
        let limits = (self.0.limits)(identity.role);
        let is_member = is_member(identity.role);
        let turn_away = |connection: Counted| {
            connection.close("too many connections");
            Err(TurnedAway { reason: "connections", source: None })
        };
        let mut known = crate::lock(&self.0.known);
        let most = match identity.role {
            Role::Node | Role::Coordinator => self.0.most_members,
            Role::Admin => MAX_ADMIN_CONNECTIONS,
            Role::Engine => MAX_ENGINE_CONNECTIONS,
        };
        if *known.count(identity.role) >= most || known.is_tenant_full(identity) {
            return turn_away(connection);
        }
        known.last += 1;
        let number = known.last;
        let connected = known.by_identity.entry(identity.clone()).or_insert_with(|| Connected {
            connections: BTreeMap::new(),
            waiting_bytes: Arc::new(Semaphore::new(limits.waiting_bytes)),
        });
        if connected.connections.len() >= limits.connections {
            let oldest = connected.connections.values().find(|connection| connection.is_open());
            match oldest {
                // The closed connection counts until its server has seen the close.
                Some(oldest) if is_member && connected.connections.len() < 2 * limits.connections => {
                    oldest.close("a newer connection took its place");
                }
                _ => return turn_away(connection),
            }
        }
        let waiting_bytes = Arc::clone(&connected.waiting_bytes);
        connected.connections.insert(number, connection);
        *known.count(identity.role) += 1;
        drop(known);
        Ok(Seat { guests: self.clone(), identity: identity.clone(), number, limits, waiting_bytes })
    }
}

impl Guest {
    /// The guest's connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Logs that a request of the guest is refused: at most one line a second for all guests together.
    pub fn log_refused(&self, refused: &str) {
        self.seat.log_refused(self.connection.quic().remote_address(), refused);
    }

    /// The guest's seat, which reads the guest's messages.
    pub fn seat(&self) -> &Seat {
        &self.seat
    }
}

impl Seat {
    /// As [`Guest::log_refused`], for a guest at this address.
    pub fn log_refused(&self, remote: SocketAddr, refused: &str) {
        let Shared { started, known, .. } = &*self.guests.0;
        if let Some(more) = crate::lock(known).refused.says(started.elapsed()) {
            tracing::warn!(peer = %self.identity, %remote, refused, more, "a request is refused");
        }
    }

    /// Reads a message; `None` if the stream ended before one began. If too many bytes of its sender are in flight, it waits
    /// until there are fewer.
    ///
    /// # Errors
    /// [`MessageError`]: the stream is of no use any more.
    ///
    /// # Cancel safety
    /// Dropped, it may have taken half a message off the stream: stop it.
    pub async fn read<M: Message>(
        &self,
        stream: &mut (impl AsyncRead + Unpin),
    ) -> Result<Option<Asked<M>>, MessageError> {
        let Some(bytes) = read_header(stream, self.limits.message_bytes).await? else { return Ok(None) };
        let permits = bytes.min(self.limits.waiting_bytes) as u32;
        // Never an error, since nobody closes the semaphore.
        let permits = Arc::clone(&self.waiting_bytes).acquire_many_owned(permits).await;
        let permits = permits.map_err(|_| MessageError::Cut)?;
        let message = read_body(stream, bytes).await?;
        Ok(Some(Asked { message, bytes: permits }))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut known = crate::lock(&self.guests.0.known);
        *known.count(self.identity.role) -= 1;
        if let Some(connected) = known.by_identity.get_mut(&self.identity) {
            connected.connections.remove(&self.number);
            if connected.connections.is_empty() {
                known.by_identity.remove(&self.identity);
            }
        }
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut known = crate::lock(&self.guests.0.known);
        known.handshakes -= 1;
        if let Some(count) = known.handshakes_by_source.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                known.handshakes_by_source.remove(&self.source);
            }
        }
    }
}

/// The host behind an address: one host has all addresses of an IPv6 network of 64 bits.
pub fn host_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() >> 64 << 64).into()),
        v4 => v4,
    }
}

/// Whether this role belongs to a member of the cluster, whose number is bounded.
fn is_member(role: Role) -> bool {
    matches!(role, Role::Node | Role::Coordinator)
}

/// Connections of all engines, however many they are; those of one tenant have a quarter at most.
const MAX_ENGINE_CONNECTIONS: usize = 2_048;

/// Connections of all admins, however many they are.
const MAX_ADMIN_CONNECTIONS: usize = 256;

/// Handshakes under way.
const MAX_HANDSHAKES: usize = 1_024;

/// Handshakes under way with one host.
const MAX_HANDSHAKES_OF_A_SOURCE: usize = MAX_HANDSHAKES / 8;

/// With more handshakes in progress, of all or of its host, a new client must first prove its address. Otherwise packets with a
/// false address could take all places of a host.
const MANY_HANDSHAKES: usize = 128;
const MANY_OF_A_SOURCE: usize = MAX_HANDSHAKES_OF_A_SOURCE / 4;

/// How long a handshake may take.
pub(crate) const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

const CLOSED_FOR_NUMBER: VarInt = VarInt::from_u32(2);

/// At most one connection that is turned away, and one request that is refused, is logged in this time.
const QUIET: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_gets_an_eighth_of_the_handshakes_whatever_its_addresses_are() {
        let limits = |_| GuestLimits { connections: 1, streams: 1, message_bytes: 1, waiting_bytes: 1 };
        let guests = Guests::new(limits, 1);
        let handshakes = |host: u128| {
            let addresses = (0..).map(|n| IpAddr::V6((host << 64 | n).into()));
            addresses.map_while(|address| guests.begin_handshake(address).ok()).collect::<Vec<_>>()
        };
        let begun = guests.begin_handshake(IpAddr::V6((9 << 64 | 1).into()));
        assert!(begun.is_ok_and(|(_, is_crowded)| !is_crowded));
        let (one, other) = (handshakes(1), handshakes(2));
        let must_prove = one.iter().filter(|(_, is_crowded)| *is_crowded).count();
        assert_eq!(
            must_prove,
            one.len() * 3 / 4,
            "places of a host that packets with its address cannot take"
        );
        assert_eq!([one.len(), other.len()], [MAX_HANDSHAKES / 8; 2]);
        drop(one);
        assert_eq!(handshakes(1).len(), MAX_HANDSHAKES / 8, "the places are free again");
        let mapped = "::ffff:10.0.0.1".parse::<IpAddr>().unwrap();
        assert_ne!(host_of(mapped), host_of("10.0.0.2".parse().unwrap()), "each IPv4 address is a host");
    }

    #[test]
    fn engines_leave_places_for_admins_and_for_engines_of_other_tenants() {
        let limits = |_| GuestLimits { connections: 16, streams: 1, message_bytes: 1, waiting_bytes: 1 };
        let guests = Guests::new(limits, 1);
        let enter = |identity: &Identity| guests.seat_for(identity, Counted::Tcp(watch::Sender::default()));
        let fill = |tenant: &str| {
            let names = (0..).map(|engine| Identity::engine(tenant, &format!("engine-{engine}")));
            let seats = names.map_while(|engine| {
                let seats: Vec<Seat> = (0..16).map_while(|_| enter(&engine).ok()).collect();
                (!seats.is_empty()).then_some(seats)
            });
            seats.flatten().collect::<Vec<Seat>>()
        };
        let (one, admin) = (fill("one"), Identity::new(Role::Admin, "me"));
        assert_eq!(one.len(), MAX_ENGINE_CONNECTIONS / 4);
        let others = ["two", "three", "four"].map(fill);
        assert!(others.iter().all(|seats| seats.len() == one.len()));
        assert!(fill("five").is_empty());
        assert!(enter(&admin).is_ok());
        drop(one);
        assert_eq!(fill("five").len(), MAX_ENGINE_CONNECTIONS / 4, "the places are free again");
    }
}
