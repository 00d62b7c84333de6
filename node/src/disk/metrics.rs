//! What a disk tier counts.

use larder_client::metrics::Families;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::log::Log;
use crate::metrics::table;

/// The metrics of a disk tier.
#[derive(Debug, Clone)]
pub struct DiskMetrics {
    /// Bytes that were read, headers and what the scrubber reads included.
    pub read_bytes: IntCounter,
    /// Bytes that were written, headers and moves included.
    pub written_bytes: IntCounter,
    /// Bytes of records that were moved because they were read since they were written.
    pub moved_bytes: IntCounter,
    /// Bytes that the scrubber verified.
    pub scrubbed_bytes: IntCounter,
    /// Chunks that are on disk.
    pub records: IntGauge,
    /// Chunks that left because their segment was given up.
    pub evicted: IntCounter,
    /// Seconds that a sync takes.
    pub sync_seconds: Histogram,
    /// 1 where the tier closed itself after a failure.
    pub closed: IntGauge,
    segments: IntGaugeVec,
    damaged: IntCounterVec,
    answers: IntCounterVec,
}

/// Where wrong bytes were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundBy {
    /// A read.
    Read,
    /// The scrubber.
    Scrub,
    /// A move to a younger segment.
    Move,
    /// The search through a segment without a right footer. What a killed process left half written counts too.
    Recovery,
}

impl DiskMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Where a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let families = Families::new(registry, &[table::DISK]);
        Ok(Self {
            read_bytes: families.counter("larder_disk_read_bytes_total")?,
            written_bytes: families.counter("larder_disk_written_bytes_total")?,
            moved_bytes: families.counter("larder_disk_moved_bytes_total")?,
            scrubbed_bytes: families.counter("larder_disk_scrubbed_bytes_total")?,
            records: families.gauge("larder_disk_records")?,
            evicted: families.counter("larder_disk_evicted_chunks_total")?,
            sync_seconds: families.histogram("larder_disk_sync_seconds")?,
            closed: families.gauge("larder_disk_closed")?,
            segments: families.gauges("larder_disk_segments")?,
            damaged: families.counters("larder_disk_checksum_failures_total")?,
            answers: families.counters("larder_disk_orders_total")?,
        })
    }

    /// Wrong bytes so far.
    #[must_use]
    pub fn damaged(&self, by: FoundBy) -> u64 {
        self.damaged.with_label_values(&[by.name()]).get()
    }

    /// Orders so far that ended this way.
    #[must_use]
    pub fn answers(&self, outcome: &str) -> u64 {
        self.answers.with_label_values(&[outcome]).get()
    }

    pub(super) fn found_damage(&self, by: FoundBy) {
        self.damaged.with_label_values(&[by.name()]).inc();
    }

    pub(super) fn answered(&self, outcome: &str) {
        self.answers.with_label_values(&[outcome]).inc();
    }

    pub(super) fn bring_up_to_date(&self, log: &Log) {
        self.records.set(log.records() as i64);
        let counts = log.counts();
        for (state, count) in [("free", counts.free), ("open", counts.open), ("sealed", counts.sealed)] {
            self.segments.with_label_values(&[state]).set(count as i64);
        }
    }
}

impl FoundBy {
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Scrub => "scrub",
            Self::Move => "move",
            Self::Recovery => "recovery",
        }
    }
}
