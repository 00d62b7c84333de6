//! What the coordinator counts.

use std::time::Duration;

use prometheus::{Encoder as _, Gauge, IntGauge, Opts, Registry, TextEncoder};

/// The coordinator's metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    uptime: Gauge,
}

impl Metrics {
    /// Registers everything; `nodes` are known from the start.
    pub(crate) fn new(nodes: usize) -> prometheus::Result<Self> {
        let registry = Registry::new();
        let build = Opts::new("larder_build_info", "Always 1; the labels say what runs")
            .const_label("role", "coordinator")
            .const_label("version", env!("CARGO_PKG_VERSION"));
        let build_info = IntGauge::with_opts(build)?;
        build_info.set(1);
        let known_nodes =
            IntGauge::new("larder_coordinator_nodes", "Nodes that the coordinator was told of")?;
        known_nodes.set(i64::try_from(nodes).unwrap_or(i64::MAX));
        let uptime = Gauge::new("larder_uptime_seconds", "Seconds since the process began to serve")?;
        registry.register(Box::new(build_info))?;
        registry.register(Box::new(known_nodes))?;
        registry.register(Box::new(uptime.clone()))?;
        Ok(Self { registry, uptime })
    }

    /// Everything in Prometheus' text format.
    pub(crate) fn render(&self, uptime: Duration) -> prometheus::Result<Vec<u8>> {
        self.uptime.set(uptime.as_secs_f64());
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_there_from_the_start() {
        let text = Metrics::new(3).unwrap().render(Duration::from_secs(2)).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("larder_build_info{role=\"coordinator\",version="), "{text}");
        assert!(text.contains("larder_coordinator_nodes 3\n"), "{text}");
        assert!(text.contains("larder_uptime_seconds 2\n"), "{text}");
    }
}
