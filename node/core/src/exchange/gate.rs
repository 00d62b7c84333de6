//! The gate before a peer: bounds streams of blocks and bytes in flight.

use super::{ExchangeLimits, RequestId};
use crate::priority::TenantTurns;
use crate::store::ids::TenantId;

/// The limits of requests to one peer, and the requests that wait.
#[derive(Debug)]
pub(super) struct Gate {
    pub(super) turns: TenantTurns<RequestId>,
    streams: usize,
    /// Free credits, in units of [`CREDIT_UNIT_BYTES`].
    credits: u64,
    all_credits: u64,
}

impl Gate {
    pub(super) fn new(limits: &ExchangeLimits) -> Self {
        let all_credits = limits.credit_bytes / CREDIT_UNIT_BYTES;
        let turns = TenantTurns::default();
        Self { turns, streams: limits.streams_per_peer, credits: all_credits, all_credits }
    }

    /// Takes a stream and credits for `bytes` bytes of a tenant, if they are free. A smaller request never passes the next
    /// request in the line.
    pub(super) fn admit(&mut self, next: RequestId, tenant: TenantId, bytes: u64) -> bool {
        let credits = self.credits_for(bytes);
        let has_room = self.streams > 0 && self.credits >= credits;
        if has_room {
            self.turns.leave(next);
            self.turns.began(tenant, bytes);
            self.streams -= 1;
            self.credits -= credits;
        }
        has_room
    }

    /// Takes back a stream and its credits.
    pub(super) fn give_back(&mut self, tenant: TenantId, bytes: u64) {
        self.turns.ended(tenant, bytes);
        self.streams += 1;
        self.credits += self.credits_for(bytes);
    }

    /// Bytes that are requested and have not come.
    pub(super) fn bytes_under_way(&self) -> u64 {
        (self.all_credits - self.credits) * CREDIT_UNIT_BYTES
    }

    /// The credits for so many bytes: at least one, at most all credits.
    fn credits_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(CREDIT_UNIT_BYTES).clamp(1, self.all_credits.max(1))
    }
}

/// Bytes of one credit.
const CREDIT_UNIT_BYTES: u64 = 4 << 10;
