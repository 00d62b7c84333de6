//! The namespace of a replay: one block a chunk, hashes from the trace.

use larder_protocol::NamespaceSpec;
use larder_protocol::namespace::{EngineHash, HashAlgorithm};

use crate::trace::CHUNK_TOKENS;

/// The namespace of a replay whose chunks have blocks of `block_bytes`.
pub fn replay_namespace(block_bytes: u64) -> NamespaceSpec {
    let hash = HashAlgorithm::Engine(EngineHash { name: "larder trace".into(), seed: String::new() });
    NamespaceSpec { hash, ..NamespaceSpec::of_blocks("larder replay", CHUNK_TOKENS as u32, block_bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_of_a_replay_is_possible_and_its_blocks_have_the_size_asked() {
        let spec = replay_namespace(4_096);
        assert_eq!(spec.check(), Ok(()));
        assert_eq!(spec.pools[0].block_bytes(), 4_096);
        assert_ne!(spec.fingerprint("a"), replay_namespace(8_192).fingerprint("a"));
    }
}
