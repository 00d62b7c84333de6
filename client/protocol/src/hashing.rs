//! Chunk hashes for callers that have only tokens.
//!
//! The hashes are chained BLAKE3: a collision would serve one user's KV to another user, so a weaker hash is not enough. The byte
//! layout below is part of the namespace ([`crate::namespace::HashAlgorithm`]) and has golden tests.
//!
//! | what | BLAKE3 of |
//! | --- | --- |
//! | start of a prompt | `"larder start 1"`, root, then salt and LoRA id, each as presence byte, `u32` length, bytes |
//! | chunk | `"larder chunk 1"`, parent, `u32` token count, tokens as `u32`, then each multimodal item as `u32` offset, 32 bytes |
//!
//! All numbers are little-endian.

use crate::chunk::ChunkHash;

/// Facts besides the tokens that change the KV of a whole prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptExtra<'a> {
    /// Keeps prompts of different users apart (vLLM's `cache_salt`).
    pub salt: Option<&'a [u8]>,
    /// Name or path of the LoRA adapter.
    pub lora: Option<&'a [u8]>,
}

/// A multimodal input whose placeholder tokens overlap a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultimodalItem {
    /// Position of the input's first placeholder token in the prompt.
    pub offset_tokens: u32,
    /// Hash of the input's content.
    pub content: [u8; 32],
}

/// Hashes one prompt chunk by chunk.
#[derive(Debug, Clone)]
pub struct ChunkHasher {
    parent: ChunkHash,
}

impl ChunkHasher {
    /// Starts a prompt in the namespace whose root is `root`.
    #[must_use]
    pub fn new(root: ChunkHash, extra: PromptExtra<'_>) -> Self {
        if extra == PromptExtra::default() {
            return Self { parent: root };
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"larder start 1").update(&root.0);
        for field in [extra.salt, extra.lora] {
            let bytes = field.unwrap_or_default();
            hasher
                .update(&[field.is_some().into()])
                .update(&(bytes.len() as u32).to_le_bytes())
                .update(bytes);
        }
        Self { parent: ChunkHash(hasher.finalize().into()) }
    }

    /// Hashes the next chunk, with these tokens and these overlapping multimodal items.
    pub fn chunk(&mut self, tokens: &[u32], items: &[MultimodalItem]) -> ChunkHash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"larder chunk 1").update(&self.parent.0).update(&(tokens.len() as u32).to_le_bytes());
        let mut buffer = [0; 1024];
        for part in tokens.chunks(buffer.len() / 4) {
            for (bytes, token) in buffer.chunks_exact_mut(4).zip(part) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&buffer[..part.len() * 4]);
        }
        for item in items {
            hasher.update(&item.offset_tokens.to_le_bytes()).update(&item.content);
        }
        self.parent = ChunkHash(hasher.finalize().into());
        self.parent
    }
}

/// The hashes of all full chunks of a prompt; the last, partial chunk has none.
///
/// # Panics
/// Panics if `chunk_tokens` is 0.
#[must_use]
pub fn hash_prompt(
    root: ChunkHash,
    tokens: &[u32],
    chunk_tokens: u32,
    extra: PromptExtra<'_>,
) -> Vec<ChunkHash> {
    let mut hasher = ChunkHasher::new(root, extra);
    tokens.chunks_exact(chunk_tokens as usize).map(|chunk| hasher.chunk(chunk, &[])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: ChunkHash = ChunkHash([7; 32]);

    #[test]
    fn hashes_are_what_they_always_were() {
        let tokens: Vec<u32> = (0..520).collect();
        let plain = hash_prompt(ROOT, &tokens, 256, PromptExtra::default());
        let golden: Vec<String> = plain.iter().map(ToString::to_string).collect();
        assert_eq!(golden, GOLDEN_PLAIN);
        let extra = PromptExtra { salt: Some(b"alice"), lora: Some(b"sql") };
        assert_eq!(hash_prompt(ROOT, &tokens, 256, extra)[0].to_string(), GOLDEN_SALTED);
    }

    #[test]
    fn whatever_changes_the_kv_changes_the_hash() {
        let tokens = [1, 2, 3, 4];
        let item = MultimodalItem { offset_tokens: 0, content: [1; 32] };
        let first = |extra| ChunkHasher::new(ROOT, extra).chunk(&tokens, &[]);
        let salt = |salt| PromptExtra { salt: Some(salt), lora: None };
        let hashes = [
            first(PromptExtra::default()),
            first(salt(b"")),
            first(salt(b"a")),
            first(PromptExtra { salt: None, lora: Some(b"a") }),
            ChunkHasher::new(ROOT, PromptExtra::default()).chunk(&tokens, &[item]),
            ChunkHasher::new(ROOT, PromptExtra::default()).chunk(&tokens[..3], &[]),
            ChunkHasher::new(ChunkHash([8; 32]), PromptExtra::default()).chunk(&tokens, &[]),
        ];
        for (i, a) in hashes.iter().enumerate() {
            assert!(hashes[i + 1..].iter().all(|b| a != b), "hash {i} comes twice");
        }
    }

    #[test]
    fn a_hash_names_the_whole_prefix() {
        let a = hash_prompt(ROOT, &[1, 2, 3, 4, 5], 2, PromptExtra::default());
        let b = hash_prompt(ROOT, &[9, 2, 3, 4, 5], 2, PromptExtra::default());
        assert_eq!(a.len(), 2);
        assert_ne!(a[1], b[1]);
    }

    const GOLDEN_PLAIN: [&str; 2] = [
        "d773004778f7799df1998e1deeb1d24a3b8d30faf933749e8276c31def763073",
        "c13d2b443ddca0cda3249ed6a84c1edbf2658cf1098af99f4b96fb2cb6f47dbd",
    ];
    const GOLDEN_SALTED: &str = "fecc27fd1da544daa60377bc90b919099d129a16523ed6536ea3e2f342df410c";
}
