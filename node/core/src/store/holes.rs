//! Chunks behind holes: other nodes hold them, but a chunk before them in their prompt is nowhere.
//!
//! Nobody can read such a chunk. The engine that asked for the prompt computes it again, and saves it here. If the other holder
//! kept its copy like any chunk, the cluster would have the chunk twice. So the holder hears that this store keeps the chunk, and
//! evicts its copy before any only copy.

use std::collections::HashMap;

use larder_protocol::table::Holder;
use larder_protocol::{ChunkHash, Fingerprint};

use super::Store;
use super::ids::NamespaceId;
use super::journal::ChangeKind;
use crate::placement::PlacementRule;

/// The holders of chunks behind holes, as lookups found them. Takes about 30 bytes for each chunk.
#[derive(Debug, Default)]
pub(super) struct Holes {
    behind: HashMap<(NamespaceId, u64), Holder>,
}

impl Store {
    /// Notes that another node holds a chunk behind a hole.
    pub fn is_behind_hole(&mut self, fingerprint: &Fingerprint, hash: &ChunkHash, holder: Holder) {
        if self.placement() != PlacementRule::Worth {
            return;
        }
        let Some(namespace) = self.namespaces.of(fingerprint) else { return };
        let behind = &mut self.holes.behind;
        if behind.len() >= MOST_REMEMBERED {
            // Most of these chunks were saved somewhere else, or never.
            behind.clear();
        }
        behind.insert((namespace, hash.short()), holder);
    }

    /// How a chunk is gained that an engine has computed.
    pub(super) fn gained_by_computing(&mut self, namespace: NamespaceId, short_hash: u64) -> ChangeKind {
        let behind = &mut self.holes.behind;
        let holder = if behind.is_empty() { None } else { behind.remove(&(namespace, short_hash)) };
        holder.map_or(ChangeKind::Gained, ChangeKind::MovedFrom)
    }
}

/// The most chunks that are remembered. At this limit all are forgotten, and the next lookups fill the memory again.
const MOST_REMEMBERED: usize = 1 << 14;
