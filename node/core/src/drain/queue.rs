//! The chunks that a drain has yet to move, in the order of their worth.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use larder_protocol::Fingerprint;
use larder_protocol::drain::TakeChunk;
use larder_protocol::table::NodeNumber;

use super::takers::Takers;
use crate::store::Leaving;
use crate::store::ids::ChunkId;

/// The chunks that wait.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Chunks to offer, the most worth last.
    next: Vec<Candidate>,
    /// Chunks that no taker would keep at present, by namespace; one of the most worth first. They hold up no other namespace.
    aside: BTreeMap<Fingerprint, Vec<Candidate>>,
    /// Chunks that need not be considered again.
    seen: HashSet<ChunkId>,
    /// Chunks among them that stay because another node holds them, by that node.
    elsewhere: BTreeMap<NodeNumber, Vec<ChunkId>>,
}

/// A chunk that may have to move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    pub(super) id: ChunkId,
    pub(super) rank_ppm: u32,
    /// How often it was refused.
    pub(super) refusals: u8,
}

/// Chunks of one namespace that are offered together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) fingerprint: Fingerprint,
    pub(super) chunks: Vec<(Candidate, TakeChunk, u64)>,
}

impl Queue {
    /// Adds the chunks that were not added yet. The most worth come first; returns their number.
    pub(super) fn extend(&mut self, ranked: impl Iterator<Item = Candidate>) -> u64 {
        let mut new: Vec<Candidate> = ranked.filter(|candidate| self.seen.insert(candidate.id)).collect();
        new.reverse();
        let added = new.len() as u64;
        // The chunks that are here already come first.
        self.next.splice(..0, new);
        added
    }

    /// Adds a chunk that was not kept: it is offered again next.
    pub(super) fn again(&mut self, candidate: Candidate) {
        self.next.push(candidate);
    }

    /// Notes that a chunk stays because this node holds it too.
    pub(super) fn is_held_by(&mut self, node: NodeNumber, chunk: ChunkId) {
        self.elsewhere.entry(node).or_default().push(chunk);
    }

    /// Forgets the chunks that stayed because of nodes that do not `stay`, so that they are added anew. Returns their number.
    pub(super) fn forget_held_by_others(&mut self, stay: &BTreeSet<NodeNumber>) -> u64 {
        let before = self.seen.len();
        self.elsewhere.retain(|&node, chunks| {
            let stays = stay.contains(&node);
            chunks.iter().filter(|_| !stays).for_each(|chunk| _ = self.seen.remove(chunk));
            stays
        });
        (before - self.seen.len()) as u64
    }

    /// Whether chunks are left for which no taker has room.
    pub(super) fn is_stuck(&self) -> bool {
        !self.aside.is_empty()
    }

    /// Gives up the chunks that wait, and returns their number.
    pub(super) fn clear(&mut self) -> u64 {
        let (next, aside) = (std::mem::take(&mut self.next), std::mem::take(&mut self.aside));
        (next.len() + aside.values().map(Vec::len).sum::<usize>()) as u64
    }

    /// Takes the next batch: the chunks of most worth that a taker would keep. `None` if there are none. Also counts the chunks
    /// that a tier below keeps.
    pub(super) fn batch(
        &mut self,
        takers: &Takers,
        leaving: impl Fn(ChunkId) -> Leaving,
    ) -> (Option<Batch>, u64) {
        self.call_back(takers);
        let (mut batch, mut others, mut bytes) = (None::<Batch>, Vec::new(), 0);
        let (mut kept_below, mut limits) = (0, HashMap::new());
        while let Some(candidate) = self.next.pop() {
            let Leaving::Moves { fingerprint, chunk, bytes: more } = leaving(candidate.id) else {
                kept_below += u64::from(leaving(candidate.id) == Leaving::KeptBelow);
                continue;
            };
            let most = *limits.entry(fingerprint).or_insert_with(|| takers.rank_limit_ppm(&fingerprint));
            if batch.is_none() && candidate.rank_ppm >= most {
                self.put_aside(fingerprint, candidate);
                continue;
            }
            let batch = batch.get_or_insert_with(|| Batch { fingerprint, chunks: Vec::new() });
            if batch.fingerprint != fingerprint {
                others.push(candidate);
            } else if batch.is_full(bytes + more) || candidate.rank_ppm >= most {
                self.next.push(candidate);
                break;
            } else {
                bytes += more;
                let take = TakeChunk { chunk, rank_ppm: candidate.rank_ppm };
                batch.chunks.push((candidate, take, more));
            }
            if others.len() >= LOOK_AHEAD {
                break;
            }
        }
        self.next.extend(others.into_iter().rev());
        (batch, kept_below)
    }

    fn put_aside(&mut self, namespace: Fingerprint, candidate: Candidate) {
        let aside = self.aside.entry(namespace).or_default();
        let at = aside.len();
        aside.push(candidate);
        if candidate.rank_ppm < aside[0].rank_ppm {
            aside.swap(0, at);
        }
    }

    /// Queues the chunks of namespaces again for which a taker has room now.
    fn call_back(&mut self, takers: &Takers) {
        let has_room = |(namespace, aside): &(&Fingerprint, &Vec<Candidate>)| {
            aside.first().is_some_and(|first| first.rank_ppm < takers.rank_limit_ppm(namespace))
        };
        let names: Vec<Fingerprint> = self.aside.iter().filter(has_room).map(|(&name, _)| name).collect();
        let back: Vec<Candidate> =
            names.iter().filter_map(|name| self.aside.remove(name)).flatten().collect();
        if !back.is_empty() {
            self.next.extend(back);
            self.next.sort_by_key(|candidate| Reverse(candidate.rank_ppm));
        }
    }
}

impl Batch {
    /// Whether no chunk more fits, with which the batch would have so many bytes.
    fn is_full(&self, bytes: u64) -> bool {
        self.chunks.len() >= BATCH_CHUNKS || (bytes > BATCH_BYTES && !self.chunks.is_empty())
    }
}

/// Chunks of a batch: one question to the directory, and enough to keep a connection busy.
const BATCH_CHUNKS: usize = 64;

/// Bytes of a batch; a single chunk may be larger.
const BATCH_BYTES: u64 = 4 << 20;

/// Chunks of other namespaces that are passed over while a batch fills.
const LOOK_AHEAD: usize = 256;

#[cfg(test)]
mod tests {
    use larder_protocol::drain::Taken;
    use larder_protocol::table::Holder;
    use larder_protocol::{ChunkHash, ChunkRef};

    use super::*;
    use crate::store::ids::ChunkNumber;

    const NAMESPACE: Fingerprint = Fingerprint([1; 32]);

    #[test]
    fn chunks_that_nobody_had_room_for_are_offered_when_there_is_room_for_the_best_of_them() {
        let taker = Holder { node: NodeNumber(2), device: 0 };
        let mut takers = Takers::default();
        takers.are(&[taker]);
        let mut queue = Queue::default();
        // The better chunk was refused before: it comes later.
        for (number, rank_ppm) in [(1, 100_000), (2, 500_000)] {
            let id = ChunkId::new(ChunkNumber::at(number), 0);
            queue.again(Candidate { id, rank_ppm, refusals: 0 });
        }
        let hash = ChunkHash([0; 32]);
        let chunk = ChunkRef { hash, parent: hash, index: 0, anchor: hash };
        let mut batch = |rank_limit_ppm| {
            takers.answered(taker, &Taken { rank_limit_ppm, ..Taken::default() });
            let leaving = |_| Leaving::Moves { fingerprint: NAMESPACE, chunk, bytes: 1 };
            let batch = queue.batch(&takers, leaving).0;
            batch.map(|batch| batch.chunks.iter().map(|(.., take, _)| take.rank_ppm).collect::<Vec<_>>())
        };
        assert_eq!(batch(50_000), None);
        assert_eq!(batch(200_000), Some(vec![100_000]));
        assert_eq!(batch(600_000), Some(vec![500_000]));
    }
}
