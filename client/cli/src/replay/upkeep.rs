//! The planned events of the cluster during a replay: nodes that drain, and nodes that restart.

use std::time::Duration;

use larder_net::quic::CredentialFiles;
use larder_protocol::drain::{AfterDrain, DrainCommand, DrainStart};

use super::Driver;
use crate::address::Coordinators;
use crate::admin;
use crate::drain::{self, Drained};
use crate::restart::Restart;

/// The planned events.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Upkeep {
    /// The last node drains once this number of requests was started.
    pub(crate) drain_at: Option<usize>,
    /// Every node restarts, one after the other, once this number of requests was started.
    pub(crate) restart_at: Option<usize>,
}

impl Upkeep {
    /// Carries out each event at its time. Returns the result of each node.
    ///
    /// # Errors
    /// The cluster cannot be asked.
    pub(crate) async fn carry_out(
        self,
        driver: &Driver,
        coordinator: &Coordinators,
        admin: &CredentialFiles,
    ) -> anyhow::Result<Vec<Drained>> {
        let mut done = Vec::new();
        let credentials = admin::credentials(admin)?;
        if let Some(at) = self.drain_at {
            driver.reached(at).await;
            let nodes = drain::status_of(coordinator).await?.nodes;
            let Some(last) = nodes.iter().max_by_key(|node| number_of(&node.name)) else { return Ok(done) };
            let within_ms = WITHIN.as_millis() as u64;
            let start = DrainStart { within_ms, bytes_per_second: None, then: AfterDrain::Stop };
            let start = DrainCommand::Start(start);
            done.push(drain::drain(&credentials, coordinator, last, start, |_| {}).await?);
        }
        if let Some(at) = self.restart_at {
            driver.reached(at).await;
            let nodes = drain::status_of(coordinator).await?.nodes;
            let mut names: Vec<String> = nodes.into_iter().map(|node| node.name).collect();
            names.sort_by_key(|name| number_of(name));
            let how = Restart { within: WITHIN, back_within: WITHIN, bytes_per_second: None, shows: false };
            done.extend(how.all(&credentials, coordinator, &names).await);
        }
        Ok(done)
    }
}

/// Updates the replay's list of the nodes that take requests, as a router would.
pub(crate) async fn watch_drains(driver: &Driver, coordinator: &Coordinators) {
    loop {
        if let Ok(status) = drain::status_of(coordinator).await {
            let well = status.nodes.into_iter().filter(|node| node.state != "draining");
            driver.serving(&well.map(|node| node.name).collect::<Vec<_>>());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// The number at the end of a name.
fn number_of(name: &str) -> u32 {
    name.rsplit('-').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

const WITHIN: Duration = Duration::from_secs(120);

/// Pause between a router's looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);
