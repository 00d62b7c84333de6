//! What an object tier counts.

pub(crate) mod table;

use larder_net::metrics::Families;
use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

/// The metrics of an object tier.
#[derive(Debug, Clone)]
pub struct ObjectMetrics {
    /// Bytes of bodies that were read, headers included.
    pub read_bytes: IntCounter,
    /// Bytes of bodies that were written, headers included.
    pub written_bytes: IntCounter,
    /// Requests that are under way.
    pub in_flight: IntGauge,
    /// Blocks whose presence is known.
    pub known: IntGauge,
    /// Objects that were wrong.
    pub damaged: IntCounter,
    requests: IntCounterVec,
    seconds: HistogramVec,
    open: IntGaugeVec,
    opened: IntCounterVec,
    answers: IntCounterVec,
    /// Bytes of chunks that wait to be written.
    pub(crate) waiting_bytes: IntGaugeVec,
    /// Chunks that were not written because too many waited.
    pub(crate) shed: IntCounterVec,
}

/// The kind of a request to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Whether an object is there.
    Head,
    /// An object.
    Get,
    /// A new object.
    Put,
    /// Its end.
    Delete,
}

/// The two things that may be refused apart from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Looking for objects, and reading them.
    Reading,
    /// Writing and deleting them.
    Writing,
}

impl ObjectMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Fails if a name is taken.
    pub fn new(families: &Families<'_>) -> Result<Self, prometheus::Error> {
        Ok(Self {
            read_bytes: families.counter("larder_object_read_bytes_total")?,
            written_bytes: families.counter("larder_object_written_bytes_total")?,
            in_flight: families.gauge("larder_object_requests_in_flight")?,
            known: families.gauge("larder_object_known_blocks")?,
            damaged: families.counter("larder_object_checksum_failures_total")?,
            requests: families.counters("larder_object_requests_total")?,
            seconds: families.histograms("larder_object_request_seconds")?,
            open: families.gauges("larder_object_closed")?,
            opened: families.counters("larder_object_closings_total")?,
            answers: families.counters("larder_object_orders_total")?,
            waiting_bytes: families.gauges("larder_object_waiting_bytes")?,
            shed: families.counters("larder_object_shed_chunks_total")?,
        })
    }

    /// Says that the tier could not be opened: both of its sides are closed until the node is started again.
    pub fn never_opened(&self) {
        [Side::Reading, Side::Writing].into_iter().for_each(|side| self.closed(side));
    }

    /// Requests so far of a kind that ended this way.
    #[must_use]
    pub fn requests(&self, kind: Kind, outcome: &str) -> u64 {
        self.requests.with_label_values(&[kind.name(), outcome]).get()
    }

    /// Orders so far that ended this way.
    #[must_use]
    pub fn answers(&self, outcome: &str) -> u64 {
        self.answers.with_label_values(&[outcome]).get()
    }

    /// Times so far that one side of the store was left alone.
    #[cfg(test)]
    pub(super) fn closings(&self, side: Side) -> u64 {
        self.opened.with_label_values(&[side.name()]).get()
    }

    pub(super) fn requested(&self, kind: Kind, outcome: &str, seconds: f64) {
        self.requests.with_label_values(&[kind.name(), outcome]).inc();
        self.seconds.with_label_values(&[kind.name()]).observe(seconds);
    }

    pub(super) fn answered(&self, outcome: &str) {
        self.answers.with_label_values(&[outcome]).inc();
    }

    pub(super) fn closed(&self, side: Side) {
        self.opened.with_label_values(&[side.name()]).inc();
        self.open.with_label_values(&[side.name()]).set(1);
    }

    pub(super) fn reopened(&self, side: Side) {
        self.open.with_label_values(&[side.name()]).set(0);
    }
}

impl Kind {
    /// The side of the store that it belongs to.
    #[must_use]
    pub fn side(self) -> Side {
        match self {
            Self::Head | Self::Get => Side::Reading,
            Self::Put | Self::Delete => Side::Writing,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Get => "get",
            Self::Put => "put",
            Self::Delete => "delete",
        }
    }
}

impl Side {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reading => "reading",
            Self::Writing => "writing",
        }
    }
}
