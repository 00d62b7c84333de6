//! The journal: which chunks were gained and lost, in order, for those who tell other nodes.

use larder_protocol::{ChunkRef, Fingerprint};

use super::Store;
use super::ids::ChunkId;
use super::index::{Chunk, Index};
use crate::directory::{Change, ChangeKind};

/// Changes that nobody has taken yet. Whoever keeps a journal takes them after every call.
#[derive(Debug, Default)]
pub(super) struct Journal {
    is_kept: bool,
    changes: Vec<Change>,
}

impl Journal {
    /// Notes what happened to a chunk, if it is one that others could read.
    pub(super) fn note(&mut self, index: &Index, fingerprint: Fingerprint, id: ChunkId, kind: ChangeKind) {
        if self.is_kept && can_be_read_by_others(index.get(id)) {
            self.changes.push(Change { fingerprint, chunk: index.name(id), kind });
        }
    }
}

impl Store {
    /// Keeps a journal from now on.
    pub fn keep_journal(&mut self) {
        self.journal.is_kept = true;
    }

    /// What was gained and lost since the last call, in order. A chunk counts when all its slices are here.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.journal.changes)
    }

    /// Everything that other nodes could read here.
    pub fn held(&self) -> impl Iterator<Item = (Fingerprint, ChunkRef)> {
        self.held_from(0, usize::MAX).0.into_iter()
    }

    /// At most `most` chunks that other nodes could read, from a place in the index on, and where the next such page begins.
    /// Chunks that come or go between two pages may be in either, or in none.
    #[must_use]
    pub fn held_from(&self, from: usize, most: usize) -> (Vec<(Fingerprint, ChunkRef)>, Option<usize>) {
        let mut held = Vec::new();
        for (place, id, chunk) in self.index.iter_from(from) {
            if held.len() == most {
                return (held, Some(place));
            }
            if can_be_read_by_others(chunk) {
                held.push((self.namespaces.get(chunk.namespace).fingerprint, self.index.name(id)));
            }
        }
        (held, None)
    }
}

fn can_be_read_by_others(chunk: &Chunk) -> bool {
    chunk.is_cached() && chunk.is_complete()
}
