//! Which process records which spans, with a subscriber that keeps spans in memory and without one.

use opentelemetry::trace::{SpanId, TracerProvider as _};
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry;

use super::queue::{Processor, Queue};
use super::*;

fn context(flags: u8) -> TraceContext {
    TraceContext { trace_id: [7; 16], span_id: [9; 8], flags }
}

/// The spans that `work` makes.
fn recorded(work: impl FnOnce()) -> Vec<SpanData> {
    // Nobody empties the queue.
    let queue = Arc::new(Queue::default());
    let provider = SdkTracerProvider::builder().with_span_processor(Processor(Arc::clone(&queue))).build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("test"));
    tracing::subscriber::with_default(registry().with(layer), work);
    queue.waiting()
}

#[test]
fn a_part_belongs_to_its_whole_and_that_to_its_caller() {
    let mut told = None;
    let spans = recorded(|| {
        let request = Sampler::new(0.0).request("lease", Some(context(1)));
        let part = request.child(SpanKind::Client, "fetch");
        part.count("larder.bytes", 4_096_u64);
        told = part.context();
    });
    let [part, request] = spans.as_slice() else { panic!("{spans:?}") };
    assert_eq!((request.name.as_ref(), part.name.as_ref()), ("lease", "fetch"));
    assert_eq!(request.parent_span_id, SpanId::from_bytes([9; 8]));
    assert_eq!(part.parent_span_id, request.span_context.span_id());
    let told = told.unwrap();
    assert_eq!((told.trace_id, told.is_sampled()), ([7; 16], true));
    assert_eq!(told.span_id, part.span_context.span_id().to_bytes());
    let bytes = part.attributes.iter().find(|pair| pair.key.as_str() == "larder.bytes").unwrap();
    assert_eq!(bytes.value, opentelemetry::Value::I64(4_096), "numbers are numbers");
}

#[test]
fn the_callers_decision_counts_and_the_fraction_only_without_one() {
    let spans = recorded(|| {
        let sampler = Sampler::new(1.0);
        assert!(sampler.request("unrecorded", Some(context(0))).context().is_none());
        assert!(Sampler::new(0.0).request("none of them", None).context().is_none());
        assert!(Sampler::default().begin("off").context().is_none());
        drop(sampler.request("all of them", None));
    });
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_ref()).collect();
    assert_eq!(names, ["all of them"]);
}

#[test]
fn a_context_of_zeros_is_ignored() {
    let zeros = TraceContext { trace_id: [0; 16], ..context(1) };
    assert!(Sampler::new(0.0).request("lease", Some(zeros)).context().is_none());
}

#[test]
fn a_process_that_records_no_spans_passes_the_callers_context_on() {
    let request = Sampler::default().request("lease", Some(context(1)));
    assert!(!request.is_recorded());
    request.count("larder.bytes", 1_u64);
    assert_eq!(request.child(SpanKind::Client, "fetch").context(), Some(context(1)));
}
