//! Reads that wait for a tier: ordered by tenant and class, bounded by bytes in flight.

use std::time::Duration;

use crate::priority::TenantTurns;
use crate::store::FetchId;
use crate::store::ids::TenantId;
use larder_protocol::peer::Class;

/// The line before one tier. A chunk that nobody waits for when its turn comes is not read.
#[derive(Debug)]
pub(crate) struct ReadLine {
    turns: TenantTurns<FetchId>,
    most_bytes: u64,
}

impl ReadLine {
    /// Allows `most_bytes` of reads in flight; the last read may exceed it.
    pub(crate) fn new(most_bytes: u64) -> Self {
        Self { turns: TenantTurns::default(), most_bytes }
    }

    /// Lines up a tenant's chunk from `now` on.
    pub(crate) fn wait(&mut self, tenant: TenantId, id: FetchId, class: Class, now: Duration) {
        self.turns.wait(tenant, id, class, now);
    }

    /// Notes that an engine waits for this chunk.
    pub(crate) fn hurry(&mut self, id: FetchId) {
        self.turns.change_class(id, Class::Decode);
    }

    /// Takes a chunk out of the line; returns whether it was there.
    pub(crate) fn leave(&mut self, id: FetchId) -> bool {
        self.turns.leave(id)
    }

    /// Takes all chunks out of the line.
    pub(crate) fn clear(&mut self) -> Vec<FetchId> {
        std::iter::from_fn(|| self.take()).collect()
    }

    /// Takes the next chunk out of the line, if the bytes in flight allow another read.
    pub(crate) fn next(&mut self) -> Option<FetchId> {
        if self.bytes_under_way() >= self.most_bytes { None } else { self.take() }
    }

    /// Puts a tenant's chunk back that could not be ordered at its turn: it is first in the tenant's line again.
    pub(crate) fn put_off(&mut self, tenant: TenantId, id: FetchId) {
        self.wait(tenant, id, Class::Decode, Duration::ZERO);
    }

    /// Notes that a tenant's read of `bytes` bytes was ordered.
    pub(crate) fn began(&mut self, tenant: TenantId, bytes: u64) {
        self.turns.began(tenant, bytes);
    }

    /// Bytes of reads that were ordered and have not ended.
    pub(crate) fn bytes_under_way(&self) -> u64 {
        self.turns.bytes_under_way()
    }

    /// Notes that a tenant's read of `bytes` bytes has ended.
    pub(crate) fn ended(&mut self, tenant: TenantId, bytes: u64) {
        self.turns.ended(tenant, bytes);
    }

    fn take(&mut self) -> Option<FetchId> {
        self.turns.next().filter(|&id| self.turns.leave(id))
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
