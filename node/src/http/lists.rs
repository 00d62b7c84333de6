//! The lists that a node shows: namespaces, sessions, pins, tenants.
//!
//! The lists leave out actors that do not answer in time; `GET /status` then says that the node is not ready.

use std::collections::BTreeMap;
use std::path::PathBuf;

use larder_core::store::NamespaceFacts;
use larder_core::store::ids::TenantId;
use larder_protocol::namespace::HashAlgorithm;
use larder_protocol::{ChunkHash, sha256_cbor};
use serde::{Deserialize, Serialize};

use super::HttpState;
use crate::actor::{GpuActor, Holdings, SessionSeen};
use crate::tenants::Tenant;

/// A namespace in the list that `GET /namespaces` returns: the facts that a router needs to ask for prompts in the namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamespaceStatus {
    /// The namespace's tenant.
    pub tenant: String,
    /// Name of the model.
    pub model: String,
    /// The namespace's fingerprint, which is part of every key: 64 hexadecimal digits.
    pub fingerprint: String,
    /// Tokens of one chunk.
    pub chunk_tokens: u32,
    /// How to hash chunks from tokens, as the coordinator's `/v1/prefix` takes it; `None` if only the engines can compute the
    /// hashes.
    pub hash: Option<HashStatus>,
    /// Open sessions that registered the namespace, over all actors.
    pub sessions: u64,
    /// The namespace's chunks in the node, over all actors.
    pub chunks: u64,
}

/// How the chunks of a namespace are hashed from tokens.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum HashStatus {
    /// Larder's own hash.
    Larder,
    /// vLLM's hash.
    Sha256Cbor {
        /// The seed of the engines' hash.
        seed: String,
        /// Tokens of one engine block.
        block_tokens: u32,
    },
}

/// A session in the list that `GET /sessions` returns.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionStatus {
    /// The device that serves the session.
    pub device: u16,
    /// The session's number at that device.
    pub session: u32,
    /// The session's tenant.
    pub tenant: String,
    /// The name that the engine gave itself.
    pub client: String,
    /// The engine's process; `None` if it is in a PID namespace that the node does not see.
    pub pid: Option<u32>,
    /// Namespaces that the session registered.
    pub namespaces: u64,
    /// The fingerprints of these namespaces, 64 hexadecimal digits each.
    pub fingerprints: Vec<String>,
    /// The session's last request; `None` before the first request.
    pub last_request: Option<String>,
    /// Milliseconds since the last request.
    pub idle_ms: Option<u64>,
    /// Leases.
    pub leases: u64,
    /// Blocks that are leased.
    pub leased_blocks: u64,
    /// Reservations.
    pub reservations: u64,
    /// Bytes of reserved slots.
    pub reserved_bytes: u64,
    /// Bytes of the session's write window.
    pub window_bytes: u64,
}

/// A pin in the list that `GET /pins` returns.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PinStatus {
    /// The device that keeps the chunks.
    pub device: u16,
    /// The pin's number at that device, for `larder unpin`.
    pub pin: u64,
    /// The pin's tenant.
    pub tenant: String,
    /// Chunks that the pin keeps.
    pub chunks: u64,
    /// Bytes of these chunks.
    pub bytes: u64,
    /// Seconds until the pin ends.
    pub seconds_left: f64,
}

/// A tenant in the list that `GET /tenants` returns: the tenant's part of the node, over all actors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantStatus {
    /// The tenant's name.
    pub tenant: String,
    /// The socket for the tenant's sessions.
    pub socket: PathBuf,
    /// Open sessions.
    pub sessions: u64,
    /// Pins.
    pub pins: u64,
    /// Bytes that the pins keep.
    pub pinned_bytes: u64,
    /// Bytes of the extents that the tenant holds.
    pub arena_bytes: u64,
    /// Limit of the extents' bytes.
    pub arena_limit_bytes: u64,
}

/// The namespaces that any actor knows, each once.
pub(super) async fn namespaces(state: &HttpState) -> Vec<NamespaceStatus> {
    let answers = state
        .ask_actors(|actor| actor.core.store().namespaces().collect::<Vec<_>>())
        .await
        .flat_map(|(_, known)| known);
    let mut known = BTreeMap::<_, NamespaceStatus>::new();
    for facts in answers {
        let (sessions, chunks) = (u64::from(facts.sessions), u64::from(facts.chunks));
        let status = known.entry(facts.fingerprint).or_insert_with(|| namespace_status(facts));
        status.sessions += sessions;
        status.chunks += chunks;
    }
    let mut namespaces: Vec<_> = known.into_values().collect();
    namespaces.sort();
    namespaces
}

fn namespace_status(facts: NamespaceFacts) -> NamespaceStatus {
    let hash = match sha256_cbor::seed_of(&facts.hash) {
        Some(seed) => {
            Some(HashStatus::Sha256Cbor { seed: seed.to_owned(), block_tokens: facts.engine_block_tokens })
        }
        None => (facts.hash == HashAlgorithm::Larder).then_some(HashStatus::Larder),
    };
    NamespaceStatus {
        tenant: facts.tenant,
        model: facts.model,
        fingerprint: ChunkHash(facts.fingerprint.0).to_string(),
        chunk_tokens: facts.chunk_tokens,
        hash,
        sessions: 0,
        chunks: 0,
    }
}

/// Every open session.
pub(super) async fn sessions(state: &HttpState) -> Vec<SessionStatus> {
    let mut sessions = Vec::new();
    for (device, Holdings { sessions: held, .. }) in state.ask_actors(GpuActor::holdings).await {
        sessions.extend(held.into_iter().map(|SessionSeen { facts, client, namespaces, last }| {
            SessionStatus {
                device,
                session: facts.session.0,
                tenant: state.tenant(facts.tenant),
                client: client.name,
                pid: client.pid,
                namespaces: facts.namespaces,
                fingerprints: namespaces.iter().map(|namespace| ChunkHash(namespace.0).to_string()).collect(),
                last_request: last.map(|(request, _)| request.to_owned()),
                idle_ms: last.map(|(_, idle)| idle.as_millis() as u64),
                leases: facts.leases,
                leased_blocks: facts.leased_blocks,
                reservations: facts.reservations,
                reserved_bytes: facts.reserved_bytes,
                window_bytes: facts.window_bytes,
            }
        }));
    }
    sessions
}

/// Every pin.
pub(super) async fn pins(state: &HttpState) -> Vec<PinStatus> {
    let mut pins = Vec::new();
    for (device, Holdings { pins: held, .. }) in state.ask_actors(GpuActor::holdings).await {
        pins.extend(held.into_iter().map(|facts| PinStatus {
            device,
            pin: facts.pin,
            tenant: state.tenant(facts.tenant),
            chunks: facts.chunks,
            bytes: facts.bytes,
            seconds_left: facts.left_ms as f64 / 1_000.0,
        }));
    }
    pins
}

/// Every tenant that is served or still has memory.
pub(super) async fn tenants(state: &HttpState) -> Vec<TenantStatus> {
    let known = state.tenants.all();
    let named = |tenant: &Tenant| {
        let (tenant, socket) = (tenant.name.clone(), tenant.socket.clone());
        TenantStatus { tenant, socket, ..TenantStatus::default() }
    };
    let mut tenants: Vec<TenantStatus> = known.iter().map(named).collect();
    for (_, Holdings { sessions, pins, tenants: extents }) in state.ask_actors(GpuActor::holdings).await {
        for (status, (held, limit)) in tenants.iter_mut().zip(extents) {
            status.arena_bytes += held;
            status.arena_limit_bytes += limit;
        }
        for SessionSeen { facts, .. } in sessions {
            if let Some(status) = tenants.get_mut(usize::from(facts.tenant.0)) {
                status.sessions += 1;
            }
        }
        for facts in pins {
            if let Some(status) = tenants.get_mut(usize::from(facts.tenant.0)) {
                status.pins += 1;
                status.pinned_bytes += facts.bytes;
            }
        }
    }
    let is_of_use = |(status, tenant): &(TenantStatus, &Tenant)| tenant.is_served || status.arena_bytes > 0;
    let tenants = tenants.into_iter().zip(&known).filter(is_of_use).map(|(status, _)| status);
    tenants.collect()
}

impl HttpState {
    pub(super) fn tenant(&self, tenant: TenantId) -> String {
        self.tenants.name(tenant)
    }
}
