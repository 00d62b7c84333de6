//! Writes from memory to the tiers below: one line of chunks for each tier, with one set of rules.
//!
//! A chunk that waits for its write is claimed, so its bytes stay as they are. The line is bounded, and each tenant has a part of
//! it: a chunk beyond the bound stays only in memory, is counted, and has another chance when it is evicted. Until an evicted
//! chunk is on disk it can still be read. A record is written again when its chunk has gained a pool; the old record counts until
//! the new record is durable. A chunk that only the disk has is not uploaded.

use std::collections::{BTreeMap, HashMap};

use larder_protocol::checksum::{BlockKey, range_bytes};
use larder_protocol::session::Place;
use larder_protocol::{ChunkRef, Fingerprint, PoolSet};

use super::admission::Admission;
use super::commit::BlockMove;
use super::disk::Disk;
use super::hand_out::Named;
use super::ids::{Below, ChunkId, ChunkKey, TenantId};
use super::index::{Account, Block, Chunk, OnDisk, Standing, Stored};
use super::namespaces::{Namespace, Pool};
use super::object::Objects;
use super::shares::Shares;
use super::{Checksums, Store};

/// When a chunk is written from memory to a tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// At its commit: the chunk survives a restart from then on.
    #[default]
    WriteThrough,
    /// After enough uses: chunks that are used once do not wear the drive.
    WriteThroughSelective,
    /// At its eviction from memory.
    WriteBack,
}

/// A write under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteId {
    pub(super) chunk: ChunkId,
    /// The pools to write.
    pub(super) pools: PoolSet,
    /// The tier to write to.
    pub tier: Below,
}

/// A chunk to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkWrite {
    /// The write's number; [`Store::written`] or [`Store::postpone_write`] must follow.
    pub write: WriteId,
    /// The number of the chunk's namespace.
    pub namespace: u32,
    /// The fingerprint of the chunk's namespace.
    pub fingerprint: Fingerprint,
    /// The chunk's name.
    pub chunk: ChunkRef,
    /// Whether an older record may lack some of these blocks, so that this write replaces it.
    pub replaces: bool,
    /// The places of the chunk's blocks, by slice, then pool, with their checksums.
    pub blocks: Vec<(BlockMove, Checksums)>,
}

/// Chunks that wait to be written to a tier, or are being written.
#[derive(Debug)]
pub(super) struct WriteLine {
    /// When chunks are written; never if `None`.
    policy: Option<WritePolicy>,
    admission: Admission,
    /// Chunks that wait; they are claimed.
    waiting: Waiting,
    /// Bytes of waiting chunks, including those that are being written, by tenant.
    waiting_bytes: Shares,
    max_waiting_bytes: u64,
    shed: u64,
}

/// Chunks in the order in which they are to be written. A purge takes out many of them, wherever they are.
#[derive(Debug, Default)]
struct Waiting {
    line: BTreeMap<i64, Named>,
    places: HashMap<ChunkId, i64>,
}

impl Waiting {
    fn push_back(&mut self, named: Named) {
        let place = self.line.last_key_value().map_or(0, |(last, _)| last + 1);
        self.insert(place, named);
    }

    fn push_front(&mut self, named: Named) {
        let place = self.line.first_key_value().map_or(0, |(first, _)| first - 1);
        self.insert(place, named);
    }

    fn pop_front(&mut self) -> Option<Named> {
        let (_, named) = self.line.pop_first()?;
        self.places.remove(&named.id);
        Some(named)
    }

    fn remove(&mut self, id: ChunkId) -> bool {
        self.places.remove(&id).is_some_and(|place| self.line.remove(&place).is_some())
    }

    fn insert(&mut self, place: i64, named: Named) {
        let before = self.places.insert(named.id, place);
        debug_assert!(before.is_none(), "a chunk waits once");
        self.line.insert(place, named);
    }
}

/// The moment in a chunk's life at which a write is considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// The chunk was committed here, or moved here.
    Came,
    /// The chunk was used.
    Used,
    /// The chunk leaves memory.
    Evicted,
}

impl WriteLine {
    pub(super) fn new(policy: Option<WritePolicy>, write_after_uses: u32, max_waiting_bytes: u64) -> Self {
        let admission = Admission::new(REMEMBERED_CHUNKS, write_after_uses);
        Self {
            policy,
            admission,
            waiting: Waiting::default(),
            waiting_bytes: Shares::default(),
            max_waiting_bytes,
            shed: 0,
        }
    }

    pub(super) fn writes_through(&self) -> bool {
        self.policy == Some(WritePolicy::WriteThrough)
    }

    /// The bytes of chunks that wait or are being written, and the number of chunks that were not written because too many
    /// waited.
    pub(super) fn usage(&self) -> (u64, u64) {
        (self.waiting_bytes.total(), self.shed)
    }

    /// Takes a tenant's chunk of `bytes` bytes out of the line; returns whether it was there.
    pub(super) fn forget(&mut self, id: ChunkId, tenant: TenantId, bytes: u64) -> bool {
        let was_there = self.waiting.remove(id);
        if was_there {
            self.waiting_bytes.take(tenant, bytes);
        }
        was_there
    }

    /// The chunks that wait and are not being written.
    pub(super) fn into_waiting(self) -> impl Iterator<Item = ChunkId> {
        self.waiting.line.into_values().map(|named| named.id)
    }

    /// Whether a chunk that may be written is written now. Counts the use, if the policy counts uses.
    fn wants(&mut self, namespace: &Namespace, chunk: &Chunk, moment: Moment) -> bool {
        let key = || ChunkKey { fingerprint: namespace.fingerprint, hash: chunk.hash };
        match (self.policy, moment) {
            (Some(WritePolicy::WriteThrough), Moment::Came | Moment::Evicted)
            | (Some(WritePolicy::WriteBack), Moment::Evicted) => true,
            (Some(WritePolicy::WriteThroughSelective), Moment::Came | Moment::Used) => {
                self.admission.used(namespace.tenant, &key())
            }
            (Some(WritePolicy::WriteThroughSelective), Moment::Evicted) => {
                self.admission.is_worth_writing(namespace.tenant, &key())
            }
            _ => false,
        }
    }
}

impl Store {
    /// The next chunk to be written to a tier, if one waits.
    pub fn next_write(&mut self, tier: Below) -> Option<ChunkWrite> {
        loop {
            let named = self.line(tier)?.waiting.pop_front()?;
            if self.may_leave(&named) {
                return Some(self.chunk_write(tier, named.id));
            }
            if self.index.known(named.id).is_some() {
                self.written(WriteId { chunk: named.id, pools: PoolSet::default(), tier }, false);
            }
        }
    }

    /// Puts a write back that cannot be ordered now: it comes first again, unless its tier is closed by now.
    pub fn postpone_write(&mut self, write: WriteId) {
        let named = self.name_now(write.chunk);
        match self.line(write.tier) {
            // A chunk that outgrew its record meanwhile waits for another write.
            Some(line) if !line.waiting.places.contains_key(&named.id) => line.waiting.push_front(named),
            _ => self.written(write, false),
        }
    }

    /// Ends a write; `is_there` says whether the tier has the chunk.
    pub fn written(&mut self, write: WriteId, is_there: bool) {
        let WriteId { chunk: id, pools, tier } = write;
        let (tenant, bytes) = (self.tenant_of(id), self.whole_chunk_bytes(self.index.get(id).namespace));
        if let Some(line) = self.line(tier) {
            line.waiting_bytes.take(tenant, bytes);
        }
        match tier {
            Below::Disk => self.written_to_disk(id, pools, is_there),
            Below::Object => {
                // A purge that is under way may delete the object yet.
                let stays = self.may_come(self.index.get(id).namespace);
                let chunk = self.index.get_mut(id);
                // It may have got another pool meanwhile.
                let is_whole = pools.has_all(chunk.pools);
                chunk.stored = if is_there && is_whole && stays { Stored::There } else { Stored::Unknown };
                if is_there && !is_whole {
                    self.write_if_wanted(tier, id, Moment::Came);
                }
            }
        }
        self.unclaim(&[id]);
        self.evict_above_watermark();
    }

    /// The write of a chunk in its present state.
    pub(super) fn chunk_write(&self, tier: Below, id: ChunkId) -> ChunkWrite {
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
        // If all records of a namespace have the same blocks, none needs to replace another.
        let (write, replaces) =
            (WriteId { chunk: id, pools: chunk.pools, tier }, !namespace.rules.is_plain());
        let (fingerprint, chunk) = (namespace.fingerprint, self.index.name(id));
        ChunkWrite { write, namespace: number.0.into(), fingerprint, chunk, replaces, blocks }
    }

    /// Queues the disk write of a chunk that was committed here or moved here. A moved chunk needs no upload: its first node has
    /// queued it.
    pub(super) fn queue_disk_write(&mut self, id: ChunkId) {
        self.write_if_wanted(Below::Disk, id, Moment::Came);
    }

    /// Queues the upload of a chunk that was committed here.
    pub(super) fn queue_upload(&mut self, id: ChunkId) {
        self.write_if_wanted(Below::Object, id, Moment::Came);
    }

    /// Queues the writes of a readable chunk that was used often enough.
    pub(super) fn queue_writes_after_use(&mut self, id: ChunkId) {
        self.write_if_wanted(Below::Object, id, Moment::Used);
        self.write_if_wanted(Below::Disk, id, Moment::Used);
    }

    /// Writes an evicted chunk to the tiers below before it leaves, if they want it and there is room; returns whether it does.
    /// The chunk is no longer counted as cached, and the policy does not know it any more.
    pub(super) fn demote(&mut self, id: ChunkId) -> bool {
        let to_disk = self.is_wanted(Below::Disk, id, Moment::Evicted);
        let to_objects = self.is_wanted(Below::Object, id, Moment::Evicted);
        if !to_disk && !to_objects {
            return false;
        }
        self.index.get_mut(id).standing = Standing::Leaving;
        let goes_to_disk = to_disk && self.wait_for_write(Below::Disk, id);
        let is_uploaded = to_objects && self.wait_for_write(Below::Object, id);
        if !goes_to_disk && !is_uploaded {
            self.index.get_mut(id).standing = Standing::Kept;
            return false;
        }
        let bytes = self.readable_bytes(id);
        self.passes(id, Account::Leaving, bytes);
        self.vacate(id);
        true
    }

    /// Forgets the uses by a tenant that left.
    pub(super) fn forget_uses(&mut self, tenant: TenantId) {
        for tier in [Below::Disk, Below::Object] {
            self.line(tier).into_iter().for_each(|line| line.admission.forget(tenant));
        }
    }

    fn line(&mut self, tier: Below) -> Option<&mut WriteLine> {
        line_of(&mut self.disk, &mut self.object, tier)
    }

    // This and its caller are inlined: commits, hits and evictions call them, mostly without a tier below. The call was 8 % of an
    // eviction.
    #[inline]
    fn is_wanted(&mut self, tier: Below, id: ChunkId, moment: Moment) -> bool {
        let Some(line) = line_of(&mut self.disk, &mut self.object, tier) else { return false };
        let chunk = self.index.get(id);
        let may_be_written = match tier {
            Below::Disk => chunk.belongs_on_disk(),
            Below::Object => chunk.belongs_in_objects(),
        };
        may_be_written && line.wants(self.namespaces.get(chunk.namespace), chunk, moment)
    }

    #[inline]
    fn write_if_wanted(&mut self, tier: Below, id: ChunkId, moment: Moment) {
        if self.is_wanted(tier, id, moment) {
            self.wait_for_write(tier, id);
        }
    }

    /// Queues the write of a chunk, if there is room in the line and the drive answers; returns whether it will be written.
    fn wait_for_write(&mut self, tier: Below, id: ChunkId) -> bool {
        if tier == Below::Disk && self.is_disk_silent() {
            return false;
        }
        let named = self.name_now(id);
        let bytes = self.whole_chunk_bytes(named.namespace);
        let (tenant, tenants) = (self.tenant_of(id), &self.limits.tenant_bytes);
        let Some(line) = line_of(&mut self.disk, &mut self.object, tier) else { return false };
        if line.waiting.places.contains_key(&id) {
            return true;
        }
        if !line.waiting_bytes.may_add(tenant, bytes, line.max_waiting_bytes, tenants) {
            line.shed += 1;
            return false;
        }
        line.waiting_bytes.add(tenant, bytes);
        line.waiting.push_back(named);
        self.change(id, |chunk| {
            chunk.claims += 1;
            match tier {
                Below::Disk if chunk.disk == OnDisk::Nowhere => chunk.disk = OnDisk::Coming,
                Below::Disk => {}
                Below::Object => chunk.stored = Stored::Coming,
            }
        });
        true
    }
}

#[inline]
fn line_of<'a>(
    disk: &'a mut Option<Disk>,
    object: &'a mut Option<Objects>,
    tier: Below,
) -> Option<&'a mut WriteLine> {
    match tier {
        Below::Disk => disk.as_mut().map(|disk| &mut disk.line),
        Below::Object => object.as_mut().map(|object| &mut object.line),
    }
}

/// The number of chunks whose uses are remembered, even after they left memory, for [`WritePolicy::WriteThroughSelective`].
const REMEMBERED_CHUNKS: usize = 1 << 20;
