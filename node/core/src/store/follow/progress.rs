//! Progress of followed chunks: layers, then the commit.

use std::ops::Range;

use larder_protocol::checksum::layers_checksum;
use larder_protocol::{PoolSet, PoolSpec};

use super::layers::Layers;
use super::{Follow, FollowProgress, Followed, LayersInPlace, Reader};
use crate::store::ids::{ChunkId, SessionId};
use crate::store::index::{Block, Chunk};
use crate::store::lookup::{Leased, Place};
use crate::store::{FetchId, Refused, Store};

impl Store {
    /// The progress of a follow.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a follow that is not the session's.
    pub fn followed(&self, session: SessionId, follow: u64) -> Result<FollowProgress, Refused> {
        let unknown = Refused::Unknown { what: "follow", number: follow };
        let open = self.follows.open.get(&follow).filter(|open| open.session == Some(session));
        let open = open.ok_or(unknown)?;
        let living = open.living();
        let layers = (0..living).map(|position| self.layers_of(open, position)).min();
        let is_whole = open.chunks[..living].iter().all(|chunk| matches!(chunk, Followed::Here(_)));
        Ok(FollowProgress { chunks: living as u32, layers: layers.unwrap_or(0), is_whole })
    }

    /// The places of a follow's chunks. They are given once, as soon as every wanted block has a slot; `None` before and after.
    ///
    /// # Errors
    /// As [`Store::followed`].
    pub fn show_followed(&mut self, session: SessionId, follow: u64) -> Result<Option<Leased>, Refused> {
        let FollowProgress { chunks, .. } = self.followed(session, follow)?;
        let Some(open) = self.follows.open.get(&follow).filter(|open| !open.is_shown && chunks > 0) else {
            return Ok(None);
        };
        let number = self.namespaces.of(&open.fingerprint);
        let (slices, hashes) = (open.slices.clone(), open.hashes.clone());
        let ids: Option<Vec<ChunkId>> =
            open.chunks[..chunks as usize].iter().map(|chunk| chunk.id()).collect();
        let (Some(number), Some(ids)) = (number, ids) else { return Ok(None) };
        let namespace = self.namespaces.get(number);
        let wanted: Vec<(ChunkId, PoolSet)> =
            ids.iter().enumerate().map(|(at, &id)| (id, open.wants(at, &namespace.rules))).collect();
        let has_slots = |&(id, pools): &(ChunkId, PoolSet)| {
            let block = |slice, pool| &self.index.get(id).blocks[namespace.block(slice, pool)];
            slices.iter().all(|&slice| pools.iter().all(|pool| block(slice, pool).slot().is_some()))
        };
        if !wanted.iter().all(has_slots) {
            return Ok(None);
        }
        let is_all_or_none = open.is_all_or_none();
        let mut leased = Leased { lease: follow, ..Leased::default() };
        let named = self.named_prefix(number, &hashes, &ids);
        let mut fit = self.place_each(session, number, &slices, &wanted[..named], &mut leased);
        if is_all_or_none && fit < ids.len() {
            leased.show_nothing();
            fit = 0;
        }
        leased.chunks = fit as u32;
        self.follow_mut(follow, |open| open.is_shown = true);
        // The follow loses the chunks that do not fit into one answer.
        self.lose_from(follow, fit);
        Ok(Some(leased))
    }

    /// Notes that the session was not told the places of a follow after all: they are given again with the next news.
    ///
    /// # Errors
    /// As [`Store::followed`].
    pub fn hide_followed(&mut self, session: SessionId, follow: u64) -> Result<(), Refused> {
        self.followed(session, follow)?;
        self.follow_mut(follow, |open| open.is_shown = false);
        Ok(())
    }

    /// The number of layers that are in place in every block that a follow wants of the chunk at a position. A complete block
    /// does not lower the number, even if its pool has fewer layers.
    fn layers_of(&self, open: &Follow, position: usize) -> u32 {
        let id = match open.chunks[position] {
            Followed::Awaited(_) | Followed::Lost(_) => return 0,
            Followed::Coming(id) | Followed::Here(id) => id,
        };
        let chunk = self.index.get(id);
        let namespace = self.namespaces.get(chunk.namespace);
        let most = namespace.pools.iter().map(|pool| pool.spec.layers).max().unwrap_or(0);
        let of_block = |slice, pool: usize| {
            let (block, layers) = (namespace.block(slice, pool), namespace.pools[pool].spec.layers);
            let in_place = match chunk.blocks[block] {
                Block::Ready(..) => layers,
                Block::Absent => 0,
                Block::Writing(_) => self.follows.layers(id, block).map_or(0, Layers::contiguous),
            };
            if in_place == layers { most } else { in_place }
        };
        let wanted = open.wants(position, &namespace.rules);
        let blocks = open.slices.iter().flat_map(|&slice| wanted.iter().map(move |pool| (slice, pool)));
        blocks.map(|(slice, pool)| of_block(slice, pool)).min().unwrap_or(0)
    }

    /// Notes that layers of a block are in place. The block's chunk is being written.
    pub(in crate::store) fn layers_in_place(
        &mut self,
        id: ChunkId,
        block: usize,
        layers: Range<u32>,
        checksum: u64,
    ) {
        let blocks = self.index.get(id).blocks.len();
        let of_chunk = self.follows.layers.entry(id).or_insert_with(|| vec![Layers::default(); blocks]);
        of_chunk[block].add(layers.clone(), checksum);
        let chunk = self.index.get(id);
        let spec = self.pool_of(chunk, block);
        let (offset, bytes) = (
            u64::from(layers.start) * spec.layer_bytes,
            u64::from(layers.end - layers.start) * spec.layer_bytes,
        );
        let Some(slot) = chunk.blocks[block].slot() else { return };
        let key = self.namespaces.get(chunk.namespace).key(chunk.hash, block);
        let named = layers_checksum(&key, &(offset..offset + bytes), checksum);
        let place = Place { extent: slot.extent, offset: self.slab.offset(slot) };
        for (follow, position) in self.follows.followers(id) {
            self.moved(follow);
            if self.is_peers(follow) && self.waits_for(follow, position, id) {
                let news = LayersInPlace { block, place, offset, bytes, checksum: named };
                self.tell_peer(follow, position, id, [news]);
            }
        }
    }

    /// Takes verified layers of a chunk that is being fetched. `block` counts the fetched blocks, by slice, then pool. Does
    /// nothing if the fetch has another number: the chunk may be in a later fetch by now.
    pub fn layers_came(
        &mut self,
        fetch: FetchId,
        number: u64,
        block: usize,
        offset: u64,
        bytes: u64,
        checksum: u64,
    ) {
        let id = fetch.chunk();
        if !self.gathers.is_fetch(fetch, number) {
            return;
        }
        let chunk = self.index.get(id);
        let mut fetched = (0..chunk.blocks.len()).filter(|&at| matches!(chunk.blocks[at], Block::Writing(_)));
        let Some(block) = fetched.nth(block) else { return };
        let layer_bytes = self.pool_of(chunk, block).layer_bytes.max(1);
        if !offset.is_multiple_of(layer_bytes) || !bytes.is_multiple_of(layer_bytes) {
            return;
        }
        let first = (offset / layer_bytes) as u32;
        let layers = first..first + (bytes / layer_bytes) as u32;
        if self.follows.layers(id, block).is_none_or(|known| !known.overlaps(&layers)) {
            self.layers_in_place(id, block, layers, checksum);
        }
    }

    /// Whether all layers of a followed chunk are in place, committed or not.
    pub(super) fn has_all_layers(&self, chunk: &Followed) -> bool {
        let id = match *chunk {
            Followed::Awaited(_) | Followed::Lost(_) => return false,
            Followed::Here(_) => return true,
            Followed::Coming(id) => id,
        };
        let chunk = self.index.get(id);
        chunk.blocks.iter().enumerate().all(|(at, block)| match block {
            Block::Ready(..) => true,
            Block::Absent => false,
            Block::Writing(_) => {
                let layers = self.follows.layers(id, at).map_or(0, Layers::contiguous);
                layers == self.pool_of(chunk, at).layers
            }
        })
    }

    fn pool_of(&self, chunk: &Chunk, block: usize) -> &PoolSpec {
        let namespace = self.namespaces.get(chunk.namespace);
        &namespace.pools[block % namespace.pools.len()].spec
    }

    /// Notes that these `blocks` of a chunk were committed or fetched.
    pub(in crate::store) fn blocks_ready(&mut self, id: ChunkId, blocks: &[usize]) {
        if self.follows.is_idle() {
            return;
        }
        let followers = self.follows.followers(id);
        for &block in blocks {
            if self.follows.layers(id, block).is_none() {
                // The block was not handed over layer by layer: all its layers are news.
                for &(follow, position) in &followers {
                    self.tell_block(follow, position, id, block);
                }
            }
            self.follows.forget_layers(id, block);
        }
        let chunk = self.index.get(id);
        let (pools, number) = (chunk.pools, chunk.namespace);
        let is_written = chunk.blocks.iter().any(|block| matches!(block, Block::Writing(_)));
        let is_settled = chunk.is_complete() && !is_written;
        for (follow, position) in followers {
            self.moved(follow);
            if !self.waits_for(follow, position, id)
                || !pools.has_all(self.wanted_pools(follow, number, position))
            {
                continue;
            }
            self.follow_mut(follow, |open| open.chunks[position] = Followed::Here(id));
            self.follows.let_go(id, Reader::Follow(follow, position));
            if self.is_peers(follow) {
                self.tell_whole(follow, position, id);
            }
        }
        if is_settled {
            self.settle_awaited(id);
            self.follows.let_go_processes(id);
            self.follows.attempts.remove(&id);
        }
    }

    /// Settles the follows that waited for a writer of a chunk. The chunk is here now: each follow has it, or loses it if the
    /// chunk lacks pools that the follow wants.
    fn settle_awaited(&mut self, id: ChunkId) {
        let chunk = self.index.get(id);
        let (number, hash, pools) = (chunk.namespace, chunk.hash, chunk.pools);
        let fingerprint = self.namespaces.get(number).fingerprint;
        for (follow, position) in self.follows.waiting(fingerprint, hash) {
            let Some(open) = self.follows.open.get(&follow) else { continue };
            let (attempt, is_peer) = (open.attempt, open.session.is_none());
            if pools.has_all(self.wanted_pools(follow, number, position)) {
                self.follows.awaited.remove(&(fingerprint, hash, (follow, position)));
                self.change(id, |chunk| chunk.claims += 1);
                self.follow_mut(follow, |open| open.chunks[position] = Followed::Here(id));
                self.moved(follow);
                if is_peer {
                    self.tell_layers(follow, position, id);
                    self.tell_whole(follow, position, id);
                }
            } else if !self.follows.is_early(id, attempt) {
                self.lose(follow, position);
            }
        }
    }

    fn tell_block(&mut self, follow: u64, position: usize, id: ChunkId, block: usize) {
        if self.is_peers(follow) && self.waits_for(follow, position, id) {
            let news: Vec<LayersInPlace> = self.block_news(self.index.get(id), id, block).collect();
            self.tell_peer(follow, position, id, news);
        }
    }

    fn is_peers(&self, follow: u64) -> bool {
        self.follows.open.get(&follow).is_some_and(|open| open.session.is_none())
    }

    /// Whether the chunk at a position of a follow is coming.
    fn waits_for(&self, follow: u64, position: usize, id: ChunkId) -> bool {
        self.follows.open.get(&follow).is_some_and(|open| open.chunks[position] == Followed::Coming(id))
    }
}
