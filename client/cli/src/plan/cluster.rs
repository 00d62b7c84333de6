//! Several stores behind one router: the model of [`larder_core::what_if::cluster`], with the planner's workloads.

use larder_core::store::policy::PolicyName;
pub use larder_core::what_if::cluster::MAX_CLUSTER_NODES;
use larder_core::what_if::cluster::{Cluster, NodeChoice, NodeSize, Shape};

use super::wait::Waits;
use super::workload::Workload;
use super::{Played, Prices, Scenario, Sharing};
use crate::content;

/// Plays a workload through the stores of a scenario, with the given number of requests under way at a time.
///
/// # Panics
/// Panics if there are no nodes, or more than [`MAX_CLUSTER_NODES`].
pub fn replay(
    workload: &Workload,
    policy: PolicyName,
    scenario: &Scenario,
    in_flight: u16,
    prices: &Prices,
) -> Played {
    let Scenario { nodes, sharing, capacity_chunks, tiers, .. } = *scenario;
    let longest = workload.prompts.iter().map(|prompt| prompt.blocks.len() as u64).max().unwrap_or(0);
    let hashes = (0..workload.distinct_blocks).map(content::chunk_hash).collect();
    // More room than chunks is not used.
    let most = workload.distinct_blocks.max(1);
    let size = NodeSize { policy, capacity_chunks: capacity_chunks.min(most) };
    let shape = Shape {
        disk_chunks: tiers.disk_chunks.min(most),
        has_objects: tiers.object_store,
        in_flight,
        ..Shape::of_memory(sharing.shares())
    };
    let mut cluster = Cluster::new(&vec![size; nodes.into()], shape, hashes, longest);
    let mut waits = Waits::new(prices);
    for prompt in &workload.prompts {
        let hits = cluster.play(prompt, way(sharing));
        waits.note(prompt, &hits);
    }
    cluster.end();
    Played { counts: cluster.take_counts(), wait: waits.finish(), stored_chunks: cluster.stored_chunks() }
}

fn way(sharing: Sharing) -> NodeChoice {
    match sharing {
        Sharing::Local | Sharing::Shared => NodeChoice::Load,
        Sharing::Routed | Sharing::RoutedShared => NodeChoice::Cost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Counts, PlanPolicy, Tiers};
    use crate::trace::{CHUNK_TOKENS, Request};

    fn workload(prompts: &[&[u64]]) -> Workload {
        let request = |ids: &&[u64]| Request {
            timestamp_ms: 0,
            input_tokens: ids.len() as u64 * CHUNK_TOKENS,
            output_tokens: 1,
            block_ids: ids.to_vec(),
        };
        Workload::new(&prompts.iter().map(request).collect::<Vec<_>>(), true)
    }

    fn counts(workload: &Workload, nodes: u16, sharing: Sharing) -> Counts {
        let policy = PlanPolicy::Store(PolicyName::Lru);
        let scenario = Scenario { policy, nodes, sharing, capacity_chunks: 100, tiers: Tiers::default() };
        replay(workload, PolicyName::Lru, &scenario, 1, &Prices::of(1)).counts
    }

    fn played(prompts: &[&[u64]], nodes: u16, sharing: Sharing) -> Counts {
        counts(&workload(prompts), nodes, sharing)
    }

    #[test]
    fn a_node_that_shares_nothing_hits_only_what_it_computed_itself() {
        let prompts: [&[u64]; 2] = [&[1, 2, 3], &[1, 2, 3]];
        assert_eq!(played(&prompts, 2, Sharing::Local).blocks_hit, 0, "the second goes to the idle node");
        assert_eq!(played(&prompts, 1, Sharing::Local).blocks_hit, 3);
    }

    #[test]
    fn a_router_with_an_index_sends_a_prompt_to_its_longest_prefix_unless_that_node_is_busy() {
        let prompts: [&[u64]; 4] = [&[1, 2], &[5, 6, 7], &[1, 2, 3], &[5, 6]];
        let mut rested = workload(&prompts);
        for (at, prompt) in rested.prompts.iter_mut().enumerate() {
            prompt.at_ms = at as u64 * 3_600_000;
        }
        let counts = |workload| counts(workload, 4, Sharing::Routed);
        assert_eq!((counts(&rested).blocks_hit, counts(&rested).chunks_moved), (4, 0));
        assert!(counts(&workload(&prompts)).blocks_hit < 4, "at once, some go to idle nodes");
    }

    #[test]
    fn shared_chunks_hit_wherever_they_are_even_in_the_middle_of_a_prefix() {
        // The first prompt keeps node 0 busy, so that the second and the third are computed elsewhere.
        let counts = played(&[&[1, 2, 3, 4], &[1, 2, 5], &[1, 2, 5, 6]], 2, Sharing::Shared);
        assert_eq!(counts.blocks_hit, 2 + 3);
        assert!(counts.chunks_moved >= 2, "{counts:?}");
    }

    #[test]
    fn the_requests_under_way_at_the_end_are_saved_too() {
        let workload = workload(&[&[1, 2], &[5, 6, 7]]);
        let tiers = Tiers { disk_chunks: 0, object_store: true };
        let policy = PlanPolicy::Store(PolicyName::Lru);
        let scenario = Scenario { policy, nodes: 4, sharing: Sharing::Shared, capacity_chunks: 100, tiers };
        assert_eq!(replay(&workload, PolicyName::Lru, &scenario, 4, &Prices::of(1)).stored_chunks, 5);
    }

    #[test]
    fn a_chunk_that_is_read_often_is_copied_and_moves_no_more() {
        let prompts: Vec<Vec<u64>> = (0..40).map(|i| vec![1, 100 + i]).collect();
        let prompts: Vec<&[u64]> = prompts.iter().map(Vec::as_slice).collect();
        let counts = played(&prompts, 2, Sharing::Shared);
        assert_eq!(counts.blocks_hit, 39);
        assert!(counts.chunks_moved <= 2, "in free room every copy earns its place: {counts:?}");
    }
}
