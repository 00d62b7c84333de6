//! One node of a planned cluster: the production store with one session.

use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{Chain, ChunkHash};

use crate::store::ids::{ProcessId, SessionId, TenantId};
use crate::store::policy::PolicyName;
use crate::store::{Leased, Store, StoreLimits};
use crate::time::Millis;

/// A store and the session that asks it.
#[derive(Debug)]
pub(super) struct Node {
    store: Store,
    session: SessionId,
    namespace: u32,
    root: ChunkHash,
}

impl Node {
    /// An empty node that keeps `capacity_chunks` chunks, beside those of one prompt of at most `longest` blocks.
    pub(super) fn new(policy: PolicyName, capacity_chunks: u64, longest: u64) -> Self {
        let mut store = Store::new(limits(policy, capacity_chunks, longest));
        let session = store.open_session(TenantId(0), ProcessId(0), 0);
        let spec = NamespaceSpec::of_blocks("plan", 16, SLOT_BYTES);
        let registered = store.register(session, "plan", &spec, &[0], &[SLOT_BYTES]);
        let registered = registered.expect("a namespace of one pool is possible");
        Self { store, session, namespace: registered.namespace, root: registered.root }
    }

    /// It is so late, in trace time.
    pub(super) fn is_now(&mut self, now_ms: u64) {
        self.store.is_now(Millis(now_ms));
    }

    /// The parent of every first chunk; the same for all nodes.
    pub(super) fn root(&self) -> ChunkHash {
        self.root
    }

    /// Whether a chunk can be read here. Touches nothing.
    pub(super) fn holds(&self, hash: &ChunkHash) -> bool {
        self.store.checksums(self.namespace, hash).is_some()
    }

    /// Uses the longest prefix of a chain that is here, and keeps it until it is released.
    pub(super) fn lease(&mut self, chain: &Chain) -> Leased {
        let leased = self.store.lease(self.session, self.namespace, chain);
        leased.expect("a trace's ids are chained, and leases are not limited")
    }

    /// Ends a lease.
    pub(super) fn release(&mut self, leased: &Leased) {
        if leased.chunks > 0 {
            self.store.release(self.session, leased.lease).expect("it was leased and not released");
        }
    }

    /// Keeps those chunks of a chain that are not here yet.
    pub(super) fn put(&mut self, chain: &Chain) {
        let reserved = self.store.reserve(self.session, self.namespace, chain, 0, Millis(0));
        let reserved = reserved.expect("there are slots for a prompt beside what is cached");
        if !reserved.chunks.is_empty() {
            let order = self.store.begin_commit(self.session, reserved.reservation, &reserved.chunks, &[]);
            self.store.finish_commit(order.expect("it was just reserved").order, Some(Vec::new()));
        }
    }
}

/// The smallest slot: nothing is ever written to it.
const SLOT_BYTES: u64 = 4_096;

/// Limits of a store that only the capacity bounds; the session is trusted, so that nothing is copied.
fn limits(policy: PolicyName, capacity_chunks: u64, longest: u64) -> StoreLimits {
    let extent_bytes = (capacity_chunks + 2 * longest) * SLOT_BYTES;
    StoreLimits { trust_engines: true, ..StoreLimits::of_chunks(1, extent_bytes, capacity_chunks, policy) }
}
