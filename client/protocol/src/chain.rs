//! A stretch of consecutive chunks of one prompt, as messages carry it.

use rkyv::with::Skip;
use rkyv::{Archive, Deserialize, Serialize};

use crate::chunk::{ChunkHash, ChunkRef};
use crate::limits::{MAX_CHAIN_CHUNKS, MAX_CHUNK_INDEX};
use crate::run::{run_start, run_start_before};

/// Consecutive chunks, with all facts for the [`ChunkRef`] of each, in little more than 32 bytes a chunk.
#[derive(Archive, Serialize, Deserialize, Clone, Debug)]
pub struct Chain {
    /// How the chunks are linked.
    pub links: Links,
    /// The chunks' hashes, first to last.
    pub hashes: Vec<ChunkHash>,
    /// The first chunk's anchor in sessions of version 5, if it differs from the present anchor. This field is not sent.
    #[rkyv(with = Skip)]
    pub anchor_before: Option<ChunkHash>,
}

/// How the chunks of a [`Chain`] are linked.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Each chunk is the child of the chunk before it; [`Start`] gives the place of the first.
    Linked(Start),
    /// Keys without order (LMCache, vLLM's secondary tier): each chunk is independent, a child of the namespace's root.
    Flat(ChunkHash),
}

/// The place of the first chunk of a linked [`Chain`] in its prompt.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// The chunk's index in its prompt.
    pub index: u32,
    /// The chunk before it; the namespace's root if `index` is 0.
    pub parent: ChunkHash,
    /// The first chunk of its run; ignored if the chunk itself begins the run.
    pub anchor: ChunkHash,
}

/// Why a chain is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChainError {
    /// More chunks than one message may carry.
    #[error("this chain has {found} chunks, but a chain has at most {MAX_CHAIN_CHUNKS}: send it in parts")]
    TooLong {
        /// Chunks found.
        found: usize,
    },
    /// Chunk numbers beyond any real prompt.
    #[error(
        "chunk indices end at {MAX_CHUNK_INDEX}, this chain starts at {first_index} with {chunks} chunks"
    )]
    IndexTooLarge {
        /// Index of the first chunk.
        first_index: u32,
        /// Chunks in the chain.
        chunks: usize,
    },
    /// A linked chain for a flat namespace, or the other way round.
    #[error("the namespace is {}, the chain is not", if *.namespace_is_flat { "flat" } else { "linked" })]
    WrongShape {
        /// Whether the namespace is flat.
        namespace_is_flat: bool,
    },
    /// The chain starts at chunk 0 (or is flat), but its parent is not the namespace's root.
    #[error("the parent of a first chunk is the namespace's root {root:?}, not {parent:?}")]
    NotTheRoot {
        /// The namespace's root.
        root: ChunkHash,
        /// The chain's parent.
        parent: ChunkHash,
    },
    /// The list has a hash twice.
    #[error("the list has chunk {hash:?} twice")]
    Duplicate {
        /// The hash.
        hash: ChunkHash,
    },
    /// The chunk does not fit its neighbors: its parent, a child or the first chunk of its run is known in another place.
    #[error(
        "chunk {hash:?} cannot be number {index} beside {near:?}: that chunk is known in another place; give every chunk its own hash"
    )]
    Misplaced {
        /// The hash.
        hash: ChunkHash,
        /// Its index in this chain.
        index: u32,
        /// The hash of the neighbor that is known in another place.
        near: ChunkHash,
    },
    /// The chunk is known with another parent or index: two prompts share a hash, or the engine's chain is broken.
    #[error(
        "chunk {hash:?} is known as number {known_index} after {known_parent:?}, not as number {index} after {parent:?}"
    )]
    Disagrees {
        /// The hash.
        hash: ChunkHash,
        /// Index in this chain.
        index: u32,
        /// Parent in this chain.
        parent: ChunkHash,
        /// Index under which it is cached.
        known_index: u32,
        /// Parent under which it is cached.
        known_parent: ChunkHash,
    },
}

impl Chain {
    /// A prompt's chunks from its first one on, in the namespace whose root is `root`.
    #[must_use]
    pub fn from_root(root: ChunkHash, hashes: Vec<ChunkHash>) -> Self {
        Self {
            links: Links::Linked(Start { index: 0, parent: root, anchor: root }),
            hashes,
            anchor_before: None,
        }
    }

    /// Independent keys, in the flat namespace whose root is `root`.
    #[must_use]
    pub fn flat(root: ChunkHash, hashes: Vec<ChunkHash>) -> Self {
        Self { links: Links::Flat(root), hashes, anchor_before: None }
    }

    /// The chunks from position `from` on; empty if `from` is past the end.
    #[must_use]
    pub fn tail(&self, from: usize) -> Self {
        let from = from.min(self.hashes.len());
        self.part(from, self.hashes.len())
    }

    /// The chunks at positions `from..to`.
    ///
    /// # Panics
    /// Panics if `from..to` does not lie within the chain.
    #[must_use]
    pub fn part(&self, from: usize, to: usize) -> Self {
        let hashes = self.hashes[from..to].to_vec();
        let links = match self.links {
            Links::Linked(start) if from > 0 => Links::Linked(Start {
                index: start.index + from as u32,
                parent: self.hashes[from - 1],
                // The chunk before is in the same run. If instead a run starts here, the anchor is ignored.
                anchor: self.chunk(from - 1).anchor,
            }),
            links => links,
        };
        let anchor_before = match self.links {
            Links::Linked(start) if from > 0 => {
                // As above, for the shorter runs of version 5.
                let first = run_start_before(start.index + from as u32 - 1);
                first.checked_sub(start.index).map_or(self.anchor_before, |at| Some(self.hashes[at as usize]))
            }
            _ => self.anchor_before,
        };
        Self { links, hashes, anchor_before }
    }

    /// The chain in the form of this version's sessions.
    #[must_use]
    pub fn for_session(&self, version: u16) -> Self {
        let mut chain = self.clone();
        if let (Links::Linked(start), Some(anchor)) = (&mut chain.links, self.anchor_before)
            && version < 6
        {
            start.anchor = anchor;
        }
        chain
    }

    /// Chunks in the chain.
    #[must_use]
    pub fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Whether the chain has no chunk.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// The chunk at `position`.
    ///
    /// # Panics
    /// Panics if `position` is past the end.
    #[must_use]
    pub fn chunk(&self, position: usize) -> ChunkRef {
        let hash = self.hashes[position];
        match self.links {
            Links::Flat(root) => ChunkRef { hash, parent: root, index: 0, anchor: hash },
            Links::Linked(start) => {
                let index = start.index + position as u32;
                ChunkRef {
                    hash,
                    parent: if position == 0 { start.parent } else { self.hashes[position - 1] },
                    index,
                    anchor: run_start(index)
                        .checked_sub(start.index)
                        .map_or(start.anchor, |offset| self.hashes[offset as usize]),
                }
            }
        }
    }

    /// The chunks, first to last.
    pub fn chunks(&self) -> impl DoubleEndedIterator<Item = ChunkRef> + ExactSizeIterator {
        (0..self.hashes.len()).map(|position| self.chunk(position))
    }

    /// Checks length, indices, shape and root, which need no store. A store checks the rest: duplicates, and the agreement of
    /// parents and indices with its own chunks.
    ///
    /// # Errors
    /// [`ChainError`], but never `Duplicate`, `Misplaced` or `Disagrees`.
    pub fn check(&self, root: ChunkHash, namespace_is_flat: bool) -> Result<(), ChainError> {
        let chunks = self.hashes.len();
        if chunks > MAX_CHAIN_CHUNKS {
            return Err(ChainError::TooLong { found: chunks });
        }
        let parent = match self.links {
            Links::Flat(root) if namespace_is_flat => root,
            Links::Linked(Start { index, parent, .. }) if !namespace_is_flat => {
                if u64::from(index) + chunks as u64 > u64::from(MAX_CHUNK_INDEX) {
                    return Err(ChainError::IndexTooLarge { first_index: index, chunks });
                }
                if index > 0 {
                    return Ok(());
                }
                parent
            }
            _ => return Err(ChainError::WrongShape { namespace_is_flat }),
        };
        if parent == root { Ok(()) } else { Err(ChainError::NotTheRoot { root, parent }) }
    }
}

/// Two chains are equal if they are the same message.
impl PartialEq for Chain {
    fn eq(&self, other: &Self) -> bool {
        (self.links, &self.hashes) == (other.links, &other.hashes)
    }
}

impl Eq for Chain {}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> ChunkHash {
        ChunkHash([n; 32])
    }

    fn chain(len: u8) -> Chain {
        Chain::from_root(hash(255), (0..len).map(hash).collect())
    }

    #[test]
    fn every_chunk_names_its_parent_index_and_anchor() {
        let chunks: Vec<ChunkRef> = chain(40).chunks().collect();
        assert_eq!(chunks[0], ChunkRef { hash: hash(0), parent: hash(255), index: 0, anchor: hash(0) });
        assert_eq!(chunks[7], ChunkRef { hash: hash(7), parent: hash(6), index: 7, anchor: hash(1) });
        assert_eq!(chunks[35], ChunkRef { hash: hash(35), parent: hash(34), index: 35, anchor: hash(8) });
    }

    #[test]
    fn a_part_of_a_chain_has_the_same_chunks_as_the_whole() {
        let whole = chain(80);
        for from in 0..80 {
            let part = whole.part(from, 80);
            assert!(part.chunks().eq(whole.chunks().skip(from)), "from {from}");
            let again = part.tail(80_usize.saturating_sub(from) / 2);
            assert!(again.chunks().eq(part.chunks().skip((80 - from) / 2)), "tail of the tail from {from}");
        }
    }

    #[test]
    fn a_session_of_version_5_gets_the_anchors_of_its_shorter_runs() {
        let whole = chain(80);
        let anchor = |chain: &Chain| match chain.links {
            Links::Linked(start) => start.anchor,
            Links::Flat(root) => root,
        };
        for from in 1..80 {
            for chain in [whole.tail(from), whole.tail(from / 2).tail(from - from / 2)] {
                let index = from as u32;
                // The anchor of a chunk that begins a run is ignored.
                if run_start_before(index) != index {
                    assert_eq!(
                        anchor(&chain.for_session(5)),
                        hash(run_start_before(index) as u8),
                        "from {from}"
                    );
                }
                assert_eq!(chain.for_session(6), chain);
            }
        }
        assert_eq!(whole.for_session(5), whole);
    }

    #[test]
    fn flat_chunks_stand_for_themselves() {
        let flat = Chain::flat(hash(255), vec![hash(1), hash(2)]);
        assert_eq!(flat.chunk(1), ChunkRef { hash: hash(2), parent: hash(255), index: 0, anchor: hash(2) });
        assert_eq!(flat.check(hash(255), true), Ok(()));
        assert_eq!(flat.check(hash(255), false), Err(ChainError::WrongShape { namespace_is_flat: false }));
    }

    #[test]
    fn impossible_chains_are_refused() {
        assert_eq!(chain(3).check(hash(255), false), Ok(()));
        assert_eq!(
            chain(3).check(hash(9), false),
            Err(ChainError::NotTheRoot { root: hash(9), parent: hash(255) })
        );
        let far = Chain {
            links: Links::Linked(Start { index: MAX_CHUNK_INDEX, parent: hash(1), anchor: hash(1) }),
            hashes: vec![hash(2)],
            anchor_before: None,
        };
        assert!(matches!(far.check(hash(255), false), Err(ChainError::IndexTooLarge { .. })));
        let long = Chain::from_root(hash(255), vec![hash(1); MAX_CHAIN_CHUNKS + 1]);
        assert!(matches!(long.check(hash(255), false), Err(ChainError::TooLong { .. })));
    }
}
