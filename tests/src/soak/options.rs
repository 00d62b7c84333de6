//! The command line of `tests/soak`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};

/// Attack a running cluster and check every byte that it serves
///
/// Starts a cluster of processes on this machine, plays engines against it, breaks it on purpose, and counts events
/// that must never happen: wrong bytes, failed requests, processes that died on their own.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "tests/soak",
    after_help = "\
Scenarios:
  sizes   Two replays at once whose chunks have 64 KiB and 4 KiB, on two nodes with 64 MiB each
  again   One trace after another on the same two nodes; then a tenant that gives the same hashes
          different parents on the two nodes, and fills both nodes
  mixed   Two tenants with three namespaces each (4 KiB; two slices of 20 KiB; 64 KiB with a recurrent
          state), memory for a tenth of their chunks, a disk for half of them, chains with holes, leases
          that are held, prefetches, pins and cancelled requests; a node is killed (SIGKILL) every 20 s
          and started again
  faults  The same as `mixed`, and more: nodes that stop for seconds (SIGSTOP), a clone with a
          node's identity, a disk with sectors that cannot be read, an object store that hangs, idle and
          hostile connections. Shows whether memory (resident, without arena and windows) and descriptors
          grow, and for how long a healthy peer was left out

Counted events:
  wrong bytes      bytes that are served under a key and are not the bytes of this key
  failed requests  requests that ended with an error, or were not answered in 10 s. Not counted: an answer
                   that the node is busy (the engine repeats the request for 10 s, then computes); a request
                   to a node that this command keeps killed or stopped (the engine repeats the request when
                   the node is back; it counts as failed if it gets no answer within 60 s)
  deaths           processes that ended without being told to, parts of a node that panicked, and processes
                   that did not end when they were told to

Exit status: 0 if all three counts are 0 (and, in a run of `faults` of 5 minutes or more, nothing grew), 1 if not, 2 for
impossible arguments. If the status is 1, the folder with all logs is kept.

Examples:
  tests/soak                              20 minutes of `mixed`
  tests/soak --minutes 2 --seed 7         Other requests, other victims
  tests/soak sizes --rounds 5
  tests/soak again --rounds 1 --requests 2000
  tests/soak faults --minutes 20 --json > report.json"
)]
pub(super) struct Options {
    /// What to do to the cluster
    #[arg(value_enum, default_value_t = Scenario::Mixed)]
    pub(super) scenario: Scenario,

    /// The longest time of the run [default: 20 for `mixed` and `faults`; `sizes` and `again` end with their rounds]
    #[arg(long, value_name = "MINUTES", value_parser = positive)]
    minutes: Option<f64>,

    /// The seed of all random choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,

    /// Rounds of `sizes` and `again`
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) rounds: u32,

    /// The most requests of each replay of `sizes` and `again` [default: all]
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    pub(super) requests: usize,

    /// The trace of small chunks in `sizes` [default: ../shared/traces/synthetic.jsonl beside the project, else a generated one]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Nodes of `mixed` and `faults`
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=16))]
    pub(super) nodes: u16,

    /// MiB of each node's arena in `mixed` and `faults`; engines use chunks of ten times this size
    #[arg(long, value_name = "MIB", default_value_t = 32, value_parser = clap::value_parser!(u64).range(16..=4096))]
    pub(super) arena_mib: u64,

    /// Time between two kills, and between two other faults, in `mixed` and `faults`
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, value_parser = positive)]
    kill_every: f64,

    /// Print the results as one JSON object
    #[arg(long)]
    pub(super) json: bool,

    /// Show no progress
    #[arg(long, short)]
    pub(super) quiet: bool,

    /// The folder for configuration files, logs and disks [default: a temporary one, removed after a good run]
    #[arg(long, value_name = "FOLDER")]
    pub(super) folder: Option<PathBuf>,

    /// Keep the temporary folder in any case
    #[arg(long)]
    pub(super) keep: bool,

    /// The `larder` command [default: the one beside this program]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

/// What to do to the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Scenario {
    /// Two block sizes
    Sizes,
    /// One trace after another
    Again,
    /// Namespaces, tenants, holes and kills
    Mixed,
    /// The same as `mixed` with more faults
    Faults,
}

impl Scenario {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sizes => "sizes",
            Self::Again => "again",
            Self::Mixed => "mixed",
            Self::Faults => "faults",
        }
    }

    /// Whether the scenario ends after its rounds.
    pub(super) fn has_rounds(self) -> bool {
        matches!(self, Self::Sizes | Self::Again)
    }
}

impl Options {
    /// The longest time of the run; `None` if only its rounds end it.
    pub(super) fn time(&self) -> Option<Duration> {
        let minutes = self.minutes.or((!self.scenario.has_rounds()).then_some(20.0));
        minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes))
    }

    pub(super) fn kill_every(&self) -> Duration {
        Duration::from_secs_f64(self.kill_every)
    }

    /// The `larder` command.
    pub(super) fn program(&self) -> anyhow::Result<PathBuf> {
        let program = match &self.program {
            Some(program) => program.clone(),
            None => std::env::current_exe()?.with_file_name("larder"),
        };
        program.canonicalize().with_context(|| format!("no `larder` command at {}", program.display()))
    }

    /// The trace of small chunks, if there is one.
    pub(super) fn trace(&self) -> Option<PathBuf> {
        let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces/synthetic.jsonl");
        self.trace.clone().or_else(|| Some(PathBuf::from(beside)).filter(|path| Path::exists(path)))
    }

    /// The command that repeats this run.
    pub(super) fn command(&self) -> String {
        let mut command = format!("tests/soak {} --seed {}", self.scenario.name(), self.seed);
        let mut add = |option: &str, value: String| command += &format!(" {option} {value}");
        if let Some(minutes) = self.minutes {
            add("--minutes", minutes.to_string());
        }
        if self.scenario.has_rounds() {
            add("--rounds", self.rounds.to_string());
            if self.requests < usize::MAX {
                add("--requests", self.requests.to_string());
            }
        } else {
            add("--nodes", self.nodes.to_string());
            add("--arena-mib", self.arena_mib.to_string());
            add("--kill-every", self.kill_every.to_string());
        }
        if let Some(trace) = &self.trace {
            add("--trace", trace.display().to_string());
        }
        command
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number < 1e6 => Ok(number),
        _ => Err("not a number above 0".into()),
    }
}
