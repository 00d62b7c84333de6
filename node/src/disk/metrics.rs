//! The metrics of a disk tier.

use larder_net::metrics::{Label, Part as _};
use larder_net::metrics_table;
use prometheus::Registry;

use super::log::Log;

metrics_table! {
    /// The metrics of the disk tier of one actor.
    pub struct DiskMetrics: "Disk", "nodes with a disk tier" => {
        read_bytes: IntCounter = "larder_disk_read_bytes_total", "bytes", [DEVICE],
            "Bytes read from disk, including headers and the scrubber's reads";
        written_bytes: IntCounter = "larder_disk_written_bytes_total", "bytes", [DEVICE],
            "Bytes written to disk, including headers and moves";
        moved_bytes: IntCounter = "larder_disk_moved_bytes_total", "bytes", [DEVICE],
            "Bytes rewritten when their segment was given up: they were in use, or their tenant has less than its part of the disk";
        scrubbed_bytes: IntCounter = "larder_disk_scrubbed_bytes_total", "bytes", [DEVICE],
            "Bytes that the scrubber verified";
        records: IntGauge = "larder_disk_records", "chunks", [DEVICE], "Chunks on disk";
        evicted: IntCounter = "larder_disk_evicted_chunks_total", "chunks", [DEVICE],
            "Chunks that left the disk to make room";
        sync_seconds: Histogram = "larder_disk_sync_seconds", "seconds", [DEVICE],
            "Time of a sync: until the drive has all written bytes"
            in [5e-5, 2e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 2.0, 10.0];
        used_bytes: IntGauge = "larder_disk_used_bytes", "bytes", [DEVICE],
            "Bytes of the tier's file that records have taken; segments are freed as wholes";
        closed: IntGauge = "larder_disk_closed", "bool", [DEVICE],
            "1 if the disk tier closed itself after a failure";
        silent: IntGauge = "larder_disk_silent", "bool", [DEVICE],
            "1 while the drive does not answer the disk tier";
        read_errors: IntCounter = "larder_disk_read_errors_total", "records", [DEVICE],
            "Records and pages that the drive could not read; no reader got them";
        segments: IntGaugeVec = "larder_disk_segments", "segments",
            [DEVICE, Label::one_of("state", &["free", "open", "sealed"])],
            "Segments, by state";
        damaged: IntCounterVec = "larder_disk_checksum_failures_total", "records",
            [DEVICE, Label::one_of("found_by", &["read", "scrub", "move", "recovery"])],
            "Records with wrong bytes on disk, by finder; no reader got them";
        waiting_bytes: IntGauge = "larder_disk_waiting_bytes", "bytes", [DEVICE],
            "Bytes of chunks that wait to be written, or are being written";
        shed: IntCounter = "larder_disk_shed_chunks_total", "chunks", [DEVICE],
            "Chunks that were not written because too many waited";
        answers: IntCounterVec = "larder_disk_orders_total", "orders",
            [DEVICE, Label::one_of("outcome", OUTCOMES)],
            "Orders to the disk tier, by outcome";
    }
}

/// The reader that found wrong bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum FoundBy {
    /// A read.
    Read,
    /// The scrubber.
    Scrub,
    /// A move to a younger segment.
    Move,
    /// The search through a segment without a right footer. Records that a killed process left half written count too.
    Recovery,
}

impl DiskMetrics {
    /// Registers the metrics of one actor's tier.
    ///
    /// # Errors
    /// Fails if they are registered already.
    pub fn new(registry: &Registry, device: u16) -> Result<Self, prometheus::Error> {
        Self::register_with(registry, &[(DEVICE.name, &device.to_string())])
    }

    /// Wrong bytes so far.
    pub fn damaged(&self, by: FoundBy) -> u64 {
        self.damaged.with_label_values(&[by.name()]).get()
    }

    /// Orders so far that ended this way.
    pub fn answers(&self, outcome: &str) -> u64 {
        self.answers.with_label_values(&[outcome]).get()
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes.get() as u64
    }

    pub(super) fn found_damage(&self, by: FoundBy) {
        self.damaged.with_label_values(&[by.name()]).inc();
    }

    pub(crate) fn answered(&self, outcome: &str) {
        self.answers.with_label_values(&[outcome]).inc();
    }

    pub(super) fn bring_up_to_date(&self, log: &Log) {
        self.records.set(log.records() as i64);
        self.used_bytes.set(log.used_bytes() as i64);
        let counts = log.counts();
        for (state, count) in [("free", counts.free), ("open", counts.open), ("sealed", counts.sealed)] {
            self.segments.with_label_values(&[state]).set(count as i64);
        }
    }
}

impl FoundBy {
    fn name(self) -> &'static str {
        self.into()
    }
}

/// The label of an actor.
pub(crate) const DEVICE: Label = Label::each("device", "each actor of the node, from 0");

/// The outcomes of orders.
pub(crate) const OUTCOMES: &[&str] = &[
    "read",
    "not_held",
    "other_blocks",
    "damaged",
    "disagrees",
    "written",
    "already_there",
    "too_large",
    "busy",
    "closed",
    "silent",
    "misnamed",
    "undescribed",
];
