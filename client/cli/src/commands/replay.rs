//! `larder replay`: plays a trace through real engine sessions.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::process::ExitCode;
use std::time::Duration;

use larder_core::placement::PlacementRule;
use larder_core::store::policy::PolicyName;

use super::plan::{note_unordered, positive};
use crate::address::Coordinators;
use crate::clock::now;
use crate::cluster::{NodeAddress, TENANT, ask_node};
use crate::content::TraceName;
use crate::dev::{DevCluster, DevDisk, DevOptions};
use crate::drain::Drained;
use crate::failure::{FAILED, Usage};
use crate::generator::{DEFAULT_REQUESTS, Generator};
use crate::replay::link::LinkSettings;
use crate::replay::namespace::replay_namespace;
use crate::replay::progress::Progress;
use crate::replay::route::{Route, Router};
use crate::replay::upkeep::{Upkeep, watch_drains};
use crate::replay::{
    DEFAULT_BLOCK_BYTES, DEFAULT_CHUNKS_PER_NODE, Driver, Load, MAX_REQUESTS_IN_FLIGHT, REQUESTS_IN_FLIGHT,
    Report, USUAL_REQUESTS_IN_FLIGHT,
};
use crate::trace::{Request, TraceReader, sort_by_time, source};
use crate::tracing::TraceOptions;
use crate::{context, output, signals, values};
use anyhow::{Context as _, anyhow, bail};
use larder_net::quic::CredentialFiles;
use larder_node::Status as NodeStatus;
use serde::Serialize;

/// Play a trace through real engine sessions and check every byte that they read
///
/// Each request looks its prompt up, leases the cached chunks and copies them out. It compares the bytes with the bytes that the
/// chunks' keys imply, makes the bytes of the other chunks, and saves these. Only full chunks of 512 tokens are cached. Requests
/// start in the order of their times, four sessions at a time; a session's next turn starts when the turn before it is saved. The
/// command fails on a wrong byte or a failed request.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder replay                                   A generated trace, through a node that the command starts
  larder replay trace.jsonl --chunks-per-node 10000 --block-bytes 4096 --policy lru
  larder replay trace.jsonl --dev 4               Through four nodes that share their chunks
  larder replay trace.jsonl --speed 60 --disk-chunks-per-node 30000
  larder replay trace.jsonl --limit 1000 --json   1,000 requests; results as one JSON object
  larder replay --dev 2 --compute --load worth    Engines take their time, and load what comes sooner than they compute it
  larder replay --coordinator 127.0.0.1:7600      Through the nodes of a running cluster
  larder replay --dev 8 --restart-at 500           All nodes restart meanwhile, one after the other
  larder replay --dev 2 --trace-endpoint http://127.0.0.1:4318   Trace every request

Trace: Mooncake's JSON lines, one id for each 512 tokens of the prompt:
  {\"timestamp\": MS, \"input_length\": TOKENS, \"output_length\": TOKENS, \"hash_ids\": [...]}

Several nodes: each request goes to the node that recomputed the fewest tokens lately (half-life 30 s of trace
time), or with --route cache to the node where it costs least (POST /v1/prefix). Chunks that only another node holds
come from that node; with --no-share they are computed. A dead node is started again; meanwhile its requests are
computed, and counted.")]
pub(crate) struct Args {
    /// The trace, packed by gzip or zstd or not; `-` for standard input [default: a generated trace]
    file: Option<PathBuf>,

    /// Start a development cluster of N nodes for this replay
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "coordinator",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    dev: u16,

    /// Use the nodes that this coordinator knows; `dev` is the newest development cluster
    #[arg(long, value_name = "ADDR", value_parser = context::coordinators)]
    coordinator: Option<Coordinators>,

    /// Limit of chunks that each node keeps, for all its actors together
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHUNKS_PER_NODE, conflicts_with = "coordinator",
          value_parser = clap::value_parser!(u64).range(1..))]
    chunks_per_node: u64,

    /// Bytes of one chunk's block
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, default_value_t = DEFAULT_BLOCK_BYTES)]
    block_bytes: u64,

    /// Give each node a disk tier for this number of chunks
    #[arg(long, value_name = "N", conflicts_with = "coordinator", value_parser = clap::value_parser!(u64).range(1..))]
    disk_chunks_per_node: Option<u64>,

    /// Limit of chunks of the last node, to give it less memory than the others
    #[arg(long, value_name = "N", conflicts_with = "coordinator", value_parser = clap::value_parser!(u64).range(1..))]
    last_node_chunks: Option<u64>,

    /// Drain the last node when request N starts
    #[arg(long, value_name = "N", conflicts_with = "coordinator", value_parser = at_least_one)]
    drain_at: Option<usize>,

    /// Restart all nodes one after the other, beginning when request N starts
    #[arg(long, value_name = "N", conflicts_with = "coordinator", value_parser = at_least_one)]
    restart_at: Option<usize>,

    /// Eviction policy
    #[arg(long, value_parser = values::policy(), default_value_t, conflicts_with = "coordinator")]
    policy: PolicyName,

    /// Rule by which nodes place chunks: `worth`, or the former `reads`
    #[arg(long, value_parser = values::placement(), default_value_t, conflicts_with = "coordinator")]
    placement: PlacementRule,

    /// Let each node serve only the chunks of its own engines
    #[arg(long, conflicts_with = "coordinator")]
    no_share: bool,

    /// Rule that chooses the node of a request
    #[arg(long, value_enum, default_value_t)]
    route: Route,

    /// Limit of sessions in flight
    #[arg(long, value_name = "N", default_value_t = REQUESTS_IN_FLIGHT,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_REQUESTS_IN_FLIGHT)))]
    in_flight: u16,

    /// Limit of requests that the engine of one node prefills at a time; other requests wait in the engine's queue
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_REQUESTS_IN_FLIGHT)))]
    prefills: u16,

    /// Start requests at the times of the trace, this many times as fast. In nodes that the replay starts, chunks age faster by
    /// the nearest whole factor, at least 1 [default: start requests as soon as the nodes serve them]
    #[arg(long, value_name = "FACTOR", value_parser = positive)]
    speed: Option<f64>,

    /// Tokens that an engine computes in a second of prefill, for the time that hits save
    #[arg(long, value_name = "N", default_value_t = 10_000.0, value_parser = positive)]
    prefill_tokens_per_s: f64,

    /// Let engines spend time on the tokens that they compute, one request of a node at a time. Without this option, computing
    /// takes no time
    #[arg(long)]
    compute: bool,

    /// Found chunks that a request waits for; its engine computes the others
    #[arg(long, value_enum, default_value_t)]
    load: Load,

    /// Limit of the bytes of blocks that each node sends to others in a second, as on a slower network
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, conflicts_with = "coordinator")]
    send_bytes_per_second: Option<u64>,

    /// Time for a node's answer; without an answer by then, the engine computes the prompt
    #[arg(long, value_name = "MS", default_value_t = 5_000, value_parser = clap::value_parser!(u64).range(1..))]
    node_deadline_ms: u64,

    /// Play only the first N requests
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    limit: Option<usize>,

    /// Requests of a generated trace
    #[arg(long, value_name = "N", conflicts_with = "file", default_value_t = DEFAULT_REQUESTS,
          value_parser = at_least_one)]
    requests: usize,

    /// Seed of a generated trace
    #[arg(long, value_name = "N", conflicts_with = "file", default_value_t = 0)]
    seed: u64,

    /// Show no progress
    #[arg(long, short)]
    quiet: bool,

    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    pub(crate) tracing: TraceOptions,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Logs why the environment's endpoint cannot be used: nothing was logged yet when spans began.
    let _ = args.tracing.config().or_from_environment();
    let requests = args.trace()?;
    args.check_upkeep(requests.len())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(replay(args, &requests))
}

/// Starts or finds the nodes, plays the trace, stops the started nodes, and prints the results.
async fn replay(args: &Args, requests: &[Request]) -> anyhow::Result<ExitCode> {
    let stop = signals::stop_or_hangup()?;
    tokio::pin!(stop);
    let started = tokio::select! {
        started = args.nodes() => started,
        () = &mut stop => bail!("interrupted before the first request"),
    };
    let (mut cluster, nodes) = started?;
    args.say_what_is_played(requests.len(), nodes.len());
    let watched = args.watched(cluster.as_ref());
    let router = args.router(cluster.as_ref())?;
    let played = match &mut cluster {
        Some(cluster) => {
            let ended = pin!(async {
                tokio::select! {
                    () = stop => None,
                    gave_up = cluster.supervise() => Some(gave_up.into()),
                }
            });
            play(args, requests, &nodes, router, watched, ended).await
        }
        None => {
            let ended = pin!(async {
                stop.await;
                None
            });
            play(args, requests, &nodes, router, watched, ended).await
        }
    };
    let stopped = match cluster {
        Some(cluster) => cluster.stop().await,
        None => Ok(()),
    };
    let mut played = played?;
    played.print(args.json)?;
    played.failed.take().map_or(Ok(()), Err)?;
    stopped?;
    if played.interrupted {
        bail!("interrupted after {} of {} requests", played.report.requests, requests.len());
    }
    let is_well = played.report.passed() && played.upkeep.iter().all(Drained::is_well);
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The result of a replay, complete or interrupted.
struct Played {
    report: Report,
    /// The nodes that drained or restarted during the replay.
    upkeep: Vec<Drained>,
    interrupted: bool,
    /// The error that ended the replay.
    failed: Option<anyhow::Error>,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "<[Drained]>::is_empty")]
    upkeep: &'a [Drained],
}

async fn play(
    args: &Args,
    requests: &[Request],
    nodes: &[NodeAddress],
    router: Option<Router>,
    watched: Option<(Coordinators, CredentialFiles)>,
    mut ended: Pin<&mut impl Future<Output = Option<anyhow::Error>>>,
) -> anyhow::Result<Played> {
    let settings = LinkSettings {
        block_bytes: args.block_bytes,
        in_flight: args.in_flight,
        prefills: args.prefills,
        deadline: Duration::from_millis(args.node_deadline_ms),
        prefill_tokens_per_s: args.prefill_tokens_per_s,
        load: args.load,
        computes: args.compute,
    };
    let driver = tokio::select! {
        driver = Driver::connect(nodes, settings) => {
            driver?.named(args.trace_name(requests)).routed(router).traced(args.tracing.config().sampler())
        }
        failed = &mut ended => return Err(failed.unwrap_or_else(|| anyhow!("interrupted before the first request"))),
    };
    let before = forwarded_chunks(nodes).await;
    let progress = Progress::new(requests.len() as u64, args.quiet);
    let start = now();
    let (mut interrupted, mut upkeep, mut failed) = (false, Vec::new(), None);
    let playing = async {
        let playing = driver.play(requests, args.speed, &progress);
        match &watched {
            None => {
                playing.await;
                Ok(Vec::new())
            }
            Some((coordinator, admin)) => {
                let playing =
                    async { tokio::join!(playing, args.upkeep().carry_out(&driver, coordinator, admin)).1 };
                tokio::select! {
                    done = playing => done,
                    () = watch_drains(&driver, coordinator) => Ok(Vec::new()),
                }
            }
        }
    };
    tokio::select! {
        done = playing => match done {
            Ok(done) => upkeep = done,
            Err(error) => failed = Some(error),
        },
        error = ended => (interrupted, failed) = (error.is_none(), error),
    }
    let took = now() - start;
    progress.finish();
    let forwarded = forwarded_since(&before, &forwarded_chunks(nodes).await);
    Ok(Played { report: driver.report(took, forwarded), upkeep, interrupted, failed })
}

/// Chunks that each life of a node has forwarded to other nodes, without nodes that do not answer.
async fn forwarded_chunks(nodes: &[NodeAddress]) -> Forwarded {
    let nodes = nodes.to_vec();
    let count = move || {
        let statuses = nodes.iter().filter_map(|node| ask_node(&node.http).ok());
        let forwarded = |(_, status): (_, NodeStatus)| {
            let chunks = status.actors.iter().map(|actor| actor.forwarded_chunks).sum();
            ((status.name, status.incarnation), chunks)
        };
        statuses.map(forwarded).collect()
    };
    tokio::task::spawn_blocking(count).await.unwrap_or_default()
}

/// Chunks forwarded meanwhile. A node that was restarted counts from 0.
fn forwarded_since(before: &Forwarded, after: &Forwarded) -> u64 {
    let earlier = |life| before.get(life).copied().unwrap_or(0);
    after.iter().map(|(life, chunks)| chunks.saturating_sub(earlier(life))).sum()
}

/// Chunks by the name and incarnation of a node.
type Forwarded = BTreeMap<(String, u64), u64>;

impl Played {
    fn print(&self, json: bool) -> io::Result<()> {
        let Self { report, upkeep, .. } = self;
        if json {
            return output::print_json(&Printed { report, upkeep });
        }
        output::print(&report.table())?;
        upkeep.iter().try_for_each(|node| output::print(&node.line()))
    }
}

impl Args {
    fn trace(&self) -> anyhow::Result<Vec<Request>> {
        let Some(path) = &self.file else {
            let requests = self.requests.min(self.limit.unwrap_or(usize::MAX));
            return Ok(Generator::new(self.seed).take(requests).collect());
        };
        let wrong = || Usage(format!("cannot play {}", path.display()));
        let lines = source::open(path).with_context(wrong)?;
        let mut requests = TraceReader::new(lines).read_all(self.limit).with_context(wrong)?;
        note_unordered(sort_by_time(&mut requests), requests.len());
        Ok(requests)
    }

    /// The name of the trace, which the hashes of its chunks include.
    fn trace_name(&self, requests: &[Request]) -> TraceName {
        match (&self.file, requests.first()) {
            (Some(_), Some(first)) => TraceName::of(first),
            _ => TraceName::generated(self.seed),
        }
    }

    /// The nodes to play through, and the cluster if it was started for this replay.
    async fn nodes(&self) -> anyhow::Result<(Option<DevCluster>, Vec<NodeAddress>)> {
        if let Some(coordinator) = self.coordinator.clone() {
            let asked = coordinator.clone();
            let nodes = tokio::task::spawn_blocking(move || NodeAddress::discover(&asked)).await??;
            if nodes.is_empty() {
                bail!(
                    "the coordinator at {coordinator} knows no nodes: start a node, or see `larder status`"
                );
            }
            return Ok((None, nodes));
        }
        let cluster = DevCluster::start(self.cluster()?).await?;
        cluster.joined().await?;
        let nodes = cluster.addresses().nodes.clone();
        Ok((Some(cluster), nodes))
    }

    /// The coordinator of the started cluster and the admin's certificate, if the replay drains or restarts nodes.
    fn watched(&self, cluster: Option<&DevCluster>) -> Option<(Coordinators, CredentialFiles)> {
        let cluster = cluster.filter(|_| self.drain_at.is_some() || self.restart_at.is_some())?;
        Some((cluster.addresses().coordinator?.into(), cluster.admin()))
    }

    /// The router that finds the node where a request costs least; `None` if the cache does not decide the route.
    fn router(&self, cluster: Option<&DevCluster>) -> anyhow::Result<Option<Router>> {
        if self.route == Route::Load {
            return Ok(None);
        }
        let started = cluster.and_then(|cluster| cluster.addresses().coordinator).map(Coordinators::from);
        let coordinator = started.or_else(|| self.coordinator.clone());
        let coordinator = coordinator.context("--route cache needs a coordinator, and there is none")?;
        let namespace = replay_namespace(self.block_bytes).fingerprint(TENANT);
        Ok(Some(Router::new(coordinator, &namespace)))
    }

    /// Refuses a drain or a restart at a request that never comes.
    fn check_upkeep(&self, requests: usize) -> Result<(), Usage> {
        for (option, at) in [("--drain-at", self.drain_at), ("--restart-at", self.restart_at)] {
            if let Some(at) = at.filter(|&at| at > requests) {
                let requests = output::counted(requests, "request");
                return Err(Usage(format!(
                    "there is no request {at} for {option}: the trace has {requests}"
                )));
            }
        }
        Ok(())
    }

    fn upkeep(&self) -> Upkeep {
        Upkeep { drain_at: self.drain_at, restart_at: self.restart_at }
    }

    /// Prints the replay's settings on standard error, for people.
    fn say_what_is_played(&self, requests: usize, nodes: usize) {
        if self.quiet || !io::stderr().is_terminal() {
            return;
        }
        let requests = output::counted(requests, "request");
        let trace = match &self.file {
            Some(path) => format!("{requests} of {}", path.display()),
            None => format!("{requests} of a generated trace"),
        };
        let block = output::bytes(self.block_bytes);
        let capacity = match &self.coordinator {
            Some(_) => format!("chunks of {block}"),
            None => format!("{} chunks of {block}, {}", output::count(self.chunks_per_node), self.policy),
        };
        output::note(format_args!("Playing {trace} through {} ({capacity})", output::counted(nodes, "node")));
    }

    /// How fast chunks age in the nodes: about as fast as the trace is played, so that ages are the same as when the trace was
    /// recorded. Nodes count ages by whole factors, at least 1.
    fn age_speed(&self) -> NonZeroU32 {
        let whole = self.speed.unwrap_or(1.0).round().min(u32::MAX.into()) as u32;
        NonZeroU32::new(whole).unwrap_or(NonZeroU32::MIN)
    }

    fn cluster(&self) -> anyhow::Result<DevOptions> {
        Ok(DevOptions {
            nodes: self.dev,
            chunks_per_node: Some(self.chunks_per_node),
            chunks_of_last_node: self.last_node_chunks,
            block_bytes: Some(self.block_bytes),
            disk: self.disk_chunks_per_node.map(|chunks| DevDisk::of_chunks(chunks, self.block_bytes)),
            policy: self.policy,
            share: !self.no_share,
            placement: self.placement,
            send_bytes_per_second: self.send_bytes_per_second,
            age_speed: self.age_speed(),
            tracing: self.tracing.of_followers(),
            requests_in_flight: self.in_flight.max(USUAL_REQUESTS_IN_FLIGHT),
            ..DevOptions::new()?
        })
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn requests_are_played_by_their_times_wherever_they_are_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.jsonl");
        let line = |at: u64, id: u64| {
            format!("{{\"timestamp\":{at},\"input_length\":9,\"output_length\":1,\"hash_ids\":[{id}]}}\n")
        };
        std::fs::write(&path, [line(30, 1), line(10, 2), line(30, 3), line(20, 4)].concat()).unwrap();
        let line = Line::parse_from(["replay", path.to_str().unwrap()]);
        let ids = line.args.trace().unwrap().into_iter().map(|request| request.block_ids[0]);
        assert_eq!(ids.collect::<Vec<_>>(), [2, 4, 1, 3]);
    }

    #[test]
    fn a_node_that_was_restarted_counts_its_forwarded_chunks_from_0() {
        let forwarded = |lives: &[(u64, u64)]| {
            lives.iter().map(|&(life, chunks)| (("a".to_owned(), life), chunks)).collect::<Forwarded>()
        };
        assert_eq!(forwarded_since(&forwarded(&[(1, 5)]), &forwarded(&[(1, 7)])), 2);
        assert_eq!(forwarded_since(&forwarded(&[(1, 5)]), &forwarded(&[(2, 3)])), 3);
    }
}
