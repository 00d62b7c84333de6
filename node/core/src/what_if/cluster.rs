//! A model of several stores behind one router, or behind engines that each keep to one node. The planner and the console use it.
//!
//! Production code makes all decisions: eviction, placement, forwards, writes to tiers, and the cost of a route. Only requests
//! have times in the model: questions between nodes are answered at once, and with each request a node hears how much room all
//! nodes have. Directory rows are never stale, and there is always enough staging.

mod directory;
mod disk;
mod loads;
mod node;
mod sharing;

use std::collections::{HashSet, VecDeque};

use larder_protocol::routing;
use larder_protocol::{Chain, ChunkHash};

use self::directory::{Directory, MAX_NODES};
pub use self::loads::{HALF_LIFE_MS, LeastRecomputed};
use self::node::Node;
use crate::placement::PlacementRule;
use crate::store::policy::PolicyName;
use crate::store::{Leased, Source};

/// The most nodes of a cluster.
pub const MAX_CLUSTER_NODES: u16 = MAX_NODES as u16;

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The time of its arrival.
    pub at_ms: u64,
    /// Its tokens.
    pub tokens: u64,
    /// The prompt's blocks that a cache keeps, first to last, numbered from 0.
    pub blocks: Vec<u32>,
    /// The most blocks that the prompt can hit.
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
    /// Chunks that a node read from another node.
    pub chunks_moved: u64,
    /// Evicted chunks that another node took.
    pub chunks_forwarded: u64,
    /// Chunks leased and committed.
    pub operations: u64,
}

/// The chunks that a request hit, and their sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hits {
    /// Chunks that were hit, from the prompt's first on.
    pub chunks: u64,
    /// Chunks among them that some node read from its disk.
    pub from_disk: u64,
    /// Chunks among them that came from another node.
    pub from_peers: u64,
    /// Chunks among them that came from the object store.
    pub from_objects: u64,
    /// Tokens of all chunks that were hit.
    pub tokens: u64,
}

/// The way in which a request's node is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeChoice {
    /// A router takes the node that has recomputed the fewest tokens lately (half-life 30 s).
    Load,
    /// A router knows the chunks of each node. If nodes share chunks, it takes the node of the least
    /// [cost](routing::Prompt::cost_tokens); otherwise the node with the fewest tokens recomputed lately, this prompt's included.
    Cost,
    /// The engine keeps to this node.
    To(usize),
}

/// The policy and capacity of one node of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeSize {
    /// Its eviction policy.
    pub policy: PolicyName,
    /// Chunks that it keeps in memory.
    pub capacity_chunks: u64,
}

/// The properties that all nodes of a cluster have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Whether nodes read each other's chunks.
    pub shares: bool,
    /// The rule by which nodes place chunks.
    pub placement: PlacementRule,
    /// Chunks that each node keeps on its disk; 0 for no disk.
    pub disk_chunks: u64,
    /// Whether there is an object store. It keeps everything.
    pub has_objects: bool,
    /// Requests under way at a time, at most one at each node. The chunks that a request computes can be read when the request is
    /// done.
    pub in_flight: u16,
}

/// The stores of a cluster.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    shape: Shape,
    directory: Directory,
    /// The chunks of the object store.
    objects: HashSet<ChunkHash>,
    loads: LeastRecomputed,
    /// The hash of each block.
    hashes: Vec<ChunkHash>,
    /// Requests that have read their hits and not saved their computed chunks.
    open: VecDeque<Open>,
    counts: Counts,
}

/// A request under way.
#[derive(Debug)]
struct Open {
    node: usize,
    chain: Chain,
    hit: usize,
    /// The position and hash of the prompt's last full block.
    end: Option<(usize, ChunkHash)>,
}

impl Prompt {
    /// Tokens of its first `blocks` blocks.
    pub fn tokens_of(&self, blocks: usize) -> u64 {
        (blocks as u64 * self.block_tokens).min(self.tokens)
    }
}

impl Shape {
    /// Nodes without tiers below their memory, with one request after the other.
    pub fn of_memory(shares: bool) -> Self {
        let placement = PlacementRule::default();
        Self { shares, placement, disk_chunks: 0, has_objects: false, in_flight: 1 }
    }

    fn is_memory_alone(&self) -> bool {
        !self.shares && self.disk_chunks == 0 && !self.has_objects
    }
}

impl Cluster {
    /// A cluster of empty nodes, for prompts of at most `longest` blocks. `hashes` has the hash of each block, by the block's
    /// number.
    ///
    /// # Panics
    /// Panics if there are no nodes, or more than [`MAX_CLUSTER_NODES`].
    pub fn new(nodes: &[NodeSize], shape: Shape, hashes: Vec<ChunkHash>, longest: u64) -> Self {
        assert!((1..=MAX_NODES).contains(&nodes.len()), "a planned cluster has 1 to {MAX_NODES} nodes");
        // One node has nobody to share with.
        let shape = Shape { shares: shape.shares && nodes.len() > 1, ..shape };
        Self {
            nodes: nodes.iter().map(|size| Node::new(size, &shape, longest)).collect(),
            shape,
            directory: Directory::new(&hashes),
            objects: HashSet::new(),
            loads: LeastRecomputed::new(nodes.len()),
            hashes,
            open: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// The counts since the start, or since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Chunks that the object store has.
    pub fn stored_chunks(&self) -> u64 {
        self.objects.len() as u64
    }

    /// Plays a request, and returns its hits. The request stays under way until others take its place.
    ///
    /// # Panics
    /// Panics if the prompt has a block without a hash, or a block that followed another block in an earlier request.
    pub fn play(&mut self, prompt: &Prompt, way: NodeChoice) -> Hits {
        self.nodes.iter_mut().for_each(|node| node.is_now(prompt.at_ms));
        let node = self.choose(prompt, way);
        let hashes: Vec<ChunkHash> = prompt.blocks.iter().map(|&block| self.hashes[block as usize]).collect();
        self.make_place(node, &hashes);
        let chain = Chain::from_root(self.nodes[node].root(), hashes);
        let (leased, mut hits) = self.get(prompt, node, &chain);
        let hit = leased.chunks as usize;
        (hits.chunks, hits.tokens) = (hit as u64, prompt.tokens_of(hit));
        let full = (prompt.tokens / prompt.block_tokens.max(1)) as usize;
        let end = full.checked_sub(1).and_then(|at| Some((at, *chain.hashes.get(at)?)));
        let open = Open { node, chain, hit, end };
        if self.shape.in_flight > 1 {
            self.nodes[node].release(&leased);
            self.open.push_back(open);
        } else {
            self.put(&open);
            self.nodes[node].release(&leased);
        }
        self.settle(node);
        self.loads.recomputed(node, prompt.at_ms, prompt.tokens - hits.tokens);
        self.counts.chunks_moved += hits.from_peers;
        self.counts.blocks_asked += prompt.blocks.len() as u64;
        self.counts.blocks_hit += hit as u64;
        self.counts.tokens_asked += prompt.tokens;
        self.counts.tokens_hit += hits.tokens;
        self.counts.operations += prompt.blocks.len() as u64;
        hits
    }

    /// Ends the requests that are still under way.
    pub fn end(&mut self) {
        while let Some(open) = self.open.pop_front() {
            self.put(&open);
            self.settle(open.node);
        }
    }

    /// Ends the requests that must be done before the next request begins at `node`: the request at this node, the turn before in
    /// the same conversation, and the oldest request if too many are under way.
    fn make_place(&mut self, node: usize, hashes: &[ChunkHash]) {
        let goes_on =
            |end: Option<(usize, ChunkHash)>| end.is_some_and(|(at, hash)| hashes.get(at) == Some(&hash));
        let most = usize::from(self.shape.in_flight);
        while let Some(at) = (self.open.iter().position(|open| open.node == node || goes_on(open.end)))
            .or_else(|| (self.open.len() >= most.max(1)).then_some(0))
        {
            let Some(open) = self.open.remove(at) else { break };
            self.put(&open);
            self.settle(open.node);
        }
    }

    /// Reads the longest prefix that can be read.
    fn get(&mut self, prompt: &Prompt, node: usize, chain: &Chain) -> (Leased, Hits) {
        let usable = chain.part(0, prompt.usable.min(chain.len()));
        if self.shape.is_memory_alone() {
            return (self.nodes[node].lease(&usable), Hits::default());
        }
        self.hear_all(node);
        let elsewhere = self.elsewhere(prompt, node, &usable);
        self.note_hole(prompt, node, &usable, &elsewhere);
        self.bring(prompt, node, &usable, &elsewhere)
    }

    /// The sources of the chunks that a node lacks, up to the first chunk that is nowhere.
    fn elsewhere(&self, prompt: &Prompt, node: usize, chain: &Chain) -> Vec<Option<Source>> {
        let mut elsewhere = vec![None; chain.len()];
        for position in self.nodes[node].absent(chain) {
            let at = position as usize;
            let held = self.shape.shares && self.directory.holders(prompt.blocks[at]) & !(1 << node) != 0;
            elsewhere[at] = match held {
                true => Some(Source::Peer),
                false if self.objects.contains(&chain.hashes[at]) => Some(Source::Object),
                false => break,
            };
        }
        elsewhere
    }

    /// Tells a node the chunks that other nodes have behind the first chunk that is nowhere.
    fn note_hole(&mut self, prompt: &Prompt, node: usize, chain: &Chain, elsewhere: &[Option<Source>]) {
        let absent = self.nodes[node].absent(chain);
        let hole = absent.iter().position(|&position| elsewhere[position as usize].is_none());
        for &position in &absent[hole.unwrap_or(absent.len())..] {
            let at = position as usize;
            let others = self.directory.holders(prompt.blocks[at]) & !(1 << node);
            if let Some(other) = directory::members(others).next()
                && self.shape.shares
            {
                self.nodes[node].is_behind_hole(&chain.hashes[at], sharing::holder(other));
            }
        }
    }

    /// Saves the chunks that a request has computed.
    fn put(&mut self, Open { node, chain, hit, .. }: &Open) {
        // Engines save long prompts in parts, so that others find room between them.
        let part = if self.shape.is_memory_alone() { chain.len().max(1) } else { PART_CHUNKS };
        for from in (*hit..chain.len()).step_by(part) {
            self.nodes[*node].put(&chain.part(from, chain.len().min(from + part)));
            if !self.shape.is_memory_alone() {
                self.settle(*node);
            }
        }
    }

    fn choose(&self, prompt: &Prompt, way: NodeChoice) -> usize {
        match way {
            NodeChoice::To(node) => node,
            NodeChoice::Load => self.loads.choose(prompt.at_ms),
            NodeChoice::Cost if self.shape.shares => self.cheapest_reader(prompt),
            NodeChoice::Cost => self.cheapest(prompt),
        }
    }

    /// The node with the fewest tokens recomputed lately, this prompt's included.
    fn cheapest(&self, prompt: &Prompt) -> usize {
        let mut prefixes = vec![0; self.nodes.len()];
        let mut candidates = directory::all(self.nodes.len());
        for (position, &block) in prompt.blocks.iter().take(prompt.usable).enumerate() {
            candidates &= self.directory.holders(block);
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

    /// The node where a request costs least, by the coordinator's formula.
    fn cheapest_reader(&self, prompt: &Prompt) -> usize {
        let rows = prompt.blocks.iter().map(|&block| self.directory.holders(block));
        let rows: Vec<u64> = rows.take_while(|&row| row != 0).collect();
        let asked = routing::Prompt { tokens: prompt.tokens, cluster_tokens: prompt.tokens_of(rows.len()) };
        let cost = |node: usize| {
            let held = rows.iter().filter(|&&row| row >> node & 1 == 1).count();
            asked.cost_tokens(routing::Candidate {
                backlog_tokens: self.loads.backlog(node, prompt.at_ms),
                held_tokens: prompt.tokens_of(held),
            })
        };
        let cheapest = self.loads.cheapest_among(prompt.at_ms, |_| true, cost);
        cheapest.expect("a cluster has at least one node")
    }
}

/// Chunks that are saved together.
const PART_CHUNKS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(blocks: &[u32]) -> Prompt {
        let tokens = blocks.len() as u64 * 16 + 1;
        Prompt { at_ms: 0, tokens, blocks: blocks.to_vec(), usable: usize::MAX, block_tokens: 16 }
    }

    fn cluster(capacity_chunks: u64, shape: Shape) -> Cluster {
        let hashes = (0..32).map(|number| ChunkHash([number; 32])).collect();
        Cluster::new(&[NodeSize { policy: PolicyName::Lru, capacity_chunks }; 2], shape, hashes, 8)
    }

    fn of_memory(capacity_chunks: u64, shares: bool) -> Cluster {
        cluster(capacity_chunks, Shape::of_memory(shares))
    }

    #[test]
    fn a_request_that_keeps_to_its_node_finds_the_chunks_of_others_only_where_nodes_read_them() {
        for (shares, hit) in [(false, 0), (true, 3)] {
            let mut cluster = of_memory(16, shares);
            assert_eq!(cluster.play(&prompt(&[1, 2, 3]), NodeChoice::To(0)).chunks, 0);
            let hits = cluster.play(&prompt(&[1, 2, 3]), NodeChoice::To(1));
            assert_eq!((hits.chunks, hits.from_peers, hits.tokens), (hit, hit, 16 * hit));
            assert_eq!(cluster.take_counts().chunks_moved, hit);
            assert_eq!(
                cluster.play(&prompt(&[1, 2, 3, 4]), NodeChoice::To(0)).chunks,
                3,
                "in both cases there"
            );
        }
    }

    #[test]
    fn two_nodes_that_read_each_others_chunks_keep_more_than_two_that_do_not() {
        // Twelve prompts of one block take turns. Each comes to the two nodes alternately. Each node has room for eight.
        let hit = |shares| {
            let mut cluster = of_memory(8, shares);
            for turn in 0..36 {
                let hits = cluster
                    .play(&prompt(&[turn % 12]), NodeChoice::To((turn as usize + turn as usize / 12) % 2));
                assert!(hits.from_peers <= hits.chunks);
            }
            cluster.take_counts().blocks_hit
        };
        assert_eq!(hit(false), 0, "apart, both have to hold all of them");
        assert!(hit(true) >= 16, "{}", hit(true));
    }

    #[test]
    fn what_is_evicted_from_memory_comes_from_disk_and_what_no_node_has_from_the_object_store() {
        let played = |disk_chunks, has_objects| {
            let shape = Shape { disk_chunks, has_objects, ..Shape::of_memory(false) };
            let mut cluster = cluster(4, shape);
            (0..24).for_each(|turn| _ = cluster.play(&prompt(&[turn]), NodeChoice::To(0)));
            let hits = |cluster: &mut Cluster, block| {
                let hits = cluster.play(&prompt(&[block]), NodeChoice::To(0));
                (hits.chunks, hits.from_disk, hits.from_objects)
            };
            let found = (hits(&mut cluster, 23), hits(&mut cluster, 15), hits(&mut cluster, 0));
            (found, cluster.stored_chunks())
        };
        assert_eq!(played(0, false), (((1, 0, 0), (0, 0, 0), (0, 0, 0)), 0));
        assert_eq!(played(12, false), (((1, 0, 0), (1, 1, 0), (0, 0, 0)), 0));
        assert_eq!(played(12, true), (((1, 0, 0), (1, 1, 0), (1, 0, 1)), 24));
    }

    #[test]
    fn a_chunk_on_another_nodes_disk_is_read_there_and_sent() {
        let mut cluster = cluster(4, Shape { disk_chunks: 20, ..Shape::of_memory(true) });
        (0..12).for_each(|turn| _ = cluster.play(&prompt(&[turn]), NodeChoice::To(0)));
        let hits = cluster.play(&prompt(&[1]), NodeChoice::To(1));
        assert_eq!((hits.chunks, hits.from_disk, hits.from_peers), (1, 1, 1));
    }

    #[test]
    fn what_a_request_computes_is_found_once_it_is_done_and_its_next_turn_waits_for_it() {
        let hits = |in_flight: u16, second: &[u32], way| {
            let mut cluster = cluster(16, Shape { in_flight, ..Shape::of_memory(true) });
            cluster.play(&prompt(&[1, 2, 3]), NodeChoice::To(0));
            cluster.play(&prompt(second), way).chunks
        };
        assert_eq!(hits(1, &[1, 2, 9], NodeChoice::To(1)), 2);
        assert_eq!(hits(4, &[1, 2, 9], NodeChoice::To(1)), 0, "the first is under way");
        assert_eq!(hits(4, &[1, 2, 9], NodeChoice::To(0)), 2, "a node computes one at a time");
        assert_eq!(hits(4, &[1, 2, 3, 9], NodeChoice::To(1)), 3, "the next turn comes after the answer");
    }

    #[test]
    fn an_only_copy_that_is_used_again_goes_to_a_node_with_room_instead_of_away() {
        // The first node lacks room for the chunks that it uses again and again. It hears of the second node when it asks it.
        let played = |shares| {
            let mut cluster = of_memory(8, shares);
            cluster.play(&Prompt { at_ms: 0, ..prompt(&[30]) }, NodeChoice::To(1));
            for turn in 0..48 {
                let at_ms = 1_000 * u64::from(turn + 1);
                for _ in 0..3 {
                    cluster.play(&Prompt { at_ms, ..prompt(&[30, turn % 12]) }, NodeChoice::To(0));
                }
            }
            cluster.take_counts()
        };
        let (apart, shared) = (played(false), played(true));
        assert_eq!(apart.chunks_forwarded, 0);
        assert!(
            shared.chunks_forwarded > 0 && shared.blocks_hit >= apart.blocks_hit + 24,
            "{apart:?} {shared:?}"
        );
    }
}
