//! The ceiling: the most that any cache of a size could hit, found by looking into the future.
//!
//! After each request the cache keeps those of its own and the request's blocks that are used again soonest (Belady 1966). A
//! block names its whole prefix, so each use of a block also uses its parent: a parent's next use is never after its child's.
//! Ties are broken in favour of the block nearer to the root. So the dropped block is always a leaf, and the cache is closed
//! under prefixes without a restriction to leaves: the result is exact for caches that keep prefixes.

use std::collections::BinaryHeap;

use larder_core::what_if::cluster::Hits;

use super::Counts;
use super::workload::{Prompt, Workload};

/// The next use of each block of a workload.
#[derive(Debug)]
pub struct Future {
    /// For each prompt, for each of its blocks: the number of the next prompt that can hit it, or [`NEVER`].
    next: Vec<Vec<u32>>,
}

impl Future {
    /// Reads the workload backwards.
    pub fn of(workload: &Workload) -> Self {
        let mut soonest = vec![NEVER; workload.distinct_blocks as usize];
        let mut next: Vec<Vec<u32>> = Vec::with_capacity(workload.prompts.len());
        for (number, prompt) in workload.prompts.iter().enumerate().rev() {
            let see = |(position, &block): (usize, &u32)| {
                let soonest = &mut soonest[block as usize];
                // A block that the prompt cannot hit is not used by it.
                if position < prompt.usable { std::mem::replace(soonest, number as u32) } else { *soonest }
            };
            next.push(prompt.blocks.iter().enumerate().map(see).collect());
        }
        next.reverse();
        Self { next }
    }
}

/// Plays a workload through the best possible cache of `capacity` chunks, and passes the hits of each prompt to the caller.
pub fn opt(
    workload: &Workload,
    future: &Future,
    capacity_chunks: u64,
    mut hits: impl FnMut(&Prompt, &Hits),
) -> Counts {
    let mut cache = Cache { next: vec![GONE; workload.distinct_blocks as usize], ..Cache::default() };
    let mut counts = Counts::default();
    for (prompt, next) in workload.prompts.iter().zip(&future.next) {
        let hit = cache.prefix(prompt).min(prompt.usable);
        counts.blocks_asked += prompt.blocks.len() as u64;
        counts.blocks_hit += hit as u64;
        counts.tokens_asked += prompt.tokens;
        counts.tokens_hit += prompt.tokens_of(hit);
        counts.operations += prompt.blocks.len() as u64;
        hits(prompt, &Hits { chunks: hit as u64, tokens: prompt.tokens_of(hit), ..Hits::default() });
        cache.keep(prompt, next, capacity_chunks);
    }
    counts
}

#[derive(Debug, Default)]
struct Cache {
    /// The next use of each block that is cached, [`GONE`] of the others.
    next: Vec<u32>,
    chunks: u64,
    /// The next block to drop is on top: next use, position in its prompt, block. Entries with a changed next use are skipped.
    order: BinaryHeap<(u32, u32, u32)>,
}

impl Cache {
    fn prefix(&self, prompt: &Prompt) -> usize {
        prompt.blocks.iter().take_while(|&&block| self.next[block as usize] != GONE).count()
    }

    /// Notes the next uses of a prompt's blocks, and drops the blocks beyond the capacity.
    fn keep(&mut self, prompt: &Prompt, next: &[u32], capacity_chunks: u64) {
        for ((position, &block), &next) in (0..).zip(&prompt.blocks).zip(next) {
            let known = std::mem::replace(&mut self.next[block as usize], next);
            self.chunks += u64::from(known == GONE);
            self.order.push((next, position, block));
        }
        while self.chunks > capacity_chunks
            && let Some((next, _, block)) = self.order.pop()
        {
            if self.next[block as usize] == next {
                self.next[block as usize] = GONE;
                self.chunks -= 1;
            }
        }
    }
}

/// A block that is not used again.
const NEVER: u32 = u32::MAX - 1;

/// A block that is not cached.
const GONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::generator::Generator;
    use crate::trace::Request;

    fn workload(prompts: &[&[u64]]) -> Workload {
        workload_with(prompts, true)
    }

    fn workload_with(prompts: &[&[u64]], partial_blocks: bool) -> Workload {
        let request = |ids: &&[u64]| Request {
            timestamp_ms: 0,
            input_tokens: ids.len() as u64 * 512,
            output_tokens: 1,
            block_ids: ids.to_vec(),
        };
        Workload::new(&prompts.iter().map(request).collect::<Vec<_>>(), partial_blocks)
    }

    fn hits(workload: &Workload, capacity: u64) -> u64 {
        opt(workload, &Future::of(workload), capacity, |_, _| {}).blocks_hit
    }

    /// The most hits over every choice of the blocks that are kept after each prompt, prefixes only.
    fn exhaustive(prompts: &[Prompt], cached: &HashSet<u32>, capacity: usize) -> u64 {
        let Some((Prompt { blocks: prompt, usable, .. }, rest)) = prompts.split_first() else { return 0 };
        let found = prompt.iter().take(*usable).take_while(|block| cached.contains(block));
        let hit = found.count() as u64;
        if rest.is_empty() {
            return hit;
        }
        let mut all: Vec<u32> = cached.iter().chain(prompt).copied().collect();
        all.sort_unstable();
        all.dedup();
        let choices = (0_u32..1 << all.len()).filter(|choice| choice.count_ones() as usize <= capacity);
        let kept = |choice: u32| {
            (0..).zip(&all).filter(|(i, _)| choice >> i & 1 == 1).map(|(_, &block)| block).collect()
        };
        hit + choices.map(|choice| exhaustive(rest, &kept(choice), capacity)).max().unwrap_or(0)
    }

    #[test]
    fn the_optimum_keeps_the_chunks_that_are_used_soonest_and_heads_before_tails() {
        let trace = workload(&[&[1, 2, 3], &[4], &[1, 2], &[4]]);
        assert_eq!(hits(&trace, 1), 1);
        assert_eq!(hits(&trace, 2), 2, "1 and 2, or 4: never 3");
        assert_eq!(hits(&trace, 3), 3);
        assert_eq!(hits(&trace, 100), 3);
    }

    #[test]
    fn no_other_choice_of_chunks_hits_more_than_the_optimum() {
        let mut rng = fastrand::Rng::with_seed(4);
        for round in 0..20 {
            let prompt = |rng: &mut fastrand::Rng| -> Vec<u64> {
                let mut id = 0;
                (0..rng.u64(1..=3))
                    .map(|_| {
                        id = id * 2 + rng.u64(1..=2);
                        id
                    })
                    .collect()
            };
            let prompts: Vec<Vec<u64>> = (0..4).map(|_| prompt(&mut rng)).collect();
            for (capacity, partial_blocks) in
                (1..=3).flat_map(|capacity| [(capacity, true), (capacity, false)])
            {
                let prompts: Vec<&[u64]> = prompts.iter().map(Vec::as_slice).collect();
                let trace = workload_with(&prompts, partial_blocks);
                let best = exhaustive(&trace.prompts, &HashSet::new(), capacity);
                assert_eq!(hits(&trace, capacity as u64), best, "round {round}, {capacity}: {prompts:?}");
            }
        }
    }

    #[test]
    fn with_room_for_everything_it_hits_what_an_infinite_cache_would() {
        let trace: Vec<Request> = Generator::new(3).take(300).collect();
        let workload = Workload::new(&trace, false);
        let mut infinite = crate::replay::infinite::InfiniteCache::default();
        trace.iter().for_each(|request| _ = infinite.ask(request));
        let counts = opt(&workload, &Future::of(&workload), workload.distinct_blocks, |_, _| {});
        assert!((counts.tokens_hit as f64 / counts.tokens_asked as f64 - infinite.hit_rate()).abs() < 1e-12);
    }
}
