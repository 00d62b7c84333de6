//! Compares the metrics that a running cluster exports with the table of metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use larder_coordinator::COORDINATOR;
use larder_net::metrics::{Kind, Metric, Section, Values};
use larder_node::metrics::table::NODE;
use larder_tests::cluster::Cluster;
use larder_tests::content::{CHUNK_TOKENS, prompt};
use larder_tests::server;
use larder_tests::wait;

use super::{Engine, LARDER};

/// The metrics of a server: kind and help of each family, and its series.
#[derive(Debug, Default)]
struct Exported {
    kinds: BTreeMap<String, String>,
    helps: BTreeMap<String, String>,
    series: BTreeMap<String, BTreeSet<BTreeMap<String, String>>>,
}

#[test]
fn a_running_cluster_exports_what_the_table_says_and_nothing_else() {
    let tiers = "[disk]\nfolder = \"{name}.disk\"\ncapacity_bytes = \"8MiB\"\nsegment_bytes = \"512KiB\"\n\
                 [object]\nurl = \"file://{name}.objects\"\n";
    let cluster = Cluster::start_with(LARDER, 2, 3_000, tiers).unwrap();
    let hashes = prompt(b'm', 8);
    let writer = Engine::connect(&cluster.socket(0));
    writer.put(&hashes);
    let reader = Engine::connect(&cluster.socket(1));
    let all = hashes.len() as u64 * u64::from(CHUNK_TOKENS);
    wait::until("the directory knows", || (reader.find(&hashes, all + 1) == all).then_some(()));
    assert_eq!(reader.get(&hashes), 8);
    drop(Engine::connect(&cluster.socket(1)));
    wait::until("a session has ended, and the packets of peers are counted", || {
        let text = cluster.node(1).get("/metrics").ok()?;
        let ended = server::sum(&text, "larder_session_ends_total") > 0.0;
        (ended && text.contains("larder_peer_rtt_seconds{")).then_some(())
    });
    assert_agree(NODE, &cluster.node(1).get("/metrics").unwrap());
    assert_agree(COORDINATOR, &cluster.coordinator().get("/metrics").unwrap());
}

#[test]
fn the_counters_of_a_peer_go_with_it() {
    let cluster = Cluster::start(LARDER, 2).unwrap();
    let knows = || {
        let text = cluster.node(0).get("/metrics").unwrap();
        text.contains(r#"larder_peer_received_bytes_total{peer="node-1"}"#)
    };
    wait::until("a peer is known", || knows().then_some(()));
    cluster.node(1).signal(rustix::process::Signal::TERM).unwrap();
    wait::until("a peer that left is not", || (!knows()).then_some(()));
}

#[test]
fn every_metric_that_a_dashboard_or_rule_names_is_in_the_table() {
    let sections = NODE.iter().chain(COORDINATOR);
    let known: BTreeSet<&str> =
        sections.flat_map(|section| section.metrics).map(|metric| metric.name).collect();
    let dashboards = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dashboards");
    let folders = [dashboards.clone(), dashboards.join("rules")];
    let mut named = 0;
    for path in
        folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path())
    {
        if !path.extension().is_some_and(|extension| extension == "json" || extension == "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
        for word in words.filter(|word| word.starts_with("larder_")) {
            let stems = ["_bucket", "_sum", "_count"].into_iter().filter_map(|end| word.strip_suffix(end));
            let is_known = known.contains(word) || stems.into_iter().any(|stem| known.contains(stem));
            assert!(is_known, "{}: {word}", path.display());
            named += 1;
        }
    }
    assert!(named > 100, "only {named} names were found");
}

fn assert_agree(table: &[Section], text: &str) {
    let exported = Exported::parse(text);
    let metrics: Vec<&Metric> = table.iter().flat_map(|section| section.metrics).collect();
    let (written, found): (BTreeSet<&str>, BTreeSet<&str>) = (
        metrics.iter().map(|metric| metric.name).collect(),
        exported.kinds.keys().map(String::as_str).collect(),
    );
    assert_eq!(written, found, "the table on the left, what is exported on the right");
    for metric in metrics {
        assert_eq!(exported.kinds[metric.name], metric.kind.as_str(), "{}", metric.name);
        assert_eq!(exported.helps[metric.name], metric.help, "{}", metric.name);
        let names: BTreeSet<&str> = metric.label_names().into_iter().collect();
        for series in &exported.series[metric.name] {
            assert_eq!(series.keys().map(String::as_str).collect::<BTreeSet<_>>(), names, "{}", metric.name);
            for label in metric.labels {
                assert!(label.allows(&series[label.name]), "{} {series:?}", metric.name);
            }
        }
        let closed = metric.labels.iter().all(|label| matches!(label.values, Values::OneOf(_)));
        let all = metric.combinations().map_or(0, |all| all.len());
        assert!(!closed || exported.series[metric.name].len() == all, "{} is not whole", metric.name);
    }
}

impl Exported {
    fn parse(text: &str) -> Self {
        let mut all = Self::default();
        for line in text.lines() {
            if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
                all.helps.insert(name.to_owned(), help.to_owned());
            } else if let Some((name, kind)) =
                line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
            {
                all.kinds.insert(name.to_owned(), kind.to_owned());
            } else if let Some((series, _)) = line.rsplit_once(' ') {
                let (name, labels) = series.split_once('{').unwrap_or((series, ""));
                let pairs =
                    labels.trim_end_matches('}').split("\",").filter_map(|pair| pair.split_once("=\""));
                let labels = pairs.filter(|&(name, _)| name != "le");
                let labels =
                    labels.map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned()));
                let family = all.family(name);
                all.series.entry(family).or_default().insert(labels.collect());
            }
        }
        all
    }

    /// The family of a sample: a histogram's samples have three names.
    fn family(&self, name: &str) -> String {
        let mut stems = ["_bucket", "_sum", "_count"].into_iter().filter_map(|end| name.strip_suffix(end));
        let is_histogram =
            |stem: &&str| self.kinds.get(*stem).is_some_and(|kind| kind == Kind::Histogram(&[]).as_str());
        stems.find(is_histogram).unwrap_or(name).to_owned()
    }
}
