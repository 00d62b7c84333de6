//! What the directory counts.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use super::outbox::Outbox;
use super::shard::{Shard, ShardCounts};

/// Every metric of the directory.
#[derive(Debug, Clone)]
pub struct DirectoryMetrics {
    /// Rows of this home.
    rows: IntGauge,
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
    /// What the shard counts itself.
    shard: IntCounterVec,
}

impl DirectoryMetrics {
    /// Registers all of them.
    ///
    /// # Errors
    /// Where the registry has one of these names already.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let families = Families(registry);
        let homes = HistogramOpts::new("larder_directory_homes_asked", "Homes asked in one lookup")
            .buckets(vec![0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
        let lag = HistogramOpts::new(
            "larder_directory_announce_lag_seconds",
            "From a chunk's gain or loss until its home knows",
        )
        .buckets(vec![0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0]);
        Ok(Self {
            rows: families.gauge("rows", "Rows whose home this node is")?,
            holders: families.gauge("holders", "Actors of the cluster that announce to this home")?,
            held: families.gauge("held_chunks", "Chunks that this node's actors hold")?,
            waiting: families.gauge("waiting_changes", "Changes that no announcement carries yet")?,
            finds: families.by("finds_total", "Questions to other homes, by outcome", "outcome")?,
            homes: families.histogram(homes)?,
            cached: families.counter("cached_chunks_total", "Chunks asked for whose answer was known")?,
            asked: families.counter("asked_chunks_total", "Chunks asked for")?,
            served: families.counter("served_finds_total", "Questions of peers that were answered")?,
            announced: families.by(
                "served_announces_total",
                "Announcements received, by outcome",
                "outcome",
            )?,
            batches: families.by("announces_total", "Announcements sent, by outcome", "outcome")?,
            changes: families.counter("announced_changes_total", "Changes that homes have taken")?,
            lag: families.histogram(lag)?,
            moved: families.by("moved_total", "Holders told that chunks moved, by outcome", "outcome")?,
            stale: families.counter("stale_chunks_total", "Chunks that their holder did not have")?,
            shard: families.by("shard_events_total", "What happened to rows of this home", "event")?,
        })
    }

    /// Brings the gauges up to date.
    pub(super) fn show(&self, shard: &Shard, outbox: &Outbox) {
        self.rows.set(shard.len() as i64);
        self.holders.set(shard.holders() as i64);
        self.held.set(outbox.held() as i64);
        self.waiting.set(outbox.waiting() as i64);
        let ShardCounts { foreign, dropped, restarts, differing, repaired } = shard.counts();
        let events = [
            ("foreign", foreign),
            ("dropped", dropped),
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

struct Families<'a>(&'a Registry);

impl Families<'_> {
    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        let gauge = IntGauge::new(format!("{PREFIX}{name}"), help)?;
        self.0.register(Box::new(gauge.clone()))?;
        Ok(gauge)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let counter = IntCounter::new(format!("{PREFIX}{name}"), help)?;
        self.0.register(Box::new(counter.clone()))?;
        Ok(counter)
    }

    fn by(&self, name: &str, help: &str, label: &str) -> Result<IntCounterVec, prometheus::Error> {
        let counters = IntCounterVec::new(Opts::new(format!("{PREFIX}{name}"), help), &[label])?;
        self.0.register(Box::new(counters.clone()))?;
        Ok(counters)
    }

    fn histogram(&self, options: HistogramOpts) -> Result<Histogram, prometheus::Error> {
        let histogram = Histogram::with_opts(options)?;
        self.0.register(Box::new(histogram.clone()))?;
        Ok(histogram)
    }
}

const PREFIX: &str = "larder_directory_";
