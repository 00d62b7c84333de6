//! The journal: which chunks were gained and lost, in order, for those who tell other nodes.

use larder_protocol::{ChunkRef, Fingerprint};

use super::Store;
use super::ids::ChunkId;
use super::index::{Chunk, Index};
use crate::directory::{Change, ChangeKind};

/// Changes that nobody has taken yet. Whoever keeps a journal takes them after every call.
#[derive(Debug)]
pub(super) struct Journal {
    is_kept: bool,
    changes: Vec<Change>,
}

impl Journal {
    pub(super) fn new(is_kept: bool) -> Self {
        Self { is_kept, changes: Vec::new() }
    }

    /// Notes what happened to a chunk, if it is one that others could read.
    pub(super) fn note(&mut self, index: &Index, fingerprint: Fingerprint, id: ChunkId, kind: ChangeKind) {
        if self.is_kept && can_be_read_by_others(index.get(id)) {
            self.changes.push(Change { fingerprint, chunk: index.get(id).name, kind });
        }
    }
}

impl Store {
    /// What was gained and lost since the last call, in order. A chunk counts when all its slices are here.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.journal.changes)
    }

    /// Everything that other nodes could read here.
    pub fn held(&self) -> impl Iterator<Item = (Fingerprint, ChunkRef)> {
        let chunks = self.index.iter().filter(|chunk| can_be_read_by_others(chunk));
        chunks.map(|chunk| (self.namespaces.get(chunk.namespace).fingerprint, chunk.name))
    }
}

fn can_be_read_by_others(chunk: &Chunk) -> bool {
    chunk.is_cached() && chunk.is_complete()
}
