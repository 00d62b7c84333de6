//! The metrics of a disk tier.

use larder_net::metrics::{Label, Metric, Section};

/// Chunks on disk.
pub(crate) const DISK: Section = Section {
    title: "Disk",
    only: "nodes with a disk tier",
    metrics: &[
        Metric::counter(
            "larder_disk_read_bytes_total",
            "bytes",
            &[DEVICE],
            "Bytes read from disk, headers and what the scrubber reads included",
        ),
        Metric::counter(
            "larder_disk_written_bytes_total",
            "bytes",
            &[DEVICE],
            "Bytes written to disk, headers and moves included",
        ),
        Metric::counter(
            "larder_disk_moved_bytes_total",
            "bytes",
            &[DEVICE],
            "Bytes rewritten because they were in use when their segment was given up",
        ),
        Metric::counter(
            "larder_disk_scrubbed_bytes_total",
            "bytes",
            &[DEVICE],
            "Bytes that the scrubber verified",
        ),
        Metric::gauge("larder_disk_records", "chunks", &[DEVICE], "Chunks on disk"),
        Metric::counter(
            "larder_disk_evicted_chunks_total",
            "chunks",
            &[DEVICE],
            "Chunks that left the disk to make room",
        ),
        Metric::histogram(
            "larder_disk_sync_seconds",
            &[5e-5, 2e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 2.0, 10.0],
            "seconds",
            &[DEVICE],
            "Time until the drive has everything",
        ),
        Metric::gauge(
            "larder_disk_closed",
            "bool",
            &[DEVICE],
            "1 where the disk tier closed itself after a failure",
        ),
        Metric::counter(
            "larder_disk_read_errors_total",
            "records",
            &[DEVICE],
            "Records and pages that the drive could not read; nobody was given them",
        ),
        Metric::gauge(
            "larder_disk_segments",
            "segments",
            &[DEVICE, Label::one_of("state", &["free", "open", "sealed"])],
            "Segments, by state",
        ),
        Metric::counter(
            "larder_disk_checksum_failures_total",
            "records",
            &[DEVICE, Label::one_of("found_by", &["read", "scrub", "move", "recovery"])],
            "Wrong bytes on disk, by who found them; nobody was given them",
        ),
        Metric::gauge(
            "larder_disk_waiting_bytes",
            "bytes",
            &[DEVICE],
            "Bytes of chunks that wait to be written, or are being written",
        ),
        Metric::counter(
            "larder_disk_shed_chunks_total",
            "chunks",
            &[DEVICE],
            "Chunks that were not written because too many waited",
        ),
        Metric::counter(
            "larder_disk_orders_total",
            "orders",
            &[DEVICE, Label::one_of("outcome", OUTCOMES)],
            "Orders, by what came of them",
        ),
    ],
};

/// The label of an actor.
pub(crate) const DEVICE: Label = Label::each("device", "each actor of the node, from 0");

/// What comes of an order.
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
    "misnamed",
    "undescribed",
];
