//! The recommendation: a policy, a size of memory, and the savings.

use super::{Outcome, PlanPolicy, Prices, Scenario, Workload};

/// The share of an infinite cache's hits that is enough.
pub const ENOUGH: f64 = 0.9;

/// The goal of the recommended size.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Goal {
    /// [`ENOUGH`] of an infinite cache's hits, at the least cost.
    #[default]
    Enough,
    /// This fraction of all tokens, at the least cost.
    HitRate(f64),
    /// The most tokens hit, with memory, disks and objects that cost at most this price in an hour.
    Budget(f64),
}

/// The size to buy, and the reasons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advice<'a> {
    /// The size that reaches the goal, or comes nearest to it.
    pub choice: &'a Outcome,
    /// Whether this size reaches the goal.
    pub is_enough: bool,
    /// The next cheaper outcome, among the outcomes that hit more than all cheaper ones.
    pub cheaper: Option<&'a Outcome>,
    /// The next dearer outcome among the same outcomes.
    pub dearer: Option<&'a Outcome>,
    /// Tokens that an infinite cache would hit, as a fraction.
    pub infinite: f64,
}

/// The policy of a store that hits most tokens, on average over the capacities. It compares runs on one node, or on the fewest
/// nodes that were tried.
pub fn best_policy(outcomes: &[Outcome]) -> Option<PlanPolicy> {
    let of_store = || outcomes.iter().filter(|outcome| outcome.scenario.policy.of_store().is_some());
    let nodes = of_store().map(|outcome| outcome.scenario.nodes).min()?;
    let total = |policy| {
        let of_policy = of_store().filter(|o| o.scenario.policy == policy && o.scenario.nodes == nodes);
        of_policy.map(|outcome| outcome.token_hit_rate).sum::<f64>()
    };
    let mut best: Option<(PlanPolicy, f64)> = None;
    for Outcome { scenario: Scenario { policy, .. }, .. } in of_store() {
        let total = total(*policy);
        if best.is_none_or(|(_, most)| total > most) {
            best = Some((*policy, total));
        }
    }
    best.map(|(policy, _)| policy)
}

/// The sizes that are worth their price, under the best policy: each hits more than all cheaper sizes. The cheapest first.
pub fn worth_their_price(outcomes: &[Outcome]) -> Vec<&Outcome> {
    let Some(policy) = best_policy(outcomes) else { return Vec::new() };
    let mut sizes: Vec<&Outcome> =
        outcomes.iter().filter(|outcome| outcome.scenario.policy == policy).collect();
    let most_first = |a: &Outcome, b: &Outcome| b.token_hit_rate.total_cmp(&a.token_hit_rate);
    sizes.sort_by(|a, b| a.cost_per_hour.total_cmp(&b.cost_per_hour).then_with(|| most_first(a, b)));
    let mut most = -1.0;
    sizes.retain(|size| {
        let hits_more = size.token_hit_rate > most;
        most = size.token_hit_rate.max(most);
        hits_more
    });
    sizes
}

/// The size to buy: under the best policy the cheapest that reaches the goal. `None` if no policy of a store was tried.
pub fn advice<'a>(outcomes: &'a [Outcome], infinite: f64, prices: &Prices) -> Option<Advice<'a>> {
    let sizes = worth_their_price(outcomes);
    let first_with = |rate: f64| sizes.iter().position(|size| size.token_hit_rate >= rate);
    let reached = match prices.goal {
        Goal::Enough => first_with(ENOUGH * infinite),
        Goal::HitRate(rate) => first_with(rate),
        Goal::Budget(most) => sizes.partition_point(|size| size.cost_per_hour <= most).checked_sub(1),
    };
    let last = sizes.len().checked_sub(1)?;
    let at = reached.unwrap_or(if matches!(prices.goal, Goal::Budget(_)) { 0 } else { last });
    Some(Advice {
        choice: sizes[at],
        is_enough: reached.is_some(),
        cheaper: at.checked_sub(1).map(|at| sizes[at]),
        dearer: sizes.get(at + 1).copied(),
        infinite,
    })
}

/// The token hit rate of an infinite cache, as a fraction.
pub fn infinite_rate(outcomes: &[Outcome], workload: &Workload) -> f64 {
    let run = outcomes.iter().find(|outcome| outcome.scenario.policy == PlanPolicy::Infinite);
    run.map_or_else(
        || {
            let future = super::opt::Future::of(workload);
            let counts = super::opt::opt(workload, &future, workload.distinct_blocks, |_, _| {});
            counts.tokens_hit as f64 / counts.tokens_asked.max(1) as f64
        },
        |run| run.token_hit_rate,
    )
}

impl Advice<'_> {
    /// The reasons, in sentences.
    pub fn reasons(&self, prices: &Prices) -> String {
        let rate = |outcome: &Outcome| outcome.token_hit_rate * 100.0;
        let share = |outcome: &Outcome| 100.0 * outcome.token_hit_rate / self.infinite.max(f64::MIN_POSITIVE);
        let mut text = format!(
            "With {} it hits {:.1} % of all tokens, {:.0} % of what an infinite cache would.",
            self.choice.scenario.policy,
            rate(self.choice),
            share(self.choice).min(100.0),
        );
        if let Some(cheaper) = self.cheaper {
            text += &format!(
                " The next cheaper, {}, hits {:.1} % ({:.0} % of infinite).",
                size(cheaper, prices),
                rate(cheaper),
                share(cheaper)
            );
        }
        if let Some(dearer) = self.dearer {
            text += &format!(
                " The next dearer, {}, adds {:.1} points for {:.1} times the price.",
                size(dearer, prices),
                rate(dearer) - rate(self.choice),
                dearer.cost_per_hour / self.choice.cost_per_hour
            );
        }
        if !self.is_enough {
            text += &match prices.goal {
                Goal::Enough => format!(
                    " No size that was tried hits {:.0} % of what an infinite cache would: try larger --capacities or more --nodes.",
                    ENOUGH * 100.0
                ),
                Goal::HitRate(rate) => format!(
                    " No size that was tried hits {:.1} % of all tokens: try larger --capacities or more --nodes; an infinite cache hits {:.1} %.",
                    rate * 100.0,
                    self.infinite * 100.0
                ),
                Goal::Budget(most) => {
                    format!(" No size that was tried costs {most} an hour or less: try smaller --capacities.")
                }
            };
        }
        text
    }

    /// The size, in words.
    pub fn size(&self, prices: &Prices) -> String {
        size(self.choice, prices)
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Enough => {
                write!(f, "the cheapest that hits {:.0} % of what an infinite cache would", ENOUGH * 100.0)
            }
            Self::HitRate(rate) => {
                write!(f, "the cheapest that hits {:.1} % of all tokens", rate * 100.0)
            }
            Self::Budget(most) => write!(f, "the most hits for {most} an hour"),
        }
    }
}

/// A size in words.
fn size(outcome: &Outcome, prices: &Prices) -> String {
    let Scenario { nodes, sharing, capacity_chunks, tiers, .. } = outcome.scenario;
    let words = |chunks| crate::output::bytes(prices.bytes(chunks));
    let chunks = crate::output::count(capacity_chunks);
    let memory = words(outcome.scenario.total_chunks());
    let mut text = if nodes == 1 {
        format!("one node of {chunks} chunks ({memory})")
    } else {
        format!("{nodes} {sharing} nodes of {chunks} chunks each ({memory} together)")
    };
    if tiers.disk_chunks > 0 {
        text += &format!(" with disks ({})", words(outcome.scenario.disk_chunks()));
    }
    if tiers.object_store {
        text += &format!(" with an object store ({} at the end)", words(outcome.stored_chunks));
    }
    text
}

#[cfg(test)]
mod tests {
    use larder_core::store::policy::PolicyName;

    use super::*;
    use crate::plan::{Counts, Played, Sharing, Tiers};

    const PRICES: Prices = Prices { price_per_gib_hour: 0.5, ..Prices::of(1 << 30) };

    fn sizes() -> [Outcome; 4] {
        [(1, 10), (2, 37), (4, 39), (8, 39)].map(|(capacity, hit)| outcome(PolicyName::Lru, capacity, hit))
    }

    fn choice(goal: Goal) -> (u64, bool, String) {
        let (outcomes, prices) = (sizes(), Prices { goal, ..PRICES });
        let advice = advice(&outcomes, 0.4, &prices).unwrap();
        (advice.choice.scenario.capacity_chunks, advice.is_enough, advice.reasons(&prices))
    }

    fn outcome(policy: PolicyName, capacity_chunks: u64, hit: u64) -> Outcome {
        let policy = PlanPolicy::Store(policy);
        let tiers = Tiers::default();
        let scenario = Scenario { policy, nodes: 1, sharing: Sharing::Local, capacity_chunks, tiers };
        made(scenario, hit)
    }

    fn made(scenario: Scenario, hit: u64) -> Outcome {
        let counts = Counts { tokens_asked: 100, tokens_hit: hit, ..Counts::default() };
        Outcome::new(scenario, Played { counts, ..Played::default() }, 1.0, &PRICES)
    }

    #[test]
    fn the_smallest_size_that_is_enough_is_advised_with_its_neighbours_as_reasons() {
        let rates = [(1, 10), (2, 37), (4, 39), (8, 40)];
        let lru = rates.iter().map(|&(capacity, hit)| outcome(PolicyName::Lru, capacity, hit));
        let fifo = rates.iter().map(|&(capacity, _)| outcome(PolicyName::Fifo, capacity, 5));
        let outcomes: Vec<Outcome> = fifo.chain(lru).collect();
        let advice = advice(&outcomes, 0.4, &PRICES).unwrap();
        assert_eq!((advice.choice.scenario.capacity_chunks, advice.is_enough), (2, true));
        assert_eq!(advice.size(&PRICES), "one node of 2 chunks (2.0 GiB)");
        let reasons = advice.reasons(&PRICES);
        assert!(reasons.contains("With lru it hits 37.0 % of all tokens, 92 %"), "{reasons}");
        assert!(reasons.contains("adds 2.0 points for 2.0 times the price"), "{reasons}");
    }

    #[test]
    fn where_nothing_is_enough_the_best_is_advised_and_larger_ones_are_asked_for() {
        let outcomes = [outcome(PolicyName::Lru, 1, 10), outcome(PolicyName::Lru, 2, 20)];
        let advice = advice(&outcomes, 0.9, &PRICES).unwrap();
        assert_eq!((advice.choice.scenario.capacity_chunks, advice.is_enough), (2, false));
        assert!(advice.reasons(&PRICES).contains("try larger --capacities"));
        assert!(super::advice(&[], 0.9, &PRICES).is_none());
    }

    #[test]
    fn for_a_hit_rate_the_least_memory_is_advised_and_for_a_budget_the_most_hits() {
        assert_eq!((choice(Goal::HitRate(0.3)).0, choice(Goal::HitRate(0.37)).0), (2, 2));
        let (capacity, is_enough, reasons) = choice(Goal::HitRate(0.5));
        assert_eq!((capacity, is_enough), (4, false));
        assert!(
            reasons.contains("hits 50.0 % of all tokens") && reasons.contains("infinite cache hits 40.0 %")
        );
        assert_eq!((choice(Goal::Budget(1.9)).0, choice(Goal::Budget(2.0)).0), (2, 4));
        assert_eq!(choice(Goal::Budget(9.0)).0, 4, "twice the memory hits no more");
        let (capacity, is_enough, reasons) = choice(Goal::Budget(0.4));
        assert_eq!((capacity, is_enough), (1, false));
        assert!(reasons.contains("costs 0.4 an hour or less: try smaller --capacities"), "{reasons}");
    }

    #[test]
    fn a_disk_is_advised_where_it_hits_as_much_as_memory_for_less() {
        let memory = outcome(PolicyName::Lru, 10, 40);
        let tiers = Tiers { disk_chunks: 20, object_store: false };
        let disk = made(Scenario { capacity_chunks: 2, tiers, ..memory.scenario }, 39);
        let (outcomes, prices) = ([memory, disk], Prices { goal: Goal::HitRate(0.35), ..PRICES });
        let advice = advice(&outcomes, 0.4, &prices).unwrap();
        assert_eq!(advice.size(&prices), "one node of 2 chunks (2.0 GiB) with disks (20.0 GiB)");
        assert_eq!(advice.dearer.map(|dearer| dearer.scenario.capacity_chunks), Some(10));
    }
}
