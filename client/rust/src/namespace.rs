//! A namespace that a session has registered.

use std::sync::Arc;

use larder_protocol::checksum::{BlockKey, range_bytes};
use larder_protocol::hashing::{PromptExtra, hash_prompt};
use larder_protocol::session::{Register, Registered};
use larder_protocol::{Chain, ChainError, ChunkHash, Fingerprint, PoolRules, PoolSet};

/// A namespace as one session knows it. Cheap to clone; only for the session that registered it.
///
/// A chunk has one block for each slice of the session and each pool. Block `slice * pools + pool` belongs to the `slice`-th
/// registered slice.
#[derive(Debug, Clone)]
pub struct Namespace {
    shape: Arc<Shape>,
}

#[derive(Debug)]
struct Shape {
    /// The session's number in this process.
    session: u64,
    number: u32,
    fingerprint: Fingerprint,
    root: ChunkHash,
    slices: Vec<u16>,
    pool_bytes: Vec<u64>,
    pool_layers: Vec<u32>,
    /// For each pool, the bytes of a layer, and the bytes that share one checksum.
    layer_bytes: Vec<(u64, u64)>,
    rules: PoolRules,
    chunk_tokens: u32,
    flat: bool,
}

impl Namespace {
    pub(crate) fn new(session: u64, registered: &Registered, asked: &Register) -> Self {
        Self {
            shape: Arc::new(Shape {
                session,
                number: registered.namespace,
                fingerprint: registered.fingerprint,
                root: registered.root,
                slices: asked.slices.clone(),
                pool_bytes: asked.block_bytes.clone(),
                pool_layers: asked.spec.pools.iter().map(|pool| pool.layers).collect(),
                layer_bytes: asked
                    .spec
                    .pools
                    .iter()
                    .map(|pool| (pool.layer_bytes, range_bytes(pool)))
                    .collect(),
                rules: PoolRules::new(&asked.spec.pools),
                chunk_tokens: asked.spec.chunk_tokens,
                flat: asked.spec.flat,
            }),
        }
    }

    /// The session that registered it.
    pub(crate) fn session(&self) -> u64 {
        self.shape.session
    }

    /// The namespace's number in the session.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.shape.number
    }

    /// The namespace's fingerprint, tenant included.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.shape.fingerprint
    }

    /// The parent of every first chunk.
    #[must_use]
    pub fn root(&self) -> ChunkHash {
        self.shape.root
    }

    /// Tokens of one chunk.
    #[must_use]
    pub fn chunk_tokens(&self) -> u32 {
        self.shape.chunk_tokens
    }

    /// Whether the namespace is flat: its keys stand for themselves, without order.
    #[must_use]
    pub fn is_flat(&self) -> bool {
        self.shape.flat
    }

    /// Slices that the session reads and writes.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.shape.slices.len()
    }

    /// Bytes of one block of each pool.
    #[must_use]
    pub fn pool_bytes(&self) -> &[u64] {
        &self.shape.pool_bytes
    }

    /// Layers of each pool.
    #[must_use]
    pub fn pool_layers(&self) -> &[u32] {
        &self.shape.pool_layers
    }

    /// The pools that a prefix needs at each of its chunks.
    #[must_use]
    pub fn rules(&self) -> &PoolRules {
        &self.shape.rules
    }

    /// The blocks of one chunk in this session in these pools, ascending.
    pub fn blocks_of(&self, pools: PoolSet) -> impl Iterator<Item = usize> + use<> {
        let per_slice = self.shape.pool_bytes.len();
        (0..self.blocks_per_chunk()).filter(move |block| pools.has(block % per_slice))
    }

    /// Blocks of one chunk in this session: slices x pools.
    #[must_use]
    pub fn blocks_per_chunk(&self) -> usize {
        self.shape.slices.len() * self.shape.pool_bytes.len()
    }

    /// Bytes of block `block` of a chunk.
    ///
    /// # Panics
    /// Panics if a chunk has no such block.
    #[must_use]
    pub fn block_bytes(&self, block: usize) -> u64 {
        assert!(
            block < self.blocks_per_chunk(),
            "a chunk has {} blocks, not {block}",
            self.blocks_per_chunk()
        );
        self.shape.pool_bytes[block % self.shape.pool_bytes.len()]
    }

    /// The identity of block `block` of a chunk.
    pub(crate) fn key(&self, hash: ChunkHash, block: usize) -> BlockKey {
        let pools = self.shape.pool_bytes.len();
        let (slice, pool) = (self.shape.slices[block / pools], (block % pools) as u8);
        BlockKey { fingerprint: self.shape.fingerprint, hash, slice, pool }
    }

    /// Bytes of one layer of block `block`.
    pub(crate) fn layer_bytes(&self, block: usize) -> u64 {
        self.shape.layer_bytes[block % self.shape.layer_bytes.len()].0
    }

    /// Bytes of block `block` that share one checksum.
    pub(crate) fn range_bytes(&self, block: usize) -> u64 {
        self.shape.layer_bytes[block % self.shape.layer_bytes.len()].1
    }

    /// # Errors
    /// [`ChainError`] if `chain` cannot be of this namespace.
    pub(crate) fn check(&self, chain: &Chain) -> Result<(), ChainError> {
        chain.check(self.root(), self.is_flat())
    }

    /// A prompt's chunks from the first one on, or independent keys if the namespace is flat.
    #[must_use]
    pub fn chain(&self, hashes: Vec<ChunkHash>) -> Chain {
        if self.shape.flat { Chain::flat(self.root(), hashes) } else { Chain::from_root(self.root(), hashes) }
    }

    /// The full chunks of a prompt, under Larder's own hash.
    #[must_use]
    pub fn chain_of_tokens(&self, tokens: &[u32], extra: PromptExtra<'_>) -> Chain {
        self.chain(hash_prompt(self.root(), tokens, self.shape.chunk_tokens, extra))
    }
}
