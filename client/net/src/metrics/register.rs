//! Makes handles of a table's rows, and registers them.

use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Error, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::{Kind, Label, Metric, Section, combinations};

/// The handles of one section of a table, as [`metrics_table!`](crate::metrics_table) makes them.
pub trait Part: Sized {
    /// The section, with its rows.
    const SECTION: Section;

    /// Registers all handles; `fixed` are labels that have one value in all of these handles.
    ///
    /// # Errors
    /// Fails if the registry has one of them already, or a field has another kind or other labels than its row.
    fn register_with(registry: &Registry, fixed: &[(&str, &str)]) -> Result<Self, Error>;

    /// Registers all handles, without fixed labels.
    ///
    /// # Errors
    /// See [`Part::register_with`].
    fn register(registry: &Registry) -> Result<Self, Error> {
        Self::register_with(registry, &[])
    }
}

/// A type of handles.
pub trait Handle: Collector + Clone + 'static {
    /// The kind of the metric; a histogram has no buckets here.
    const KIND: Kind;
    /// Whether the metric has labels whose values are not fixed.
    const BY_LABELS: bool;

    /// Makes a handle.
    ///
    /// # Errors
    /// Fails if Prometheus does not accept a name.
    fn make(metric: &Metric, options: Opts, labels: &[&str]) -> Result<Self, Error>;

    /// Exports this combination of label values from now on, even without an event.
    fn show(&self, values: &[&str]);
}

/// Makes a metric's handle, and registers it.
///
/// # Errors
/// See [`Part::register_with`].
pub fn register<T: Handle>(registry: &Registry, metric: &Metric, fixed: &[(&str, &str)]) -> Result<T, Error> {
    let (mut options, mut open) = (Opts::new(metric.name, metric.help), Vec::<Label>::new());
    for label in metric.labels {
        match fixed.iter().find(|(name, _)| *name == label.name) {
            Some((name, value)) => options = options.const_label(*name, *value),
            None => open.push(*label),
        }
    }
    if metric.kind.as_str() != T::KIND.as_str() || open.is_empty() == T::BY_LABELS {
        return Err(Error::Msg(format!(
            "`{}` has another kind or other labels in the table of metrics",
            metric.name
        )));
    }
    let names: Vec<&str> = open.iter().map(|label| label.name).collect();
    let handle = T::make(metric, options, &names)?;
    // A rate over a counter that comes with its first event misses that event.
    for values in combinations(&open).unwrap_or_default() {
        handle.show(&values);
    }
    registry.register(Box::new(handle.clone()))?;
    Ok(handle)
}

/// Raises the counters, which have one label, to these totals.
pub fn show_totals<const N: usize>(counters: &IntCounterVec, totals: [(&str, u64); N]) {
    for (value, total) in totals {
        let counter = counters.with_label_values(&[value]);
        counter.inc_by(total.saturating_sub(counter.get()));
    }
}

macro_rules! handles {
    ($($one:ident, $many:ident: $kind:expr, $options:ident;)*) => {$(
        impl Handle for $one {
            const KIND: Kind = $kind;
            const BY_LABELS: bool = false;

            fn make(metric: &Metric, options: Opts, _: &[&str]) -> Result<Self, Error> {
                Self::with_opts($options(metric, options))
            }

            fn show(&self, _: &[&str]) {}
        }

        impl Handle for $many {
            const KIND: Kind = $kind;
            const BY_LABELS: bool = true;

            fn make(metric: &Metric, options: Opts, labels: &[&str]) -> Result<Self, Error> {
                Self::new($options(metric, options), labels)
            }

            fn show(&self, values: &[&str]) {
                drop(self.with_label_values(values));
            }
        }
    )*};
}

handles! {
    IntCounter, IntCounterVec: Kind::Counter, plain;
    Counter, CounterVec: Kind::Counter, plain;
    IntGauge, IntGaugeVec: Kind::Gauge, plain;
    Gauge, GaugeVec: Kind::Gauge, plain;
    Histogram, HistogramVec: Kind::Histogram(&[]), in_buckets;
}

fn plain(_: &Metric, options: Opts) -> Opts {
    options
}

fn in_buckets(metric: &Metric, options: Opts) -> HistogramOpts {
    let Kind::Histogram(buckets) = metric.kind else { return options.into() };
    HistogramOpts::from(options).buckets(buckets.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::metrics_table! {
        /// Rows of a test.
        struct Rows: "Tests", "" => {
            rows: IntGauge = "rows", "rows", [Label::each("device", "a device")], "Rows";
            ends: IntCounterVec = "ends_total", "ends", [Label::one_of("how", &["well", "badly"])], "Ends";
        }
    }

    #[test]
    fn handles_are_registered_once_and_as_what_their_row_says() {
        let registry = Registry::new();
        assert!(Rows::register(&Registry::new()).is_err(), "a gauge by device has no value");
        assert!(Rows::register_with(&registry, &[("device", "0")]).is_ok());
        assert!(Rows::register_with(&registry, &[("device", "0")]).is_err(), "twice");
        let [_, ends] = Rows::SECTION.metrics else { panic!("two rows") };
        assert!(register::<IntGaugeVec>(&Registry::new(), ends, &[]).is_err(), "it is a counter");
        assert!(register::<IntCounterVec>(&Registry::new(), ends, &[]).is_ok());
    }

    #[test]
    fn values_that_are_known_are_there_from_the_start_and_fixed_ones_are_labels_too() {
        let registry = Registry::new();
        let rows = Rows::register_with(&registry, &[("device", "7")]).unwrap();
        rows.rows.set(3);
        show_totals(&rows.ends, [("well", 2)]);
        show_totals(&rows.ends, [("well", 2)]);
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in ["rows{device=\"7\"} 3", "ends_total{how=\"well\"} 2", "ends_total{how=\"badly\"} 0"] {
            assert!(text.contains(line), "{text}");
        }
    }
}
