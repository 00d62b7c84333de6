//! Starts a cluster, breaks it on purpose, mends it, and notes where it breaks on its own.

mod process;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use larder_net::quic::ca::Authority;
use rustix::process::Signal;
use tokio::sync::oneshot;

use super::SoakRun;
use super::nodes::Node;
use super::tally::Tally;
use crate::wait::now;

use self::process::{Processes, What};

/// The faults of a cluster, besides killed nodes.
#[derive(Debug, Clone, Default)]
pub(super) struct Plan {
    /// Whether nodes are stopped for a while, and clones of nodes are started.
    pub(super) stops_and_clones: bool,
    /// More of each node's environment and configuration, by its number.
    pub(super) nodes: Vec<NodePlan>,
}

/// What is special about one node.
#[derive(Debug, Clone, Default)]
pub(super) struct NodePlan {
    pub(super) environment: Vec<(String, String)>,
    pub(super) config: String,
}

/// A cluster and its disturbances, all on one thread. The cluster's processes end with this thread.
pub(super) struct Chaos {
    program: PathBuf,
    folder: PathBuf,
    nodes: u16,
    arena_bytes: u64,
    plan: Plan,
    rng: fastrand::Rng,
    kill_every: Duration,
    tally: Arc<Tally>,
}

/// The cluster and its thread. Dropping it ends both.
pub(super) struct Handle {
    cluster: Cluster,
    ends: Ends,
}

/// Ends the thread, and with it the cluster, when dropped.
struct Ends {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The processes of a cluster, and their authority.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) nodes: Vec<Arc<Node>>,
    pub(super) coordinator: Arc<Node>,
    pub(super) authority: Arc<Authority>,
}

/// The times of the next disturbances.
struct Due {
    kill: Instant,
    stop: Instant,
    clone: Instant,
}

impl Chaos {
    pub(super) fn new(run: &SoakRun, plan: Plan) -> Self {
        Self {
            program: run.program.clone(),
            folder: run.folder.clone(),
            nodes: run.options.nodes,
            arena_bytes: run.options.arena_mib << 20,
            plan,
            rng: fastrand::Rng::with_seed(run.options.seed.wrapping_add(1)),
            kill_every: run.options.kill_every(),
            tally: Arc::clone(&run.tally),
        }
    }

    /// Breaks and mends the cluster until `stop` is set, then stops it as an operator would.
    fn work(mut self, mut processes: Processes, stop: &AtomicBool) {
        let start = now();
        let mut due = Due {
            kill: start + self.kill_every,
            stop: start + self.kill_every.mul_f64(0.6),
            clone: start + self.kill_every.mul_f64(0.3),
        };
        while !stop.load(Ordering::Acquire) {
            let now = now();
            processes.watch(now);
            if now >= due.kill {
                due.kill = now + self.kill_every;
                self.kill_one(&mut processes, now);
            }
            if self.plan.stops_and_clones && now >= due.stop {
                due.stop = now + self.kill_every.mul_f64(0.7);
                self.stop_one(&mut processes, now);
            }
            if self.plan.stops_and_clones && now >= due.clone {
                due.clone = now + self.kill_every.mul_f64(1.5);
                let until = now + self.kill_every.mul_f64(0.5).min(LONGEST_CLONE);
                processes.start_clone(self.rng.usize(..usize::from(self.nodes)), until);
            }
            std::thread::sleep(TICK);
        }
        processes.stop();
    }

    fn kill_one(&mut self, processes: &mut Processes, now: Instant) {
        // In runs that watch the first node for growth, the first node is never killed.
        let first = usize::from(self.plan.stops_and_clones);
        let victim = self.rng.usize(first..usize::from(self.nodes));
        let down = Duration::from_millis(self.rng.u64(0..2_000));
        if processes.disturb(victim, What::Kill, now + down) {
            self.tally.count(|counts| counts.kills += 1);
        }
    }

    fn stop_one(&mut self, processes: &mut Processes, now: Instant) {
        let victim = self.rng.usize(..usize::from(self.nodes));
        let down = Duration::from_millis(self.rng.u64(100..4_000));
        if processes.disturb(victim, What::Signal(Signal::STOP), now + down) {
            self.tally.count(|counts| counts.stops += 1);
        }
    }
}

impl Handle {
    /// Starts the cluster. Ready when all nodes are members.
    pub(super) async fn start(chaos: Chaos) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (started, cluster) = oneshot::channel();
        let is_to_stop = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("chaos".into()).spawn(move || {
            let processes = Processes::start(&chaos);
            let cluster = processes.as_ref().map(Processes::cluster);
            // Nobody listens any more if the run was interrupted.
            let _ = started.send(cluster.map_err(|error| anyhow::anyhow!("{error:#}")));
            if let Ok(processes) = processes {
                chaos.work(processes, &is_to_stop);
            }
        })?;
        let ends = Ends { stop, thread: Some(thread) };
        let cluster = cluster.await.context("the cluster's thread ended")??;
        Ok(Self { cluster, ends })
    }

    pub(super) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Stops the cluster as an operator would.
    pub(super) async fn end(&mut self) -> anyhow::Result<()> {
        self.ends.stop.store(true, Ordering::Release);
        let thread = self.ends.thread.take();
        let ended = tokio::task::spawn_blocking(move || thread.map(JoinHandle::join)).await?;
        anyhow::ensure!(!matches!(ended, Some(Err(_))), "the cluster's thread ended in a panic");
        Ok(())
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The thread has told of its panic already.
            let _ = thread.join();
        }
    }
}

/// The ratio of a node's disk to its memory: half of what engines use.
pub(super) const DISK_TIMES: u64 = 5;

/// How often processes are checked.
const TICK: Duration = Duration::from_millis(20);

/// The longest life of a clone.
const LONGEST_CLONE: Duration = Duration::from_secs(10);
