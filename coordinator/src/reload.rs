//! Changes of the configuration while the coordinator runs. An admin's `larder reload`, SIGHUP or a change of the file starts
//! them.
//!
//! The file is read and checked as at a start; a file with a fault changes nothing. The patience with silent nodes changes at
//! once. The other settings count from the next start on, and the answer names them. Certificates are read again anyway.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use larder_net::audit::Audit;
use larder_net::blocking::blocking;
use larder_net::in_one_line;
use larder_net::reload::{ReloadTimes, differences, note};
use larder_protocol::reload::Reloaded;

use crate::config::Config;
use crate::membership::Patience;
use crate::shared::SharedMembership;

/// The changes of a running coordinator's configuration. Cloning shares.
#[derive(Clone)]
pub(crate) struct Reloads(Arc<CoordinatorReloads>);

struct CoordinatorReloads {
    /// `None`: there is no file, and each reload is refused.
    file: Option<PathBuf>,
    /// The configuration in force, without the arguments of the command line.
    running: Mutex<Config>,
    membership: SharedMembership,
    audit: Audit,
}

impl Reloads {
    /// Starts with the file and its content. If `file` is `None`, each reload is refused.
    pub(crate) fn new(
        file: Option<&(ReloadTimes, Config)>,
        membership: SharedMembership,
        audit: Audit,
    ) -> Self {
        let running = Mutex::new(file.map(|(_, in_file)| in_file.clone()).unwrap_or_default());
        let file = file.map(|(times, _)| times.file().to_owned());
        Self(Arc::new(CoordinatorReloads { file, running, membership, audit }))
    }

    /// Reads the file again, and changes the settings that can change. `by` names who asked for it.
    ///
    /// # Errors
    /// The reason that nothing has changed, for people.
    ///
    /// # Cancel safety
    /// If dropped, the changes may be made all the same.
    pub(crate) async fn reload(&self, by: &str) -> Result<Reloaded, String> {
        let reloads = self.clone();
        // The file's drive or server may hang.
        let reloaded = blocking(move || reloads.try_reload()).await;
        note(&self.0.audit, by, &reloaded);
        reloaded
    }

    fn try_reload(&self) -> Result<Reloaded, String> {
        let CoordinatorReloads { file, running, membership, .. } = &*self.0;
        let file = file.as_ref().ok_or("the coordinator was started without a configuration file")?;
        let new = Config::read(file).map_err(|error| in_one_line(&error))?;
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        take_chosen_ports(&mut running, &new);
        let merged = with_changes(&running, &new);
        merged.check().map_err(|error| in_one_line(&error))?;
        let others = differences(&merged, &new).into_iter().map(|setting| setting.key);
        let reloaded = Reloaded { applied: differences(&*running, &merged), at_restart: others.collect() };
        membership.lock().change_patience(merged.membership.clone());
        *running = merged;
        Ok(reloaded)
    }

    /// Reloads at the times, if there is a file.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing is reloaded any more.
    pub(crate) async fn watch(self, times: Option<ReloadTimes>) {
        if let Some(times) = times {
            // Errors are logged.
            times.call(async |by| _ = self.reload(by).await).await;
        }
    }
}

/// The configuration in force, with the settings of the new one that can change while a coordinator runs. The heartbeat cannot,
/// since members were told it when they joined.
fn with_changes(running: &Config, new: &Config) -> Config {
    let heartbeat_ms = running.membership.heartbeat_ms;
    Config { membership: Patience { heartbeat_ms, ..new.membership.clone() }, ..running.clone() }
}

/// If the system chose a port, the file may name that port now, as the file of a development cluster does.
fn take_chosen_ports(running: &mut Config, new: &Config) {
    let listens = [(&mut running.http.listen, new.http.listen), (&mut running.peer.listen, new.peer.listen)];
    for (running, new) in listens {
        if (running.ip(), running.port()) == (new.ip(), 0) {
            *running = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use larder_protocol::reload::ChangedSetting;

    use super::*;
    use crate::membership::{DurableState, Membership};

    #[test]
    fn a_port_that_the_system_chose_may_stand_in_the_file() {
        let (mut running, mut new) = (Config::default(), Config::default());
        running.http.listen.set_port(0);
        new.http.listen.set_port(9_000);
        take_chosen_ports(&mut running, &new);
        assert_eq!(running, new);
        new.http.listen.set_port(9_001);
        take_chosen_ports(&mut running, &new);
        assert_ne!(running, new, "that is another port");
    }

    #[tokio::test]
    async fn a_reload_that_waits_holds_up_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (path, config) = (dir.path().join("coordinator.toml"), Config::default());
        std::fs::write(&path, toml::to_string(&config).unwrap()).unwrap();
        let membership = Membership::new(config.membership.clone(), DurableState::default(), 0);
        let file = (ReloadTimes::begin(&path), config);
        let reloads = Reloads::new(Some(&file), SharedMembership::new(membership), Audit::default());
        let waits = reloads.0.running.lock().unwrap();
        let mut reload = std::pin::pin!(reloads.reload("me"));
        // The wait would have no end if the reload kept this thread.
        assert_eq!(reload.as_mut().now_or_never(), None);
        drop(waits);
        assert_eq!(reload.await.map(|reloaded| reloaded.applied), Ok(Vec::new()));
    }

    #[test]
    fn the_patience_of_membership_changes_at_once_and_other_settings_are_named() {
        let (running, mut new) = (Config::default(), Config::default());
        new.membership.remove_after_ms = 60_000;
        new.membership.heartbeat_ms = 500;
        new.election.lease_ms = 9_000;
        let merged = with_changes(&running, &new);
        let keys = |settings: Vec<ChangedSetting>| {
            settings.into_iter().map(|setting| setting.key).collect::<Vec<_>>()
        };
        assert_eq!(keys(differences(&running, &merged)), ["membership.remove_after_ms"]);
        assert_eq!(keys(differences(&merged, &new)), ["election.lease_ms", "membership.heartbeat_ms"]);
    }
}
