//! Serving: answers requests of other processes to this node.
//!
//! An asker that stops reading loses its answer: blocks after [`STALL_DEADLINE`], others after [`SEND_DEADLINE`].

mod admin;

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::Recipient;
use futures_util::future::LocalBoxFuture;
use larder_core::Event;
use larder_core::exchange::Dialler;
use larder_core::placement::Worth;
use larder_core::reports::Reporter;
use larder_net::quic::{
    Asked, Connection, Endpoint, Guest, GuestLimits, Guests, Incoming, MAX_STREAMS, MessageError, Seat,
    write_message,
};
use larder_net::trace::{Sampler, Trace};
use larder_protocol::TraceContext;
use larder_protocol::drain::{DrainCommand, DrainReport, Take, Taken};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::limits::{
    MAX_ANNOUNCE_CHANGES, MAX_ANNOUNCES, MAX_CHAIN_CHUNKS, MAX_FETCH_CHUNKS, MAX_FIND_ROWS,
    MAX_PEER_MESSAGE_BYTES,
};
use larder_protocol::peer::{
    Announce, Chunks, Fetch, FollowPools, OfferChunks, PeerRequest, PeerResponse, RetryAfter, Show,
};
use larder_protocol::pin::PinCommand;
use larder_protocol::purge::{PurgeCommand, PurgeReport};
use larder_protocol::reload::Reloaded;
use larder_protocol::table::Holder;
use quinn::{RecvStream, SendStream};
use tokio::io::AsyncRead;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::connections::{Carried, InUse};
use super::metrics::{Counted, ExchangeMetrics};
use super::peers::{Peers, SMALL_FIRST, rides};
use super::send::order::SendOrder;
use super::{AskBlocks, AskFollow, PinForAdmin, ServeAnnounce, ServeFind, ServeRepair, TakeChunks, TakeIn};
use crate::limits::MAX_ACTORS;
use crate::tell::Tell;
use crate::watched::here;
use larder_net::audit::Audit;

/// Carries out an admin's command about the node's drain; the error is for people.
pub(super) type DrainByAdmin = Box<dyn Fn(&str, DrainCommand) -> Result<DrainReport, String> + Send>;

/// Has the node read its configuration again, for the admin of this name; the error is for people.
pub(super) type ReloadByAdmin =
    Box<dyn Fn(String) -> LocalBoxFuture<'static, Result<Reloaded, String>> + Send>;

/// Carries out an admin's command about a purge; the error is for people.
pub(super) type PurgeByAdmin = Box<dyn Fn(&str, PurgeCommand) -> Result<PurgeReport, String> + Send>;

/// The answer of the node's HTTP server, by path and body; the error is for people.
pub type ShowNode = Box<dyn Fn(Show) -> LocalBoxFuture<'static, Result<Vec<u8>, String>> + Send>;

/// The receivers of requests.
pub struct Services {
    /// Whether the node shares chunks. Otherwise it serves only admins and coordinators.
    pub shares: bool,
    /// The actors that hold blocks, by device.
    pub blocks: Vec<Recipient<AskBlocks>>,
    /// The same actors, by device.
    pub follow: Vec<Recipient<AskFollow>>,
    /// The same actors, by device.
    pub tell: Vec<Recipient<Tell>>,
    /// The same actors, by device.
    pub take_in: Vec<Recipient<TakeIn>>,
    /// The same actors, by device.
    pub pin: Vec<Recipient<PinForAdmin>>,
    /// The same actors, by device.
    pub take: Vec<Recipient<TakeChunks>>,
    /// The node's drain.
    pub drain: DrainByAdmin,
    /// The node's configuration.
    pub reload: ReloadByAdmin,
    /// The node's purges.
    pub purge: PurgeByAdmin,
    /// The node's HTTP server.
    pub show: ShowNode,
    /// The audit log.
    pub audit: Audit,
    /// The directory.
    pub find: Recipient<ServeFind>,
    /// The directory.
    pub announce: Recipient<ServeAnnounce>,
    /// The directory.
    pub repair: Recipient<ServeRepair>,
    /// Decides which requests are traced: those of a trace that the asker records.
    pub sampler: Sampler,
}

pub(super) struct Server {
    pub(super) peers: Peers,
    pub(super) services: Services,
    guests: Guests,
}

/// Serves until the endpoint is closed.
pub(super) async fn accept(server: Rc<Server>, endpoint: Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        here("accept");
        let server = Rc::clone(&server);
        actix_rt::spawn(async move {
            let peers = server.peers.clone();
            peers.watched("serve", None, server.serve_connection(incoming)).await;
        });
    }
}

/// Lets in the other side of a connection; `None` if it was turned away. It is counted as long as the second value lives.
pub(super) async fn let_in(
    guests: &Guests,
    incoming: Incoming,
    metrics: &ExchangeMetrics,
) -> Option<(Rc<Guest>, Counted)> {
    match guests.receive(incoming).await {
        Ok(guest) => guest.map(|guest| (Rc::new(guest), Counted::new(&metrics.connections, 1))),
        Err(turned_away) => {
            metrics.rejected(turned_away.reason);
            None
        }
    }
}

impl Server {
    pub(super) fn new(peers: Peers, services: Services) -> Rc<Self> {
        Rc::new(Self { peers, services, guests: Guests::new(limits_of, MAX_MEMBER_CONNECTIONS) })
    }

    async fn serve_connection(self: Rc<Self>, incoming: Incoming) {
        let Some((guest, _counted)) = let_in(&self.guests, incoming, self.peers.metrics()).await else {
            return;
        };
        let carried = (guest.connection().peer().role == Role::Node).then(|| {
            guest.connection().take_blocks();
            self.peers.carry(guest.connection(), Dialler::There)
        });
        self.serve_streams(&guest, carried.as_ref()).await;
    }

    /// Serves the peer on a connection that was dialed here.
    pub(super) async fn serve_dialled(self: Rc<Self>, connection: Connection, carried: Carried) {
        match self.guests.welcome(connection) {
            Ok(guest) => self.serve_streams(&Rc::new(guest), Some(&carried)).await,
            Err(turned_away) => self.peers.metrics().rejected(turned_away.reason),
        }
    }

    async fn serve_streams(self: Rc<Self>, guest: &Rc<Guest>, carried: Option<&Carried>) {
        let quic = guest.connection().quic();
        let streams = Arc::new(Semaphore::new(MAX_STREAMS as usize));
        let order = Rc::new(SendOrder::default());
        while let Ok((send, receive)) = quic.accept_bi().await {
            // If the connection was closed here as idle, its asker asks again: the request must not be served twice.
            if quic.close_reason().is_some() {
                break;
            }
            let in_use = carried.map(|carried| carried.serves(guest.connection()));
            let Ok(place) = Arc::clone(&streams).acquire_owned().await else { break };
            let (server, guest, order) = (Rc::clone(&self), Rc::clone(guest), Rc::clone(&order));
            actix_rt::spawn(async move {
                let peers = server.peers.clone();
                let served = server.serve_stream((&guest, &order), send, receive, in_use.as_ref());
                peers.watched("serve", None, served).await;
                drop((place, in_use));
            });
        }
    }

    /// Answers one request. The answer is under way until its last byte was acknowledged.
    async fn serve_stream(
        &self,
        (guest, order): (&Guest, &SendOrder),
        mut send: SendStream,
        mut receive: RecvStream,
        in_use: Option<&InUse>,
    ) {
        let (metrics, connection) = (self.peers.metrics(), guest.connection());
        let (Asked { message: request, bytes }, traced) = match read_request(guest.seat(), &mut receive).await
        {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(reason) => return metrics.rejected(reason),
        };
        metrics.requested(request.name());
        in_use.filter(|_| rides(&request)).into_iter().for_each(InUse::rides);
        here("serve");
        let response = match self.check(connection.peer(), &request) {
            Err(refused) => {
                metrics.rejected("not_allowed");
                guest.log_refused(refused);
                PeerResponse::Refused(refused.to_owned())
            }
            Ok(()) => {
                let trace = trace_of(self.services.sampler, &request, traced);
                match request {
                    PeerRequest::Fetch(fetch) => {
                        drop(bytes);
                        let blocks = &self.services.blocks;
                        return self
                            .peers
                            .mover()
                            .send_blocks(blocks, (connection, order), send, fetch, trace)
                            .await;
                    }
                    PeerRequest::Follow(chunks) => {
                        drop(bytes);
                        let follow = FollowPools { chunks, pools: Vec::new() };
                        return self.tell_follower((connection, order), send, follow).await;
                    }
                    PeerRequest::FollowPools(follow) => {
                        drop(bytes);
                        return self.tell_follower((connection, order), send, *follow).await;
                    }
                    request @ PeerRequest::Show(_) => tokio::select! {
                        response = self.answer(connection.peer(), request) => response,
                        // Nobody waits for the answer any more, and the seat is for others.
                        _ = send.stopped() => return,
                    },
                    request => self.answer(connection.peer(), request).await,
                }
            }
        };
        let answered = async {
            if connection.peer().role == Role::Node && response != PeerResponse::Done {
                let (rooms, now) = (self.peers.rooms(), self.peers.now());
                rooms.write_before(&mut send, connection.version(), now).await.ok()?;
            }
            send.set_priority(SMALL_FIRST).ok()?;
            write_message(&mut send, &response).await.ok()?;
            send.finish().ok()?;
            drop(bytes);
            send.stopped().await.ok()
        };
        // Errors: the asker went away, or does not read.
        let _ = timeout(SEND_DEADLINE, answered).await;
    }

    /// Checks whether a process may make this request.
    fn check(&self, peer: &Identity, request: &PeerRequest) -> Result<(), &'static str> {
        let is_node = peer.role == Role::Node;
        match request {
            PeerRequest::Ping => Ok(()),
            PeerRequest::Purge(command) if is_too_long(command) => Err("too many chunks in one purge"),
            PeerRequest::Pin(command) if is_long_pin(command) => Err("too many chunks in one pin"),
            PeerRequest::Show(_) if matches!(peer.role, Role::Coordinator | Role::Admin) => Ok(()),
            PeerRequest::SetPolicy(_)
            | PeerRequest::Drain(_)
            | PeerRequest::Reload
            | PeerRequest::Purge(_)
            | PeerRequest::Pin(_)
                if peer.role == Role::Admin =>
            {
                Ok(())
            }
            _ if !self.services.shares => Err("this node shares no chunks: [cluster] share is false"),
            PeerRequest::Take(take) if take.chunks.len() > MAX_FETCH_CHUNKS => {
                Err("too many chunks in one take")
            }
            PeerRequest::Find(find) if find.rows.len() > MAX_FIND_ROWS => {
                Err("too many rows in one question")
            }
            PeerRequest::Find(_) if peer.role != Role::Engine => Ok(()),
            PeerRequest::Repair(repair) if repair.rows.len() > MAX_FIND_ROWS => {
                Err("too many rows in one repair")
            }
            PeerRequest::Announce(announces) if !is_bounded(announces) => {
                Err("too many changes in one announcement")
            }
            PeerRequest::Announce(announces) if is_node => {
                announces.iter().try_for_each(|announce| self.check_announcer(peer, announce))
            }
            PeerRequest::Fetch(fetch) => may_fetch(peer, fetch),
            PeerRequest::Follow(follow) if follow.chunks.hashes.len() > MAX_FETCH_CHUNKS => {
                Err("too many chunks in one follow")
            }
            PeerRequest::FollowPools(follow) if follow.chunks.chunks.hashes.len() > MAX_FETCH_CHUNKS => {
                Err("too many chunks in one follow")
            }
            PeerRequest::FollowPools(follow) if !follow.names_pools_of_each() => {
                Err("a follow must name pools of each chunk")
            }
            PeerRequest::Damaged(chunks) if chunks.hashes.len() > MAX_FETCH_CHUNKS => {
                Err("too many chunks in one report")
            }
            PeerRequest::Offer(offer) if offer.chunks.len() > MAX_FETCH_CHUNKS => {
                Err("too many chunks in one offer")
            }
            PeerRequest::Moved(chunks) if chunks.hashes.len() > MAX_FETCH_CHUNKS => {
                Err("too many chunks in one move")
            }
            // Nobody finds the chunks of a node that is no member.
            PeerRequest::Moved(_) if is_node && self.peers.number_of(&peer.name).is_none() => {
                Err("only members of the cluster may take chunks over")
            }
            PeerRequest::Follow(_)
            | PeerRequest::FollowPools(_)
            | PeerRequest::Damaged(_)
            | PeerRequest::Moved(_)
            | PeerRequest::Offer(_)
            | PeerRequest::Repair(_)
            | PeerRequest::Take(_)
                if is_node =>
            {
                Ok(())
            }
            _ => Err(NOT_ALLOWED),
        }
    }

    /// Checks that a node announces only its own chunks.
    fn check_announcer(&self, peer: &Identity, announce: &Announce) -> Result<(), &'static str> {
        let table = self.peers.table();
        match table.member(announce.holder.node) {
            Some(member) if member.name != peer.name => Err("a node may announce only its own chunks"),
            // A liar must not take the places of other holders.
            _ if usize::from(announce.holder.device) >= MAX_ACTORS => Err("a node has fewer devices"),
            // The directory handles a node that is not a member yet.
            _ => Ok(()),
        }
    }

    async fn answer(&self, peer: &Identity, request: PeerRequest) -> PeerResponse {
        let busy = busy();
        match request {
            PeerRequest::Ping => PeerResponse::Done,
            PeerRequest::Find(find) => {
                let rows = self.services.find.send(ServeFind(find)).await;
                rows.map_or(busy, PeerResponse::Rows)
            }
            PeerRequest::Announce(announces) => {
                let announced = self.services.announce.send(ServeAnnounce(announces)).await;
                announced.map_or(busy, PeerResponse::Announced)
            }
            PeerRequest::Repair(repair) => {
                self.services.repair.send(ServeRepair(repair)).await.map_or(busy, |()| PeerResponse::Done)
            }
            PeerRequest::Moved(Chunks { device, fingerprint, hashes }) => {
                self.tell(device, Event::Moved { fingerprint, hashes }).await
            }
            PeerRequest::Offer(offer) => {
                let Some(node) = self.peers.number_of(&peer.name) else { return busy };
                let cheapest = self.peers.rooms().cheapest_actor().map_or(0, |(device, _)| device);
                let Some(actor) = self.services.take_in.get(usize::from(cheapest)) else {
                    return PeerResponse::Refused("no actor of this node takes chunks".to_owned());
                };
                let OfferChunks { device, fingerprint, worth, chunks } = offer;
                let holder = Holder { node, device };
                let wanted = actor.send(TakeIn { holder, fingerprint, chunks, worth: Worth(worth) }).await;
                wanted.map_or(busy, PeerResponse::Wanted)
            }
            PeerRequest::Damaged(Chunks { device, fingerprint, hashes }) => {
                let by = Reporter::Peer(peer.name.clone());
                self.tell(device, Event::Damaged { by, fingerprint, hashes }).await
            }
            PeerRequest::Show(show) => match (self.services.show)(show).await {
                Ok(shown) => PeerResponse::Shown(shown),
                Err(refused) => PeerResponse::Refused(refused),
            },
            PeerRequest::Take(take) => self.take(peer, *take).await.map_or(busy, PeerResponse::Taken),
            PeerRequest::SetPolicy(_)
            | PeerRequest::Drain(_)
            | PeerRequest::Reload
            | PeerRequest::Purge(_)
            | PeerRequest::Pin(_) => self.answer_admin(peer, request).await,
            PeerRequest::Fetch(_) | PeerRequest::Follow(_) | PeerRequest::FollowPools(_) => {
                PeerResponse::Refused("a fetch or a follow needs its own stream".to_owned())
            }
            PeerRequest::Trace(_) => PeerResponse::Refused("a trace must come before its request".to_owned()),
        }
    }

    /// Tells the actor of a device an event.
    async fn tell(&self, device: u16, event: Event) -> PeerResponse {
        match self.services.tell.get(usize::from(device)) {
            Some(actor) => actor.send(Tell(event)).await.map_or_else(|_| busy(), |()| PeerResponse::Done),
            None => PeerResponse::Refused("there is no such device".to_owned()),
        }
    }

    /// Has an actor keep chunks of a node that drains; `None` if the actor is stopping.
    async fn take(&self, peer: &Identity, take: Take) -> Option<Taken> {
        let Take { from: device, to, namespace, chunks } = take;
        let all_refused = Taken { is_kept: vec![false; chunks.len()], ..Taken::default() };
        let Some(node) = self.peers.number_of(&peer.name) else { return Some(all_refused) };
        let Some(actor) = self.services.take.get(usize::from(to)) else { return Some(all_refused) };
        let from = Holder { node, device };
        actor.send(TakeChunks { from, namespace, chunks }).await.ok().flatten()
    }
}

/// The response of an actor that is stopping, or has too much to do.
fn busy() -> PeerResponse {
    PeerResponse::Busy(RetryAfter { retry_after_ms: BUSY_RETRY_MS })
}

/// Whether a purge names too many chunks.
fn is_too_long(command: &PurgeCommand) -> bool {
    matches!(command, PurgeCommand::Start(scope, _) if scope.chunks().is_some_and(|chunks| chunks.len() > MAX_CHAIN_CHUNKS))
}

fn is_long_pin(command: &PinCommand) -> bool {
    matches!(command, PinCommand::Start(start) if start.hashes.len() > MAX_CHAIN_CHUNKS)
}

/// Whether a message of announcements is within its limits.
fn is_bounded(announces: &[Announce]) -> bool {
    let changes: usize = announces.iter().map(|announce| announce.changes.len()).sum();
    announces.len() <= MAX_ANNOUNCES && changes <= MAX_ANNOUNCE_CHANGES
}

/// The request of a stream, and its trace; `None` if the asker went away or takes too long.
///
/// # Errors
/// Fails with the reason, as metrics name it, if there is no valid request.
pub(super) async fn read_request(
    seat: &Seat,
    receive: &mut (impl AsyncRead + Unpin),
) -> Result<Option<(Asked<PeerRequest>, Option<TraceContext>)>, &'static str> {
    let read = async {
        match seat.read(receive).await? {
            Some(Asked { message: PeerRequest::Trace(context), bytes }) => {
                drop(bytes);
                let request = seat.read(receive).await?;
                Ok(request.map(|request| (request, Some(context))))
            }
            request => Ok(request.map(|request| (request, None))),
        }
    };
    match timeout(REQUEST_DEADLINE, read).await {
        Ok(Ok(request)) => Ok(request),
        Ok(Err(MessageError::TooLong { .. })) => Err("too_long"),
        Ok(Err(MessageError::Malformed(_) | MessageError::NotAFrame | MessageError::Cut)) => Err("malformed"),
        Ok(Err(_)) | Err(_) => Ok(None),
    }
}

/// The span of serving a traced request.
pub(super) fn trace_of(sampler: Sampler, request: &PeerRequest, asked: Option<TraceContext>) -> Trace {
    let Some(context) = asked else { return Trace::default() };
    match request {
        PeerRequest::Fetch(Fetch { chunks, .. }) => {
            let trace = sampler.request("serve_fetch", Some(context));
            trace.set("larder.namespace", tracing::field::display(&chunks.fingerprint));
            trace.count("larder.chunks", chunks.hashes.len() as u64);
            trace
        }
        PeerRequest::Find(find) => {
            let trace = sampler.request("serve_find", Some(context));
            trace.count("larder.chunks", find.rows.len() as u64);
            trace
        }
        _ => Trace::default(),
    }
}

/// Checks whether a process may make this fetch.
pub(super) fn may_fetch(peer: &Identity, fetch: &Fetch) -> Result<(), &'static str> {
    match peer.role {
        _ if fetch.chunks.hashes.len() > MAX_FETCH_CHUNKS => Err("too many chunks in one fetch"),
        Role::Node => Ok(()),
        _ => Err(NOT_ALLOWED),
    }
}

/// The limits of processes that connect, by role. An engine only asks for a sign of life.
pub(super) fn limits_of(role: Role) -> GuestLimits {
    let [connections, streams, message_bytes, waiting_bytes] = match role {
        Role::Node => [16, MAX_STREAMS as usize, MAX_PEER_MESSAGE_BYTES, 8 * MAX_PEER_MESSAGE_BYTES],
        // All coordinators may have one certificate.
        Role::Coordinator => [16, MAX_STREAMS as usize, MAX_PEER_MESSAGE_BYTES, 8 * MAX_PEER_MESSAGE_BYTES],
        // Admins run commands in a row, and a closed connection may count until it is idle for long.
        Role::Admin => [64, 16, MAX_PEER_MESSAGE_BYTES / 2, MAX_PEER_MESSAGE_BYTES],
        Role::Engine => [16, 4, SMALL_MESSAGE_BYTES, 4 * SMALL_MESSAGE_BYTES],
    };
    GuestLimits { connections, streams: streams as u32, message_bytes, waiting_bytes }
}

/// Connections of nodes and coordinators to one thread of this node.
pub(super) const MAX_MEMBER_CONNECTIONS: usize = 8_192;

const NOT_ALLOWED: &str = "this role may not send this request";

/// Bytes of a message that names no chunks.
const SMALL_MESSAGE_BYTES: usize = 256;

/// How long a request may take to come once its stream is open.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// How long blocks may take to be read: far more than any fetch waits.
pub(super) const SEND_DEADLINE: Duration = Duration::from_secs(30);

/// A reader that takes nothing for this time, while there is something to read, gets nothing more.
pub(super) const STALL_DEADLINE: Duration = Duration::from_secs(2);

/// The pause for a peer that was told that there is too much to do.
pub(super) const BUSY_RETRY_MS: u64 = 5;
