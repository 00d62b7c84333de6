//! A holder before peers that do not read what they requested.

use futures_util::future::join_all;
use larder_net::metrics::Part as _;
use larder_protocol::peer::{Announced, Chunks, Fetch, Rows, Show};
use larder_protocol::table::Epoch;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::*;
use crate::exchange::rooms::read_answer;
use crate::exchange::serve::limits_of;
use crate::exchange::{ServeAnnounce, ServeFind, ServeRepair};

/// Has every chunk, all in one place, and knows nothing of a directory.
pub(super) struct HasAll {
    memory: Arc<ExtentMemory>,
    ended: UnboundedSender<u64>,
}

impl HasAll {
    pub(super) fn new(ended: UnboundedSender<u64>) -> Self {
        let memory = Arc::clone(arena(2).extent(1));
        memory.copy_in(0, &CONTENT).unwrap();
        Self { memory, ended }
    }
}

impl Actor for HasAll {
    type Context = Context<Self>;
}

impl Handler<AskBlocks> for HasAll {
    type Result = Vec<Grant>;

    fn handle(&mut self, ask: AskBlocks, _: &mut Self::Context) -> Self::Result {
        let grant = |(number, hash): (usize, &ChunkHash)| {
            let memory = Arc::clone(&self.memory);
            let block = GrantedBlock { memory, offset: 0, bytes: BLOCK_BYTES, checksum: checksum(hash) };
            let lease = Arc::new(PeerLease { number: number as u64, ended: self.ended.clone() });
            let pools = PoolSet::first(1);
            Grant::Held(GrantedChunk { reads: 1, is_on_disk: false, pools, blocks: vec![block], lease })
        };
        ask.hashes.iter().enumerate().map(grant).collect()
    }
}

impl Handler<ServeFind> for HasAll {
    type Result = MessageResult<ServeFind>;

    fn handle(&mut self, _: ServeFind, _: &mut Self::Context) -> Self::Result {
        MessageResult(Rows { epoch: Epoch::default(), spans: Vec::new() })
    }
}

impl Handler<ServeAnnounce> for HasAll {
    type Result = MessageResult<ServeAnnounce>;

    fn handle(&mut self, _: ServeAnnounce, _: &mut Self::Context) -> Self::Result {
        MessageResult(vec![Announced::Later])
    }
}

impl Handler<ServeRepair> for HasAll {
    type Result = ();

    fn handle(&mut self, _: ServeRepair, _: &mut Self::Context) {}
}

/// Wants all offered chunks, and keeps all chunks that it is asked to take.
impl Handler<TakeIn> for HasAll {
    type Result = Vec<bool>;

    fn handle(&mut self, offered: TakeIn, _: &mut Self::Context) -> Self::Result {
        vec![true; offered.chunks.len()]
    }
}

impl Handler<TakeChunks> for HasAll {
    type Result = MessageResult<TakeChunks>;

    fn handle(&mut self, take: TakeChunks, _: &mut Self::Context) -> Self::Result {
        MessageResult(Some(Taken { is_kept: vec![true; take.chunks.len()], ..Taken::default() }))
    }
}

pub(super) fn services(all: &Addr<HasAll>) -> Services {
    Services {
        shares: true,
        blocks: vec![all.clone().recipient()],
        follow: Vec::new(),
        take_in: vec![all.clone().recipient()],
        tell: Vec::new(),
        pin: Vec::new(),
        take: vec![all.clone().recipient()],
        drain: Box::new(|_, _| Err(String::new())),
        reload: Box::new(|_| Box::pin(async { Err(String::new()) })),
        purge: Box::new(|_, _| Err(String::new())),
        // The answer never comes.
        show: Box::new(|_| Box::pin(std::future::pending())),
        audit: larder_net::audit::Audit::default(),
        find: all.clone().recipient(),
        announce: all.clone().recipient(),
        repair: all.clone().recipient(),
        sampler: larder_net::trace::TracingConfig::default().sampler(),
    }
}

/// A node that serves others.
pub(super) struct Serving {
    pub(super) metrics: ExchangeMetrics,
    pub(super) watch: Watch,
    /// Leases that have ended.
    pub(super) ends: UnboundedReceiver<u64>,
    pub(super) actor: Addr<PeerActor>,
    _handle: ExchangeHandle,
}

impl Serving {
    pub(super) async fn start(holder: Endpoint, limits: ExchangeLimits) -> Self {
        Self::with(holder, limits, async |common| (common, TakenThreads::none())).await
    }

    /// Starts the node with the ways of blocks and the block threads that `prepare` returns.
    pub(super) async fn with(
        holder: Endpoint,
        limits: ExchangeLimits,
        prepare: impl AsyncFnOnce(Common) -> (Common, TakenThreads),
    ) -> Self {
        let metrics = ExchangeMetrics::register(&Registry::new()).unwrap();
        let watch = Watch::in_test();
        let clock = Clock::start();
        let (_handle, orders) = ExchangeHandle::new(clock);
        let others = (SilentPeers::default(), ConnectedPeers::default());
        let common = Common::new(&limits, metrics.clone(), clock, Rooms::default());
        let (common, threads) = prepare(common).await;
        let watches = watch.clone();
        let actor = PeerActor::new(holder, limits, common, others, threads, watches, orders).start();
        let (ended, ends) = unbounded_channel();
        actor.send(Serve(services(&HasAll::new(ended).start()))).await.unwrap();
        Self { metrics, watch, ends, actor, _handle }
    }
}

/// Requests `chunks` chunks. Nothing of the answer is read yet.
pub(super) async fn asks(connection: &Connection, chunks: u64) -> quinn::RecvStream {
    let (mut send, receive) = connection.quic().open_bi().await.unwrap();
    write_message(&mut send, &PeerRequest::Fetch(fetch_of(chunks))).await.unwrap();
    send.finish().unwrap();
    receive
}

/// A fetch of so many chunks.
pub(super) fn fetch_of(chunks: u64) -> Fetch {
    let hashes = (0..chunks).map(|number| ChunkHash([number as u8; 32])).collect();
    let chunks = Chunks { device: 0, fingerprint: SPACE, hashes };
    Fetch { chunks, block_bytes: vec![BLOCK_BYTES], class: Class::Decode }
}

#[test]
fn who_went_away_before_an_answer_leaves_its_seat_to_others() {
    System::new().block_on(async {
        let owners = [Identity::new(Role::Node, "node-1"), Identity::new(Role::Coordinator, "c")];
        let [holder, asker] =
            credentials_of(owners.map(|owner| (owner, Version::LATEST))).map(|one| endpoint(&one));
        let address = holder.local_address();
        let serving = Serving::start(holder, ExchangeLimits::default()).await;
        let asks = async || {
            let connection = asker.connect(address, Role::Node, Some("node-1")).await.unwrap();
            let (mut send, receive) = connection.quic().open_bi().await.unwrap();
            let show = Show { path: "/doctor".to_owned(), body: Vec::new() };
            write_message(&mut send, &PeerRequest::Show(show)).await.unwrap();
            send.finish().unwrap();
            (connection, receive)
        };
        let came = || serving.metrics.requests.with_label_values(&["show"]).get();
        let seats = limits_of(Role::Coordinator).connections;
        for asked in 1..=2 * seats as u64 {
            let (connection, receive) = asks().await;
            until("the question came", || came() == asked).await;
            drop(receive);
            connection.quic().close(0_u32.into(), b"the asker goes away");
            until("the connection is gone", || serving.metrics.connections.get() == 0).await;
        }
    });
}

fn held(chunks: &[FetchedChunk]) -> u64 {
    chunks.iter().filter(|chunk| matches!(chunk, FetchedChunk::Held(_))).count() as u64
}

#[test]
fn each_stage_of_sending_is_timed() {
    System::new().block_on(async {
        let [holder, asker] = endpoints(["node-1", "node-2"]);
        let address = holder.local_address();
        let Serving { metrics, .. } = Serving::start(holder, ExchangeLimits::default()).await;
        let connection = asker.connect(address, Role::Node, Some("node-1")).await.unwrap();
        let mut receive = asks(&connection, 2).await;
        assert!(matches!(read_answer(&mut receive).await, Ok(Some((_, PeerResponse::Fetched(_))))));
        receive.read_to_end(3 * BLOCK_BYTES as usize).await.unwrap();
        until("the last byte is acknowledged", || metrics.counted(Stage::Acknowledged) == 1).await;
        assert_eq!([Stage::Grant, Stage::Send].map(|stage| metrics.counted(stage)), [1, 1]);
    });
}

#[test]
fn blocks_that_are_asked_for_together_come_one_after_the_other() {
    System::new().block_on(async {
        let [holder, asker] = endpoints(["node-1", "node-2"]);
        let address = holder.local_address();
        let _serving = Serving::start(holder, ExchangeLimits::default()).await;
        let connection = asker.connect(address, Role::Node, Some("node-1")).await.unwrap();
        let came = [const { Cell::new(0) }; 8];
        let mut streams = Vec::new();
        for _ in &came {
            streams.push(asks(&connection, 4).await);
        }
        // Returns how many bytes of the last answer had come when another answer was complete.
        let reads = came.iter().zip(streams).map(async |(bytes, mut stream)| {
            while let Some(chunk) = stream.read_chunk(usize::MAX, true).await.unwrap() {
                bytes.set(bytes.get() + chunk.bytes.len() as u64);
            }
            came[7].get()
        });
        let last = join_all(reads).await;
        assert!(last[0] < 2 * BLOCK_BYTES, "{last:?}");
        assert!(last[7] > 4 * BLOCK_BYTES, "{last:?}");
    });
}

#[test]
fn peers_that_stop_reading_neither_take_everything_nor_keep_it() {
    System::new().block_on(async {
        let names = ["node-1", "stuck-1", "stuck-2", "stuck-3", "stuck-4", "honest"];
        let [holder, askers @ ..] = endpoints(names);
        let address = holder.local_address();
        // More than a connection carries before its other side reads: 8 MiB.
        let limits = ExchangeLimits { sending_bytes: 2_048 * BLOCK_BYTES, ..ExchangeLimits::default() };
        let Serving { metrics, mut ends, .. } = Serving::start(holder, limits).await;
        let mut connections = Vec::new();
        for asker in &askers {
            connections.push(asker.connect(address, Role::Node, Some("node-1")).await.unwrap());
        }
        let [stuck @ .., honest] = &connections[..] else { panic!("all have connected") };

        // Each requests twice as much as all may have together.
        let mut unread = Vec::new();
        for connection in stuck {
            for _ in 0..16 {
                unread.push(asks(connection, 256).await);
            }
        }
        until("all are served", || metrics.requests("fetch") == 64).await;
        let mut receive = asks(honest, 32).await;
        let Ok(Some((_, PeerResponse::Fetched(chunks)))) = read_answer(&mut receive).await else {
            panic!("an answer")
        };
        assert_eq!(held(&chunks), 32, "the others left room");
        let came = receive.read_to_end(33 * BLOCK_BYTES as usize).await.unwrap();
        assert_eq!(came.len() as u64, 32 * BLOCK_BYTES);

        // Blocks that nobody reads are given up after a moment, and their chunks' leases with them.
        until("some sends are given up", || metrics.stalled_sends() >= 4).await;
        let mut ended = 0;
        while tokio::time::timeout(Duration::from_secs(3), ends.recv()).await.is_ok() {
            ended += 1;
        }
        // The actor is asked only for chunks that have room: it may have to read them from disk.
        assert!((2_048 / 4..3 * 2_048).contains(&ended), "{ended} of {} chunks were leased", 64 * 256 + 32);
        drop(unread);
    });
}
