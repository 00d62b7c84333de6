//! `larder reload`: has nodes read their configuration again.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use futures_util::{StreamExt as _, stream};
use larder_coordinator::NodeStatus;
use larder_net::quic::Credentials;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::reload::Reloaded;
use serde::Serialize;

use crate::address::HostPort;
use crate::admin::{AdminArgs, AdminLink, ask_at, ask_coordinators, peer_of_coordinator};
use crate::cluster::{ask_coordinator, chosen_members, lost_nodes, require_nodes};
use crate::context::{Chosen, ClusterArg};
use crate::failure::FAILED;
use crate::listing::{Cell, FormatArgs, Listing, column};
use crate::together::ASKED_AT_ONCE;

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
        let ask_one = async |address| ask_coordinator_to_reload(&credentials, address).await;
        let answers = ask_coordinators(&named, ask_one).await.into_iter();
        let coordinators = answers.map(|(name, answer)| NodeReport::new(&name, answer)).collect();
        let asked =
            members.iter().map(async |member| NodeReport::new(&member.name, ask(&credentials, member).await));
        let mut nodes: Vec<_> = stream::iter(asked).buffered(ASKED_AT_ONCE).collect().await;
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

async fn ask_coordinator_to_reload(
    credentials: &Credentials,
    address: SocketAddr,
) -> anyhow::Result<Reloaded> {
    let peer = peer_of_coordinator(address).await?;
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
