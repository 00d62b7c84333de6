//! The node's answers as Python classes.

use std::time::Duration;

use larder_client::Counters;
use larder_protocol::session;
use pyo3::prelude::*;

/// A run of chunks in one tier: positions `start` to before `end` of the chain.
#[pyclass(frozen, get_all, eq, module = "larder_kv")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// Position of the first chunk.
    start: u32,
    /// Position after the last.
    end: u32,
    /// The tier of these chunks: "device", "host", "disk", "peer" or "object".
    tier: &'static str,
}

/// How much of a prompt is in the cache.
#[pyclass(frozen, get_all, module = "larder_kv")]
#[derive(Debug)]
pub(crate) struct Found {
    /// Tokens of the contiguous prefix that can be used.
    tokens: u64,
    /// The tiers of the prefix's chunks.
    spans: Vec<Span>,
    /// The requested pin, for `unpin`; None if there is none.
    pin: Option<u64>,
}

/// The progress of a prefetch.
#[pyclass(frozen, get_all, module = "larder_kv")]
#[derive(Debug)]
pub(crate) struct Progress {
    /// Tokens of contiguous prefix that are in place.
    tokens_in_place: u64,
    /// Tokens that will be in place if nothing fails.
    tokens_expected: u64,
    /// Whether nothing more is on its way.
    is_done: bool,
}

/// The chunks of a pin.
#[pyclass(frozen, get_all, module = "larder_kv")]
#[derive(Debug)]
pub(crate) struct Pinned {
    /// The pin, for `unpin`; 0 if nothing is pinned.
    pin: u64,
    /// Chunks pinned, from the chain's first on.
    chunks: u32,
    /// How long the pin lasts.
    seconds: f64,
}

/// The bytes that a session has moved.
#[pyclass(frozen, get_all, module = "larder_kv")]
#[derive(Debug)]
pub(crate) struct Stats {
    /// Bytes copied out of leased blocks; a block that was viewed counts as a whole.
    bytes_read: u64,
    /// Bytes copied into staged chunks.
    bytes_written: u64,
    /// Bytes that were verified.
    bytes_verified: u64,
    /// Blocks that had other bytes than were committed under their names.
    blocks_damaged: u64,
}

impl From<&session::Found> for Found {
    fn from(found: &session::Found) -> Self {
        let span = |span: &session::Span| Span { start: span.from, end: span.to, tier: span.tier.name() };
        Self { tokens: found.tokens, spans: found.spans.iter().map(span).collect(), pin: found.pin }
    }
}

impl From<session::Progress> for Progress {
    fn from(progress: session::Progress) -> Self {
        let session::Progress { tokens_in_place, tokens_expected, is_done } = progress;
        Self { tokens_in_place, tokens_expected, is_done }
    }
}

impl From<session::Pinned> for Pinned {
    fn from(pinned: session::Pinned) -> Self {
        let session::Pinned { pin, chunks, duration_ms } = pinned;
        Self { pin, chunks, seconds: Duration::from_millis(duration_ms).as_secs_f64() }
    }
}

impl From<Counters> for Stats {
    fn from(counters: Counters) -> Self {
        let Counters { bytes_read, bytes_written, bytes_verified, blocks_damaged } = counters;
        Self { bytes_read, bytes_written, bytes_verified, blocks_damaged }
    }
}

#[pymethods]
impl Span {
    fn __repr__(&self) -> String {
        format!("Span(start={}, end={}, tier='{}')", self.start, self.end, self.tier)
    }
}

#[pymethods]
impl Found {
    fn __repr__(&self) -> String {
        format!("Found(tokens={}, spans={}, pin={:?})", self.tokens, self.spans.len(), self.pin)
    }
}

repr!(Progress(tokens_in_place, tokens_expected, is_done));
repr!(Pinned(pin, chunks, seconds));
repr!(Stats(bytes_read, bytes_written, bytes_verified, blocks_damaged));
