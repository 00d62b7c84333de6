//! The sections of the report, in its order.

use super::chart::{self, Group, Series};
use super::{Facts, escaped};
use crate::output;
use crate::plan::{Outcome, PlanPolicy, Scenario, Sharing, Tiers, advice as advise, table};

/// The numbers that matter most.
pub(super) fn tiles(facts: &Facts<'_>) -> String {
    let prices = facts.prices;
    let tile =
        |value: String, what: &str| format!(r#"<div class="tile"><b>{value}</b><span>{what}</span></div>"#);
    let mut tiles = tile(percent(facts.infinite), "of all tokens an infinite cache would hit");
    if let Some(advice) = advise::advice(facts.outcomes, facts.infinite, facts.prices) {
        let saved = prices.gpu_seconds(advice.choice.counts.tokens_hit);
        tiles += &tile(percent(advice.choice.token_hit_rate), "of all tokens the recommended size hits");
        tiles += &tile(duration(saved), "of GPU time in prefill saved over the trace");
        tiles +=
            &tile(format!("{:.2}", prices.money(saved)), "saved over the trace, at the given price of a GPU");
    }
    format!(r#"<div class="tiles">{tiles}</div>"#)
}

/// The recommended size, and why.
pub(super) fn advice(facts: &Facts<'_>) -> String {
    let Some(advice) = advise::advice(facts.outcomes, facts.infinite, facts.prices) else {
        return String::new();
    };
    format!(
        r#"<section class="advice"><strong>Recommended: {}</strong><p>{} {} A GPU computes {} tokens of prefill a second. The rule: {}.</p></section>"#,
        advice.size(facts.prices),
        escaped(&advice.reasons(facts.prices)),
        facts.prices.balance(advice.choice, facts.workload.span_ms()),
        output::count(facts.prices.prefill_tokens_per_s.round() as u64),
        facts.prices.goal,
    )
}

/// Hit rate by capacity and policy.
pub(super) fn capacity(facts: &Facts<'_>) -> String {
    let one: Vec<&Outcome> = facts.in_memory().filter(|o| is_bounded(o) && o.scenario.nodes == 1).collect();
    if one.is_empty() {
        return String::new();
    }
    let mut series: Vec<Series> = Vec::new();
    for outcome in &one {
        let name = outcome.scenario.policy.to_string();
        let point = (outcome.scenario.capacity_chunks as f64, outcome.token_hit_rate * 100.0);
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series {
                class: class(facts, outcome.scenario.policy),
                name,
                points: vec![point],
            }),
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    let capacities: Vec<u64> = table::capacities(facts.outcomes);
    let ends = [capacities.first(), capacities.last()].into_iter().flatten();
    let points = ends.map(|&capacity| (capacity as f64, facts.infinite * 100.0)).collect();
    series.push(Series { name: "infinite".into(), class: "bound", points });
    series.sort_by_key(|series| {
        ["best", "second", "bound", ""].iter().position(|class| *class == series.class)
    });
    let tick = |&capacity: &u64| {
        (
            capacity as f64,
            format!(
                "{}<tspan dx=\"4\">({})</tspan>",
                short(capacity),
                output::bytes(facts.prices.bytes(capacity))
            ),
        )
    };
    let ticks: Vec<_> = capacities.iter().map(tick).collect();
    let advice =
        advise::advice(facts.outcomes, facts.infinite, facts.prices).map(|advice| advice.choice.scenario);
    let mark = advice.filter(|choice| choice.nodes == 1 && choice.tiers == Tiers::default());
    let mark = mark.map(|choice| (choice.capacity_chunks as f64, "recommended".into()));
    format!(
        "<section><h2>Hit rate by capacity and policy</h2><p>Tokens hit in % of all tokens, one node; capacity in chunks of {} tokens, {} each. Dashed: the bounds, a cache of the size that knows the future (opt) and a cache that never evicts. Grey: the other policies.</p>{}{}</section>",
        facts.workload.chunk_tokens,
        output::bytes(facts.prices.chunk_bytes),
        chart::lines(&series, &ticks, mark),
        policies(facts, &series, &capacities)
    )
}

/// The numbers behind the lines, the policy that hits most first.
fn policies(facts: &Facts<'_>, series: &[Series], capacities: &[u64]) -> String {
    let mut rows: Vec<&Series> = series.iter().filter(|series| series.name != "infinite").collect();
    let sum = |series: &Series| series.points.iter().map(|point| point.1).sum::<f64>();
    rows.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
    let row = |series: &&Series| {
        let rate = |capacity: &u64| {
            let point = series.points.iter().find(|point| point.0 == *capacity as f64);
            format!("<td>{}</td>", point.map_or(String::new(), |point| format!("{:.2}", point.1)))
        };
        let cells: String = capacities.iter().map(rate).collect();
        format!(r#"<tr class="{}"><td class="name">{}</td>{cells}</tr>"#, series.class, series.name)
    };
    let rows: String = rows.iter().map(row).collect();
    let heading = |&capacity: &u64| {
        format!("<th>{}<br>{}</th>", output::count(capacity), output::bytes(facts.prices.bytes(capacity)))
    };
    let headings: String = capacities.iter().map(heading).collect();
    format!(
        r#"<div class="scroll"><table><thead><tr><th class="name">tokens hit, %</th>{headings}</tr></thead><tbody>{rows}</tbody></table></div>"#
    )
}

/// Hit rate by node count.
pub(super) fn nodes(facts: &Facts<'_>) -> String {
    let Some(capacity) = telling_capacity(facts) else { return String::new() };
    let groups = by_nodes(
        facts,
        capacity,
        |_| true,
        |outcome| {
            let rate = outcome.token_hit_rate * 100.0;
            (sharing_class(outcome.scenario.sharing), rate, format!("{rate:.1}"))
        },
    );
    format!(
        "<section><h2>What each node count buys</h2><p>Tokens hit in %, nodes of {} chunks each, {}. {}</p>{}</section>",
        output::count(capacity),
        best_name(facts),
        legend(&[ROUTED_SHARED, SHARED, ("second", "routed"), ("other", "local")]),
        chart::bars("Hit rate by node count", &groups, &|value| format!("{value:.0} %"))
    )
}

/// Bytes that nodes send to each other.
pub(super) fn moved(facts: &Facts<'_>) -> String {
    let Some(capacity) = telling_capacity(facts) else { return String::new() };
    let requests = facts.workload.prompts.len().max(1) as f64;
    let is_shared = |outcome: &Outcome| outcome.scenario.sharing.shares() && outcome.scenario.nodes > 1;
    let groups = by_nodes(facts, capacity, is_shared, |outcome| {
        let mib = facts.prices.bytes(outcome.chunks_sent()) as f64 / requests / MIB;
        (sharing_class(outcome.scenario.sharing), mib, format!("{mib:.0}"))
    });
    if groups.is_empty() {
        return String::new();
    }
    format!(
        "<section><h2>Bytes moved between nodes</h2><p>For each request, nodes of {} chunks each that share them, evicted chunks that another node took included; local and routed nodes move nothing. {}</p>{}</section>",
        output::count(capacity),
        legend(&[ROUTED_SHARED, SHARED]),
        chart::bars("Bytes moved for each request", &groups, &|value| format!("{value:.0} MiB"))
    )
}

/// GPU time of prefill, saved and left.
pub(super) fn prefill(facts: &Facts<'_>) -> String {
    let total = facts.prices.gpu_seconds(facts.workload.tokens());
    let (name, unit) = match total {
        0.0..600.0 => ("s", 1.0),
        600.0..7_200.0 => ("min", 60.0),
        _ => ("h", 3_600.0),
    };
    let groups = by_capacity(facts, |outcome| {
        let counts = outcome.counts;
        let bar = |class, tokens| {
            let time = facts.prices.gpu_seconds(tokens) / unit;
            (class, time, format!("{time:.1}"))
        };
        vec![bar("third", counts.tokens_hit), bar("other", counts.tokens_asked - counts.tokens_hit)]
    });
    section_of_bars(
        &groups,
        "Prefill: GPU time saved and left",
        &format!(
            "Over the trace, at {} tokens a second, {}, by capacity. {}",
            output::count(facts.prices.prefill_tokens_per_s.round() as u64),
            one_node(facts),
            legend(&[("third", "saved"), ("other", "left to compute")])
        ),
        &|value| format!("{value:.1} {name}"),
    )
}

/// Money saved.
pub(super) fn money(facts: &Facts<'_>) -> String {
    let groups = by_capacity(facts, |outcome| {
        let saved = facts.prices.money(facts.prices.gpu_seconds(outcome.counts.tokens_hit));
        vec![("third", saved, format!("{saved:.2}"))]
    });
    let price = facts.prices.price_per_gpu_hour;
    let about = format!(
        "Over the trace, at {price} a GPU hour, {}, by capacity. The table of all runs has the cluster's costs.",
        one_node(facts)
    );
    section_of_bars(&groups, "Money saved", &about, &|value| format!("{value:.2}"))
}

/// Every run, as numbers.
pub(super) fn all_runs(facts: &Facts<'_>) -> String {
    let row = |outcome: &Outcome| {
        let Scenario { policy, nodes, sharing, capacity_chunks, tiers } = outcome.scenario;
        let class = if Some(policy) == facts.best { r#" class="best""# } else { "" };
        let sharing = match (policy, nodes) {
            (PlanPolicy::Opt, 2..) => "one pool".into(),
            (_, 1) => "–".into(),
            _ => sharing.to_string(),
        };
        format!(
            r#"<tr{class}><td class="name">{policy}</td><td>{nodes}</td><td class="name">{sharing}</td><td>{}</td><td class="name">{}</td><td>{:.2}</td><td>{:.2}</td><td>{:.1}</td><td>{:.3}</td><td>{:.0} / {:.0} / {:.0}</td><td>{:.0}</td></tr>"#,
            output::count(capacity_chunks),
            table::below(tiers),
            outcome.block_hit_rate * 100.0,
            outcome.token_hit_rate * 100.0,
            outcome.chunks_sent() as f64 / facts.workload.prompts.len().max(1) as f64,
            outcome.cost_per_hour,
            outcome.wait.ttft_mean_ms,
            outcome.wait.ttft_p50_ms,
            outcome.wait.ttft_p99_ms,
            outcome.ns_per_op
        )
    };
    let rows: String = facts.outcomes.iter().map(row).collect();
    format!(
        r#"<section><h2>Every run</h2><details><summary>{} runs</summary><div class="scroll"><table><thead><tr><th class="name">policy</th><th>nodes</th><th class="name">sharing</th><th>chunks a node</th><th class="name">below memory</th><th>blocks hit %</th><th>tokens hit %</th><th>chunks moved a request</th><th>price an hour</th><th>first token, ms (mean / p50 / p99)</th><th>ns an operation</th></tr></thead><tbody>{rows}</tbody></table></div></details></section>"#,
        facts.outcomes.len()
    )
}

/// The capacity that tells node counts apart best: the largest cluster then holds about a quarter of all blocks. `None` if
/// there was only one node.
fn telling_capacity(facts: &Facts<'_>) -> Option<u64> {
    let several = || facts.of_best().filter(|outcome| outcome.scenario.nodes > 1);
    let most_nodes = several().map(|outcome| outcome.scenario.nodes).max()?;
    let wanted = facts.workload.distinct_blocks as f64 / 4.0 / f64::from(most_nodes);
    let distance = |capacity: u64| (capacity as f64 / wanted.max(1.0)).ln().abs();
    several()
        .map(|outcome| outcome.scenario.capacity_chunks)
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)))
}

/// Bars by node count, of the best policy at one capacity; the bars of one node are separate.
fn by_nodes(
    facts: &Facts<'_>,
    capacity: u64,
    is_shown: impl Fn(&Outcome) -> bool,
    bar: impl Fn(&Outcome) -> (&'static str, f64, String),
) -> Vec<Group> {
    let mut groups: Vec<(u16, Group)> = Vec::new();
    let is_shown = |outcome: &&Outcome| outcome.scenario.capacity_chunks == capacity && is_shown(outcome);
    for outcome in facts.of_best().filter(is_shown) {
        let nodes = outcome.scenario.nodes;
        let name = if nodes == 1 { "1 node".to_owned() } else { format!("{nodes} nodes") };
        match groups.iter_mut().find(|(known, _)| *known == nodes) {
            Some((_, group)) => group.bars.push(bar(outcome)),
            None => groups.push((nodes, Group { name, bars: vec![bar(outcome)] })),
        }
    }
    groups.sort_by_key(|(nodes, _)| *nodes);
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Bars by capacity, of the best policy on the fewest nodes.
fn by_capacity(facts: &Facts<'_>, bars: impl Fn(&Outcome) -> Vec<(&'static str, f64, String)>) -> Vec<Group> {
    let Some((nodes, sharing)) = fewest_nodes(facts) else { return Vec::new() };
    let same = |outcome: &&Outcome| (outcome.scenario.nodes, outcome.scenario.sharing) == (nodes, sharing);
    let group =
        |outcome: &Outcome| Group { name: short(outcome.scenario.capacity_chunks), bars: bars(outcome) };
    let mut found: Vec<&Outcome> = facts.of_best().filter(same).collect();
    found.sort_by_key(|outcome| outcome.scenario.capacity_chunks);
    found.into_iter().map(group).collect()
}

fn fewest_nodes(facts: &Facts<'_>) -> Option<(u16, Sharing)> {
    let of = |outcome: &Outcome| (outcome.scenario.nodes, outcome.scenario.sharing);
    facts.of_best().map(of).min_by_key(|&(nodes, sharing)| (nodes, sharing != Sharing::Shared))
}

fn section_of_bars(groups: &[Group], title: &str, about: &str, unit: &dyn Fn(f64) -> String) -> String {
    if groups.is_empty() {
        return String::new();
    }
    format!("<section><h2>{title}</h2><p>{about}</p>{}</section>", chart::bars(title, groups, unit))
}

fn one_node(facts: &Facts<'_>) -> String {
    match fewest_nodes(facts) {
        Some((1, _)) | None => format!("one node, {}", best_name(facts)),
        Some((nodes, sharing)) => format!("{nodes} {sharing} nodes, {}", best_name(facts)),
    }
}

fn best_name(facts: &Facts<'_>) -> String {
    facts.best.map(|policy| policy.to_string()).unwrap_or_default()
}

fn legend(keys: &[(&str, &str)]) -> String {
    keys.iter()
        .map(|(class, name)| format!(r#"<span class="legend"><i class="key {class}"></i>{name}</span> "#))
        .collect()
}

fn is_bounded(outcome: &Outcome) -> bool {
    outcome.scenario.policy != PlanPolicy::Infinite
}

/// The style of a policy's line: the best policy, the policy that everybody knows, the bound, and the others.
fn class(facts: &Facts<'_>, policy: PlanPolicy) -> &'static str {
    match policy {
        PlanPolicy::Opt | PlanPolicy::Infinite => "bound",
        _ if Some(policy) == facts.best => "best",
        _ if policy.as_str() == "lru" => "second",
        _ => "",
    }
}

fn sharing_class(sharing: Sharing) -> &'static str {
    match sharing {
        Sharing::Local => "other",
        Sharing::Routed => "second",
        Sharing::Shared => "third",
        Sharing::RoutedShared => "best",
    }
}

fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}

fn short(chunks: u64) -> String {
    match chunks {
        0..1_000 => chunks.to_string(),
        1_000..1_000_000 => format!("{}k", chunks as f64 / 1e3),
        _ => format!("{}M", chunks as f64 / 1e6),
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        0.0..120.0 => format!("{seconds:.0} s"),
        120.0..7_200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3_600.0),
    }
}

/// The legend's keys of nodes that share chunks.
const ROUTED_SHARED: (&str, &str) = ("best", "routed and shared");
const SHARED: (&str, &str) = ("third", "shared");

const MIB: f64 = (1 << 20) as f64;
