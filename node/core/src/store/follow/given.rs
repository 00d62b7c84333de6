//! Layers that sessions hand over ahead of a commit.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_protocol::checksum::BlockKey;
use larder_protocol::handoff::HandOver;

use crate::store::checksums::Checksums;
use crate::store::commit::{BlockMove, CommitOrder, OpenCommit};
use crate::store::ids::{ChunkId, NamespaceId, OrderId, SessionId};
use crate::store::index::Block;
use crate::store::lookup::Place;
use crate::store::{Refused, Store};

impl Store {
    /// Takes over some layers of chunks that the session has reserved. The caller copies the order's bytes and then calls
    /// [`Store::finish_layers`]; from then on followers of the chunks may read the layers.
    ///
    /// # Errors
    /// As [`Store::begin_commit`]; [`Refused::Layers`] for layers that do not exist or are in place already.
    pub fn begin_layers(&mut self, session: SessionId, ask: &HandOver) -> Result<CommitOrder, Refused> {
        self.take_layers(session, ask, false)
    }

    /// Takes over layers that are in the session's window, or that a device writes into their places.
    pub(in crate::store) fn take_layers(
        &mut self,
        session: SessionId,
        ask: &HandOver,
        is_by_device: bool,
    ) -> Result<CommitOrder, Refused> {
        let &HandOver { reservation, ref chunks, pool, from_layer, to_layer, ref sources } = ask;
        let order = OrderId(self.next_number());
        let held = self.session(session)?;
        let process = held.process;
        let unknown = Refused::Unknown { what: "reservation", number: reservation };
        let (number, slices) = held
            .reservations
            .get(&reservation)
            .map(|held| (held.namespace, held.slices.clone()))
            .ok_or(unknown)?;
        let ids = self.start_copying(session, reservation, chunks, order)?;
        let layers = from_layer..to_layer;
        let sources = (!is_by_device).then_some(sources.as_slice());
        let checked = self.layer_moves(number, &slices, (&ids, chunks), (pool, &layers), sources);
        let moves = checked.and_then(|moves| self.check_sources(session, &moves).map(|()| moves));
        let moves = match moves {
            Ok(moves) => moves,
            Err(refused) => {
                self.stop_copying(session, reservation, order);
                return Err(refused);
            }
        };
        let (reservation, layers) = (Some(reservation), Some((usize::from(pool), layers)));
        let opened = OpenCommit {
            session,
            process,
            reservation,
            namespace: number,
            slices,
            chunks: ids,
            layers,
            given: BTreeMap::new(),
            is_by_device,
            quarantined: Vec::new(),
        };
        self.orders.open.insert(order, opened);
        let bytes = moves.iter().map(|block| block.bytes).sum();
        Ok(CommitOrder { order, moves, bytes })
    }

    /// Ends the copies of layers: the layers are in place, unless the right to commit has ended meanwhile. `checksums` are in the
    /// order of the moves; `None` if the copying failed. Returns whether the layers are in place.
    pub fn finish_layers(&mut self, order: OrderId, checksums: Option<Vec<Checksums>>) -> bool {
        let Some(open) = self.orders.open.get(&order) else { return false };
        let (Some(reservation), Some(checksums), Some((pool, layers))) =
            (open.reservation, checksums, open.layers.clone())
        else {
            self.finish_commit(order, None);
            return false;
        };
        let (session, namespace) = (open.session, self.namespaces.get(open.namespace));
        let blocks = open
            .chunks
            .iter()
            .flat_map(|&id| open.slices.iter().map(move |&slice| (id, namespace.block(slice, pool))));
        let blocks: Vec<(ChunkId, usize)> = blocks.collect();
        self.stop_copying(session, reservation, order);
        let quarantined = self.orders.open.remove(&order).map(|open| open.quarantined).unwrap_or_default();
        quarantined.into_iter().for_each(|slot| self.slab.restore(slot));
        for ((id, block), sums) in blocks.into_iter().zip(checksums) {
            // All of these layers share one checksum.
            let checksum = sums.ranges.first().copied().unwrap_or_default();
            self.layers_in_place(id, block, layers.clone(), checksum);
        }
        true
    }

    /// The moves for some layers, of each chunk in each slice. `sources` is `None` if a device copies the bytes.
    fn layer_moves(
        &self,
        number: NamespaceId,
        slices: &[u16],
        (ids, positions): (&[ChunkId], &[u32]),
        (pool, layers): (u8, &Range<u32>),
        sources: Option<&[u64]>,
    ) -> Result<Vec<BlockMove>, Refused> {
        let namespace = self.namespaces.get(number);
        let (from_layer, to_layer) = (layers.start, layers.end);
        let spec = namespace.pools.get(usize::from(pool)).map(|pool| &pool.spec);
        let is_in_place = sources.is_none();
        let sources = sources.unwrap_or_default();
        let expected = if self.limits.trust_engines || is_in_place { 0 } else { ids.len() * slices.len() };
        if sources.len() != expected {
            return Err(Refused::Sources { found: sources.len(), blocks: expected });
        }
        let mut moves = Vec::with_capacity(ids.len() * slices.len());
        let mut next_source = sources.iter().copied();
        for (&id, &position) in ids.iter().zip(positions) {
            let none_such = Refused::Layers { position, pool, from_layer, to_layer };
            let spec = spec
                .filter(|spec| from_layer < to_layer && to_layer <= spec.layers)
                .ok_or(none_such.clone())?;
            let (offset, bytes) = (
                u64::from(from_layer) * spec.layer_bytes,
                u64::from(to_layer - from_layer) * spec.layer_bytes,
            );
            for &slice in slices {
                let block = namespace.block(slice, pool.into());
                let chunk = self.index.get(id);
                let Block::Writing(slot) = chunk.blocks[block] else { return Err(none_such) };
                if self.follows.layers(id, block).is_some_and(|known| known.overlaps(layers)) {
                    return Err(none_such);
                }
                let place = Place { extent: slot.extent, offset: self.slab.offset(slot) + offset };
                let key = BlockKey { fingerprint: namespace.fingerprint, hash: chunk.hash, slice, pool };
                let source = next_source.next();
                moves.push(BlockMove { source, is_in_place, place, bytes, range_bytes: bytes, key });
            }
        }
        Ok(moves)
    }

    /// Whether only some layers of a block of a chunk were handed over.
    pub(in crate::store) fn lacks_layers(&self, number: NamespaceId, id: ChunkId, slices: &[u16]) -> bool {
        let namespace = self.namespaces.get(number);
        let lacks = |slice: u16, pool: usize| {
            let layers = self.follows.layers(id, namespace.block(slice, pool));
            layers.is_some_and(|layers| layers.contiguous() < namespace.pools[pool].spec.layers)
        };
        slices.iter().any(|&slice| (0..namespace.pools.len()).any(|pool| lacks(slice, pool)))
    }
}
