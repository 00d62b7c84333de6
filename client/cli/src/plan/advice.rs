//! What to buy: which policy, how much memory, and what it saves.

use super::{Outcome, PlanPolicy, Scenario, Workload};

/// The share of an infinite cache's hits that is enough.
pub const ENOUGH: f64 = 0.9;

/// The prices, and what is to be reached at them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// Tokens that one GPU computes in a second of prefill.
    pub prefill_tokens_per_s: f64,
    /// Price of one GPU for an hour.
    pub price_per_gpu_hour: f64,
    /// Price of one GiB of the cache's memory for an hour.
    pub price_per_gib_hour: f64,
    /// Bytes of one chunk over all ranks.
    pub chunk_bytes: u64,
    /// The goal of the recommended size.
    pub goal: Goal,
}

/// What the recommended size is to reach.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Goal {
    /// [`ENOUGH`] of an infinite cache's hits, with the least memory.
    #[default]
    Enough,
    /// This fraction of all tokens, with the least memory.
    HitRate(f64),
    /// The most tokens, with memory that costs at most so much in an hour.
    Budget(f64),
}

/// The size to buy, and the reasons.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Advice<'a> {
    /// The size that reaches the goal, or comes nearest to it.
    pub choice: &'a Outcome,
    /// Whether it reaches the goal.
    pub is_enough: bool,
    /// The next smaller one that was tried.
    pub smaller: Option<&'a Outcome>,
    /// The next larger one that was tried.
    pub larger: Option<&'a Outcome>,
    /// Tokens that an infinite cache would hit, as a fraction.
    pub infinite: f64,
}

/// The policy of a store that hits most tokens on one node, on average over the capacities; on the fewest nodes that
/// were tried if one was not.
#[must_use]
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

/// The size to buy: under the best policy the least memory, and of that the best use, that reaches the goal. `None` if no
/// policy of a store was tried.
#[must_use]
pub fn advice<'a>(outcomes: &'a [Outcome], infinite: f64, prices: &Prices) -> Option<Advice<'a>> {
    let policy = best_policy(outcomes)?;
    let mut sizes: Vec<&Outcome> = Vec::new();
    for outcome in outcomes.iter().filter(|outcome| outcome.scenario.policy == policy) {
        let total = outcome.scenario.total_chunks();
        match sizes.iter_mut().find(|size| size.scenario.total_chunks() == total) {
            Some(size) if size.token_hit_rate < outcome.token_hit_rate => *size = outcome,
            Some(_) => {}
            None => sizes.push(outcome),
        }
    }
    sizes.sort_by_key(|size| size.scenario.total_chunks());
    let first_of_most = |sizes: &[&Outcome]| {
        let most = sizes.iter().map(|size| size.token_hit_rate).fold(0.0, f64::max);
        sizes.iter().position(|size| size.token_hit_rate >= most)
    };
    let first_with = |rate: f64| sizes.iter().position(|size| size.token_hit_rate >= rate);
    let reached = match prices.goal {
        Goal::Enough => first_with(ENOUGH * infinite),
        Goal::HitRate(rate) => first_with(rate),
        Goal::Budget(most) => {
            let costs_less = |size: &&Outcome| prices.memory(size.scenario.total_chunks(), 1.0) <= most;
            first_of_most(&sizes[..sizes.partition_point(costs_less)])
        }
    };
    let at = match (reached, prices.goal) {
        (Some(at), _) => at,
        (None, Goal::Budget(_)) if !sizes.is_empty() => 0,
        (None, _) => first_of_most(&sizes)?,
    };
    Some(Advice {
        choice: sizes[at],
        is_enough: reached.is_some(),
        smaller: at.checked_sub(1).map(|at| sizes[at]),
        larger: sizes.get(at + 1).copied(),
        infinite,
    })
}

/// The token hit rate of an infinite cache, as a fraction.
#[must_use]
pub fn infinite_rate(outcomes: &[Outcome], workload: &Workload) -> f64 {
    let run = outcomes.iter().find(|outcome| outcome.scenario.policy == PlanPolicy::Infinite);
    run.map_or_else(
        || {
            let future = super::opt::Future::of(workload);
            let counts = super::opt::opt(workload, &future, workload.distinct_blocks);
            counts.tokens_hit as f64 / counts.tokens_asked.max(1) as f64
        },
        |run| run.token_hit_rate,
    )
}

impl Prices {
    /// GPU seconds to compute `tokens` tokens.
    #[must_use]
    pub fn gpu_seconds(&self, tokens: u64) -> f64 {
        tokens as f64 / self.prefill_tokens_per_s
    }

    /// The price of GPU seconds.
    #[must_use]
    pub fn money(&self, gpu_seconds: f64) -> f64 {
        gpu_seconds / 3_600.0 * self.price_per_gpu_hour
    }

    /// The price of memory for `chunks` chunks.
    #[must_use]
    pub fn memory(&self, chunks: u64, hours: f64) -> f64 {
        self.bytes(chunks) as f64 / GIB * self.price_per_gib_hour * hours
    }

    /// What a size saves and what its memory costs while a trace of `span_ms` runs, in a sentence.
    #[must_use]
    pub fn balance(&self, outcome: &Outcome, span_ms: u64) -> String {
        let saved = self.money(self.gpu_seconds(outcome.counts.tokens_hit));
        let memory = self.memory(outcome.scenario.total_chunks(), span_ms as f64 / 3_600e3);
        format!(
            "Over the trace it saves {saved:.2} at {} a GPU hour, and its memory costs {memory:.2} at {} a GiB hour: {:.2} are left.",
            self.price_per_gpu_hour,
            self.price_per_gib_hour,
            saved - memory
        )
    }

    /// Bytes of `chunks` chunks.
    #[must_use]
    pub fn bytes(&self, chunks: u64) -> u64 {
        chunks.saturating_mul(self.chunk_bytes)
    }
}

impl Advice<'_> {
    /// The reasons, in sentences.
    #[must_use]
    pub fn reasons(&self, prices: &Prices) -> String {
        let rate = |outcome: &Outcome| outcome.token_hit_rate * 100.0;
        let share = |outcome: &Outcome| 100.0 * outcome.token_hit_rate / self.infinite.max(f64::MIN_POSITIVE);
        let mut text = format!(
            "With {} it hits {:.1} % of all tokens, {:.0} % of what an infinite cache would.",
            self.choice.scenario.policy,
            rate(self.choice),
            share(self.choice).min(100.0),
        );
        if let Some(smaller) = self.smaller {
            text += &format!(
                " The next smaller size that was tried, {}, hits {:.1} % ({:.0} % of infinite).",
                size(smaller, prices),
                rate(smaller),
                share(smaller)
            );
        }
        if let Some(larger) = self.larger {
            text += &format!(
                " The next larger, {}, adds {:.1} points for {:.1} times the memory.",
                size(larger, prices),
                (rate(larger) - rate(self.choice)).max(0.0),
                larger.scenario.total_chunks() as f64 / self.choice.scenario.total_chunks() as f64
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
    #[must_use]
    pub fn size(&self, prices: &Prices) -> String {
        size(self.choice, prices)
    }
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Enough => {
                write!(
                    f,
                    "the least memory that hits {:.0} % of what an infinite cache would",
                    ENOUGH * 100.0
                )
            }
            Self::HitRate(rate) => {
                write!(f, "the least memory that hits {:.1} % of all tokens", rate * 100.0)
            }
            Self::Budget(most) => write!(f, "the most hits with memory for {most} an hour"),
        }
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

/// A size in words.
fn size(outcome: &Outcome, prices: &Prices) -> String {
    let Scenario { nodes, sharing, capacity_chunks, .. } = outcome.scenario;
    let bytes = crate::output::bytes(prices.bytes(outcome.scenario.total_chunks()));
    let chunks = super::table::grouped(capacity_chunks);
    if nodes == 1 {
        format!("one node of {chunks} chunks ({bytes})")
    } else {
        format!("{nodes} {sharing} nodes of {chunks} chunks each ({bytes} together)")
    }
}

#[cfg(test)]
mod tests {
    use larder_core::store::policy::PolicyName;

    use super::*;
    use crate::plan::{Counts, Sharing};

    const PRICES: Prices = Prices {
        prefill_tokens_per_s: 1_000.0,
        price_per_gpu_hour: 3.6,
        price_per_gib_hour: 0.5,
        chunk_bytes: 1 << 30,
        goal: Goal::Enough,
    };

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
        let scenario = Scenario { policy, nodes: 1, sharing: Sharing::Local, capacity_chunks };
        let counts = Counts { tokens_asked: 100, tokens_hit: hit, ..Counts::default() };
        Outcome::new(scenario, counts, 1.0)
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
        assert!(reasons.contains("adds 2.0 points for 2.0 times the memory"), "{reasons}");
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
    fn the_price_of_memory_is_set_against_that_of_the_saved_prefill() {
        let size = Outcome {
            counts: Counts { tokens_hit: 5_000_000, ..Counts::default() },
            ..outcome(PolicyName::Lru, 2, 0)
        };
        let text = PRICES.balance(&size, 2 * 3_600_000);
        assert_eq!(
            text,
            "Over the trace it saves 5.00 at 3.6 a GPU hour, and its memory costs 2.00 at 0.5 a GiB hour: 3.00 are left."
        );
    }

    #[test]
    fn tokens_become_seconds_and_seconds_become_money() {
        assert!((PRICES.gpu_seconds(5_000) - 5.0).abs() < 1e-12);
        assert!((PRICES.money(500.0) - 0.5).abs() < 1e-12);
    }
}
