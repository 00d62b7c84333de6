//! Spans that wait for the collector: a bounded queue and the thread that empties it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};

use crate::lock;

/// Counts of this process's spans, by their fate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpanCounts {
    /// The collector took them.
    pub exported: u64,
    /// The queue was full, or the process ended before they were sent.
    pub dropped: u64,
    /// The collector was not reached, or did not take them.
    pub failed: u64,
}

/// The counts of this process's spans so far.
pub fn span_counts() -> SpanCounts {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    SpanCounts { exported: count(&EXPORTED), dropped: count(&DROPPED), failed: count(&FAILED) }
}

/// The queue. Ending a span never waits for the collector: if there is no room the span is dropped and counted.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<QueuedSpans>,
    /// Notified when there is something to do.
    wake: Condvar,
    /// Notified when something was done.
    done: Condvar,
}

#[derive(Debug, Default)]
struct QueuedSpans {
    spans: Vec<SpanData>,
    is_sending: bool,
    is_stopping: bool,
}

/// The queue as the spans' provider sees it.
#[derive(Debug)]
pub(super) struct Processor(pub(super) Arc<Queue>);

impl Queue {
    /// Sends spans in batches until the queue is stopped and empty.
    pub(super) fn send_all(&self, exporter: &impl SpanExporter) {
        let mut was_refused = false;
        while let Some(batch) = self.next_batch() {
            let spans = batch.len() as u64;
            // The client blocks, so the export is done when it is first polled.
            let sent = exporter.export(batch).now_or_never();
            let sent = sent.unwrap_or_else(|| Err(OTelSdkError::InternalFailure("it waits".to_owned())));
            let counter = if sent.is_ok() { &EXPORTED } else { &FAILED };
            counter.fetch_add(spans, Ordering::Relaxed);
            match &sent {
                Err(error) if !was_refused => {
                    tracing::warn!(%error, spans, "spans did not get to the collector: they are lost, and counted");
                }
                Ok(()) if was_refused => tracing::info!("the collector takes spans again"),
                Ok(()) | Err(_) => {}
            }
            was_refused = sent.is_err();
            lock(&self.state).is_sending = false;
            self.done.notify_all();
        }
    }

    /// Stops the queue when the waiting spans were sent, or after `deadline`. Returns whether all were sent.
    pub(super) fn stop(&self, deadline: Duration) -> bool {
        let mut state = lock(&self.state);
        state.is_stopping = true;
        self.wake.notify_all();
        let is_busy = |state: &mut QueuedSpans| state.is_sending || !state.spans.is_empty();
        let waited = self.done.wait_timeout_while(state, deadline, is_busy);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let left = state.spans.len();
        state.spans.clear();
        DROPPED.fetch_add(left as u64, Ordering::Relaxed);
        left == 0 && !state.is_sending
    }

    /// The waiting spans.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> Vec<SpanData> {
        lock(&self.state).spans.clone()
    }

    fn push(&self, span: SpanData) {
        let mut state = lock(&self.state);
        if state.is_stopping || state.spans.len() >= MAX_SPANS {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.spans.push(span);
        let waiting = state.spans.len();
        drop(state);
        if waiting == 1 || waiting == BATCH_SPANS {
            self.wake.notify_one();
        }
    }

    /// Waits for a whole batch, or for a part of one some time after its first span. `None` at the end.
    fn next_batch(&self) -> Option<Vec<SpanData>> {
        let state = lock(&self.state);
        let is_idle = |state: &mut QueuedSpans| state.spans.is_empty() && !state.is_stopping;
        let state = self.wake.wait_while(state, is_idle).unwrap_or_else(PoisonError::into_inner);
        let is_short = |state: &mut QueuedSpans| state.spans.len() < BATCH_SPANS && !state.is_stopping;
        let waited = self.wake.wait_timeout_while(state, BATCH_AFTER, is_short);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.spans.is_empty() {
            return None;
        }
        state.is_sending = true;
        let batch = state.spans.len().min(BATCH_SPANS);
        Some(state.spans.drain(..batch).collect())
    }
}

impl SpanProcessor for Processor {
    fn on_start(&self, _: &mut Span, _: &opentelemetry::Context) {}

    fn on_end(&self, span: SpanData) {
        self.0.push(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        if self.0.stop(timeout) { Ok(()) } else { Err(OTelSdkError::Timeout(timeout)) }
    }

    fn set_resource(&mut self, _: &Resource) {}
}

static EXPORTED: AtomicU64 = AtomicU64::new(0);
static DROPPED: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);

/// Spans that wait at most: a second of a node at its busiest with every tenth request recorded.
const MAX_SPANS: usize = 4_096;

/// Spans in one request to the collector.
const BATCH_SPANS: usize = 512;

/// How long the first span of a batch waits for others.
const BATCH_AFTER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::future::{Future, ready};
    use std::thread;
    use std::time::SystemTime;

    use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status};

    use super::*;

    /// Takes all spans.
    #[derive(Debug, Default)]
    struct Fake {
        taken: AtomicU64,
    }

    impl SpanExporter for Fake {
        fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
            self.taken.fetch_add(batch.len() as u64, Ordering::Relaxed);
            ready(Ok(()))
        }
    }

    fn span() -> SpanData {
        SpanData {
            span_context: SpanContext::empty_context(),
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "span".into(),
            start_time: SystemTime::UNIX_EPOCH,
            end_time: SystemTime::UNIX_EPOCH,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: Default::default(),
            links: Default::default(),
            status: Status::Unset,
            instrumentation_scope: Default::default(),
        }
    }

    #[test]
    fn a_stopped_queue_has_sent_what_waited_in_batches() {
        let (queue, fake) = (Queue::default(), Fake::default());
        (0..BATCH_SPANS + 1).for_each(|_| queue.push(span()));
        thread::scope(|scope| {
            scope.spawn(|| queue.send_all(&fake));
            assert!(queue.stop(Duration::from_secs(30)));
        });
        assert_eq!(fake.taken.into_inner(), BATCH_SPANS as u64 + 1);
    }

    #[test]
    fn a_full_queue_drops_and_counts_and_is_stopped_without_a_sender() {
        let queue = Queue::default();
        let before = span_counts().dropped;
        (0..MAX_SPANS + 3).for_each(|_| queue.push(span()));
        assert!(span_counts().dropped >= before + 3);
        assert!(!queue.stop(Duration::ZERO));
        assert!(span_counts().dropped >= before + 3 + MAX_SPANS as u64);
        assert!(lock(&queue.state).spans.is_empty());
    }
}
