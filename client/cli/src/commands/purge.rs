//! `larder purge`: has nodes remove chunks, wherever they have them.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ArgGroup;
use futures_util::future::join_all;
use larder_coordinator::NodeStatus;
use larder_net::quic::Credentials;
use larder_node::{NamespaceStatus, TenantStatus};
use larder_protocol::ChunkHash;
use larder_protocol::limits::MAX_CHAIN_CHUNKS;
use larder_protocol::peer::{PeerRequest, PeerResponse};
use larder_protocol::purge::{NamespaceName, PurgeCommand, PurgeCounts, PurgeMode, PurgeReport, PurgeScope};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::admin::{AdminArgs, AdminLink, AdminSockets};
use crate::cluster::{ask_coordinator, chosen_members, lost_nodes, require_nodes};
use crate::context::{Chosen, ClusterArg};
use crate::failure::{FAILED, Usage};
use crate::listing::{Cell, Format, FormatArgs, Listing, column, wide};
use crate::together::together;
use crate::{http, output};

/// Have nodes remove chunks from memory, disk and object store
///
/// The command removes all chunks of a tenant or of a namespace, or some chunks with all chunks that continue them. From then on
/// engines do not find these chunks, and compute them again. A chunk that an engine is reading stays in place until the engine
/// lets go. A chunk that an engine had reserved before is not kept when it is committed. Before all nodes are done, no node
/// brings such a chunk from another node, from disk or from the object store. A record's bytes stay on the drive until they are
/// written over, but no start finds them again. A node that does not answer, or is lost, keeps its chunks: purge again when the
/// node answers. A node that joins during the purge keeps them too, and is named. A node that has left the cluster is not asked
/// and not named, and finds the chunks on its disk when it starts again: purge when no restart of a node (`larder restart`) is
/// under way.
#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("scope").args(["tenant", "namespace_id"]).required(true), after_help = "\
Examples:
  larder purge --tenant chat --dry-run            Count a tenant's chunks, on every node
  larder purge --tenant chat                      Remove them, in the newest development cluster
  larder purge --namespace-id 6fb2a9d0c4e81733    `larder list namespaces --json` has the `fingerprint` of each namespace
  larder purge --namespace-id 6fb2a9d0c4e81733 --chunk HASH      A chunk, and all that continue it
  larder purge --tenant chat --member node-3 --coordinator 10.0.0.10:7600 \\
      --ca ca.pem --certificate me.pem --key me.key
  larder purge --tenant chat --json               One object with `nodes`: counts, or `error`

A node knows the tenant's namespaces that engines have used since the node started, and those on disk; objects of others
stay in the object store. `larder ca issue admin me` makes an admin's certificate. A development cluster has one of its own.
Exit status: 1 if a node refuses, does not answer, is lost, could not remove all chunks, or joins during the purge, or if the
coordinator knows no nodes; 2 after wrong arguments, or if no node has the tenant or the namespace.")]
pub(crate) struct Args {
    /// All chunks of this tenant
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,

    /// All chunks of this namespace: its fingerprint, or the first 16 digits of it
    #[arg(long, value_name = "FINGERPRINT")]
    namespace_id: Option<NamespaceName>,

    /// Only this chunk of the namespace, and all chunks that continue it; may be given several times
    #[arg(long = "chunk", value_name = "HASH", requires = "namespace_id", conflicts_with = "tenant")]
    chunks: Vec<ChunkHash>,

    /// Only count the chunks
    #[arg(long)]
    dry_run: bool,

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
    /// Whether chunks were only counted.
    dry_run: bool,
    nodes: Vec<NodeReport>,
}

/// A node's chunks.
#[derive(Debug, Serialize)]
struct NodeReport {
    name: String,
    memory_chunks: u64,
    memory_bytes: u64,
    /// Chunks among them that somebody still reads.
    read_chunks: u64,
    disk_chunks: u64,
    objects: u64,
    /// Why some chunks are left.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A node that purges.
struct Purging {
    name: String,
    link: Option<AdminLink>,
    report: PurgeReport,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (scope, mode) = (args.scope()?, if args.dry_run { PurgeMode::Count } else { PurgeMode::Remove });
    let Chosen { coordinator, admin } = args.cluster.choose()?;
    let (_, status) = ask_coordinator(&coordinator)?;
    require_nodes(&status)?;
    let members = chosen_members(status.nodes, &args.members)?;
    if let PurgeScope::Tenant(tenant) = &scope {
        check_tenant(tenant, &members)?;
    }
    let credentials = args.admin.credentials(admin)?;
    let shows = args.format.format() != Format::Json && std::io::stderr().is_terminal();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut nodes = runtime.block_on(purge(&credentials, &members, &scope, mode, shows));
    // Lost nodes may come back with all their chunks.
    let advice = " and keeps its chunks: purge again when it is back";
    let lost = lost_nodes(status.lost, &args.members, advice);
    nodes.extend(lost.into_iter().map(|(name, trouble)| NodeReport::troubled(name, trouble)));
    let joined = match mode {
        PurgeMode::Remove => ask_coordinator(&coordinator).map(|(_, status)| status.nodes),
        PurgeMode::Count => Ok(Vec::new()),
    };
    nodes.extend(newcomers(joined.as_deref().unwrap_or_default(), &members, &args.members));
    let report = Report { dry_run: args.dry_run, nodes };
    args.format.print(&report, |format| report.list().text(format))?;
    let mut status = ExitCode::SUCCESS;
    for NodeReport { name, error, .. } in &report.nodes {
        if let Some(error) = error {
            output::note(format_args!("{name}: {error}"));
            status = ExitCode::from(FAILED);
        }
    }
    let is_nothing =
        |node: &NodeReport| node.error.is_none() && node.memory_chunks + node.disk_chunks + node.objects == 0;
    if let Some(name) = args.namespace_id
        && report.nodes.iter().all(is_nothing)
    {
        check_namespace(name, &members)?;
    }
    joined.context("the coordinator does not say which nodes have joined during the purge: purge again")?;
    Ok(status)
}

/// Reports of the members that have joined since `asked` were members, of the chosen names or all. They may have brought purged
/// chunks on their disks.
fn newcomers<'a>(
    now: &'a [NodeStatus],
    asked: &'a [NodeStatus],
    chosen: &'a [String],
) -> impl Iterator<Item = NodeReport> + 'a {
    let is_asked = move |node: &NodeStatus| {
        asked.iter().any(|asked| (&asked.name, asked.incarnation) == (&node.name, node.incarnation))
    };
    let is_chosen = move |node: &NodeStatus| chosen.is_empty() || chosen.contains(&node.name);
    let new = now.iter().filter(move |node| is_chosen(node) && !is_asked(node));
    new.map(|node| NodeReport::troubled(node.name.clone(), "joined during the purge: purge again".into()))
}

impl Args {
    fn scope(&self) -> anyhow::Result<PurgeScope> {
        if self.chunks.len() > MAX_CHAIN_CHUNKS {
            return Err(Usage(format!("--chunk: a purge names at most {MAX_CHAIN_CHUNKS} chunks")).into());
        }
        Ok(match (&self.tenant, self.namespace_id) {
            (Some(tenant), _) => PurgeScope::Tenant(tenant.clone()),
            (None, Some(name)) if self.chunks.is_empty() => PurgeScope::Namespace(name),
            (None, Some(name)) => PurgeScope::Chunks(name, self.chunks.clone()),
            (None, None) => return Err(Usage("name a tenant or a namespace".into()).into()),
        })
    }
}

/// Checks that these members may have this tenant. Otherwise a wrong name would look like a purge that found nothing.
///
/// # Errors
/// All members answer, and none has the tenant.
fn check_tenant(tenant: &str, members: &[NodeStatus]) -> anyhow::Result<()> {
    let names = listed(members, "/tenants", |status: TenantStatus| status.tenant);
    let Some(names) = names.filter(|names| !members.is_empty() && !names.contains(tenant)) else {
        return Ok(());
    };
    let names: Vec<String> = names.into_iter().collect();
    Err(Usage(format!("no node has a tenant `{tenant}`; the tenants are: {}", names.join(", "))).into())
}

/// As [`check_tenant`], for a namespace in which nothing was found. A disk may have chunks of a namespace that no list shows, so
/// this comes after the purge.
///
/// # Errors
/// All members answer, and none has the namespace.
fn check_namespace(name: NamespaceName, members: &[NodeStatus]) -> anyhow::Result<()> {
    let names = listed(members, "/namespaces", |status: NamespaceStatus| status.fingerprint);
    let is_it = |fingerprint: &String| fingerprint.parse() == Ok(name);
    if members.is_empty() || names.is_none_or(|names| names.iter().any(is_it)) {
        return Ok(());
    }
    let advice = "`larder list namespaces -o wide` shows the namespaces in use";
    Err(Usage(format!("no node has a namespace `{name}`: {advice}")).into())
}

/// The names in a list of every member; `None` if a member does not answer.
fn listed<T: DeserializeOwned>(
    members: &[NodeStatus],
    path: &str,
    name: fn(T) -> String,
) -> Option<BTreeSet<String>> {
    let answers = together(members, |member| {
        let listed = http::get_json::<Vec<T>>(&member.http, path).ok()?;
        Some(listed.into_iter().map(name).collect::<Vec<_>>())
    });
    Some(answers.into_iter().collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Purges all nodes, and ends the purge at each when all are done.
async fn purge(
    credentials: &Credentials,
    members: &[NodeStatus],
    scope: &PurgeScope,
    mode: PurgeMode,
    shows: bool,
) -> Vec<NodeReport> {
    // All connections stay open until all nodes are done. With a socket for each, a large cluster would need more files than a
    // process may have open.
    let sockets = AdminSockets::new(credentials);
    // One after the other, some dead members would take longer than the other nodes wait for the purge to go on.
    let starting = members.iter().map(|member| Purging::start(&sockets, member, scope, mode));
    let mut nodes = join_all(starting).await;
    while nodes.iter().any(Purging::goes_on) {
        tokio::time::sleep(LOOK_EVERY).await;
        // Tells a node that is done that other nodes are not.
        join_all(nodes.iter_mut().map(|node| node.ask(PurgeCommand::Report))).await;
        if shows {
            show(&nodes);
        }
    }
    if shows {
        output::progress(format_args!("\r\x1b[K"));
    }
    join_all(nodes.iter_mut().map(|node| node.ask(PurgeCommand::End))).await;
    sockets.close().await;
    nodes.into_iter().map(|node| NodeReport::new(node.name, node.report)).collect()
}

impl Purging {
    async fn start(
        sockets: &AdminSockets<'_>,
        member: &NodeStatus,
        scope: &PurgeScope,
        mode: PurgeMode,
    ) -> Self {
        let mut node = Self { name: member.name.clone(), link: None, report: PurgeReport::default() };
        match sockets.connect(member).await {
            Ok(link) => {
                node.link = Some(link);
                node.ask(|_| PurgeCommand::Start(scope.clone(), mode)).await;
            }
            Err(error) => node.failed(&error),
        }
        node
    }

    async fn ask(&mut self, command: impl FnOnce(u64) -> PurgeCommand) {
        let Some(link) = &self.link else { return };
        match ask(link, command(self.report.purge)).await {
            Ok(report) => self.report = report,
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &anyhow::Error) {
        self.report.trouble = Some(format!("{error:#}"));
        self.link = None;
    }

    fn goes_on(&self) -> bool {
        self.link.is_some() && !self.report.is_over
    }
}

async fn ask(link: &AdminLink, command: PurgeCommand) -> anyhow::Result<PurgeReport> {
    match link.ask(&PeerRequest::Purge(Box::new(command))).await? {
        PeerResponse::Purges(report) => Ok(*report),
        _ => bail!("the node sent an unexpected answer"),
    }
}

/// Shows the progress of the purge on one line of a terminal.
fn show(nodes: &[Purging]) {
    let all = nodes.iter().map(|node| node.report.counts).fold(PurgeCounts::default(), PurgeCounts::and);
    let PurgeCounts { memory_chunks, disk_chunks, objects, .. } = all;
    let [memory, disk, objects] = [memory_chunks, disk_chunks, objects].map(output::count);
    let open = nodes.iter().filter(|node| node.goes_on()).count();
    output::progress(format_args!(
        "\r\x1b[K{memory} chunks in memory, {disk} on disk, {objects} objects; {open} nodes to go"
    ));
}

impl NodeReport {
    fn new(name: String, PurgeReport { trouble: error, counts, .. }: PurgeReport) -> Self {
        let PurgeCounts { memory_chunks, memory_bytes, read_chunks, disk_chunks, objects } = counts;
        Self { name, memory_chunks, memory_bytes, read_chunks, disk_chunks, objects, error }
    }

    fn troubled(name: String, trouble: String) -> Self {
        Self::new(name, PurgeReport { trouble: Some(trouble), ..PurgeReport::default() })
    }
}

impl Report {
    fn list(&self) -> Listing {
        let mut list = Listing::new(&[
            column("node"),
            column("in memory"),
            column("bytes"),
            column("still read"),
            column("on disk"),
            column("objects"),
            wide("trouble"),
        ]);
        for node in &self.nodes {
            list.add([
                node.name.as_str().into(),
                Cell::Count(node.memory_chunks),
                Cell::Bytes(node.memory_bytes),
                Cell::Count(node.read_chunks),
                Cell::Count(node.disk_chunks),
                Cell::Count(node.objects),
                node.error.clone().unwrap_or_default().into(),
            ]);
        }
        list
    }
}

/// Pause between questions for the nodes' progress.
const LOOK_EVERY: Duration = Duration::from_millis(150);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

    use larder_net::quic::ca::{Authority, Validity};
    use larder_protocol::identity::{Identity, Role};
    use serde_json::json;

    use super::*;

    fn member(name: &str, incarnation: u64, peer: SocketAddr) -> NodeStatus {
        serde_json::from_value(json!({"name": name, "incarnation": incarnation, "http": peer, "peer": peer}))
            .unwrap()
    }

    #[test]
    fn nodes_that_join_during_a_purge_are_named() {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let asked = [member("a", 1, address), member("b", 1, address)];
        let now = [member("a", 1, address), member("b", 2, address), member("c", 1, address)];
        let named = |chosen: &[&str]| -> Vec<String> {
            let chosen: Vec<String> = chosen.iter().map(|&name| name.to_owned()).collect();
            newcomers(&now, &asked, &chosen).filter(|new| new.error.is_some()).map(|new| new.name).collect()
        };
        assert_eq!(named(&[]), ["b", "c"], "one started again, one is new");
        assert_eq!(named(&["a", "b"]), ["b"], "whoever names members means these");
    }

    #[test]
    fn no_node_waits_for_a_dead_one_to_begin_its_purge() {
        assert!(sources_of_dials().iter().all(Option::is_some));
    }

    #[test]
    fn a_purge_of_many_nodes_takes_one_socket() {
        let [first, second, third] = sources_of_dials();
        assert_eq!((second, third), (first, first));
    }

    /// The sources of the packets with which a purge dials three dead nodes; `None` if one is not dialled.
    fn sources_of_dials() -> [Option<SocketAddr>; 3] {
        let (authority, _) = Authority::create(Validity::days(1)).unwrap();
        let issued = authority.issue(&Identity::new(Role::Admin, "me"), Validity::days(1)).unwrap();
        let (certificate, key) = (issued.certificate_pem.as_bytes(), issued.key_pem.as_bytes());
        let ca = authority.certificate_pem().as_bytes();
        let credentials = Credentials::from_pem(ca, certificate, key).unwrap();
        // They take packets and answer none.
        let dead = [(); 3].map(|()| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        dead.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        let members: Vec<NodeStatus> =
            dead.iter().map(|socket| member("dead", 1, socket.local_addr().unwrap())).collect();
        let scope = PurgeScope::Tenant("default".into());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let purging = purge(&credentials, &members, &scope, PurgeMode::Remove, false);
            let dialled = async {
                let mut dialled = [None; 3];
                // Far less than a dial takes to fail.
                for _ in 0..1_000 {
                    tokio::task::yield_now().await;
                    for (socket, dialled) in dead.iter().zip(&mut dialled) {
                        *dialled = dialled.or(socket.recv_from(&mut [0; 2_048]).ok().map(|(_, from)| from));
                    }
                }
                dialled
            };
            tokio::select! {
                _ = purging => panic!("nobody answers"),
                dialled = dialled => dialled,
            }
        })
    }
}
