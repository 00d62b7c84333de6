//! The chunks of a node: names in the order of their use, without bytes, in place of the real store.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use larder_core::placement::{Pressure, Saves, Stake, Worth, copy_goes_first};
use larder_protocol::{ChunkHash, ChunkRef};
use xxhash_rust::xxh3::xxh3_64;

/// The name of a chunk: the copy of the traces, and the number of the block in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id(pub(super) u64);

/// The chunks of a node. The least recently used chunk is evicted first.
#[derive(Debug)]
pub(super) struct Blocks {
    places: HashMap<Id, u32, BuildHasherDefault<IdHasher>>,
    chunks: Vec<Chunk>,
    newest: u32,
    oldest: u32,
    free: Vec<u32>,
    capacity: usize,
    /// Copies of chunks that others have, with the times of their making and their last use, least recently used first.
    copies: VecDeque<(Id, u64, u64)>,
    pressure: Pressure,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    id: Id,
    anchor: Id,
    newer: u32,
    older: u32,
    reads: u32,
    used_ms: u64,
    is_copy: bool,
}

impl Id {
    pub(super) fn of(copy: u32, block: u32) -> Self {
        Self(u64::from(copy) << 32 | u64::from(block))
    }

    /// A chunk that no request asks for.
    pub(super) fn filler(node: usize, number: u64) -> Self {
        Self(1 << 63 | (node as u64) << 32 | number)
    }

    pub(super) fn hash(self) -> ChunkHash {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&xxh3_64(&self.0.to_le_bytes()).to_le_bytes());
        hash[8..16].copy_from_slice(&self.0.to_le_bytes());
        ChunkHash(hash)
    }

    /// The chunk for the directory, where parent and index do not count.
    pub(super) fn chunk(self, anchor: Self) -> ChunkRef {
        ChunkRef { hash: self.hash(), parent: ChunkHash([0; 32]), index: 0, anchor: anchor.hash() }
    }
}

impl Blocks {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            places: HashMap::default(),
            chunks: Vec::new(),
            newest: NOTHING,
            oldest: NOTHING,
            free: Vec::new(),
            capacity,
            copies: VecDeque::new(),
            pressure: Pressure::default(),
        }
    }

    pub(super) fn has(&self, id: Id) -> bool {
        self.places.contains_key(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Number of the first chunks of a prompt that are here.
    pub(super) fn prefix(&self, blocks: &[(Id, Id)]) -> usize {
        blocks.iter().take_while(|(id, _)| self.has(*id)).count()
    }

    /// How long an unused chunk stays.
    pub(super) fn keeps_ms(&self, now_ms: u64) -> u64 {
        self.pressure.keeps_ms(now_ms).unwrap_or(u64::MAX)
    }

    /// The worth of the next victim; `None` if nothing is evicted.
    pub(super) fn least(&self, now_ms: u64) -> Option<Worth> {
        if self.len() < self.capacity { None } else { self.pressure.least(now_ms) }
    }

    /// Uses a chunk. Returns the number of its reads so far, including this one.
    pub(super) fn touch(&mut self, id: Id, now_ms: u64) -> Option<u32> {
        let at = *self.places.get(&id)?;
        self.unlink(at);
        self.link(at);
        let chunk = &mut self.chunks[at as usize];
        chunk.reads += 1;
        chunk.used_ms = now_ms;
        Some(chunk.reads)
    }

    /// Inserts a new chunk. Returns the chunk that is evicted for it, with its anchor.
    pub(super) fn insert(&mut self, id: Id, anchor: Id, now_ms: u64) -> Option<(Id, Id)> {
        let victim = (self.len() >= self.capacity).then(|| self.victim(now_ms));
        let gone = victim.map(|at| self.chunks[at as usize]);
        if let Some(gone) = gone {
            if !gone.is_copy {
                let idle_ms = now_ms.saturating_sub(gone.used_ms);
                self.pressure.evicted(STAKE, Saves::Prefill, idle_ms, now_ms);
            }
            self.remove(gone.id);
        }
        let (used_ms, is_copy) = (now_ms, false);
        let chunk = Chunk { id, anchor, newer: NOTHING, older: NOTHING, reads: 0, used_ms, is_copy };
        let at = self.free.pop().unwrap_or(self.chunks.len() as u32);
        match self.chunks.get_mut(at as usize) {
            Some(place) => *place = chunk,
            None => self.chunks.push(chunk),
        }
        self.places.insert(id, at);
        self.link(at);
        gone.map(|gone| (gone.id, gone.anchor))
    }

    /// Notes that a chunk is now a copy of another node's chunk.
    pub(super) fn is_copy(&mut self, id: Id, now_ms: u64) {
        if let Some(&at) = self.places.get(&id)
            && !self.chunks[at as usize].is_copy
        {
            self.chunks[at as usize].is_copy = true;
            self.copies.push_back((id, now_ms, now_ms));
        }
    }

    /// The next victim: a copy, unless its transfers are worth more than the least recently used chunk.
    fn victim(&mut self, now_ms: u64) -> u32 {
        let keeps_ms = self.keeps_ms(now_ms);
        for _ in 0..self.copies.len().min(MOST_LOOKED_AT) {
            let Some((id, made_ms, known_ms)) = self.copies.pop_front() else { break };
            let at = self.places.get(&id).copied().filter(|&at| self.chunks[at as usize].is_copy);
            let Some(at) = at else { continue };
            let chunk = &mut self.chunks[at as usize];
            if now_ms.saturating_sub(made_ms) > keeps_ms {
                chunk.is_copy = false;
            } else if chunk.used_ms > known_ms {
                self.copies.push_back((id, made_ms, chunk.used_ms));
            } else {
                let worth = STAKE.worth(Saves::Transfer, now_ms.saturating_sub(chunk.used_ms));
                if copy_goes_first(worth, self.pressure.least(now_ms)) {
                    return at;
                }
                self.copies.push_front((id, made_ms, known_ms));
                break;
            }
        }
        self.oldest
    }

    /// Removes a chunk. Returns its anchor.
    pub(super) fn remove(&mut self, id: Id) -> Option<Id> {
        let at = self.places.remove(&id)?;
        self.unlink(at);
        self.free.push(at);
        Some(self.chunks[at as usize].anchor)
    }

    /// Every chunk with its anchor.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, Id)> {
        let mut at = self.oldest;
        std::iter::from_fn(move || {
            let chunk = self.chunks.get(at as usize)?;
            at = chunk.newer;
            Some((chunk.id, chunk.anchor))
        })
    }

    fn unlink(&mut self, at: u32) {
        let Chunk { newer, older, .. } = self.chunks[at as usize];
        match self.chunks.get_mut(newer as usize) {
            Some(chunk) => chunk.older = older,
            None => self.newest = older,
        }
        match self.chunks.get_mut(older as usize) {
            Some(chunk) => chunk.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link(&mut self, at: u32) {
        let before = self.newest;
        self.chunks[at as usize].older = before;
        self.chunks[at as usize].newer = NOTHING;
        match self.chunks.get_mut(before as usize) {
            Some(chunk) => chunk.newer = at,
            None => self.oldest = at,
        }
        self.newest = at;
    }
}

/// A hash for names, which no attacker chooses.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    fn write_u64(&mut self, id: u64) {
        let spread = u128::from(id ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f_u128;
        self.0 = (spread >> 64) as u64 ^ spread as u64;
    }
}

/// The stake of every chunk: all chunks are of one model.
pub(super) const STAKE: Stake = Stake { tokens: 512, bytes: 16 << 20 };

/// Copies that one search for a victim checks, as in the real store.
const MOST_LOOKED_AT: usize = 8;

/// The place of no chunk.
const NOTHING: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_that_nobody_used_for_longest_goes_first() {
        let [a, b, c] = [1, 2, 3].map(|block| Id::of(0, block));
        let mut blocks = Blocks::new(2);
        assert_eq!(blocks.insert(a, a, 0), None);
        assert_eq!(blocks.insert(b, a, 0), None);
        assert_eq!(blocks.touch(a, 1), Some(1));
        assert_eq!(blocks.insert(c, c, 2), Some((b, a)));
        assert_eq!(blocks.iter().map(|(id, _)| id).collect::<Vec<_>>(), [a, c]);
        assert_eq!(blocks.remove(a), Some(a));
        assert_eq!((blocks.remove(a), blocks.touch(a, 3), blocks.len()), (None, None, 1));
        assert_eq!(blocks.insert(b, b, 3), None);
        assert_eq!(blocks.insert(a, b, 4), Some((c, c)));
    }

    #[test]
    fn a_copy_that_nobody_reads_goes_before_an_older_only_copy() {
        let [a, b, c, d] = [1, 2, 3, 4].map(|block| Id::of(0, block));
        let mut blocks = Blocks::new(2);
        blocks.insert(a, a, 0);
        blocks.insert(b, b, 1_000);
        blocks.is_copy(b, 1_000);
        assert_eq!(blocks.insert(c, c, 2_000), Some((b, b)));
        assert_eq!(blocks.insert(d, d, 3_000), Some((a, a)));
    }

    #[test]
    fn two_chunks_have_two_hashes() {
        let id = Id::of(7, 9);
        assert_ne!(id.chunk(id).hash.short(), Id::of(9, 7).chunk(id).hash.short());
    }
}
