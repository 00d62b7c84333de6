//! The exchange: blocks that travel between nodes.
//!
//! A node that wants blocks opens a stream to a holder and asks. The holder's actor leases the blocks, and the holder sends them
//! from the arena without a copy. The lease ends when the last byte is acknowledged. Incoming bytes are written straight into
//! the slots that the asking actor reserved. The actor hears of them only when length, key and checksum are right.
//!
//! Fetches may go over TCP instead (`tcp.rs`), which needs less CPU time on networks with small packets.
//!
//! Each request has a stream of its own. Small requests have priority over blocks, so that none queues behind a block, and a
//! broken answer breaks nothing else.
//!
//! [`larder_core::exchange`] decides how much each peer is asked for and sent. This module tells it the facts, and keeps
//! connections, streams and timers.

mod awake;
mod block_threads;
mod connections;
mod fetch;
mod follow;
mod handoff;
mod home;
pub(crate) mod metrics;
mod mover;
mod peers;
mod place;
mod receive;
mod rooms;
mod send;
mod serve;
mod tcp;

use std::cell::Cell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
pub use larder_core::exchange::ExchangeLimits;
use larder_core::placement::Worth;
use larder_core::{AdminPin, Arrival};
use larder_net::quic::{Connection, Endpoint};
use larder_net::trace::Trace;
use larder_protocol::drain::{TakeChunk, TakeNamespace, Taken};
use larder_protocol::peer::{Class, PeerRequest, PeerResponse};
use larder_protocol::session::Pinned;
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};
use tokio::sync::{mpsc, oneshot, watch};

pub use self::block_threads::{BlockThreads, StartError, TakenThreads};
pub use self::connections::ConnectedPeers;
use self::fetch::Report;
pub use self::handoff::{AskFollow, FollowOrder, PeerNews, PeerStep};
pub use self::home::{NewTable, ServeAnnounce, ServeFind, ServeRepair};
pub use self::metrics::ExchangeMetrics;
use self::metrics::Stage;
pub use self::mover::Common;
use self::peers::Peers;
pub use self::peers::SilentPeers;
pub use self::rooms::Rooms;
pub use self::serve::{Services, ShowNode};
use crate::arena::{Destination, ExtentMemory};
use crate::clock::Clock;
use crate::watched::{Watch, here};

/// The asking half: an actor on the peer thread, which is an arbiter with a current-thread runtime.
pub struct PeerActor {
    peers: Peers,
    endpoint: Endpoint,
    watch: Watch,
    orders: Option<mpsc::Receiver<Order>>,
    /// Connections of block threads.
    opened: Option<mpsc::UnboundedReceiver<Connection>>,
}

/// Hands orders to the peer thread from any other thread. Cloning shares.
#[derive(Debug, Clone)]
pub struct ExchangeHandle {
    orders: mpsc::Sender<Order>,
    clock: Clock,
}

#[derive(Debug)]
enum Order {
    /// The order, with the time at which it was handed over.
    Fetch(FetchOrder, oneshot::Sender<Vec<Arrival>>, Duration),
    Follow(FollowOrder),
}

/// Starts the serving half with these services.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Serve(pub Services);

impl PeerActor {
    /// The actor of the exchange. `endpoint` must live on the peer thread's runtime.
    pub fn new(
        endpoint: Endpoint,
        limits: ExchangeLimits,
        common: Common,
        known: (SilentPeers, ConnectedPeers),
        block_threads: TakenThreads,
        watch: Watch,
        orders: ExchangeOrders,
    ) -> Self {
        let TakenThreads { handles, opened } = block_threads;
        let peers = Peers::new(endpoint.clone(), limits, common, known, handles, watch.clone());
        Self { peers, endpoint, watch, orders: Some(orders.0), opened: Some(opened) }
    }
}

/// The receiving end of the queue of orders, for the peer thread.
#[derive(Debug)]
pub struct ExchangeOrders(mpsc::Receiver<Order>);

impl ExchangeHandle {
    /// A handle, and the receiver of its orders. `clock` is the clock of the [`PeerActor`].
    pub fn new(clock: Clock) -> (Self, ExchangeOrders) {
        let (orders, receiver) = mpsc::channel(QUEUE_ORDERS);
        (Self { orders, clock }, ExchangeOrders(receiver))
    }

    /// Hands an order to the peer thread; `None` if too many orders wait. The channel brings the result once, whatever happens.
    /// An error of the channel means that the peer thread stopped, and nothing writes to the slots any more.
    #[must_use]
    pub fn fetch(&self, order: FetchOrder) -> Option<oneshot::Receiver<Vec<Arrival>>> {
        let place = self.orders.try_reserve().ok()?;
        let (done, came) = oneshot::channel();
        place.send(Order::Fetch(order, done, self.clock.elapsed()));
        Some(came)
    }

    /// Hands a follow to the peer thread; returns `false` if too many orders wait. The result of each chunk comes on the order's
    /// channel. When this channel ends, nothing writes to the slots any more.
    #[must_use]
    pub fn follow(&self, order: FollowOrder) -> bool {
        self.orders.try_send(Order::Follow(order)).is_ok()
    }
}

impl PeerActor {
    /// Accepts connections over TCP. Block threads serve them in turns, if there are any, and this thread otherwise.
    fn serve_tcp(&self, services: &Services) {
        let peers = self.peers.clone();
        let (Some(over_tcp), Some(tcp)) = (peers.over_tcp().cloned(), &peers.mover().common.tcp) else {
            return;
        };
        let listener = match tcp.port.listen() {
            Ok(listener) => Rc::new(listener),
            Err(error) => return tracing::error!(%error, "no blocks go over TCP: the node cannot listen"),
        };
        let (blocks, sampler): (Rc<[_]>, _) = (services.blocks.as_slice().into(), services.sampler);
        let closing = Rc::clone(&over_tcp);
        actix_rt::spawn(self.watch.clone().keep("blocks", move || Rc::clone(&closing).close_idle()));
        let turn = Rc::new(Cell::new(0));
        let serve = move |stream, remote| {
            let threads = peers.block_threads();
            if let Some(thread) = threads.get(turn.get() % threads.len().max(1)) {
                turn.set(turn.get().wrapping_add(1));
                return thread.serve_tcp(stream, remote);
            }
            let (over_tcp, blocks, peers) = (Rc::clone(&over_tcp), Rc::clone(&blocks), peers.clone());
            actix_rt::spawn(async move {
                peers.watched("serve", None, over_tcp.serve((stream, remote), &blocks, sampler)).await;
            });
        };
        let accept = move || tcp::accept(Rc::clone(&listener), serve.clone());
        actix_rt::spawn(self.watch.clone().keep("accept", accept));
    }
}

impl Actor for PeerActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MESSAGES);
        ctx.run_interval(METRICS_TICK, |actor, _| actor.peers.guarded(Peers::show));
        let Some(orders) = self.orders.take() else { return };
        let (peers, orders) = (self.peers.clone(), Rc::new(tokio::sync::Mutex::new(orders)));
        let carry_out = move || carry_out_orders(peers.clone(), Rc::clone(&orders));
        actix_rt::spawn(self.watch.clone().keep("orders", carry_out));
        let peers = self.peers.clone();
        actix_rt::spawn(self.watch.clone().keep("peers", move || peers.clone().keep_time()));
        if let Some(mut opened) = self.opened.take() {
            let peers = self.peers.clone();
            actix_rt::spawn(async move {
                while let Some(connection) = opened.recv().await {
                    peers.watch(&connection);
                }
            });
        }
        let awake = self.peers.mover().awake.clone();
        actix_rt::spawn(self.watch.clone().keep("peers", move || awake.clone().keep()));
    }
}

/// Hands each order to a task of its own. A task that panics drops its channel, which says that nothing came.
async fn carry_out_orders(peers: Peers, orders: Rc<tokio::sync::Mutex<mpsc::Receiver<Order>>>) {
    let mut orders = orders.lock().await;
    while let Some(order) = orders.recv().await {
        here("orders");
        let peers = peers.clone();
        actix_rt::spawn(async move {
            match order {
                Order::Fetch(order, done, handed_over) => {
                    peers.metrics().took(Stage::Queue, peers.now() - handed_over);
                    let node = order.ordered.holder.node;
                    peers
                        .watched(
                            "fetch",
                            Some(node),
                            fetch::carry_out(peers.clone(), order, Report::new(done)),
                        )
                        .await;
                }
                Order::Follow(order) => {
                    let node = peers.number_of(&order.ordered.writer.node);
                    peers.watched("follow", node, follow::carry_out(peers.clone(), order)).await;
                }
            }
        });
    }
}

impl Handler<AskPeer> for PeerActor {
    type Result = ResponseFuture<Result<PeerResponse, PeerUnavailable>>;

    fn handle(&mut self, ask: AskPeer, _: &mut Self::Context) -> Self::Result {
        let peers = self.peers.clone();
        Box::pin(async move {
            let AskPeer { node, request, deadline, trace } = ask;
            let asked = peers.ask(node, &request, deadline, &trace);
            let panicked = || Err(PeerUnavailable { node, reason: "asking it panicked".to_owned() });
            peers.watched("peers", Some(node), asked).await.unwrap_or_else(panicked)
        })
    }
}

impl Handler<SetPace> for PeerActor {
    type Result = ();

    fn handle(&mut self, SetPace(bytes_per_second): SetPace, _: &mut Self::Context) {
        self.peers.mover().common.outgoing().pace.set(bytes_per_second);
    }
}

impl Handler<NewTable> for PeerActor {
    type Result = ();

    fn handle(&mut self, new: NewTable, _: &mut Self::Context) {
        self.peers.guarded(|peers| peers.set_table(new.table, new.own));
    }
}

impl Handler<Serve> for PeerActor {
    type Result = ();

    fn handle(&mut self, Serve(services): Serve, _: &mut Self::Context) {
        let threads = self.peers.block_threads().iter();
        threads.for_each(|thread| thread.serve(&services.blocks, services.sampler));
        self.serve_tcp(&services);
        let (server, endpoint) = (serve::Server::new(self.peers.clone(), services), self.endpoint.clone());
        self.peers.carrying().serve_with(&server);
        let accept = move || serve::accept(Rc::clone(&server), endpoint.clone());
        actix_rt::spawn(self.watch.clone().keep("accept", accept));
    }
}

/// How often the metrics of peers are updated.
const METRICS_TICK: Duration = Duration::from_secs(1);

/// Orders that wait for the peer thread.
const QUEUE_ORDERS: usize = 4_096;

/// Messages that wait for the peer thread; senders wait for a place.
const MAILBOX_MESSAGES: usize = 4_096;

/// Asks an actor for blocks to send to a peer. The answer has one item for each chunk, in their order.
#[derive(Message, Debug)]
#[rtype(result = "Vec<Grant>")]
pub struct AskBlocks {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub hashes: Vec<ChunkHash>,
    /// Bytes of each block of a chunk, by slice, then pool, as the peer expects them. A chunk with other sizes counts as not
    /// held.
    pub block_bytes: Vec<u64>,
    /// The urgency of the peer's waiters.
    pub class: Class,
    /// The trace of the request.
    pub trace: Trace,
}

/// An actor's answer for one chunk that a peer requests.
#[derive(Debug)]
pub enum Grant {
    /// The chunk's blocks may be read as long as the lease lives.
    Held(GrantedChunk),
    /// The chunk is not here.
    NotHeld,
    /// Too much is being sent.
    Busy {
        /// The time after which another request may succeed.
        retry_after_ms: u64,
    },
}

/// A chunk that may be sent.
#[derive(Debug)]
pub struct GrantedChunk {
    /// How often the chunk was read, this time included.
    pub reads: u32,
    /// Whether the chunk is on disk here too.
    pub is_on_disk: bool,
    /// The pools that the chunk has.
    pub pools: PoolSet,
    /// The blocks of these pools, by slice, then pool.
    pub blocks: Vec<GrantedBlock>,
    /// Keeps the blocks from reuse. Must live until the last byte of the blocks is acknowledged.
    pub lease: Arc<PeerLease>,
}

/// A block that may be sent.
#[derive(Debug)]
pub struct GrantedBlock {
    /// The extent of the block.
    pub memory: Arc<ExtentMemory>,
    /// Offset of the block in the extent.
    pub offset: u64,
    /// Size of the block.
    pub bytes: u64,
    /// Checksum of the block.
    pub checksum: u64,
}

/// Ends a lease when dropped, wherever that happens.
#[derive(Debug)]
pub struct PeerLease {
    /// Number of the lease.
    pub number: u64,
    /// The channel for the leases' ends. It holds at most one message for each lease, and the actor bounds the leases.
    pub ended: mpsc::UnboundedSender<u64>,
}

impl Drop for PeerLease {
    fn drop(&mut self) {
        // An actor that is gone has no slots to reuse.
        let _ = self.ended.send(self.number);
    }
}

/// Offers an actor chunks that another node evicts. The answer says of each chunk, in their order, whether the actor fetches it.
#[derive(Message, Debug)]
#[rtype(result = "Vec<bool>")]
pub struct TakeIn {
    /// The actor that still has the chunks for a moment.
    pub holder: Holder,
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub chunks: Vec<ChunkRef>,
    /// Each chunk is worth at least this to its holder.
    pub worth: Worth,
}

/// Asks an actor to keep chunks of a node that drains; `None` if the actor cannot say.
#[derive(Message, Debug)]
#[rtype(result = "Option<Taken>")]
pub struct TakeChunks {
    /// The actor that has the chunks.
    pub from: Holder,
    /// The chunks' namespace, if there are chunks.
    pub namespace: Option<TakeNamespace>,
    /// The chunks.
    pub chunks: Vec<TakeChunk>,
}

/// Bounds how many bytes of blocks are sent a second, to all peers together, from now on. `None` removes the bound.
#[derive(Message, Debug, Clone, Copy)]
#[rtype(result = "()")]
pub struct SetPace(pub Option<NonZeroU64>);

/// Has an actor pin for an admin, or end such a pin; the error is for people.
#[derive(Message, Debug, Clone)]
#[rtype(result = "Result<Pinned, String>")]
pub struct PinForAdmin(pub AdminPin);

/// Chunks to fetch from one holder.
#[derive(Debug)]
pub struct FetchOrder {
    /// The core's order. Its deadline holds for one batch of chunks, and counts from the request to the holder.
    pub ordered: larder_core::FetchOrder,
    /// The order's chunks, with their targets.
    pub chunks: Vec<FetchChunk>,
    /// The urgency of the waiters; it may change until the holder is asked.
    pub class: watch::Receiver<Class>,
    /// A message here stops the order: chunks that have not come by then do not come.
    pub cancelled: oneshot::Receiver<()>,
    /// The span of the request.
    pub trace: Trace,
}

/// A chunk to fetch.
#[derive(Debug)]
pub struct FetchChunk {
    /// The chunk's hash.
    pub hash: ChunkHash,
    /// The targets of the chunk's blocks, by slice, then pool.
    pub blocks: Vec<Destination>,
}

/// Sends another node a request. The result is an error if no answer comes in time.
#[derive(Message, Debug)]
#[rtype(result = "Result<PeerResponse, PeerUnavailable>")]
pub struct AskPeer {
    /// The node to ask.
    pub node: NodeNumber,
    /// The request.
    pub request: PeerRequest,
    /// How long the answer may take.
    pub deadline: Duration,
    /// The span of the request.
    pub trace: Trace,
}

/// A node does not answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} does not answer: {reason}")]
pub struct PeerUnavailable {
    /// The node.
    pub node: NodeNumber,
    /// Why the node does not answer.
    pub reason: String,
}

#[cfg(test)]
mod tests;
