//! Chunks on their way from disk, other nodes or the object store: each is fetched once, however many gathers wait for it.

use larder_protocol::session::Tier;
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint, PoolSet};

use super::{Coming, Cut};
use crate::store::ChangeKind;
use crate::store::commit::BlockMove;
use crate::store::disk::Disk;
use crate::store::ids::{ChunkId, NamespaceId};
use crate::store::index::{Account, Block, Standing};
use crate::store::journal::is_held;
use crate::store::object::Objects;
use crate::store::{Checksums, Store};

/// A chunk that is being fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub(super) ChunkId);

impl FetchId {
    pub(in crate::store) fn chunk(self) -> ChunkId {
        self.0
    }

    #[cfg(test)]
    pub(crate) fn of(chunk: ChunkId) -> Self {
        Self(chunk)
    }
}

/// A chunk on its way from disk, for another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recall {
    /// Its fetch.
    pub fetch: FetchId,
    /// The read to start, unless the chunk is being read already.
    pub wanted: Option<Wanted>,
}

/// A chunk to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Its fetch.
    pub fetch: FetchId,
    /// Its position in the chain; 0 if a peer asked for it.
    pub position: u32,
    /// The source of the chunk.
    pub from: Source,
    /// Its name.
    pub chunk: ChunkRef,
    /// The places of its blocks, by slice, then pool.
    pub blocks: Vec<BlockMove>,
    /// Number of this attempt at fetching it, for [`Store::layers_came`].
    pub number: u64,
}

impl Wanted {
    /// The pools of its blocks.
    pub fn pools(&self) -> PoolSet {
        self.blocks.iter().fold(PoolSet::default(), |pools, block| pools.with(block.key.pool.into()))
    }
}

/// A fetched chunk: its blocks are in their slots, and verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Came {
    /// Checksums of the requested blocks that came, by slice, then pool.
    pub checksums: Vec<Checksums>,
    /// The pools that came with every slice; the others are absent.
    pub pools: PoolSet,
    /// How often the chunk was read, this time included.
    pub reads: u32,
    /// Whether the node that sent it has it on disk.
    pub is_on_disk_elsewhere: bool,
    /// Whether it came from the object store.
    pub is_stored: bool,
    /// Whether its holder keeps the chunk too, so that the chunk here is a copy.
    pub is_copy: bool,
}

/// The source of a chunk that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// This node's disk.
    Disk,
    /// Another actor of this node.
    Sibling,
    /// Another node.
    Peer,
    /// The object store.
    Object,
}

impl Source {
    /// The tier that a chunk from this source counts for.
    pub fn tier(self) -> Tier {
        match self {
            Self::Sibling => Tier::Host,
            Self::Disk => Tier::Disk,
            Self::Peer => Tier::Peer,
            Self::Object => Tier::Object,
        }
    }
}

impl Store {
    /// Keeps a chunk that was only passing or leaving.
    pub(in crate::store) fn admit(&mut self, id: ChunkId, kind: ChangeKind) {
        let chunk = self.index.get(id);
        if chunk.standing == Standing::Kept || !chunk.is_complete() {
            return;
        }
        let was_held = is_held(chunk);
        let bytes = self.readable_bytes(id);
        let tenant = self.tenant_of(id);
        self.evict_ahead(tenant, 1, bytes);
        self.stops_passing(id, bytes);
        self.cached_chunks += 1;
        self.tenants.of_mut(tenant).cached_bytes += bytes;
        let used = self.used_now();
        let chunk = self.index.get_mut(id);
        chunk.standing = Standing::Kept;
        chunk.used = used;
        self.index.set_since(id, self.tenths);
        self.occupy(id);
        self.enter_policy(id);
        self.tell(id, was_held, kind);
    }

    /// Forgets a chunk that does not stay, once nobody claims it.
    pub(in crate::store) fn let_pass(&mut self, id: ChunkId) {
        let chunk = self.index.get(id);
        if chunk.claims > 0 || chunk.pins > 0 {
            return;
        }
        if chunk.standing != Standing::Kept {
            self.stops_passing(id, self.readable_bytes(id));
            self.forget(id);
        } else if chunk.slots().next().is_none() {
            // The chunk was being fetched, and did not come.
            self.forget(id);
        }
    }

    /// Starts to bring a chunk from disk for another node, after [`Store::grant`] said that it is there; `None` if there is no
    /// room. The chunk may be granted when it has come; [`Store::end_recall`] must follow.
    pub fn recall(&mut self, fingerprint: &Fingerprint, hash: &ChunkHash) -> Option<Recall> {
        let id = self.named(fingerprint, hash)?;
        let wanted = if self.gathers.fetches.contains_key(&id) {
            None
        } else if self.index.get(id).is_on_disk_alone() {
            let number = self.index.get(id).namespace;
            self.start_fetch(number, self.index.name(id), Source::Disk)?;
            Some(self.wanted(number, id, 0, Source::Disk))
        } else {
            return None;
        };
        if let Some(fetch) = self.gathers.fetches.get_mut(&id) {
            fetch.recalls += 1;
        }
        self.change(id, |chunk| chunk.claims += 1);
        Some(Recall { fetch: FetchId(id), wanted })
    }

    /// Ends a recall, after its peer was answered.
    pub fn end_recall(&mut self, FetchId(id): FetchId) {
        self.unclaim(&[id]);
        self.evict_above_watermark();
    }

    /// Whether a gather or follow waits for a chunk that is being fetched.
    pub fn is_leased_soon(&self, FetchId(id): FetchId) -> bool {
        self.gathers.fetches.get(&id).is_some_and(|fetch| !fetch.gathers.is_empty())
    }

    /// Notes that a read may still write to the slots of a fetch that fails now. After [`Store::fetched`] the slots stay unused until
    /// [`Store::read_is_over`].
    pub(crate) fn may_write_later(&mut self, FetchId(id): FetchId, read: u64) {
        if let Some(fetch) = self.gathers.fetches.get_mut(&id) {
            fetch.late_read = Some(read);
        }
    }

    /// Whether a fetched chunk has slots for every pool, so that a peer may be asked for it. A chunk from disk has slots only
    /// for its record's pools.
    pub fn takes_all_pools(&self, FetchId(id): FetchId) -> bool {
        self.gathers.is_coming(id) && !self.index.get(id).blocks.iter().any(Block::is_absent)
    }

    /// Whether anybody waits for a chunk that is being fetched.
    pub fn is_awaited(&self, FetchId(id): FetchId) -> bool {
        self.gathers.fetches.get(&id).is_some_and(|fetch| {
            !fetch.gathers.is_empty() || fetch.recalls > 0 || fetch.taken_in.is_some() || fetch.is_in_place
        })
    }

    /// Enters a chunk and takes slots for all blocks that may come; `None` if there is no room for a passing chunk, or its
    /// namespace is purged.
    pub(in crate::store) fn start_fetch(
        &mut self,
        number: NamespaceId,
        name: ChunkRef,
        from: Source,
    ) -> Option<ChunkId> {
        let every = self.namespaces.get(number).rules.every();
        self.start_fetch_of(number, name, from, every)
    }

    /// As [`Self::start_fetch`], for some pools; a chunk from disk comes with all pools of its record.
    pub(in crate::store) fn start_fetch_of(
        &mut self,
        number: NamespaceId,
        name: ChunkRef,
        from: Source,
        pools: PoolSet,
    ) -> Option<ChunkId> {
        if !self.may_come(number) {
            return None;
        }
        let pools = match (from, self.index.find(number, &name.hash)) {
            (Source::Disk, Some(id)) => self.index.get(id).disk_pools,
            _ => pools,
        };
        let bytes = self.pools_bytes(number, self.namespaces.get(number).slices.into(), pools);
        let account = account_of(from);
        if !self.has_room_on_the_way(number, account, bytes) {
            return None;
        }
        let all = self.all_slices(number);
        let chunk = self.insert(number, name).ok()?;
        self.change(chunk, |chunk| chunk.claims += 1);
        if !self.take_slots(number, chunk, &all, pools) {
            self.drop_written(number, chunk, &all);
            return None;
        }
        self.index.get_mut(chunk).standing = Standing::Passing;
        self.passes(chunk, account, bytes);
        let number = self.next_number();
        self.gathers.fetches.insert(chunk, Coming { number, ..Coming::default() });
        self.writing_begins(chunk);
        Some(chunk)
    }

    /// Whether chunks of an account that are on their way leave room for so many further bytes.
    fn has_room_on_the_way(&self, number: NamespaceId, account: Account, bytes: u64) -> bool {
        let most = match account {
            Account::Disk => self.disk.as_ref().map_or(0, Disk::max_reading_bytes),
            Account::Objects => self.object.as_ref().map_or(0, Objects::max_reading_bytes),
            _ => self.limits.peers.as_ref().map_or(0, |peers| peers.passing_bytes),
        };
        let tenant = self.namespaces.get(number).tenant;
        self.gathers.may_come(account, tenant, bytes, most, &self.limits.tenant_bytes)
    }

    /// Why [`Self::start_fetch`] began no fetch.
    pub(super) fn why_cut(&self, number: NamespaceId, from: Source) -> Cut {
        let account = account_of(from);
        let is_crowded = !self.has_room_on_the_way(number, account, self.whole_chunk_bytes(number));
        // A chunk that does not fit beside no other one never will.
        let are_others = self.gathers.passing_bytes[account as usize].total() > 0;
        if self.may_come(number) && is_crowded && are_others { Cut::Crowded } else { Cut::Full }
    }

    pub(in crate::store) fn wanted(
        &self,
        number: NamespaceId,
        id: ChunkId,
        position: u32,
        from: Source,
    ) -> Wanted {
        let mut blocks = Vec::new();
        self.block_moves(number, id, &self.all_slices(number), || None, &mut blocks);
        let attempt = self.gathers.fetches.get(&id).map_or(0, |fetch| fetch.number);
        Wanted { fetch: FetchId(id), position, from, chunk: self.index.name(id), blocks, number: attempt }
    }

    /// Makes the received blocks of a chunk readable, and frees the slots of the others.
    pub(super) fn make_readable(
        &mut self,
        id: ChunkId,
        pools: PoolSet,
        checksums: Vec<Checksums>,
        reads: u32,
    ) {
        let chunk = self.index.get_mut(id);
        let namespace = self.namespaces.get(chunk.namespace);
        let passing = &mut self.gathers.passing_bytes[chunk.account() as usize];
        let mut checksums = checksums.into_iter();
        let mut ready = Vec::new();
        for (number, block) in chunk.blocks.iter_mut().enumerate() {
            let Block::Writing(slot) = *block else { continue };
            if pools.has(number % namespace.pools.len()) {
                *block = Block::Ready(slot, checksums.next().unwrap_or_default());
                chunk.ready += 1;
                ready.push(number);
                if chunk.orphaned_leases > 0 {
                    // A vanished process may have followed the chunk.
                    self.slab.quarantine(slot);
                }
            } else {
                *block = Block::Absent;
                passing.take(namespace.tenant, self.slab.slot_bytes_of(slot));
                self.slab.free(slot);
            }
        }
        chunk.pools = namespace.readable(chunk);
        chunk.reads = u8::try_from(reads).unwrap_or(u8::MAX);
        self.blocks_ready(id, &ready);
    }

    /// Counts a chunk that does not stay.
    pub(in crate::store) fn passes(&mut self, id: ChunkId, account: Account, bytes: u64) {
        self.index.get_mut(id).set_account(account);
        self.gathers.passing_bytes[account as usize].add(self.tenant_of(id), bytes);
    }

    /// Counts no longer so many bytes of a chunk that did not stay.
    pub(in crate::store) fn stops_passing(&mut self, id: ChunkId, bytes: u64) {
        let account = self.index.get(id).account();
        self.gathers.passing_bytes[account as usize].take(self.tenant_of(id), bytes);
    }

    pub(in crate::store) fn all_slices(&self, number: NamespaceId) -> Vec<u16> {
        (0..self.namespaces.get(number).slices).collect()
    }

    pub(in crate::store) fn whole_chunk_bytes(&self, number: NamespaceId) -> u64 {
        let namespace = self.namespaces.get(number);
        self.pools_bytes(number, namespace.slices.into(), namespace.rules.every())
    }
}

/// The account of chunks on their way from a source.
fn account_of(from: Source) -> Account {
    match from {
        Source::Disk => Account::Disk,
        Source::Sibling | Source::Peer => Account::Peers,
        Source::Object => Account::Objects,
    }
}
