//! `larder pin`: keeps a prompt from eviction for a time.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use larder_client::Session;
use larder_protocol::NamespaceSpec;
use serde::Serialize;

use crate::failure::FAILED;
use crate::listing::{Cell, FormatArgs, Listing, column};
use crate::prompt::{Prompt, PromptArgs};
use crate::{values, visit};

/// Keep a prompt from eviction for a time
///
/// Each device that has a prefix of the prompt in memory pins the prefix and prints the pin's number. The pin stays after
/// this command ends, and belongs to the tenant; `larder unpin NUMBER` ends it early. The node bounds how long a pin lasts
/// (session.max_pin_ms) and how many bytes are pinned (session.max_pinned_fraction).
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder pin 0 1 2 --for 5m               A prompt of a trace, on every node of the newest development cluster
  larder pin --namespace qwen.json --tokens system-prompt.json --for 10m --socket /run/larder/default.sock
  larder pin 0 1 --json                   An array with one object for each device

Exit status: 1 if nothing is pinned, since no memory has a prefix of the prompt, or if a device fails: then the
command prints the pins made before, and ends. `larder lookup --help` explains namespace files.")]
pub(crate) struct Args {
    #[command(flatten)]
    prompt: PromptArgs,

    /// Time until the pin ends: 500ms, 90s, 10m, 1h 30m; the node may grant less
    #[arg(long = "for", value_name = "TIME", value_parser = values::time, default_value = "10m")]
    duration: Duration,

    /// The node's session socket [default: the sockets of all nodes of the newest development cluster, or
    /// /run/larder/default.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(flatten)]
    format: FormatArgs,
}

/// The part of the prompt that one device pinned.
#[derive(Serialize)]
struct Pinned {
    node: String,
    device: u16,
    socket: String,
    /// `None` if nothing of the prompt is in its memory.
    pin: Option<u64>,
    chunks: u32,
    tokens: u64,
    seconds: f64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (spec, prompt) = args.prompt.read()?;
    let sockets = visit::sockets(args.socket.as_ref())?;
    let devices = sockets.iter().flat_map(|socket| match visit::every_device(socket) {
        Ok(sessions) => sessions.into_iter().map(|session| Ok((socket, session))).collect(),
        Err(error) => vec![Err(error)],
    });
    let (pinned, all) = until_one_fails(devices.map(|device| {
        let (socket, session) = device?;
        let answer = pin(&session, socket, &spec, &prompt, args.duration);
        answer.with_context(|| format!("node {}", session.node()))
    }));
    // Without its number, nobody could end a pin.
    if all.is_ok() || !pinned.is_empty() {
        args.format.print(&pinned, |format| list(&pinned).text(format))?;
    }
    all?;
    let any = pinned.iter().any(|pinned| pinned.pin.is_some());
    Ok(if any { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The results up to the first error, and this error.
fn until_one_fails<T>(results: impl Iterator<Item = anyhow::Result<T>>) -> (Vec<T>, anyhow::Result<()>) {
    let mut good = Vec::new();
    for result in results {
        match result {
            Ok(one) => good.push(one),
            Err(error) => return (good, Err(error)),
        }
    }
    (good, Ok(()))
}

fn pin(
    session: &Session,
    socket: &Path,
    spec: &NamespaceSpec,
    prompt: &Prompt,
    duration: Duration,
) -> anyhow::Result<Pinned> {
    let namespace = visit::register(session, spec)?;
    let pinned = session.pin(&namespace, &prompt.chain(&namespace), duration).wait()?;
    Ok(Pinned {
        node: session.node().to_owned(),
        device: session.device(),
        socket: socket.display().to_string(),
        pin: Some(pinned.pin).filter(|&pin| pin != 0),
        chunks: pinned.chunks,
        tokens: u64::from(pinned.chunks) * u64::from(spec.chunk_tokens),
        seconds: if pinned.pin == 0 { 0.0 } else { pinned.duration_ms as f64 / 1_000.0 },
    })
}

fn list(pinned: &[Pinned]) -> Listing {
    let mut list = Listing::new(&["node", "device", "pin", "chunks", "tokens", "for"].map(column));
    for Pinned { node, device, pin, chunks, tokens, seconds, .. } in pinned {
        let (pin, seconds) = match pin {
            Some(pin) => (pin.to_string(), Cell::Seconds(*seconds)),
            None => ("nothing to pin".into(), Cell::Unknown),
        };
        let numbers = [Cell::Count((*chunks).into()), Cell::Count(*tokens), seconds];
        let first = [node.as_str().into(), Cell::Count((*device).into()), pin.into()];
        list.add(first.into_iter().chain(numbers));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_that_were_made_before_a_device_failed_are_known() {
        let (pinned, all) = until_one_fails([Ok(1), Err(anyhow::anyhow!("it is gone")), Ok(3)].into_iter());
        assert_eq!(pinned, [1]);
        assert_eq!(all.unwrap_err().to_string(), "it is gone");
    }
}
