//! The journal: gained and lost chunks, in order, for modules that tell other nodes.

use larder_protocol::table::Holder;
use larder_protocol::{ChunkRef, Fingerprint};

use super::Store;
use super::ids::ChunkId;
use super::index::{Chunk, OnDisk, Standing};
use super::room::EvictionReason;

/// A chunk that was gained or lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The namespace.
    pub fingerprint: Fingerprint,
    /// The chunk.
    pub chunk: ChunkRef,
    /// The change.
    pub kind: ChangeKind,
    /// Why a lost chunk was evicted; `None` if it was not evicted.
    pub evicted: Option<EvictionReason>,
}

/// The change of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// The chunk was computed or copied here.
    Gained,
    /// The chunk moved here from this holder, or was computed here again. Once the home knows, the holder may give up its copy
    /// ([`larder_protocol::peer::PeerRequest::Moved`]).
    MovedFrom(Holder),
    /// The chunk was evicted, or given up.
    Lost,
}

/// Changes that nobody has taken yet. A caller that keeps a journal takes them after every call.
#[derive(Debug, Default)]
pub(super) struct Journal {
    is_kept: bool,
    changes: Vec<Change>,
    /// The reason to note for chunks that leave now, if they are evicted.
    pub(super) evicting: Option<EvictionReason>,
}

impl Journal {
    /// Keeps changes if the other journal does.
    pub(super) fn keep_as(&mut self, other: &Self) {
        self.is_kept = other.is_kept;
    }
}

impl Store {
    /// Keeps a journal from now on.
    pub fn keep_journal(&mut self) {
        self.journal.is_kept = true;
    }

    /// The chunks gained and lost since the last call, in order. A chunk counts as gained when all its slices are here.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.journal.changes)
    }

    /// Notes a change of a chunk, if there is one. `kind` says how it was gained if others can read it now but could not before
    /// (`was_held`). In the reverse case the chunk was lost.
    pub(super) fn tell(&mut self, id: ChunkId, was_held: bool, kind: ChangeKind) {
        let chunk = self.index.get(id);
        let kind = match (was_held, is_held(chunk)) {
            (false, true) => kind,
            (true, false) => ChangeKind::Lost,
            _ => return,
        };
        if self.journal.is_kept {
            let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
            let chunk = self.index.name(id);
            self.journal.changes.push(Change { fingerprint, chunk, kind, evicted: None });
        }
    }

    /// Notes that a chunk that is about to be forgotten is lost.
    pub(super) fn tell_forgotten(&mut self, id: ChunkId) {
        let chunk = self.index.get(id);
        if self.journal.is_kept && is_held(chunk) {
            let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
            let chunk = self.index.name(id);
            let evicted = self.journal.evicting;
            self.journal.changes.push(Change { fingerprint, chunk, kind: ChangeKind::Lost, evicted });
        }
    }

    /// Notes that a chunk has another anchor than before: others look for it in another run.
    pub(super) fn tell_renamed(&mut self, id: ChunkId, before: ChunkRef) {
        let chunk = self.index.get(id);
        if self.journal.is_kept && is_held(chunk) {
            let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
            let change = |chunk, kind| Change { fingerprint, chunk, kind, evicted: None };
            let now = self.index.name(id);
            self.journal.changes.extend([change(before, ChangeKind::Lost), change(now, ChangeKind::Gained)]);
        }
    }

    /// All chunks that other nodes could read here.
    pub fn held(&self) -> impl Iterator<Item = (Fingerprint, ChunkRef)> {
        self.held_from(0, usize::MAX).0.into_iter()
    }

    /// At most `most` chunks that other nodes could read, from a place in the index on, and the place where the next page begins.
    /// Chunks that come or go between two pages may be in either, or in none.
    pub fn held_from(&self, from: usize, most: usize) -> (Vec<(Fingerprint, ChunkRef)>, Option<usize>) {
        let mut held = Vec::new();
        for (place, id, chunk) in self.index.iter_from(from) {
            if held.len() == most {
                return (held, Some(place));
            }
            if is_held(chunk) {
                held.push((self.namespaces.get(chunk.namespace).fingerprint, self.index.name(id)));
            }
        }
        (held, None)
    }
}

/// Whether others could read a chunk here: from memory, or from disk.
pub(super) fn is_held(chunk: &Chunk) -> bool {
    let stays = chunk.standing != Standing::Passing;
    chunk.disk == OnDisk::Here || (stays && chunk.ready > 0 && chunk.is_complete())
}
