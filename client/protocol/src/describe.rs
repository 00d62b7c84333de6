//! An engine's description of chunks: the tokens and the other facts in vLLM's own events. With a description, the node's events
//! can be used without the engine's events.
//!
//! Tokens are user data. An engine sends them only if its settings say so, and a node keeps them only if its configuration says
//! so.

use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::ChunkHash;
use crate::limits::{MAX_CHUNK_TOKENS, MAX_EXTRA_KEYS_BYTES, MAX_NAME_BYTES};
use crate::namespace::Fingerprint;

/// Describes chunks of a namespace.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Describe {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub chunks: Vec<Described>,
}

/// A chunk, block by block as the engine hashes it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// The hash of each block; the last one is the chunk's name.
    pub blocks: Vec<ChunkHash>,
    /// The hash of the block before these; none at the beginning of a prompt.
    pub parent: Option<ChunkHash>,
    /// The tokens of the blocks; each block has the same number.
    pub tokens: Vec<u32>,
    /// The number of the LoRA adapter.
    pub lora_id: Option<u32>,
    /// The name of the LoRA adapter.
    pub lora_name: Option<String>,
    /// For each block, the other inputs of its hash, as a list in JSON; empty if there are none.
    pub extra_keys: String,
}

impl Described {
    /// The chunk's name; `None` if the description has no block.
    #[must_use]
    pub fn name(&self) -> Option<ChunkHash> {
        self.blocks.last().copied()
    }

    /// Tokens of one block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.tokens.len().checked_div(self.blocks.len()).unwrap_or(0)
    }

    /// Whether a node accepts this description.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let tokens = self.tokens.len();
        (1..=MAX_CHUNK_TOKENS as usize).contains(&tokens)
            && !self.blocks.is_empty()
            && tokens.is_multiple_of(self.blocks.len())
            && self.lora_name.as_ref().is_none_or(|name| name.len() <= MAX_NAME_BYTES)
            && self.extra_keys.len() <= MAX_EXTRA_KEYS_BYTES
    }
}
