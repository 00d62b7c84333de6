//! Tests single behaviors of the store, and random histories against a model.

mod behaviour;
mod disk;
mod follow_histories;
mod follows;
mod forwards;
mod gathers;
mod histories;
mod limits;
mod loads;
mod mixed_histories;
mod model;
mod names;
mod object;
mod policies;
mod pool_faults;
mod pool_follows;
mod pool_histories;
mod pool_tiers;
mod pools;
mod purge;
mod sizes;
mod tenants;
mod verify;

use std::num::NonZeroU32;

use larder_protocol::handoff::Writer;
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{Chain, ChunkHash, HitPolicy, PoolSpec};

use super::ids::{ProcessId, SessionId, TenantId};
use super::policy::PolicyName;
use super::{Checksums, CommitOrder, LookupOptions, Source, Store, StoreLimits};
use crate::Millis;

/// Bytes of a block, and of its slot.
const BLOCK: u64 = 4_096;

const NOW: Millis = Millis(0);

/// A writer at another node.
static ELSEWHERE: Writer = Writer { node: String::new(), device: 0 };

/// The source of a chunk that another node has.
const PEER: Option<Source> = Some(Source::Peer);

fn limits(slots: u32, capacity_chunks: u64) -> StoreLimits {
    StoreLimits {
        extents: slots.div_ceil(4),
        extent_bytes: 4 * BLOCK,
        capacity_chunks: Some(capacity_chunks),
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
        peers: None,
        disk: None,
        object: None,
    }
}

fn spec() -> NamespaceSpec {
    let mut spec = NamespaceSpec::of_blocks("m", 16, BLOCK);
    spec.pools[0] = PoolSpec { layers: 2, layer_bytes: BLOCK / 2, ..spec.pools[0].clone() };
    spec
}

/// A store with one session of one process.
struct Fixture {
    store: Store,
    session: SessionId,
    namespace: u32,
    root: ChunkHash,
}

impl Fixture {
    fn new(limits: StoreLimits) -> Self {
        Self::with_spec(limits, &spec())
    }

    fn with_spec(limits: StoreLimits, spec: &NamespaceSpec) -> Self {
        let mut store = Store::new(limits);
        store.keep_journal();
        let session = store.open_session(TenantId(0), ProcessId(0), 1 << 20);
        let bytes: Vec<u64> = spec.pools.iter().map(PoolSpec::block_bytes).collect();
        let registered = store.register(session, "a", spec, &[0], &bytes).unwrap();
        Self { store, session, namespace: registered.namespace, root: registered.root }
    }

    fn join(&mut self, tenant: u16, process: u32) -> SessionId {
        let session = self.store.open_session(TenantId(tenant), ProcessId(process), 1 << 20);
        let name = ["a", "b"][usize::from(tenant)];
        let registered = self.store.register(session, name, &spec(), &[0], &[BLOCK]).unwrap();
        assert_eq!(registered.namespace == self.namespace, tenant == 0, "tenants share no namespace");
        session
    }

    /// The chain of a prompt whose chunks are named by the letters of a word; equal beginnings are equal chunks.
    fn chain(&self, word: &str) -> Chain {
        Chain::from_root(self.root, (1..=word.len()).map(|end| name(&word[..end])).collect())
    }

    fn put(&mut self, word: &str) {
        let chain = self.chain(word);
        let reserved = self.store.reserve(self.session, self.namespace, &chain, 0, NOW).unwrap();
        let sources = vec![0; reserved.chunks.len()];
        let order = self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources);
        if !reserved.chunks.is_empty() {
            let order = order.unwrap();
            assert_eq!(
                self.store.finish_commit(order.order, Some(sums(&order))) as usize,
                reserved.chunks.len()
            );
        }
    }

    fn found(&mut self, word: &str) -> u64 {
        let chain = self.chain(word);
        let options = LookupOptions {
            elsewhere: &[],
            prompt_tokens: u64::MAX,
            skip_read: false,
            tiers: &[],
            pin_ms: None,
        };
        let found = self.store.lookup(self.session, self.namespace, &chain, options, NOW).unwrap();
        found.tokens / 16
    }

    fn lease(&mut self, word: &str) -> super::Leased {
        let chain = self.chain(word);
        self.store.lease(self.session, self.namespace, &chain).unwrap()
    }
}

fn name(word: &str) -> ChunkHash {
    let mut hash = [0; 32];
    hash[..word.len()].copy_from_slice(word.as_bytes());
    ChunkHash(hash)
}

fn sums(order: &CommitOrder) -> Vec<Checksums> {
    order.moves.iter().map(|_| Checksums::default()).collect()
}

impl Store {
    /// Asserts every invariant that can be seen from inside.
    fn assert_consistent(&self) {
        self.slab.assert_consistent();
        let bytes = self.slab.bytes();
        assert_eq!(bytes.free + bytes.used + bytes.quarantined, bytes.total);
        self.assert_policies_know_what_is_cached();
        let order: Vec<_> = self.tenants.ids().flat_map(|tenant| self.tenants.order(tenant)).collect();
        let cached = order.iter().map(|&number| self.index.at(number));
        assert!(cached.clone().all(super::index::Chunk::is_cached));
        let ready: u64 = cached.map(|chunk| u64::from(chunk.ready)).sum();
        assert_eq!(ready * BLOCK, self.tenants.cached_bytes());
        for (_, _, chunk) in self.index.iter_from(0) {
            assert_eq!(chunk.pools, self.namespaces.get(chunk.namespace).readable(chunk));
        }
        let mut slots: Vec<_> = order.iter().flat_map(|&number| self.index.at(number).slots()).collect();
        let count = slots.len();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), count, "no two blocks share a slot");
    }

    fn assert_policies_know_what_is_cached(&self) {
        let mut known = 0;
        for tenant in self.tenants.ids() {
            let order = self.tenants.order(tenant);
            let ids = || order.iter().map(|&number| self.index.id(number));
            assert!(ids().all(|id| self.index.get(id).is_cached() && self.tenant_of(id) == tenant));
            let bytes: u64 = ids().map(|id| self.readable_bytes(id)).sum();
            assert_eq!(bytes, self.tenants.of(tenant).cached_bytes);
            known += order.len() as u64;
        }
        assert_eq!(known, self.cached_chunks, "the policies know exactly the cached chunks");
    }

    /// Asserts that each chunk's index is one more than its parent's, and that each chunk's name can be told.
    pub(crate) fn assert_tree_is_whole(&self) {
        self.slab.assert_consistent();
        self.assert_policies_know_what_is_cached();
        for (_, id, chunk) in self.index.iter_from(0) {
            let name = self.index.name(id);
            assert_eq!((name.hash, name.index), (chunk.hash, chunk.index));
            if let Some(parent) = self.index.parent(id) {
                assert_eq!(self.index.get(parent).index + 1, chunk.index);
                assert_eq!(self.index.get(parent).hash, name.parent);
            }
        }
    }
}

#[test]
fn ages_grow_as_fast_as_the_limits_say() {
    let age_speed = NonZeroU32::new(60).unwrap();
    let mut store = Store::new(StoreLimits { age_speed, ..limits(8, 4) });
    store.is_now(Millis(1_000));
    assert_eq!(store.age_ms(), 60_000);
}
