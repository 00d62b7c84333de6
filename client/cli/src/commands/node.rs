//! `larder node`: runs a node.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;

use crate::parent;

/// Run a node until Ctrl-C or SIGTERM
///
/// When it serves, it prints one line of JSON: {"ready":true,"http":"ADDRESS:PORT","sockets":{"TENANT":"PATH"}}.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  larder node --config node.toml")]
pub(crate) struct Args {
    /// The config file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,

    /// End when this process does, which must be the one that started this
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<u32>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    args.parent.map_or(Ok(()), parent::die_with)?;
    bail!("this build has no node yet; nothing was done with {}", args.config.display())
}
