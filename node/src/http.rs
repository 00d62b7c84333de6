//! The node's HTTP answers: health, metrics, status, events, lists.
//!
//! `/healthz` asks no actor, so a hanging actor fails no health check. The other paths ask the actors, and give up after
//! `ACTOR_DEADLINE`.

mod counters;
mod doctor;
mod lists;
mod past;
mod prefixes;
mod show;
mod what_if;
mod why;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix::Addr;
use actix_web::web::{Data, ServiceConfig, get, post};
use actix_web::{HttpRequest, HttpResponse, error};
use futures_util::future::join_all;
use futures_util::{FutureExt as _, StreamExt as _};
use larder_net::http::{Open, arguments, in_pieces};
use larder_protocol::drain::{DrainCounts, DrainReport};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::timeout;

pub use self::counters::{LinkStatus, TierHits, UsageStatus};
pub(crate) use self::doctor::{Examiner, Findings};
pub use self::lists::{HashStatus, NamespaceStatus, PinStatus, SessionStatus, TenantStatus};
pub use self::past::{PastLookupStatus, PastStatus};
pub use self::prefixes::PrefixStatus;
pub(crate) use self::what_if::Progress;
pub use self::what_if::{PlayedStatus, TriedStatus, WhatIfStatus};
pub use self::why::{ChainStatus, EvictedStatus, LookupStatus, OtherStatus, RunStatus, StayStatus};
use crate::actor::{ActorReport, GpuActor, ask};
use crate::clock::Clock;
use crate::cluster::ClusterStatus;
use crate::drain::Drains;
use crate::events::{self, AskPage, Feed, PAGE_CHUNKS};
use crate::filling::MemoryProgress;
use crate::guests::Guests;
use crate::hardware::HardwareStatus;
use crate::kv_events::Bound;
use crate::metrics::{SharedMetrics, TenantRates};
use crate::tenants::Tenants;

/// The body of `GET /status`. Parts that a node of another version leaves out count as empty.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Always `node`.
    #[serde(default)]
    pub role: String,
    /// The node's name.
    pub name: String,
    /// This life of the node, as the coordinator knows it; microseconds since 1970 at its start.
    #[serde(default)]
    pub incarnation: u64,
    /// The node's version.
    #[serde(default)]
    pub version: String,
    /// Whether all memory is there and every actor answers.
    pub ready: bool,
    /// Seconds since the node started.
    pub uptime_seconds: f64,
    /// The socket of each tenant.
    #[serde(default)]
    pub sockets: BTreeMap<String, PathBuf>,
    /// Every actor that answers.
    pub actors: Vec<ActorStatus>,
    /// The node's view of its cluster, if it is a member of one.
    pub cluster: Option<ClusterStatus>,
    /// The parts of the machine that the node got; `None` before all memory is there.
    pub hardware: Option<HardwareStatus>,
    /// The state of the object store; `None` if none is configured.
    pub object: Option<ObjectStatus>,
    /// The address where the node publishes vLLM's events; `None` if the node publishes none.
    pub kv_events: Option<SocketAddr>,
    /// The address where the node sends old events again; `None` if the node sends none again.
    #[serde(default)]
    pub kv_events_replay: Option<SocketAddr>,
    /// The progress of the node's drain; `None` if the node does not drain.
    #[serde(default)]
    pub drain: Option<DrainStatus>,
}

/// A drain in [`Status`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DrainStatus {
    /// Seconds until the node leaves, at most.
    pub left_seconds: f64,
    /// Chunks that were in memory at the start.
    pub found_chunks: u64,
    /// Chunks that moved to other nodes.
    pub moved_chunks: u64,
    /// Bytes of the chunks that moved.
    pub moved_bytes: u64,
    /// Chunks that other nodes have anyway.
    pub elsewhere_chunks: u64,
    /// Chunks that the disk or the object store keeps.
    pub kept_below_chunks: u64,
    /// Chunks that no other node takes.
    pub left_chunks: u64,
}

/// One actor in [`Status`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ActorStatus {
    /// The actor's device number.
    pub device: u16,
    /// The eviction policy in force.
    pub policy: String,
    /// Chunks in the host tier.
    pub chunks: u64,
    /// The limit of chunks in the host tier, if there is one.
    pub capacity_chunks: Option<u64>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// Bytes of slots in use.
    pub used_bytes: u64,
    /// Bytes free.
    pub free_bytes: u64,
    /// Bytes that vanished processes may still touch.
    pub quarantined_bytes: u64,
    /// Bytes pinned.
    pub pinned_bytes: u64,
    /// Open sessions.
    pub sessions: u64,
    /// Leases.
    pub leases: u64,
    /// Pins.
    pub pins: u64,
    /// Reservations.
    pub reservations: u64,
    /// Processes that have closed their sessions and may still run.
    pub lingering_processes: u64,
    /// Copies under way between engines' GPU memory and the arena.
    pub device_copies: u64,
    /// Blocks in the device tier.
    pub device_tier_blocks: u64,
    /// Bytes of the slots of these blocks.
    pub device_tier_bytes: u64,
    /// Prompt tokens of all lookups.
    pub tokens_asked: u64,
    /// Prompt tokens found.
    pub tokens_hit: u64,
    /// Chunks evicted.
    pub evictions: u64,
    /// Chunks that other nodes evicted and that moved here.
    #[serde(default)]
    pub forwarded_chunks: u64,
    /// The contents of the disk tier; `None` if there is no disk tier, or it is closed.
    pub disk: Option<DiskStatus>,
    /// Why the disk tier is closed or silent, or does not keep all chunks, or the damage that it found within the last hour, and
    /// the remedy; `None` if all is well or there is no disk tier.
    pub disk_trouble: Option<String>,
    /// Each tenant's recent hit rates, real and for an infinite cache.
    pub tenants: Vec<TenantRates>,
}

/// The disk tier of an actor in [`ActorStatus`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskStatus {
    /// Chunks on disk.
    pub chunks: u64,
    /// Bytes of the tier that chunks take. The tier frees many chunks at a time, so it is never completely full.
    pub used_bytes: u64,
    /// Bytes of the whole tier.
    pub capacity_bytes: u64,
    /// Bytes of chunks that wait to be written.
    pub waiting_bytes: u64,
    /// Chunks that were not written because too many waited.
    pub shed: u64,
}

/// The object tier in [`Status`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ObjectStatus {
    /// The store's URL.
    pub url: String,
    /// Whether the node reads the store.
    pub reads: bool,
    /// Whether the node writes to the store.
    pub writes: bool,
    /// Why the node does not read or write the store, and the remedy.
    pub trouble: Option<String>,
}

/// The state that all requests share.
pub(crate) struct HttpState {
    pub(crate) name: String,
    /// This life of the node, before it joins a cluster.
    pub(crate) incarnation: u64,
    /// The tenants, by number.
    pub(crate) tenants: Tenants,
    /// Set when sessions are accepted.
    pub(crate) actors: OnceLock<Vec<(Feed, Addr<GpuActor>)>>,
    /// The addresses where events are published; set when publishing begins.
    pub(crate) kv_events: OnceLock<Bound>,
    /// The node's drain, if it is in a cluster.
    pub(crate) drains: OnceLock<Drains>,
    /// Reports the node's view of its cluster.
    pub(crate) cluster: OnceLock<Box<dyn Fn() -> ClusterStatus + Send + Sync>>,
    /// Reports the state of the object store, if there is one.
    pub(crate) object: OnceLock<Box<dyn Fn() -> ObjectStatus + Send + Sync>>,
    /// How much of the memory is there.
    pub(crate) filling: Arc<MemoryProgress>,
    /// Set when all memory is there.
    pub(crate) hardware: OnceLock<HardwareStatus>,
    /// Places for followers of events.
    pub(crate) followers: Guests,
    /// Whether the node stops. When it does, sessions and streams of events end.
    pub(crate) stopping: watch::Sender<bool>,
    /// The examination of the host.
    pub(crate) examiner: OnceLock<Examiner>,
    /// The host's last examination.
    pub(crate) findings: Findings,
    /// The progress of playing the last lookups again.
    pub(crate) what_if: Arc<watch::Sender<Progress>>,
    pub(crate) metrics: SharedMetrics,
    pub(crate) clock: Clock,
}

/// Adds all paths.
pub(crate) fn routes(service: &mut ServiceConfig) {
    service
        .route("/healthz", get().to(healthy))
        .route("/readyz", get().to(ready))
        .route("/metrics", get().to(metrics))
        .route("/status", get().to(show::answer))
        .route("/namespaces", get().to(show::answer))
        .route("/sessions", get().to(show::answer))
        .route("/pins", get().to(show::answer))
        .route("/tenants", get().to(show::answer))
        .route("/lookups", get().to(show::answer))
        .route("/links", get().to(show::answer))
        .route("/usage", get().to(show::answer))
        .route("/prefixes", get().to(show::answer))
        .route("/doctor", get().to(show::answer))
        .route("/past", get().to(show::answer))
        .route("/what_if", get().to(show::answer))
        .route("/explain", post().to(show::answer))
        .route("/events", get().to(events));
}

/// Places for followers of events.
pub(crate) fn new_followers() -> Guests {
    Guests::new(MAX_FOLLOWERS, MAX_FROM_ONE_ADDRESS)
}

async fn healthy() -> &'static str {
    "ok\n"
}

/// The node is ready if all memory is there, every actor answers, the node does not drain, and it was once a member of its
/// cluster: a rollout waits for this, so a release or certificate that cannot join stops at the first node.
async fn ready(state: Data<Arc<HttpState>>) -> HttpResponse {
    if state.actors.get().is_none() {
        return HttpResponse::ServiceUnavailable().body("the node is still starting: try again\n");
    }
    if !state.filling.is_done() {
        return HttpResponse::ServiceUnavailable().body(format!("{}\n", state.filling.text()));
    }
    if state.drains.get().is_some_and(Drains::is_draining) {
        return HttpResponse::ServiceUnavailable().body("the node drains\n");
    }
    if let Some(cluster) = state.cluster.get().map(|report| report()).filter(|cluster| !cluster.was_member) {
        let reason = cluster.refused.or(cluster.leaderless).unwrap_or_else(|| "no table lists it yet".into());
        return HttpResponse::ServiceUnavailable()
            .body(format!("the node has not joined its cluster: {reason}\n"));
    }
    let reports = state.reports().await.into_iter();
    let silent: Vec<u16> = reports.filter(|(_, report)| report.is_none()).map(|(device, _)| device).collect();
    if silent.is_empty() {
        return HttpResponse::Ok().body("ok\n");
    }
    HttpResponse::ServiceUnavailable().body(format!("no answer from the actors of devices {silent:?}\n"))
}

async fn metrics(state: Data<Arc<HttpState>>) -> actix_web::Result<HttpResponse> {
    for (device, report) in state.reports().await {
        state.metrics.actor_is_up(device, report.is_some());
    }
    // The report also updates the gauges of the cluster.
    let _ = state.cluster.get().map(|report| report());
    let text = state.metrics.render().map_err(error::ErrorInternalServerError)?;
    Ok(in_pieces(prometheus::TEXT_FORMAT, text))
}

/// The held chunks, then the changes, as server-sent events.
async fn events(state: Data<Arc<HttpState>>, request: HttpRequest) -> HttpResponse {
    if let Err(refused) = arguments(request.path(), request.query_string(), &[]) {
        return HttpResponse::BadRequest().body(format!("{refused}\n"));
    }
    let Some(actors) = state.actors.get() else {
        return HttpResponse::ServiceUnavailable().body("the node is still starting: try again\n");
    };
    let from = request.peer_addr().map_or(Ipv4Addr::UNSPECIFIED.into(), |from| from.ip());
    let Some(place) = state.followers.enter(from) else {
        let full = format!(
            "too many clients follow the events: at most {MAX_FOLLOWERS}, and {MAX_FROM_ONE_ADDRESS} of one address: end one, or \
             try again\n"
        );
        return HttpResponse::ServiceUnavailable().body(full);
    };
    let busy = request.conn_data::<Open>().map(Open::busy);
    let pages = |actor: &Addr<GpuActor>| -> AskPage {
        let actor = actor.clone();
        Box::new(move |from| {
            let asked = actor.send(ask(move |actor| actor.core.store().held_from(from, PAGE_CHUNKS)));
            asked.map(|page| page.ok().flatten()).boxed_local()
        })
    };
    let actors = actors.iter().map(|(feed, actor)| (feed.clone(), pages(actor))).collect();
    let mut stopping = state.stopping.subscribe();
    // An error: the state is gone, so the node has ended.
    let stops = async move { _ = stopping.wait_for(|stops| *stops).await };
    let events = events::follow(actors).take_until(Box::pin(stops)).map(move |event| {
        let _held_as_long_as_the_stream = (&place, &busy);
        event
    });
    HttpResponse::Ok()
        .insert_header(("content-type", "text/event-stream"))
        .insert_header(("cache-control", "no-store"))
        .streaming(events)
}

async fn status(state: &HttpState) -> Status {
    let reports = state.reports().await;
    let cluster = state.cluster.get().map(|report| report());
    let joined_as =
        cluster.as_ref().map(|cluster| cluster.incarnation).filter(|&incarnation| incarnation > 0);
    Status {
        role: "node".into(),
        name: state.name.clone(),
        incarnation: joined_as.unwrap_or(state.incarnation),
        version: env!("CARGO_PKG_VERSION").into(),
        ready: state.filling.is_done()
            && !reports.is_empty()
            && reports.iter().all(|(_, report)| report.is_some()),
        uptime_seconds: state.clock.elapsed().as_secs_f64(),
        sockets: state.tenants.sockets(),
        actors: reports
            .into_iter()
            .filter_map(|(device, report)| Some(actor_status(device, &report?)))
            .collect(),
        cluster,
        hardware: state.hardware.get().cloned(),
        object: state.object.get().map(|report| report()),
        kv_events: state.kv_events.get().map(|bound| bound.listen),
        kv_events_replay: state.kv_events.get().and_then(|bound| bound.replay),
        drain: state.drains.get().map(Drains::report).filter(|report| report.is_draining).map(drain_status),
    }
}

fn drain_status(report: DrainReport) -> DrainStatus {
    let DrainCounts { found, moved, moved_bytes, elsewhere, kept_below, left } = report.chunks;
    DrainStatus {
        left_seconds: report.left_ms as f64 / 1_000.0,
        found_chunks: found,
        moved_chunks: moved,
        moved_bytes,
        elsewhere_chunks: elsewhere,
        kept_below_chunks: kept_below,
        left_chunks: left,
    }
}

impl HttpState {
    /// Every actor's report; `None` for an actor that does not answer in time.
    async fn reports(&self) -> Vec<(u16, Option<ActorReport>)> {
        self.ask_each(GpuActor::report).await.collect()
    }

    /// The answers of the actors that answer in time.
    async fn ask_actors<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut GpuActor) -> T + Clone + Send + 'static,
    ) -> impl Iterator<Item = (u16, T)> {
        self.ask_each(what).await.filter_map(|(device, answer)| Some((device, answer?)))
    }

    async fn ask_each<T: Send + 'static>(
        &self,
        what: impl FnOnce(&mut GpuActor) -> T + Clone + Send + 'static,
    ) -> impl Iterator<Item = (u16, Option<T>)> {
        let actors = self.actors.get().into_iter().flatten();
        let asked = actors.map(|(_, actor)| timeout(ACTOR_DEADLINE, actor.send(ask(what.clone()))));
        (0..).zip(join_all(asked).await.into_iter().map(|answer| answer.ok()?.ok()?))
    }
}

fn actor_status(device: u16, report: &ActorReport) -> ActorStatus {
    let usage = &report.usage;
    let (used_bytes, capacity_bytes) = report.disk_fill.unwrap_or_default();
    ActorStatus {
        device,
        policy: report.policy.to_string(),
        chunks: usage.cached_chunks,
        capacity_chunks: usage.capacity_chunks,
        arena_bytes: usage.bytes.total,
        used_bytes: usage.bytes.used,
        free_bytes: usage.bytes.free,
        quarantined_bytes: usage.bytes.quarantined,
        pinned_bytes: usage.pinned_bytes,
        sessions: usage.sessions,
        leases: usage.leases,
        pins: usage.pins,
        reservations: usage.reservations,
        lingering_processes: usage.lingering_processes,
        device_copies: usage.device_copies,
        device_tier_blocks: usage.device_tier.blocks,
        device_tier_bytes: usage.device_tier.used_bytes,
        tokens_asked: report.tokens_asked,
        tokens_hit: report.tokens_hit,
        disk: usage.disk.map(|disk| DiskStatus {
            used_bytes,
            capacity_bytes,
            chunks: disk.chunks,
            waiting_bytes: disk.waiting_bytes,
            shed: disk.shed,
        }),
        disk_trouble: report.disk_trouble.clone(),
        forwarded_chunks: usage.forwards.taken_in,
        evictions: usage.evictions.watermark + usage.evictions.need + usage.evictions.clearing,
        tenants: report.tenants.clone(),
    }
}

/// Maximum number of followers of events at a time, in all and from one address.
const MAX_FOLLOWERS: usize = 64;
const MAX_FROM_ONE_ADDRESS: usize = MAX_FOLLOWERS / 2;

/// How long an actor may take to answer.
const ACTOR_DEADLINE: Duration = Duration::from_millis(500);
