//! What the spans of requests say.

use larder_client::trace::{SpanKind, Trace};
use larder_core::store::{Gathered, Source, Wanted};
use larder_protocol::session::{Lookup, Request, Response, Tier};
use larder_protocol::{Chain, Fingerprint};

use super::{Answer, GpuActor};
use crate::metrics::Outcome;

impl GpuActor {
    /// What is asked.
    pub(super) fn describe_request(&self, trace: &Trace, request: &Request) {
        let chain = |namespace: u32, chain: &Chain| {
            if let Some(fingerprint) = self.store.fingerprint(namespace) {
                describe_namespace(trace, &fingerprint);
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
}

/// The bringing of what a lease or a prefetch wants.
pub(super) fn gather_span(trace: &Trace, gathered: &Gathered) -> Trace {
    if gathered.wanted.is_empty() {
        return Trace::default();
    }
    let gather = trace.child(SpanKind::Internal, "gather");
    gather.count("larder.chunks", gathered.wanted.len() as u64);
    gather
}

/// The reading of chunks from disk.
pub(super) fn disk_span(trace: &Trace, chunks: usize, bytes: impl FnOnce() -> u64) -> Trace {
    read_span(trace, "read_disk", Tier::Disk, chunks, bytes)
}

fn read_span(
    trace: &Trace,
    name: &'static str,
    tier: Tier,
    chunks: usize,
    bytes: impl FnOnce() -> u64,
) -> Trace {
    let span = trace.child(SpanKind::Internal, name);
    if span.is_recorded() {
        span.set("larder.tier", tier_name(tier));
        span.count("larder.chunks", chunks as u64);
        span.count("larder.bytes", bytes());
    }
    span
}

/// The span of those of the chunks that are read from disk, or from the object store.
pub(super) fn source_span(trace: &Trace, wanted: &[Wanted], from: Source) -> Trace {
    if !trace.is_recorded() {
        return trace.clone();
    }
    let from_there = || wanted.iter().filter(|wanted| wanted.from == from);
    let bytes = || from_there().flat_map(|wanted| &wanted.blocks).map(|block| block.bytes).sum();
    match (from_there().count(), from) {
        (0, _) => Trace::default(),
        (chunks, Source::Object) => read_span(trace, "read_object", Tier::Object, chunks, bytes),
        (chunks, _) => disk_span(trace, chunks, bytes),
    }
}

/// Of which namespace it is.
pub(super) fn describe_namespace(trace: &Trace, fingerprint: &Fingerprint) {
    trace.set("larder.namespace", tracing::field::display(fingerprint));
}

/// What came of it.
pub(super) fn describe_answer(trace: &Trace, answer: &Answer) {
    trace.set(
        "larder.outcome",
        match answer.outcome() {
            Outcome::Done => "done",
            Outcome::Busy => "busy",
            Outcome::Refused => "refused",
        },
    );
    let found = match &answer.response {
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
    // The farthest: that is what bringing it costs.
    if let Some(tier) = found.spans.iter().map(|span| span.tier).max() {
        trace.set("larder.tier", tier_name(tier));
    }
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Peer => "peer",
        Tier::Object => "object",
    }
}
