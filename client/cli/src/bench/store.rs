//! The cost of the store's bookkeeping: the node's [`Store`] alone, in this process, without messages or bytes.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use larder_core::Millis;
use larder_core::store::ids::{ProcessId, SessionId, TenantId};
use larder_core::store::policy::PolicyName;
use larder_core::store::{Checksums, LookupOptions, Store, StoreLimits};
use larder_protocol::{Chain, ChunkHash};

use super::Measurement;
use super::measure::{medians, timed};
use super::yardsticks::HashProbes;
use crate::content::chunk_hash;
use crate::replay::namespace::replay_namespace;

/// A store with one session, full of prompts of 100 chunks each.
pub struct StoreBench {
    store: Store,
    session: SessionId,
    namespace: u32,
    root: ChunkHash,
    prompts: u64,
}

impl StoreBench {
    /// A store with `chunks` chunks that may cache `capacity_chunks`, and remembers the given number of evictions.
    ///
    /// # Errors
    /// The store refuses its own limits.
    pub fn filled(chunks: u64, capacity_chunks: u64, remembered_evictions: usize) -> anyhow::Result<Self> {
        let extent_bytes = 64 << 20;
        let slots = capacity_chunks + 2 * CHUNKS;
        let extents = u32::try_from((slots * BLOCK_BYTES).div_ceil(extent_bytes) + 1)?;
        let limits = StoreLimits::of_chunks(extents, extent_bytes, capacity_chunks, PolicyName::Lru);
        let mut store = Store::new(StoreLimits { remembered_evictions, ..limits });
        let session = store.open_session(TenantId(0), ProcessId(0), BLOCK_BYTES);
        let spec = replay_namespace(BLOCK_BYTES);
        let registered = store.register(session, "default", &spec, &[0], &[BLOCK_BYTES])?;
        let mut bench =
            Self { store, session, namespace: registered.namespace, root: registered.root, prompts: 0 };
        for _ in 0..chunks.div_ceil(CHUNKS) {
            bench.put()?;
        }
        Ok(bench)
    }

    /// `store_lookup_100`: a lookup of 100 chunks, against 100 probes of a hash map with as many entries.
    ///
    /// # Errors
    /// The store refuses.
    pub fn lookup(&mut self, rounds: usize) -> anyhow::Result<Measurement> {
        let probes = HashProbes::new(self.prompts * CHUNKS, CHUNKS as usize, SEED);
        let mut rng = fastrand::Rng::with_seed(SEED);
        let options = LookupOptions {
            elsewhere: &[],
            prompt_tokens: u64::MAX,
            skip_read: false,
            tiers: &[],
            pin_ms: None,
        };
        let mut lookup = || {
            let chain = self.chain(rng.u64(..self.prompts));
            let found =
                timed(|| Ok(self.store.lookup(self.session, self.namespace, &chain, options, Millis(0))?))?;
            Ok(found)
        };
        let mut probe = || timed(|| Ok(probes.pass()));
        let [subject, yardstick] = medians(rounds * ROUNDS, [&mut lookup, &mut probe])?;
        Ok(Measurement::microseconds("store_lookup_100", "100 hash-map probes", subject, yardstick))
    }

    /// `store_hit`: the cost of one chunk of a hit: a lease and release of a prompt of 100 chunks drawn at random, divided by
    /// 100. The store finds each chunk by its hash, checks its place in the chain, claims it, touches it in the policy, and gives
    /// it back. The yardstick is one probe of a hash map with as many entries.
    ///
    /// # Errors
    /// The store refuses.
    pub fn hit(&mut self, rounds: usize) -> anyhow::Result<Measurement> {
        let probes = HashProbes::new(self.prompts * CHUNKS, CHUNKS as usize, SEED);
        let mut rng = fastrand::Rng::with_seed(SEED);
        let mut hit = || {
            let chain = self.chain(rng.u64(..self.prompts));
            timed(|| {
                let leased = self.store.lease(self.session, self.namespace, &chain)?;
                self.store.release(self.session, leased.lease)?;
                Ok(leased)
            })
        };
        let mut probe = || timed(|| Ok(probes.pass()));
        let seconds = medians(rounds * ROUNDS, [&mut hit, &mut probe])?;
        let [subject, yardstick] = seconds.map(|seconds| seconds / CHUNKS as f64);
        Ok(Measurement::nanoseconds("store_hit", "hash-map probe", subject, yardstick))
    }

    /// `store_evict`: the cost of one eviction. A commit of 100 chunks ends with the eviction of as many in a full store
    /// (`self`), and with none in a store that is not full (`roomy`, with as many chunks). The cost is the difference of
    /// [`Store::finish_commit`] in both, divided by 100. Against one probe of a hash map with as many entries.
    ///
    /// # Errors
    /// The store refuses.
    pub fn evict(&mut self, roomy: &mut Self, rounds: usize) -> anyhow::Result<Measurement> {
        let probes = HashProbes::new(self.prompts * CHUNKS, CHUNKS as usize, SEED);
        let mut full_put = || self.put();
        let mut roomy_put = || roomy.put();
        let mut probe = || timed(|| Ok(probes.pass()));
        let seconds = medians(rounds * ROUNDS, [&mut full_put, &mut roomy_put, &mut probe])?;
        let [full, roomy, probe] = seconds.map(|seconds| seconds / CHUNKS as f64);
        Ok(Measurement::nanoseconds("store_evict", "hash-map probe", (full - roomy).max(0.0), probe))
    }

    /// `store_remember`: the cost of remembering an eviction, in 16 bytes each. [`Store::finish_commit`] of 100 chunks displaces
    /// as many, both in this store, which remembers them, and in `forgetful`, which is as full and remembers none. The cost is
    /// the difference, divided by 100. Against one probe of a hash map with as many entries.
    ///
    /// # Errors
    /// The store refuses, or an eviction takes more than 16 bytes.
    pub fn remember(&mut self, forgetful: &mut Self, rounds: usize) -> anyhow::Result<Measurement> {
        let probes = HashProbes::new(self.prompts * CHUNKS, CHUNKS as usize, SEED);
        let mut remembering_put = || self.put();
        let mut forgetful_put = || forgetful.put();
        let mut probe = || timed(|| Ok(probes.pass()));
        let [remembering, forgetful, probe] =
            medians(rounds * ROUNDS, [&mut remembering_put, &mut forgetful_put, &mut probe])?;
        let remembered = (remembering - forgetful).max(0.0) / CHUNKS as f64;
        let bytes = self.store.remembered_bytes();
        let evictions = self.store.evictions_so_far().next_multiple_of(SEGMENT);
        ensure!(bytes <= evictions * 16, "{evictions} evictions take {bytes} bytes");
        Ok(Measurement::nanoseconds("store_remember", "hash-map probe", remembered, probe / CHUNKS as f64))
    }

    /// Saves a new prompt; returns the time of the end of its commit.
    fn put(&mut self) -> anyhow::Result<Duration> {
        let chain = self.chain(self.prompts);
        self.prompts += 1;
        let reserved = self.store.reserve(self.session, self.namespace, &chain, 0, Millis(0))?;
        let sources = vec![0; reserved.chunks.len()];
        let order =
            self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources)?;
        let sums = vec![Checksums::default(); order.moves.len()];
        timed(|| {
            let kept = self.store.finish_commit(order.order, Some(sums));
            (u64::from(kept) == CHUNKS).then_some(()).context("a commit was not kept")
        })
    }

    fn chain(&self, prompt: u64) -> Chain {
        let ids = prompt * CHUNKS..(prompt + 1) * CHUNKS;
        black_box(Chain::from_root(self.root, ids.map(chunk_hash).collect()))
    }
}

/// Chunks of a prompt.
const CHUNKS: u64 = 100;

const BLOCK_BYTES: u64 = 4_096;

/// Remembered evictions in one allocation.
const SEGMENT: u64 = 4_096;

/// These passes are short: this many for each round of another measurement.
const ROUNDS: usize = 10;

const SEED: u64 = 1;
