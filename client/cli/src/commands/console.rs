//! `larder console`: the address of a cluster's console.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::process::{Command, ExitCode, Stdio};

use serde::Serialize;

use crate::address::HostPort;
use crate::cluster::{ask_coordinator, first_answer};
use crate::context::ClusterArg;
use crate::output;

/// Print the address of a cluster's console, or open it
///
/// The coordinator serves the console: a page that shows the nodes, why prompts were misses, which nodes hold a prompt, tenants,
/// sessions and pins. Without a token, everybody on the coordinator's own host may read it. From elsewhere make a tunnel:
/// after `ssh -L 7600:127.0.0.1:7600 COORDINATOR` the console is at http://127.0.0.1:7600/. Or use a token: `console_token_file`
/// in [http] of the coordinator's configuration names the token's file; open `ADDRESS/#token=TOKEN` once in each tab. With the
/// token of `console_admin_token_file` the console also changes policies, drains nodes, pins and purges.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder console                                   The address for the newest development cluster
  larder console --open                            Open the console in this desktop's browser
  larder console --coordinator 10.0.0.10:7600

Exit status: 1 if no coordinator answers, or no browser can be started.")]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArg,

    /// Open the console in a browser, by `xdg-open`
    #[arg(long)]
    open: bool,

    /// Print one JSON object with `url`
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Address {
    url: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let coordinator = args.cluster.choose()?.coordinator;
    // Leader and followers serve the console, so the first coordinator that answers is enough.
    let one = first_answer(coordinator.each(), |one| ask_coordinator(one).map(|_| one.clone()))?;
    let near = by_loopback(&one);
    if near.is_none() {
        output::note(format_args!(
            "From this host the console needs a token, or a tunnel: see `larder console --help`."
        ));
    }
    show(args, format!("http://{}/", near.unwrap_or(one)))
}

/// The loopback address of a coordinator on this host: there the console needs no token if none is configured.
fn by_loopback(coordinator: &HostPort) -> Option<HostPort> {
    let address = coordinator.to_string().to_socket_addrs().ok()?.next()?;
    if address.ip().is_loopback() {
        return Some(coordinator.clone());
    }
    // Only an address of this host can be bound.
    UdpSocket::bind((address.ip(), 0)).ok()?;
    let loopback = match address.ip() {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    };
    let near = HostPort::from(SocketAddr::new(loopback, address.port()));
    ask_coordinator(&near).is_ok().then_some(near)
}

fn show(args: &Args, url: String) -> anyhow::Result<ExitCode> {
    if args.open {
        let mut browser = Command::new("xdg-open");
        browser.arg(&url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let opened = browser.status();
        anyhow::ensure!(
            opened.is_ok_and(|status| status.success()),
            "no browser was started by xdg-open: open {url} yourself"
        );
    }
    if args.json {
        output::print_json(&Address { url })?;
    } else {
        output::print(&url)?;
    }
    Ok(ExitCode::SUCCESS)
}
