//! Namespaces on disk: each is described there before its first chunk is written, and for as long as one of its chunks is there.
//!
//! So a restarted node can serve peers before any engine comes.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::purge::PurgeScope;
use larder_protocol::session::Registered;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet};

use crate::Core;
use crate::effect::Effect;
use crate::event::Description;
use crate::store::ids::{ChunkKey, SessionId, TenantId};
use crate::store::{PurgedKeys, Refused};

/// Namespaces whose chunks were to be written to disk, or that were described when the node started.
#[derive(Debug)]
pub(crate) struct Described {
    /// An entry has a copy of the whole description. So no entry is made for a name alone: engines may name any number of
    /// namespaces.
    known: HashMap<Fingerprint, Namespace>,
    /// Namespaces whose tenants are not served, or that do not fit this node.
    strangers: Vec<(String, Fingerprint, NamespaceSpec)>,
    /// Whether all chunks that were on disk at the start are known.
    is_recovered: bool,
    /// Namespaces of chunks that a list of the disk passed over, because nobody had named the namespaces yet.
    passed_over: HashSet<Fingerprint>,
    /// Whether the disk is to be listed once more, because the list under way may have passed over chunks that can be known now.
    lists_again: bool,
    /// The time of the next search for unused descriptions.
    forget_at: Duration,
}

#[derive(Debug)]
struct Namespace {
    tenant: TenantId,
    spec: NamespaceSpec,
    state: DescribedState,
}

/// Whether a namespace is described on disk. Without a description, none of its chunks is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DescribedState {
    Missing,
    /// The description is being written or deleted.
    UnderWay,
    There,
    /// The description could not be written, and is tried again after this time.
    Failed(Duration),
}

/// Whether a chunk may be written, judged by its namespace's description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MayWrite {
    Now,
    Later,
    /// Not soon: the chunk does not wait, since its memory is needed.
    Never,
}

impl Default for Described {
    fn default() -> Self {
        Self {
            known: HashMap::new(),
            strangers: Vec::new(),
            is_recovered: false,
            passed_over: HashSet::new(),
            lists_again: false,
            forget_at: FORGET_EVERY,
        }
    }
}

impl Described {
    #[cfg(test)]
    pub(crate) fn namespaces(&self) -> usize {
        self.known.len()
    }
}

impl Core {
    /// Registers a namespace for a session; see [`Store::register`](crate::store::Store::register).
    ///
    /// # Errors
    /// [`Refused`]
    pub(crate) fn register(
        &mut self,
        session: SessionId,
        spec: &NamespaceSpec,
        slices: &[u16],
        block_bytes: &[u64],
    ) -> Result<Registered, Refused> {
        let tenant = self.store.tenant(session)?;
        let tenant_name = self.tenant_name(tenant);
        let registered = self.store.register(session, &tenant_name, spec, slices, block_bytes)?;
        let Registered { namespace, fingerprint, .. } = registered;
        self.effects.push_back(Effect::Knows { namespace, tenant_name, fingerprint });
        self.is_named(tenant, &fingerprint);
        Ok(registered)
    }

    /// Adds a namespace that is described on disk, before any session names it. Returns whether its tenant is served; if not, the
    /// namespace waits until the tenant is served. Purges find the namespace in any case.
    ///
    /// # Errors
    /// [`Refused`] if the namespace does not fit this node.
    pub fn know(
        &mut self,
        tenant_name: String,
        fingerprint: Fingerprint,
        spec: NamespaceSpec,
    ) -> Result<bool, Refused> {
        let Ok(tenant) = self.tenant_of(&tenant_name) else {
            self.described.strangers.push((tenant_name, fingerprint, spec));
            return Ok(false);
        };
        if let Err(refused) = self.know_in_store(tenant, fingerprint, &spec) {
            // Purges remove its chunks from disk all the same.
            self.described.strangers.push((tenant_name, fingerprint, spec));
            return Err(refused);
        }
        let namespace = Namespace { tenant, spec, state: DescribedState::There };
        self.described.known.entry(fingerprint).or_insert(namespace).tenant = tenant;
        Ok(true)
    }

    /// Adds a namespace whose chunks come from a node that drains.
    ///
    /// # Errors
    /// [`Refused`] if this node does not serve the tenant, or if the namespace does not fit this node.
    pub(crate) fn know_of_another(
        &mut self,
        tenant_name: &str,
        fingerprint: Fingerprint,
        spec: &NamespaceSpec,
    ) -> Result<(), Refused> {
        let tenant = self.tenant_of(tenant_name)?;
        self.know_in_store(tenant, fingerprint, spec)?;
        self.is_named(tenant, &fingerprint);
        Ok(())
    }

    /// Notes whose namespace it is. Learns the disk's chunks of a namespace that was not known when the disk was listed.
    fn is_named(&mut self, tenant: TenantId, fingerprint: &Fingerprint) {
        if let Some(namespace) = self.described.known.get_mut(fingerprint) {
            namespace.tenant = tenant;
        }
        if self.described.passed_over.remove(fingerprint) {
            self.list_disk_again();
        }
    }

    fn list_disk_again(&mut self) {
        self.described.lists_again = !self.described.is_recovered;
        if std::mem::take(&mut self.described.is_recovered) {
            self.list_disk();
        }
    }

    fn know_in_store(
        &mut self,
        tenant: TenantId,
        fingerprint: Fingerprint,
        spec: &NamespaceSpec,
    ) -> Result<(), Refused> {
        let tenant_name = self.tenant_name(tenant);
        let namespace = self.store.know(tenant, &tenant_name, spec)?;
        self.effects.push_back(Effect::Knows { namespace, tenant_name, fingerprint });
        Ok(())
    }

    /// Forgets the namespaces of tenants that left: they are no longer described, and their descriptions on disk are deleted
    /// later as unused.
    pub(crate) fn forget_namespaces_of_the_left(&mut self) {
        let tenants = &self.tenants;
        let is_served =
            |tenant: TenantId| tenants.get(usize::from(tenant.0)).is_some_and(|name| !name.is_empty());
        let known = &mut self.described.known;
        known.retain(|_, known| {
            is_served(known.tenant) || matches!(known.state, DescribedState::There | DescribedState::UnderWay)
        });
    }

    /// Learns the disk's chunks of tenants that were not served before.
    pub(crate) fn know_strangers(&mut self) {
        let strangers = std::mem::take(&mut self.described.strangers);
        let before = strangers.len();
        for (tenant, fingerprint, spec) in strangers {
            // Refused: the namespace does not fit this node.
            _ = self.know(tenant, fingerprint, spec);
        }
        if self.described.strangers.len() < before {
            self.list_disk_again();
        }
    }

    /// The names of a purge's chunks, including chunks on disk of tenants that are not served.
    pub fn purged_keys(&self, scope: &PurgeScope) -> PurgedKeys {
        let mut keys = self.store.purged_keys(scope);
        for (tenant, fingerprint, _) in &self.described.strangers {
            if matches!(scope, PurgeScope::Tenant(name) if name == tenant) {
                keys.add(*fingerprint);
            }
        }
        keys
    }

    /// Those of these namespaces whose tenants nobody knows, since their descriptions cannot be used.
    pub fn undescribed(&self, namespaces: &[Fingerprint]) -> Vec<Fingerprint> {
        let is_stranger = |namespace| self.described.strangers.iter().any(|(_, known, _)| known == namespace);
        let is_known =
            |namespace| self.store.tenant_of_namespace(namespace).is_some() || is_stranger(namespace);
        namespaces.iter().filter(|&namespace| !is_known(namespace)).copied().collect()
    }

    fn tenant_of(&self, name: &str) -> Result<TenantId, Refused> {
        let number = self.tenants.iter().position(|known| known == name && !known.is_empty());
        number.map(|number| TenantId(number as u16)).ok_or(Refused::Unknown { what: "tenant", number: 0 })
    }

    fn tenant_name(&self, tenant: TenantId) -> String {
        self.tenants.get(usize::from(tenant.0)).cloned().unwrap_or_default()
    }

    /// Takes chunks that were found on disk.
    pub(crate) fn recovered(&mut self, held: Vec<(Fingerprint, ChunkRef, PoolSet)>, is_all: bool) {
        for (fingerprint, chunk, pools) in held {
            if self.is_purged_on_disk(&fingerprint) {
                continue;
            }
            // A record of an unknown namespace stays until the namespace is known.
            if self.store.described(&fingerprint).is_none() {
                self.described.passed_over.insert(fingerprint);
                continue;
            }
            // A record that disagrees with the known names of its chunk, parent or children is of no use.
            if !self.store.recovered(&fingerprint, chunk, pools) {
                let key = ChunkKey { fingerprint, hash: chunk.hash };
                self.effects.extend([Effect::Disagrees(chunk), Effect::Remove(key)]);
                // A chunk that was committed under this hash since the start counts as being on disk.
                self.store.left_disk(&[key]);
            }
        }
        if is_all && std::mem::take(&mut self.described.lists_again) {
            self.list_disk();
        } else if is_all {
            self.described.is_recovered = true;
        }
    }

    /// Whether chunks that were on disk at the start are still unknown.
    pub(crate) fn lists_disk(&self) -> bool {
        self.store.has_disk() && !self.described.is_recovered
    }

    /// Takes the result of writing or deleting a namespace's description.
    pub(crate) fn description_is(&mut self, fingerprint: Fingerprint, description: Description) {
        if let Some(namespace) = self.described.known.get_mut(&fingerprint) {
            namespace.state = match description {
                Description::There => DescribedState::There,
                Description::Failed => DescribedState::Failed(self.now + DESCRIBE_AGAIN),
                Description::Gone => DescribedState::Missing,
            };
        }
    }

    /// Whether a namespace could not be described at the last try, so that its chunks are not written to disk.
    pub fn cannot_describe(&self) -> bool {
        self.described.known.values().any(|known| matches!(known.state, DescribedState::Failed(_)))
    }

    /// Whether a chunk of a namespace may be written. Orders the namespace's description if there is none.
    pub(crate) fn may_write_to_disk(&mut self, fingerprint: Fingerprint) -> MayWrite {
        let now = self.now;
        if self.is_purged_on_disk(&fingerprint) {
            return MayWrite::Never;
        }
        // A tenant that left has nothing more to write.
        let tenant = self.store.tenant_of_namespace(&fingerprint);
        let Some((tenant, (_, spec))) = tenant.zip(self.store.described(&fingerprint)) else {
            return MayWrite::Never;
        };
        let anew = || Namespace { tenant, spec: spec.clone(), state: DescribedState::Missing };
        let namespace = self.described.known.entry(fingerprint).or_insert_with(anew);
        match namespace.state {
            DescribedState::There => return MayWrite::Now,
            DescribedState::UnderWay => return MayWrite::Later,
            DescribedState::Failed(until) if now < until => return MayWrite::Never,
            DescribedState::Missing | DescribedState::Failed(_) => namespace.state = DescribedState::UnderWay,
        }
        let (tenant, spec) = (namespace.tenant, namespace.spec.clone());
        let tenant_name = self.tenant_name(tenant);
        self.effects.push_back(Effect::Describe { fingerprint, tenant_name, spec });
        MayWrite::Later
    }

    /// From time to time, forgets namespaces without a session and without a chunk in memory or on disk, and has their
    /// descriptions deleted.
    pub(crate) fn forget_unused(&mut self) {
        if self.now < self.described.forget_at || self.lists_disk() {
            return;
        }
        self.described.forget_at = self.now + FORGET_EVERY;
        let in_use: HashSet<Fingerprint> = self.store.namespaces().map(|known| known.fingerprint).collect();
        let known = &mut self.described.known;
        known.retain(|known, namespace| in_use.contains(known) || namespace.state != DescribedState::Missing);
        if !self.store.has_disk() {
            return;
        }
        let mut unused = Vec::new();
        for (&fingerprint, namespace) in &mut self.described.known {
            let is_unused =
                !in_use.contains(&fingerprint) && !self.described.passed_over.contains(&fingerprint);
            if is_unused && namespace.state != DescribedState::UnderWay {
                namespace.state = DescribedState::UnderWay;
                unused.push(fingerprint);
            }
        }
        if !unused.is_empty() {
            unused.sort_unstable();
            self.effects.push_back(Effect::ForgetDescriptions(unused));
        }
    }

    /// Tells a new store the namespaces that are described on disk. Nobody waits for a description that was under way: sessions
    /// register their namespaces again.
    pub(crate) fn know_again(&mut self) {
        (self.described.is_recovered, self.described.lists_again) = (false, false);
        self.described.passed_over.clear();
        self.described.known.retain(|_, namespace| namespace.state == DescribedState::There);
        let known = self.described.known.iter();
        let mut known: Vec<_> =
            known.map(|(&name, known)| (name, known.tenant, known.spec.clone())).collect();
        known.sort_unstable_by_key(|&(fingerprint, ..)| fingerprint);
        for (fingerprint, tenant, spec) in known {
            // The namespace fitted the store before.
            let _ = self.know_in_store(tenant, fingerprint, &spec);
        }
    }
}

/// The time until a failed description is tried again; meanwhile no chunk of the namespace is written to disk.
const DESCRIBE_AGAIN: Duration = Duration::from_secs(10);

/// Time between searches for unused namespaces.
const FORGET_EVERY: Duration = Duration::from_secs(60);
