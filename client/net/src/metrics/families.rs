//! Makes the metrics of a table, and registers them.

use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Error, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::{Kind, Metric, Section};

/// Makes metrics by their names in a table. Each method fails if the table has no such metric or one of another kind, or if
/// the registry has it already: a server that asks for an undocumented metric does not start.
#[derive(Debug, Clone, Copy)]
pub struct Families<'a> {
    registry: &'a Registry,
    sections: &'a [Section],
}

impl<'a> Families<'a> {
    /// Makes metrics of this table, in this registry.
    #[must_use]
    pub fn new(registry: &'a Registry, sections: &'a [Section]) -> Self {
        Self { registry, sections }
    }

    /// A number that only grows.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn counter(&self, name: &str) -> Result<IntCounter, Error> {
        let metric = self.find(name, &Kind::Counter, false)?;
        self.add(IntCounter::new(metric.name, metric.help)?)
    }

    /// The same kind of metric, with labels.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn counters(&self, name: &str) -> Result<IntCounterVec, Error> {
        let metric = self.find(name, &Kind::Counter, true)?;
        let family = IntCounterVec::new(options(metric), &metric.label_names())?;
        show(metric, |values| drop(family.with_label_values(values)));
        self.add(family)
    }

    /// A fraction that only grows, such as seconds.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn sum(&self, name: &str) -> Result<Counter, Error> {
        let metric = self.find(name, &Kind::Counter, false)?;
        self.add(Counter::new(metric.name, metric.help)?)
    }

    /// The same kind of metric, with labels.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn sums(&self, name: &str) -> Result<CounterVec, Error> {
        let metric = self.find(name, &Kind::Counter, true)?;
        let family = CounterVec::new(options(metric), &metric.label_names())?;
        show(metric, |values| drop(family.with_label_values(values)));
        self.add(family)
    }

    /// A number that grows and shrinks.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn gauge(&self, name: &str) -> Result<IntGauge, Error> {
        let metric = self.find(name, &Kind::Gauge, false)?;
        self.add(IntGauge::new(metric.name, metric.help)?)
    }

    /// The same kind of metric, with labels.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn gauges(&self, name: &str) -> Result<IntGaugeVec, Error> {
        let metric = self.find(name, &Kind::Gauge, true)?;
        let family = IntGaugeVec::new(options(metric), &metric.label_names())?;
        show(metric, |values| drop(family.with_label_values(values)));
        self.add(family)
    }

    /// A fraction that grows and shrinks.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn level(&self, name: &str) -> Result<Gauge, Error> {
        let metric = self.find(name, &Kind::Gauge, false)?;
        self.add(Gauge::new(metric.name, metric.help)?)
    }

    /// The same kind of metric, with labels.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn levels(&self, name: &str) -> Result<GaugeVec, Error> {
        let metric = self.find(name, &Kind::Gauge, true)?;
        let family = GaugeVec::new(options(metric), &metric.label_names())?;
        show(metric, |values| drop(family.with_label_values(values)));
        self.add(family)
    }

    /// Values in buckets.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn histogram(&self, name: &str) -> Result<Histogram, Error> {
        let metric = self.find(name, &Kind::Histogram(&[]), false)?;
        self.add(Histogram::with_opts(buckets(metric))?)
    }

    /// The same kind of metric, with labels.
    ///
    /// # Errors
    /// See [`Families`].
    pub fn histograms(&self, name: &str) -> Result<HistogramVec, Error> {
        let metric = self.find(name, &Kind::Histogram(&[]), true)?;
        let family = HistogramVec::new(buckets(metric), &metric.label_names())?;
        show(metric, |values| drop(family.with_label_values(values)));
        self.add(family)
    }

    fn find(&self, name: &str, kind: &Kind, has_labels: bool) -> Result<&'a Metric, Error> {
        let metric = self.sections.iter().flat_map(|section| section.metrics).find(|row| row.name == name);
        let metric = metric.ok_or_else(|| Error::Msg(format!("`{name}` is not in the table of metrics")))?;
        if metric.kind.as_str() != kind.as_str() || metric.labels.is_empty() == has_labels {
            return Err(Error::Msg(format!("`{name}` is something else in the table of metrics")));
        }
        Ok(metric)
    }

    fn add<T: Collector + Clone + 'static>(&self, family: T) -> Result<T, Error> {
        self.registry.register(Box::new(family.clone()))?;
        Ok(family)
    }
}

fn options(metric: &Metric) -> Opts {
    Opts::new(metric.name, metric.help)
}

fn buckets(metric: &Metric) -> HistogramOpts {
    let Kind::Histogram(buckets) = metric.kind else { return HistogramOpts::new(metric.name, metric.help) };
    HistogramOpts::new(metric.name, metric.help).buckets(buckets.to_vec())
}

/// Has every value there from the start, where they are known: a rate over a counter that comes with its first event misses
/// that event.
fn show(metric: &Metric, with: impl Fn(&[&str])) {
    for values in metric.combinations().unwrap_or_default() {
        with(&values);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Label;
    use super::*;

    const TABLE: &[Section] = &[Section {
        title: "Tests",
        only: "",
        metrics: &[
            Metric::gauge("rows", "rows", &[], "Rows"),
            Metric::counter("ends_total", "ends", &[Label::one_of("how", &["well", "badly"])], "Ends"),
        ],
    }];

    #[test]
    fn only_what_is_in_the_table_can_be_had_once_and_as_what_it_is() {
        let registry = Registry::new();
        let families = Families::new(&registry, TABLE);
        assert!(families.gauge("rows").is_ok());
        assert!(families.gauge("rows").is_err(), "twice");
        assert!(families.gauge("lines").is_err(), "not in the table");
        assert!(families.gauge("ends_total").is_err() && families.counter("ends_total").is_err());
        assert!(families.counters("ends_total").is_ok());
    }

    #[test]
    fn values_that_are_known_are_there_from_the_start() {
        let registry = Registry::new();
        let _ends = Families::new(&registry, TABLE).counters("ends_total").unwrap();
        let gathered = registry.gather();
        assert_eq!(gathered[0].get_metric().len(), 2, "{gathered:?}");
    }
}
