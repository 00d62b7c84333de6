//! What an object tier counts.

use prometheus::core::Collector;
use prometheus::{
    HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

/// The metrics of an object tier.
#[derive(Debug, Clone)]
pub struct ObjectMetrics {
    /// Bytes of bodies that were read, headers included.
    pub read_bytes: IntCounter,
    /// Bytes of bodies that were written, headers included.
    pub written_bytes: IntCounter,
    /// Requests that are under way.
    pub in_flight: IntGauge,
    /// Chunks of which it is known whether they are there.
    pub known: IntGauge,
    /// Objects that were wrong.
    pub damaged: IntCounter,
    requests: IntCounterVec,
    seconds: HistogramVec,
    open: IntGaugeVec,
    opened: IntCounterVec,
    answers: IntCounterVec,
}

/// What is asked of a store.
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
    /// Where a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str| IntCounter::new(format!("larder_object_{name}"), help);
        let gauge = |name: &str, help: &str| IntGauge::new(format!("larder_object_{name}"), help);
        let opts = |name: &str, help: &str| Opts::new(format!("larder_object_{name}"), help);
        let counters = |name: &str, help: &str, labels: &[&str]| IntCounterVec::new(opts(name, help), labels);
        let seconds =
            HistogramOpts::new("larder_object_request_seconds", "Time of a request, retries included");
        let open = opts("closed", "1 where the store is left alone after failures");
        let metrics = Self {
            read_bytes: counter("read_bytes_total", "Bytes read from the object store")?,
            written_bytes: counter("written_bytes_total", "Bytes written to the object store")?,
            in_flight: gauge("requests_in_flight", "Requests to the object store under way")?,
            known: gauge("known_chunks", "Chunks of which the node knows whether the store has them")?,
            damaged: counter("checksum_failures_total", "Objects with wrong bytes")?,
            requests: counters("requests_total", "Requests, by kind and outcome", &["kind", "outcome"])?,
            seconds: HistogramVec::new(seconds.buckets(BUCKETS.to_vec()), &["kind"])?,
            open: IntGaugeVec::new(open, &["side"])?,
            opened: counters("closings_total", "Times the store was left alone after failures", &["side"])?,
            answers: counters("orders_total", "Orders, by what came of them", &["outcome"])?,
        };
        metrics.register(registry)?;
        Ok(metrics)
    }

    fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all: [Box<dyn Collector>; 10] = [
            Box::new(self.read_bytes.clone()),
            Box::new(self.written_bytes.clone()),
            Box::new(self.in_flight.clone()),
            Box::new(self.known.clone()),
            Box::new(self.damaged.clone()),
            Box::new(self.requests.clone()),
            Box::new(self.seconds.clone()),
            Box::new(self.open.clone()),
            Box::new(self.opened.clone()),
            Box::new(self.answers.clone()),
        ];
        all.into_iter().try_for_each(|metric| registry.register(metric))
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
    #[must_use]
    pub fn closings(&self, side: Side) -> u64 {
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
    /// Which side of the store it tells about.
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
    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reading => "reading",
            Self::Writing => "writing",
        }
    }
}

/// Seconds, from a local folder's to a store's that hardly answers.
const BUCKETS: [f64; 10] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 2.0, 10.0, 60.0];
