//! Gathers: leases of which some chunks have to come from other nodes first.
//!
//! A gather claims what is here and takes slots for the rest. Each chunk that is fetched is fetched once, however many
//! gathers wait for it. When the last has come, or failed to, the gather ends as a lease of the prefix that is here.

use std::collections::HashMap;

use larder_protocol::limits::MAX_MESSAGE_BLOCKS;
use larder_protocol::session::Scarce;
use larder_protocol::{Chain, ChunkRef};

use super::ids::{ChunkId, NamespaceId, SessionId};
use super::index::{Block, Standing};
use super::lookup::{CLAIMS_RETRY_MS, Leased};
use super::reserve::BlockMove;
use super::room::facts;
use super::sessions::Lease;
use super::{Checksums, Refused, Store};
use crate::directory::ChangeKind;

/// Gathers and fetches under way.
#[derive(Debug, Default)]
pub(super) struct Gathers {
    open: HashMap<u64, Gather>,
    fetches: HashMap<ChunkId, Fetch>,
    passing_bytes: u64,
}

#[derive(Debug)]
struct Gather {
    session: SessionId,
    namespace: NamespaceId,
    slices: Box<[u16]>,
    /// Claimed, from the chain's first on.
    chunks: Vec<ChunkId>,
    /// Chunks among them that are still being fetched.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Fetch {
    /// Gathers that wait for it.
    gathers: Vec<u64>,
}

/// A chunk that is being fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(ChunkId);

/// A gather has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// Its number, for [`Store::finish_gather`].
    pub gather: u64,
    /// Whether nothing has to come: it can be finished at once.
    pub is_ready: bool,
    /// What to fetch. Each must be followed by [`Store::fetched`].
    pub wanted: Vec<Wanted>,
}

/// A chunk to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its fetch.
    pub fetch: FetchId,
    /// Its position in the chain.
    pub position: u32,
    /// Its name.
    pub chunk: ChunkRef,
    /// Where its blocks go, by slice, then pool.
    pub blocks: Vec<BlockMove>,
}

impl Gathers {
    pub(super) fn passing_bytes(&self) -> u64 {
        self.passing_bytes
    }

    pub(super) fn fetches(&self) -> u64 {
        self.fetches.len() as u64
    }
}

impl Store {
    /// Starts to lease the longest prefix of a chain of which each chunk is here, or is on its way, or another node has it
    /// (`peers`, by position) and there is room to fetch it. What is here cannot be evicted meanwhile.
    ///
    /// # Errors
    /// As [`Store::lease`].
    pub fn gather(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        peers: &[bool],
    ) -> Result<Gathered, Refused> {
        let (number, slices) = self.slices(session, namespace)?;
        let slices: Box<[u16]> = slices.into();
        let blocks = slices.len() * self.namespaces.get(number).pools.len();
        let found = self.walk(number, chain)?;
        let held = self.session(session)?.leased_blocks;
        let room = usize::try_from(self.limits.max_leased_blocks.saturating_sub(held)).unwrap_or(usize::MAX);
        let most = (MAX_MESSAGE_BLOCKS.min(room) / blocks).min(chain.len());
        if most == 0 && !chain.is_empty() {
            return Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: CLAIMS_RETRY_MS });
        }
        let gather = self.next_number();
        let mut started = Gather { session, namespace: number, slices, chunks: Vec::new(), waiting: 0 };
        let mut wanted = Vec::new();
        for (position, found) in found.into_iter().enumerate().take(most) {
            let known = self.index.find(number, &chain.hashes[position]);
            let chunk = match (found, known) {
                (Some(chunk), _) => {
                    self.use_chunks(&[chunk]);
                    chunk
                }
                (None, Some(chunk)) if self.gathers.fetches.contains_key(&chunk) => chunk,
                (None, None) if peers.get(position) == Some(&true) => {
                    let Some(chunk) = self.start_fetch(number, chain.chunk(position)) else { break };
                    wanted.push(self.wanted(number, chunk, position as u32));
                    chunk
                }
                _ => break,
            };
            if let Some(fetch) = self.gathers.fetches.get_mut(&chunk) {
                fetch.gathers.push(gather);
                started.waiting += 1;
                self.change(chunk, |chunk| chunk.claims += 1);
            }
            started.chunks.push(chunk);
        }
        let is_ready = started.waiting == 0;
        self.session_mut(session)?.leased_blocks += (started.chunks.len() * blocks) as u64;
        self.gathers.open.insert(gather, started);
        Ok(Gathered { gather, is_ready, wanted })
    }

    /// A fetch has ended: its blocks are in their slots with these checksums, or it failed (`None`). `kept` says that they
    /// are to stay, and why; else they pass. Answers the gathers that are now ready.
    pub fn fetched(
        &mut self,
        fetch: FetchId,
        came: Option<(Vec<Checksums>, u32)>,
        kept: Option<ChangeKind>,
    ) -> Vec<u64> {
        let FetchId(id) = fetch;
        let Some(Fetch { gathers }) = self.gathers.fetches.remove(&id) else { return Vec::new() };
        let number = self.index.get(id).namespace;
        match came {
            Some((checksums, reads)) => {
                self.make_readable(id, checksums, reads);
                if let Some(kind) = kept {
                    self.admit(id, kind);
                }
            }
            None => {
                let all = self.all_slices(number);
                for slot in self.take_written_slots(number, id, &all) {
                    self.slab.free(slot);
                }
                self.gathers.passing_bytes -= self.whole_chunk_bytes(number);
                self.index.get_mut(id).standing = Standing::Kept;
            }
        }
        self.unclaim(&[id]);
        let mut ready = Vec::new();
        for number in gathers {
            let Some(gather) = self.gathers.open.get_mut(&number) else { continue };
            gather.waiting -= 1;
            if gather.waiting == 0 {
                ready.push(number);
            }
        }
        ready
    }

    /// Ends a gather as a lease of the prefix that is here. Fetches it still waits for go on without it.
    ///
    /// # Errors
    /// [`Refused::Unknown`] where the session has ended, or there is no such gather.
    pub fn finish_gather(&mut self, gather: u64) -> Result<Leased, Refused> {
        let unknown = Refused::Unknown { what: "gather", number: gather };
        let Gather { session, namespace, slices, chunks, .. } =
            self.gathers.open.remove(&gather).ok_or(unknown)?;
        let blocks = slices.len() * self.namespaces.get(namespace).pools.len();
        if let Ok(held) = self.session_mut(session) {
            held.leased_blocks -= (chunks.len() * blocks) as u64;
        } else {
            self.unclaim(&chunks);
            self.evict_above_watermark();
            return Err(Refused::Unknown { what: "session", number: session.0.into() });
        }
        let mut leased = Leased::default();
        let complete = chunks.iter().take_while(|&&chunk| self.index.get(chunk).is_complete()).count();
        let mut fit = 0;
        while fit < complete && self.place_blocks(session, namespace, &slices, chunks[fit], &mut leased) {
            fit += 1;
        }
        self.unclaim(&chunks[fit..]);
        if fit > 0 {
            leased.lease = self.next_number();
            leased.chunks = fit as u32;
            let blocks = (fit * blocks) as u64;
            let session = self.session_mut(session)?;
            session.leased_blocks += blocks;
            session.leases.insert(leased.lease, Lease { chunks: chunks[..fit].into(), blocks });
        }
        self.evict_above_watermark();
        Ok(leased)
    }

    /// Makes a chunk that only passes one that stays, if it is one.
    pub(super) fn admit(&mut self, id: ChunkId, kind: ChangeKind) {
        let chunk = self.index.get(id);
        if chunk.standing != Standing::Passing || !chunk.is_complete() {
            return;
        }
        let number = chunk.namespace;
        let bytes = self.whole_chunk_bytes(number);
        self.evict_ahead(1, bytes);
        self.gathers.passing_bytes -= bytes;
        self.cached_chunks += 1;
        self.cached_bytes += bytes;
        let chunk = self.index.get_mut(id);
        chunk.standing = Standing::Kept;
        chunk.since_tenths = self.tenths;
        let chunk = self.index.get(id);
        self.policy.insert(id, facts(chunk));
        if !chunk.may_go() {
            self.policy.block(id);
        }
        let fingerprint = self.namespaces.get(number).fingerprint;
        self.journal.note(&self.index, fingerprint, id, kind);
    }

    /// Forgets a chunk that only passes, once nobody claims it.
    pub(super) fn let_pass(&mut self, id: ChunkId) {
        let chunk = self.index.get(id);
        if chunk.claims > 0 || chunk.pins > 0 {
            return;
        }
        if chunk.standing == Standing::Passing {
            self.gathers.passing_bytes -= self.whole_chunk_bytes(chunk.namespace);
            self.forget(id);
        } else if chunk.slots().next().is_none() {
            // It was to be fetched, and did not come.
            self.forget(id);
        }
    }

    /// Enters a chunk and takes slots for all its blocks; `None` where there is no room for what only passes.
    fn start_fetch(&mut self, number: NamespaceId, name: ChunkRef) -> Option<ChunkId> {
        let bytes = self.whole_chunk_bytes(number);
        let most = self.limits.peers.as_ref().map_or(0, |peers| peers.passing_bytes);
        if self.gathers.passing_bytes + bytes > most {
            return None;
        }
        let all = self.all_slices(number);
        let chunk = self.insert(number, name);
        self.change(chunk, |chunk| chunk.claims += 1);
        if !self.take_slots(number, chunk, &all) {
            self.drop_written(number, chunk, &all);
            return None;
        }
        self.index.get_mut(chunk).standing = Standing::Passing;
        self.gathers.passing_bytes += bytes;
        self.gathers.fetches.insert(chunk, Fetch::default());
        Some(chunk)
    }

    fn wanted(&self, number: NamespaceId, id: ChunkId, position: u32) -> Wanted {
        let mut blocks = Vec::new();
        self.block_moves(number, id, &self.all_slices(number), || None, &mut blocks);
        Wanted { fetch: FetchId(id), position, chunk: self.index.name(id), blocks }
    }

    fn make_readable(&mut self, id: ChunkId, checksums: Vec<Checksums>, reads: u32) {
        let chunk = self.index.get_mut(id);
        let mut checksums = checksums.into_iter();
        for block in &mut chunk.blocks {
            if let Block::Writing(slot) = *block {
                *block = Block::Ready(slot, checksums.next().unwrap_or_default());
                chunk.ready += 1;
            }
        }
        chunk.reads = u8::try_from(reads).unwrap_or(u8::MAX);
    }

    fn all_slices(&self, number: NamespaceId) -> Vec<u16> {
        (0..self.namespaces.get(number).slices).collect()
    }

    fn whole_chunk_bytes(&self, number: NamespaceId) -> u64 {
        self.chunk_bytes(number, usize::from(self.namespaces.get(number).slices))
    }
}
