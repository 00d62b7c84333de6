//! `larder forget`: has the coordinators forget a lost node.

use std::process::ExitCode;

use anyhow::bail;
use larder_coordinator::Status;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use serde::Serialize;

use crate::address::HostPort;
use crate::admin::{AdminArgs, ask_at, ask_coordinators, peer_of_coordinator};
use crate::cluster::ask_coordinator;
use crate::context::{Chosen, ClusterArg};
use crate::failure::{FAILED, Usage};
use crate::listing::{Cell, FormatArgs, Listing, column};

/// Have the coordinators forget a lost node that will never come back
///
/// A node that was removed after long silence is lost until it comes back, or for a day (`remember_lost_ms`). Until then the
/// cluster is degraded, and purges and reloads name the node. A member cannot be forgotten. A node that stops properly, or that
/// `larder drain` makes leave, is not lost; only a coordinator that was away meanwhile may count it as lost. A forgotten node that
/// comes back is a member like any other. The node's disk keeps its chunks, and no purge reaches them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder forget node-3               In the newest development cluster
  larder forget node-3 --coordinator 10.0.0.10:7600,10.0.0.11:7600 \\
      --ca ca.pem --certificate me.pem --key me.key
  larder forget node-3 --json        One object with `node` and `coordinators`: `name`, `was_lost`, or `error`

Name every coordinator by --coordinator: each remembers the lost nodes.
`larder ca issue admin me` makes an admin's certificate. A development cluster has one of its own.
Exit status: 1 if a coordinator refuses or does not answer; 2 if there is no lost node of that name.")]
pub(crate) struct Args {
    /// The lost node
    #[arg(value_name = "NODE")]
    node: String,

    #[command(flatten)]
    cluster: ClusterArg,

    #[command(flatten)]
    admin: AdminArgs,

    #[command(flatten)]
    format: FormatArgs,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    node: String,
    coordinators: Vec<CoordinatorReport>,
}

#[derive(Debug, Serialize)]
struct CoordinatorReport {
    name: String,
    /// Whether it remembered the node as lost until now.
    was_lost: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Chosen { coordinator, admin } = args.cluster.choose()?;
    let (_, status) = ask_coordinator(&coordinator)?;
    check_no_member(&args.node, &status)?;
    let credentials = args.admin.credentials(admin)?;
    let named: Vec<HostPort> = coordinator.each().cloned().collect();
    let ask = async |address| {
        let peer = peer_of_coordinator(address).await?;
        match ask_at(&credentials, peer, &FollowerMessage::Forget(args.node.clone())).await? {
            CoordinatorMessage::Forgot(was_lost) => Ok(was_lost),
            CoordinatorMessage::Refused(refused) => bail!("the coordinator refuses: {refused}"),
            _ => bail!("the coordinator sent an unexpected answer"),
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answers = runtime.block_on(ask_coordinators(&named, ask));
    let coordinators = answers.into_iter().map(|(name, answer)| CoordinatorReport {
        name,
        error: answer.as_ref().err().map(|error| format!("{error:#}")),
        was_lost: answer.unwrap_or(false),
    });
    let report = Report { node: args.node.clone(), coordinators: coordinators.collect() };
    // One coordinator may still know the node as lost when the leader has forgotten it.
    if report.coordinators.iter().all(|one| one.error.is_none() && !one.was_lost) {
        return Err(not_lost(&args.node, &status));
    }
    args.format.print(&report, |format| report.list().text(format))?;
    let failed = report.coordinators.iter().any(|coordinator| coordinator.error.is_some());
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// Checks that the node is no member.
fn check_no_member(node: &str, status: &Status) -> anyhow::Result<()> {
    if status.nodes.iter().any(|member| member.name == node) {
        let advice = "`larder drain` makes it leave, and a node that left seldom needs forgetting";
        return Err(Usage(format!("`{node}` is a member, so it cannot be forgotten: {advice}")).into());
    }
    Ok(())
}

/// The error for a node that no coordinator has lost.
fn not_lost(node: &str, status: &Status) -> anyhow::Error {
    let lost: Vec<&str> = status.lost.iter().map(|lost| &*lost.name).filter(|&lost| lost != node).collect();
    let known = match &lost[..] {
        [] => "no node is lost".to_owned(),
        [only] => format!("did you mean `{only}`?"),
        lost => format!("the lost nodes are: {}", lost.join(", ")),
    };
    Usage(format!("there is no lost node `{node}`; {known}")).into()
}

impl Report {
    fn list(&self) -> Listing {
        let mut list = Listing::new(&["coordinator", "node", "result"].map(column));
        for CoordinatorReport { name, was_lost, error } in &self.coordinators {
            let result = match (error, was_lost) {
                (Some(error), _) => format!("failed: {error}"),
                (None, true) => "forgotten".to_owned(),
                (None, false) => "was not lost".to_owned(),
            };
            list.add([name.as_str().into(), self.node.as_str().into(), Cell::from(result)]);
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_lost_node_can_be_forgotten_and_a_wrong_name_names_the_lost_nodes() {
        let lost = |names: &[&str]| {
            let lost = |name: &&str| {
                json!({"name": name, "http": "127.0.0.1:1", "number": 1, "incarnation": 1,
                    "silent_seconds": 1.0})
            };
            let lost: Vec<_> = names.iter().map(lost).collect();
            let member = json!({"name": "node-0", "http": "127.0.0.1:1", "peer": "127.0.0.1:1"});
            let status = json!({"version": "1", "uptime_seconds": 1.0, "nodes": [member], "lost": lost});
            serde_json::from_value::<Status>(status).unwrap()
        };
        assert!(check_no_member("node-1", &lost(&["node-1"])).is_ok());
        let refused = check_no_member("node-0", &lost(&["node-1"])).unwrap_err();
        assert!(refused.to_string().contains("is a member"));
        let refusal = |node: &str, names: &[&str]| not_lost(node, &lost(names)).to_string();
        assert!(refusal("node1", &["node-1"]).contains("did you mean `node-1`?"));
        assert!(refusal("node-3", &["node-1", "node-2"]).contains("the lost nodes are: node-1, node-2"));
        assert!(refusal("node-3", &[]).contains("no node is lost"));
    }
}
