//! A node's configuration file.
//!
//! Nothing here is checked against the machine or against other values: [`Config::resolve`] does that, and makes the limits
//! for the modules.

mod object;

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use larder_core::placement::PlacementRule;
use larder_core::store::WritePolicy;
use larder_core::store::policy::PolicyName;
use larder_net::addresses::address;
use larder_net::config_file;
pub use larder_net::line_file::RecordConfig;
use larder_net::quic::CredentialFiles;
use larder_net::sizes::{exact, size};
use larder_net::trace::TracingConfig;
use serde::{Deserialize, Serialize};
use strsim::damerau_levenshtein;

pub use self::object::{ObjectConfig, ObjectWrite};
use crate::arena::HugePages;
use crate::disk::DEFAULT_SEGMENT_BYTES;
use crate::host::PciAddress;

/// A node's configuration. Every key has a default; an unknown key is an error.
///
/// Sizes are numbers of bytes or texts such as `"1GiB"` (2^30) and `"1GB"` (10^9).
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The node's name. Default: the host's name.
    pub name: Option<String>,
    /// The filter of the log, such as `info` or `larder_node=debug,warn`. The options `--log` and `-v` and the variable
    /// LARDER_LOG override it.
    pub log: Option<String>,
    /// Lets engines write straight into the arena. This saves a copy, but a faulty engine can then spoil any block. Only for one
    /// tenant. The memory of a reservation that is not committed serves nobody until the engine's process ends.
    pub trust_engines: bool,
    /// The HTTP endpoint.
    pub http: HttpConfig,
    /// The host tier.
    pub host: HostConfig,
    /// The GPUs to serve, with one actor for each. If the list is empty, the node has one actor without a GPU.
    pub gpus: Vec<GpuConfig>,
    /// The device tier.
    pub gpu: GpuTierConfig,
    /// The tenants, each with a socket of its own.
    pub tenants: Vec<TenantConfig>,
    /// The disk tier; without it, evicted chunks are gone.
    pub disk: Option<DiskConfig>,
    /// The object store that all nodes share; without it, the node uses no object store.
    pub object: Option<ObjectConfig>,
    /// The limits of one engine session.
    pub session: SessionConfig,
    /// The lookup log; without it, nothing is recorded.
    pub record: Option<RecordConfig>,
    /// The audit log: changes with their authors; without it, only the node's own log has them.
    pub audit: Option<RecordConfig>,
    /// The publisher of vLLM's events; without it, nothing is published.
    pub kv_events: Option<KvEventsConfig>,
    /// The collector of traces; without an endpoint, nothing is traced.
    pub tracing: TracingConfig,
    /// The cluster to join; without it, the node serves only its own host.
    pub cluster: Option<ClusterConfig>,
}

/// The HTTP endpoint for metrics and health.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    /// The address to listen on. Default: all addresses for a member of a cluster, since operators and other hosts ask it;
    /// loopback otherwise.
    #[serde(deserialize_with = "address")]
    pub listen: Option<SocketAddr>,
}

/// The publisher of events in vLLM's format.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct KvEventsConfig {
    /// The address for subscribers (ZeroMQ over TCP), without authentication.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// The topic; `{node}`, `{tenant}` and `{model}` are replaced.
    #[serde(default = "default_topic")]
    pub topic: String,
    /// The form of hashes.
    #[serde(default)]
    pub hashes: EventHashes,
    /// Whether events include the tokens of chunks that engines describe.
    #[serde(default)]
    pub tokens: EventTokens,
    /// The address, without authentication, where subscribers ask for missed messages or for all held chunks. Without it, nobody
    /// can ask.
    #[serde(default, deserialize_with = "address")]
    pub replay_listen: Option<SocketAddr>,
    /// Number of messages that are kept for these subscribers.
    #[serde(default = "default_replay_messages")]
    pub replay_messages: usize,
}

/// Whether events include tokens. Tokens are user data.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum EventTokens {
    /// No.
    #[default]
    Off,
    /// Yes, on loopback only.
    Local,
    /// Yes, since the connection to the subscribers is encrypted.
    Encrypted,
}

/// The form of a hash in events.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum EventHashes {
    /// The hash's last 64 bits as a number, as vLLM does by default.
    #[default]
    Int64,
    /// All 32 bytes, as vLLM does with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    Bytes,
}

/// The host tier.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// Memory for blocks, for all actors together. The node takes it at its start.
    #[serde(serialize_with = "exact", deserialize_with = "size")]
    pub arena_bytes: ByteSize,
    /// Limit of chunks for all actors together, whatever their size. The arena must be larger than these chunks: blocks that are
    /// being written need extra room.
    pub capacity_chunks: Option<u64>,
    /// Size of the arena's extents. Engines map the arena extent by extent, and an extent changes tenant as a whole. No block is
    /// larger. Default: a 32nd of an actor's arena, between 2 MiB and 256 MiB.
    #[serde(serialize_with = "exact", deserialize_with = "size")]
    pub extent_bytes: Option<ByteSize>,
    /// Fraction of the arena above which committed blocks are evicted. With several tenants, a fraction of the memory that each
    /// tenant can have beside the others.
    pub high_watermark: f64,
    /// Fraction of the arena down to which blocks are then evicted. A lower value makes evictions rarer and longer.
    pub low_watermark: f64,
    /// The eviction policy: `adaptive`, or another of [`PolicyName::ALL`].
    pub policy: String,
    /// Number of chunks after which a chunk costs twice as much to recompute as the first chunk of a prompt. `adaptive` then
    /// weighs the cost that a hit saves, and keeps the ends of long prompts longer. `None`: all chunks cost the same.
    pub recompute_doubles_at: Option<NonZeroU32>,
    /// Factor by which the ages of chunks grow faster than time: above 1 only to replay a trace faster than it was recorded.
    pub age_speed: NonZeroU32,
    /// Whether to use huge pages.
    pub huge_pages: HugePages,
}

/// The disk tier.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The tier's own folder on the drive; the node makes it if it is missing. It belongs to one node at a time.
    pub folder: PathBuf,
    /// Size of the tier, for all actors together. The node takes the space at its first start.
    #[serde(serialize_with = "exact", deserialize_with = "size")]
    pub capacity_bytes: ByteSize,
    /// Size of a segment: the tier is written and freed by segments. Fixed when the tier is made.
    #[serde(default = "default_segment_bytes", serialize_with = "exact", deserialize_with = "size")]
    pub segment_bytes: ByteSize,
    /// When chunks are written: `write_through`, `write_through_selective` or `write_back`.
    #[serde(default)]
    pub write: WritePolicy,
    /// For `write_through_selective`: the number of uses, the commit included, from which a chunk is written.
    #[serde(default = "number::<WRITE_AFTER_USES, _>")]
    pub write_after_uses: u32,
    /// Bytes verified per second while the drive has nothing else to do; 0 turns this off.
    #[serde(default = "mib::<SCRUB_MIB>", serialize_with = "exact", deserialize_with = "size")]
    pub scrub_bytes_per_second: ByteSize,
    /// Time for which a lease waits for chunks from disk. A drive that takes longer for an operation, and a second, is silent.
    #[serde(default = "number::<READ_DEADLINE_MS, _>")]
    pub read_deadline_ms: u64,
}

/// A GPU to serve.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct GpuConfig {
    /// The GPU's address on the PCI bus, such as `0000:65:00.0`.
    pub pci: PciAddress,
}

/// The device tier: GPU memory for blocks that engines load again and again through the device lane.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields, default)]
pub struct GpuTierConfig {
    /// Memory of each GPU; 0 turns the tier off. The node takes the memory at its first use.
    #[serde(serialize_with = "exact", deserialize_with = "size")]
    pub device_bytes: ByteSize,
    /// The eviction policy: one of [`PolicyName::ALL`].
    pub policy: String,
}

/// A tenant of the node.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// The tenant's name; part of its namespaces' fingerprints.
    pub name: String,
    /// The Unix socket that serves the tenant: every process that can open it acts as the tenant.
    pub socket: PathBuf,
    /// Limit of the tenant's part of the arena, for all actors together. With several tenants, half of the arena is divided into
    /// equal parts, one kept for each tenant, used or not. So no tenant can leave the others with nothing.
    #[serde(default, serialize_with = "exact", deserialize_with = "size")]
    pub max_bytes: Option<ByteSize>,
    /// Limit of the tenant's write windows, for all sessions together. Windows are memory outside the arena; the node takes it
    /// when a session opens. Default: `session.max_sessions` windows of the largest size, but no more than the tenant's part of
    /// half the memory that the arena and the windows given to other tenants leave.
    #[serde(default, serialize_with = "exact", deserialize_with = "size")]
    pub max_window_bytes: Option<ByteSize>,
}

/// The limits of one engine session.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct SessionConfig {
    /// Maximum number of sessions of one tenant at a time. Fewer if they would need more than a quarter of the files that the
    /// process may have open: a session has four.
    pub max_sessions: u32,
    /// The largest write window. Windows are memory outside the arena; `tenants.max_window_bytes` bounds all windows of a tenant.
    #[serde(serialize_with = "exact", deserialize_with = "size")]
    pub max_window_bytes: ByteSize,
    /// Maximum number of blocks that one session leases at a time.
    pub max_leased_blocks: u64,
    /// Fraction of the arena that pins may keep from eviction.
    pub max_pinned_fraction: f64,
    /// Time after which a reservation loses the right to commit.
    pub reservation_ttl_ms: u64,
    /// The longest pin.
    pub max_pin_ms: u64,
    /// Maximum number of processes that have closed their session but still run. Memory that they may touch cannot be reused.
    /// Beyond this number, the tenant gets no new session.
    pub max_lingering_processes: u32,
}

/// The cluster that the node is a member of.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    /// The address where each coordinator serves nodes, as `host:port`, separated by commas. A host name may have several
    /// addresses.
    pub coordinator: String,
    /// The address for peers (UDP).
    #[serde(default = "default_peer_listen", deserialize_with = "address")]
    pub listen: SocketAddr,
    /// The node's address as peers see it; by default, the address that the coordinator sees.
    #[serde(default, deserialize_with = "address")]
    pub advertise: Option<SocketAddr>,
    /// The node's place, such as a rack or an availability zone: lists and the console show nodes by it.
    pub zone: Option<String>,
    /// Certificates of the trusted authorities (PEM).
    pub ca: PathBuf,
    /// This node's certificate chain (PEM); `larder ca issue node NAME` makes one. It must carry the node's name.
    pub certificate: PathBuf,
    /// The certificate's private key (PEM).
    pub key: PathBuf,
    /// Whether chunks are shared with other nodes.
    #[serde(default = "yes")]
    pub share: bool,
    /// The rule by which chunks are placed: `worth`, or the earlier rule `reads`.
    #[serde(default)]
    pub placement: PlacementRule,
    /// Memory of each arena for staging. It holds blocks of other nodes only while they are read.
    #[serde(default = "mib::<STAGING_MIB>", serialize_with = "exact", deserialize_with = "size")]
    pub staging_bytes: ByteSize,
    /// Time for which a lease waits for blocks from other nodes.
    #[serde(default = "number::<FETCH_DEADLINE_MS, _>")]
    pub fetch_deadline_ms: u64,
    /// Time for which a lookup waits for the directory's answers.
    #[serde(default = "number::<FIND_DEADLINE_MS, _>")]
    pub find_deadline_ms: u64,
    /// The largest datagram to try (UDP payload): 8900 suits jumbo frames, and costs nothing if there are none.
    #[serde(default = "number::<DATAGRAM_BYTES, _>")]
    pub max_datagram_bytes: u16,
    /// Maximum bytes of blocks sent to other nodes per second, for networks with other traffic. Default: no limit.
    #[serde(default, serialize_with = "exact", deserialize_with = "size")]
    pub send_bytes_per_second: Option<ByteSize>,
    /// Connections with other nodes to keep. Beyond this number, the node closes the longest unused connections.
    #[serde(default = "number::<CONNECTIONS, _>")]
    pub peer_connections: u32,
    /// Number of block threads, which move blocks between nodes. With 0, the thread between nodes moves blocks too. Default: 0 on
    /// a link of up to 20 Gbit/s, else one for each 20 Gbit/s, at most a quarter of the CPUs near the link. Never more than 8.
    #[serde(default)]
    pub block_threads: Option<u8>,
    /// Whether blocks move between nodes over TCP, encrypted by TLS, where both nodes allow it. All other requests stay on QUIC.
    /// The node also listens on the TCP port with the number of `listen`. Good for networks with packets of 1,500 bytes, which cost
    /// QUIC more CPU time.
    #[serde(default)]
    pub blocks_over_tcp: bool,
    /// Time for which a stopping node moves its warm chunks to others before it leaves; 0 leaves at once.
    #[serde(default)]
    pub drain_ms: u64,
    /// Maximum bytes of blocks per second that other nodes fetch from this node while it drains.
    #[serde(default = "mib::<DRAIN_MIB>", serialize_with = "exact", deserialize_with = "size")]
    pub drain_bytes_per_second: ByteSize,
}

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is no valid configuration.
    #[error("{}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The fault in the file.
        source: InvalidConfig,
    },
}

/// A fault in a configuration text: its line, its description, and the nearest allowed word.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}{}", nearest.as_ref().map(|key| format!("; did you mean `{key}`?")).unwrap_or_default())]
pub struct InvalidConfig {
    /// The line, from 1.
    pub line: usize,
    /// The fault, and the allowed values.
    pub problem: String,
    /// The allowed word that looks most like the one found.
    pub nearest: Option<String>,
}

impl Config {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is no valid configuration.
    pub fn load(path: &Path) -> Result<Self, ConfigFileError> {
        Ok(Self::load_and_look(path)?.0)
    }

    /// Reads the file at `path`. Returns also whether the file names tenants: without, there is the default tenant.
    pub(crate) fn load_and_look(path: &Path) -> Result<(Self, bool), ConfigFileError> {
        let text =
            config_file::read(path).map_err(|source| ConfigFileError::Read { path: path.into(), source })?;
        let config =
            Self::parse(&text).map_err(|source| ConfigFileError::Invalid { path: path.into(), source })?;
        let names_tenants = text.parse::<toml::Table>().is_ok_and(|table| table.contains_key("tenants"));
        Ok((config, names_tenants))
    }

    /// Reads a configuration in TOML.
    ///
    /// # Errors
    /// Fails if the text is no valid configuration.
    pub fn parse(text: &str) -> Result<Self, InvalidConfig> {
        toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start.min(text.len()));
            InvalidConfig {
                line: 1 + text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count(),
                problem: error.message().trim().replace('\n', ", "),
                nearest: nearest_word(error.message()),
            }
        })
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: None,
            log: None,
            trust_engines: false,
            http: HttpConfig::default(),
            host: HostConfig::default(),
            gpus: Vec::new(),
            gpu: GpuTierConfig::default(),
            tenants: vec![TenantConfig {
                name: "default".into(),
                socket: "/run/larder/default.sock".into(),
                max_bytes: None,
                max_window_bytes: None,
            }],
            disk: None,
            object: None,
            session: SessionConfig::default(),
            record: None,
            audit: None,
            kv_events: None,
            tracing: TracingConfig::default(),
            cluster: None,
        }
    }
}

impl DiskConfig {
    /// A tier of `capacity_bytes` in `folder`, with all the defaults.
    pub fn new(folder: PathBuf, capacity_bytes: ByteSize) -> Self {
        Self {
            folder,
            capacity_bytes,
            segment_bytes: default_segment_bytes(),
            write: WritePolicy::default(),
            write_after_uses: WRITE_AFTER_USES.into(),
            scrub_bytes_per_second: mib::<SCRUB_MIB>(),
            read_deadline_ms: READ_DEADLINE_MS.into(),
        }
    }
}

impl ClusterConfig {
    /// The cluster of the coordinator at `host:port`, with all the defaults.
    pub fn new(coordinator: String, credentials: CredentialFiles) -> Self {
        let CredentialFiles { ca, certificate, key } = credentials;
        Self {
            coordinator,
            listen: default_peer_listen(),
            advertise: None,
            zone: None,
            ca,
            certificate,
            key,
            share: true,
            placement: PlacementRule::default(),
            staging_bytes: mib::<STAGING_MIB>(),
            fetch_deadline_ms: FETCH_DEADLINE_MS.into(),
            find_deadline_ms: FIND_DEADLINE_MS.into(),
            max_datagram_bytes: DATAGRAM_BYTES,
            send_bytes_per_second: None,
            peer_connections: CONNECTIONS.into(),
            block_threads: None,
            blocks_over_tcp: false,
            drain_ms: 0,
            drain_bytes_per_second: mib::<DRAIN_MIB>(),
        }
    }
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            arena_bytes: ByteSize::gib(1),
            capacity_chunks: None,
            extent_bytes: None,
            high_watermark: 0.95,
            low_watermark: 0.93,
            policy: PolicyName::default().to_string(),
            recompute_doubles_at: None,
            age_speed: NonZeroU32::MIN,
            huge_pages: HugePages::Auto,
        }
    }
}

impl Default for GpuTierConfig {
    fn default() -> Self {
        Self { device_bytes: ByteSize(0), policy: PolicyName::default().to_string() }
    }
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            max_sessions: 64,
            max_window_bytes: ByteSize::mib(64),
            max_leased_blocks: 65_536,
            max_pinned_fraction: 0.5,
            reservation_ttl_ms: 60_000,
            max_pin_ms: 600_000,
            max_lingering_processes: 64,
        }
    }
}

fn mib<const MIB: u64>() -> ByteSize {
    ByteSize::mib(MIB)
}

fn number<const NUMBER: u16, T: From<u16>>() -> T {
    NUMBER.into()
}

fn yes() -> bool {
    true
}

fn default_topic() -> String {
    "kv@{node}@{model}".to_owned()
}

fn default_replay_messages() -> usize {
    10_000
}

fn default_segment_bytes() -> ByteSize {
    ByteSize(DEFAULT_SEGMENT_BYTES)
}

fn default_peer_listen() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::UNSPECIFIED, 9441))
}

/// The allowed word that is most similar to the found word, if serde's message names both: the first pair of backticks has the
/// found word, the others have the allowed words.
fn nearest_word(message: &str) -> Option<String> {
    let mut words = message.strip_prefix("unknown ")?.split('`').skip(1).step_by(2);
    let found = words.next()?;
    let (distance, nearest) = words.map(|word| (damerau_levenshtein(found, word), word)).min()?;
    (distance <= nearest.len() / 2).then(|| nearest.to_owned())
}

/// Default of `write_after_uses`.
const WRITE_AFTER_USES: u16 = 2;

/// How fast the disk tier verifies its blocks, and how long a lease waits for the tier.
const SCRUB_MIB: u64 = 16;
const READ_DEADLINE_MS: u16 = 5_000;

/// Defaults of [`ClusterConfig`].
const STAGING_MIB: u64 = 256;
const DRAIN_MIB: u64 = 1_024;
const FETCH_DEADLINE_MS: u16 = 2_000;
const FIND_DEADLINE_MS: u16 = 100;
const DATAGRAM_BYTES: u16 = 8_900;
const CONNECTIONS: u16 = larder_core::exchange::MOST_CONNECTIONS as u16;

#[cfg(test)]
mod tests;
