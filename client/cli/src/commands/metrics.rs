//! `larder metrics`: the metrics that servers export, and their present values.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::bail;
use larder_coordinator::COORDINATOR;
use larder_net::metrics::{Kind, Label, Metric, Section, Values};
use larder_node::metrics::table::NODE;
use serde::Serialize;

use crate::address::{Coordinators, HostPort};
use crate::cluster::first_answer;
use crate::samples::{Sample, Samples};
use crate::{context, http, output};

/// Show every metric of nodes and coordinator: meaning, unit, labels, and present values
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  larder metrics                                  Every metric
  larder metrics --node 127.0.0.1:9440            The present values of a node
  larder metrics --coordinator 127.0.0.1:7600     The present values of a coordinator
  larder metrics --json                           One JSON array
  larder metrics --markdown > docs/metrics.md     The page of the documentation")]
pub(crate) struct Args {
    /// Show the present values of this node
    #[arg(long, value_name = "ADDR", value_parser = HostPort::of_node)]
    node: Option<HostPort>,

    /// Show the present values of this coordinator, or of the first that answers: addresses with commas between them, or `dev`
    /// for the newest development cluster
    #[arg(long, value_name = "ADDR", value_parser = context::coordinators, conflicts_with = "node")]
    coordinator: Option<Coordinators>,

    /// Print JSON: an array with one object a metric
    #[arg(long)]
    json: bool,

    /// Print Markdown
    #[arg(long, conflicts_with_all = ["json", "node", "coordinator"])]
    markdown: bool,
}

/// One metric with `--json`.
#[derive(Debug, Serialize)]
struct MetricRow {
    server: &'static str,
    section: &'static str,
    /// The servers that export the metric, if not every server of the kind does.
    #[serde(skip_serializing_if = "str::is_empty")]
    only: &'static str,
    name: &'static str,
    kind: &'static str,
    unit: &'static str,
    labels: Vec<LabelRow>,
    /// Upper bounds of a histogram's buckets.
    #[serde(skip_serializing_if = "<[f64]>::is_empty")]
    buckets: &'static [f64],
    help: &'static str,
    /// The present values at a server, if one was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    samples: Option<Vec<Sample>>,
}

#[derive(Debug, Serialize)]
struct LabelRow {
    name: &'static str,
    /// All possible values, if the list is closed.
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<&'static [&'static str]>,
    /// If the list is open: the things, each with a value of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    each: Option<&'static str>,
}

/// The metrics of one kind of server.
type Table = (&'static str, &'static [Section]);

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (asked, samples) = match (&args.node, &args.coordinator) {
        (Some(node), _) => (Some("node"), Some(ask("node", node)?)),
        (None, Some(coordinators)) => {
            let ask = |one: &HostPort| ask("coordinator", one);
            (Some("coordinator"), Some(first_answer(coordinators.each(), ask)?))
        }
        (None, None) => (None, None),
    };
    let tables: Vec<Table> = [("node", NODE), ("coordinator", COORDINATOR)]
        .into_iter()
        .filter(|&(server, _)| asked.is_none_or(|of| of == server))
        .collect();
    if args.json {
        output::print_json(&rows(&tables, samples.as_ref()))?;
    } else if args.markdown {
        output::print(&markdown(&tables))?;
    } else {
        output::print(&text(&tables, samples.as_ref()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The present values of a server.
///
/// # Errors
/// The server does not answer, or is of another kind.
fn ask(role: &str, address: &HostPort) -> anyhow::Result<Samples> {
    let samples = Samples::parse(&http::get_text(address, "/metrics")?);
    match samples.role() {
        Some(found) if found == role => Ok(samples),
        Some(found) => bail!("{address} is a {found}, not a {role}: ask it by --{found} {address}"),
        None => bail!(http::not_larder(address)),
    }
}

fn rows(tables: &[Table], samples: Option<&Samples>) -> Vec<MetricRow> {
    let label = |&Label { name, values }: &Label| match values {
        Values::OneOf(values) => LabelRow { name, values: Some(values), each: None },
        Values::Each(what) => LabelRow { name, values: None, each: Some(what) },
    };
    let row = |server, section: &Section, metric: &Metric| MetricRow {
        server,
        section: section.title,
        only: section.only,
        name: metric.name,
        kind: metric.kind.as_str(),
        unit: metric.unit,
        labels: metric.labels.iter().map(label).collect(),
        buckets: if let Kind::Histogram(buckets) = metric.kind { buckets } else { &[] },
        help: metric.help,
        samples: samples.map(|samples| samples.of(metric)),
    };
    let mut rows = Vec::new();
    for (server, sections) in tables {
        for section in *sections {
            rows.extend(section.metrics.iter().map(|metric| row(server, section, metric)));
        }
    }
    rows
}

fn text(tables: &[Table], samples: Option<&Samples>) -> String {
    let mut text = String::new();
    for (server, sections) in tables {
        for Section { title, only, metrics } in *sections {
            let only = if only.is_empty() { String::new() } else { format!(" ({only})") };
            let _ = writeln!(text, "{server}: {title}{only}\n");
            for metric in *metrics {
                let _ = writeln!(text, "  {}  {}", metric.name, kind_and_unit(metric));
                let _ = writeln!(text, "      {}", metric.help);
                match samples {
                    Some(samples) => samples.of(metric).iter().for_each(|sample| {
                        let _ = writeln!(text, "      {sample}");
                    }),
                    None => metric.labels.iter().for_each(|label| {
                        let _ = writeln!(text, "      {label}");
                    }),
                }
            }
            text.push('\n');
        }
    }
    text
}

fn markdown(tables: &[Table]) -> String {
    let mut text = String::from(INTRODUCTION);
    for (server, sections) in tables {
        let _ = write!(text, "\n## What a {server} exports\n");
        for Section { title, only, metrics } in *sections {
            let only = if only.is_empty() { String::new() } else { format!(" (of {only})") };
            let _ = write!(text, "\n### {server}: {title}{only}\n\n{HEADINGS}");
            for metric in *metrics {
                let labels: Vec<String> = metric.labels.iter().map(markdown_label).collect();
                let (kind, labels) = (kind_and_unit(metric), labels.join("; "));
                let _ = writeln!(text, "| `{}` | {kind} | {labels} | {} |", metric.name, metric.help);
            }
        }
    }
    text
}

fn markdown_label(label: &Label) -> String {
    match label.values {
        Values::OneOf(values) => format!("`{}`: {}", label.name, values.join(", ")),
        Values::Each(what) => format!("`{}`: {what}", label.name),
    }
}

fn kind_and_unit(metric: &Metric) -> String {
    let (kind, unit) = (metric.kind.as_str(), metric.unit);
    if unit.is_empty() { kind.to_owned() } else { format!("{kind}, {unit}") }
}

const INTRODUCTION: &str = "\
# Metrics

`larder metrics --markdown` makes this page from the code's table of metrics. Tests compare the page, and the metrics that a
running cluster exports, with that table. `larder metrics --node ADDR` shows the metrics with their values.

Labels are bounded: each has a closed list of values, or one value for each member of a bounded set. If every label of a metric
has a closed list, all its series exist from the start, at zero. Counting costs a node relaxed additions; gauges are brought up
to date when somebody asks.

A scraper adds the labels `cluster` and `node`. The [dashboards](../dashboards/README.md) select by these labels.
";

const HEADINGS: &str = "| metric | kind, unit | labels | meaning |\n| --- | --- | --- | --- |\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_the_documentation_is_what_the_table_says() {
        let written = include_str!("../../../../docs/metrics.md");
        let made = markdown(&[("node", NODE), ("coordinator", COORDINATOR)]);
        assert!(written == made, "docs/metrics.md: make it anew with `larder metrics --markdown`");
    }

    #[test]
    fn a_value_is_shown_under_the_metric_that_it_belongs_to() {
        let samples =
            Samples::parse("larder_peer_silent 3\nlarder_build_info{role=\"node\",version=\"1\"} 1\n");
        let text = text(&[("node", NODE)], Some(&samples));
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let at = lines.iter().position(|line| line.starts_with("larder_peer_silent")).unwrap();
        assert_eq!(lines[at + 2], "3");
        assert!(lines.contains(&r#"role="node" version="1"  1"#), "{text}");
        assert_eq!(samples.role(), Some("node"));
        let json = serde_json::to_value(rows(&[("node", NODE)], Some(&samples))).unwrap();
        let silent = json.as_array().unwrap().iter().find(|row| row["name"] == "larder_peer_silent").unwrap();
        assert_eq!(silent["samples"][0]["value"], 3.0);
    }
}
