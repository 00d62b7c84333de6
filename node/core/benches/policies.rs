//! What an operation of each policy takes with a million chunks cached.
//!
//! `cargo bench -p larder-core --bench policies`. One iteration is [`OPERATIONS`] operations. Chunks are used with a
//! popularity of about one over the rank, as in real traffic; one in [`PROMPT`] may go, as with prompts of so many.

use std::num::NonZeroU32;

use divan::Bencher;
use larder_core::store::ids::ChunkNumber;
use larder_core::store::policy::{Facts, Policy, PolicyName, Removal, Verdict};

fn main() {
    divan::main();
}

/// A cached chunk is leased and let go: blocked, used, unblocked.
#[divan::bench(args = PolicyName::ALL, sample_count = 5, sample_size = 1)]
fn touch(bencher: Bencher<'_, '_>, policy: PolicyName) {
    let mut full = Full::new(policy.build(None));
    bencher.bench_local(|| {
        for _ in 0..OPERATIONS {
            let chunk = full.popular();
            full.policy.touch(chunk);
            if chunk.position().is_multiple_of(PROMPT) {
                full.policy.block(chunk);
                full.policy.unblock(chunk);
            }
        }
    });
}

/// A chunk is evicted, and another one comes in.
#[divan::bench(args = PolicyName::ALL, sample_count = 5, sample_size = 1)]
fn replace(bencher: Bencher<'_, '_>, policy: PolicyName) {
    replace_in(bencher, policy.build(None));
}

/// The same with `adaptive`, where it weighs what recomputing costs.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn replace_by_cost(bencher: Bencher<'_, '_>) {
    replace_in(bencher, PolicyName::Adaptive.build(NonZeroU32::new(128)));
}

fn replace_in(bencher: Bencher<'_, '_>, policy: Box<dyn Policy>) {
    let mut full = Full::new(policy);
    bencher.bench_local(|| {
        for _ in 0..OPERATIONS {
            let victim = full.policy.victim(&mut |_| Verdict::Take).expect("some may go");
            full.policy.remove(victim, Removal::Evicted);
            full.insert(victim);
        }
    });
}

struct Full {
    policy: Box<dyn Policy>,
    rng: fastrand::Rng,
}

impl Full {
    fn new(policy: Box<dyn Policy>) -> Self {
        let mut full = Self { policy, rng: fastrand::Rng::with_seed(1) };
        for chunk in (0..CHUNKS).map(ChunkNumber::at) {
            full.insert(chunk);
            if !chunk.position().is_multiple_of(PROMPT) {
                full.policy.block(chunk);
            }
        }
        (0..CHUNKS).for_each(|_| {
            let chunk = full.popular();
            full.policy.touch(chunk);
        });
        full
    }

    fn insert(&mut self, chunk: ChunkNumber) {
        let index = self.rng.u32(..LONGEST);
        let facts = Facts { short_hash: self.rng.u64(..), index, priority: 0, parent: None };
        self.policy.insert(chunk, facts);
    }

    fn popular(&mut self) -> ChunkNumber {
        let below = (self.rng.f64() * (CHUNKS as f64).ln()).exp() as usize;
        ChunkNumber::at((below * SPREAD) % CHUNKS)
    }
}

const CHUNKS: usize = 1 << 20;
const PROMPT: usize = 16;

/// Chunks stand anywhere in prompts of at most so many.
const LONGEST: u32 = 1_000;

const OPERATIONS: usize = 1_000_000;

/// An odd number, so that popular chunks are not neighbors.
const SPREAD: usize = 0x9e37_79b9;
