//! The cached chunks of each tenant: their policy, their copies and their bytes.
//!
//! Each tenant has a policy of its own, because memory seldom moves between tenants: a chunk of another tenant would make no room.
//! In one policy, a tenant's search for a victim would pass over the chunks of all others.
//!
//! While there is one tenant, its policy knows chunks by their place in the index. With several, each policy numbers the chunks
//! itself, so that the vectors of all policies together are as long as those of one.

use std::num::NonZeroU32;

use super::copies::Copies;
use super::ids::{ChunkNumber, TenantId};
use super::policy::{Facts, Judge, Policy, PolicyName, Removal};

/// All tenants.
#[derive(Debug)]
pub(super) struct Tenants {
    tenants: Vec<Tenant>,
    /// The tenants that are served. Tenants that left keep their numbers, and there may be thousands of them.
    served: Vec<TenantId>,
    name: PolicyName,
    recompute_doubles_at: Option<NonZeroU32>,
    age_ms: u64,
    /// Each cached chunk's number in its tenant's policy, by place in the index. Empty while there is one tenant.
    numbers: Vec<Option<ChunkNumber>>,
}

/// One tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    policy: Box<dyn Policy>,
    /// Each chunk's place in the index, by its number in the policy. Empty while there is one tenant.
    places: Vec<ChunkNumber>,
    /// Numbers that name no chunk.
    spare: Vec<ChunkNumber>,
    pub(super) copies: Copies,
    /// Bytes of the slots of cached, readable blocks.
    pub(super) cached_bytes: u64,
}

impl Tenants {
    /// Tenants that may have so many bytes each; a tenant that may have none is not served.
    pub(super) fn new(bytes: &[u64], name: PolicyName, recompute_doubles_at: Option<NonZeroU32>) -> Self {
        let numbers = Vec::new();
        let mut all =
            Self { tenants: Vec::new(), served: Vec::new(), name, recompute_doubles_at, age_ms: 0, numbers };
        all.are(bytes.len().max(1));
        all.serve(bytes);
        all.forget_left();
        all
    }

    /// Makes room for new tenants: there are at least `count`.
    pub(super) fn are(&mut self, count: usize) {
        if self.tenants.len() == 1 && count > 1 {
            self.number_chunks();
        }
        while self.tenants.len() < count {
            let policy = self.build();
            let (places, spare, copies) = (Vec::new(), Vec::new(), Copies::default());
            self.served.push(TenantId(self.tenants.len() as u16));
            self.tenants.push(Tenant { policy, places, spare, copies, cached_bytes: 0 });
        }
    }

    /// Notes the bytes that each tenant may have; a tenant that may have none is not served.
    pub(super) fn serve(&mut self, bytes: &[u64]) {
        self.served = self.ids().filter(|tenant| bytes.get(usize::from(tenant.0)) != Some(&0)).collect();
    }

    /// The tenants that are served, each by its place among them.
    pub(super) fn served(&self, place: usize) -> Option<TenantId> {
        self.served.get(place).copied()
    }

    /// Gives back the memory of the policies of tenants that left and have no cached chunk any more.
    pub(super) fn forget_left(&mut self) {
        for tenant in self.ids().filter(|tenant| !self.served.contains(tenant)).collect::<Vec<_>>() {
            let known = self.of_mut(tenant);
            if known.cached_bytes == 0 && known.policy.order().is_empty() {
                known.policy = PolicyName::Lru.build(None);
                (known.places, known.spare) = (Vec::new(), Vec::new());
            }
        }
    }

    /// All tenants, those that left included.
    pub(super) fn ids(&self) -> impl Iterator<Item = TenantId> + use<> {
        (0..self.tenants.len() as u16).map(TenantId)
    }

    #[inline]
    pub(super) fn of(&self, tenant: TenantId) -> &Tenant {
        &self.tenants[usize::from(tenant.0)]
    }

    #[inline]
    pub(super) fn of_mut(&mut self, tenant: TenantId) -> &mut Tenant {
        &mut self.tenants[usize::from(tenant.0)]
    }

    /// Bytes of the slots of all cached, readable blocks.
    pub(super) fn cached_bytes(&self) -> u64 {
        self.tenants.iter().map(|tenant| tenant.cached_bytes).sum()
    }

    /// Sets the time on the clock by which chunks age.
    pub(super) fn is_now(&mut self, age_ms: u64) {
        self.age_ms = age_ms;
        self.served.iter().for_each(|tenant| self.tenants[usize::from(tenant.0)].policy.is_now(age_ms));
    }

    /// The policy in force.
    pub(super) fn policy_name(&self) -> PolicyName {
        self.name
    }

    /// Changes the policy of all tenants. The chunks must enter again, in the order that is returned for each tenant.
    pub(super) fn set_policy(
        &mut self,
        name: PolicyName,
        recompute_doubles_at: Option<NonZeroU32>,
    ) -> Vec<(TenantId, Vec<ChunkNumber>)> {
        (self.name, self.recompute_doubles_at) = (name, recompute_doubles_at);
        let orders: Vec<_> = self.ids().map(|tenant| (tenant, self.order(tenant))).collect();
        for place in 0..self.tenants.len() {
            self.tenants[place].policy = self.build();
        }
        self.numbers.clear();
        for tenant in &mut self.tenants {
            (tenant.places, tenant.spare) = (Vec::new(), Vec::new());
        }
        self.forget_left();
        orders
    }

    /// A tenant's cached chunks in the order of eviction, blocked chunks included.
    pub(super) fn order(&self, tenant: TenantId) -> Vec<ChunkNumber> {
        let Tenant { policy, places, .. } = self.of(tenant);
        let mut order = policy.order();
        if self.has_several() {
            order.iter_mut().for_each(|number| *number = places[number.position()]);
        }
        order
    }

    /// The next chunk to evict among the tenant's chunks that may be evicted and that `judge` accepts.
    #[inline]
    pub(super) fn victim(&mut self, tenant: TenantId, judge: Judge<'_>) -> Option<ChunkNumber> {
        let has_several = self.has_several();
        let Tenant { policy, places, .. } = self.of_mut(tenant);
        if !has_several {
            return policy.victim(judge);
        }
        let victim = policy.victim(&mut |number| judge(places[number.position()]))?;
        Some(places[victim.position()])
    }

    /// Adds a cached chunk of a tenant to the tenant's policy.
    #[inline]
    pub(super) fn insert(&mut self, tenant: TenantId, chunk: ChunkNumber, mut facts: Facts) {
        if !self.has_several() {
            return self.of_mut(tenant).policy.insert(chunk, facts);
        }
        facts.parent = facts.parent.and_then(|parent| *self.numbers.get(parent.position())?);
        if self.numbers.len() <= chunk.position() {
            self.numbers.resize(chunk.position() + 1, None);
        }
        let Tenant { policy, places, spare, .. } = &mut self.tenants[usize::from(tenant.0)];
        let number = spare.pop().unwrap_or_else(|| {
            places.push(chunk);
            ChunkNumber::at(places.len() - 1)
        });
        places[number.position()] = chunk;
        debug_assert!(self.numbers[chunk.position()].is_none(), "a chunk enters once");
        self.numbers[chunk.position()] = Some(number);
        policy.insert(number, facts);
    }

    /// Removes a cached chunk of a tenant.
    #[inline]
    pub(super) fn remove(&mut self, tenant: TenantId, chunk: ChunkNumber, why: Removal) {
        if !self.has_several() {
            return self.of_mut(tenant).policy.remove(chunk, why);
        }
        let number = self.numbers[chunk.position()].take().expect("a cached chunk has a number");
        let tenant = self.of_mut(tenant);
        tenant.policy.remove(number, why);
        tenant.spare.push(number);
    }

    /// The policy of a tenant, and the number of one of its cached chunks there.
    #[inline]
    pub(super) fn policy(&mut self, tenant: TenantId, chunk: ChunkNumber) -> (&mut dyn Policy, ChunkNumber) {
        let number = match self.has_several() {
            true => self.numbers[chunk.position()].expect("a cached chunk has a number"),
            false => chunk,
        };
        (self.of_mut(tenant).policy.as_mut(), number)
    }

    /// Whether there are, or were, several tenants.
    #[inline]
    pub(super) fn has_several(&self) -> bool {
        self.tenants.len() > 1
    }

    /// Numbers the chunks of the only tenant, because a second tenant comes: its policy keeps their places as their numbers.
    fn number_chunks(&mut self) {
        let Self { tenants, numbers, .. } = self;
        let Some(Tenant { policy, places, spare, .. }) = tenants.first_mut() else { return };
        let known = policy.order();
        let most = known.iter().map(|chunk| chunk.position() + 1).max().unwrap_or(0);
        numbers.resize(most, None);
        known.into_iter().for_each(|chunk| numbers[chunk.position()] = Some(chunk));
        places.extend((0..most).map(ChunkNumber::at));
        spare.extend((0..most).map(ChunkNumber::at).filter(|chunk| numbers[chunk.position()].is_none()));
    }

    fn build(&self) -> Box<dyn Policy> {
        let mut policy = self.name.build(self.recompute_doubles_at);
        policy.is_now(self.age_ms);
        policy
    }
}
