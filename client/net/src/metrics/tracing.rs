//! What became of the spans that a server made.

use prometheus::{Error, IntCounterVec};

use super::{Families, Label, Metric, Section};
use crate::trace::{SpanCounts, span_counts};

/// The part of a table that every server has which can be traced.
pub const TRACING: Section = Section {
    title: "Tracing",
    only: "",
    metrics: &[Metric::counter(
        NAME,
        "spans",
        &[Label::one_of("outcome", &["exported", "dropped", "failed"])],
        "Spans by what became of them: `dropped` found the queue full, `failed` found no collector that took them",
    )],
};

/// The spans of this process.
#[derive(Debug, Clone)]
pub struct TracingMetrics(IntCounterVec);

impl TracingMetrics {
    /// Registers them.
    ///
    /// # Errors
    /// Fails if the name is taken, or is not in the table.
    pub fn new(families: &Families<'_>) -> Result<Self, Error> {
        Ok(Self(families.counters(NAME)?))
    }

    /// Brings them up to date.
    pub fn show(&self) {
        let SpanCounts { exported, dropped, failed } = span_counts();
        for (outcome, count) in [("exported", exported), ("dropped", dropped), ("failed", failed)] {
            let counter = self.0.with_label_values(&[outcome]);
            counter.inc_by(count.saturating_sub(counter.get()));
        }
    }
}

const NAME: &str = "larder_trace_spans_total";
