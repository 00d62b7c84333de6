//! The counters of the exchange.

mod by_peer;
pub(crate) mod table;

use std::time::Duration;

use larder_core::{Arrival, FetchFailure};
use larder_net::metrics::Families;
use larder_protocol::peer::Class;
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, Registry};

pub(super) use by_peer::{ByPeer, OTHER, Watched};

/// The exchange's metrics.
#[derive(Debug, Clone)]
pub struct ExchangeMetrics {
    /// Chunks that are being fetched.
    pub fetches_in_flight: IntGauge,
    /// Peers that do not answer.
    pub silent: IntGauge,
    /// Connections that others made.
    pub connections: IntGauge,
    /// Seconds of a small request, from asking to answer.
    pub round_trip_seconds: Histogram,
    /// The counters of each peer.
    pub(super) by_peer: ByPeer,
    missed: IntCounterVec,
    stalled: IntCounter,
    fetched: IntCounterVec,
    requests: IntCounterVec,
    rejected: IntCounterVec,
}

impl ExchangeMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Fails if a name is taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let families = Families::new(registry, &[table::PEERS]);
        Ok(Self {
            fetches_in_flight: families.gauge("larder_peer_fetches_in_flight")?,
            silent: families.gauge("larder_peer_silent")?,
            connections: families.gauge("larder_peer_connections")?,
            round_trip_seconds: families.histogram("larder_peer_round_trip_seconds")?,
            by_peer: ByPeer::new(&families)?,
            missed: families.counters("larder_peer_missed_deadlines_total")?,
            stalled: families.counter("larder_peer_stalled_sends_total")?,
            fetched: families.counters("larder_peer_fetches_total")?,
            requests: families.counters("larder_peer_requests_total")?,
            rejected: families.counters("larder_peer_rejected_total")?,
        })
    }

    /// Counts a chunk's result.
    pub fn fetched(&self, came: &Arrival) {
        let outcome = match came {
            Arrival::Here { .. } => "here",
            Arrival::NotHeld => "not_held",
            Arrival::Busy { .. } => "busy",
            Arrival::Failed(FetchFailure::Unreachable) => "unreachable",
            Arrival::Failed(FetchFailure::Deadline) => "deadline",
            Arrival::Failed(FetchFailure::Broken) => "broken",
            Arrival::Failed(FetchFailure::Malformed) => "malformed",
            Arrival::Damaged => "checksum",
            Arrival::Failed(FetchFailure::Full) => "full",
        };
        self.fetched.with_label_values(&[outcome]).inc();
    }

    /// Counts how long a fetch waited until its peer could be asked.
    pub(super) fn waited(&self, peer: &str, class: Class, took: Duration) {
        let class = match class {
            Class::Decode => "decode",
            Class::Prefetch => "prefetch",
        };
        let waited = &self.by_peer.credit_wait_seconds;
        waited.with_label_values(&[peer, class]).inc_by(took.as_secs_f64());
    }

    /// Counts a deadline that passed without the answer: `slow` where the peer was heard meanwhile, else `silent`.
    pub(super) fn missed(&self, how: &str) {
        self.missed.with_label_values(&[how]).inc();
    }

    /// Counts blocks that were given up because their asker did not read them.
    pub(super) fn stalled(&self) {
        self.stalled.inc();
    }

    #[cfg(test)]
    pub(super) fn requests(&self, request: &str) -> u64 {
        self.requests.with_label_values(&[request]).get()
    }

    #[cfg(test)]
    pub(super) fn stalled_sends(&self) -> u64 {
        self.stalled.get()
    }

    /// Counts a request that somebody made.
    pub fn requested(&self, request: &str) {
        self.requests.with_label_values(&[request]).inc();
    }

    /// Counts a refused connection or request.
    pub fn rejected(&self, reason: &str) {
        self.rejected.with_label_values(&[reason]).inc();
    }
}

/// A part of a gauge's value, until it is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    gauge: IntGauge,
    count: i64,
}

impl Counted {
    pub(super) fn new(gauge: &IntGauge, count: i64) -> Self {
        gauge.add(count);
        Self { gauge: gauge.clone(), count }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.sub(self.count);
    }
}
