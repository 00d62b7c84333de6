//! Tests of the core in virtual time, without a process: events go in, effects come out.

mod announced;
mod below;
mod copies;
mod device;
mod drains;
mod forwards;
mod handoffs;
mod histories;
mod holders;
mod prefetches;
mod segments;
mod statistics;
mod unshown;
mod why;
mod written;

use std::num::NonZeroU32;
use std::time::Duration;

use larder_protocol::namespace::{HashAlgorithm, NamespaceSpec};
use larder_protocol::session::{Lease, Lookup, Request, Response};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{Chain, ChunkHash, Fingerprint, HitPolicy, PoolSet, PoolSpec};
use smallvec::smallvec;

use crate::cause::Cause;
use crate::directory::Holders;
use crate::event::Below;
use crate::store::ids::{ProcessId, SessionId, TenantId};
use crate::store::policy::PolicyName;
use crate::store::{
    Checksums, DiskStoreLimits, FetchId, Leased, ObjectStoreLimits, PeerStoreLimits, Refused, StoreLimits,
    WritePolicy,
};
use crate::{
    Arrival, Core, Counted, DeviceLimits, Effect, Event, FetchFailure, FetchOrder, OrderNumber, QuestionId,
    ReadAnswer, ReadId, RequestId, Sources,
};

/// Bytes of a block, and of its slot.
const BLOCK: u64 = 4_096;

const TENANTS: [&str; 2] = ["a", "b"];

/// How long a lease waits for another node in these tests.
const DEADLINE: Duration = Duration::from_secs(2);

const PEERS: Sources =
    Sources { siblings: None, peers: Some(DEADLINE), disk: None, object: None, known_chunks: 100 };

/// Four copies at a time, of 100 ms each, and room for three blocks.
const DEVICE: DeviceLimits =
    DeviceLimits { orders: 4, copy_deadline_ms: 100, tier_bytes: 3 * BLOCK, tier_policy: PolicyName::Lru };

fn limits() -> StoreLimits {
    StoreLimits {
        extents: 8,
        extent_bytes: 4 * BLOCK,
        capacity_chunks: Some(16),
        high_watermark_bytes: u64::MAX,
        low_watermark_bytes: u64::MAX,
        policy: PolicyName::Lru,
        recompute_doubles_at: None,
        age_speed: NonZeroU32::MIN,
        trust_engines: false,
        tenant_bytes: vec![u64::MAX, u64::MAX],
        max_leased_blocks: 1_000,
        max_reserved_bytes: 1_000 * BLOCK,
        max_pinned_bytes: 1_000 * BLOCK,
        reservation_ttl_ms: 1_000,
        max_pin_ms: 10_000,
        remembered_evictions: 64,
        peers: Some(PeerStoreLimits {
            passing_bytes: 16 * BLOCK,
            max_granted_chunks: 16,
            placement: crate::placement::PlacementRule::Reads,
        }),
        disk: Some(DiskStoreLimits {
            write: WritePolicy::default(),
            write_after_uses: 2,
            max_waiting_bytes: 4 * BLOCK,
            max_reading_bytes: 16 * BLOCK,
        }),
        object: Some(ObjectStoreLimits {
            write: None,
            write_after_uses: 2,
            max_waiting_bytes: 4 * BLOCK,
            max_reading_bytes: 16 * BLOCK,
        }),
    }
}

fn spec(pages: u64) -> NamespaceSpec {
    NamespaceSpec {
        model: format!("m{pages}"),
        revision: String::new(),
        kv_dtype: "bfloat16".into(),
        layout: "nhd".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens: 16,
        engine_block_tokens: 16,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 1,
        pools: vec![PoolSpec {
            name: "kv".into(),
            layers: 1,
            layer_bytes: pages * BLOCK,
            hit: HitPolicy::All,
        }],
        flat: false,
    }
}

/// A core with one session of one process, and a shell that the test plays.
struct World {
    core: Core,
    now: Duration,
    session: SessionId,
    namespace: u32,
    fingerprint: Fingerprint,
    root: ChunkHash,
    requests: u64,
    /// Whether the test sees effects that write to tiers below. `sees_news`: whether it sees effects that tell others of changes.
    sees_writes: bool,
    sees_news: bool,
}

/// An order to another actor.
struct Asked {
    order: OrderNumber,
    holder: Holder,
    chunks: Vec<FetchId>,
    has_others: bool,
    class: larder_protocol::peer::Class,
}

impl World {
    fn new(sources: Sources) -> Self {
        let disk = limits().disk.filter(|_| sources.disk.is_some());
        Self::with(StoreLimits { disk, ..limits() }, sources)
    }

    fn with(limits: StoreLimits, sources: Sources) -> Self {
        let mut core = Core::new(limits, sources, DEVICE, TENANTS.map(str::to_owned).into());
        let session = core.store.open_session(TenantId(0), ProcessId(0), 1 << 20);
        let registered = core.register(session, &spec(1), &[0], &[BLOCK]).unwrap();
        let (namespace, fingerprint, root) = (registered.namespace, registered.fingerprint, registered.root);
        Self {
            core,
            now: Duration::ZERO,
            session,
            namespace,
            fingerprint,
            root,
            requests: 0,
            sees_writes: false,
            sees_news: false,
        }
    }

    fn tell(&mut self, event: Event) {
        self.core.handle(self.now, event);
    }

    fn asks(&mut self, session: SessionId, ask: Request) -> RequestId {
        self.requests += 1;
        let request = RequestId { session, number: self.requests };
        self.tell(Event::Asked { request, ask, cause: Cause::default() });
        request
    }

    /// Takes the next effect, which must answer this request.
    fn answered(&mut self, of: RequestId) -> Response {
        match self.next() {
            Effect::Answer { request, response, .. } if request == of => response,
            other => panic!("{other:?}"),
        }
    }

    /// Takes the next effect, which must refuse this request.
    fn refused(&mut self, of: RequestId) -> Refused {
        match self.next() {
            Effect::Refused { request, refused } if request == of => refused,
            other => panic!("{other:?}"),
        }
    }

    /// Opens another session, of another process, in the same namespace.
    fn other_session(&mut self) -> SessionId {
        let session = self.core.open_session(TenantId(0), ProcessId(self.requests as u32 + 1_000), 1 << 20);
        self.core.register(session, &spec(1), &[0], &[BLOCK]).unwrap();
        session
    }

    fn cancel(&mut self, session: SessionId, ticket: u64) {
        self.asks(session, Request::Cancel(ticket));
    }

    /// The next effect that is not filtered out, such as counting.
    fn next(&mut self) -> Effect {
        self.poll().expect("there is something to do")
    }

    fn poll(&mut self) -> Option<Effect> {
        let (sees_writes, sees_news) = (self.sees_writes, self.sees_news);
        let is_seen = |effect: &Effect| match effect {
            Effect::Count(counted) => *counted == Counted::NotWritten,
            Effect::Knows { .. } | Effect::Done { .. } => false,
            Effect::Describe { .. } | Effect::Write { .. } | Effect::Touch(_) => sees_writes,
            Effect::TellSiblings(_)
            | Effect::Changed { .. }
            | Effect::AnnouncePage { .. }
            | Effect::VisitSegment { .. }
            | Effect::TenantLeft(_) => sees_news,
            _ => true,
        };
        std::iter::from_fn(|| self.core.poll_effect()).find(is_seen)
    }

    fn is_idle(&mut self) -> bool {
        let effect = self.poll();
        assert!(effect.is_none(), "{effect:?}");
        true
    }

    /// The chain of a prompt whose chunks are named by the letters of a word; equal beginnings are equal chunks.
    fn chain(&self, word: &str) -> Chain {
        Chain::from_root(self.root, (1..=word.len()).map(|end| name(&word[..end])).collect())
    }

    /// Tells the store that the chunks of a word are on disk.
    fn on_disk(&mut self, word: &str) {
        let chain = self.chain(word);
        for position in 0..chain.len() {
            assert!(self.core.store.recovered(&self.fingerprint, chain.chunk(position), PoolSet::ANY));
        }
    }

    fn put(&mut self, word: &str) {
        self.put_in(self.session, self.namespace, &self.chain(word));
    }

    fn put_in(&mut self, session: SessionId, namespace: u32, chain: &Chain) {
        let store = &mut self.core.store;
        let reserved = store.reserve(session, namespace, chain, 0, crate::Millis(0)).unwrap();
        let sources = vec![0; reserved.chunks.len()];
        let order = store.begin_commit(session, reserved.reservation, &reserved.chunks, &sources).unwrap();
        let sums = order.moves.iter().map(|_| Checksums::default()).collect();
        assert_eq!(store.finish_commit(order.order, Some(sums)) as usize, reserved.chunks.len());
    }

    fn lease(&mut self, word: &str) -> RequestId {
        let ask = Lease { namespace: self.namespace, chain: self.chain(word) };
        self.asks(self.session, Request::Lease(ask))
    }

    fn ask(&self, word: &str) -> Lookup {
        Lookup {
            namespace: self.namespace,
            chain: self.chain(word),
            prompt_tokens: 1 << 20,
            skip_read: false,
            preempted: false,
            tiers: Vec::new(),
            pin_ms: None,
            prefill_tokens_per_second: None,
        }
    }

    fn lookup(&mut self, word: &str) -> RequestId {
        self.asks(self.session, Request::Lookup(self.ask(word)))
    }

    /// Takes the core's question to the directory, and answers which nodes hold each chunk. Returns the number of chunks in the
    /// question.
    fn directory_says(&mut self, holders: &[&[u16]]) -> usize {
        let Effect::FindHolders { question, chunks, .. } = self.next() else { panic!("the directory") };
        self.tell(Event::HoldersFound { question, holders: holders.iter().map(|nodes| of(nodes)).collect() });
        chunks.len()
    }

    fn fetch(&mut self) -> Asked {
        match self.next() {
            Effect::Fetch(FetchOrder { order, holder, chunks, has_others, class, .. }) => {
                Asked { order, holder, chunks, has_others, class }
            }
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self) -> (ReadId, Below) {
        match self.next() {
            Effect::Read { read, tier, .. } => (read, tier),
            other => panic!("{other:?}"),
        }
    }

    fn stored(&mut self) -> QuestionId {
        match self.next() {
            Effect::FindStored { question, .. } => question,
            other => panic!("{other:?}"),
        }
    }

    fn leased(&mut self, of: RequestId) -> Leased {
        match self.next() {
            Effect::Leased { request, leased } if request == of => leased,
            other => panic!("{other:?}"),
        }
    }

    fn ended(&mut self, order: OrderNumber, came: Vec<Arrival>) {
        self.tell(Event::OrderEnded { order, came });
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.tell(Event::Tick);
    }

    /// Whether nothing is under way, and nothing is kept for anything that was under way.
    fn is_at_rest(&mut self) -> bool {
        let usage = self.core.store.usage();
        assert_eq!((usage.fetches, usage.passing_bytes), (0, 0));
        self.core.bring.assert_is_at_rest();
        self.core.store.assert_tree_is_whole();
        self.is_idle()
    }
}

fn name(word: &str) -> ChunkHash {
    let mut hash = [0; 32];
    hash[..word.len()].copy_from_slice(word.as_bytes());
    ChunkHash(hash)
}

fn node(number: u16) -> Holder {
    Holder { node: NodeNumber(number), device: 0 }
}

fn sibling(device: u16) -> Holder {
    Holder { node: NodeNumber::THIS_NODE, device }
}

fn of(nodes: &[u16]) -> Holders {
    nodes.iter().map(|&number| node(number)).collect()
}

/// A chunk that did not come.
const FAILED: Arrival = Arrival::Failed(FetchFailure::Broken);

/// A chunk that came, and was read `reads` times.
fn here(reads: u32) -> Arrival {
    Arrival::Here { checksums: vec![Checksums::default()], pools: PoolSet::ANY, reads, is_on_disk: false }
}

fn read_here() -> ReadAnswer {
    ReadAnswer::Here { checksums: vec![Checksums::default()], pools: PoolSet::ANY }
}

fn of_sibling(device: u16) -> Holders {
    smallvec![sibling(device)]
}
