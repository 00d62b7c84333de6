//! The tenants of a running node: their numbers, their sockets, and the ends of their sessions.
//!
//! Tenants come and go with the configuration. Each has its own number for as long as the node lives: a tenant that comes again
//! under the same name is another tenant, and sees nothing of the former tenant.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use larder_core::Event;
use larder_core::store::ids::TenantId;
use tokio::sync::{mpsc, oneshot, watch};

use crate::limits::{Limits, TenantLimits};
use crate::session::{BindError, Listener, Listening, Places, SessionSettings};
use crate::tell::tell_each;
use crate::window::WindowBudget;

/// The tenants that the node serves or served, by number. Cloning shares.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tenants(Arc<RwLock<Vec<Tenant>>>);

/// One tenant.
#[derive(Debug, Clone)]
pub(crate) struct Tenant {
    pub(crate) name: String,
    pub(crate) socket: PathBuf,
    /// Whether the tenant is still served.
    pub(crate) is_served: bool,
}

/// The sockets of all tenants. Stays on the thread that accepts.
pub(crate) struct Doors {
    tenants: Tenants,
    settings: SessionSettings,
    open: BTreeMap<u16, Door>,
}

/// The socket of one tenant.
struct Door {
    listening: Option<Listening>,
    places: Places,
    windows: WindowBudget,
    /// Turns true when the tenant leaves.
    leaves: watch::Sender<bool>,
}

/// Asks to serve the tenants of these limits from now on; the error is for people.
pub(crate) struct ChangeTenants {
    pub(crate) limits: Limits,
    pub(crate) done: oneshot::Sender<Result<(), String>>,
}

impl Tenants {
    pub(crate) fn all(&self) -> Vec<Tenant> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The name of a tenant; empty if no tenant ever had this number.
    pub(crate) fn name(&self, TenantId(number): TenantId) -> String {
        self.all().get(usize::from(number)).map(|tenant| tenant.name.clone()).unwrap_or_default()
    }

    /// The numbers that the tenant of this name has and had: it gets a new one whenever it comes back.
    pub(crate) fn numbers(&self, name: &str) -> Vec<TenantId> {
        let named = (0..).zip(self.all()).filter(|(_, tenant)| tenant.name == name);
        named.map(|(number, _)| TenantId(number)).collect()
    }

    /// The sockets of the tenants that are served.
    pub(crate) fn sockets(&self) -> BTreeMap<String, PathBuf> {
        let served = self.all().into_iter().filter(|tenant| tenant.is_served);
        served.map(|tenant| (tenant.name, tenant.socket)).collect()
    }

    /// Brings `bytes`, the tenants' bytes of extents in the order of `limits`, into the order of tenants' numbers; 0 for tenants
    /// that are not served.
    pub(crate) fn bytes(&self, limits: &[TenantLimits], bytes: &[u64]) -> Vec<u64> {
        let of = |tenant: Tenant| {
            let at = limits.iter().position(|limits| limits.name == tenant.name);
            at.filter(|_| tenant.is_served).and_then(|at| bytes.get(at)).copied().unwrap_or(0)
        };
        self.all().into_iter().map(of).collect()
    }

    fn set(&self, tenants: Vec<Tenant>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = tenants;
    }
}

impl Doors {
    /// Listens on the sockets of the first tenants.
    ///
    /// # Errors
    /// The tenant whose socket cannot be used, and why.
    pub(crate) fn open(
        limits: &[TenantLimits],
        tenants: Tenants,
        settings: SessionSettings,
    ) -> Result<Self, (TenantLimits, BindError)> {
        let mut doors = Self { tenants, settings, open: BTreeMap::new() };
        let mut served = Vec::new();
        for (number, limits) in (0..).zip(limits) {
            let listener = Listener::bind(TenantId(number), &limits.name, &limits.socket);
            doors.add(number, limits, listener.map_err(|error| (limits.clone(), error))?);
            served.push(Tenant { name: limits.name.clone(), socket: limits.socket.clone(), is_served: true });
        }
        doors.tenants.set(served);
        Ok(doors)
    }

    /// Carries out changes until it is dropped.
    ///
    /// # Cancel safety
    /// If dropped, the sockets are removed.
    pub(crate) async fn change_when_told(mut self, mut changes: mpsc::Receiver<ChangeTenants>) {
        while let Some(ChangeTenants { limits, done }) = changes.recv().await {
            // An error: nobody waits for the result.
            _ = done.send(self.change(&limits).await);
        }
        // Nobody can change the tenants any more: the sockets stay.
        std::future::pending().await
    }

    async fn change(&mut self, limits: &Limits) -> Result<(), String> {
        let wanted: BTreeMap<&str, &TenantLimits> =
            limits.tenants.iter().map(|tenant| (tenant.name.as_str(), tenant)).collect();
        let mut tenants = self.tenants.all();
        let served = |tenants: &[Tenant]| -> BTreeSet<String> {
            tenants.iter().filter(|tenant| tenant.is_served).map(|tenant| tenant.name.clone()).collect()
        };
        let before = served(&tenants);
        let new = limits.tenants.iter().filter(|tenant| !before.contains(&tenant.name));
        if tenants.len() + new.clone().count() > MOST_TENANTS {
            return Err(format!(
                "the node had {MOST_TENANTS} tenants since its start: start it again for another"
            ));
        }
        let bound = self.bind(&wanted, &tenants, new)?;
        self.settings.descriptions.tenants_are(wanted.len());
        for (number, tenant) in (0..).zip(&mut tenants).filter(|(_, tenant)| tenant.is_served) {
            let Some(door) = self.open.get_mut(&number) else { continue };
            match wanted.get(tenant.name.as_str()) {
                Some(limits) => {
                    tenant.socket.clone_from(&limits.socket);
                    door.windows.bound(limits.max_window_bytes);
                    _ = self.settings.metrics.windows(&tenant.name, limits.max_window_bytes);
                }
                None => {
                    tenant.is_served = false;
                    self.settings.metrics.tenant_left(&tenant.name);
                    // From now on no session opens, and open sessions end.
                    if let Some(Door { leaves, .. }) = self.open.remove(&number) {
                        leaves.send_replace(true);
                    }
                }
            }
        }
        let mut added = Vec::new();
        for (name, listener) in bound {
            let Some(limits) = wanted.get(name.as_str()) else { continue };
            let known = tenants.iter().position(|tenant| tenant.is_served && tenant.name == name);
            let number = known.unwrap_or(tenants.len());
            if known.is_none() {
                tenants.push(Tenant { name, socket: limits.socket.clone(), is_served: true });
            }
            added.push((number as u16, *limits, listener));
        }
        let is_other = before != served(&tenants);
        self.tenants.set(tenants);
        if is_other {
            self.tell_actors(limits).await;
        }
        // The actors already know the tenants whose sessions may open from now on.
        for (number, limits, listener) in added {
            self.add(number, limits, listener.of(TenantId(number)));
        }
        self.make_lost_again();
        Ok(())
    }

    /// Binds the sockets of new tenants, and of tenants whose path has changed.
    fn bind<'a>(
        &mut self,
        wanted: &BTreeMap<&str, &'a TenantLimits>,
        tenants: &[Tenant],
        new: impl Iterator<Item = &'a TenantLimits>,
    ) -> Result<Vec<(String, Listener)>, String> {
        let mut to_bind: Vec<&TenantLimits> = new.collect();
        let mut closed = Vec::new();
        for (number, tenant) in (0..).zip(tenants).filter(|(_, tenant)| tenant.is_served) {
            match wanted.get(tenant.name.as_str()) {
                Some(limits) if limits.socket == tenant.socket => continue,
                Some(limits) => to_bind.push(limits),
                None => {}
            }
            // Another tenant may want the path.
            if wanted.values().any(|limits| limits.socket == tenant.socket)
                && let Some(door) = self.open.get_mut(&number)
            {
                door.listening = None;
                closed.push((number, tenant));
            }
        }
        let bind = |limits: &TenantLimits| {
            let listener = Listener::bind(TenantId(0), &limits.name, &limits.socket);
            let failed = |error| {
                format!(
                    "cannot listen on the socket {} of tenant `{}`: {error}",
                    limits.socket.display(),
                    limits.name
                )
            };
            listener.map(|listener| (limits.name.clone(), listener)).map_err(failed)
        };
        let bound: Result<Vec<_>, _> = to_bind.into_iter().map(bind).collect();
        if bound.is_err() {
            for (number, tenant) in closed {
                match Listener::bind(TenantId(number), &tenant.name, &tenant.socket) {
                    Ok(listener) => self.listen(number, listener),
                    Err(error) => {
                        let socket = tenant.socket.display();
                        tracing::error!(tenant = tenant.name, %socket, %error, "the tenant's former socket cannot be made again, so no engine reaches the tenant: reload when it can");
                    }
                }
            }
        }
        bound
    }

    async fn tell_actors(&self, limits: &Limits) {
        let told = self.settings.actors.iter().zip(&limits.actors).map(|(actor, actor_limits)| {
            let bytes = self.tenants.bytes(&limits.tenants, &actor_limits.store.tenant_bytes);
            let names = self.tenants.all().into_iter().map(|tenant| tenant.name);
            (&actor.address, Event::TenantsAre(names.zip(bytes).collect()))
        });
        tell_each(told).await;
    }

    /// Accepts sessions of a tenant. If the tenant was served before, its open sessions go on.
    fn add(&mut self, number: u16, limits: &TenantLimits, listener: Listener) {
        let gauge = self.settings.metrics.windows(&limits.name, limits.max_window_bytes);
        self.open.entry(number).or_insert_with(|| Door {
            listening: None,
            places: Places::new(&self.settings.limits),
            windows: WindowBudget::new(limits.max_window_bytes, gauge),
            leaves: watch::Sender::new(false),
        });
        self.listen(number, listener);
    }

    /// Makes the sockets again that are gone. A socket that cannot be made is tried again at the next change.
    fn make_lost_again(&mut self) {
        for (number, tenant) in (0..).zip(self.tenants.all()).filter(|(_, tenant)| tenant.is_served) {
            let Some(door) = self.open.get_mut(&number) else { continue };
            if door.listening.as_ref().is_some_and(Listening::is_there) {
                continue;
            }
            let (name, socket) = (&tenant.name, tenant.socket.display());
            match Listener::bind(TenantId(number), name, &tenant.socket) {
                Ok(listener) => {
                    tracing::warn!(tenant = name, %socket, "the tenant's socket was gone, and is made again");
                    door.listening.iter_mut().for_each(Listening::abandon);
                    self.listen(number, listener);
                }
                Err(error) => {
                    tracing::error!(tenant = name, %socket, %error, "the tenant's socket is gone, and cannot be made again: reload when it can");
                }
            }
        }
    }

    /// Accepts sessions on a tenant's socket, if the tenant is served.
    fn listen(&mut self, number: u16, listener: Listener) {
        let Some(door) = self.open.get_mut(&number) else { return };
        let settings = self.settings.clone();
        let (places, windows) = (door.places.clone(), door.windows.clone());
        door.listening = Some(listener.start(settings, places, windows, door.leaves.subscribe()));
    }
}

/// Maximum number of tenants that a node has in one life.
const MOST_TENANTS: usize = 4_096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_that_left_and_came_back_has_both_numbers() {
        let tenant = |name: &str, is_served| Tenant { name: name.into(), socket: "/s".into(), is_served };
        let tenants = Tenants::default();
        tenants.set(vec![tenant("chat", false), tenant("other", true), tenant("chat", true)]);
        assert_eq!(tenants.numbers("chat"), [TenantId(0), TenantId(2)]);
        assert!(tenants.numbers("nobody").is_empty());
    }
}
