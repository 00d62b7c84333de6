//! Pictures of the figures: a line over the size of the cluster, with the goal beside it.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use super::options::Played;

/// Draws all pictures into a folder.
pub(super) fn draw(folder: &Path, all: &[Played]) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let picture = |name: &str, picture: &Picture<'_>| std::fs::write(folder.join(name), picture.svg(all));
    let lookups = Picture {
        title: "Homes that a lookup asks",
        lines: &[
            ("mean", |played| played.figures.homes_mean),
            ("99 % of lookups", |played| played.figures.homes_p99 as f64),
        ],
        goal: Some(("goal for the mean", 3.0)),
    };
    picture("scale-homes.svg", &lookups)?;
    let skew = Picture {
        title: "The busiest node, as a multiple of the mean",
        lines: &[
            ("rows", |played| played.figures.skew_rows),
            ("requests", |played| played.figures.skew_requests),
            ("served bytes", |played| played.figures.skew_served),
        ],
        goal: Some(("goal", 1.5)),
    };
    picture("scale-skew.svg", &skew)?;
    let messages = Picture {
        title: "Messages of the directory, a second and node",
        lines: &[
            ("questions", |played| played.figures.finds_a_second),
            ("announcements", |played| played.figures.announces_a_second),
            ("comparisons", |played| played.figures.compares_a_second),
        ],
        goal: None,
    };
    picture("scale-messages.svg", &messages)?;
    let crash = Picture {
        title: "Seconds after a crash of 5 % of the nodes",
        lines: &[
            ("crash to removal", |played| played.figures.crash.table_after_seconds),
            ("removal to a right directory", |played| played.figures.crash.repaired_after_seconds),
        ],
        goal: Some(("goal for each", 10.0)),
    };
    picture("scale-crash.svg", &crash)
}

/// A picture of some figures.
struct Picture<'a> {
    title: &'a str,
    lines: &'a [Line],
    goal: Option<(&'a str, f64)>,
}

/// The name of a figure, and the function that reads it.
type Line = (&'static str, fn(&Played) -> f64);

impl Picture<'_> {
    fn svg(&self, all: &[Played]) -> String {
        let figures = self.lines.iter().flat_map(|(_, of)| all.iter().map(of));
        let most = figures.chain(self.goal.map(|(_, goal)| goal)).fold(0.0, f64::max);
        let top = round_up(most);
        let sizes: Vec<f64> = all.iter().map(|played| (played.figures.nodes as f64).log2()).collect();
        let (first, last) = (sizes.first().copied().unwrap_or(0.0), sizes.last().copied().unwrap_or(1.0));
        let x = |size: f64| LEFT + (size - first) / (last - first).max(1.0) * (RIGHT - LEFT);
        let y = |figure: f64| BOTTOM - figure / top * (BOTTOM - TOP);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 340\" font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n\
             <title>{0}</title>\n<rect width=\"720\" height=\"340\" fill=\"#ffffff\"/>\n\
             <text x=\"{LEFT}\" y=\"24\" font-size=\"15\" fill=\"#1f2933\">{0}</text>\n",
            self.title
        );
        for step in 0..=4 {
            let figure = top * f64::from(step) / 4.0;
            let at = y(figure);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e4e7eb\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#616e7c\">{}</text>",
                LEFT - 8.0,
                at + 4.0,
                short(figure)
            );
        }
        for (played, &size) in all.iter().zip(&sizes) {
            let nodes = played.figures.nodes;
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\" fill=\"#616e7c\">{nodes} nodes</text>",
                x(size),
                BOTTOM + 22.0
            );
        }
        if let Some((name, goal)) = self.goal {
            let at = y(goal);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#9aa5b1\" stroke-dasharray=\"6 4\"/><text x=\"{:.0}\" y=\"{:.1}\" fill=\"#616e7c\">{name}</text>",
                RIGHT + 8.0,
                at + 4.0
            );
        }
        let mut names: Vec<(f64, &str, &str)> = Vec::new();
        for ((name, of), color) in self.lines.iter().zip(COLORS) {
            let points: Vec<(f64, f64)> =
                all.iter().zip(&sizes).map(|(played, &size)| (x(size), y(of(played)))).collect();
            let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2.5\"/>",
                path.join(" ")
            );
            for (x, y) in &points {
                let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{color}\"/>");
            }
            names.push((points.last().map_or(TOP, |point| point.1), name, color));
        }
        svg + &labels(names, self.goal.map(|(_, goal)| y(goal))) + "</svg>\n"
    }
}

/// The names of the lines at their ends, kept apart from each other.
fn labels(mut names: Vec<(f64, &str, &str)>, goal: Option<f64>) -> String {
    names.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut text = String::new();
    let mut taken: Vec<f64> = goal.into_iter().collect();
    for (at, name, color) in names {
        let mut at = at;
        while let Some(other) = taken.iter().find(|other| (at - **other).abs() < LINE - 0.5) {
            at = other + LINE;
        }
        taken.push(at);
        let _ = writeln!(
            text,
            "<text x=\"{:.0}\" y=\"{:.1}\" fill=\"{color}\">{name}</text>",
            RIGHT + 8.0,
            at + 4.0
        );
    }
    text
}

/// The next larger number that divides well into four steps.
fn round_up(most: f64) -> f64 {
    let unit = 10.0_f64.powf(most.max(1e-6).log10().floor());
    [1.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        .map(|step| step * unit)
        .into_iter()
        .find(|top| *top >= most)
        .unwrap_or(most)
}

fn short(figure: f64) -> String {
    if figure >= 10.0 || figure.fract() == 0.0 { format!("{figure:.0}") } else { format!("{figure:.2}") }
}

const LEFT: f64 = 60.0;
const RIGHT: f64 = 520.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 290.0;
/// The distance between names.
const LINE: f64 = 17.0;
const COLORS: [&str; 3] = ["#0b7285", "#c2255c", "#5f3dc4"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_end_in_round_numbers_and_names_stand_apart() {
        assert_eq!(
            [0.3, 1.0, 5.4, 30.05, 101.0].map(round_up).map(|top| (top * 10.0).round()),
            [4.0, 10.0, 60.0, 400.0, 2_000.0]
        );
        let text = labels(vec![(100.0, "one", "a"), (101.0, "two", "b")], Some(99.0));
        assert!(text.contains("y=\"120.0\"") && text.contains("y=\"137.0\""), "{text}");
    }
}
