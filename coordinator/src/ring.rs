//! The ring: chooses the home of each partition.
//!
//! A consistent-hash ring (with a hash function fixed by a golden test) proposes homes. A bound on every node's load and the
//! table before decide. A partition moves only if its home is gone or has too much, or if a node has too little. Joining and
//! leaving move no more partitions than they must.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use consistent_hash::{Node, RingHash, StaticHashRing};
use larder_protocol::table::{NodeNumber, PARTITIONS};
use larder_protocol::v1;
use xxhash_rust::xxh3::Xxh3;

/// A node and its share, relative to the others'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weighted {
    /// The node.
    pub node: NodeNumber,
    /// Its weight; 0 counts as 1.
    pub weight: u64,
}

/// Bounds weights, so that no node becomes home to nearly all partitions: neither by a lie nor by its size.
pub(crate) fn bound(nodes: &mut [Weighted]) {
    let mut weights: Vec<u64> = nodes.iter().map(|node| node.weight).collect();
    weights.sort_unstable();
    let Some(&median) = weights.get(weights.len().saturating_sub(1) / 2) else { return };
    nodes.iter_mut().for_each(|node| node.weight = node.weight.min(median.saturating_mul(MOST_WEIGHT)));
}

/// The homes of all partitions; none if there are no nodes. `previous` has the homes so far, or is empty.
///
/// No home has more than its share by weight, rounded up, or a tenth more, whichever is more.
pub fn assign(previous: &[NodeNumber], nodes: &[Weighted]) -> Vec<NodeNumber> {
    let mut homes = assign_of(PARTITIONS, previous, nodes);
    set_apart(&mut homes);
    homes
}

/// As [`assign`], for a cluster with nodes of version 1: all parts of a partition of version 1 have one home.
pub fn assign_for_v1(previous: &[NodeNumber], nodes: &[Weighted]) -> Vec<NodeNumber> {
    v1::split(&assign_of(v1::PARTITIONS_BEFORE as u16, &v1::merge(previous), nodes))
}

/// Swaps two partitions if the homes look as if there were still nodes of version 1, so that nobody asks for rows of version 1's
/// partitions ([`v1::is_merged`]).
fn set_apart(homes: &mut [NodeNumber]) {
    let last = homes.len().saturating_sub(1);
    if v1::is_merged(homes)
        && let Some(other) = homes.iter().position(|home| *home != homes[last])
    {
        homes.swap(other, last);
    }
}

fn assign_of(partitions: u16, previous: &[NodeNumber], nodes: &[Weighted]) -> Vec<NodeNumber> {
    if nodes.is_empty() {
        return Vec::new();
    }
    let mut plan = Plan::new(partitions, nodes);
    let ring = ring(nodes);
    let mut homes: Vec<Option<NodeNumber>> = vec![None; usize::from(partitions)];
    for (home, &before) in homes.iter_mut().zip(previous) {
        *home = Some(before).filter(|&node| plan.take(node));
    }
    for (partition, home) in homes.iter_mut().enumerate() {
        if home.is_none() {
            let candidates = || ring.calc_candidates(&(partition as u16)).map(|node| node.key);
            let lacking = candidates().find(|&node| plan.lacks(node) >= 1.0);
            *home = lacking.into_iter().chain(candidates()).find(|&node| plan.take(node));
        }
    }
    let mut homes: Vec<NodeNumber> = homes.into_iter().flatten().collect();
    debug_assert_eq!(homes.len(), usize::from(partitions), "the bounds add up to all partitions");
    fill_up(&mut plan, &ring, &mut homes);
    homes
}

/// Gives partitions of the nodes that are most above their share to the nodes below theirs, first the partitions that the ring
/// would give them.
fn fill_up(plan: &mut Plan, ring: &Ring<'_>, homes: &mut [NodeNumber]) {
    if plan.neediest().is_none() {
        return;
    }
    // The partitions of each home, and by home the partitions that the ring would give another node. The first partition is
    // last.
    let mut all: BTreeMap<NodeNumber, Vec<usize>> = BTreeMap::new();
    let mut wanted: BTreeMap<(NodeNumber, NodeNumber), Vec<usize>> = BTreeMap::new();
    for (partition, &home) in homes.iter().enumerate().rev() {
        all.entry(home).or_default().push(partition);
        if let Some(favourite) = ring.calc_candidates(&(partition as u16)).next() {
            wanted.entry((home, favourite.key)).or_default().push(partition);
        }
    }
    while let (Some(taker), Some(giver)) = (plan.neediest(), plan.richest()) {
        let favourites = wanted.get_mut(&(giver, taker));
        let mut of_giver = favourites.into_iter().chain(all.get_mut(&giver));
        // Some partitions were given away already.
        let next = |partitions: &mut Vec<usize>| loop {
            match partitions.pop() {
                Some(partition) if homes[partition] == giver => return Some(partition),
                Some(_) => {}
                None => return None,
            }
        };
        let Some(partition) = of_giver.find_map(next) else { return };
        homes[partition] = taker;
        plan.give(giver, taker);
    }
}

type Ring<'a> = StaticHashRing<'a, NodeNumber, (), FixedHash>;

fn ring(nodes: &[Weighted]) -> Ring<'_> {
    let mean = nodes.iter().map(|node| node.weight.max(1) as f64).sum::<f64>() / nodes.len() as f64;
    let points = |weight: u64| (weight.max(1) as f64 / mean * POINTS).clamp(1.0, MOST_POINTS) as usize;
    let nodes = nodes.iter().map(|node| Node::new(node.node).quantity(points(node.weight)));
    StaticHashRing::new(FixedHash, nodes)
}

/// The number of partitions that each node has and may have.
struct Plan(BTreeMap<NodeNumber, Load>);

struct Load {
    share: f64,
    bound: u32,
    has: u32,
}

impl Load {
    fn lacks(&self) -> f64 {
        self.share.floor() - f64::from(self.has)
    }
}

impl Plan {
    fn new(partitions: u16, nodes: &[Weighted]) -> Self {
        let total: f64 = nodes.iter().map(|node| node.weight.max(1) as f64).sum();
        let load = |node: &Weighted| {
            let share = f64::from(partitions) * node.weight.max(1) as f64 / total;
            let bound = share.ceil().max((share * MOST_ABOVE_SHARE).floor()) as u32;
            (node.node, Load { share, bound, has: 0 })
        };
        Self(nodes.iter().map(load).collect())
    }

    /// Gives a node one more partition, if it may have more.
    fn take(&mut self, node: NodeNumber) -> bool {
        let Some(load) = self.0.get_mut(&node).filter(|load| load.has < load.bound) else { return false };
        load.has += 1;
        true
    }

    /// The whole partitions that a node lacks to its share.
    fn lacks(&self, node: NodeNumber) -> f64 {
        self.0.get(&node).map_or(0.0, Load::lacks)
    }

    /// The node that lacks most of its share, if it lacks a whole partition.
    fn neediest(&self) -> Option<NodeNumber> {
        let most = self.0.iter().max_by(|a, b| a.1.lacks().total_cmp(&b.1.lacks()).then(b.0.cmp(a.0)))?;
        (most.1.lacks() >= 1.0).then_some(*most.0)
    }

    /// The node that is most above its share.
    fn richest(&self) -> Option<NodeNumber> {
        let above = |load: &Load| f64::from(load.has) - load.share;
        let most = self.0.iter().max_by(|a, b| above(a.1).total_cmp(&above(b.1)).then(b.0.cmp(a.0)))?;
        (above(most.1) > 0.0).then_some(*most.0)
    }

    fn give(&mut self, giver: NodeNumber, taker: NodeNumber) {
        if let Some(load) = self.0.get_mut(&giver) {
            load.has -= 1;
        }
        if let Some(load) = self.0.get_mut(&taker) {
            load.has += 1;
        }
    }
}

/// The ring's hash: xxh3-64 over little-endian numbers, the same on every machine and in every version.
#[derive(Debug, Clone, Copy)]
struct FixedHash;

impl RingHash for FixedHash {
    fn hash_item<T: Hash>(&self, item: &T) -> u64 {
        let mut hasher = FixedHasher(Xxh3::new());
        item.hash(&mut hasher);
        hasher.finish()
    }

    fn hash_vnode<K: Hash>(&self, node_key: &K, vnode_seq: usize) -> u64 {
        self.hash_item(&(node_key, vnode_seq as u64))
    }
}

struct FixedHasher(Xxh3);

impl Hasher for FixedHasher {
    fn finish(&self) -> u64 {
        self.0.digest()
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn write_u16(&mut self, number: u16) {
        self.write(&number.to_le_bytes());
    }

    fn write_u64(&mut self, number: u64) {
        self.write(&number.to_le_bytes());
    }
}

/// A node counts as at most this many nodes of median weight.
const MOST_WEIGHT: u64 = 4;

/// Points on the ring of a node of mean weight.
const POINTS: f64 = 128.0;
const MOST_POINTS: f64 = 4_096.0;

/// A node above this multiple of its share has to give partitions away.
const MOST_ABOVE_SHARE: f64 = 1.1;

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: u16) -> Vec<Weighted> {
        (1..=count).map(|number| Weighted { node: NodeNumber(number), weight: 1 }).collect()
    }

    fn loads(homes: &[NodeNumber]) -> BTreeMap<NodeNumber, usize> {
        let mut loads = BTreeMap::new();
        homes.iter().for_each(|&home| *loads.entry(home).or_default() += 1);
        loads
    }

    fn moved(before: &[NodeNumber], after: &[NodeNumber]) -> usize {
        before.iter().zip(after).filter(|(before, after)| before != after).count()
    }

    fn assert_balanced(homes: &[NodeNumber], nodes: usize) {
        let most = *loads(homes).values().max().unwrap() as f64;
        let mean = f64::from(PARTITIONS) / nodes as f64;
        assert!(most / mean <= 1.15 || most <= mean.ceil(), "{nodes} nodes: {most} of {mean}");
    }

    #[test]
    fn homes_are_what_they_always_were() {
        let homes = assign(&[], &nodes(5));
        let first: Vec<u16> = homes.iter().take(16).map(|home| home.0).collect();
        assert_eq!(first, GOLDEN);
    }

    #[test]
    fn no_home_has_much_more_than_its_share() {
        for count in [1, 2, 3, 4, 16, 100, 256, 1_000, 1_024, 4_096] {
            let homes = assign(&[], &nodes(count));
            assert_eq!(homes.len(), usize::from(PARTITIONS));
            assert_balanced(&homes, usize::from(count));
        }
    }

    #[test]
    fn a_join_or_leave_moves_what_it_must_and_no_more() {
        for count in [16_u16, 256, 1_024] {
            let before = assign(&[], &nodes(count));
            let joined = assign(&before, &nodes(count + 1));
            let share = f64::from(PARTITIONS) / f64::from(count + 1);
            assert!((moved(&before, &joined) as f64) <= share.ceil() * 1.1, "{count} nodes: join");
            assert!((moved(&before, &joined) as f64) >= share.floor() * 0.9, "{count} nodes: join");
            assert_balanced(&joined, usize::from(count) + 1);

            let gone = NodeNumber(count / 2);
            let left: Vec<Weighted> = nodes(count).into_iter().filter(|node| node.node != gone).collect();
            let had = loads(&before)[&gone] as f64;
            let after = assign(&before, &left);
            let moves = moved(&before, &after) as f64;
            assert!((had..=had * 1.1).contains(&moves), "{count} nodes: leave moved {moves} of {had}");
            assert_balanced(&after, usize::from(count) - 1);
        }
    }

    #[test]
    fn each_node_gets_partitions_in_proportion_to_its_weight() {
        let nodes = [1, 2, 5].map(|weight| Weighted { node: NodeNumber(weight as u16), weight });
        let loads = loads(&assign(&[], &nodes));
        for node in nodes {
            let share = f64::from(PARTITIONS) / 8.0 * node.weight as f64;
            let has = loads[&node.node] as f64;
            assert!((share * 0.89..=share * 1.11).contains(&has), "{node:?} has {has}, not {share}");
        }
    }

    #[test]
    fn any_sequence_of_joins_and_leaves_keeps_the_balance() {
        let seed = 42;
        let mut random = fastrand::Rng::with_seed(seed);
        let mut present: Vec<Weighted> = nodes(8);
        let mut homes = assign(&[], &present);
        for step in 0..60 {
            if present.len() > 2 && random.bool() {
                present.swap_remove(random.usize(..present.len()));
            } else {
                present.push(Weighted { node: NodeNumber(100 + step), weight: 1 });
            }
            let after = assign(&homes, &present);
            assert_eq!(after, assign(&homes, &present), "seed {seed}: the same again");
            assert!(after.iter().all(|home| present.iter().any(|node| node.node == *home)), "seed {seed}");
            assert_balanced(&after, present.len());
            homes = after;
        }
    }

    #[test]
    fn with_nodes_of_version_1_the_parts_of_their_partitions_stay_together_and_the_load_is_even() {
        let homes = assign_for_v1(&[], &nodes(5));
        assert!(v1::is_merged(&homes) && homes.len() == usize::from(PARTITIONS));
        assert_eq!(v1::merge(&homes)[..16], GOLDEN.map(NodeNumber));
        assert_balanced(&homes, 5);
        let fine = assign(&homes, &nodes(5));
        assert!(!v1::is_merged(&fine), "without such nodes everybody can see that");
        assert_eq!(moved(&homes, &fine), 2);
        assert_eq!(assign(&fine, &nodes(5)), fine);
        let fine = assign(&homes, &nodes(6));
        let merged = assign_for_v1(&fine, &nodes(6));
        assert!(v1::is_merged(&merged));
        assert_balanced(&merged, 6);
        assert!(assign_for_v1(&homes, &[]).is_empty());
    }

    #[test]
    fn without_nodes_there_are_no_homes() {
        assert!(assign(&assign(&[], &nodes(2)), &[]).is_empty());
    }

    const GOLDEN: [u16; 16] = [2, 5, 4, 3, 1, 1, 2, 2, 5, 5, 1, 2, 5, 4, 3, 5];
}
