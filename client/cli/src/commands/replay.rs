//! `larder replay`: plays a trace through real engine sessions.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::timeout;

use crate::clock::now;
use crate::cluster::{Addresses, NodeAddress};
use crate::dev::{DevCluster, DevOptions, Policy};
use crate::failure::{FAILED, Usage};
use crate::generator::{DEFAULT_REQUESTS, Generator};
use crate::replay::progress::Progress;
use crate::replay::{DEFAULT_BLOCK_BYTES, DEFAULT_CHUNKS_PER_NODE, Driver, REQUESTS_IN_FLIGHT, Report};
use crate::trace::{Request, TraceReader};
use crate::{args, output, signals};

/// Play a trace through real engine sessions and check every byte that comes back
///
/// Each request looks its prompt up, leases and copies out what hits, compares it with what the keys imply,
/// "computes" the rest, and saves it. Full chunks of 512 tokens are cached; requests start in the order of the trace, four
/// at a time. Fails where a byte is wrong or a request failed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder replay                                   A generated trace, through a node started for it
  larder replay trace.jsonl --chunks-per-node 10000 --block-bytes 4096 --policy lru
  larder replay trace.jsonl --limit 1000 --json   1,000 requests; results as one JSON object
  larder replay --coordinator 127.0.0.1:7600      Through the nodes of a running cluster

Trace: Mooncake's JSON lines, one id for each 512 tokens of the prompt:
  {\"timestamp\": MS, \"input_length\": TOKENS, \"output_length\": TOKENS, \"hash_ids\": [...]}

Several nodes: this release does not share chunks between nodes, and `--dev N` above 1 needs
`--no-share`. Each request then goes to the node that recomputed least lately (half-life 30 s of
trace time).")]
pub(crate) struct Args {
    /// The trace, `-` for standard input; without one, a trace is generated
    file: Option<PathBuf>,

    /// Start a development cluster of N nodes for this replay
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "coordinator",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    dev: u16,

    /// Use the nodes that this coordinator knows
    #[arg(long, value_name = "ADDR")]
    coordinator: Option<SocketAddr>,

    /// The most chunks that each node keeps, over all of its actors
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHUNKS_PER_NODE, conflicts_with = "coordinator",
          value_parser = clap::value_parser!(u64).range(1..))]
    chunks_per_node: u64,

    /// Bytes of one chunk's block
    #[arg(long, value_name = "BYTES", value_parser = args::bytes, default_value_t = DEFAULT_BLOCK_BYTES)]
    block_bytes: u64,

    /// Who is evicted first
    #[arg(long, value_enum, default_value_t, conflicts_with = "coordinator")]
    policy: Policy,

    /// Each node serves only what it computed itself
    #[arg(long)]
    no_share: bool,

    /// Requests that are played at a time, at most
    #[arg(long, value_name = "N", default_value_t = REQUESTS_IN_FLIGHT as u16,
          value_parser = clap::value_parser!(u16).range(1..=16))]
    in_flight: u16,

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
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.coordinator.is_none() {
        args.check_sharing(usize::from(args.dev))?;
    }
    let requests = args.trace()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(replay(args, &requests))
}

/// Starts or finds the nodes, plays, stops what it started, and prints what was found.
async fn replay(args: &Args, requests: &[Request]) -> anyhow::Result<ExitCode> {
    let stop = signals::stop()?;
    tokio::pin!(stop);
    let started = tokio::select! {
        started = args.nodes() => started,
        () = &mut stop => bail!("interrupted before the first request"),
    };
    let (mut cluster, nodes) = started?;
    args.say_what_is_played(requests.len(), nodes.len());
    let played = play(args, requests, &nodes, stop).await;
    let is_well = played.as_ref().is_ok_and(|played| played.report.passed());
    let died = match &mut cluster {
        // The run may have failed because a node ended, of which the system tells a moment later.
        Some(cluster) if !is_well => timeout(OBITUARY, cluster.died()).await.ok(),
        _ => None,
    };
    let stopped = match cluster {
        Some(cluster) => cluster.stop().await,
        None => Ok(()),
    };
    let played = match (played, died.clone()) {
        (Err(_), Some(died)) => return Err(died.into()),
        (played, _) => played?,
    };
    played.print(args.json)?;
    match (died, stopped) {
        (Some(died), _) => Err(died.into()),
        (None, Err(error)) => Err(error.into()),
        _ if played.interrupted => {
            bail!("interrupted after {} of {} requests", played.report.requests, requests.len())
        }
        _ if !is_well => Ok(ExitCode::from(FAILED)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// What came of it, however it ended.
struct Played {
    report: Report,
    interrupted: bool,
}

async fn play(
    args: &Args,
    requests: &[Request],
    nodes: &[NodeAddress],
    mut stop: Pin<&mut impl Future<Output = ()>>,
) -> anyhow::Result<Played> {
    let driver = tokio::select! {
        driver = Driver::connect(nodes, args.block_bytes) => driver?,
        () = &mut stop => bail!("interrupted before the first request"),
    };
    let progress = Progress::new(requests.len() as u64, args.quiet);
    let start = now();
    let interrupted = tokio::select! {
        () = driver.play(requests, args.in_flight, &progress) => false,
        () = stop => true,
    };
    let took = now() - start;
    progress.finish();
    Ok(Played { report: driver.report(took), interrupted })
}

impl Played {
    fn print(&self, json: bool) -> io::Result<()> {
        if json { output::print_json(&self.report) } else { output::print(&self.report.table()) }
    }
}

/// How long a failed replay waits to hear that a node of its own has ended.
const OBITUARY: Duration = Duration::from_millis(500);

impl Args {
    fn trace(&self) -> anyhow::Result<Vec<Request>> {
        let Some(path) = &self.file else {
            let requests = self.requests.min(self.limit.unwrap_or(usize::MAX));
            return Ok(Generator::new(self.seed).take(requests).collect());
        };
        let wrong = || Usage(format!("cannot play {}", path.display()));
        let lines: Box<dyn BufRead> = if path.as_os_str() == "-" {
            Box::new(io::stdin().lock())
        } else {
            Box::new(BufReader::new(File::open(path).with_context(wrong)?))
        };
        TraceReader::new(lines).read_all(self.limit).with_context(wrong)
    }

    /// The nodes to play through, with the cluster that was started for it.
    async fn nodes(&self) -> anyhow::Result<(Option<DevCluster>, Vec<NodeAddress>)> {
        if let Some(coordinator) = self.coordinator {
            let nodes = tokio::task::spawn_blocking(move || Addresses::discover(coordinator)).await??.nodes;
            if nodes.is_empty() {
                bail!("the coordinator at {coordinator} knows no nodes");
            }
            self.check_sharing(nodes.len())?;
            return Ok((None, nodes));
        }
        let cluster = DevCluster::start(self.cluster()?).await?;
        let nodes = cluster.addresses().nodes.clone();
        Ok((Some(cluster), nodes))
    }

    /// Tells people, on standard error, what the numbers to come are about.
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
        let capacity = match self.coordinator {
            Some(_) => format!("chunks of {block}"),
            None => format!("{} chunks of {block}, {}", output::count(self.chunks_per_node), self.policy),
        };
        eprintln!("Playing {trace} through {} ({capacity})", output::counted(nodes, "node"));
    }

    fn cluster(&self) -> anyhow::Result<DevOptions> {
        Ok(DevOptions {
            nodes: self.dev,
            chunks_per_node: Some(self.chunks_per_node),
            block_bytes: Some(self.block_bytes),
            policy: self.policy,
            ..DevOptions::new()?
        })
    }

    fn check_sharing(&self, nodes: usize) -> anyhow::Result<()> {
        if nodes > 1 && !self.no_share {
            return Err(Usage(format!(
                "this release does not share chunks between nodes, and there are {nodes}: add --no-share to replay \
                 through caches that know nothing of each other"
            ))
            .into());
        }
        Ok(())
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number".into()),
    }
}
