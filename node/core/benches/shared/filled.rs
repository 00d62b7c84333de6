//! A store full of prompts, for whatever measures it.

use larder_core::Millis;
use larder_core::store::ids::{ProcessId, SessionId, TenantId};
use larder_core::store::policy::PolicyName;
use larder_core::store::{Checksums, Store, StoreLimits};
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{Chain, ChunkHash};

/// A store full of prompts of 100 chunks.
pub(crate) struct Filled {
    pub(crate) store: Store,
    pub(crate) session: SessionId,
    pub(crate) namespace: u32,
    root: ChunkHash,
    prompts: u64,
}

impl Filled {
    pub(crate) fn new(chunks: u64, capacity_chunks: u64) -> Self {
        Self::by(PolicyName::Lru, chunks, capacity_chunks)
    }

    /// A store that evicts by another policy.
    pub(crate) fn by(policy: PolicyName, chunks: u64, capacity_chunks: u64) -> Self {
        let limits = StoreLimits::of_chunks(1 << 10, 64 << 20, capacity_chunks, policy);
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

    pub(crate) fn put(&mut self, chain: &Chain) {
        let reserved = self.store.reserve(self.session, self.namespace, chain, 0, Millis(0)).expect("room");
        let sources = vec![0; reserved.chunks.len()];
        let order = self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &sources);
        let order = order.expect("it is reserved");
        let sums = vec![Checksums::default(); order.moves.len()];
        assert_eq!(u64::from(self.store.finish_commit(order.order, Some(sums))), PROMPT);
    }

    pub(crate) fn random_prompts(&self) -> impl FnMut() -> Chain + use<> {
        let (root, prompts) = (self.root, self.prompts);
        let mut rng = fastrand::Rng::with_seed(1);
        move || chain(root, rng.u64(..prompts))
    }

    pub(crate) fn new_prompts(&self) -> impl FnMut() -> Chain + use<> {
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

/// Chunks of a prompt.
pub(crate) const PROMPT: u64 = 100;

const BLOCK_BYTES: u64 = 4_096;
