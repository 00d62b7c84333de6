//! The disk below the store: which chunks are written to it, which are there, which left it.
//!
//! A chunk that is to be written is claimed until it is; its bytes stay as they are meanwhile. What is on disk alone keeps
//! its place in the prefix tree and takes no slot.

use std::collections::VecDeque;

use larder_protocol::checksum::{BlockKey, range_bytes};
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::session::Place;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet, PoolSpec};

use super::commit::BlockMove;
use super::hand_out::Named;
use super::ids::{ChunkId, TenantId};
use super::index::{Block, OnDisk, Standing};
use super::journal::is_held;
use super::namespaces::Pool;
use super::{Checksums, Refused, Store};
use crate::store::ChangeKind;
use crate::store::admission::Admission;
use crate::store::ids::ChunkKey;

/// When a chunk is written from memory to disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// When it is committed: it survives a restart from then on.
    #[default]
    WriteThrough,
    /// When it was used often enough: what is used once does not wear the drive.
    WriteThroughSelective,
    /// When it is evicted from memory.
    WriteBack,
}

/// What a store needs to know of the disk below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskStoreLimits {
    /// When chunks are written.
    pub write: WritePolicy,
    /// For [`WritePolicy::WriteThroughSelective`]: from which use on, the commit included.
    pub write_after_uses: u32,
    /// Bytes of chunks that wait to be written or are being written; what is beyond it is not written.
    pub max_waiting_bytes: u64,
    /// Bytes of slots into which chunks are being read.
    pub max_reading_bytes: u64,
}

/// What a store knows of the disk below it.
#[derive(Debug)]
pub(super) struct Disk {
    limits: DiskStoreLimits,
    admission: Admission,
    /// Claimed.
    waiting: VecDeque<Named>,
    waiting_bytes: u64,
    touched: Vec<ChunkKey>,
    given_up: Vec<ChunkKey>,
    chunks: u64,
    shed: u64,
}

/// A write under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteId(pub(super) ChunkId, pub(super) PoolSet);

/// A chunk to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkWrite {
    /// For [`Store::written`] or [`Store::postpone_write`], one of which must follow; [`Store::uploaded`] or
    /// [`Store::postpone_upload`] where it goes to the object store.
    pub write: WriteId,
    /// Its namespace's number.
    pub namespace: u32,
    /// Its namespace.
    pub fingerprint: Fingerprint,
    /// Its name.
    pub chunk: ChunkRef,
    /// Whether a record that is there already lacks some of these blocks, and is to be forgotten.
    pub replaces: bool,
    /// Where the blocks of its pools stand, by slice, then pool, with their checksums.
    pub blocks: Vec<(BlockMove, Checksums)>,
}

/// What a store has on disk, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskUsage {
    /// Chunks on disk.
    pub chunks: u64,
    /// Bytes of chunks that wait to be written, or are being written.
    pub waiting_bytes: u64,
    /// Chunks that were not written because too many waited.
    pub shed: u64,
}

impl Disk {
    pub(super) fn new(limits: DiskStoreLimits) -> Self {
        let admission = Admission::new(REMEMBERED_CHUNKS, limits.write_after_uses);
        Self {
            limits,
            admission,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            touched: Vec::new(),
            given_up: Vec::new(),
            chunks: 0,
            shed: 0,
        }
    }

    pub(super) fn max_reading_bytes(&self) -> u64 {
        self.limits.max_reading_bytes
    }

    /// Takes a chunk of so many bytes out of what waits to be written; whether it was there.
    pub(super) fn forget_waiting(&mut self, id: ChunkId, bytes: u64) -> bool {
        let Some(at) = self.waiting.iter().position(|waiting| waiting.id == id) else { return false };
        self.waiting.remove(at);
        self.waiting_bytes -= bytes;
        true
    }

    pub(super) fn usage(&self) -> DiskUsage {
        DiskUsage { chunks: self.chunks, waiting_bytes: self.waiting_bytes, shed: self.shed }
    }
}

impl Store {
    /// Makes a namespace known whose chunks are on disk, before any session names it.
    ///
    /// # Errors
    /// [`Refused`] where it does not fit this node.
    pub fn know(
        &mut self,
        tenant: TenantId,
        tenant_name: &str,
        spec: &NamespaceSpec,
    ) -> Result<u32, Refused> {
        spec.check()?;
        let extent_bytes = self.limits.extent_bytes;
        let class = |block_bytes: u64| {
            self.slab.class(tenant, block_bytes).ok_or(Refused::BlockTooLarge { block_bytes, extent_bytes })
        };
        let classes =
            spec.pools.iter().map(PoolSpec::block_bytes).map(class).collect::<Result<Vec<_>, _>>()?;
        let most = self.most_namespaces();
        let too_many = Refused::TooManyNamespaces { most };
        let number = self.namespaces.enter((tenant, tenant_name), spec, &classes, most).ok_or(too_many)?;
        Ok(number.0.into())
    }

    /// A chunk was found on disk with these pools when the node started. Whether its namespace is known, so that it can be
    /// used.
    pub fn recovered(&mut self, fingerprint: &Fingerprint, name: ChunkRef, pools: PoolSet) -> bool {
        let Some(number) = self.namespaces.of(fingerprint) else { return false };
        let Ok(id) = self.enter_name(number, name) else { return false };
        if self.index.get(id).disk != OnDisk::Here {
            let rules = &self.namespaces.get(number).rules;
            self.index.get_mut(id).disk_pools = pools.common(rules.every()).and(rules.obligatory());
            self.now_on_disk(id);
        }
        true
    }

    /// The next chunk to be written, if one waits.
    pub fn next_write(&mut self) -> Option<ChunkWrite> {
        loop {
            let named = self.disk.as_mut()?.waiting.pop_front()?;
            if self.may_leave(&named) {
                return Some(self.chunk_write(named.id));
            }
            if self.index.known(named.id).is_some() {
                self.written(WriteId(named.id, PoolSet::default()), false);
            }
        }
    }

    /// What is to be written of a chunk, as it is.
    pub(super) fn chunk_write(&self, id: ChunkId) -> ChunkWrite {
        let number = self.index.get(id).namespace;
        let (namespace, chunk) = (self.namespaces.get(number), self.index.get(id));
        let mut blocks = Vec::with_capacity(chunk.blocks.len());
        for slice in 0..namespace.slices {
            for (pool, Pool { spec, .. }) in namespace.pools.iter().enumerate() {
                if !chunk.pools.has(pool) {
                    continue;
                }
                let Block::Ready(slot, checksums) = &chunk.blocks[namespace.block(slice, pool)] else {
                    continue;
                };
                let fingerprint = namespace.fingerprint;
                let key = BlockKey { fingerprint, hash: chunk.hash, slice, pool: pool as u8 };
                let place = Place { extent: slot.extent, offset: self.slab.offset(*slot) };
                let (bytes, range_bytes) = (spec.block_bytes(), range_bytes(spec));
                blocks.push((
                    BlockMove { source: None, is_in_place: false, place, bytes, range_bytes, key },
                    checksums.clone(),
                ));
            }
        }
        // Where all records of a namespace have the same blocks, none needs to take the place of another.
        let (write, replaces) = (WriteId(id, chunk.pools), !namespace.rules.is_plain());
        let (fingerprint, chunk) = (namespace.fingerprint, self.index.name(id));
        ChunkWrite { write, namespace: number.0.into(), fingerprint, chunk, replaces, blocks }
    }

    /// The write cannot be ordered now: it is the next again.
    pub fn postpone_write(&mut self, WriteId(id, _): WriteId) {
        let named = self.name_now(id);
        if let Some(disk) = &mut self.disk {
            disk.waiting.push_front(named);
        }
    }

    /// A write has ended; whether the chunk is on disk.
    pub fn written(&mut self, WriteId(id, pools): WriteId, is_on_disk: bool) {
        let bytes = self.whole_chunk_bytes(self.index.get(id).namespace);
        if let Some(disk) = &mut self.disk {
            disk.waiting_bytes -= bytes;
        }
        let chunk = self.index.get_mut(id);
        if chunk.disk == OnDisk::Coming {
            chunk.disk = OnDisk::Nowhere;
        }
        let chunk = self.index.get(id);
        if chunk.standing == Standing::Damaged {
            let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
            let key = ChunkKey { fingerprint, hash: chunk.hash };
            if let Some(disk) = self.disk.as_mut().filter(|_| is_on_disk) {
                disk.given_up.push(key);
            }
        } else if is_on_disk && self.disk.is_some() {
            self.index.get_mut(id).disk_pools = pools;
            self.now_on_disk(id);
            // It may have got another pool meanwhile.
            self.arrived(id);
        }
        self.unclaim(&[id]);
        self.evict_above_watermark();
    }

    /// Chunks are no longer on disk.
    pub fn left_disk(&mut self, keys: &[ChunkKey]) {
        // All are looked up before the first leaves the index.
        let known = keys.iter().filter_map(|ChunkKey { fingerprint, hash }| self.named(fingerprint, hash));
        let known: Vec<ChunkId> = known.collect();
        for id in known {
            // A key may come twice.
            if self.index.known(id).is_some_and(|chunk| chunk.disk == OnDisk::Here) {
                self.no_longer_on_disk(id);
            }
        }
        self.index.settle();
    }

    /// The disk is closed: nothing on it can be read any more, and nothing is written.
    pub fn disk_closed(&mut self) {
        let Some(Disk { waiting, .. }) = self.disk.take() else { return };
        for Named { id, .. } in waiting {
            let chunk = self.index.get_mut(id);
            if chunk.disk == OnDisk::Coming {
                chunk.disk = OnDisk::Nowhere;
            }
            self.unclaim(&[id]);
        }
        let on_disk = self.index.iter_from(0).filter(|(_, _, chunk)| chunk.disk == OnDisk::Here);
        let on_disk: Vec<ChunkId> = on_disk.map(|(_, id, _)| id).collect();
        on_disk.into_iter().for_each(|id| self.no_longer_on_disk(id));
        self.index.settle();
    }

    /// Chunks on disk that were used in memory since the last call: they should stay there.
    pub fn take_touched(&mut self) -> Vec<ChunkKey> {
        self.disk.as_mut().map(|disk| std::mem::take(&mut disk.touched)).unwrap_or_default()
    }

    /// A chunk was committed, or moved here.
    pub(super) fn arrived(&mut self, id: ChunkId) {
        let Some(disk) = &mut self.disk else { return };
        let chunk = self.index.get(id);
        if !chunk.belongs_on_disk() {
            return;
        }
        let goes = match disk.limits.write {
            WritePolicy::WriteThrough => true,
            WritePolicy::WriteThroughSelective => disk.admission.used(&chunk.hash),
            WritePolicy::WriteBack => false,
        };
        if goes {
            self.wait_for_write(id);
        }
    }

    /// A chunk that can be read was used.
    pub(super) fn used(&mut self, id: ChunkId) {
        self.used_for_upload(id);
        let Some(disk) = &mut self.disk else { return };
        let chunk = self.index.get(id);
        if disk.limits.write == WritePolicy::WriteThroughSelective
            && chunk.belongs_on_disk()
            && disk.admission.used(&chunk.hash)
        {
            self.wait_for_write(id);
        }
    }

    /// Lets a chunk that is evicted leave by way of the disk or the object store, where they want it and there is room; whether
    /// it does. It is no longer counted as cached, and the policy does not know it any more.
    pub(super) fn demote(&mut self, id: ChunkId) -> bool {
        let chunk = self.index.get(id);
        let to_disk = self.disk.as_ref().is_some_and(|disk| {
            disk.limits.write != WritePolicy::WriteThroughSelective && chunk.belongs_on_disk()
        });
        let to_objects = self.object.as_ref().is_some_and(|object| object.wants_evicted(chunk));
        if !to_disk && !to_objects {
            return false;
        }
        self.index.get_mut(id).standing = Standing::Leaving;
        let goes_to_disk = to_disk && self.wait_for_write(id);
        let is_uploaded = to_objects && self.wait_for_upload(id);
        if !goes_to_disk && !is_uploaded {
            self.index.get_mut(id).standing = Standing::Kept;
            return false;
        }
        let bytes = self.readable_bytes(id);
        self.gathers.add_passing(self.tenant_of(id), bytes);
        self.vacate(id);
        true
    }

    /// A chunk that is on disk leaves memory.
    pub(super) fn leave_to_disk(&mut self, id: ChunkId) {
        let fingerprint = self.namespaces.get(self.index.get(id).namespace).fingerprint;
        let chunk = self.index.get_mut(id);
        for block in &mut chunk.blocks {
            if let Some(slot) = std::mem::take(block).slot() {
                self.slab.free(slot);
            }
        }
        chunk.ready = 0;
        chunk.pools = PoolSet::default();
        chunk.standing = Standing::Kept;
        if std::mem::take(&mut chunk.reads) > 0
            && let Some(disk) = &mut self.disk
        {
            disk.touched.push(ChunkKey { fingerprint, hash: chunk.hash });
        }
        self.vacate(id);
    }

    /// Gives up the place on disk of a chunk that moved to another node.
    pub(super) fn give_up_on_disk(&mut self, id: ChunkId) {
        let chunk = self.index.get(id);
        if chunk.disk != OnDisk::Here {
            return;
        }
        let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
        let key = ChunkKey { fingerprint, hash: chunk.hash };
        if let Some(disk) = &mut self.disk {
            disk.given_up.push(key);
        }
        self.no_longer_on_disk(id);
    }

    /// Chunks whose place on disk was given up since the last call.
    pub fn take_given_up(&mut self) -> Vec<ChunkKey> {
        self.disk.as_mut().map(|disk| std::mem::take(&mut disk.given_up)).unwrap_or_default()
    }

    /// Has a chunk written, if there is room among those that wait; whether it will be.
    fn wait_for_write(&mut self, id: ChunkId) -> bool {
        let named = self.name_now(id);
        let bytes = self.whole_chunk_bytes(named.namespace);
        let Some(disk) = &mut self.disk else { return false };
        if disk.waiting_bytes + bytes > disk.limits.max_waiting_bytes {
            disk.shed += 1;
            return false;
        }
        disk.waiting_bytes += bytes;
        disk.waiting.push_back(named);
        self.change(id, |chunk| {
            chunk.claims += 1;
            if chunk.disk == OnDisk::Nowhere {
                chunk.disk = OnDisk::Coming;
            }
        });
        true
    }

    fn now_on_disk(&mut self, id: ChunkId) {
        let was_held = is_held(self.index.get(id));
        if std::mem::replace(&mut self.index.get_mut(id).disk, OnDisk::Here) == OnDisk::Here {
            return;
        }
        if let Some(disk) = &mut self.disk {
            disk.chunks += 1;
        }
        self.tell(id, was_held, ChangeKind::Gained);
    }

    /// The caller settles the index.
    fn no_longer_on_disk(&mut self, id: ChunkId) {
        let was_held = is_held(self.index.get(id));
        if let Some(disk) = &mut self.disk {
            disk.chunks -= 1;
        }
        let chunk = self.index.get_mut(id);
        chunk.disk = OnDisk::Nowhere;
        let is_gone = !chunk.is_resident() && chunk.claims == 0;
        self.tell(id, was_held, ChangeKind::Gained);
        if is_gone {
            self.take_out(id);
        }
    }
}

/// Chunks whose uses are remembered after they left memory, for [`WritePolicy::WriteThroughSelective`].
const REMEMBERED_CHUNKS: usize = 1 << 20;
