//! The metrics of an object tier.

use larder_net::metrics::Label;
use larder_net::metrics_table;

use crate::disk::metrics::{DEVICE, OUTCOMES};

metrics_table! {
    /// The metrics of an object tier.
    pub struct ObjectMetrics: "Object store", "nodes with an object tier" => {
        read_bytes: IntCounter = "larder_object_read_bytes_total", "bytes", [],
            "Bytes of objects read, headers included";
        written_bytes: IntCounter = "larder_object_written_bytes_total", "bytes", [],
            "Bytes of objects written, headers included";
        requests: IntCounterVec = "larder_object_requests_total", "requests",
            [KIND, Label::one_of("outcome", &["ok", "absent", "exists", "not_made", "credentials", "denied",
                "clock", "no_bucket", "unreachable", "timed_out", "unsupported", "failed"])],
            "Requests to the object store, by outcome";
        seconds: HistogramVec = "larder_object_request_seconds", "seconds", [KIND],
            "Time of a request, retries included"
            in [0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 2.0, 10.0, 60.0];
        in_flight: IntGauge = "larder_object_requests_in_flight", "requests", [],
            "Requests to the object store under way";
        closed: IntGaugeVec = "larder_object_closed", "bool", [SIDE],
            "1 if the store could not be opened, or is left alone after failures";
        closings: IntCounterVec = "larder_object_closings_total", "times", [SIDE],
            "Times the store was left alone after failures";
        damaged: IntCounter = "larder_object_checksum_failures_total", "objects", [],
            "Objects with wrong bytes; no reader got them";
        answers: IntCounterVec = "larder_object_orders_total", "orders", [Label::one_of("outcome", OUTCOMES)],
            "Chunks to be read or written, by outcome";
        known: IntGauge = "larder_object_known_blocks", "blocks", [],
            "Blocks for which the node knows whether the store has them";
        waiting_bytes: IntGaugeVec = "larder_object_waiting_bytes", "bytes", [DEVICE],
            "Bytes of chunks that wait to be written, or are being written";
        shed: IntCounterVec = "larder_object_shed_chunks_total", "chunks", [DEVICE],
            "Chunks that were not written because too many waited";
    }
}

/// The kind of a request to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Kind {
    /// Asks whether an object is there.
    Head,
    /// Reads an object.
    Get,
    /// Writes an object.
    Put,
    /// Deletes an object.
    Delete,
}

/// The two sides of a store, each of which may refuse alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Side {
    /// Looking for objects, and reading them.
    Reading,
    /// Writing and deleting objects.
    Writing,
}

impl ObjectMetrics {
    /// Shows that the tier could not be opened: both of its sides are closed until the node is started again.
    pub fn never_opened(&self) {
        [Side::Reading, Side::Writing].into_iter().for_each(|side| self.closed(side));
    }

    /// Requests so far of a kind that ended this way.
    pub fn requests(&self, kind: Kind, outcome: &str) -> u64 {
        self.requests.with_label_values(&[kind.name(), outcome]).get()
    }

    /// Orders so far that ended this way.
    pub fn answers(&self, outcome: &str) -> u64 {
        self.answers.with_label_values(&[outcome]).get()
    }

    /// Times so far that one side of the store was left alone.
    #[cfg(test)]
    pub(super) fn closings(&self, side: Side) -> u64 {
        self.closings.with_label_values(&[side.name()]).get()
    }

    pub(super) fn requested(&self, kind: Kind, outcome: &str, seconds: f64) {
        self.requests.with_label_values(&[kind.name(), outcome]).inc();
        self.seconds.with_label_values(&[kind.name()]).observe(seconds);
    }

    pub(super) fn answered(&self, outcome: &str) {
        self.answers.with_label_values(&[outcome]).inc();
    }

    pub(super) fn closed(&self, side: Side) {
        self.closings.with_label_values(&[side.name()]).inc();
        self.closed.with_label_values(&[side.name()]).set(1);
    }

    pub(super) fn reopened(&self, side: Side) {
        self.closed.with_label_values(&[side.name()]).set(0);
    }
}

impl Kind {
    /// The side of the store that such a request concerns.
    pub fn side(self) -> Side {
        match self {
            Self::Head | Self::Get => Side::Reading,
            Self::Put | Self::Delete => Side::Writing,
        }
    }

    fn name(self) -> &'static str {
        self.into()
    }
}

impl Side {
    /// The side's name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

const KIND: Label = Label::one_of("kind", &["head", "get", "put", "delete"]);
const SIDE: Label = Label::one_of("side", &["reading", "writing"]);
