//! Commits: the end of a put.
//!
//! The caller copies and sums the bytes of an order. Then the blocks can be read, unless the right to commit has ended.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use larder_protocol::checksum::BlockKey;
use larder_protocol::session::Place;

use super::checksums::Checksums;
use super::ids::{ChunkId, NamespaceId, OrderId, ProcessId, SessionId, Slot};
use super::index::{Block, OnDisk, Stored};
use super::journal::is_held;
use super::sessions::ItemState;
use super::{Refused, Store};
use crate::store::ChangeKind;

/// Bytes to copy before chunks can be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommitOrder {
    /// Its number, for [`Store::finish_commit`].
    pub order: OrderId,
    /// The moves, one per block. A block that was handed over in pieces has one more move for each piece: the piece's checksum
    /// must be the same as when it was handed over.
    pub moves: Vec<BlockMove>,
    /// Bytes of the blocks.
    pub bytes: u64,
}

/// One block to copy and sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    /// Offset in the session's write window; `None` if the engine or a device writes the block into its place.
    pub source: Option<u64>,
    /// Whether the block is only summed, not copied: it was handed over layer by layer, or a device copies it.
    pub is_in_place: bool,
    /// The block's place.
    pub place: Place,
    /// Its size.
    pub bytes: u64,
    /// Bytes that share one checksum: whole layers.
    pub range_bytes: u64,
    /// Its name.
    pub key: BlockKey,
}

/// Commits whose bytes are being copied.
#[derive(Debug, Default)]
pub(super) struct Orders {
    pub(super) open: BTreeMap<OrderId, OpenCommit>,
}

#[derive(Debug)]
pub(super) struct OpenCommit {
    pub(super) session: SessionId,
    pub(super) process: ProcessId,
    /// The reservation, for as long as the right to commit lasts.
    pub(super) reservation: Option<u64>,
    pub(super) namespace: NamespaceId,
    pub(super) slices: Box<[u16]>,
    pub(super) chunks: Vec<ChunkId>,
    /// The pool and the layers, if only some layers are handed over.
    pub(super) layers: Option<(usize, Range<u32>)>,
    /// The pieces that were handed over before, by the index of their move.
    pub(super) given: BTreeMap<usize, Given>,
    /// Whether a device copies the bytes.
    pub(super) is_by_device: bool,
    /// Slots that a device may still write to although nobody waits for it.
    pub(super) quarantined: Vec<Slot>,
}

/// A piece that was handed over before. It is summed again, because its bits may have changed since.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    checksum: u64,
    /// Whether the piece is the whole block, so that its move also gives the block's checksums.
    is_block: bool,
}

impl Orders {
    /// Whether bytes of one of these chunks are being copied.
    pub(super) fn copies_any(&self, chunks: &HashSet<ChunkId>) -> bool {
        self.open.values().any(|order| order.chunks.iter().any(|id| chunks.contains(id)))
    }

    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Ends the right to commit an order's blocks.
    pub(super) fn forbid(&mut self, order: OrderId) {
        if let Some(order) = self.open.get_mut(&order) {
            order.reservation = None;
        }
    }
}

impl Store {
    /// Takes over chunks that the session has written. The caller copies the order's bytes and then calls
    /// [`Store::finish_commit`]; until then nobody sees the chunks.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a reservation that the session does not have, [`Refused::NotOpen`] for a position that cannot be
    /// committed, [`Refused::LayersMissing`] for a chunk of which only some layers were handed over, [`Refused::Sources`] for a
    /// wrong number of sources, [`Refused::OutsideWindow`] for a source outside the write window.
    pub fn begin_commit(
        &mut self,
        session: SessionId,
        reservation: u64,
        positions: &[u32],
        sources: &[u64],
    ) -> Result<CommitOrder, Refused> {
        let order = OrderId(self.next_number());
        let trusted = self.limits.trust_engines;
        let held = self.session_mut(session)?;
        let process = held.process;
        let unknown = Refused::Unknown { what: "reservation", number: reservation };
        let (number, slices) = match held.reservations.get(&reservation) {
            Some(held) => (held.namespace, held.slices.clone()),
            None => return Err(unknown),
        };
        let chunks = self.start_copying(session, reservation, positions, order)?;
        let (mut moves, mut given) = (Vec::with_capacity(sources.len()), BTreeMap::new());
        let (mut next_source, mut bytes) = (sources.iter().copied(), 0);
        let mut blocks = Vec::new();
        for &chunk in &chunks {
            self.block_moves(number, chunk, &slices, || next_source.next(), &mut blocks);
            for block in blocks.drain(..) {
                moves.push(block);
                bytes += block.bytes;
                if block.is_in_place {
                    self.sum_given(number, chunk, &block, &mut moves, &mut given);
                }
            }
        }
        let (found, blocks) = (sources.len(), moves.iter().filter(|block| !block.is_in_place).count());
        let lacks_layers =
            chunks.iter().zip(positions).find(|&(&chunk, _)| self.lacks_layers(number, chunk, &slices));
        let checked = if let Some((_, &position)) = lacks_layers {
            Err(Refused::LayersMissing { reservation, position })
        } else if found == if trusted { 0 } else { blocks } {
            self.check_sources(session, &moves)
        } else {
            Err(Refused::Sources { found, blocks })
        };
        if let Err(refused) = checked {
            self.stop_copying(session, reservation, order);
            return Err(refused);
        }
        let (reservation, layers) = (Some(reservation), None);
        self.orders.open.insert(
            order,
            OpenCommit {
                session,
                process,
                reservation,
                namespace: number,
                slices,
                chunks,
                layers,
                given,
                is_by_device: false,
                quarantined: Vec::new(),
            },
        );
        Ok(CommitOrder { order, moves, bytes })
    }

    /// Adds moves that sum the pieces of a block that was handed over; the block is the last move so far.
    fn sum_given(
        &self,
        number: NamespaceId,
        chunk: ChunkId,
        block: &BlockMove,
        moves: &mut Vec<BlockMove>,
        given: &mut BTreeMap<usize, Given>,
    ) {
        let (namespace, pool) = (self.namespaces.get(number), usize::from(block.key.pool));
        let layers = self.follows.layers(chunk, namespace.block(block.key.slice, pool));
        let pieces = layers.map(|layers| layers.pieces(&namespace.pools[pool].spec)).unwrap_or_default();
        for (offset, bytes, checksum) in pieces {
            if bytes == block.bytes && bytes <= block.range_bytes {
                given.insert(moves.len() - 1, Given { checksum, is_block: true });
                return;
            }
            given.insert(moves.len(), Given { checksum, is_block: false });
            let place = Place { offset: block.place.offset + offset, ..block.place };
            moves.push(BlockMove { place, bytes, range_bytes: bytes, ..*block });
        }
    }

    /// Notes that an order's copies cannot be made now: its chunks can be committed again.
    pub fn postpone_commit(&mut self, order: OrderId) {
        let Some(held) = self.orders.open.get(&order) else { return };
        let Some(reservation) = held.reservation else {
            self.finish_commit(order, None);
            return;
        };
        self.stop_copying(held.session, reservation, order);
        self.orders.open.remove(&order);
    }

    pub(super) fn stop_copying(&mut self, session: SessionId, reservation: u64, order: OrderId) {
        let session = self.sessions.get_mut(session);
        let Some(held) = session.and_then(|session| session.reservations.get_mut(&reservation)) else {
            return;
        };
        for item in held.items.iter_mut().filter(|item| item.state == ItemState::Copying(order)) {
            item.state = ItemState::Reserved;
        }
    }

    /// Ends an order whose copies are done: its blocks can be read, unless the right to commit has ended meanwhile. `checksums`
    /// are in the order of the moves; `None` if the copying failed. Returns how many chunks were kept: none if layers that were
    /// handed over have changed since.
    pub fn finish_commit(&mut self, order: OrderId, checksums: Option<Vec<Checksums>>) -> u32 {
        let Some(order_open) = self.orders.open.remove(&order) else { return 0 };
        let OpenCommit {
            session, process, reservation, namespace, slices, chunks, given, quarantined, ..
        } = order_open;
        quarantined.into_iter().for_each(|slot| self.slab.restore(slot));
        let was_copied = checksums.is_some();
        let checksums = checksums.and_then(|checksums| of_blocks(checksums, &given));
        if was_copied && checksums.is_none() {
            self.verifications.found_damage();
        }
        let kept = match (reservation, checksums) {
            (Some(reservation), Some(checksums)) if !self.is_void(session, reservation) => {
                self.make_room_for(namespace, &slices, &chunks);
                self.keep(namespace, &slices, &chunks, checksums);
                chunks.len() as u32
            }
            _ => {
                chunks.iter().rev().for_each(|&chunk| self.discard(process, namespace, chunk, &slices));
                0
            }
        };
        if let Some(reservation) = reservation {
            self.settle(session, reservation, order);
        }
        self.evict_above_watermark();
        kept
    }

    /// Whether the chunks of a reservation were purged since it was made.
    fn is_void(&self, session: SessionId, reservation: u64) -> bool {
        let held = self.sessions.get(session).and_then(|held| held.reservations.get(&reservation));
        held.is_some_and(|held| held.is_void)
    }

    /// Evicts chunks to make room for new ones, before the new ones can be evicted themselves.
    fn make_room_for(&mut self, number: NamespaceId, slices: &[u16], chunks: &[ChunkId]) {
        // A chunk that was only passing stays from now on.
        chunks.iter().for_each(|&chunk| self.admit(chunk, ChangeKind::Gained));
        let new_chunks = chunks.iter().filter(|&&chunk| !self.index.get(chunk).is_cached()).count() as u64;
        let mut bytes = 0;
        let namespace = self.namespaces.get(number);
        for &chunk in chunks {
            let chunk = self.index.get(chunk);
            for block in slices.iter().flat_map(|&slice| &chunk.blocks[namespace.slice(slice)]) {
                bytes += if let Block::Writing(slot) = *block { self.slab.slot_bytes_of(slot) } else { 0 };
            }
        }
        let tenant = namespace.tenant;
        self.evict_ahead(tenant, new_chunks, bytes);
    }

    /// Makes the blocks of written chunks readable.
    fn keep(&mut self, number: NamespaceId, slices: &[u16], chunks: &[ChunkId], checksums: Vec<Checksums>) {
        let namespace = self.namespaces.get(number);
        let mut checksums = checksums.into_iter();
        let mut before = Vec::with_capacity(chunks.len());
        let mut ready = Vec::with_capacity(chunks.len());
        let mut bytes = 0;
        for &id in chunks {
            let chunk = self.index.get_mut(id);
            before.push((is_held(chunk), chunk.is_cached()));
            for &slice in slices {
                for number in namespace.slice(slice) {
                    let block = &mut chunk.blocks[number];
                    let Block::Writing(slot) = *block else { continue };
                    ready.push((id, number));
                    *block = Block::Ready(slot, checksums.next().unwrap_or_default());
                    chunk.ready += 1;
                    bytes += self.slab.slot_bytes_of(slot);
                    if chunk.orphaned_leases > 0 {
                        // The slot shares the fate of the chunk's other blocks, which a vanished process may still read.
                        self.slab.quarantine(slot);
                    }
                }
            }
            chunk.pools = namespace.readable(chunk);
        }
        self.tenants.of_mut(namespace.tenant).cached_bytes += bytes;
        let mut numbers = Vec::new();
        ready.chunk_by(|a, b| a.0 == b.0).for_each(|blocks| {
            numbers.clear();
            numbers.extend(blocks.iter().map(|&(_, number)| number));
            self.blocks_ready(blocks[0].0, &numbers);
        });
        for (&id, (was_held, was_cached)) in chunks.iter().zip(before).rev() {
            let is_gained = !was_held && is_held(self.index.get(id));
            let kind = match is_gained {
                true => self.gained_by_computing(number, self.index.get(id).hash.short()),
                false => ChangeKind::Gained,
            };
            self.tell(id, was_held, kind);
            let used = self.used_now();
            let chunk = self.index.get_mut(id);
            chunk.claims -= 1;
            chunk.used = used;
            chunk.set_copy(false);
            if chunk.disk == OnDisk::Elsewhere {
                // The record on disk lacks the blocks that were written here.
                chunk.disk = OnDisk::Nowhere;
            }
            if chunk.stored == Stored::There {
                // The same holds for the object in the object store.
                chunk.stored = Stored::Unknown;
            }
            if !was_cached {
                self.cached_chunks += 1;
                self.enter_policy(id);
                self.index.set_since(id, self.tenths);
            } else if chunk.may_go() {
                self.unblock(id);
            }
            self.queue_disk_write(id);
        }
        // The first chunk is written first: the beginning of a prompt is of use even if the rest is not written.
        chunks.iter().for_each(|&id| self.queue_upload(id));
    }

    /// Marks the chunks of a finished order, and forgets a reservation that has nothing left to commit.
    fn settle(&mut self, session: SessionId, reservation: u64, order: OrderId) {
        let Some(session) = self.sessions.get_mut(session) else { return };
        let Some(held) = session.reservations.get_mut(&reservation) else { return };
        for item in held.items.iter_mut().filter(|item| item.state == ItemState::Copying(order)) {
            item.state = ItemState::Done;
        }
        if held.items.iter().all(|item| item.state == ItemState::Done) {
            session.reserved_bytes -= held.bytes;
            session.reservations.remove(&reservation);
        }
    }

    /// Marks reserved chunks as being copied: all of these positions, or none.
    pub(super) fn start_copying(
        &mut self,
        session: SessionId,
        reservation: u64,
        positions: &[u32],
        order: OrderId,
    ) -> Result<Vec<ChunkId>, Refused> {
        let held = self.session_mut(session)?.reservations.get_mut(&reservation);
        let held = held.ok_or(Refused::Unknown { what: "reservation", number: reservation })?;
        let mut chunks = Vec::with_capacity(positions.len());
        for &position in positions {
            let item = held.items.binary_search_by_key(&position, |item| item.position);
            match item.ok().map(|at| &mut held.items[at]) {
                Some(item) if item.state == ItemState::Reserved => {
                    item.state = ItemState::Copying(order);
                    chunks.push(item.chunk);
                }
                _ => {
                    for item in held.items.iter_mut().filter(|item| item.state == ItemState::Copying(order)) {
                        item.state = ItemState::Reserved;
                    }
                    return Err(Refused::NotOpen { reservation, position });
                }
            }
        }
        Ok(chunks)
    }

    /// Whether every source lies in the session's write window.
    pub(super) fn check_sources(&self, session: SessionId, moves: &[BlockMove]) -> Result<(), Refused> {
        let window_bytes = self.session(session)?.window_bytes;
        for &BlockMove { source, bytes, .. } in moves {
            let Some(source_offset) = source else { continue };
            if source_offset.checked_add(bytes).is_none_or(|end| end > window_bytes) {
                return Err(Refused::OutsideWindow { source_offset, bytes, window_bytes });
            }
        }
        Ok(())
    }
}

/// The checksums of whole blocks, among the checksums of an order's moves; `None` if a piece that was handed over has another
/// checksum now.
fn of_blocks(checksums: Vec<Checksums>, given: &BTreeMap<usize, Given>) -> Option<Vec<Checksums>> {
    let mut blocks = Vec::with_capacity(checksums.len());
    for (at, sums) in checksums.into_iter().enumerate() {
        let before = given.get(&at);
        let now = sums.ranges.first().copied().unwrap_or_default();
        if before.is_some_and(|before| now != before.checksum) {
            return None;
        }
        if before.is_none_or(|before| before.is_block) {
            blocks.push(sums);
        }
    }
    Some(blocks)
}
