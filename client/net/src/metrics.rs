//! The metrics of a server: one table, from which the metrics are made. The table is also their documentation.
//!
//! A server has its table as a list of [`Section`]s. [`metrics_table!`](crate::metrics_table) makes a section and the struct of
//! its handles from the same rows, so that the documented and the exported metrics are the same. Labels are bounded: a label has
//! a closed list of values, or one value for each instance of something bounded. If every label of a metric has a closed list,
//! all of their values are there from the start, at zero.

mod certificate;
mod process;
mod register;
mod table;
mod tracing;

use std::fmt;

pub use certificate::{CertificateMetrics, EarliestEnd};
pub use process::ProcessMetrics;
pub use register::{Handle, Part, register, show_totals};
pub use tracing::TracingMetrics;

/// A group of metrics that answer one question.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Section {
    /// The subject of the metrics.
    pub title: &'static str,
    /// The servers that export the metrics; empty if every server of this kind does.
    pub only: &'static str,
    /// The metrics.
    pub metrics: &'static [Metric],
}

/// A metric with all of its labels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    /// Its name, as Prometheus has it.
    pub name: &'static str,
    /// The kind of its values.
    pub kind: Kind,
    /// The unit of its values.
    pub unit: &'static str,
    /// Its labels.
    pub labels: &'static [Label],
    /// Its meaning.
    pub help: &'static str,
}

/// A kind of metric.
#[derive(Debug, Clone, Copy, PartialEq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Kind {
    /// The value only grows.
    Counter,
    /// The value grows and shrinks.
    Gauge,
    /// Values are counted in buckets, whose upper bounds these are.
    Histogram(&'static [f64]),
}

/// A label of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// Its values.
    pub values: Values,
}

/// The values of a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// These values and no others.
    OneOf(&'static [&'static str]),
    /// One value for each instance of this, which is bounded.
    Each(&'static str),
}

impl Metric {
    /// The names of its labels.
    pub fn label_names(&self) -> Vec<&'static str> {
        self.labels.iter().map(|label| label.name).collect()
    }

    /// Every combination of its labels' values; `None` if one of them has no closed list.
    pub fn combinations(&self) -> Option<Vec<Vec<&'static str>>> {
        combinations(self.labels)
    }
}

impl Label {
    /// A label with these values and no others.
    pub const fn one_of(name: &'static str, values: &'static [&'static str]) -> Self {
        Self { name, values: Values::OneOf(values) }
    }

    /// A label with one value for each instance of `what`, which is bounded.
    pub const fn each(name: &'static str, what: &'static str) -> Self {
        Self { name, values: Values::Each(what) }
    }

    /// Whether the label may have this value.
    pub fn allows(&self, value: &str) -> bool {
        match self.values {
            Values::OneOf(values) => values.contains(&value),
            Values::Each(_) => true,
        }
    }
}

impl Kind {
    /// This kind of metric, with its values counted in buckets.
    #[must_use]
    pub const fn in_buckets(self, upper_bounds: &'static [f64]) -> Self {
        Self::Histogram(upper_bounds)
    }

    /// The kind's name in Prometheus' text format.
    pub fn as_str(&self) -> &'static str {
        self.into()
    }
}

fn combinations(labels: &[Label]) -> Option<Vec<Vec<&'static str>>> {
    labels.iter().try_fold(vec![Vec::new()], |all: Vec<Vec<&str>>, label| {
        let Values::OneOf(values) = label.values else { return None };
        let with = |known: &Vec<&'static str>| {
            let known = known.clone();
            values.iter().map(move |&value| [&known[..], &[value]].concat())
        };
        Some(all.iter().flat_map(with).collect())
    })
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.values {
            Values::OneOf(values) => write!(f, "{}: {}", self.name, values.join(", ")),
            Values::Each(what) => write!(f, "{}: {what}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_of_closed_labels_are_combined_and_those_of_others_are_not() {
        const BOTH: &[Label] =
            &[Label::one_of("request", &["get", "put"]), Label::one_of("outcome", &["done", "busy"])];
        let all = combinations(BOTH).unwrap();
        assert_eq!(all, [["get", "done"], ["get", "busy"], ["put", "done"], ["put", "busy"]]);
        assert_eq!(combinations(&[BOTH[0], Label::each("tenant", "a tenant")]), None);
        assert_eq!(combinations(&[]), Some(vec![vec![]]));
    }
}
