//! The store: one actor's chunks and all decisions about them.
//!
//! The store is pure: it takes `now`, moves no byte and asks no clock. It returns orders to copy, read, write and fetch, and is
//! told how each order ended. Callers use it in this order:
//!
//! 1. **Sessions.** [`Store::open_session`] and [`Store::register`]; [`Store::close_session`] when the engine's socket closes,
//!    [`Store::process_gone`] when its process is gone. Until then, memory that the engine was shown is not reused.
//! 2. **Put.** [`Store::reserve`] takes slots; [`Store::begin_commit`] says which bytes to copy; [`Store::finish_commit`]
//!    with their checksums makes the chunks readable. [`Store::begin_layers`] and [`Store::finish_layers`] do the same for
//!    layers ahead of their commit.
//! 3. **Get.** [`Store::lookup`] says which chunks are here, [`Store::lease`] says where they are, [`Store::release`] ends the
//!    lease. [`Store::gather`] leases chunks, some of which must first be brought into memory: [`Store::fetched`] answers each
//!    [`Wanted`], and [`Store::finish_gather`] ends the gather. [`Store::follow`] reads chunks that are being written.
//! 4. **Peers.** [`Store::grant`] lends a chunk to a peer, [`Store::end_grant`] ends the loan; [`Store::give_up`] drops chunks
//!    that moved to another node.
//! 5. **Lower tiers.** [`Store::next_write`] says what to write to a tier; [`Store::written`] reports the end of each write.
//! 6. **After every call**: [`Store::take_changes`], [`Store::take_abandoned`], [`Store::take_progressed`], [`Store::take_told`]
//!    and [`Store::take_renewals`] return what the caller must pass on or do. [`Store::tick`] ends pins, reservations, follows
//!    and forwards whose time is over.
//!
//! Most of these steps have a module of the same name. `room` evicts. Places leave the store only through `hand_out`. All modules
//! use `index` and `slab`. `verify` and `loads` keep chunks in place while a thread sums them or a device copies them.
//!
//! A request claims all chunks that it needs before the store makes room for anything.

mod admission;
mod checksums;
mod commit;
mod copies;
mod disk;
mod explain;
mod follow;
mod forward;
mod gather;
mod grants;
mod hand_out;
mod holdings;
mod holes;
pub mod ids;
mod index;
mod journal;
mod limits;
mod lives;
mod loads;
mod lookup;
mod namespaces;
mod object;
mod pins;
pub mod policy;
mod purge;
mod refused;
mod remembered;
pub mod replay;
mod reserve;
mod room;
mod sessions;
mod shares;
mod slab;
mod stays;
mod tenants;
#[cfg(test)]
pub(crate) mod tests;
mod usage;
mod verify;
mod writes;

use larder_protocol::limits::MAX_SESSION_NAMESPACES;
use larder_protocol::namespace::NamespaceSpec;
use larder_protocol::session::Registered;
use larder_protocol::{ChunkHash, Fingerprint, PoolSet};

use crate::Millis;
use crate::placement::Pressure;
use ids::{ChunkId, ChunkNumber, NamespaceId, ProcessId, SessionId, TenantId};
use index::{Block, Index};
use namespaces::Namespaces;
use pins::Pins;
use policy::{Policy, PolicyName};
use sessions::{Lease, Session, Sessions};
use slab::Slab;
use tenants::Tenants;

pub use checksums::{Checksums, Ranges};
pub use commit::{BlockMove, CommitOrder};
pub use disk::{DiskStoreLimits, DiskUsage};
pub(crate) use explain::absent_of;
pub use explain::{ExplainedChain, OtherNamespace};
pub use follow::{
    AskedAgain, FollowNews, FollowProgress, FollowProofs, FollowRequest, FollowStarted, LayersInPlace, News,
};
pub use forward::{Forwards, Offered};
pub use gather::{Came, Cut, FetchId, FreeRoom, Gathered, Leaving, Recall, Source, TakeIn, Wanted};
pub use grants::{Granted, GrantedBlock};
pub use holdings::{PinFacts, SessionFacts};
pub use journal::{Change, ChangeKind};
pub use limits::{PeerStoreLimits, StoreLimits};
pub use loads::{BlockFacts, LoadBlock, LoadOrder};
pub use lookup::{Leased, LookupOptions, Place, Usable, Walk};
pub(crate) use namespaces::MAX_NAMESPACES;
#[cfg(test)]
pub(crate) use namespaces::MOST_FORGOTTEN;
pub use namespaces::NamespaceFacts;
pub use object::{ObjectStoreLimits, ObjectUsage};
pub use purge::{PurgedKeys, PurgedPage};
pub use refused::Refused;
pub use remembered::{EvictionRule, FoundEvictions, RememberedEviction, RememberedEvictions};
pub use reserve::Reserved;
pub use room::{EvictionReason, Evictions};
pub use slab::Bytes;
pub use stays::{Keeper, Stay};
pub use usage::{TierUsage, Usage};
pub use verify::VerifyOrder;
pub use writes::{ChunkWrite, WriteId, WritePolicy};

/// One actor's chunks.
#[derive(Debug)]
pub struct Store {
    limits: StoreLimits,
    namespaces: Namespaces,
    sessions: Sessions,
    index: Index,
    slab: Slab,
    tenants: Tenants,
    pins: Pins,
    orders: commit::Orders,
    gathers: gather::Gathers,
    grants: grants::Grants,
    follows: follow::Follows,
    loads: loads::Loads,
    verifications: verify::Verifications,
    journal: journal::Journal,
    holes: holes::Holes,
    disk: Option<disk::Disk>,
    object: Option<object::Objects>,
    /// The last number in use. Leases, reservations, pins and orders share one series of numbers; 0 names nothing.
    last_number: u64,
    cached_chunks: u64,
    evictions: Evictions,
    remembered: remembered::EvictionMemory,
    /// The places that an earlier store gave out, if this store replaced one.
    seclusion: lives::Seclusion,
    /// Chunks that were not given out because they did not have the requested name.
    misnamed: u64,
    /// Chunks refused because their names contradict those of cached chunks.
    refused_names: u64,
    /// Time of the last tick, in tenths of a second since the node started.
    tenths: u32,
    now: Millis,
    pressure: Pressure,
    departing: forward::Departing,
    evicted_after_ms: Option<u64>,
    /// No extent is searched to be cleared before then.
    clears_from: Millis,
    purges: purge::Purges,
}

impl Store {
    /// An empty store.
    pub fn new(limits: StoreLimits) -> Self {
        Self {
            slab: Slab::new(limits.extents, limits.extent_bytes, &limits.most_extents()),
            tenants: Tenants::new(&limits.tenant_bytes, limits.policy, limits.recompute_doubles_at),
            journal: journal::Journal::default(),
            holes: holes::Holes::default(),
            gathers: gather::Gathers::default(),
            grants: grants::Grants::default(),
            follows: follow::Follows::default(),
            loads: loads::Loads::default(),
            verifications: verify::Verifications::default(),
            remembered: remembered::EvictionMemory::new(limits.remembered_evictions),
            disk: limits.disk.as_ref().map(disk::Disk::new),
            object: limits.object.as_ref().map(object::Objects::new),
            limits,
            namespaces: Namespaces::default(),
            sessions: Sessions::default(),
            index: Index::default(),
            pins: Pins::default(),
            orders: commit::Orders::default(),
            last_number: 0,
            cached_chunks: 0,
            evictions: Evictions::default(),
            seclusion: lives::Seclusion::default(),
            misnamed: 0,
            refused_names: 0,
            tenths: 0,
            now: Millis::default(),
            pressure: Pressure::default(),
            departing: forward::Departing::default(),
            evicted_after_ms: None,
            clears_from: Millis::default(),
            purges: purge::Purges::default(),
        }
    }

    /// Opens a session of a process that belongs to `tenant`, with a write window of `window_bytes` bytes (0: none).
    pub fn open_session(&mut self, tenant: TenantId, process: ProcessId, window_bytes: u64) -> SessionId {
        self.sessions.open(tenant, process, window_bytes)
    }

    /// Registers a namespace for a session, with the session's slices and its own block size of each pool. The same registration
    /// again changes nothing.
    ///
    /// # Errors
    /// [`Refused`] if the namespace is invalid, disagrees with the block sizes, or does not fit this node; or if the session
    /// registered it with other slices, since both handles would have the same number, and their blocks would be taken for each
    /// other.
    pub fn register(
        &mut self,
        session: SessionId,
        tenant_name: &str,
        spec: &NamespaceSpec,
        slices: &[u16],
        block_bytes: &[u64],
    ) -> Result<Registered, Refused> {
        spec.check()?;
        check_block_sizes(spec, block_bytes)?;
        check_slices(spec, slices)?;
        let &Session { tenant, window_bytes, ref namespaces, .. } = self.session(session)?;
        self.must_serve(tenant)?;
        let registered = namespaces.len();
        if let Some(&block_bytes) =
            block_bytes.iter().find(|&&bytes| window_bytes > 0 && bytes > window_bytes)
        {
            return Err(Refused::WindowTooSmall { block_bytes, window_bytes });
        }
        let extent_bytes = self.limits.extent_bytes;
        let class = |&block_bytes: &u64| {
            let too_large = Refused::BlockTooLarge { block_bytes, extent_bytes };
            self.slab.class(tenant, block_bytes).ok_or(too_large)
        };
        let classes = block_bytes.iter().map(class).collect::<Result<Vec<_>, _>>()?;
        let (bytes, most) =
            (self.slab.extents_bytes_for(&classes, spec.slices), self.slab.most_bytes(tenant));
        if bytes > most {
            return Err(Refused::ChunkTooLarge { bytes, most });
        }
        let most = self.most_namespaces();
        let too_many = Refused::TooManyNamespaces { most };
        let about = (tenant, tenant_name);
        let number = match self.namespaces.enter(about, spec, &classes, most) {
            None if registered < MAX_SESSION_NAMESPACES && self.forget_oldest_namespace(tenant) => {
                self.namespaces.enter(about, spec, &classes, most)
            }
            entered => entered,
        };
        let number = number.ok_or(too_many)?;
        let fingerprint = self.namespaces.get(number).fingerprint;
        let namespaces = &mut self.session_mut(session)?.namespaces;
        let before = namespaces.get(&number);
        if let Some(before) = before.filter(|before| before[..] != *slices) {
            return Err(Refused::OtherSlices { registered: before.to_vec(), slices: slices.to_vec() });
        }
        let is_new = before.is_none();
        if is_new && registered >= MAX_SESSION_NAMESPACES {
            return Err(Refused::TooManySessionNamespaces);
        }
        namespaces.insert(number, slices.into());
        self.namespaces.get_mut(number).sessions += u32::from(is_new);
        Ok(Registered { namespace: number.0.into(), fingerprint, root: fingerprint.root() })
    }

    /// The namespaces that sessions registered or chunks belong to.
    pub fn namespaces(&self) -> impl Iterator<Item = NamespaceFacts> {
        self.namespaces.facts()
    }

    /// Ends a session. It may no longer commit its reservations. Its leased slots stay quarantined until its process is gone.
    /// Pins stay until their deadline.
    pub fn close_session(&mut self, id: SessionId) {
        self.cancel_gathers_of(id);
        self.end_follows_of(id);
        while let Some(number) =
            self.sessions.get(id).and_then(|session| session.reservations.keys().next().copied())
        {
            self.lapse(id, number);
        }
        self.quarantine_copies_of(id);
        let Some(session) = self.sessions.close(id) else { return };
        session.namespaces.keys().for_each(|&number| self.namespaces.get_mut(number).sessions -= 1);
        // The memory of a tenant that left is never used again in place.
        let has_left = !self.serves(session.tenant);
        for Lease { chunks, .. } in session.leases.into_values() {
            match self.sessions.living(session.process).filter(|_| !has_left) {
                Some(process) => {
                    let (new, known): (Vec<ChunkId>, Vec<ChunkId>) =
                        chunks.into_iter().partition(|&chunk| process.orphaned.insert(chunk));
                    new.into_iter().for_each(|chunk| self.orphan(chunk));
                    self.unclaim(&known);
                }
                None => self.unclaim(&chunks),
            }
        }
        self.evict_above_watermark();
    }

    /// Notes that a process is gone: memory that it might have touched is free again.
    pub fn process_gone(&mut self, process: ProcessId) {
        self.process_left_seclusion(process);
        let Some(held) = self.sessions.process_gone(process) else { return };
        self.end_orphaned(held.orphaned.into_iter().collect());
        self.process_left_follows(process);
        self.evict_above_watermark();
    }

    /// Frees orphaned chunks that an engine reads no more, or whose memory is never used again in place.
    fn end_orphaned(&mut self, mut chunks: Vec<ChunkId>) {
        // The last chunks of prompts leave first.
        chunks.sort_by_key(|&chunk| self.index.get(chunk).index);
        chunks.iter().for_each(|&chunk| self.adopt(chunk));
        self.unclaim(&chunks);
    }

    /// Ends pins, reservations, follows and forwards whose time is over. Removes some chunks of tenants that left or hold too
    /// much.
    pub fn tick(&mut self, now: Millis) {
        self.is_now(now);
        self.tenths = self.tenths.max(u32::try_from(now.0 / 100).unwrap_or(u32::MAX));
        for (session, reservation) in self.sessions.lapsed(now) {
            self.lapse(session, reservation);
        }
        self.expire_pins(now);
        self.expire_follows(now);
        self.expire_forwards();
        self.remove_leaving();
        self.shrink_tenants();
    }

    /// Sets the time by which uses are dated.
    pub fn is_now(&mut self, now: Millis) {
        self.now = self.now.max(now);
        self.tenants.is_now(self.age_ms());
    }

    /// The open sessions.
    pub fn open_sessions(&self) -> Vec<SessionId> {
        self.sessions.ids()
    }

    /// Whether the configuration has more than one tenant.
    pub fn has_several_tenants(&self) -> bool {
        self.limits.tenant_bytes.iter().filter(|&&most| most > 0).nth(1).is_some()
    }

    /// The tenant of an open session.
    ///
    /// # Errors
    /// [`Refused::Unknown`] for a session that is not open.
    pub fn tenant(&self, session: SessionId) -> Result<TenantId, Refused> {
        Ok(self.session(session)?.tenant)
    }

    /// Notes that a session asks for an operator, and not for an engine.
    pub(crate) fn observe(&mut self, session: SessionId) -> Result<(), Refused> {
        self.session_mut(session)?.is_observer = true;
        Ok(())
    }

    /// Whether a session asks for an operator: its lookups are not counted.
    pub(crate) fn is_observer(&self, session: SessionId) -> bool {
        self.sessions.get(session).is_some_and(|session| session.is_observer)
    }

    /// The fingerprint of a namespace.
    pub fn fingerprint(&self, namespace: u32) -> Option<Fingerprint> {
        Some(self.namespaces.find(NamespaceId::of(namespace))?.fingerprint)
    }

    /// All pools of a namespace that is known.
    pub(crate) fn every_pool(&self, fingerprint: &Fingerprint) -> Option<PoolSet> {
        Some(self.namespaces.get(self.namespaces.of(fingerprint)?).rules.every())
    }

    /// Tokens of one chunk of a namespace.
    pub fn chunk_tokens(&self, namespace: u32) -> Option<u32> {
        Some(self.namespaces.find(NamespaceId::of(namespace))?.chunk_tokens)
    }

    /// Bytes of the slots of a whole chunk of a namespace; 0 for a namespace that nobody registered.
    pub fn chunk_bytes_of(&self, namespace: u32) -> u64 {
        let number = NamespaceId::of(namespace);
        self.namespaces.find(number).map_or(0, |_| self.whole_chunk_bytes(number))
    }

    /// Whether engines write straight into the arena.
    pub fn trusts_engines(&self) -> bool {
        self.limits.trust_engines
    }

    /// Extents that need new memory since the last call, because they change tenant. Replace the memory of each, then
    /// call [`Store::extent_renewed`].
    pub fn take_renewals(&mut self) -> Vec<u32> {
        self.slab.take_renewals()
    }

    /// Notes that the extent has new memory.
    pub fn extent_renewed(&mut self, extent: u32) {
        self.sessions.forget_extent(extent);
        if !self.secluded_is_renewed(extent) {
            self.slab.renewed(extent);
        }
    }

    /// Checksums of the readable blocks of a chunk, by slice, then pool; `None` if the chunk is not complete in memory.
    pub fn checksums(&self, namespace: u32, hash: &ChunkHash) -> Option<Vec<&Checksums>> {
        let chunk = self.index.get(self.index.find(NamespaceId::of(namespace), hash)?);
        let readable = chunk.blocks.iter().filter_map(|block| match block {
            Block::Ready(_, checksums) => Some(checksums),
            Block::Absent | Block::Writing(_) => None,
        });
        chunk.is_complete().then(|| readable.collect())
    }

    /// The policy in force.
    pub fn policy(&self) -> PolicyName {
        self.tenants.policy_name()
    }

    fn session(&self, id: SessionId) -> Result<&Session, Refused> {
        self.sessions.get(id).ok_or(Refused::Unknown { what: "session", number: id.0.into() })
    }

    fn session_mut(&mut self, id: SessionId) -> Result<&mut Session, Refused> {
        self.sessions.get_mut(id).ok_or(Refused::Unknown { what: "session", number: id.0.into() })
    }

    /// The slices with which a session registered a namespace.
    fn slices(&self, session: SessionId, namespace: u32) -> Result<(NamespaceId, &[u16]), Refused> {
        let number = NamespaceId::of(namespace);
        let slices = self.session(session)?.namespaces.get(&number);
        let slices = slices.filter(|_| !self.namespaces.get(number).is_gone);
        let unknown = Refused::Unknown { what: "namespace", number: namespace.into() };
        Ok((number, slices.ok_or(unknown)?))
    }

    fn must_serve(&self, tenant: TenantId) -> Result<(), Refused> {
        let unknown = Refused::Unknown { what: "tenant", number: tenant.0.into() };
        self.serves(tenant).then_some(()).ok_or(unknown)
    }

    /// The most namespaces that each tenant may have in use at a time.
    fn most_namespaces(&self) -> usize {
        let served = self.limits.tenant_bytes.iter().filter(|&&bytes| bytes > 0);
        (MAX_NAMESPACES / served.count().max(1)).max(1)
    }

    /// The tenant of a namespace; `None` for a namespace that nobody registered.
    pub(crate) fn tenant_of_namespace(&self, fingerprint: &Fingerprint) -> Option<TenantId> {
        self.namespaces.of(fingerprint).map(|number| self.namespaces.get(number).tenant)
    }

    /// The policy that decides over a chunk, and the chunk's number there.
    #[inline]
    fn policy_of(&mut self, id: ChunkId) -> (&mut dyn Policy, ChunkNumber) {
        let tenant = self.owner_of(id);
        self.tenants.policy(tenant, id.number())
    }

    /// The tenant of a chunk; not looked up while there is only one tenant.
    #[inline]
    fn owner_of(&self, id: ChunkId) -> TenantId {
        if self.tenants.has_several() { self.tenant_of(id) } else { TenantId(0) }
    }

    fn tenant_of(&self, id: ChunkId) -> TenantId {
        self.namespaces.get(self.index.get(id).namespace).tenant
    }

    /// The current time on the clock of ages: `now` times `limits.age_speed`. This clock dates the uses of chunks.
    pub(crate) fn age_ms(&self) -> u64 {
        self.now.0.saturating_mul(self.limits.age_speed.get().into())
    }

    /// The current time as the index dates uses, in units of `USE_MS`.
    fn used_now(&self) -> u32 {
        self.used_at(self.age_ms())
    }

    /// A time as the index dates uses.
    fn used_at(&self, age_ms: u64) -> u32 {
        (age_ms / USE_MS) as u32
    }

    /// The time of a use that the index dated `used`; wrong for a use more than 497 days ago, because dates wrap around.
    fn used_ms(&self, used: u32) -> u64 {
        let ago = self.used_now().wrapping_sub(used);
        (self.age_ms() / USE_MS).saturating_sub(u64::from(ago)) * USE_MS
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }
}

/// The precision of a use's date.
const USE_MS: u64 = 10;

fn check_block_sizes(spec: &NamespaceSpec, block_bytes: &[u64]) -> Result<(), Refused> {
    if block_bytes.len() != spec.pools.len() {
        return Err(Refused::BlockSizes { found: block_bytes.len(), pools: spec.pools.len() });
    }
    let disagrees = spec.pools.iter().zip(block_bytes).find(|(pool, bytes)| pool.block_bytes() != **bytes);
    disagrees.map_or(Ok(()), |(pool, &engine_bytes)| {
        let (pool, layers, layer_bytes) = (pool.name.clone(), pool.layers, pool.layer_bytes);
        Err(Refused::BlockSize { pool, engine_bytes, layers, layer_bytes })
    })
}

fn check_slices(spec: &NamespaceSpec, slices: &[u16]) -> Result<(), Refused> {
    let twice = |(i, slice): (usize, &u16)| slices[..i].contains(slice);
    let beyond = slices.iter().any(|&slice| slice >= spec.slices);
    if slices.is_empty()
        || slices.len() > usize::from(spec.slices)
        || beyond
        || slices.iter().enumerate().any(twice)
    {
        return Err(Refused::Slices { slices: slices.to_vec(), of: spec.slices });
    }
    Ok(())
}
