//! `larder node`: runs a node.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use larder_node::config::RecordConfig;
use larder_node::host::HostFacts;
use larder_node::limits::Limits;
use larder_node::{Config, Ended, Ready, Reloadable};

use crate::commands::{config, doctor};
use crate::dev::{DrainedLine, ReadyLine};
use crate::failure::{TO_RESTART, Usage};
use crate::{heap, logging, output, parent, signals};

/// Run a node until Ctrl-C or SIGTERM
///
/// The node reads its configuration again when the file changes, at SIGHUP, and by `larder reload`: some settings change while it
/// runs. When the node serves, it prints one line of JSON: {"ready":true,"http":"ADDRESS:PORT","sockets":{"TENANT":"PATH"}}. When
/// it has drained and ends, it prints {"drained":true}. Exit status 75 asks the supervisor to start it again (`larder restart`).
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
        let stop = signals::stop()?;
        let (limits, reloadable) = limits(args.config.as_deref(), args.record.as_deref())
            .context(Usage("the node cannot start".into()))?;
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
fn limits(file: Option<&Path>, record: Option<&Path>) -> anyhow::Result<(Limits, Option<Reloadable>)> {
    let mut config = match file {
        Some(path) => config::load_node(path)?,
        None => Config::default(),
    };
    let in_file = config.clone();
    config.tracing = config.tracing.or_from_environment();
    if let Some(path) = record {
        config.record = Some(RecordConfig::to(path.to_owned()));
    }
    let host = HostFacts::read(Path::new("/"))?;
    let limits = config.resolve(&host)?;
    limits.check_available(&host)?;
    config::check_sockets(&limits)?;
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

/// The default filter of a server's log.
pub(crate) const LOG_FILTER: &str = "info";

fn announce(ready: Ready) {
    ReadyLine { ready: true, http: ready.http, peer: None, sockets: ready.sockets }.print();
}
