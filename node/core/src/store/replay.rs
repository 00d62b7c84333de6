//! Plays a trace of requests through a store, to measure policies.
//!
//! The store is the production store, with blocks of one byte in an arena so large that only the number of chunks is scarce.
//! No byte is moved.

use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{Chain, ChunkHash};

use super::ids::{ProcessId, SessionId, TenantId};
use super::policy::PolicyName;
use super::slab::SLOT_ALIGNMENT;
use super::{Checksums, Refused, Store, StoreLimits};
use crate::Millis;

/// A request of a trace: its blocks' names in order, and its prompt's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceRequest {
    /// When it arrives, in milliseconds since an arbitrary moment.
    pub at_ms: u64,
    /// Tokens of the prompt.
    pub tokens: u64,
    /// The names of the blocks, chained: a name stands for the whole prefix up to its block's end. The last, partial block
    /// has a name of its own.
    pub blocks: Vec<u64>,
}

/// The result of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Replayed {
    /// Blocks of all prompts.
    pub blocks_asked: u64,
    /// Blocks in the longest cached prefix of their prompt.
    pub blocks_hit: u64,
    /// Tokens of all prompts.
    pub tokens_asked: u64,
    /// Tokens in the longest cached prefix of their prompt.
    pub tokens_hit: u64,
    /// Chunks leased and chunks committed.
    pub operations: u64,
    /// Chunks evicted.
    pub evictions: u64,
}

/// Plays requests one after another through one store of `capacity_chunks` chunks. With `partial_blocks`, a partial last block
/// counts as a block. Without it, only full chunks of `chunk_tokens` tokens count, and at least one token of the prompt is no
/// hit.
///
/// Each request leases the chunks that it hits, commits the others, and only then releases the lease.
///
/// # Panics
/// Panics if block names are not chained, or a prompt has more chunks than a session message may carry.
pub fn replay(
    requests: &[TraceRequest],
    chunk_tokens: u32,
    capacity_chunks: u64,
    policy: PolicyName,
    partial_blocks: bool,
) -> Replayed {
    replay_after(requests, 0, chunk_tokens, capacity_chunks, policy, partial_blocks)
}

/// As [`replay`], but the first `warming` requests only fill the cache and are not counted.
///
/// # Panics
/// As [`replay`].
pub fn replay_after(
    requests: &[TraceRequest],
    warming: usize,
    chunk_tokens: u32,
    capacity_chunks: u64,
    policy: PolicyName,
    partial_blocks: bool,
) -> Replayed {
    let longest = requests.iter().map(|request| request.blocks.len()).max().unwrap_or(0) as u64;
    let mut player = Player::new(chunk_tokens, capacity_chunks, longest, policy, partial_blocks)
        .expect("a namespace of one pool fits a new store");
    let mut evictions_before = 0;
    for (number, request) in requests.iter().enumerate() {
        if number == warming {
            player.replayed = Replayed::default();
            evictions_before = player.store.usage().evictions.watermark;
        }
        player.play(request).expect("a trace's names are chained, and nothing is scarce but chunks");
    }
    player.replayed.evictions = player.store.usage().evictions.watermark - evictions_before;
    player.replayed
}

struct Player {
    store: Store,
    session: SessionId,
    namespace: u32,
    root: ChunkHash,
    chunk_tokens: u64,
    partial_blocks: bool,
    replayed: Replayed,
}

impl Player {
    fn new(
        chunk_tokens: u32,
        capacity_chunks: u64,
        longest: u64,
        policy: PolicyName,
        partial_blocks: bool,
    ) -> Result<Self, Refused> {
        // One request is written beside the cached chunks.
        let slots = capacity_chunks + longest + 1;
        let limits = StoreLimits::of_chunks(1, slots * SLOT_ALIGNMENT, capacity_chunks, policy);
        let mut store = Store::new(StoreLimits { reservation_ttl_ms: 1, ..limits });
        let session = store.open_session(TenantId(0), ProcessId(0), 1);
        let registered = store.register(session, "replay", &spec(chunk_tokens), &[0], &[1])?;
        Ok(Self {
            store,
            session,
            namespace: registered.namespace,
            root: registered.root,
            chunk_tokens: chunk_tokens.into(),
            partial_blocks,
            replayed: Replayed::default(),
        })
    }

    fn play(&mut self, request: &TraceRequest) -> Result<(), Refused> {
        self.store.is_now(Millis(request.at_ms));
        let full = (request.tokens / self.chunk_tokens) as usize;
        let usable = (request.tokens.saturating_sub(1) / self.chunk_tokens) as usize;
        let (kept, usable) = match self.partial_blocks {
            true => (request.blocks.len(), request.blocks.len()),
            false => (full.min(request.blocks.len()), usable.min(request.blocks.len())),
        };
        let hashes = request.blocks[..kept].iter().map(|&name| hash(name)).collect();
        let chain = Chain::from_root(self.root, hashes);
        let leased = self.store.lease(self.session, self.namespace, &chain.part(0, usable))?;
        let reserved = self.store.reserve(self.session, self.namespace, &chain, 0, Millis(0))?;
        if !reserved.chunks.is_empty() {
            let sources = vec![0; reserved.chunks.len()];
            let order =
                self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources)?;
            let checksums = vec![Checksums::default(); reserved.chunks.len()];
            self.store.finish_commit(order.order, Some(checksums));
        }
        if leased.lease != 0 {
            self.store.release(self.session, leased.lease)?;
        }
        let hit = u64::from(leased.chunks);
        self.replayed.blocks_asked += kept as u64;
        self.replayed.blocks_hit += hit;
        self.replayed.tokens_asked += request.tokens;
        self.replayed.tokens_hit += (hit * self.chunk_tokens).min(request.tokens);
        self.replayed.operations += hit + reserved.chunks.len() as u64;
        Ok(())
    }
}

fn spec(chunk_tokens: u32) -> NamespaceSpec {
    let spec = NamespaceSpec::of_blocks("replay", chunk_tokens, 1);
    NamespaceSpec { kv_dtype: "none".into(), layout: "none".into(), ..spec }
}

/// Makes a chunk hash of a block's name; like a real hash, every bit is random.
pub(crate) fn hash(name: u64) -> ChunkHash {
    let mut bytes = [0; 32];
    for (part, seed) in bytes.chunks_exact_mut(8).zip(0..) {
        part.copy_from_slice(&xxhash_rust::xxh3::xxh3_64_with_seed(&name.to_le_bytes(), seed).to_le_bytes());
    }
    ChunkHash(bytes)
}
