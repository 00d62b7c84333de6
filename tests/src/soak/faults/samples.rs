//! Watches memory and descriptors of every process, and whether nodes leave out peers that are well.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::server::{get, sum};
use crate::soak::nodes::{Life, Node};
use crate::soak::report::Verdict;
use crate::wait::now;

/// The threads that watch, one for each process. Dropping this ends them.
pub(super) struct Samples {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Seen>>,
}

/// The samples of one process.
struct Seen {
    name: String,
    /// Samples of each life, by its process id.
    lives: BTreeMap<u32, Vec<Sample>>,
    left_out: LeftOut,
    /// Whether its disk tier closed.
    closed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Resident memory, without shared memory: arena and windows.
    memory_bytes: u64,
    descriptors: u64,
}

/// The time for which a node left out more peers than had an excuse.
#[derive(Debug, Default)]
struct LeftOut {
    since: Option<Instant>,
    longest: Duration,
    /// When the longest such time began, from the start of the watching.
    at: Duration,
}

impl Samples {
    /// Begins to watch.
    pub(super) fn start(nodes: &[Arc<Node>], coordinator: &Arc<Node>) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for process in nodes.iter().chain([coordinator]) {
            let others: Vec<Arc<Node>> =
                nodes.iter().filter(|other| other.name != process.name).map(Arc::clone).collect();
            let (process, stop) = (Arc::clone(process), Arc::clone(&stop));
            let thread = std::thread::Builder::new().name(format!("samples of {}", process.name));
            threads.push(thread.spawn(move || watch(&process, &others, &stop))?);
        }
        Ok(Self { stop, threads })
    }

    /// The verdicts on all samples. `is_long` says that the run was long enough for growth to show.
    pub(super) fn end(mut self, is_long: bool) -> Vec<Verdict> {
        self.stop.store(true, Ordering::Release);
        let seen: Vec<Seen> = self.threads.drain(..).filter_map(|thread| thread.join().ok()).collect();
        let worst = seen.iter().max_by_key(|process| process.left_out.longest);
        let longest = worst.map(|process| process.left_out.longest).unwrap_or_default();
        let whose = worst.filter(|_| longest > Duration::ZERO).map(|process| {
            format!(", by {} {} s after the start", process.name, process.left_out.at.as_secs())
        });
        let left_out = Verdict {
            what: "a healthy peer was left out for".into(),
            seen: format!("{:.1} s at most{}", longest.as_secs_f64(), whose.unwrap_or_default()),
            is_good: Some(longest <= MOST_LEFT_OUT),
        };
        let closed: Vec<&str> =
            seen.iter().filter(|process| process.closed).map(|process| process.name.as_str()).collect();
        let closed = Verdict {
            what: "disk tiers that closed".into(),
            seen: if closed.is_empty() { "none".into() } else { closed.join(", ") },
            is_good: Some(closed.is_empty()),
        };
        let mut verdicts = vec![left_out, closed];
        for process in &seen {
            verdicts.extend(process.growth(is_long));
        }
        verdicts
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

impl Seen {
    /// The growth of memory and descriptors in the longest life, by quarters.
    fn growth(&self, is_long: bool) -> Vec<Verdict> {
        let Some(samples) = self.lives.values().max_by_key(|samples| samples.len()) else {
            return Vec::new();
        };
        let lives = self.lives.len();
        let of = |what: &str, unit: &str, value: fn(&Sample) -> u64, slack: u64| {
            let quarters = quarters(samples, value);
            let is_flat = quarters[3] <= quarters[1] + quarters[1] / 10 + slack;
            // A short life is only warm-up.
            let is_judged = is_long && lives == 1 && samples.len() >= 4;
            let texts: Vec<String> = quarters.iter().map(u64::to_string).collect();
            let word = if is_flat { "flat" } else { "growing" };
            Verdict {
                what: format!("{}: {what}", self.name),
                seen: format!("{} {unit}by quarters of its longest life, {word}", texts.join(", ")),
                is_good: is_judged.then_some(is_flat),
            }
        };
        vec![
            of("memory", "MiB ", |sample| sample.memory_bytes >> 20, 8),
            of("descriptors", "", |sample| sample.descriptors, 32),
        ]
    }
}

/// The median of each quarter.
fn quarters(samples: &[Sample], value: fn(&Sample) -> u64) -> [u64; 4] {
    std::array::from_fn(|quarter| {
        let (from, to) = (samples.len() * quarter / 4, samples.len() * (quarter + 1) / 4);
        let mut part: Vec<u64> = samples[from..to].iter().map(value).collect();
        part.sort_unstable();
        part.get(part.len() / 2).copied().unwrap_or(0)
    })
}

fn watch(process: &Node, others: &[Arc<Node>], stop: &AtomicBool) -> Seen {
    let mut seen = Seen {
        name: process.name.clone(),
        lives: BTreeMap::new(),
        left_out: LeftOut::default(),
        closed: false,
    };
    let start = now();
    while !stop.load(Ordering::Acquire) {
        let began = now();
        let life = process.life();
        if let Some(sample) = sample(&life) {
            seen.lives.entry(life.pid).or_default().push(sample);
        }
        // A node that is stopped or gone does not answer.
        if let Ok(metrics) = get(&life.http, "/metrics") {
            seen.closed |= sum(&metrics, "larder_disk_closed") > 0.0;
            let silent = sum(&metrics, "larder_peer_silent") as u64;
            process.is_member(is_member(&life.http));
            let excused = others.iter().filter(|node| node.is_excused(began)).count() as u64;
            note(&mut seen.left_out, start, !process.is_excused(began) && silent > excused);
        }
        std::thread::sleep(PAUSE);
    }
    seen
}

/// Whether the node that answers here is a member of the cluster, by its own status.
fn is_member(http: &str) -> bool {
    let status = get(http, "/status").ok().and_then(|status| serde_json::from_str::<Value>(&status).ok());
    let cluster = status.as_ref().map(|status| &status["cluster"]);
    cluster.is_some_and(|cluster| cluster["number"] != 0 && cluster["refused"].is_null())
}

fn note(left_out: &mut LeftOut, start: Instant, leaves_out: bool) {
    if !leaves_out {
        left_out.since = None;
        return;
    }
    let now = now();
    let since = *left_out.since.get_or_insert(now);
    if now - since > left_out.longest {
        (left_out.longest, left_out.at) = (now - since, since - start);
    }
}

fn sample(life: &Life) -> Option<Sample> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", life.pid)).ok()?;
    let kib = |field: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let memory_bytes = (kib("VmRSS:")?.saturating_sub(kib("RssShmem:")?)) << 10;
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", life.pid)).ok()?.count() as u64;
    Some(Sample { memory_bytes, descriptors })
}

/// The time between samples.
const PAUSE: Duration = Duration::from_millis(250);

/// How long a node may leave out a healthy peer: the deadline of a fetch, and the time of sampling.
const MOST_LEFT_OUT: Duration = Duration::from_millis(2_000 + 1_000);
