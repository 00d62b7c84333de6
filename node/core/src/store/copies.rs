//! Copies of chunks that other nodes hold: they are evicted first when room is scarce.
//!
//! A node does not hear when the other holder evicts the chunk. But the holder used the chunk when it sent it, so the holder
//! keeps it for about as long as this node keeps an unused chunk. After that time, a copy counts as an only copy.

use std::collections::VecDeque;

use super::Store;
use super::ids::{ChunkId, TenantId};
use super::index::{Chunk, OnDisk};
use crate::placement::{Saves, copy_goes_first};

/// The copies of one tenant, the longest unused first.
#[derive(Debug, Default)]
pub(super) struct Copies {
    line: VecDeque<Copy>,
    /// The length at which the line is cleared of chunks that are gone. Chunks may go without a search for copies.
    clear_at: usize,
}

#[derive(Debug, Clone, Copy)]
struct Copy {
    id: ChunkId,
    made_ms: u64,
    /// The copy's last use, as seen when the copy was last looked at.
    used_ms: u64,
    /// Whether the chunk is on no disk, as far as this node knows: the other holder's node decides whether it is written.
    is_unwritten: bool,
}

impl Copies {
    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.line.len()
    }
}

impl Store {
    /// Notes that a chunk that was just admitted is a copy: another node holds it too.
    pub(super) fn is_copy(&mut self, id: ChunkId) {
        let now = self.age_ms();
        let chunk = self.index.get_mut(id);
        chunk.set_copy(true);
        let is_unwritten = chunk.disk == OnDisk::Nowhere;
        if is_unwritten {
            chunk.disk = OnDisk::Elsewhere;
        }
        let (tenant, index) = (self.owner_of(id), &self.index);
        let Copies { line, clear_at } = &mut self.tenants.of_mut(tenant).copies;
        line.push_back(Copy { id, made_ms: now, used_ms: now, is_unwritten });
        if line.len() > *clear_at {
            line.retain(|copy| index.known(copy.id).is_some_and(Chunk::is_copy));
            *clear_at = (2 * line.len()).max(LEAST_CLEARED);
        }
    }

    /// Takes the copy of a tenant that is to be evicted before any only copy, if there is such a copy.
    pub(super) fn next_copy(&mut self, tenant: TenantId) -> Option<ChunkId> {
        let (now, least, keeps_ms) = (self.age_ms(), self.pressure.least(self.age_ms()), self.keeps_ms());
        for _ in 0..self.tenants.of(tenant).copies.line.len().min(MOST_LOOKED_AT) {
            let copy = self.tenants.of_mut(tenant).copies.line.pop_front()?;
            let Some(chunk) = self.index.known(copy.id).filter(|chunk| chunk.is_copy()) else { continue };
            if now.saturating_sub(copy.made_ms) > keeps_ms {
                let chunk = self.index.get_mut(copy.id);
                chunk.set_copy(false);
                if copy.is_unwritten && chunk.disk == OnDisk::Elsewhere {
                    chunk.disk = OnDisk::Nowhere;
                }
                continue;
            }
            let used_ms = self.used_ms(chunk.used);
            let (is_free, is_unused) = (chunk.is_cached() && chunk.may_go(), used_ms <= copy.used_ms);
            if is_free && is_unused {
                let worth = self.stake(chunk.namespace).worth(Saves::Transfer, now.saturating_sub(used_ms));
                if copy_goes_first(worth, least) {
                    return Some(copy.id);
                }
                self.tenants.of_mut(tenant).copies.line.push_front(copy);
                return None;
            }
            self.tenants.of_mut(tenant).copies.line.push_back(Copy { used_ms, ..copy });
        }
        None
    }
}

/// The line is not cleared while it is shorter.
const LEAST_CLEARED: usize = 1_024;

/// The most copies that one search for a victim looks at.
const MOST_LOOKED_AT: usize = 8;
