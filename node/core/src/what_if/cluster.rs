//! Several stores behind one router, or behind engines that keep to their node: the model of the planner and of the console.

mod directory;
mod loads;
mod node;

use larder_protocol::{Chain, ChunkHash};

use self::directory::{Directory, MAX_NODES};
pub use self::loads::{HALF_LIFE_MS, LeastRecomputed};
use self::node::Node;
use crate::store::policy::PolicyName;
use crate::store::replay::Replayed;

/// Reads from which on a chunk is copied to its reader.
pub const REPLICATE_FROM_READS: u32 = 8;

/// The cost of reading a token from another node, in recomputed tokens.
pub const REMOTE_TOKEN_COST: f64 = 0.1;

/// The most nodes of a cluster.
pub const MAX_CLUSTER_NODES: u16 = MAX_NODES as u16;

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// When it arrived.
    pub at_ms: u64,
    /// Its tokens.
    pub tokens: u64,
    /// The blocks that a cache keeps of it, first to last, numbered from 0.
    pub blocks: Vec<u32>,
    /// The most blocks that it can hit.
    pub usable: usize,
    /// Tokens of one block.
    pub block_tokens: u64,
}

/// The counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Blocks of all prompts.
    pub blocks_asked: u64,
    /// Cached blocks.
    pub blocks_hit: u64,
    /// Tokens of all prompts.
    pub tokens_asked: u64,
    /// Tokens of the blocks that were cached.
    pub tokens_hit: u64,
    /// Chunks that a node read from another one.
    pub chunks_moved: u64,
    /// Chunks leased and committed.
    pub operations: u64,
}

/// Where a request goes, and whose chunks it finds there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the node that recomputed least lately (half-life 30 s); it finds the chunks there.
    Local,
    /// To the node with the fewest tokens recomputed lately, this prompt's included: to its longest prefix, unless that node is
    /// busy. It finds the chunks there.
    Routed,
    /// To the node where the tokens recomputed lately and [`REMOTE_TOKEN_COST`] for each token that is elsewhere are fewest
    /// together. The node reads what any of them holds; what is computed is kept where it was computed, and a chunk is copied
    /// to its reader from [`REPLICATE_FROM_READS`] reads on.
    Shared,
    /// To this node; it finds the chunks there.
    Apart(usize),
    /// To this node, which reads what any of them holds, as with [`Self::Shared`].
    Together(usize),
}

/// What one node of a cluster is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeSize {
    /// Its eviction policy.
    pub policy: PolicyName,
    /// Chunks that it keeps.
    pub capacity_chunks: u64,
}

/// The stores of a cluster, with requests played one after the other.
#[derive(Debug)]
pub struct Cluster {
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

impl Prompt {
    /// Tokens of its first `blocks` blocks.
    #[must_use]
    pub fn tokens_of(&self, blocks: usize) -> u64 {
        (blocks as u64 * self.block_tokens).min(self.tokens)
    }
}

impl Cluster {
    /// Empty nodes, for prompts of at most `longest` blocks; `hashes` are those of the blocks, by their numbers.
    ///
    /// # Panics
    /// Panics if there are no nodes, or more than [`MAX_CLUSTER_NODES`].
    #[must_use]
    pub fn new(nodes: &[NodeSize], hashes: Vec<ChunkHash>, longest: u64) -> Self {
        assert!((1..=MAX_NODES).contains(&nodes.len()), "a planned cluster has 1 to {MAX_NODES} nodes");
        let node = |size: &NodeSize| Node::new(size.policy, size.capacity_chunks, longest);
        Self {
            nodes: nodes.iter().map(node).collect(),
            directory: Directory::new(hashes.len() as u64),
            loads: LeastRecomputed::new(nodes.len()),
            reads: vec![0; hashes.len()],
            hashes,
            counts: Counts::default(),
        }
    }

    /// What was counted since the start, or since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Plays a request.
    ///
    /// # Panics
    /// Panics if it has a block without a hash, or a block behind another one than in an earlier request.
    pub fn play(&mut self, prompt: &Prompt, way: Way) {
        self.nodes.iter_mut().for_each(|node| node.is_now(prompt.at_ms));
        let (reader, runs) = match way {
            Way::Local => {
                let reader = self.loads.choose(prompt.at_ms);
                (reader, self.run_on(reader, prompt))
            }
            Way::Routed => {
                let reader = self.cheapest(prompt);
                (reader, self.run_on(reader, prompt))
            }
            Way::Apart(reader) => (reader, self.run_on(reader, prompt)),
            Way::Shared => {
                let holders = self.holders(prompt);
                let reader = self.cheapest_reader(prompt, &holders);
                (reader, runs(reader, &holders))
            }
            Way::Together(reader) => (reader, runs(reader, &self.holders(prompt))),
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

    /// The nodes that hold each block of the longest prefix that all of them hold together.
    fn holders(&mut self, prompt: &Prompt) -> Vec<u64> {
        let usable = prompt.blocks.iter().take(prompt.usable);
        let holders = usable.map(|&block| self.directory.holders(block, &self.hashes, &self.nodes));
        holders.take_while(|&holders| holders != 0).collect()
    }

    /// Where a request goes when all chunks are shared.
    fn cheapest_reader(&self, prompt: &Prompt, holders: &[u64]) -> usize {
        let cost = |node: usize| {
            let elsewhere = holders.iter().filter(|&&holders| holders >> node & 1 == 0).count() as u64;
            let remote = (elsewhere * prompt.block_tokens) as f64 * REMOTE_TOKEN_COST;
            self.loads.tokens_at(node, prompt.at_ms) + remote
        };
        (0..self.nodes.len())
            .min_by(|&a, &b| cost(a).total_cmp(&cost(b)))
            .expect("a cluster has at least one node")
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

impl From<Replayed> for Counts {
    fn from(replayed: Replayed) -> Self {
        let Replayed { blocks_asked, blocks_hit, tokens_asked, tokens_hit, operations, .. } = replayed;
        Self { blocks_asked, blocks_hit, tokens_asked, tokens_hit, chunks_moved: 0, operations }
    }
}

/// Which node serves which blocks of a prefix to its reader.
fn runs(reader: usize, holders: &[u64]) -> Vec<Stretch> {
    let mut runs: Vec<Stretch> = Vec::new();
    for (at, &holders) in holders.iter().enumerate() {
        let last = runs.last().map(|run| run.holder);
        let holder = directory::prefer(holders, [Some(reader), last]);
        match runs.last_mut() {
            Some(run) if run.holder == holder => run.to += 1,
            _ => runs.push(Stretch { from: at, to: at + 1, holder }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(blocks: &[u32]) -> Prompt {
        let tokens = blocks.len() as u64 * 16 + 1;
        Prompt { at_ms: 0, tokens, blocks: blocks.to_vec(), usable: usize::MAX, block_tokens: 16 }
    }

    fn cluster(capacity_chunks: u64) -> Cluster {
        let hashes = (0..32).map(|number| ChunkHash([number; 32])).collect();
        Cluster::new(&[NodeSize { policy: PolicyName::Lru, capacity_chunks }; 2], hashes, 8)
    }

    #[test]
    fn a_request_that_keeps_to_its_node_finds_the_chunks_of_others_only_where_nodes_read_them() {
        for (way, hit, moved) in [(Way::Apart as fn(usize) -> Way, 0, 0), (Way::Together, 3, 3)] {
            let mut cluster = cluster(16);
            cluster.play(&prompt(&[1, 2, 3]), way(0));
            assert_eq!(cluster.take_counts().blocks_hit, 0);
            cluster.play(&prompt(&[1, 2, 3]), way(1));
            let counts = cluster.take_counts();
            assert_eq!((counts.blocks_hit, counts.chunks_moved, counts.tokens_hit), (hit, moved, 16 * hit));
            cluster.play(&prompt(&[1, 2, 3, 4]), way(0));
            assert_eq!(cluster.take_counts().blocks_hit, 3, "in both cases there");
        }
    }

    #[test]
    fn two_nodes_that_read_each_others_chunks_keep_twice_as_many() {
        // Twelve prompts of one block in turn, each always at the same node, which has room for eight.
        for (way, rounds_hit) in [(Way::Apart as fn(usize) -> Way, 2), (Way::Together, 2)] {
            let mut cluster = cluster(8);
            for turn in 0..36 {
                cluster.play(&prompt(&[turn % 12]), way(turn as usize % 2));
            }
            assert_eq!(cluster.take_counts().blocks_hit, 12 * rounds_hit);
        }
        // The same prompts, each at the other node every other time: apart, both have to hold all of them.
        for (way, hit) in [(Way::Apart as fn(usize) -> Way, 0), (Way::Together, 24)] {
            let mut cluster = cluster(8);
            for turn in 0..36 {
                cluster.play(&prompt(&[turn % 12]), way((turn as usize + turn as usize / 12) % 2));
            }
            assert_eq!(cluster.take_counts().blocks_hit, hit);
        }
    }
}
