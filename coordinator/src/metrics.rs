//! What the coordinator counts.

use std::time::Duration;

use larder_net::http::{Connections, HTTP};
use larder_net::metrics::{
    CERTIFICATE, CertificateMetrics, Families, Label, Metric, PROCESS, ProcessMetrics, Section, TRACING,
    TracingMetrics,
};
use larder_protocol::table::MemberState;
use prometheus::{
    Encoder as _, Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder,
};

use crate::membership::{Counts, MemberReport};

/// The coordinator's metrics.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    registry: Registry,
    uptime: Gauge,
    members: IntGaugeVec,
    epoch: IntGaugeVec,
    longest_silence: Gauge,
    events: IntCounterVec,
    rejected: IntCounterVec,
    table_pushes: IntCounter,
    late_heartbeats: IntGauge,
    process: ProcessMetrics,
    tracing: TracingMetrics,
    certificate: CertificateMetrics,
    connections: Connections,
}

impl Metrics {
    /// Registers everything.
    pub(crate) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let families = Families::new(&registry, COORDINATOR);
        let build = families.gauges("larder_build_info")?;
        build.with_label_values(&["coordinator", env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            uptime: families.level("larder_uptime_seconds")?,
            members: families.gauges("larder_coordinator_members")?,
            epoch: families.gauges("larder_coordinator_epoch")?,
            longest_silence: families.level("larder_coordinator_longest_silence_seconds")?,
            events: families.counters("larder_coordinator_events_total")?,
            rejected: families.counters("larder_coordinator_rejected_total")?,
            table_pushes: families.counter("larder_coordinator_table_pushes_total")?,
            late_heartbeats: families.gauge("larder_coordinator_late_members")?,
            process: ProcessMetrics::new(&families)?,
            tracing: TracingMetrics::new(&families)?,
            certificate: CertificateMetrics::new(&families)?,
            connections: Connections::new(MAX_HTTP_CONNECTIONS, &families)?,
            registry,
        })
    }

    /// Connections to the HTTP endpoint.
    pub(crate) fn connections(&self) -> Connections {
        self.connections.clone()
    }

    /// Until when the own certificate may be used.
    pub(crate) fn certificate(&self) -> CertificateMetrics {
        self.certificate.clone()
    }

    /// Counts a connection or stream that was turned away.
    pub(crate) fn rejected(&self, reason: &str) {
        self.rejected.with_label_values(&[reason]).inc();
    }

    /// Counts a table that was sent.
    pub(crate) fn table_pushed(&self) {
        self.table_pushes.inc();
    }

    /// Brings everything up to date, and writes it in Prometheus' text format.
    pub(crate) fn render(
        &self,
        uptime: Duration,
        members: &[MemberReport],
        epoch: larder_protocol::table::Epoch,
        counts: Counts,
        heartbeat_ms: u64,
    ) -> prometheus::Result<Vec<u8>> {
        self.uptime.set(uptime.as_secs_f64());
        for (name, state) in [("alive", MemberState::Alive), ("suspect", MemberState::Suspect)] {
            let count = members.iter().filter(|report| report.member.state == state).count();
            self.members.with_label_values(&[name]).set(count as i64);
        }
        self.epoch.with_label_values(&["term"]).set(epoch.term as i64);
        self.epoch.with_label_values(&["number"]).set(epoch.number as i64);
        let longest = members.iter().map(|report| report.silent_ms).max().unwrap_or(0);
        self.longest_silence.set(longest as f64 / 1_000.0);
        let late = members.iter().filter(|report| report.silent_ms > 2 * heartbeat_ms).count();
        self.late_heartbeats.set(late as i64);
        let Counts { joins, leaves, suspects, removals, moved_partitions, contests, reused_numbers } = counts;
        for (event, total) in [
            ("join", joins),
            ("leave", leaves),
            ("suspect", suspects),
            ("remove", removals),
            ("partition_moved", moved_partitions),
            ("contest", contests),
            ("number_reused", reused_numbers),
        ] {
            let counter = self.events.with_label_values(&[event]);
            counter.inc_by(total.saturating_sub(counter.get()));
        }
        self.process.show();
        self.tracing.show();
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

/// Every metric of a coordinator: what is exported, and its documentation.
pub const COORDINATOR: &[Section] = &[
    Section {
        title: "Membership",
        only: "",
        metrics: &[
            Metric::gauge(
                "larder_coordinator_members",
                "nodes",
                &[Label::one_of("state", &["alive", "suspect"])],
                "Nodes of the cluster, by state",
            ),
            Metric::gauge(
                "larder_coordinator_epoch",
                "",
                &[Label::one_of("part", &["term", "number"])],
                "The epoch of the last table: its term and its number",
            ),
            Metric::gauge(
                "larder_coordinator_longest_silence_seconds",
                "seconds",
                &[],
                "Time since the member was heard of that was heard of least lately",
            ),
            Metric::gauge(
                "larder_coordinator_late_members",
                "nodes",
                &[],
                "Members not heard of for more than two heartbeats",
            ),
            Metric::counter(
                "larder_coordinator_events_total",
                "events",
                &[Label::one_of("event", EVENTS)],
                "Nodes that joined, left, became suspect or were removed; partitions that moved; joins under the name of a member that lives; numbers given to another name",
            ),
            Metric::counter(
                "larder_coordinator_table_pushes_total",
                "tables",
                &[],
                "Tables sent to followers",
            ),
            Metric::counter(
                "larder_coordinator_rejected_total",
                "refusals",
                &[Label::one_of("reason", REJECTED)],
                "Connections and streams turned away, by reason",
            ),
            Metric::gauge(
                "larder_uptime_seconds",
                "seconds",
                &[],
                "Seconds since the process began to serve",
            ),
            Metric::gauge(
                "larder_build_info",
                "",
                &[Label::one_of("role", &["coordinator"]), Label::each("version", "the version that runs")],
                "Always 1; the labels say what runs",
            ),
        ],
    },
    CERTIFICATE,
    TRACING,
    HTTP,
    PROCESS,
];

/// Connections to the HTTP endpoint: each takes two descriptors. Routers keep some open.
const MAX_HTTP_CONNECTIONS: usize = 1_024;

/// The events of members.
const EVENTS: &[&str] =
    &["join", "leave", "suspect", "remove", "partition_moved", "contest", "number_reused"];

/// Why somebody is turned away.
const REJECTED: &[&str] = &[
    "handshakes",
    "connections",
    "certificate",
    "identity",
    "handshake",
    "malformed",
    "too_long",
    "not_allowed",
    "full",
    "implausible",
    "in_use",
    "out_of_order",
];

#[cfg(test)]
mod tests {
    use larder_protocol::table::Epoch;

    use super::*;

    #[test]
    fn every_metric_is_there_from_the_start() {
        let metrics = Metrics::new().unwrap();
        let counts = Counts { joins: 2, ..Counts::default() };
        let epoch = Epoch { term: 3, number: 4 };
        for _ in 0..2 {
            let text = metrics.render(Duration::from_secs(2), &[], epoch, counts, 1_000).unwrap();
            let text = String::from_utf8(text).unwrap();
            for line in [
                "larder_build_info{role=\"coordinator\",version=",
                "larder_coordinator_members{state=\"alive\"} 0\n",
                "larder_coordinator_epoch{part=\"term\"} 3\n",
                "larder_coordinator_events_total{event=\"join\"} 2\n",
                "larder_uptime_seconds 2\n",
            ] {
                assert!(text.contains(line), "{line} is not in\n{text}");
            }
        }
    }
}
