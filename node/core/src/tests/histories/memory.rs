//! What stands in memory, and who may read or write where: the model that a history is checked against.

use std::collections::{HashMap, HashSet};

use larder_protocol::{ChunkHash, Fingerprint};

use super::super::BLOCK;
use crate::store::ids::ProcessId;
use crate::store::{BlockMove, Place};

/// Bytes in memory: extent, first byte, end.
pub(super) type Range = (u32, u64, u64);

/// The name of a block.
pub(super) type Name = (Fingerprint, ChunkHash);

/// Memory is looked at in pieces of this size: a layer of the smaller blocks.
pub(super) const PIECE: u64 = BLOCK / 2;

/// Somebody who may read a part of a block: where, what it is, and where in the block it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) at: Range,
    pub(super) name: Name,
}

#[derive(Debug, Default)]
pub(super) struct Memory {
    /// What every piece holds: a block's name, and which of its pieces.
    pieces: HashMap<(u32, u64), (Name, u64)>,
    /// Pieces that were found to be wrong.
    damaged: HashSet<(u32, u64)>,
    /// What living processes may read of sessions that ended.
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
    /// Something was written; `None`: nobody knows what. Slots begin at multiples of their size, so that a piece says where in
    /// its block it stands.
    pub(super) fn put(&mut self, to: Range, block_bytes: u64, name: Option<Name>) {
        for at in pieces(to) {
            self.damaged.remove(&at);
            match name {
                Some(name) => self.pieces.insert(at, (name, at.1 % (block_bytes / PIECE))),
                None => self.pieces.remove(&at),
            };
        }
    }

    /// Whether a place holds what it should.
    pub(super) fn holds(&self, &Reading { at, name }: &Reading, block_bytes: u64) -> bool {
        let is_right = |at: (u32, u64)| self.pieces.get(&at) == Some(&(name, at.1 % (block_bytes / PIECE)));
        pieces(at).all(is_right)
    }

    /// The block that stands at a place, if it is known.
    pub(super) fn name_at(&self, at: Range) -> Option<Name> {
        pieces(at).next().and_then(|piece| self.pieces.get(&piece)).map(|(name, _)| *name)
    }

    /// It was verified, and is wrong.
    pub(super) fn condemn(&mut self, at: Range) {
        self.damaged.extend(pieces(at));
    }

    pub(super) fn is_condemned(&self, at: Range) -> bool {
        pieces(at).any(|at| self.damaged.contains(&at))
    }

    /// An extent has new memory: who could read the old one keeps that.
    pub(super) fn renew(&mut self, extent: u32) {
        self.pieces.retain(|&(of, _), _| of != extent);
        self.damaged.retain(|&(of, _)| of != extent);
        self.ghosts.iter_mut().for_each(|(_, held)| held.retain(|reading| reading.at.0 != extent));
    }
}
