//! Makes limits from the configuration and the machine.

use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU64;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use larder_core::DeviceLimits;
use larder_core::store::policy::PolicyName;
use larder_core::store::{DiskStoreLimits, ObjectStoreLimits, PeerStoreLimits, StoreLimits};
use larder_net::config_file::place_of;
use larder_net::quic::CredentialFiles;
use larder_net::trace::Sampler;
use larder_protocol::identity::is_name;

use super::near::{
    ActorPlace, MOST_BLOCK_THREADS, expected_huge_bytes, loosen_what_does_not_fit, possible_huge_bytes,
};
use super::{
    ActorLimits, COPY_QUEUE_ORDERS, ClusterLimits, ConfigError, DEVICE_COPY_DEADLINE_MS, DEVICE_ORDERS,
    DISK_QUEUE_ORDERS, DISK_READING_SHARE, DISK_WAITING_SHARE, DiskLimits, Limits, MAX_ACTORS,
    MAX_COPY_THREADS, MAX_DATAGRAM_BYTES, MAX_DEFAULT_EXTENT_BYTES, MAX_FAULT_THREADS, MAX_GRANTED_CHUNKS,
    MAX_SOCKET_PATH_BYTES, MIN_DATAGRAM_BYTES, MIN_EXTENTS, Mismatch, OBJECT_BYTES_IN_FLIGHT,
    OBJECT_KNOWN_BLOCKS, OBJECT_KNOWN_CHUNKS, OBJECT_READING_SHARE, OBJECT_WAITING_SHARE, ObjectLimits,
    PASSING_SHARE, PeerPlace, REMEMBERED_EVICTIONS, RESERVED_SHARE, SIBLING_STAGING_BYTES, SessionLimits,
    TenantLimits,
};
use crate::arena::{ArenaLimits, Binding, ExtentSpec, MIN_EXTENT_BYTES, PAGE_BYTES};
use crate::config::{
    ClusterConfig, Config, DiskConfig, EventTokens, GpuConfig, HostConfig, KvEventsConfig, ObjectConfig,
    ObjectWrite, TenantConfig,
};
use crate::copy::CopyLimits;
use crate::disk::DiskOptions;
use crate::disk::log::{Geometry, MIN_SEGMENTS};
use crate::host::{CpuSet, HostFacts, PciAddress};
use crate::object::{ObjectOptions, is_url_of_a_store, unknown_setting};

/// Checks that tokens of prompts stay on this host, unless the connection to subscribers is encrypted.
fn check_events(events: &KvEventsConfig) -> Result<(), ConfigError> {
    nonzero("kv_events.replay_messages", events.replay_messages as u64)?;
    if events.replay_listen == Some(events.listen) && events.listen.port() != 0 {
        return Err(ConfigError::OneEventsAddress(events.listen));
    }
    let addresses = [Some(events.listen), events.replay_listen];
    let public = addresses.into_iter().flatten().find(|address| !address.ip().is_loopback());
    match public.filter(|_| events.tokens == EventTokens::Local) {
        Some(address) => Err(ConfigError::EventTokens(address)),
        None => Ok(()),
    }
}

impl Config {
    /// Makes the node's limits for the machine that `host` describes.
    ///
    /// Arena, capacity and tenants' shares are split evenly over the actors.
    ///
    /// # Errors
    /// Fails if the configuration cannot be met. The error names the fault and the values to set.
    pub fn resolve(&self, host: &HostFacts) -> Result<Limits, ConfigError> {
        let name = self.name.clone().unwrap_or_else(|| host.name.clone());
        check_name(&name)?;
        check_gpus(&self.gpus, host)?;
        check_tenants(&self.tenants)?;
        check_watermarks(&self.host)?;
        if self.trust_engines && self.tenants.len() > 1 {
            return Err(ConfigError::TrustWithSeveralTenants(self.tenants.len()));
        }
        nonzero("record.max_bytes", self.record.as_ref().map_or(1, |record| record.max_bytes.0))?;
        nonzero("audit.max_bytes", self.audit.as_ref().map_or(1, |audit| audit.max_bytes.0))?;
        self.kv_events.as_ref().map_or(Ok(()), check_events)?;
        let session = self.session_limits(host)?;
        let (extents, extent_bytes) = extents(&self.host, self.gpus.len().max(1) as u64)?;
        check_tenant_bytes(&self.tenants, extent_bytes * self.gpus.len().max(1) as u64)?;
        let mut mismatches = Vec::new();
        let mut actors = self.actors(host, extents, extent_bytes, &mut mismatches)?;
        loosen_what_does_not_fit(&mut actors, host, &mut mismatches);
        check_memory(&actors, self.host.arena_bytes.0, host)?;
        let peer_place = |cluster| PeerPlace::find(host, cluster, self.gpus.first().map(|gpu| gpu.pci));
        Ok(Limits {
            name,
            http_listen: self.http_listen(),
            tenants: self.tenant_limits(&session, &actors, host)?,
            object: self.object.as_ref().map(|object| object_limits(object, &actors)).transpose()?,
            actors,
            session,
            record: self.record.clone(),
            audit: self.audit.clone(),
            kv_events: self.kv_events.clone(),
            sampler: self.sampler()?,
            cluster: self
                .cluster
                .as_ref()
                .map(|cluster| cluster_limits(cluster, host, peer_place(cluster)))
                .transpose()?,
            mismatches,
        })
    }

    /// The address of HTTP. A member of a cluster listens on all addresses, since operators and other hosts ask it.
    fn http_listen(&self) -> SocketAddr {
        let everywhere = self.cluster.is_some();
        let ip = if everywhere { Ipv4Addr::UNSPECIFIED } else { Ipv4Addr::LOCALHOST };
        self.http.listen.unwrap_or_else(|| (ip, HTTP_PORT).into())
    }

    fn session_limits(&self, host: &HostFacts) -> Result<SessionLimits, ConfigError> {
        let session = &self.session;
        nonzero("session.max_sessions", session.max_sessions.into())?;
        nonzero("session.max_window_bytes", session.max_window_bytes.0)?;
        nonzero("session.max_leased_blocks", session.max_leased_blocks)?;
        nonzero("session.reservation_ttl_ms", session.reservation_ttl_ms)?;
        nonzero("session.max_pin_ms", session.max_pin_ms)?;
        nonzero("session.max_lingering_processes", session.max_lingering_processes.into())?;
        if !(0.0..=1.0).contains(&session.max_pinned_fraction) {
            let found = session.max_pinned_fraction;
            return Err(ConfigError::Fraction { key: "session.max_pinned_fraction", found });
        }
        let in_all = host.open_files / SessionLimits::DESCRIPTORS_SHARE / SessionLimits::DESCRIPTORS;
        let max_sessions_in_all = u32::try_from(in_all).unwrap_or(u32::MAX).max(1);
        let of_a_tenant = (max_sessions_in_all / self.tenants.len() as u32).max(1);
        Ok(SessionLimits {
            max_sessions: session.max_sessions.min(of_a_tenant),
            configured_sessions: session.max_sessions,
            max_sessions_in_all,
            // Such a connection has half of a session's descriptors.
            max_other_connections: of_a_tenant.saturating_mul(2).min(MOST_OTHER_CONNECTIONS),
            max_window_bytes: session.max_window_bytes.0,
            max_leased_blocks: session.max_leased_blocks,
            max_lingering_processes: session.max_lingering_processes,
            trust_engines: self.trust_engines,
        })
    }

    /// Resolves the tenants. Windows are ordinary memory outside the arena. Tenants without a limit share half of what the arena, the
    /// node itself and the other tenants' windows leave.
    fn tenant_limits(
        &self,
        session: &SessionLimits,
        actors: &[ActorLimits],
        host: &HostFacts,
    ) -> Result<Vec<TenantLimits>, ConfigError> {
        let beside = |huge_bytes| host.ordinary_bytes().saturating_sub(self.ordinary_arena(huge_bytes, host));
        let configured = self.tenants.iter().filter_map(|tenant| tenant.max_window_bytes);
        let window_bytes = configured.clone().fold(0_u64, |sum, bytes| sum.saturating_add(bytes.0));
        let others = (self.tenants.len() - configured.count()).max(1) as u64;
        let usual = u64::from(session.max_sessions).saturating_mul(session.max_window_bytes);
        let left = beside(expected_huge_bytes(actors, host));
        let windows = left.saturating_sub(OWN_BYTES).saturating_sub(window_bytes) / WINDOWS_SHARE;
        let default = usual.min(windows.max(LEAST_WINDOWS_BYTES) / others);
        let whole_pages =
            |bytes: u64| bytes.min(host.memory_bytes).max(PAGE_BYTES).next_multiple_of(PAGE_BYTES);
        let left_bytes = beside(possible_huge_bytes(actors, host))
            .saturating_sub(OWN_BYTES + self.host.arena_bytes.0 / INDEX_SHARE);
        if window_bytes > left_bytes {
            return Err(ConfigError::WindowsTooLarge { window_bytes, left_bytes });
        }
        let limits = |tenant: &TenantConfig| TenantLimits {
            name: tenant.name.clone(),
            socket: tenant.socket.clone(),
            max_bytes: tenant.max_bytes.map(|bytes| bytes.0),
            max_window_bytes: whole_pages(tenant.max_window_bytes.map_or(default, |bytes| bytes.0)),
        };
        Ok(self.tenants.iter().map(limits).collect())
    }

    /// Bytes of the arena for which ordinary memory is kept. Huge pages are not among them, unless a control group's limit holds the
    /// whole arena: then the limit leaves room for an arena without huge pages, and what the host has for it may be less.
    fn ordinary_arena(&self, huge_bytes: u64, host: &HostFacts) -> u64 {
        let (arena, ordinary) = (self.host.arena_bytes.0, host.ordinary_bytes());
        let is_held = host.cgroup_limit_bytes == Some(ordinary) && ordinary >= arena;
        if is_held { arena } else { arena.saturating_sub(huge_bytes) }
    }

    fn sampler(&self) -> Result<Sampler, ConfigError> {
        let found = self.tracing.sample_ratio;
        if !(0.0..=1.0).contains(&found) {
            return Err(ConfigError::Fraction { key: "tracing.sample_ratio", found });
        }
        self.tracing.url()?;
        Ok(self.tracing.sampler())
    }

    fn actors(
        &self,
        host: &HostFacts,
        extents: u32,
        extent_bytes: u64,
        mismatches: &mut Vec<Mismatch>,
    ) -> Result<Vec<ActorLimits>, ConfigError> {
        let gpus: Vec<Option<PciAddress>> = if self.gpus.is_empty() {
            vec![None]
        } else {
            self.gpus.iter().map(|gpu| Some(gpu.pci)).collect()
        };
        let actors = gpus.len() as u64;
        if let Some(capacity_chunks) = self.host.capacity_chunks.filter(|&chunks| chunks < actors) {
            return Err(ConfigError::CapacityTooSmall { capacity_chunks, actors });
        }
        let actor = |(i, pci): (u64, Option<PciAddress>)| {
            let ActorPlace { numa_node, memory_node, cpus, interface } =
                ActorPlace::find(host, pci, mismatches);
            let extent = ExtentSpec {
                bytes: extent_bytes,
                numa_node: memory_node,
                binding: Binding::Strict,
                huge_pages: self.host.huge_pages,
                trust_engines: self.trust_engines,
            };
            let fault_threads = cpus.len().clamp(1, MAX_FAULT_THREADS);
            let arena = ArenaLimits { extents, extent, fault_threads, cpus: cpus.clone() };
            let copy = CopyLimits {
                threads: (cpus.len() / 2).clamp(1, MAX_COPY_THREADS),
                cpus: cpus.clone(),
                queue_orders: COPY_QUEUE_ORDERS,
            };
            let capacity_chunks = self.host.capacity_chunks.map(|chunks| share(chunks, i, actors));
            let store = self.store_limits(&arena, capacity_chunks, actors)?;
            let disk = self.disk.as_ref().map(|disk| disk_limits(disk, i, actors, &cpus)).transpose()?;
            let device = DeviceLimits {
                orders: DEVICE_ORDERS,
                copy_deadline_ms: DEVICE_COPY_DEADLINE_MS,
                tier_bytes: self.gpu.device_bytes.0,
                tier_policy: policy("[gpu] policy", &self.gpu.policy)?,
            };
            Ok(ActorLimits { pci, numa_node, cpus, interface, arena, copy, device, store, disk })
        };
        (0..).zip(gpus).map(actor).collect()
    }

    /// Each actor's memory for staging; `None` if the node neither shares chunks nor has several actors.
    fn staging_bytes(&self, actors: u64) -> Option<u64> {
        let cluster = self.cluster.as_ref();
        let sharing = cluster.filter(|cluster| cluster.share).map(|cluster| cluster.staging_bytes.0);
        let siblings = || cluster.map_or(SIBLING_STAGING_BYTES, |cluster| cluster.staging_bytes.0);
        sharing.or_else(|| (actors > 1).then(siblings))
    }

    fn store_limits(
        &self,
        arena: &ArenaLimits,
        capacity_chunks: Option<u64>,
        actors: u64,
    ) -> Result<StoreLimits, ConfigError> {
        let bytes = arena.bytes();
        Ok(StoreLimits {
            extents: arena.extents,
            extent_bytes: arena.extent.bytes,
            capacity_chunks,
            high_watermark_bytes: fraction(bytes, self.host.high_watermark),
            low_watermark_bytes: fraction(bytes, self.host.low_watermark),
            policy: policy("[host] policy", &self.host.policy)?,
            recompute_doubles_at: self.host.recompute_doubles_at,
            age_speed: self.host.age_speed,
            reservation_ttl_ms: self.session.reservation_ttl_ms,
            max_pin_ms: self.session.max_pin_ms,
            max_pinned_bytes: fraction(bytes, self.session.max_pinned_fraction),
            max_leased_blocks: self.session.max_leased_blocks,
            trust_engines: self.trust_engines,
            remembered_evictions: REMEMBERED_EVICTIONS / actors.max(1) as usize,
            peers: self.staging_bytes(actors).map(|staging_bytes| PeerStoreLimits {
                passing_bytes: staging_bytes.min(bytes / PASSING_SHARE),
                max_granted_chunks: MAX_GRANTED_CHUNKS,
                placement: self.cluster.as_ref().map(|cluster| cluster.placement).unwrap_or_default(),
            }),
            disk: self.disk.as_ref().map(|disk| DiskStoreLimits {
                write: disk.write,
                write_after_uses: disk.write_after_uses,
                max_waiting_bytes: bytes / DISK_WAITING_SHARE,
                max_reading_bytes: bytes / DISK_READING_SHARE,
            }),
            object: self.object.as_ref().map(|object| ObjectStoreLimits {
                write: object.write.into(),
                write_after_uses: object.write_after_uses,
                max_waiting_bytes: bytes / OBJECT_WAITING_SHARE,
                max_reading_bytes: bytes / OBJECT_READING_SHARE,
            }),
            max_reserved_bytes: bytes / RESERVED_SHARE,
            tenant_bytes: self
                .tenants
                .iter()
                .map(|tenant| tenant.max_bytes.map_or(u64::MAX, |bytes| bytes.0 / actors))
                .collect(),
        })
    }
}

/// Number and size of the extents of each actor.
fn extents(host: &HostConfig, actors: u64) -> Result<(u32, u64), ConfigError> {
    let arena_bytes = host.arena_bytes.0;
    nonzero("host.arena_bytes", arena_bytes)?;
    let share = arena_bytes / actors;
    let extent_bytes = match host.extent_bytes {
        Some(extent) if extent.0 < MIN_EXTENT_BYTES || !extent.0.is_multiple_of(PAGE_BYTES) => {
            return Err(ConfigError::ExtentBytes(extent.0));
        }
        Some(extent) => extent.0,
        None => {
            let wanted = share / DEFAULT_EXTENTS / MIN_EXTENT_BYTES * MIN_EXTENT_BYTES;
            wanted.clamp(MIN_EXTENT_BYTES, MAX_DEFAULT_EXTENT_BYTES)
        }
    };
    let extents = share / extent_bytes;
    if extents < MIN_EXTENTS {
        return Err(ConfigError::ArenaTooSmall { arena_bytes, actors, extent_bytes });
    }
    let extents = u32::try_from(extents)
        .map_err(|_| ConfigError::TooManyExtents { arena_bytes: share, extent_bytes })?;
    Ok((extents, extent_bytes))
}

fn check_gpus(gpus: &[GpuConfig], host: &HostFacts) -> Result<(), ConfigError> {
    if gpus.len() > MAX_ACTORS {
        return Err(ConfigError::TooManyGpus(gpus.len()));
    }
    let mut seen = HashSet::new();
    for &GpuConfig { pci } in gpus {
        if !seen.insert(pci) {
            return Err(ConfigError::DuplicateGpu(pci));
        }
        if !host.pci.contains_key(&pci) {
            let displays = host.pci.iter().filter(|(_, device)| device.is_display);
            return Err(ConfigError::NoSuchGpu { pci, present: displays.map(|(&pci, _)| pci).collect() });
        }
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), ConfigError> {
    match name {
        "" => Err(ConfigError::NoName),
        name if is_name(name) => Ok(()),
        name => Err(ConfigError::NodeName(name.to_owned())),
    }
}

fn check_tenants(tenants: &[TenantConfig]) -> Result<(), ConfigError> {
    if tenants.is_empty() {
        return Err(ConfigError::NoTenants);
    }
    let (mut names, mut sockets) = (HashSet::new(), HashSet::new());
    for TenantConfig { name, socket, max_bytes, max_window_bytes } in tenants {
        let (name, socket) = (name.clone(), socket.clone());
        if !is_name(&name) {
            return Err(ConfigError::TenantName(name));
        }
        if !names.insert(name.clone()) {
            return Err(ConfigError::DuplicateTenant(name));
        }
        let bytes = socket.as_os_str().as_bytes().len();
        if !(1..=MAX_SOCKET_PATH_BYTES).contains(&bytes) || socket.as_os_str().as_bytes().contains(&0) {
            return Err(ConfigError::SocketPath { name, socket, bytes });
        }
        if !sockets.insert(place_of(&socket)) {
            return Err(ConfigError::DuplicateSocket { name, socket });
        }
        nonzero("tenants.max_bytes", max_bytes.map_or(1, |bytes| bytes.0))?;
        nonzero("tenants.max_window_bytes", max_window_bytes.map_or(1, |bytes| bytes.0))?;
    }
    Ok(())
}

/// Checks that each tenant may have at least one extent of each actor: a tenant takes memory in whole extents.
fn check_tenant_bytes(tenants: &[TenantConfig], least_bytes: u64) -> Result<(), ConfigError> {
    for TenantConfig { name, max_bytes, .. } in tenants {
        if let Some(max_bytes) = max_bytes.map(|bytes| bytes.0)
            && max_bytes < least_bytes
        {
            return Err(ConfigError::TenantTooSmall { name: name.clone(), max_bytes, least_bytes });
        }
    }
    Ok(())
}

fn check_watermarks(host: &HostConfig) -> Result<(), ConfigError> {
    let (low, high) = (host.low_watermark, host.high_watermark);
    let ordered = 0.0 < low && low < high && high <= 1.0;
    if ordered { Ok(()) } else { Err(ConfigError::Watermarks { low, high }) }
}

/// Checks that arenas fit into the machine and the control group. Huge pages count separately: the system has already reserved
/// them, and no group counts them as memory. [`Limits::check_available`] asks for free memory.
fn check_memory(actors: &[ActorLimits], arena_bytes: u64, host: &HostFacts) -> Result<(), ConfigError> {
    let memory_bytes = host.ordinary_bytes().saturating_add(possible_huge_bytes(actors, host));
    if arena_bytes.saturating_add(LEAST_LEFT_BYTES) > memory_bytes {
        let group = host.cgroup_limit_bytes == Some(host.ordinary_bytes());
        let within = if group { "the node's control group" } else { "the machine" };
        let most_bytes = (memory_bytes / 10 * 9).min(memory_bytes.saturating_sub(LEAST_LEFT_BYTES));
        return Err(ConfigError::ArenaTooLarge { arena_bytes, within, memory_bytes, most_bytes });
    }
    Ok(())
}

fn check_advertise(advertise: SocketAddr, listen: SocketAddr) -> Result<(), ConfigError> {
    if advertise.port() == 0 || advertise.ip().is_unspecified() {
        return Err(ConfigError::Advertise(advertise));
    }
    if advertise.ip().to_canonical().is_ipv6() && listen.is_ipv4() {
        return Err(ConfigError::AdvertiseUnheard { advertise, listen });
    }
    Ok(())
}

fn cluster_limits(
    cluster: &ClusterConfig,
    host: &HostFacts,
    place: PeerPlace,
) -> Result<ClusterLimits, ConfigError> {
    if let Some(threads) = cluster.block_threads.filter(|&threads| threads > 0) {
        up_to("cluster.block_threads", threads.into(), MOST_BLOCK_THREADS as u64)?;
    }
    nonzero("cluster.staging_bytes", cluster.staging_bytes.0)?;
    nonzero("cluster.fetch_deadline_ms", cluster.fetch_deadline_ms)?;
    nonzero("cluster.find_deadline_ms", cluster.find_deadline_ms)?;
    let send_bytes_per_second = cluster.send_bytes_per_second.map(|bytes| bytes.0);
    nonzero("cluster.send_bytes_per_second", send_bytes_per_second.unwrap_or(u64::MAX))?;
    nonzero("cluster.peer_connections", cluster.peer_connections.into())?;
    nonzero("cluster.drain_bytes_per_second", cluster.drain_bytes_per_second.0)?;
    if let Some(advertise) = cluster.advertise {
        check_advertise(advertise, cluster.listen)?;
    }
    let coordinators: Vec<String> =
        cluster.coordinator.split(',').map(|coordinator| coordinator.trim().to_owned()).collect();
    if let Some(wrong) = coordinators.iter().find(|coordinator| !is_host_and_port(coordinator)) {
        return Err(ConfigError::Coordinator(wrong.clone()));
    }
    if let Some(zone) = &cluster.zone
        && !is_name(zone)
    {
        return Err(ConfigError::Zone(zone.clone()));
    }
    if !(MIN_DATAGRAM_BYTES..=MAX_DATAGRAM_BYTES).contains(&cluster.max_datagram_bytes) {
        return Err(ConfigError::Datagram(cluster.max_datagram_bytes));
    }
    Ok(ClusterLimits {
        coordinators,
        listen: cluster.listen,
        advertise: cluster.advertise,
        zone: cluster.zone.clone(),
        credentials: CredentialFiles {
            ca: cluster.ca.clone(),
            certificate: cluster.certificate.clone(),
            key: cluster.key.clone(),
        },
        share: cluster.share,
        fetch_deadline: Duration::from_millis(cluster.fetch_deadline_ms),
        find_deadline: Duration::from_millis(cluster.find_deadline_ms),
        max_datagram_bytes: cluster.max_datagram_bytes,
        send_bytes_per_second: send_bytes_per_second.and_then(NonZeroU64::new),
        peer_connections: cluster.peer_connections as usize,
        block_threads: cluster.block_threads.map_or_else(|| place.block_threads(), usize::from),
        blocks_over_tcp: cluster.blocks_over_tcp,
        drain: Duration::from_millis(cluster.drain_ms),
        drain_bytes_per_second: cluster.drain_bytes_per_second.0,
        directory_rows: (host.ordinary_bytes() / DIRECTORY_SHARE / ROW_BYTES).max(MIN_DIRECTORY_ROWS),
        place,
    })
}

/// Whether a text is `HOST:PORT`, with a port that can be dialed. An IPv6 address needs brackets.
fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_host = match host.strip_prefix('[') {
        Some(address) => address.strip_suffix(']').is_some_and(|address| address.parse::<Ipv6Addr>().is_ok()),
        None => {
            !host.is_empty() && !host.contains([':', '/', '[', ']']) && !host.contains(char::is_whitespace)
        }
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port != 0)
}

fn disk_limits(disk: &DiskConfig, i: u64, actors: u64, cpus: &CpuSet) -> Result<DiskLimits, ConfigError> {
    nonzero("disk.capacity_bytes", disk.capacity_bytes.0)?;
    nonzero("disk.segment_bytes", disk.segment_bytes.0)?;
    if disk.folder.as_os_str().as_bytes().is_empty() {
        return Err(ConfigError::NoDiskFolder);
    }
    nonzero("disk.write_after_uses", disk.write_after_uses.into())?;
    nonzero("disk.read_deadline_ms", disk.read_deadline_ms)?;
    let (capacity_bytes, segment_bytes) = (disk.capacity_bytes.0, disk.segment_bytes.0);
    if Geometry::of(capacity_bytes / actors, segment_bytes).is_none() {
        return Err(match capacity_bytes / actors / segment_bytes < MIN_SEGMENTS.into() {
            true => ConfigError::DiskTooSmall { capacity_bytes, segment_bytes, actors },
            false => ConfigError::DiskSegments { capacity_bytes, segment_bytes, actors },
        });
    }
    let options = DiskOptions {
        folder: disk.folder.join(format!("device-{i}")),
        capacity_bytes: capacity_bytes / actors,
        segment_bytes,
        queue_orders: DISK_QUEUE_ORDERS,
        scrub_bytes_per_second: disk.scrub_bytes_per_second.0 / actors,
        silent_after: Duration::from_millis(disk.read_deadline_ms).max(LEAST_SILENCE),
        cpus: cpus.clone(),
        lane: None,
    };
    Ok(DiskLimits { options, read_deadline: Duration::from_millis(disk.read_deadline_ms) })
}

fn object_limits(object: &ObjectConfig, actors: &[ActorLimits]) -> Result<ObjectLimits, ConfigError> {
    up_to("object.max_requests", object.max_requests as u64, MAX_OBJECT_REQUESTS)?;
    up_to("object.queue_orders", object.queue_orders as u64, MAX_OBJECT_ORDERS)?;
    nonzero("object.write_after_uses", object.write_after_uses.into())?;
    nonzero("object.request_timeout_ms", object.request_timeout_ms)?;
    nonzero("object.read_deadline_ms", object.read_deadline_ms)?;
    nonzero("object.find_deadline_ms", object.find_deadline_ms)?;
    if !is_url_of_a_store(&object.url) {
        return Err(ConfigError::ObjectUrl(object.url.clone()));
    }
    if let Some(key) = unknown_setting(&object.url, &object.settings) {
        return Err(ConfigError::ObjectSetting { url: object.url.clone(), key: key.to_owned() });
    }
    let mut settings = object.settings.clone();
    if let Some(endpoint) = &object.endpoint {
        if endpoint.starts_with("http://") && !object.allow_http {
            return Err(ConfigError::ObjectHttp(endpoint.clone()));
        }
        settings.insert("endpoint".to_owned(), endpoint.clone());
    }
    let options = ObjectOptions {
        url: object.url.clone(),
        settings,
        allow_http: object.allow_http,
        start_without: true,
        writes: object.write != ObjectWrite::Off,
        queue_orders: object.queue_orders,
        max_in_flight: object.max_requests,
        bytes_in_flight: OBJECT_BYTES_IN_FLIGHT,
        timeout: Duration::from_millis(object.request_timeout_ms),
        deadline: Duration::from_millis(object.read_deadline_ms),
        find_deadline: Duration::from_millis(object.find_deadline_ms),
        known_chunks: OBJECT_KNOWN_BLOCKS,
        cpus: actors.first().map(|actor| actor.cpus.clone()).unwrap_or_default(),
    };
    let known_chunks = OBJECT_KNOWN_CHUNKS / actors.len().max(1);
    Ok(ObjectLimits { options, known_chunks })
}

fn nonzero(key: &'static str, number: u64) -> Result<(), ConfigError> {
    if number == 0 { Err(ConfigError::Zero(key)) } else { Ok(()) }
}

fn policy(key: &'static str, name: &str) -> Result<PolicyName, ConfigError> {
    name.parse().map_err(|unknown| ConfigError::Policy { key, unknown })
}

fn up_to(key: &'static str, number: u64, most: u64) -> Result<(), ConfigError> {
    nonzero(key, number)?;
    if number > most { Err(ConfigError::TooMany { key, number, most }) } else { Ok(()) }
}

/// The share of number `i` of `parts` in `whole`. The shares add up to `whole`, and differ by at most one.
fn share(whole: u64, i: u64, parts: u64) -> u64 {
    whole / parts + u64::from(i < whole % parts)
}

fn fraction(bytes: u64, fraction: f64) -> u64 {
    (bytes as f64 * fraction) as u64
}

/// The default part of the memory outside the arena that all write windows may take together, as a divisor.
const WINDOWS_SHARE: u64 = 2;

/// Memory that a node takes besides the arena and the windows while it has few chunks. With a cluster, a disk and three engines it
/// took 47 MiB.
const OWN_BYTES: u64 = 64 << 20;

/// The index of blocks and the directory's rows, as a part of the arena, as a divisor. `deploy/kubernetes/resources` has it too.
const INDEX_SHARE: u64 = 64;

/// All windows together, by default, where the arena leaves little.
const LEAST_WINDOWS_BYTES: u64 = 32 << 20;

/// The arena must leave as much as this: with less, the kernel would kill the node.
pub(super) const LEAST_LEFT_BYTES: u64 = OWN_BYTES + LEAST_WINDOWS_BYTES;

/// Maximum number of connections of a tenant beside its sessions.
const MOST_OTHER_CONNECTIONS: u32 = 256;

/// The port of HTTP.
const HTTP_PORT: u16 = 9440;

/// The part of the memory for rows of the directory, as a divisor.
const DIRECTORY_SHARE: u64 = 32;

/// Bytes of a row, including the room that tables keep free.
const ROW_BYTES: u64 = 17;

/// Rows that even a node of little memory keeps: 17 MiB.
const MIN_DIRECTORY_ROWS: u64 = 1 << 20;

/// Default number of extents of an actor's arena.
const DEFAULT_EXTENTS: u64 = 32;

/// How long any drive may take for an operation, such as a sync of many bytes.
const LEAST_SILENCE: Duration = Duration::from_secs(1);

/// Maximum number of requests to an object store at a time: far more than any store serves one node.
const MAX_OBJECT_REQUESTS: u64 = 65_536;

/// Maximum number of orders that wait for an object store. Each takes a few hundred bytes.
const MAX_OBJECT_ORDERS: u64 = 1 << 20;

#[cfg(test)]
mod tests;
