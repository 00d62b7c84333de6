//! `larder lookup`: how much of a prompt a node holds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;

use crate::replay::DEFAULT_BLOCK_BYTES;
use crate::{args, dev};

/// Ask a node how much of a prompt it holds
///
/// The prompt is one of a trace, in the namespace of `larder replay`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder lookup 0 1 2 3                   Ask the newest development cluster for a prompt of four full blocks
  larder lookup 0 1 --tokens 1024         The same prompt without a token behind its blocks: the last one must be computed
  larder lookup --socket node-0.sock 0 1  Ask one node")]
pub(crate) struct Args {
    /// Ids of the prompt's full blocks, as the trace has them, first to last
    #[arg(required = true, value_name = "BLOCK_ID")]
    block_ids: Vec<u64>,

    /// Tokens of the prompt [default: one more than its full blocks have]
    #[arg(long, value_name = "N")]
    tokens: Option<u64>,

    /// Bytes of one chunk's block in the replay that saved it
    #[arg(long, value_name = "BYTES", value_parser = args::bytes, default_value_t = DEFAULT_BLOCK_BYTES)]
    block_bytes: u64,

    /// The node's session socket [default: that of every node of the newest development cluster]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Print JSON: one array with what each node holds
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let sockets = match &args.socket {
        Some(socket) => vec![socket.clone()],
        None => dev::newest()?.nodes.into_iter().flat_map(|node| node.sockets.into_values()).collect(),
    };
    bail!("this build has no engine session yet; not asked: {sockets:?}, {args:?}")
}
