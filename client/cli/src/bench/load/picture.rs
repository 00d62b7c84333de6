//! The times of requests over their rate, as a picture.

use std::fmt::Write as _;
use std::time::Duration;

use super::seen::{KindSeen, Knee, Step};

/// An SVG with both axes logarithmic: the median, the 99th and the 99.9th percentile of all requests, the limit and the knee.
pub fn svg(steps: &[Step], limit: Duration) -> String {
    let rates = || steps.iter().map(|step| step.rate);
    let (least, most) = (rates().fold(f64::MAX, f64::min), rates().fold(1.0, f64::max));
    let slowest = steps.iter().map(|step| step.all.p999_us).max().unwrap_or(1).max(1) as f64;
    let top = 10.0_f64.powf(slowest.max(limit.as_micros() as f64).log10().ceil());
    let x = |rate: f64| LEFT + (rate / least).ln() / (most / least).max(1.001).ln() * (RIGHT - LEFT);
    let y = |us: f64| BOTTOM - (us.max(FLOOR_US) / FLOOR_US).ln() / (top / FLOOR_US).ln() * (BOTTOM - TOP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 340\" font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n\
         <title>{TITLE}</title>\n<rect width=\"720\" height=\"340\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\" fill=\"#1f2933\">{TITLE}</text>\n"
    );
    let mut decade = FLOOR_US;
    while decade <= top {
        level(&mut svg, y(decade), "stroke=\"#e4e7eb\"");
        let name = format!("{} ms", decade / 1e3);
        text(&mut svg, LEFT - 8.0, y(decade) + 4.0, "end", "#616e7c", &name);
        decade *= 10.0;
    }
    let mut free_from = f64::MIN;
    for rate in rates() {
        if x(rate) >= free_from {
            text(&mut svg, x(rate), BOTTOM + 22.0, "middle", "#616e7c", &format!("{rate:.0}/s"));
            free_from = x(rate) + LABEL_WIDTH;
        }
    }
    let limit_us = limit.as_micros() as f64;
    level(&mut svg, y(limit_us), DASHED);
    text(&mut svg, RIGHT + 8.0, y(limit_us) + 4.0, "start", "#616e7c", "limit for 99 %");
    if let Some(knee) = Knee::of(steps) {
        let at = x(knee.rate);
        let _ = writeln!(svg, "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\" {DASHED}/>");
        text(&mut svg, at - 6.0, TOP - 6.0, "end", "#616e7c", &format!("knee: {:.0}/s", knee.rate));
    }
    for (name, of, color) in LINES {
        let points: Vec<(f64, f64)> =
            steps.iter().map(|step| (x(step.rate), y(of(&step.all) as f64))).collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let path = path.join(" ");
        let _ = writeln!(
            svg,
            "<polyline points=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2.5\"/>"
        );
        // The name is where the line begins, since the ends of lines come close to each other.
        if let Some((x, y)) = points.first() {
            text(&mut svg, x + 4.0, y - 7.0, "start", color, name);
        }
    }
    svg + "</svg>\n"
}

fn level(svg: &mut String, y: f64, style: &str) {
    let _ = writeln!(svg, "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\" {style}/>");
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, color: &str, words: &str) {
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{color}\">{words}</text>"
    );
}

/// The name of a line, its figure, and its color.
type Line = (&'static str, fn(&KindSeen) -> u64, &'static str);

const LINES: [Line; 3] = [
    ("half", |seen| seen.p50_us, "#0b7285"),
    ("99 %", |seen| seen.p99_us, "#c2255c"),
    ("99.9 %", |seen| seen.p999_us, "#5f3dc4"),
];

const TITLE: &str = "How long requests take, from when they were due, as they become more";
const DASHED: &str = "stroke=\"#9aa5b1\" stroke-dasharray=\"6 4\"";
/// Times below this are at the bottom.
const FLOOR_US: f64 = 10.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 600.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 290.0;
/// Width of the label of a rate below the picture.
const LABEL_WIDTH: f64 = 62.0;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn step(rate: f64, us: u64, within_limit: bool) -> Step {
        let all = KindSeen { answered: 1, p50_us: us, p99_us: 2 * us, p999_us: 4 * us };
        Step {
            rate,
            asked: 1,
            answered_a_second: rate,
            turned_away: 0,
            unanswered: 0,
            node_cpus: 0.0,
            engine_cpus: 0.0,
            all,
            kinds: BTreeMap::new(),
            within_limit,
        }
    }

    #[test]
    fn slower_steps_are_drawn_higher_and_all_points_are_inside_the_picture() {
        let steps = [step(100.0, 50, true), step(1_000.0, 5_000, true), step(10_000.0, 3_000_000, false)];
        let drawn = svg(&steps, Duration::from_millis(10));
        assert!(drawn.contains("knee: 1000/s") && !drawn.contains("NaN"), "{drawn}");
        let half = drawn.split("<polyline points=\"").nth(1).unwrap().split('"').next().unwrap();
        let points: Vec<(f64, f64)> = half
            .split(' ')
            .map(|point| point.split_once(',').unwrap())
            .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
            .collect();
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1), "{points:?}");
        assert!(
            points.iter().all(|(x, y)| (LEFT..=RIGHT).contains(x) && (TOP..=BOTTOM).contains(y)),
            "{points:?}"
        );
    }

    #[test]
    fn one_step_without_an_answer_can_be_drawn() {
        assert!(!svg(&[step(5.0, 0, false)], Duration::from_millis(10)).contains("NaN"));
    }
}
