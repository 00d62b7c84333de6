//! Reads that wait for a tier: ordered by class, bounded by bytes in flight.
//!
//! Each tenant has a line of its own. The next read is that of the tenant with the fewest bytes in flight, so a tenant that waits
//! for many chunks does not keep the others from theirs.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::priority::Turns;
use crate::store::FetchId;
use crate::store::ids::TenantId;
use larder_protocol::peer::Class;

/// The line before one tier. A chunk that nobody waits for when its turn comes is not read.
#[derive(Debug)]
pub(crate) struct ReadLine {
    tenants: BTreeMap<TenantId, OfTenant>,
    most_bytes: u64,
}

/// The line of one tenant.
#[derive(Debug, Default)]
struct OfTenant {
    turns: Turns<FetchId>,
    bytes_under_way: u64,
}

impl ReadLine {
    /// Allows `most_bytes` of reads in flight; the last read may exceed it.
    pub(crate) fn new(most_bytes: u64) -> Self {
        Self { tenants: BTreeMap::new(), most_bytes }
    }

    /// Lines up a tenant's chunk from `now` on.
    pub(crate) fn wait(&mut self, tenant: TenantId, id: FetchId, class: Class, now: Duration) {
        self.tenants.entry(tenant).or_default().turns.wait(id, class, now);
    }

    /// Notes that an engine waits for this chunk.
    pub(crate) fn hurry(&mut self, id: FetchId) {
        self.tenants.values_mut().for_each(|line| line.turns.change_class(id, Class::Decode));
    }

    /// Takes a chunk out of the line; returns whether it was there.
    pub(crate) fn leave(&mut self, id: FetchId) -> bool {
        self.tenants.values_mut().any(|line| line.turns.leave(id))
    }

    /// Takes all chunks out of the line.
    pub(crate) fn clear(&mut self) -> Vec<FetchId> {
        let lines = self.tenants.values_mut();
        lines
            .flat_map(|line| std::iter::from_fn(|| line.turns.next().filter(|&id| line.turns.leave(id))))
            .collect()
    }

    /// Takes the next chunk out of the line, if the bytes in flight allow another read.
    pub(crate) fn next(&mut self) -> Option<FetchId> {
        let under_way: u64 = self.tenants.values().map(|line| line.bytes_under_way).sum();
        if under_way >= self.most_bytes {
            return None;
        }
        let waiting = self.tenants.values_mut().filter(|line| line.turns.next().is_some());
        let line = waiting.min_by_key(|line| line.bytes_under_way)?;
        let id = line.turns.next()?;
        line.turns.leave(id);
        Some(id)
    }

    /// Puts a tenant's chunk back that could not be ordered at its turn: it is first in the tenant's line again.
    pub(crate) fn put_off(&mut self, tenant: TenantId, id: FetchId) {
        self.wait(tenant, id, Class::Decode, Duration::ZERO);
    }

    /// Notes that a tenant's read of `bytes` bytes was ordered.
    pub(crate) fn began(&mut self, tenant: TenantId, bytes: u64) {
        self.tenants.entry(tenant).or_default().bytes_under_way += bytes;
    }

    /// Bytes of reads that were ordered and have not ended.
    #[cfg(test)]
    pub(crate) fn bytes_under_way(&self) -> u64 {
        self.tenants.values().map(|line| line.bytes_under_way).sum()
    }

    /// Notes that a tenant's read of `bytes` bytes has ended.
    pub(crate) fn ended(&mut self, tenant: TenantId, bytes: u64) {
        self.tenants.entry(tenant).or_default().bytes_under_way -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ids::{ChunkId, ChunkNumber};

    fn chunk(number: usize) -> FetchId {
        FetchId::of(ChunkId::new(ChunkNumber::at(number), 0))
    }

    #[test]
    fn a_tenant_with_many_reads_leaves_every_second_turn_to_another_tenant() {
        let mut line = ReadLine::new(4);
        let (busy, other) = (TenantId(0), TenantId(1));
        (0..100).for_each(|number| line.wait(busy, chunk(number), Class::Prefetch, Duration::ZERO));
        for number in 0..4 {
            assert_eq!(line.next(), Some(chunk(number)));
            line.began(busy, 1);
        }
        assert_eq!(line.next(), None, "as many bytes are under way as may be");
        // Much later than the head start of a read that an engine waits for.
        (100..102).for_each(|number| line.wait(other, chunk(number), Class::Decode, Duration::from_secs(9)));
        line.ended(busy, 1);
        assert_eq!(line.next(), Some(chunk(100)));
        line.began(other, 1);
        line.ended(busy, 1);
        assert_eq!(line.next(), Some(chunk(101)));
        line.began(other, 1);
        line.ended(other, 1);
        assert_eq!(line.next(), Some(chunk(4)), "nobody else waits");
    }
}
