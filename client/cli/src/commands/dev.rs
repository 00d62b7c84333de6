//! `larder dev`: runs a development cluster.

use std::convert::Infallible;
use std::path::PathBuf;
use std::process::ExitCode;

use larder_core::store::policy::PolicyName;
use serde::Serialize;

use crate::cluster::Addresses;
use crate::dev::{DevCluster, DevDisk, DevError, DevOptions};
use crate::failure::Usage;
use crate::tracing::TraceOptions;
use crate::{output, signals, values};

/// Run a development cluster on this machine until Ctrl-C, SIGTERM or the end of the terminal
///
/// The command starts a coordinator and nodes as separate processes, on free ports of the loopback interface, and prints their
/// addresses. It makes an authority and certificates for them. The nodes share their chunks. `larder status` and `larder lookup`
/// find the newest development cluster by themselves. A process that dies is started again, up to five times in a minute. All
/// processes end with this command, however it ends.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder dev                                       One node with an arena of 256 MiB
  larder dev --nodes 2 --arena-bytes 1GiB --policy fifo
  larder dev --json                                One JSON object when all are ready, for scripts
  larder dev --dir ./dev                           Keep configuration files and logs there")]
pub(crate) struct Args {
    /// Number of nodes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,

    /// A number of nodes without its option
    #[arg(hide = true, value_parser = without_option)]
    without_option: Option<Infallible>,

    /// Memory of each node's arena [default: enough for the chunks, or 256 MiB]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    arena_bytes: Option<u64>,

    /// Limit of chunks that each node keeps [default: as many as the arena holds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    chunks_per_node: Option<u64>,

    /// Bytes of one chunk's block, to size the arena for --chunks-per-node
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, requires = "chunks_per_node")]
    block_bytes: Option<u64>,

    /// Give each node a disk tier of this size in the cluster's directory; with --dir it survives the cluster
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    disk_bytes: Option<u64>,

    /// Give the nodes a shared object store, such as file:///FOLDER or s3://BUCKET/PREFIX
    #[arg(long, value_name = "URL")]
    object_store: Option<String>,

    /// Eviction policy
    #[arg(long, value_parser = values::policy(), default_value_t)]
    policy: PolicyName,

    /// Let each node serve only the chunks of its own engines
    #[arg(long)]
    no_share: bool,

    /// Limit of the bytes of blocks that each node sends to others in a second, as on a slower network
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    send_bytes_per_second: Option<u64>,

    /// Threads of each node that move blocks between nodes, beside the thread that does everything else between nodes [default:
    /// as many as suit the machine]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=8))]
    block_threads: Option<u8>,

    /// Move blocks between nodes over TCP, encrypted by TLS: better than QUIC on networks with packets of 1,500 bytes
    #[arg(long)]
    blocks_over_tcp: bool,

    /// Folder with tokenizers of models, MODEL/tokenizer.json: with them the console takes the text of a prompt
    #[arg(long, value_name = "DIR")]
    tokenizers: Option<PathBuf>,

    /// Folder for configuration files, sockets and logs [default: a temporary folder, removed at the end]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,

    /// Print the cluster's addresses as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    tracing: TraceOptions,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Ready<'a> {
    ready: bool,
    ready_after_seconds: f64,
    dir: PathBuf,
    /// The console, with the token that changes nodes.
    console: Option<String>,
    #[serde(flatten)]
    addresses: &'a Addresses,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let options = args.into_options()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(options, json))
}

async fn serve(options: DevOptions, json: bool) -> anyhow::Result<ExitCode> {
    let stop = signals::stop_or_hangup()?;
    tokio::pin!(stop);
    let mut cluster = tokio::select! {
        started = DevCluster::start(options) => started.map_err(explain)?,
        () = &mut stop => return Ok(ExitCode::SUCCESS),
    };
    tokio::select! {
        joined = cluster.joined() => joined?,
        () = &mut stop => return Ok(ExitCode::SUCCESS),
    }
    announce(&cluster, json)?;
    let gave_up = tokio::select! {
        () = stop => None,
        gave_up = cluster.supervise() => Some(gave_up),
    };
    let stopped = cluster.stop().await;
    if let Some(gave_up) = gave_up {
        return Err(gave_up.into());
    }
    stopped?;
    Ok(ExitCode::SUCCESS)
}

fn announce(cluster: &DevCluster, json: bool) -> anyhow::Result<()> {
    let addresses = cluster.addresses();
    if json {
        let ready_after_seconds = cluster.ready_after().as_secs_f64();
        let dir = cluster.dir().to_owned();
        return Ok(output::print_json(&Ready {
            ready: true,
            ready_after_seconds,
            dir,
            console: cluster.console(),
            addresses,
        })?);
    }
    let mut table = output::table(&["process", "http", "session socket"]);
    if let Some(http) = addresses.coordinator {
        table.add_row(["coordinator", &http.to_string(), ""]);
    }
    for node in &addresses.nodes {
        let sockets: Vec<_> = node.sockets.values().map(|path| path.display().to_string()).collect();
        table.add_row([&node.name, &node.http.to_string(), &sockets.join("\n")]);
    }
    let console = cluster.console().map(|url| format!("Console: {url}\n")).unwrap_or_default();
    let dir = cluster.dir().display();
    let seconds = cluster.ready_after().as_secs_f64();
    Ok(output::print(&format!(
        "{table}\n{console}Logs and config files: {dir}\nReady after {seconds:.2} s. Ctrl-C stops the cluster."
    ))?)
}

/// Refuses a word that belongs to no option.
fn without_option(word: &str) -> Result<Infallible, String> {
    Err(match word.parse::<u16>() {
        Ok(nodes) => format!("for {nodes} nodes, say `larder dev --nodes {nodes}`"),
        Err(_) => "`larder dev` takes options only, such as `--nodes 2`".to_owned(),
    })
}

/// Marks errors in the options as the user's.
fn explain(error: DevError) -> anyhow::Error {
    match error {
        DevError::Options { .. } | DevError::SocketPath { .. } | DevError::InUse { .. } => {
            Usage(error.to_string()).into()
        }
        error => error.into(),
    }
}

impl Args {
    fn into_options(self) -> Result<DevOptions, DevError> {
        Ok(DevOptions {
            nodes: self.nodes,
            arena_bytes: self.arena_bytes,
            disk: self.disk_bytes.map(DevDisk::of_bytes),
            object_store: self.object_store,
            chunks_per_node: self.chunks_per_node,
            block_bytes: self.block_bytes,
            policy: self.policy,
            share: !self.no_share,
            send_bytes_per_second: self.send_bytes_per_second,
            block_threads: self.block_threads,
            blocks_over_tcp: self.blocks_over_tcp,
            tokenizers: self
                .tokenizers
                .map(std::path::absolute)
                .transpose()
                .map_err(|_| DevError::Options { what: "the folder of --tokenizers has no name".into() })?,
            tracing: self.tracing.config(),
            dir: self.dir,
            ..DevOptions::new()?
        })
    }
}
