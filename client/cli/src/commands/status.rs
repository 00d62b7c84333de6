//! `larder status`: what nodes and coordinator say of themselves.

use std::net::SocketAddr;
use std::process::ExitCode;

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

/// What the tables show of a coordinator. Others of its fields are let pass: it may be newer.
#[derive(Debug, Deserialize)]
struct CoordinatorStatus {
    version: String,
    uptime_seconds: f64,
    #[serde(default)]
    epoch: String,
    nodes: Vec<MemberStatus>,
}

/// What the table shows of a member.
#[derive(Debug, Deserialize)]
struct MemberStatus {
    name: String,
    http: SocketAddr,
    #[serde(default)]
    number: u16,
    #[serde(default)]
    state: String,
    #[serde(default)]
    peer: Option<SocketAddr>,
    #[serde(default)]
    partitions: usize,
    #[serde(default)]
    silent_seconds: f64,
}

/// A node that does not answer.
#[derive(Debug, Serialize, Deserialize)]
struct SilentNode {
    name: String,
    http: SocketAddr,
    error: String,
}

/// What the table shows of a node. Others of its fields are let pass: it may be newer.
#[derive(Debug, Deserialize)]
struct NodeStatus {
    name: String,
    ready: bool,
    uptime_seconds: f64,
    actors: Vec<ActorStatus>,
    #[serde(default)]
    object: Option<ObjectStatus>,
}

/// What is shown of an object store.
#[derive(Debug, Deserialize)]
struct ObjectStatus {
    url: String,
    trouble: Option<String>,
}

/// What the table shows of a GPU actor.
#[derive(Debug, Deserialize)]
struct ActorStatus {
    device: u16,
    policy: String,
    chunks: u64,
    capacity_chunks: Option<u64>,
    used_bytes: u64,
    arena_bytes: u64,
    quarantined_bytes: u64,
    sessions: u64,
    leases: u64,
    tokens_asked: u64,
    tokens_hit: u64,
    #[serde(default)]
    disk: Option<DiskStatus>,
    #[serde(default)]
    disk_trouble: Option<String>,
    /// A node of an older version does not say.
    #[serde(default)]
    tenants: Vec<TenantRates>,
}

/// What the table shows of a disk tier.
#[derive(Debug, Deserialize)]
struct DiskStatus {
    chunks: u64,
}

/// What a tenant hit lately.
#[derive(Debug, Deserialize)]
struct TenantRates {
    tenant: String,
    window: String,
    tokens_asked: u64,
    hit_rate: f64,
    infinite_hit_rate: f64,
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
        let NodeStatus { name, ready, uptime_seconds, actors, object } = NodeStatus::deserialize(node)?;
        if let Some(ObjectStatus { url, trouble: Some(trouble) }) = object {
            troubles += &format!("\n{name} does without {url}: {trouble}");
        }
        let up = if ready { duration(uptime_seconds) } else { "not ready".into() };
        for actor in actors {
            let cells = [name.clone(), up.clone()].into_iter().chain(actor.cells());
            table.add_row(cells);
            for rates in actor.tenants.iter().filter(|rates| rates.tokens_asked > 0) {
                let cells = [name.clone(), actor.device.to_string()].into_iter().chain(rates.cells());
                tenants.add_row(cells);
            }
        }
    }
    let tenants = if tenants.is_empty() { String::new() } else { format!("\n{tenants}") };
    Ok(format!("{text}{table}{tenants}{troubles}"))
}

/// What the coordinator says of the members.
fn members(coordinator: CoordinatorStatus) -> String {
    let CoordinatorStatus { version, uptime_seconds, epoch, nodes } = coordinator;
    let mut table = output::table(&["member", "number", "state", "peer address", "partitions", "heard of"]);
    for node in &nodes {
        table.add_row([
            node.name.clone(),
            node.number.to_string(),
            node.state.clone(),
            node.peer.map_or_else(String::new, |peer| peer.to_string()),
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

impl ActorStatus {
    fn cells(&self) -> [String; 9] {
        let chunks = match self.capacity_chunks {
            Some(capacity) => format!("{} of {capacity}", self.chunks),
            None => self.chunks.to_string(),
        };
        let hit = 100.0 * self.tokens_hit as f64 / self.tokens_asked.max(1) as f64;
        [
            self.device.to_string(),
            self.policy.clone(),
            chunks,
            match (&self.disk, &self.disk_trouble) {
                (_, Some(_)) => "closed".to_owned(),
                (disk, None) => disk.as_ref().map_or_else(String::new, |disk| disk.chunks.to_string()),
            },
            format!("{} of {}", output::bytes(self.used_bytes), output::bytes(self.arena_bytes)),
            output::bytes(self.quarantined_bytes),
            self.sessions.to_string(),
            self.leases.to_string(),
            format!("{hit:.1} %"),
        ]
    }
}

impl TenantRates {
    fn cells(&self) -> [String; 5] {
        let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
        [
            self.tenant.clone(),
            self.window.clone(),
            output::count(self.tokens_asked),
            percent(self.hit_rate),
            percent(self.infinite_hit_rate),
        ]
    }
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
