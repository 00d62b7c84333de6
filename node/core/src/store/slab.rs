//! Slots: maps each piece of the arena to its block.
//!
//! The arena is a number of extents of one size. An extent serves one tenant and one slot size at a time; when its last slot is
//! freed, it may serve another tenant and size. It changes tenant only with new memory (see [`Slab::take_renewals`]), and only
//! when the caller says that every process that held the old memory is gone. So an idle engine keeps its tenant's extents for as
//! long as it lives. Half of the arena is kept for all tenants in equal parts, so that no tenant can leave the others with
//! nothing.
//!
//! **Invariant:** free + used + quarantined = total, in bytes, always. The rest at the end of an extent whose size is no multiple
//! of the slot size counts as free.

use std::collections::{BTreeMap, HashMap};

use super::ids::{ChunkNumber, Slot, TenantId};

/// Slots start at multiples of this, so that a block can be read from and written to a device directly.
pub(crate) const SLOT_ALIGNMENT: u64 = 4_096;

/// The extents of one actor's arena.
#[derive(Debug)]
pub(crate) struct Slab {
    extent_bytes: u64,
    extents: Vec<Extent>,
    classes: Vec<Class>,
    class_numbers: HashMap<(TenantId, u64), ClassId>,
    tenants: Vec<TenantExtents>,
    /// Tenants that may have extents.
    served: usize,
    /// Extents that the tenants hold or that are kept for them.
    spoken_for: u32,
    renewals: Vec<u32>,
    used_bytes: u64,
    quarantined_bytes: u64,
    free_bytes: u64,
}

/// One tenant's slots of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClassId(u32);

#[derive(Debug)]
struct Class {
    tenant: TenantId,
    slot_bytes: u64,
    slots_per_extent: u32,
    /// Its extents that have a free slot.
    open: Vec<u32>,
}

#[derive(Debug, Default)]
struct Extent {
    state: ExtentUse,
    /// The tenant of the bytes that its memory holds, or held last.
    last_tenant: Option<TenantId>,
}

#[derive(Debug, Default)]
enum ExtentUse {
    #[default]
    Unassigned,
    /// Waits for new memory, for this class.
    Renewing(ClassId),
    /// Holds nothing; processes that an earlier slab showed it to may still touch it.
    Secluded,
    Assigned(Assigned),
}

#[derive(Debug)]
struct Assigned {
    class: ClassId,
    /// Slots below this number were in use at least once.
    touched: u32,
    /// Free slots below `touched`.
    free: Vec<u32>,
    /// Slots in use, quarantined ones included.
    taken: u32,
    quarantined: u32,
    /// The chunk of each touched slot that is in use.
    owners: Vec<Option<ChunkNumber>>,
    /// Its position in its class's `open`.
    open_position: Option<usize>,
}

#[derive(Debug, Clone, Copy, Default)]
struct TenantExtents {
    held: u32,
    most: u32,
    /// Bytes at the ends of its extents, where no slot fits.
    rests: u64,
}

/// How the arena's bytes are spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bytes {
    /// All bytes.
    pub total: u64,
    /// Bytes in slots that may be used at once, or in no slot at all.
    pub free: u64,
    /// Bytes in slots that hold a block or are reserved for a block.
    pub used: u64,
    /// Bytes that are kept from reuse because a vanished process or a device may still touch them.
    pub quarantined: u64,
}

impl Slab {
    /// A slab of `extents` extents. `most_extents` bounds the extents of each tenant.
    pub(crate) fn new(extents: u32, extent_bytes: u64, most_extents: &[u32]) -> Self {
        let mut slab = Self {
            extent_bytes,
            extents: (0..extents).map(|_| Extent::default()).collect(),
            classes: Vec::new(),
            class_numbers: HashMap::new(),
            tenants: Vec::new(),
            served: 0,
            spoken_for: 0,
            renewals: Vec::new(),
            used_bytes: 0,
            quarantined_bytes: 0,
            free_bytes: u64::from(extents) * extent_bytes,
        };
        slab.bound_tenants(most_extents);
        slab
    }

    /// The class of a tenant's blocks of this size; `None` if such a block is larger than an extent.
    pub(crate) fn class(&mut self, tenant: TenantId, block_bytes: u64) -> Option<ClassId> {
        let slot_bytes = block_bytes.max(1).next_multiple_of(SLOT_ALIGNMENT);
        let slots_per_extent = u32::try_from(self.extent_bytes / slot_bytes).unwrap_or(u32::MAX);
        if slots_per_extent == 0 {
            return None;
        }
        let classes = &mut self.classes;
        Some(*self.class_numbers.entry((tenant, slot_bytes)).or_insert_with(|| {
            classes.push(Class { tenant, slot_bytes, slots_per_extent, open: Vec::new() });
            ClassId(classes.len() as u32 - 1)
        }))
    }

    /// Bytes that a slot of this class takes.
    pub(crate) fn slot_bytes(&self, class: ClassId) -> u64 {
        self.classes[class.0 as usize].slot_bytes
    }

    /// The offset of a slot in its extent, in bytes.
    pub(crate) fn offset(&self, slot: Slot) -> u64 {
        self.slot_bytes(self.assigned(slot.extent).class) * u64::from(slot.number)
    }

    /// Takes a free slot for `owner`; `None` if the class has no free slot and may take no further extent. `left_by_all` says
    /// whether every process that was shown an extent is gone.
    pub(crate) fn take(
        &mut self,
        class: ClassId,
        owner: ChunkNumber,
        left_by_all: impl Fn(u32) -> bool,
    ) -> Option<Slot> {
        if self.classes[class.0 as usize].open.is_empty() {
            self.open_extent(class, left_by_all)?;
        }
        let Class { slot_bytes, slots_per_extent, open, .. } = &self.classes[class.0 as usize];
        let (slot_bytes, slots_per_extent, extent) = (*slot_bytes, *slots_per_extent, *open.last()?);
        let assigned = self.assigned_mut(extent);
        let number = assigned.free.pop().unwrap_or_else(|| {
            assigned.touched += 1;
            assigned.owners.push(None);
            assigned.touched - 1
        });
        assigned.owners[number as usize] = Some(owner);
        assigned.taken += 1;
        if assigned.taken == slots_per_extent {
            self.close_extent(extent);
        }
        self.used_bytes += slot_bytes;
        self.free_bytes -= slot_bytes;
        Some(Slot { extent, number })
    }

    /// Gives a used slot back.
    pub(crate) fn free(&mut self, slot: Slot) {
        self.give_back(slot);
        self.used_bytes -= self.slot_bytes_of(slot);
        self.free_bytes += self.slot_bytes_of(slot);
        self.unassign_if_empty(slot.extent);
    }

    /// Quarantines a used slot: a vanished process may still touch it. The slot may still hold a chunk that others read.
    pub(crate) fn quarantine(&mut self, slot: Slot) {
        let bytes = self.slot_bytes_of(slot);
        self.used_bytes -= bytes;
        self.quarantined_bytes += bytes;
        self.assigned_mut(slot.extent).quarantined += 1;
    }

    /// Marks a quarantined slot as used again: the process is gone.
    pub(crate) fn restore(&mut self, slot: Slot) {
        let bytes = self.slot_bytes_of(slot);
        self.used_bytes += bytes;
        self.quarantined_bytes -= bytes;
        self.assigned_mut(slot.extent).quarantined -= 1;
    }

    /// Extents that need new memory since the last call. The caller replaces each and calls [`Slab::renewed`].
    pub(crate) fn take_renewals(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.renewals)
    }

    /// Notes that the extent has new memory, which no process has seen.
    pub(crate) fn renewed(&mut self, extent: u32) {
        let ExtentUse::Renewing(class) = self.extents[extent as usize].state else { return };
        let tenant = usize::from(self.tenant_of(class).0);
        if self.tenants[tenant].most > 0 {
            return self.assign(extent, class);
        }
        // The tenant left meanwhile.
        self.tenants[tenant].held -= 1;
        let renewed = &mut self.extents[extent as usize];
        (renewed.state, renewed.last_tenant) = (ExtentUse::Unassigned, None);
        self.count_spoken_for();
    }

    /// Takes every extent out of use, because the slab `before` gave its memory out.
    pub(crate) fn seclude_all(&mut self, before: &Self) {
        for (extent, before) in self.extents.iter_mut().zip(&before.extents) {
            extent.last_tenant = before.last_tenant;
        }
        self.wait_for_memory();
    }

    /// Takes every extent of an empty slab out of use.
    pub(crate) fn wait_for_memory(&mut self) {
        self.extents.iter_mut().for_each(|extent| extent.state = ExtentUse::Secluded);
        self.quarantined_bytes = std::mem::take(&mut self.free_bytes);
    }

    /// Puts a secluded extent into use again, with its old memory or with new memory.
    pub(crate) fn include(&mut self, extent: u32, keeps_memory: bool) {
        let included = &mut self.extents[extent as usize];
        if matches!(included.state, ExtentUse::Secluded) {
            included.state = ExtentUse::Unassigned;
            included.last_tenant = included.last_tenant.filter(|_| keeps_memory);
            self.quarantined_bytes -= self.extent_bytes;
            self.free_bytes += self.extent_bytes;
        }
    }

    /// The extents that could be cleared for `class`: extents of other classes that the tenant of `class` may have and that no
    /// vanished process may touch.
    pub(crate) fn clearable(&self, class: ClassId, left_by_all: impl Fn(u32) -> bool) -> Vec<u32> {
        let tenant = self.tenant_of(class);
        let may_grow = self.may_grow(tenant);
        let bound = self.bound(&left_by_all);
        let mut found = Vec::new();
        for (number, extent) in (0..).zip(&self.extents) {
            let ExtentUse::Assigned(assigned) = &extent.state else { continue };
            let other = self.classes[assigned.class.0 as usize].tenant;
            // Another tenant may lose an extent if it keeps its part.
            let may_go = || may_grow && bound[usize::from(other.0)] > self.part(other) && left_by_all(number);
            if assigned.class != class && assigned.quarantined == 0 && (other == tenant || may_go()) {
                found.push(number);
            }
        }
        found
    }

    /// The chunks with a block in an assigned extent. A chunk with several blocks comes several times.
    pub(crate) fn owners(&self, extent: u32) -> impl Iterator<Item = ChunkNumber> {
        self.assigned(extent).owners.iter().flatten().copied()
    }

    /// Slots in use of an assigned extent, and all its slots.
    pub(crate) fn fill(&self, extent: u32) -> (u32, u32) {
        let Assigned { taken, class, .. } = *self.assigned(extent);
        (taken, self.classes[class.0 as usize].slots_per_extent)
    }

    /// How the arena's bytes are spent.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes {
            total: self.extents.len() as u64 * self.extent_bytes,
            free: self.free_bytes,
            used: self.used_bytes,
            quarantined: self.quarantined_bytes,
        }
    }

    fn open_extent(&mut self, class: ClassId, left_by_all: impl Fn(u32) -> bool) -> Option<()> {
        let tenant = self.tenant_of(class);
        if !self.may_grow(tenant) {
            return None;
        }
        let unassigned = |extent: &Extent| matches!(extent.state, ExtentUse::Unassigned);
        let last_of = |last: Option<TenantId>| {
            self.extents.iter().position(|extent| unassigned(extent) && extent.last_tenant == last)
        };
        // The tenant's own former extents come first: its engines may have mapped them.
        let own = last_of(Some(tenant));
        if own.is_none() && !self.leaves_others_their_parts(tenant, &left_by_all) {
            return None;
        }
        if let Some(extent) = own.or_else(|| last_of(None)) {
            self.hold(tenant, extent as u32);
            self.assign(extent as u32, class);
            return Some(());
        }
        if self
            .extents
            .iter()
            .any(|extent| matches!(extent.state, ExtentUse::Renewing(waiting) if waiting == class))
        {
            return None;
        }
        let mut numbered = (0_u32..).zip(&self.extents);
        let is_left =
            |number, extent| unassigned(extent) && (left_by_all(number) || self.is_abandoned(extent));
        let (foreign, _) = numbered.find(|&(number, extent)| is_left(number, extent))?;
        self.hold(tenant, foreign);
        self.extents[foreign as usize].state = ExtentUse::Renewing(class);
        self.renewals.push(foreign);
        None
    }

    /// Bytes that each tenant holds and may hold.
    pub(crate) fn tenant_bytes(&self) -> impl Iterator<Item = (u64, u64)> {
        let bytes = |extents: u32| u64::from(extents) * self.extent_bytes;
        let tenants = (0..).map(TenantId).zip(&self.tenants);
        tenants.map(move |(id, tenant)| (bytes(tenant.held), bytes(self.most(id))))
    }

    /// The extents that a tenant may hold beside the parts of the others.
    fn most(&self, tenant: TenantId) -> u32 {
        let others = (0..self.tenants.len() as u16).map(TenantId).filter(|&other| other != tenant);
        let kept: u32 = others.map(|other| self.part(other)).sum();
        self.tenants[usize::from(tenant.0)].most.min(self.extents.len() as u32 - kept)
    }

    /// Bytes of the extents that a tenant may hold beside the parts of the others.
    pub(crate) fn most_bytes(&self, tenant: TenantId) -> u64 {
        u64::from(self.most(tenant)) * self.extent_bytes
    }

    /// Bytes of the extents that a chunk takes by itself, if it has one block of each of these classes in each slice.
    pub(crate) fn extents_bytes_for(&self, classes: &[ClassId], slices: u16) -> u64 {
        let mut slots: BTreeMap<ClassId, u32> = BTreeMap::new();
        classes.iter().for_each(|&class| *slots.entry(class).or_default() += u32::from(slices));
        let extents = slots
            .into_iter()
            .map(|(class, slots)| u64::from(slots.div_ceil(self.classes[class.0 as usize].slots_per_extent)));
        extents.sum::<u64>() * self.extent_bytes
    }

    /// Sets new bounds for the extents of each tenant, new tenants included. A tenant that has more keeps its extents until they
    /// are cleared.
    pub(crate) fn bound_tenants(&mut self, most_extents: &[u32]) {
        self.tenants.resize(most_extents.len().max(self.tenants.len()), TenantExtents::default());
        for (tenant, &most) in self.tenants.iter_mut().zip(most_extents) {
            tenant.most = most;
        }
        self.served = self.tenants.iter().filter(|tenant| tenant.most > 0).count();
        self.count_spoken_for();
    }

    /// The part of `bytes`, a number of bytes of the whole arena, that falls to a tenant: it can fill the extents that it holds and
    /// those that it may still take, up to the rests at their ends.
    pub(crate) fn reach(&self, tenant: TenantId, bytes: u64) -> u64 {
        let TenantExtents { held, most, rests } = self.tenants[usize::from(tenant.0)];
        let all = self.extents.len() as u32;
        let others = self.spoken_for - held.max(self.part(tenant));
        let extents = most.min(all.saturating_sub(others)).max(held);
        if extents == all {
            return bytes.saturating_sub(rests);
        }
        let part = u128::from(bytes) * u128::from(extents) / u128::from(all);
        u64::try_from(part).unwrap_or(u64::MAX).saturating_sub(rests)
    }

    /// Whether a tenant holds more extents than are kept for it.
    pub(crate) fn may_yield(&self, tenant: TenantId) -> bool {
        self.tenants[usize::from(tenant.0)].held > self.part(tenant)
    }

    /// The tenant of a class.
    pub(crate) fn tenant_of(&self, class: ClassId) -> TenantId {
        self.classes[class.0 as usize].tenant
    }

    /// The tenants that hold more than they may.
    pub(crate) fn tenants_beyond_their_parts(&self) -> Vec<TenantId> {
        let tenants = (0..).map(TenantId).zip(&self.tenants);
        tenants.filter(|(_, tenant)| tenant.held > tenant.most).map(|(id, _)| id).collect()
    }

    /// The extents of a tenant that could be cleared, the last first: they hold the ends of prompts. Among them is no extent that
    /// a vanished process may touch.
    pub(crate) fn clearable_of(&self, tenant: TenantId) -> Vec<u32> {
        let is_its = |extent: &Extent| match &extent.state {
            ExtentUse::Assigned(assigned) => {
                self.tenant_of(assigned.class) == tenant && assigned.quarantined == 0
            }
            _ => false,
        };
        let numbers = (0..self.extents.len() as u32).rev();
        numbers.filter(|&number| is_its(&self.extents[number as usize])).collect()
    }

    /// The extents kept for a tenant, used or not: half of the arena is kept for all tenants in equal parts. Otherwise one tenant
    /// could leave the others none: an extent that a living engine has mapped stays with its tenant, however idle the engine is.
    fn part(&self, tenant: TenantId) -> u32 {
        match self.served {
            0 | 1 => 0,
            several => {
                let extents = self.extents.len();
                // Many tenants have small parts, but none has nothing while there are more extents than tenants.
                let equal = (extents / (2 * several)).max(usize::from(extents > several));
                self.tenants[usize::from(tenant.0)].most.min(equal as u32)
            }
        }
    }

    /// Extents that only one tenant can use now, by tenant: extents that hold something, and extents that living engines have
    /// mapped.
    fn bound(&self, left_by_all: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut bound: Vec<u32> = self.tenants.iter().map(|tenant| tenant.held).collect();
        for (number, extent) in (0..).zip(&self.extents) {
            if matches!(extent.state, ExtentUse::Unassigned)
                && let Some(last) = extent.last_tenant
                && !self.is_abandoned(extent)
                && !left_by_all(number)
            {
                bound[usize::from(last.0)] += 1;
            }
        }
        bound
    }

    /// Whether an extent's last tenant has left. Its engines have no sessions any more; those that still have the extent mapped keep
    /// its old memory, and the next tenant gets new memory.
    fn is_abandoned(&self, extent: &Extent) -> bool {
        extent.last_tenant.is_some_and(|last| self.tenants[usize::from(last.0)].most == 0)
    }

    /// Whether a tenant may have an extent that is not its own yet.
    fn leaves_others_their_parts(&self, tenant: TenantId, left_by_all: impl Fn(u32) -> bool) -> bool {
        let bound = self.bound(left_by_all);
        let others = (0..self.tenants.len() as u16).map(TenantId).filter(|&other| other != tenant);
        let unused = others.map(|other| self.part(other).saturating_sub(bound[usize::from(other.0)]));
        unused.sum::<u32>() + bound.iter().sum::<u32>() < self.extents.len() as u32
    }

    fn may_grow(&self, tenant: TenantId) -> bool {
        let TenantExtents { held, most, .. } = self.tenants[usize::from(tenant.0)];
        held < most
    }

    fn hold(&mut self, tenant: TenantId, extent: u32) {
        self.tenants[usize::from(tenant.0)].held += 1;
        self.extents[extent as usize].last_tenant = Some(tenant);
        self.count_spoken_for();
    }

    fn count_spoken_for(&mut self) {
        let all = (0..).map(TenantId).zip(&self.tenants);
        self.spoken_for = all.map(|(id, tenant)| tenant.held.max(self.part(id))).sum();
    }

    /// Bytes at the end of an extent of this class, where no slot fits.
    fn rest(&self, class: ClassId) -> u64 {
        let Class { slot_bytes, slots_per_extent, .. } = self.classes[class.0 as usize];
        self.extent_bytes - slot_bytes * u64::from(slots_per_extent)
    }

    fn assign(&mut self, extent: u32, class: ClassId) {
        let (tenant, rest) = (self.tenant_of(class), self.rest(class));
        self.tenants[usize::from(tenant.0)].rests += rest;
        let open = &mut self.classes[class.0 as usize].open;
        let open_position = Some(open.len());
        open.push(extent);
        self.extents[extent as usize].state = ExtentUse::Assigned(Assigned {
            class,
            touched: 0,
            free: Vec::new(),
            taken: 0,
            quarantined: 0,
            owners: Vec::new(),
            open_position,
        });
    }

    fn give_back(&mut self, slot: Slot) {
        let assigned = self.assigned_mut(slot.extent);
        let owner = assigned.owners[slot.number as usize].take();
        debug_assert!(owner.is_some(), "a slot is freed once");
        assigned.free.push(slot.number);
        assigned.taken -= 1;
        if assigned.open_position.is_none() {
            let class = assigned.class;
            let open = &mut self.classes[class.0 as usize].open;
            let position = open.len();
            open.push(slot.extent);
            self.assigned_mut(slot.extent).open_position = Some(position);
        }
    }

    fn unassign_if_empty(&mut self, extent: u32) {
        let Assigned { taken, class, .. } = *self.assigned(extent);
        if taken > 0 {
            return;
        }
        self.close_extent(extent);
        let (tenant, rest) = (self.tenant_of(class), self.rest(class));
        let tenant = &mut self.tenants[usize::from(tenant.0)];
        tenant.held -= 1;
        tenant.rests -= rest;
        self.extents[extent as usize].state = ExtentUse::Unassigned;
        self.count_spoken_for();
    }

    /// Takes an extent out of the open extents of its class.
    fn close_extent(&mut self, extent: u32) {
        let assigned = self.assigned_mut(extent);
        let (class, Some(position)) = (assigned.class, assigned.open_position.take()) else { return };
        let open = &mut self.classes[class.0 as usize].open;
        open.swap_remove(position);
        if let Some(&moved) = open.get(position) {
            self.assigned_mut(moved).open_position = Some(position);
        }
    }

    /// Bytes that a slot takes.
    pub(crate) fn slot_bytes_of(&self, slot: Slot) -> u64 {
        self.slot_bytes(self.assigned(slot.extent).class)
    }

    fn assigned(&self, extent: u32) -> &Assigned {
        match &self.extents[extent as usize].state {
            ExtentUse::Assigned(assigned) => assigned,
            state => unreachable!("a slot lies in an assigned extent, this is {state:?}"),
        }
    }

    fn assigned_mut(&mut self, extent: u32) -> &mut Assigned {
        match &mut self.extents[extent as usize].state {
            ExtentUse::Assigned(assigned) => assigned,
            state => unreachable!("a slot lies in an assigned extent, this is {state:?}"),
        }
    }

    /// Counts every slot anew, and asserts that the kept counts are the same.
    #[cfg(test)]
    pub(crate) fn assert_consistent(&self) {
        let (mut used, mut quarantined, mut free) = (0, 0, 0);
        let mut held = vec![0; self.tenants.len()];
        for extent in &self.extents {
            if matches!(extent.state, ExtentUse::Secluded) {
                quarantined += self.extent_bytes;
                continue;
            }
            if !matches!(extent.state, ExtentUse::Unassigned) {
                held[usize::from(extent.last_tenant.expect("an extent in use has a tenant").0)] += 1;
            }
            let ExtentUse::Assigned(assigned) = &extent.state else {
                free += self.extent_bytes;
                continue;
            };
            let class = &self.classes[assigned.class.0 as usize];
            let owned = assigned.owners.iter().flatten().count() as u32;
            assert_eq!(owned, assigned.taken);
            assert_eq!(assigned.touched as usize, assigned.owners.len());
            assert_eq!(assigned.free.len() as u32 + owned, assigned.touched);
            assert!(assigned.free.iter().all(|&slot| assigned.owners[slot as usize].is_none()));
            assert_eq!(assigned.open_position.is_some(), owned < class.slots_per_extent);
            quarantined += u64::from(assigned.quarantined) * class.slot_bytes;
            used += u64::from(owned - assigned.quarantined) * class.slot_bytes;
            free += self.extent_bytes - u64::from(owned) * class.slot_bytes;
        }
        for (extent, position, class) in self.classes.iter().flat_map(|class| {
            class.open.iter().enumerate().map(move |(position, &extent)| (extent, position, class))
        }) {
            assert_eq!(self.assigned(extent).open_position, Some(position));
            assert_eq!(self.extents[extent as usize].last_tenant, Some(class.tenant));
        }
        let bytes = self.bytes();
        assert_eq!((used, quarantined, free), (bytes.used, bytes.quarantined, bytes.free));
        assert_eq!(bytes.free + bytes.used + bytes.quarantined, bytes.total);
        let kept: Vec<u32> = self.tenants.iter().map(|tenant| tenant.held).collect();
        assert_eq!(held, kept);
        let mut rests = vec![0; self.tenants.len()];
        for (extent, state) in (0_u32..).zip(&self.extents) {
            if matches!(state.state, ExtentUse::Assigned(_)) {
                let class = self.assigned(extent).class;
                rests[usize::from(self.tenant_of(class).0)] += self.rest(class);
            }
        }
        let kept: Vec<u64> = self.tenants.iter().map(|tenant| tenant.rests).collect();
        assert_eq!(rests, kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(0);
    const B: TenantId = TenantId(1);
    const OWNER: usize = 0;

    fn take(slab: &mut Slab, class: ClassId) -> Option<Slot> {
        let slot = slab.take(class, ChunkNumber::at(OWNER), |_| true);
        slab.assert_consistent();
        slot
    }

    #[test]
    fn each_of_many_tenants_has_an_extent_while_there_are_more_extents_than_tenants() {
        let mut slab = Slab::new(32, 4 * SLOT_ALIGNMENT, &[u32::MAX; 20]);
        let classes: Vec<ClassId> =
            (0..20).map(|tenant| slab.class(TenantId(tenant), 4_096).unwrap()).collect();
        let of_first =
            (0..200).map_while(|_| slab.take(classes[0], ChunkNumber::at(OWNER), |_| false)).count();
        assert_eq!(of_first, 4 * (32 - 19));
        assert!(
            classes[1..].iter().all(|&class| slab.take(class, ChunkNumber::at(OWNER), |_| false).is_some())
        );
        slab.assert_consistent();
    }

    #[test]
    fn an_emptied_extent_serves_another_size() {
        let mut slab = Slab::new(1, 16_384, &[1, 1]);
        let small = slab.class(A, 100).unwrap();
        let large = slab.class(A, 8_000).unwrap();
        let slots: Vec<Slot> = std::iter::from_fn(|| take(&mut slab, small)).collect();
        assert_eq!(slots.len(), 4);
        assert_eq!(take(&mut slab, large), None);
        slots.into_iter().for_each(|slot| slab.free(slot));
        assert_eq!(slab.bytes().free, 16_384);
        let slot = take(&mut slab, large).unwrap();
        assert_eq!(slab.offset(slot), 0);
        let slot = take(&mut slab, large).unwrap();
        assert_eq!(slab.offset(slot), 8_192);
        assert_eq!(slab.class(A, 20_000), None);
    }

    #[test]
    fn another_tenant_gets_an_extent_only_with_new_memory_and_when_all_have_left() {
        let mut slab = Slab::new(1, 8_192, &[1, 1]);
        let (a, b) = (slab.class(A, 4_096).unwrap(), slab.class(B, 4_096).unwrap());
        let slot = take(&mut slab, a).unwrap();
        slab.free(slot);
        assert_eq!(slab.take(b, ChunkNumber::at(OWNER), |_| false), None);
        assert!(slab.take_renewals().is_empty());
        assert_eq!(take(&mut slab, b), None);
        assert_eq!(slab.take_renewals(), [0]);
        assert_eq!(take(&mut slab, a), None);
        slab.renewed(0);
        assert_eq!(take(&mut slab, b), Some(Slot { extent: 0, number: 0 }));
    }

    #[test]
    fn a_tenant_holds_no_more_extents_than_it_may() {
        let mut slab = Slab::new(4, 4_096, &[2, 4]);
        let (a, b) = (slab.class(A, 4_096).unwrap(), slab.class(B, 4_096).unwrap());
        assert_eq!(std::iter::from_fn(|| take(&mut slab, a)).count(), 2);
        assert_eq!(std::iter::from_fn(|| take(&mut slab, b)).count(), 2);
    }

    #[test]
    fn a_tenant_whose_engines_keep_what_they_mapped_leaves_the_others_their_parts() {
        const C: TenantId = TenantId(2);
        let mut slab = Slab::new(12, 4_096, &[12, 12, 12]);
        let [a, b, c] = [A, B, C].map(|tenant| slab.class(tenant, 4_096).unwrap());
        let mapped = |_| false;
        let fill = |slab: &mut Slab, class| {
            let take = || slab.take(class, ChunkNumber::at(OWNER), mapped);
            std::iter::from_fn(take).collect::<Vec<_>>()
        };
        let first = fill(&mut slab, a);
        assert_eq!(first.len(), 8, "two of twelve are kept for each of the others");
        // Extents that the tenant empties stay its own, and it takes them first.
        first.iter().for_each(|&slot| slab.free(slot));
        assert_eq!(fill(&mut slab, a).len(), 8);
        assert_eq!((fill(&mut slab, b).len(), fill(&mut slab, c).len()), (2, 2));
        slab.assert_consistent();
    }

    #[test]
    fn another_tenant_can_lose_only_the_extents_beyond_its_part() {
        let mut slab = Slab::new(4, 4_096, &[4, 4]);
        let [a, b] = [A, B].map(|tenant| slab.class(tenant, 4_096).unwrap());
        let taken: Vec<Slot> = std::iter::from_fn(|| take(&mut slab, a)).collect();
        assert_eq!(taken.len(), 3);
        assert_eq!(take(&mut slab, b), Some(Slot { extent: 3, number: 0 }));
        assert!(slab.clearable(a, |_| true).is_empty(), "one extent is the other's part");
        assert_eq!(slab.clearable(b, |_| true).len(), 3);
        assert!(slab.clearable(b, |_| false).is_empty(), "engines have them mapped");
    }

    #[test]
    fn quarantined_slots_are_counted_apart_and_come_back() {
        let mut slab = Slab::new(1, 8_192, &[1]);
        let class = slab.class(A, 4_096).unwrap();
        let slot = take(&mut slab, class).unwrap();
        slab.quarantine(slot);
        slab.assert_consistent();
        assert_eq!(slab.bytes(), Bytes { total: 8_192, free: 4_096, used: 0, quarantined: 4_096 });
        assert!(slab.clearable(class, |_| true).is_empty());
        slab.restore(slot);
        slab.free(slot);
        slab.assert_consistent();
        assert_eq!(slab.bytes().free, 8_192);
    }
}
