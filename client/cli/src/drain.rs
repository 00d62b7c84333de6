//! Drains of nodes: begins them, watches them, and waits for nodes that come back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use larder_coordinator::{NodeStatus, Status as CoordinatorStatus};
use larder_net::quic::Credentials;
use larder_protocol::drain::{DrainCommand, DrainReport};
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::table::Epoch;
use serde::Serialize;

use crate::address::Coordinators;
use crate::admin::AdminLink;
use crate::clock::now;
use crate::cluster::{ask_coordinator, ask_member};
use crate::failure::Usage;
use crate::output;

/// The result of a drain.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Drained {
    /// The node.
    pub(crate) node: String,
    /// `left`, `cancelled`, `given up`, `died`, `draining`, `gone` (not back after a restart) or `failed`.
    pub(crate) outcome: &'static str,
    /// The reason, if the node did not leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
    /// Duration of the drain, in seconds.
    pub(crate) seconds: f64,
    /// Chunks that were in its memory at the start.
    pub(crate) found_chunks: u64,
    /// Chunks that moved to other nodes.
    pub(crate) moved_chunks: u64,
    /// Bytes of the moved chunks.
    pub(crate) moved_bytes: u64,
    /// Chunks that other nodes had already.
    pub(crate) elsewhere_chunks: u64,
    /// Chunks that the disk or the object store keeps.
    pub(crate) kept_below_chunks: u64,
    /// Chunks that no node took.
    pub(crate) left_chunks: u64,
    /// Time that the node took to come back, for a restart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) back_after_seconds: Option<f64>,
}

impl Drained {
    fn new(node: &str, outcome: &'static str, report: &DrainReport, started: Instant) -> Self {
        let chunks = report.chunks;
        Self {
            node: node.to_owned(),
            outcome,
            reason: report.trouble.clone(),
            seconds: (now() - started).as_secs_f64(),
            found_chunks: chunks.found,
            moved_chunks: chunks.moved,
            moved_bytes: chunks.moved_bytes,
            elsewhere_chunks: chunks.elsewhere,
            kept_below_chunks: chunks.kept_below,
            left_chunks: chunks.left,
            back_after_seconds: None,
        }
    }

    /// The result of a drain without a watcher, from the node's report.
    pub(crate) fn of_report(node: &str, outcome: &'static str, report: &DrainReport) -> Self {
        Self::new(node, outcome, report, now())
    }

    /// The result for a node that could not be asked to drain.
    pub(crate) fn failed(node: &str, error: &anyhow::Error) -> Self {
        let reason = Some(format!("{error:#}"));
        Self { reason, ..Self::new(node, "failed", &DrainReport::default(), now()) }
    }

    /// The result as a sentence.
    pub(crate) fn line(&self) -> String {
        let Self { node, outcome, seconds, found_chunks, moved_chunks, elsewhere_chunks, .. } = self;
        let Self { kept_below_chunks, left_chunks, .. } = self;
        let back = self.back_after_seconds.map_or(String::new(), |back| format!("; back after {back:.1} s"));
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
        format!(
            "{node}: {outcome} after {seconds:.1} s; of {found_chunks} chunks {moved_chunks} moved, other nodes had {elsewhere_chunks}, \
             disk or object store keeps {kept_below_chunks}, nobody took {left_chunks}{back}{reason}"
        )
    }

    /// Whether the drain succeeded.
    pub(crate) fn is_well(&self) -> bool {
        matches!(self.outcome, "left" | "draining")
    }
}

/// Sends a node a command about its drain; returns the progress.
///
/// # Errors
/// The node does not answer, or refuses.
pub(crate) async fn command(
    credentials: &Credentials,
    member: &NodeStatus,
    command: DrainCommand,
) -> anyhow::Result<DrainReport> {
    let link = AdminLink::connect(credentials, member).await?;
    let report = ask(&link, command).await;
    link.close().await;
    report
}

async fn ask(link: &AdminLink, command: DrainCommand) -> anyhow::Result<DrainReport> {
    match link.ask(&PeerRequest::Drain(command)).await? {
        PeerResponse::Drains(report) => Ok(*report),
        _ => bail!("the node sent an unexpected answer"),
    }
}

/// Begins a drain, unless `first` only asks for a report, and watches it to its end. `show` gets each report. If the path to the
/// node is lost for a time, the drain is watched over a new connection.
///
/// # Errors
/// The node does not answer, or refuses; or its fate stays unknown.
pub(crate) async fn drain(
    credentials: &Credentials,
    coordinator: &Coordinators,
    member: &NodeStatus,
    first: DrainCommand,
    mut show: impl FnMut(&DrainReport),
) -> anyhow::Result<Drained> {
    let started = now();
    // A coordinator that knows less later cannot say how the node ended.
    let known = status_of(coordinator).await.map(|status| epoch_of(&status)).unwrap_or_default();
    let mut link = AdminLink::connect(credentials, member).await?;
    let begins = !matches!(first, DrainCommand::Report);
    let mut last = ask(&link, first).await?;
    if !(begins || last.is_draining || last.trouble.is_some()) {
        link.close().await;
        bail!("{name} does not drain: `larder drain {name}` begins a drain", name = member.name);
    }
    let mut silent_since = None;
    loop {
        show(&last);
        if !last.is_draining {
            let outcome = if last.trouble.is_some() { "given up" } else { "cancelled" };
            link.close().await;
            return Ok(Drained::new(&member.name, outcome, &last, started));
        }
        tokio::time::sleep(LOOK_EVERY).await;
        match ask(&link, DrainCommand::Report).await {
            Ok(report) => (last, silent_since) = (report, None),
            Err(error) => {
                // The node has most likely left: the coordinator knows.
                let since = *silent_since.get_or_insert_with(now);
                match fate(coordinator, member, known, last.is_over || link.was_closed()).await {
                    Some(outcome) => return Ok(Drained::new(&member.name, outcome, &last, started)),
                    None if now() - since > SILENCE => {
                        return Err(error).context(format!(
                            "{} does not answer, and the coordinator still has it as a member: see `larder status`",
                            member.name
                        ));
                    }
                    None => {
                        if let Some(renewed) = renew(credentials, member).await {
                            std::mem::replace(&mut link, renewed).close().await;
                        }
                    }
                }
            }
        }
    }
}

/// A new connection to a node that still drains, or has given up its drain. `None` if the node does not answer; another life of
/// the node drains no more.
async fn renew(credentials: &Credentials, member: &NodeStatus) -> Option<AdminLink> {
    let link = AdminLink::connect(credentials, member).await.ok()?;
    match ask(&link, DrainCommand::Report).await {
        Ok(report) if report.is_draining || report.trouble.is_some() => Some(link),
        _ => {
            link.close().await;
            None
        }
    }
}

/// The fate of one life of a node that does not answer. `None` while no coordinator answers that knows it.
async fn fate(
    coordinator: &Coordinators,
    member: &NodeStatus,
    known: Epoch,
    said_goodbye: bool,
) -> Option<&'static str> {
    fate_in(&status_of(coordinator).await.ok()?, member, known, said_goodbye)
}

/// The fate of one life of a node, according to a coordinator: `died` or `left`. A node that came back, though it had not said that
/// it leaves, died: its supervisor started it again. `None` while this life is a member, or if the coordinator does not lead, or if
/// its table is older than the epoch that was known before: a coordinator that has lost its state, or that has just begun to lead,
/// does not know its members yet.
fn fate_in(
    status: &CoordinatorStatus,
    member: &NodeStatus,
    known: Epoch,
    said_goodbye: bool,
) -> Option<&'static str> {
    if status.follows || epoch_of(status) < known {
        return None;
    }
    let is_it = |name: &str, incarnation: u64| name == member.name && incarnation == member.incarnation;
    if status.lost.iter().any(|lost| is_it(&lost.name, lost.incarnation)) {
        return Some("died");
    }
    if status.nodes.iter().any(|node| is_it(&node.name, node.incarnation)) {
        return None;
    }
    let is_back = status.nodes.iter().any(|node| node.name == member.name);
    Some(if is_back && !said_goodbye { "died" } else { "left" })
}

/// Waits until another life of the node is a ready member, and has found the chunks on its disk.
///
/// # Errors
/// The node takes longer than `within`.
pub(crate) async fn comes_back(
    coordinator: &Coordinators,
    before: &NodeStatus,
    within: Duration,
) -> anyhow::Result<()> {
    let started = now();
    let mut on_disk = None;
    loop {
        if now() - started > within {
            bail!(
                "it did not come back within {} s: does its supervisor start it again? `larder restart` goes on from the others",
                within.as_secs()
            );
        }
        tokio::time::sleep(LOOK_EVERY).await;
        let Ok(status) = status_of(coordinator).await else { continue };
        let is_back = |node: &&NodeStatus| {
            node.name == before.name && node.incarnation != before.incarnation && node.state == "alive"
        };
        let Some(member) = status.nodes.iter().find(is_back).cloned() else { continue };
        let said = tokio::task::spawn_blocking(move || ask_member(&member)).await?;
        let Ok((_, said)) = said else { continue };
        let is_in_table = said.cluster.as_ref().is_some_and(|cluster| cluster.members > 0);
        // A node finds the chunks on its disk piece by piece.
        let chunks: u64 = said.actors.iter().filter_map(|actor| actor.disk).map(|disk| disk.chunks).sum();
        if said.ready && is_in_table && on_disk.replace(chunks) == Some(chunks) {
            return Ok(());
        }
    }
}

/// The coordinator's status now.
///
/// # Errors
/// No coordinator answers.
pub(crate) async fn status_of(coordinator: &Coordinators) -> anyhow::Result<CoordinatorStatus> {
    let coordinator = coordinator.clone();
    Ok(tokio::task::spawn_blocking(move || ask_coordinator(&coordinator)).await??.1)
}

/// The epoch of a coordinator's last table; the first epoch if the coordinator does not say.
fn epoch_of(status: &CoordinatorStatus) -> Epoch {
    let numbers = status.epoch.split_once('.');
    let read = |(term, number): (&str, &str)| Some((term.parse().ok()?, number.parse().ok()?));
    numbers.and_then(read).map_or_else(Epoch::default, |(term, number)| Epoch { term, number })
}

/// The member with this name.
///
/// # Errors
/// There is no such member.
pub(crate) fn find<'a>(nodes: &'a [NodeStatus], name: &str) -> anyhow::Result<&'a NodeStatus> {
    let found = nodes.iter().find(|node| node.name == name);
    found.ok_or_else(|| Usage(format!("the coordinator knows no node `{name}`: see `larder status`")).into())
}

/// Shows the progress of a drain on one line of a terminal.
pub(crate) fn show(shows: bool, node: &str, report: &DrainReport) {
    if !shows {
        return;
    }
    let chunks = report.chunks;
    let done = chunks.moved + chunks.elsewhere + chunks.kept_below + chunks.left;
    let (done, found, moved) =
        (output::count(done), output::count(chunks.found), output::bytes(chunks.moved_bytes));
    let left = output::duration(report.left_ms as f64 / 1_000.0);
    output::progress(format_args!(
        "\r\x1b[K{node}: {done} of {found} chunks, {moved} moved, at most {left} left"
    ));
}

/// Clears the line of progress.
pub(crate) fn clear() {
    output::progress(format_args!("\r\x1b[K"));
}

/// Pause between questions for a node's progress.
const LOOK_EVERY: Duration = Duration::from_millis(150);

/// How long a node may be silent while the coordinator still has it as a member.
const SILENCE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use larder_net::quic::ca::{Authority, Validity};
    use larder_net::quic::{Connection, Endpoint, TransportSettings, read_message, write_message};
    use larder_protocol::drain::{AfterDrain, DrainStart};
    use larder_protocol::identity::{Identity, Role};
    use serde_json::{Value, json};

    use super::*;
    use crate::cluster::tests::server;

    /// A coordinator's answer.
    fn words(follows: bool, epoch: &str, nodes: &[Value], lost: &[Value]) -> Value {
        json!({"role": "coordinator", "version": "1", "uptime_seconds": 1.0, "epoch": epoch, "follows": follows,
            "nodes": nodes, "lost": lost})
    }

    fn node(peer: SocketAddr) -> Value {
        json!({"name": "node-1", "incarnation": 7, "http": peer, "peer": peer, "number": 1, "silent_seconds": 9.0})
    }

    #[test]
    fn only_a_leader_that_knows_as_much_as_before_says_how_a_node_ended() {
        let node = node(([127, 0, 0, 1], 1).into());
        let member: NodeStatus = serde_json::from_value(node.clone()).unwrap();
        let fate = |follows, epoch, nodes: &[Value], lost: &[Value]| {
            let status = serde_json::from_value(words(follows, epoch, nodes, lost)).unwrap();
            fate_in(&status, &member, Epoch { term: 3, number: 14 }, false)
        };
        let here = [node];
        assert_eq!(fate(false, "3.15", &here, &[]), None, "it is a member");
        assert_eq!(fate(false, "3.15", &[], &[]), Some("left"));
        assert_eq!(fate(false, "4.1", &[], &here), Some("died"));
        assert_eq!(fate(true, "3.15", &[], &[]), None, "a follower may know only later who is lost");
        for epoch in ["0.0", "3.13", ""] {
            assert_eq!(fate(false, epoch, &[], &[]), None, "a coordinator without state, at {epoch}");
        }
    }

    #[test]
    fn a_node_that_came_back_without_a_goodbye_died() {
        let member: NodeStatus = serde_json::from_value(node(([127, 0, 0, 1], 1).into())).unwrap();
        let mut back = node(([127, 0, 0, 1], 1).into());
        back["incarnation"] = 8.into();
        let status = serde_json::from_value(words(false, "3.15", &[back], &[])).unwrap();
        let fate = |said_goodbye| fate_in(&status, &member, Epoch { term: 3, number: 14 }, said_goodbye);
        assert_eq!(fate(false), Some("died"));
        assert_eq!(fate(true), Some("left"), "its supervisor was quick");
    }

    fn credentials(authority: &Authority, identity: &Identity) -> Credentials {
        let issued = authority.issue(identity, Validity::days(1)).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        Credentials::from_pem(authority.certificate_pem().as_bytes(), certificate, key).unwrap()
    }

    /// Answers the next request on a connection with a drain's report.
    async fn report(connection: &Connection, is_draining: bool) {
        let (mut send, mut receive) = connection.quic().accept_bi().await.unwrap();
        let asked: Option<PeerRequest> = read_message(&mut receive).await.unwrap();
        assert!(matches!(asked, Some(PeerRequest::Drain(_))), "{asked:?}");
        let report = DrainReport { is_draining, ..DrainReport::default() };
        write_message(&mut send, &PeerResponse::Drains(Box::new(report))).await.unwrap();
        send.finish().unwrap();
    }

    #[test]
    fn a_drain_is_watched_over_another_connection_when_the_first_is_lost() {
        let (authority, _) = Authority::create(Validity::days(1)).unwrap();
        let admin = credentials(&authority, &Identity::new(Role::Admin, "me"));
        let own = credentials(&authority, &Identity::new(Role::Node, "node-1"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let any = SocketAddr::from(([127, 0, 0, 1], 0));
            let endpoint = Endpoint::bind(any, &own, &TransportSettings::default()).unwrap();
            let node = node(endpoint.local_address());
            let words = words(false, "3.14", std::slice::from_ref(&node), &[]);
            let coordinator = Coordinators::from(server(words));
            let member: NodeStatus = serde_json::from_value(node).unwrap();
            let shown = tokio::sync::Notify::new();
            let draining = async {
                let first = endpoint.accept().await.unwrap().accept().await.unwrap();
                report(&first, true).await;
                shown.notified().await;
                first.quic().close(0_u32.into(), b"");
                let second = endpoint.accept().await.unwrap().accept().await.unwrap();
                for is_draining in [true, true, false] {
                    report(&second, is_draining).await;
                }
                // The connection stays open.
                std::future::pending::<()>().await;
            };
            let start = DrainStart { within_ms: 1_000, bytes_per_second: None, then: AfterDrain::Stop };
            let show = |_: &DrainReport| shown.notify_one();
            let watching = drain(&admin, &coordinator, &member, DrainCommand::Start(start), show);
            tokio::select! {
                watched = watching => assert_eq!(watched.unwrap().outcome, "cancelled", "it is watched to its end"),
                () = draining => {}
            }
        });
    }
}
