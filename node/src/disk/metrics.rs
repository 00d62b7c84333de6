//! What a disk tier counts.

pub(crate) mod table;

use larder_net::metrics::Families;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::log::Log;

/// The metrics of a disk tier.
#[derive(Debug, Clone)]
pub struct DiskMetrics {
    /// Bytes read, including headers and the scrubber's reads.
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
    /// Records and pages that the drive could not read.
    pub read_errors: IntCounter,
    segments: IntGaugeVec,
    damaged: IntCounterVec,
    answers: IntCounterVec,
    device: String,
}

/// The reader that found wrong bytes.
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

/// The metrics of all disk tiers of a node, which differ in the device.
#[derive(Debug, Clone)]
pub struct DiskFamilies {
    read_bytes: IntCounterVec,
    written_bytes: IntCounterVec,
    moved_bytes: IntCounterVec,
    scrubbed_bytes: IntCounterVec,
    records: IntGaugeVec,
    evicted: IntCounterVec,
    sync_seconds: HistogramVec,
    closed: IntGaugeVec,
    read_errors: IntCounterVec,
    segments: IntGaugeVec,
    damaged: IntCounterVec,
    answers: IntCounterVec,
    /// Bytes of chunks that wait to be written.
    pub(crate) waiting_bytes: IntGaugeVec,
    /// Chunks that were not written because too many waited.
    pub(crate) shed: IntCounterVec,
}

impl DiskFamilies {
    /// Registers them.
    ///
    /// # Errors
    /// Fails if a name is taken.
    pub fn new(families: &Families<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            read_bytes: families.counters("larder_disk_read_bytes_total")?,
            written_bytes: families.counters("larder_disk_written_bytes_total")?,
            moved_bytes: families.counters("larder_disk_moved_bytes_total")?,
            scrubbed_bytes: families.counters("larder_disk_scrubbed_bytes_total")?,
            records: families.gauges("larder_disk_records")?,
            evicted: families.counters("larder_disk_evicted_chunks_total")?,
            sync_seconds: families.histograms("larder_disk_sync_seconds")?,
            closed: families.gauges("larder_disk_closed")?,
            read_errors: families.counters("larder_disk_read_errors_total")?,
            segments: families.gauges("larder_disk_segments")?,
            damaged: families.counters("larder_disk_checksum_failures_total")?,
            answers: families.counters("larder_disk_orders_total")?,
            waiting_bytes: families.gauges("larder_disk_waiting_bytes")?,
            shed: families.counters("larder_disk_shed_chunks_total")?,
        })
    }

    /// The metrics of one actor's tier.
    #[must_use]
    pub fn of_device(&self, device: u16) -> DiskMetrics {
        let device = device.to_string();
        let only = &[device.as_str()];
        // All of them are there from the start, at zero.
        for by in [FoundBy::Read, FoundBy::Scrub, FoundBy::Move, FoundBy::Recovery] {
            self.damaged.with_label_values(&[&*device, by.name()]);
        }
        for outcome in table::OUTCOMES {
            self.answers.with_label_values(&[&*device, outcome]);
        }
        DiskMetrics {
            read_bytes: self.read_bytes.with_label_values(only),
            written_bytes: self.written_bytes.with_label_values(only),
            moved_bytes: self.moved_bytes.with_label_values(only),
            scrubbed_bytes: self.scrubbed_bytes.with_label_values(only),
            records: self.records.with_label_values(only),
            evicted: self.evicted.with_label_values(only),
            sync_seconds: self.sync_seconds.with_label_values(only),
            closed: self.closed.with_label_values(only),
            read_errors: self.read_errors.with_label_values(only),
            segments: self.segments.clone(),
            damaged: self.damaged.clone(),
            answers: self.answers.clone(),
            device,
        }
    }
}

impl DiskMetrics {
    /// Registers the metrics of a single tier.
    ///
    /// # Errors
    /// Fails if they are registered already.
    pub fn new(registry: &Registry, device: u16) -> Result<Self, prometheus::Error> {
        Ok(DiskFamilies::new(&Families::new(registry, &[table::DISK]))?.of_device(device))
    }

    /// Wrong bytes so far.
    #[must_use]
    pub fn damaged(&self, by: FoundBy) -> u64 {
        self.damaged.with_label_values(&[&*self.device, by.name()]).get()
    }

    /// Orders so far that ended this way.
    #[must_use]
    pub fn answers(&self, outcome: &str) -> u64 {
        self.answers.with_label_values(&[&*self.device, outcome]).get()
    }

    pub(super) fn found_damage(&self, by: FoundBy) {
        self.damaged.with_label_values(&[&*self.device, by.name()]).inc();
    }

    pub(super) fn answered(&self, outcome: &str) {
        self.answers.with_label_values(&[&*self.device, outcome]).inc();
    }

    pub(super) fn bring_up_to_date(&self, log: &Log) {
        self.records.set(log.records() as i64);
        let counts = log.counts();
        for (state, count) in [("free", counts.free), ("open", counts.open), ("sealed", counts.sealed)] {
            self.segments.with_label_values(&[&*self.device, state]).set(count as i64);
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
