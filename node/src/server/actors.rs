//! Starts the actors, each on its own thread, and takes their memory from the system.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use actix::Actor as _;
use actix_rt::Arbiter;
use futures_util::FutureExt as _;
use futures_util::future::try_join_all;
use larder_net::audit::Audit;
use larder_net::blocking::blocking;
use tokio::sync::{mpsc, watch};

use super::object::Objects;
use super::{ServeError, disk};
use crate::actor::{GpuActor, Parts};
use crate::arena::Arena;
use crate::clock::Clock;
use crate::cluster::Cluster;
use crate::copy::CopyPool;
use crate::device_lane::{DevicePlace, Devices};
use crate::disk::DiskMetrics;
use crate::events::Feed;
use crate::filling::{self, Arrival, MemoryProgress};
use crate::hands::{Hands, Peers, Renewals};
use crate::hardware::{DeviceHardware, HardwareStatus};
use crate::http::HttpState;
use crate::limits::{ActorLimits, Limits};
use crate::lookup_log::Recorder;
use crate::metrics::SharedMetrics;
use crate::session::SessionActor;
use crate::siblings::{Sibling, Siblings};
use crate::threads;

/// The parts that all actors share.
pub(super) struct NodeParts {
    pub(super) metrics: SharedMetrics,
    pub(super) clock: Clock,
    pub(super) tenants: Arc<[String]>,
    pub(super) logs: (Option<Recorder>, Audit),
    pub(super) objects: Option<Objects>,
    pub(super) devices: Devices,
    pub(super) filling: Arc<MemoryProgress>,
}

/// Looks for the GPUs whose memory the configuration takes. Nodes without such GPUs need no driver.
pub(super) async fn find_gpus(devices: &Devices, actors: &[ActorLimits]) -> Result<(), ServeError> {
    for (device, actor) in (0..).zip(actors).filter(|(_, actor)| actor.device.tier_bytes > 0) {
        let (devices, pci) = (devices.clone(), actor.pci);
        let found = blocking(move || devices.find(pci)).await;
        found.map_err(|source| ServeError::Gpu { device, source })?;
    }
    Ok(())
}

/// The task that takes an actor's memory. It returns the actor's part of the machine.
pub(super) type Filling = actix_rt::task::JoinHandle<Result<DeviceHardware, ServeError>>;

/// Starts all actors, one after the other; their memory comes later.
pub(super) async fn start_actors(
    limits: &[ActorLimits],
    shared: &NodeParts,
    cluster: Option<&Cluster>,
) -> Result<(Vec<(SessionActor, Arbiter)>, Vec<Feed>, Vec<Filling>), ServeError> {
    disk::warn_of_leftovers(limits);
    let (mut actors, mut feeds, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    let addresses = Arc::<OnceLock<Vec<Sibling>>>::default();
    let mut siblings = Siblings::of(limits.len() as u16, &addresses).into_iter().filter(|_| limits.len() > 1);
    for (device, limits) in (0..).zip(limits) {
        let feed = Feed::new(device);
        let peers = cluster.and_then(|cluster| cluster.peers(device));
        let (actor, arbiter, filling) =
            start_actor(device, limits, shared, feed.clone(), siblings.next(), peers).await?;
        actors.push((actor, arbiter));
        feeds.push(feed);
        memory.push(filling);
    }
    let sibling = |(actor, _): &(SessionActor, Arbiter)| Sibling {
        blocks: actor.address.clone().recipient(),
        tell: actor.address.clone().recipient(),
    };
    _ = addresses.set(actors.iter().map(sibling).collect());
    Ok((actors, feeds, memory))
}

/// Waits until all memory is there, calls `then`, and waits on forever. Returns only if the system does not give the memory.
pub(super) async fn memory_is_there(
    memory: Vec<Filling>,
    limits: &Limits,
    state: &HttpState,
    then: impl FnOnce(),
) -> ServeError {
    let mut hardware = HardwareStatus::new(limits, &state.metrics);
    let filled = memory.into_iter().map(|filling| {
        filling.map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())))
    });
    match try_join_all(filled).await {
        Ok(devices) => hardware.devices = devices,
        Err(error) => return error,
    }
    _ = state.hardware.set(hardware);
    state.filling.end();
    tracing::info!(node = state.name, "the node serves");
    then();
    std::future::pending().await
}

/// Takes an actor's memory from the system.
async fn fill(
    device: u16,
    limits: ActorLimits,
    arrivals: mpsc::Sender<Arrival>,
    (progress, metrics, clock): (Arc<MemoryProgress>, SharedMetrics, Clock),
) -> Result<DeviceHardware, ServeError> {
    let started = clock.elapsed();
    let filled = filling::fill(limits.arena.clone(), arrivals, progress).await;
    let placement = filled.map_err(|source| ServeError::Arena { device, source })?;
    tracing::info!(device, bytes = limits.arena.bytes(), took = ?(clock.elapsed() - started), "the arena has all its memory");
    Ok(DeviceHardware::of(device, &limits, &placement, &metrics))
}

/// Starts an actor on its own thread, on the CPUs near its GPU, and starts to take its memory.
async fn start_actor(
    device: u16,
    limits: &ActorLimits,
    NodeParts { metrics, clock, tenants, logs: (recorder, audit), objects, devices, filling }: &NodeParts,
    feed: Feed,
    siblings: Option<Siblings>,
    peers: Option<Peers>,
) -> Result<(SessionActor, Arbiter, Filling), ServeError> {
    let (arrivals, arriving) = mpsc::channel((limits.arena.extents as usize).max(1));
    let copy_pool = CopyPool::start(&format!("larder-copy-{device}"), &limits.copy);
    let copy_pool = copy_pool.map_err(|source| ServeError::CopyPool { device, source })?;
    let disk_metrics =
        limits.disk.as_ref().map(|_| DiskMetrics::new(metrics.registry(), device)).transpose()?;
    let (disk, disk_trouble) = disk::start(device, limits.disk.as_ref().zip(disk_metrics.clone())).await;
    let mut store_limits = limits.store.clone();
    store_limits.disk = store_limits.disk.filter(|_| disk.is_some());
    let stored = objects.as_ref().and_then(|objects| objects.parts());
    store_limits.object = store_limits.object.filter(|_| stored.is_some());
    let (devices, pci, cpus) = (devices.clone(), limits.pci, limits.cpus.clone());
    let place = DevicePlace { devices, device, pci, cpus };
    let (lives, watch_lives) = watch::channel(0);
    let (ended_grants, ends) = mpsc::unbounded_channel();
    let hands = Hands {
        arena: Arena::planned(&limits.arena),
        copy_pool: Arc::new(copy_pool),
        metrics: metrics.of_actor(device, disk_metrics),
        clock: *clock,
        audit: audit.clone(),
        recorder: recorder.clone(),
        siblings,
        peers,
        feed,
        disk,
        disk_trouble,
        objects: stored,
        renewals: Renewals::default(),
        followers: HashMap::new(),
        ended_grants,
    };
    let (device_place, tenants) = ((place, limits.device), Arc::clone(tenants));
    let actor = GpuActor::new(Parts {
        store: store_limits,
        device: device_place,
        tenants,
        arriving,
        ended_grants: ends,
        lives,
        hands,
    });
    let arbiter = threads::arbiter(format!("larder-gpu-{device}"), &limits.cpus);
    let arbiter = arbiter.map_err(|source| ServeError::Thread { device, source })?;
    let address = GpuActor::start_in_arbiter(&arbiter.handle(), move |_| actor);
    let told = (Arc::clone(filling), Arc::clone(metrics), *clock);
    let filling = actix_rt::spawn(fill(device, limits.clone(), arrivals, told));
    let session_actor = SessionActor {
        address,
        arbiter: arbiter.handle(),
        numa_node: limits.numa_node,
        lives: watch_lives,
        sessions: Arc::default(),
    };
    Ok((session_actor, arbiter, filling))
}
