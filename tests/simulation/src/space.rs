//! The namespaces of the engines: two tenants, blocks of different sizes, slices, a pool of another kind, keys without order.

use larder_protocol::checksum::BlockKey;
use larder_protocol::namespace::{HashAlgorithm, NamespaceSpec};
use larder_protocol::{Chain, ChunkHash, Fingerprint, HitPolicy, PoolRules, PoolSet, PoolSpec};

/// A namespace.
#[derive(Debug, Clone)]
pub(crate) struct Space {
    pub(crate) tenant: u16,
    pub(crate) spec: NamespaceSpec,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) root: ChunkHash,
    pub(crate) rules: PoolRules,
}

/// The tenants' names.
pub(crate) const TENANTS: [&str; 2] = ["a", "b"];

/// Prompts; chunks are named by the beginnings of words: equal beginnings are equal chunks.
const WORDS: [&str; 14] = [
    "abcdefgh",
    "abcdexyz",
    "abq",
    "aqrs",
    "bcdefghi",
    "bq",
    "cdefgh",
    "cxyz",
    "dddddddd",
    "efghij",
    "fgh",
    "ghijklmnop",
    "abcdexyw",
    "hh",
];

/// All namespaces that engines use.
pub(crate) fn all() -> Vec<Space> {
    let kv = |layer_bytes| PoolSpec { name: "kv".into(), layers: 2, layer_bytes, hit: HitPolicy::All };
    let state = PoolSpec { name: "state".into(), layers: 1, layer_bytes: 1_024, hit: HitPolicy::Last };
    vec![
        space(0, "m1", 1, vec![kv(2_048)], false),
        space(0, "m2", 1, vec![kv(4_096)], false),
        space(0, "hybrid", 1, vec![kv(1_024), state], false),
        space(1, "m1", 1, vec![kv(2_048)], false),
        space(1, "wide", 2, vec![kv(2_048)], false),
        space(1, "flat", 1, vec![kv(1_536)], true),
    ]
}

fn space(tenant: u16, model: &str, slices: u16, pools: Vec<PoolSpec>, flat: bool) -> Space {
    let spec = NamespaceSpec {
        model: model.into(),
        revision: String::new(),
        kv_dtype: "bfloat16".into(),
        layout: "nhd".into(),
        hash: HashAlgorithm::Larder,
        chunk_tokens: 16,
        engine_block_tokens: 8,
        tensor_parallel: slices,
        pipeline_parallel: 1,
        context_parallel: 1,
        slices,
        pools,
        flat,
    };
    let fingerprint = spec.fingerprint(TENANTS[usize::from(tenant)]);
    let rules = PoolRules::new(&spec.pools);
    Space { tenant, root: fingerprint.root(), fingerprint, rules, spec }
}

impl Space {
    /// A random prompt.
    pub(crate) fn prompt(&self, random: &mut fastrand::Rng) -> Chain {
        let word = WORDS[random.usize(..WORDS.len())];
        let most = if random.u8(..4) == 0 { word.len() } else { 4.min(word.len()) };
        self.chain(&word[..random.usize(1..=most)])
    }

    pub(crate) fn chain(&self, word: &str) -> Chain {
        let hashes = (1..=word.len()).map(|end| name(&word[..end])).collect();
        if self.spec.flat { Chain::flat(self.root, hashes) } else { Chain::from_root(self.root, hashes) }
    }

    /// The blocks of these pools of a chunk, by slice, then pool.
    pub(crate) fn blocks_of(
        &self,
        hash: ChunkHash,
        pools: PoolSet,
    ) -> impl Iterator<Item = BlockKey> + use<'_> {
        let (fingerprint, count) = (self.fingerprint, self.spec.pools.len());
        let key = move |slice, pool| BlockKey { fingerprint, hash, slice, pool: pool as u8 };
        (0..self.spec.slices).flat_map(move |slice| {
            (0..count).filter(move |&pool| pools.has(pool)).map(move |pool| key(slice, pool))
        })
    }

    /// The chunks of all prompts.
    pub(crate) fn all_hashes(&self) -> impl Iterator<Item = ChunkHash> {
        WORDS.iter().flat_map(|word| (1..=word.len()).map(|end| name(&word[..end])))
    }

    /// Bytes of a layer of a pool.
    pub(crate) fn layer_bytes(&self, pool: usize) -> u64 {
        self.spec.pools[pool].layer_bytes
    }

    /// Bytes of the blocks of a pool.
    pub(crate) fn block_bytes(&self, pool: usize) -> u64 {
        self.spec.pools[pool].block_bytes()
    }
}

fn name(word: &str) -> ChunkHash {
    let mut hash = [0; 32];
    hash[..word.len()].copy_from_slice(word.as_bytes());
    // The directory distinguishes chunks by their first bytes.
    let short = xxhash_rust::xxh3::xxh3_64(word.as_bytes()).to_le_bytes();
    hash[24..].copy_from_slice(&short);
    hash.rotate_right(8);
    ChunkHash(hash)
}
