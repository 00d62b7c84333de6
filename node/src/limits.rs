//! The numbers that the node's modules work with: the configuration, resolved on this machine.
//!
//! [`Config::resolve`](crate::config::Config::resolve) is the only place that makes these numbers. Each module receives its own
//! part.

mod error;
mod near;
mod resolve;

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use larder_core::DeviceLimits;
use larder_core::store::StoreLimits;
use larder_net::quic::CredentialFiles;
use larder_net::trace::Sampler;

pub use error::ConfigError;
pub use near::{Mismatch, PeerPlace};

use crate::arena::ArenaLimits;
use crate::config::{KvEventsConfig, RecordConfig};
use crate::copy::CopyLimits;
use crate::disk::DiskOptions;
use crate::host::{CpuSet, HostFacts, PciAddress};
use crate::object::ObjectOptions;

/// All numbers of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// The node's name.
    pub name: String,
    /// The address of HTTP.
    pub http_listen: SocketAddr,
    /// One actor for each GPU, or a single actor without GPUs. Never empty; the position is the device's number.
    pub actors: Vec<ActorLimits>,
    /// The tenants, in the order of the configuration. Never empty.
    pub tenants: Vec<TenantLimits>,
    /// The object store that all actors share.
    pub object: Option<ObjectLimits>,
    /// The limits of a session.
    pub session: SessionLimits,
    /// The lookup log.
    pub record: Option<RecordConfig>,
    /// The audit log.
    pub audit: Option<RecordConfig>,
    /// The publisher of vLLM's events.
    pub kv_events: Option<KvEventsConfig>,
    /// Decides which requests are traced.
    pub sampler: Sampler,
    /// The cluster that the node is a member of.
    pub cluster: Option<ClusterLimits>,
    /// The parts that are not in their best place.
    pub mismatches: Vec<Mismatch>,
}

impl Limits {
    /// Checks the arena against the memory that is free at this moment. Without this check, the system might kill a process while
    /// the node takes its memory.
    ///
    /// # Errors
    /// [`ConfigError::ArenaNotAvailable`]
    pub fn check_available(&self, host: &HostFacts) -> Result<(), ConfigError> {
        let arena_bytes = self.actors.iter().map(|actor| actor.arena.bytes()).sum();
        let ordinary = host.ordinary_bytes().saturating_sub(resolve::LEAST_LEFT_BYTES);
        let huge = near::expected_huge_bytes(&self.actors, host);
        let available_bytes = host.available_bytes.min(ordinary).saturating_add(huge);
        if arena_bytes > available_bytes {
            return Err(ConfigError::ArenaNotAvailable { arena_bytes, available_bytes });
        }
        Ok(())
    }
}

impl ClusterLimits {
    /// The address where others reach the node's HTTP server, which listens at `http`. If the result has no IP address, the
    /// coordinator uses the IP address that it sees.
    pub(crate) fn reached_at(&self, http: SocketAddr) -> SocketAddr {
        match self.advertise {
            Some(advertised) if http.ip().is_unspecified() => SocketAddr::new(advertised.ip(), http.port()),
            _ => http,
        }
    }
}

/// The limits of a cluster's member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterLimits {
    /// Each coordinator's `host:port`.
    pub coordinators: Vec<String>,
    /// The address for peers.
    pub listen: SocketAddr,
    /// The node's address as peers see it, if it differs from the address that the coordinator sees.
    pub advertise: Option<SocketAddr>,
    /// The place of the node.
    pub zone: Option<String>,
    /// The files of the node's certificate and its authorities.
    pub credentials: CredentialFiles,
    /// Whether chunks are shared.
    pub share: bool,
    /// How long a lease waits for blocks of other nodes.
    pub fetch_deadline: Duration,
    /// How long a lookup waits for the directory's answers.
    pub find_deadline: Duration,
    /// The largest datagram to try.
    pub max_datagram_bytes: u16,
    /// Maximum bytes of blocks that are sent per second.
    pub send_bytes_per_second: Option<NonZeroU64>,
    /// Connections with other nodes to keep; beyond this number, idle connections are closed.
    pub peer_connections: usize,
    /// Number of block threads.
    pub block_threads: usize,
    /// Whether blocks move over TCP.
    pub blocks_over_tcp: bool,
    /// How long a drain before a stop may take.
    pub drain: Duration,
    /// Maximum bytes of blocks that move per second during a drain.
    pub drain_bytes_per_second: u64,
    /// Maximum number of rows of the directory that the node keeps.
    pub directory_rows: u64,
    /// The place of the thread between nodes.
    pub place: PeerPlace,
}

/// The numbers of one GPU actor.
#[derive(Debug, Clone, PartialEq)]
pub struct ActorLimits {
    /// The actor's GPU, if it has one.
    pub pci: Option<PciAddress>,
    /// The NUMA node of the GPU; `None` if it is unknown.
    pub numa_node: Option<u32>,
    /// The CPUs of the actor's threads, the nearest to the GPU. Never empty.
    pub cpus: CpuSet,
    /// The network interface nearest to the GPU.
    pub interface: Option<String>,
    /// The actor's memory.
    pub arena: ArenaLimits,
    /// The actor's copy pool.
    pub copy: CopyLimits,
    /// The actor's device lane.
    pub device: DeviceLimits,
    /// The actor's store.
    pub store: StoreLimits,
    /// The actor's disk tier.
    pub disk: Option<DiskLimits>,
}

/// The numbers of one actor's disk tier.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskLimits {
    /// The options of the tier itself.
    pub options: DiskOptions,
    /// How long a lease waits for the tier.
    pub read_deadline: Duration,
}

/// The numbers of the object tier.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectLimits {
    /// The options of the tier itself. A lease waits for the tier as long as an order may take.
    pub options: ObjectOptions,
    /// Limit of chunks for which each actor remembers whether the store has them.
    pub known_chunks: usize,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantLimits {
    /// The tenant's name.
    pub name: String,
    /// The Unix socket that serves the tenant.
    pub socket: PathBuf,
    /// Limit of the tenant's bytes in the arena, for all actors together.
    pub max_bytes: Option<u64>,
    /// Limit of the bytes of write windows, in whole pages, for all sessions together.
    pub max_window_bytes: u64,
}

/// The limits of engine sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionLimits {
    /// Maximum number of sessions of one tenant at a time.
    pub max_sessions: u32,
    /// The number in the configuration: more than `max_sessions` if the process may open too few files.
    pub configured_sessions: u32,
    /// Maximum number of sessions of all tenants together: for so many the process has descriptors.
    pub max_sessions_in_all: u32,
    /// Maximum number of connections of a tenant beside its sessions: those that have not said hello, and those that are being
    /// closed. If closing hangs for so many, the tenant's further connections wait.
    pub max_other_connections: u32,
    /// The largest write window.
    pub max_window_bytes: u64,
    /// Maximum number of blocks that one session leases at a time.
    pub max_leased_blocks: u64,
    /// Maximum number of processes of one tenant that have closed their session but still run. Beyond this number, the tenant
    /// gets no new session.
    pub max_lingering_processes: u32,
    /// Whether engines write straight into the arena, and so have no write window.
    pub trust_engines: bool,
}

impl SessionLimits {
    /// The part of a process's descriptors that sessions may have, as a divisor. HTTP has as many, and so have the connections
    /// beside sessions. The others are for extents, disk, object store and peers.
    pub const DESCRIPTORS_SHARE: u64 = 4;

    /// Descriptors of a session: its socket twice (the last one is closed on another thread), its window, the process.
    /// Descriptors of extents are on their way only for a moment.
    pub const DESCRIPTORS: u64 = 4;

    /// Says that a tenant gets fewer sessions than configured, if so.
    pub fn shortage(&self) -> Option<String> {
        let Self { max_sessions, configured_sessions, .. } = self;
        (max_sessions < configured_sessions).then(|| {
            format!(
                "a tenant gets {max_sessions} sessions, not {configured_sessions} ([session] max_sessions): sessions may have a \
                 quarter of the files that the process may open"
            )
        })
    }
}

/// The largest default size of an extent. It is bounded because an extent changes tenant as a whole.
pub const MAX_DEFAULT_EXTENT_BYTES: u64 = 256 << 20;

/// Minimum number of extents of an arena: with a single extent, no second tenant or block size would find a place.
pub const MIN_EXTENTS: u64 = 2;

/// The longest path of a Unix socket: `sockaddr_un` has 108 bytes, and one of them ends the text.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The least size of a datagram that QUIC needs on every path.
pub const MIN_DATAGRAM_BYTES: u16 = 1_200;

/// The largest payload of a UDP datagram over IPv4.
pub const MAX_DATAGRAM_BYTES: u16 = 65_507;

/// Maximum number of actors of one node.
pub const MAX_ACTORS: usize = 64;

/// Maximum number of threads of one copy pool: two copies fill the memory channels that one GPU's traffic may have.
pub const MAX_COPY_THREADS: usize = 2;

/// Maximum number of threads that fault in one arena.
pub const MAX_FAULT_THREADS: usize = 4;

/// The part of a store that one session may have reserved at a time, as a divisor: even a session that reserves without end
/// leaves room for others.
pub const RESERVED_SHARE: u64 = 4;

/// Evictions that a node remembers, over all actors, of 16 bytes each.
pub const REMEMBERED_EVICTIONS: usize = 1 << 20;

/// Orders that may wait for one copy pool: at 4 MiB an order and 8 GB/s, 32 ms of work.
pub const COPY_QUEUE_ORDERS: usize = 64;

/// Maximum number of copies that one device has under way: enough for four sessions.
pub const DEVICE_ORDERS: usize = 64;

/// How long a copy by a device may take, the wait for the engine's stream included: far longer than any copy that ends.
pub const DEVICE_COPY_DEADLINE_MS: u64 = 10_000;

/// The largest part of an arena for staging, as a divisor.
pub const PASSING_SHARE: u64 = 4;

/// An actor's staging for blocks of its siblings, on a node without a cluster.
pub const SIBLING_STAGING_BYTES: u64 = 256 << 20;

/// Orders that may wait for one disk: more than a lease of the longest prompt needs.
pub const DISK_QUEUE_ORDERS: usize = 8_192;

/// The part of an arena for chunks that wait to be written to disk, as a divisor. They cannot be evicted meanwhile.
pub const DISK_WAITING_SHARE: u64 = 8;

/// The part of an arena into which chunks may be read from disk at a time, as a divisor.
pub const DISK_READING_SHARE: u64 = 4;

/// The part of an arena for chunks that wait to be written to the object store, as a divisor.
pub const OBJECT_WAITING_SHARE: u64 = 8;

/// The part of an arena into which chunks may be read from the object store at a time, as a divisor.
pub const OBJECT_READING_SHARE: u64 = 4;

/// Maximum bytes of blocks on their way to or from the object store: half a second at 4 Gbit/s.
pub const OBJECT_BYTES_IN_FLIGHT: u64 = 256 << 20;

/// Limit of blocks for which the object tier remembers whether the store has them: about 100 bytes each.
pub const OBJECT_KNOWN_BLOCKS: usize = 1 << 18;

/// Limit of chunks for which all actors together remember whether the store has them: about 100 bytes each.
pub const OBJECT_KNOWN_CHUNKS: usize = 1 << 16;

/// Maximum number of chunks that are being sent to other nodes: more would only wait in one queue.
pub const MAX_GRANTED_CHUNKS: u64 = 4_096;
