//! `larder unpin`: ends a pin before its time.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;

use crate::failure::Usage;
use crate::{output, visit};

/// End a pin before its time
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder unpin 17                                              In a development cluster of one node
  larder unpin 17 --socket /run/larder/default.sock --device 1

Exit status: 1 if the device has no such pin of this tenant, for instance after its deadline.")]
pub(crate) struct Args {
    /// The pin's number, as `larder pin` printed it
    pin: u64,

    /// The node's session socket [default: the socket of the newest development cluster if it has one node, or else
    /// /run/larder/default.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// The device of the pin
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u16,

    /// Print JSON: one object with `node`, `device` and `unpinned`
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let sockets = visit::sockets(args.socket.as_ref())?;
    let [socket] = &sockets[..] else {
        let text = "a pin belongs to one node: name its socket by --socket, as `larder pin --json` prints it";
        return Err(Usage(text.into()).into());
    };
    let (session, pin) = (visit::device_of(socket, args.device)?, args.pin);
    session.unpin(pin).wait().with_context(|| format!("node {}, device {}", session.node(), args.device))?;
    if args.json {
        let unpinned = json!({"node": session.node(), "device": args.device, "unpinned": pin});
        output::print_json(&unpinned)?;
    } else {
        output::print(&format!("{} no longer pins the chunks of pin {pin}.", session.node()))?;
    }
    Ok(ExitCode::SUCCESS)
}
