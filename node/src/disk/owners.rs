//! The tenants of the namespaces on disk, as the actor and its disk thread share them.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use larder_protocol::Fingerprint;

/// The tenant of each namespace that is described on disk.
#[derive(Debug, Default)]
pub struct Owners(Mutex<Tenants>);

#[derive(Debug, Default)]
struct Tenants {
    owners: HashMap<Fingerprint, Arc<str>>,
    /// Tenants that this node does not serve. They own nothing meanwhile.
    unserved: HashSet<Arc<str>>,
}

impl Owners {
    /// Notes the tenant of a namespace.
    pub fn own(&self, tenant: &str, fingerprint: Fingerprint) {
        self.tenants().owners.insert(fingerprint, tenant.into());
    }

    /// Notes whether this node serves a tenant.
    pub fn serves(&self, tenant: &str, is_served: bool) {
        let unserved = &mut self.tenants().unserved;
        _ = if is_served { unserved.remove(tenant) } else { unserved.insert(tenant.into()) };
    }

    /// Forgets a namespace without records.
    pub fn forget(&self, fingerprint: &Fingerprint) {
        self.tenants().owners.remove(fingerprint);
    }

    /// The tenant of a namespace; `None` if it is unknown or not served.
    pub fn of(&self, fingerprint: &Fingerprint) -> Option<Arc<str>> {
        let Tenants { owners, unserved } = &*self.tenants();
        owners.get(fingerprint).filter(|tenant| !unserved.contains(*tenant)).cloned()
    }

    fn tenants(&self) -> MutexGuard<'_, Tenants> {
        // Each change is one call, so that a panic leaves no half of one.
        larder_net::lock(&self.0)
    }
}
