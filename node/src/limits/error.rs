//! Reasons why a configuration cannot be used on this machine.

use std::net::SocketAddr;
use std::path::PathBuf;

use bytesize::ByteSize;
use larder_core::store::policy::UnknownPolicy;
use larder_net::trace::InvalidEndpoint;

use super::{MAX_ACTORS, MAX_DATAGRAM_BYTES, MAX_SOCKET_PATH_BYTES, MIN_DATAGRAM_BYTES, MIN_EXTENTS};
use crate::arena::{MIN_EXTENT_BYTES, PAGE_BYTES};
use crate::disk::log::MIN_SEGMENTS;
use crate::disk::{MAX_SEGMENT_BYTES, MAX_SEGMENTS, MIN_SEGMENT_BYTES};
use crate::host::PciAddress;

/// The reason why a configuration cannot be used on this machine, and the values to set instead.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A number is zero, but must not be.
    #[error("`{0}` is 0: set it to at least 1")]
    Zero(&'static str),
    /// A number is larger than it may be.
    #[error("`{key}` is {number}: set it to at most {most}")]
    TooMany {
        /// The key.
        key: &'static str,
        /// Its value.
        number: u64,
        /// The largest value.
        most: u64,
    },
    /// The two addresses of events are one.
    #[error("[kv_events] `listen` and `replay_listen` are both {0}: give them different ports")]
    OneEventsAddress(SocketAddr),
    /// Events would show tokens to anybody.
    #[error(
        "[kv_events] would send tokens of prompts to other hosts, from {0}: set the address to a loopback address, or `tokens` to \"encrypted\" if the network to the subscribers is encrypted"
    )]
    EventTokens(SocketAddr),
    /// The object store's URL names no store.
    #[error(
        "[object] url is `{0}`: write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER"
    )]
    ObjectUrl(String),
    /// The node would speak to the object store without TLS.
    #[error("[object] endpoint `{0}` is not encrypted: use https, or set object.allow_http = true")]
    ObjectHttp(String),
    /// The eviction policy does not exist.
    #[error("{key}: {unknown}")]
    Policy {
        /// The key.
        key: &'static str,
        /// The name found, and the policies that exist.
        unknown: UnknownPolicy,
    },
    /// The node has no name.
    #[error("the node has no name: set `name`")]
    NoName,
    /// No certificate, label or topic could carry the node's name.
    #[error("the node's name is {}: set `name` to {NAME_RULE}", shown(.0))]
    NodeName(String),
    /// There are more GPUs than a node serves.
    #[error("{0} [[gpus]]: a node serves at most {MAX_ACTORS}; run a second node")]
    TooManyGpus(usize),
    /// A GPU is named twice.
    #[error("[[gpus]] names {0} twice: remove one")]
    DuplicateGpu(PciAddress),
    /// The machine does not have a GPU.
    #[error("[[gpus]] {pci}: no such device; {}", display_controllers(present))]
    NoSuchGpu {
        /// The address looked for.
        pci: PciAddress,
        /// The machine's display controllers.
        present: Vec<PciAddress>,
    },
    /// The arena does not fit into the memory of the machine or the node's control group. Huge pages count only if the node may
    /// have them.
    #[error(
        "[host] arena_bytes is {}, {within} has {}: {}",
        exact(*arena_bytes), exact(*memory_bytes), arena_hint(*most_bytes)
    )]
    ArenaTooLarge {
        /// Bytes of all arenas.
        arena_bytes: u64,
        /// The source of the limit.
        within: &'static str,
        /// Bytes of ordinary memory, and of the huge pages that the node may have, whoever has them now.
        memory_bytes: u64,
        /// The bytes that an arena should have at most.
        most_bytes: u64,
    },
    /// The arena does not fit into the memory that other processes leave now.
    #[error(
        "[host] arena_bytes is {}, but other processes leave {} of this machine's memory now: end some of them, or set it to {} or less",
        exact(*arena_bytes), exact(*available_bytes), exact(available_bytes / 10 * 9)
    )]
    ArenaNotAvailable {
        /// Bytes of all arenas.
        arena_bytes: u64,
        /// Bytes that the node can take without taking memory from another process, and the huge pages that the node gets.
        available_bytes: u64,
    },
    /// Write windows do not fit into the machine beside the arena.
    #[error(
        "[[tenants]] max_window_bytes together are {}, but the arena and the node itself leave {}: lower them, or [host] arena_bytes",
        exact(*window_bytes), exact(*left_bytes)
    )]
    WindowsTooLarge {
        /// Bytes of all tenants' windows.
        window_bytes: u64,
        /// Bytes that the arena and the node itself leave.
        left_bytes: u64,
    },
    /// The arena has room for fewer than two extents for each actor.
    #[error(
        "[host] arena_bytes is {} for {actors} actors: each needs at least {MIN_EXTENTS} extents of {}, so set it to \
         {} or more", exact(*arena_bytes), exact(*extent_bytes), exact(needed(*extent_bytes, *actors))
    )]
    ArenaTooSmall {
        /// Bytes of all arenas.
        arena_bytes: u64,
        /// Actors that share them.
        actors: u64,
        /// Bytes of one extent.
        extent_bytes: u64,
    },
    /// The extent size is impossible.
    #[error(
        "[host] extent_bytes is {}: set it to {} or more, in multiples of {PAGE_BYTES} (of 2 MiB for huge pages)",
        exact(*.0), exact(MIN_EXTENT_BYTES)
    )]
    ExtentBytes(u64),
    /// An arena has more extents than there are numbers for.
    #[error("an arena of {} has too many extents of {}: raise [host] extent_bytes", exact(*arena_bytes), exact(*extent_bytes))]
    TooManyExtents {
        /// Bytes of one arena.
        arena_bytes: u64,
        /// Bytes of one extent.
        extent_bytes: u64,
    },
    /// The capacity has fewer chunks than there are actors.
    #[error("[host] capacity_chunks is {capacity_chunks}: each of the {actors} actors needs at least one")]
    CapacityTooSmall {
        /// The capacity found.
        capacity_chunks: u64,
        /// Actors that share the capacity.
        actors: u64,
    },
    /// The watermarks are no fractions, or are in the wrong order.
    #[error("[host] low_watermark is {low}, high_watermark {high}: they must be 0 < low < high <= 1")]
    Watermarks {
        /// The lower watermark.
        low: f64,
        /// The higher watermark.
        high: f64,
    },
    /// A fraction is not between 0 and 1.
    #[error("`{key}` is {found}: set it to between 0 and 1")]
    Fraction {
        /// The key.
        key: &'static str,
        /// The number found.
        found: f64,
    },
    /// The disk tier has no folder.
    #[error("[disk] folder is empty: set it to the folder of the disk tier")]
    NoDiskFolder,
    /// The disk tier is too small.
    #[error(
        "[disk] capacity_bytes is {} for {actors} actors: each needs at least {MIN_SEGMENTS} segments of {}, so set it to {} or \
         more, or segment_bytes lower",
        exact(*capacity_bytes), exact(*segment_bytes),
        exact(segment_bytes.saturating_mul(u64::from(MIN_SEGMENTS)).saturating_mul(*actors))
    )]
    DiskTooSmall {
        /// Bytes on disk of all actors.
        capacity_bytes: u64,
        /// Bytes of a segment.
        segment_bytes: u64,
        /// Actors that share them.
        actors: u64,
    },
    /// The disk tier cannot be divided into such segments.
    #[error(
        "[disk] capacity_bytes is {} for {actors} actors, in segments of {}: each has at most {MAX_SEGMENTS} segments, of {} to \
         {}, in multiples of {PAGE_BYTES}; set segment_bytes accordingly",
        exact(*capacity_bytes), exact(*segment_bytes), exact(MIN_SEGMENT_BYTES), exact(MAX_SEGMENT_BYTES)
    )]
    DiskSegments {
        /// Bytes on disk of all actors.
        capacity_bytes: u64,
        /// Bytes of a segment.
        segment_bytes: u64,
        /// Actors that share them.
        actors: u64,
    },
    /// This kind of object store does not have the setting.
    #[error("[object.settings] {key}: there is no such setting of `{url}`; correct its name or remove it")]
    ObjectSetting {
        /// The store.
        url: String,
        /// The setting's name.
        key: String,
    },
    /// Nobody can dial the address at which other nodes are to reach this node.
    #[error("[cluster] advertise is {0}: write an address and a port at which other nodes reach this node")]
    Advertise(SocketAddr),
    /// The node does not listen at addresses of that kind.
    #[error(
        "[cluster] advertise is {advertise}, an IPv6 address, but listen is {listen}, where only IPv4 arrives: set listen to [::]:{}",
        .listen.port()
    )]
    AdvertiseUnheard {
        /// The address for other nodes.
        advertise: SocketAddr,
        /// The address at which the node listens.
        listen: SocketAddr,
    },
    /// The coordinator's address cannot be dialed.
    #[error(
        "[cluster] coordinator is `{0}`: write HOST:PORT, as coordinator.example:7601 or [::1]:7601, and commas between several"
    )]
    Coordinator(String),
    /// The zone is no valid name.
    #[error("[cluster] zone is {}: set it to {NAME_RULE}, or leave it out", shown(.0))]
    Zone(String),
    /// The size of a datagram is impossible.
    #[error(
        "[cluster] max_datagram_bytes is {0}: set it to between {MIN_DATAGRAM_BYTES} and {MAX_DATAGRAM_BYTES}"
    )]
    Datagram(u16),
    /// The endpoint for traces is invalid.
    #[error(transparent)]
    TracingEndpoint(#[from] InvalidEndpoint),
    /// There is no tenant.
    #[error("no [[tenants]]: add one, or leave the key out for the default tenant")]
    NoTenants,
    /// No certificate, label or topic could carry the tenant's name.
    #[error("[[tenants]] name {}: it must be {NAME_RULE}", shown(.0))]
    TenantName(String),
    /// A tenant's limit is smaller than one extent of each actor.
    #[error(
        "[[tenants]] {name}: max_bytes is {}, less than a tenant's smallest part of the arena: set it to {} or more",
        ByteSize(*max_bytes),
        ByteSize(*least_bytes)
    )]
    TenantTooSmall {
        /// The tenant.
        name: String,
        /// The tenant's limit.
        max_bytes: u64,
        /// Bytes of one extent of each actor.
        least_bytes: u64,
    },
    /// Two tenants have the same name.
    #[error("[[tenants]] has {0} twice: names must differ")]
    DuplicateTenant(String),
    /// Two tenants have the same socket.
    #[error("[[tenants]] {name} has the socket {} of another tenant: give each tenant a socket of its own", socket.display())]
    DuplicateSocket {
        /// The second tenant.
        name: String,
        /// The socket.
        socket: PathBuf,
    },
    /// The system cannot take the path of a socket.
    #[error(
        "[[tenants]] {name}: the socket path {socket:?} has {bytes} bytes; a socket's has 1 to {MAX_SOCKET_PATH_BYTES}, \
         none of them zero"
    )]
    SocketPath {
        /// The tenant.
        name: String,
        /// The path.
        socket: PathBuf,
        /// Length of the path.
        bytes: usize,
    },
    /// Engines are trusted, but there are several tenants: each could write over the others' blocks.
    #[error(
        "trust_engines lets engines write over any block: it needs a single tenant, not {0}; set it to false"
    )]
    TrustWithSeveralTenants(usize),
}

/// A size for people. If it is rounded, the exact bytes follow.
fn exact(bytes: u64) -> String {
    let size = ByteSize(bytes).display().iec().to_string();
    if size.parse() == Ok(ByteSize(bytes)) { size } else { format!("{size} ({bytes} bytes)") }
}

/// A name for people: shortened and escaped.
fn shown(name: &str) -> String {
    let start: String = name.chars().take(SHOWN_CHARACTERS).collect();
    let more = if start.len() < name.len() { format!("... ({} bytes)", name.len()) } else { String::new() };
    format!("{start:?}{more}")
}

/// What to do if an arena should have at most so many bytes.
fn arena_hint(most_bytes: u64) -> String {
    if most_bytes == 0 {
        return "a node needs 96 MiB beside its arena: give it more memory".into();
    }
    let most = exact(most_bytes);
    format!("set it to {most} or less, to leave a tenth for write windows and the rest, and 96 MiB at least")
}

fn needed(extent_bytes: u64, actors: u64) -> u64 {
    extent_bytes.saturating_mul(MIN_EXTENTS).saturating_mul(actors)
}

fn display_controllers(present: &[PciAddress]) -> String {
    if present.is_empty() {
        return "this machine has no display controller: leave [[gpus]] out".into();
    }
    let addresses: Vec<String> = present.iter().map(ToString::to_string).collect();
    format!("this machine has {}", addresses.join(", "))
}

/// The rule for names.
const NAME_RULE: &str = "1 to 256 of the characters A-Z a-z 0-9 . _ -";

/// Characters of a name that an error shows.
const SHOWN_CHARACTERS: usize = 64;
