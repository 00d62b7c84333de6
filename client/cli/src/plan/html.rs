//! The report: one HTML file with its charts inside, which loads nothing.

mod chart;
mod sections;

use super::advice::{self, Prices};
use super::{Outcome, PlanPolicy, Workload, table};

/// The report on a trace of this name.
#[must_use]
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
    /// Runs of the best policy.
    fn of_best(&self) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(|outcome| Some(outcome.scenario.policy) == self.best)
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
    use crate::plan::sweep::{Grid, run};
    use crate::plan::{PlanPolicy, Sharing};

    const PRICES: Prices = Prices {
        prefill_tokens_per_s: 10_000.0,
        price_per_gpu_hour: 2.5,
        price_per_gib_hour: 0.005,
        chunk_bytes: 64 << 20,
        goal: advice::Goal::Enough,
    };

    fn made(nodes: Vec<u16>) -> String {
        let trace: Vec<_> = Generator::new(2).take(300).collect();
        let workload = Workload::new(&trace, true);
        let policies = vec![PlanPolicy::Store(PolicyName::Lru), PlanPolicy::Opt, PlanPolicy::Infinite];
        let grid = Grid {
            cluster_policies: policies.clone(),
            policies,
            capacities: vec![100, 1_000],
            nodes,
            sharing: vec![Sharing::Local, Sharing::Routed, Sharing::Shared],
        };
        let outcomes = run(&workload, &grid.scenarios(workload.distinct_blocks), true);
        report("a<b>.jsonl", &workload, &outcomes, &PRICES)
    }

    #[test]
    fn the_report_loads_nothing_and_escapes_names() {
        let text = made(vec![1, 2]);
        for loads in ["http:", "https:", "<script", "<link", "@import", "url(", "src="] {
            assert!(!text.contains(loads), "{loads}");
        }
        assert!(text.contains("a&lt;b&gt;.jsonl") && !text.contains("a<b>"));
        assert!(text.contains("prefers-color-scheme: dark"));
        assert!(!text.contains("NaN") && !text.contains("inf\""), "every number is one");
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
}
