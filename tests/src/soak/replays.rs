//! Scenarios `sizes` and `again`: whole replays against a development cluster, both started by the commands that people use.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use larder_cli::cluster::{Addresses, NodeAddress};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout};

use super::deaths::PanicWatch;
use super::report::Verdict;
use super::{SoakRun, guard, parents};
use crate::replay::write_generated;
use crate::wait::now;

/// Two replays at once, with different chunk sizes; the node has room for the chunks of neither.
pub(super) async fn two_sizes(run: &SoakRun) -> anyhow::Result<Vec<Verdict>> {
    let mut cluster = DevCluster::start(run, &["--nodes", "2", "--arena-bytes", "67108864"]).await?;
    let trace = match run.options.trace() {
        Some(trace) => trace,
        None => {
            let path = run.folder.join("generated.jsonl");
            write_generated(&path, run.options.seed, 600)?;
            path
        }
    };
    let trace = trace.to_str().context("the trace's path is not UTF-8")?;
    let coordinator = cluster.coordinator()?;
    let (large, small) =
        (run.options.requests.min(1_500).to_string(), run.options.requests.min(600).to_string());
    for round in 0..run.options.rounds {
        if is_over(run) {
            break;
        }
        // The first round repeats the one that found the fault.
        let seed =
            if round == 0 { 7 } else { run.options.seed.wrapping_mul(1_000).wrapping_add(round.into()) };
        let seed = seed.to_string();
        let large = ["--requests", &large, "--seed", &seed, "--block-bytes", "65536"];
        let small = [trace, "--limit", &small, "--in-flight", "16", "--block-bytes", "4096"];
        let both = (replay(run, &coordinator, &large), replay(run, &coordinator, &small));
        let (large, small) = tokio::join!(both.0, both.1);
        large?;
        small?;
        run.tally.count(|counts| counts.rounds += 1);
        cluster.watch(run).await?;
    }
    cluster.stop(run).await?;
    Ok(Vec::new())
}

/// One trace after another on the same nodes, then a tenant that gives chunks other parents on each node.
pub(super) async fn again(run: &SoakRun) -> anyhow::Result<Vec<Verdict>> {
    let mut cluster = DevCluster::start(run, &["--nodes", "2"]).await?;
    let coordinator = cluster.coordinator()?;
    let (first, second) = (run.options.requests.min(2_000), run.options.requests.min(40_000));
    for round in 0..run.options.rounds {
        if is_over(run) {
            break;
        }
        // The first round repeats the one that found the fault.
        let of_round = run.options.seed.wrapping_mul(1_000).wrapping_add(2 * u64::from(round));
        let seeds = if round == 0 { [0, 3] } else { [of_round, of_round + 1] };
        for (requests, seed) in [(first, seeds[0]), (second, seeds[1])] {
            let (requests, seed) = (requests.to_string(), seed.to_string());
            replay(run, &coordinator, &["--requests", &requests, "--seed", &seed]).await?;
            cluster.watch(run).await?;
        }
        parents::attack(run, &cluster.addresses, round).await?;
        run.tally.count(|counts| counts.rounds += 1);
        cluster.watch(run).await?;
    }
    cluster.stop(run).await?;
    Ok(Vec::new())
}

fn is_over(run: &SoakRun) -> bool {
    run.options.time().is_some_and(|time| run.tally.elapsed() >= time)
}

/// `larder dev` as a process.
struct DevCluster {
    child: Child,
    /// Kept open: `larder dev` must not die when it prints more.
    _stdout: BufReader<ChildStdout>,
    addresses: Addresses,
    folder: PathBuf,
    /// Restarts that its log has reported.
    restarts: usize,
    panics: Vec<(String, PanicWatch)>,
}

impl DevCluster {
    async fn start(run: &SoakRun, arguments: &[&str]) -> anyhow::Result<Self> {
        let folder = run.folder.join("dev");
        let log = std::fs::File::create(run.folder.join("dev.log"))?;
        let mut child = guard::command(&run.program)?
            .args(["dev", "--json", "--dir"])
            .arg(&folder)
            .args(arguments)
            // The cluster announces itself here, so that the user's own clusters stay the newest.
            .env("XDG_RUNTIME_DIR", &run.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let mut stdout = BufReader::new(child.stdout.take().context("the cluster has no standard output")?);
        let mut line = String::new();
        stdout.read_line(&mut line).await?;
        let addresses: Addresses = serde_json::from_str(&line)
            .with_context(|| format!("no cluster: {}", text_of(&run.folder.join("dev.log"))))?;
        let names = addresses.nodes.iter().map(|node| node.name.clone()).chain(["coordinator".into()]);
        let panics =
            names.map(|name| (name.clone(), PanicWatch::new(folder.join(name).with_extension("log"))));
        let panics = panics.collect();
        Ok(Self { child, _stdout: stdout, addresses, folder, restarts: 0, panics })
    }

    fn coordinator(&self) -> anyhow::Result<String> {
        Ok(self.addresses.coordinator.context("the cluster has no coordinator")?.to_string())
    }

    /// Counts the processes that died since the last call.
    async fn watch(&mut self, run: &SoakRun) -> anyhow::Result<()> {
        let log = text_of(&run.folder.join("dev.log"));
        let restarts = log.matches("it is started again").count();
        let now = now();
        let mut panics: Vec<(String, String)> = Vec::new();
        for (name, watch) in &mut self.panics {
            panics.extend(watch.of_dead(now).map(|panic| (name.clone(), panic)));
        }
        let deaths = (restarts - self.restarts).max(panics.len());
        self.restarts = restarts;
        let mut panics = panics.into_iter();
        for _ in 0..deaths {
            let (name, panic) = panics.next().unzip();
            let name = name.unwrap_or_else(|| "a process".into());
            run.tally.died(&name, "`larder dev` or a panic in its log told of it".into(), panic);
        }
        if let Some(status) = self.child.try_wait()? {
            run.tally.died("larder dev", status.to_string(), None);
            anyhow::bail!("the cluster ended, see {} and {}", self.folder.display(), tail(&log));
        }
        if deaths > 0 {
            self.is_whole_again().await;
        }
        Ok(())
    }

    /// Waits until all nodes serve again, but no longer than that may take.
    async fn is_whole_again(&self) {
        let addresses = self.addresses.clone();
        let serve = move || {
            let Some(coordinator) = addresses.coordinator else { return false };
            let nodes = NodeAddress::discover(&coordinator).map(|found| found.len());
            nodes.is_ok_and(|nodes| nodes == addresses.nodes.len())
        };
        let start = now();
        while start.elapsed() < RESTART {
            let serve = serve.clone();
            if tokio::task::spawn_blocking(serve).await.unwrap_or(false) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Stops the cluster as a person would.
    async fn stop(mut self, run: &SoakRun) -> anyhow::Result<()> {
        self.watch(run).await?;
        crate::server::signal(
            self.child.id().context("the cluster has ended")?,
            rustix::process::Signal::TERM,
        )?;
        let ended = tokio::time::timeout(Duration::from_secs(30), self.child.wait()).await;
        match ended {
            Ok(Ok(status)) if status.success() => {}
            other => run.tally.died("larder dev", format!("told to end: {other:?}"), None),
        }
        Ok(())
    }
}

/// Plays a trace through the nodes of a coordinator, and counts the results.
async fn replay(run: &SoakRun, coordinator: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let mut child = guard::command(&run.program)?
        .args(["replay", "--json", "--quiet", "--coordinator", coordinator])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (mut report, mut said) = (String::new(), String::new());
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let (stdout, stderr) = (
        stdout.as_mut().context("an output of the replay is not piped")?,
        stderr.as_mut().context("an output of the replay is not piped")?,
    );
    let read = (stdout.read_to_string(&mut report), stderr.read_to_string(&mut said));
    let (reported, told) = tokio::join!(read.0, read.1);
    reported?;
    told?;
    let status = child.wait().await?;
    let Ok(report) = serde_json::from_str::<Value>(&report) else {
        run.tally.failed(1, || format!("replay {arguments:?}: {status}: {}", tail(&said)));
        return Ok(());
    };
    let number = |field: &str| report[field].as_u64().unwrap_or(0);
    run.tally.count(|counts| {
        counts.requests += number("requests");
        counts.chunks_asked += number("tokens_asked") / CHUNK_TOKENS;
        counts.chunks_hit += number("tokens_hit") / CHUNK_TOKENS;
        counts.bytes_checked += number("bytes_moved");
        counts.busy_answers += number("busy_answers");
        counts.given_up += number("saves_shed");
    });
    if number("wrong_bytes") > 0 {
        run.tally.wrong(number("wrong_bytes"), || format!("replay {arguments:?}: {}", report["first_wrong"]));
    }
    if number("failed_requests") > 0 {
        let why = || format!("replay {arguments:?}: {}", report["first_failure"]);
        run.tally.failed(number("failed_requests"), why);
    }
    if !status.success() && number("wrong_bytes") == 0 && number("failed_requests") == 0 {
        run.tally.failed(1, || format!("replay {arguments:?}: {status}: {}", tail(&said)));
    }
    // No node is ended on purpose here: a session that had to be opened again was lost by a fault.
    if number("sessions_reconnected") > 0 {
        let why = || format!("replay {arguments:?}: sessions that were lost");
        run.tally.failed(number("sessions_reconnected"), why);
    }
    Ok(())
}

fn text_of(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// How long a node that died may take to serve again.
const RESTART: Duration = Duration::from_secs(20);

/// Tokens of a replay's chunk.
const CHUNK_TOKENS: u64 = larder_cli::trace::CHUNK_TOKENS;
