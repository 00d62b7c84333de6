//! Lookups and leases: the start and the end of a get.
//!
//! Lookups, leases, pins and tickets end with the longest prefix at whose end every pool can be restored
//! ([`PoolRules`](larder_protocol::pools::PoolRules)). A chunk that lacks an `all` pool in some slice counts as absent
//! everywhere. Two bytes of each chunk say which of the other pools it has in every slice: one byte for memory, one for its
//! record on disk. Some pools also need chunks before the chain's first chunk: the caller judges those.

use std::collections::HashSet;

use larder_protocol::limits::{MAX_FRAME_DESCRIPTORS, MAX_MESSAGE_BLOCKS};
use larder_protocol::session::{Found, Scarce, Span, Tier};
use larder_protocol::{Chain, ChainError, ChunkHash, Fingerprint, PoolRules, PoolSet};

use super::ids::{ChunkId, NamespaceId, SessionId};
use super::index::{Block, OnDisk};
use super::sessions::Lease;
use super::{Refused, Source, Store};
use crate::Millis;
use crate::outcome::{ChunkOutcome, OutcomeRun, runs_of};

pub use larder_protocol::session::Place;

/// The options of a lookup.
#[derive(Debug, Clone, Copy)]
pub struct LookupOptions<'a> {
    /// By position in the chain, a place of the chunk outside this store; empty if no other place was asked.
    pub elsewhere: &'a [Option<Source>],
    /// Tokens of the whole prompt; at least one is left to compute.
    pub prompt_tokens: u64,
    /// Whether the caller cannot use a hit, so that nothing is looked up.
    pub skip_read: bool,
    /// Tiers to look in; all tiers if empty.
    pub tiers: &'a [Tier],
    /// Duration of a pin for the chunks found.
    pub pin_ms: Option<u64>,
}

/// The part of a chain that a prompt can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usable {
    /// Chunks, from the chain's first on.
    pub chunks: usize,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// The chunks' namespace.
    pub fingerprint: Fingerprint,
}

/// Blocks that may be read until the lease is released.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Leased {
    /// The lease's number; 0 if nothing is leased.
    pub lease: u64,
    /// Chunks leased, from the chain's first on.
    pub chunks: u32,
    /// The places of the blocks that restoring the chunks needs: for each chunk, for each slice of the session, for each pool
    /// of [`PoolRules::needed`].
    pub places: Vec<Place>,
    /// The checksum of each of these blocks; 0 for a followed block that is being written.
    pub checksums: Vec<u64>,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Extents of these places whose memory the session was not given before.
    pub new_extents: Vec<u32>,
}

impl Leased {
    /// Takes the blocks out of the answer, but not the new extents: the session gets these nevertheless.
    pub(super) fn show_nothing(&mut self) {
        self.places.clear();
        self.checksums.clear();
        self.bytes = 0;
    }
}

/// The presence of a chain's chunks, by position. It is valid until the store changes.
#[derive(Debug)]
pub struct Walk {
    number: NamespaceId,
    found: Vec<Presence>,
}

/// The place of a chunk in this store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Presence {
    /// The chunk can be read in memory.
    Here(ChunkId),
    /// The chunk is on disk alone, or on its way from there.
    OnDisk(ChunkId),
    /// The chunk cannot be read.
    Absent,
}

impl LookupOptions<'_> {
    /// The tier in which a chunk was found, among the tiers to look in.
    fn place(&self, position: usize, found: Presence) -> Option<Tier> {
        let asks = |tier: &Tier| self.tiers.is_empty() || self.tiers.contains(tier);
        let here = match found {
            Presence::Here(_) => Some(Tier::Host),
            Presence::OnDisk(_) => Some(Tier::Disk),
            Presence::Absent => None,
        };
        let elsewhere = || self.elsewhere.get(position).copied().flatten().map(Source::tier);
        here.filter(asks).or_else(|| elsewhere().filter(asks))
    }
}

impl Presence {
    /// The chunk, if it can be read in memory.
    pub(super) fn here(self) -> Option<ChunkId> {
        match self {
            Self::Here(id) => Some(id),
            Self::OnDisk(_) | Self::Absent => None,
        }
    }
}

impl Walk {
    /// Positions of the chain's first `most` chunks that are not here.
    pub fn absent(&self, most: usize) -> Vec<u32> {
        let absent = (0..).zip(self.found.iter().take(most)).filter(|(_, found)| **found == Presence::Absent);
        absent.map(|(position, _)| position).collect()
    }

    /// Whether all chunks can be read in memory.
    pub fn is_whole(&self) -> bool {
        self.found.iter().all(|found| matches!(found, Presence::Here(_)))
    }

    /// Whether some chunks are only on disk.
    pub fn needs_disk(&self) -> bool {
        self.found.iter().any(|found| matches!(found, Presence::OnDisk(_)))
    }
}

impl Store {
    /// Finds the chunks of a chain, for the calls that take a [`Walk`].
    ///
    /// # Errors
    /// [`Refused::Chain`] for a chain that is invalid or contradicts cached chunks, [`Refused::Unknown`] for a namespace that the
    /// session did not register.
    pub fn find(&self, session: SessionId, namespace: u32, chain: &Chain) -> Result<Walk, Refused> {
        let (number, _) = self.slices(session, namespace)?;
        Ok(Walk { number, found: self.walk(number, chain)? })
    }

    /// The outcome of each chunk of a walk whose first `chunks` chunks can be used, for the log of lookups. The holders of the
    /// chunks at the ascending positions `unanswered` are unknown.
    pub(crate) fn outcomes(
        &self,
        Walk { number, found }: &Walk,
        chain: &Chain,
        options: LookupOptions<'_>,
        chunks: usize,
        unanswered: &[u32],
    ) -> Vec<OutcomeRun> {
        let known = self.namespaces.get(*number);
        let asked = match options.skip_read {
            true => 0,
            false if known.flat => chain.len(),
            false => usable_chunks(options.prompt_tokens, known.chunk_tokens, chain),
        };
        runs_of(found.iter().enumerate().map(|(position, found)| {
            if position >= asked {
                return ChunkOutcome::NotAsked;
            }
            match options.place(position, *found) {
                Some(tier) if known.flat || position < chunks => ChunkOutcome::Found(tier),
                Some(tier) => ChunkOutcome::BehindGap(tier),
                None if self.is_being_written(*number, &chain.hashes[position]) => ChunkOutcome::BeingWritten,
                None if unanswered.binary_search(&(position as u32)).is_ok() => ChunkOutcome::HomeSilent,
                None => ChunkOutcome::Absent,
            }
        }))
    }

    /// The number of leading chunks of a walk that are here or elsewhere.
    pub(crate) fn leading(&self, Walk { found, .. }: &Walk, elsewhere: &[Option<Source>]) -> usize {
        let is_somewhere = |(position, found): &(usize, &Presence)| {
            **found != Presence::Absent || elsewhere.get(*position).copied().flatten().is_some()
        };
        found.iter().enumerate().take_while(is_somewhere).count()
    }

    /// Whether some block of a chunk is being written or fetched.
    pub(super) fn is_being_written(&self, number: NamespaceId, hash: &ChunkHash) -> bool {
        let is_writing =
            |id: ChunkId| self.index.get(id).blocks.iter().any(|block| matches!(block, Block::Writing(_)));
        self.index.find(number, hash).is_some_and(is_writing)
    }

    /// Finds how much of a prompt can be served from memory, disk, other nodes and the object store: the longest contiguous
    /// prefix, or all keys of a flat namespace. A lookup does not count as use; a lease does. A pin holds only chunks in memory.
    ///
    /// # Errors
    /// [`Refused::Chain`] for a chain that is invalid or contradicts cached chunks, [`Refused::Unknown`] for a namespace that the
    /// session did not register.
    pub fn lookup(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        options: LookupOptions<'_>,
        now: Millis,
    ) -> Result<Found, Refused> {
        let walk = self.find(session, namespace, chain)?;
        self.lookup_found(session, chain, &walk, options, now)
    }

    /// As [`Store::lookup`], for a fresh [`Walk`].
    ///
    /// # Errors
    /// [`Refused::Busy`] if no more may be pinned.
    pub fn lookup_found(
        &mut self,
        session: SessionId,
        chain: &Chain,
        Walk { number, found }: &Walk,
        options: LookupOptions<'_>,
        now: Millis,
    ) -> Result<Found, Refused> {
        let known = self.namespaces.get(*number);
        let chunk_tokens = u64::from(known.chunk_tokens);
        let place = |position: usize| options.place(position, found[position]);
        if options.skip_read {
            return Ok(Found { tokens: 0, spans: Vec::new(), pin: None });
        }
        if known.flat {
            let (spans, chunks) = spans((0..chain.len()).map(place));
            return Ok(Found { tokens: chunks * chunk_tokens, spans, pin: None });
        }
        let usable = usable_chunks(options.prompt_tokens, known.chunk_tokens, chain).min(chain.len());
        let usable = if known.rules.is_plain() {
            usable
        } else {
            // The further pools of chunks on other nodes are known only when these chunks have come.
            let held = |position: usize| match place(position) {
                Some(Tier::Peer | Tier::Object) => known.rules.obligatory(),
                // A sibling has the chunk.
                Some(_) if found[position] == Presence::Absent => known.rules.obligatory(),
                Some(_) => self.pools_of(found[position]),
                None => PoolSet::default(),
            };
            known.rules.longest((0..usable).map(held))
        };
        let (spans, chunks) = spans((0..usable).map(place).take_while(Option::is_some));
        let pin = match (options.pin_ms, spans.first()) {
            (Some(duration_ms), Some(&Span { to, tier: Tier::Host, .. })) => {
                let chunks = found[..to as usize].iter().filter_map(|found| found.here()).collect();
                Some(self.pin_chunks(session, *number, chunks, duration_ms, now)?.pin)
            }
            _ => None,
        };
        Ok(Found { tokens: chunks * chunk_tokens, spans, pin })
    }

    /// The most chunks of a chain that a prompt could use, with a token left to compute; `None` for a namespace that nobody
    /// registered.
    pub fn usable(&self, namespace: u32, chain: &Chain, prompt_tokens: u64) -> Option<Usable> {
        let known = self.namespaces.find(NamespaceId::of(namespace))?;
        let most =
            if known.flat { chain.len() } else { usable_chunks(prompt_tokens, known.chunk_tokens, chain) };
        let chunks = most.min(chain.len());
        Some(Usable { chunks, chunk_tokens: known.chunk_tokens, fingerprint: known.fingerprint })
    }

    /// Keeps the blocks of the longest prefix that is here from reuse, and returns their places. This counts as a use of the
    /// chunks.
    ///
    /// If the answer would exceed a message's limits, fewer chunks are leased than are here.
    ///
    /// # Errors
    /// As [`Store::lookup`], and [`Refused::Busy`] if the session holds as many leased blocks as it may.
    pub fn lease(&mut self, session: SessionId, namespace: u32, chain: &Chain) -> Result<Leased, Refused> {
        let walk = self.find(session, namespace, chain)?;
        self.lease_found(session, namespace, chain, walk)
    }

    /// As [`Store::lease`], for a fresh [`Walk`].
    ///
    /// # Errors
    /// [`Refused::Busy`] if the session holds as many leased blocks as it may.
    pub fn lease_found(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        Walk { number, found }: Walk,
    ) -> Result<Leased, Refused> {
        let slices = self.slices(session, namespace)?.1.to_vec();
        let rules = self.namespaces.get(number).rules;
        let mut leased = Leased::default();
        let held = self.session(session)?.leased_blocks;
        let room = usize::try_from(self.limits.max_leased_blocks.saturating_sub(held)).unwrap_or(usize::MAX);
        let most = most_chunks(&rules, slices.len(), MAX_MESSAGE_BLOCKS.min(room), found.len());
        let is_here = found.first().is_some_and(|first| first.here().is_some());
        if most == 0 && is_here {
            return Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: CLAIMS_RETRY_MS });
        }
        let mut chunks: Vec<ChunkId> = found.into_iter().map_while(Presence::here).take(most).collect();
        chunks.truncate(self.named_prefix(number, &chain.hashes, &chunks));
        chunks.truncate(self.restorable(&rules, &chunks));
        leased.places.reserve(slices.len() * rules.blocks(chunks.len()));
        let fit = self.place_prefix(session, number, &slices, &chunks, &mut leased);
        chunks.truncate(fit);
        if chunks.is_empty() {
            return Ok(leased);
        }
        self.use_chunks(&chunks);
        leased.lease = self.next_number();
        leased.chunks = chunks.len() as u32;
        let blocks = leased.places.len() as u64;
        let session = self.session_mut(session)?;
        session.leased_blocks += blocks;
        let hashes = chain.hashes[..chunks.len()].into();
        session
            .leases
            .insert(leased.lease, Lease { namespace: number, chunks: chunks.into(), hashes, blocks });
        Ok(leased)
    }

    /// Ends a lease or a follow.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a number that is neither a lease nor a follow of the session.
    pub fn release(&mut self, session: SessionId, lease: u64) -> Result<(), Refused> {
        if self.release_follow(session, lease) {
            return Ok(());
        }
        let held = self.session_mut(session)?;
        let unknown = Refused::Unknown { what: "lease", number: lease };
        let Lease { chunks, blocks, .. } = held.leases.remove(&lease).ok_or(unknown)?;
        held.leased_blocks -= blocks;
        self.unclaim(&chunks);
        self.evict_above_watermark();
        Ok(())
    }

    /// Notes that the answer that should have shown new extents to a session was not given: a later answer shows them.
    pub fn was_not_shown(&mut self, session: SessionId, new_extents: &[u32]) {
        new_extents.iter().for_each(|&extent| self.sessions.was_not_shown(session, extent));
    }

    /// Makes every check that a chain must pass, and returns the place of each of its chunks.
    pub(super) fn walk(&self, number: NamespaceId, chain: &Chain) -> Result<Vec<Presence>, Refused> {
        let namespace = self.namespaces.get(number);
        chain.check(namespace.root, namespace.flat)?;
        let mut found = Vec::with_capacity(chain.len());
        if !namespace.flat {
            self.walk_tree(number, chain, &mut found)?;
        }
        // All keys are hashed before the first probe, so that the probes' cache misses overlap.
        let (first, rest) = (found.len(), &chain.hashes[found.len()..]);
        let keys: Vec<u64> = rest.iter().map(|hash| self.index.hash(number, hash)).collect();
        let ids = keys.iter().zip(rest).map(|(&key, hash)| self.index.find_hashed(key, number, hash));
        let ids: Vec<Option<ChunkId>> = ids.collect();
        let mut unknown = Vec::new();
        for (position, (&key, &id)) in (first..).zip(keys.iter().zip(&ids)) {
            match id {
                Some(id) => self.index.agrees(id, &chain.chunk(position))?,
                None => unknown.push((key, position)),
            }
            // Known chunks are checked for duplicates only in flat namespaces: elsewhere, a known chunk that comes twice
            // disagrees with one of its positions.
            if namespace.flat && id.is_some() {
                unknown.push((key, position));
            }
            found.push(id.map_or(Presence::Absent, |id| self.presence(id)));
        }
        refuse_duplicates(chain, &unknown)?;
        Ok(found)
    }

    /// Adds the places of a linked chain's chunks up to the first that the index does not know.
    fn walk_tree(
        &self,
        number: NamespaceId,
        chain: &Chain,
        found: &mut Vec<Presence>,
    ) -> Result<(), ChainError> {
        let mut before = None;
        for (position, hash) in chain.hashes.iter().enumerate() {
            let name = || chain.chunk(position);
            // A child of the chunk before always agrees with its position in the chain.
            let id = if let Some(id) = before.and_then(|before| self.index.first_child(before, hash)) {
                debug_assert_eq!(self.index.agrees(id, &name()), Ok(()));
                id
            } else {
                let Some(id) = self.index.find(number, hash) else { break };
                self.index.agrees(id, &name())?;
                id
            };
            found.push(self.presence(id));
            before = Some(id);
        }
        Ok(())
    }

    /// The pools that a chunk has where it was found.
    pub(super) fn pools_of(&self, found: Presence) -> PoolSet {
        match found {
            Presence::Here(id) => self.index.get(id).pools,
            Presence::OnDisk(id) => self.index.get(id).disk_pools,
            Presence::Absent => PoolSet::default(),
        }
    }

    /// The length of the longest prefix of these chunks that can be restored. All of them are in memory.
    pub(super) fn restorable(&self, rules: &PoolRules, chunks: &[ChunkId]) -> usize {
        if rules.is_plain() {
            return chunks.len();
        }
        rules.longest(chunks.iter().map(|&chunk| self.index.get(chunk).pools))
    }

    pub(super) fn presence(&self, id: ChunkId) -> Presence {
        let chunk = self.index.get(id);
        if chunk.is_complete() {
            Presence::Here(id)
        } else if (chunk.is_on_disk_alone() || (chunk.disk == OnDisk::Here && self.gathers.is_coming(id)))
            && !self.is_disk_silent()
        {
            Presence::OnDisk(id)
        } else {
            Presence::Absent
        }
    }

    /// Claims chunks that can be read, from last to first, and counts their uses.
    pub(super) fn use_chunks(&mut self, chunks: &[ChunkId]) {
        for &id in chunks.iter().rev() {
            self.count_use(id);
            self.change(id, |chunk| chunk.claims += 1);
        }
    }

    /// Counts that a chunk is read.
    pub(super) fn count_use(&mut self, id: ChunkId) {
        if self.index.get(id).is_cached() {
            let (policy, number) = self.policy_of(id);
            policy.touch(number);
        }
        let now = self.used_now();
        self.index.get_mut(id).count_read(now);
        self.queue_writes_after_use(id);
    }

    /// Ends one claim on each chunk, from last to first.
    pub(super) fn unclaim(&mut self, chunks: &[ChunkId]) {
        for &chunk in chunks.iter().rev() {
            self.change(chunk, |chunk| chunk.claims -= 1);
            self.let_pass(chunk);
        }
    }

    /// Notes that the session that leased the chunk has ended, while its process may still read the chunk.
    pub(super) fn orphan(&mut self, id: ChunkId) {
        let chunk = self.index.get_mut(id);
        chunk.orphaned_leases += 1;
        if chunk.orphaned_leases == 1 {
            chunk.readable_slots().for_each(|slot| self.slab.quarantine(slot));
        }
    }

    /// Notes that a process that might have read the chunk is gone. After the last such process, the chunk's slots leave
    /// quarantine.
    pub(super) fn adopt(&mut self, id: ChunkId) {
        let chunk = self.index.get_mut(id);
        chunk.orphaned_leases -= 1;
        if chunk.orphaned_leases == 0 {
            chunk.readable_slots().for_each(|slot| self.slab.restore(slot));
        }
    }

    /// Adds the places of restorable chunks to a lease, and returns how many chunks have places: fewer if the extents that the
    /// session has not seen do not all fit into one message.
    pub(super) fn place_prefix(
        &mut self,
        session: SessionId,
        number: NamespaceId,
        slices: &[u16],
        chunks: &[ChunkId],
        leased: &mut Leased,
    ) -> usize {
        let rules = self.namespaces.get(number).rules;
        let mut fit = 0;
        if rules.is_plain() {
            while let Some(&chunk) = chunks.get(fit)
                && self.place_blocks(session, number, slices, (chunk, rules.every()), leased)
            {
                fit += 1;
            }
            return fit;
        }
        // The needed blocks depend on the end of the prefix. So the first pass adds the extents of all blocks that might be
        // needed.
        let all_of = |store: &Self, chunk| store.index.get(chunk).pools;
        while let Some(&chunk) = chunks.get(fit)
            && self.place_blocks(session, number, slices, (chunk, all_of(self, chunk)), leased)
        {
            fit += 1;
        }
        let prefix = self.restorable(&rules, &chunks[..fit]);
        leased.show_nothing();
        for (position, &chunk) in chunks[..prefix].iter().enumerate() {
            self.place_blocks(session, number, slices, (chunk, rules.needed(position, prefix)), leased);
        }
        prefix
    }

    /// Adds the places of some pools of each chunk to a lease; returns how many chunks fit into one message.
    pub(super) fn place_each(
        &mut self,
        session: SessionId,
        number: NamespaceId,
        slices: &[u16],
        chunks: &[(ChunkId, PoolSet)],
        leased: &mut Leased,
    ) -> usize {
        let fits = |&&chunk: &&(ChunkId, PoolSet)| self.place_blocks(session, number, slices, chunk, leased);
        chunks.iter().take_while(fits).count()
    }

    /// Adds the places of a chunk's blocks in some pools to a lease; returns whether the extents that the session has not seen
    /// still fit into one message.
    fn place_blocks(
        &mut self,
        session: SessionId,
        number: NamespaceId,
        slices: &[u16],
        (id, pools): (ChunkId, PoolSet),
        leased: &mut Leased,
    ) -> bool {
        let namespace = self.namespaces.get(number);
        let chunk = self.index.get(id);
        if leased.new_extents.len() + slices.len() * namespace.pools.len() > MAX_FRAME_DESCRIPTORS {
            let known = &self.sessions.get(session).map(|session| &session.extents);
            let unseen = |extent| known.is_none_or(|known| !known.contains(&extent));
            let fresh: HashSet<u32> =
                chunk.slots().map(|slot| slot.extent).filter(|&extent| unseen(extent)).collect();
            if leased.new_extents.len() + fresh.len() > MAX_FRAME_DESCRIPTORS {
                return false;
            }
        }
        for &slice in slices {
            for pool in pools.iter() {
                // A follower of a chunk is told the places of blocks that are being written.
                let block = &chunk.blocks[namespace.block(slice, pool)];
                let Some(slot) = block.slot() else { return false };
                leased.checksums.push(block.checksum());
                leased.bytes += namespace.pools[pool].spec.block_bytes();
                // Blocks that were stored together usually share an extent.
                let is_shown = leased.places.last().is_some_and(|last| last.extent == slot.extent);
                if !is_shown && self.sessions.show_extent(session, slot.extent) {
                    leased.new_extents.push(slot.extent);
                }
                leased.places.push(Place { extent: slot.extent, offset: self.slab.offset(slot) });
            }
        }
        true
    }
}

/// The pause for a session that holds too much.
pub(super) const CLAIMS_RETRY_MS: u64 = 10;

/// The number of chunks, at most `chunks`, that fit into an answer of at most `most_blocks` blocks.
pub(super) fn most_chunks(rules: &PoolRules, slices: usize, most_blocks: usize, chunks: usize) -> usize {
    if rules.is_plain() {
        return (most_blocks / (slices * rules.every().len())).min(chunks);
    }
    let (mut fit, mut beyond) = (0, chunks + 1);
    while fit + 1 < beyond {
        let middle = fit.midpoint(beyond);
        if slices.saturating_mul(rules.blocks(middle)) <= most_blocks {
            fit = middle
        } else {
            beyond = middle
        }
    }
    fit
}

/// The number of chunks of a chain that a prompt may use, so that one token at least is left to compute.
fn usable_chunks(prompt_tokens: u64, chunk_tokens: u32, chain: &Chain) -> usize {
    let of_prompt = prompt_tokens.saturating_sub(1) / u64::from(chunk_tokens);
    let before = chain.hashes.first().map_or(0, |_| u64::from(chain.chunk(0).index));
    usize::try_from(of_prompt.saturating_sub(before)).unwrap_or(usize::MAX)
}

/// The runs of positions that lie in one tier, and the number of their positions.
fn spans(tiers: impl Iterator<Item = Option<Tier>>) -> (Vec<Span>, u64) {
    let (mut spans, mut chunks) = (Vec::<Span>::new(), 0);
    for (position, tier) in (0..).zip(tiers) {
        let Some(tier) = tier else { continue };
        chunks += 1;
        match spans.last_mut() {
            Some(span) if span.to == position && span.tier == tier => span.to += 1,
            _ => spans.push(Span { from: position, to: position + 1, tier }),
        }
    }
    (spans, chunks)
}

/// Refuses a chain that has the same hash at two of these positions. Each position comes with its key: a hash of the chunk's hash
/// under the index's own secret seed.
fn refuse_duplicates(chain: &Chain, positions: &[(u64, usize)]) -> Result<(), ChainError> {
    let mut seen = hashbrown::HashTable::<(u64, usize)>::with_capacity(positions.len());
    for &(key, position) in positions {
        let hash = chain.hashes[position];
        if seen.find(key, |&(_, other)| chain.hashes[other] == hash).is_some() {
            return Err(ChainError::Duplicate { hash });
        }
        seen.insert_unique(key, (key, position), |&(key, _)| key);
    }
    Ok(())
}
