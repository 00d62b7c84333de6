//! What holds a node's chunks: names in the order of their use, without bytes, in place of the real store.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use larder_protocol::{ChunkHash, ChunkRef};
use xxhash_rust::xxh3::xxh3_64;

/// The name of a chunk: the copy of the traces, and the number of the block in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id(pub(super) u64);

/// The chunks of a node. The chunk that nobody used for longest goes first.
#[derive(Debug)]
pub(super) struct Blocks {
    places: HashMap<Id, u32, BuildHasherDefault<IdHasher>>,
    chunks: Vec<Chunk>,
    newest: u32,
    oldest: u32,
    free: Vec<u32>,
    capacity: usize,
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    id: Id,
    anchor: Id,
    newer: u32,
    older: u32,
    reads: u32,
}

impl Id {
    pub(super) fn of(copy: u32, block: u32) -> Self {
        Self(u64::from(copy) << 32 | u64::from(block))
    }

    /// A chunk that no request asks for.
    pub(super) fn filler(node: usize, number: u64) -> Self {
        Self(1 << 63 | (node as u64) << 32 | number)
    }

    fn hash(self) -> ChunkHash {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&xxh3_64(&self.0.to_le_bytes()).to_le_bytes());
        hash[8..16].copy_from_slice(&self.0.to_le_bytes());
        ChunkHash(hash)
    }

    /// The chunk of this hash.
    pub(super) fn named(hash: &ChunkHash) -> Self {
        let mut id = [0; 8];
        id.copy_from_slice(&hash.0[8..16]);
        Self(u64::from_le_bytes(id))
    }

    /// The chunk, as the directory knows it: neither parent nor index count there.
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
        }
    }

    pub(super) fn has(&self, id: Id) -> bool {
        self.places.contains_key(&id)
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The first chunks of a prompt that are here.
    pub(super) fn prefix(&self, blocks: &[(Id, Id)]) -> usize {
        blocks.iter().take_while(|(id, _)| self.has(*id)).count()
    }

    /// A chunk is used; the number of its reads so far, this one included.
    pub(super) fn touch(&mut self, id: Id) -> Option<u32> {
        let at = *self.places.get(&id)?;
        self.unlink(at);
        self.link(at);
        let chunk = &mut self.chunks[at as usize];
        chunk.reads += 1;
        Some(chunk.reads)
    }

    /// A chunk comes, which is not there yet. The chunk that goes for it, with its anchor.
    pub(super) fn insert(&mut self, id: Id, anchor: Id) -> Option<(Id, Id)> {
        let gone = (self.len() >= self.capacity).then(|| self.chunks[self.oldest as usize]);
        if let Some(gone) = gone {
            self.remove(gone.id);
        }
        let chunk = Chunk { id, anchor, newer: NOTHING, older: NOTHING, reads: 0 };
        let at = self.free.pop().unwrap_or(self.chunks.len() as u32);
        match self.chunks.get_mut(at as usize) {
            Some(place) => *place = chunk,
            None => self.chunks.push(chunk),
        }
        self.places.insert(id, at);
        self.link(at);
        gone.map(|gone| (gone.id, gone.anchor))
    }

    /// A chunk goes; its anchor.
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

/// Spreads the names, which nobody chose to do harm.
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

/// The place of no chunk.
const NOTHING: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_that_nobody_used_for_longest_goes_first() {
        let [a, b, c] = [1, 2, 3].map(|block| Id::of(0, block));
        let mut blocks = Blocks::new(2);
        assert_eq!(blocks.insert(a, a), None);
        assert_eq!(blocks.insert(b, a), None);
        assert_eq!(blocks.touch(a), Some(1));
        assert_eq!(blocks.insert(c, c), Some((b, a)));
        assert_eq!(blocks.iter().map(|(id, _)| id).collect::<Vec<_>>(), [a, c]);
        assert_eq!(blocks.remove(a), Some(a));
        assert_eq!((blocks.remove(a), blocks.touch(a), blocks.len()), (None, None, 1));
        assert_eq!(blocks.insert(b, b), None);
        assert_eq!(blocks.insert(a, b), Some((c, c)));
    }

    #[test]
    fn a_chunk_is_known_by_its_hash() {
        let id = Id::of(7, 9);
        assert_eq!(Id::named(&id.chunk(id).hash), id);
        assert_ne!(id.chunk(id).hash.short(), Id::of(9, 7).chunk(id).hash.short());
    }
}
