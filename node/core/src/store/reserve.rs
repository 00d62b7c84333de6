//! Reservations: the start of a put.
//!
//! A reservation turns absent blocks into blocks that are being written; they are ready when their bytes were copied and
//! summed. A reservation takes a slot for every missing block of every pool and slice that will be written, or none at all. A
//! pool is added to a chunk only if nobody is writing the chunk: a chunk has one writer per slice at a time.

use std::collections::HashSet;

use larder_protocol::checksum::{BlockKey, range_bytes};
use larder_protocol::limits::{MAX_FRAME_DESCRIPTORS, MAX_MESSAGE_BLOCKS};
use larder_protocol::session::{Place, Scarce};
use larder_protocol::{Chain, ChainError, ChunkHash, ChunkRef, PoolSet};

use super::commit::BlockMove;
use super::follow::Reader;
use super::ids::{ChunkId, NamespaceId, ProcessId, SessionId, Slot};
use super::index::{Block, Standing};
use super::namespaces::Pool;
use super::sessions::{Item, ItemState, Reservation, Session};
use super::{Refused, Store};
use crate::Millis;

/// A new reservation: room for chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// Its number; 0 if there is nothing to write.
    pub reservation: u64,
    /// Positions of the chunks to write.
    pub chunks: Vec<u32>,
    /// For each chunk, the pools to write; empty if all pools of all chunks are to be written.
    pub pools: Vec<PoolSet>,
    /// The place of each block: for each chunk, for each slice of the session, for each of its pools to write.
    pub places: Vec<Place>,
    /// With trusted engines: extents among the places that the session does not know yet.
    pub new_extents: Vec<u32>,
    /// When the right to commit ends.
    pub deadline: Millis,
}

impl Store {
    /// Takes room for every block of a chain that is not here and is not being written, all of them or none.
    ///
    /// # Errors
    /// [`Refused::Busy`] if there is no room now, [`Refused::TooLarge`] if there never can be; also the errors of
    /// [`Store::lookup`].
    pub fn reserve(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        priority: i8,
        now: Millis,
    ) -> Result<Reserved, Refused> {
        self.reserve_pools(session, namespace, chain, &[], priority, now)
    }

    /// Reserves chunks. `pools` holds the pools to write, by position; if it is empty, all pools are written. Pools that every
    /// chunk must have are always written. A cached chunk gets the pools that it lacks.
    ///
    /// # Errors
    /// As [`Store::reserve`], and [`Refused::Pools`].
    pub fn reserve_pools(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        pools: &[PoolSet],
        priority: i8,
        now: Millis,
    ) -> Result<Reserved, Refused> {
        self.reserve_attempt(session, namespace, chain, pools, priority, 0, now)
    }

    /// Reserves chunks in a numbered attempt. The attempt ends reservations of earlier attempts for chunks of the chain: their
    /// sessions can neither hand over nor commit any more. `attempt` 0 is no attempt, and ends no reservation.
    ///
    /// # Errors
    /// As [`Store::reserve_pools`].
    #[expect(clippy::too_many_arguments, reason = "they are the fields of the request")]
    pub fn reserve_attempt(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        pools: &[PoolSet],
        priority: i8,
        attempt: u64,
        now: Millis,
    ) -> Result<Reserved, Refused> {
        let (number, slices) = self.slices(session, namespace)?;
        let slices: Box<[u16]> = slices.into();
        self.walk(number, chain)?;
        if attempt > 0 {
            self.supersede(number, chain, attempt)?;
        }
        let wanted = self.missing(number, chain, &slices, pools)?;
        let bytes = wanted.iter().map(|&(_, pools)| self.pools_bytes(number, slices.len(), pools)).sum();
        let blocks = wanted.iter().map(|(_, pools)| pools.len()).sum::<usize>() * slices.len();
        let &Session { tenant, reserved_bytes, .. } = self.session(session)?;
        let most = self.limits.max_reserved_bytes.min(self.slab.most_bytes(tenant));
        if blocks > MAX_MESSAGE_BLOCKS || bytes > most {
            return Err(Refused::TooLarge { blocks, bytes, most });
        }
        if reserved_bytes + bytes > self.limits.max_reserved_bytes {
            return Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: MEMORY_RETRY_MS });
        }
        let items = self.enter(number, chain, &wanted, &slices, priority)?;
        let mut to_take = items.iter().zip(&wanted);
        if !to_take.all(|(item, &(_, pools))| self.take_slots(number, item.chunk, &slices, pools)) {
            self.undo(&items, number, &slices);
            return Err(Refused::Busy { what: Scarce::Memory, retry_after_ms: MEMORY_RETRY_MS });
        }
        let mut places = Vec::with_capacity(blocks);
        items.iter().for_each(|item| self.add_places(number, item.chunk, &slices, &mut places));
        let new_extents =
            if self.limits.trust_engines { self.unseen_extents(session, &places) } else { Vec::new() };
        if new_extents.len() > MAX_FRAME_DESCRIPTORS {
            self.undo(&items, number, &slices);
            return Err(Refused::TooLarge { blocks, bytes, most });
        }
        let deadline = now + self.limits.reservation_ttl_ms;
        let (chunks, mut pools): (Vec<u32>, Vec<PoolSet>) = wanted.into_iter().unzip();
        let every = self.namespaces.get(number).rules.every();
        if pools.iter().all(|&pools| pools == every) {
            pools.clear();
        }
        if items.is_empty() {
            return Ok(Reserved { reservation: 0, chunks, pools, places, new_extents, deadline });
        }
        new_extents.iter().for_each(|&extent| _ = self.sessions.show_extent(session, extent));
        for item in &items {
            self.follows.note_attempt(item.chunk, attempt);
            self.writing_begins(item.chunk);
        }
        let reservation = self.next_number();
        let held = self.session_mut(session)?;
        held.reserved_bytes += bytes;
        held.reservations.insert(
            reservation,
            Reservation { namespace: number, slices, deadline, items, bytes, attempt, is_void: false },
        );
        Ok(Reserved { reservation, chunks, pools, places, new_extents, deadline })
    }

    /// Ends earlier attempts at the chunks of a chain. [`Refused::Busy`] while bytes of such a chunk are being copied: its slots
    /// are free when the copy has ended.
    fn supersede(&mut self, number: NamespaceId, chain: &Chain, attempt: u64) -> Result<(), Refused> {
        let ids: HashSet<ChunkId> =
            chain.hashes.iter().filter_map(|hash| self.index.find(number, hash)).collect();
        for (session, reservation) in self.sessions.earlier_attempts(attempt, &ids) {
            self.lapse(session, reservation);
        }
        if self.orders.copies_any(&ids) {
            return Err(Refused::Busy { what: Scarce::Memory, retry_after_ms: MEMORY_RETRY_MS });
        }
        Ok(())
    }

    /// Gives back the uncommitted chunks of a reservation.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a reservation that is not the session's.
    pub fn abort(&mut self, session: SessionId, reservation: u64) -> Result<(), Refused> {
        if !self.session(session)?.reservations.contains_key(&reservation) {
            return Err(Refused::Unknown { what: "reservation", number: reservation });
        }
        self.lapse(session, reservation);
        Ok(())
    }

    /// Gives a reservation back of which its session was not told: nobody can have written to its slots, so all are free at once.
    ///
    /// # Errors
    /// As [`Store::abort`].
    pub fn withdraw(&mut self, session: SessionId, reservation: u64) -> Result<(), Refused> {
        let held = self.session_mut(session)?;
        let unknown = Refused::Unknown { what: "reservation", number: reservation };
        let Reservation { namespace, slices, items, bytes, .. } =
            held.reservations.remove(&reservation).ok_or(unknown)?;
        held.reserved_bytes -= bytes;
        self.undo(&items, namespace, &slices);
        self.evict_above_watermark();
        Ok(())
    }

    /// Ends the right to commit a reservation. Slots that the engine could write to directly are quarantined until its process is
    /// gone. Slots that are being copied into are freed at the end of the copy. All other slots are free at once.
    pub(super) fn lapse(&mut self, session: SessionId, reservation: u64) {
        let Some(held) = self.sessions.get_mut(session) else { return };
        let process = held.process;
        let Some(Reservation { namespace, slices, items, bytes, .. }) =
            held.reservations.remove(&reservation)
        else {
            return;
        };
        held.reserved_bytes -= bytes;
        for item in items.iter().rev() {
            match item.state {
                ItemState::Reserved => self.discard(process, namespace, item.chunk, &slices),
                ItemState::Copying(order) => self.orders.forbid(order),
                ItemState::Done => {}
            }
        }
        self.evict_above_watermark();
    }

    /// Positions of a chain at which blocks in these slices are to be written, with the pools to write. An absent chunk needs the
    /// requested pools and the pools that every chunk must have. A cached chunk needs those of them that it lacks. A chunk that
    /// somebody else is writing needs none.
    fn missing(
        &self,
        number: NamespaceId,
        chain: &Chain,
        slices: &[u16],
        asked: &[PoolSet],
    ) -> Result<Vec<(u32, PoolSet)>, Refused> {
        let namespace = self.namespaces.get(number);
        let (every, obligatory) = (namespace.rules.every(), namespace.rules.obligatory());
        let are_possible = asked.is_empty() || asked.len() == chain.len();
        if !are_possible || !asked.iter().all(|&pools| every.has_all(pools)) {
            let (found, chunks, of) = (asked.len(), chain.len(), every.len());
            return Err(Refused::Pools { found, chunks, of });
        }
        let missing = |position: usize, hash: &ChunkHash| {
            let asked = asked.get(position).map_or(every, |&asked| asked.and(obligatory));
            let Some(id) = self.index.find(number, hash) else { return asked };
            let chunk = self.index.get(id);
            if chunk.standing == Standing::Condemned {
                return PoolSet::default();
            }
            let all = |pool: usize, is: fn(&Block) -> bool| {
                slices.iter().all(|&slice| is(&chunk.blocks[namespace.block(slice, pool)]))
            };
            if all(0, Block::is_absent) {
                return asked;
            }
            // No pool is added while somebody is writing the chunk in these slices.
            let is_settled =
                || every.iter().all(|pool| all(pool, |block| !matches!(block, Block::Writing(_))));
            if namespace.rules.is_plain()
                || self.verifications.has(id)
                || !all(0, |block| matches!(block, Block::Ready(..)))
                || !is_settled()
            {
                return PoolSet::default();
            }
            asked.iter().filter(|&pool| all(pool, Block::is_absent)).fold(PoolSet::default(), PoolSet::with)
        };
        let missing = chain
            .hashes
            .iter()
            .enumerate()
            .map(|(position, hash)| (position as u32, missing(position, hash)));
        Ok(missing.filter(|(_, pools)| !pools.is_empty()).collect())
    }

    /// Enters chunks into the index, claimed and without new slots, so that they and their parents stay while slots are
    /// found.
    fn enter(
        &mut self,
        number: NamespaceId,
        chain: &Chain,
        wanted: &[(u32, PoolSet)],
        slices: &[u16],
        priority: i8,
    ) -> Result<Vec<Item>, Refused> {
        let mut items = Vec::with_capacity(wanted.len());
        for &(position, _) in wanted {
            let chunk = match self.insert(number, chain.chunk(position as usize)) {
                Ok(chunk) => chunk,
                Err(disagrees) => {
                    self.undo(&items, number, slices);
                    return Err(disagrees.into());
                }
            };
            self.change(chunk, |chunk| {
                chunk.claims += 1;
                chunk.priority = priority;
            });
            items.push(Item { position, chunk, state: ItemState::Reserved });
        }
        Ok(items)
    }

    /// Enters a chunk that is not in memory, without a slot or claim.
    pub(super) fn insert(&mut self, number: NamespaceId, name: ChunkRef) -> Result<ChunkId, ChainError> {
        let chunk = self.enter_name(number, name)?;
        self.occupy(chunk);
        Ok(chunk)
    }

    /// Enters a chunk's name, if it is not known yet. Every chunk enters the store here, whatever its source.
    ///
    /// # Errors
    /// [`ChainError`] if the name contradicts the names around it; the store counts such names.
    pub(super) fn enter_name(&mut self, number: NamespaceId, name: ChunkRef) -> Result<ChunkId, ChainError> {
        let namespace = self.namespaces.get_mut(number);
        let (flat, blocks) = (namespace.flat, namespace.blocks());
        let root = namespace.root;
        let placed = match name {
            ChunkRef { index: 0, parent, .. } if parent != root => {
                Err(ChainError::NotTheRoot { root, parent })
            }
            ChunkRef { index, .. } if flat && index > 0 => {
                Err(ChainError::WrongShape { namespace_is_flat: true })
            }
            _ => self.index.admits(number, &name, flat),
        };
        self.refused_names += u64::from(placed.is_err());
        placed?;
        if let Some(known) = self.index.find(number, &name.hash) {
            return Ok(known);
        }
        namespace.chunks += 1;
        let anew = self.index.anchored_anew(number, &name);
        let before: Vec<ChunkRef> = anew.iter().map(|&id| self.index.name(id)).collect();
        let entered = self.index.insert(number, name, flat, blocks);
        anew.into_iter().zip(before).for_each(|(id, before)| self.tell_renamed(id, before));
        Ok(entered)
    }

    /// Finds a slot for each block of a chunk in these slices and pools; returns whether there was room.
    pub(super) fn take_slots(
        &mut self,
        number: NamespaceId,
        id: ChunkId,
        slices: &[u16],
        pools: PoolSet,
    ) -> bool {
        for &slice in slices {
            for pool in pools.iter() {
                let namespace = self.namespaces.get(number);
                let block = namespace.block(slice, pool);
                let class = namespace.pools[pool].class;
                let Some(slot) = self.take_slot(class, id) else { return false };
                self.index.get_mut(id).blocks[block] = Block::Writing(slot);
            }
        }
        true
    }

    /// Undoes a reservation that found no room.
    fn undo(&mut self, items: &[Item], number: NamespaceId, slices: &[u16]) {
        for item in items.iter().rev() {
            self.drop_written(number, item.chunk, slices);
        }
    }

    /// Ends the writing of a chunk that was not committed. Slots that a living process could write to directly are
    /// quarantined until it is gone; the others are free.
    pub(super) fn discard(&mut self, process: ProcessId, number: NamespaceId, id: ChunkId, slices: &[u16]) {
        if !self.limits.trust_engines || self.sessions.living(process).is_none() {
            return self.drop_written(number, id, slices);
        }
        let slots = self.take_written_slots(number, id, slices);
        self.writing_failed(id, slots, Some(Reader::Process(process)));
        self.unwrite(id);
    }

    /// Frees the slots of a chunk that are being written in these slices, and ends the claim.
    pub(super) fn drop_written(&mut self, number: NamespaceId, id: ChunkId, slices: &[u16]) {
        let slots = self.take_written_slots(number, id, slices);
        self.writing_failed(id, slots, None);
        self.unwrite(id);
    }

    pub(super) fn take_written_slots(
        &mut self,
        number: NamespaceId,
        id: ChunkId,
        slices: &[u16],
    ) -> Vec<Slot> {
        let namespace = self.namespaces.get(number);
        let chunk = self.index.get_mut(id);
        let mut slots = Vec::new();
        for &slice in slices {
            for pool in 0..namespace.pools.len() {
                let number = namespace.block(slice, pool);
                let block = &mut chunk.blocks[number];
                if let Block::Writing(slot) = *block {
                    *block = Block::Absent;
                    slots.push(slot);
                    self.follows.forget_layers(id, number);
                }
            }
        }
        slots
    }

    /// Ends the claim of a writer, and forgets the chunk if nothing is left of it, or if it was only passing.
    fn unwrite(&mut self, id: ChunkId) {
        self.change(id, |chunk| chunk.claims -= 1);
        let chunk = self.index.get_mut(id);
        if chunk.standing == Standing::Condemned && chunk.slots().next().is_none() {
            // Only the chunk's name is left.
            chunk.standing = Standing::Kept;
        }
        self.let_pass(id);
    }

    pub(super) fn block_moves(
        &self,
        number: NamespaceId,
        id: ChunkId,
        slices: &[u16],
        mut source: impl FnMut() -> Option<u64>,
        moves: &mut Vec<BlockMove>,
    ) {
        let namespace = self.namespaces.get(number);
        let chunk = self.index.get(id);
        for &slice in slices {
            for (pool, Pool { spec, .. }) in namespace.pools.iter().enumerate() {
                let block = namespace.block(slice, pool);
                let Block::Writing(slot) = chunk.blocks[block] else { continue };
                let is_in_place = self.follows.layers(id, block).is_some();
                moves.push(BlockMove {
                    source: if is_in_place { None } else { source() },
                    is_in_place,
                    place: Place { extent: slot.extent, offset: self.slab.offset(slot) },
                    bytes: spec.block_bytes(),
                    range_bytes: range_bytes(spec),
                    key: BlockKey {
                        fingerprint: namespace.fingerprint,
                        hash: chunk.hash,
                        slice,
                        pool: pool as u8,
                    },
                });
            }
        }
    }

    fn unseen_extents(&self, session: SessionId, places: &[Place]) -> Vec<u32> {
        let seen = self.sessions.get(session).map(|session| &session.extents);
        let mut extents: Vec<u32> = places.iter().map(|place| place.extent).collect();
        extents.sort_unstable();
        extents.dedup();
        extents.retain(|extent| seen.is_none_or(|seen| !seen.contains(extent)));
        extents
    }

    /// Adds the places of a chunk's blocks that are being written in these slices.
    fn add_places(&self, number: NamespaceId, id: ChunkId, slices: &[u16], places: &mut Vec<Place>) {
        let namespace = self.namespaces.get(number);
        let blocks = &self.index.get(id).blocks;
        for block in slices.iter().flat_map(|&slice| &blocks[namespace.slice(slice)]) {
            if let Block::Writing(slot) = *block {
                places.push(Place { extent: slot.extent, offset: self.slab.offset(slot) });
            }
        }
    }

    /// Bytes of the slots of a chunk's blocks in these slices and pools.
    pub(super) fn pools_bytes(&self, number: NamespaceId, slices: usize, pools: PoolSet) -> u64 {
        let namespace = self.namespaces.get(number);
        let of = |pool: usize| self.slab.slot_bytes(namespace.pools[pool].class);
        pools.iter().map(of).sum::<u64>() * slices as u64
    }
}

/// The pause for a session that found no room: about the time of a lease or a copy.
const MEMORY_RETRY_MS: u64 = 5;
