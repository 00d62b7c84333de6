//! Blocks over TCP: fetches go over TLS connections of their own, one at a time on each.
//!
//! Only fetches go this way; all other requests use QUIC. A node that cannot be reached over TCP is asked over QUIC for a while, and
//! so is a node of whose blocks nothing comes: a path may lose large packets and carry those of a handshake.
//! A fetch that is given up closes its connection, since the rest of the answer is under way on it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use actix::Recipient;
use larder_core::exchange::MAX_IDLE;
use larder_core::{Arrival, FetchFailure};
use larder_net::quic::{Asked, ConnectError, GuestLimits, Guests, Seat};
use larder_net::tcp::{TcpConnection, TcpEndpoint, TcpGuest};
use larder_net::trace::{Sampler, Trace};
use larder_protocol::identity::Role;
use larder_protocol::peer::{Fetch, PeerRequest};
use prometheus::IntCounter;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::AskBlocks;
use super::connections::DIAL_DEADLINE;
use super::metrics::Counted;
use super::mover::{Common, Mover};
use super::receive::{Batch, From, Way};
use super::serve::{
    MAX_MEMBER_CONNECTIONS, SEND_DEADLINE, STALL_DEADLINE, limits_of, may_fetch, read_request, trace_of,
};
use crate::accept::NotAccepted;
use crate::watched::here;

/// The connections over TCP of one thread.
pub(super) struct OverTcp {
    endpoint: TcpEndpoint,
    mover: Mover,
    links: RefCell<BTreeMap<String, Rc<Link>>>,
    guests: Guests,
}

/// The way to another node.
struct Link {
    address: SocketAddr,
    /// Connections that no fetch uses, each with the time of its last use. The last is the latest.
    idle: RefCell<Vec<(TcpConnection, Duration)>>,
    /// Bounds the connections in use.
    places: Semaphore,
    /// The time until which the node is asked over QUIC.
    avoided_until: Cell<Duration>,
    /// Bytes that came from the node over TCP.
    came: Arc<AtomicU64>,
}

/// A connection over TCP as the way of an answer.
pub(super) struct TcpWay<'a> {
    pub(super) connection: &'a mut TcpConnection,
    /// Bytes that came from the node, and from all nodes.
    pub(super) came: (&'a AtomicU64, &'a IntCounter),
}

impl Way for TcpWay<'_> {
    async fn take<T>(&mut self, most: usize, take: impl FnOnce(&[u8]) -> T) -> Result<T, FetchFailure> {
        let came = self.connection.fill_buf().await.map_err(|_| FetchFailure::Broken)?;
        let bytes = came.len().min(most);
        if bytes == 0 {
            return Err(FetchFailure::Broken);
        }
        let taken = take(&came[..bytes]);
        self.connection.consume(bytes);
        self.came.0.fetch_add(bytes as u64, Ordering::Relaxed);
        self.came.1.inc_by(bytes as u64);
        Ok(taken)
    }
}

/// A dial under way, or a fetch. If it is given up before anything came of it, the node is asked over QUIC for a while: otherwise
/// fetches with little time would try again and again, and none would bring a block.
struct Trying<'a> {
    link: &'a Link,
    common: &'a Common,
    since: Duration,
    /// Bytes of blocks that had come from the node before.
    had_come: u64,
    is_over: bool,
}

impl Link {
    /// Has the node asked over QUIC until then.
    fn avoid(&self, until: Duration) {
        self.avoided_until.set(self.avoided_until.get().max(until));
    }
}

impl<'a> Trying<'a> {
    fn begin(link: &'a Link, common: &'a Common) -> Self {
        let had_come = link.came.load(Ordering::Relaxed);
        Self { link, common, since: common.now(), had_come, is_over: false }
    }
}

impl Drop for Trying<'_> {
    fn drop(&mut self) {
        if !self.is_over && self.link.came.load(Ordering::Relaxed) == self.had_come {
            let now = self.common.now();
            let lasted = now.saturating_sub(self.since);
            let address = self.link.address;
            tracing::info!(%address, ?lasted, "nothing came over TCP: the node is asked over QUIC for a while");
            self.link.avoid(now + (lasted * AVOIDED_FOR_EACH).min(AVOIDED));
        }
    }
}

impl OverTcp {
    /// The connections of the mover's thread; `None` if blocks come over QUIC alone.
    pub(super) fn new(mover: Mover) -> Option<Rc<Self>> {
        let endpoint = mover.common.tcp.as_ref()?.endpoint.clone();
        let guests = Guests::new(limits_over_tcp, MAX_MEMBER_CONNECTIONS);
        let links = RefCell::default();
        Some(Rc::new(Self { endpoint, mover, links, guests }))
    }

    /// Fetches a batch from the node of this name and address, and calls `came` for each chunk as it comes. Returns whether the
    /// node was reached over TCP. If it was not, `came` was not called.
    ///
    /// # Cancel safety
    /// If the future is dropped, its connection is closed, and nothing writes to the slots any more.
    pub(super) async fn fetch(
        &self,
        (name, address): (&str, SocketAddr),
        from: From,
        batch: &Batch,
        trace: &Trace,
        came: impl FnMut(usize, Arrival),
    ) -> bool {
        let link = self.link(name, address);
        let is_avoided = || self.mover.common.now() < link.avoided_until.get();
        if is_avoided() {
            return false;
        }
        // Never an error, since nobody closes the semaphore.
        let Ok(_place) = link.places.acquire().await else { return false };
        // The fetches before may have found the node unreachable.
        if is_avoided() {
            return false;
        }
        let mut idle = link.idle.borrow_mut().pop();
        loop {
            let (mut connection, is_new) = match idle.take() {
                Some((connection, _)) => (connection, false),
                None => match self.dial(name, &link).await {
                    Some(connection) => (connection, true),
                    None => return false,
                },
            };
            let mut trying = Trying::begin(&link, &self.mover.common);
            let asked = self.mover.ask_over_tcp(&mut connection, from, batch, (trace, &link.came)).await;
            if matches!(asked, Err(FetchFailure::Broken)) {
                trying.is_over = true;
                if is_new {
                    // As when the node turns this node away after the handshake.
                    tracing::info!(name, %address, "a new connection over TCP broke: the node is asked over QUIC");
                    link.avoid(self.mover.common.now() + AVOIDED);
                    return false;
                }
                // The node closed the connection, or has restarted: the other idle connections are of no use either.
                link.idle.borrow_mut().clear();
                continue;
            }
            let may_go_on = self.mover.receive(asked, from, batch, came).await;
            trying.is_over = true;
            if may_go_on {
                link.idle.borrow_mut().push((connection, self.mover.common.now()));
            }
            return true;
        }
    }

    fn link(&self, name: &str, address: SocketAddr) -> Rc<Link> {
        let mut links = self.links.borrow_mut();
        let link = links.get(name).filter(|link| link.address == address).cloned();
        link.unwrap_or_else(|| {
            let link = Rc::new(Link {
                address,
                idle: RefCell::default(),
                places: Semaphore::new(MOST_CONNECTIONS),
                avoided_until: Cell::default(),
                came: self.mover.common.came_over_tcp(name),
            });
            links.insert(name.to_owned(), Rc::clone(&link));
            link
        })
    }

    async fn dial(&self, name: &str, link: &Link) -> Option<TcpConnection> {
        let address = link.address;
        let common = &self.mover.common;
        let mut dialling = Trying::begin(link, common);
        match timeout(DIAL_DEADLINE, self.endpoint.connect(address, Role::Node, name)).await {
            Ok(Ok(connection)) => {
                dialling.is_over = true;
                return Some(connection);
            }
            Ok(Err(ConnectError::Tcp(error))) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                tracing::info!(name, %address, "a node takes no blocks over TCP: it is asked over QUIC");
            }
            Ok(Err(error)) => {
                let error = larder_net::in_one_line(&error);
                tracing::warn!(name, %address, error, "no connection over TCP to a node: it is asked over QUIC");
            }
            Err(_) => {
                tracing::warn!(name, %address, "a node does not answer over TCP: it is asked over QUIC");
            }
        }
        link.avoid(common.now() + AVOIDED);
        None
    }

    /// Closes connections that were not used for long, again and again.
    pub(super) async fn close_idle(self: Rc<Self>) {
        loop {
            sleep(MAX_IDLE / 4).await;
            let now = self.mover.common.now();
            self.links.borrow_mut().retain(|_, link| {
                link.idle.borrow_mut().retain(|(_, used_at)| now.saturating_sub(*used_at) < MAX_IDLE);
                let is_used = Rc::strong_count(link) > 1 || !link.idle.borrow().is_empty();
                is_used || now < link.avoided_until.get()
            });
        }
    }

    /// Serves a connection that came in, until the other side closes it or sends no request for long.
    pub(super) async fn serve(
        &self,
        (stream, remote): (TcpStream, SocketAddr),
        blocks: &[Recipient<AskBlocks>],
        sampler: Sampler,
    ) {
        let metrics = &self.mover.common.metrics;
        let guest = match self.endpoint.receive(&self.guests, stream, remote).await {
            Ok(guest) => guest,
            Err(turned_away) => return metrics.rejected(turned_away.reason),
        };
        let _counted = Counted::new(&metrics.connections, 1);
        let TcpGuest { mut connection, seat, mut closed } = guest;
        let answers =
            async { while self.answer(&mut connection, (&seat, remote), blocks, sampler).await.is_some() {} };
        tokio::select! {
            () = answers => {}
            () = closed.wait() => {}
        }
    }

    /// Answers the next fetch; `None` if the connection is of no use any more.
    async fn answer(
        &self,
        connection: &mut TcpConnection,
        (seat, remote): (&Seat, SocketAddr),
        blocks: &[Recipient<AskBlocks>],
        sampler: Sampler,
    ) -> Option<()> {
        let metrics = &self.mover.common.metrics;
        // The asker closes an idle connection first.
        let is_over = timeout(2 * MAX_IDLE, connection.fill_buf()).await.ok()?.ok()?.is_empty();
        if is_over {
            return None;
        }
        let (Asked { message: request, bytes }, traced) = match read_request(seat, connection).await {
            Ok(request) => request?,
            Err(reason) => {
                metrics.rejected(reason);
                return None;
            }
        };
        metrics.requested(request.name());
        here("serve");
        let trace = trace_of(sampler, &request, traced);
        let refused = match request {
            PeerRequest::Fetch(fetch) => match may_fetch(connection.peer(), &fetch) {
                Ok(()) => {
                    drop(bytes);
                    return self.send(connection, blocks, fetch, trace).await;
                }
                Err(refused) => refused,
            },
            _ => "only fetches come over TCP",
        };
        seat.log_refused(remote, refused);
        metrics.rejected("not_allowed");
        None
    }

    /// Answers a fetch. Each block stays leased until it is encrypted; `None` if the asker does not read, or went away.
    async fn send(
        &self,
        connection: &mut TcpConnection,
        blocks: &[Recipient<AskBlocks>],
        fetch: Fetch,
        trace: Trace,
    ) -> Option<()> {
        let (mover, common) = (&self.mover, &self.mover.common);
        let (peer, version) = (connection.peer().name.clone(), connection.version());
        let granted = tokio::select! {
            granted = mover.grant(blocks, &peer, fetch, &trace) => Some(granted),
            // The asker sends nothing before it has the answer: it went away.
            _ = connection.fill_buf() => None,
        };
        let Some(mut granted) = granted else {
            trace.set("larder.outcome", "failed");
            return None;
        };
        let sent = async {
            let head = async {
                common.rooms.write_before(connection, version, common.now()).await?;
                larder_net::quic::write_message(connection, &granted.said).await
            };
            timeout(STALL_DEADLINE, head).await.ok()?.ok()?;
            for mut block in std::mem::take(&mut granted.blocks) {
                while let Some(piece) = mover.next_piece(&mut block).await {
                    mover.unless_stalled(connection.write_all(&piece)).await?.ok()?;
                }
            }
            mover.unless_stalled(connection.flush()).await?.ok()?;
            granted.are_sent();
            Some(())
        };
        let sent = timeout(SEND_DEADLINE, sent).await.ok().flatten();
        trace.set("larder.outcome", if sent.is_some() { "done" } else { "failed" });
        sent
    }
}

/// Accepts connections, and hands each to `serve`. Never ends.
pub(super) async fn accept(listener: Rc<TcpListener>, serve: impl Fn(TcpStream, SocketAddr)) {
    let mut not_accepted = NotAccepted::new();
    loop {
        match listener.accept().await {
            Ok((stream, remote)) => {
                not_accepted.accepted();
                serve(stream, remote);
            }
            Err(error) => sleep(not_accepted.failed("blocks over TCP", error)).await,
        }
    }
}

/// The limits of processes that connect over TCP. Others than nodes get no answer there.
fn limits_over_tcp(role: Role) -> GuestLimits {
    let connections = if role == Role::Node { MOST_CONNECTIONS_OF_A_NODE } else { 1 };
    GuestLimits { connections, ..limits_of(role) }
}

/// Connections of one thread to one node: so many fetches go there at a time, and further ones wait.
const MOST_CONNECTIONS: usize = 8;

/// Connections that a thread serves for one node: those of as many threads as a node may have, if all meet here.
const MOST_CONNECTIONS_OF_A_NODE: usize = MOST_CONNECTIONS * 9;

/// How long a node that cannot be reached over TCP is asked over QUIC.
const AVOIDED: Duration = Duration::from_secs(60);

/// After a dial or a fetch that was given up with nothing, the node is asked over QUIC for this many times as long as that lasted.
const AVOIDED_FOR_EACH: u32 = 60;
