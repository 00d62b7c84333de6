//! The nodes of a run, as its engines see them: their addresses, and when they were disturbed on purpose.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::wait::now;

/// One node, over all its lives.
pub(super) struct Node {
    pub(super) name: String,
    /// Its session sockets, by tenant.
    pub(super) sockets: Vec<PathBuf>,
    state: Mutex<State>,
    is_member: AtomicBool,
}

#[derive(Default)]
struct State {
    life: Life,
    disturbances: VecDeque<Disturbance>,
}

/// The process that a node is now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Life {
    pub(super) pid: u32,
    /// The address on which the process serves HTTP.
    pub(super) http: String,
}

struct Disturbance {
    /// `None` while it lasts.
    until: Option<Instant>,
}

impl Node {
    pub(super) fn new(name: String, sockets: Vec<PathBuf>) -> Self {
        Self { name, sockets, state: Mutex::default(), is_member: AtomicBool::new(false) }
    }

    /// Notes that the node is another process from now on.
    pub(super) fn lives(&self, life: Life) {
        self.is_member(false);
        self.state().life = life;
    }

    /// Notes whether the coordinator has let the process join. A process that is started again waits until its earlier life, or
    /// its clone, has been silent for long enough.
    pub(super) fn is_member(&self, is_member: bool) {
        self.is_member.store(is_member, Ordering::Release);
    }

    /// Whether peers may leave the node out: it was disturbed since `since`, or is no member.
    pub(super) fn is_excused(&self, since: Instant) -> bool {
        self.was_disturbed_since(since) || !self.is_member.load(Ordering::Acquire)
    }

    pub(super) fn life(&self) -> Life {
        self.state().life.clone()
    }

    /// Notes that the node is killed or stopped in a moment: requests that it does not answer from now on are no failure.
    pub(super) fn disturb(&self) {
        let mut state = self.state();
        state.disturbances.push_back(Disturbance { until: None });
        if state.disturbances.len() > KEPT {
            state.disturbances.pop_front();
        }
    }

    /// Notes that the node is back. It has to answer requests that are sent after `slack`.
    pub(super) fn settle(&self, slack: Duration) {
        let until = now() + slack;
        let mut state = self.state();
        let lasting = state.disturbances.iter_mut().filter(|disturbance| disturbance.until.is_none());
        lasting.for_each(|disturbance| disturbance.until = Some(until));
    }

    /// Whether the node was killed or stopped, or was about to come back, at any time since `then`.
    pub(super) fn was_disturbed_since(&self, then: Instant) -> bool {
        self.state().disturbances.iter().any(|one| one.until.is_none_or(|until| until >= then))
    }

    /// The state of the threads of the node's process and of this process: each with its state, its wait in the kernel, and its
    /// ticks of CPU time so far.
    pub(super) fn threads(&self) -> String {
        let own = std::process::id();
        let of = |pid: u32| {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            let text = |task: &std::fs::DirEntry, file| {
                std::fs::read_to_string(task.path().join(file)).unwrap_or_default().trim().to_owned()
            };
            let one = |task: std::fs::DirEntry| {
                let stat = text(&task, "stat");
                let fields: Vec<&str> =
                    stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
                let field = |at: usize| fields.get(at).copied().unwrap_or("?");
                let (name, waits) = (text(&task, "comm"), text(&task, "wchan"));
                format!("{name} {} in {waits}, {}+{}", field(0), field(11), field(12))
            };
            tasks.map(one).collect::<Vec<_>>().join("; ")
        };
        format!("{}: {}\nsoak: {}", self.name, of(self.life().pid), of(own))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Disturbances that are remembered: far more than happen during one request.
const KEPT: usize = 64;
