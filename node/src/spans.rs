//! Sets the fields of requests' spans.

use std::any::Any;
use std::sync::Arc;

use larder_core::cause::{Cause, Span};
use larder_net::trace::{SpanKind, Trace};
use larder_protocol::session::{Lookup, Request, Response, Tier};
use larder_protocol::{Chain, Fingerprint};

use crate::metrics::Outcome;

/// Sets the fields of a request. `fingerprint` returns the fingerprint of a session's namespace.
pub(crate) fn describe_request(
    trace: &Trace,
    request: &Request,
    fingerprint: impl Fn(u32) -> Option<Fingerprint>,
) {
    let chain = |namespace: u32, chain: &Chain| {
        if let Some(fingerprint) = fingerprint(namespace) {
            trace.set("larder.namespace", tracing::field::display(fingerprint));
        }
        trace.count("larder.chunks", chain.hashes.len() as u64);
    };
    let lookup = |ask: &Lookup| {
        chain(ask.namespace, &ask.chain);
        trace.count("larder.tokens", ask.prompt_tokens);
    };
    match request {
        Request::Lookup(ask) => lookup(ask),
        Request::Prefetch(ask) => lookup(ask),
        Request::Lease(ask) => chain(ask.namespace, &ask.chain),
        Request::Reserve(ask) => chain(ask.namespace, &ask.chain),
        Request::Pin(ask) => chain(ask.namespace, &ask.chain),
        Request::Commit(ask) => trace.count("larder.chunks", ask.chunks.len() as u64),
        _ => {}
    }
}

/// A span that the core refers to.
struct Recorded(Trace);

impl Span for Recorded {
    fn child(&self, name: &'static str) -> Cause {
        let span = self.0.child(SpanKind::Internal, name);
        match name {
            "read_disk" => span.set("larder.tier", Tier::Disk.name()),
            "read_object" => span.set("larder.tier", Tier::Object.name()),
            _ => {}
        }
        cause_of(&span)
    }

    fn count(&self, field: &'static str, number: u64) {
        self.0.count(field, number);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A trace in the form that the core carries.
pub(crate) fn cause_of(trace: &Trace) -> Cause {
    if trace.is_recorded() { Cause::new(Arc::new(Recorded(trace.clone()))) } else { Cause::default() }
}

/// The trace that the core carried.
pub(crate) fn trace_of(cause: &Cause) -> Trace {
    let recorded = cause.span().and_then(|span| span.as_any().downcast_ref::<Recorded>());
    recorded.map(|recorded| recorded.0.clone()).unwrap_or_default()
}

/// Sets the fields of a request's answer.
pub(crate) fn describe_answer(trace: &Trace, outcome: Outcome, response: Option<&Response>) {
    trace.set("larder.outcome", outcome.name());
    let found = match response {
        Some(Response::Found(found)) => found,
        Some(Response::Prefetching(prefetching)) => &prefetching.found,
        Some(Response::Leased(leased)) => return trace.count("larder.chunks_here", leased.chunks),
        Some(Response::Reserved(reserved)) => {
            return trace.count("larder.chunks_here", reserved.chunks.len() as u64);
        }
        Some(Response::Committed(chunks)) => return trace.count("larder.chunks_here", *chunks),
        Some(Response::Pinned(pinned)) => return trace.count("larder.chunks_here", pinned.chunks),
        _ => return,
    };
    trace.count("larder.tokens_found", found.tokens);
    trace.count("larder.chunks_here", found.spans.iter().map(|span| span.to - span.from).sum::<u32>());
    // The farthest tier: its distance decides the cost of bringing the chunks.
    if let Some(tier) = found.spans.iter().map(|span| span.tier).max() {
        trace.set("larder.tier", tier.name());
    }
}
