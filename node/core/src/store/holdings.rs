//! The holdings of sessions and pins, for people.

use larder_protocol::Fingerprint;

use super::Store;
use super::ids::{SessionId, TenantId};
use crate::Millis;

/// An open session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionFacts {
    /// Its number.
    pub session: SessionId,
    /// Its tenant.
    pub tenant: TenantId,
    /// Namespaces that it registered.
    pub namespaces: u64,
    /// Leases.
    pub leases: u64,
    /// Blocks that are leased.
    pub leased_blocks: u64,
    /// Reservations.
    pub reservations: u64,
    /// Bytes of reserved slots.
    pub reserved_bytes: u64,
    /// Bytes of its write window.
    pub window_bytes: u64,
}

/// A pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PinFacts {
    /// Its number.
    pub pin: u64,
    /// Its tenant.
    pub tenant: TenantId,
    /// Chunks that the pin keeps.
    pub chunks: u64,
    /// Bytes of these chunks.
    pub bytes: u64,
    /// The time until it ends, in milliseconds.
    pub left_ms: u64,
}

impl Store {
    /// Every open session.
    pub fn session_facts(&self) -> impl Iterator<Item = SessionFacts> {
        self.sessions.open_sessions().map(|(session, held)| SessionFacts {
            session,
            tenant: held.tenant,
            namespaces: held.namespaces.len() as u64,
            leases: held.leases.len() as u64,
            leased_blocks: held.leased_blocks,
            reservations: held.reservations.len() as u64,
            reserved_bytes: held.reserved_bytes,
            window_bytes: held.window_bytes,
        })
    }

    /// The namespaces that an open session registered.
    pub fn namespaces_of(&self, session: SessionId) -> impl Iterator<Item = Fingerprint> {
        let held = self.sessions.open_sessions().find(move |&(other, _)| other == session);
        let numbers = held.into_iter().flat_map(|(_, held)| held.namespaces.keys());
        numbers.map(|&number| self.namespaces.get(number).fingerprint)
    }

    /// Every pin.
    pub fn pin_facts(&self, now: Millis) -> impl Iterator<Item = PinFacts> {
        self.pins.facts(now)
    }
}
