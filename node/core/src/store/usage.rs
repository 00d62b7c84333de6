//! The contents of a store, in numbers.

use super::disk::Disk;
use super::object::Objects;
use super::{Bytes, DiskUsage, Evictions, Forwards, ObjectUsage, Store};

/// The contents of a device tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TierUsage {
    /// Bytes of the GPU that it may take.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Bytes of their slots.
    pub used_bytes: u64,
    /// Blocks evicted so far.
    pub evicted: u64,
}

/// The contents of a store at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// How the arena's bytes are spent.
    pub bytes: Bytes,
    /// Chunks that can be read, in whole or in part.
    pub cached_chunks: u64,
    /// Bytes of their slots.
    pub cached_bytes: u64,
    /// Bytes of slots of passing chunks, which were fetched and do not stay.
    pub passing_bytes: u64,
    /// Chunks that are being fetched, from any source.
    pub fetches: u64,
    /// Chunks that are being sent to other nodes.
    pub grants: u64,
    /// Follows of sessions and peers: chunks read while they are being written.
    pub follows: u64,
    /// Chunks that were followed and did not come, so far.
    pub follows_lost: u64,
    /// Chunks that moved to other nodes so far.
    pub given_up: u64,
    /// The counts of forwards.
    pub forwards: Forwards,
    /// Copies that the device has not let go of; the actor fills this in.
    pub device_copies: u64,
    /// The contents of the device tier; the actor fills this in.
    pub device_tier: TierUsage,
    /// The limit of cached chunks, if there is one.
    pub capacity_chunks: Option<u64>,
    /// Pins in force.
    pub pins: u64,
    /// Bytes of pinned chunks.
    pub pinned_bytes: u64,
    /// Leases of open sessions.
    pub leases: u64,
    /// Reservations of open sessions.
    pub reservations: u64,
    /// Commits being copied.
    pub commits_in_flight: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Processes that ended their last session and may still run.
    pub lingering_processes: u64,
    /// Namespaces in use.
    pub namespaces: u64,
    /// Chunks evicted so far.
    pub evictions: Evictions,
    /// Chunks refused so far because their parent or index contradicts chunks that are here.
    pub refused_names: u64,
    /// Chunks so far that were not given out because they did not have the requested name. Each is a bug of Larder, and a miss.
    pub misnamed: u64,
    /// Chunks that were verified, found to be wrong, and dropped, so far.
    pub damaged: u64,
    /// The contents of the disk tier, if there is one.
    pub disk: Option<DiskUsage>,
    /// The writes to the object store, if there is one.
    pub object: Option<ObjectUsage>,
}

impl Store {
    /// The store's present contents.
    pub fn usage(&self) -> Usage {
        let sessions = || self.sessions.iter();
        Usage {
            bytes: self.slab.bytes(),
            cached_chunks: self.cached_chunks,
            cached_bytes: self.tenants.cached_bytes(),
            passing_bytes: self.gathers.passing_bytes(),
            fetches: self.gathers.fetches(),
            grants: self.grants.len(),
            follows: self.follows.len(),
            follows_lost: self.follows.lost(),
            given_up: self.grants.given_up,
            forwards: self.forwards(),
            device_copies: 0,
            device_tier: TierUsage::default(),
            capacity_chunks: self.limits.capacity_chunks,
            pins: self.pins.len() as u64,
            pinned_bytes: self.pins.bytes(),
            leases: sessions().map(|session| session.leases.len() as u64).sum(),
            reservations: sessions().map(|session| session.reservations.len() as u64).sum(),
            commits_in_flight: self.orders.len() as u64,
            sessions: sessions().count() as u64,
            lingering_processes: self.sessions.lingering() as u64,
            namespaces: self.namespaces.in_use() as u64,
            evictions: self.evictions,
            misnamed: self.misnamed,
            refused_names: self.refused_names,
            damaged: self.verifications.damaged(),
            disk: self.disk.as_ref().map(Disk::usage),
            object: self.object.as_ref().map(Objects::usage),
        }
    }

    /// The number of chunks that somebody reads, writes, pins or sends; 0 when nothing is under way.
    pub fn claimed_chunks(&self) -> usize {
        self.index.iter_from(0).filter(|(_, _, chunk)| chunk.claims > 0 || chunk.pins > 0).count()
    }

    /// Bytes of extents that each tenant holds and may hold, by its place in the configuration.
    pub fn tenant_bytes(&self) -> Vec<(u64, u64)> {
        self.slab.tenant_bytes().collect()
    }
}
