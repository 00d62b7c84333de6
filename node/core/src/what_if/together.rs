//! Tries other sizes, policies and ways to work together: plays the last lookups of all nodes again through a cluster.
//!
//! The first half of the lookups only fills the stores; the second half is counted. A chunk on disk counts as a chunk in memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use larder_protocol::ChunkHash;

use super::cluster::{Cluster, MAX_CLUSTER_NODES, NodeChoice, NodeSize, Prompt, Shape};
use super::{PastLookup, Played, SIZES, main_chunk_tokens};
use crate::store::policy::PolicyName;
use crate::store::replay::hash;
use crate::time::Millis;

/// A node, and its last lookups.
#[derive(Debug, Clone)]
pub struct NodePast {
    /// The node's present policy and size.
    pub size: NodeSize,
    /// Its last lookups. All nodes count time from the same moment.
    pub lookups: Vec<PastLookup>,
}

/// How nodes work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Working {
    /// Each request stays at its node, and finds only this node's chunks.
    Apart,
    /// Each request stays at its node. The node reads the chunks of all other nodes too.
    Together,
    /// A router sends each request to the node where it costs least. The request finds only this node's chunks.
    RoutedApart,
    /// A router sends each request to the node where it costs least. The node reads the chunks of all other nodes too.
    RoutedTogether,
}

/// A cluster to try.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    /// The policy of all nodes; `None` if each node keeps its policy.
    pub policy: Option<PolicyName>,
    /// The size of each node, as a multiple of the present one; `None` for nodes that never evict.
    pub times: Option<f64>,
    /// How the nodes work together.
    pub working: Working,
}

/// The hits of a cluster that was tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tried {
    /// The cluster.
    pub variant: Variant,
    /// The sum of the chunks that its nodes can keep.
    pub capacity_chunks: u64,
    /// Tokens of the counted lookups that it hits.
    pub tokens_hit: u64,
    /// Tokens among these that a node read from another node.
    pub tokens_moved: u64,
}

/// A lookup whose chunks are numbered.
struct Numbered {
    node: usize,
    tokens_found: u64,
    prompt: Prompt,
}

/// The numbers of chunks, and the chunk before each of them.
#[derive(Default)]
struct Numbers {
    by_name: HashMap<u64, (u32, Option<u64>)>,
    names: Vec<u64>,
}

/// The clusters to try: the present one first, then other sizes, other policies, and other ways to work together. `shares` says
/// whether the nodes read each other's chunks at present.
pub fn variants(nodes: &[NodeSize], shares: bool) -> Vec<Variant> {
    let present = if shares { Working::Together } else { Working::Apart };
    let of_policy = |policy, times| Variant { policy, times, working: present };
    let sizes = SIZES.into_iter().filter(|&times| times != 1.0).map(Some).chain([None]);
    let is_in_force = |policy| nodes.iter().all(|node| node.policy == policy);
    let policies = PolicyName::ALL.into_iter().filter(|&policy| !is_in_force(policy));
    let policies = policies.map(|policy| of_policy(Some(policy), Some(1.0)));
    let other = if shares { Working::Apart } else { Working::Together };
    let routed = if shares { Working::RoutedTogether } else { Working::RoutedApart };
    let ways = [other, routed].map(|working| Variant { policy: None, times: Some(1.0), working });
    let ways = ways.into_iter().filter(|_| nodes.len() > 1);
    let sizes = sizes.map(|times| of_policy(None, times));
    std::iter::once(of_policy(None, Some(1.0))).chain(sizes).chain(policies).chain(ways).collect()
}

/// Plays the lookups of nodes through every cluster; `shares` says whether the nodes read each other's chunks at present. Takes
/// some microseconds for each chunk and cluster. `None` if there is nothing to play.
///
/// # Panics
/// Panics if there are more than [`MAX_CLUSTER_NODES`] nodes.
pub fn play(nodes: &[NodePast], shares: bool) -> Option<Played<Tried>> {
    assert!(nodes.len() <= usize::from(MAX_CLUSTER_NODES), "more nodes than can be played");
    let all: usize = nodes.iter().map(|node| node.lookups.len()).sum();
    let mut sorted: Vec<(usize, &PastLookup)> = Vec::with_capacity(all);
    for (node, past) in nodes.iter().enumerate() {
        sorted.extend(past.lookups.iter().map(|lookup| (node, lookup)));
    }
    sorted.sort_by_key(|(_, lookup)| lookup.at);
    let chunk_tokens = main_chunk_tokens(sorted.iter().map(|(_, lookup)| *lookup))?;
    let mut numbers = Numbers::default();
    let of_size = sorted.iter().filter(|(_, lookup)| lookup.chunk_tokens == chunk_tokens);
    let numbered: Vec<Numbered> =
        of_size.filter_map(|(node, lookup)| numbers.lookup(*node, lookup)).collect();
    let warming = numbered.len() / 2;
    let counted = &numbered[warming..];
    let at = |lookup: &Numbered| Millis(lookup.prompt.at_ms);
    let (first, last) = (at(counted.first()?), at(counted.last()?));
    let sizes: Vec<NodeSize> = nodes.iter().map(|node| node.size).collect();
    let hashes = numbers.hashes();
    let try_one = |variant: Variant| variant.play(&sizes, &hashes, &numbered, warming);
    Some(Played {
        warming_lookups: warming as u64,
        counted_lookups: counted.len() as u64,
        left_out_lookups: (all - numbered.len()) as u64,
        counted_ms: last.since(first),
        chunk_tokens,
        distinct_chunks: hashes.len() as u64,
        tokens_asked: counted.iter().map(|lookup| lookup.prompt.tokens).sum(),
        tokens_found: counted.iter().map(|lookup| lookup.tokens_found).sum(),
        tried: variants(&sizes, shares).into_iter().map(try_one).collect(),
    })
}

impl Variant {
    fn play(self, sizes: &[NodeSize], hashes: &[ChunkHash], lookups: &[Numbered], warming: usize) -> Tried {
        let distinct = (hashes.len() as u64).max(1);
        let capacity = |size: &NodeSize| {
            self.times.map_or(distinct, |times| (size.capacity_chunks as f64 * times) as u64).max(1)
        };
        // More room than chunks is not used.
        let size = |size: &NodeSize| NodeSize {
            policy: self.policy.unwrap_or(size.policy),
            capacity_chunks: capacity(size).min(distinct),
        };
        let sizes_to_try: Vec<NodeSize> = sizes.iter().map(size).collect();
        let longest = lookups.iter().map(|lookup| lookup.prompt.blocks.len() as u64).max().unwrap_or(0);
        let shape = Shape::of_memory(self.working.shares());
        let mut cluster = Cluster::new(&sizes_to_try, shape, hashes.to_vec(), longest);
        for (number, lookup) in lookups.iter().enumerate() {
            if number == warming {
                cluster.take_counts();
            }
            cluster.play(&lookup.prompt, self.working.way(lookup.node));
        }
        let counts = cluster.take_counts();
        let chunk_tokens = lookups.first().map_or(0, |lookup| lookup.prompt.block_tokens);
        Tried {
            variant: self,
            capacity_chunks: self.times.map_or(distinct, |_| sizes.iter().map(capacity).sum()),
            tokens_hit: counts.tokens_hit,
            tokens_moved: counts.chunks_moved * chunk_tokens,
        }
    }
}

impl Working {
    fn shares(self) -> bool {
        matches!(self, Self::Together | Self::RoutedTogether)
    }

    fn way(self, node: usize) -> NodeChoice {
        match self {
            Self::Apart | Self::Together => NodeChoice::To(node),
            Self::RoutedApart | Self::RoutedTogether => NodeChoice::Cost,
        }
    }
}

impl Numbers {
    /// Numbers a lookup's chunks; `None` if a chunk follows another chunk than in an earlier lookup, since no store could have
    /// both.
    fn lookup(&mut self, node: usize, lookup: &PastLookup) -> Option<Numbered> {
        let parents = || std::iter::once(None).chain(lookup.chunks.iter().copied().map(Some));
        let links = || lookup.chunks.iter().copied().zip(parents());
        let stands = |(chunk, parent)| self.by_name.get(&chunk).is_none_or(|&(_, known)| known == parent);
        let mut own: Vec<u64> = lookup.chunks.to_vec();
        own.sort_unstable();
        own.dedup();
        if own.len() < lookup.chunks.len() || !links().all(stands) {
            return None;
        }
        let blocks = links().map(|(chunk, parent)| self.number(chunk, parent)).collect();
        let block_tokens = u64::from(lookup.chunk_tokens);
        let prompt = Prompt {
            at_ms: lookup.at.0,
            tokens: lookup.prompt_tokens,
            blocks,
            usable: (lookup.prompt_tokens.saturating_sub(1) / block_tokens.max(1)) as usize,
            block_tokens,
        };
        Some(Numbered { node, tokens_found: lookup.tokens_hit, prompt })
    }

    fn number(&mut self, chunk: u64, parent: Option<u64>) -> u32 {
        match self.by_name.entry(chunk) {
            Entry::Occupied(known) => known.get().0,
            Entry::Vacant(vacant) => {
                let number = self.names.len() as u32;
                vacant.insert((number, parent));
                self.names.push(chunk);
                number
            }
        }
    }

    /// A hash for each number.
    fn hashes(&self) -> Vec<ChunkHash> {
        self.names.iter().map(|&name| hash(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use larder_protocol::Fingerprint;

    use super::*;

    fn lookup(at: u64, chunks: &[u64]) -> PastLookup {
        PastLookup {
            at: Millis(at),
            namespace: Fingerprint([1; 32]),
            chunk_tokens: 16,
            prompt_tokens: chunks.len() as u64 * 16 + 1,
            tokens_hit: 16,
            chunks: chunks.into(),
        }
    }

    fn node(capacity_chunks: u64, lookups: Vec<PastLookup>) -> NodePast {
        NodePast { size: NodeSize { policy: PolicyName::Lru, capacity_chunks }, lookups }
    }

    fn tried(played: &Played<Tried>, working: Working, times: Option<f64>) -> Tried {
        let wanted = Variant { policy: None, times, working };
        *played.tried.iter().find(|tried| tried.variant == wanted).unwrap()
    }

    /// Eight prompts of one chunk take turns. Each comes to the two nodes alternately.
    fn two_nodes(capacity_chunks: u64) -> [NodePast; 2] {
        let at_node = |node| {
            let turns = (0..160).filter(move |turn| (turn + turn / 8) % 2 == node);
            turns.map(|turn| lookup(turn, &[100 + turn % 8])).collect()
        };
        [node(capacity_chunks, at_node(0)), node(capacity_chunks, at_node(1))]
    }

    #[test]
    fn nodes_that_read_each_others_chunks_hit_what_either_would_compute_alone() {
        // Each node has room for five of the eight chunks: together they can keep all, while a loop over eight chunks hits
        // nothing at one node.
        let played = play(&two_nodes(5), true).unwrap();
        assert_eq!((played.warming_lookups, played.counted_lookups, played.distinct_chunks), (80, 80, 8));
        assert_eq!((played.tokens_asked, played.tokens_found, played.counted_ms), (80 * 17, 80 * 16, 79));
        assert_eq!(
            played.tried[0].variant,
            Variant { policy: None, times: Some(1.0), working: Working::Together }
        );
        let (together, apart) =
            (tried(&played, Working::Together, Some(1.0)), tried(&played, Working::Apart, Some(1.0)));
        // Copies at readers take some of the room.
        assert!(together.tokens_hit > 80 * 16 / 2 && together.tokens_moved > 0, "{together:?}");
        assert_eq!((apart.tokens_hit, apart.tokens_moved, apart.capacity_chunks), (0, 0, 10));
        assert!(tried(&played, Working::RoutedTogether, Some(1.0)).tokens_hit >= apart.tokens_hit);
        let alone = play(&two_nodes(5), false).unwrap();
        assert_eq!(alone.tried[0].variant.working, Working::Apart);
        assert_eq!(tried(&alone, Working::Apart, Some(1.0)), apart);
        assert_eq!(tried(&alone, Working::Apart, Some(2.0)).tokens_hit, 80 * 16, "with twice the memory");
        assert_eq!(tried(&alone, Working::Apart, None).tokens_hit, 80 * 16);
    }

    #[test]
    fn one_node_hits_what_its_own_play_says() {
        let lookups: Vec<PastLookup> = (0..80).map(|at| lookup(at, &[100 + at % 8])).collect();
        let own = super::super::play(lookups.clone(), 4, PolicyName::Lru).unwrap();
        let played = play(&[node(4, lookups)], true).unwrap();
        for times in [Some(0.5), Some(1.0), Some(2.0), None] {
            let of_own = own
                .tried
                .iter()
                .find(|tried| tried.variant == super::super::Variant { policy: PolicyName::Lru, times });
            let of_cluster = tried(&played, Working::Together, times);
            assert_eq!(Some(of_cluster.tokens_hit), of_own.map(|tried| tried.tokens_hit), "{times:?}");
            assert_eq!(of_cluster.tokens_moved, 0);
        }
        assert!(
            played.tried.iter().all(|tried| tried.variant.working == Working::Together),
            "there is no other node"
        );
    }

    #[test]
    fn lookups_of_nodes_that_contradict_each_other_or_have_other_chunks_are_left_out() {
        let other_size = PastLookup { chunk_tokens: 32, ..lookup(5, &[9]) };
        let one = node(4, vec![lookup(1, &[1, 2]), lookup(3, &[1, 1]), other_size]);
        let other = node(4, vec![lookup(2, &[3, 2]), lookup(4, &[1, 2])]);
        let played = play(&[one, other], true).unwrap();
        assert_eq!((played.warming_lookups, played.counted_lookups, played.left_out_lookups), (1, 1, 3));
        let present = tried(&played, Working::Together, Some(1.0));
        assert_eq!((present.tokens_hit, present.tokens_moved), (32, 32), "the second is at the other node");
        assert!(play(&[], true).is_none() && play(&[node(4, Vec::new())], false).is_none());
    }
}
