//! Requests at rising rates. Each is sent when it is due, even if earlier requests have no answer yet.
//!
//! A bench that waits for each answer asks less of a slow node, and hides how long requests would have waited. This mistake is
//! known as coordinated omission. Here a request's time counts from when it was due.

mod arrivals;
mod engine;
mod picture;
mod seen;

use std::fs::read_to_string;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use larder_core::store::policy::PolicyName;
use rustix::param::clock_ticks_per_second;
use tokio::runtime::Builder;

use self::arrivals::arrivals;
use self::engine::Engines;
pub use self::picture::svg;
use self::seen::Seen;
pub use self::seen::{KindSeen, Knee, Step, table};
use crate::clock::{now, process_seconds};
use crate::dev::{DevCluster, DevOptions, TENANT};

/// The rates of the steps, and the limit of their latency.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Requests a second of the first step.
    pub first_rate: f64,
    /// Factor from the rate of a step to the rate of the next.
    pub factor: f64,
    /// Time of a step.
    pub step: Duration,
    /// Limit of the time of 99 % of the requests.
    pub limit: Duration,
    /// Most steps.
    pub steps: usize,
}

/// Raises the rate until two steps one after the other miss the limit, or until the nodes have no room for a step's blocks.
/// Passes each step to `tell` when it ends.
///
/// Two nodes on this host, 16 engines at one of them. Of ten requests six are lookups of 100 chunks that are there,
/// two are leases of them, one saves a block of 64 KiB, and one gets such a block from the other node.
///
/// # Errors
/// The cluster does not start, or a request fails. An answer that the node is busy is no failure: it is counted.
pub fn load(load: Load, mut tell: impl FnMut(&Step) -> anyhow::Result<()>) -> anyhow::Result<Vec<Step>> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let options = DevOptions {
            nodes: 2,
            arena_bytes: Some(ARENA_BYTES),
            extent_bytes: Some(EXTENT_BYTES),
            // This policy keeps the newest blocks: those that were saved for this step.
            policy: PolicyName::Lru,
            ..DevOptions::new()?
        };
        let cluster = DevCluster::start(options).await?;
        cluster.joined().await?;
        let sockets = cluster.addresses().nodes.iter().map(|node| node.sockets.get(TENANT));
        let sockets: Vec<&Path> = sockets
            .map(|socket| Ok(socket.context("the node has no socket")?.as_path()))
            .collect::<anyhow::Result<_>>()?;
        let nodes: Vec<u32> = cluster.pids().into_iter().skip(1).filter_map(|(_, pid)| pid).collect();
        let mut engines = Engines::connect(sockets[0], sockets[1]).await?;
        // Warms up: mappings, connections, memory of the nodes.
        step(&mut engines, &nodes, load, load.first_rate).await?;
        let (mut steps, mut missed, mut rate) = (Vec::new(), 0, load.first_rate);
        while missed < MISSES && steps.len() < load.steps && has_room(load, rate) {
            let seen = step(&mut engines, &nodes, load, rate).await?;
            tell(&seen)?;
            missed = if seen.within_limit { 0 } else { missed + 1 };
            steps.push(seen);
            rate *= load.factor;
        }
        drop(engines);
        cluster.stop().await?;
        Ok(steps)
    })
}

/// Whether the other node has room for the blocks that a step fetches.
fn has_room(load: Load, rate: f64) -> bool {
    Engines::fetched_bytes(requests(load, rate)) < ARENA_BYTES / 4 * 3
}

/// A few more requests than a step has on average, since their number is random.
fn requests(load: Load, rate: f64) -> usize {
    (rate * load.step.as_secs_f64() * 1.2) as usize + 64
}

/// Plays one step at this rate.
async fn step(engines: &mut Engines, nodes: &[u32], load: Load, rate: f64) -> anyhow::Result<Step> {
    engines.prepare(requests(load, rate)).await?;
    let cpu_before = (cpu(nodes)?, process_seconds());
    let mut seen = Seen::new(rate);
    let start = now();
    let mut arrivals = arrivals(rate, start, load.step, MOST_WAITING)?;
    while engines.waiting() < MOST_WAITING {
        tokio::select! {
            biased;
            answer = engines.answered() => seen.note(answer?),
            due = arrivals.recv() => match due {
                Some(due) => {
                    engines.ask(seen.asked, due);
                    seen.asked += 1;
                }
                None => break,
            },
        }
    }
    // Requests that were sent still get some time for their answers.
    let patience = tokio::time::sleep(PATIENCE);
    tokio::pin!(patience);
    while engines.waiting() > 0 {
        tokio::select! {
            biased;
            answer = engines.answered() => seen.note(answer?),
            () = &mut patience => break,
        }
    }
    let took = now() - start;
    let cpu_seconds = (cpu(nodes)? - cpu_before.0, process_seconds() - cpu_before.1);
    engines.forget_waiting();
    Ok(seen.step(took, cpu_seconds, load.limit))
}

/// CPU seconds of processes so far, including threads that have ended; precise to a hundredth.
fn cpu(nodes: &[u32]) -> io::Result<f64> {
    let seconds_of = |&pid| {
        let text = read_to_string(format!("/proc/{pid}/stat"))?;
        // The name is in brackets, and may have spaces. The user's and the system's time are the 12th and 13th fields after it.
        let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        let times = after_name.split_whitespace().skip(11).take(2);
        let ticks: u64 = times.filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        io::Result::Ok(ticks as f64 / clock_ticks_per_second() as f64)
    };
    nodes.iter().map(seconds_of).sum()
}

/// Room at each node for all blocks of a step at some 50,000 requests a second.
const ARENA_BYTES: u64 = 1 << 30;

const EXTENT_BYTES: u64 = 64 << 20;

/// Most requests without an answer. With more, the step sends no further requests: it has shown what it can.
const MOST_WAITING: usize = 8_192;

/// Steps one after the other that miss the limit before the bench ends: one alone may have been the machine's doing.
const MISSES: usize = 2;

/// Time after the last request in which answers still count.
const PATIENCE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_process_is_that_of_its_threads() {
        let start = process_seconds();
        while process_seconds() - start < 0.1 {}
        let seen = cpu(&[std::process::id()]).unwrap();
        assert!(seen > 0.05 && seen < process_seconds() + 0.05, "{seen}");
    }
}
