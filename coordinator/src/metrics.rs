//! What the coordinator counts.

use std::time::Duration;

use larder_protocol::table::MemberState;
use prometheus::core::Collector;
use prometheus::{
    Encoder as _, Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
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
}

impl Metrics {
    /// Registers everything.
    pub(crate) fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let build = Opts::new("larder_build_info", "Always 1; the labels say what runs")
            .const_label("role", "coordinator")
            .const_label("version", env!("CARGO_PKG_VERSION"));
        let build_info = IntGauge::with_opts(build)?;
        build_info.set(1);
        let vector = |name, help, label| IntGaugeVec::new(Opts::new(name, help), &[label]);
        let counters = |name, help, label| IntCounterVec::new(Opts::new(name, help), &[label]);
        let metrics = Self {
            uptime: Gauge::new("larder_uptime_seconds", "Seconds since the process began to serve")?,
            members: vector("larder_coordinator_members", "Nodes of the cluster, by state", "state")?,
            epoch: vector(
                "larder_coordinator_epoch",
                "The epoch of the last table: its term and its number",
                "part",
            )?,
            longest_silence: Gauge::new(
                "larder_coordinator_longest_silence_seconds",
                "Time since the member was heard of that was heard of least lately",
            )?,
            events: counters(
                "larder_coordinator_events_total",
                "Nodes that joined, left, became suspect or were removed, and partitions that moved",
                "event",
            )?,
            rejected: counters(
                "larder_coordinator_rejected_total",
                "Connections and streams turned away, by reason",
                "reason",
            )?,
            table_pushes: IntCounter::new(
                "larder_coordinator_table_pushes_total",
                "Tables sent to followers",
            )?,
            late_heartbeats: IntGauge::new(
                "larder_coordinator_late_members",
                "Members not heard of for more than two heartbeats",
            )?,
            registry,
        };
        let all: [Box<dyn Collector>; 9] = [
            Box::new(build_info),
            Box::new(metrics.uptime.clone()),
            Box::new(metrics.members.clone()),
            Box::new(metrics.epoch.clone()),
            Box::new(metrics.longest_silence.clone()),
            Box::new(metrics.events.clone()),
            Box::new(metrics.rejected.clone()),
            Box::new(metrics.table_pushes.clone()),
            Box::new(metrics.late_heartbeats.clone()),
        ];
        all.into_iter().try_for_each(|metric| metrics.registry.register(metric))?;
        Ok(metrics)
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
        let Counts { joins, leaves, suspects, removals, moved_partitions } = counts;
        for (event, total) in [
            ("join", joins),
            ("leave", leaves),
            ("suspect", suspects),
            ("remove", removals),
            ("partition_moved", moved_partitions),
        ] {
            let counter = self.events.with_label_values(&[event]);
            counter.inc_by(total.saturating_sub(counter.get()));
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

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
