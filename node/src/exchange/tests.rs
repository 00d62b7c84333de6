//! The asking half before a holder that is busy, slow, breaks off or is silent: its results, and how much it asks of the holder.
//!
//! The holder is a real endpoint on loopback whose answers the test decides.

mod block_threads;
mod connections;
mod follows;
mod panics;
mod sends;
mod silence;
mod tcp;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use larder_core::cause::Cause;
use larder_core::store::ids::TenantId;
use larder_core::{FetchFailure, OrderNumber};
use larder_net::metrics::Part as _;
use larder_net::quic::ca::{Authority, Validity};
use larder_net::quic::{Connection, Credentials, TransportSettings, read_message, write_message};
use larder_net::trace::Trace;
use larder_protocol::checksum::{BlockKey, RangeChecksum, block_checksum};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::peer::{FetchedChunk, HeldBlock, HeldChunk, OfferChunks, RetryAfter};
use larder_protocol::table::Table;
use larder_protocol::version::Version;
use prometheus::Registry;
use quinn::SendStream;
use tokio::sync::Notify;

use self::follows::{Says, play};
use super::*;
use crate::arena::tests::arena;
use crate::directory::tests::table;

const SPACE: Fingerprint = Fingerprint([7; 32]);
const BLOCK_BYTES: u64 = 64 << 10;
/// Blocks in one extent.
const SLOTS: u64 = (2 << 20) / BLOCK_BYTES;
const EXTENTS: usize = 10;
static CONTENT: [u8; BLOCK_BYTES as usize] = [0x5a; BLOCK_BYTES as usize];

/// The holder's reaction to a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Sends,
    IsBusy,
    /// Sends the first chunk of each fetch, and is busy with the others.
    IsBusyAfterTheFirst,
    ClosesTheConnection,
    /// Closes the connection as idle, and sends from then on.
    ClosesAsIdle,
    Nothing,
    /// Sends when the test lets it.
    Waits,
}

/// Node 2, which holds everything.
struct Holder2 {
    does: Cell<Does>,
    fetches: Cell<usize>,
    under_way: Cell<usize>,
    most_under_way: Cell<usize>,
    chunks_under_way: Cell<usize>,
    most_chunks_under_way: Cell<usize>,
    go_on: Notify,
    connections: RefCell<Vec<Connection>>,
    /// The holder's messages to the next follower, and whether it then ends the stream.
    says: RefCell<Option<(Vec<Says>, bool)>>,
    /// Followers that the holder tells now.
    plays: Cell<usize>,
}

impl Holder2 {
    fn serve(endpoint: Endpoint) -> Rc<Self> {
        let holder = Rc::new(Self {
            does: Cell::new(Does::Sends),
            fetches: Cell::new(0),
            under_way: Cell::new(0),
            most_under_way: Cell::new(0),
            chunks_under_way: Cell::new(0),
            most_chunks_under_way: Cell::new(0),
            go_on: Notify::new(),
            connections: RefCell::default(),
            says: RefCell::default(),
            plays: Cell::new(0),
        });
        let served = Rc::clone(&holder);
        actix_rt::spawn(async move {
            while let Some(incoming) = endpoint.accept().await {
                let connection = incoming.accept().await.unwrap();
                served.connections.borrow_mut().push(connection.clone());
                let served = Rc::clone(&served);
                actix_rt::spawn(async move {
                    while let Ok((send, mut receive)) = connection.quic().accept_bi().await {
                        let (served, connection) = (Rc::clone(&served), connection.clone());
                        actix_rt::spawn(async move {
                            let request = read_message(&mut receive).await.unwrap().unwrap();
                            served.answer(request, send, &connection).await;
                        });
                    }
                });
            }
        });
        holder
    }

    async fn answer(&self, request: PeerRequest, mut send: SendStream, connection: &Connection) {
        if self.does.get() == Does::ClosesAsIdle {
            self.does.set(Does::Sends);
            return connection.close_as_idle();
        }
        if let PeerRequest::Follow(ask) = request {
            let (says, ends) = self.says.take().unwrap_or_default();
            self.plays.set(self.plays.get() + 1);
            play(says, ends, ask, send).await;
            return self.plays.set(self.plays.get() - 1);
        }
        let PeerRequest::Fetch(fetch) = request else {
            if self.does.get() != Does::Nothing {
                write_message(&mut send, &PeerResponse::Done).await.unwrap();
            }
            return send.finish().unwrap();
        };
        let hashes = fetch.chunks.hashes;
        self.fetches.set(self.fetches.get() + 1);
        self.under_way.set(self.under_way.get() + 1);
        self.most_under_way.set(self.most_under_way.get().max(self.under_way.get()));
        self.chunks_under_way.set(self.chunks_under_way.get() + hashes.len());
        self.most_chunks_under_way.set(self.most_chunks_under_way.get().max(self.chunks_under_way.get()));
        match self.does.get() {
            Does::IsBusy => {
                let busy = PeerResponse::Busy(RetryAfter { retry_after_ms: 77 });
                write_message(&mut send, &busy).await.unwrap();
            }
            Does::ClosesTheConnection => connection.quic().close(0_u32.into(), b"enough"),
            // The asker ends the stream.
            Does::Nothing => _ = send.stopped().await,
            Does::Sends | Does::ClosesAsIdle => send_all(&mut send, &hashes).await,
            Does::IsBusyAfterTheFirst => send_some(&mut send, &hashes, 1).await,
            Does::Waits => {
                self.go_on.notified().await;
                self.under_way.set(self.under_way.get() - 1);
                self.chunks_under_way.set(self.chunks_under_way.get() - hashes.len());
                send_all(&mut send, &hashes).await;
            }
        }
    }
}

async fn send_all(send: &mut SendStream, hashes: &[ChunkHash]) {
    send_some(send, hashes, hashes.len()).await;
}

/// Sends the first `most` chunks, and is too busy for the others.
async fn send_some(send: &mut SendStream, hashes: &[ChunkHash], most: usize) {
    let held = hashes.iter().enumerate().map(|(at, hash)| {
        if at >= most {
            return FetchedChunk::Busy(RetryAfter { retry_after_ms: 3 });
        }
        let block = HeldBlock { bytes: BLOCK_BYTES, checksum: checksum(hash) };
        FetchedChunk::Held(HeldChunk {
            reads: 1,
            is_on_disk: false,
            pools: PoolSet::first(1),
            blocks: vec![block],
        })
    });
    write_message(send, &PeerResponse::Fetched(held.collect())).await.unwrap();
    for _ in hashes.iter().take(most) {
        send.write_all(&CONTENT).await.unwrap();
    }
    send.finish().unwrap();
}

fn key(hash: &ChunkHash) -> BlockKey {
    BlockKey { fingerprint: SPACE, hash: *hash, slice: 0, pool: 0 }
}

fn checksum(hash: &ChunkHash) -> u64 {
    let mut range = RangeChecksum::new();
    range.update(&CONTENT);
    block_checksum(&key(hash), &[range.finish()])
}

/// Node 1, which asks node 2.
struct Asker {
    handle: ExchangeHandle,
    /// The memory of the first blocks.
    memory: Arc<ExtentMemory>,
    extents: Vec<Arc<ExtentMemory>>,
    next: Cell<u64>,
    /// The other node's name.
    other: String,
    actor: Addr<PeerActor>,
    silent: SilentPeers,
    /// Whether others have the requested chunks, too.
    has_others: Cell<bool>,
    watch: Watch,
    metrics: ExchangeMetrics,
}

impl Asker {
    fn new(endpoint: Endpoint, limits: &ExchangeLimits, table: Table) -> Self {
        let common = common(limits);
        Self::with_threads(endpoint, limits, table, common, TakenThreads::none())
    }

    fn with_threads(
        endpoint: Endpoint,
        limits: &ExchangeLimits,
        table: Table,
        common: Common,
        threads: TakenThreads,
    ) -> Self {
        let (metrics, clock) = (common.metrics.clone(), common.clock());
        let other = table.members[1].name.clone();
        let silent = SilentPeers::default();
        let known = (silent.clone(), ConnectedPeers::default());
        let (watch, (handle, orders)) = (Watch::in_test(), ExchangeHandle::new(clock));
        let actor = PeerActor::new(endpoint, limits.clone(), common, known, threads, watch.clone(), orders);
        actor.peers.set_table(Arc::new(table), NodeNumber(1));
        let arena = arena(EXTENTS as u32);
        let extents: Vec<_> = (0..EXTENTS as u32).map(|extent| Arc::clone(arena.extent(extent))).collect();
        let (memory, next) = (Arc::clone(&extents[0]), Cell::new(0));
        let (actor, has_others) = (actor.start(), Cell::new(false));
        Self { handle, memory, extents, next, other, actor, silent, has_others, watch, metrics }
    }

    /// Whether the other node answers a small request within the deadline.
    async fn pings(&self, deadline: Duration) -> bool {
        let (node, request, trace) = (NodeNumber(2), PeerRequest::Ping, Trace::default());
        self.actor.send(AskPeer { node, request, deadline, trace }).await.unwrap().is_ok()
    }

    /// Orders `chunks` chunks, and waits for their results.
    async fn fetch(&self, chunks: u64, deadline: Duration) -> Vec<Arrival> {
        self.fetch_as(&watch::Sender::new(Class::Decode), chunks, deadline).await
    }

    async fn fetch_as(&self, class: &watch::Sender<Class>, chunks: u64, deadline: Duration) -> Vec<Arrival> {
        self.order(self.chunks(chunks), class, deadline).await
    }

    /// `count` new chunks.
    fn chunks(&self, count: u64) -> Vec<FetchChunk> {
        let first = self.next.replace(self.next.get() + count);
        let chunk = |number: u64| {
            let mut hash = ChunkHash([0; 32]);
            hash.0[..8].copy_from_slice(&number.to_le_bytes());
            let block = Destination {
                memory: Arc::clone(&self.extents[(number / SLOTS) as usize % EXTENTS]),
                offset: number % SLOTS * BLOCK_BYTES,
                bytes: BLOCK_BYTES,
                range_bytes: BLOCK_BYTES,
                key: key(&hash),
            };
            FetchChunk { hash, blocks: vec![block] }
        };
        (first..first + count).map(chunk).collect()
    }

    async fn order(
        &self,
        chunks: Vec<FetchChunk>,
        class: &watch::Sender<Class>,
        deadline: Duration,
    ) -> Vec<Arrival> {
        self.handle.fetch(self.order_of(chunks, class, deadline)).unwrap().await.unwrap()
    }

    fn order_of(
        &self,
        chunks: Vec<FetchChunk>,
        class: &watch::Sender<Class>,
        deadline: Duration,
    ) -> FetchOrder {
        let order = order_to(NodeNumber(2), chunks, class, deadline);
        let ordered = larder_core::FetchOrder { has_others: self.has_others.get(), ..order.ordered };
        FetchOrder { ordered, ..order }
    }
}

/// An order that nobody cancels.
fn order_to(
    node: NodeNumber,
    chunks: Vec<FetchChunk>,
    class: &watch::Sender<Class>,
    deadline: Duration,
) -> FetchOrder {
    let ordered = larder_core::FetchOrder {
        order: OrderNumber(1),
        holder: Holder { node, device: 0 },
        fingerprint: SPACE,
        tenant: TenantId(0),
        chunks: Vec::new(),
        deadline,
        has_others: false,
        class: *class.borrow(),
        cause: Cause::default(),
    };
    let (class, cancelled) = (class.subscribe(), oneshot::channel().1);
    FetchOrder { ordered, chunks, class, cancelled, trace: Trace::default() }
}

/// The parts that the threads of a node share.
fn common(limits: &ExchangeLimits) -> Common {
    let metrics = ExchangeMetrics::register(&Registry::new()).unwrap();
    Common::new(limits, metrics, Clock::start(), Rooms::default())
}

/// Endpoints of nodes of these names.
fn endpoints<const COUNT: usize>(names: [&str; COUNT]) -> [Endpoint; COUNT] {
    endpoints_of(names.map(|name| (name, Version::LATEST)))
}

/// Endpoints of nodes of these names. They speak no later version than these.
fn endpoints_of<const COUNT: usize>(nodes: [(&str, Version); COUNT]) -> [Endpoint; COUNT] {
    credentials(nodes).map(|credentials| endpoint(&credentials))
}

fn endpoint(credentials: &Credentials) -> Endpoint {
    Endpoint::bind(any_port(), credentials, &TransportSettings::default()).unwrap()
}

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn credentials<const COUNT: usize>(nodes: [(&str, Version); COUNT]) -> [Credentials; COUNT] {
    credentials_of(nodes.map(|(name, latest)| (Identity::new(Role::Node, name), latest)))
}

fn credentials_of<const COUNT: usize>(owners: [(Identity, Version); COUNT]) -> [Credentials; COUNT] {
    let (authority, files) = Authority::create(Validity::days(1)).unwrap();
    owners.map(|(identity, latest)| {
        let issued = authority.issue(&identity, Validity::days(1)).unwrap();
        let [ca, certificate, key] =
            [&files.certificate_pem, &issued.certificate_pem, &issued.key_pem].map(String::as_bytes);
        Credentials::speaking(Version::EARLIEST..=latest, ca, certificate, key).unwrap()
    })
}

/// Runs a test between the two nodes.
fn between(limits: ExchangeLimits, test: impl AsyncFnOnce(Asker, Rc<Holder2>)) {
    between_versions([Version::LATEST; 2], limits, test);
}

/// Runs a test between the two nodes, which speak no later versions than these.
fn between_versions(
    [asks, holds]: [Version; 2],
    limits: ExchangeLimits,
    test: impl AsyncFnOnce(Asker, Rc<Holder2>),
) {
    System::new().block_on(async {
        let [asker, holder] = endpoints_of([("node-1", asks), ("node-2", holds)]);
        let mut table = Table::clone(&table(1, &BTreeMap::from([(1, 10), (2, 20)])));
        table.members[1].peer = holder.local_address();
        test(Asker::new(asker, &limits, table), Holder2::serve(holder)).await;
    });
}

fn is_here(fetched: &[Arrival]) -> bool {
    fetched.iter().all(|fetched| matches!(fetched, Arrival::Here { reads: 1, .. }))
}

/// Far more than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(20);

/// Limits with small batches: each chunk has a stream of its own.
fn a_stream_a_chunk() -> ExchangeLimits {
    ExchangeLimits { batch_bytes: BLOCK_BYTES, ..ExchangeLimits::default() }
}

/// Waits for something that other tasks bring about.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, wait).await.expect(what);
}

#[test]
fn blocks_come_into_their_slots() {
    between(ExchangeLimits::default(), async |asker, holder| {
        let came = asker.fetch(10, LONG).await;
        assert!(came.len() == 10 && is_here(&came), "{came:?}");
        assert_eq!(holder.fetches.get(), 1, "one stream carries what fits");
        let mut bytes = vec![0; 10 * BLOCK_BYTES as usize];
        asker.memory.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == CONTENT[0]));
    });
}

#[test]
fn each_stage_of_an_order_is_timed() {
    between(a_stream_a_chunk(), async |asker, _holder| {
        assert!(is_here(&asker.fetch(3, LONG).await));
        let counted = [Stage::Queue, Stage::Turn, Stage::Answer, Stage::Blocks]
            .map(|stage| asker.metrics.counted(stage));
        assert_eq!(counted, [1, 3, 3, 3], "one order, three streams");
    });
}

#[test]
fn a_node_of_version_1_sends_blocks_and_is_asked_for_nothing_that_it_does_not_know() {
    for versions in [[Version::LATEST, Version::FIRST], [Version::FIRST, Version::LATEST]] {
        between_versions(versions, ExchangeLimits::default(), async |asker, _holder| {
            assert!(is_here(&asker.fetch(3, LONG).await));
            let (fingerprint, chunks) = (SPACE, Vec::new());
            let request = PeerRequest::Offer(OfferChunks { device: 0, fingerprint, worth: 1, chunks });
            let (node, trace) = (NodeNumber(2), Trace::default());
            let answer = asker.actor.send(AskPeer { node, request, deadline: LONG, trace }).await.unwrap();
            let error = answer.unwrap_err().to_string();
            assert!(error.contains("the node speaks larder/1, which has no such request"), "{error}");
            assert!(asker.pings(LONG).await && asker.silent.get().is_empty());
        });
    }
}

#[test]
fn a_block_that_the_holder_lacks_is_said_to_be_missing_and_its_slot_is_left_alone() {
    between(ExchangeLimits::default(), async |asker, _| {
        asker.memory.copy_in(BLOCK_BYTES, &[0x11; 8]).unwrap();
        let hash = ChunkHash([3; 32]);
        let to = |pool: u8| Destination {
            memory: Arc::clone(&asker.memory),
            offset: u64::from(pool) * BLOCK_BYTES,
            bytes: BLOCK_BYTES,
            range_bytes: BLOCK_BYTES,
            key: BlockKey { pool, ..key(&hash) },
        };
        let (chunks, class) =
            (vec![FetchChunk { hash, blocks: vec![to(0), to(1)] }], watch::Sender::new(Class::Decode));
        let [Arrival::Here { checksums, pools, .. }] = &asker.order(chunks, &class, LONG).await[..] else {
            panic!("the other block comes");
        };
        assert_eq!((checksums.len(), *pools), (1, PoolSet::first(1)));
        let mut bytes = [0; 8];
        asker.memory.copy_out(BLOCK_BYTES, &mut bytes).unwrap();
        assert_eq!(bytes, [0x11; 8]);
    });
}

#[test]
fn one_peer_is_asked_on_so_many_streams_at_a_time() {
    let limits = ExchangeLimits { streams_per_peer: 3, ..a_stream_a_chunk() };
    between(limits, async |asker, holder| {
        holder.does.set(Does::Waits);
        let (came, ()) = tokio::join!(asker.fetch(12, LONG), async {
            for served in 1..=12 {
                let expected = 3.min(13 - served);
                until("three are under way", || holder.under_way.get() == expected).await;
                holder.go_on.notify_one();
                until("one is served", || holder.fetches.get() >= (served + 3).min(12)).await;
            }
        });
        assert!(is_here(&came), "{came:?}");
        assert_eq!((holder.fetches.get(), holder.most_under_way.get()), (12, 3));
    });
}

#[test]
fn credits_bound_the_bytes_that_are_asked_for() {
    let limits = ExchangeLimits { streams_per_peer: 8, credit_bytes: 2 * BLOCK_BYTES, ..a_stream_a_chunk() };
    between(limits, async |asker, holder| {
        holder.does.set(Does::Waits);
        let (came, ()) = tokio::join!(asker.fetch(6, LONG), async {
            for served in 1..=6 {
                until("two are under way", || holder.chunks_under_way.get() == 2.min(7 - served)).await;
                holder.go_on.notify_one();
                until("one is served", || holder.fetches.get() >= (served + 2).min(6)).await;
            }
        });
        assert!(is_here(&came), "{came:?}");
        assert_eq!(holder.most_chunks_under_way.get(), 2);
    });
}

/// Uses one stream at a time: a prefetch of four chunks, and two more fetches that are ordered while the first is under way.
/// Returns what was served, in order.
async fn served_after_a_prefetch(asker: &Asker, holder: &Holder2, class: Class, later: Class) -> Vec<u8> {
    holder.does.set(Does::Waits);
    let (slow, other) = (watch::Sender::new(Class::Prefetch), watch::Sender::new(class));
    let served = RefCell::new(Vec::new());
    let first = async {
        assert!(is_here(&asker.fetch_as(&slow, 4, LONG).await));
        served.borrow_mut().push(1);
    };
    let second = async {
        until("the first is under way", || holder.under_way.get() == 1).await;
        assert!(is_here(&asker.fetch_as(&other, 2, LONG).await));
        served.borrow_mut().push(2);
    };
    let serving = async {
        until("all have lined up", || asker.metrics.fetches_in_flight.get() == 6).await;
        other.send_replace(later);
        for fetch in 1..=6 {
            until("one is under way", || holder.fetches.get() == fetch).await;
            holder.go_on.notify_one();
        }
    };
    tokio::join!(first, second, serving);
    served.take()
}

#[test]
fn what_an_engine_waits_for_goes_before_what_is_only_prefetched() {
    let limits = ExchangeLimits { streams_per_peer: 1, ..a_stream_a_chunk() };
    between(limits, async |asker, holder| {
        let served = served_after_a_prefetch(&asker, &holder, Class::Decode, Class::Decode).await;
        assert_eq!(served, [2, 1]);
    });
}

#[test]
fn of_one_class_the_first_goes_first() {
    let limits = ExchangeLimits { streams_per_peer: 1, ..a_stream_a_chunk() };
    between(limits, async |asker, holder| {
        let served = served_after_a_prefetch(&asker, &holder, Class::Prefetch, Class::Prefetch).await;
        assert_eq!(served, [1, 2]);
    });
}

#[test]
fn a_prefetch_that_an_engine_comes_to_wait_for_goes_before_others() {
    let limits = ExchangeLimits { streams_per_peer: 1, ..a_stream_a_chunk() };
    between(limits, async |asker, holder| {
        let served = served_after_a_prefetch(&asker, &holder, Class::Prefetch, Class::Decode).await;
        assert_eq!(served, [2, 1]);
    });
}

#[test]
fn time_in_the_line_is_not_taken_for_silence() {
    let limits = ExchangeLimits { streams_per_peer: 1, ..a_stream_a_chunk() };
    between(limits, async |asker, holder| {
        holder.does.set(Does::Waits);
        let deadline = Duration::from_millis(1_500);
        let serving = async {
            for fetch in 1..=4 {
                until("one is under way", || holder.fetches.get() == fetch).await;
                // Four chunks together take longer than one chunk may.
                tokio::time::sleep(deadline / 3).await;
                holder.go_on.notify_one();
            }
        };
        let (came, ()) = tokio::join!(asker.fetch(4, deadline), serving);
        assert!(is_here(&came), "{came:?}");
    });
}

#[test]
fn a_busy_holder_is_asked_again_when_it_said_within_the_deadline() {
    between(ExchangeLimits::default(), async |asker, holder| {
        holder.does.set(Does::IsBusy);
        let serving = async {
            until("it was asked three times", || holder.fetches.get() >= 3).await;
            holder.does.set(Does::Sends);
        };
        let (came, ()) = tokio::join!(asker.fetch(2, LONG), serving);
        assert!(is_here(&came), "{came:?}");

        holder.does.set(Does::IsBusy);
        let came = asker.fetch(2, Duration::from_millis(300)).await;
        assert!(came.iter().all(|came| matches!(came, Arrival::Busy { retry_after_ms: 77 })), "{came:?}");
        assert!(asker.silent.get().is_empty(), "it is no reason to leave it alone");
    });
}

#[test]
fn of_a_fetch_only_what_the_holder_was_too_busy_for_is_asked_again() {
    between(ExchangeLimits::default(), async |asker, holder| {
        holder.does.set(Does::IsBusyAfterTheFirst);
        let came = asker.fetch(4, LONG).await;
        assert!(is_here(&came), "{came:?}");
        assert_eq!(holder.fetches.get(), 4);
        assert_eq!(holder.chunks_under_way.get(), 4 + 3 + 2 + 1);
    });
}

#[test]
fn nobody_waits_for_a_busy_holder_of_chunks_that_others_have() {
    between(ExchangeLimits::default(), async |asker, holder| {
        holder.does.set(Does::IsBusy);
        asker.has_others.set(true);
        let came = asker.fetch(2, LONG).await;
        assert!(came.iter().all(|came| matches!(came, Arrival::Busy { retry_after_ms: 77 })), "{came:?}");
        assert_eq!(holder.fetches.get(), 1);
    });
}

#[test]
fn a_connection_that_breaks_fails_its_fetches_and_the_next_makes_a_new_one() {
    between(ExchangeLimits::default(), async |asker, holder| {
        holder.does.set(Does::ClosesTheConnection);
        let came = asker.fetch(2, LONG).await;
        assert!(came.iter().all(|came| matches!(came, Arrival::Failed(FetchFailure::Broken))), "{came:?}");
        holder.does.set(Does::Sends);
        assert!(is_here(&asker.fetch(2, LONG).await));
        assert_eq!(holder.connections.borrow().len(), 2);
    });
}

#[test]
fn a_node_that_is_no_member_is_asked_for_nothing() {
    between(ExchangeLimits::default(), async |asker, holder| {
        let order = order_to(NodeNumber(9), Vec::new(), &watch::Sender::new(Class::Decode), LONG);
        assert!(asker.handle.fetch(order).unwrap().await.unwrap().is_empty());
        assert_eq!((holder.fetches.get(), holder.connections.borrow().len()), (0, 0));
    });
}
