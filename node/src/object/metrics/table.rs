//! The metrics of an object tier.

use larder_net::metrics::{Label, Metric, Section};

use crate::disk::metrics::table::{DEVICE, OUTCOMES};

/// Chunks in the object store.
pub(crate) const OBJECT: Section = Section {
    title: "Object store",
    only: "nodes with an object tier",
    metrics: &[
        Metric::counter(
            "larder_object_read_bytes_total",
            "bytes",
            &[],
            "Bytes of objects read, headers included",
        ),
        Metric::counter(
            "larder_object_written_bytes_total",
            "bytes",
            &[],
            "Bytes of objects written, headers included",
        ),
        Metric::counter(
            "larder_object_requests_total",
            "requests",
            &[KIND, Label::one_of("outcome", REQUEST_OUTCOMES)],
            "Requests to the object store, by what came of them",
        ),
        Metric::histogram(
            "larder_object_request_seconds",
            &[0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 2.0, 10.0, 60.0],
            "seconds",
            &[KIND],
            "Time of a request, retries included",
        ),
        Metric::gauge(
            "larder_object_requests_in_flight",
            "requests",
            &[],
            "Requests to the object store under way",
        ),
        Metric::gauge(
            "larder_object_closed",
            "bool",
            &[SIDE],
            "1 where the store could not be opened, or is left alone after failures",
        ),
        Metric::counter(
            "larder_object_closings_total",
            "times",
            &[SIDE],
            "Times the store was left alone after failures",
        ),
        Metric::counter(
            "larder_object_checksum_failures_total",
            "objects",
            &[],
            "Objects with wrong bytes; nobody was given them",
        ),
        Metric::counter(
            "larder_object_orders_total",
            "orders",
            &[Label::one_of("outcome", OUTCOMES)],
            "Chunks to be read or written, by what came of them",
        ),
        Metric::gauge(
            "larder_object_known_blocks",
            "blocks",
            &[],
            "Blocks of which the node knows whether the store has them",
        ),
        Metric::gauge(
            "larder_object_waiting_bytes",
            "bytes",
            &[DEVICE],
            "Bytes of chunks that wait to be written, or are being written",
        ),
        Metric::counter(
            "larder_object_shed_chunks_total",
            "chunks",
            &[DEVICE],
            "Chunks that were not written because too many waited",
        ),
    ],
};

const KIND: Label = Label::one_of("kind", &["head", "get", "put", "delete"]);
const SIDE: Label = Label::one_of("side", &["reading", "writing"]);

/// What comes of a request.
const REQUEST_OUTCOMES: &[&str] = &[
    "ok",
    "absent",
    "exists",
    "not_made",
    "credentials",
    "denied",
    "no_bucket",
    "unreachable",
    "timed_out",
    "unsupported",
    "failed",
];
