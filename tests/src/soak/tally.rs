//! Counts what happens during a run.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::wait::now;

/// Counts that all threads of a run share.
pub(super) struct Tally {
    started: Instant,
    counts: Mutex<Counts>,
}

/// The counts of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Counts {
    pub(super) seconds: f64,
    pub(super) rounds: u32,
    pub(super) requests: u64,
    /// Requests that were repeated, since their node was killed or stopped.
    pub(super) asked_again: u64,
    pub(super) chunks_asked: u64,
    pub(super) chunks_hit: u64,
    pub(super) bytes_checked: u64,
    pub(super) wrong_bytes: u64,
    pub(super) failed_requests: u64,
    /// Answers that a node is busy.
    pub(super) busy_answers: u64,
    /// The number of times that an engine gave up on a busy node.
    pub(super) given_up: u64,
    pub(super) kills: u64,
    pub(super) stops: u64,
    pub(super) clones: u64,
    pub(super) hostile_connections: u64,
    pub(super) deaths: u64,
    /// The first few of each kind.
    pub(super) wrong: Vec<String>,
    pub(super) failures: Vec<String>,
    pub(super) died: Vec<Death>,
    /// The parts of the scenario that this machine cannot run, and the reasons.
    pub(super) left_out: Vec<String>,
}

/// A process, or a part of it, that ended on its own.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Death {
    pub(super) process: String,
    pub(super) after_seconds: f64,
    /// How the process ended.
    pub(super) how: String,
    /// The last panic in its log.
    pub(super) panic: Option<String>,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self { started: now(), counts: Mutex::default() }
    }

    pub(super) fn elapsed(&self) -> Duration {
        now() - self.started
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = self.locked(|counts| counts.clone());
        counts.seconds = self.elapsed().as_secs_f64();
        counts
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut Counts)) {
        self.locked(change);
    }

    /// Counts bytes served under `key` that are not the key's bytes.
    pub(super) fn wrong(&self, bytes: u64, key: impl FnOnce() -> String) {
        self.locked(|counts| {
            counts.wrong_bytes += bytes;
            note(&mut counts.wrong, key);
        });
    }

    /// Counts failed requests.
    pub(super) fn failed(&self, requests: u64, why: impl FnOnce() -> String) {
        let at = self.elapsed().as_secs_f64();
        self.locked(|counts| {
            counts.failed_requests += requests;
            note(&mut counts.failures, || format!("after {at:.1} s: {}", why()));
        });
    }

    /// Counts a process that died on its own.
    pub(super) fn died(&self, process: &str, how: String, panic: Option<String>) {
        let after_seconds = self.elapsed().as_secs_f64();
        self.locked(|counts| {
            counts.deaths += 1;
            note(&mut counts.died, || Death { process: process.to_owned(), after_seconds, how, panic });
        });
    }

    fn locked<T>(&self, change: impl FnOnce(&mut Counts) -> T) -> T {
        change(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Counts {
    /// Whether nothing happened that must never happen.
    pub(super) fn are_clean(&self) -> bool {
        (self.wrong_bytes, self.failed_requests, self.deaths) == (0, 0, 0)
    }

    pub(super) fn hit_rate(&self) -> f64 {
        self.chunks_hit as f64 / self.chunks_asked.max(1) as f64
    }
}

fn note<T>(list: &mut Vec<T>, entry: impl FnOnce() -> T) {
    if list.len() < NOTED {
        list.push(entry());
    }
}

/// The most entries of each list.
const NOTED: usize = 20;
