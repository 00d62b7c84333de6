//! What the store's bookkeeping costs, at several sizes: `cargo bench -p larder-core --bench store`.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use larder_core::Millis;
use larder_core::store::LookupOptions;
use larder_core::store::policy::{Facts, PolicyName, Removal, Verdict};

use self::filled::{Filled, PROMPT};

#[path = "shared/filled.rs"]
mod filled;

fn main() {
    divan::main();
}

/// Chunks in the store.
const SIZES: [u64; 3] = [10_000, 100_000, 1_000_000];

/// A lookup of a prompt of 100 chunks, all of them there.
#[divan::bench(args = SIZES)]
fn lookup_100(bencher: Bencher<'_, '_>, chunks: u64) {
    let mut filled = Filled::new(chunks, chunks);
    let prompts = filled.random_prompts();
    let options =
        LookupOptions { elsewhere: &[], prompt_tokens: u64::MAX, skip_read: false, tiers: &[], pin_ms: None };
    bencher.with_inputs(prompts).bench_local_values(|chain| {
        let found = filled.store.lookup(filled.session, filled.namespace, &chain, options, Millis(0));
        black_box(found.expect("the chain is right"))
    });
}

/// Lease and release of a prompt of 100 chunks.
#[divan::bench(args = SIZES)]
fn lease_and_release_100(bencher: Bencher<'_, '_>, chunks: u64) {
    let mut filled = Filled::new(chunks, chunks);
    let prompts = filled.random_prompts();
    bencher.counter(ItemsCount::new(PROMPT)).with_inputs(prompts).bench_local_values(|chain| {
        let leased = filled.store.lease(filled.session, filled.namespace, &chain).expect("it is there");
        filled.store.release(filled.session, leased.lease).expect("it was leased");
    });
}

/// Reserving and committing 100 new chunks if there is room.
#[divan::bench(args = SIZES)]
fn reserve_and_commit_100(bencher: Bencher<'_, '_>, chunks: u64) {
    let mut filled = Filled::new(chunks, u64::MAX);
    let next = filled.new_prompts();
    bencher.counter(ItemsCount::new(PROMPT)).with_inputs(next).bench_local_values(|chain| filled.put(&chain));
}

/// The same where the store is full, so that as many chunks are evicted.
#[divan::bench(args = SIZES)]
fn reserve_commit_and_evict_100(bencher: Bencher<'_, '_>, chunks: u64) {
    let mut filled = Filled::new(chunks, chunks);
    let next = filled.new_prompts();
    bencher.counter(ItemsCount::new(PROMPT)).with_inputs(next).bench_local_values(|chain| filled.put(&chain));
}

/// The policy alone: finding a victim, removing it, and inserting another chunk in its place.
#[divan::bench(args = SIZES)]
fn policy_victim_remove_insert(bencher: Bencher<'_, '_>, chunks: u64) {
    let mut policy = PolicyName::Lru.build(None);
    let facts = Facts { short_hash: 0, index: 0, priority: 0, parent: None };
    for position in 0..chunks as usize {
        policy.insert(larder_core::store::ids::ChunkNumber::at(position), facts);
    }
    bencher.counter(ItemsCount::new(PROMPT)).bench_local(|| {
        for _ in 0..PROMPT {
            let victim = policy.victim(&mut |_| Verdict::Take).expect("none is blocked");
            policy.remove(victim, Removal::Evicted);
            policy.insert(victim, facts);
        }
    });
}
