//! The commands that make spans, the names of their processes, and the collector.

use std::path::Path;

use clap::Args;
use larder_net::trace::{ExportError, Exporter, Service, TracingConfig};

/// The destination of the spans of a development cluster or a replay.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tracing")]
pub(crate) struct TraceOptions {
    /// Send traces to this collector, as OTLP over HTTP: `http://HOST:4318`
    #[arg(long, value_name = "URL")]
    trace_endpoint: Option<String>,

    /// Fraction of the requests to trace
    #[arg(long, value_name = "FRACTION", default_value_t = 1.0, requires = "trace_endpoint", value_parser = fraction)]
    trace_ratio: f64,
}

impl TraceOptions {
    /// The configuration of a process that decides which requests are traced.
    pub(crate) fn config(&self) -> TracingConfig {
        TracingConfig { endpoint: self.trace_endpoint.clone(), sample_ratio: self.trace_ratio }
    }

    /// The configuration of processes that trace only the requests that another process chose.
    pub(crate) fn of_followers(&self) -> TracingConfig {
        TracingConfig { sample_ratio: 0.0, ..self.config() }
    }
}

/// Starts to send the spans of this process, if a collector is set.
pub(crate) fn start(
    config: TracingConfig,
    name: &'static str,
    instance: String,
) -> Result<Option<Exporter>, ExportError> {
    let service = Service { name, instance, version: env!("CARGO_PKG_VERSION") };
    Exporter::start(&config.or_from_environment(), &service)
}

/// The host's name.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string(Path::new("/proc/sys/kernel/hostname"));
    name.map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(fraction) if (0.0..=1.0).contains(&fraction) => Ok(fraction),
        _ => Err("not a number from 0 to 1".into()),
    }
}
