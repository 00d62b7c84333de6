//! Plays a trace through a store: how much of it hits, under which policy, at which capacity.

use std::collections::HashMap;

use larder_protocol::namespace::{HashAlgorithm, NamespaceSpec};
use larder_protocol::{Chain, ChunkHash, PoolSpec};
use xxhash_rust::xxh3::xxh3_128;

use super::ids::{ProcessId, TenantId};
use super::policy::PolicyName;
use super::{Store, StoreLimits};
use crate::clock::Millis;

/// One request of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRequest {
    /// Tokens of its prompt.
    pub tokens: u64,
    /// Ids of its blocks, chained; the last one may be partial.
    pub blocks: Vec<u64>,
}

/// What a store did with a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replayed {
    /// Blocks of all prompts.
    pub blocks_asked: u64,
    /// Those that were here.
    pub blocks_hit: u64,
    /// Tokens of all prompts.
    pub tokens_asked: u64,
    /// Tokens of the blocks that were here.
    pub tokens_hit: u64,
    /// Chunks touched, inserted and evicted.
    pub operations: u64,
    /// Chunks evicted.
    pub evictions: u64,
}

/// Plays a trace, one request after the other, through a store of so many chunks.
///
/// Where `partial_blocks`, a partial last block counts and is kept like any other, as published simulators do; else only
/// full blocks are kept and a token of each prompt is always computed, as a node does.
///
/// # Panics
/// Where the blocks of a prompt are not chained, or are more than a chain may have.
#[must_use]
pub fn replay(
    requests: &[TraceRequest],
    chunk_tokens: u32,
    capacity_chunks: u64,
    policy: PolicyName,
    partial_blocks: bool,
) -> Replayed {
    let longest = requests.iter().map(|request| request.blocks.len() as u64).max().unwrap_or_default();
    let mut store = Store::new(limits(capacity_chunks + longest, capacity_chunks, policy));
    let session = store.open_session(TenantId(0), ProcessId(0), 0);
    let spec = spec(chunk_tokens);
    let registered = store.register(session, "replay", &spec, &[0], &[SLOT_BYTES]);
    let registered = registered.expect("the namespace is possible");
    let mut names: HashMap<u64, ChunkHash> = HashMap::new();
    let mut replayed = Replayed::default();
    for request in requests {
        let full = (request.tokens / u64::from(chunk_tokens)) as usize;
        let usable = (request.tokens.saturating_sub(1) / u64::from(chunk_tokens)) as usize;
        let (kept, usable) = if partial_blocks {
            (request.blocks.len(), usize::MAX)
        } else {
            (full.min(request.blocks.len()), usable)
        };
        let hashes = request.blocks[..kept].iter().map(|id| *names.entry(*id).or_insert_with(|| name(*id)));
        let chain = Chain::from_root(registered.root, hashes.collect());
        let leased = store.lease(session, registered.namespace, &chain).expect("the chain is possible");
        let hit = (leased.chunks as usize).min(usable) as u64;
        replayed.blocks_asked += kept as u64;
        replayed.blocks_hit += hit;
        replayed.tokens_asked += request.tokens;
        replayed.tokens_hit += (hit * u64::from(chunk_tokens)).min(request.tokens);
        replayed.operations += kept as u64;
        let reserved =
            store.reserve(session, registered.namespace, &chain, 0, Millis(0)).expect("there is room");
        if !reserved.chunks.is_empty() {
            let order = store.begin_commit(session, reserved.reservation, &reserved.chunks, &[]);
            store.finish_commit(order.expect("it was reserved").order, Some(Vec::new()));
        }
        if leased.chunks > 0 {
            store.release(session, leased.lease).expect("it was leased");
        }
    }
    let evictions = store.usage().evictions;
    replayed.evictions = evictions.watermark + evictions.need + evictions.clearing;
    replayed.operations += replayed.evictions;
    replayed
}

const SLOT_BYTES: u64 = 4_096;

fn name(id: u64) -> ChunkHash {
    let bytes = id.to_le_bytes();
    let mut hash = [0; 32];
    hash[..16].copy_from_slice(&xxh3_128(&bytes).to_le_bytes());
    hash[16..24].copy_from_slice(&bytes);
    ChunkHash(hash)
}

fn limits(slots: u64, capacity_chunks: u64, policy: PolicyName) -> StoreLimits {
    StoreLimits {
        extents: 1,
        extent_bytes: slots * SLOT_BYTES,
        capacity_chunks: Some(capacity_chunks),
        high_watermark_bytes: u64::MAX,
        low_watermark_bytes: u64::MAX,
        policy,
        trust_engines: true,
        tenant_bytes: vec![u64::MAX],
        max_leased_blocks: u64::MAX,
        max_reserved_bytes: u64::MAX,
        max_pinned_bytes: 0,
        reservation_ttl_ms: u64::MAX,
        max_pin_ms: 0,
    }
}

fn spec(chunk_tokens: u32) -> NamespaceSpec {
    NamespaceSpec {
        model: "replay".into(),
        revision: String::new(),
        kv_dtype: "bytes".into(),
        layout: "flat".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens,
        engine_block_tokens: chunk_tokens,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 1,
        pools: vec![PoolSpec { name: "kv".into(), layers: 1, layer_bytes: SLOT_BYTES }],
        flat: false,
    }
}
