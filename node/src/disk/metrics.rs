//! What a disk tier counts.

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::log::Log;

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
    /// Registers them, for the tier of the actor with this number.
    ///
    /// # Errors
    /// Where they are registered already.
    pub fn new(registry: &Registry, device: u16) -> Result<Self, prometheus::Error> {
        let device = device.to_string();
        let opts = |name: &str, help: &str| {
            Opts::new(format!("larder_disk_{name}"), help).const_label("device", &device)
        };
        let counter = |name: &str, help: &str| IntCounter::with_opts(opts(name, help));
        let gauge = |name: &str, help: &str| IntGauge::with_opts(opts(name, help));
        let sync = HistogramOpts::new("larder_disk_sync_seconds", "Time until the drive has everything");
        let sync = sync.const_label("device", &device);
        let metrics = Self {
            read_bytes: counter("read_bytes_total", "Bytes read from disk")?,
            written_bytes: counter("written_bytes_total", "Bytes written to disk")?,
            moved_bytes: counter("moved_bytes_total", "Bytes rewritten because they were in use")?,
            scrubbed_bytes: counter("scrubbed_bytes_total", "Bytes that the scrubber verified")?,
            records: gauge("records", "Chunks on disk")?,
            evicted: counter("evicted_chunks_total", "Chunks that left the disk to make room")?,
            sync_seconds: Histogram::with_opts(sync.buckets(SYNC_BUCKETS.to_vec()))?,
            closed: gauge("closed", "1 where the disk tier closed itself after a failure")?,
            segments: IntGaugeVec::new(opts("segments", "Segments, by state"), &["state"])?,
            damaged: IntCounterVec::new(
                opts("checksum_failures_total", "Wrong bytes on disk, by who found them"),
                &["found_by"],
            )?,
            answers: IntCounterVec::new(opts("orders_total", "Orders, by what came of them"), &["outcome"])?,
        };
        metrics.register(registry)?;
        Ok(metrics)
    }

    fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all: [Box<dyn Collector>; 11] = [
            Box::new(self.read_bytes.clone()),
            Box::new(self.written_bytes.clone()),
            Box::new(self.moved_bytes.clone()),
            Box::new(self.scrubbed_bytes.clone()),
            Box::new(self.records.clone()),
            Box::new(self.evicted.clone()),
            Box::new(self.sync_seconds.clone()),
            Box::new(self.closed.clone()),
            Box::new(self.segments.clone()),
            Box::new(self.damaged.clone()),
            Box::new(self.answers.clone()),
        ];
        all.into_iter().try_for_each(|metric| registry.register(metric))
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

/// Seconds, from 50 microseconds to ten seconds.
const SYNC_BUCKETS: [f64; 9] = [5e-5, 2e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 2.0, 10.0];
