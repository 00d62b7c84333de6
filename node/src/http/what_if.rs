//! `GET /what_if`: the hits that the last lookups would have had with more memory, more disk or another policy.
//!
//! Playing the lookups takes seconds of one processor. A thread of the lowest priority does it, at most once a minute for all
//! requests.

use std::sync::Arc;
use std::time::Duration;

use larder_core::store::policy::PolicyName;
use larder_core::what_if::{PastLookup, Played, Tried, play};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::timeout;

use super::HttpState;
use crate::actor::{ActorReport, GpuActor};

/// The body of `GET /what_if`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WhatIfStatus {
    /// Whether lookups are being played at the moment: ask again for a newer answer.
    pub running: bool,
    /// Seconds since the answer was made; `None` without an answer.
    pub age_seconds: Option<f64>,
    /// The answer; `None` while the first answer is being made, and if nothing was looked up or cached yet.
    pub played: Option<PlayedStatus>,
}

/// The lookups that were played, in [`WhatIfStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlayedStatus {
    /// The policy in force.
    pub policy: String,
    /// Chunks that memory and disk keep at present. With `write_through`, those in memory are on disk too, and count once.
    pub capacity_chunks: u64,
    /// Bytes of a chunk, on average over the cached chunks.
    pub chunk_bytes: u64,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// Lookups that only filled the cache.
    pub warming_lookups: u64,
    /// Lookups that were counted.
    pub counted_lookups: u64,
    /// Lookups that were left out: their chunks have another size, or a chunk follows another chunk than in another lookup.
    pub left_out_lookups: u64,
    /// Seconds from the first counted lookup to the last.
    pub counted_seconds: f64,
    /// The number of different chunks in these lookups: a cache for more chunks than this is as good as a cache that never
    /// evicts.
    pub distinct_chunks: u64,
    /// Tokens of the counted lookups.
    pub tokens_asked: u64,
    /// Tokens of the counted lookups that were really found, including those at other nodes.
    pub tokens_found: u64,
    /// The caches that were tried.
    pub tried: Vec<TriedStatus>,
}

/// A cache in [`PlayedStatus`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TriedStatus {
    /// The cache's policy.
    pub policy: String,
    /// The cache's size, as a multiple of the present size; `None` for a cache that never evicts.
    pub times: Option<f64>,
    /// Chunks that the cache keeps.
    pub capacity_chunks: u64,
    /// Tokens of the counted lookups that the cache hits.
    pub tokens_hit: u64,
}

/// The last answer, and whether a newer one is being made.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    is_running: bool,
    last: Option<(Duration, Option<PlayedStatus>)>,
}

/// The cache at present.
pub(super) struct Present {
    pub(super) policy: PolicyName,
    pub(super) capacity_chunks: u64,
    pub(super) chunk_bytes: u64,
}

/// Starts to play the last lookups if the last answer is old, and waits a second for the result.
pub(super) async fn what_if(state: &HttpState) -> WhatIfStatus {
    let mut progress = state.what_if.subscribe();
    let now = state.clock.elapsed();
    let begins = state.what_if.send_if_modified(|progress| {
        let is_fresh = progress.last.as_ref().is_some_and(|(at, _)| now.saturating_sub(*at) < FRESH);
        let begins = !is_fresh && !progress.is_running;
        progress.is_running |= begins;
        begins
    });
    if begins {
        begin(state, Running(Arc::clone(&state.what_if))).await;
    }
    // Done or timed out: the answer is whatever is known now.
    let _ = timeout(PATIENCE, progress.wait_for(|progress| !progress.is_running)).await;
    let now = state.clock.elapsed();
    let progress = progress.borrow();
    WhatIfStatus {
        running: progress.is_running,
        age_seconds: progress.last.as_ref().map(|(at, _)| now.saturating_sub(*at).as_secs_f64()),
        played: progress.last.as_ref().and_then(|(_, played)| played.clone()),
    }
}

/// The lookups of all actors, and the present cache; `None` if nothing is cached.
pub(super) async fn seen(state: &HttpState) -> (Vec<PastLookup>, Option<Present>) {
    let reports: Vec<ActorReport> =
        state.ask_actors(GpuActor::report).await.map(|(_, report)| report).collect();
    let lookups =
        state.ask_actors(|actor| actor.core.past()).await.flat_map(|(_, lookups)| lookups).collect();
    (lookups, Present::of(&reports))
}

async fn begin(state: &HttpState, running: Running) {
    let ((lookups, present), clock) = (seen(state).await, state.clock);
    let work = move || {
        // An error: the thread goes on at its old priority.
        let _ = rustix::process::nice(LOWEST_PRIORITY);
        let played = present.and_then(|present| {
            let played = play(lookups, present.capacity_chunks, present.policy)?;
            Some(played_status(&present, played))
        });
        running.0.send_modify(|progress| progress.last = Some((clock.elapsed(), played)));
    };
    if let Err(error) = std::thread::Builder::new().name("larder-what-if".into()).spawn(work) {
        tracing::warn!(%error, "cannot start a thread that plays lookups");
    }
}

/// Marks that lookups are being played, until it is dropped.
struct Running(Arc<watch::Sender<Progress>>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|progress| progress.is_running = false);
    }
}

impl Present {
    /// Describes the present cache. `None` if nothing is cached: then the size of a chunk is unknown.
    fn of(reports: &[ActorReport]) -> Option<Self> {
        let sum = |of: fn(&ActorReport) -> u64| reports.iter().map(of).sum::<u64>();
        let chunk_bytes = sum(|report| report.usage.cached_bytes)
            .checked_div(sum(|report| report.usage.cached_chunks))
            .filter(|&bytes| bytes > 0)?;
        let in_memory = |report: &ActorReport| {
            let room = report.usage.bytes.total / chunk_bytes;
            report.usage.capacity_chunks.map_or(room, |chunks| chunks.min(room))
        };
        let capacity = |report: &ActorReport| {
            let (memory, disk) = (in_memory(report), on_disk(report, chunk_bytes));
            match report.usage.disk {
                Some(usage) if usage.writes_through => memory.max(disk),
                _ => memory + disk,
            }
        };
        let capacity_chunks = reports.iter().map(capacity).sum();
        Some(Self { policy: reports.first()?.policy, capacity_chunks, chunk_bytes })
    }
}

/// Chunks that an actor's disk has room for. A record is larger than its block: it counts as the average of those on disk, but as
/// no more than two blocks, since records that nobody needs any more take room too.
fn on_disk(report: &ActorReport, chunk_bytes: u64) -> u64 {
    let Some((used, capacity)) = report.disk_fill else { return 0 };
    let chunks = report.usage.disk.map_or(0, |usage| usage.chunks);
    capacity / used.checked_div(chunks).unwrap_or(chunk_bytes).clamp(chunk_bytes, 2 * chunk_bytes)
}

fn played_status(present: &Present, played: Played<Tried>) -> PlayedStatus {
    let tried = |Tried { variant, capacity_chunks, tokens_hit }: Tried| TriedStatus {
        policy: variant.policy.to_string(),
        times: variant.times,
        capacity_chunks,
        tokens_hit,
    };
    PlayedStatus {
        policy: present.policy.to_string(),
        capacity_chunks: present.capacity_chunks,
        chunk_bytes: present.chunk_bytes,
        chunk_tokens: played.chunk_tokens,
        warming_lookups: played.warming_lookups,
        counted_lookups: played.counted_lookups,
        left_out_lookups: played.left_out_lookups,
        counted_seconds: played.counted_ms as f64 / 1_000.0,
        distinct_chunks: played.distinct_chunks,
        tokens_asked: played.tokens_asked,
        tokens_found: played.tokens_found,
        tried: played.tried.into_iter().map(tried).collect(),
    }
}

/// The lifetime of an answer.
const FRESH: Duration = Duration::from_secs(60);

/// How long a request waits for an answer: less than a coordinator waits for a node.
const PATIENCE: Duration = Duration::from_secs(1);

/// All other threads go first.
const LOWEST_PRIORITY: i32 = 19;

#[cfg(test)]
mod tests {
    use larder_core::store::{Bytes, DiskUsage, Usage};

    use super::*;

    fn capacity(disk: Option<(bool, u64)>) -> u64 {
        let usage = Usage {
            bytes: Bytes { total: 10 << 20, ..Bytes::default() },
            cached_chunks: 4,
            cached_bytes: 4 << 20,
            disk: disk.map(|(writes_through, chunks)| DiskUsage {
                writes_through,
                chunks,
                ..DiskUsage::default()
            }),
            ..Usage::default()
        };
        let report = ActorReport {
            usage,
            policy: PolicyName::Lru,
            tokens_asked: 0,
            tokens_hit: 0,
            tenants: Vec::new(),
            disk_fill: disk.map(|(_, chunks)| (chunks * (5 << 18), 100 << 20)),
            disk_trouble: None,
        };
        Present::of(&[report]).unwrap().capacity_chunks
    }

    #[test]
    fn a_chunk_in_memory_and_on_disk_counts_once_and_a_record_by_its_own_size() {
        assert_eq!((capacity(None), capacity(Some((false, 0)))), (10, 110));
        assert_eq!((capacity(Some((false, 8))), capacity(Some((true, 8)))), (90, 80));
    }
}
