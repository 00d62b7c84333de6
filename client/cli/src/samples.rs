//! The present values of a server's metrics, read from Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt;

use larder_net::metrics::{Kind, Metric};
use serde::Serialize;

/// All samples, by the name in the text.
#[derive(Debug, Default)]
pub(crate) struct Samples(BTreeMap<String, Vec<Sample>>);

/// One series.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Sample {
    pub(crate) labels: BTreeMap<String, String>,
    /// The value; for a histogram, the mean of the observations.
    pub(crate) value: f64,
    /// For a histogram, the number of observations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) count: Option<u64>,
}

impl Samples {
    /// Reads the text. Skips lines that make no sense.
    pub(crate) fn parse(text: &str) -> Self {
        let mut all = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = parse_labels(labels.trim_end_matches('}'));
            all.0.entry(name.to_owned()).or_default().push(Sample { labels, value, count: None });
        }
        all
    }

    /// The kind of the server: `node` or `coordinator`; `None` if it is no server of Larder.
    pub(crate) fn role(&self) -> Option<&str> {
        self.0.get("larder_build_info")?.first()?.labels.get("role").map(String::as_str)
    }

    /// The sum of a metric over its series that have all of these labels. A missing metric counts as 0.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |sample: &&Sample| {
            labels.iter().all(|&(label, value)| sample.labels.get(label).is_some_and(|found| found == value))
        };
        self.0.get(name).into_iter().flatten().filter(has).map(|sample| sample.value).sum()
    }

    /// The samples of one metric.
    pub(crate) fn of(&self, metric: &Metric) -> Vec<Sample> {
        let get = |name: &str| self.0.get(name).map(Vec::as_slice).unwrap_or_default();
        if !matches!(metric.kind, Kind::Histogram(_)) {
            return get(metric.name).to_vec();
        }
        let sums = get(&format!("{}_sum", metric.name));
        let counts = get(&format!("{}_count", metric.name));
        let mean = |(sum, count): (&Sample, &Sample)| {
            let value = if count.value > 0.0 { sum.value / count.value } else { 0.0 };
            Sample { labels: sum.labels.clone(), value, count: Some(count.value as u64) }
        };
        sums.iter().zip(counts).map(mean).collect()
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let labels: Vec<String> =
            self.labels.iter().map(|(name, value)| format!("{name}={value:?}")).collect();
        if !labels.is_empty() {
            write!(f, "{}  ", labels.join(" "))?;
        }
        match self.count {
            Some(count) => write!(f, "{count} times, {:.3e} on average", self.value),
            None => write!(f, "{}", self.value),
        }
    }
}

/// Reads `a="x",b="y"`. No value of a label of Larder's has a quote or a backslash in it.
fn parse_labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split("\",").filter_map(|pair| pair.split_once("=\""));
    pairs.map(|(name, value)| (name.to_owned(), value.trim_end_matches('"').to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_read_with_their_labels() {
        let samples = Samples::parse("# HELP x y\nx{a=\"1,2\",b=\"3\"} 4\ny_sum 6\ny_count 3\nnonsense\n");
        let metric = |name, kind| Metric { name, kind, unit: "", labels: &[], help: "" };
        let x = samples.of(&metric("x", Kind::Gauge));
        assert_eq!(x[0].to_string(), r#"a="1,2" b="3"  4"#);
        let y = samples.of(&metric("y", Kind::Histogram(&[])));
        assert_eq!((y[0].value, y[0].count), (2.0, Some(3)));
    }

    #[test]
    fn series_with_the_labels_are_added_and_no_others() {
        let text = "x{a=\"0\",b=\"c\"} 10\nx{a=\"1\",b=\"c\"} 2.5\nx{a=\"1\",b=\"d\"} 100\nx_more 7\n";
        let samples = Samples::parse(text);
        let sums = [&[][..], &[("b", "c")], &[("b", "c"), ("a", "1")]].map(|labels| samples.sum("x", labels));
        assert_eq!((sums, samples.sum("z", &[])), ([112.5, 12.5, 2.5], 0.0));
    }
}
