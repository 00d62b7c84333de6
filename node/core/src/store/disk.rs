//! The store's knowledge of its disk: which chunks are on it, and which have left it.
//!
//! A chunk that only the disk has stays in the index, without a slot. So it keeps its place in the prefix tree: announcements
//! need that place. Leaf-first eviction counts only children in memory.

use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet, PoolSpec};

use super::ids::{ChunkId, ChunkKey, TenantId};
use super::index::{OnDisk, Standing};
use super::journal::{ChangeKind, is_held};
use super::remembered::EvictionRule;
use super::writes::{WriteLine, WritePolicy};
use super::{Refused, Store};

/// A store's settings for the disk below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskStoreLimits {
    /// When chunks are written.
    pub write: WritePolicy,
    /// For [`WritePolicy::WriteThroughSelective`]: the number of uses, the commit included, from which a chunk is written.
    pub write_after_uses: u32,
    /// Limit of the bytes of chunks that wait to be written or are being written; further chunks are not written.
    pub max_waiting_bytes: u64,
    /// Limit of the bytes of slots into which chunks are being read.
    pub max_reading_bytes: u64,
}

/// A store's state for the disk below it.
#[derive(Debug)]
pub(super) struct Disk {
    /// The chunks to write.
    pub(super) line: WriteLine,
    max_reading_bytes: u64,
    touched: Vec<ChunkKey>,
    given_up: Vec<ChunkKey>,
    chunks: u64,
    /// Whether the drive does not answer, so that chunks on disk count as absent.
    is_silent: bool,
}

/// A store's contents on disk, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskUsage {
    /// Chunks on disk.
    pub chunks: u64,
    /// Whether each chunk is written at its commit, so that memory keeps only chunks that are on disk too.
    pub writes_through: bool,
    /// Bytes of chunks that wait to be written, or are being written.
    pub waiting_bytes: u64,
    /// Chunks that were not written because too many waited.
    pub shed: u64,
}

impl Disk {
    pub(super) fn new(limits: &DiskStoreLimits) -> Self {
        let line = WriteLine::new(Some(limits.write), limits.write_after_uses, limits.max_waiting_bytes);
        let (touched, given_up) = (Vec::new(), Vec::new());
        let max_reading_bytes = limits.max_reading_bytes;
        Self { line, max_reading_bytes, touched, given_up, chunks: 0, is_silent: false }
    }

    pub(super) fn max_reading_bytes(&self) -> u64 {
        self.max_reading_bytes
    }

    pub(super) fn usage(&self) -> DiskUsage {
        let (waiting_bytes, shed) = self.line.usage();
        let writes_through = self.line.writes_through();
        DiskUsage { chunks: self.chunks, writes_through, waiting_bytes, shed }
    }
}

impl Store {
    /// Adds a namespace whose chunks are on disk, before any session names it.
    ///
    /// # Errors
    /// [`Refused`] if it does not fit this node.
    pub fn know(
        &mut self,
        tenant: TenantId,
        tenant_name: &str,
        spec: &NamespaceSpec,
    ) -> Result<u32, Refused> {
        self.must_serve(tenant)?;
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

    /// Adds a chunk that was found on disk with these pools at the node's start. Returns whether its namespace is known, so that
    /// the chunk can be used.
    pub fn recovered(&mut self, fingerprint: &Fingerprint, name: ChunkRef, pools: PoolSet) -> bool {
        let Some(number) = self.namespaces.of(fingerprint) else { return false };
        let Ok(id) = self.enter_name(number, name) else { return false };
        if self.index.get(id).standing == Standing::Condemned {
            // The chunk was purged or found damaged since the start.
            let given_up = self.disk.iter_mut().map(|disk| &mut disk.given_up);
            given_up.for_each(|keys| keys.push(ChunkKey { fingerprint: *fingerprint, hash: name.hash }));
            return true;
        }
        if self.index.get(id).disk != OnDisk::Here {
            let rules = &self.namespaces.get(number).rules;
            self.index.get_mut(id).disk_pools = pools.common(rules.every()).and(rules.obligatory());
            self.now_on_disk(id);
        }
        true
    }

    /// Ends a write of these pools to disk; `is_there` says whether the chunk is on disk. The caller ends the claim of the write.
    pub(super) fn written_to_disk(&mut self, id: ChunkId, pools: PoolSet, is_there: bool) {
        let chunk = self.index.get_mut(id);
        if chunk.disk == OnDisk::Coming {
            chunk.disk = OnDisk::Nowhere;
        }
        let chunk = self.index.get(id);
        if chunk.standing == Standing::Condemned {
            let fingerprint = self.namespaces.get(chunk.namespace).fingerprint;
            let key = ChunkKey { fingerprint, hash: chunk.hash };
            if let Some(disk) = self.disk.as_mut().filter(|_| is_there) {
                disk.given_up.push(key);
            }
        } else if is_there && self.disk.is_some() {
            self.index.get_mut(id).disk_pools = pools;
            self.now_on_disk(id);
            // The chunk may have got another pool meanwhile.
            self.queue_disk_write(id);
        }
    }

    /// Whether an open disk tier exists.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Whether the disk's drive does not answer.
    pub fn is_disk_silent(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.is_silent)
    }

    /// Notes that the disk's drive does not answer, or answers again. Meanwhile chunks on disk count as absent.
    pub fn disk_silent(&mut self, is_silent: bool) {
        self.disk.iter_mut().for_each(|disk| disk.is_silent = is_silent);
    }

    /// Notes that chunks are no longer on disk.
    pub fn left_disk(&mut self, keys: &[ChunkKey]) {
        // All keys are looked up before the first chunk leaves the index.
        let known = keys.iter().filter_map(|ChunkKey { fingerprint, hash }| self.named(fingerprint, hash));
        let known: Vec<ChunkId> = known.collect();
        for id in known {
            // A key may come twice.
            if self.index.known(id).is_some_and(|chunk| chunk.disk == OnDisk::Here) {
                self.dropped_by_disk(id);
            }
        }
        self.index.settle();
    }

    /// Closes the disk: nothing on it can be read any more, and nothing is written.
    pub fn disk_closed(&mut self) {
        let Some(Disk { line, .. }) = self.disk.take() else { return };
        for id in line.into_waiting() {
            let chunk = self.index.get_mut(id);
            if chunk.disk == OnDisk::Coming {
                chunk.disk = OnDisk::Nowhere;
            }
            self.unclaim(&[id]);
        }
        let on_disk = self.index.iter_from(0).filter(|(_, _, chunk)| chunk.disk == OnDisk::Here);
        let on_disk: Vec<ChunkId> = on_disk.map(|(_, id, _)| id).collect();
        on_disk.into_iter().for_each(|id| self.dropped_by_disk(id));
        self.index.settle();
    }

    /// Chunks on disk that left memory since the last call and had been read there: the disk should keep them.
    pub fn take_touched(&mut self) -> Vec<ChunkKey> {
        self.disk.as_mut().map(|disk| std::mem::take(&mut disk.touched)).unwrap_or_default()
    }

    /// Takes a chunk that is on disk out of memory.
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

    /// Notes that the disk evicted a chunk. The caller settles the index.
    fn dropped_by_disk(&mut self, id: ChunkId) {
        if !self.index.get(id).is_resident() {
            self.remember(id, EvictionRule::Disk);
        }
        self.no_longer_on_disk(id);
    }

    /// Forgets a chunk's place on disk. The caller settles the index.
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
