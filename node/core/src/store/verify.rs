//! Verifies chunks that are reported as damaged: names the blocks to sum, and drops a chunk that is wrong.
//!
//! A chunk that is being verified is claimed, so it is neither evicted nor overwritten meanwhile. A wrong chunk leaves the
//! policy, the disk and the announcements at once, so nobody finds it. Its slots are freed when its last reader has let go.

use std::collections::BTreeMap;

use larder_protocol::session::Checked;
use larder_protocol::{ChunkHash, Fingerprint};

use super::commit::BlockMove;
use super::ids::{Below, ChunkId, SessionId};
use super::index::{Block, OnDisk};
use super::remembered::EvictionRule;
use super::writes::ChunkWrite;
use super::{Refused, Store};

/// Chunks that are being verified.
#[derive(Debug, Default)]
pub(super) struct Verifications {
    open: BTreeMap<u64, Verification>,
    /// The number of wrong chunks so far.
    damaged: u64,
}

#[derive(Debug)]
struct Verification {
    chunk: ChunkId,
    /// The checksums that its blocks should have.
    sums: Vec<u64>,
}

/// A chunk to sum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyOrder {
    /// Its number, for [`Store::finish_verify`], which must follow.
    pub verify: u64,
    /// The places and names of its blocks.
    pub blocks: Vec<BlockMove>,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl Verifications {
    /// Whether a chunk is being verified.
    pub(super) fn has(&self, id: ChunkId) -> bool {
        self.open.values().any(|open| open.chunk == id)
    }

    /// Counts a chunk whose bytes have changed.
    pub(super) fn found_damage(&mut self) {
        self.damaged += 1;
    }

    pub(super) fn damaged(&self) -> u64 {
        self.damaged
    }
}

impl Store {
    /// The fingerprint of a namespace that the session registered.
    ///
    /// # Errors
    /// [`Refused::Unknown`] if the session did not register it.
    pub fn registered(&self, session: SessionId, namespace: u32) -> Result<Fingerprint, Refused> {
        let (number, _) = self.slices(session, namespace)?;
        Ok(self.namespaces.get(number).fingerprint)
    }

    /// Starts to verify a chunk, which stays as it is meanwhile; `None` if it is not whole in memory, somebody writes to it,
    /// or it is being verified already.
    pub fn begin_verify(&mut self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Option<VerifyOrder> {
        let id = self.named(fingerprint, hash)?;
        let chunk = self.index.get(id);
        let is_written = chunk.blocks.iter().any(|block| matches!(block, Block::Writing(_)));
        if !chunk.is_complete() || is_written || self.verifications.has(id) {
            return None;
        }
        let ChunkWrite { blocks, .. } = self.chunk_write(Below::Disk, id);
        let (blocks, sums): (Vec<BlockMove>, Vec<u64>) = blocks
            .into_iter()
            .map(|(block, sums)| (BlockMove { is_in_place: true, ..block }, sums.whole))
            .unzip();
        let bytes = blocks.iter().map(|block| block.bytes).sum();
        self.change(id, |chunk| chunk.claims += 1);
        let verify = self.next_number();
        self.verifications.open.insert(verify, Verification { chunk: id, sums });
        Some(VerifyOrder { verify, blocks, bytes })
    }

    /// Ends a verification. `sums` are in the order of the blocks; `None` if they are not known. Drops a wrong chunk, and returns
    /// the verdict.
    pub fn finish_verify(&mut self, verify: u64, sums: Option<&[u64]>) -> Checked {
        let Some(Verification { chunk, sums: right }) = self.verifications.open.remove(&verify) else {
            return Checked::Nothing;
        };
        let found = match sums {
            None => Checked::Nothing,
            Some(sums) if sums == right => Checked::Right,
            Some(_) => {
                self.verifications.found_damage();
                self.condemn(chunk, EvictionRule::Damaged);
                Checked::Damaged
            }
        };
        self.unclaim(&[chunk]);
        self.evict_above_watermark();
        found
    }

    /// Cancels the waiting writes of a chunk.
    pub(super) fn stop_writes_of(&mut self, id: ChunkId) {
        let (tenant, bytes) = (self.tenant_of(id), self.whole_chunk_bytes(self.index.get(id).namespace));
        let mut claims = 0;
        if self.disk.as_mut().is_some_and(|disk| disk.line.forget(id, tenant, bytes)) {
            claims += 1;
        }
        if self.object.as_mut().is_some_and(|object| object.line.forget(id, tenant, bytes)) {
            claims += 1;
        }
        self.change(id, |chunk| {
            chunk.claims -= claims;
            if chunk.disk == OnDisk::Coming {
                // The record of a write under way is given up when the write has ended.
                chunk.disk = OnDisk::Nowhere;
            }
        });
    }
}
