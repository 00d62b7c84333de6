//! What the directory counts.

pub(crate) mod table;

use larder_core::directory::{Outbox, Shard, ShardCounts};
use larder_net::metrics::Families;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, Registry};

/// Every metric of the directory.
#[derive(Debug, Clone)]
pub struct DirectoryMetrics {
    /// Rows of this home.
    rows: IntGauge,
    /// Rows for which this home has no room.
    missing_rows: IntGauge,
    /// Rows that this home can keep.
    max_rows: IntGauge,
    /// Holders that announce to this home.
    holders: IntGauge,
    /// Chunks that this node's actors hold.
    held: IntGauge,
    /// Changes that no announcement carries yet.
    waiting: IntGauge,
    /// Questions to homes, by outcome.
    pub(super) finds: IntCounterVec,
    /// Homes asked in one lookup.
    pub(super) homes: Histogram,
    /// Chunks of lookups that the cache knew.
    pub(super) cached: IntCounter,
    /// Chunks of lookups.
    pub(super) asked: IntCounter,
    /// Questions of peers answered.
    pub(super) served: IntCounter,
    /// Announcements of peers and of this node's own actors, by outcome.
    pub(super) announced: IntCounterVec,
    /// Announcements of this node, by outcome.
    pub(super) batches: IntCounterVec,
    /// Changes that homes have taken.
    pub(super) changes: IntCounter,
    /// From a change until its home knows it.
    pub(super) lag: Histogram,
    /// Moves that holders were told of, by outcome.
    pub(super) moved: IntCounterVec,
    /// Chunks that a holder did not have.
    pub(super) stale: IntCounter,
    /// The shard's own counts.
    shard: IntCounterVec,
}

impl DirectoryMetrics {
    /// Registers all of them.
    ///
    /// # Errors
    /// Fails if the registry has one of the names already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let families = Families::new(registry, &[table::DIRECTORY]);
        Ok(Self {
            rows: families.gauge("larder_directory_rows")?,
            missing_rows: families.gauge("larder_directory_missing_rows")?,
            max_rows: families.gauge("larder_directory_max_rows")?,
            holders: families.gauge("larder_directory_holders")?,
            held: families.gauge("larder_directory_held_chunks")?,
            waiting: families.gauge("larder_directory_waiting_changes")?,
            finds: families.counters("larder_directory_finds_total")?,
            homes: families.histogram("larder_directory_homes_asked")?,
            cached: families.counter("larder_directory_cached_chunks_total")?,
            asked: families.counter("larder_directory_asked_chunks_total")?,
            served: families.counter("larder_directory_served_finds_total")?,
            announced: families.counters("larder_directory_served_announces_total")?,
            batches: families.counters("larder_directory_announces_total")?,
            changes: families.counter("larder_directory_announced_changes_total")?,
            lag: families.histogram("larder_directory_announce_lag_seconds")?,
            moved: families.counters("larder_directory_moved_total")?,
            stale: families.counter("larder_directory_stale_chunks_total")?,
            shard: families.counters("larder_directory_shard_events_total")?,
        })
    }

    /// Brings the gauges up to date.
    pub(super) fn show(&self, shard: &Shard, outbox: &Outbox) {
        self.rows.set(shard.len() as i64);
        self.missing_rows.set(shard.missing() as i64);
        self.max_rows.set(shard.max_rows() as i64);
        self.holders.set(shard.holders() as i64);
        self.held.set(outbox.held() as i64);
        self.waiting.set(outbox.waiting() as i64);
        let ShardCounts { foreign, dropped, crowded, refilled, restarts, differing, repaired } =
            shard.counts();
        let events = [
            ("foreign", foreign),
            ("dropped", dropped),
            ("crowded", crowded),
            ("refilled", refilled),
            ("restart", restarts),
            ("differing", differing),
            ("repaired", repaired),
        ];
        for (event, count) in events {
            let counter = self.shard.with_label_values(&[event]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }
}
