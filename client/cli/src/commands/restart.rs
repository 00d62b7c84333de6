//! `larder restart`: has nodes drain and come back, one after the other.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::ArgGroup;

use crate::admin::AdminArgs;
use crate::cluster::ask_coordinator;
use crate::commands::drain::{Report, goes_on};
use crate::context::{Chosen, ClusterArg};
use crate::drain::{Drained, clear, find};
use crate::failure::{FAILED, Usage};
use crate::listing::{Format, FormatArgs};
use crate::restart::Restart;
use crate::{signals, values};

/// Restart nodes one after the other, without losing their warm chunks
///
/// Each node moves its warm chunks to the others (`larder drain`), except the chunks that its disk keeps, and leaves the cluster.
/// The node's process ends with status 75, and its supervisor starts it again, as systemd (Restart=on-failure), Kubernetes and
/// `larder dev` do. The next node follows when this node is a member again and ready. If a node does not leave or does not come
/// back, the command ends and leaves the following nodes alone.
#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("which").args(["nodes", "rolling"]).required(true), after_help = "\
Examples:
  larder restart --rolling                 Every node of the newest development cluster
  larder restart node-3 node-4 --within 5m --coordinator 10.0.0.10:7600 \\
      --ca ca.pem --certificate me.pem --key me.key
  larder restart --rolling --json          One object with `nodes`: times, and the numbers of chunks that moved and that did not

Exit status: 1 if a node refuses, dies, or does not come back, or if Ctrl-C ends the command: a drain that has begun goes on.")]
pub(crate) struct Args {
    /// The nodes to restart, in this order
    #[arg(value_name = "NODE")]
    nodes: Vec<String>,

    /// Restart every node of the cluster
    #[arg(long)]
    rolling: bool,

    /// Time for each drain; when it is over, the node leaves, even if chunks are left
    #[arg(long, value_name = "TIME", value_parser = values::time, default_value = "2m")]
    within: Duration,

    /// Time for each node to come back
    #[arg(long, value_name = "TIME", value_parser = values::time, default_value = "5m")]
    back_within: Duration,

    /// Limit of the bytes of chunks that move in a second [default: the node's drain_bytes_per_second]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    bytes_per_second: Option<u64>,

    #[command(flatten)]
    cluster: ClusterArg,

    #[command(flatten)]
    admin: AdminArgs,

    #[command(flatten)]
    format: FormatArgs,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Chosen { coordinator, admin } = args.cluster.choose()?;
    let (_, status) = ask_coordinator(&coordinator)?;
    let mut names: Vec<String> = status.nodes.iter().map(|node| node.name.clone()).collect();
    if !args.rolling {
        names = once_each(&args.nodes);
    }
    for name in &names {
        find(&status.nodes, name)?;
    }
    if status.nodes.len() < 2 {
        return Err(Usage(
            "the cluster has one node, so no other node would take its chunks: restart the node's process"
                .into(),
        )
        .into());
    }
    let credentials = args.admin.credentials(admin)?;
    let shows = args.format.format() != Format::Json && std::io::stderr().is_terminal();
    let how = Restart {
        within: args.within,
        back_within: args.back_within,
        bytes_per_second: args.bytes_per_second,
        shows,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let nodes = runtime.block_on(async {
        tokio::select! {
            nodes = how.all(&credentials, &coordinator, &names) => Ok(nodes),
            () = signals::stop()? => Err(goes_on("NODE")),
        }
    });
    if shows {
        clear();
    }
    let nodes = nodes?;
    let is_well = nodes.len() == names.len() && nodes.iter().all(Drained::is_well);
    Report { nodes }.print(args.format)?;
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The names in their order, without repetitions.
fn once_each(names: &[String]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.iter().filter(|&name| seen.insert(name)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_named_twice_is_restarted_once() {
        assert_eq!(once_each(&["b", "a", "b"].map(str::to_owned)), ["b", "a"]);
    }
}
