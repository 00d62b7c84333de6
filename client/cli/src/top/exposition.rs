//! Reads metrics in Prometheus' text format.

/// The sum of a metric over its series that have all of these labels. A missing metric counts as 0.
pub(crate) fn sum(text: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let series = text.lines().filter_map(|line| series(line.strip_prefix(name)?));
    let with_labels = series.filter(|(found, _)| {
        labels.iter().all(|(label, value)| has_label(found, &format!("{label}=\"{value}\"")))
    });
    with_labels.map(|(_, value)| value).sum()
}

/// Labels and value, from the text behind a metric's name; `None` if the name goes on.
fn series(rest: &str) -> Option<(&str, f64)> {
    let (labels, value) = match rest.strip_prefix('{') {
        Some(labelled) => labelled.rsplit_once("} ")?,
        None => ("", rest.strip_prefix(' ')?),
    };
    Some((labels, value.split(' ').next()?.parse().ok()?))
}

/// Whether one of the labels is this one: a label's name starts the text, or follows a comma.
fn has_label(labels: &str, wanted: &str) -> bool {
    labels.match_indices(wanted).any(|(at, _)| at == 0 || labels[..at].ends_with(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# HELP larder_moved_bytes_total Bytes
# TYPE larder_moved_bytes_total counter
larder_moved_bytes_total{device=\"0\",movement=\"leased\"} 10
larder_moved_bytes_total{device=\"1\",movement=\"leased\"} 2.5
larder_moved_bytes_total{device=\"1\",movement=\"committed\"} 100
larder_moved_bytes_total_more 7
larder_peer_silent 3
larder_odd{on_device=\"1\",text=\"a } b\"} 5
";

    #[test]
    fn series_with_the_labels_are_added_and_no_others() {
        assert_eq!(sum(TEXT, "larder_moved_bytes_total", &[("movement", "leased")]), 12.5);
        assert_eq!(sum(TEXT, "larder_moved_bytes_total", &[("movement", "leased"), ("device", "1")]), 2.5);
        assert_eq!(sum(TEXT, "larder_moved_bytes_total", &[]), 112.5);
        assert_eq!(sum(TEXT, "larder_peer_silent", &[]), 3.0);
        assert_eq!(sum(TEXT, "larder_odd", &[("device", "1")]), 0.0);
        assert_eq!(sum(TEXT, "larder_odd", &[("on_device", "1")]), 5.0);
        assert_eq!(sum(TEXT, "larder_nothing", &[]), 0.0);
    }
}
