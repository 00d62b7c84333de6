//! Forwards: a chunk whose only copy is evicted here moves to a node whose next victim is worth less.
//!
//! An evicted chunk that is worth its transfer leaves the cache at once. It keeps its slots for a moment ([`Standing::Leaving`])
//! while it is offered to the other node. That node fetches it like any other chunk, and reports it as [moved](Store::give_up)
//! afterwards. No commit and no lease waits for this. The slots are bounded; a request of the same tenant that needs a slot takes
//! them back ([`Store::drop_departing`]). If a node takes some chunks of an offer and not the others, it may lack room for so many
//! at a time: the others are offered again, to this node when the taken ones have come. If the whole offer is refused or lost, its
//! chunks are gone, and their next lookup is a miss. A chunk that is pinned or written again before it is offered stays, and is not
//! offered.
//!
//! A chunk is forwarded once: until it is used at its new node, it is not forwarded again. It keeps its age: the offer's worth
//! tells for how long nobody had used it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use larder_protocol::table::NodeNumber;
use larder_protocol::{ChunkRef, Fingerprint};

use super::Store;
use super::gather::{FetchId, Source, Wanted};
use super::hand_out::Named;
use super::ids::{ChunkId, NamespaceId, TenantId};
use super::index::{Account, Chunk, OnDisk, Standing, Stored};
use super::room::EvictionReason;
use super::shares::Shares;
use crate::Millis;
use crate::placement::{Neighbours, PlacementRule, Saves, Stake, Worth, may_be_forwarded, pays_to_forward};

/// Chunks that are about to move to other nodes.
#[derive(Debug, Default)]
pub(super) struct Departing {
    neighbours: Neighbours,
    /// Claimed chunks, the oldest first.
    line: BTreeMap<u64, Leaving>,
    places: HashMap<ChunkId, u64>,
    /// The places of each offer's chunks that are still here.
    open: HashMap<u64, BTreeSet<u64>>,
    /// The places of chunks that may be offered now.
    unoffered: BTreeSet<u64>,
    /// The places of chunks that may be offered when an offer is over, by that offer.
    held_back: HashMap<u64, BTreeSet<u64>>,
    /// The last offer of which a node took only a part: it may have no more room before it has the chunks of this part.
    partly_taken: BTreeMap<NodeNumber, u64>,
    bytes: Shares,
    counts: Forwards,
}

#[derive(Debug, Clone, Copy)]
struct Leaving {
    named: Named,
    to: NodeNumber,
    worth: Worth,
    tenant: TenantId,
    bytes: u64,
    /// The number of the offer that includes the chunk, and the chunk's position there.
    offer: Option<(u64, usize)>,
    /// An offer that must be over before the chunk is offered again.
    after: Option<u64>,
    until: Millis,
}

/// The counts of forwards so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forwards {
    /// Chunks that were offered.
    pub offered: u64,
    /// Chunks that other nodes have taken.
    pub taken: u64,
    /// Bytes of the taken chunks.
    pub taken_bytes: u64,
    /// Chunks that other nodes evicted and that this store took in.
    pub taken_in: u64,
}

/// Chunks that are offered to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offered {
    /// The offer's number.
    pub number: u64,
    /// The node.
    pub to: NodeNumber,
    /// The chunks' namespace.
    pub fingerprint: Fingerprint,
    /// The least worth among these chunks, in this store.
    pub worth: Worth,
    /// The chunks.
    pub chunks: Vec<ChunkRef>,
}

impl Departing {
    fn add(&mut self, place: u64, leaving: Leaving) {
        self.bytes.add(leaving.tenant, leaving.bytes);
        self.places.insert(leaving.named.id, place);
        self.put(place, leaving);
    }

    fn put(&mut self, place: u64, leaving: Leaving) {
        match leaving.after.filter(|offer| self.open.contains_key(offer)) {
            _ if leaving.offer.is_some() => {}
            Some(offer) => _ = self.held_back.entry(offer).or_default().insert(place),
            None => _ = self.unoffered.insert(place),
        }
        self.line.insert(place, leaving);
    }

    fn remove(&mut self, id: ChunkId) -> Option<Leaving> {
        let place = self.places.remove(&id)?;
        let leaving = self.line.remove(&place)?;
        self.unoffered.remove(&place);
        if let Some(held_back) = leaving.after.and_then(|offer| self.held_back.get_mut(&offer)) {
            held_back.remove(&place);
        }
        self.bytes.take(leaving.tenant, leaving.bytes);
        leaving.offer.into_iter().for_each(|(offer, _)| self.leaves(offer, place));
        Some(leaving)
    }

    /// Notes that a chunk no longer belongs to an offer.
    fn leaves(&mut self, offer: u64, place: u64) {
        if let Some(places) = self.open.get_mut(&offer) {
            places.remove(&place);
            if places.is_empty() {
                self.open.remove(&offer);
                self.unoffered.extend(self.held_back.remove(&offer).into_iter().flatten());
                self.partly_taken.retain(|_, last| *last != offer);
            }
        }
    }

    /// The chunks that may be offered now, the oldest first.
    fn offerable(&self) -> impl Iterator<Item = (u64, &Leaving)> {
        self.unoffered.iter().filter_map(|&place| Some((place, self.line.get(&place)?)))
    }
}

impl Store {
    /// The worth of the other nodes' next victims.
    pub fn neighbours(&mut self) -> &mut Neighbours {
        &mut self.departing.neighbours
    }

    /// The worth of the next victim, as other nodes are told: 0 while all tenants have free room.
    pub fn least_worth(&self) -> Worth {
        self.least().unwrap_or(Worth::NOTHING)
    }

    /// How long an unused chunk stays.
    pub fn keeps_ms(&self) -> u64 {
        self.pressure.keeps_ms(self.age_ms()).unwrap_or(u64::MAX)
    }

    /// The worth of the next victim here; `None` if all tenants have free room, or nothing was evicted yet.
    pub fn least(&self) -> Option<Worth> {
        let mut with_chunks = self.tenants.ids().filter(|&tenant| self.tenants.of(tenant).cached_bytes > 0);
        let has_room = with_chunks.all(|tenant| self.has_free_room(tenant));
        if has_room { None } else { self.pressure.least(self.age_ms()) }
    }

    /// As [`Store::least`], for the tenant of a namespace.
    pub fn least_for(&self, fingerprint: &Fingerprint) -> Option<Worth> {
        let has_room = self.tenant_of_namespace(fingerprint).is_some_and(|tenant| self.has_free_room(tenant));
        if has_room { None } else { self.pressure.least(self.age_ms()) }
    }

    /// The worth of a copy of a chunk of a namespace that is read once in `every_ms`; `None` for a namespace that nobody
    /// registered.
    pub fn worth_of_copy(&self, fingerprint: &Fingerprint, every_ms: u64) -> Option<Worth> {
        let number = self.namespaces.of(fingerprint)?;
        Some(self.stake(number).worth(Saves::Transfer, every_ms))
    }

    /// The rule by which chunks are placed.
    pub fn placement(&self) -> PlacementRule {
        self.limits.peers.as_ref().map(|peers| peers.placement).unwrap_or_default()
    }

    /// Whether more chunks of a tenant fit without an eviction.
    fn has_free_room(&self, tenant: TenantId) -> bool {
        let is_below = |used: u64, most: u64| used < most - most / FREE_SHARE;
        let high = self.slab.reach(tenant, self.limits.high_watermark_bytes);
        self.limits.capacity_chunks.is_none_or(|most| is_below(self.cached_chunks, most))
            && is_below(self.tenants.of(tenant).cached_bytes, high)
    }

    /// Tokens and bytes of a chunk of a namespace.
    pub(super) fn stake(&self, number: NamespaceId) -> Stake {
        let tokens = self.namespaces.get(number).chunk_tokens;
        Stake { tokens, bytes: self.whole_chunk_bytes(number) }
    }

    /// Forwards a chunk that is evicted, if that pays and staging has room for the chunk until it is gone. Returns whether the
    /// chunk is forwarded. The chunk is no longer counted as cached, and the policy does not know it any more.
    pub(super) fn forward(&mut self, id: ChunkId, idle_ms: u64) -> bool {
        let Some(staging) = self.staging_bytes() else { return false };
        // Chunks that leave make way for their own tenant only.
        let most = if self.tenants.has_several() { staging / FORWARDING_SHARE } else { staging };
        let now = Duration::from_millis(self.now.0);
        let chunk = self.index.get(id);
        if !is_only_copy(chunk) || chunk.was_forwarded() || !may_be_forwarded(chunk.reads.into()) {
            return false;
        }
        let Some((to, there)) =
            self.departing.neighbours.cheapest(self.namespaces.get(chunk.namespace).fingerprint, now)
        else {
            return false;
        };
        // A learning policy also evicts young chunks without worth. So a chunk counts for no more than recent victims did.
        let least = self.pressure.least(self.age_ms()).unwrap_or_default();
        let worth = self.stake(chunk.namespace).worth(Saves::Prefill, idle_ms).min(least);
        let (bytes, tenant) = (self.readable_bytes(id), self.tenant_of(id));
        if !pays_to_forward(worth, there)
            || !self.departing.bytes.may_add(tenant, bytes, most, &self.limits.tenant_bytes)
        {
            return false;
        }
        self.index.get_mut(id).standing = Standing::Leaving;
        self.passes(id, Account::Leaving, bytes);
        self.vacate(id);
        self.change(id, |chunk| chunk.claims += 1);
        let (named, until) = (self.name_now(id), self.now + LEAVES_WITHIN_MS);
        let (offer, after) = (None, self.departing.partly_taken.get(&to).copied());
        let place = self.next_number();
        self.departing.add(place, Leaving { named, to, worth, tenant, bytes, offer, after, until });
        true
    }

    /// The next chunks to offer to a node; [`Store::offer_ended`] must follow.
    pub fn next_offer(&mut self) -> Option<Offered> {
        let waiting = self.departing.offerable().map(|(_, leaving)| leaving.named.id);
        let stays: Vec<ChunkId> = waiting.filter(|&id| !self.still_leaves(id)).collect();
        stays.into_iter().for_each(|id| _ = self.departed(id));
        let first = *self.departing.offerable().next()?.1;
        let (to, namespace) = (first.to, first.named.namespace);
        let is_alike =
            |(_, leaving): &(u64, &Leaving)| leaving.to == to && leaving.named.namespace == namespace;
        let alike = self.departing.offerable().filter(is_alike).take(MOST_OFFERED);
        let alike: BTreeSet<u64> = alike.map(|(place, _)| place).collect();
        let number = self.next_number();
        let mut worth = first.worth;
        let mut chunks = Vec::with_capacity(alike.len());
        for &place in &alike {
            let Some(leaving) = self.departing.line.get_mut(&place) else { continue };
            leaving.offer = Some((number, chunks.len()));
            self.departing.unoffered.remove(&place);
            worth = worth.min(leaving.worth);
            chunks.push(self.index.name(leaving.named.id));
        }
        self.departing.open.insert(number, alike);
        self.departing.counts.offered += chunks.len() as u64;
        let fingerprint = self.namespaces.get(namespace).fingerprint;
        Some(Offered { number, to, fingerprint, worth, chunks })
    }

    /// Takes a node's answer to an offer: for each chunk, in order, whether the node wants it; `wanted` is empty if the node did
    /// not answer. Wanted chunks keep their slots until the node has them.
    pub fn offer_ended(&mut self, number: u64, wanted: &[bool]) {
        let places = self.departing.open.get(&number).into_iter().flatten();
        let offered = places.filter_map(|&place| Some((place, *self.departing.line.get(&place)?)));
        let offered: Vec<(u64, Leaving)> = offered.collect();
        let takes_some = wanted.contains(&true);
        if let Some(&(_, Leaving { to, named, .. })) = offered.first() {
            let namespace = self.namespaces.get(named.namespace).fingerprint;
            let (now, neighbours) = (Duration::from_millis(self.now.0), &mut self.departing.neighbours);
            match offered.iter().map(|(_, leaving)| leaving.worth).min() {
                _ if takes_some => neighbours.accepted(to, namespace),
                Some(worth) if !wanted.is_empty() => neighbours.refused(to, namespace, worth, now),
                _ => neighbours.forget(to),
            }
        }
        if let Some((_, leaving)) = offered.first()
            && takes_some
            && wanted.contains(&false)
        {
            self.departing.partly_taken.insert(leaving.to, number);
        }
        for (place, leaving) in offered {
            let is_wanted = leaving.offer.and_then(|(_, at)| wanted.get(at)).copied().unwrap_or(false);
            if takes_some && !is_wanted {
                self.offer_again(place, leaving);
            } else if !is_wanted {
                self.departed(leaving.named.id);
            }
        }
        self.evict_above_watermark();
    }

    /// Offers a chunk again to the node whose room is worth least by now. Ends the forward if that does not pay any more, or if the
    /// chunk does not leave any more.
    fn offer_again(&mut self, place: u64, leaving: Leaving) {
        let now = Duration::from_millis(self.now.0);
        let namespace = self.namespaces.get(leaving.named.namespace).fingerprint;
        let cheapest = self.departing.neighbours.cheapest(namespace, now);
        let Some((to, _)) = cheapest.filter(|&(_, there)| {
            self.still_leaves(leaving.named.id) && pays_to_forward(leaving.worth, there)
        }) else {
            self.departed(leaving.named.id);
            return;
        };
        let after = self.departing.partly_taken.get(&to).copied();
        self.departing.put(place, Leaving { to, offer: None, after, ..leaving });
        leaving.offer.into_iter().for_each(|(offer, _)| self.departing.leaves(offer, place));
    }

    /// Whether a chunk that is about to move still leaves this store: since its eviction nobody wrote, pinned or purged it.
    fn still_leaves(&self, id: ChunkId) -> bool {
        self.index.known(id).is_some_and(|chunk| chunk.standing == Standing::Leaving)
    }

    /// Notes that another node now has a chunk that this store was forwarding; returns whether it was forwarding the chunk.
    pub(super) fn was_taken(&mut self, id: ChunkId) -> bool {
        let bytes = self.departed(id);
        self.departing.counts.taken += u64::from(bytes.is_some());
        self.departing.counts.taken_bytes += bytes.unwrap_or(0);
        bytes.is_some()
    }

    /// Ends the forwards of chunks that no node took in time.
    pub(super) fn expire_forwards(&mut self) {
        while let Some((_, leaving)) = self.departing.line.first_key_value()
            && leaving.until <= self.now
        {
            self.departed(leaving.named.id);
        }
    }

    /// Drops a tenant's oldest chunk that is about to move and that nobody else uses, to make room for the tenant; returns whether
    /// there was such a chunk.
    pub(super) fn drop_departing(&mut self, tenant: TenantId) -> bool {
        let is_free = |leaving: &&Leaving| {
            leaving.tenant == tenant
                && self
                    .index
                    .known(leaving.named.id)
                    .is_some_and(|chunk| chunk.claims == 1 && chunk.pins == 0)
        };
        let Some(id) = self.departing.line.values().find(is_free).map(|leaving| leaving.named.id) else {
            return false;
        };
        self.departed(id).is_some()
    }

    /// Begins to take a chunk that another node offers and evicts, if it is worth its place here. [`Store::fetched`] must answer
    /// the fetch.
    pub fn take_in(&mut self, fingerprint: &Fingerprint, name: ChunkRef, worth: Worth) -> Option<Wanted> {
        let most = self.staging_bytes()? / FORWARDING_SHARE;
        let number = self.namespaces.of(fingerprint)?;
        if self.index.find(number, &name.hash).is_some() {
            return None;
        }
        if !pays_to_forward(worth, self.least_for(fingerprint).unwrap_or_default()) {
            return None;
        }
        let (tenant, bytes) = (self.namespaces.get(number).tenant, self.whole_chunk_bytes(number));
        if !self.gathers.may_take_in(tenant, bytes, most, &self.limits.tenant_bytes) {
            return None;
        }
        let id = self.start_fetch(number, name, Source::Peer)?;
        self.gathers.take_in(id, self.stake(number).every_ms(Saves::Prefill, worth));
        Some(self.wanted(number, id, 0, Source::Peer))
    }

    /// Whether a fetch is of a chunk that another node forwards.
    pub fn is_taken_in(&self, fetch: FetchId) -> bool {
        self.gathers.is_taken_in(fetch.chunk())
    }

    /// Notes that a forwarded chunk has come that nobody had used for `idle_ms`. It keeps this age: as a new chunk it would outlive
    /// the chunks before it in its prompt, and be of no use without them.
    pub(super) fn was_taken_in(&mut self, id: ChunkId, idle_ms: u64) {
        let used = self.used_at(self.age_ms().saturating_sub(idle_ms));
        let chunk = self.index.get_mut(id);
        chunk.set_forwarded(true);
        if chunk.is_cached() {
            chunk.used = used;
            let (policy, number) = self.policy_of(id);
            policy.was_idle(number, idle_ms);
        }
        self.departing.counts.taken_in += 1;
    }

    /// The forwards so far.
    pub fn forwards(&self) -> Forwards {
        self.departing.counts
    }

    /// The number of chunks that are about to move.
    pub fn departing_chunks(&self) -> usize {
        self.departing.line.len()
    }

    /// Ends the claim on a chunk that was about to move, and returns its bytes; `None` if it was not about to move.
    fn departed(&mut self, id: ChunkId) -> Option<u64> {
        let leaving = self.departing.remove(id)?;
        self.journal.evicting = Some(EvictionReason::Watermark);
        self.unclaim(&[id]);
        self.journal.evicting = None;
        Some(leaving.bytes)
    }

    /// Bytes of staging; `None` if this store forwards nothing.
    fn staging_bytes(&self) -> Option<u64> {
        let peers = self.limits.peers.as_ref().filter(|peers| peers.placement == PlacementRule::Worth)?;
        Some(peers.passing_bytes)
    }
}

/// Whether a complete chunk is nowhere else, as far as this store knows.
fn is_only_copy(chunk: &Chunk) -> bool {
    chunk.is_complete() && !chunk.is_copy() && chunk.disk == OnDisk::Nowhere && chunk.stored != Stored::There
}

/// Chunks that come may take one part in this many of staging. Chunks that leave may take as many bytes of memory as staging has,
/// if there is one tenant: they make way for other chunks of their tenant. With several tenants they may take such a part.
const FORWARDING_SHARE: u64 = 4;

/// The store has free room while one part in this many of its capacity is unused.
const FREE_SHARE: u64 = 20;

/// How long an evicted chunk keeps its slots for a node that wants it.
const LEAVES_WITHIN_MS: u64 = 1_000;

/// The most chunks in one offer.
const MOST_OFFERED: usize = 256;
