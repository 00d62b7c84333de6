//! Chunk hashes as vLLM's `sha256_cbor` computes them, for callers that have only tokens.
//!
//! A block's hash is the SHA-256 of the canonical CBOR (RFC 8949, section 4.2) of `[parent, [token, ...], extra]`. The first
//! block's parent is the hash of the seed's text. `extra` is null, or names other inputs that change the KV:
//! `["lora", name, path]` in every block, `["cache_salt", salt]` in the first. A chunk of several blocks has the hash of its last
//! block. The golden vectors of the tests come from vLLM 0.32. Only the engine hashes blocks with multimodal items or prompt
//! embeddings.

use sha2::{Digest as _, Sha256};

use crate::chunk::ChunkHash;
use crate::namespace::{EngineHash, HashAlgorithm};

/// The algorithm's name, in vLLM and in a namespace.
pub const NAME: &str = "sha256_cbor";

/// The seed of a vLLM whose environment has no `PYTHONHASHSEED`.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// Facts besides the tokens that change the KV of a prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptExtra<'a> {
    /// Keeps prompts of different users apart. An empty salt counts as none, as in vLLM.
    pub cache_salt: Option<&'a str>,
    /// The LoRA adapter.
    pub lora: Option<Lora<'a>>,
}

/// A LoRA adapter, as the engine knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lora<'a> {
    /// The adapter's name.
    pub name: &'a str,
    /// The adapter's path.
    pub path: &'a str,
}

/// The hashes of all full chunks of a prompt, of `chunk_tokens` each; the last, partial chunk has none.
///
/// # Panics
/// Panics if `block_tokens` is 0, or `chunk_tokens` is no multiple of it.
#[must_use]
pub fn hash_prompt(
    seed: &str,
    tokens: &[u32],
    block_tokens: u32,
    chunk_tokens: u32,
    extra: PromptExtra<'_>,
) -> Vec<ChunkHash> {
    assert!(chunk_tokens > 0 && chunk_tokens.is_multiple_of(block_tokens), "a chunk is of whole blocks");
    let blocks_per_chunk = (chunk_tokens / block_tokens) as usize;
    let chunks = tokens.len() / chunk_tokens as usize;
    let mut parent = sha256(|encoding| encoding.text(seed));
    let mut is_first = true;
    let mut hash_block = |tokens: &[u32]| {
        parent = block_hash(&parent, tokens, extra, is_first);
        is_first = false;
        parent
    };
    let hashes: Vec<[u8; 32]> = tokens
        .chunks_exact(block_tokens as usize)
        .take(chunks * blocks_per_chunk)
        .map(&mut hash_block)
        .collect();
    hashes.chunks_exact(blocks_per_chunk).map(|blocks| ChunkHash(blocks[blocks_per_chunk - 1])).collect()
}

/// The seed of a namespace's engines, if they hash by `sha256_cbor`. In the namespace, the seed may end in a test vector of the
/// engines' own function, 16 hexadecimal digits after a colon. The vector is left out.
#[must_use]
pub fn seed_of(hash: &HashAlgorithm) -> Option<&str> {
    let HashAlgorithm::Engine(EngineHash { name, seed }) = hash else { return None };
    if name != NAME {
        return None;
    }
    let is_vector = |text: &str| text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    Some(match seed.rsplit_once(':') {
        Some((before, vector)) if is_vector(vector) => before,
        _ => seed,
    })
}

fn block_hash(parent: &[u8; 32], tokens: &[u32], extra: PromptExtra<'_>, is_first: bool) -> [u8; 32] {
    let salt = extra.cache_salt.filter(|salt| is_first && !salt.is_empty());
    sha256(|encoding| {
        encoding.array(3);
        encoding.bytes(parent);
        encoding.array(tokens.len());
        tokens.iter().for_each(|&token| encoding.head(UNSIGNED, u64::from(token)));
        match usize::from(extra.lora.is_some()) + usize::from(salt.is_some()) {
            0 => encoding.null(),
            some => encoding.array(some),
        }
        if let Some(Lora { name, path }) = extra.lora {
            encoding.array(3);
            ["lora", name, path].iter().for_each(|text| encoding.text(text));
        }
        if let Some(salt) = salt {
            encoding.array(2);
            ["cache_salt", salt].iter().for_each(|text| encoding.text(text));
        }
    })
}

fn sha256(write: impl FnOnce(&mut Encoding)) -> [u8; 32] {
    let mut encoding = Encoding(Sha256::new());
    write(&mut encoding);
    encoding.0.finalize().into()
}

/// Writes canonical CBOR into a hash.
struct Encoding(Sha256);

impl Encoding {
    fn array(&mut self, items: usize) {
        self.head(ARRAY, items as u64);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.head(BYTES, bytes.len() as u64);
        self.0.update(bytes);
    }

    fn text(&mut self, text: &str) {
        self.head(TEXT, text.len() as u64);
        self.0.update(text);
    }

    fn null(&mut self) {
        self.0.update([NULL]);
    }

    /// Writes a number in its shortest form, as canonical CBOR demands.
    fn head(&mut self, major: u8, number: u64) {
        let bytes = number.to_be_bytes();
        let (additional, from) = match number {
            0..24 => return self.0.update([major | number as u8]),
            24..0x100 => (24, 7),
            0x100..0x1_0000 => (25, 6),
            0x1_0000..0x1_0000_0000 => (26, 4),
            _ => (27, 0),
        };
        self.0.update([major | additional]);
        self.0.update(&bytes[from..]);
    }
}

const UNSIGNED: u8 = 0 << 5;
const BYTES: u8 = 2 << 5;
const TEXT: u8 = 3 << 5;
const ARRAY: u8 = 4 << 5;
const NULL: u8 = 0xf6;

#[cfg(test)]
mod tests {
    use super::*;

    const LORA: Lora<'_> = Lora { name: "sql", path: "/adapters/sql" };

    fn tokens(count: u32) -> Vec<u32> {
        (0..count).map(|i| (i * i * 7 + i * 13) % 1_000 + 3).collect()
    }

    fn hashes(extra: PromptExtra<'_>) -> Vec<String> {
        let hashes = hash_prompt(DEFAULT_SEED, &tokens(70), 32, 32, extra);
        hashes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn hashes_are_those_of_vllm() {
        assert_eq!(hashes(PromptExtra::default()), PLAIN);
        assert_eq!(hashes(PromptExtra { cache_salt: Some("alice"), lora: None }), SALTED);
        assert_eq!(hashes(PromptExtra { cache_salt: None, lora: Some(LORA) }), WITH_LORA);
        assert_eq!(hashes(PromptExtra { cache_salt: Some("alice"), lora: Some(LORA) }), SALTED_WITH_LORA);
        assert_eq!(hashes(PromptExtra { cache_salt: Some(""), lora: None }), PLAIN);
    }

    #[test]
    fn numbers_of_every_length_are_encoded_as_vllm_does() {
        let tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 151_643];
        let hashes = hash_prompt(DEFAULT_SEED, &tokens, 8, 8, PromptExtra::default());
        assert_eq!(hashes[0].to_string(), "4a54c1c9c19240e9df3e88bdc395bf18bb11dcf9e5f6626e1f32ce78641762d2");
    }

    #[test]
    fn another_seed_makes_other_hashes() {
        let hashes = hash_prompt("0", &tokens(32), 32, 32, PromptExtra::default());
        assert_eq!(hashes[0].to_string(), "5a04f2f2d4934fb9ea496474b13177b2b559451eb6cd175608faef2712cf164a");
    }

    #[test]
    fn a_chunk_of_several_blocks_has_the_hash_of_its_last() {
        let of_blocks = hash_prompt(DEFAULT_SEED, &tokens(70), 16, 16, PromptExtra::default());
        let of_chunks = hash_prompt(DEFAULT_SEED, &tokens(70), 16, 32, PromptExtra::default());
        assert_eq!(of_blocks.len(), 4);
        assert_eq!(of_chunks, [of_blocks[1], of_blocks[3]]);
    }

    #[test]
    fn a_namespace_tells_the_seed_with_or_without_a_test_vector() {
        let hash = |name: &str, seed: &str| {
            HashAlgorithm::Engine(EngineHash { name: name.into(), seed: seed.into() })
        };
        assert_eq!(seed_of(&hash(NAME, "vllm-none-hash:0123456789abcdef")), Some(DEFAULT_SEED));
        assert_eq!(seed_of(&hash(NAME, "a:b")), Some("a:b"));
        assert_eq!(seed_of(&hash("sha256", "0")), None);
        assert_eq!(seed_of(&HashAlgorithm::Larder), None);
    }

    const PLAIN: [&str; 2] = [
        "94bf9f84736991e8a956e4a789ba849f9c6f4ecbe88593fb8d3024beb872007c",
        "4ceb57fdc692854012b7a5ee98964ee382a1a5e57aead586f0b394870e8549a3",
    ];
    const SALTED: [&str; 2] = [
        "da3e58b2b9b03fae57bffdb734af69aa08aa26e7381d62ffe7b557422291713c",
        "d92891a425b32f3901a429f3537af270f063a04615044246ce10072f6fe6edfb",
    ];
    const WITH_LORA: [&str; 2] = [
        "c30accb5c056ed9e2c5180c3eef76a050031a8c235eb97fe66fbc9890a5713a2",
        "fde0a82b18434c68cc283bbbfc12d490d1dbc1bfb734dc3fbaea5247d6b2fdab",
    ];
    const SALTED_WITH_LORA: [&str; 2] = [
        "e8954b9413451df297096f99b8e2b934cd970842859ca1cbf8115c1ff37ce26a",
        "5b4a032f0ac8325e40d267aea3999325e21e141293b1fc46a02a9ba1d1bc149d",
    ];
}
