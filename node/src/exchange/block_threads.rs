//! Block threads: they fetch and send blocks beside the thread between nodes, which decides.
//!
//! Each block thread has a share of the node's port ([`PortShare`]), where it serves fetches, and a socket of its own, from
//! which it dials. It connects to the block threads of another node with the first fetch there. Its connections carry fetches
//! alone, and only the dialing side closes them: no fetch meets a connection that the other side is closing as idle.
//!
//! The thread between nodes chooses the thread of a fetch ([`larder_core::exchange::ThreadLoads`]) and hears of each chunk as it
//! comes. A block thread that cannot reach a node hands the fetch back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix::Recipient;
use actix_rt::Arbiter;
use larder_core::Arrival;
use larder_core::exchange::MAX_IDLE;
use larder_net::quic::{
    BindError, ConnectError, Connection, Credentials, Endpoint, Guest, Guests, Incoming, PortShare,
    TransportSettings,
};
use larder_net::trace::{Sampler, Trace};
use larder_protocol::identity::Role;
use larder_protocol::peer::PeerRequest;
use quinn::{RecvStream, SendStream, VarInt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use super::AskBlocks;
use super::connections::DIAL_DEADLINE;
use super::fetch::Report;
use super::mover::{Common, Mover};
use super::receive::{Batch, From};
use super::send::order::SendOrder;
use super::serve::{MAX_MEMBER_CONNECTIONS, let_in, limits_of, may_fetch, read_request, trace_of};
use super::tcp::OverTcp;
use crate::host::CpuSet;
use crate::threads;
use crate::watched::{Watch, here};

/// The block threads of a node, from their start to their end.
pub struct BlockThreads {
    handles: Vec<BlockThread>,
    endpoints: Vec<Endpoint>,
    arbiters: Vec<Arbiter>,
    opened: mpsc::UnboundedReceiver<Connection>,
}

/// The block threads as the thread between nodes uses them.
#[derive(Debug)]
pub struct TakenThreads {
    pub(super) handles: Vec<BlockThread>,
    /// Connections that the block threads make or accept.
    pub(super) opened: mpsc::UnboundedReceiver<Connection>,
}

/// Hands work to a block thread. Cloning shares.
#[derive(Debug, Clone)]
pub(super) struct BlockThread(mpsc::Sender<Work>);

/// A batch to fetch.
#[derive(Debug)]
pub(super) struct ThreadFetch {
    /// The life of the holder's node, its address and its name.
    pub(super) incarnation: u64,
    pub(super) address: SocketAddr,
    pub(super) name: String,
    pub(super) from: From,
    pub(super) batch: Batch,
    pub(super) trace: Trace,
    /// Held as long as anything may write to the slots.
    pub(super) report: Report,
}

#[derive(Debug)]
enum Work {
    /// Fetch a batch, and tell each chunk by the first channel. Stop when the second channel ends.
    Fetch(ThreadFetch, mpsc::UnboundedSender<(usize, Arrival)>, oneshot::Receiver<()>),
    /// Serve fetches from these actors.
    Serve(Vec<Recipient<AskBlocks>>, Sampler),
    /// Serve this connection over TCP, which came from this address.
    ServeTcp(std::net::TcpStream, SocketAddr),
}

/// The state of a block thread.
struct Thread {
    mover: Mover,
    /// The share of other nodes' ports that the thread dials.
    share: u8,
    dials: Endpoint,
    serves: Endpoint,
    links: RefCell<BTreeMap<String, Rc<Link>>>,
    opened: mpsc::UnboundedSender<Connection>,
    /// `None` if blocks come over QUIC alone.
    over_tcp: Option<Rc<OverTcp>>,
    watch: Watch,
}

/// The way to another node, in one life.
struct Link {
    incarnation: u64,
    address: SocketAddr,
    connection: tokio::sync::Mutex<Option<Connection>>,
    /// The time at which the last dial failed.
    dial_failed_at: Cell<Option<Duration>>,
    users: Cell<usize>,
    used_at: Cell<Duration>,
    /// Whether another link took the place of this one.
    is_closed: Cell<bool>,
}

/// A use of a link, as long as this value lives.
struct InUse {
    link: Rc<Link>,
    common: Common,
}

/// Why threads that speak with other nodes cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be used.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The system gives no thread.
    #[error("cannot start a thread that speaks with other nodes")]
    Thread(#[source] std::io::Error),
}

impl StartError {
    /// A thread ended at once.
    pub(crate) fn ended() -> Self {
        Self::Thread(std::io::Error::other("the thread ended at once"))
    }
}

impl BlockThreads {
    /// Starts a thread for each share, on these CPUs.
    ///
    /// # Errors
    /// [`StartError`] if the system gives no thread, or a thread no socket.
    pub async fn start(
        shares: Vec<PortShare>,
        listen: SocketAddr,
        (credentials, settings): (&Credentials, &TransportSettings),
        cpus: &CpuSet,
        common: &Common,
        watch: &Watch,
    ) -> Result<Self, StartError> {
        let (opens, opened) = mpsc::unbounded_channel();
        let mut all = Self { handles: Vec::new(), endpoints: Vec::new(), arbiters: Vec::new(), opened };
        for (number, share) in (1..).zip(shares) {
            let arbiter = threads::arbiter(format!("larder-blocks-{number}"), cpus);
            let arbiter = arbiter.map_err(StartError::Thread)?;
            let (orders, work) = mpsc::channel(QUEUE_WORK);
            let (bound, binding) = oneshot::channel();
            let (credentials, settings) = (credentials.for_blocks(), settings.clone());
            let (common, opens, watch) = (common.clone(), opens.clone(), watch.clone());
            arbiter.spawn(async move {
                let dials = Endpoint::dialler(listen.ip(), &credentials, &settings);
                let serves =
                    dials.and_then(|dials| Ok((dials, Endpoint::on(share, &credentials, &settings)?)));
                let endpoints = serves.map(|(dials, serves)| {
                    let mover = Mover::of_block_thread(common);
                    let links = RefCell::default();
                    let endpoints = [dials.clone(), serves.clone()];
                    let over_tcp = OverTcp::new(mover.clone());
                    let opened = opens;
                    let thread =
                        Thread { mover, share: number, dials, serves, links, opened, over_tcp, watch };
                    actix_rt::spawn(Rc::new(thread).run(work));
                    endpoints
                });
                // An error: nobody waits for it any more.
                let _ = bound.send(endpoints);
            });
            all.arbiters.push(arbiter);
            all.endpoints.extend(binding.await.map_err(|_| StartError::ended())??);
            all.handles.push(BlockThread(orders));
        }
        Ok(all)
    }

    /// Handles for the thread between nodes. Only the first caller hears of the block threads' connections.
    pub(crate) fn take(&mut self) -> TakenThreads {
        let nothing = mpsc::unbounded_channel().1;
        TakenThreads { handles: self.handles.clone(), opened: std::mem::replace(&mut self.opened, nothing) }
    }

    /// The threads' endpoints. Their credentials are [`Credentials::for_blocks`].
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.endpoints.clone()
    }

    /// Ends the threads, which drop their work. Blocks the calling thread until they have ended.
    pub fn stop(self) {
        drop(self.handles);
        self.arbiters.iter().for_each(|arbiter| _ = arbiter.stop());
        for arbiter in self.arbiters {
            if arbiter.join().is_err() {
                tracing::error!("a block thread ended in a panic");
            }
        }
    }
}

#[cfg(test)]
impl TakenThreads {
    /// A node without block threads.
    pub(super) fn none() -> Self {
        Self { handles: Vec::new(), opened: mpsc::unbounded_channel().1 }
    }
}

impl BlockThread {
    /// Has the thread fetch a batch, and calls `came` for each chunk as it comes. Returns whether the thread reached the
    /// holder. If it did not, `came` was not called.
    ///
    /// # Cancel safety
    /// If the future is dropped, the thread stops soon. It holds the report until then.
    pub(super) async fn fetch(&self, fetch: ThreadFetch, mut came: impl FnMut(usize, Arrival)) -> bool {
        let (comes, mut arrivals) = mpsc::unbounded_channel();
        let (_stop, stopped) = oneshot::channel();
        if self.0.try_send(Work::Fetch(fetch, comes, stopped)).is_err() {
            return false;
        }
        let mut has_come = false;
        while let Some((at, arrival)) = arrivals.recv().await {
            has_come = true;
            came(at, arrival);
        }
        has_come
    }

    /// Has the thread serve fetches from these actors.
    pub(super) fn serve(&self, blocks: &[Recipient<AskBlocks>], sampler: Sampler) {
        if self.0.try_send(Work::Serve(blocks.to_vec(), sampler)).is_err() {
            tracing::error!("a block thread does not serve: it is stopping");
        }
    }

    /// Has the thread serve a connection over TCP. With too much work in its queue, the connection is closed.
    pub(super) fn serve_tcp(&self, stream: TcpStream, remote: SocketAddr) {
        // Errors: the socket is broken, or the thread is stopping or has too much to do. The other side dials again.
        if let Ok(stream) = stream.into_std() {
            let _ = self.0.try_send(Work::ServeTcp(stream, remote));
        }
    }
}

impl Thread {
    async fn run(self: Rc<Self>, mut work: mpsc::Receiver<Work>) {
        let thread = Rc::clone(&self);
        actix_rt::spawn(self.watch.clone().keep("blocks", move || Rc::clone(&thread).close_idle()));
        if let Some(over_tcp) = self.over_tcp.clone() {
            actix_rt::spawn(self.watch.clone().keep("blocks", move || Rc::clone(&over_tcp).close_idle()));
        }
        let mut served = None;
        while let Some(work) = work.recv().await {
            let thread = Rc::clone(&self);
            match work {
                Work::Fetch(fetch, comes, stopped) => actix_rt::spawn(async move {
                    let fetched = async {
                        tokio::select! {
                            () = thread.fetch(&fetch, &comes) => {}
                            _ = stopped => {}
                        }
                    };
                    thread.watch.catch_in("blocks", fetched).await;
                    // Nothing writes any more: the report may go.
                    drop(fetch.report);
                }),
                Work::Serve(blocks, sampler) => {
                    let guests = Guests::new(limits_of, MAX_MEMBER_CONNECTIONS);
                    let serving = Rc::new(Serving { guests, blocks, sampler });
                    served = Some(Rc::clone(&serving));
                    let accept = move || Rc::clone(&thread).accept(Rc::clone(&serving));
                    actix_rt::spawn(self.watch.clone().keep("accept", accept))
                }
                Work::ServeTcp(stream, remote) => {
                    let Some(serving) = served.clone() else { continue };
                    actix_rt::spawn(async move {
                        let Some(over_tcp) = &thread.over_tcp else { return };
                        // An error: the socket is broken.
                        let Ok(stream) = TcpStream::from_std(stream) else { return };
                        let served = over_tcp.serve((stream, remote), &serving.blocks, serving.sampler);
                        thread.watch.catch_in("serve", served).await;
                    })
                }
            };
        }
    }

    async fn fetch(&self, fetch: &ThreadFetch, comes: &mpsc::UnboundedSender<(usize, Arrival)>) {
        here("blocks");
        let &ThreadFetch { address, ref name, from, ref batch, ref trace, .. } = fetch;
        // An error: nobody waits any more.
        let came = |at, arrival| _ = comes.send((at, arrival));
        if let Some(over_tcp) = &self.over_tcp
            && over_tcp.fetch((name, address), from, batch, trace, came).await
        {
            return;
        }
        let mut tries = 0;
        let (asked, _in_use) = loop {
            let Some((connection, in_use)) = self.connection(fetch).await else { return };
            let asked = self.mover.ask(&connection, from, batch, trace).await;
            tries += 1;
            // A node that has restarted does not know the connection of its earlier life.
            if asked.is_ok() || !connection.was_closed_as_idle() || tries > 1 {
                break (asked, in_use);
            }
        };
        self.mover.receive(asked, from, batch, came).await;
    }

    /// The link to the holder's node; `None` if the fetch is for an earlier life of the node. The connection with an earlier life
    /// is closed: packets to a dead process get no answer, not even an error, so its fetches would wait in vain.
    fn link(&self, fetch: &ThreadFetch) -> Option<Rc<Link>> {
        let &ThreadFetch { incarnation, address, ref name, .. } = fetch;
        let mut links = self.links.borrow_mut();
        let link = links.entry(name.clone()).or_insert_with(|| Rc::new(Link::new(incarnation, address)));
        if incarnation < link.incarnation {
            return None;
        }
        if (link.incarnation, link.address) != (incarnation, address) {
            link.close();
            *link = Rc::new(Link::new(incarnation, address));
        }
        Some(Rc::clone(link))
    }

    /// The connection to a node, dialed if there is none.
    async fn connection(&self, fetch: &ThreadFetch) -> Option<(Connection, InUse)> {
        let (link, common) = (self.link(fetch)?, self.mover.common.clone());
        link.users.set(link.users.get() + 1);
        let came_at = common.now();
        let in_use = InUse { link, common };
        let mut open = in_use.link.connection.lock().await;
        if let Some(connection) = open.as_ref().filter(|open| open.quic().close_reason().is_none()) {
            let connection = connection.clone();
            drop(open);
            return Some((connection, in_use));
        }
        // A dial that fails answers all who waited for it.
        if in_use.link.dial_failed_at.get() >= Some(came_at) {
            return None;
        }
        let connection = self.dial(fetch).await;
        if connection.is_none() {
            in_use.link.dial_failed_at.set(Some(in_use.common.now()));
        }
        let connection = connection?;
        if in_use.link.is_closed.get() {
            connection.quic().close(CLOSED, OTHER_LIFE);
            return None;
        }
        // An error: the node stops.
        let _ = self.opened.send(connection.clone());
        *open = Some(connection.clone());
        drop(open);
        Some((connection, in_use))
    }

    async fn dial(&self, ThreadFetch { address, name, .. }: &ThreadFetch) -> Option<Connection> {
        let dialled = self.dials.connect_to_share(*address, Role::Node, Some(name), self.share);
        match timeout(DIAL_DEADLINE, dialled).await {
            Ok(Ok(connection)) => return Some(connection),
            Ok(Err(ConnectError::Version(_))) => {
                tracing::debug!(
                    name,
                    "a node has no block threads: the thread between nodes fetches from it"
                );
            }
            Ok(Err(error)) => {
                tracing::warn!(name, %address, %error, "a block thread cannot connect to a node");
            }
            Err(_) => tracing::warn!(name, %address, "a block thread cannot connect to a node: no answer"),
        }
        None
    }

    async fn close_idle(self: Rc<Self>) {
        loop {
            tokio::time::sleep(MAX_IDLE / 4).await;
            let now = self.mover.common.now();
            self.links.borrow_mut().retain(|_, link| {
                let is_used = link.users.get() > 0 || now.saturating_sub(link.used_at.get()) < MAX_IDLE;
                if !is_used && let Ok(open) = link.connection.try_lock() {
                    open.iter().for_each(Connection::close_as_idle);
                }
                is_used
            });
        }
    }

    async fn accept(self: Rc<Self>, serving: Rc<Serving>) {
        while let Some(incoming) = self.serves.accept().await {
            here("accept");
            let (thread, serving) = (Rc::clone(&self), Rc::clone(&serving));
            actix_rt::spawn(async move {
                let watch = thread.watch.clone();
                watch.catch_in("serve", thread.serve_connection(serving, incoming)).await;
            });
        }
    }

    async fn serve_connection(self: Rc<Self>, serving: Rc<Serving>, incoming: Incoming) {
        let metrics = &self.mover.common.metrics;
        let Some((guest, _counted)) = let_in(&serving.guests, incoming, metrics).await else { return };
        if guest.connection().peer().role == Role::Node {
            // An error: the node stops.
            let _ = self.opened.send(guest.connection().clone());
        }
        let streams = Arc::new(Semaphore::new(larder_net::quic::MAX_STREAMS as usize));
        let order = Rc::new(SendOrder::default());
        while let Ok((send, receive)) = guest.connection().quic().accept_bi().await {
            let Ok(place) = Arc::clone(&streams).acquire_owned().await else { break };
            let (thread, serving) = (Rc::clone(&self), Rc::clone(&serving));
            let (guest, order) = (Rc::clone(&guest), Rc::clone(&order));
            actix_rt::spawn(async move {
                let served = thread.serve_stream(&serving, (&guest, &order), send, receive);
                thread.watch.catch_in("serve", served).await;
                drop(place);
            });
        }
    }

    /// Answers a fetch. Other requests get no answer, since nobody has a reason to send them here.
    async fn serve_stream(
        &self,
        serving: &Serving,
        (guest, order): (&Guest, &SendOrder),
        send: SendStream,
        mut receive: RecvStream,
    ) {
        let metrics = &self.mover.common.metrics;
        let (request, traced) = match read_request(guest.seat(), &mut receive).await {
            Ok(Some((asked, traced))) => (asked.message, traced),
            Ok(None) => return,
            Err(reason) => return metrics.rejected(reason),
        };
        metrics.requested(request.name());
        here("serve");
        let trace = trace_of(serving.sampler, &request, traced);
        let PeerRequest::Fetch(fetch) = request else { return metrics.rejected("not_allowed") };
        let connection = guest.connection();
        if let Err(refused) = may_fetch(connection.peer(), &fetch) {
            guest.log_refused(refused);
            return metrics.rejected("not_allowed");
        }
        self.mover.send_blocks(&serving.blocks, (connection, order), send, fetch, trace).await;
    }
}

/// The parts with which a block thread serves.
struct Serving {
    guests: Guests,
    blocks: Vec<Recipient<AskBlocks>>,
    sampler: Sampler,
}

impl Link {
    fn new(incarnation: u64, address: SocketAddr) -> Self {
        let (connection, dial_failed_at) = (tokio::sync::Mutex::default(), Cell::default());
        Self {
            incarnation,
            address,
            connection,
            dial_failed_at,
            users: Cell::new(0),
            used_at: Cell::default(),
            is_closed: Cell::default(),
        }
    }

    /// Closes the connection, with the fetches on it. A connection that is being dialed is closed when it is there.
    fn close(&self) {
        self.is_closed.set(true);
        if let Ok(open) = self.connection.try_lock() {
            open.iter().for_each(|open| open.quic().close(CLOSED, OTHER_LIFE));
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.link.users.set(self.link.users.get() - 1);
        self.link.used_at.set(self.common.now());
    }
}

const CLOSED: VarInt = VarInt::from_u32(0);
const OTHER_LIFE: &[u8] = b"the node has another life";

/// Orders that wait for a block thread.
const QUEUE_WORK: usize = 1_024;
