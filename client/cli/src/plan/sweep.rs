//! Runs many scenarios at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::opt::{Future, opt};
use super::wait::Waits;
use super::{Outcome, PlanPolicy, Played, Prices, Scenario, Sharing, Tiers, Workload, cluster};
use crate::clock;

/// The combinations to try.
#[derive(Debug, Clone)]
pub struct Grid {
    /// The eviction policy.
    pub policies: Vec<PlanPolicy>,
    /// The policies that are tried on more than one node.
    pub cluster_policies: Vec<PlanPolicy>,
    /// Chunks that each node keeps.
    pub capacities: Vec<u64>,
    /// Numbers of nodes.
    pub nodes: Vec<u16>,
    /// The ways in which several nodes work together.
    pub sharing: Vec<Sharing>,
    /// The tiers below memory.
    pub tiers: Vec<Tiers>,
}

/// The conditions under which scenarios are played.
#[derive(Debug, Clone, Copy)]
pub struct Conditions {
    /// Requests under way at a time.
    pub in_flight: u16,
    /// The prices and speeds.
    pub prices: Prices,
    /// Whether there is no progress bar.
    pub quiet: bool,
}

impl Grid {
    /// Every scenario. The bounds do not depend on nodes: `opt` is the best of one cache of the summed size, and `infinite` is
    /// one scenario with room for `distinct_blocks`.
    pub fn scenarios(&self, distinct_blocks: u64) -> Vec<Scenario> {
        let mut all = Vec::new();
        for &policy in &self.policies {
            if policy == PlanPolicy::Infinite {
                let (nodes, sharing) = (1, Sharing::Local);
                let tiers = Tiers::default();
                all.push(Scenario { policy, nodes, sharing, capacity_chunks: distinct_blocks, tiers });
                continue;
            }
            let tiers: &[Tiers] = if policy == PlanPolicy::Opt {
                &[Tiers { disk_chunks: 0, object_store: false }]
            } else {
                &self.tiers
            };
            for &nodes in
                self.nodes.iter().filter(|&&nodes| nodes == 1 || self.cluster_policies.contains(&policy))
            {
                let sharing: &[Sharing] = match (nodes, policy) {
                    (1, _) => &[Sharing::Local],
                    (_, PlanPolicy::Opt) => &[Sharing::Shared],
                    _ => &self.sharing,
                };
                for (&sharing, &tiers) in
                    sharing.iter().flat_map(|one| tiers.iter().map(move |other| (one, other)))
                {
                    let scenario =
                        |&capacity_chunks: &u64| Scenario { policy, nodes, sharing, capacity_chunks, tiers };
                    all.extend(self.capacities.iter().map(scenario));
                }
            }
        }
        all
    }
}

/// Runs every scenario, as many at a time as there are CPUs, with a bar on standard error.
///
/// The outcomes are in the order of the scenarios.
pub fn run(workload: &Workload, scenarios: &[Scenario], conditions: &Conditions) -> Vec<Outcome> {
    let future = Future::of(workload);
    let bar = bar(scenarios.len() as u64, conditions.quiet);
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(scenarios.len()));
    let work = || {
        while let Some(&scenario) = scenarios.get(next.fetch_add(1, Ordering::Relaxed)) {
            bar.set_message(format!("{} {}", scenario.policy, scenario.capacity_chunks));
            let started = clock::thread_seconds();
            let played = play(workload, &future, &scenario, conditions);
            let seconds = clock::thread_seconds() - started;
            let outcome = Outcome::new(scenario, played, seconds, &conditions.prices);
            done.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
            bar.inc(1);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(scenarios.len());
    thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(work)));
    bar.finish_and_clear();
    let mut outcomes = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|outcome| scenarios.iter().position(|&scenario| scenario == outcome.scenario));
    outcomes
}

fn play(workload: &Workload, future: &Future, scenario: &Scenario, conditions: &Conditions) -> Played {
    let Conditions { in_flight, prices, .. } = conditions;
    match scenario.policy {
        PlanPolicy::Store(policy) => cluster::replay(workload, policy, scenario, *in_flight, prices),
        PlanPolicy::Opt | PlanPolicy::Infinite => {
            let mut waits = Waits::new(prices);
            let counts =
                opt(workload, future, scenario.total_chunks(), |prompt, hits| waits.note(prompt, hits));
            Played { counts, wait: waits.finish(), stored_chunks: 0 }
        }
    }
}

fn bar(scenarios: u64, quiet: bool) -> ProgressBar {
    if quiet {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(scenarios), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

const TEMPLATE: &str = "{wide_bar} {human_pos}/{human_len} runs  {eta} left  {msg}";

#[cfg(test)]
mod tests {
    use larder_core::store::policy::PolicyName;

    use super::*;
    use crate::generator::Generator;

    const LRU: PlanPolicy = PlanPolicy::Store(PolicyName::Lru);
    const FIFO: PlanPolicy = PlanPolicy::Store(PolicyName::Fifo);

    fn grid() -> Grid {
        Grid {
            policies: vec![LRU, FIFO, PlanPolicy::Opt, PlanPolicy::Infinite],
            cluster_policies: vec![LRU, PlanPolicy::Opt],
            capacities: vec![200, 900],
            nodes: vec![1, 2],
            sharing: vec![Sharing::Local, Sharing::Routed, Sharing::Shared],
            tiers: vec![Tiers::default()],
        }
    }

    const CONDITIONS: Conditions = Conditions { in_flight: 1, prices: Prices::of(1), quiet: true };

    #[test]
    fn every_combination_is_run_once_and_the_bounds_know_no_nodes() {
        let scenarios = grid().scenarios(5_000);
        assert_eq!(scenarios.len(), (2 + 3 * 2) + 2 + (2 + 2) + 1);
        let infinite = scenarios.last().unwrap();
        assert_eq!((infinite.policy, infinite.capacity_chunks), (PlanPolicy::Infinite, 5_000));
        let disk = Tiers { disk_chunks: 7, object_store: false };
        let with_disk = Grid { tiers: vec![Tiers::default(), disk], ..grid() }.scenarios(5_000);
        assert_eq!(with_disk.len(), 2 * ((2 + 3 * 2) + 2) + (2 + 2) + 1, "bounds know no tiers");
    }

    #[test]
    fn outcomes_come_in_order_and_no_policy_beats_the_ceiling() {
        let trace: Vec<_> = Generator::new(5).take(400).collect();
        let workload = Workload::new(&trace, true);
        let scenarios = grid().scenarios(workload.distinct_blocks);
        let outcomes = run(&workload, &scenarios, &CONDITIONS);
        assert!(outcomes.iter().map(|outcome| &outcome.scenario).eq(&scenarios));
        let infinite = outcomes.last().unwrap().block_hit_rate;
        for outcome in &outcomes {
            let Scenario { nodes, capacity_chunks, .. } = outcome.scenario;
            let ceiling = outcomes.iter().find(|other| {
                let Scenario { policy, nodes: n, capacity_chunks: c, .. } = other.scenario;
                (policy, n, c) == (PlanPolicy::Opt, nodes, capacity_chunks)
            });
            let ceiling = ceiling.map_or(infinite, |ceiling| ceiling.block_hit_rate);
            assert!(outcome.block_hit_rate <= ceiling && ceiling <= infinite, "{outcome:?}");
        }
    }

    #[test]
    fn the_progress_template_is_valid() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
