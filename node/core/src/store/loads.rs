//! Loads and saves by devices: the memory that they touch stays until the device has let go, even if lease, session and process
//! have ended.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_protocol::ChunkHash;
use larder_protocol::checksum::{BlockKey, range_bytes};
use larder_protocol::handoff::HandOver;

use super::commit::CommitOrder;
use super::ids::{ChunkId, NamespaceId, OrderId, SessionId, Slot};
use super::index::{Block, Standing};
use super::lookup::Place;
use super::policy::Facts;
use super::room::facts;
use super::{Refused, Store};

/// Chunks that devices read.
#[derive(Debug, Default)]
pub(super) struct Loads {
    open: BTreeMap<u64, Load>,
}

#[derive(Debug)]
struct Load {
    session: SessionId,
    chunks: Box<[ChunkId]>,
    /// Whether nobody waits for the load any more.
    is_quarantined: bool,
}

/// Blocks that a device is to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadOrder {
    /// Its number, for [`Store::end_load`].
    pub load: u64,
    /// Each block.
    pub blocks: Vec<LoadBlock>,
}

/// A block that a device is to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadBlock {
    /// The block's place.
    pub place: Place,
    /// Its name.
    pub key: BlockKey,
    /// Its bytes.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: u64,
    /// Bytes that share one checksum: whole layers.
    pub range_bytes: u64,
    /// How often its chunk was read, this time included.
    pub reads: u8,
    /// The policy's facts of its chunk.
    pub facts: Facts,
}

/// The size and layers of a chunk's block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFacts {
    /// Its pool.
    pub pool: u8,
    /// Its bytes.
    pub bytes: u64,
    /// Its layers.
    pub layers: u32,
}

impl BlockFacts {
    /// Bytes of one layer.
    pub fn layer_bytes(&self) -> u64 {
        self.bytes / u64::from(self.layers.max(1))
    }
}

impl Store {
    /// The facts of the block with this number, counted by slice, then pool, as the session registered the namespace.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a namespace that the session did not register, or a block that its chunks do not have.
    pub fn block_facts(
        &self,
        session: SessionId,
        namespace: u32,
        block: usize,
    ) -> Result<BlockFacts, Refused> {
        let (number, slices) = self.slices(session, namespace)?;
        let pools = &self.namespaces.get(number).pools;
        if block >= slices.len() * pools.len() {
            return Err(Refused::Unknown { what: "block", number: block as u64 });
        }
        let pool = block % pools.len();
        let spec = &pools[pool].spec;
        Ok(BlockFacts { pool: pool as u8, bytes: spec.block_bytes(), layers: spec.layers })
    }

    /// The names of a chunk's blocks in this session; none if it did not register the namespace.
    pub fn block_keys(
        &self,
        session: SessionId,
        namespace: u32,
        hash: ChunkHash,
    ) -> impl Iterator<Item = BlockKey> {
        let known = self.slices(session, namespace).ok();
        known.into_iter().flat_map(move |(number, slices)| {
            let known = self.namespaces.get(number);
            let (fingerprint, pools) = (known.fingerprint, known.pools.len() as u8);
            let of_slice =
                move |&slice: &u16| (0..pools).map(move |pool| BlockKey { fingerprint, hash, slice, pool });
            slices.iter().flat_map(of_slice)
        })
    }

    /// Keeps one block of each of these leased chunks in place until [`Store::end_load`], even if the lease and its session end.
    /// `block` counts the blocks of a chunk in this session, by slice, then pool.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a lease that is not the session's, [`Refused::NotLeased`] for chunks or a block that the lease
    /// does not cover.
    pub fn begin_load(
        &mut self,
        session: SessionId,
        lease: u64,
        (namespace, block): (u32, usize),
        positions: Range<usize>,
    ) -> Result<LoadOrder, Refused> {
        let held = self.session(session)?;
        let leased = held.leases.get(&lease).ok_or(Refused::Unknown { what: "lease", number: lease })?;
        let refused = Refused::NotLeased { from: positions.start as u64, to: positions.end as u64 };
        let chunks: Box<[ChunkId]> = leased.chunks.get(positions.clone()).ok_or(refused.clone())?.into();
        let hashes: Box<[ChunkHash]> = leased.hashes.get(positions).ok_or(refused.clone())?.into();
        let number = NamespaceId::of(namespace);
        if leased.namespace != number {
            return Err(refused);
        }
        let slices = held.namespaces.get(&number).ok_or(refused.clone())?;
        let known = self.namespaces.get(number);
        let slice = *slices.get(block / known.pools.len()).ok_or(refused.clone())?;
        let (fingerprint, pool) = (known.fingerprint, block % known.pools.len());
        let block = known.block(slice, pool);
        let spec = &known.pools[pool].spec;
        let (bytes, range_bytes) = (spec.block_bytes(), range_bytes(spec));
        if self.named_prefix(number, &hashes, &chunks) < chunks.len() {
            return Err(refused);
        }
        let found = |&id: &ChunkId| {
            let chunk = self.index.get(id);
            match chunk.blocks.get(block) {
                Some(Block::Ready(slot, checksums)) if chunk.standing != Standing::Condemned => {
                    let place = Place { extent: slot.extent, offset: self.slab.offset(*slot) };
                    let key = BlockKey { fingerprint, hash: chunk.hash, slice, pool: pool as u8 };
                    let (checksum, reads, facts) = (checksums.whole, chunk.reads, facts(chunk));
                    Ok(LoadBlock { place, key, bytes, checksum, range_bytes, reads, facts })
                }
                _ => Err(refused.clone()),
            }
        };
        let blocks = chunks.iter().map(found).collect::<Result<Vec<_>, _>>()?;
        chunks.iter().rev().for_each(|&id| self.change(id, |chunk| chunk.claims += 1));
        let load = self.next_number();
        self.loads.open.insert(load, Load { session, chunks, is_quarantined: false });
        Ok(LoadOrder { load, blocks })
    }

    /// Ends a load: the device no longer reads these blocks.
    pub fn end_load(&mut self, load: u64) {
        let Some(Load { chunks, is_quarantined, .. }) = self.loads.open.remove(&load) else { return };
        if is_quarantined {
            chunks.iter().for_each(|&chunk| self.adopt(chunk));
        }
        self.unclaim(&chunks);
        self.evict_above_watermark();
    }

    /// Quarantines a load that nobody waits for, while a device may still read its blocks.
    pub fn quarantine_load(&mut self, load: u64) {
        let Some(load) = self.loads.open.get_mut(&load).filter(|load| !load.is_quarantined) else { return };
        load.is_quarantined = true;
        let chunks = load.chunks.clone();
        chunks.iter().for_each(|&chunk| self.orphan(chunk));
    }

    /// Takes over layers of reserved chunks, as [`Store::begin_layers`] does, for a device to write into their places. After
    /// the device's copy, the caller sums the order's bytes and calls [`Store::finish_layers`].
    ///
    /// # Errors
    /// As [`Store::begin_layers`]; [`Refused::SeveralSlices`] for a reservation of several slices.
    pub fn begin_save(&mut self, session: SessionId, layers: &HandOver) -> Result<CommitOrder, Refused> {
        let held = self.session(session)?.reservations.get(&layers.reservation);
        if let Some(slices) = held.map(|held| held.slices.len()).filter(|&slices| slices != 1) {
            return Err(Refused::SeveralSlices { slices });
        }
        self.take_layers(session, layers, true)
    }

    /// Quarantines a save that nobody waits for, while a device may still write to its places.
    pub fn quarantine_save(&mut self, order: OrderId) {
        let Some(open) = self.orders.open.get(&order).filter(|open| open.quarantined.is_empty()) else {
            return;
        };
        let Some((pool, _)) = open.layers else { return };
        let namespace = self.namespaces.get(open.namespace);
        let blocks = open.slices.iter().map(|&slice| namespace.block(slice, pool));
        let slot = |(id, block): (ChunkId, usize)| match self.index.get(id).blocks[block] {
            Block::Writing(slot) => Some(slot),
            Block::Absent | Block::Ready(..) => None,
        };
        let slots: Vec<Slot> = blocks
            .flat_map(|block| open.chunks.iter().map(move |&id| (id, block)))
            .filter_map(slot)
            .collect();
        slots.iter().for_each(|&slot| self.slab.quarantine(slot));
        if let Some(open) = self.orders.open.get_mut(&order) {
            open.quarantined = slots;
        }
    }

    /// Quarantines the places of a session's running device copies until the copies end: the session has ended.
    pub(super) fn quarantine_copies_of(&mut self, session: SessionId) {
        let of_session = self.loads.open.iter().filter(|(_, load)| load.session == session);
        let mut loads: Vec<u64> = of_session.map(|(&load, _)| load).collect();
        loads.sort_unstable();
        loads.into_iter().for_each(|load| self.quarantine_load(load));
        let is_of_session =
            |order: &super::commit::OpenCommit| order.session == session && order.is_by_device;
        let orders = self.orders.open.iter().filter(|(_, order)| is_of_session(order));
        let mut orders: Vec<OrderId> = orders.map(|(&order, _)| order).collect();
        orders.sort_unstable();
        orders.into_iter().for_each(|order| self.quarantine_save(order));
    }
}
