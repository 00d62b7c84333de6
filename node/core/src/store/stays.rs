//! Answers to "until when does this stay?" for chunks in memory.

use std::collections::HashMap;

use larder_protocol::{ChunkHash, Fingerprint};

use super::Store;
use super::ids::ChunkId;

/// The reason why a chunk stays in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    /// A pin, for this many more milliseconds.
    Pin(u64),
    /// Engines or other nodes read it, or it is being written.
    Use,
    /// A chunk behind it in memory: prompts are evicted from their ends.
    Continuation,
    /// Nothing: the policy may evict it at any moment.
    Nothing,
}

/// Chunks in memory that follow one another and have one keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stay {
    /// Position of the first chunk.
    pub from: u32,
    /// Position after the last.
    pub to: u32,
    /// The keeper of each of them.
    pub keeper: Keeper,
    /// Milliseconds since the last use of any of them.
    pub idle_ms: u64,
}

impl Store {
    /// The keepers of a prompt's chunks in memory; other chunks are left out. Empty for an unknown namespace.
    pub fn stays(&self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> Vec<Stay> {
        let Some(number) = self.namespaces.of(fingerprint) else { return Vec::new() };
        let pinned = self.pins.left_ms(self.now);
        let mut stays = Vec::<Stay>::new();
        for (from, hash) in (0..).zip(hashes) {
            let found = self.index.find(number, hash).filter(|&id| self.index.get(id).is_complete());
            let Some(id) = found else { continue };
            let (keeper, idle_ms) = (self.keeper(id, &pinned), self.idle_ms(id));
            match stays.last_mut() {
                Some(last) if last.to == from && last.keeper == keeper => {
                    (last.to, last.idle_ms) = (from + 1, last.idle_ms.min(idle_ms));
                }
                _ => stays.push(Stay { from, to: from + 1, keeper, idle_ms }),
            }
        }
        stays
    }

    /// How long the recently evicted chunks had been unused, in milliseconds: a moving mean in which each eviction counts one
    /// sixteenth. `None` before the first eviction.
    pub fn evicted_after_ms(&self) -> Option<u64> {
        self.evicted_after_ms
    }

    /// Notes how long an evicted chunk had been unused.
    pub(super) fn note_evicted_after(&mut self, idle_ms: u64) {
        let before = self.evicted_after_ms.unwrap_or(idle_ms);
        self.evicted_after_ms = Some(before - before / 16 + idle_ms / 16);
    }

    fn keeper(&self, id: ChunkId, pinned: &HashMap<ChunkId, u64>) -> Keeper {
        let chunk = self.index.get(id);
        match pinned.get(&id) {
            Some(&left_ms) => Keeper::Pin(left_ms),
            None if chunk.claims > 0 => Keeper::Use,
            None if !chunk.may_go() => Keeper::Continuation,
            None => Keeper::Nothing,
        }
    }

    fn idle_ms(&self, id: ChunkId) -> u64 {
        self.age_ms().saturating_sub(self.used_ms(self.index.get(id).used))
    }
}
