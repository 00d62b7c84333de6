//! Purges: removes chunks at an admin's command, and the chunks of a tenant that left.
//!
//! A purged chunk leaves the policy, the disk, its pins and the announcements at once, so nobody finds it. Its slots are free when
//! its last reader has let go. Chunks that engines had reserved before are not kept when they are committed; chunks that are
//! on their way here are dropped. Until a purge ends, no chunk of its namespaces is brought from elsewhere.

use std::collections::{BTreeMap, HashMap, HashSet};

use larder_protocol::purge::{NamespaceName, PurgeCounts, PurgeMode, PurgeScope};
use larder_protocol::{ChunkHash, Fingerprint, PoolSet};

use super::ids::{ChunkId, ChunkKey, NamespaceId, TenantId};
use super::index::{Account, Block, OnDisk, Standing};
use super::journal::is_held;
use super::namespaces::Namespace;
use super::policy::Removal;
use super::remembered::EvictionRule;
use super::{ChangeKind, Store};
use crate::Millis;

/// The purges of a store.
#[derive(Debug, Default)]
pub(super) struct Purges {
    /// Purges that have not ended.
    open: Vec<OpenPurge>,
    /// The place in the index from which on chunks of tenants that left may still be here; `None` if all are removed.
    leaving_from: Option<usize>,
    /// When a tenant's namespaces may be searched again for one that may make way: a search that found none looked at all chunks.
    searches_from: BTreeMap<TenantId, Millis>,
}

/// A purge that has not ended.
#[derive(Debug, Clone)]
struct OpenPurge {
    number: u64,
    scope: PurgeScope,
    /// The names of the chunks that were here since it began, those that came meanwhile included.
    keys: PurgedKeys,
}

/// The names of a purge's chunks, in memory or not.
#[derive(Debug, Clone, Default)]
pub struct PurgedKeys {
    namespace: Option<NamespaceName>,
    fingerprints: HashSet<Fingerprint>,
    /// The chunks; `None` for all chunks of the namespaces.
    hashes: Option<HashSet<ChunkHash>>,
    /// Whether namespaces of the tenant may be missing.
    lack_namespaces: bool,
}

impl PurgedKeys {
    /// The names that an admin gave.
    pub fn named_by(scope: &PurgeScope) -> Self {
        let namespace = match *scope {
            PurgeScope::Tenant(_) => None,
            PurgeScope::Namespace(name) | PurgeScope::Chunks(name, _) => Some(name),
        };
        let hashes = scope.chunks().map(|hashes| hashes.iter().copied().collect());
        Self { namespace, hashes, ..Self::default() }
    }

    /// Adds all chunks of a namespace.
    pub fn add(&mut self, fingerprint: Fingerprint) {
        self.fingerprints.insert(fingerprint);
    }

    /// Adds chunks to a purge of some chunks.
    pub fn add_chunks(&mut self, more: impl IntoIterator<Item = ChunkHash>) {
        if let Some(hashes) = &mut self.hashes {
            hashes.extend(more);
        }
    }

    /// Adds the names that another actor knows for the same purge.
    pub fn add_all(&mut self, other: &Self) {
        let lack_namespaces = self.lack_namespaces || other.lack_namespaces;
        if self.is_empty() && !other.is_empty() {
            self.clone_from(other);
        }
        self.lack_namespaces = lack_namespaces;
        if other.is_empty() {
            return;
        }
        self.namespace = self.namespace.or(other.namespace);
        self.fingerprints.extend(&other.fingerprints);
        if let (Some(hashes), Some(others)) = (&mut self.hashes, &other.hashes) {
            hashes.extend(others);
        }
    }

    /// Whether no namespace is among them.
    fn is_empty(&self) -> bool {
        self.namespace.is_none() && self.fingerprints.is_empty()
    }

    /// Whether namespaces of the tenant may be missing: there were too many to remember.
    pub fn lack_namespaces(&self) -> bool {
        self.lack_namespaces
    }

    /// Whether a chunk is among them.
    pub fn has(&self, ChunkKey { fingerprint, hash }: &ChunkKey) -> bool {
        self.has_namespace(fingerprint) && self.hashes.as_ref().is_none_or(|hashes| hashes.contains(hash))
    }

    /// Whether chunks of a namespace are among them.
    pub fn has_namespace(&self, fingerprint: &Fingerprint) -> bool {
        self.namespace.is_some_and(|name| name.names(fingerprint)) || self.fingerprints.contains(fingerprint)
    }

    /// The chunks, if they are not all chunks of a namespace.
    pub fn hashes(&self) -> Option<&HashSet<ChunkHash>> {
        self.hashes.as_ref()
    }
}

/// A step of a purge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PurgedPage {
    /// The chunks of this step. Chunks that are only on disk do not count.
    pub counts: PurgeCounts,
    /// The removed chunks, those only on disk or on their way here included.
    pub removed: u64,
    /// Where the next step begins; `None` after the last.
    pub next: Option<usize>,
}

impl Purges {
    /// The open purges, for the store that replaces this one: it has no chunk of tenants that left.
    pub(super) fn after(&self) -> Self {
        Self { open: self.open.clone(), ..Self::default() }
    }
}

impl Store {
    /// Begins a purge: its chunks that are being written are not kept, and no chunk of its namespaces is brought from elsewhere
    /// before [`Store::end_purge`].
    pub fn begin_purge(&mut self, purge: u64, scope: PurgeScope) {
        let namespaces = self.covered(&scope);
        let chunks: Option<HashSet<ChunkId>> =
            scope.chunks().map(|_| self.continued(&scope, &namespaces).into_iter().collect());
        self.void_where(|namespace, id| {
            namespaces.contains(&namespace) && chunks.as_ref().is_none_or(|chunks| chunks.contains(&id))
        });
        self.end_purge(purge);
        let keys = self.purged_keys(&scope);
        self.purges.open.push(OpenPurge { number: purge, scope, keys });
    }

    /// Ends a purge: its chunks may come again. Returns their names.
    pub fn end_purge(&mut self, purge: u64) -> Option<PurgedKeys> {
        let at = self.purges.open.iter().position(|open| open.number == purge)?;
        Some(self.purges.open.swap_remove(at).keys)
    }

    /// The names of the chunks of a purge, including chunks here that continue them.
    pub fn purged_keys(&self, scope: &PurgeScope) -> PurgedKeys {
        let namespaces = self.covered(scope);
        let mut keys = PurgedKeys::named_by(scope);
        keys.fingerprints.extend(namespaces.iter().map(|&number| self.namespaces.get(number).fingerprint));
        if let PurgeScope::Tenant(tenant) = scope {
            keys.fingerprints.extend(self.namespaces.forgotten_of(tenant));
            keys.lack_namespaces = self.namespaces.have_lost_track_of(tenant);
        }
        let continued = self.continued(scope, &namespaces);
        keys.add_chunks(continued.into_iter().map(|id| self.index.get(id).hash));
        keys
    }

    /// The names of all chunks that an open purge has had here until now. Otherwise a chunk whose parent is already gone would not
    /// be found any more, though it is still being written below.
    pub(crate) fn keys_of_purge(&mut self, purge: u64, scope: &PurgeScope) -> PurgedKeys {
        let mut keys = self.purged_keys(scope);
        if let Some(open) = self.purges.open.iter_mut().find(|open| open.number == purge) {
            open.keys.add_all(&keys);
            keys.clone_from(&open.keys);
        }
        keys
    }

    /// Removes some chunks of a purge, or counts them: begin at 0, and go on at [`PurgedPage::next`].
    pub fn purge_page(&mut self, scope: &PurgeScope, mode: PurgeMode, from: usize) -> PurgedPage {
        let namespaces = self.covered(scope);
        let (found, next) = match scope {
            PurgeScope::Chunks(..) => {
                let mut found = self.continued(scope, &namespaces);
                found.retain(|&id| self.is_to_purge(id));
                let is_whole = mode == PurgeMode::Count || found.len() <= PAGE_CHUNKS;
                found.truncate(if is_whole { usize::MAX } else { PAGE_CHUNKS });
                // The chunks of this page are not found again.
                (found, (!is_whole).then_some(0))
            }
            PurgeScope::Tenant(_) | PurgeScope::Namespace(_) => {
                let (found, next) = self.page_of(from, |number| namespaces.contains(&number));
                (found.into_iter().filter(|&id| self.is_to_purge(id)).collect(), next)
            }
        };
        let mut counts = PurgeCounts::default();
        for &id in &found {
            let chunk = self.index.get(id);
            if chunk.ready > 0 {
                counts.memory_chunks += 1;
                counts.memory_bytes += self.readable_bytes(id);
                counts.read_chunks += u64::from(chunk.claims > 0);
            }
        }
        let mut removed = 0;
        if mode == PurgeMode::Remove {
            removed = found.len() as u64;
            self.remove_all(&found, EvictionRule::Purged);
        }
        PurgedPage { counts, removed, next }
    }

    /// Sets the tenants that are served, by number, with the bytes of extents of each; 0 for a tenant that is not served. If a
    /// tenant is no longer served, its pins end at once, and its chunks leave step by step; all leave at once if a tenant whose
    /// chunks still leave is among the `new` names.
    pub(crate) fn tenants_are(&mut self, bytes: &[u64], new: &[&str]) {
        let leaving: Vec<TenantId> = (0..)
            .map(TenantId)
            .zip(&self.limits.tenant_bytes)
            .filter_map(|(tenant, &before)| {
                (before > 0 && bytes.get(usize::from(tenant.0)) == Some(&0)).then_some(tenant)
            })
            .collect();
        self.limits.tenant_bytes = bytes.to_vec();
        self.slab.bound_tenants(&self.limits.most_extents());
        self.tenants.are(bytes.len());
        self.tenants.serve(bytes);
        for &tenant in &leaving {
            self.end_pins_of_tenant(tenant);
            self.forget_uses(tenant);
            self.namespaces.leave(tenant);
        }
        if !leaving.is_empty() {
            let namespaces = &self.namespaces;
            let gone: HashSet<NamespaceId> = namespaces.gone().collect();
            self.void_where(|namespace, _| gone.contains(&namespace));
            self.purges.leaving_from = Some(0);
            let index = &self.index;
            let orphaned = self.sessions.take_orphaned(|id| gone.contains(&index.get(id).namespace));
            self.end_orphaned(orphaned);
        }
        // Otherwise others would hear that a chunk is lost after they heard that it is here again.
        let is_named_again =
            self.namespaces.iter().any(|(_, known)| known.is_gone && new.contains(&known.tenant_name()));
        while is_named_again && self.remove_leaving() {}
        self.shrink_tenants();
        self.evict_above_watermark();
    }

    /// Removes some of the chunks of tenants that left; returns whether there are more.
    pub(super) fn remove_leaving(&mut self) -> bool {
        let Some(from) = self.purges.leaving_from else { return false };
        let (found, next) = self.page_of(from, |number| self.namespaces.get(number).is_gone);
        let found: Vec<ChunkId> = found.into_iter().filter(|&id| self.is_to_purge(id)).collect();
        self.remove_all(&found, EvictionRule::Purged);
        self.purges.leaving_from = next;
        if next.is_none() {
            self.tenants.forget_left();
        }
        next.is_some()
    }

    /// Forgets the tenant's namespace that no session has registered for the longest time, and its chunks, so that a new model
    /// finds room. Returns false if sessions use all, or each has a chunk that somebody holds, or too many to go at once.
    pub(super) fn forget_oldest_namespace(&mut self, tenant: TenantId) -> bool {
        let may_go = |(_, known): &(NamespaceId, &Namespace)| {
            let is_unused = known.tenant == tenant && known.sessions == 0 && !known.is_gone;
            is_unused && (1..=PAGE_CHUNKS as u32).contains(&known.chunks)
        };
        let mut idle: Vec<(u64, NamespaceId)> =
            self.namespaces.iter().filter(may_go).map(|(number, known)| (known.last_use, number)).collect();
        idle.sort_unstable();
        idle.truncate(MOST_LOOKED_AT);
        let searches_from = self.purges.searches_from.get(&tenant).copied().unwrap_or_default();
        if idle.is_empty() || self.now < searches_from {
            return false;
        }
        self.purges.searches_from.insert(tenant, self.now + SEARCH_AGAIN_MS);
        let mut chunks: HashMap<NamespaceId, Vec<ChunkId>> = HashMap::new();
        for (_, id, chunk) in self.index.iter_from(0) {
            if idle.iter().any(|&(_, number)| number == chunk.namespace) {
                chunks.entry(chunk.namespace).or_default().push(id);
            }
        }
        let is_free = |&id: &ChunkId| {
            let chunk = self.index.get(id);
            chunk.claims == 0 && chunk.pins == 0 && !self.is_written(id)
        };
        let is_free =
            |(_, number): &(u64, NamespaceId)| chunks.get(number).is_some_and(|ids| ids.iter().all(is_free));
        let Some((_, oldest)) = idle.iter().copied().find(is_free) else { return false };
        self.purges.searches_from.remove(&tenant);
        self.remove_all(&chunks.remove(&oldest).unwrap_or_default(), EvictionRule::Clearing);
        self.namespaces.get(oldest).chunks == 0
    }

    /// Whether chunks of a namespace may be brought from elsewhere.
    pub(super) fn may_come(&self, number: NamespaceId) -> bool {
        let namespace = self.namespaces.get(number);
        let is_purged = |OpenPurge { scope, .. }: &OpenPurge| {
            scope.covers(namespace.tenant_name(), &namespace.fingerprint)
        };
        !namespace.is_gone && !self.purges.open.iter().any(is_purged)
    }

    /// Whether chunks of the namespace with this number, as engines know it, may come from
    /// elsewhere now: it is there, and no purge of it is open.
    pub fn may_bring(&self, namespace: u32) -> bool {
        let number = NamespaceId::of(namespace);
        self.namespaces.find(number).is_some() && self.may_come(number)
    }

    /// Whether a tenant is served.
    pub(super) fn serves(&self, tenant: TenantId) -> bool {
        self.limits.tenant_bytes.get(usize::from(tenant.0)).is_some_and(|&bytes| bytes > 0)
    }

    /// Whether nobody can find a chunk: it is unknown, or it is condemned and only waits for its last readers.
    pub(crate) fn is_condemned(&self, ChunkKey { fingerprint, hash }: &ChunkKey) -> bool {
        let id = self.named(fingerprint, hash);
        id.is_none_or(|id| self.index.get(id).standing == Standing::Condemned)
    }

    /// Condemns a chunk that the caller has claimed: nobody finds it any more.
    pub(super) fn condemn(&mut self, id: ChunkId, rule: EvictionRule) {
        if is_held(self.index.get(id)) {
            self.remember(id, rule);
        }
        self.give_up_on_disk(id);
        self.stop_writes_of(id);
        self.end_pins_of(&[id]);
        let chunk = self.index.get(id);
        let was_held = is_held(chunk);
        if chunk.is_cached() {
            let bytes = self.readable_bytes(id);
            self.uncount(id);
            self.tenants.remove(self.owner_of(id), id.number(), Removal::Dropped);
            self.passes(id, Account::Leaving, bytes);
        }
        let chunk = self.index.get_mut(id);
        chunk.standing = Standing::Condemned;
        chunk.pools = PoolSet::default();
        self.tell(id, was_held, ChangeKind::Lost);
    }

    fn remove_all(&mut self, found: &[ChunkId], rule: EvictionRule) {
        let written: HashSet<ChunkId> = found.iter().copied().filter(|&id| self.is_written(id)).collect();
        if !written.is_empty() {
            self.void_where(|_, id| written.contains(&id));
        }
        self.end_pins_of(found);
        for &id in found {
            self.change(id, |chunk| chunk.claims += 1);
            self.condemn(id, rule);
            self.unclaim(&[id]);
        }
        self.evict_above_watermark();
    }

    /// Whether a purge has to remove something of a chunk. A chunk that only has a writer was begun after the purge.
    fn is_to_purge(&self, id: ChunkId) -> bool {
        let chunk = self.index.get(id);
        chunk.standing != Standing::Condemned
            && (chunk.ready > 0 || chunk.disk == OnDisk::Here || self.gathers.is_coming(id))
    }

    /// Whether a session writes blocks of a chunk.
    fn is_written(&self, id: ChunkId) -> bool {
        let is_writing = |block: &Block| matches!(block, Block::Writing(_));
        !self.gathers.is_coming(id) && self.index.get(id).blocks.iter().any(is_writing)
    }

    fn covered(&self, scope: &PurgeScope) -> HashSet<NamespaceId> {
        self.namespaces
            .iter()
            .filter(|(_, known)| !known.is_gone && scope.covers(known.tenant_name(), &known.fingerprint))
            .map(|(number, _)| number)
            .collect()
    }

    /// The chunks that a purge names, and those that continue them.
    fn continued(&self, scope: &PurgeScope, namespaces: &HashSet<NamespaceId>) -> Vec<ChunkId> {
        let (mut seen, mut found) = (HashSet::new(), Vec::new());
        for &number in namespaces {
            for hash in scope.chunks().unwrap_or_default() {
                for root in self.index.roots(number, hash) {
                    found.extend(self.index.subtree(root, &mut seen));
                }
            }
        }
        found
    }

    /// Some chunks of namespaces, from a place in the index on, and the place where the next page begins.
    fn page_of(&self, from: usize, is_wanted: impl Fn(NamespaceId) -> bool) -> (Vec<ChunkId>, Option<usize>) {
        let mut found = Vec::new();
        for (looked_at, (place, id, chunk)) in self.index.iter_from(from).enumerate() {
            if looked_at == PAGE_CHUNKS {
                return (found, Some(place));
            }
            if is_wanted(chunk.namespace) {
                found.push(id);
            }
        }
        (found, None)
    }

    /// Voids the reservations that have such a chunk: their commits are not kept, and their sessions go on without an error.
    fn void_where(&mut self, is_such: impl Fn(NamespaceId, ChunkId) -> bool) {
        for held in self.sessions.iter_mut().flat_map(|session| session.reservations.values_mut()) {
            held.is_void |= held.items.iter().any(|item| is_such(held.namespace, item.chunk));
        }
    }
}

/// Chunks that one step looks at or removes: a few milliseconds.
const PAGE_CHUNKS: usize = 8_192;

/// The most namespaces that are looked at to find one that may make way for a new one.
const MOST_LOOKED_AT: usize = 8;

/// The pause after a search that found none.
const SEARCH_AGAIN_MS: u64 = 1_000;
