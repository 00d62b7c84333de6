//! Namespaces: everything that makes KV bytes interchangeable, and its fingerprint.

use std::fmt;

use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::ChunkHash;
use crate::limits::{MAX_BLOCK_BYTES, MAX_CHUNK_TOKENS, MAX_LAYERS, MAX_NAME_BYTES, MAX_POOLS, MAX_SLICES};
use crate::pools::{HitPolicy, PoolSpec};

/// An engine's description of its KV. Two engines with different descriptions never see each other's blocks.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// The model's name or path.
    pub model: String,
    /// The model's revision; empty if it has none.
    pub revision: String,
    /// Data type of the KV, in the engine's words (`bfloat16`, `fp8_e4m3`).
    pub kv_dtype: String,
    /// Order of the dimensions inside a block, in the engine's words.
    pub layout: String,
    /// The hash algorithm of chunks.
    pub hash: HashAlgorithm,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Tokens of one engine block (page); divides `chunk_tokens`.
    pub engine_block_tokens: u32,
    /// Tensor-parallel ranks.
    pub tensor_parallel: u16,
    /// Pipeline-parallel ranks.
    pub pipeline_parallel: u16,
    /// Context-parallel ranks.
    pub context_parallel: u16,
    /// Parts of a chunk that engine ranks hold: TP x PP, or fewer if ranks hold the same KV (MLA: one per PP rank).
    pub slices: u16,
    /// Kinds of state of one chunk; the first is called `kv`, and every chunk has it.
    pub pools: Vec<PoolSpec>,
    /// Whether keys are independent, without order (LMCache, vLLM's secondary tier).
    pub flat: bool,
}

/// The hash algorithm of chunks, and who computes it.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// Larder's own chained BLAKE3 (see [`crate::hashing`]).
    Larder,
    /// The engine's own chained hash of a chunk's last engine block.
    Engine(EngineHash),
}

/// A hash that an engine computes.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct EngineHash {
    /// The engine's name for it (`sha256_cbor`).
    pub name: String,
    /// The algorithm's seed (vLLM: `PYTHONHASHSEED`); never a seed that each process draws for itself.
    pub seed: String,
}

/// 32 bytes that stand for a namespace and its tenant; part of every key.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl NamespaceSpec {
    /// A namespace of blocks without structure: one slice, and one pool with one layer of `block_bytes`. Its chunks have Larder's
    /// own hashes.
    #[must_use]
    pub fn of_blocks(model: impl Into<String>, chunk_tokens: u32, block_bytes: u64) -> Self {
        Self {
            model: model.into(),
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
            pools: vec![PoolSpec {
                name: "kv".into(),
                layers: 1,
                layer_bytes: block_bytes,
                hit: HitPolicy::All,
            }],
            flat: false,
        }
    }

    /// Checks whether the namespace is possible at all.
    ///
    /// # Errors
    /// [`NamespaceError`] names the first impossible field.
    pub fn check(&self) -> Result<(), NamespaceError> {
        self.check_names()?;
        let chunk_tokens = self.chunk_tokens;
        if !(1..=MAX_CHUNK_TOKENS).contains(&chunk_tokens) {
            return Err(NamespaceError::ChunkTokens { chunk_tokens });
        }
        let engine_block_tokens = self.engine_block_tokens;
        if engine_block_tokens == 0 || !chunk_tokens.is_multiple_of(engine_block_tokens) {
            return Err(NamespaceError::EngineBlock { chunk_tokens, engine_block_tokens });
        }
        if !(1..=MAX_SLICES).contains(&self.slices) {
            return Err(NamespaceError::Slices { slices: self.slices });
        }
        if self.tensor_parallel == 0 || self.pipeline_parallel == 0 || self.context_parallel == 0 {
            return Err(NamespaceError::ZeroRanks);
        }
        self.check_pools()
    }

    /// The names of the fields in which this description differs from another.
    #[must_use]
    pub fn differing(&self, other: &Self) -> Vec<&'static str> {
        let Self { model, revision, kv_dtype, layout, hash, chunk_tokens, engine_block_tokens, .. } = self;
        let Self { tensor_parallel, pipeline_parallel, context_parallel, slices, pools, flat, .. } = self;
        let fields = [
            ("model", *model != other.model),
            ("revision", *revision != other.revision),
            ("kv_dtype", *kv_dtype != other.kv_dtype),
            ("layout", *layout != other.layout),
            ("hash", *hash != other.hash),
            ("chunk_tokens", *chunk_tokens != other.chunk_tokens),
            ("engine_block_tokens", *engine_block_tokens != other.engine_block_tokens),
            ("tensor_parallel", *tensor_parallel != other.tensor_parallel),
            ("pipeline_parallel", *pipeline_parallel != other.pipeline_parallel),
            ("context_parallel", *context_parallel != other.context_parallel),
            ("slices", *slices != other.slices),
            ("pools", *pools != other.pools),
            ("flat", *flat != other.flat),
        ];
        fields.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }

    /// The namespace of `tenant`, as 32 bytes.
    ///
    /// BLAKE3 of a canonical encoding: every text as `u32` length and bytes, every number as `u64`, all little-endian,
    /// in the order of the fields, the tenant first.
    #[must_use]
    pub fn fingerprint(&self, tenant: &str) -> Fingerprint {
        let mut encoding = Encoding(blake3::Hasher::new());
        encoding.0.update(b"larder namespace 1");
        encoding.text(tenant).text(&self.model).text(&self.revision).text(&self.kv_dtype).text(&self.layout);
        match &self.hash {
            HashAlgorithm::Larder => encoding.text("larder"),
            HashAlgorithm::Engine(EngineHash { name, seed }) => encoding.text("engine").text(name).text(seed),
        };
        encoding.number(self.chunk_tokens).number(self.engine_block_tokens);
        encoding.number(self.tensor_parallel).number(self.pipeline_parallel).number(self.context_parallel);
        encoding.number(self.slices).number(self.pools.len() as u64);
        for pool in &self.pools {
            encoding.text(&pool.name).number(pool.layers).number(pool.layer_bytes);
            let (policy, chunks) = match pool.hit {
                HitPolicy::All => (0, 0),
                HitPolicy::Window(chunks) => (1, chunks),
                HitPolicy::Last => (2, 0),
            };
            encoding.number(policy as u32).number(chunks);
        }
        encoding.number(self.flat);
        Fingerprint(encoding.0.finalize().into())
    }

    fn check_names(&self) -> Result<(), NamespaceError> {
        let (hash_name, seed) = match &self.hash {
            HashAlgorithm::Larder => ("larder", ""),
            HashAlgorithm::Engine(EngineHash { name, seed }) => (name.as_str(), seed.as_str()),
        };
        if seed.eq_ignore_ascii_case("random") {
            return Err(NamespaceError::RandomSeed);
        }
        let named = [
            ("model", self.model.as_str(), 1),
            ("revision", &self.revision, 0),
            ("kv_dtype", &self.kv_dtype, 1),
            ("layout", &self.layout, 1),
            ("hash name", hash_name, 1),
            ("hash seed", seed, 0),
        ];
        for (field, text, least) in named {
            if !(least..=MAX_NAME_BYTES).contains(&text.len()) {
                return Err(NamespaceError::Name { field, bytes: text.len() });
            }
        }
        Ok(())
    }

    fn check_pools(&self) -> Result<(), NamespaceError> {
        if !(1..=MAX_POOLS).contains(&self.pools.len()) {
            return Err(NamespaceError::Pools { found: self.pools.len() });
        }
        let PoolSpec { name, hit, .. } = &self.pools[0];
        if name != "kv" || *hit != HitPolicy::All {
            return Err(NamespaceError::FirstPool { pool: name.clone(), hit: *hit });
        }
        for (i, pool) in self.pools.iter().enumerate() {
            if !(1..=MAX_NAME_BYTES).contains(&pool.name.len()) {
                return Err(NamespaceError::Name { field: "pool", bytes: pool.name.len() });
            }
            if self.pools[..i].iter().any(|other| other.name == pool.name) {
                return Err(NamespaceError::DuplicatePool { pool: pool.name.clone() });
            }
            if pool.hit == HitPolicy::Window(0) {
                return Err(NamespaceError::EmptyWindow { pool: pool.name.clone() });
            }
            if self.flat && pool.hit != HitPolicy::All {
                return Err(NamespaceError::FlatPool { pool: pool.name.clone(), hit: pool.hit });
            }
            let possible = (1..=MAX_LAYERS).contains(&pool.layers)
                && (1..=MAX_BLOCK_BYTES).contains(&pool.layer_bytes)
                && pool.block_bytes() <= MAX_BLOCK_BYTES;
            if !possible {
                let PoolSpec { name, layers, layer_bytes, .. } = pool.clone();
                return Err(NamespaceError::BlockSize { pool: name, layers, layer_bytes });
            }
        }
        Ok(())
    }
}

impl Fingerprint {
    /// The parent of every prompt's first chunk.
    #[must_use]
    pub fn root(&self) -> ChunkHash {
        ChunkHash(blake3::Hasher::new().update(b"larder root 1").update(&self.0).finalize().into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The whole fingerprint; [`fmt::Display`] shows only its beginning.
impl fmt::LowerHex for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The canonical encoding that [`NamespaceSpec::fingerprint`] hashes.
struct Encoding(blake3::Hasher);

impl Encoding {
    fn text(&mut self, text: &str) -> &mut Self {
        self.0.update(&(text.len() as u32).to_le_bytes()).update(text.as_bytes());
        self
    }

    fn number(&mut self, number: impl Into<u64>) -> &mut Self {
        self.0.update(&number.into().to_le_bytes());
        self
    }
}

/// Why a namespace is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// A text is empty or too long.
    #[error("`{field}` has {bytes} bytes; it must have 1 to {MAX_NAME_BYTES}")]
    Name {
        /// The field.
        field: &'static str,
        /// The text's length.
        bytes: usize,
    },
    /// Each process draws the seed for itself: no two engines would ever agree on a hash.
    #[error(
        "a random hash seed gives each process other hashes, so no process hits the chunks of another: set a fixed seed (vLLM: PYTHONHASHSEED=0)"
    )]
    RandomSeed,
    /// No tokens, or too many, in a chunk.
    #[error("chunk_tokens is {chunk_tokens}; it must be 1 to {MAX_CHUNK_TOKENS}")]
    ChunkTokens {
        /// Tokens of a chunk.
        chunk_tokens: u32,
    },
    /// A chunk is no whole number of engine blocks.
    #[error("a chunk of {chunk_tokens} tokens is no whole number of engine blocks of {engine_block_tokens}")]
    EngineBlock {
        /// Tokens of a chunk.
        chunk_tokens: u32,
        /// Tokens of an engine block.
        engine_block_tokens: u32,
    },
    /// No slices, or too many.
    #[error("a namespace has 1 to {MAX_SLICES} slices, not {slices}")]
    Slices {
        /// Slices found.
        slices: u16,
    },
    /// A parallel layout with no rank.
    #[error("the numbers of tensor, pipeline and context parallel ranks must be at least 1")]
    ZeroRanks,
    /// No pool, or too many.
    #[error(
        "a namespace has 1 to {MAX_POOLS} pools, not {found}: put layers that are needed at the same chunks into one pool"
    )]
    Pools {
        /// Pools found.
        found: usize,
    },
    /// The first pool is not the pool of every chunk.
    #[error(
        "the first pool must be `kv` with hit policy `all`, the state of every chunk; this is `{pool}` with {hit:?}"
    )]
    FirstPool {
        /// The pool's name.
        pool: String,
        /// The pool's policy.
        hit: HitPolicy,
    },
    /// A window of no chunks.
    #[error(
        "pool `{pool}` has a window of 0 chunks: a window has at least 1 (window tokens / chunk_tokens, rounded up)"
    )]
    EmptyWindow {
        /// The pool.
        pool: String,
    },
    /// A pool of a flat namespace that is needed only at the end of a prefix.
    #[error("pool `{pool}` has hit policy {hit:?}, but keys of a flat namespace have no order: use `all`")]
    FlatPool {
        /// The pool.
        pool: String,
        /// The pool's policy.
        hit: HitPolicy,
    },
    /// Two pools of one name.
    #[error("two pools have the name `{pool}`: give each kind of state its own name")]
    DuplicatePool {
        /// The name.
        pool: String,
    },
    /// A block of no bytes, or of too many.
    #[error(
        "pool `{pool}`: {layers} layers of {layer_bytes} bytes; a block has at most {MAX_LAYERS} layers and {MAX_BLOCK_BYTES} bytes"
    )]
    BlockSize {
        /// The pool.
        pool: String,
        /// Layers of the pool.
        layers: u32,
        /// Bytes a layer.
        layer_bytes: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> NamespaceSpec {
        NamespaceSpec {
            model: "meta-llama/Meta-Llama-3-8B".into(),
            revision: "main".into(),
            kv_dtype: "bfloat16".into(),
            layout: "vllm-nhd".into(),
            hash: HashAlgorithm::Engine(EngineHash { name: "sha256_cbor".into(), seed: "0".into() }),
            chunk_tokens: 256,
            engine_block_tokens: 16,
            tensor_parallel: 1,
            pipeline_parallel: 1,
            context_parallel: 1,
            slices: 1,
            pools: vec![PoolSpec {
                name: "kv".into(),
                layers: 32,
                layer_bytes: 1 << 20,
                hit: HitPolicy::All,
            }],
            flat: false,
        }
    }

    type Edit = fn(&mut NamespaceSpec);

    fn state(hit: HitPolicy) -> PoolSpec {
        PoolSpec { name: "state".into(), layers: 1, layer_bytes: 1 << 20, hit }
    }

    const EDITS: [Edit; 20] = [
        |s| s.model.push('x'),
        |s| s.revision.push('x'),
        |s| s.kv_dtype.push('x'),
        |s| s.layout.push('x'),
        |s| s.hash = HashAlgorithm::Larder,
        |s| s.hash = HashAlgorithm::Engine(EngineHash { name: "sha256_cbor".into(), seed: "1".into() }),
        |s| s.chunk_tokens = 512,
        |s| s.engine_block_tokens = 32,
        |s| s.tensor_parallel = 2,
        |s| s.pipeline_parallel = 2,
        |s| s.context_parallel = 2,
        |s| s.slices = 2,
        |s| s.pools[0].layers = 16,
        |s| s.pools[0].layer_bytes = 1 << 19,
        |s| s.flat = true,
        |s| s.pools.push(state(HitPolicy::All)),
        |s| s.pools.push(state(HitPolicy::Last)),
        |s| s.pools.push(state(HitPolicy::Window(1))),
        |s| s.pools.push(state(HitPolicy::Window(2))),
        |s| {
            s.pools
                .extend([state(HitPolicy::Last), PoolSpec { name: "draft".into(), ..state(HitPolicy::All) }])
        },
    ];

    #[test]
    fn every_field_and_the_tenant_change_the_fingerprint() {
        let mut seen = vec![spec().fingerprint("a"), spec().fingerprint("b")];
        for edit in EDITS {
            let mut edited = spec();
            edit(&mut edited);
            assert_eq!(edited.check(), Ok(()));
            seen.push(edited.fingerprint("a"));
        }
        let count = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn the_fingerprint_is_what_it_always_was() {
        assert_eq!(spec().fingerprint("default").to_string(), "bc57aabaab7d79dc");
    }

    #[test]
    fn impossible_namespaces_are_refused() {
        let refused = |edit: Edit| {
            let mut edited = spec();
            edit(&mut edited);
            edited.check().unwrap_err()
        };
        assert_eq!(refused(|s| s.model.clear()), NamespaceError::Name { field: "model", bytes: 0 });
        assert_eq!(
            refused(
                |s| s.hash = HashAlgorithm::Engine(EngineHash { name: "x".into(), seed: "random".into() })
            ),
            NamespaceError::RandomSeed
        );
        assert_eq!(
            refused(|s| s.engine_block_tokens = 24),
            NamespaceError::EngineBlock { chunk_tokens: 256, engine_block_tokens: 24 }
        );
        assert_eq!(refused(|s| s.chunk_tokens = 0), NamespaceError::ChunkTokens { chunk_tokens: 0 });
        assert_eq!(refused(|s| s.pools.clear()), NamespaceError::Pools { found: 0 });
        assert!(matches!(
            refused(|s| s.pools.push(s.pools[0].clone())),
            NamespaceError::DuplicatePool { .. }
        ));
        assert!(matches!(refused(|s| s.pools[0].layer_bytes = u64::MAX), NamespaceError::BlockSize { .. }));
        assert_eq!(refused(|s| s.slices = 0), NamespaceError::Slices { slices: 0 });
    }

    #[test]
    fn impossible_pool_sets_are_refused_and_told_what_to_do() {
        let refused = |edit: Edit| {
            let mut edited = spec();
            edit(&mut edited);
            edited.check().unwrap_err().to_string()
        };
        let told = [
            (refused(|s| s.pools.clear()), "1 to 8 pools, not 0"),
            (
                refused(|s| {
                    (0..8)
                        .for_each(|i| s.pools.push(PoolSpec { name: i.to_string(), ..state(HitPolicy::All) }))
                }),
                "1 to 8 pools, not 9",
            ),
            (
                refused(|s| s.pools[0].name = "mamba".into()),
                "the first pool must be `kv` with hit policy `all`",
            ),
            (refused(|s| s.pools[0].hit = HitPolicy::Last), "this is `kv` with Last"),
            (refused(|s| s.pools.push(s.pools[0].clone())), "two pools have the name `kv`"),
            (refused(|s| s.pools.push(state(HitPolicy::Window(0)))), "a window has at least 1"),
            (
                refused(|s| {
                    s.flat = true;
                    s.pools.push(state(HitPolicy::Window(2)));
                }),
                "have no order: use `all`",
            ),
            (
                refused(|s| {
                    s.flat = true;
                    s.pools.push(state(HitPolicy::Last));
                }),
                "have no order: use `all`",
            ),
        ];
        for (message, said) in told {
            assert!(message.contains(said), "{message}");
        }
    }
}
