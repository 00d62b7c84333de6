//! `larder node`: runs a node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;

use larder_node::config::RecordConfig;
use larder_node::host::HostFacts;
use larder_node::limits::{ConfigError, Limits};
use larder_node::{Config, Ended, Ready, Reloadable};
use tokio::time::Instant;

use crate::commands::{config, doctor};
use crate::dev::{DrainedLine, ReadyLine};
use crate::failure::{TO_RESTART, Usage};
use crate::{heap, logging, output, parent, signals};

/// Run a node until Ctrl-C or SIGTERM
///
/// The node reads its configuration again when the file changes, at SIGHUP, and by `larder reload`: some settings change while it
/// runs. When the node serves, it prints one line of JSON: {"ready":true,"http":"ADDRESS:PORT","sockets":{"TENANT":"PATH"}}. When
/// it ends after `larder drain`, it prints {"drained":true}. Status 75 asks the supervisor to start it again (`larder restart`).
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder node --config node.toml
  larder node --print-config       Every key with its default

  node.toml:
    [host]
    arena_bytes = \"8GiB\"

    [[tenants]]
    name = \"default\"
    socket = \"/run/larder/default.sock\"")]
pub(crate) struct Args {
    /// The configuration file [default: every key has its default]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Record lookups to this file, as hashes only; older records are kept in files beside it
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Print every key with its default, and do nothing else
    #[arg(long, conflicts_with = "config")]
    print_config: bool,

    /// Process id of the parent; the server ends when its parent ends
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<u32>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.print_config {
        output::print(config::NODE)?;
        return Ok(ExitCode::SUCCESS);
    }
    logging::log_panics();
    args.parent.map_or(Ok(()), parent::die_with)?;
    heap::keep_freed_memory();
    actix_rt::System::new().block_on(async {
        let mut stop = Box::pin(signals::stop()?);
        signals::outlive_limit_of_file_sizes()?;
        let (limits, reloadable) = tokio::select! {
            limits = limits(args.config.as_deref(), args.record.as_deref()) => {
                limits.context(Usage("the node cannot start".into()))?
            }
            () = &mut stop => return Ok(ExitCode::SUCCESS),
        };
        match larder_node::run(limits, reloadable, announce, stop).await {
            Ok(Ended::Stopped) => Ok(ExitCode::SUCCESS),
            Ok(Ended::Drained) => {
                DrainedLine { drained: true }.print();
                Ok(ExitCode::SUCCESS)
            }
            Ok(Ended::ToRestart) => Ok(ExitCode::from(TO_RESTART)),
            Err(error) if error.is_the_askers() => Err(error).context(Usage("the node cannot start".into())),
            Err(error) => Err(error.into()),
        }
    })
}

impl Args {
    /// The log filter if nothing else sets one.
    pub(crate) fn log_filter(&self) -> String {
        self.config_file().and_then(|config| config.log).unwrap_or_else(|| LOG_FILTER.to_owned())
    }

    /// The configuration file, if it can be read.
    pub(crate) fn config_file(&self) -> Option<Config> {
        if self.print_config {
            return None;
        }
        self.config.as_deref().map_or_else(|| Some(Config::default()), |path| Config::load(path).ok())
    }
}

/// The limits of the configuration file, or of the defaults, on this machine. With a file, also the means to read the file again.
async fn limits(file: Option<&Path>, record: Option<&Path>) -> anyhow::Result<(Limits, Option<Reloadable>)> {
    let mut config = match file {
        Some(path) => config::load_node(path)?,
        None => Config::default(),
    };
    let in_file = config.clone();
    config.tracing = config.tracing.or_from_environment();
    if let Some(path) = record {
        config.record = Some(RecordConfig::to(path.to_owned()));
    }
    let (limits, host) = when_memory_is_available(|| {
        let host = HostFacts::read(Path::new("/"))?;
        let limits = config.resolve(&host)?;
        limits.check_available(&host)?;
        Ok((limits, host))
    })
    .await?;
    config::check_paths(&limits, file)?;
    let reloadable = file.map(|file| Reloadable {
        config: in_file,
        file: file.to_owned(),
        host,
        set_log: Box::new(|filter| {
            logging::set_filter(filter.unwrap_or(LOG_FILTER)).map_err(|error| format!("{error:#}"))
        }),
        examine: Box::new(doctor::examine_host_of),
    });
    Ok((limits, reloadable))
}

/// Tries again for a while if other processes have the memory of the arenas: engines keep the memory of the node's life before
/// until they notice its end.
async fn when_memory_is_available<T>(mut attempt: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + MEMORY_WAIT;
    let mut is_told = false;
    loop {
        let error = match attempt() {
            Err(error) if Instant::now() < deadline => error,
            result => return result,
        };
        if !matches!(error.downcast_ref(), Some(ConfigError::ArenaNotAvailable { .. })) {
            return Err(error);
        }
        if !is_told {
            tracing::warn!("{error}; waiting {} s for it", MEMORY_WAIT.as_secs());
            is_told = true;
        }
        tokio::time::sleep(MEMORY_LOOK).await;
    }
}

/// How long a starting node waits for memory. An engine that is idle looks once a second whether its node is gone.
const MEMORY_WAIT: Duration = Duration::from_secs(10);

/// How often a starting node looks for memory.
const MEMORY_LOOK: Duration = Duration::from_millis(250);

/// The default filter of a server's log.
pub(crate) const LOG_FILTER: &str = "info";

fn announce(ready: Ready) {
    ReadyLine { ready: true, http: ready.http, peer: None, sockets: ready.sockets }.print();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_memory() -> anyhow::Error {
        ConfigError::ArenaNotAvailable { arena_bytes: 8 << 30, available_bytes: 1 << 30 }.into()
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_waits_for_the_memory_that_engines_of_its_life_before_still_have() {
        let mut tries = 0;
        let found = when_memory_is_available(|| {
            tries += 1;
            if tries < 5 { Err(no_memory()) } else { Ok("memory") }
        });
        assert_eq!(found.await.unwrap(), "memory");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_does_not_wait_for_ever_nor_for_anything_else() {
        let begun = Instant::now();
        let refused = when_memory_is_available(|| Err::<(), _>(anyhow::anyhow!("no such file"))).await;
        assert_eq!(
            (refused.unwrap_err().to_string().as_str(), begun.elapsed()),
            ("no such file", Duration::ZERO)
        );
        let refused = when_memory_is_available(|| Err::<(), _>(no_memory())).await.unwrap_err();
        assert!(
            refused.to_string().contains("end some of them") && begun.elapsed() >= MEMORY_WAIT,
            "{refused}"
        );
    }
}
