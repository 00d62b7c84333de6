//! The processes of a cluster: their addresses and their status. An answer counts only from the server that was asked.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, anyhow, bail, ensure};
use larder_coordinator::{LostStatus, NodeStatus as Member, Status as CoordinatorStatus};
use larder_node::Status as NodeStatus;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::address::HostPort;
use crate::failure::Usage;
use crate::http;
use crate::output::duration;
use crate::together::together;

/// The processes of one cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// HTTP address of the coordinator, if there is one.
    pub coordinator: Option<SocketAddr>,
    /// The nodes.
    pub nodes: Vec<NodeAddress>,
}

/// One node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAddress {
    /// Its name.
    pub name: String,
    /// The address of its HTTP server.
    pub http: SocketAddr,
    /// Its session sockets, by tenant; empty until the node has named them.
    pub sockets: BTreeMap<String, PathBuf>,
}

impl NodeAddress {
    /// Asks a coordinator for its nodes, and each node for its session sockets. A node that does not answer has none.
    ///
    /// # Errors
    /// The coordinator does not answer.
    pub fn discover(coordinator: &impl Display) -> anyhow::Result<Vec<Self>> {
        let (_, status) = ask_coordinator(coordinator).context("cannot ask the coordinator for its nodes")?;
        let ask = |member: &Member| {
            let sockets = ask_member(member).map(|(_, status)| status.sockets).unwrap_or_else(|error| {
                tracing::warn!(node = member.name, "a node cannot be asked for its sockets: {error:#}");
                BTreeMap::new()
            });
            Self { name: member.name.clone(), http: member.http, sockets }
        };
        Ok(together(&status.nodes, ask))
    }

    /// Asks the node anew for its session sockets.
    ///
    /// # Errors
    /// The node does not answer, or another node does.
    pub fn ask_again(self) -> anyhow::Result<Self> {
        let (_, status) = ask_node(&self.http)?;
        ensure!(status.name == self.name, is_another(&self.http, &status.name, &self.name));
        Ok(Self { sockets: status.sockets, ..self })
    }
}

/// The state of a cluster, from the leading coordinator, or from another if no leader answers. `addresses` may hold several, with
/// commas between them. Returns the answer's JSON as sent, and the part that this version understands.
///
/// # Errors
/// No coordinator answers: the first error.
pub(crate) fn ask_coordinator(addresses: &impl Display) -> anyhow::Result<(Value, CoordinatorStatus)> {
    let addresses = addresses.to_string();
    let mut open: Vec<String> = addresses.rsplit(',').map(str::to_owned).collect();
    let (mut follower, mut error, mut asked) = (None, None, Vec::new());
    while let Some(address) = open.pop() {
        match ask_one_coordinator(&address) {
            Ok(answer) if !answer.1.follows => return Ok(answer),
            Ok(answer) => {
                // The answer names the leader, perhaps by another name than `addresses` does.
                open.extend(answer.1.leader.clone().filter(|leader| !asked.contains(leader)));
                follower = follower.or(Some(answer));
            }
            Err(failed) => error = error.or(Some(failed)),
        }
        asked.push(address);
    }
    follower.ok_or_else(|| error.unwrap_or_else(|| anyhow!("no coordinator is given")))
}

/// The answer of the first coordinator that gives one. For questions that every coordinator can answer.
///
/// # Errors
/// No coordinator answers: the error of the last.
pub(crate) fn first_answer<'a, T>(
    coordinators: impl Iterator<Item = &'a HostPort>,
    ask: impl Fn(&HostPort) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut last = Err(anyhow!("no coordinator is given"));
    for coordinator in coordinators {
        last = ask(coordinator);
        if last.is_ok() {
            break;
        }
    }
    last
}

fn ask_one_coordinator(address: &impl Display) -> anyhow::Result<(Value, CoordinatorStatus)> {
    let said: Value = http::get_json(address, "/status")?;
    if said["role"] == "node" || said.get("actors").is_some() {
        bail!("{address} is a node, not a coordinator: ask it by --node {address}");
    }
    let understood = CoordinatorStatus::deserialize(&said);
    Ok((said, understood.with_context(|| http::not_larder(address))?))
}

/// A node's status: its JSON as sent, and the part that this version understands.
///
/// # Errors
/// The server does not answer, or is no node.
pub(crate) fn ask_node(address: &impl Display) -> anyhow::Result<(Value, NodeStatus)> {
    let said: Value = http::get_json(address, "/status")?;
    if said["role"] == "coordinator" {
        bail!("{address} is a coordinator, not a node: ask it by --coordinator {address}");
    }
    let understood = NodeStatus::deserialize(&said);
    Ok((said, understood.with_context(|| http::not_larder(address))?))
}

/// Checks that the coordinator knows a node. Otherwise a command for all nodes would look as if all had obeyed. A coordinator
/// without its state knows none until they have joined again.
///
/// # Errors
/// It knows neither members nor lost nodes.
pub(crate) fn require_nodes(status: &CoordinatorStatus) -> anyhow::Result<()> {
    let knows_none = status.nodes.is_empty() && status.lost.is_empty();
    ensure!(!knows_none, "the coordinator knows no nodes: see `larder status`");
    Ok(())
}

/// The members of these names, or all members if there are no names; sorted by name.
///
/// # Errors
/// The coordinator knows no member of one of the names.
pub(crate) fn chosen_members(mut members: Vec<Member>, names: &[String]) -> anyhow::Result<Vec<Member>> {
    if let Some(unknown) = names.iter().find(|&name| members.iter().all(|node| node.name != *name)) {
        return Err(Usage(format!("--member: the coordinator knows no node `{unknown}`")).into());
    }
    members.retain(|node| names.is_empty() || names.contains(&node.name));
    members.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(members)
}

/// The status of a member of a cluster. The answer must come from the node, and the life of the node, that the coordinator knows.
///
/// # Errors
/// The member does not answer, or another node or another life of the member does.
pub(crate) fn ask_member(member: &Member) -> anyhow::Result<(Value, NodeStatus)> {
    let (said, status) = ask_node(&member.http)?;
    ensure!(status.name == member.name, is_another(&member.http, &status.name, &member.name));
    // A node of an older version reports its incarnation in another place.
    let older = status.cluster.as_ref().map_or(0, |cluster| cluster.incarnation);
    let found = if status.incarnation == 0 { older } else { status.incarnation };
    let known = member.incarnation;
    ensure!(
        found == known,
        "{} at {} is in life {found}, but the coordinator knows its life {known}: if the node was restarted, try again in \
         some seconds; otherwise check the clock of its host",
        member.name,
        member.http
    );
    Ok((said, status))
}

fn is_another(address: &impl Display, found: &str, asked: &str) -> String {
    format!(
        "{address} is {found}, not {asked}: {asked} registers an address that leads other hosts elsewhere. In the configuration \
         of {asked}, set [http] listen and [cluster] coordinator to addresses that other hosts reach, or set [cluster] advertise"
    )
}

/// The tenant of a development cluster.
pub const TENANT: &str = "default";

/// The lost nodes, which a command for all nodes does not reach: their names, and a reason that ends with `advice`. Empty if the
/// user has chosen members.
pub(crate) fn lost_nodes(lost: Vec<LostStatus>, chosen: &[String], advice: &str) -> Vec<(String, String)> {
    let lost = if chosen.is_empty() { lost } else { Vec::new() };
    let trouble =
        |node: &LostStatus| format!("it is lost, not heard for {}{advice}", duration(node.silent_seconds));
    lost.into_iter().map(|node| (node.name.clone(), trouble(&node))).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    use serde_json::json;

    use super::*;

    /// A server that gives this answer to everybody, as long as the test runs.
    pub(crate) fn server(answer: Value) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
                let body = answer.to_string();
                let head =
                    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                stream.write_all((head + &body).as_bytes()).unwrap();
            }
        });
        address
    }

    fn node(name: &str, incarnation: u64) -> SocketAddr {
        let words = json!({"name": name, "incarnation": incarnation, "ready": true, "uptime_seconds": 1.0, "actors": []});
        server(words)
    }

    fn member(name: &str, incarnation: u64, http: SocketAddr) -> Member {
        let peer = "127.0.0.1:1";
        serde_json::from_value(json!({"name": name, "incarnation": incarnation, "http": http, "peer": peer}))
            .unwrap()
    }

    fn error<T>(result: anyhow::Result<T>) -> String {
        format!("{:#}", result.err().unwrap())
    }

    #[test]
    fn only_the_node_and_the_life_that_were_asked_count_as_an_answer() {
        let http = node("node-1", 7);
        assert_eq!(ask_member(&member("node-1", 7, http)).unwrap().1.name, "node-1");
        let another = error(ask_member(&member("node-0", 7, http)));
        assert!(another.starts_with(&format!("{http} is node-1, not node-0: ")), "{another}");
        let life = error(ask_member(&member("node-1", 8, http)));
        assert!(life.contains("is in life 7, but the coordinator knows its life 8"), "{life}");
    }

    #[test]
    fn a_node_of_an_older_version_is_known_by_the_life_that_it_joined_as() {
        let cluster = json!({"number": 1, "incarnation": 7, "epoch": "1.1", "members": 1, "suspects": 0, "silent": [], "shares": true});
        let words =
            json!({"name": "node-1", "ready": true, "uptime_seconds": 1.0, "actors": [], "cluster": cluster});
        let http = server(words);
        assert!(ask_member(&member("node-1", 7, http)).is_ok());
        assert!(ask_member(&member("node-1", 8, http)).is_err());
    }

    #[test]
    fn a_node_that_is_asked_as_coordinator_and_the_other_way_round_are_named() {
        let http = node("node-1", 7);
        let text = error(ask_coordinator(&http));
        assert_eq!(text, format!("{http} is a node, not a coordinator: ask it by --node {http}"));
        let words = json!({"role": "coordinator", "version": "1", "uptime_seconds": 1.0, "nodes": []});
        let http = server(words);
        assert!(ask_coordinator(&http).is_ok());
        let text = error(ask_node(&http));
        assert_eq!(text, format!("{http} is a coordinator, not a node: ask it by --coordinator {http}"));
    }

    #[test]
    fn of_several_coordinators_the_one_that_leads_is_asked_and_another_where_none_does() {
        let words = |leads: bool, leader: Option<SocketAddr>, epoch: &str| {
            let leader = leader.map(|leader| leader.to_string());
            json!({"role": "coordinator", "version": "1", "uptime_seconds": 1.0, "nodes": [], "epoch": epoch,
                "follows": !leads, "leader": leader})
        };
        let leader = server(words(true, None, "2.9"));
        let knows = server(words(false, Some(leader), "2.8"));
        let lost = server(words(false, Some(([127, 0, 0, 1], 1).into()), "2.7"));
        let epoch = |addresses: String| ask_coordinator(&addresses).unwrap().1.epoch;
        assert_eq!(epoch(format!("127.0.0.1:1,{lost},{leader}")), "2.9");
        assert_eq!(epoch(knows.to_string()), "2.9", "it names the leader");
        assert_eq!(epoch(lost.to_string()), "2.7", "the leader does not answer");
    }

    #[test]
    fn a_server_of_another_kind_is_named() {
        let http = server(json!({"hello": 1}));
        let expected = format!("{http} does not answer as a Larder server of this version");
        assert!(
            error(ask_node(&http)).starts_with(&expected)
                && error(ask_coordinator(&http)).starts_with(&expected)
        );
    }

    #[test]
    fn a_node_whose_place_another_took_is_not_asked_for_its_sockets() {
        let known = NodeAddress { name: "node-0".into(), http: node("node-1", 7), sockets: BTreeMap::new() };
        assert!(error(known.ask_again()).contains("is node-1, not node-0"));
    }
}
