//! Token hit rates without a shared cache: each node for itself, and behind a router that knows what each node has.
//!
//! Both are models with the same chunks per node, the same requests and the same arrivals as the cluster.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::time::Duration;

use super::Load;
use super::arrivals::Arrivals;
use super::blocks::{Blocks, Id, IdHasher};
use super::trace::CHUNK_TOKENS;

/// The share of all tokens that nodes find in their own chunks. Nodes are asked in turn.
pub(super) fn local(load: &Load) -> f64 {
    let mut nodes: Vec<Blocks> = (0..load.playing()).map(|_| Blocks::new(load.chunks)).collect();
    let mut rate = Rate::default();
    for arrival in Arrivals::new(load) {
        let node = &mut nodes[arrival.node];
        if arrival.at >= Duration::from_secs(load.warm_up) {
            rate.add(node.prefix(&arrival.blocks), arrival.tokens);
        }
        use_all(node, &arrival.blocks, arrival.at, |_, _| {});
    }
    rate.rate()
}

/// The share of all tokens that nodes find in their own chunks if a router knows the chunks of every node: each request goes to
/// the node with the least to compute, including the node's load of the last half minute.
pub(super) fn routed(load: &Load) -> f64 {
    let mut nodes: Vec<Blocks> = (0..load.playing()).map(|_| Blocks::new(load.chunks)).collect();
    let mut index: HashMap<Id, Vec<u16>, BuildHasherDefault<IdHasher>> = HashMap::default();
    let mut backlogs = vec![(0.0, Duration::ZERO); nodes.len()];
    let mut random = fastrand::Rng::with_seed(load.seed ^ 0x726f_7574);
    let mut rate = Rate::default();
    for arrival in Arrivals::new(load) {
        let blocks = &arrival.blocks;
        let known = blocks.iter().take_while(|(id, _)| index.contains_key(id)).count();
        let mut candidates = vec![arrival.node, random.usize(..nodes.len())];
        for depth in [known, known / 2, 1] {
            let holders = depth.checked_sub(1).and_then(|last| index.get(&blocks.get(last)?.0));
            candidates.extend(holders.into_iter().flatten().take(CANDIDATES).map(|&node| usize::from(node)));
        }
        let cost = |&node: &usize| {
            let (work, then): (f64, Duration) = backlogs[node];
            let left = work * 0.5_f64.powf((arrival.at - then).as_secs_f64() / HALF_LIFE_SECONDS);
            left + (blocks.len() - nodes[node].prefix(blocks)) as f64
        };
        let best = candidates.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.cmp(b)));
        let Some(node) = best else { continue };
        let work = cost(&node);
        backlogs[node] = (work, arrival.at);
        if arrival.at >= Duration::from_secs(load.warm_up) {
            rate.add(nodes[node].prefix(blocks), arrival.tokens);
        }
        use_all(&mut nodes[node], blocks, arrival.at, |id, is_there| {
            let holders = index.entry(id).or_default();
            if is_there {
                holders.push(node as u16);
            } else {
                holders.retain(|&holder| usize::from(holder) != node);
                if holders.is_empty() {
                    index.remove(&id);
                }
            }
        });
    }
    rate.rate()
}

/// Uses all chunks of a prompt, the last first, so that no chunk is evicted before the chunks after it.
fn use_all(node: &mut Blocks, blocks: &[(Id, Id)], at: Duration, mut changed: impl FnMut(Id, bool)) {
    let now_ms = at.as_millis() as u64;
    for &(id, anchor) in blocks.iter().rev() {
        if node.touch(id, now_ms).is_none() {
            let gone = node.insert(id, anchor, now_ms);
            changed(id, true);
            if let Some((gone, _)) = gone {
                changed(gone, false);
            }
        }
    }
}

/// Found tokens, of all requested tokens.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Rate {
    found: u64,
    asked: u64,
}

impl Rate {
    pub(super) fn add(&mut self, chunks: usize, tokens: u64) {
        self.found += chunks as u64 * CHUNK_TOKENS;
        self.asked += tokens;
    }

    pub(super) fn rate(&self) -> f64 {
        self.found as f64 / self.asked.max(1) as f64
    }
}

/// Time after which half of a node's work is done.
const HALF_LIFE_SECONDS: f64 = 30.0;

/// Holders of one chunk that the router compares.
const CANDIDATES: usize = 8;
