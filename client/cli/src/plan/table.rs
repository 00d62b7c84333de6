//! The results of a plan, for a terminal.

use std::collections::BTreeSet;

use super::{Outcome, PlanPolicy, Prices, Scenario, Workload, advice};
use crate::output;

/// The outcomes as tables, with the recommended size below them.
pub fn tables(workload: &Workload, outcomes: &[Outcome], prices: &Prices) -> String {
    let mut text = headline(workload);
    let capacities = capacities(outcomes);
    let is_one = |scenario: &Scenario| scenario.nodes == 1 && scenario.tiers == super::Tiers::default();
    let one: Vec<&Outcome> = of_scenarios(outcomes, is_one);
    if !one.is_empty() {
        text += "\n\nOne node: blocks / tokens hit in %, by capacity in chunks\n";
        text += &policies_table(&one, &capacities).to_string();
    }
    let several: Vec<&Outcome> = of_scenarios(outcomes, |scenario| !is_one(scenario));
    if !several.is_empty() {
        text += "\n\nSeveral nodes, and tiers below memory: tokens hit in %, by capacity of each node in chunks\n";
        text += &cluster_table(&several, &capacities).to_string();
    }
    let infinite = advice::infinite_rate(outcomes, workload);
    let sizes = advice::worth_their_price(outcomes);
    if !sizes.is_empty() {
        text += "\n\nCheapest first, runs that hit more than all cheaper runs: price and saved prefill an hour, time to first token\n";
        text += &price_table(&sizes, workload, prices).to_string();
    }
    text += &format!("\n\nAn infinite cache would hit {:.2} % of tokens.", infinite * 100.0);
    let Some(advice) = advice::advice(outcomes, infinite, prices) else {
        return text + "\nNothing is recommended: no policy of a store was tried.";
    };
    let saved = prices.gpu_seconds(advice.choice.counts.tokens_hit);
    text += &format!(
        "\nRecommended: {}. {}\nThe rule: {}. That saves {} GPU seconds of prefill. {}",
        advice.size(prices),
        advice.reasons(prices),
        prices.goal,
        output::count(saved.round() as u64),
        prices.balance(advice.choice, workload.span_ms())
    );
    text
}

/// A summary of the trace in one line.
pub fn headline(workload: &Workload) -> String {
    let blocks: u64 = workload.prompts.iter().map(|prompt| prompt.blocks.len() as u64).sum();
    format!(
        "{} requests over {:.0} min; {} tokens in {} blocks, {} of them different{}",
        output::count(workload.prompts.len() as u64),
        workload.span_ms() as f64 / 60_000.0,
        output::count(workload.tokens()),
        output::count(blocks),
        output::count(workload.distinct_blocks),
        if workload.partial_blocks { " (partial last blocks counted)" } else { " (full blocks only)" }
    )
}

/// The capacities of policies that have one, in order.
pub fn capacities(outcomes: &[Outcome]) -> Vec<u64> {
    let bounded = outcomes.iter().filter(|outcome| outcome.scenario.policy != PlanPolicy::Infinite);
    let capacities: BTreeSet<u64> = bounded.map(|outcome| outcome.scenario.capacity_chunks).collect();
    capacities.into_iter().collect()
}

fn of_scenarios(outcomes: &[Outcome], wanted: impl Fn(&Scenario) -> bool) -> Vec<&Outcome> {
    let bounded = |outcome: &&Outcome| outcome.scenario.policy != PlanPolicy::Infinite;
    outcomes.iter().filter(bounded).filter(|outcome| wanted(&outcome.scenario)).collect()
}

/// The tiers below memory, in words.
pub fn below(tiers: super::Tiers) -> String {
    let disk = (tiers.disk_chunks > 0).then(|| format!("disk {}", output::count(tiers.disk_chunks)));
    let objects = tiers.object_store.then(|| "objects".to_owned());
    disk.into_iter().chain(objects).collect::<Vec<_>>().join(", ")
}

fn policies_table(outcomes: &[&Outcome], capacities: &[u64]) -> comfy_table::Table {
    let headings = headings(&["policy"], capacities, &["ns/op"]);
    let mut table = output::table(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let mut policies: Vec<PlanPolicy> = Vec::new();
    for outcome in outcomes {
        if !policies.contains(&outcome.scenario.policy) {
            policies.push(outcome.scenario.policy);
        }
    }
    for policy in policies {
        let of_policy = || outcomes.iter().filter(|outcome| outcome.scenario.policy == policy);
        let mut cells = vec![policy.to_string()];
        for &capacity in capacities {
            let found = of_policy().find(|outcome| outcome.scenario.capacity_chunks == capacity);
            cells.push(found.map_or_else(String::new, |outcome| {
                format!("{:.2} / {:.2}", outcome.block_hit_rate * 100.0, outcome.token_hit_rate * 100.0)
            }));
        }
        let mean = of_policy().map(|outcome| outcome.ns_per_op).sum::<f64>() / of_policy().count() as f64;
        cells.push(format!("{mean:.0}"));
        table.add_row(cells);
    }
    (1..headings.len()).for_each(|column| output::align_right(&mut table, column));
    table
}

fn cluster_table(outcomes: &[&Outcome], capacities: &[u64]) -> comfy_table::Table {
    let headings = headings(&["policy", "nodes", "sharing", "below"], capacities, &[]);
    let mut table = output::table(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let mut rows: Vec<(PlanPolicy, u16, super::Sharing, super::Tiers)> = Vec::new();
    for Outcome { scenario, .. } in outcomes {
        let row = (scenario.policy, scenario.nodes, scenario.sharing, scenario.tiers);
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    for (policy, nodes, sharing, tiers) in rows {
        let of_row = || {
            let same = move |outcome: &&&Outcome| {
                let scenario = &outcome.scenario;
                (scenario.policy, scenario.nodes, scenario.sharing, scenario.tiers)
                    == (policy, nodes, sharing, tiers)
            };
            outcomes.iter().filter(same)
        };
        let pool = if policy == PlanPolicy::Opt { "one pool".into() } else { sharing.to_string() };
        let pool = if nodes == 1 { String::new() } else { pool };
        let mut cells = vec![policy.to_string(), nodes.to_string(), pool, below(tiers)];
        for &capacity in capacities {
            let found = of_row().find(|outcome| outcome.scenario.capacity_chunks == capacity);
            cells.push(
                found.map_or_else(String::new, |outcome| format!("{:.2}", outcome.token_hit_rate * 100.0)),
            );
        }
        table.add_row(cells);
    }
    (1..headings.len())
        .filter(|column| ![2, 3].contains(column))
        .for_each(|column| output::align_right(&mut table, column));
    table
}

fn price_table(sizes: &[&Outcome], workload: &Workload, prices: &Prices) -> comfy_table::Table {
    let headings = [
        "nodes",
        "sharing",
        "chunks a node",
        "on disk",
        "objects",
        "tokens %",
        "price",
        "saved",
        "mean ms",
        "p50",
        "p99",
    ];
    let mut table = output::table(&headings);
    let hours = (workload.span_ms() as f64 / 3_600e3).max(f64::MIN_POSITIVE);
    for size in sizes {
        let Scenario { nodes, sharing, capacity_chunks, tiers, .. } = size.scenario;
        let saved = prices.money(prices.gpu_seconds(size.counts.tokens_hit)) / hours;
        let is_timed = workload.span_ms() > 0;
        table.add_row([
            nodes.to_string(),
            if nodes == 1 { String::new() } else { sharing.to_string() },
            output::count(capacity_chunks),
            if tiers.disk_chunks > 0 { output::count(tiers.disk_chunks) } else { String::new() },
            if tiers.object_store { output::count(size.stored_chunks) } else { String::new() },
            format!("{:.2}", size.token_hit_rate * 100.0),
            format!("{:.3}", size.cost_per_hour),
            if is_timed { format!("{saved:.2}") } else { String::new() },
            format!("{:.0}", size.wait.ttft_mean_ms),
            format!("{:.0}", size.wait.ttft_p50_ms),
            format!("{:.0}", size.wait.ttft_p99_ms),
        ]);
    }
    (0..headings.len()).filter(|&at| at != 1).for_each(|column| output::align_right(&mut table, column));
    table
}

fn headings(first: &[&str], capacities: &[u64], last: &[&str]) -> Vec<String> {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    [names(first), capacities.iter().copied().map(output::count).collect(), names(last)].concat()
}
