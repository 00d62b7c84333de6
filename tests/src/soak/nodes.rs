//! The nodes of a run, as its engines see them: where they are, and when they were disturbed on purpose.

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
    /// Where it serves HTTP.
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

    /// It is another process from now on.
    pub(super) fn lives(&self, life: Life) {
        self.is_member(false);
        self.state().life = life;
    }

    /// Whether the coordinator has let it in. A process that is started again waits until its earlier life, or its clone, has been
    /// silent for long enough.
    pub(super) fn is_member(&self, is_member: bool) {
        self.is_member.store(is_member, Ordering::Release);
    }

    /// Whether peers may leave it out: it was disturbed since then, or is no member.
    pub(super) fn is_excused(&self, since: Instant) -> bool {
        self.was_disturbed_since(since) || !self.is_member.load(Ordering::Acquire)
    }

    pub(super) fn life(&self) -> Life {
        self.state().life.clone()
    }

    /// It is killed or stopped in a moment: what it does not answer from now on is no failure.
    pub(super) fn disturb(&self) {
        let mut state = self.state();
        state.disturbances.push_back(Disturbance { until: None });
        if state.disturbances.len() > KEPT {
            state.disturbances.pop_front();
        }
    }

    /// It is back, and has to answer what it is asked after `slack`.
    pub(super) fn settle(&self, slack: Duration) {
        let until = now() + slack;
        let mut state = self.state();
        let lasting = state.disturbances.iter_mut().filter(|disturbance| disturbance.until.is_none());
        lasting.for_each(|disturbance| disturbance.until = Some(until));
    }

    /// Whether it was killed or stopped, or was about to come back, at any time since then.
    pub(super) fn was_disturbed_since(&self, then: Instant) -> bool {
        self.state().disturbances.iter().any(|one| one.until.is_none_or(|until| until >= then))
    }

    /// What the threads of its process and of this one are doing: each with its state, what it waits for in the kernel, and the
    /// ticks of CPU time that it had so far.
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

/// Disturbances that are remembered: far more than a request lasts.
const KEPT: usize = 64;
