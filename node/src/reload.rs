//! Changes the configuration while the node runs: on an admin's request (`larder reload`), on SIGHUP, or when the file changes.
//!
//! The file is read and checked as at a start; a file with a fault changes nothing, nor does a file that names no tenants while
//! the node's tenants are other than such a file's. Settings that can change while the node runs count at once ([`with_changes`]
//! has all of them). Other settings count from the next start on, and the answer names them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix::Addr;
use larder_core::Event;
use larder_core::store::StoreLimits;
use larder_net::blocking::blocking;
use larder_net::in_one_line;
use larder_net::reload::{ReloadTimes, differences, note};
use larder_protocol::reload::Reloaded;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;

use crate::actor::GpuActor;
use crate::config::{Config, TenantConfig};
use crate::drain::Drains;
use crate::exchange::{PeerActor, SetPace};
use crate::findings::FindingStatus;
use crate::host::HostFacts;
use crate::limits::Limits;
use crate::tell::tell_each;
use crate::tenants::{ChangeTenants, Tenants};
use larder_net::audit::Audit;

/// Sets the filter of the log; `None` is the default filter. The error tells people why the filter cannot be set.
pub type SetLog = Box<dyn Fn(Option<&str>) -> Result<(), String> + Send + Sync>;

/// Examines the host for a node with this configuration. May block for seconds.
pub type Examine = Box<dyn Fn(&Config) -> Vec<FindingStatus> + Send + Sync>;

/// A configuration that may change while its node runs.
pub struct Reloadable {
    /// The configuration in force.
    pub config: Config,
    /// The configuration's file.
    pub file: PathBuf,
    /// The machine.
    pub host: HostFacts,
    /// Sets the filter of the log.
    pub set_log: SetLog,
    /// Examines the host.
    pub examine: Examine,
}

/// The changes of a running node's configuration. Cloning shares.
#[derive(Clone)]
pub(crate) struct Reloads(Arc<NodeReloads>);

struct NodeReloads {
    reloadable: Option<Reloadable>,
    running: Mutex<Config>,
    /// Held from the reading of the file on: the reload that reads last has the last word.
    turn: Mutex<()>,
    audit: Audit,
    parts: OnceLock<Changeable>,
}

/// The parts of a node that take changes.
pub(crate) struct Changeable {
    pub(crate) actors: Vec<Addr<GpuActor>>,
    pub(crate) tenants: Tenants,
    pub(crate) change_tenants: mpsc::Sender<ChangeTenants>,
    pub(crate) peers: Option<Addr<PeerActor>>,
    pub(crate) drains: Option<Drains>,
}

impl Reloadable {
    /// The times at which the file is read again, from now on.
    pub(crate) fn times(&self) -> ReloadTimes {
        ReloadTimes::begin(&self.file)
    }
}

impl Reloads {
    /// Starts with the configuration in force. If `reloadable` is `None`, each reload is refused.
    pub(crate) fn new(reloadable: Option<Reloadable>, audit: Audit) -> Self {
        let running = reloadable.as_ref().map(|reloadable| reloadable.config.clone()).unwrap_or_default();
        Self(Arc::new(NodeReloads {
            reloadable,
            running: Mutex::new(running),
            turn: Mutex::default(),
            audit,
            parts: OnceLock::new(),
        }))
    }

    /// The audit log that records the changes.
    pub(crate) fn audit(&self) -> Audit {
        self.0.audit.clone()
    }

    /// Examines the host for the configuration in force; `None` if the node has no configuration file. May take seconds.
    pub(crate) async fn examine(&self) -> Option<Vec<FindingStatus>> {
        let (this, running) = (self.clone(), self.0.running.lock().await.clone());
        blocking(move || this.0.reloadable.as_ref().map(|reloadable| (reloadable.examine)(&running))).await
    }

    /// Sets the parts that take changes.
    pub(crate) fn begin(&self, parts: Changeable) {
        _ = self.0.parts.set(parts);
    }

    /// Reads the file again, and changes the settings that can change. `by` names who asked.
    ///
    /// # Errors
    /// A text for people: why nothing has changed.
    ///
    /// # Cancel safety
    /// If dropped, a part of the changes may be made; the next reload makes all.
    pub(crate) async fn reload(&self, by: &str) -> Result<Reloaded, String> {
        let reloaded = self.try_reload(by).await;
        note(&self.0.audit, by, &reloaded);
        reloaded
    }

    /// Notes which tenants came and left.
    fn note_tenants(audit: &Audit, by: &str, before: &Config, after: &Config) {
        let only_in = |one: &Config, other: &Config| {
            let is_new = |tenant: &&TenantConfig| !other.tenants.iter().any(|same| same.name == tenant.name);
            one.tenants.iter().filter(is_new).map(|tenant| tenant.name.clone()).collect::<Vec<_>>()
        };
        for (action, names) in
            [("add_tenant", only_in(after, before)), ("remove_tenant", only_in(before, after))]
        {
            for name in names {
                tracing::info!(by, tenant = name, action, "tenants have changed");
                audit.note(by, action, &name, Ok::<_, &str>(()));
            }
        }
    }

    async fn try_reload(&self, by: &str) -> Result<Reloaded, String> {
        let reloadable =
            self.0.reloadable.as_ref().ok_or("the node was started without a configuration file")?;
        let parts = self.0.parts.get().ok_or("the node is starting: try again")?;
        let turn = timeout(TURN_WITHIN, self.0.turn.lock()).await;
        let _turn = turn
            .map_err(|_| "an earlier reload has not ended: the drive of the configuration file may hang")?;
        let (file, host) = (reloadable.file.clone(), reloadable.host.clone());
        // The file's drive or server may hang.
        let (new, names_tenants) = blocking(move || read(&file, &host)).await?;
        let mut running = self.0.running.lock().await;
        check_tenants(&running, &new, names_tenants)?;
        let merged = with_changes(&running, &new);
        let limits = merged.resolve(&reloadable.host).map_err(|error| in_one_line(&error))?;
        let others = differences(&merged, &new).into_iter().map(|setting| setting.key);
        let reloaded = Reloaded { applied: differences(&*running, &merged), at_restart: others.collect() };
        if merged.log != running.log {
            (reloadable.set_log)(merged.log.as_deref())?;
        }
        // Also if the tenants are the same: somebody may have removed the file of a socket.
        if let Err(error) = parts.change_tenants(&limits).await {
            if merged.log != running.log {
                // The former filter was valid.
                _ = (reloadable.set_log)(running.log.as_deref());
            }
            return Err(error);
        }
        Self::note_tenants(&self.0.audit, by, &running, &merged);
        parts.change(&limits, merged.host.policy != running.host.policy).await;
        *running = merged;
        Ok(reloaded)
    }

    /// Reloads at the times, if there is a file.
    ///
    /// # Cancel safety
    /// If dropped, the node no longer reloads.
    pub(crate) async fn watch(self, times: Option<ReloadTimes>) {
        if let Some(times) = times {
            // Errors are logged.
            times.call(async |by| _ = self.reload(by).await).await;
        }
    }
}

impl Changeable {
    /// Adds, removes and changes tenants.
    async fn change_tenants(&self, limits: &Limits) -> Result<(), String> {
        let (done, changed) = oneshot::channel();
        let stopping = || "the node is stopping".to_owned();
        let sent = self.change_tenants.send(ChangeTenants { limits: limits.clone(), done }).await;
        sent.map_err(|_| stopping())?;
        changed.await.unwrap_or_else(|_| Err(stopping()))
    }

    async fn change(&self, limits: &Limits, has_other_policy: bool) {
        let tenants = &limits.tenants;
        let actors = || self.actors.iter().zip(&limits.actors);
        tell_each(actors().map(|(actor, limits)| {
            let tenant_bytes = self.tenants.bytes(tenants, &limits.store.tenant_bytes);
            (actor, Event::LimitsAre(Box::new(StoreLimits { tenant_bytes, ..limits.store.clone() })))
        }))
        .await;
        if has_other_policy {
            tell_each(actors().map(|(actor, limits)| (actor, Event::PolicyIs(limits.store.policy)))).await;
        }
        if let Some(cluster) = &limits.cluster {
            if let Some(peers) = &self.peers {
                _ = peers.send(SetPace(cluster.send_bytes_per_second)).await;
            }
            if let Some(drains) = &self.drains {
                drains.change(cluster.drain, cluster.drain_bytes_per_second);
            }
        }
    }
}

impl fmt::Debug for Reloads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloads").finish_non_exhaustive()
    }
}

/// The configuration of the file, and whether the file names tenants. A fault that would stop the node's next start is an error.
fn read(file: &Path, host: &HostFacts) -> Result<(Config, bool), String> {
    let (new, names_tenants) = Config::load_and_look(file).map_err(|error| in_one_line(&error))?;
    new.resolve(host).map_err(|error| in_one_line(&error))?;
    Ok((new, names_tenants))
}

/// Refuses a file without tenants, if it would remove or change a tenant. A full disk and a writer that ends early leave empty
/// files, and a removed tenant loses its chunks.
fn check_tenants(running: &Config, new: &Config, names_tenants: bool) -> Result<(), String> {
    let stays = |tenant: &TenantConfig| new.tenants.iter().any(|other| other.name == tenant.name);
    let changes = || running.tenants.iter().find(|tenant| !new.tenants.contains(tenant));
    let first = running.tenants.iter().find(|tenant| !stays(tenant)).or_else(changes);
    match first.filter(|_| !names_tenants) {
        None => Ok(()),
        Some(tenant) => {
            let would = if stays(tenant) { "change" } else { "remove" };
            let with = if stays(tenant) { "" } else { " with its chunks" };
            Err(format!(
                "the file has no [[tenants]], and would {would} tenant `{}`{with}: was the file cut off? To have \
                 the default tenant alone, name it",
                tenant.name
            ))
        }
    }
}

/// The configuration in force, with the settings of `new` that can change while a node runs.
fn with_changes(running: &Config, new: &Config) -> Config {
    let mut merged = running.clone();
    merged.log.clone_from(&new.log);
    if let (Some(running), Some(new)) = (running.http.listen, new.http.listen)
        && (running.ip(), running.port()) == (new.ip(), 0)
    {
        // The system chose the port, and the file now names the chosen port, as in a development cluster.
        merged.http.listen = Some(new);
    }
    merged.host.capacity_chunks = new.host.capacity_chunks;
    merged.host.high_watermark = new.host.high_watermark;
    merged.host.low_watermark = new.host.low_watermark;
    merged.host.policy.clone_from(&new.host.policy);
    merged.host.recompute_doubles_at = new.host.recompute_doubles_at;
    merged.session.max_leased_blocks = new.session.max_leased_blocks;
    merged.session.max_pinned_fraction = new.session.max_pinned_fraction;
    merged.session.reservation_ttl_ms = new.session.reservation_ttl_ms;
    merged.session.max_pin_ms = new.session.max_pin_ms;
    merged.tenants.clone_from(&new.tenants);
    if let (Some(cluster), Some(new)) = (&mut merged.cluster, &new.cluster) {
        cluster.send_bytes_per_second = new.send_bytes_per_second;
        cluster.drain_ms = new.drain_ms;
        cluster.drain_bytes_per_second = new.drain_bytes_per_second;
    }
    merged
}

/// How long a reload waits for an earlier one: less than an admin waits for the answer.
const TURN_WITHIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
