//! `larder reload`: has nodes read their configuration again.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{anyhow, bail, ensure};
use larder_coordinator::{NodeStatus, Status};
use larder_net::quic::Credentials;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::reload::Reloaded;
use serde::Serialize;

use crate::address::HostPort;
use crate::admin::{AdminArgs, AdminLink, ask_at};
use crate::cluster::{ask_coordinator, chosen_members, lost_nodes, require_nodes};
use crate::context::{Chosen, ClusterArg};
use crate::failure::FAILED;
use crate::listing::{Cell, FormatArgs, Listing, column};

/// Have nodes and coordinators read their configuration files again
///
/// Some settings change at once. At a node these are `log`, the eviction policy, capacity and watermarks, the tenants, the limits
/// of sessions and pins, and how fast the node sends and drains. At a coordinator they are the times of `[membership]`, except
/// `heartbeat_ms`. All other changed settings take effect at the next start; the command lists them. A file with a fault changes
/// nothing. A server also reads its file again when the file changes, and at SIGHUP. Certificates are read again when their files
/// change.
///
/// A tenant that leaves the file leaves the node: its sessions end with a reason, its pins and its chunks in memory and on disk
/// go. If the tenant comes again, it begins anew.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder reload                      All servers of the newest development cluster
  larder reload --member node-3 --coordinator 10.0.0.10:7600 \\
      --ca ca.pem --certificate me.pem --key me.key
  larder reload --json               One object with `coordinators` and `nodes`: `name`, `applied`, `at_restart`, or `error`

`larder ca issue admin me` makes an admin's certificate. A development cluster has one of its own.
Exit status: 1 if a node refuses, does not answer or is lost, or if the coordinator knows no nodes.")]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArg,

    /// Ask only this member, and no coordinator; may be given several times
    #[arg(long = "member", value_name = "NAME")]
    members: Vec<String>,

    #[command(flatten)]
    admin: AdminArgs,

    #[command(flatten)]
    format: FormatArgs,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    /// Empty if only members were asked.
    coordinators: Vec<NodeReport>,
    nodes: Vec<NodeReport>,
}

#[derive(Debug, Serialize)]
struct NodeReport {
    name: String,
    applied: Vec<Setting>,
    /// Keys of the settings that take effect at the next start.
    at_restart: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Setting {
    key: String,
    before: String,
    after: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Chosen { coordinator, admin } = args.cluster.choose()?;
    let (_, status) = ask_coordinator(&coordinator)?;
    let knows_nodes = require_nodes(&status);
    let members = chosen_members(status.nodes, &args.members)?;
    let credentials = args.admin.credentials(admin)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let named: Vec<HostPort> =
        if args.members.is_empty() { coordinator.each().cloned().collect() } else { Vec::new() };
    let report = runtime.block_on(async {
        let (mut coordinators, mut nodes) = (Vec::new(), Vec::new());
        for address in &named {
            match tokio::net::lookup_host(address.to_string()).await {
                Ok(found) => {
                    coordinators.extend(reload_coordinators(&credentials, address, found.collect()).await)
                }
                Err(error) => coordinators.push(NodeReport::new(&address.to_string(), Err(error.into()))),
            }
        }
        for member in &members {
            nodes.push(NodeReport::new(&member.name, ask(&credentials, member).await));
        }
        let advice = ": if its process runs, it reads its file again when the file changes";
        let lost = lost_nodes(status.lost, &args.members, advice).into_iter();
        nodes.extend(lost.map(|(name, error)| NodeReport::new(&name, Err(anyhow!(error)))));
        Report { coordinators, nodes }
    });
    args.format.print(&report, |format| report.list().text(format))?;
    // The coordinators have their new configuration all the same.
    knows_nodes?;
    let failed = report.all().any(|server| server.error.is_some());
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// Has the coordinators at all addresses of a name reload: a name may stand for all coordinators of a cluster.
async fn reload_coordinators(
    credentials: &Credentials,
    name: &HostPort,
    mut addresses: Vec<SocketAddr>,
) -> Vec<NodeReport> {
    addresses.sort_unstable();
    addresses.dedup();
    let mut answers = Vec::new();
    for &address in &addresses {
        answers.push((address, ask_coordinator_to_reload(credentials, address).await));
    }
    // A coordinator may listen at its IPv4 addresses alone, though its name has others.
    let v4_answers = answers.iter().any(|(address, answer)| address.is_ipv4() && answer.is_ok());
    answers.retain(|(address, answer)| address.is_ipv4() || answer.is_ok() || !v4_answers);
    if let [(_, answer)] = &mut answers[..] {
        let answer = std::mem::replace(answer, Ok(Reloaded::default()));
        return vec![NodeReport::new(&name.to_string(), answer)];
    }
    let named = |address: SocketAddr| format!("{name} at {address}");
    answers.into_iter().map(|(address, answer)| NodeReport::new(&named(address), answer)).collect()
}

async fn ask_coordinator_to_reload(
    credentials: &Credentials,
    address: SocketAddr,
) -> anyhow::Result<Reloaded> {
    let status =
        tokio::task::spawn_blocking(move || crate::http::get_json::<Status>(&address, "/status")).await??;
    ensure!(
        status.peer_port > 0,
        "{address} has an older version, which cannot reload: upgrade the coordinator"
    );
    let peer = SocketAddr::new(address.ip(), status.peer_port);
    match ask_at(credentials, peer, &FollowerMessage::Reload).await? {
        CoordinatorMessage::Reloaded(reloaded) => Ok(*reloaded),
        CoordinatorMessage::Refused(refused) => bail!("the coordinator refuses: {refused}"),
        _ => bail!("the coordinator sent an unexpected answer"),
    }
}

async fn ask(credentials: &Credentials, member: &NodeStatus) -> anyhow::Result<Reloaded> {
    let link = AdminLink::connect(credentials, member).await?;
    let answer = link.ask(&PeerRequest::Reload).await;
    link.close().await;
    match answer? {
        PeerResponse::Reloaded(reloaded) => Ok(*reloaded),
        _ => bail!("the node sent an unexpected answer"),
    }
}

impl NodeReport {
    fn new(name: &str, answer: anyhow::Result<Reloaded>) -> Self {
        let error = answer.as_ref().err().map(|error| format!("{error:#}"));
        let Reloaded { applied, at_restart } = answer.unwrap_or_default();
        let setting = |setting: larder_protocol::reload::ChangedSetting| Setting {
            key: setting.key,
            before: setting.before,
            after: setting.after,
        };
        Self { name: name.to_owned(), applied: applied.into_iter().map(setting).collect(), at_restart, error }
    }
}

impl Report {
    fn all(&self) -> impl Iterator<Item = &NodeReport> {
        self.coordinators.iter().chain(&self.nodes)
    }

    fn list(&self) -> Listing {
        let mut list = Listing::new(&["server", "setting", "before", "now"].map(column));
        for NodeReport { name, applied, at_restart, error } in self.all() {
            let is_same = applied.is_empty() && at_restart.is_empty() && error.is_none();
            if is_same {
                list.add([name.as_str().into(), "nothing has changed".into(), Cell::Unknown, Cell::Unknown]);
            }
            for Setting { key, before, after } in applied {
                list.add([name, key, before, after].map(|text| text.as_str().into()));
            }
            for key in at_restart {
                list.add([
                    name.as_str().into(),
                    key.as_str().into(),
                    Cell::Unknown,
                    "takes effect at the next start".into(),
                ]);
            }
            if let Some(error) = error {
                list.add([
                    name.as_str().into(),
                    Cell::Unknown,
                    Cell::Unknown,
                    format!("failed: {error}").into(),
                ]);
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use larder_net::quic::ca::{Authority, Validity};
    use larder_protocol::identity::{Identity, Role};
    use serde_json::json;

    use super::*;
    use crate::cluster::tests::server;

    #[test]
    fn every_address_of_a_name_is_asked() {
        let (authority, _) = Authority::create(Validity::days(1)).unwrap();
        let issued = authority.issue(&Identity::new(Role::Admin, "me"), Validity::days(1)).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let credentials =
            Credentials::from_pem(authority.certificate_pem().as_bytes(), certificate, key).unwrap();
        // Coordinators that are too old to reload.
        let coordinator = || {
            server(
                json!({"role": "coordinator", "version": "1", "uptime_seconds": 1.0, "epoch": "1.1", "follows": false,
                "nodes": [], "lost": []}),
            )
        };
        let addresses = vec![coordinator(), coordinator(), (Ipv6Addr::LOCALHOST, 1).into()];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let name = HostPort::of_coordinator("larder-coordinator").unwrap();
        let reports = runtime.block_on(reload_coordinators(&credentials, &name, addresses.clone()));
        for address in addresses {
            let is_it = |report: &&NodeReport| report.name == format!("larder-coordinator:7600 at {address}");
            let report = reports.iter().find(is_it).expect("each is asked");
            assert_eq!(report.error.as_ref().unwrap().contains("older version"), address.is_ipv4());
        }
    }
}
