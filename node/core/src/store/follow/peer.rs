//! Follows by peers: a peer is told of each layer, the commit, or the loss of a chunk.

use larder_protocol::checksum::{layer_ranges, layers_checksum};
use larder_protocol::{ChunkHash, Fingerprint, PoolSet};

use super::{Follow, Followed};
use crate::Millis;
use crate::store::Store;
use crate::store::hand_out::Named;
use crate::store::ids::ChunkId;
use crate::store::index::{Block, Chunk};
use crate::store::lookup::Place;

/// News of a chunk for a peer that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowNews {
    /// The follow.
    pub follow: u64,
    /// Position of the chunk in the follow.
    pub position: u32,
    /// The news.
    pub what: News,
}

/// A peer's news of a followed chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Layers of a block are in place.
    Layers(LayersInPlace),
    /// The chunk is committed. Holds the checksums of the followed blocks, by slice, then pool.
    Whole(Vec<u64>),
    /// The chunk will not come.
    Lost,
}

/// Layers of a block that may be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayersInPlace {
    /// The block among those that are followed, by slice, then pool.
    pub block: usize,
    /// The block's place.
    pub place: Place,
    /// Offset of the layers in the block.
    pub offset: u64,
    /// Bytes of the layers.
    pub bytes: u64,
    /// The checksum over the layers' bytes and the block's name.
    pub checksum: u64,
}

impl Store {
    /// Follows chunks for another node: the `pools` of each chunk, by position, or all pools if `pools` is empty. `None` if peers
    /// already follow too many chunks of the namespace's tenant. [`Store::end_grant`] ends the follow.
    pub fn follow_for_peer(
        &mut self,
        fingerprint: &Fingerprint,
        (hashes, pools): (&[ChunkHash], &[PoolSet]),
        attempt: u64,
        patience_ms: u64,
        now: Millis,
    ) -> Option<u64> {
        let most = self.limits.peers.as_ref()?.max_granted_chunks.saturating_mul(FOLLOWED_FOR_EACH_GRANT);
        let tenant = self.tenant_of_namespace(fingerprint);
        // A follow may wait for minutes, and must not keep other tenants from following.
        if !self.follows.peer_chunks.take(tenant, hashes.len() as u64, most) {
            return None;
        }
        let follow = self.next_number();
        let started = Follow {
            session: None,
            tenant,
            fingerprint: *fingerprint,
            slices: Box::default(),
            attempt,
            chunks: hashes.iter().map(|&hash| Followed::Awaited(hash)).collect(),
            hashes: hashes.into(),
            pools: pools.into(),
            links: None,
            writer: None,
            may_ask: vec![false; hashes.len()].into(),
            patience_ms,
            deadline: now + patience_ms,
            is_shown: true,
            leased_blocks: 0,
        };
        self.follows.open(follow, started);
        for (position, &hash) in hashes.iter().enumerate() {
            let id = self.named(fingerprint, &hash);
            let is_here = |&id: &ChunkId| {
                let chunk = self.index.get(id);
                chunk.pools.has_all(self.wanted_pools(follow, chunk.namespace, position))
            };
            match id.filter(is_here) {
                Some(id) => {
                    self.use_chunks(&[id]);
                    self.follow_mut(follow, |open| open.chunks[position] = Followed::Here(id));
                    self.tell_layers(follow, position, id);
                    self.tell_whole(follow, position, id);
                }
                None => match self.namespaces.of(fingerprint) {
                    Some(number) => {
                        self.await_chunk(follow, number, position, hash);
                        if id.is_some_and(|id| self.index.get(id).is_complete()) {
                            self.lose_awaited(follow, position);
                        }
                    }
                    None => {
                        self.follows.awaited.insert((*fingerprint, hash, (follow, position)));
                    }
                },
            }
        }
        Some(follow)
    }

    /// Tells a peer which layers of a chunk are in place.
    pub(super) fn tell_layers(&mut self, follow: u64, position: usize, id: ChunkId) {
        if self.follows.open.get(&follow).is_none_or(|open| open.session.is_some()) {
            return;
        }
        let chunk = self.index.get(id);
        let news = (0..chunk.blocks.len()).flat_map(|block| self.block_news(chunk, id, block));
        let news: Vec<LayersInPlace> = news.collect();
        self.tell_peer(follow, position, id, news);
    }

    /// Tells a peer about the layers of pools that it wants. In `news`, blocks are numbered among all blocks of the chunk.
    pub(super) fn tell_peer(
        &mut self,
        follow: u64,
        position: usize,
        id: ChunkId,
        news: impl IntoIterator<Item = LayersInPlace>,
    ) {
        if !self.may_be_told(follow, position, id) {
            return;
        }
        let number = self.index.get(id).namespace;
        let (wanted, pools) =
            (self.wanted_pools(follow, number, position), self.namespaces.get(number).pools.len());
        for layers in news {
            let (slice, pool) = (layers.block / pools, layers.block % pools);
            if wanted.has(pool) {
                let block = slice * wanted.len() + wanted.iter().take_while(|&other| other < pool).count();
                let what = News::Layers(LayersInPlace { block, ..layers });
                self.follows.told.push(FollowNews { follow, position: position as u32, what });
            }
        }
    }

    /// The news of those layers of a block that are in place.
    pub(super) fn block_news(
        &self,
        chunk: &Chunk,
        id: ChunkId,
        block: usize,
    ) -> impl Iterator<Item = LayersInPlace> {
        let pieces = self.pieces_in_place(chunk, id, block);
        let place = chunk.blocks[block]
            .slot()
            .map(|slot| Place { extent: slot.extent, offset: self.slab.offset(slot) });
        let key = self.namespaces.get(chunk.namespace).key(chunk.hash, block);
        let in_place = move |(offset, bytes, sum)| {
            let checksum = layers_checksum(&key, &(offset..offset + bytes), sum);
            Some(LayersInPlace { block, place: place?, offset, bytes, checksum })
        };
        pieces.into_iter().filter_map(in_place)
    }

    /// The layers of a block that are in place, as pieces: offset, bytes, checksum.
    pub(super) fn pieces_in_place(&self, chunk: &Chunk, id: ChunkId, block: usize) -> Vec<(u64, u64, u64)> {
        let pools = &self.namespaces.get(chunk.namespace).pools;
        let spec = &pools[block % pools.len()].spec;
        match &chunk.blocks[block] {
            Block::Absent => Vec::new(),
            Block::Writing(_) => {
                self.follows.layers(id, block).map(|layers| layers.pieces(spec)).unwrap_or_default()
            }
            Block::Ready(_, checksums) => {
                let ranges = layer_ranges(spec).zip(checksums.ranges.iter());
                ranges.map(|(range, &checksum)| (range.start, range.end - range.start, checksum)).collect()
            }
        }
    }

    /// Whether a chunk has the name under which the peer follows it.
    pub(super) fn may_be_told(&mut self, follow: u64, position: usize, id: ChunkId) -> bool {
        let Some(open) = self.follows.open.get(&follow) else { return false };
        let Some((namespace, &hash)) = self.namespaces.of(&open.fingerprint).zip(open.hashes.get(position))
        else {
            return false;
        };
        self.may_leave(&Named { id, namespace, hash })
    }

    pub(super) fn tell_whole(&mut self, follow: u64, position: usize, id: ChunkId) {
        if !self.may_be_told(follow, position, id) {
            return;
        }
        let chunk = self.index.get(id);
        let (wanted, pools) = (
            self.wanted_pools(follow, chunk.namespace, position),
            self.namespaces.get(chunk.namespace).pools.len(),
        );
        let blocks = chunk.blocks.iter().enumerate().filter(|(block, _)| wanted.has(block % pools));
        let checksums = blocks.map(|(_, block)| block.checksum()).collect();
        self.follows.told.push(FollowNews {
            follow,
            position: position as u32,
            what: News::Whole(checksums),
        });
    }
}

/// Chunks that peers may follow for each chunk that may be lent to them: a followed chunk takes no memory of the arena.
const FOLLOWED_FOR_EACH_GRANT: u64 = 4;
