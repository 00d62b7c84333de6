//! A namespace and blocks for tests: the bytes of a block follow from its name.

use larder_protocol::ChunkHash;
use larder_protocol::namespace::NamespaceSpec;

/// Bytes of one block of [`namespace`].
pub const BLOCK_BYTES: usize = 4_096;

/// Tokens of one chunk of [`namespace`].
pub const CHUNK_TOKENS: u32 = 16;

/// A namespace with one pool of 4 KiB blocks.
pub fn namespace() -> NamespaceSpec {
    NamespaceSpec::of_blocks("test", CHUNK_TOKENS, BLOCK_BYTES as u64)
}

/// The hashes of a prompt's chunks. Prompts of one name are prefixes of each other.
pub fn prompt(name: u8, chunks: u8) -> Vec<ChunkHash> {
    (1..=chunks).map(|index| ChunkHash(std::array::from_fn(|i| [name, index][i % 2]))).collect()
}

/// The bytes of a chunk's block.
pub fn block(hash: &ChunkHash) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_BYTES];
    larder_cli::content::fill(hash, &mut bytes);
    bytes
}
