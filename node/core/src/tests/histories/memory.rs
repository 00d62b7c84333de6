//! The model that a history is checked against: the bytes in memory, and the parts that may be read.

use std::collections::{HashMap, HashSet};

use larder_protocol::{ChunkHash, Fingerprint};

use super::super::BLOCK;
use crate::store::ids::ProcessId;
use crate::store::{BlockMove, Place};

/// Bytes in memory: extent, first byte, end.
pub(super) type Range = (u32, u64, u64);

/// The name of a block.
pub(super) type Name = (Fingerprint, ChunkHash);

/// The model divides memory into pieces of this size: a layer of the smaller blocks.
pub(super) const PIECE: u64 = BLOCK / 2;

/// A range that somebody may read, and the name of the block that it must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) at: Range,
    pub(super) name: Name,
}

#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The contents of every piece: a block's name, and the position of the piece in the block.
    pieces: HashMap<(u32, u64), (Name, u64)>,
    /// Pieces that were found to be wrong.
    damaged: HashSet<(u32, u64)>,
    /// The parts that living processes may still read after their sessions ended.
    pub(super) ghosts: Vec<(ProcessId, Vec<Reading>)>,
}

pub(super) fn range(block: &BlockMove) -> Range {
    (block.place.extent, block.place.offset, block.place.offset + block.bytes)
}

pub(super) fn reading(&Place { extent, offset, .. }: &Place, bytes: u64, name: Name) -> Reading {
    Reading { at: (extent, offset, offset + bytes), name }
}

pub(super) fn meet(one: &Range, other: &Range) -> bool {
    one.0 == other.0 && one.1 < other.2 && other.1 < one.2
}

fn pieces((extent, from, to): Range) -> impl Iterator<Item = (u32, u64)> {
    (from / PIECE..to / PIECE).map(move |piece| (extent, piece))
}

impl Memory {
    /// Notes the name of the bytes that were written to a range; `None` for unknown bytes. Slots begin at multiples of their
    /// size, so a piece's address gives its position in its block.
    pub(super) fn put(&mut self, to: Range, block_bytes: u64, name: Option<Name>) {
        for at in pieces(to) {
            self.damaged.remove(&at);
            match name {
                Some(name) => self.pieces.insert(at, (name, at.1 % (block_bytes / PIECE))),
                None => self.pieces.remove(&at),
            };
        }
    }

    /// Whether a range holds the block that it should.
    pub(super) fn holds(&self, &Reading { at, name }: &Reading, block_bytes: u64) -> bool {
        let is_right = |at: (u32, u64)| self.pieces.get(&at) == Some(&(name, at.1 % (block_bytes / PIECE)));
        pieces(at).all(is_right)
    }

    /// The block that is at a range, if it is known.
    pub(super) fn name_at(&self, at: Range) -> Option<Name> {
        pieces(at).next().and_then(|piece| self.pieces.get(&piece)).map(|(name, _)| *name)
    }

    /// Notes that verification of a range failed.
    pub(super) fn condemn(&mut self, at: Range) {
        self.damaged.extend(pieces(at));
    }

    pub(super) fn is_condemned(&self, at: Range) -> bool {
        pieces(at).any(|at| self.damaged.contains(&at))
    }

    /// Gives an extent new memory. Earlier readers keep the old memory.
    pub(super) fn renew(&mut self, extent: u32) {
        self.pieces.retain(|&(of, _), _| of != extent);
        self.damaged.retain(|&(of, _)| of != extent);
        self.ghosts.iter_mut().for_each(|(_, held)| held.retain(|reading| reading.at.0 != extent));
    }
}
