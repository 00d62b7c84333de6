//! The metrics that the coordinator exports.

use std::time::Duration;

use larder_net::http::{Connections, HttpMetrics};
use larder_net::metrics::{
    CertificateMetrics, Label, Part as _, ProcessMetrics, Section, TracingMetrics, show_totals,
};
use larder_net::metrics_table;
use larder_protocol::table::{Epoch, MemberState};
use prometheus::{Registry, TextEncoder};

use crate::membership::{EventCounts, MemberReport};

/// The membership at one moment.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) members: Vec<MemberReport>,
    /// Lost members.
    pub(crate) lost: usize,
    pub(crate) epoch: Epoch,
    pub(crate) leads: bool,
    pub(crate) counts: EventCounts,
}

/// The coordinator's metrics.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    registry: Registry,
    cluster: Cluster,
    process: ProcessMetrics,
    tracing: TracingMetrics,
    certificate: CertificateMetrics,
    connections: Connections,
}

metrics_table! {
    /// The metrics of the coordinator's cluster, and of the coordinator itself.
    struct Cluster: "Membership", "" => {
        members: IntGaugeVec = "larder_coordinator_members", "nodes",
            [Label::one_of("state", &["alive", "suspect", "draining"])],
            "Nodes of the cluster, by state";
        epoch: IntGaugeVec = "larder_coordinator_epoch", "", [Label::one_of("part", &["term", "number"])],
            "The epoch of the last table: its term and its number";
        leads: IntGauge = "larder_coordinator_leads", "", [],
            "1 while this coordinator leads, 0 while it follows another one";
        lost: IntGauge = "larder_coordinator_lost_members", "nodes", [],
            "Nodes that were removed after long silence, or left while this coordinator was away, and did \
             not come back (membership.remember_lost_ms)";
        longest_silence: Gauge = "larder_coordinator_longest_silence_seconds", "seconds", [],
            "The longest time for which a member has been silent";
        late_heartbeats: IntGauge = "larder_coordinator_late_members", "nodes", [],
            "Members that have been silent for more than two heartbeats";
        events: IntCounterVec = "larder_coordinator_events_total", "events",
            [Label::one_of("event", &["join", "leave", "suspect", "remove", "partition_moved", "contest",
                "number_reused", "drain"])],
            "Nodes that joined, left, became suspect, were removed or began to drain; partitions that moved; joins under the name of a living member; numbers given to another name";
        table_pushes: IntCounter = "larder_coordinator_table_pushes_total", "tables", [],
            "Tables sent to followers";
        rejected: IntCounterVec = "larder_coordinator_rejected_total", "refusals",
            [Label::one_of("reason", &["handshakes", "connections", "certificate", "identity", "version", "handshake",
                "malformed", "too_long", "not_allowed", "full", "implausible", "in_use", "out_of_order",
                "not_leading", "later_term"])],
            "Connections and streams turned away, by reason";
        uptime: Gauge = "larder_uptime_seconds", "seconds", [], "Seconds since the process began to serve";
        build: IntGaugeVec = "larder_build_info", "",
            [Label::one_of("role", &["coordinator"]), Label::each("version", "the version that runs")],
            "Always 1; the labels name the version";
    }
}

impl Metrics {
    /// Registers everything.
    pub(crate) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let cluster = Cluster::register(&registry)?;
        cluster.build.with_label_values(&["coordinator", env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            cluster,
            process: ProcessMetrics::register(&registry)?,
            tracing: TracingMetrics::register(&registry)?,
            certificate: CertificateMetrics::register(&registry)?,
            connections: Connections::new(MAX_HTTP_CONNECTIONS, &registry)?,
            registry,
        })
    }

    /// Connections to the HTTP endpoint.
    pub(crate) fn connections(&self) -> Connections {
        self.connections.clone()
    }

    /// The expiry of the coordinator's own certificate.
    pub(crate) fn certificate(&self) -> CertificateMetrics {
        self.certificate.clone()
    }

    /// Counts a connection or stream that was turned away.
    pub(crate) fn rejected(&self, reason: &str) {
        self.cluster.rejected.with_label_values(&[reason]).inc();
    }

    /// Counts a table that was sent.
    pub(crate) fn table_pushed(&self) {
        self.cluster.table_pushes.inc();
    }

    /// Updates all metrics, and writes them in Prometheus' text format.
    pub(crate) fn render(
        &self,
        uptime: Duration,
        Shown { members, lost, epoch, leads, counts }: &Shown,
        heartbeat_ms: u64,
    ) -> prometheus::Result<String> {
        self.cluster.uptime.set(uptime.as_secs_f64());
        let states = [
            ("alive", MemberState::Alive),
            ("suspect", MemberState::Suspect),
            ("draining", MemberState::Draining),
        ];
        for (name, state) in states {
            let count = members.iter().filter(|report| report.member.state == state).count();
            self.cluster.members.with_label_values(&[name]).set(count as i64);
        }
        self.cluster.leads.set(i64::from(*leads));
        self.cluster.lost.set(*lost as i64);
        self.cluster.epoch.with_label_values(&["term"]).set(epoch.term as i64);
        self.cluster.epoch.with_label_values(&["number"]).set(epoch.number as i64);
        let longest = members.iter().map(|report| report.silent_ms).max().unwrap_or(0);
        self.cluster.longest_silence.set(longest as f64 / 1_000.0);
        let late = members.iter().filter(|report| report.silent_ms > 2 * heartbeat_ms).count();
        self.cluster.late_heartbeats.set(late as i64);
        let EventCounts { joins, leaves, suspects, removals, moved_partitions, .. } = *counts;
        let EventCounts { contests, reused_numbers, drains, .. } = *counts;
        let events = [
            ("join", joins),
            ("leave", leaves),
            ("suspect", suspects),
            ("remove", removals),
            ("partition_moved", moved_partitions),
            ("contest", contests),
            ("number_reused", reused_numbers),
            ("drain", drains),
        ];
        show_totals(&self.cluster.events, events);
        self.process.show();
        self.tracing.show();
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// Every metric of a coordinator: what is exported, and its documentation.
pub const COORDINATOR: &[Section] = &[
    Cluster::SECTION,
    CertificateMetrics::SECTION,
    TracingMetrics::SECTION,
    HttpMetrics::SECTION,
    ProcessMetrics::SECTION,
];

/// Connections to the HTTP endpoint: each takes two descriptors. Routers keep some open.
const MAX_HTTP_CONNECTIONS: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_there_from_the_start() {
        let metrics = Metrics::new().unwrap();
        let counts = EventCounts { joins: 2, ..EventCounts::default() };
        let epoch = Epoch { term: 3, number: 4 };
        let shown = Shown { lost: 1, epoch, counts, ..Shown::default() };
        for _ in 0..2 {
            let text = metrics.render(Duration::from_secs(2), &shown, 1_000).unwrap();
            for line in [
                "larder_build_info{role=\"coordinator\",version=",
                "larder_coordinator_members{state=\"alive\"} 0\n",
                "larder_coordinator_lost_members 1\n",
                "larder_coordinator_epoch{part=\"term\"} 3\n",
                "larder_coordinator_events_total{event=\"join\"} 2\n",
                "larder_uptime_seconds 2\n",
            ] {
                assert!(text.contains(line), "{line} is not in\n{text}");
            }
        }
    }
}
