//! The index: knows which chunks are here, and the prefix tree that they form.
//!
//! A chunk keeps its own hash only; the tree gives the hashes of its parent and its anchor. This saves a third of the memory.
//! Eviction from the leaves seldom leaves a chunk without its parent. For those few chunks, the index keeps both hashes
//! separately.

use std::collections::HashSet;
use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use larder_protocol::run::run_start;
use larder_protocol::{ChainError, ChunkHash, ChunkRef};

pub(crate) use self::chunk::{Account, Block, Chunk, OnDisk, Standing, Stored};

use self::chunk::Mark;
use super::ids::{ChunkId, ChunkNumber, NamespaceId};

mod chunk;

/// Chunks by namespace and hash, linked to their parents.
#[derive(Debug, Default)]
pub(crate) struct Index {
    entries: Vec<Entry>,
    /// For each place, the time since which its chunk is cached, in tenths of a second since the node started. Only eviction uses
    /// it.
    since_tenths: Vec<u32>,
    vacant: Vec<ChunkNumber>,
    /// Chunks that were taken out but are still in the table, with the hashes of their keys.
    departed: Vec<(u64, ChunkNumber)>,
    table: HashTable<ChunkNumber>,
    hasher: DefaultHashBuilder,
    /// First child of every parent that is not here itself. All children of one parent have the same index. They also have the
    /// same anchor if their run began before them.
    orphans: HashMap<(NamespaceId, ChunkHash), ChunkNumber>,
    /// For each child of an absent parent, the hashes of its parent and its anchor.
    above: HashMap<ChunkNumber, Above>,
    /// The parent of every namespace's first chunks.
    roots: HashMap<NamespaceId, ChunkHash>,
}

/// The hashes of a chunk's parent and anchor. Neither has to be here.
#[derive(Debug, Clone, Copy)]
struct Above {
    parent: ChunkHash,
    anchor: ChunkHash,
}

#[derive(Debug)]
enum Entry {
    /// No chunk has the place. The next chunk there gets this generation.
    Vacant(u32),
    Chunk(Chunk),
}

impl Index {
    /// Hash of a key in this index; one computation serves several look-ups.
    pub(crate) fn hash(&self, namespace: NamespaceId, hash: &ChunkHash) -> u64 {
        self.hasher.hash_one((namespace, hash))
    }

    /// The chunk of this name. `key` comes from [`Index::hash`].
    pub(crate) fn find_hashed(&self, key: u64, namespace: NamespaceId, hash: &ChunkHash) -> Option<ChunkId> {
        self.number_hashed(key, namespace, hash).map(|number| self.id(number))
    }

    /// The first of a chunk's children, if it has this hash. Most chunks have one child, so most chains are followed without a
    /// look into the table.
    pub(crate) fn first_child(&self, parent: ChunkId, hash: &ChunkHash) -> Option<ChunkId> {
        let number = self.get(parent).first_child?;
        let child = self.at(number);
        (child.hash == *hash).then(|| ChunkId::new(number, child.generation))
    }

    /// The chunk of this name.
    pub(crate) fn find(&self, namespace: NamespaceId, hash: &ChunkHash) -> Option<ChunkId> {
        self.find_hashed(self.hash(namespace, hash), namespace, hash)
    }

    /// A chunk, unless its id has outlived it.
    pub(crate) fn known(&self, id: ChunkId) -> Option<&Chunk> {
        match self.entries.get(id.number().position()) {
            Some(Entry::Chunk(chunk)) if chunk.generation == id.generation() => Some(chunk),
            _ => None,
        }
    }

    /// A chunk that is claimed, or that was found since the last removal of any chunk.
    ///
    /// # Panics
    /// Panics if the id has outlived its chunk: that is our bug, and any other chunk would be the wrong chunk.
    pub(crate) fn get(&self, id: ChunkId) -> &Chunk {
        self.known(id).expect(OUTLIVED)
    }

    /// Mutable access to such a chunk.
    ///
    /// # Panics
    /// As [`Index::get`].
    pub(crate) fn get_mut(&mut self, id: ChunkId) -> &mut Chunk {
        match self.entries.get_mut(id.number().position()) {
            Some(Entry::Chunk(chunk)) if chunk.generation == id.generation() => Some(chunk),
            _ => None,
        }
        .expect(OUTLIVED)
    }

    /// The time since which a chunk is cached, in tenths of a second since the node started.
    pub(crate) fn since_tenths(&self, id: ChunkId) -> u32 {
        self.since_tenths[id.number().position()]
    }

    /// Sets the time since which a chunk is cached.
    pub(crate) fn set_since(&mut self, id: ChunkId, tenths: u32) {
        self.since_tenths[id.number().position()] = tenths;
    }

    /// The chunk that has a place now.
    ///
    /// # Panics
    /// Panics if no chunk has it.
    pub(crate) fn id(&self, number: ChunkNumber) -> ChunkId {
        ChunkId::new(number, self.at(number).generation)
    }

    /// A chunk's name.
    pub(crate) fn name(&self, id: ChunkId) -> ChunkRef {
        let &Chunk { hash, index, .. } = self.get(id);
        let number = id.number();
        ChunkRef { hash, parent: self.parent_hash(number), index, anchor: self.anchor(number) }
    }

    /// Whether a known chunk agrees with its name in a chain.
    pub(crate) fn agrees(&self, id: ChunkId, name: &ChunkRef) -> Result<(), ChainError> {
        let (known_index, known_parent) = (self.get(id).index, self.parent_hash(id.number()));
        if known_index == name.index && known_parent == name.parent {
            return Ok(());
        }
        Err(ChainError::Disagrees {
            hash: name.hash,
            index: name.index,
            parent: name.parent,
            known_index,
            known_parent,
        })
    }

    /// Whether a chunk of this name may be here: its known name is the same, or it fits between the parent and the children
    /// that are here. `flat` chunks have no parent and no children. Anchors are not compared: the tree knows them better.
    ///
    /// # Errors
    /// [`ChainError::Disagrees`] if the chunk itself is known under another name, [`ChainError::Misplaced`] if it does not fit
    /// its parent or children.
    pub(crate) fn admits(
        &self,
        namespace: NamespaceId,
        name: &ChunkRef,
        flat: bool,
    ) -> Result<(), ChainError> {
        let misplaced =
            |near: ChunkHash| Err(ChainError::Misplaced { hash: name.hash, index: name.index, near });
        if name.parent == name.hash {
            return misplaced(name.parent);
        }
        if let Some(id) = self.find(namespace, &name.hash) {
            return self.agrees(id, name);
        }
        if flat {
            return Ok(());
        }
        if let Some(&child) = self.orphans.get(&(namespace, name.hash))
            && Some(self.at(child).index) != name.index.checked_add(1)
        {
            return misplaced(self.at(child).hash);
        }
        if name.index == 0 {
            return Ok(());
        }
        let index = match self.number(namespace, &name.parent) {
            Some(parent) => Some(self.at(parent).index.checked_add(1)),
            None => self.orphans.get(&(namespace, name.parent)).map(|&sibling| Some(self.at(sibling).index)),
        };
        match index {
            Some(index) if index != Some(name.index) => misplaced(name.parent),
            _ => Ok(()),
        }
    }

    /// The chunks below an absent chunk that get another anchor once the absent chunk is here. Their names had no anchor or a
    /// wrong anchor, such as that of an earlier version's run.
    pub(crate) fn anchored_anew(&self, namespace: NamespaceId, name: &ChunkRef) -> Vec<ChunkId> {
        let Some(&first) = self.orphans.get(&(namespace, name.hash)) else { return Vec::new() };
        let start = run_start(name.index);
        let anchor = match self.number(namespace, &name.parent) {
            _ if start == name.index => name.hash,
            Some(parent) => self.anchor(parent),
            None => name.anchor,
        };
        let mut anew = Vec::new();
        let mut next = Some(first);
        while let Some(orphan) = next {
            if run_start(self.at(orphan).index) == start && self.anchor(orphan) != anchor {
                anew.push(orphan);
            }
            next = self.at(orphan).next_sibling;
        }
        let mut at = 0;
        while let Some(&number) = anew.get(at) {
            let mut child = self.at(number).first_child;
            while let Some(number) = child {
                if run_start(self.at(number).index) == start {
                    anew.push(number);
                }
                child = self.at(number).next_sibling;
            }
            at += 1;
        }
        anew.into_iter().map(|number| self.id(number)).collect()
    }

    /// Adds a chunk that is not here and that [`Index::admits`] accepts, with `blocks` absent blocks, and links it to its parent
    /// and children. `flat` chunks have neither. It is not in memory until [`Index::occupy`].
    pub(crate) fn insert(
        &mut self,
        namespace: NamespaceId,
        name: ChunkRef,
        flat: bool,
        blocks: usize,
    ) -> ChunkId {
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(Entry::Vacant(0));
            self.since_tenths.push(0);
            ChunkNumber::at(self.entries.len() - 1)
        });
        let generation = match self.entries[number.position()] {
            Entry::Vacant(generation) => generation,
            Entry::Chunk(_) => unreachable!("only vacant places are given out"),
        };
        self.entries[number.position()] = Entry::Chunk(Chunk::new(namespace, &name, generation, blocks));
        let (entries, hasher) = (&self.entries, &self.hasher);
        let key_of = |&number: &ChunkNumber| match &entries[number.position()] {
            Entry::Chunk(chunk) => hasher.hash_one((chunk.namespace, chunk.hash)),
            Entry::Vacant(_) => unreachable!("the table holds only chunks"),
        };
        self.table.insert_unique(self.hash(namespace, &name.hash), number, key_of);
        if name.index == 0 {
            self.roots.insert(namespace, name.parent);
        }
        if !flat {
            self.link(number, namespace, name);
        }
        ChunkId::new(number, generation)
    }

    /// Takes a chunk out. Its children become chunks without a parent here.
    ///
    /// Call [`Index::settle`] before the next search or insertion. The table forgets removed chunks together, because their cache
    /// misses overlap then.
    pub(crate) fn remove(&mut self, id: ChunkId) -> Chunk {
        self.vacate(id);
        let (number, &Chunk { namespace, hash, first_child, generation, .. }) = (id.number(), self.get(id));
        if let Some(first_child) = first_child {
            self.orphan(number, first_child);
        }
        self.unlink(number);
        let key = self.hash(namespace, &hash);
        self.departed.push((key, number));
        // A place that ran out of generations is never used again.
        if let Some(next) = generation.checked_add(1) {
            self.vacant.push(number);
            self.replace(number, next)
        } else {
            self.replace(number, generation)
        }
    }

    fn replace(&mut self, number: ChunkNumber, next_generation: u32) -> Chunk {
        match std::mem::replace(&mut self.entries[number.position()], Entry::Vacant(next_generation)) {
            Entry::Chunk(chunk) => chunk,
            Entry::Vacant(_) => unreachable!("it was read above"),
        }
    }

    /// Notes that the chunk is in memory; its parent may no longer leave before it.
    pub(crate) fn occupy(&mut self, id: ChunkId) {
        self.set_resident(id, true);
    }

    /// Notes that the chunk is no longer in memory.
    pub(crate) fn vacate(&mut self, id: ChunkId) {
        self.set_resident(id, false);
    }

    fn set_resident(&mut self, id: ChunkId, is_resident: bool) {
        let chunk = self.get_mut(id);
        if chunk.marks.set(Mark::Resident, is_resident) == is_resident {
            return;
        }
        if let Some(parent) = chunk.parent {
            let children = &mut self.at_mut(parent).resident_children;
            *children = if is_resident { *children + 1 } else { *children - 1 };
        }
    }

    /// Makes the table forget removed chunks.
    pub(crate) fn settle(&mut self) {
        for (key, number) in self.departed.drain(..) {
            if let Ok(entry) = self.table.find_entry(key, |&other| other == number) {
                entry.remove();
            }
        }
    }

    /// The chunk's parent, if it is here.
    pub(crate) fn parent(&self, id: ChunkId) -> Option<ChunkId> {
        self.get(id).parent.map(|parent| self.id(parent))
    }

    /// The chunk of this name; if it is not here, the chunks here that continue it at once.
    pub(crate) fn roots(&self, namespace: NamespaceId, hash: &ChunkHash) -> Vec<ChunkNumber> {
        if let Some(chunk) = self.find(namespace, hash) {
            return vec![chunk.number()];
        }
        let first = self.orphans.get(&(namespace, *hash)).copied();
        std::iter::successors(first, |&orphan| self.at(orphan).next_sibling).collect()
    }

    /// The chunk and everything below it, every chunk before its children, without the chunks that were `seen` and all below these.
    /// Adds the result to `seen`.
    pub(crate) fn subtree(&self, root: ChunkNumber, seen: &mut HashSet<ChunkNumber>) -> Vec<ChunkId> {
        let mut found: Vec<ChunkNumber> = Some(root).filter(|&root| seen.insert(root)).into_iter().collect();
        let mut next = 0;
        while let Some(&number) = found.get(next) {
            next += 1;
            let mut child = self.at(number).first_child;
            while let Some(number) = child {
                if seen.insert(number) {
                    found.push(number);
                }
                child = self.at(number).next_sibling;
            }
        }
        found.into_iter().map(|number| self.id(number)).collect()
    }

    /// Every chunk from a place on, with its place.
    pub(crate) fn iter_from(&self, from: usize) -> impl Iterator<Item = (usize, ChunkId, &Chunk)> {
        let entries = self.entries.iter().enumerate().skip(from);
        entries.filter_map(|(place, entry)| match entry {
            Entry::Chunk(chunk) => {
                Some((place, ChunkId::new(ChunkNumber::at(place), chunk.generation), chunk))
            }
            Entry::Vacant(_) => None,
        })
    }

    /// Chunks here, those being written included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    fn number_hashed(&self, key: u64, namespace: NamespaceId, hash: &ChunkHash) -> Option<ChunkNumber> {
        let same = |&number: &ChunkNumber| {
            let chunk = self.at(number);
            chunk.hash == *hash && chunk.namespace == namespace
        };
        self.table.find(key, same).copied()
    }

    fn number(&self, namespace: NamespaceId, hash: &ChunkHash) -> Option<ChunkNumber> {
        self.number_hashed(self.hash(namespace, hash), namespace, hash)
    }

    /// The chunk at a place that the index itself, or a policy, keeps.
    pub(crate) fn at(&self, number: ChunkNumber) -> &Chunk {
        match &self.entries[number.position()] {
            Entry::Chunk(chunk) => chunk,
            Entry::Vacant(_) => unreachable!("links and policies forget a chunk when it leaves"),
        }
    }

    fn at_mut(&mut self, number: ChunkNumber) -> &mut Chunk {
        match &mut self.entries[number.position()] {
            Entry::Chunk(chunk) => chunk,
            Entry::Vacant(_) => unreachable!("links and policies forget a chunk when it leaves"),
        }
    }

    fn parent_hash(&self, number: ChunkNumber) -> ChunkHash {
        let chunk = self.at(number);
        match chunk.parent {
            Some(parent) => self.at(parent).hash,
            None if chunk.index == 0 => self.roots[&chunk.namespace],
            None => self.above[&number].parent,
        }
    }

    /// The hash of the first chunk of a chunk's run. It is at most 63 steps up; if the tree ends before, `above` has the hash.
    fn anchor(&self, mut number: ChunkNumber) -> ChunkHash {
        let start = run_start(self.at(number).index);
        loop {
            let chunk = self.at(number);
            if chunk.index == start {
                return chunk.hash;
            }
            match chunk.parent {
                Some(parent) => number = parent,
                None => return self.above[&number].anchor,
            }
        }
    }

    fn link(&mut self, number: ChunkNumber, namespace: NamespaceId, name: ChunkRef) {
        if let Some(first_child) = self.orphans.remove(&(namespace, name.hash)) {
            self.at_mut(number).first_child = Some(first_child);
            let (mut child, mut resident) = (Some(first_child), 0);
            while let Some(orphan) = child {
                self.above.remove(&orphan);
                let chunk = self.at_mut(orphan);
                chunk.parent = Some(number);
                resident += u32::from(chunk.is_resident());
                child = chunk.next_sibling;
            }
            self.at_mut(number).resident_children = resident;
        }
        if name.index == 0 {
            return;
        }
        let parent = self.number(namespace, &name.parent);
        let old_first = match parent {
            Some(parent) => self.at_mut(parent).first_child.replace(number),
            None => {
                self.above.insert(number, Above { parent: name.parent, anchor: name.anchor });
                self.orphans.insert((namespace, name.parent), number)
            }
        };
        if let Some(old_first) = old_first {
            self.at_mut(old_first).previous_sibling = Some(number);
        }
        let chunk = self.at_mut(number);
        chunk.parent = parent;
        chunk.next_sibling = old_first;
    }

    fn unlink(&mut self, number: ChunkNumber) {
        let &Chunk { namespace, parent, next_sibling, previous_sibling, .. } = self.at(number);
        if let Some(next) = next_sibling {
            self.at_mut(next).previous_sibling = previous_sibling;
        }
        let above = self.above.remove(&number);
        match (previous_sibling, parent, above) {
            (Some(previous), ..) => self.at_mut(previous).next_sibling = next_sibling,
            (None, Some(parent), _) => self.at_mut(parent).first_child = next_sibling,
            // The first child of an absent parent.
            (None, None, Some(above)) => match next_sibling {
                Some(next) => _ = self.orphans.insert((namespace, above.parent), next),
                None => _ = self.orphans.remove(&(namespace, above.parent)),
            },
            // A root or flat chunk: it has no parent.
            (None, None, None) => {}
        }
    }

    /// Detaches the children of a chunk from it; `first_child` is one of them.
    fn orphan(&mut self, parent: ChunkNumber, first_child: ChunkNumber) {
        let &Chunk { namespace, hash, .. } = self.at(parent);
        self.orphans.insert((namespace, hash), first_child);
        let mut child = Some(first_child);
        while let Some(number) = child {
            let above = Above { parent: hash, anchor: self.anchor(number) };
            self.above.insert(number, above);
            let chunk = self.at_mut(number);
            chunk.parent = None;
            child = chunk.next_sibling;
        }
    }
}

const OUTLIVED: &str = "whoever keeps a chunk's id claims the chunk";

#[cfg(test)]
mod tests {
    use larder_protocol::Chain;

    use super::*;

    const SPACE: NamespaceId = NamespaceId(0);

    fn chain(chunks: u8) -> Chain {
        Chain::from_root(ChunkHash([255; 32]), (0..chunks).map(|n| ChunkHash([n; 32])).collect())
    }

    /// However chunks come and go, each chunk in the index has the name with which it entered.
    #[test]
    fn names_outlive_parents_and_anchors() {
        let (chain, mut rng) = (chain(40), fastrand::Rng::with_seed(9));
        let mut index = Index::default();
        let mut present: Vec<Option<ChunkId>> = vec![None; chain.len()];
        for _ in 0..5_000 {
            let position = rng.usize(..chain.len());
            match present[position].take() {
                Some(id) => {
                    index.remove(id);
                    index.settle();
                }
                None => present[position] = Some(index.insert(SPACE, chain.chunk(position), false, 1)),
            }
            for (position, id) in present.iter().enumerate() {
                let Some(id) = *id else { continue };
                assert_eq!(index.name(id), chain.chunk(position));
                assert_eq!(index.agrees(id, &chain.chunk(position)), Ok(()));
            }
        }
        present.into_iter().flatten().for_each(|id| drop(index.remove(id)));
        assert!(index.above.is_empty() && index.orphans.is_empty(), "nothing is kept of what left");
    }

    #[test]
    fn a_chunk_takes_128_bytes() {
        assert_eq!(size_of::<Entry>(), 128);
    }
}
