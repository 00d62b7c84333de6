//! Gathers: leases of which some chunks must first come from disk, other nodes or the object store.
//!
//! A gather claims the chunks that are here and takes slots for the rest. Each chunk is fetched once, however many gathers wait
//! for it. When the last fetch has ended, the gather ends as a lease of the prefix that is here.

mod fetch;
mod taken;

use std::collections::{BTreeMap, BTreeSet};

use larder_protocol::limits::{MAX_MESSAGE_BLOCKS, MAX_SESSION_GATHERS};
use larder_protocol::session::{Progress, Scarce};
use larder_protocol::{Chain, ChunkHash, PoolRules, PoolSet};

use super::follow::Reader;
use super::ids::{ChunkId, NamespaceId, SessionId, TenantId};
use super::index::{Account, Chunk, OnDisk, Standing};
use super::lookup::{CLAIMS_RETRY_MS, Leased, Presence, most_chunks};
use super::sessions::Lease;
use super::shares::Shares;
use super::{Refused, Store};
use crate::store::ChangeKind;

pub use fetch::{Came, FetchId, Recall, Source, Wanted};
pub use taken::{FreeRoom, Leaving, TakeIn};

/// Gathers and fetches under way.
#[derive(Debug, Default)]
pub(super) struct Gathers {
    open: BTreeMap<u64, Gather>,
    fetches: BTreeMap<ChunkId, Coming>,
    /// Bytes of chunks that are not kept, by account and tenant.
    passing_bytes: [Shares; 4],
    /// Fetches that nobody waits for any more.
    abandoned: Vec<FetchId>,
}

#[derive(Debug)]
struct Gather {
    session: SessionId,
    namespace: NamespaceId,
    slices: Box<[u16]>,
    /// Claimed chunks, from the chain's first on.
    chunks: Vec<ChunkId>,
    /// The requested names of these chunks.
    hashes: Box<[ChunkHash]>,
    /// The number of chunks among them that are still being fetched.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Coming {
    /// Its number, which no other fetch has.
    number: u64,
    /// Numbers of the gathers and follows that wait for the chunk.
    gathers: BTreeSet<u64>,
    /// Number of peers that wait for the chunk, and of drains that move it here.
    recalls: u32,
    /// If another node evicts the chunk and forwards it here: for how long nobody had used it when it was offered, in milliseconds.
    taken_in: Option<u64>,
    /// Whether all its bytes are here, and only the commit at the writer's node is awaited.
    is_in_place: bool,
    /// The number of a read that may still write to the chunk's slots when the fetch has ended.
    late_read: Option<u64>,
}

/// A gather's step for one chunk.
#[derive(Debug, Clone, Copy)]
enum ChunkStep {
    /// The chunk can be read, and is claimed.
    Here(ChunkId),
    /// The chunk is being fetched, and is claimed.
    Coming(ChunkId),
    /// The chunk has to be fetched.
    Fetch(Source),
}

impl ChunkStep {
    fn claimed(&self) -> Option<ChunkId> {
        match *self {
            Self::Here(id) | Self::Coming(id) => Some(id),
            Self::Fetch(_) => None,
        }
    }
}

/// A gather that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathered {
    /// Its number, for [`Store::finish_gather`].
    pub gather: u64,
    /// Whether no chunk has to be fetched, so that the gather can be finished at once.
    pub is_ready: bool,
    /// The fetches to start; [`Store::fetched`] must answer each.
    pub wanted: Vec<Wanted>,
    /// Why the rest of the chain found no room. [`Store::gather_more`] may go on when these chunks are here.
    pub cut: Option<Cut>,
}

/// Why a gather begins no more fetches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// Other chunks on their way have the room. They leave it when they have come.
    Crowded,
    /// Memory has no room for a further chunk, or nothing of the namespace may come.
    Full,
}

impl Gathers {
    fn may_come(&self, from: Account, tenant: TenantId, bytes: u64, most: u64, tenants: &[u64]) -> bool {
        self.passing_bytes[from as usize].may_add(tenant, bytes, most, tenants)
    }

    /// Whether a tenant may take in forwarded chunks of `bytes` bytes, if the chunks from peers may take `most` bytes.
    pub(super) fn may_take_in(&self, tenant: TenantId, bytes: u64, most: u64, tenants: &[u64]) -> bool {
        self.may_come(Account::Peers, tenant, bytes, most, tenants)
    }

    pub(super) fn is_coming(&self, id: ChunkId) -> bool {
        self.fetches.contains_key(&id)
    }

    pub(super) fn take_in(&mut self, id: ChunkId, idle_ms: u64) {
        self.fetches.entry(id).and_modify(|fetch| fetch.taken_in = Some(idle_ms));
    }

    /// Notes that all bytes of a chunk are here. It comes to an end even if nobody waits for it.
    pub(super) fn is_in_place(&mut self, id: ChunkId) {
        self.fetches.entry(id).and_modify(|fetch| fetch.is_in_place = true);
    }

    pub(super) fn is_taken_in(&self, id: ChunkId) -> bool {
        self.fetches.get(&id).is_some_and(|fetch| fetch.taken_in.is_some())
    }

    /// Whether this fetch has this number.
    pub(super) fn is_fetch(&self, FetchId(id): FetchId, number: u64) -> bool {
        self.fetches.get(&id).is_some_and(|fetch| fetch.number == number)
    }

    /// Makes a follow wait for a chunk, if the chunk is being fetched.
    pub(super) fn wait_for(&mut self, id: ChunkId, follow: u64) {
        if let Some(fetch) = self.fetches.get_mut(&id) {
            fetch.gathers.insert(follow);
        }
    }

    /// Ends the wait of a gather or follow for a chunk.
    pub(super) fn stop_waiting_for(&mut self, id: ChunkId, number: u64) {
        let Some(fetch) = self.fetches.get_mut(&id) else { return };
        if fetch.gathers.remove(&number)
            && fetch.gathers.is_empty()
            && fetch.recalls == 0
            && fetch.taken_in.is_none()
            && !fetch.is_in_place
        {
            self.abandoned.push(FetchId(id));
        }
    }

    /// Forgets abandoned fetches that were never ordered: nobody has to stop them.
    pub(super) fn forget_abandoned(&mut self, ids: &BTreeSet<FetchId>) {
        self.abandoned.retain(|id| !ids.contains(id));
    }

    pub(super) fn passing_bytes(&self) -> u64 {
        self.passing_bytes.iter().map(Shares::total).sum()
    }

    pub(super) fn fetches(&self) -> u64 {
        self.fetches.len() as u64
    }
}

impl Store {
    /// Starts to lease the longest prefix of a chain whose chunks are here, on disk, on their way, or `elsewhere` (by
    /// position), as far as there is room. Chunks that are here cannot be evicted meanwhile.
    ///
    /// # Errors
    /// As [`Store::lease`].
    pub fn gather(
        &mut self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        elsewhere: &[Option<Source>],
    ) -> Result<Gathered, Refused> {
        let (number, slices) = self.slices(session, namespace)?;
        let slices: Box<[u16]> = slices.into();
        let rules = self.namespaces.get(number).rules;
        let found = self.walk(number, chain)?;
        let held = self.session(session)?;
        let room = self.limits.max_leased_blocks.saturating_sub(held.leased_blocks);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        let most = most_chunks(&rules, slices.len(), MAX_MESSAGE_BLOCKS.min(room), chain.len());
        if (most == 0 && !chain.is_empty()) || held.gathers.len() >= MAX_SESSION_GATHERS {
            return Err(Refused::Busy { what: Scarce::Claims, retry_after_ms: CLAIMS_RETRY_MS });
        }
        let most = most.min(self.restorable_with(number, &found, elsewhere));
        let gather = self.next_number();
        let mut open = Gather {
            session,
            namespace: number,
            slices,
            chunks: Vec::new(),
            hashes: Box::default(),
            waiting: 0,
        };
        let (wanted, cut) = self.continue_gather(gather, &mut open, chain, &found[..most], elsewhere);
        let blocks = open.slices.len() * rules.blocks(open.chunks.len());
        let held = self.session_mut(session)?;
        held.leased_blocks += blocks as u64;
        held.gathers.insert(gather);
        let is_ready = open.waiting == 0;
        self.gathers.open.insert(gather, open);
        Ok(Gathered { gather, is_ready, wanted, cut })
    }

    /// Goes on with a gather that was cut, now that its chunks are here: those that stay have left their room to the next. `None`
    /// if one of them did not come, or the session may lease no more.
    pub fn gather_more(
        &mut self,
        gather: u64,
        chain: &Chain,
        elsewhere: &[Option<Source>],
    ) -> Option<Gathered> {
        let open = self.gathers.open.get(&gather)?;
        if open.waiting > 0 || !open.chunks.iter().all(|&chunk| self.index.get(chunk).is_complete()) {
            return None;
        }
        let (number, session, slices, before) =
            (open.namespace, open.session, open.slices.len(), open.chunks.len());
        let rules = self.namespaces.get(number).rules;
        let own = (slices * rules.blocks(before)) as u64;
        let held = self.session(session).ok()?.leased_blocks.saturating_sub(own);
        let room = usize::try_from(self.limits.max_leased_blocks.saturating_sub(held)).unwrap_or(usize::MAX);
        let found = self.walk(number, chain).ok()?;
        let most = most_chunks(&rules, slices, MAX_MESSAGE_BLOCKS.min(room), chain.len());
        let most = most.min(self.restorable_with(number, &found, elsewhere));
        let rest = found.get(..most).filter(|_| most > before)?;
        let mut open = self.gathers.open.remove(&gather)?;
        let (wanted, cut) = self.continue_gather(gather, &mut open, chain, rest, elsewhere);
        let blocks = (slices * rules.blocks(open.chunks.len())) as u64;
        if let Ok(session) = self.session_mut(session) {
            session.leased_blocks += blocks - own;
        }
        let is_ready = open.waiting == 0;
        self.gathers.open.insert(gather, open);
        Some(Gathered { gather, is_ready, wanted, cut })
    }

    /// Whether any chunk is on its way.
    pub fn is_bringing(&self) -> bool {
        !self.gathers.fetches.is_empty()
    }

    /// Whether a gather that was cut because it is [`Cut::Crowded`] may find room later: others' chunks are on their way, and its
    /// own stay, so that they take none of their room.
    pub fn may_find_room(&self, gather: u64) -> bool {
        let stays = |&chunk: &ChunkId| self.index.get(chunk).standing == Standing::Kept;
        self.is_bringing()
            && self
                .gathers
                .open
                .get(&gather)
                .is_some_and(|open| open.waiting == 0 && open.chunks.iter().all(stays))
    }

    /// Claims the chunks of a chain behind those that a gather has, and starts the fetches of chunks that are not here. Returns
    /// these fetches, and why a fetch found no room, if one did.
    fn continue_gather(
        &mut self,
        gather: u64,
        open: &mut Gather,
        chain: &Chain,
        found: &[Presence],
        elsewhere: &[Option<Source>],
    ) -> (Vec<Wanted>, Option<Cut>) {
        let (number, from) = (open.namespace, open.chunks.len());
        let steps = self.claim_run(number, chain, (from, found), elsewhere);
        open.hashes = chain.hashes[..from + steps.len()].into();
        let mut wanted = Vec::new();
        let mut cut = None;
        for (at, &step) in steps.iter().enumerate() {
            let position = from + at;
            let chunk = match step {
                ChunkStep::Here(chunk) | ChunkStep::Coming(chunk) => chunk,
                ChunkStep::Fetch(source) => {
                    let Some(chunk) = self.start_fetch(number, chain.chunk(position), source) else {
                        self.unclaim(&steps[at..].iter().filter_map(ChunkStep::claimed).collect::<Vec<_>>());
                        cut = Some(self.why_cut(number, source));
                        break;
                    };
                    self.change(chunk, |chunk| chunk.claims += 1);
                    wanted.push(self.wanted(number, chunk, position as u32, source));
                    chunk
                }
            };
            if let Some(fetch) = self.gathers.fetches.get_mut(&chunk) {
                fetch.gathers.insert(gather);
                open.waiting += 1;
            }
            open.chunks.push(chunk);
        }
        // The policy hears of a prompt's uses from last to first.
        for step in steps[..open.chunks.len() - from].iter().rev() {
            if let ChunkStep::Here(chunk) = *step {
                self.count_use(chunk);
            }
        }
        (wanted, cut)
    }

    /// Claims the chunks of a run from a position on that are here or on their way, and returns the step for each chunk. Room is
    /// made only afterwards: it may take any unclaimed chunk, even further down the chain.
    fn claim_run(
        &mut self,
        number: NamespaceId,
        chain: &Chain,
        (from, found): (usize, &[Presence]),
        elsewhere: &[Option<Source>],
    ) -> Vec<ChunkStep> {
        let mut steps = Vec::with_capacity(found.len().saturating_sub(from));
        for (position, &found) in found.iter().enumerate().skip(from) {
            let known = self.index.find(number, &chain.hashes[position]);
            let step = match (found, known, elsewhere.get(position).copied().flatten()) {
                (Presence::Here(chunk), ..) => ChunkStep::Here(chunk),
                (_, Some(chunk), _) if self.gathers.is_coming(chunk) => ChunkStep::Coming(chunk),
                (Presence::OnDisk(_), ..) => ChunkStep::Fetch(Source::Disk),
                (Presence::Absent, None, Some(from)) => ChunkStep::Fetch(from),
                // The disk is silent.
                (Presence::Absent, Some(chunk), Some(from)) if self.index.get(chunk).is_on_disk_alone() => {
                    ChunkStep::Fetch(from)
                }
                _ => break,
            };
            if let Some(chunk) = step.claimed() {
                self.change(chunk, |chunk| chunk.claims += 1);
            }
            steps.push(step);
        }
        steps
    }

    /// How many of a chain's first `chunks` chunks [`Store::gather`] can bring at most. `None` if every chunk has all pools:
    /// lookups know the number then.
    ///
    /// # Errors
    /// As [`Store::find`].
    pub fn hoped(
        &self,
        session: SessionId,
        namespace: u32,
        chain: &Chain,
        chunks: usize,
        elsewhere: &[Option<Source>],
    ) -> Result<Option<usize>, Refused> {
        let (number, _) = self.slices(session, namespace)?;
        if self.namespaces.get(number).rules.is_plain() {
            return Ok(None);
        }
        let mut found = self.walk(number, chain)?;
        found.truncate(chunks);
        Ok(Some(self.restorable_with(number, &found, elsewhere)))
    }

    /// Ends a fetch: its blocks are in their slots with these checksums, or the fetch failed (`None`). With `kept` the chunk
    /// stays, for this reason; otherwise it only passes. Returns the gathers that are now ready.
    pub fn fetched(&mut self, fetch: FetchId, came: Option<Came>, kept: Option<ChangeKind>) -> Vec<u64> {
        let FetchId(id) = fetch;
        let Some(Coming { gathers, taken_in, late_read, .. }) = self.gathers.fetches.remove(&id) else {
            return Vec::new();
        };
        let Chunk { namespace: number, standing, .. } = *self.index.get(id);
        let is_purged = standing == Standing::Condemned;
        match came {
            Some(Came { checksums, pools, reads, is_on_disk_elsewhere, is_stored, is_copy })
                if pools.has_all(self.namespaces.get(number).rules.obligatory()) && !is_purged =>
            {
                self.make_readable(id, pools, checksums, reads);
                let chunk = self.index.get_mut(id);
                if is_on_disk_elsewhere && chunk.disk == OnDisk::Nowhere {
                    chunk.disk = OnDisk::Elsewhere;
                }
                self.came_stored(id, is_stored);
                if let Some(kind) = kept {
                    self.admit(id, kind);
                    if is_copy {
                        self.is_copy(id);
                    }
                    if let Some(idle_ms) = taken_in
                        && gathers.is_empty()
                    {
                        self.was_taken_in(id, idle_ms);
                    }
                    self.queue_disk_write(id);
                }
            }
            _ => {
                let all = self.all_slices(number);
                let slots = self.take_written_slots(number, id, &all);
                let bytes: u64 = slots.iter().map(|&slot| self.slab.slot_bytes_of(slot)).sum();
                self.stops_passing(id, bytes);
                if !is_purged {
                    self.await_again(id);
                }
                self.writing_failed(id, slots, late_read.map(Reader::Drive));
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

    /// Ends a gather as a lease of the prefix that is here. Fetches that it still waits for are abandoned, unless others wait for
    /// them too.
    ///
    /// # Errors
    /// [`Refused::Unknown`] if the session has ended, or there is no such gather.
    pub fn finish_gather(&mut self, gather: u64) -> Result<Leased, Refused> {
        let unknown = Refused::Unknown { what: "gather", number: gather };
        let Gather { session, namespace, slices, chunks, hashes, .. } =
            self.gathers.open.remove(&gather).ok_or(unknown)?;
        let rules = self.namespaces.get(namespace).rules;
        let blocks = slices.len() * rules.blocks(chunks.len());
        if let Ok(held) = self.session_mut(session) {
            held.leased_blocks -= blocks as u64;
            held.gathers.remove(&gather);
        } else {
            self.stop_waiting(gather, &chunks);
            self.unclaim(&chunks);
            self.evict_above_watermark();
            return Err(Refused::Unknown { what: "session", number: session.0.into() });
        }
        let mut leased = Leased::default();
        let complete = chunks.iter().take_while(|&&chunk| self.index.get(chunk).is_complete()).count();
        let named = self.named_prefix(namespace, &hashes, &chunks[..complete]);
        let restorable = self.restorable(&rules, &chunks[..named]);
        let fit = self.place_prefix(session, namespace, &slices, &chunks[..restorable], &mut leased);
        self.stop_waiting(gather, &chunks[complete..]);
        self.unclaim(&chunks[fit..]);
        if fit > 0 {
            leased.lease = self.next_number();
            leased.chunks = fit as u32;
            let blocks = leased.places.len() as u64;
            let session = self.session_mut(session)?;
            session.leased_blocks += blocks;
            let (chunks, hashes) = (chunks[..fit].into(), hashes[..fit].into());
            session.leases.insert(leased.lease, Lease { namespace, chunks, hashes, blocks });
        }
        self.evict_above_watermark();
        Ok(leased)
    }

    /// Ends a gather without a lease; nothing happens if the session has no gather of this number.
    pub fn cancel_gather(&mut self, session: SessionId, gather: u64) {
        if self.gathers.open.get(&gather).is_none_or(|open| open.session != session) {
            return;
        }
        let Some(Gather { namespace, slices, chunks, .. }) = self.gathers.open.remove(&gather) else {
            return;
        };
        let blocks = (slices.len() * self.namespaces.get(namespace).rules.blocks(chunks.len())) as u64;
        if let Ok(held) = self.session_mut(session) {
            held.leased_blocks -= blocks;
            held.gathers.remove(&gather);
        }
        self.stop_waiting(gather, &chunks);
        self.unclaim(&chunks);
        self.evict_above_watermark();
    }

    /// The progress of a gather.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a gather that is not the session's, or has ended.
    pub fn progress(&self, session: SessionId, gather: u64) -> Result<Progress, Refused> {
        let unknown = Refused::Unknown { what: "ticket", number: gather };
        let open = self.gathers.open.get(&gather).filter(|open| open.session == session).ok_or(unknown)?;
        let namespace = self.namespaces.get(open.namespace);
        let in_place = namespace.rules.longest(open.chunks.iter().map(|&id| self.index.get(id).pools));
        let expected = |&id: &ChunkId| self.expected(&namespace.rules, id);
        let expected = namespace.rules.longest(open.chunks.iter().map(expected));
        let chunk_tokens = u64::from(namespace.chunk_tokens);
        Ok(Progress {
            tokens_in_place: in_place as u64 * chunk_tokens,
            tokens_expected: expected as u64 * chunk_tokens,
            is_done: open.waiting == 0,
        })
    }

    /// The fetches that lost their last waiter since the last call. They may be stopped; [`Store::fetched`] must follow.
    pub fn take_abandoned(&mut self) -> Vec<FetchId> {
        std::mem::take(&mut self.gathers.abandoned)
    }

    /// Cancels the gathers of a session that ends.
    pub(super) fn cancel_gathers_of(&mut self, session: SessionId) {
        let open = self.sessions.get_mut(session).map(|session| std::mem::take(&mut session.gathers));
        open.into_iter().flatten().for_each(|gather| self.cancel_gather(session, gather));
    }

    /// Ends a gather's wait for those of its chunks that are on their way.
    fn stop_waiting(&mut self, gather: u64, chunks: &[ChunkId]) {
        chunks.iter().for_each(|&chunk| self.gathers.stop_waiting_for(chunk, gather));
    }

    /// Chunks that a gather still waits for.
    pub fn awaited(&self, gather: u64) -> impl Iterator<Item = FetchId> {
        let chunks = self.gathers.open.get(&gather).map_or(&[][..], |open| &open.chunks);
        chunks.iter().filter(|&&id| self.gathers.is_coming(id)).map(|&id| FetchId(id))
    }

    /// The pools that a chunk of a gather has, or may have when it has come.
    fn expected(&self, rules: &PoolRules, id: ChunkId) -> PoolSet {
        let chunk = self.index.get(id);
        match (self.gathers.is_coming(id), chunk.disk) {
            (false, _) => chunk.pools,
            (true, OnDisk::Here) => chunk.disk_pools,
            (true, _) => rules.every(),
        }
    }

    /// The longest prefix that may become restorable. A chunk elsewhere counts with all pools: its real pools are known only when
    /// it has come.
    fn restorable_with(
        &self,
        number: NamespaceId,
        found: &[Presence],
        elsewhere: &[Option<Source>],
    ) -> usize {
        let rules = self.namespaces.get(number).rules;
        if rules.is_plain() {
            return found.len();
        }
        let held = found.iter().enumerate().map(|(position, &found)| match found {
            Presence::Absent if matches!(elsewhere.get(position), Some(Some(_))) => rules.every(),
            found => self.pools_of(found),
        });
        rules.longest(held)
    }
}
