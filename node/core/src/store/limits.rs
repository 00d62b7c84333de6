//! The limits of a store.
//!
//! `capacity_chunks` bounds the *committed* chunks. Reservations take their slots beyond it, so the arena must exceed the
//! capacity by the bytes that are being written at a time. Without `capacity_chunks` the watermarks do the same in bytes.

use std::num::NonZeroU32;

use super::disk::DiskStoreLimits;
use super::object::ObjectStoreLimits;
use super::policy::PolicyName;
use crate::placement::PlacementRule;

/// The limits of a store; every value is resolved from the configuration once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreLimits {
    /// Extents of the arena.
    pub extents: u32,
    /// Bytes of an extent.
    pub extent_bytes: u64,
    /// Chunks that may be cached; if `None`, only the bytes are limited.
    pub capacity_chunks: Option<u64>,
    /// Bytes of cached blocks above which eviction starts.
    pub high_watermark_bytes: u64,
    /// Bytes of cached blocks at which eviction ends.
    pub low_watermark_bytes: u64,
    /// The eviction policy.
    pub policy: PolicyName,
    /// Number of chunks after which recomputing a chunk costs twice as much as the first chunk of a prompt; `adaptive` weighs
    /// this cost. If `None`, all chunks cost the same.
    pub recompute_doubles_at: Option<NonZeroU32>,
    /// The factor by which the ages of chunks grow faster than time. It is above 1 only where a trace is played faster than it
    /// was recorded.
    pub age_speed: NonZeroU32,
    /// Whether engines write straight into the arena.
    pub trust_engines: bool,
    /// Bytes of extents that each tenant may hold, by its place in the configuration.
    pub tenant_bytes: Vec<u64>,
    /// Blocks that one session may have leased at a time.
    pub max_leased_blocks: u64,
    /// Bytes that one session may have reserved at a time.
    pub max_reserved_bytes: u64,
    /// Bytes that may be pinned.
    pub max_pinned_bytes: u64,
    /// How long a reservation may take.
    pub reservation_ttl_ms: u64,
    /// How long a pin may last.
    pub max_pin_ms: u64,
    /// Evictions that are remembered, of 16 bytes each.
    pub remembered_evictions: usize,
    /// The part that other nodes may take; `None` if there are no other nodes.
    pub peers: Option<PeerStoreLimits>,
    /// Limits of the disk below the store; `None` if there is no disk.
    pub disk: Option<DiskStoreLimits>,
    /// Limits of the object store beside the store; `None` if there is no object store.
    pub object: Option<ObjectStoreLimits>,
}

impl StoreLimits {
    /// Extents that each tenant may hold.
    pub(super) fn most_extents(&self) -> Vec<u32> {
        let extents = |&bytes: &u64| u32::try_from(bytes / self.extent_bytes).unwrap_or(u32::MAX);
        self.tenant_bytes.iter().map(extents).collect()
    }

    /// Bounds a store of one tenant by its memory and `capacity_chunks` alone: it has no pins, no disk, no object store and no
    /// peers, and engines may hold any number of chunks.
    pub fn of_chunks(extents: u32, extent_bytes: u64, capacity_chunks: u64, policy: PolicyName) -> Self {
        Self {
            extents,
            extent_bytes,
            capacity_chunks: Some(capacity_chunks),
            high_watermark_bytes: u64::MAX,
            low_watermark_bytes: u64::MAX,
            policy,
            recompute_doubles_at: None,
            age_speed: NonZeroU32::MIN,
            trust_engines: false,
            tenant_bytes: vec![u64::MAX],
            max_leased_blocks: u64::MAX,
            max_reserved_bytes: u64::MAX,
            max_pinned_bytes: 0,
            reservation_ttl_ms: u64::MAX,
            max_pin_ms: 0,
            remembered_evictions: 0,
            peers: None,
            disk: None,
            object: None,
        }
    }
}

/// The part of a store that other nodes may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStoreLimits {
    /// Bytes of slots whose blocks come from other nodes and only pass through.
    pub passing_bytes: u64,
    /// Chunks that may be lent to other nodes at a time. Other nodes may also follow four times as many: followed chunks wait
    /// for their writers, for minutes, and must not keep other chunks from being lent.
    pub max_granted_chunks: u64,
    /// The rule by which chunks are placed.
    pub placement: PlacementRule,
}
