//! `larder status`: what nodes and coordinator say of themselves.

use std::net::SocketAddr;
use std::process::ExitCode;

use larder_coordinator::Status as CoordinatorStatus;
use larder_node::metrics::TenantRates;
use larder_node::{ActorStatus, ObjectStatus, Status as NodeStatus};
use serde::{Deserialize, Serialize};

use crate::cluster::Addresses;
use crate::{dev, http, output};

/// Show the state of nodes and coordinator
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder status                                The newest development cluster
  larder status --coordinator 127.0.0.1:7600   The nodes that this coordinator knows
  larder status --node 127.0.0.1:7601 --json   One node, as JSON")]
pub(crate) struct Args {
    /// Ask this coordinator and its nodes
    #[arg(long, value_name = "ADDR")]
    coordinator: Option<SocketAddr>,

    /// Ask this node; may be given several times
    #[arg(long = "node", value_name = "ADDR", conflicts_with = "coordinator")]
    nodes: Vec<SocketAddr>,

    /// Print JSON: one object with `coordinator` and `nodes`
    #[arg(long)]
    json: bool,
}

/// What `--json` prints: each server's own words. A node that does not answer has `name`, `http` and `error` instead.
#[derive(Debug, Serialize)]
struct ClusterStatus {
    coordinator: Option<serde_json::Value>,
    nodes: Vec<serde_json::Value>,
}

/// A node that does not answer.
#[derive(Debug, Serialize, Deserialize)]
struct SilentNode {
    name: String,
    http: SocketAddr,
    error: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let status = ask(args)?;
    if args.json {
        output::print_json(&status)?;
    } else {
        output::print(&tables(&status)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ask(args: &Args) -> anyhow::Result<ClusterStatus> {
    let dev = if args.coordinator.is_none() && args.nodes.is_empty() { Some(dev::newest()?) } else { None };
    let coordinator = args.coordinator.or_else(|| dev.as_ref()?.coordinator);
    let coordinator: Option<serde_json::Value> =
        coordinator.map(|address| http::get_json(address, "/status")).transpose()?;
    let nodes: Vec<(String, SocketAddr)> = match (&coordinator, dev) {
        (Some(known), _) => {
            let known = CoordinatorStatus::deserialize(known)?;
            known.nodes.into_iter().map(|node| (node.name, node.http)).collect()
        }
        (None, Some(Addresses { nodes, .. })) => {
            nodes.into_iter().map(|node| (node.name, node.http)).collect()
        }
        (None, None) => args.nodes.iter().map(|&address| (address.to_string(), address)).collect(),
    };
    let get = |(name, http): (String, SocketAddr)| match http::get_json(http, "/status") {
        Ok(status) => Ok(status),
        Err(error) if args.nodes.is_empty() => {
            Ok(serde_json::to_value(SilentNode { name, http, error: format!("{error:#}") })?)
        }
        Err(error) => Err(error),
    };
    Ok(ClusterStatus { coordinator, nodes: nodes.into_iter().map(get).collect::<anyhow::Result<_>>()? })
}

fn tables(status: &ClusterStatus) -> anyhow::Result<String> {
    let (mut text, mut troubles) = (String::new(), String::new());
    if let Some(coordinator) = &status.coordinator {
        text += &members(CoordinatorStatus::deserialize(coordinator)?);
    }
    let mut table = output::table(&[
        "node",
        "up",
        "device",
        "policy",
        "chunks",
        "on disk",
        "used",
        "quarantined",
        "sessions",
        "leases",
        "token hit rate",
    ]);
    let mut tenants = output::table(&[
        "node",
        "device",
        "tenant",
        "window",
        "tokens asked",
        "token hit rate",
        "with an infinite cache",
    ]);
    for node in &status.nodes {
        if let Ok(SilentNode { name, error, .. }) = SilentNode::deserialize(node) {
            table.add_row([name, format!("does not answer: {error}")]);
            continue;
        }
        let NodeStatus { name, ready, uptime_seconds, actors, object, .. } = NodeStatus::deserialize(node)?;
        if let Some(ObjectStatus { url, trouble: Some(trouble), .. }) = object {
            troubles += &format!("\n{name} does without {url}: {trouble}");
        }
        let up = if ready { duration(uptime_seconds) } else { "not ready".into() };
        for actor in actors {
            let cells = [name.clone(), up.clone()].into_iter().chain(actor_cells(&actor));
            table.add_row(cells);
            for rates in actor.tenants.iter().filter(|rates| rates.tokens_asked > 0) {
                let cells = [name.clone(), actor.device.to_string()].into_iter().chain(tenant_cells(rates));
                tenants.add_row(cells);
            }
        }
    }
    let tenants = if tenants.is_empty() { String::new() } else { format!("\n{tenants}") };
    Ok(format!("{text}{table}{tenants}{troubles}"))
}

/// What the coordinator says of the members.
fn members(coordinator: CoordinatorStatus) -> String {
    let CoordinatorStatus { version, uptime_seconds, epoch, nodes, .. } = coordinator;
    let mut table = output::table(&["member", "number", "state", "peer address", "partitions", "heard of"]);
    for node in &nodes {
        table.add_row([
            node.name.clone(),
            node.number.to_string(),
            node.state.clone(),
            node.peer.to_string(),
            output::count(node.partitions as u64),
            format!("{:.1} s ago", node.silent_seconds),
        ]);
    }
    let nodes = output::counted(nodes.len(), "node");
    format!(
        "coordinator: version {version}, up {}, {nodes}, epoch {epoch}\n{table}\n",
        duration(uptime_seconds)
    )
}

fn actor_cells(actor: &ActorStatus) -> [String; 9] {
    let chunks = match actor.capacity_chunks {
        Some(capacity) => format!("{} of {capacity}", actor.chunks),
        None => actor.chunks.to_string(),
    };
    let hit = 100.0 * actor.tokens_hit as f64 / actor.tokens_asked.max(1) as f64;
    [
        actor.device.to_string(),
        actor.policy.clone(),
        chunks,
        match (&actor.disk, &actor.disk_trouble) {
            (_, Some(_)) => "closed".to_owned(),
            (disk, None) => disk.as_ref().map_or_else(String::new, |disk| disk.chunks.to_string()),
        },
        format!("{} of {}", output::bytes(actor.used_bytes), output::bytes(actor.arena_bytes)),
        output::bytes(actor.quarantined_bytes),
        actor.sessions.to_string(),
        actor.leases.to_string(),
        format!("{hit:.1} %"),
    ]
}

fn tenant_cells(rates: &TenantRates) -> [String; 5] {
    let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
    [
        rates.tenant.clone(),
        rates.window.clone(),
        output::count(rates.tokens_asked),
        percent(rates.hit_rate),
        percent(rates.infinite_hit_rate),
    ]
}

fn duration(seconds: f64) -> String {
    match seconds as u64 {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7_199 => format!("{} min", s / 60),
        s @ 7_200..=172_799 => format!("{} h", s / 3_600),
        s => format!("{} d", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_tables_show_each_actor_and_let_unknown_fields_pass() {
        let status = ClusterStatus {
            coordinator: Some(json!({
                "role": "coordinator", "version": "9.9.9", "uptime_seconds": 200.0, "epoch": "3.14", "later": 1,
                "nodes": [{
                    "name": "node-0", "http": "127.0.0.1:1", "number": 7, "state": "suspect",
                    "peer": "127.0.0.1:2", "partitions": 4096, "silent_seconds": 3.21, "later": 1
                }]
            })),
            nodes: vec![json!({
                "name": "node-0", "ready": true, "uptime_seconds": 5.5, "later": {},
                "object": {"url": "s3://b/p", "reads": false, "trouble": "no such bucket"}, "actors": [{
                    "device": 0, "policy": "lru", "chunks": 12, "capacity_chunks": 3000, "used_bytes": 1 << 20,
                    "arena_bytes": 1 << 30, "quarantined_bytes": 0, "sessions": 1, "leases": 2,
                    "tokens_asked": 1000, "tokens_hit": 512, "later": true, "tenants": [
                        {"tenant": "red", "window": "1h", "tokens_asked": 70123, "hit_rate": 0.312,
                         "infinite_hit_rate": 0.423},
                        {"tenant": "idle", "window": "1h", "tokens_asked": 0, "hit_rate": 0.0,
                         "infinite_hit_rate": 0.0}
                    ]
                }]
            })],
        };
        let text = tables(&status).unwrap();
        let parts = [
            "version 9.9.9, up 3 min",
            "epoch 3.14",
            "suspect",
            "4,096",
            "3.2 s ago",
            "node-0",
            "12 of 3000",
            "1.0 MiB of 1.0 GiB",
            "51.2 %",
            "70,123",
            "31.2 %",
            "42.3 %",
            "node-0 does without s3://b/p: no such bucket",
        ];
        for part in parts {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("idle"), "who asked nothing is not shown\n{text}");
    }

    #[test]
    fn a_node_that_does_not_answer_is_shown_as_such() {
        let silent = json!({"name": "node-1", "http": "127.0.0.1:1", "error": "connection refused"});
        let text = tables(&ClusterStatus { coordinator: None, nodes: vec![silent] }).unwrap();
        assert!(text.contains("node-1") && text.contains("does not answer: connection refused"), "{text}");
    }
}
