//! A survey of a cluster: each server's status, and the problems of the whole cluster.

use std::collections::BTreeSet;

use larder_coordinator::{NodeStatus as Member, Status as CoordinatorStatus};
use larder_node::{ActorStatus, ObjectStatus, Status as NodeStatus};
use serde_json::{Value, json};

use crate::address::{Coordinators, HostPort};
use crate::cluster::{ask_coordinator, ask_member, ask_node, lost_nodes};
use crate::context::ClusterArg;
use crate::output::duration;
use crate::together::together;

/// The servers that a command asks.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Servers {
    #[command(flatten)]
    pub(crate) cluster: ClusterArg,

    /// Ask only this node, HOST or HOST:PORT; may be given several times
    #[arg(long = "node", value_name = "ADDR", value_parser = HostPort::of_node, conflicts_with = "coordinator")]
    pub(crate) nodes: Vec<HostPort>,
}

/// The servers to ask.
#[derive(Debug, Clone)]
pub(crate) enum Targets {
    /// A coordinator, and the nodes that it knows at the time.
    Cluster(Coordinators),
    /// These nodes.
    Nodes(Vec<HostPort>),
}

/// The status of all servers.
#[derive(Debug)]
pub(crate) struct Survey {
    /// The coordinator's status: its JSON as sent, and the part that this version understands.
    pub(crate) coordinator: Option<(Value, CoordinatorStatus)>,
    pub(crate) nodes: Vec<Surveyed>,
}

/// One node, and its status.
#[derive(Debug)]
pub(crate) struct Surveyed {
    pub(crate) name: String,
    pub(crate) http: String,
    /// The coordinator's entry of the node.
    pub(crate) member: Option<Member>,
    /// The node's status: its JSON as sent, and the part that this version understands; or why there is none.
    pub(crate) said: Result<(Value, NodeStatus), String>,
}

impl Servers {
    /// The servers to ask: the named ones, or the cluster of the context.
    ///
    /// # Errors
    /// Nothing is named, and no development cluster runs.
    pub(crate) fn targets(&self) -> anyhow::Result<Targets> {
        if self.nodes.is_empty() {
            Ok(Targets::Cluster(self.cluster.choose()?.coordinator))
        } else {
            Ok(Targets::Nodes(self.nodes.clone()))
        }
    }
}

impl Targets {
    /// Asks all servers at once. A node that is named twice is asked twice, and counted once.
    ///
    /// # Errors
    /// The coordinator does not answer. A silent node is no error, but a part of the survey.
    pub(crate) fn survey(&self) -> anyhow::Result<Survey> {
        match self {
            Self::Cluster(address) => {
                let coordinator = ask_coordinator(address)?;
                let members = coordinator.1.nodes.clone();
                Ok(Survey {
                    nodes: together(&members, |member| Surveyed::member(member.clone())),
                    coordinator: Some(coordinator),
                })
            }
            Self::Nodes(addresses) => {
                let mut nodes = together(addresses, |address| Surveyed::node(address.clone()));
                let mut seen = BTreeSet::new();
                nodes.retain(|node| match &node.said {
                    Ok((_, said)) => seen.insert((said.name.clone(), said.incarnation)),
                    Err(_) => true,
                });
                Ok(Survey { coordinator: None, nodes })
            }
        }
    }
}

impl Surveyed {
    fn member(member: Member) -> Self {
        let said = ask_member(&member).map_err(|error| format!("{error:#}"));
        Self { name: member.name.clone(), http: member.http.to_string(), member: Some(member), said }
    }

    fn node(address: HostPort) -> Self {
        let said = ask_node(&address).map_err(|error| format!("{error:#}"));
        let name = said.as_ref().map_or_else(|_| address.to_string(), |(_, status)| status.name.clone());
        Self { name, http: address.to_string(), member: None, said }
    }

    /// Whether the node serves: `alive`, `suspect`, `not ready` or `silent`.
    pub(crate) fn state(&self) -> &str {
        match (&self.said, &self.member) {
            (Err(_), _) => "silent",
            (Ok((_, status)), _) if !status.ready => "not ready",
            (Ok(_), Some(member)) if !member.state.is_empty() => &member.state,
            (Ok(_), _) => "alive",
        }
    }

    /// Says which actors of a node that answers do not; `None` if all do.
    pub(crate) fn silent_actors(&self) -> Option<String> {
        let (_, status) = self.said.as_ref().ok()?;
        silent_actors(status).map(|silent| format!("{}: {silent}", self.name))
    }

    /// The node's JSON as sent; for a silent node, `name`, `http` and `error`.
    pub(crate) fn json(&self) -> Value {
        match &self.said {
            Ok((words, _)) => words.clone(),
            Err(error) => json!({"name": self.name, "http": self.http, "error": error}),
        }
    }

    fn troubles(&self, troubles: &mut Vec<String>) {
        let name = &self.name;
        let status = match &self.said {
            Err(error) => return troubles.push(format!("{name} does not answer: {error}")),
            Ok((_, status)) => status,
        };
        match self.state() {
            "suspect" => {
                let silent = self.member.as_ref().map_or(0.0, |member| member.silent_seconds);
                troubles.push(format!(
                    "{name} is suspect: the coordinator has not heard it for {}",
                    duration(silent)
                ));
            }
            "not ready" => troubles.push(format!(
                "{name} is not ready: the node is starting, or one of its actors does not answer"
            )),
            _ => {}
        }
        if let Some(ObjectStatus { url, trouble: Some(trouble), .. }) = &status.object {
            troubles.push(format!("{name} does without {url}: {trouble}"));
        }
        for ActorStatus { device, disk, disk_trouble, .. } in &status.actors {
            if let Some(trouble) = disk_trouble {
                let does = if disk.is_some() { "does not keep all chunks on" } else { "does without" };
                troubles.push(format!("{name}, device {device}, {does} its disk: {trouble}"));
            }
        }
        if let Some(cluster) = &status.cluster {
            if let Some(refused) = &cluster.refused {
                troubles.push(format!("{name} may not join its cluster: {refused}"));
            }
            if let Some(reason) = &cluster.leaderless {
                let does = if cluster.number == 0 { "is no member" } else { "goes on with its last table" };
                troubles.push(format!("{name} {does}: {reason}"));
            }
            if !cluster.silent.is_empty() {
                troubles.push(format!("{name} gets no answer from {}", cluster.silent.join(", ")));
            }
        }
    }
}

/// Says which actors of a node do not answer; `None` if all do. The node's lists lack what these actors have.
pub(crate) fn silent_actors(status: &NodeStatus) -> Option<String> {
    let devices = status.hardware.iter().flat_map(|hardware| &hardware.devices).map(|part| part.device);
    let silent = devices.filter(|&device| status.actors.iter().all(|actor| actor.device != device));
    let silent: Vec<String> = silent.map(|device| device.to_string()).collect();
    (!silent.is_empty()).then(|| format!("no answer from the actor of device {}", silent.join(", ")))
}

impl Survey {
    /// What is wrong, a sentence each; none if all is well.
    pub(crate) fn troubles(&self) -> Vec<String> {
        let mut troubles = Vec::new();
        for lost in self.coordinator.iter().flat_map(|(_, coordinator)| &coordinator.lost) {
            let silent = duration(lost.silent_seconds);
            troubles.push(format!("{} is lost: it was last heard {silent} ago, at {}", lost.name, lost.http));
        }
        if self.coordinator.as_ref().is_some_and(|(_, coordinator)| coordinator.follows) {
            troubles.push("no leading coordinator answers: no node joins or leaves until one does".into());
        }
        if self.nodes.is_empty() {
            troubles.push("the coordinator knows no node".into());
        }
        self.nodes.iter().for_each(|node| node.troubles(&mut troubles));
        let members = || self.nodes.iter().filter_map(|node| node.member.as_ref());
        if members().any(|member| !member.peer.ip().is_loopback()) {
            for Member { name, peer, .. } in members().filter(|member| member.peer.ip().is_loopback()) {
                troubles.push(format!(
                    "other hosts cannot reach {name} at {peer}: let its [cluster] coordinator name an address of the \
                     network, or set [cluster] advertise"
                ));
            }
        }
        troubles
    }

    /// One word: `healthy`, `degraded` if something is wrong but a node serves, or `down`.
    pub(crate) fn health(&self, troubles: &[String]) -> &'static str {
        let serves = self.nodes.iter().any(|node| matches!(node.state(), "alive" | "suspect"));
        match (serves, troubles.is_empty()) {
            (false, _) => "down",
            (true, false) => "degraded",
            (true, true) => "healthy",
        }
    }
}

impl Survey {
    /// The lost nodes, which are not asked, a sentence each.
    pub(crate) fn lost(&self) -> Vec<String> {
        let lost = self.coordinator.iter().flat_map(|(_, coordinator)| coordinator.lost.clone()).collect();
        lost_nodes(lost, &[], "").into_iter().map(|(name, trouble)| format!("{name}: {trouble}")).collect()
    }

    /// A sentence about the nodes that speak an earlier version than others. That is no trouble: an upgrade is under way.
    pub(crate) fn upgrading(&self) -> Option<String> {
        let members = || self.nodes.iter().filter_map(|node| node.member.as_ref());
        let latest = members().map(|member| member.protocol).max()?;
        let earlier = members().filter(|member| (1..latest).contains(&member.protocol));
        let names: Vec<&str> = earlier.map(|member| member.name.as_str()).collect();
        let text = format!(
            "{} of an earlier version than the others (larder/{latest}): upgrade the rest, too",
            names.join(", ")
        );
        (!names.is_empty()).then_some(text)
    }
}
