//! `larder doctor`: the problems of this machine as a node's host, and their remedies.

use std::io::IsTerminal as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use larder_node::host::HostFacts;
use larder_node::{Config, FindingStatus};
use serde::Serialize;

use crate::address::Coordinators;
use crate::cluster::ask_coordinator;
use crate::commands::config::load_node;
use crate::doctor::{Files, Finding, Level, Probes, Subject};
use crate::failure::{FAILED, Usage};
use crate::{context, output};

/// Find this machine's problems for a node, and say what to do
///
/// The command checks memory and huge pages, NUMA, CPU quota, limits, io_uring, UDP, the paths to other servers, the clock,
/// certificates, folders, the object store and the GPU driver, and gives advice for each finding. The command changes nothing,
/// but it sends small and large datagrams to each checked address, and writes a small object to the object store and deletes it. Run
/// it as the node's user, in the node's container if it has one.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder doctor                                     This machine, for a node with the defaults
  larder doctor --config node.toml                  For this node: its arena, its certificates, its sockets
  larder doctor --config node.toml --peer 10.0.0.7:9441 --disk /var/lib/larder
                                                    The path to another node, a folder for the disk tier
  larder doctor --coordinator 127.0.0.1:7600 --json The paths to all members; one JSON object

Levels:
  problem  the node does not start, or does not work: the exit status is 1
  warning  the node works, but slowly or not safely
  note     the node could work better")]
pub(crate) struct Args {
    /// The node's configuration file [default: every key has its default]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Check the path to this address too; may be given several times
    #[arg(long = "peer", value_name = "HOST:PORT")]
    peers: Vec<String>,

    /// Check the paths to all members that this coordinator knows
    #[arg(long, value_name = "ADDR", value_parser = context::coordinators)]
    coordinator: Option<Coordinators>,

    /// Check this folder for the disk tier [default: the folder in the configuration]
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,

    /// Print JSON: one object with `findings`, each with `check`, `level`, `found` and `advice`
    #[arg(long)]
    json: bool,
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    problems: usize,
    warnings: usize,
    findings: Vec<Finding>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (subject, mut findings) = subject(args)?;
    findings.extend(subject.examine());
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let report = Report { problems: count(Level::Problem), warnings: count(Level::Warning), findings };
    if args.json {
        output::print_json(&report)?;
    } else {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        output::print(&report.text(colours))?;
    }
    Ok(if report.problems == 0 { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

/// The subject, and the findings about the coordinator.
fn subject(args: &Args) -> anyhow::Result<(Subject, Vec<Finding>)> {
    let root = Path::new("/");
    let config = args.config.as_deref().map(load_node).transpose();
    let config = config.context(Usage("the configuration cannot be used".into()))?.unwrap_or_default();
    let coordinators = config.cluster.iter().flat_map(|cluster| cluster.coordinator.split(','));
    let mut targets: Vec<String> = coordinators.map(|coordinator| coordinator.trim().to_owned()).collect();
    targets.extend(args.peers.iter().cloned());
    let mut findings = Vec::new();
    match args.coordinator.as_ref().map(ask_coordinator) {
        None => {}
        Some(Ok((_, status))) => targets.extend(status.nodes.iter().map(|node| node.peer.to_string())),
        Some(Err(error)) => findings.push(Finding {
            check: "coordinator",
            level: Level::Problem,
            found: format!("{error:#}: the paths to its members are not checked"),
            advice: Some("start it, or name another one with --coordinator".into()),
        }),
    }
    let disk = args.disk.as_deref().or(config.disk.as_ref().map(|disk| disk.folder.as_path()));
    let disk = disk.map(|folder| (folder, actors(&config)));
    let (host, files) = (HostFacts::read(root)?, Files::below(root));
    let limits = config.resolve(&host);
    let object = limits.as_ref().ok().and_then(|limits| Some(&limits.object.as_ref()?.options));
    let node_runs = config.tenants.iter().any(|tenant| UnixStream::connect(&tenant.socket).is_ok());
    let probes = Probes::run(&targets, disk, object, (node_runs, PATIENCE));
    Ok((Subject { files, probes, limits, now: SystemTime::now(), host, config }, findings))
}

/// The actors of a node with this configuration.
fn actors(config: &Config) -> usize {
    config.gpus.len().max(1)
}

/// Examines the host for a node that runs here with this configuration. Nothing is sent, and nothing written to an object store.
/// Waits for a drive that hangs, so that a node that examines its host again and again waits with one thread.
pub(crate) fn examine_host_of(config: &Config) -> Vec<FindingStatus> {
    let root = Path::new("/");
    let host = match HostFacts::read(root) {
        Ok(host) => host,
        Err(error) => {
            let (check, level) = ("host".to_owned(), Level::Problem.name().to_owned());
            return vec![FindingStatus { check, level, found: error.to_string(), advice: None }];
        }
    };
    let disk = config.disk.as_ref().map(|disk| (disk.folder.as_path(), actors(config)));
    let subject = Subject {
        files: Files::below(root),
        probes: Probes::run(&[], disk, None, (true, Duration::MAX)),
        limits: config.resolve(&host),
        now: SystemTime::now(),
        host,
        config: config.clone(),
    };
    let told = |Finding { check, level, found, advice }: Finding| FindingStatus {
        check: check.to_owned(),
        level: level.name().to_owned(),
        found,
        advice,
    };
    subject.examine().into_iter().map(told).collect()
}

impl Report {
    /// A line for each finding, and one for its remedy.
    fn text(&self, colours: bool) -> String {
        let width = self.findings.iter().map(|finding| finding.check.len()).max().unwrap_or(0);
        let mut text = String::new();
        for Finding { check, level, found, advice } in &self.findings {
            let name = format!("{:7}", level.name());
            let name = if colours { format!("\x1b[{}m{name}\x1b[0m", colour(*level)) } else { name };
            text += &format!("{name}  {check:width$}  {found}\n");
            if let Some(advice) = advice {
                text += &format!("{:7}  {:width$}  -> {advice}\n", "", "");
            }
        }
        let (problems, warnings) =
            (output::counted(self.problems, "problem"), output::counted(self.warnings, "warning"));
        format!("{text}\n{problems}, {warnings}.")
    }
}

/// How long a drive or the object store may take to answer: longer than a store that answers slowly.
const PATIENCE: Duration = Duration::from_secs(20);

/// The level's color: green, blue, yellow, bold red.
fn colour(level: Level) -> &'static str {
    match level {
        Level::Ok => "32",
        Level::Note => "34",
        Level::Warning => "33",
        Level::Problem => "1;31",
    }
}
