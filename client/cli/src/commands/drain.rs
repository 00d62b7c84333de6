//! `larder drain`: has a node move its warm chunks to others, and leave.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use larder_protocol::drain::{AfterDrain, DrainCommand, DrainStart};
use serde::Serialize;

use crate::admin::AdminArgs;
use crate::cluster::ask_coordinator;
use crate::context::{Chosen, ClusterArg};
use crate::drain::{self, Drained, clear, find, show};
use crate::failure::FAILED;
use crate::listing::{Cell, Format, FormatArgs, Listing, column, wide};
use crate::{output, signals, values};

/// Have a node move its warm chunks to the others, then leave the cluster and end
///
/// Only chunks that no other node has move, and only if they displace nothing of more worth. The chunks that the node would evict
/// last move first. Meanwhile the node serves reads and keeps no new chunks; its partitions of the directory move at once. The
/// node's process ends with status 0, so that systemd does not start it again; `larder restart` lets it come back. The command
/// needs an admin's certificate, and a cluster whose nodes share chunks.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder drain node-3                      In the newest development cluster
  larder drain node-3 --within 5m --bytes-per-second 200MB --coordinator 10.0.0.10:7600 \\
      --ca ca.pem --certificate me.pem --key me.key
  larder drain node-3 --no-wait            Return once the drain has begun
  larder drain node-3 --watch              Watch a drain that is under way
  larder drain node-3 --cancel             The node goes on; chunks that have moved stay where they are
  larder drain node-3 --json               One object with `nodes`: the numbers of chunks that moved and that did not

`larder ca issue admin me` makes an admin's certificate. A development cluster has one of its own.
Exit status: 1 if the node refuses, dies, or does not leave, or if Ctrl-C ends the command: the drain itself goes on.")]
pub(crate) struct Args {
    /// The node to drain
    #[arg(value_name = "NODE")]
    node: String,

    /// Time for the drain; when it is over, the node leaves, even if chunks are left
    #[arg(long, value_name = "TIME", value_parser = values::time, default_value = "2m",
          conflicts_with_all = ["cancel", "watch"])]
    within: Duration,

    /// Limit of the bytes of chunks that move in a second [default: the node's drain_bytes_per_second]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, conflicts_with_all = ["cancel", "watch"])]
    bytes_per_second: Option<u64>,

    /// Return once the drain has begun
    #[arg(long, conflicts_with_all = ["cancel", "watch"])]
    no_wait: bool,

    /// Cancel the drain that is under way: the node goes on
    #[arg(long, conflicts_with = "watch")]
    cancel: bool,

    /// Watch the drain that is under way
    #[arg(long)]
    watch: bool,

    #[command(flatten)]
    cluster: ClusterArg,

    #[command(flatten)]
    admin: AdminArgs,

    #[command(flatten)]
    format: FormatArgs,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) nodes: Vec<Drained>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Chosen { coordinator, admin } = args.cluster.choose()?;
    let (_, status) = ask_coordinator(&coordinator)?;
    let member = find(&status.nodes, &args.node)?;
    let credentials = args.admin.credentials(admin)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let start = DrainCommand::Start(DrainStart {
        within_ms: args.within.as_millis() as u64,
        bytes_per_second: args.bytes_per_second,
        then: AfterDrain::Stop,
    });
    let shows = args.format.format() != Format::Json && std::io::stderr().is_terminal();
    let drained = runtime.block_on(async {
        let first = match (args.cancel, args.watch, args.no_wait) {
            (true, ..) => {
                let report = drain::command(&credentials, member, DrainCommand::Cancel).await?;
                return Ok(Drained::of_report(&member.name, "cancelled", &report));
            }
            (_, _, true) => {
                let report = drain::command(&credentials, member, start).await?;
                return Ok(Drained::of_report(&member.name, "draining", &report));
            }
            (_, true, _) => DrainCommand::Report,
            _ => start,
        };
        let shown = |report: &_| show(shows, &member.name, report);
        tokio::select! {
            drained = drain::drain(&credentials, &coordinator, member, first, shown) => drained,
            () = signals::stop()? => Err(goes_on(&member.name)),
        }
    });
    if shows {
        clear();
    }
    let drained = drained?;
    let is_well = drained.is_well() || args.cancel;
    Report { nodes: vec![drained] }.print(args.format)?;
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The error of a command that somebody stopped.
pub(super) fn goes_on(name: &str) -> anyhow::Error {
    anyhow!(
        "stopped, but a drain that has begun goes on: `larder drain {name} --watch` watches it, and `larder drain {name} --cancel` \
         cancels it"
    )
}

impl Report {
    /// Prints the report in the chosen format, and the reasons of failures to standard error.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(crate) fn print(&self, format: FormatArgs) -> anyhow::Result<()> {
        format.print(self, |format| self.list().text(format))?;
        for Drained { node, reason, .. } in &self.nodes {
            if let Some(reason) = reason {
                output::note(format_args!("{node}: {reason}"));
            }
        }
        Ok(())
    }

    fn list(&self) -> Listing {
        let mut list = Listing::new(&[
            column("node"),
            column("outcome"),
            column("chunks"),
            column("moved"),
            column("bytes"),
            column("elsewhere"),
            column("kept below"),
            column("left"),
            column("took"),
            column("back after"),
            wide("reason"),
        ]);
        for node in &self.nodes {
            list.add([
                node.node.as_str().into(),
                node.outcome.into(),
                Cell::Count(node.found_chunks),
                Cell::Count(node.moved_chunks),
                Cell::Bytes(node.moved_bytes),
                Cell::Count(node.elsewhere_chunks),
                Cell::Count(node.kept_below_chunks),
                Cell::Count(node.left_chunks),
                Cell::Seconds(node.seconds),
                node.back_after_seconds.map_or(Cell::Unknown, Cell::Seconds),
                node.reason.clone().unwrap_or_default().into(),
            ]);
        }
        list
    }
}
