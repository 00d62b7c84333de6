//! Room: eviction, ahead of need and on need.
//!
//! Eviction runs when a commit passes the capacity or the high watermark, so that a reservation seldom has to evict. Room is
//! made before new chunks count as candidates, as published policies assume: otherwise `lfu` evicts a chunk right after its
//! commit. The index forgets evicted chunks in batches: one by one, the cache misses of an eviction take 300 ns.

use std::cmp::Reverse;
use std::collections::HashSet;

use smallvec::SmallVec;

use super::ids::{ChunkId, ChunkNumber, Slot, TenantId};
use super::index::{Chunk, OnDisk};
use super::policy::{Facts, PolicyName, Removal, Verdict};
use super::remembered::EvictionRule;
use super::slab::ClassId;
use super::{Store, StoreLimits};
use crate::Millis;
use crate::placement::{Saves, goes_before_read};

/// Why chunks were evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum EvictionReason {
    /// More was cached than the capacity or the high watermark allows.
    Watermark,
    /// A reservation found no free slot.
    Need,
    /// An extent was cleared for blocks of another size or tenant.
    Clearing,
}

impl EvictionReason {
    fn rule(self) -> EvictionRule {
        match self {
            Self::Watermark => EvictionRule::Watermark,
            Self::Need => EvictionRule::Need,
            Self::Clearing => EvictionRule::Clearing,
        }
    }
}

/// Chunks evicted so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evictions {
    /// Because of [`EvictionReason::Watermark`].
    pub watermark: u64,
    /// Because of [`EvictionReason::Need`].
    pub need: u64,
    /// Because of [`EvictionReason::Clearing`].
    pub clearing: u64,
    /// The sum of the times for which the evicted chunks had been cached, in milliseconds.
    pub resided_ms: u64,
}

impl Store {
    /// Sets the policy that chooses the chunk to go first; no cached chunk is lost.
    pub fn set_policy(&mut self, name: PolicyName) {
        self.limits.policy = name;
        for (_, order) in self.tenants.set_policy(name, self.limits.recompute_doubles_at) {
            for number in order {
                self.enter_policy(self.index.id(number));
            }
        }
    }

    /// Tells the policy of a chunk that is cached from now on.
    #[inline]
    pub(super) fn enter_policy(&mut self, id: ChunkId) {
        let tenant = self.owner_of(id);
        let chunk = self.index.get(id);
        self.tenants.insert(tenant, id.number(), facts(chunk));
        if !chunk.may_go() {
            let (policy, number) = self.tenants.policy(tenant, id.number());
            policy.block(number);
        }
    }

    /// Takes over the limits that can change while the store is in use: capacity, watermarks, the tenants' parts, cost, and the
    /// limits of sessions and pins. The other limits stay. Chunks beyond the new limits are evicted at once, chunks beyond a
    /// tenant's part step by step. Chunks that engines hold stay until the engines let go.
    pub fn change_limits(&mut self, new: &StoreLimits) {
        let before = self.limits.recompute_doubles_at;
        self.limits = StoreLimits {
            capacity_chunks: new.capacity_chunks,
            high_watermark_bytes: new.high_watermark_bytes,
            low_watermark_bytes: new.low_watermark_bytes,
            recompute_doubles_at: new.recompute_doubles_at,
            max_leased_blocks: new.max_leased_blocks,
            max_pinned_bytes: new.max_pinned_bytes,
            reservation_ttl_ms: new.reservation_ttl_ms,
            max_pin_ms: new.max_pin_ms,
            ..self.limits.clone()
        };
        for (bytes, &new) in self.limits.tenant_bytes.iter_mut().zip(&new.tenant_bytes) {
            // Tenants come and go only through `tenants_are`.
            if *bytes > 0 && new > 0 {
                *bytes = new;
            }
        }
        self.slab.bound_tenants(&self.limits.most_extents());
        if before != new.recompute_doubles_at {
            self.set_policy(self.policy());
        }
        self.shrink_tenants();
        self.evict_above_watermark();
    }

    /// Clears an extent of each tenant that has more than its part, if nobody holds the extent's chunks. Every tick clears one
    /// more extent, so that no call takes long.
    pub(super) fn shrink_tenants(&mut self) {
        for tenant in self.slab.tenants_beyond_their_parts() {
            self.clear_one_of(self.slab.clearable_of(tenant));
        }
    }

    /// Evicts until no more is cached than allowed, or no chunk may be evicted. It runs whenever a chunk was added or let go, so
    /// that a reservation seldom has to evict.
    pub(super) fn evict_above_watermark(&mut self) {
        // The chunks of tenants that left go step by step.
        let mut place = 0;
        while let Some(tenant) = self.tenants.served(place) {
            self.evict_for(tenant, 0);
            place += 1;
        }
        self.evict_above_capacity(0);
    }

    /// Evicts for chunks of a tenant that are about to be cached.
    pub(super) fn evict_ahead(&mut self, tenant: TenantId, new_chunks: u64, new_bytes: u64) {
        self.evict_for(tenant, new_bytes);
        self.evict_above_capacity(new_chunks);
    }

    fn evict_above_capacity(&mut self, new_chunks: u64) {
        if let Some(capacity) = self.limits.capacity_chunks {
            let most = capacity.saturating_sub(new_chunks);
            while self.cached_chunks > most && self.evict_of_the_largest() {}
        }
        self.index.settle();
    }

    /// Whether a tenant has more cached than the high watermark allows. Each tenant has the watermarks of the whole arena, scaled
    /// to the memory that the tenant can have beside the others.
    #[inline]
    fn is_above_watermark(&self, tenant: TenantId, new_bytes: u64) -> bool {
        let high = self.slab.reach(tenant, self.limits.high_watermark_bytes);
        self.tenants.of(tenant).cached_bytes + new_bytes > high
    }

    fn evict_for(&mut self, tenant: TenantId, new_bytes: u64) {
        if self.is_above_watermark(tenant, new_bytes) && self.tenants.has_several() {
            self.evict_of_absent(tenant, new_bytes);
        }
        if !self.is_above_watermark(tenant, new_bytes) {
            return;
        }
        let low = self.slab.reach(tenant, self.limits.low_watermark_bytes).saturating_sub(new_bytes);
        while self.tenants.of(tenant).cached_bytes > low && self.evict_next(tenant, EvictionReason::Watermark)
        {
        }
    }

    /// Evicts for a tenant chunks of other tenants that have more, from extents that no living engine has mapped: these extents can
    /// serve the tenant.
    fn evict_of_absent(&mut self, tenant: TenantId, new_bytes: u64) {
        let mut most = new_bytes + self.limits.extent_bytes;
        for other in self.tenants.ids().filter(|&other| other != tenant) {
            while most > 0
                && self.slab.may_yield(other)
                && self.tenants.of(other).cached_bytes > self.tenants.of(tenant).cached_bytes
                && self.is_above_watermark(tenant, new_bytes)
                && let Some(victim) = self.victim_left_by_all(other)
            {
                most = most.saturating_sub(self.readable_bytes(victim));
                self.evict(victim, EvictionReason::Watermark);
            }
        }
    }

    /// Evicts a chunk of the tenant that has the most bytes cached, among the tenants with a chunk that may go.
    fn evict_of_the_largest(&mut self) -> bool {
        if !self.tenants.has_several() {
            return self.evict_next(TenantId(0), EvictionReason::Watermark);
        }
        let mut tenants: SmallVec<[TenantId; 4]> = self.tenants.ids().collect();
        tenants.sort_unstable_by_key(|&tenant| Reverse(self.tenants.of(tenant).cached_bytes));
        tenants.into_iter().any(|tenant| self.evict_next(tenant, EvictionReason::Watermark))
    }

    /// Takes a free slot for a block of a chunk, or evicts chunks to free one.
    pub(super) fn take_slot(&mut self, class: ClassId, owner: ChunkId) -> Option<Slot> {
        if let Some(slot) = self.take_free_slot(class, owner) {
            return Some(slot);
        }
        let tenant = self.slab.tenant_of(class);
        while self.drop_departing(tenant) {
            if let Some(slot) = self.take_free_slot(class, owner) {
                return Some(slot);
            }
        }
        // First, evict the policy's next chunks that have a block of this class. If the policy would first evict many chunks of
        // other classes, clear one of their extents instead: otherwise they would stay for ever, however seldom they are used.
        if let Some(slot) = self.evict_of_class(class, owner, MOST_SKIPPED) {
            return Some(slot);
        }
        let sessions = &self.sessions;
        self.clear_one_of(self.slab.clearable(class, |extent| sessions.left_by_all(extent)));
        self.take_free_slot(class, owner).or_else(|| self.evict_of_class(class, owner, MOST_SEARCHED))
    }

    /// Evicts chunks with a block of this class until a slot is free. Passes over at most `most_skipped` chunks of other classes to
    /// find one.
    fn evict_of_class(&mut self, class: ClassId, owner: ChunkId, most_skipped: u32) -> Option<Slot> {
        while let Some(victim) = self.victim_of(class, most_skipped) {
            let idle = self.idle(victim.number());
            self.evict(victim, EvictionReason::Need);
            if self.evictions.need.is_multiple_of(NEEDS_A_SEARCH) {
                self.clear_idle(class, idle);
            }
            if let Some(slot) = self.take_free_slot(class, owner) {
                return Some(slot);
            }
        }
        None
    }

    /// Clears one of these extents, if one has no chunk that somebody holds: one that is nearly empty, or else the one whose chunks
    /// have been unused for the longest time.
    fn clear_one_of(&mut self, mut extents: Vec<u32>) {
        if self.now < self.clears_from {
            return;
        }
        extents.sort_by_cached_key(|&extent| {
            let (taken, slots) = self.slab.fill(extent);
            (taken > slots / NEARLY_EMPTY, Reverse(self.idle_extent(extent)), taken)
        });
        // Samples for the order are taken from all slots of an extent.
        let mut looked_at: u64 = extents.iter().map(|&extent| u64::from(self.slab.fill(extent).1) / 8).sum();
        let free = extents.iter().filter_map(|&extent| {
            let owners = self.slab.owners(extent).inspect(|_| looked_at += 1);
            let free = owners.map(|owner| (!is_in_use(self.index.at(owner))).then_some(owner));
            let free = free.collect::<Option<Vec<_>>>()?;
            looked_at += SUBTREE_COSTS * free.len() as u64;
            self.subtrees(&free)
        });
        let Some(doomed) = free.take(CLEARABLE_TRIES).min_by_key(Vec::len) else {
            self.clears_from = Millis(self.now.0 + looked_at / LOOKED_AT_IN_A_MS);
            return;
        };
        for id in doomed {
            self.evict(id, EvictionReason::Clearing);
        }
    }

    /// Clears an extent of another class that has been unused for far longer than this class's next victim. Some policies evict new
    /// chunks first, so that chunks of other classes would never be their victims.
    fn clear_idle(&mut self, class: ClassId, victims: u32) {
        let sessions = &self.sessions;
        let mut extents = self.slab.clearable(class, |extent| sessions.left_by_all(extent));
        let least = victims.saturating_mul(IDLE_FACTOR).max(LEAST_IDLE);
        extents.retain(|&extent| self.idle_extent(extent) > least);
        self.clear_one_of(extents);
    }

    /// The time since the last use of an extent's chunks, estimated by some of them, as the index dates uses.
    fn idle_extent(&self, extent: u32) -> u32 {
        let step = (self.slab.fill(extent).0 as usize / SAMPLED_OWNERS).max(1);
        self.slab.owners(extent).step_by(step).map(|owner| self.idle(owner)).min().unwrap_or(u32::MAX)
    }

    fn idle(&self, chunk: ChunkNumber) -> u32 {
        self.used_now().wrapping_sub(self.index.at(chunk).used)
    }

    /// Applies a change to a chunk's claims or pins and tells the policy if the chunk may be evicted now, or may no longer be
    /// evicted.
    pub(super) fn change(&mut self, id: ChunkId, change: impl FnOnce(&mut Chunk)) {
        let chunk = self.index.get_mut(id);
        let could_go = chunk.may_go();
        change(chunk);
        if !chunk.is_cached() {
            return;
        }
        match (could_go, chunk.may_go()) {
            (true, false) => self.block(id),
            (false, true) => self.unblock(id),
            _ => {}
        }
    }

    /// Takes a chunk that nobody claims out of memory, and frees its slots. Unless it is on disk, it also leaves the index. Its
    /// parent may be evicted if this was the last child in memory.
    pub(super) fn forget(&mut self, id: ChunkId) {
        self.take_out(id);
        self.index.settle();
    }

    pub(super) fn take_out(&mut self, id: ChunkId) {
        if self.index.get(id).disk == OnDisk::Here {
            return self.leave_to_disk(id);
        }
        self.tell_forgotten(id);
        self.vacate(id);
        let chunk = self.index.remove(id);
        self.namespaces.get_mut(chunk.namespace).chunks -= 1;
        for slot in chunk.slots() {
            self.slab.free(slot);
        }
    }

    /// Notes that a chunk is in memory, or about to be: its parent may not be evicted before it.
    pub(super) fn occupy(&mut self, id: ChunkId) {
        let parent = self.index.parent(id);
        let parent_was_free = parent.is_some_and(|parent| self.index.get(parent).may_go());
        self.index.occupy(id);
        if let Some(parent) = parent
            && parent_was_free
            && self.index.get(parent).is_cached()
            && !self.index.get(parent).may_go()
        {
            self.block(parent);
        }
    }

    /// Notes that a chunk is no longer in memory, or about to leave it. Its parent may be evicted if this was the last child in
    /// memory.
    pub(super) fn vacate(&mut self, id: ChunkId) {
        if !self.index.get(id).is_resident() {
            return;
        }
        self.index.vacate(id);
        if let Some(parent) = self.index.parent(id) {
            let parent_chunk = self.index.get(parent);
            if parent_chunk.is_cached() && parent_chunk.may_go() {
                self.unblock(parent);
            }
        }
    }

    #[inline]
    fn block(&mut self, id: ChunkId) {
        let (policy, number) = self.policy_of(id);
        policy.block(number);
    }

    #[inline]
    pub(super) fn unblock(&mut self, id: ChunkId) {
        let (policy, number) = self.policy_of(id);
        policy.unblock(number);
    }

    fn evict_next(&mut self, tenant: TenantId, reason: EvictionReason) -> bool {
        if let Some(copy) = self.next_copy(tenant) {
            self.evict(copy, reason);
            return true;
        }
        let victim = self.next_victim(tenant);
        victim.map(|victim| self.evict(self.index.id(victim), reason)).is_some()
    }

    /// A tenant's next victim that lies only in extents that no living engine has mapped.
    fn victim_left_by_all(&mut self, tenant: TenantId) -> Option<ChunkId> {
        let (index, sessions) = (&self.index, &self.sessions);
        let mut looked_at = 0;
        let victim = self.tenants.victim(tenant, &mut |number| {
            if index.at(number).slots().all(|slot| sessions.left_by_all(slot.extent)) {
                return Verdict::Take;
            }
            looked_at += 1;
            if looked_at < MOST_LOOKED_AT { Verdict::Skip } else { Verdict::Stop }
        });
        victim.map(|number| index.id(number))
    }

    /// The next victim of the tenant's policy. If another node has read it, a later victim that no other node has read may be
    /// evicted before it.
    fn next_victim(&mut self, tenant: TenantId) -> Option<ChunkNumber> {
        let (index, now) = (&self.index, self.used_now());
        let mut first_read = None;
        let mut looked_at = 0;
        let victim = self.tenants.victim(tenant, &mut |number| {
            let chunk = index.at(number);
            let idle = now.wrapping_sub(chunk.used);
            if !chunk.was_read_elsewhere() && first_read.is_none_or(|(_, read)| goes_before_read(idle, read))
            {
                return Verdict::Take;
            }
            first_read.get_or_insert((number, idle));
            looked_at += 1;
            if looked_at < MOST_LOOKED_AT { Verdict::Skip } else { Verdict::Stop }
        });
        victim.or(first_read.map(|(number, _)| number))
    }

    fn evict(&mut self, id: ChunkId, reason: EvictionReason) {
        let chunk = self.index.get(id);
        debug_assert!(chunk.may_go() && chunk.is_cached(), "only what may go is evicted");
        self.uncount(id);
        match reason {
            EvictionReason::Watermark => self.evictions.watermark += 1,
            EvictionReason::Need => self.evictions.need += 1,
            EvictionReason::Clearing => self.evictions.clearing += 1,
        }
        self.evictions.resided_ms += u64::from(self.tenths - self.index.since_tenths(id)) * 100;
        let idle_ms = self.note_pressure(id);
        self.note_evicted_after(idle_ms);
        if self.index.get(id).disk != OnDisk::Here {
            self.remember(id, reason.rule());
        }
        let why = if reason == EvictionReason::Clearing { Removal::Dropped } else { Removal::Evicted };
        self.tenants.remove(self.owner_of(id), id.number(), why);
        if reason == EvictionReason::Watermark && (self.demote(id) || self.forward(id, idle_ms)) {
            return;
        }
        self.journal.evicting = Some(reason);
        self.take_out(id);
        self.journal.evicting = None;
        if reason != EvictionReason::Watermark {
            self.index.settle();
        }
    }

    /// Notes the eviction of a chunk: remembers the worth of its place, and returns for how long nobody had used the chunk.
    fn note_pressure(&mut self, id: ChunkId) -> u64 {
        let chunk = self.index.get(id);
        let idle_ms = self.age_ms().saturating_sub(self.used_ms(chunk.used));
        if !chunk.is_copy() {
            let saves = if chunk.disk == OnDisk::Nowhere { Saves::Prefill } else { Saves::Transfer };
            self.pressure.evicted(self.stake(chunk.namespace), saves, idle_ms, self.age_ms());
        }
        idle_ms
    }

    /// Notes that a chunk is no longer cached.
    pub(super) fn uncount(&mut self, id: ChunkId) {
        self.cached_chunks -= 1;
        let bytes = self.readable_bytes(id);
        self.tenants.of_mut(self.owner_of(id)).cached_bytes -= bytes;
    }

    /// Bytes of the slots of a chunk's readable blocks.
    pub(super) fn readable_bytes(&self, id: ChunkId) -> u64 {
        self.index.get(id).readable_slots().map(|slot| self.slab.slot_bytes_of(slot)).sum()
    }

    fn take_free_slot(&mut self, class: ClassId, owner: ChunkId) -> Option<Slot> {
        let sessions = &self.sessions;
        self.slab.take(class, owner.number(), |extent| sessions.left_by_all(extent))
    }

    /// The next chunk to evict among the chunks with a block of this class.
    fn victim_of(&mut self, class: ClassId, most_skipped: u32) -> Option<ChunkId> {
        let mut skipped = 0;
        let (index, namespaces) = (&self.index, &self.namespaces);
        let victim = self.tenants.victim(self.slab.tenant_of(class), &mut |number| {
            let pools = &namespaces.get(index.at(number).namespace).pools;
            if pools.iter().any(|pool| pool.class == class) {
                return Verdict::Take;
            }
            skipped += 1;
            if skipped < most_skipped { Verdict::Skip } else { Verdict::Stop }
        });
        victim.map(|number| index.id(number))
    }

    /// These chunks and all their descendants that are in memory, leaves first; `None` if one of them may not be evicted.
    fn subtrees(&self, chunks: &[ChunkNumber]) -> Option<Vec<ChunkId>> {
        let mut seen = HashSet::new();
        let mut all = Vec::new();
        for &chunk in chunks {
            let found = self.index.subtree(chunk, &mut seen).into_iter().rev();
            all.extend(found.filter(|&id| self.index.get(id).is_resident()));
        }
        if all.iter().any(|&id| is_in_use(self.index.get(id))) { None } else { Some(all) }
    }
}

/// The most victims, in the policy's order, that a search looks at to find a chunk that no other node has read.
const MOST_LOOKED_AT: u32 = 32;

/// The number of chunks of other classes that the search for a victim passes over before an extent is cleared instead: fewer than
/// `adaptive` knows in order.
const MOST_SKIPPED: u32 = 24;

/// The same, if no extent can be cleared: the actor serves nobody during a search.
const MOST_SEARCHED: u32 = 4_096;

/// Evictions on need for each search for an extent that nobody uses.
const NEEDS_A_SEARCH: u64 = 16;

/// An extent is idle if it has been unused for this many times as long as the next victim, and for ten minutes.
const IDLE_FACTOR: u32 = 16;
const LEAST_IDLE: u32 = (600_000 / super::USE_MS) as u32;

/// The most extents that are compared before one is cleared.
const CLEARABLE_TRIES: usize = 4;

/// The chunks that searches which clear nothing look at in a millisecond on average: about a quarter of the actor's time.
const LOOKED_AT_IN_A_MS: u64 = 50_000;

/// A search through the descendants of a chunk takes as long as a look at so many chunks.
const SUBTREE_COSTS: u64 = 16;

/// The number of chunks by which an extent's last use is estimated.
const SAMPLED_OWNERS: usize = 8;

/// An extent is nearly empty while one part in this many of its slots is in use.
const NEARLY_EMPTY: u32 = 8;

fn is_in_use(chunk: &Chunk) -> bool {
    chunk.claims > 0 || chunk.pins > 0
}

pub(super) fn facts(chunk: &Chunk) -> Facts {
    Facts {
        short_hash: chunk.hash.short(),
        index: chunk.index,
        priority: chunk.priority,
        parent: chunk.parent_number(),
    }
}
