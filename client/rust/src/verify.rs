//! Verifies the blocks that are read: each against the checksum over its bytes and name that was made at its commit.
//!
//! A block of a lease is summed as a whole, when it is read for the first time. If the whole block is copied at once, the copy is
//! summed, otherwise the block in place. The layers of a followed chunk are summed when they are read, and the whole block once
//! it is committed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use larder_protocol::ChunkHash;
use larder_protocol::checksum::{BlockKey, BlockSummer, RangeChecksum, layers_checksum};
use larder_protocol::handoff::LayersSum;
use larder_protocol::session::{ReportDamage, Request};

use crate::error::{Damaged, SessionError};
use crate::link::Link;
use crate::lock;
use crate::namespace::Namespace;
use larder_ipc::Mapping;

/// The checksums by which leased blocks are verified.
pub(crate) struct Proofs {
    /// The chunks' names.
    hashes: Box<[ChunkHash]>,
    /// The state of each block, by the index of its place; empty if nothing is verified.
    verdicts: Box<[AtomicU8]>,
    sums: Sums,
}

enum Sums {
    /// For a lease: the checksum of each place.
    Whole(Vec<u64>),
    /// For a follow.
    Followed(Mutex<Followed>),
}

#[derive(Default)]
struct Followed {
    /// The checksum of each place, once all chunks are whole; those of a prefix of the places if some chunks did not come.
    whole: Option<Vec<u64>>,
    /// The layers in place, by position and block. They stay: layers of chunks that did not come may still be read.
    layers: HashMap<(u32, u32), Vec<Layers>>,
}

#[derive(Clone)]
struct Layers {
    range: Range<u32>,
    checksum: u64,
    is_right: bool,
}

/// A block that is about to be read.
#[derive(Clone, Copy)]
pub(crate) struct Reading<'a> {
    pub(crate) link: &'a Link,
    pub(crate) namespace: &'a Namespace,
    pub(crate) lease: u64,
    pub(crate) position: usize,
    pub(crate) block: usize,
    /// The index of the block's place.
    pub(crate) index: usize,
    pub(crate) mapping: &'a Mapping,
    /// The block's offset in its mapping.
    pub(crate) offset: u64,
}

impl Proofs {
    /// # Errors
    /// Fails unless there is one checksum for each place.
    pub(crate) fn of_lease(
        link: &Link,
        hashes: &[ChunkHash],
        places: usize,
        sums: Vec<u64>,
    ) -> Result<Self, SessionError> {
        if sums.len() != places {
            return Err(SessionError::wrong_answer("one checksum comes for each block"));
        }
        Ok(Self::new(link, hashes, places, Sums::Whole(sums)))
    }

    pub(crate) fn of_follow(link: &Link, hashes: &[ChunkHash], places: usize) -> Self {
        Self::new(link, hashes, places, Sums::Followed(Mutex::default()))
    }

    fn new(link: &Link, hashes: &[ChunkHash], places: usize, sums: Sums) -> Self {
        let places = if link.verifier.is_off() { 0 } else { places };
        let verdicts = (0..places).map(|_| AtomicU8::new(UNKNOWN)).collect();
        Self { hashes: hashes.into(), verdicts, sums }
    }

    /// Adds the checksums of followed layers that are in place, or of all blocks once the chunks are whole.
    ///
    /// # Errors
    /// Fails unless there is one checksum for each place.
    pub(crate) fn add(&self, layers: Vec<LayersSum>, whole: Vec<u64>) -> Result<(), SessionError> {
        let Sums::Followed(followed) = &self.sums else { return Ok(()) };
        if self.verdicts.is_empty() {
            return Ok(());
        }
        let mut followed = lock(followed);
        if !whole.is_empty() {
            // If some chunks did not come, `whole` has the checksums of a prefix of the places.
            if whole.len() > self.verdicts.len() {
                return Err(SessionError::wrong_answer("one checksum comes for each block"));
            }
            followed.whole = Some(whole);
        }
        if followed.whole.is_some() {
            return Ok(());
        }
        for LayersSum { chunk, block, from_layer, to_layer, checksum } in layers {
            let known = followed.layers.entry((chunk, block)).or_default();
            let range = from_layer..to_layer;
            if known.iter().all(|known| known.range != range) {
                known.push(Layers { range, checksum, is_right: false });
            }
        }
        Ok(())
    }

    /// Verifies `bytes` (of the block) where they are, unless that was done before or need not be.
    pub(crate) fn check(&self, reading: Reading<'_>, bytes: &Range<u64>) -> Result<(), Damaged> {
        if !self.must_check(&reading)? {
            return Ok(());
        }
        let is_right = match self.whole_of(reading.index) {
            Some(sum) => self.judge(&reading, || {
                let mut summer = BlockSummer::new(reading.namespace.range_bytes(reading.block));
                let bytes = reading.namespace.block_bytes(reading.block);
                reading.mapping.visit(reading.offset, bytes, |piece| summer.update(piece));
                summer.finish(&self.key(&reading)) == sum
            }),
            None => self.check_layers(&reading, bytes),
        };
        if is_right { Ok(()) } else { Err(self.damaged(&reading)) }
    }

    /// Copies the whole block out, and verifies what was copied.
    pub(crate) fn copy_block(&self, reading: Reading<'_>, out: &mut [u8]) -> Result<(), Damaged> {
        let must_check = self.must_check(&reading)?;
        let Some(sum) = self.whole_of(reading.index).filter(|_| must_check) else {
            self.check(reading, &(0..out.len() as u64))?;
            reading.mapping.copy_to(reading.offset, out);
            return Ok(());
        };
        let is_right = self.judge(&reading, || {
            let mut summer = BlockSummer::new(reading.namespace.range_bytes(reading.block));
            reading.mapping.copy_to_summed(reading.offset, out, &mut summer);
            summer.finish(&self.key(&reading)) == sum
        });
        if is_right { Ok(()) } else { Err(self.damaged(&reading)) }
    }

    /// Whether a block is to be verified and was not yet.
    pub(crate) fn must_check(&self, reading: &Reading<'_>) -> Result<bool, Damaged> {
        let verdict =
            self.verdicts.get(reading.index).map_or(RIGHT, |verdict| verdict.load(Ordering::Acquire));
        match verdict {
            RIGHT => Ok(false),
            WRONG => Err(self.damaged(reading)),
            _ => Ok(reading.link.verifier.picks(reading.lease, reading.index)),
        }
    }

    /// Verifies a whole block, and remembers the result.
    fn judge(&self, reading: &Reading<'_>, verify: impl FnOnce() -> bool) -> bool {
        let is_right = verify();
        reading.link.traffic.count_verified(reading.namespace.block_bytes(reading.block));
        self.conclude(reading, is_right);
        is_right
    }

    fn conclude(&self, reading: &Reading<'_>, is_right: bool) {
        let verdict = if is_right { RIGHT } else { WRONG };
        let before = self.verdicts[reading.index].swap(verdict, Ordering::AcqRel);
        if !is_right && before != WRONG {
            reading.link.traffic.count_damaged();
            self.report(reading);
        }
    }

    /// Verifies the layers that contain these bytes and are in place, except layers that were verified before.
    fn check_layers(&self, reading: &Reading<'_>, bytes: &Range<u64>) -> bool {
        let Sums::Followed(followed) = &self.sums else { return false };
        let layer_bytes = reading.namespace.layer_bytes(reading.block).max(1);
        let wanted = bytes.start / layer_bytes..bytes.end.div_ceil(layer_bytes);
        let name = (reading.position as u32, reading.block as u32);
        let pieces = lock(followed).layers.get(&name).cloned().unwrap_or_default();
        let overlaps = |piece: &&Layers| {
            u64::from(piece.range.start) < wanted.end && wanted.start < piece.range.end.into()
        };
        let mut summed = 0;
        for piece in pieces.iter().filter(overlaps) {
            let (start, end) = (u64::from(piece.range.start), u64::from(piece.range.end));
            if piece.is_right {
                continue;
            }
            let mut sum = RangeChecksum::new();
            let piece_bytes = (end - start) * layer_bytes;
            reading
                .mapping
                .visit(reading.offset + start * layer_bytes, piece_bytes, |bytes| sum.update(bytes));
            summed += piece_bytes;
            let place = start * layer_bytes..end * layer_bytes;
            if layers_checksum(&self.key(reading), &place, sum.finish()) != piece.checksum {
                self.conclude(reading, false);
                return false;
            }
            if let Some(known) = lock(followed).layers.get_mut(&name)
                && let Some(known) = known.iter_mut().find(|known| known.range == piece.range)
            {
                known.is_right = true;
            }
        }
        reading.link.traffic.count_verified(summed);
        true
    }

    fn whole_of(&self, index: usize) -> Option<u64> {
        match &self.sums {
            Sums::Whole(sums) => sums.get(index).copied(),
            Sums::Followed(followed) => lock(followed).whole.as_ref()?.get(index).copied(),
        }
    }

    fn key(&self, reading: &Reading<'_>) -> BlockKey {
        reading.namespace.key(self.hashes[reading.position], reading.block)
    }

    fn damaged(&self, &Reading { position, block, .. }: &Reading<'_>) -> Damaged {
        Damaged { position, block, hash: self.hashes[position], has_come: true }
    }

    /// The error for a block that was not handed out, since its bytes have not come.
    pub(crate) fn missing(&self, position: usize, block: usize) -> Damaged {
        Damaged { position, block, hash: self.hashes[position], has_come: false }
    }

    fn report(&self, reading: &Reading<'_>) {
        let hash = self.hashes[reading.position];
        tracing::error!(
            %hash,
            block = reading.block,
            node = reading.link.welcome.node,
            "a block has other bytes than were committed under its name: it is not used, and the node is told"
        );
        let namespace = reading.namespace.number();
        reading.link.report(Request::ReportDamage(ReportDamage { namespace, hash }));
    }
}

const UNKNOWN: u8 = 0;
const RIGHT: u8 = 1;
const WRONG: u8 = 2;
