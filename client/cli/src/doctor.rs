//! The problems of a machine as a node's host, and their remedies.
//!
//! Each check is a function of facts: files below a root ([`files::Files`]), the results of trials ([`probes::Probes`]), and the
//! node's configuration. So tests can plant faults in trees of files.

mod certificates;
mod clock;
mod files;
mod folders;
mod gpus;
mod memory;
mod network;
mod probes;
mod processors;
mod system;

use std::time::SystemTime;

use larder_node::Config;
use larder_node::host::HostFacts;
use larder_node::limits::{ConfigError, Limits};
use serde::Serialize;

pub(crate) use files::Files;
pub(crate) use probes::Probes;

/// The subject of an examination.
pub(crate) struct Subject {
    /// The kernel's files.
    pub(crate) files: Files,
    /// The machine.
    pub(crate) host: HostFacts,
    /// The node's configuration.
    pub(crate) config: Config,
    /// The configuration's limits on this machine.
    pub(crate) limits: Result<Limits, ConfigError>,
    /// The results of trials.
    pub(crate) probes: Probes,
    /// The time.
    pub(crate) now: SystemTime,
}

/// The finding of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// The check's name.
    pub(crate) check: &'static str,
    /// The severity.
    pub(crate) level: Level,
    /// The found fact.
    pub(crate) found: String,
    /// The advice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) advice: Option<String>,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Level {
    /// No problem.
    Ok,
    /// Could be better.
    Note,
    /// Slow or fragile.
    Warning,
    /// The node does not start, or does not work.
    Problem,
}

impl Subject {
    /// All findings, in the order of a node's layers.
    pub(crate) fn examine(&self) -> Vec<Finding> {
        let checks: [fn(&Self) -> Vec<Finding>; 7] = [
            memory::check,
            processors::check,
            system::check,
            gpus::check,
            folders::check,
            network::check,
            certificates::check,
        ];
        std::iter::once(self.configuration()).chain(checks.iter().flat_map(|check| check(self))).collect()
    }

    fn configuration(&self) -> Finding {
        match &self.limits {
            Ok(limits) => {
                let actors = crate::output::counted(limits.actors.len(), "actor");
                ok("configuration", format!("{} fits this machine: {actors}", limits.name))
            }
            Err(error) => {
                problem("configuration", error.to_string(), "change the configuration as the error says")
            }
        }
    }

    /// Bytes of all arenas.
    fn arena_bytes(&self) -> u64 {
        self.config.host.arena_bytes.0
    }
}

impl Level {
    /// The level's name.
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

fn ok(check: &'static str, found: impl Into<String>) -> Finding {
    Finding { check, level: Level::Ok, found: found.into(), advice: None }
}

fn note(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { check, level: Level::Note, found: found.into(), advice: Some(advice.into()) }
}

fn warning(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { level: Level::Warning, ..note(check, found, advice) }
}

fn problem(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { level: Level::Problem, ..note(check, found, advice) }
}

#[cfg(test)]
mod tests;
