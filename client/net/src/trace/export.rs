//! Sends spans to a collector: OTLP over HTTP, on a thread of its own.
//!
//! HTTP and not gRPC: collectors take both on their usual ports, and HTTP needs neither a second HTTP stack nor a runtime.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider, SpanExporter as _};
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::registry::LookupSpan;

use super::config::{InvalidEndpoint, TracingConfig};
use super::http::BlockingClient;
use super::queue::{Processor, Queue};
use super::{TARGET, queue};

/// The process that makes the spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// `service.name`: the kind of process.
    pub name: &'static str,
    /// `service.instance.id`: the process among those of its kind.
    pub instance: String,
    /// `service.version`.
    pub version: &'static str,
}

/// Sends the spans of this process to a collector. If the collector is not reached, spans are dropped and counted
/// ([`super::span_counts`]); nobody waits for it.
#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
    queue: Arc<Queue>,
}

/// Why spans cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The endpoint cannot be used.
    #[error(transparent)]
    Endpoint(#[from] InvalidEndpoint),
    /// The exporter's variables in the environment (`OTEL_...`) cannot be used.
    #[error("cannot export spans: see the variables OTEL_EXPORTER_OTLP_... of the environment")]
    Settings(#[from] opentelemetry_otlp::ExporterBuildError),
    /// The exporter's thread cannot be started.
    #[error("cannot start the thread that exports spans")]
    Thread(#[source] io::Error),
}

impl Exporter {
    /// Starts the exporter; `None` if there is no endpoint. Headers, and attributes of the process besides those of
    /// `service`, come from the standard variables `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_RESOURCE_ATTRIBUTES`.
    ///
    /// # Errors
    /// [`ExportError`]. A collector that is not there is no error.
    pub fn start(config: &TracingConfig, service: &Service) -> Result<Option<Self>, ExportError> {
        let Some(url) = config.url()? else { return Ok(None) };
        let exporter = SpanExporter::builder().with_http();
        let exporter = exporter.with_endpoint(url).with_http_client(BlockingClient::new());
        let mut exporter = exporter.build()?;
        let resource = Resource::builder()
            .with_service_name(service.name)
            .with_attribute(KeyValue::new("service.instance.id", service.instance.clone()))
            .with_attribute(KeyValue::new("service.version", service.version))
            .build();
        exporter.set_resource(&resource);
        let queue = Arc::new(Queue::default());
        let sent = Arc::clone(&queue);
        thread::Builder::new()
            .name("larder-trace".to_owned())
            .spawn(move || sent.send_all(&exporter))
            .map_err(ExportError::Thread)?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            // Whether to record was decided before the span was made.
            .with_sampler(Sampler::AlwaysOn)
            .with_span_processor(Processor(Arc::clone(&queue)))
            .build();
        Ok(Some(Self { provider, queue }))
    }

    /// The layer of a subscriber that records the spans of this crate's [`super::Trace`]s, and no others: neither spans of
    /// libraries nor log events.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + Send + Sync + for<'a> LookupSpan<'a>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("larder"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_level(false)
            .with_tracked_inactivity(false)
            .with_filter(filter_fn(|metadata| metadata.is_span() && metadata.target() == TARGET))
    }

    /// Sends the waiting spans, for at most `deadline`; the others are dropped and counted.
    pub fn stop(self, deadline: Duration) {
        if !self.queue.stop(deadline) {
            let queue::SpanCounts { dropped, failed, .. } = queue::span_counts();
            tracing::warn!(dropped, failed, "some spans did not get to the collector");
        }
    }
}
