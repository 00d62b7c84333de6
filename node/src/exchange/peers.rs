//! Connections to other nodes: dialled on need, kept, and left alone while nobody answers.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use larder_net::quic::{Connection, Endpoint, MessageError, read_message, write_message};
use larder_net::trace::Trace;
use larder_protocol::identity::Role;
use larder_protocol::peer::{Chunks, PeerRequest, PeerResponse};
use larder_protocol::table::{Member, NodeNumber, Table};
use quinn::{SendStream, VarInt};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::busy::{BusyPause, chance};
use super::gate::Gate;
use super::metrics::{OTHER, Watched};
use super::{ExchangeLimits, ExchangeMetrics, PeerUnavailable};
use crate::clock::Clock;
use crate::watched::Watch;

/// The other nodes, as the peer thread sees them. Cloning shares.
#[derive(Clone)]
pub(crate) struct Peers(Rc<Shared>);

struct Shared {
    endpoint: Endpoint,
    limits: ExchangeLimits,
    metrics: ExchangeMetrics,
    clock: Clock,
    table: RefCell<Arc<Table>>,
    own: Cell<NodeNumber>,
    links: RefCell<BTreeMap<NodeNumber, Rc<Link>>>,
    silent: SilentPeers,
    watched: RefCell<Watched>,
    watch: Watch,
    /// Bounds the reports of damage that are under way.
    reports: Arc<Semaphore>,
}

/// Nodes that do not answer now; other threads look into it.
#[derive(Debug, Clone, Default)]
pub struct SilentPeers(Arc<Mutex<BTreeSet<NodeNumber>>>);

/// One other node, in one of its lives.
pub(super) struct Link {
    pub(super) node: NodeNumber,
    pub(super) name: String,
    incarnation: u64,
    connection: RefCell<Option<Connection>>,
    /// One dials at a time.
    dialling: tokio::sync::Mutex<()>,
    is_silent: Cell<bool>,
    /// Whether it is asked for a sign of life.
    is_doubted: Cell<bool>,
    /// Fetches, one after the other, that it did not answer in time, though it was heard.
    late_fetches: Cell<u32>,
    /// When the last of them was late.
    late_at: Cell<Duration>,
    /// Bounds what it is asked for at a time.
    pub(super) gate: Rc<Gate>,
    /// Bounds what is followed there. A follow takes as long as a prefill: it would keep fetches from passing the gate.
    pub(super) follows: Arc<Semaphore>,
}

/// When a peer was asked something, and what had come from it by then.
pub(super) struct Asked {
    at: Duration,
    packets: u64,
}

/// Why a peer cannot be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoLink {
    #[error("it is not a member")]
    NotAMember,
    #[error("it has not answered lately")]
    Silent,
    #[error("no connection can be made")]
    NoConnection,
}

impl SilentPeers {
    /// Which they are.
    #[must_use]
    pub fn get(&self) -> BTreeSet<NodeNumber> {
        self.lock().clone()
    }

    /// Whether a node is among them.
    #[must_use]
    pub fn contains(&self, node: NodeNumber) -> bool {
        self.lock().contains(&node)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<NodeNumber>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peers {
    pub(super) fn new(
        endpoint: Endpoint,
        limits: ExchangeLimits,
        metrics: ExchangeMetrics,
        clock: Clock,
        silent: SilentPeers,
        watch: Watch,
    ) -> Self {
        Self(Rc::new(Shared {
            endpoint,
            limits,
            metrics,
            clock,
            table: RefCell::default(),
            own: Cell::default(),
            links: RefCell::default(),
            silent,
            watched: RefCell::default(),
            watch,
            reports: Arc::new(Semaphore::new(MOST_REPORTS)),
        }))
    }

    pub(super) fn limits(&self) -> &ExchangeLimits {
        &self.0.limits
    }

    pub(super) fn metrics(&self) -> &ExchangeMetrics {
        &self.0.metrics
    }

    pub(super) fn clock(&self) -> Clock {
        self.0.clock
    }

    /// Tells a holder that chunks of its came with other bytes than they should have. Where too many such reports are under way
    /// it is not told: whoever reads the chunk next finds it too.
    pub(super) fn tell_damaged(&self, link: &Link, chunks: Chunks) {
        let Ok(place) = Arc::clone(&self.0.reports).try_acquire_owned() else { return };
        let (peers, node) = (self.clone(), link.node);
        actix_rt::spawn(async move {
            let report = PeerRequest::Damaged(chunks);
            if let Err(error) = peers.ask(node, &report, REPORT_DEADLINE, &Trace::default()).await {
                tracing::warn!(%error, "a holder was not told that a chunk of its came damaged");
            }
            drop(place);
        });
    }

    /// The table that counts.
    pub(super) fn table(&self) -> Arc<Table> {
        Arc::clone(&self.0.table.borrow())
    }

    /// Follows a new table: who is gone, or came back as somebody else, is let go.
    pub(super) fn set_table(&self, table: Arc<Table>, own: NodeNumber) {
        self.0.links.borrow_mut().retain(|&node, link| {
            let stays = table
                .member(node)
                .is_some_and(|member| (member.incarnation, &member.name) == (link.incarnation, &link.name));
            if !stays {
                self.lets_go(link);
            }
            stays
        });
        let gone = |was: &&Member| table.members.iter().all(|member| member.name != was.name);
        let by_peer = &self.0.metrics.by_peer;
        self.table().members.iter().filter(gone).for_each(|member| by_peer.forget(&member.name));
        let others = table.members.iter().filter(|member| member.number != own);
        others.for_each(|member| by_peer.know(&member.name));
        self.0.own.set(own);
        self.0.table.replace(table);
    }

    /// What comes of something; `None` where it panicked. Then the connection to the node that it was about goes, and with it
    /// whatever else is under way there.
    pub(super) async fn watched<T>(
        &self,
        task: &'static str,
        node: Option<NodeNumber>,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let came = self.0.watch.catch_in(task, work).await;
        if came.is_none()
            && let Some(link) = node.and_then(|node| self.0.links.borrow_mut().remove(&node))
        {
            self.lets_go(&link);
        }
        came
    }

    /// Knows nothing of any node any more but the table.
    pub(super) fn begin_again(&self) {
        let links = self.0.links.take();
        links.values().for_each(|link| self.lets_go(link));
    }

    fn lets_go(&self, link: &Link) {
        link.close();
        self.hears(link);
    }

    /// The number of the member of this name.
    pub(super) fn number_of(&self, name: &str) -> Option<NodeNumber> {
        self.table().members.iter().find(|member| member.name == name).map(|member| member.number)
    }

    /// How a node is called in metrics.
    pub(super) fn metrics_name<'a>(&self, name: &'a str) -> &'a str {
        if self.0.table.borrow().members.iter().any(|member| member.name == name) { name } else { OTHER }
    }

    /// Counts the packets of a connection with another node.
    pub(super) fn watch(&self, connection: &Connection) {
        if connection.peer().role == Role::Node {
            self.0.watched.borrow_mut().add(&connection.peer().name, connection.quic().clone());
        }
    }

    /// Brings the metrics of peers up to date.
    pub(super) fn show(&self) {
        let (table, by_peer) = (self.table(), &self.0.metrics.by_peer);
        let is_member = |name: &str| table.members.iter().any(|member| member.name == name);
        self.0.watched.borrow_mut().show(by_peer, is_member);
        for link in self.0.links.borrow().values() {
            let gauge = by_peer.in_flight_bytes.with_label_values(&[&link.name]);
            gauge.set(link.gate.bytes_under_way() as i64);
        }
    }

    /// Asks a node something small; while it is busy again and again, until the deadline.
    ///
    /// # Errors
    /// [`PeerUnavailable`] where no answer comes in time. Only a node of which nothing at all is heard counts as silent then.
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
        let asked = self.asks(&link);
        let busy = Cell::new(None);
        let answered = timeout(deadline, async {
            let mut pause = BusyPause::default();
            loop {
                let connection = self.connection(&link).await.inspect_err(|_| self.falls_silent(&link));
                let connection = connection.map_err(|error| unavailable(&error))?;
                let answer = converse(&connection, request, trace).await;
                match answer.map_err(|error| unavailable(&error))? {
                    PeerResponse::Busy(retry) => {
                        busy.set(Some(retry));
                        sleep(pause.next(retry)).await;
                    }
                    answer => return Ok(answer),
                }
            }
        });
        match (answered.await, busy.get()) {
            (Ok(Ok(response)), _) => {
                let took = self.0.clock.elapsed() - asked.at;
                self.0.metrics.round_trip_seconds.observe(took.as_secs_f64());
                Ok(response)
            }
            // A connection that breaks says nothing of the node: the next request makes another one.
            (Ok(Err(error)), _) => Err(error),
            (Err(_), Some(retry)) => Ok(PeerResponse::Busy(retry)),
            (Err(_), None) => {
                self.is_late(&link, &asked);
                Err(unavailable(&"no answer in time"))
            }
        }
    }

    /// The link to a member that is not known to be silent.
    pub(super) fn link(&self, node: NodeNumber) -> Result<Rc<Link>, NoLink> {
        let table = self.0.table.borrow();
        let member = table.member(node).filter(|_| node != self.0.own.get()).ok_or(NoLink::NotAMember)?;
        let mut links = self.0.links.borrow_mut();
        let link =
            links.entry(node).or_insert_with(|| Rc::new(Link::new(member, &self.0.limits, self.0.clock)));
        if link.is_silent.get() { Err(NoLink::Silent) } else { Ok(Rc::clone(link)) }
    }

    /// The link to the member of this name.
    pub(super) fn link_to(&self, name: &str) -> Result<Rc<Link>, NoLink> {
        self.link(self.number_of(name).ok_or(NoLink::NotAMember)?)
    }

    /// The connection to a node, dialled where there is none.
    pub(super) async fn connection(&self, link: &Rc<Link>) -> Result<Connection, NoLink> {
        if let Some(connection) = link.open_connection() {
            return Ok(connection);
        }
        let _dialling = link.dialling.lock().await;
        if let Some(connection) = link.open_connection() {
            return Ok(connection);
        }
        let (address, name) = {
            let table = self.0.table.borrow();
            let member = table.member(link.node).filter(|member| member.incarnation == link.incarnation);
            let member = member.ok_or(NoLink::NotAMember)?;
            (member.peer, member.name.clone())
        };
        let dial = self.0.endpoint.connect(address, Role::Node, Some(&name));
        match timeout(DIAL_DEADLINE, dial).await {
            Ok(Ok(connection)) => {
                tracing::debug!(node = %link.node, name, %address, "connected");
                self.watch(&connection);
                link.connection.replace(Some(connection.clone()));
                Ok(connection)
            }
            Ok(Err(error)) => {
                tracing::warn!(node = %link.node, name, %address, %error, "cannot connect to a node");
                Err(NoLink::NoConnection)
            }
            Err(_) => Err(NoLink::NoConnection),
        }
    }

    /// Something is asked of a node now.
    pub(super) fn asks(&self, link: &Link) -> Asked {
        Asked { at: self.0.clock.elapsed(), packets: self.0.watched.borrow().came(&link.name) }
    }

    /// A chunk came from a node, or the word that it has none.
    pub(super) fn heard(&self, link: &Link) {
        link.late_fetches.set(0);
    }

    /// An answer did not come in time. A node that was heard since it was asked is only slow. Nothing at all for
    /// [`SILENCE`] means that it is not there; for less, it is asked for a sign of life.
    fn is_late(&self, link: &Rc<Link>, asked: &Asked) -> bool {
        let was_heard = self.asks(link).packets > asked.packets;
        self.0.metrics.missed(if was_heard { "slow" } else { "silent" });
        if was_heard {
            return true;
        }
        match self.0.clock.elapsed().saturating_sub(asked.at) < SILENCE {
            true => self.doubts(link),
            false => self.falls_silent(link),
        }
        false
    }

    /// The same for blocks, that may take so long. A node that is heard, but lets [`LATE_FETCHES`] one after the other wait
    /// in vain, is left out too.
    pub(super) fn fetch_is_late(&self, link: &Rc<Link>, asked: &Asked, deadline: Duration) {
        let now = self.0.clock.elapsed();
        let waited = now.saturating_sub(asked.at);
        // Those that wait at the same time count as one, and what was asked shortly before the end says nothing.
        let counts = asked.at >= link.late_at.get() && waited >= deadline / 2;
        if self.is_late(link, asked) && counts {
            link.late_at.set(now);
            link.late_fetches.set(link.late_fetches.get() + 1);
            if link.late_fetches.get() >= LATE_FETCHES {
                self.falls_silent(link);
            }
        }
    }

    /// Asks a node for a sign of life: without one it is silent.
    fn doubts(&self, link: &Rc<Link>) {
        if link.is_silent() || link.is_doubted.replace(true) {
            return;
        }
        let (peers, link) = (self.clone(), Rc::clone(link));
        actix_rt::spawn(async move {
            let asked = peers.asks(&link);
            let answers = timeout(SILENCE, peers.probe(&link)).await == Ok(true);
            link.is_doubted.set(false);
            if !answers && peers.asks(&link).packets == asked.packets {
                peers.falls_silent(&link);
            }
        });
    }

    /// A node does not answer: nobody waits for it until it does again, which is tried from now on.
    pub(super) fn falls_silent(&self, link: &Rc<Link>) {
        if link.is_silent.replace(true) || !self.knows(link) {
            return;
        }
        self.note_silent(|silent| _ = silent.insert(link.node));
        tracing::warn!(node = %link.node, "a node does not answer: it is left out until it does");
        let (peers, link) = (self.clone(), Rc::clone(link));
        actix_rt::spawn(async move {
            let mut pause = FIRST_PROBE_PAUSE;
            // A node that answers at once, and not when it is asked for blocks, is not asked for them at once again.
            if link.late_fetches.get() >= LATE_FETCHES {
                sleep(LATE_PAUSE).await;
            }
            while peers.knows(&link) {
                if timeout(PROBE_DEADLINE, peers.probe(&link)).await == Ok(true) {
                    tracing::info!(node = %link.node, "a node answers again");
                    peers.hears(&link);
                    return;
                }
                sleep(pause + pause.mul_f64(chance() / 2.0)).await;
                pause = (pause * 2).min(LAST_PROBE_PAUSE);
            }
        });
    }

    async fn probe(&self, link: &Rc<Link>) -> bool {
        let Ok(connection) = self.connection(link).await else { return false };
        matches!(converse(&connection, &PeerRequest::Ping, &Trace::default()).await, Ok(PeerResponse::Done))
    }

    fn hears(&self, link: &Link) {
        // It has one more try: each that is late leaves it out again.
        link.late_fetches.set(link.late_fetches.get().min(LATE_FETCHES - 1));
        if link.is_silent.replace(false) {
            self.note_silent(|silent| _ = silent.remove(&link.node));
        }
    }

    fn note_silent(&self, change: impl FnOnce(&mut BTreeSet<NodeNumber>)) {
        let mut silent = self.0.silent.lock();
        change(&mut silent);
        self.0.metrics.silent.set(silent.len() as i64);
    }

    /// Whether this life of the node still counts.
    pub(super) fn knows(&self, link: &Rc<Link>) -> bool {
        self.0.links.borrow().get(&link.node).is_some_and(|known| Rc::ptr_eq(known, link))
    }
}

impl Link {
    fn new(member: &Member, limits: &ExchangeLimits, clock: Clock) -> Self {
        Self {
            node: member.number,
            name: member.name.clone(),
            incarnation: member.incarnation,
            connection: RefCell::default(),
            dialling: tokio::sync::Mutex::default(),
            is_silent: Cell::new(false),
            is_doubted: Cell::new(false),
            late_fetches: Cell::new(0),
            late_at: Cell::default(),
            gate: Gate::new(limits, clock),
            follows: Arc::new(Semaphore::new(FOLLOWS_PER_PEER)),
        }
    }

    /// Whether it does not answer now.
    pub(super) fn is_silent(&self) -> bool {
        self.is_silent.get()
    }

    fn open_connection(&self) -> Option<Connection> {
        self.connection.borrow().clone().filter(|connection| connection.quic().close_reason().is_none())
    }

    fn close(&self) {
        if let Some(connection) = self.connection.take() {
            connection.quic().close(VarInt::from_u32(0), b"not a member any more");
        }
    }
}

/// One request and its answer, on a stream of their own, ahead of blocks.
async fn converse(
    connection: &Connection,
    request: &PeerRequest,
    trace: &Trace,
) -> Result<PeerResponse, Box<dyn std::error::Error>> {
    let (mut send, mut receive) = connection.quic().open_bi().await?;
    send.set_priority(SMALL_FIRST)?;
    write_trace(&mut send, trace).await?;
    write_message(&mut send, request).await?;
    send.finish()?;
    read_message(&mut receive).await?.ok_or_else(|| "no answer on the stream".into())
}

/// Says what the request that follows belongs to, where that is recorded.
pub(super) async fn write_trace(send: &mut SendStream, trace: &Trace) -> Result<(), MessageError> {
    match trace.context() {
        Some(context) => write_message(send, &PeerRequest::Trace(context)).await,
        None => Ok(()),
    }
}

/// Small requests go before blocks, whose streams have priority 0. Classes of blocks share a connection evenly: QUIC would
/// let nothing of a lower priority pass while there is anything of a higher one, and the asker's gate bounds what it shares.
pub(super) const SMALL_FIRST: i32 = 1;

/// Follows of one node at a time; each has a stream. A connection carries 256.
const FOLLOWS_PER_PEER: usize = 128;

/// Reports of damage that are under way at a time, to all peers, and how long one may take.
const MOST_REPORTS: usize = 16;
const REPORT_DEADLINE: Duration = Duration::from_secs(2);

/// How long a handshake may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(1);

/// A node of which nothing at all is heard for so long, though it was asked something, is not there. A process that is
/// scheduled late on a busy machine is heard sooner.
const SILENCE: Duration = Duration::from_millis(500);

/// So many fetches one after the other a node may leave without an answer while it is heard.
const LATE_FETCHES: u32 = 3;

/// How long such a node is left out at least.
const LATE_PAUSE: Duration = Duration::from_secs(1);

/// How long a silent node may take to show that it lives.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// Pauses between such attempts.
const FIRST_PROBE_PAUSE: Duration = Duration::from_millis(20);
const LAST_PROBE_PAUSE: Duration = Duration::from_secs(1);
