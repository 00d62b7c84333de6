//! The counts of a server's spans, by outcome.

use super::{Label, show_totals};
use crate::trace::{SpanCounts, span_counts};

crate::metrics_table! {
    /// The spans of this process.
    pub struct TracingMetrics: "Tracing", "" => {
        spans: IntCounterVec = "larder_trace_spans_total", "spans",
            [Label::one_of("outcome", &["exported", "dropped", "failed"])],
            "Spans by outcome; dropped: the queue was full; failed: no collector took them";
    }
}

impl TracingMetrics {
    /// Brings the metrics up to date.
    pub fn show(&self) {
        let SpanCounts { exported, dropped, failed } = span_counts();
        show_totals(&self.spans, [("exported", exported), ("dropped", dropped), ("failed", failed)]);
    }
}
