//! Charts as SVG text: lines over a logarithmic axis, and grouped bars.

use std::fmt::Write as _;

/// A line of a chart.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Series {
    /// The label at the line's end, if the line has a class.
    pub(super) name: String,
    /// `best`, `second`, `bound`, or empty.
    pub(super) class: &'static str,
    /// Its points, by x; y in percent.
    pub(super) points: Vec<(f64, f64)>,
}

/// Bars that are drawn together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Group {
    /// The label below them.
    pub(super) name: String,
    /// For each bar its class, its height and the label above it.
    pub(super) bars: Vec<(&'static str, f64, String)>,
}

/// Lines in percent over capacities. Their labels are at the right, never over each other.
pub(super) fn lines(series: &[Series], ticks: &[(f64, String)], mark: Option<(f64, String)>) -> String {
    let xs = || {
        series
            .iter()
            .flat_map(|series| &series.points)
            .map(|point| point.0)
            .chain(ticks.iter().map(|tick| tick.0))
    };
    let (least, most) = xs().fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(x), b.max(x)));
    let top =
        nice_top(series.iter().flat_map(|series| &series.points).map(|point| point.1).fold(1.0, f64::max));
    let span = (most.ln() - least.ln()).max(f64::MIN_POSITIVE);
    let x = |value: f64| LEFT + (value.ln() - least.ln()) / span * (LINES_RIGHT - LEFT);
    let y = |value: f64| BOTTOM - value / top * (BOTTOM - TOP);
    let mut svg = open("Hit rate by capacity", LINES_WIDTH, LINES_HEIGHT);
    grid(&mut svg, top, LINES_RIGHT, &|value| format!("{value:.0} %"), &y);
    for (value, label) in ticks {
        let _ = write!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{label}</text>"#,
            x(*value),
            BOTTOM + 18.0
        );
    }
    if let Some((value, label)) = mark {
        let at = x(value);
        let _ = write!(
            svg,
            r#"<path class="mark" d="M{at:.1} {TOP}V{BOTTOM}"/><text class="best-label" x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#,
            at - 6.0,
            TOP + 12.0
        );
    }
    for Series { name, class, points } in series.iter().rev() {
        let at = |(i, point): (usize, &(f64, f64))| {
            format!("{}{:.1} {:.1}", if i == 0 { 'M' } else { 'L' }, x(point.0), y(point.1))
        };
        let path: String = points.iter().enumerate().map(at).collect();
        let _ = write!(svg, r#"<path class="series {class}" d="{path}"><title>{name}</title></path>"#);
        for point in points {
            let (cx, cy) = (x(point.0), y(point.1));
            let _ = write!(
                svg,
                r#"<circle class="dot {class}" cx="{cx:.1}" cy="{cy:.1}" r="3"><title>{name}: {:.1} %</title></circle>"#,
                point.1
            );
        }
    }
    end_labels(&mut svg, series, &x, &y);
    svg + "</svg>"
}

/// The names of the lines that have a class, at their ends.
fn end_labels(svg: &mut String, series: &[Series], x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64) -> f64) {
    let named = series.iter().filter(|series| !series.class.is_empty());
    let named: Vec<_> = named.filter_map(|series| Some((series, *series.points.last()?))).collect();
    let ends: Vec<f64> = named.iter().map(|(_, end)| y(end.1)).collect();
    for (((series, end), at), label) in named.iter().zip(&ends).zip(apart(&ends)) {
        let (from, text) = (x(end.0) + 5.0, LINES_RIGHT + 34.0);
        let _ = write!(svg, r#"<path class="leader" d="M{from:.1} {at:.1}L{:.1} {label:.1}"/>"#, text - 4.0);
        let _ = write!(
            svg,
            r#"<text class="{}-label" x="{text}" y="{:.1}">{}</text>"#,
            series.class,
            label + 4.0,
            series.name
        );
    }
}

/// Groups of bars, their values above them.
pub(super) fn bars(title: &str, groups: &[Group], unit: &dyn Fn(f64) -> String) -> String {
    let heights = groups.iter().flat_map(|group| &group.bars).map(|bar| bar.1);
    let top = nice_top(heights.fold(0.0, f64::max));
    let y = |value: f64| BARS_BOTTOM - value / top * (BARS_BOTTOM - TOP);
    let mut svg = open(title, BARS_WIDTH, BARS_BOTTOM + 30.0);
    for step in 0..=4 {
        let value = top * f64::from(step) / 4.0;
        let at = y(value);
        let _ = write!(
            svg,
            r#"<path class="grid" d="M{BARS_LEFT} {at:.1}H{BARS_WIDTH}"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            BARS_LEFT - 8.0,
            at + 4.0,
            unit(value)
        );
    }
    let step = (BARS_WIDTH - BARS_LEFT) / groups.len().max(1) as f64;
    for (number, Group { name, bars }) in groups.iter().enumerate() {
        let start = BARS_LEFT + step * number as f64;
        let width = (step * 0.8 / bars.len().max(1) as f64).min(MOST_BAR_WIDTH);
        let first = start + (step - width * bars.len() as f64) / 2.0;
        for (bar, (class, value, label)) in bars.iter().enumerate() {
            let (left, at) = (first + width * bar as f64, y(*value));
            let _ = write!(
                svg,
                r#"<rect class="bar {class}" x="{left:.1}" y="{at:.1}" width="{:.1}" height="{:.1}" rx="2"><title>{name}: {label}</title></rect>"#,
                width - 2.0,
                BARS_BOTTOM - at
            );
            let _ = write!(
                svg,
                r#"<text class="value" x="{:.1}" y="{:.1}" text-anchor="middle">{label}</text>"#,
                left + width / 2.0 - 1.0,
                at - 5.0
            );
        }
        let _ = write!(
            svg,
            r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{name}</text>"#,
            start + step / 2.0,
            BARS_BOTTOM + 18.0
        );
    }
    let _ = write!(svg, r#"<path class="axis" d="M{BARS_LEFT} {BARS_BOTTOM}H{BARS_WIDTH}"/>"#);
    svg + "</svg>"
}

fn open(title: &str, width: f64, height: f64) -> String {
    format!(r#"<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}">"#)
}

fn grid(svg: &mut String, top: f64, right: f64, label: &dyn Fn(f64) -> String, y: &dyn Fn(f64) -> f64) {
    for step in 0..=5 {
        let value = top * f64::from(step) / 5.0;
        let at = y(value);
        let class = if step == 0 { "axis" } else { "grid" };
        let _ = write!(
            svg,
            r#"<path class="{class}" d="M{LEFT} {at:.1}H{right}"/><text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
            LEFT - 8.0,
            at + 4.0,
            label(value)
        );
    }
}

/// Moves labels apart, as little as possible, and keeps their order.
fn apart(ends: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..ends.len()).collect();
    order.sort_by(|&a, &b| ends[a].total_cmp(&ends[b]));
    let mut labels = ends.to_vec();
    for pair in order.windows(2) {
        labels[pair[1]] = labels[pair[1]].max(labels[pair[0]] + LABEL_HEIGHT);
    }
    // A label that was pushed below the chart pushes the labels above it up.
    let mut limit = BOTTOM;
    for &label in order.iter().rev() {
        labels[label] = labels[label].min(limit);
        limit = labels[label] - LABEL_HEIGHT;
    }
    labels
}

/// The least of 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10 times a power of ten that is not below `most`.
fn nice_top(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(most.log10().floor());
    let steps = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0];
    steps.into_iter().map(|step| step * power).find(|&top| top >= most).unwrap_or(10.0 * power)
}

const LEFT: f64 = 52.0;
const TOP: f64 = 22.0;
const BOTTOM: f64 = 350.0;
const LINES_WIDTH: f64 = 1_000.0;
const LINES_HEIGHT: f64 = 380.0;
const LINES_RIGHT: f64 = 850.0;
const BARS_LEFT: f64 = 62.0;
const BARS_WIDTH: f64 = 480.0;
const BARS_BOTTOM: f64 = 220.0;
const MOST_BAR_WIDTH: f64 = 46.0;
const LABEL_HEIGHT: f64 = 16.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_stand_apart_in_the_order_of_their_lines_and_inside_the_chart() {
        let labels = apart(&[BOTTOM, 100.0, 101.0, BOTTOM]);
        assert_eq!((labels[1], labels[2]), (100.0, 116.0));
        assert!(labels.iter().all(|&label| label <= BOTTOM));
        assert!((labels[0] - labels[3]).abs() >= LABEL_HEIGHT);
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([0.0, 1.0, 37.4, 83.0, 2_100.0].map(nice_top), [1.0, 1.0, 40.0, 100.0, 2_500.0]);
    }
}
