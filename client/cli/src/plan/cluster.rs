//! Several stores behind one router.

mod directory;
mod node;

use larder_core::store::policy::PolicyName;
use larder_protocol::{Chain, ChunkHash};

use self::directory::{Directory, MAX_NODES};
use self::node::Node;
use super::workload::{Prompt, Workload};
use super::{Counts, Sharing};
use crate::content;
use crate::replay::assignment::LeastRecomputed;

/// Reads from which on a chunk is copied to its reader.
pub const REPLICATE_FROM_READS: u32 = 8;

/// The cost of reading a token from another node, in recomputed tokens.
pub const REMOTE_TOKEN_COST: f64 = 0.1;

/// The most nodes of a planned cluster.
pub const MAX_CLUSTER_NODES: u16 = MAX_NODES as u16;

/// Plays a workload, one request after the other, through several stores with the same capacity.
///
/// - `Local`: each request goes to the node that recomputed least lately (half-life 30 s) and hits the chunks there.
/// - `Routed`: a request goes to the node with the fewest tokens recomputed lately, this prompt's included: to its longest
///   prefix, unless that node is busy.
/// - `Shared`: each node reads what any of them holds; what is computed is kept where it was computed, and a chunk
///   is copied to its reader from [`REPLICATE_FROM_READS`] reads on. A request goes where the tokens recomputed
///   lately and [`REMOTE_TOKEN_COST`] for each token that is elsewhere are fewest together.
///
/// # Panics
/// Panics if there are no nodes, or more than [`MAX_CLUSTER_NODES`].
#[must_use]
pub fn replay(
    workload: &Workload,
    policy: PolicyName,
    nodes: u16,
    sharing: Sharing,
    capacity_chunks: u64,
) -> Counts {
    let mut cluster = Cluster::new(workload, policy, nodes, capacity_chunks);
    for prompt in &workload.prompts {
        cluster.play(prompt, sharing);
    }
    cluster.counts
}

#[derive(Debug)]
struct Cluster {
    nodes: Vec<Node>,
    directory: Directory,
    loads: LeastRecomputed,
    /// By block.
    hashes: Vec<ChunkHash>,
    /// By block: how often it was hit.
    reads: Vec<u32>,
    counts: Counts,
}

/// Blocks of one prompt, next to each other, that one node serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    from: usize,
    to: usize,
    holder: usize,
}

impl Cluster {
    fn new(workload: &Workload, policy: PolicyName, nodes: u16, capacity_chunks: u64) -> Self {
        assert!((1..=MAX_CLUSTER_NODES).contains(&nodes), "a planned cluster has 1 to {MAX_NODES} nodes");
        let longest = workload.prompts.iter().map(|prompt| prompt.blocks.len() as u64).max().unwrap_or(0);
        let blocks = workload.distinct_blocks;
        Self {
            nodes: (0..nodes).map(|_| Node::new(policy, capacity_chunks, longest)).collect(),
            directory: Directory::new(blocks),
            loads: LeastRecomputed::new(nodes.into()),
            hashes: (0..blocks).map(content::chunk_hash).collect(),
            reads: vec![0; blocks as usize],
            counts: Counts::default(),
        }
    }

    fn play(&mut self, prompt: &Prompt, sharing: Sharing) {
        self.nodes.iter_mut().for_each(|node| node.is_now(prompt.at_ms));
        let (reader, runs) = match sharing {
            Sharing::Local => {
                let reader = self.loads.choose(prompt.at_ms);
                (reader, self.run_on(reader, prompt))
            }
            Sharing::Routed => {
                let reader = self.cheapest(prompt);
                (reader, self.run_on(reader, prompt))
            }
            Sharing::Shared => self.place_shared(prompt),
        };
        let hit = runs.last().map_or(0, |run| run.to);
        self.serve(prompt, reader, &runs, hit);
        let recomputed = prompt.tokens - prompt.tokens_of(hit);
        self.loads.recomputed(reader, prompt.at_ms, recomputed);
        let remote = runs.iter().filter(|run| run.holder != reader);
        self.counts.chunks_moved += remote.map(|run| (run.to - run.from) as u64).sum::<u64>();
        self.counts.blocks_asked += prompt.blocks.len() as u64;
        self.counts.blocks_hit += hit as u64;
        self.counts.tokens_asked += prompt.tokens;
        self.counts.tokens_hit += prompt.tokens_of(hit);
        self.counts.operations += prompt.blocks.len() as u64;
    }

    /// The prefix that `node` holds, as one run or none.
    fn run_on(&mut self, node: usize, prompt: &Prompt) -> Vec<Stretch> {
        let usable = prompt.blocks.iter().take(prompt.usable);
        let held = |&&block: &&u32| self.nodes[node].holds(&self.hashes[block as usize]);
        let to = usable.take_while(held).count();
        if to == 0 { Vec::new() } else { vec![Stretch { from: 0, to, holder: node }] }
    }

    /// The node with the fewest tokens recomputed lately, this prompt's included.
    fn cheapest(&mut self, prompt: &Prompt) -> usize {
        let mut prefixes = vec![0; self.nodes.len()];
        let mut candidates = directory::all(self.nodes.len());
        for (position, &block) in prompt.blocks.iter().take(prompt.usable).enumerate() {
            candidates &= self.directory.holders(block, &self.hashes, &self.nodes);
            if candidates == 0 {
                break;
            }
            directory::members(candidates).for_each(|node| prefixes[node] = position + 1);
        }
        let cost = |node: usize| {
            let recomputed = prompt.tokens - prompt.tokens_of(prefixes[node]);
            self.loads.tokens_at(node, prompt.at_ms) + recomputed as f64
        };
        (0..self.nodes.len())
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
            .expect("a cluster has at least one node")
    }

    /// Where a request goes when all chunks are shared, and which node serves which of its blocks.
    fn place_shared(&mut self, prompt: &Prompt) -> (usize, Vec<Stretch>) {
        let usable = prompt.blocks.iter().take(prompt.usable);
        let holders = usable.map(|&block| self.directory.holders(block, &self.hashes, &self.nodes));
        let holders: Vec<u64> = holders.take_while(|&holders| holders != 0).collect();
        let cost = |node: usize| {
            let elsewhere = holders.iter().filter(|&&holders| holders >> node & 1 == 0).count() as u64;
            let remote = (elsewhere * prompt.block_tokens) as f64 * REMOTE_TOKEN_COST;
            self.loads.tokens_at(node, prompt.at_ms) + remote
        };
        let reader = (0..self.nodes.len())
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
            .expect("a cluster has at least one node");
        let mut runs: Vec<Stretch> = Vec::new();
        for (at, &holders) in holders.iter().enumerate() {
            let last = runs.last().map(|run| run.holder);
            let holder = directory::prefer(holders, [Some(reader), last]);
            match runs.last_mut() {
                Some(run) if run.holder == holder => run.to += 1,
                _ => runs.push(Stretch { from: at, to: at + 1, holder }),
            }
        }
        (reader, runs)
    }

    /// Uses the cached blocks, and keeps computed and often read blocks at the reader.
    fn serve(&mut self, prompt: &Prompt, reader: usize, runs: &[Stretch], hit: usize) {
        let hashes = prompt.blocks.iter().map(|&block| self.hashes[block as usize]).collect();
        let chain = Chain::from_root(self.nodes[reader].root(), hashes);
        let mut leases = Vec::with_capacity(runs.len());
        for run in runs.iter().rev() {
            leases.push((run.holder, self.nodes[run.holder].lease(&chain.part(run.from, run.to))));
        }
        prompt.blocks[..hit].iter().for_each(|&block| self.reads[block as usize] += 1);
        self.keep(prompt, reader, &chain, hit, chain.len());
        for run in runs.iter().rev().filter(|run| run.holder != reader) {
            // Reads never grow along a prefix: those that are read often come first.
            let often = |&&block: &&u32| self.reads[block as usize] >= REPLICATE_FROM_READS;
            let copied = prompt.blocks[run.from..run.to].iter().take_while(often).count();
            self.keep(prompt, reader, &chain, run.from, run.from + copied);
        }
        for (holder, leased) in leases {
            self.nodes[holder].release(&leased);
        }
    }

    fn keep(&mut self, prompt: &Prompt, node: usize, chain: &Chain, from: usize, to: usize) {
        if from < to {
            self.nodes[node].put(&chain.part(from, to));
            prompt.blocks[from..to].iter().for_each(|&block| self.directory.add(block, node));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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

    fn played(prompts: &[&[u64]], nodes: u16, sharing: Sharing) -> Counts {
        replay(&workload(prompts), PolicyName::Lru, nodes, sharing, 100)
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
        let counts = |workload| replay(workload, PolicyName::Lru, 4, Sharing::Routed, 100);
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
    fn a_chunk_that_is_read_often_is_copied_and_moves_no_more() {
        let prompts: Vec<Vec<u64>> = (0..40).map(|i| vec![1, 100 + i]).collect();
        let prompts: Vec<&[u64]> = prompts.iter().map(Vec::as_slice).collect();
        let counts = played(&prompts, 2, Sharing::Shared);
        assert_eq!(counts.blocks_hit, 39);
        assert!(counts.chunks_moved <= u64::from(REPLICATE_FROM_READS), "{counts:?}");
    }
}
