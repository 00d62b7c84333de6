//! The report: one HTML file that contains its charts and loads nothing.

mod chart;
mod sections;

use super::{Outcome, PlanPolicy, Prices, Tiers, Workload, advice, table};

/// The report on a trace of this name.
pub fn report(trace: &str, workload: &Workload, outcomes: &[Outcome], prices: &Prices) -> String {
    let infinite = advice::infinite_rate(outcomes, workload);
    let facts = Facts { workload, outcomes, prices, infinite, best: advice::best_policy(outcomes) };
    let name = escaped(trace);
    let body = [
        sections::tiles(&facts),
        sections::advice(&facts),
        sections::capacity(&facts),
        r#"<div class="pair">"#.into(),
        sections::nodes(&facts),
        sections::moved(&facts),
        sections::prefill(&facts),
        sections::money(&facts),
        "</div>".into(),
        sections::all_runs(&facts),
    ]
    .concat();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>Larder plan: {name}</title><style>\n{STYLE}</style></head>\n\
         <body><main><h1>Cache plan for {name}</h1><p>{}</p>\n{body}</main></body></html>\n",
        table::headline(workload)
    )
}

/// The facts for all sections.
struct Facts<'a> {
    workload: &'a Workload,
    outcomes: &'a [Outcome],
    prices: &'a Prices,
    /// Tokens that an infinite cache would hit, as a fraction.
    infinite: f64,
    /// The policy that hits most.
    best: Option<PlanPolicy>,
}

impl Facts<'_> {
    /// Runs of the best policy, without tiers below memory.
    fn of_best(&self) -> impl Iterator<Item = &Outcome> {
        let is_best = |outcome: &&Outcome| Some(outcome.scenario.policy) == self.best;
        self.in_memory().filter(is_best)
    }

    /// Runs without tiers below memory.
    fn in_memory(&self) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(|outcome| outcome.scenario.tiers == Tiers::default())
    }
}

const STYLE: &str = include_str!("html/style.css");

/// A text with HTML's special characters escaped.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use larder_core::store::policy::PolicyName;

    use super::*;
    use crate::generator::Generator;
    use crate::plan::Sharing;
    use crate::plan::sweep::{Conditions, Grid, run};

    const PRICES: Prices = Prices::of(64 << 20);

    fn made(nodes: Vec<u16>) -> String {
        let sharing = vec![Sharing::Local, Sharing::Routed, Sharing::Shared, Sharing::RoutedShared];
        made_with(nodes, sharing)
    }

    fn made_with(nodes: Vec<u16>, sharing: Vec<Sharing>) -> String {
        let trace: Vec<_> = Generator::new(2).take(300).collect();
        let workload = Workload::new(&trace, true);
        let policies = vec![PlanPolicy::Store(PolicyName::Lru), PlanPolicy::Opt, PlanPolicy::Infinite];
        let grid = Grid {
            cluster_policies: policies.clone(),
            policies,
            capacities: vec![100, 1_000],
            nodes,
            sharing,
            tiers: vec![Tiers::default(), Tiers { disk_chunks: 500, object_store: true }],
        };
        let conditions = Conditions { in_flight: 1, prices: PRICES, quiet: true };
        let outcomes = run(&workload, &grid.scenarios(workload.distinct_blocks), &conditions);
        report("a<b>.jsonl", &workload, &outcomes, &PRICES)
    }

    #[test]
    fn the_report_loads_nothing_and_escapes_names() {
        let text = made(vec![1, 2]);
        for loads in ["http:", "https:", "<script", "<link", "@import", "url(", "src="] {
            assert!(!text.contains(loads), "{loads}");
        }
        assert!(
            text.contains("disk 500, objects") && text.contains("p99"),
            "tiers are in the table of all runs"
        );
        assert!(text.contains("a&lt;b&gt;.jsonl") && !text.contains("a<b>"));
        assert!(text.contains("prefers-color-scheme: dark"));
        assert!(!text.contains("NaN") && !text.contains("inf\""), "every number is one");
    }

    #[test]
    fn moved_bytes_are_those_of_nodes_that_share_in_whatever_order_they_are_planned() {
        let moved = |sharing: [Sharing; 2]| {
            let text = made_with(vec![2], sharing.into());
            let section = text.split_once("Bytes moved between nodes").unwrap().1;
            section.split_once("</section>").unwrap().0.to_owned()
        };
        assert_eq!(moved([Sharing::Shared, Sharing::Local]), moved([Sharing::Local, Sharing::Shared]));
    }

    #[test]
    fn moved_bytes_have_a_bar_for_each_way_of_sharing() {
        let text = made(vec![2]);
        let section =
            text.split_once("Bytes moved between nodes").unwrap().1.split_once("</section>").unwrap().0;
        assert_eq!(section.matches("<rect").count(), 2, "{section}");
        assert!(section.contains("routed and shared"), "{section}");
    }

    #[test]
    fn every_chart_is_there_and_those_without_anything_to_show_are_left_out() {
        let headings =
            ["Hit rate by capacity", "What each node count buys", "Bytes moved", "Prefill", "Money"];
        let text = made(vec![1, 4]);
        assert!(headings.iter().all(|heading| text.contains(heading)), "{text}");
        assert_eq!(text.matches("<svg").count(), text.matches("</svg>").count());
        assert!(!made(vec![1]).contains("What each node count buys"));
        assert!(made(vec![2]).contains("What each node count buys"));
    }

    #[test]
    fn a_size_with_tiers_below_memory_has_no_mark_in_the_chart_of_memory_alone() {
        let text = made(vec![1]);
        assert!(text.contains("Recommended: one node of 100 chunks (6.2 GiB) with disks"), "{text}");
        assert!(!text.contains(">recommended</text>"));
    }
}
