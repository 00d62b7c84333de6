//! Follows: chunks that are read, layer by layer, while they are being written.
//!
//! A reader follows chunks that a session of this node writes, that come from another node, or that nobody writes yet. Layers
//! are in place when they were copied and summed; which ones are, is kept for each block that is being written. Nobody else
//! sees the chunk before it is committed. When the writing of a chunk ends without a commit, its slots stay as they are until
//! the last reader that may have been shown them lets go.

use std::collections::{BTreeSet, HashMap};

use larder_protocol::limits::MAX_MESSAGE_BLOCKS;
use larder_protocol::session::Scarce;
use larder_protocol::{Chain, ChunkHash, Fingerprint, PoolSpec};

use super::ids::{ChunkId, NamespaceId, ProcessId, SessionId, Slot};
use super::index::{Block, Chunk};
use super::lookup::{CLAIMS_RETRY_MS, Leased, Place, Presence};
use super::{FetchId, Refused, Source, Store, Wanted};
use crate::clock::Millis;

mod layers;

pub(super) use layers::Layers;

/// Who follows what, and how far it is.
#[derive(Debug, Default)]
pub(super) struct Follows {
    open: HashMap<u64, Follow>,
    /// Layers in place of chunks that are being written, by block.
    layers: HashMap<ChunkId, Vec<Layers>>,
    /// Chunks that are written in a numbered attempt.
    attempts: HashMap<ChunkId, u64>,
    /// Who may read slots of chunks that are being written.
    holders: HashMap<ChunkId, Vec<Holder>>,
    /// Who waits for chunks that nobody writes yet.
    awaited: HashMap<(Fingerprint, ChunkHash), Vec<u64>>,
    /// Slots whose writing ended without a commit.
    limbo: Vec<Limbo>,
    /// Follows of sessions that have news.
    progressed: BTreeSet<u64>,
    /// News for peers. They are taken after every change.
    told: Vec<Told>,
    /// Chunks that peers follow.
    peer_chunks: u64,
    /// Chunks that were followed and did not come.
    lost: u64,
}

/// Who may read a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holder {
    Follow(u64),
    /// Its session ended, and it may still read, or write, what it was shown.
    Process(ProcessId),
}

#[derive(Debug)]
struct Limbo {
    slots: Vec<Slot>,
    holders: Vec<Holder>,
}

#[derive(Debug)]
struct Follow {
    /// `None`: a peer.
    session: Option<SessionId>,
    fingerprint: Fingerprint,
    slices: Box<[u16]>,
    attempt: u64,
    chunks: Vec<Followed>,
    patience_ms: u64,
    deadline: Millis,
    /// Whether something came since the last tick.
    has_moved: bool,
    /// Whether the session was told the places.
    is_shown: bool,
    leased_blocks: u64,
}

/// One chunk that is followed. All but the first are claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Followed {
    /// Nobody writes it yet.
    Awaited(ChunkHash),
    /// Being written, or on its way from elsewhere.
    Coming(ChunkId),
    /// Committed.
    Here(ChunkId),
    /// It did not come. Its slots may still be read.
    Lost(Option<ChunkId>),
}

/// What a session asks to follow.
#[derive(Debug, Clone, Copy)]
pub struct FollowRequest<'a> {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunks.
    pub chain: &'a Chain,
    /// Whether what is not here is asked of another node.
    pub from_peer: bool,
    /// The earliest attempt that will do.
    pub attempt: u64,
    /// For how long nothing may come.
    pub patience_ms: u64,
}

/// A follow has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowStarted {
    /// Its number, which is that of a lease.
    pub follow: u64,
    /// What to fetch, each to be followed by [`Store::fetched`].
    pub wanted: Vec<Wanted>,
}

/// How far a follow is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowProgress {
    /// Chunks that have come or may still come.
    pub chunks: u32,
    /// Layers in place in all of them.
    pub layers: u32,
    /// Whether all of them are committed.
    pub is_whole: bool,
}

/// News of a chunk for a peer that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// The follow.
    pub follow: u64,
    /// Position of the chunk in it.
    pub position: u32,
    /// What there is to tell.
    pub what: News,
}

/// What a peer is told of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// Layers of a block are in place.
    Layers(LayersInPlace),
    /// It is committed: the checksums of its blocks, by slice, then pool.
    Whole(Vec<u64>),
    /// It will not come.
    Lost,
}

/// Layers of a block that may be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayersInPlace {
    /// The block, by slice, then pool.
    pub block: usize,
    /// Where the block stands.
    pub place: Place,
    /// Where in it the layers begin.
    pub offset: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their checksum.
    pub checksum: u64,
}

impl Follows {
    /// Chunks that peers follow.
    pub(super) fn peer_chunks(&self) -> u64 {
        self.peer_chunks
    }

    /// Follows of sessions and peers.
    pub(super) fn len(&self) -> u64 {
        self.open.len() as u64
    }

    /// Chunks that were followed and did not come, so far.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// The layers of a block that are in place; none where it was not handed over layer by layer.
    pub(super) fn layers(&self, id: ChunkId, block: usize) -> Option<&Layers> {
        self.layers.get(&id).map(|blocks| &blocks[block]).filter(|layers| !layers.is_empty())
    }

    /// What was in place of a block is so no more.
    pub(super) fn forget_layers(&mut self, id: ChunkId, block: usize) {
        let Some(blocks) = self.layers.get_mut(&id) else { return };
        blocks[block] = Layers::default();
        if blocks.iter().all(Layers::is_empty) {
            self.layers.remove(&id);
        }
    }

    /// The chunk is written in this attempt.
    pub(super) fn note_attempt(&mut self, id: ChunkId, attempt: u64) {
        if attempt > 0 {
            self.attempts.insert(id, attempt);
        }
    }

    fn is_early(&self, id: ChunkId, attempt: u64) -> bool {
        self.attempts.get(&id).copied().unwrap_or(0) < attempt
    }

    fn hold(&mut self, id: ChunkId, holder: Holder) {
        self.holders.entry(id).or_default().push(holder);
    }

    fn let_go(&mut self, id: ChunkId, holder: Holder) {
        let Some(holders) = self.holders.get_mut(&id) else { return };
        holders.retain(|&other| other != holder);
        if holders.is_empty() {
            self.holders.remove(&id);
        }
    }

    /// Puts `to` in the place of `from`, wherever slots wait for it.
    fn hand_on(&mut self, from: Holder, to: Holder) {
        let lists = self.holders.values_mut().chain(self.limbo.iter_mut().map(|limbo| &mut limbo.holders));
        lists.flatten().filter(|holder| **holder == from).for_each(|holder| *holder = to);
    }

    fn followers(&self, id: ChunkId) -> Vec<u64> {
        let number = |holder: &Holder| match *holder {
            Holder::Follow(number) => Some(number),
            Holder::Process(_) => None,
        };
        self.holders.get(&id).map(|holders| holders.iter().filter_map(number).collect()).unwrap_or_default()
    }
}

impl Follow {
    /// Chunks that have come or may still come.
    fn living(&self) -> usize {
        self.chunks.iter().take_while(|chunk| !matches!(chunk, Followed::Lost(_))).count()
    }

    fn position(&self, id: ChunkId) -> Option<usize> {
        self.chunks.iter().position(|&chunk| chunk == Followed::Coming(id))
    }
}

impl Store {
    /// Starts to follow chunks. Room for those that come from elsewhere is taken for all of them or for none.
    ///
    /// # Errors
    /// As [`Store::lease`]; [`Refused::Busy`] where there is no room, [`Refused::NotFollowed`] for a namespace with pools that
    /// not every chunk has.
    pub fn follow(
        &mut self,
        session: SessionId,
        ask: FollowRequest<'_>,
        now: Millis,
    ) -> Result<FollowStarted, Refused> {
        let FollowRequest { namespace, chain, from_peer, attempt, patience_ms } = ask;
        let (number, slices) = self.slices(session, namespace)?;
        let slices: Box<[u16]> = slices.into();
        let found = self.walk(number, chain)?;
        let known = self.namespaces.get(number);
        if !known.rules.is_plain() {
            return Err(Refused::NotFollowed);
        }
        let fingerprint = known.fingerprint;
        let blocks = slices.len() * known.rules.blocks(chain.len());
        let held = self.session(session)?.leased_blocks;
        if blocks > MAX_MESSAGE_BLOCKS || held + blocks as u64 > self.limits.max_leased_blocks {
            return Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: CLAIMS_RETRY_MS });
        }
        let follow = self.next_number();
        let started = Follow {
            session: Some(session),
            fingerprint,
            slices,
            attempt,
            chunks: Vec::with_capacity(chain.len()),
            patience_ms,
            deadline: now + patience_ms,
            has_moved: false,
            is_shown: false,
            leased_blocks: blocks as u64,
        };
        self.follows.open.insert(follow, started);
        self.session_mut(session)?.leased_blocks += blocks as u64;
        let mut wanted = Vec::new();
        for (position, found) in found.into_iter().enumerate() {
            let room = self.follow_chunk(follow, number, chain, (position, found), from_peer, &mut wanted);
            if !room {
                self.end_follow(follow);
                let started: Vec<FetchId> = wanted.iter().map(|wanted| wanted.fetch).collect();
                self.gathers.forget_abandoned(&started);
                wanted.into_iter().for_each(|wanted| drop(self.fetched(wanted.fetch, None, None)));
                return Err(Refused::Busy { what: Scarce::Memory, retry_after_ms: ROOM_RETRY_MS });
            }
        }
        self.follows.progressed.insert(follow);
        Ok(FollowStarted { follow, wanted })
    }

    /// Adds a chunk to a follow; whether there was room for it.
    fn follow_chunk(
        &mut self,
        follow: u64,
        number: NamespaceId,
        chain: &Chain,
        (position, found): (usize, Presence),
        from_peer: bool,
        wanted: &mut Vec<Wanted>,
    ) -> bool {
        let hash = chain.hashes[position];
        if let Presence::Here(id) = found {
            self.use_chunks(&[id]);
            self.follow_mut(follow, |open| open.chunks.push(Followed::Here(id)));
            return true;
        }
        let from = match found {
            Presence::OnDisk(_) => Some(Source::Disk),
            _ => from_peer.then_some(Source::Peer),
        };
        // What is being written here, if only in an attempt that will not do, has no room for what comes from elsewhere.
        let has_slots = |id| self.index.get(id).slots().next().is_some();
        if !self.index.find(number, &hash).is_some_and(has_slots)
            && let Some(from) = from
        {
            let Some(id) = self.start_fetch(number, chain.chunk(position), from) else { return false };
            wanted.push(self.wanted(number, id, position as u32, from));
        }
        self.await_chunk(follow, number, hash);
        true
    }

    /// Adds a chunk that is coming, or that somebody may come to write.
    fn await_chunk(&mut self, follow: u64, number: NamespaceId, hash: ChunkHash) {
        let position = self.follows.open.get(&follow).map_or(0, |open| open.chunks.len());
        self.follow_mut(follow, |open| open.chunks.push(Followed::Awaited(hash)));
        match self.index.find(number, &hash).filter(|&id| self.may_join(id, follow)) {
            Some(id) => self.join(follow, position, id),
            None => {
                let Some(open) = self.follows.open.get(&follow) else { return };
                self.follows.awaited.entry((open.fingerprint, hash)).or_default().push(follow);
            }
        }
    }

    /// Whether a chunk is being written, in an attempt that will do.
    fn may_join(&self, id: ChunkId, follow: u64) -> bool {
        let is_written = self.index.get(id).blocks.iter().any(|block| matches!(block, Block::Writing(_)));
        let attempt = self.follows.open.get(&follow).map_or(0, |open| open.attempt);
        is_written && (self.gathers.is_coming(id) || !self.follows.is_early(id, attempt))
    }

    /// The chunk at a position is being written: the follow holds it from now on.
    fn join(&mut self, follow: u64, position: usize, id: ChunkId) {
        self.change(id, |chunk| chunk.claims += 1);
        self.follows.hold(id, Holder::Follow(follow));
        self.gathers.wait_for(id, follow);
        self.follow_mut(follow, |open| open.chunks[position] = Followed::Coming(id));
        self.tell_layers(follow, position, id);
    }

    /// Somebody has begun to write a chunk, or to fetch it: who waited for it follows it from now on.
    pub(super) fn writing_begins(&mut self, id: ChunkId) {
        if self.follows.awaited.is_empty() {
            return;
        }
        let chunk = self.index.get(id);
        let key = (self.namespaces.get(chunk.namespace).fingerprint, chunk.hash);
        let Some(waiting) = self.follows.awaited.remove(&key) else { return };
        let (joining, waiting): (Vec<u64>, Vec<u64>) =
            waiting.into_iter().partition(|&follow| self.may_join(id, follow));
        if !waiting.is_empty() {
            self.follows.awaited.insert(key, waiting);
        }
        for follow in joining {
            let Some(open) = self.follows.open.get(&follow) else { continue };
            let position = open.chunks.iter().position(|&chunk| chunk == Followed::Awaited(key.1));
            if let Some(position) = position {
                self.join(follow, position, id);
                self.moved(follow);
            }
        }
    }

    /// How far a follow is.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for one that is not the session's.
    pub fn followed(&self, session: SessionId, follow: u64) -> Result<FollowProgress, Refused> {
        let unknown = Refused::Unknown { what: "follow", number: follow };
        let open = self.follows.open.get(&follow).filter(|open| open.session == Some(session));
        let open = open.ok_or(unknown)?;
        let living = open.living();
        let layers = open.chunks[..living].iter().map(|&chunk| self.layers_of(open, chunk)).min();
        let is_whole = open.chunks[..living].iter().all(|chunk| matches!(chunk, Followed::Here(_)));
        Ok(FollowProgress { chunks: living as u32, layers: layers.unwrap_or(0), is_whole })
    }

    /// Where the chunks of a follow stand, once: when each of them has its place.
    ///
    /// # Errors
    /// As [`Store::followed`].
    pub fn show_followed(&mut self, session: SessionId, follow: u64) -> Result<Option<Leased>, Refused> {
        let FollowProgress { chunks, .. } = self.followed(session, follow)?;
        let Some(open) = self.follows.open.get(&follow).filter(|open| !open.is_shown && chunks > 0) else {
            return Ok(None);
        };
        let number = self.namespaces.of(&open.fingerprint);
        let slices = open.slices.clone();
        let ids: Option<Vec<ChunkId>> =
            open.chunks[..chunks as usize].iter().map(|chunk| chunk.id()).collect();
        let (Some(number), Some(ids)) = (number, ids) else { return Ok(None) };
        let has_slots = |id: &ChunkId| {
            let (chunk, namespace) = (self.index.get(*id), self.namespaces.get(number));
            slices
                .iter()
                .all(|&slice| chunk.blocks[namespace.slice(slice)].iter().all(|block| block.slot().is_some()))
        };
        if !ids.iter().all(has_slots) {
            return Ok(None);
        }
        let mut leased = Leased { lease: follow, ..Leased::default() };
        let fit = self.place_prefix(session, number, &slices, &ids, &mut leased);
        leased.chunks = fit as u32;
        self.follow_mut(follow, |open| open.is_shown = true);
        // What does not fit into one answer is not read.
        self.lose_from(follow, fit);
        Ok(Some(leased))
    }

    /// Follows of sessions that have news since the last call.
    pub fn take_progressed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.follows.progressed).into_iter().collect()
    }

    /// News for peers, since the last call.
    pub fn take_told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.follows.told)
    }

    /// Ends a session's follow; whether there was one of this number.
    pub(super) fn release_follow(&mut self, session: SessionId, follow: u64) -> bool {
        let is_known = self.follows.open.get(&follow).is_some_and(|open| open.session == Some(session));
        if is_known {
            self.end_follow(follow);
        }
        is_known
    }

    /// Layers that are in place of a chunk, as one of its followers counts them.
    fn layers_of(&self, open: &Follow, chunk: Followed) -> u32 {
        let id = match chunk {
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
        let blocks =
            open.slices.iter().flat_map(|&slice| (0..namespace.pools.len()).map(move |pool| (slice, pool)));
        blocks.map(|(slice, pool)| of_block(slice, pool)).min().unwrap_or(0)
    }

    fn follow_mut<T>(&mut self, follow: u64, change: impl FnOnce(&mut Follow) -> T) -> Option<T> {
        self.follows.open.get_mut(&follow).map(change)
    }

    /// There are news for whoever follows this.
    fn moved(&mut self, follow: u64) {
        let is_session = self.follow_mut(follow, |open| {
            open.has_moved = true;
            open.session.is_some()
        });
        if is_session == Some(true) {
            self.follows.progressed.insert(follow);
        }
    }
}

impl Followed {
    fn id(self) -> Option<ChunkId> {
        match self {
            Self::Awaited(_) | Self::Lost(None) => None,
            Self::Coming(id) | Self::Here(id) | Self::Lost(Some(id)) => Some(id),
        }
    }
}

impl Store {
    /// Follows chunks for another node; `None` where peers follow too much already.
    /// [`Store::end_grant`] ends it.
    pub fn follow_for_peer(
        &mut self,
        fingerprint: &Fingerprint,
        hashes: &[ChunkHash],
        attempt: u64,
        patience_ms: u64,
        now: Millis,
    ) -> Option<u64> {
        let most = self.limits.peers.as_ref()?.max_granted_chunks;
        if self.grants.len() + self.follows.peer_chunks + hashes.len() as u64 > most {
            return None;
        }
        let follow = self.next_number();
        self.follows.peer_chunks += hashes.len() as u64;
        let started = Follow {
            session: None,
            fingerprint: *fingerprint,
            slices: Box::default(),
            attempt,
            chunks: Vec::with_capacity(hashes.len()),
            patience_ms,
            deadline: now + patience_ms,
            has_moved: false,
            is_shown: true,
            leased_blocks: 0,
        };
        self.follows.open.insert(follow, started);
        for &hash in hashes {
            let id = self.named(fingerprint, &hash);
            match id.filter(|&id| self.index.get(id).is_complete()) {
                Some(id) => {
                    self.use_chunks(&[id]);
                    let position = self.follow_mut(follow, |open| {
                        open.chunks.push(Followed::Here(id));
                        open.chunks.len() - 1
                    });
                    self.tell_layers(follow, position.unwrap_or_default(), id);
                    self.tell_whole(follow, position.unwrap_or_default(), id);
                }
                None => match self.namespaces.of(fingerprint) {
                    Some(number) => self.await_chunk(follow, number, hash),
                    None => {
                        self.follow_mut(follow, |open| open.chunks.push(Followed::Awaited(hash)));
                        self.follows.awaited.entry((*fingerprint, hash)).or_default().push(follow);
                    }
                },
            }
        }
        Some(follow)
    }

    /// Tells a peer which layers of a chunk are in place.
    fn tell_layers(&mut self, follow: u64, position: usize, id: ChunkId) {
        if self.follows.open.get(&follow).is_none_or(|open| open.session.is_some()) {
            return;
        }
        let chunk = self.index.get(id);
        let news = (0..chunk.blocks.len()).flat_map(|block| self.block_news(chunk, id, block));
        let told = news.map(|layers| Told { follow, position: position as u32, what: News::Layers(layers) });
        let told: Vec<Told> = told.collect();
        self.follows.told.extend(told);
    }

    /// What is in place of a block.
    fn block_news(&self, chunk: &Chunk, id: ChunkId, block: usize) -> impl Iterator<Item = LayersInPlace> {
        let namespace = self.namespaces.get(chunk.namespace);
        let spec = &namespace.pools[block % namespace.pools.len()].spec;
        let pieces: Vec<(u64, u64, u64)> = match &chunk.blocks[block] {
            Block::Absent => Vec::new(),
            Block::Writing(_) => {
                self.follows.layers(id, block).map(|layers| layers.pieces(spec)).unwrap_or_default()
            }
            Block::Ready(_, checksums) => {
                let ranges = larder_protocol::checksum::layer_ranges(spec).zip(checksums.ranges.as_slice());
                ranges.map(|(range, &checksum)| (range.start, range.end - range.start, checksum)).collect()
            }
        };
        let place = chunk.blocks[block]
            .slot()
            .map(|slot| Place { extent: slot.extent, offset: self.slab.offset(slot) });
        let in_place = move |(offset, bytes, checksum)| {
            Some(LayersInPlace { block, place: place?, offset, bytes, checksum })
        };
        pieces.into_iter().filter_map(in_place)
    }

    fn tell_whole(&mut self, follow: u64, position: usize, id: ChunkId) {
        let whole = |block: &Block| match block {
            Block::Ready(_, checksums) => checksums.whole,
            Block::Absent | Block::Writing(_) => 0,
        };
        let checksums = self.index.get(id).blocks.iter().map(whole).collect();
        self.follows.told.push(Told { follow, position: position as u32, what: News::Whole(checksums) });
    }
}

impl Store {
    /// Layers of a block of a chunk that is being written are in place.
    pub(super) fn layers_in_place(
        &mut self,
        id: ChunkId,
        block: usize,
        layers: std::ops::Range<u32>,
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
        let place = Place { extent: slot.extent, offset: self.slab.offset(slot) };
        for follow in self.follows.followers(id) {
            self.moved(follow);
            let Some(open) = self.follows.open.get(&follow).filter(|open| open.session.is_none()) else {
                continue;
            };
            let Some(position) = open.position(id) else { continue };
            let what = News::Layers(LayersInPlace { block, place, offset, bytes, checksum });
            self.follows.told.push(Told { follow, position: position as u32, what });
        }
    }

    /// Layers of a chunk that is being fetched came, and are right. Nothing happens where the fetch is another one than that
    /// of this number: a chunk's place may be used again.
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
        if !self.gathers.is_fetch(fetch, number) || block >= self.index.get(id).blocks.len() {
            return;
        }
        let chunk = self.index.get(id);
        let layer_bytes = self.pool_of(chunk, block).layer_bytes.max(1);
        if !matches!(chunk.blocks[block], Block::Writing(_))
            || offset % layer_bytes != 0
            || bytes % layer_bytes != 0
        {
            return;
        }
        let first = (offset / layer_bytes) as u32;
        let layers = first..first + (bytes / layer_bytes) as u32;
        if self.follows.layers(id, block).is_none_or(|known| !known.overlaps(&layers)) {
            self.layers_in_place(id, block, layers, checksum);
        }
    }

    fn pool_of(&self, chunk: &Chunk, block: usize) -> &PoolSpec {
        let namespace = self.namespaces.get(chunk.namespace);
        &namespace.pools[block % namespace.pools.len()].spec
    }

    /// Blocks of a chunk were committed, or came: `blocks` says which.
    pub(super) fn blocks_ready(&mut self, id: ChunkId, blocks: &[usize]) {
        let followers = self.follows.followers(id);
        for &block in blocks {
            if self.follows.layers(id, block).is_none() {
                // It was not handed over layer by layer: all of it is news.
                for &follow in &followers {
                    self.tell_block(follow, id, block);
                }
            }
            self.follows.forget_layers(id, block);
        }
        let is_complete = self.index.get(id).is_complete();
        for follow in followers {
            self.moved(follow);
            let position = self.follows.open.get(&follow).and_then(|open| open.position(id));
            let Some(position) = position.filter(|_| is_complete) else { continue };
            self.follow_mut(follow, |open| open.chunks[position] = Followed::Here(id));
            if self.follows.open.get(&follow).is_some_and(|open| open.session.is_none()) {
                self.tell_whole(follow, position, id);
            }
        }
        if is_complete {
            self.follows.holders.remove(&id);
            self.follows.attempts.remove(&id);
        }
    }

    fn tell_block(&mut self, follow: u64, id: ChunkId, block: usize) {
        let Some(open) = self.follows.open.get(&follow).filter(|open| open.session.is_none()) else { return };
        let Some(position) = open.position(id) else { return };
        let news: Vec<LayersInPlace> = self.block_news(self.index.get(id), id, block).collect();
        let told = news.into_iter().map(|layers| Told {
            follow,
            position: position as u32,
            what: News::Layers(layers),
        });
        self.follows.told.extend(told);
    }

    /// The writing of these slots of a chunk has ended without a commit: its followers hear that it is lost. The slots are
    /// free, or are so when nobody may read them any more; nor the `writer`, where it may still write.
    pub(super) fn writing_failed(&mut self, id: ChunkId, slots: Vec<Slot>, writer: Option<ProcessId>) {
        self.follows.attempts.remove(&id);
        for follow in self.follows.followers(id) {
            let position = self.follows.open.get(&follow).and_then(|open| open.position(id));
            if let Some(position) = position {
                self.lose(follow, position);
            }
        }
        let mut holders = self.follows.holders.remove(&id).unwrap_or_default();
        if holders.is_empty() && writer.is_none() {
            return slots.into_iter().for_each(|slot| self.slab.free(slot));
        }
        slots.iter().for_each(|&slot| self.slab.quarantine(slot));
        holders.extend(writer.map(Holder::Process));
        self.follows.limbo.push(Limbo { slots, holders });
    }

    /// The chunk at a position of a follow will not come.
    fn lose(&mut self, follow: u64, position: usize) {
        let Some(open) = self.follows.open.get_mut(&follow) else { return };
        let (was, fingerprint, is_peer) = (open.chunks[position], open.fingerprint, open.session.is_none());
        match was {
            Followed::Lost(_) | Followed::Here(_) => return,
            Followed::Awaited(hash) => {
                open.chunks[position] = Followed::Lost(None);
                self.forget_awaited(follow, fingerprint, hash);
            }
            Followed::Coming(id) => {
                open.chunks[position] = Followed::Lost(Some(id));
                self.gathers.stop_waiting_for(id, follow);
            }
        }
        self.follows.lost += 1;
        self.moved(follow);
        if is_peer {
            self.follows.told.push(Told { follow, position: position as u32, what: News::Lost });
        }
    }

    fn lose_from(&mut self, follow: u64, first: usize) {
        let chunks = self.follows.open.get(&follow).map_or(0, |open| open.chunks.len());
        (first..chunks).for_each(|position| self.lose(follow, position));
    }

    fn forget_awaited(&mut self, follow: u64, fingerprint: Fingerprint, hash: ChunkHash) {
        let key = (fingerprint, hash);
        let Some(waiting) = self.follows.awaited.get_mut(&key) else { return };
        waiting.retain(|&other| other != follow);
        if waiting.is_empty() {
            self.follows.awaited.remove(&key);
        }
    }

    /// Gives up what has not come in time.
    pub(super) fn expire_follows(&mut self, now: Millis) {
        let mut late = Vec::new();
        for (&follow, open) in &mut self.follows.open {
            if std::mem::take(&mut open.has_moved) {
                open.deadline = now + open.patience_ms;
            } else if open.deadline <= now {
                late.push(follow);
            }
        }
        late.sort_unstable();
        late.into_iter().for_each(|follow| self.lose_from(follow, 0));
    }

    /// Ends a follow, and all that it holds.
    pub(super) fn end_follow(&mut self, follow: u64) {
        let Some(open) = self.follows.open.remove(&follow) else { return };
        let Follow { session, fingerprint, chunks, leased_blocks, .. } = open;
        match session {
            Some(session) => {
                if let Ok(held) = self.session_mut(session) {
                    held.leased_blocks -= leased_blocks;
                }
            }
            None => self.follows.peer_chunks -= chunks.len() as u64,
        }
        for &chunk in chunks.iter().rev() {
            match chunk {
                Followed::Awaited(hash) => self.forget_awaited(follow, fingerprint, hash),
                Followed::Coming(id) => {
                    self.gathers.stop_waiting_for(id, follow);
                    self.follows.let_go(id, Holder::Follow(follow));
                }
                Followed::Lost(Some(id)) => self.follows.let_go(id, Holder::Follow(follow)),
                Followed::Here(_) | Followed::Lost(None) => {}
            }
            if let Some(id) = chunk.id() {
                self.unclaim(&[id]);
            }
        }
        self.follows.progressed.remove(&follow);
        self.leave_limbo(Holder::Follow(follow));
        self.evict_above_watermark();
    }

    /// Ends the follows of a session that ends. What was shown to a process that lives on stays until it is gone.
    pub(super) fn end_follows_of(&mut self, session: SessionId) {
        let of_session = self.follows.open.iter().filter(|(_, open)| open.session == Some(session));
        let mut of_session: Vec<u64> = of_session.map(|(&follow, _)| follow).collect();
        of_session.sort_unstable();
        for follow in of_session {
            self.leave_to_process(session, follow);
            self.end_follow(follow);
        }
    }

    fn leave_to_process(&mut self, session: SessionId, follow: u64) {
        let Some(open) = self.follows.open.get(&follow).filter(|open| open.is_shown) else { return };
        let ids: Box<[ChunkId]> = open.chunks.iter().filter_map(|chunk| chunk.id()).collect();
        let Some(id) = self.sessions.get(session).map(|session| session.process) else { return };
        let Some(process) = self.sessions.living(id) else { return };
        process.orphaned_leases.push(ids.clone());
        for &id in &ids {
            self.change(id, |chunk| chunk.claims += 1);
            self.orphan(id);
        }
        self.follows.hand_on(Holder::Follow(follow), Holder::Process(id));
    }

    /// A process is gone: nobody reads for it any more.
    pub(super) fn process_left_follows(&mut self, process: ProcessId) {
        let holder = Holder::Process(process);
        self.follows.holders.retain(|_, holders| {
            holders.retain(|&other| other != holder);
            !holders.is_empty()
        });
        self.leave_limbo(holder);
    }

    fn leave_limbo(&mut self, holder: Holder) {
        let (slab, limbo) = (&mut self.slab, &mut self.follows.limbo);
        limbo.retain_mut(|limbo| {
            limbo.holders.retain(|&other| other != holder);
            if limbo.holders.is_empty() {
                limbo.slots.iter().for_each(|&slot| {
                    slab.restore(slot);
                    slab.free(slot);
                });
            }
            !limbo.holders.is_empty()
        });
    }
}

/// How long a session that found no room should wait.
const ROOM_RETRY_MS: u64 = 5;

#[cfg(test)]
impl Store {
    /// Nobody follows or followed anything.
    pub(super) fn assert_follows_are_forgotten(&self) {
        let Follows { open, layers, attempts, holders, awaited, limbo, peer_chunks, .. } = &self.follows;
        assert!(open.is_empty() && layers.is_empty() && attempts.is_empty(), "{:?}", self.follows);
        assert!(holders.is_empty() && awaited.is_empty() && limbo.is_empty(), "{:?}", self.follows);
        assert_eq!(*peer_chunks, 0);
    }
}
