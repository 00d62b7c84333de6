//! Other nodes: asks them, and performs the exchange's decisions about them.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_core::exchange::{BusyPause, Effect, Exchange, NoPeer, PeerId, RequestId};
use larder_net::in_one_line;
use larder_net::quic::{Connection, Endpoint, MessageError, write_message};
use larder_net::trace::Trace;
use larder_protocol::peer::{Chunks, PeerRequest, PeerResponse, RetryAfter, Room};
use larder_protocol::table::{Member, NodeNumber, Table};
use larder_protocol::version::Version;
use tokio::io::AsyncWrite;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{sleep, timeout};

use super::block_threads::BlockThread;
use super::connections::{AskedAgain, Carrying, ConnectedPeers, InUse, Link};
use super::metrics::Watched;
use super::mover::{Common, Mover};
use super::place::TurnSignal;
use super::rooms::{Rooms, read_answer};
use super::tcp::OverTcp;
use super::{ExchangeLimits, ExchangeMetrics, PeerUnavailable};
use crate::watched::{Watch, here};

/// The other nodes, as the peer thread sees them. Cloning shares.
#[derive(Clone)]
pub(crate) struct Peers(Rc<Shared>);

struct Shared {
    endpoint: Endpoint,
    exchange: RefCell<Exchange>,
    /// Notified when the next deadline is earlier than the keeper of time would wake up.
    deadline: Notify,
    wakes_at: Cell<Duration>,
    /// Signals that tell fetches that it is their turn.
    turns: RefCell<HashMap<RequestId, Rc<TurnSignal>>>,
    mover: Mover,
    block_threads: Vec<BlockThread>,
    /// The connections over TCP of this thread; `None` if blocks come over QUIC alone.
    over_tcp: Option<Rc<OverTcp>>,
    /// The bytes that each thread fetches.
    threads: RefCell<larder_core::exchange::ThreadLoads>,
    links: RefCell<BTreeMap<PeerId, Rc<Link>>>,
    carrying: Carrying,
    silent: SilentPeers,
    watched: RefCell<Watched>,
    watch: Watch,
    /// Bounds the reports of damage that are under way.
    reports: Arc<Semaphore>,
}

/// The thread of a fetch, as long as this value lives.
pub(super) struct TakenThread {
    peers: Peers,
    thread: Option<usize>,
    bytes: u64,
}

/// Nodes that do not answer now. Other threads read this.
#[derive(Debug, Clone, Default)]
pub struct SilentPeers(Arc<Mutex<BTreeSet<NodeNumber>>>);

impl SilentPeers {
    /// The silent nodes.
    pub fn get(&self) -> BTreeSet<NodeNumber> {
        self.lock().clone()
    }

    /// Whether a node is silent.
    pub fn contains(&self, node: NodeNumber) -> bool {
        self.lock().contains(&node)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<NodeNumber>> {
        larder_net::lock(&self.0)
    }
}

impl Peers {
    pub(super) fn new(
        endpoint: Endpoint,
        limits: ExchangeLimits,
        common: Common,
        (silent, connected): (SilentPeers, ConnectedPeers),
        block_threads: Vec<BlockThread>,
        watch: Watch,
    ) -> Self {
        let mover = Mover::new(common);
        let over_tcp = OverTcp::new(mover.clone());
        Self(Rc::new(Shared {
            endpoint,
            exchange: RefCell::new(Exchange::new(limits, RandomState::new().hash_one(()))),
            deadline: Notify::new(),
            wakes_at: Cell::new(Duration::MAX),
            turns: RefCell::default(),
            mover,
            over_tcp,
            threads: RefCell::new(larder_core::exchange::ThreadLoads::new(block_threads.len())),
            block_threads,
            links: RefCell::default(),
            carrying: Carrying::new(connected),
            silent,
            watched: RefCell::default(),
            watch,
            reports: Arc::new(Semaphore::new(MOST_REPORTS)),
        }))
    }

    /// Lets the exchange decide, and performs its effects.
    pub(super) fn decide<T>(&self, decision: impl FnOnce(&mut Exchange, Duration) -> T) -> T {
        let mut exchange = self.0.exchange.borrow_mut();
        let decided = decision(&mut exchange, self.now());
        if exchange.next_deadline().is_some_and(|due| due < self.0.wakes_at.get()) {
            self.0.deadline.notify_one();
        }
        while let Some(effect) = exchange.poll_effect() {
            self.perform(effect);
        }
        while let Some((id, why)) = exchange.connections.poll_close() {
            self.metrics().closed(why);
            self.0.carrying.close(id, why);
        }
        decided
    }

    /// Performs an effect of the exchange. Must not ask for another decision, since the present decision is not over yet.
    fn perform(&self, effect: Effect) {
        match effect {
            Effect::Turn(request, turn) => {
                self.turns().get(&request).into_iter().for_each(|told| told.tell(turn));
            }
            Effect::Probe { peer, probe, deadline } => {
                let peers = self.clone();
                actix_rt::spawn(async move {
                    // A probe without a result would be the last: its peer would be left out for good.
                    let answered = peers.watched("peers", None, peers.asks_for_a_sign(peer, deadline)).await;
                    let (answers, was_heard) = answered.unwrap_or((false, false));
                    peers.decide(|exchange, now| exchange.probed(now, peer, probe, answers, was_heard));
                });
            }
            Effect::Silent(PeerId { node, .. }) => {
                self.note_silent(|silent| silent.insert(node));
                tracing::warn!(%node, "a node does not answer: it is left out until it answers");
            }
            Effect::Answers(PeerId { node, .. }) => {
                self.note_silent(|silent| silent.remove(&node));
                tracing::info!(%node, "a node answers again");
            }
            Effect::Gone(peer) => {
                self.note_silent(|silent| silent.remove(&peer.node));
                self.0.links.borrow_mut().remove(&peer);
            }
        }
    }

    /// Tells the exchange that time has passed whenever a deadline of the exchange is due.
    pub(super) async fn keep_time(self) {
        loop {
            let due = self.0.exchange.borrow().next_deadline();
            let now = self.now();
            let pause = due.map_or(FAR, |due| due.saturating_sub(now));
            self.0.wakes_at.set(now + pause);
            if timeout(pause, self.0.deadline.notified()).await.is_err() {
                self.guarded(|peers| peers.decide(Exchange::tick));
            }
        }
    }

    /// Runs `work`. If it panics, drops all knowledge of nodes except the table.
    pub(super) fn guarded(&self, work: impl FnOnce(&Self)) {
        if self.0.watch.catch("peers", || work(self)).is_none() {
            self.decide(|exchange, _| exchange.begin_anew());
        }
    }

    pub(super) fn carrying(&self) -> &Carrying {
        &self.0.carrying
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    pub(super) fn turns(&self) -> RefMut<'_, HashMap<RequestId, Rc<TurnSignal>>> {
        self.0.turns.borrow_mut()
    }

    pub(super) fn metrics(&self) -> &ExchangeMetrics {
        &self.0.mover.common.metrics
    }

    /// The mover of the thread between nodes.
    pub(super) fn mover(&self) -> &Mover {
        &self.0.mover
    }

    pub(super) fn block_threads(&self) -> &[BlockThread] {
        &self.0.block_threads
    }

    /// The connections over TCP of this thread.
    pub(super) fn over_tcp(&self) -> Option<&Rc<OverTcp>> {
        self.0.over_tcp.as_ref()
    }

    /// Chooses the thread that fetches `bytes` bytes.
    pub(super) fn take_thread(&self, link: &Link, bytes: u64) -> TakenThread {
        let is_chosen = !self.0.block_threads.is_empty() && !link.avoids_block_threads(self.now());
        let thread = is_chosen.then(|| self.0.threads.borrow_mut().take(bytes));
        TakenThread { peers: self.clone(), thread, bytes }
    }

    /// Tells a holder that its chunks arrived with wrong bytes. With too many such reports in progress, the holder is not
    /// told: the next reader of the chunk finds the damage too.
    pub(super) fn tell_damaged(&self, link: &Link, chunks: Chunks) {
        let Ok(place) = Arc::clone(&self.0.reports).try_acquire_owned() else { return };
        let (peers, node) = (self.clone(), link.peer.node);
        actix_rt::spawn(async move {
            let report = PeerRequest::Damaged(chunks);
            if let Err(error) = peers.ask(node, &report, REPORT_DEADLINE, &Trace::default()).await {
                tracing::warn!(%error, "cannot tell a holder that its chunk is damaged");
            }
            drop(place);
        });
    }

    /// Time since the node started.
    pub(super) fn now(&self) -> Duration {
        self.0.mover.common.now()
    }

    /// As [`Common::says`].
    pub(super) fn says(&self, fault: &'static str) -> Option<u64> {
        self.0.mover.common.says(fault)
    }

    /// The name of a link's node in metrics.
    pub(super) fn metrics_name<'a>(&self, link: &'a Link) -> &'a str {
        self.0.mover.common.metrics_name(&link.name)
    }

    /// The rooms of this node and of the others, and how much they serve.
    pub(super) fn rooms(&self) -> &Rooms {
        &self.0.mover.common.rooms
    }

    /// The table in force.
    pub(super) fn table(&self) -> Arc<Table> {
        Arc::clone(self.0.exchange.borrow().table())
    }

    /// Takes a new table. Removes the metrics of nodes that left the table.
    pub(super) fn set_table(&self, table: Arc<Table>, own: NodeNumber) {
        let names: HashSet<&str> = table.members.iter().map(|member| &*member.name).collect();
        let gone = |was: &&Member| !names.contains(&*was.name);
        let metrics = self.metrics();
        // First, so that nothing counts under a name that is forgotten.
        self.0.mover.common.set_table(&table);
        self.table().members.iter().filter(gone).for_each(|member| metrics.forget(&member.name));
        let others = table.members.iter().filter(|member| member.number != own);
        others.for_each(|member| metrics.know(&member.name));
        self.decide(|exchange, _| exchange.set_table(table, own));
        self.place_connections();
    }

    /// Awaits some work. If it panics, returns `None` and closes the connection to the work's node, with everything else that
    /// runs there.
    pub(super) async fn watched<T>(
        &self,
        task: &'static str,
        node: Option<NodeNumber>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let came = self.0.watch.catch_in(task, work).await;
        if came.is_none() {
            let peer = self.0.links.borrow().keys().copied().find(|peer| Some(peer.node) == node);
            peer.into_iter().for_each(|peer| self.decide(|exchange, _| exchange.forget(peer)));
        }
        came
    }

    /// The number of the member of this name.
    pub(super) fn number_of(&self, name: &str) -> Option<NodeNumber> {
        self.table().members.iter().find(|member| member.name == name).map(|member| member.number)
    }

    /// Counts the packets of a connection with another node.
    pub(super) fn watch(&self, connection: &Connection) {
        self.0.watched.borrow_mut().add(&connection.peer().name, connection.quic().clone());
    }

    /// Updates the metrics of peers.
    pub(super) fn show(&self) {
        let (table, metrics) = (self.table(), self.metrics());
        let is_member = |name: &str| table.members.iter().any(|member| member.name == name);
        self.0.watched.borrow_mut().show(metrics, is_member);
        metrics.connected.set(self.0.exchange.borrow().connections.len() as i64);
        for link in self.0.links.borrow().values() {
            let gauge = metrics.in_flight_bytes.with_label_values(&[&link.name]);
            gauge.set(self.0.exchange.borrow().bytes_under_way(link.peer) as i64);
        }
    }

    /// Sends a node a small request, again and again while the node is busy, until the deadline.
    ///
    /// # Errors
    /// [`PeerUnavailable`] if no answer comes in time. Only a node that sends no packet at all counts as silent then.
    pub(crate) async fn ask(
        &self,
        node: NodeNumber,
        request: &PeerRequest,
        deadline: Duration,
        trace: &Trace,
    ) -> Result<PeerResponse, PeerUnavailable> {
        let unavailable =
            |reason: &dyn std::fmt::Display| PeerUnavailable { node, reason: reason.to_string() };
        let link = self.link(node).map_err(|error| unavailable(&error))?;
        let (asked_at, before) = (self.now(), self.came(&link));
        let busy = Cell::new(None);
        let answered = timeout(deadline, async {
            let mut pause = BusyPause::default();
            loop {
                let answer = self.converse(async || self.connection(&link).await, request, trace).await;
                let (version, room, answer) = answer.map_err(|error| unavailable(&in_one_line(&*error)))?;
                // An answer that says nothing else says nothing of the room either.
                if answer != PeerResponse::Done {
                    self.rooms().heard(node, room, version, self.now());
                }
                match answer {
                    PeerResponse::Busy(retry) => {
                        busy.set(Some(retry));
                        sleep(self.pause(&mut pause, retry, Duration::MAX).unwrap_or_default()).await;
                    }
                    answer => return Ok(answer),
                }
            }
        });
        match (answered.await, busy.get()) {
            (Ok(Ok(response)), _) => {
                let took = self.now() - asked_at;
                self.metrics().round_trip_seconds.observe(took.as_secs_f64());
                Ok(response)
            }
            // A broken connection says nothing of the node: the next request makes another connection.
            (Ok(Err(error)), _) => Err(error),
            (Err(_), Some(retry)) => Ok(PeerResponse::Busy(retry)),
            (Err(_), None) => {
                let was_heard = self.missed(&link, before);
                self.decide(|exchange, now| exchange.is_late(now, link.peer, asked_at, was_heard));
                Err(unavailable(&"no answer in time"))
            }
        }
    }

    /// The pause before another attempt; `None` if it would end after `over`.
    pub(super) fn pause(&self, pause: &mut BusyPause, retry: RetryAfter, over: Duration) -> Option<Duration> {
        self.decide(|exchange, now| exchange.pause(now, pause, retry, over))
    }

    /// The link to a member that is not known to be silent.
    pub(super) fn link(&self, node: NodeNumber) -> Result<Rc<Link>, NoPeer> {
        let peer = self.decide(|exchange, _| exchange.peer(node))?;
        self.link_to(peer).ok_or(NoPeer::NotAMember)
    }

    /// The link to a member in this life, silent or not.
    fn link_to(&self, peer: PeerId) -> Option<Rc<Link>> {
        let table = self.table();
        let member = table.member(peer.node).filter(|member| member.incarnation == peer.incarnation)?;
        let mut links = self.0.links.borrow_mut();
        let link = links.entry(peer).or_insert_with(|| Rc::new(Link::new(peer, member.name.clone())));
        Some(Rc::clone(link))
    }

    /// Asks on a connection, or on another if the other side closed the first as idle. Also returns the connection's version.
    async fn converse(
        &self,
        connect: impl AsyncFn() -> Option<InUse>,
        request: &PeerRequest,
        trace: &Trace,
    ) -> Result<(Version, Room, PeerResponse), Box<dyn std::error::Error>> {
        let mut again = AskedAgain::default();
        loop {
            let connection = connect().await.ok_or("no connection can be made")?;
            if rides(request) {
                connection.rides();
            }
            let answer = converse(&connection, request, trace).await;
            match answer {
                Err(_) if again.may(&connection) => {}
                answer => return answer.map(|(room, answer)| (connection.version(), room, answer)),
            }
        }
    }

    /// Packets and bytes that came from a node so far: the number grows as long as the node's process is alive and sends.
    pub(super) fn came(&self, link: &Link) -> u64 {
        self.0.watched.borrow().came(&link.name) + self.0.mover.common.bytes_over_tcp(&link.name)
    }

    /// Counts a late answer; returns whether the node sent any packet since `before`.
    pub(super) fn missed(&self, link: &Link, before: u64) -> bool {
        let was_heard = self.came(link) > before;
        self.metrics().missed(if was_heard { "slow" } else { "silent" });
        was_heard
    }

    /// Notes that a node sent a chunk, or said that it has none.
    pub(super) fn heard(&self, link: &Link) {
        self.decide(|exchange, _| exchange.heard(link.peer));
    }

    /// Asks a node for a sign of life, also if it was never asked for anything. Returns whether it answered in time, and whether it
    /// sent any packet meanwhile.
    async fn asks_for_a_sign(&self, peer: PeerId, deadline: Duration) -> (bool, bool) {
        here("probe");
        let Some(link) = self.link_to(peer) else { return (false, false) };
        let before = self.came(&link);
        let answers = timeout(deadline, self.answers(&link)).await == Ok(true);
        (answers, self.came(&link) > before)
    }

    /// Whether a node gives a sign of life.
    async fn answers(&self, link: &Rc<Link>) -> bool {
        let trace = Trace::default();
        let answer = self.converse(async || self.dial(link).await, &PeerRequest::Ping, &trace).await;
        matches!(answer, Ok((.., PeerResponse::Done)))
    }

    fn note_silent(&self, change: impl FnOnce(&mut BTreeSet<NodeNumber>) -> bool) {
        let mut silent = self.0.silent.lock();
        change(&mut silent);
        self.metrics().silent.set(silent.len() as i64);
    }
}

impl TakenThread {
    /// The block thread; `None` for the thread between nodes.
    pub(super) fn block_thread(&self) -> Option<&BlockThread> {
        let number = self.thread?.checked_sub(1)?;
        self.peers.0.block_threads.get(number)
    }
}

impl Drop for TakenThread {
    fn drop(&mut self) {
        let threads = &self.peers.0.threads;
        self.thread.into_iter().for_each(|thread| threads.borrow_mut().give_back(thread, self.bytes));
    }
}

/// Sends a request and reads its answer, on a stream of their own, ahead of blocks.
async fn converse(
    connection: &Connection,
    request: &PeerRequest,
    trace: &Trace,
) -> Result<(Room, PeerResponse), Box<dyn std::error::Error>> {
    let version = connection.version();
    if version < request.since() {
        return Err(format!("the node speaks {version}, which has no such request: upgrade the node").into());
    }
    let (mut send, mut receive) = connection.quic().open_bi().await?;
    send.set_priority(SMALL_FIRST)?;
    write_trace(&mut send, trace).await?;
    write_message(&mut send, request).await?;
    send.finish()?;
    read_answer(&mut receive).await?.ok_or_else(|| "no answer on the stream".into())
}

/// Whether a request is no reason to keep its connection open: a sign of life, or a comparison of sums.
pub(super) fn rides(request: &PeerRequest) -> bool {
    match request {
        PeerRequest::Ping => true,
        PeerRequest::Announce(announces) => announces.iter().all(|announce| announce.changes.is_empty()),
        _ => false,
    }
}

/// Sends the trace of the following request, if it is recorded.
pub(super) async fn write_trace(
    send: &mut (impl AsyncWrite + Unpin),
    trace: &Trace,
) -> Result<(), MessageError> {
    match trace.context() {
        Some(context) => write_message(send, &PeerRequest::Trace(context)).await,
        None => Ok(()),
    }
}

/// The priority of small requests: they go before blocks. The streams of blocks have priorities of 0 and less, in the order in
/// which the blocks are written (`send/order.rs`). Classes of blocks have no priorities of their own: QUIC would let nothing of a
/// lower priority pass while there is anything of a higher priority. The asker's gate bounds what the classes share.
pub(super) const SMALL_FIRST: i32 = 1;

/// Reports of damage that are under way at a time, to all peers, and how long one may take.
const MOST_REPORTS: usize = 16;
const REPORT_DEADLINE: Duration = Duration::from_secs(2);

/// Longer than any deadline of the exchange.
const FAR: Duration = Duration::from_secs(3_600);
