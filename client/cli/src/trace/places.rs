//! Checks that ids are chained: that each names the whole prefix up to its block.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use larder_protocol::limits::MAX_CHAIN_CHUNKS;

use super::TraceError;

/// The first place of every id.
#[derive(Debug, Default)]
pub(super) struct Places {
    places: HashMap<u64, FirstSeen>,
    requests: usize,
    /// Ids of all requests.
    ids: usize,
}

#[derive(Debug, Clone, Copy)]
struct FirstSeen {
    line: u64,
    index: usize,
    parent: Option<u64>,
}

impl Places {
    /// Checks the ids of one prompt against all earlier ids, and their number against the most that a session message may carry.
    pub(super) fn check(&mut self, line: u64, ids: &[u64]) -> Result<(), TraceError> {
        if ids.len() > MAX_CHAIN_CHUNKS {
            return Err(TraceError::PromptTooLong { line, blocks: ids.len() });
        }
        (self.requests, self.ids) = (self.requests + 1, self.ids + ids.len());
        if self.requests > MAX_REQUESTS || self.ids > MAX_IDS {
            return Err(TraceError::TooLarge { line });
        }
        let mut parent = None;
        for (index, &id) in ids.iter().enumerate() {
            self.check_one(id, FirstSeen { line, index, parent })?;
            parent = Some(id);
        }
        Ok(())
    }

    fn check_one(&mut self, id: u64, place: FirstSeen) -> Result<(), TraceError> {
        match self.places.entry(id) {
            Entry::Vacant(entry) => {
                entry.insert(place);
                Ok(())
            }
            Entry::Occupied(known) if known.get().agrees(&place) => Ok(()),
            Entry::Occupied(known) => Err(TraceError::NotChained {
                line: place.line,
                id,
                index: place.index,
                parent: place.parent,
                known_line: known.get().line,
                known_index: known.get().index,
                known_parent: known.get().parent,
            }),
        }
    }
}

impl FirstSeen {
    fn agrees(&self, other: &Self) -> bool {
        (self.index, self.parent) == (other.index, other.parent)
    }
}

/// Most requests of one trace: they take up to some GiB of memory, however much a packed file unpacks to.
pub(super) const MAX_REQUESTS: usize = 1 << 23;

/// Most ids of all requests of one trace.
pub(super) const MAX_IDS: usize = 1 << 26;
