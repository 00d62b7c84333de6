//! What the directory counts.

use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use super::{OutboxCounts, ShardCounts};

/// The directory's metrics.
#[derive(Debug, Clone)]
pub struct DirectoryMetrics {
    /// Lookups in the directory.
    pub finds: IntCounter,
    /// Rows that lookups asked for: from the cache, from this node's own shard, from another home, or from one that did not
    /// answer.
    asked_rows: IntCounterVec,
    /// Homes that lookups asked.
    pub homes_asked: IntCounter,
    /// Rows that somebody found wrong.
    pub stale_rows: IntCounter,
    rows: IntGaugeVec,
    waiting: IntGauge,
    announced: IntCounterVec,
    shard: IntCounterVec,
}

/// Where the answer on a row came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedOf {
    /// The cache.
    Cache,
    /// This node is the home.
    Own,
    /// Another home.
    Home,
    /// A home that did not answer.
    Silent,
}

impl DirectoryMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Where a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name, help, label| IntCounterVec::new(Opts::new(name, help), &[label]);
        let metrics = Self {
            finds: IntCounter::new("larder_directory_finds_total", "Lookups in the directory")?,
            asked_rows: counters(
                "larder_directory_asked_rows_total",
                "Rows that lookups asked for, by who answered",
                "of",
            )?,
            homes_asked: IntCounter::new(
                "larder_directory_homes_asked_total",
                "Other nodes that lookups asked, one message each",
            )?,
            stale_rows: IntCounter::new(
                "larder_directory_stale_rows_total",
                "Rows whose holder did not have the chunk",
            )?,
            rows: IntGaugeVec::new(
                Opts::new("larder_directory_rows", "Rows this node is home to, and chunks it announces"),
                &["kind"],
            )?,
            waiting: IntGauge::new(
                "larder_directory_waiting_changes",
                "Chunks gained or lost that their homes were not told yet",
            )?,
            announced: counters(
                "larder_directory_announced_total",
                "Batches and changes that homes took, batches sent again, and streams begun anew",
                "what",
            )?,
            shard: counters(
                "larder_directory_shard_total",
                "Changes left out, streams told to begin anew, rows kept back, by reason",
                "what",
            )?,
        };
        let all: [Box<dyn Collector>; 8] = [
            Box::new(metrics.finds.clone()),
            Box::new(metrics.asked_rows.clone()),
            Box::new(metrics.homes_asked.clone()),
            Box::new(metrics.stale_rows.clone()),
            Box::new(metrics.rows.clone()),
            Box::new(metrics.waiting.clone()),
            Box::new(metrics.announced.clone()),
            Box::new(metrics.shard.clone()),
        ];
        all.into_iter().try_for_each(|metric| registry.register(metric))?;
        Ok(metrics)
    }

    /// Counts rows that a lookup asked for.
    pub fn asked(&self, of: AskedOf, rows: usize) {
        let of = match of {
            AskedOf::Cache => "cache",
            AskedOf::Own => "own",
            AskedOf::Home => "home",
            AskedOf::Silent => "silent",
        };
        self.asked_rows.with_label_values(&[of]).inc_by(rows as u64);
    }

    /// Brings the rest up to date.
    pub fn observe(&self, rows: u64, held: usize, waiting: usize, outbox: OutboxCounts, shard: ShardCounts) {
        self.rows.with_label_values(&["home"]).set(rows as i64);
        self.rows.with_label_values(&["held"]).set(held as i64);
        self.waiting.set(waiting as i64);
        let OutboxCounts { batches, changes, restarts, retries } = outbox;
        let announced = [("batch", batches), ("change", changes), ("restart", restarts), ("retry", retries)];
        let shard = [
            ("foreign", shard.foreign),
            ("dropped", shard.dropped),
            ("restart", shard.restarts),
            ("differing", shard.differing),
            ("repaired", shard.repaired),
        ];
        for (family, totals) in [(&self.announced, &announced[..]), (&self.shard, &shard[..])] {
            for (what, total) in totals {
                let counter = family.with_label_values(&[*what]);
                counter.inc_by(total.saturating_sub(counter.get()));
            }
        }
    }
}
