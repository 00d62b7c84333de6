//! Grants: chunks that another node reads here, and chunks that moved to it.

use std::collections::BTreeMap;

use larder_protocol::{ChunkHash, Fingerprint, PoolSet};

use super::Store;
use super::hand_out::Named;
use super::ids::ChunkId;
use super::index::{Block, OnDisk};
use super::lookup::{Place, Presence};
use super::policy::Removal;
use super::remembered::EvictionRule;
use crate::placement::PlacementRule;

/// Chunks that are being sent to other nodes.
#[derive(Debug, Default)]
pub(super) struct Grants {
    open: BTreeMap<u64, ChunkId>,
    /// Chunks that moved to other nodes so far.
    pub(super) given_up: u64,
}

/// The answer for one chunk that another node requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Granted {
    /// The chunk's blocks may be read until [`Store::end_grant`].
    Held {
        /// The grant.
        grant: u64,
        /// How often the chunk was read, this time included.
        reads: u32,
        /// Whether the chunk is on disk here too.
        is_on_disk: bool,
        /// The pools that the chunk has.
        pools: PoolSet,
        /// The blocks of these pools, by slice, then pool.
        blocks: Vec<GrantedBlock>,
    },
    /// The chunk is only on disk: [`Store::recall`] brings it.
    OnDisk,
    /// The chunk is not here, or its blocks have other sizes.
    NotHeld,
    /// Too much is being sent.
    Busy,
}

/// One block that another node may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantedBlock {
    /// The block's place.
    pub place: Place,
    /// Its size.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: u64,
}

impl Grants {
    pub(super) fn len(&self) -> u64 {
        self.open.len() as u64
    }
}

impl Store {
    /// Keeps a complete chunk from reuse, for another node with the same block sizes. This counts as a use.
    pub fn grant(&mut self, fingerprint: &Fingerprint, hash: &ChunkHash, block_bytes: &[u64]) -> Granted {
        let granted = self.grant_all(fingerprint, std::slice::from_ref(hash), block_bytes).pop();
        granted.unwrap_or(Granted::NotHeld)
    }

    /// As [`Store::grant`], for chunks of a prompt, first to last.
    pub fn grant_all(
        &mut self,
        fingerprint: &Fingerprint,
        hashes: &[ChunkHash],
        block_bytes: &[u64],
    ) -> Vec<Granted> {
        let mut granted: Vec<Granted> =
            hashes.iter().map(|hash| self.grant_one(fingerprint, hash, block_bytes)).collect();
        // The policy hears of a prompt's uses from last to first.
        for granted in granted.iter_mut().rev() {
            if let Granted::Held { grant, reads, .. } = granted
                && let Some(&id) = self.grants.open.get(grant)
            {
                self.count_use(id);
                *reads = self.index.get(id).reads.into();
            }
        }
        granted
    }

    /// Keeps a chunk from reuse; its use is not counted yet.
    fn grant_one(&mut self, fingerprint: &Fingerprint, hash: &ChunkHash, block_bytes: &[u64]) -> Granted {
        let Some(namespace) = self.namespaces.of(fingerprint) else { return Granted::NotHeld };
        let Some(id) = self.index.find(namespace, hash) else { return Granted::NotHeld };
        if !self.may_leave(&Named { id, namespace, hash: *hash }) {
            return Granted::NotHeld;
        }
        if self.limits.peers.as_ref().is_none_or(|peers| self.grants.len() >= peers.max_granted_chunks) {
            return Granted::Busy;
        }
        let chunk = self.index.get(id);
        let pools = &self.namespaces.get(chunk.namespace).pools;
        let sizes = (0..chunk.blocks.len()).map(|block| pools[block % pools.len()].spec.block_bytes());
        if !sizes.eq(block_bytes.iter().copied()) {
            return Granted::NotHeld;
        }
        match self.presence(id) {
            Presence::Here(_) => {}
            Presence::OnDisk(_) => return Granted::OnDisk,
            Presence::Absent => return Granted::NotHeld,
        }
        let (is_on_disk, has) = (chunk.disk == OnDisk::Here && !chunk.outgrew_disk(), chunk.pools);
        let mut blocks = Vec::with_capacity(chunk.blocks.len());
        for (block, (number, pool)) in chunk.blocks.iter().zip(pools.iter().enumerate().cycle()) {
            if !has.has(number) {
                continue;
            }
            let Block::Ready(slot, checksums) = block else { return Granted::NotHeld };
            let place = Place { extent: slot.extent, offset: self.slab.offset(*slot) };
            blocks.push(GrantedBlock { place, bytes: pool.spec.block_bytes(), checksum: checksums.whole });
        }
        self.change(id, |chunk| chunk.claims += 1);
        let reads = self.index.get(id).reads.into();
        let grant = self.next_number();
        if self.placement() == PlacementRule::Worth {
            self.index.get_mut(id).set_read_elsewhere();
        }
        self.grants.open.insert(grant, id);
        Granted::Held { grant, reads, is_on_disk, pools: has, blocks }
    }

    /// Ends a grant or a peer's follow. Nothing happens if the number is unknown.
    pub fn end_grant(&mut self, grant: u64) {
        match self.grants.open.remove(&grant) {
            Some(id) => {
                self.unclaim(&[id]);
                self.evict_above_watermark();
            }
            None => self.end_follow(grant),
        }
    }

    /// Notes that other holders keep these chunks from now on. Chunks that were being forwarded leave; the others stay as copies,
    /// and the deepest copies are evicted first.
    pub fn others_keep(&mut self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) {
        for hash in hashes.iter().rev() {
            if let Some(id) = self.named(fingerprint, hash)
                && !self.was_taken(id)
                && self.index.get(id).is_cached()
                && !self.index.get(id).is_copy()
            {
                self.is_copy(id);
                self.grants.given_up += 1;
            }
        }
    }

    /// Drops chunks that another holder keeps from now on. Chunks that somebody uses here stay, and are returned. Children stay.
    pub fn give_up(&mut self, fingerprint: &Fingerprint, hashes: &[ChunkHash]) -> Vec<ChunkHash> {
        let mut used = Vec::new();
        for hash in hashes {
            let Some(id) = self.named(fingerprint, hash) else { continue };
            if self.was_taken(id) {
                continue;
            }
            let chunk = self.index.get(id);
            if chunk.claims > 0 || chunk.pins > 0 || !chunk.is_cached() {
                used.extend((chunk.claims > 0 || chunk.pins > 0).then_some(*hash));
                continue;
            }
            self.remember(id, EvictionRule::Moved);
            self.give_up_on_disk(id);
            self.uncount(id);
            self.tenants.remove(self.owner_of(id), id.number(), Removal::Dropped);
            self.forget(id);
            self.grants.given_up += 1;
        }
        used
    }

    pub(super) fn named(&self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Option<ChunkId> {
        self.index.find(self.namespaces.of(fingerprint)?, hash)
    }
}
