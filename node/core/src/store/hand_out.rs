//! The only exit of the store: bytes leave under a name, and only if their chunk has that name.
//!
//! Leases, follows, grants to peers, loads by devices, writes to disk and uploads ask here before they tell anybody a block's
//! place. Ids carry generations, and a holder of an id claims its chunk. So a name differs only after a fault of the store
//! itself. Then the chunk counts as missing, and a metric raises an alert.

use larder_protocol::ChunkHash;

use super::Store;
use super::ids::{ChunkId, NamespaceId};
use super::index::Chunk;

/// A chunk, and the name under which its bytes are to leave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named {
    pub(super) id: ChunkId,
    pub(super) namespace: NamespaceId,
    pub(super) hash: ChunkHash,
}

impl Store {
    /// The chunk, if it has this name.
    pub(super) fn named_chunk(&self, named: &Named) -> Option<&Chunk> {
        let &Named { id, namespace, hash } = named;
        self.index.known(id).filter(|chunk| chunk.namespace == namespace && chunk.hash == hash)
    }

    /// Whether a chunk has the name under which its bytes are to leave; counts a chunk that does not.
    pub(super) fn may_leave(&mut self, named: &Named) -> bool {
        let may = self.named_chunk(named).is_some();
        self.misnamed += u64::from(!may);
        may
    }

    /// The number of chunks, from the first on, that have the requested names.
    pub(super) fn named_prefix(
        &mut self,
        namespace: NamespaceId,
        hashes: &[ChunkHash],
        chunks: &[ChunkId],
    ) -> usize {
        let is_named =
            |(&id, &hash): (&ChunkId, &ChunkHash)| self.named_chunk(&Named { id, namespace, hash }).is_some();
        let named = chunks.iter().zip(hashes).take_while(|&pair| is_named(pair)).count();
        self.misnamed += u64::from(named < chunks.len());
        named
    }

    /// A chunk with its present name, for a queue from which the chunk's bytes leave later.
    pub(super) fn name_now(&self, id: ChunkId) -> Named {
        let chunk = self.index.get(id);
        Named { id, namespace: chunk.namespace, hash: chunk.hash }
    }
}
