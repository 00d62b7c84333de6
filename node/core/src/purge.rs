//! Purges, and tenants that come or go: the core's records beside the store's chunks go with them.

use larder_protocol::purge::{PurgeMode, PurgeScope};

use crate::Core;
use crate::effect::Effect;
use crate::event::{Below, PurgeStep};
use crate::store::PurgedKeys;
use crate::store::ids::ChunkKey;

impl Core {
    /// A purge begins, goes on or ends.
    pub(crate) fn purge(&mut self, step: PurgeStep) {
        match step {
            PurgeStep::Begin(purge, scope) => self.store.begin_purge(purge, scope),
            PurgeStep::Page { purge, scope, mode, from } => {
                let keys = self.store.keys_of_purge(purge, &scope);
                if mode == PurgeMode::Remove {
                    self.forget_copies(&keys);
                }
                let page = self.store.purge_page(&scope, mode, from);
                // Nobody knows when writes to a silent drive end.
                let is_silent = self.store.is_disk_silent();
                let counts =
                    |(tier, key): &(Below, &ChunkKey)| !(is_silent && *tier == Below::Disk) && keys.has(key);
                let writes = self.writes.under_way().filter(counts).count() as u64;
                self.effects.push_back(Effect::Purged { purge, page, writes });
            }
            PurgeStep::End(purge) => {
                // Uploads may have been answered before the purge came to their objects. The store's purge has also found chunks that
                // this node does not know.
                if let Some(keys) = self.store.end_purge(purge) {
                    self.bring.known.forget(|key| keys.has_namespace(&key.fingerprint));
                }
            }
        }
    }

    /// The names of all chunks that a purge has had here until now, chunks on disk of tenants that are not served included; `None`
    /// while the disk is being listed, since chunks that continue a named chunk may still come to light. Nobody waits for the list of
    /// a silent drive.
    pub fn keys_of_purge(&mut self, purge: u64, scope: &PurgeScope) -> Option<PurgedKeys> {
        if scope.chunks().is_some() && self.lists_disk() && !self.store.is_disk_silent() {
            return None;
        }
        let mut keys = self.purged_keys(scope);
        keys.add_all(&self.store.keys_of_purge(purge, scope));
        Some(keys)
    }

    /// These tenants are served from now on, by number.
    pub(crate) fn tenants_are(&mut self, tenants: &[(String, u64)]) {
        let bytes: Vec<u64> = tenants.iter().map(|(_, bytes)| *bytes).collect();
        let left = self.tenants.iter().zip(&bytes).filter(|(name, bytes)| !name.is_empty() && **bytes == 0);
        let left: Vec<String> = left.map(|(name, _)| name.clone()).collect();
        for name in left {
            let keys = self.purged_keys(&PurgeScope::Tenant(name.clone()));
            self.forget_copies(&keys);
            self.purge_disk(keys);
            self.effects.push_back(Effect::TenantLeft(name));
        }
        let new: Vec<&str> = tenants.iter().skip(self.tenants.len()).map(|(name, _)| &**name).collect();
        self.store.tenants_are(&bytes, &new);
        // A tenant that left is not found by its name.
        let name = |(name, bytes): &(String, u64)| if *bytes > 0 { name.clone() } else { String::new() };
        self.tenants = tenants.iter().map(name).collect();
        self.forget_namespaces_of_the_left();
        self.know_strangers();
    }

    /// Drops purged blocks from the device tier. The tier knows blocks only by their names, so it may have blocks of an earlier
    /// life of a chunk.
    fn forget_copies(&mut self, keys: &PurgedKeys) {
        self.device.purge(|key| keys.has(&ChunkKey { fingerprint: key.fingerprint, hash: key.hash }));
        self.bring.known.forget(|key| keys.has(key));
    }
}
