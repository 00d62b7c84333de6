//! The namespaces of a run, the prompts that engines ask of them, and the bytes that every block must have.

use larder_cli::content;
use larder_protocol::namespace::{EngineHash, HashAlgorithm};
use larder_protocol::{ChunkHash, HitPolicy, NamespaceSpec, PoolSpec};

/// One namespace, as each tenant has it, with all prompts that engines ever ask for. All namespaces and tenants have the same
/// hashes, with different bytes under them.
pub(super) struct Space {
    pub(super) spec: NamespaceSpec,
    pub(super) slices: Vec<u16>,
    /// Bytes of one block of each pool.
    pub(super) block_bytes: Vec<u64>,
    prompts: Vec<Vec<ChunkHash>>,
    /// By tenant and block of a chunk: the tags that make their bytes differ.
    tags: Vec<Vec<ChunkHash>>,
}

impl Space {
    /// Namespaces of three block sizes, which together hold `bytes` bytes for all `tenants`.
    pub(super) fn all(seed: u64, tenants: usize, bytes: u64) -> Vec<Self> {
        let kinds = [
            Kind { name: "small", slices: 1, pools: &[(1, 4 << 10, HitPolicy::All)], longest: 96 },
            Kind { name: "slices", slices: 2, pools: &[(5, 4 << 10, HitPolicy::All)], longest: 24 },
            Kind {
                name: "state",
                slices: 1,
                pools: &[(4, 16 << 10, HitPolicy::All), (1, 12 << 10, HitPolicy::Last)],
                longest: 12,
            },
        ];
        let of_each = bytes / tenants as u64 / kinds.len() as u64;
        let numbered = kinds.into_iter().enumerate();
        numbered.map(|(number, kind)| Self::new(number, &kind, seed, tenants, of_each)).collect()
    }

    fn new(number: usize, kind: &Kind, seed: u64, tenants: usize, bytes: u64) -> Self {
        let spec = kind.spec();
        let block_bytes: Vec<u64> = spec.pools.iter().map(PoolSpec::block_bytes).collect();
        let slices: Vec<u16> = (0..spec.slices).collect();
        let chunk_bytes = slices.len() as u64 * block_bytes.iter().sum::<u64>();
        let blocks = slices.len() * block_bytes.len();
        let tag = |tenant: usize, block: usize| {
            content::chunk_hash(u64::MAX - ((tenant << 16) | (number << 8) | block) as u64)
        };
        let tags = (0..tenants).map(|tenant| (0..blocks).map(|block| tag(tenant, block)).collect()).collect();
        let prompts = prompts(seed, number, kind.longest, bytes / chunk_bytes);
        Self { spec, slices, block_bytes, prompts, tags }
    }

    /// Draws a prompt, popular prompts more often than others, or the beginning of a prompt.
    pub(super) fn draw(&self, rng: &mut fastrand::Rng) -> Vec<ChunkHash> {
        let rank = rng.f64().powi(3) * self.prompts.len() as f64;
        let prompt = &self.prompts[rank as usize];
        let chunks = if rng.u8(..4) == 0 { rng.usize(1..=prompt.len()) } else { prompt.len() };
        prompt[..chunks].to_vec()
    }

    /// Bytes of a whole chunk.
    pub(super) fn chunk_bytes(&self) -> u64 {
        self.slices.len() as u64 * self.block_bytes.iter().sum::<u64>()
    }

    /// The key from which the bytes of a block follow.
    pub(super) fn key(&self, tenant: usize, hash: &ChunkHash, block: usize) -> ChunkHash {
        let tag = &self.tags[tenant][block];
        ChunkHash(std::array::from_fn(|i| hash.0[i] ^ tag.0[i]))
    }
}

/// The description of a namespace.
struct Kind {
    name: &'static str,
    slices: u16,
    /// Layers, bytes of a layer, and the chunks that need the pool.
    pools: &'static [(u32, u64, HitPolicy)],
    /// The most chunks that a prompt has beyond its head.
    longest: usize,
}

impl Kind {
    fn spec(&self) -> NamespaceSpec {
        let pools = self.pools.iter().enumerate().map(|(number, &(layers, layer_bytes, hit))| PoolSpec {
            name: if number == 0 { "kv".into() } else { format!("state-{number}") },
            layers,
            layer_bytes,
            hit,
        });
        NamespaceSpec {
            model: format!("soak {}", self.name),
            revision: String::new(),
            kv_dtype: "bytes".into(),
            layout: "flat".into(),
            hash: HashAlgorithm::Engine(EngineHash { name: "soak".into(), seed: String::new() }),
            chunk_tokens: CHUNK_TOKENS,
            engine_block_tokens: CHUNK_TOKENS,
            tensor_parallel: self.slices,
            pipeline_parallel: 1,
            context_parallel: 1,
            slices: self.slices,
            pools: pools.collect(),
            flat: false,
        }
    }
}

/// Families of prompts, each with a common head, until they have `chunks` different chunks.
fn prompts(seed: u64, space: usize, longest: usize, chunks: u64) -> Vec<Vec<ChunkHash>> {
    let mut rng = fastrand::Rng::with_seed(seed ^ (space as u64) << 32);
    let id = |family: u64, branch: u64, index: usize| {
        content::chunk_hash((seed << 48) ^ (family << 24) ^ (branch << 16) ^ index as u64)
    };
    let (mut prompts, mut made, mut family) = (Vec::new(), 0, 0);
    while made < chunks {
        let head: Vec<ChunkHash> =
            (0..rng.usize(1..=longest.div_ceil(3))).map(|i| id(family, 0, i)).collect();
        made += head.len() as u64;
        for branch in 1..=rng.u64(1..=5) {
            let tail = (0..rng.usize(1..=longest)).map(|i| id(family, branch, i));
            let prompt: Vec<ChunkHash> = head.iter().copied().chain(tail).collect();
            made += (prompt.len() - head.len()) as u64;
            prompts.push(prompt);
        }
        family += 1;
    }
    rng.shuffle(&mut prompts);
    prompts
}

/// Tokens of one chunk.
pub(super) const CHUNK_TOKENS: u32 = 16;

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

    #[test]
    fn every_namespace_is_possible_and_all_hold_the_bytes_asked_for() {
        for space in Space::all(1, 2, 60 << 20) {
            assert_eq!(space.spec.check(), Ok(()));
            let chunks: HashSet<_> = space.prompts.iter().flatten().collect();
            let bytes = chunks.len() as u64 * space.chunk_bytes();
            assert!((9 << 20..20 << 20).contains(&bytes), "{bytes}");
        }
    }

    #[test]
    fn a_hash_has_one_parent_in_a_namespace_and_other_bytes_in_every_namespace_tenant_and_block() {
        let spaces = Space::all(3, 2, 20 << 20);
        for space in &spaces {
            let mut parents = HashMap::new();
            for prompt in &space.prompts {
                for pair in prompt.windows(2) {
                    assert_eq!(*parents.entry(pair[1]).or_insert(pair[0]), pair[0]);
                }
            }
        }
        let hash = spaces[0].prompts[0][0];
        let keys: Vec<ChunkHash> = spaces
            .iter()
            .flat_map(|space| (0..2).map(move |tenant| (space, tenant)))
            .flat_map(|(space, tenant)| {
                (0..space.tags[tenant].len()).map(move |block| space.key(tenant, &hash, block))
            })
            .collect();
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
    }
}
