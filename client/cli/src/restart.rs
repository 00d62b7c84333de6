//! Restarts of nodes, one after the other: each node drains first.

use std::time::Duration;

use larder_coordinator::NodeStatus;
use larder_net::quic::Credentials;
use larder_protocol::drain::{AfterDrain, DrainCommand, DrainStart};

use crate::address::Coordinators;
use crate::clock::now;
use crate::drain::{self, Drained, clear, find, show};

/// The options of a restart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Restart {
    pub(crate) within: Duration,
    pub(crate) back_within: Duration,
    pub(crate) bytes_per_second: Option<u64>,
    /// Whether progress is shown.
    pub(crate) shows: bool,
}

impl Restart {
    /// Restarts nodes one after the other, until one fails. The last result gives the reason.
    pub(crate) async fn all(
        self,
        credentials: &Credentials,
        coordinator: &Coordinators,
        names: &[String],
    ) -> Vec<Drained> {
        let mut done = Vec::new();
        for name in names {
            let one = self.by_name(credentials, coordinator, name).await;
            let one = one.unwrap_or_else(|error| Drained::failed(name, &error));
            let is_well = one.is_well();
            done.push(one);
            if !is_well {
                break;
            }
        }
        done
    }

    async fn by_name(
        self,
        credentials: &Credentials,
        coordinator: &Coordinators,
        name: &str,
    ) -> anyhow::Result<Drained> {
        let status = drain::status_of(coordinator).await?;
        self.one(credentials, coordinator, find(&status.nodes, name)?).await
    }

    async fn one(
        self,
        credentials: &Credentials,
        coordinator: &Coordinators,
        member: &NodeStatus,
    ) -> anyhow::Result<Drained> {
        let start = DrainCommand::Start(DrainStart {
            within_ms: self.within.as_millis() as u64,
            bytes_per_second: self.bytes_per_second,
            then: AfterDrain::Restart,
        });
        let shown = |report: &_| show(self.shows, &member.name, report);
        let drained = drain::drain(credentials, coordinator, member, start, shown).await;
        if self.shows {
            clear();
        }
        let drained = drained?;
        if drained.outcome != "left" {
            return Ok(drained);
        }
        let left = now();
        match drain::comes_back(coordinator, member, self.back_within).await {
            Ok(()) => Ok(Drained { back_after_seconds: Some((now() - left).as_secs_f64()), ..drained }),
            Err(error) => Ok(Drained { outcome: "gone", reason: Some(format!("{error:#}")), ..drained }),
        }
    }
}
