//! What the exchange counts.

use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, core::Collector,
};

use super::{FetchFailure, Fetched};

/// The exchange's metrics.
#[derive(Debug, Clone)]
pub struct ExchangeMetrics {
    /// Bytes of blocks that came from peers.
    pub received_bytes: IntCounter,
    /// Bytes of blocks that were handed to QUIC for peers.
    pub sent_bytes: IntCounter,
    /// Chunks that are being fetched.
    pub fetches_in_flight: IntGauge,
    /// Peers that do not answer.
    pub silent: IntGauge,
    /// Connections with peers, either way.
    pub connections: IntGauge,
    /// Seconds of a small request, from asking to answer.
    pub round_trip_seconds: Histogram,
    fetched: IntCounterVec,
    requests: IntCounterVec,
    rejected: IntCounterVec,
}

impl ExchangeMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Where a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = Self {
            received_bytes: IntCounter::new(
                "larder_peer_received_bytes_total",
                "Bytes of blocks that came from other nodes",
            )?,
            sent_bytes: IntCounter::new(
                "larder_peer_sent_bytes_total",
                "Bytes of blocks sent to other nodes",
            )?,
            fetches_in_flight: IntGauge::new(
                "larder_peer_fetches_in_flight",
                "Chunks that are being fetched from other nodes",
            )?,
            silent: IntGauge::new("larder_peer_silent", "Nodes that do not answer this one")?,
            connections: IntGauge::new("larder_peer_connections", "Connections with other processes")?,
            round_trip_seconds: Histogram::with_opts(
                HistogramOpts::new(
                    "larder_peer_round_trip_seconds",
                    "Time of a small request to another node",
                )
                .buckets(ROUND_TRIP_BUCKETS.to_vec()),
            )?,
            fetched: IntCounterVec::new(
                Opts::new("larder_peer_fetches_total", "Chunks asked of other nodes, by what came of it"),
                &["outcome"],
            )?,
            requests: IntCounterVec::new(
                Opts::new("larder_peer_requests_total", "Requests that other processes made, by kind"),
                &["request"],
            )?,
            rejected: IntCounterVec::new(
                Opts::new("larder_peer_rejected_total", "Connections and requests turned away, by reason"),
                &["reason"],
            )?,
        };
        let all: [Box<dyn Collector>; 9] = [
            Box::new(metrics.received_bytes.clone()),
            Box::new(metrics.sent_bytes.clone()),
            Box::new(metrics.fetches_in_flight.clone()),
            Box::new(metrics.silent.clone()),
            Box::new(metrics.connections.clone()),
            Box::new(metrics.round_trip_seconds.clone()),
            Box::new(metrics.fetched.clone()),
            Box::new(metrics.requests.clone()),
            Box::new(metrics.rejected.clone()),
        ];
        all.into_iter().try_for_each(|metric| registry.register(metric))?;
        Ok(metrics)
    }

    /// Counts what came of a chunk.
    pub fn fetched(&self, fetched: &Fetched) {
        let outcome = match fetched {
            Fetched::Here { .. } => "here",
            Fetched::NotHeld => "not_held",
            Fetched::Busy { .. } => "busy",
            Fetched::Failed(FetchFailure::Unreachable) => "unreachable",
            Fetched::Failed(FetchFailure::Deadline) => "deadline",
            Fetched::Failed(FetchFailure::Broken) => "broken",
            Fetched::Failed(FetchFailure::Malformed) => "malformed",
            Fetched::Failed(FetchFailure::Checksum) => "checksum",
            Fetched::Failed(FetchFailure::Full) => "full",
        };
        self.fetched.with_label_values(&[outcome]).inc();
    }

    /// Counts a request that somebody made.
    pub fn requested(&self, request: &str) {
        self.requests.with_label_values(&[request]).inc();
    }

    /// Counts what was turned away.
    pub fn rejected(&self, reason: &str) {
        self.rejected.with_label_values(&[reason]).inc();
    }
}

/// Seconds, from 50 microseconds to a second.
const ROUND_TRIP_BUCKETS: [f64; 10] = [5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 1.0];
