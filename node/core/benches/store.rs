//! What the store's bookkeeping costs, at several sizes: `cargo bench -p larder-core --bench store`.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use larder_core::Millis;
use larder_core::store::ids::{ProcessId, SessionId, TenantId};
use larder_core::store::policy::{Facts, PolicyName, Removal, Verdict};
use larder_core::store::{Checksums, LookupOptions, Store, StoreLimits};
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{Chain, ChunkHash};

fn main() {
    divan::main();
}

/// Chunks in the store.
const SIZES: [u64; 3] = [10_000, 100_000, 1_000_000];

/// Chunks of a prompt.
const PROMPT: u64 = 100;

const BLOCK_BYTES: u64 = 4_096;

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
    let facts = Facts { short_hash: 0, index: 0, priority: 0 };
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

/// A store full of prompts of 100 chunks.
struct Filled {
    store: Store,
    session: SessionId,
    namespace: u32,
    root: ChunkHash,
    prompts: u64,
}

impl Filled {
    fn new(chunks: u64, capacity_chunks: u64) -> Self {
        let limits = StoreLimits::of_chunks(1 << 10, 64 << 20, capacity_chunks, PolicyName::Lru);
        let mut store = Store::new(limits);
        let session = store.open_session(TenantId(0), ProcessId(0), BLOCK_BYTES);
        let registered = store.register(
            session,
            "default",
            &NamespaceSpec::of_blocks("bench", 16, BLOCK_BYTES),
            &[0],
            &[BLOCK_BYTES],
        );
        let registered = registered.expect("the namespace is possible");
        let (namespace, root) = (registered.namespace, registered.root);
        let mut filled = Self { store, session, namespace, root, prompts: chunks / PROMPT };
        for prompt in 0..filled.prompts {
            filled.put(&chain(root, prompt));
        }
        filled
    }

    fn put(&mut self, chain: &Chain) {
        let reserved = self.store.reserve(self.session, self.namespace, chain, 0, Millis(0)).expect("room");
        let sources = vec![0; reserved.chunks.len()];
        let order = self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources);
        let order = order.expect("it is reserved");
        let sums = vec![Checksums::default(); order.moves.len()];
        assert_eq!(u64::from(self.store.finish_commit(order.order, Some(sums))), PROMPT);
    }

    fn random_prompts(&self) -> impl FnMut() -> Chain + use<> {
        let (root, prompts) = (self.root, self.prompts);
        let mut rng = fastrand::Rng::with_seed(1);
        move || chain(root, rng.u64(..prompts))
    }

    fn new_prompts(&self) -> impl FnMut() -> Chain + use<> {
        let (root, mut next) = (self.root, self.prompts);
        move || {
            next += 1;
            chain(root, next)
        }
    }
}

fn chain(root: ChunkHash, prompt: u64) -> Chain {
    let name = |number: u64| {
        let mut rng = fastrand::Rng::with_seed(number);
        ChunkHash(std::array::from_fn(|_| rng.u8(..)))
    };
    Chain::from_root(root, (prompt * PROMPT..(prompt + 1) * PROMPT).map(name).collect())
}
