//! Follows: chunks that are read, layer by layer, while they are being written.
//!
//! A reader follows chunks that a session of this node writes, that come from another node, or that nobody writes yet. A layer is
//! in place when it was copied and summed; this module records which layers are in place, for each block that is being written.
//! Nobody else sees a chunk before its commit, and the commit copies nothing again. No byte of a slot is written twice, since an
//! engine may be reading it.
//!
//! **A writing that fails leaves its slots to its followers.** They hear that the chunk is lost. The slots are quarantined until
//! the last follower that may have seen them has let go, peers and vanished processes included. A follower gives up a silent
//! writer, or its silent node, when the follower's patience is over.
//!
//! **Two writers.** Follows of one chunk may name different writers' nodes; they share one fetch. If the fetch fails before a
//! follow was shown the places, this follow's own writer's node is asked, once.
//!
//! **Pools.** Only the pools that a prefix of all followed chunks needs are followed. If some pools are needed only of the last
//! chunks, a part of the chunks is of no use: if one chunk does not come, all are lost. A chunk that is here without a wanted
//! pool counts as lost if nobody is adding the pool.
//!
//! **Attempts.** A reservation may carry an attempt's number. A later attempt ends the earlier attempts at the same chunks, so a
//! writer that was given up can neither hand over nor commit. A reader names the first attempt from which it wants layers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeBounds;

use larder_protocol::chain::Links;
use larder_protocol::handoff::Writer;
use larder_protocol::limits::{MAX_MESSAGE_BLOCKS, MAX_SESSION_FOLLOWS};
use larder_protocol::session::Scarce;
use larder_protocol::{Chain, ChunkHash, Fingerprint, PoolRules, PoolSet};

use super::ids::{ChunkId, NamespaceId, ProcessId, SessionId, TenantId};
use super::index::{Block, Chunk};
use super::lookup::{CLAIMS_RETRY_MS, Presence, most_chunks};
use super::{FetchId, Refused, Source, Store, Wanted};
use crate::Millis;
use crate::fair::FairPlaces;

mod again;
mod ends;
mod given;
mod layers;
mod limbo;
mod peer;
mod progress;
mod proofs;

use limbo::Limbo;

pub use again::AskedAgain;
pub(super) use layers::Layers;
pub use peer::{FollowNews, LayersInPlace, News};
pub use proofs::FollowProofs;

/// The follows of a store and their progress.
#[derive(Debug, Default)]
pub(super) struct Follows {
    open: BTreeMap<u64, Follow>,
    /// For each chunk that is being written, the layers that are in place, by block.
    layers: BTreeMap<ChunkId, Vec<Layers>>,
    /// Chunks that are written in a numbered attempt.
    attempts: BTreeMap<ChunkId, u64>,
    /// The readers of slots of chunks that are being written.
    holders: BTreeSet<(ChunkId, Reader)>,
    /// The follows, each with a position, that wait for chunks that nobody writes yet.
    awaited: BTreeSet<(Fingerprint, ChunkHash, (u64, usize))>,
    limbo: Limbo,
    /// When follows give up their missing chunks, unless these have news before.
    deadlines: BTreeSet<(Millis, u64)>,
    /// Follows that had news since the last tick.
    moved: BTreeSet<u64>,
    /// Follows of sessions that have news.
    progressed: BTreeSet<u64>,
    /// News for peers. They are taken after every change.
    told: Vec<FollowNews>,
    /// Chunks, as (follow, position), for which the follow's own writer's node is to be asked: another follow's fetch failed.
    again: BTreeSet<(u64, usize)>,
    /// Chunks that peers follow, by tenant; namespaces that are not known here count together.
    peer_chunks: FairPlaces<Option<TenantId>>,
    /// Chunks that were followed and did not come.
    lost: u64,
}

/// A reader of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reader {
    /// A follow, and the position of the chunk there.
    Follow(u64, usize),
    /// A process whose session ended. It may still read, or write, the slots that it was shown.
    Process(ProcessId),
    /// A read from a drive that does not answer, by its number: the drive may still write to the slots.
    Drive(u64),
}

#[derive(Debug)]
struct Follow {
    /// `None` for a peer's follow.
    session: Option<SessionId>,
    /// The tenant that a peer's follow counts for; `None` if the namespace was not known when the follow began.
    tenant: Option<TenantId>,
    fingerprint: Fingerprint,
    slices: Box<[u16]>,
    attempt: u64,
    chunks: Vec<Followed>,
    hashes: Box<[ChunkHash]>,
    /// The wanted pools of each chunk; empty if all pools are wanted.
    pools: Box<[PoolSet]>,
    /// The links of the chunks; `None` for a peer's follow.
    links: Option<Links>,
    /// The writer at another node, if there is one.
    writer: Option<Writer>,
    /// For each chunk, whether a writer's node may still be asked.
    may_ask: Box<[bool]>,
    patience_ms: u64,
    deadline: Millis,
    /// Whether the session was told the places.
    is_shown: bool,
    leased_blocks: u64,
}

/// A followed chunk. The follow claims the chunk whenever the variant has its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Followed {
    /// Nobody writes it yet.
    Awaited(ChunkHash),
    /// Being written, or on its way from elsewhere.
    Coming(ChunkId),
    /// Committed.
    Here(ChunkId),
    /// The chunk did not come. If there is an id, the chunk's slots may still be read.
    Lost(Option<ChunkId>),
}

/// A session's request to follow chunks.
#[derive(Debug, Clone, Copy)]
pub struct FollowRequest<'a> {
    /// Number of the namespace.
    pub namespace: u32,
    /// The chunks.
    pub chain: &'a Chain,
    /// The writer at another node, which is asked for the missing chunks.
    pub writer: Option<&'a Writer>,
    /// The earliest attempt that will do.
    pub attempt: u64,
    /// Missing chunks are given up after this long without news, in milliseconds.
    pub patience_ms: u64,
}

/// A follow that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowStarted {
    /// Its number. It is released like a lease.
    pub follow: u64,
    /// The fetches to start; [`Store::fetched`] must answer each.
    pub wanted: Vec<Wanted>,
}

/// The progress of a follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FollowProgress {
    /// Chunks that have come or may still come.
    pub chunks: u32,
    /// Layers in place in all of these chunks.
    pub layers: u32,
    /// Whether all of them are committed.
    pub is_whole: bool,
}

impl Follows {
    fn open(&mut self, follow: u64, started: Follow) {
        self.deadlines.insert((started.deadline, follow));
        self.open.insert(follow, started);
    }

    /// Follows of sessions and peers.
    pub(super) fn len(&self) -> u64 {
        self.open.len() as u64
    }

    /// Chunks that were followed and did not come, so far.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// The layers of a block that are in place; `None` if no layer was handed over.
    pub(super) fn layers(&self, id: ChunkId, block: usize) -> Option<&Layers> {
        self.layers.get(&id).map(|blocks| &blocks[block]).filter(|layers| !layers.is_empty())
    }

    /// Forgets which layers of a block are in place.
    pub(super) fn forget_layers(&mut self, id: ChunkId, block: usize) {
        let Some(blocks) = self.layers.get_mut(&id) else { return };
        blocks[block] = Layers::default();
        if blocks.iter().all(Layers::is_empty) {
            self.layers.remove(&id);
        }
    }

    /// Whether no chunk is handed over or followed, so that a commit has nobody to tell.
    fn is_idle(&self) -> bool {
        self.holders.is_empty()
            && self.layers.is_empty()
            && self.attempts.is_empty()
            && self.awaited.is_empty()
    }

    /// Notes that the chunk is written in this attempt.
    pub(super) fn note_attempt(&mut self, id: ChunkId, attempt: u64) {
        if attempt > 0 {
            self.attempts.insert(id, attempt);
        }
    }

    fn is_early(&self, id: ChunkId, attempt: u64) -> bool {
        self.attempts.get(&id).copied().unwrap_or(0) < attempt
    }

    fn hold(&mut self, id: ChunkId, holder: Reader) {
        self.holders.insert((id, holder));
    }

    fn let_go(&mut self, id: ChunkId, holder: Reader) {
        self.holders.remove(&(id, holder));
    }

    /// Forgets the processes that may read a chunk: from now on the chunk's claims keep its slots.
    fn let_go_processes(&mut self, id: ChunkId) {
        let processes = [0, u32::MAX].map(|number| (id, Reader::Process(ProcessId(number))));
        take_range(&mut self.holders, processes[0]..=processes[1]);
    }

    fn take_holders(&mut self, id: ChunkId) -> BTreeSet<Reader> {
        let ends = [Reader::Follow(0, 0), Reader::Drive(u64::MAX)].map(|holder| (id, holder));
        take_range(&mut self.holders, ends[0]..=ends[1]).into_iter().map(|(_, holder)| holder).collect()
    }

    /// Replaces the reader `from` of a chunk by `to`, wherever slots wait for `from`.
    fn hand_on(&mut self, id: ChunkId, from: Reader, to: Reader) {
        if self.holders.remove(&(id, from)) {
            self.holders.insert((id, to));
        }
        self.limbo.hand_on(from, to);
    }

    /// The follows that hold a chunk, each with the chunk's position there.
    fn followers(&self, id: ChunkId) -> Vec<(u64, usize)> {
        let ends = [(0, 0), NO_MORE].map(|(follow, position)| (id, Reader::Follow(follow, position)));
        let follow = |&(_, holder): &(ChunkId, Reader)| match holder {
            Reader::Follow(follow, position) => Some((follow, position)),
            Reader::Process(_) | Reader::Drive(_) => None,
        };
        self.holders.range(ends[0]..=ends[1]).filter_map(follow).collect()
    }

    /// The follows that wait until somebody writes a chunk, each with the chunk's position there.
    fn waiting(&self, fingerprint: Fingerprint, hash: ChunkHash) -> Vec<(u64, usize)> {
        let ends = [(0, 0), NO_MORE].map(|of| (fingerprint, hash, of));
        self.awaited.range(ends[0]..=ends[1]).map(|&(_, _, of)| of).collect()
    }
}

impl Follow {
    /// Chunks that have come or may still come.
    fn living(&self) -> usize {
        let living = self.chunks.iter().take_while(|chunk| !matches!(chunk, Followed::Lost(_))).count();
        if self.is_all_or_none() && living < self.chunks.len() { 0 } else { living }
    }

    /// Whether the session can use the chunks only if all of them come.
    fn is_all_or_none(&self) -> bool {
        self.session.is_some() && !self.pools.is_empty()
    }

    /// The wanted pools of the chunk at a position.
    fn wants(&self, position: usize, rules: &PoolRules) -> PoolSet {
        self.pools.get(position).copied().unwrap_or(rules.every())
    }
}

impl Store {
    /// Starts to follow chunks. Takes room for all chunks from elsewhere, or for none. If the chunks have
    /// more blocks than a session may lease at once, only as many as fit are followed.
    ///
    /// # Errors
    /// As [`Store::lease`]; [`Refused::Busy`] if there is no room, or the session has [`MAX_SESSION_FOLLOWS`] follows;
    /// [`Refused::FollowTooLarge`] if the chunks do not fit, and a part of them is of no use.
    pub fn follow(
        &mut self,
        session: SessionId,
        ask: FollowRequest<'_>,
        now: Millis,
    ) -> Result<FollowStarted, Refused> {
        let FollowRequest { namespace, chain, writer, attempt, patience_ms } = ask;
        let (number, slices) = self.slices(session, namespace)?;
        let slices: Box<[u16]> = slices.into();
        let mut found = self.walk(number, chain)?;
        let known = self.namespaces.get(number);
        let (rules, fingerprint) = (known.rules, known.fingerprint);
        let chunks = self.most_followed(&rules, slices.len(), chain.len())?;
        found.truncate(chunks);
        let pools: Box<[PoolSet]> = match rules.is_plain() {
            true => Box::default(),
            false => (0..chunks).map(|position| rules.needed(position, chunks)).collect(),
        };
        let blocks = slices.len() * rules.blocks(chunks);
        self.may_follow(session, blocks)?;
        let follow = self.next_number();
        let started = Follow {
            session: Some(session),
            tenant: None,
            fingerprint,
            slices,
            attempt,
            chunks: chain.hashes[..chunks].iter().map(|&hash| Followed::Awaited(hash)).collect(),
            hashes: chain.hashes[..chunks].into(),
            pools,
            links: Some(chain.links),
            writer: writer.cloned(),
            may_ask: vec![writer.is_some(); chunks].into(),
            patience_ms,
            deadline: now + patience_ms,
            is_shown: false,
            leased_blocks: blocks as u64,
        };
        self.follows.open(follow, started);
        let held = self.session_mut(session)?;
        held.leased_blocks += blocks as u64;
        held.follows.insert(follow);
        // Making room for one chunk may take any unclaimed chunk, even further down the chain.
        let found: Vec<(Presence, bool)> = (0..)
            .zip(found)
            .map(|(position, found)| {
                (found, self.pools_of(found).has_all(self.wanted_pools(follow, number, position)))
            })
            .collect();
        for (position, &(found, has_all)) in found.iter().enumerate() {
            let Some(id) = found.here().filter(|_| has_all) else { continue };
            self.use_chunks(&[id]);
            self.follow_mut(follow, |open| open.chunks[position] = Followed::Here(id));
        }
        let mut wanted = Vec::new();
        for (position, (found, has_all)) in found.into_iter().enumerate() {
            let from = match found {
                Presence::Here(_) if has_all => continue,
                Presence::OnDisk(_) if has_all => Some(Source::Disk),
                // No node is asked for a chunk that is here and only lacks pools.
                Presence::Here(_) | Presence::OnDisk(_) => None,
                Presence::Absent => writer.map(|_| Source::Peer),
            };
            let room = self.follow_chunk(follow, number, chain, (position, from), &mut wanted);
            if room && found != Presence::Absent && !has_all {
                self.lose_awaited(follow, position);
            }
            if !room {
                self.end_follow(follow);
                let started: BTreeSet<FetchId> = wanted.iter().map(|wanted| wanted.fetch).collect();
                self.gathers.forget_abandoned(&started);
                wanted.into_iter().for_each(|wanted| drop(self.fetched(wanted.fetch, None, None)));
                return Err(Refused::Busy { what: Scarce::Memory, retry_after_ms: ROOM_RETRY_MS });
            }
        }
        self.follows.progressed.insert(follow);
        Ok(FollowStarted { follow, wanted })
    }

    /// Whether a session may follow so many further blocks.
    fn may_follow(&self, session: SessionId, blocks: usize) -> Result<(), Refused> {
        let held = self.session(session)?;
        let fits = held.leased_blocks + blocks as u64 <= self.limits.max_leased_blocks;
        match fits && held.follows.len() < MAX_SESSION_FOLLOWS {
            true => Ok(()),
            false => Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: CLAIMS_RETRY_MS }),
        }
    }

    /// How many of `chunks` chunks a session may follow at once.
    fn most_followed(&self, rules: &PoolRules, slices: usize, chunks: usize) -> Result<usize, Refused> {
        let most =
            MAX_MESSAGE_BLOCKS.min(usize::try_from(self.limits.max_leased_blocks).unwrap_or(usize::MAX));
        let followed = most_chunks(rules, slices, most, chunks);
        // The state that a shorter prefix ends with is not handed over.
        if followed < chunks && !rules.is_plain() {
            return Err(Refused::FollowTooLarge { blocks: slices * rules.blocks(chunks), most });
        }
        Ok(followed)
    }

    /// Adds a chunk that cannot be read yet to a follow; returns whether there was room for it.
    fn follow_chunk(
        &mut self,
        follow: u64,
        number: NamespaceId,
        chain: &Chain,
        (position, from): (usize, Option<Source>),
        wanted: &mut Vec<Wanted>,
    ) -> bool {
        let hash = chain.hashes[position];
        // A chunk that is being written here, even in an attempt that will not do, has no room for blocks from elsewhere.
        let has_slots = |id| self.index.get(id).slots().next().is_some();
        if !self.index.find(number, &hash).is_some_and(has_slots)
            && let Some(from) = from
        {
            let pools = self.wanted_pools(follow, number, position);
            let Some(id) = self.start_fetch_of(number, chain.chunk(position), from, pools) else {
                return false;
            };
            wanted.push(self.wanted(number, id, position as u32, from));
            if from == Source::Peer {
                self.follow_mut(follow, |open| open.may_ask[position] = false);
            }
        }
        self.await_chunk(follow, number, position, hash);
        true
    }

    /// Makes a follow wait for a chunk that is coming, or that an engine may begin to write.
    fn await_chunk(&mut self, follow: u64, number: NamespaceId, position: usize, hash: ChunkHash) {
        match self.index.find(number, &hash).filter(|&id| self.may_join(id, follow, position)) {
            Some(id) => self.join(follow, position, id),
            None => {
                let Some(open) = self.follows.open.get(&follow) else { return };
                self.follows.awaited.insert((open.fingerprint, hash, (follow, position)));
            }
        }
    }

    /// Whether the chunk at a position of a follow is being written with all wanted pools, in an attempt that will do.
    fn may_join(&self, id: ChunkId, follow: u64, position: usize) -> bool {
        let chunk = self.index.get(id);
        let is_written = chunk.blocks.iter().any(|block| matches!(block, Block::Writing(_)));
        let attempt = self.follows.open.get(&follow).map_or(0, |open| open.attempt);
        is_written
            && (self.gathers.is_coming(id) || !self.follows.is_early(id, attempt))
            && self.may_come_whole(chunk, self.wanted_pools(follow, chunk.namespace, position))
    }

    /// Whether each slice of a chunk that is being written has a place for each of these pools, or no place yet.
    fn may_come_whole(&self, chunk: &Chunk, pools: PoolSet) -> bool {
        let namespace = self.namespaces.get(chunk.namespace);
        (0..namespace.slices).all(|slice| {
            let blocks = &chunk.blocks[namespace.slice(slice)];
            blocks.iter().all(Block::is_absent)
                || pools.iter().all(|pool| blocks.get(pool).is_some_and(|block| !block.is_absent()))
        })
    }

    /// The pools that a follow wants of the chunk at a position.
    fn wanted_pools(&self, follow: u64, number: NamespaceId, position: usize) -> PoolSet {
        let rules = &self.namespaces.get(number).rules;
        self.follows.open.get(&follow).map_or(rules.every(), |open| open.wants(position, rules))
    }

    /// Makes the follow hold the chunk at a position: the chunk is being written.
    fn join(&mut self, follow: u64, position: usize, id: ChunkId) {
        self.change(id, |chunk| chunk.claims += 1);
        self.follows.hold(id, Reader::Follow(follow, position));
        self.gathers.wait_for(id, follow);
        self.follow_mut(follow, |open| open.chunks[position] = Followed::Coming(id));
        self.tell_layers(follow, position, id);
    }

    /// Notes that a chunk is being written or fetched from now on: the follows that waited for it hold it.
    pub(super) fn writing_begins(&mut self, id: ChunkId) {
        if self.follows.awaited.is_empty() {
            return;
        }
        let chunk = self.index.get(id);
        let (fingerprint, hash) = (self.namespaces.get(chunk.namespace).fingerprint, chunk.hash);
        for (follow, position) in self.follows.waiting(fingerprint, hash) {
            if self.may_join(id, follow, position) {
                self.follows.awaited.remove(&(fingerprint, hash, (follow, position)));
                self.join(follow, position, id);
                self.moved(follow);
            }
        }
    }

    /// Follows of sessions that have news since the last call.
    pub fn take_progressed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.follows.progressed).into_iter().collect()
    }

    /// News for peers, since the last call.
    pub fn take_told(&mut self) -> Vec<FollowNews> {
        std::mem::take(&mut self.follows.told)
    }

    /// Ends a session's follow; returns whether it existed.
    pub(super) fn release_follow(&mut self, session: SessionId, follow: u64) -> bool {
        let is_known = self.follows.open.get(&follow).is_some_and(|open| open.session == Some(session));
        if is_known {
            self.end_follow(follow);
        }
        is_known
    }

    fn follow_mut<T>(&mut self, follow: u64, change: impl FnOnce(&mut Follow) -> T) -> Option<T> {
        self.follows.open.get_mut(&follow).map(change)
    }

    /// Notes that a follow has news.
    fn moved(&mut self, follow: u64) {
        let Some(open) = self.follows.open.get(&follow) else { return };
        if open.session.is_some() {
            self.follows.progressed.insert(follow);
        }
        self.follows.moved.insert(follow);
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

/// Takes a range out of a set.
fn take_range<T: Ord + Copy>(set: &mut BTreeSet<T>, range: impl RangeBounds<T>) -> Vec<T> {
    let taken: Vec<T> = set.range(range).copied().collect();
    taken.iter().for_each(|item| _ = set.remove(item));
    taken
}

/// Above every follow with a position.
const NO_MORE: (u64, usize) = (u64::MAX, usize::MAX);

/// The pause for a session that found no room.
const ROOM_RETRY_MS: u64 = 5;

#[cfg(test)]
impl Store {
    /// Asserts that nothing is left of any follow.
    pub(super) fn assert_follows_are_forgotten(&self) {
        let Follows { open, layers, attempts, holders, awaited, limbo, peer_chunks, again, .. } =
            &self.follows;
        assert!(again.is_empty() && self.follows.deadlines.is_empty(), "{:?}", self.follows);
        assert!(open.is_empty() && layers.is_empty() && attempts.is_empty(), "{:?}", self.follows);
        assert!(holders.is_empty() && awaited.is_empty() && limbo.is_empty(), "{:?}", self.follows);
        assert!(peer_chunks.are_free(), "{peer_chunks:?}");
    }
}
