//! `larder coordinator`: runs a coordinator.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use larder_coordinator::{Config, Ready};
use larder_net::log_paths;

use crate::commands::config;
use crate::dev::ReadyLine;
use crate::failure::Usage;
use crate::{logging, output, parent, signals};

/// Run a coordinator until Ctrl-C or SIGTERM
///
/// The coordinator reads its configuration again when the file changes, at SIGHUP, and by `larder reload`: the times of
/// `[membership]`, except `heartbeat_ms`, change while it runs. When the coordinator serves, it prints one line of JSON:
/// {"ready":true,"http":"ADDRESS:PORT","peer":"ADDRESS:PORT"}.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder coordinator --config coordinator.toml
  larder coordinator --print-config       Every key with its default

  coordinator.toml:
    [http]
    listen = \"0.0.0.0:7600\"

    [peer]
    listen = \"0.0.0.0:7601\"
    ca = \"/etc/larder/ca.pem\"
    certificate = \"/etc/larder/coordinator.pem\"
    key = \"/etc/larder/coordinator.key\"

    [state]
    path = \"/var/lib/larder/coordinator.redb\"

Certificates: `larder ca init`, then `larder ca issue coordinator NAME`.")]
pub(crate) struct Args {
    /// The configuration file [default: every key has its default]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Print every key with its default, and do nothing else
    #[arg(long, conflicts_with = "config")]
    print_config: bool,

    /// The host at which nodes and other coordinators reach this one [default: `[election] advertise`]
    #[arg(long, value_name = "HOST")]
    advertise: Option<String>,

    /// Process id of the parent; the server ends when its parent ends
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<u32>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.print_config {
        output::print(config::COORDINATOR)?;
        return Ok(ExitCode::SUCCESS);
    }
    logging::log_panics();
    args.parent.map_or(Ok(()), parent::die_with)?;
    actix_rt::System::new().block_on(async {
        signals::outlive_limit_of_file_sizes()?;
        let stop = signals::stop()?;
        let config = match &args.config {
            Some(path) => Config::read(path).context(Usage("the coordinator cannot start".into()))?,
            None => Config::default(),
        };
        let in_file = args.config.clone().map(|path| (path, config.clone()));
        let mut config = Config { tracing: config.tracing.clone().or_from_environment(), ..config };
        if args.advertise.is_some() {
            config.election.advertise.clone_from(&args.advertise);
            config.check().context(Usage("the coordinator cannot start".into()))?;
        }
        log_paths::check(&[("audit", config.audit.as_ref())], args.config.as_deref())
            .context(Usage("the coordinator cannot start".into()))?;
        match Box::pin(larder_coordinator::run_from(config, in_file, announce, stop)).await {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) if error.is_the_askers() => {
                Err(error).context(Usage("the coordinator cannot start".into()))
            }
            Err(error) => Err(error.into()),
        }
    })
}

impl Args {
    /// The configuration file, if it can be read.
    pub(crate) fn config_file(&self) -> Option<Config> {
        if self.print_config {
            return None;
        }
        self.config.as_deref().map_or_else(|| Some(Config::default()), |path| Config::read(path).ok())
    }
}

fn announce(ready: Ready) {
    ReadyLine { ready: true, http: ready.http, peer: Some(ready.peer), sockets: BTreeMap::new() }.print();
}
