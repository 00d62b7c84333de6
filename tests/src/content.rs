//! A namespace and blocks for tests: the bytes of a block follow from its name.

use larder_protocol::namespace::{HashAlgorithm, NamespaceSpec};
use larder_protocol::{ChunkHash, HitPolicy, PoolSpec};

/// Bytes of one block of [`namespace`].
pub const BLOCK_BYTES: usize = 4_096;

/// Tokens of one chunk of [`namespace`].
pub const CHUNK_TOKENS: u32 = 16;

/// A namespace with one pool of 4 KiB blocks.
#[must_use]
pub fn namespace() -> NamespaceSpec {
    NamespaceSpec {
        model: "test".into(),
        revision: String::new(),
        kv_dtype: "uint8".into(),
        layout: "flat".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens: CHUNK_TOKENS,
        engine_block_tokens: CHUNK_TOKENS,
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices: 1,
        pools: vec![PoolSpec {
            name: "kv".into(),
            layers: 1,
            layer_bytes: BLOCK_BYTES as u64,
            hit: HitPolicy::All,
        }],
        flat: false,
    }
}

/// The hashes of a prompt's chunks. Prompts of one name are prefixes of each other.
#[must_use]
pub fn prompt(name: u8, chunks: u8) -> Vec<ChunkHash> {
    (1..=chunks).map(|index| ChunkHash(std::array::from_fn(|i| [name, index][i % 2]))).collect()
}

/// The bytes of a chunk's block.
#[must_use]
pub fn block(hash: &ChunkHash) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_BYTES];
    larder_cli::content::fill(hash, &mut bytes);
    bytes
}
