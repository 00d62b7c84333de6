//! The place of a request in a distributed trace, and the spans of its work.
//!
//! All work for a request carries its [`Trace`]. A trace that is not recorded is a null pointer: nothing is made, measured or
//! sent for it. Whether to record is decided once, where the request comes in: by its caller, or else by a configured fraction. A
//! message of its own, before the request on the socket or stream, tells the next process. Spans are made with `tracing`, for
//! subscribers of [`TARGET`]; [`Exporter`] sends them to a collector. Spans are never entered, since work for a request goes on
//! in actors, tasks and other processes at the same time: a span ends when the last [`Trace`] that refers to it is dropped.

mod config;
mod export;
mod http;
mod queue;

use std::fmt;
use std::sync::Arc;

use larder_protocol::TraceContext;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use tracing::field::Empty;
use tracing::{Span, Value, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

pub use config::{InvalidEndpoint, TracingConfig};
pub use export::{ExportError, Exporter, Service};
pub use queue::{SpanCounts, span_counts};

/// The span of a recorded trace, or nothing. Clones refer to the same span.
#[derive(Clone, Default)]
pub struct Trace(Option<Arc<Recorded>>);

struct Recorded {
    /// `Span::none()` if this process makes no spans, while others may.
    span: Span,
    /// The context for processes that do a part of the work.
    context: TraceContext,
}

/// Decides which requests are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sampler {
    is_on: bool,
    ratio: f64,
}

/// The side of a call that a span describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum SpanKind {
    /// The asking side: the other process answers.
    Client,
    /// The answering side: the other process asks.
    Server,
    /// No call, but work within a process.
    Internal,
}

impl Sampler {
    /// Records requests whose caller records them, and the fraction `ratio` of the requests without a caller's trace.
    pub fn new(ratio: f64) -> Self {
        Self { is_on: true, ratio }
    }

    /// The trace of a request that came with `parent`. The caller has decided whether it is recorded.
    #[must_use]
    pub fn request(self, name: &'static str, parent: Option<TraceContext>) -> Trace {
        match parent.filter(TraceContext::is_valid) {
            Some(parent) if !parent.is_sampled() => Trace::default(),
            Some(parent) if self.is_on => Trace::span(SpanKind::Server, name, Parent::Remote(parent)),
            // The processes that do a part of the work may record their part.
            Some(parent) => Trace::of(Span::none(), Some(parent)),
            None if self.chooses() => Trace::span(SpanKind::Server, name, Parent::Nobody),
            None => Trace::default(),
        }
    }

    /// Begins a trace here, if this request is chosen for recording.
    #[must_use]
    pub fn begin(self, name: &'static str) -> Trace {
        if self.chooses() { Trace::span(SpanKind::Internal, name, Parent::Nobody) } else { Trace::default() }
    }

    fn chooses(self) -> bool {
        self.is_on && self.ratio > 0.0 && fastrand::f64() < self.ratio
    }
}

enum Parent<'a> {
    Nobody,
    Remote(TraceContext),
    Here(&'a Span),
}

impl Trace {
    /// The trace of a part of this work.
    #[must_use]
    pub fn child(&self, kind: SpanKind, name: &'static str) -> Self {
        match &self.0 {
            Some(recorded) if !recorded.span.is_disabled() => {
                Self::span(kind, name, Parent::Here(&recorded.span))
            }
            _ => self.clone(),
        }
    }

    /// Whether there is a span to describe. Costly fields are computed only then.
    pub fn is_recorded(&self) -> bool {
        self.0.as_ref().is_some_and(|recorded| !recorded.span.is_disabled())
    }

    /// Sets a field of the span: one of the fields of the table in the book.
    pub fn set(&self, field: &'static str, value: impl Value) {
        if let Some(recorded) = &self.0 {
            debug_assert!(
                recorded.span.is_disabled() || recorded.span.has_field(field),
                "spans have no field `{field}`"
            );
            recorded.span.record(field, value);
        }
    }

    /// Sets a field to a number.
    pub fn count(&self, field: &'static str, number: impl Into<u64>) {
        // OTLP has only signed numbers: others would become texts.
        self.set(field, i64::try_from(number.into()).unwrap_or(i64::MAX));
    }

    /// The context for processes that do a part of the work.
    pub fn context(&self) -> Option<TraceContext> {
        self.0.as_ref().map(|recorded| recorded.context)
    }

    /// Makes a span. All spans come from one callsite and have the same fields; unset fields cost nothing.
    fn span(kind: SpanKind, name: &'static str, parent: Parent<'_>) -> Self {
        let kind: &'static str = kind.into();
        let id = match parent {
            Parent::Here(span) => span.id(),
            Parent::Nobody | Parent::Remote(_) => None,
        };
        let span = info_span!(
            target: TARGET, parent: id, "larder", otel.name = name, otel.kind = kind,
            larder.namespace = Empty, larder.chunks = Empty, larder.chunks_here = Empty, larder.tokens = Empty,
            larder.tokens_found = Empty, larder.bytes = Empty, larder.tier = Empty, larder.homes = Empty,
            larder.peer = Empty, larder.outcome = Empty
        );
        let remote = match parent {
            Parent::Remote(remote) => Some(remote),
            Parent::Nobody | Parent::Here(_) => None,
        };
        if let Some(remote) = remote {
            // An error: the subscriber keeps no traces.
            let _ = span.set_parent(opentelemetry::Context::new().with_remote_span_context(foreign(remote)));
        }
        let own = own_context(&span);
        Self::of(span, own.or(remote))
    }

    fn of(span: Span, context: Option<TraceContext>) -> Self {
        Self(context.map(|context| Arc::new(Recorded { span, context })))
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.context() {
            Some(context) => write!(f, "Trace({context})"),
            None => f.write_str("Trace(none)"),
        }
    }
}

/// The subscriber's context for a span, if the subscriber keeps traces.
fn own_context(span: &Span) -> Option<TraceContext> {
    if span.is_disabled() {
        return None;
    }
    let context = span.context();
    let context = context.span().span_context().clone();
    context.is_valid().then(|| TraceContext {
        trace_id: context.trace_id().to_bytes(),
        span_id: context.span_id().to_bytes(),
        flags: context.trace_flags().to_u8(),
    })
}

fn foreign(TraceContext { trace_id, span_id, flags }: TraceContext) -> SpanContext {
    let (trace_id, span_id) = (TraceId::from_bytes(trace_id), SpanId::from_bytes(span_id));
    SpanContext::new(trace_id, span_id, TraceFlags::new(flags), true, TraceState::NONE)
}

/// The `tracing` target of all spans, and of nothing else.
pub const TARGET: &str = "larder_trace";

#[cfg(test)]
mod tests;
