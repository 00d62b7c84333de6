//! Drains: chunks that move away from this node, and chunks that come from another draining node.

use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{ChunkRef, Fingerprint};

use super::fetch::{FetchId, Source, Wanted};
use crate::store::Store;
use crate::store::ids::{ChunkId, ChunkKey};
use crate::store::index::{OnDisk, Stored};
use crate::store::journal::is_held;

/// The answer for a chunk that another node wants this one to keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TakeIn {
    /// The chunk is here already.
    Here,
    /// The chunk is being fetched already, or has to be fetched: [`Store::end_recall`] must follow.
    Coming {
        /// Its fetch.
        fetch: FetchId,
        /// The fetch to start, unless it is under way.
        wanted: Option<Wanted>,
    },
    /// The chunk has no room before other chunks have come or gone.
    Busy,
    /// The chunk is being written here, or its name contradicts others.
    Refused,
}

/// How a chunk of a draining store is to be treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaving {
    /// The chunk must move, or it is lost.
    Moves {
        /// Its namespace.
        fingerprint: Fingerprint,
        /// Its name.
        chunk: ChunkRef,
        /// Bytes of its slots.
        bytes: u64,
    },
    /// The disk or the object store keeps the chunk.
    KeptBelow,
    /// The chunk is not here any more, or not whole.
    Gone,
}

/// Room for more chunks before a chunk has to be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FreeRoom {
    /// Chunks.
    pub chunks: u64,
    /// Bytes of their slots.
    pub bytes: u64,
}

impl Store {
    /// All cached chunks, in the reverse of the order in which the policy would evict them. The chunks of several tenants are
    /// mixed, so that each tenant's are spread over the whole.
    pub fn by_worth(&self) -> Vec<ChunkId> {
        let mut all = Vec::with_capacity(self.cached_chunks as usize);
        for tenant in self.tenants.ids() {
            let order = self.tenants.order(tenant);
            let count = order.len() as u64;
            let ranked = order.into_iter().rev().zip(0..);
            all.extend(ranked.map(|(chunk, rank)| (rank * self.cached_chunks / count, chunk)));
        }
        all.sort_by_key(|&(rank, _)| rank);
        all.into_iter().map(|(_, number)| self.index.id(number)).collect()
    }

    /// How a cached chunk is to be treated when the node leaves; `keeps_disk`: the node's disk will be read again.
    pub fn leaving(&self, id: ChunkId, keeps_disk: bool) -> Leaving {
        let Some(chunk) = self.index.known(id).filter(|chunk| chunk.is_cached() && chunk.is_complete())
        else {
            return Leaving::Gone;
        };
        let is_on_disk = chunk.disk == OnDisk::Here && !chunk.outgrew_disk();
        if (keeps_disk && is_on_disk) || chunk.stored == Stored::There {
            return Leaving::KeptBelow;
        }
        let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
        Leaving::Moves { fingerprint, chunk: self.index.name(id), bytes: self.readable_bytes(id) }
    }

    /// A namespace's tenant and description.
    pub fn described(&self, fingerprint: &Fingerprint) -> Option<(&str, &NamespaceSpec)> {
        let namespace = self.namespaces.get(self.namespaces.of(fingerprint)?);
        Some((namespace.tenant_name(), &namespace.spec))
    }

    /// Room for more chunks of a namespace before a chunk has to be evicted; without a namespace, the room of the tenant that has
    /// the most.
    pub fn free_room(&self, fingerprint: Option<&Fingerprint>) -> FreeRoom {
        let limits = &self.limits;
        let free = |tenant| {
            let high = self.slab.reach(tenant, limits.high_watermark_bytes);
            high.saturating_sub(self.tenants.of(tenant).cached_bytes)
        };
        FreeRoom {
            chunks: limits.capacity_chunks.map_or(u64::MAX, |most| most.saturating_sub(self.cached_chunks)),
            bytes: match fingerprint {
                Some(fingerprint) => self.tenant_of_namespace(fingerprint).map_or(0, free),
                None => self.tenants.ids().map(free).max().unwrap_or(0),
            },
        }
    }

    /// Bytes of the slots of a whole chunk of a namespace; 0 if the namespace is not known.
    pub fn chunk_bytes_by(&self, fingerprint: &Fingerprint) -> u64 {
        self.namespaces.of(fingerprint).map_or(0, |number| self.whole_chunk_bytes(number))
    }

    /// Bytes of passing chunks, those still on their way included.
    pub fn passing_bytes(&self) -> u64 {
        self.gathers.passing_bytes()
    }

    /// Chunks that are cached.
    pub fn cached_chunks(&self) -> u64 {
        self.cached_chunks
    }

    /// Whether others could read a chunk here.
    pub fn holds(&self, ChunkKey { fingerprint, hash }: &ChunkKey) -> bool {
        self.named(fingerprint, hash).is_some_and(|id| is_held(self.index.get(id)))
    }

    /// Starts to bring a chunk from a node that drains, to keep it.
    pub fn take_from_leaver(&mut self, fingerprint: &Fingerprint, name: ChunkRef) -> TakeIn {
        let Some(number) = self.namespaces.of(fingerprint) else { return TakeIn::Refused };
        let known = self.index.find(number, &name.hash);
        if known.is_some_and(|id| is_held(self.index.get(id))) {
            return TakeIn::Here;
        }
        let coming = known.filter(|id| self.gathers.fetches.contains_key(id));
        let (id, wanted) = match (coming, known) {
            (Some(id), _) => (id, None),
            (None, Some(_)) => return TakeIn::Refused,
            (None, None) => {
                let Some(id) = self.start_fetch(number, name, Source::Peer) else { return TakeIn::Busy };
                (id, Some(self.wanted(number, id, 0, Source::Peer)))
            }
        };
        if let Some(fetch) = self.gathers.fetches.get_mut(&id) {
            fetch.recalls += 1;
        }
        self.change(id, |chunk| chunk.claims += 1);
        TakeIn::Coming { fetch: FetchId(id), wanted }
    }
}
