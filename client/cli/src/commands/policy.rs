//! `larder policy`: the nodes' eviction policies.

use std::process::ExitCode;

use anyhow::bail;
use futures_util::{StreamExt as _, stream};
use larder_coordinator::NodeStatus;
use larder_core::store::policy::PolicyName;
use larder_net::quic::Credentials;
use larder_node::Status;
use larder_protocol::peer::{PeerRequest, PeerResponse};
use serde::Serialize;

use crate::admin::{AdminArgs, AdminLink};
use crate::cluster::{ask_coordinator, ask_member, chosen_members, lost_nodes, require_nodes};
use crate::context::{Chosen, ClusterArg};
use crate::failure::FAILED;
use crate::listing::{Cell, FormatArgs, Listing, column};
use crate::survey::silent_actors;
use crate::together::{ASKED_AT_ONCE, together};
use crate::values;

/// Show the eviction policies of nodes, or set one while they run
///
/// A change goes over QUIC and needs an admin's certificate, since a node's HTTP server has no authentication and changes
/// nothing. The command needs a cluster whose nodes share chunks. The policy lasts until the node's process ends:
/// `host.policy` in its configuration is the policy at each start.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder policy                      The policies in the newest development cluster
  larder policy sieve                Set `sieve` on all nodes of this cluster
  larder policy lru --member node-0 --coordinator 10.0.0.10:7600 \\
      --ca ca.pem --certificate me.pem --key me.key
  larder policy --json               One object with `nodes`: `name`, `policies` by device, and `error` if there is one

`larder ca issue admin me` makes an admin's certificate. A development cluster has one of its own.
Exit status: 1 if a node refuses, a node or one of its actors does not answer, a node is lost, or if the coordinator knows no nodes.")]
pub(crate) struct Args {
    /// The policy to set
    #[arg(value_name = "POLICY", value_parser = values::policy())]
    policy: Option<PolicyName>,

    #[command(flatten)]
    cluster: ClusterArg,

    /// Ask only this member; may be given several times
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
    nodes: Vec<NodeReport>,
}

#[derive(Debug, Serialize)]
struct NodeReport {
    name: String,
    /// The policy of each device; `None` if its actor does not answer.
    policies: Vec<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Chosen { coordinator, admin } = args.cluster.choose()?;
    let (_, status) = ask_coordinator(&coordinator)?;
    require_nodes(&status)?;
    let members = chosen_members(status.nodes, &args.members)?;
    let mut errors: Vec<Option<String>> = vec![None; members.len()];
    if let Some(policy) = args.policy {
        errors = set(&args.admin.credentials(admin)?, policy, &members)?;
    }
    let mut nodes = NodeReport::of_all(&members, errors);
    let advice = if args.policy.is_some() { ": set the policy again when it is back" } else { "" };
    let lost = lost_nodes(status.lost, &args.members, advice);
    nodes.extend(lost.into_iter().map(|(name, error)| NodeReport {
        name,
        policies: Vec::new(),
        error: Some(error),
    }));
    let report = Report { nodes };
    args.format.print(&report, |format| report.list().text(format))?;
    let failed = report.nodes.iter().any(|node| node.error.is_some());
    Ok(if failed { ExitCode::from(FAILED) } else { ExitCode::SUCCESS })
}

/// Asks all nodes at once; returns the error of each.
fn set(
    credentials: &Credentials,
    policy: PolicyName,
    members: &[NodeStatus],
) -> anyhow::Result<Vec<Option<String>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let asked = members.iter().map(async |member| {
        let asked = ask(credentials, policy, member).await;
        asked.err().map(|error| format!("{error:#}"))
    });
    Ok(runtime.block_on(stream::iter(asked).buffered(ASKED_AT_ONCE).collect()))
}

async fn ask(credentials: &Credentials, policy: PolicyName, member: &NodeStatus) -> anyhow::Result<()> {
    let link = AdminLink::connect(credentials, member).await?;
    let answer = link.ask(&PeerRequest::SetPolicy(policy.to_string())).await;
    link.close().await;
    match answer? {
        PeerResponse::Done => Ok(()),
        _ => bail!("the node sent an unexpected answer"),
    }
}

impl NodeReport {
    /// Asks all members at once, except those that have failed before.
    fn of_all(members: &[NodeStatus], errors: Vec<Option<String>>) -> Vec<Self> {
        let asked: Vec<_> = members.iter().zip(errors).collect();
        together(&asked, |(member, error)| Self::of(member, error.clone()))
    }

    fn of(member: &NodeStatus, error: Option<String>) -> Self {
        let ask = || ask_member(member).map_err(|silent| format!("{silent:#}"));
        match error.map_or_else(ask, Err) {
            Ok((_, status)) => Self::told(&member.name, &status),
            Err(error) => Self { name: member.name.clone(), policies: Vec::new(), error: Some(error) },
        }
    }

    fn told(name: &str, status: &Status) -> Self {
        let mut policies = Vec::new();
        for actor in &status.actors {
            policies.resize(actor.device.into(), None);
            policies.push(Some(actor.policy.clone()));
        }
        Self { name: name.to_owned(), policies, error: silent_actors(status) }
    }
}

impl Report {
    fn list(&self) -> Listing {
        let mut list = Listing::new(&["node", "device", "policy", "what goes first"].map(column));
        for NodeReport { name, policies, error } in &self.nodes {
            let known =
                policies.iter().enumerate().filter_map(|(device, policy)| Some((device, policy.as_ref()?)));
            for (device, policy) in known {
                let about = policy.parse().map_or("", PolicyName::about);
                let device = Cell::Count(device as u64);
                list.add([name.as_str().into(), device, policy.as_str().into(), about.into()]);
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
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::sync::{Arc, Barrier};
    use std::thread;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_silent_actor_is_named_and_lends_no_other_its_number() {
        let part = |device| {
            json!({"device": device, "cpus": "0", "huge_bytes": 0, "transparent_huge_bytes": 0, "ordinary_bytes": 0,
                "bytes_on_numa_nodes": {}, "misplaced_bytes": 0, "placement_source": "unknown"})
        };
        let status = json!({"name": "node-0", "ready": false, "uptime_seconds": 1.0,
            "actors": [{"device": 1, "policy": "lru"}],
            "hardware": {"devices": [part(0), part(1), part(2)], "mismatches": []}});
        let node = NodeReport::told("node-0", &serde_json::from_value(status).unwrap());
        assert_eq!(node.policies, [None, Some("lru".to_owned())]);
        assert!(
            node.error.as_deref().is_some_and(|error| error.ends_with("device 0, 2")),
            "{:?}",
            node.error
        );
        let listed = Report { nodes: vec![node] }.list().text(crate::listing::Format::Tsv);
        assert!(listed.contains("node-0\t1\tlru"), "{listed}");
    }

    #[test]
    fn nodes_are_asked_at_the_same_time_and_not_after_a_failure() {
        let both = Arc::new(Barrier::new(2));
        let member = |name: &str| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let http = listener.local_addr().unwrap();
            let (both, own) = (Arc::clone(&both), name.to_owned());
            thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                _ = stream.read(&mut [0; 4_096]);
                both.wait();
                let body = json!({"name": own, "incarnation": 1, "ready": true, "uptime_seconds": 1.0,
                    "actors": []})
                .to_string();
                let head =
                    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                stream.write_all((head + &body).as_bytes()).unwrap();
            });
            let words = json!({"name": name, "incarnation": 1, "http": http, "peer": "127.0.0.1:1"});
            serde_json::from_value::<NodeStatus>(words).unwrap()
        };
        let members = ["node-0", "node-1", "node-2"].map(member);
        let reports = NodeReport::of_all(&members, vec![None, Some("refused".to_owned()), None]);
        let told = reports.iter().map(|node| (node.name.as_str(), node.error.as_deref()));
        let expected = [("node-0", None), ("node-1", Some("refused")), ("node-2", None)];
        assert_eq!(told.collect::<Vec<_>>(), expected);
    }
}
