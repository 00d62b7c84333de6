//! Starts a node and stops it.

mod actors;
mod disk;
mod error;
mod member;
mod object;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use actix::Addr;
use actix_rt::Arbiter;
use actix_web::web::{Data, ServiceConfig};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use larder_net::audit::{self, Audit};
use larder_net::blocking::{blocking, try_blocking};
use larder_net::line_file::last_lines;
use larder_net::reload::ReloadTimes;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::timeout;

use self::actors::{NodeParts, find_gpus, memory_is_there, start_actors};
pub use self::error::ServeError;
use self::member::{join_cluster, start_cluster, to_leave};
use self::object::Objects;
use crate::actor::GpuActor;
use crate::clock::{Clock, now_us};
use crate::cluster::Cluster;
use crate::config::EventTokens;
use crate::described::Descriptions;
use crate::device_lane::Devices;
use crate::drain::{Drains, Ended};
use crate::events::Feed;
use crate::filling::MemoryProgress;
use crate::http::{Findings, HttpState, new_followers, routes};
use crate::kv_events::KvEvents;
use crate::limits::{Limits, TenantLimits};
use crate::lookup_log::Recorder;
use crate::metrics::{Metrics, SharedMetrics};
use crate::processes::Processes;
use crate::purge::Purges;
use crate::reload::{Changeable, Reloadable, Reloads};
use crate::session::{BindError, SessionActor, SessionSettings};
use crate::tenants::{ChangeTenants, Doors, Tenants};

/// The facts of a node that serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// Address of the node's HTTP server.
    pub http: SocketAddr,
    /// The socket of each tenant.
    pub sockets: BTreeMap<String, PathBuf>,
}

/// Serves until `stop` is ready, then ends the running work within [`STOP_WITHIN`]. Sessions are accepted while the memory still
/// comes, extent by extent; `on_ready` is called once, when all memory is there. With `reloadable`, the configuration can change
/// meanwhile. Needs an actix system.
///
/// # Errors
/// [`ServeError`]: the node could not start to serve, or could not go on.
///
/// # Cancel safety
/// If dropped, the node stops serving without a grace time.
pub async fn run(
    limits: Limits,
    reloadable: Option<Reloadable>,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<Ended, ServeError> {
    run_on(Devices::cuda(), limits, reloadable, on_ready, stop).await
}

/// Like [`run`], but on `devices` in place of the machine's GPUs.
///
/// # Errors
/// As [`run`].
///
/// # Cancel safety
/// As [`run`].
pub async fn run_on(
    devices: Devices,
    limits: Limits,
    reloadable: Option<Reloadable>,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<Ended, ServeError> {
    let (stop, (begun, has_begun)) = (stop.shared(), oneshot::channel());
    let serving = start_and_serve(devices, limits, reloadable, on_ready, (begun, stop.clone()));
    tokio::select! {
        ended = serving => ended,
        // A drive or folder that hangs may keep the node from serving for ever.
        () = stopped_before(has_begun, stop) => {
            tracing::info!("the node stops before it serves");
            Ok(Ended::Stopped)
        }
    }
}

/// Ready if the node is told to stop before the start is over.
async fn stopped_before(start_is_over: oneshot::Receiver<()>, stop: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        Ok(()) = start_is_over => std::future::pending().await,
        () = stop => {}
    }
}

async fn start_and_serve(
    devices: Devices,
    limits: Limits,
    reloadable: Option<Reloadable>,
    on_ready: impl FnOnce(Ready),
    (begun, stop): (oneshot::Sender<()>, impl Future<Output = ()>),
) -> Result<Ended, ServeError> {
    let (clock, reload_times) = (Clock::start(), reloadable.as_ref().map(Reloadable::times));
    find_gpus(&devices, &limits.actors).await?;
    raise_open_files();
    let metrics: SharedMetrics = Arc::new(Metrics::new()?);
    let (listener, http) = bind(limits.http_listen)?;
    let (sockets, tenants_here) = (sockets_of(&limits), Tenants::default());
    let state = new_state(&limits, &tenants_here, &metrics, clock);
    // Health checks are answered from here on: a large arena takes long to make.
    let (server, serving) = serve_http(listener, http, Arc::clone(&state))?;

    let tenants: Arc<[String]> = limits.tenants.iter().map(|tenant| tenant.name.clone()).collect();
    let (recorder, recording) = start_recorder(&limits, &metrics).await?.unzip();
    let (audit, auditing) = start_audit(&limits).await?;
    let mut cluster = start_cluster(&limits, &metrics, clock).await?;
    let objects = Objects::start(limits.object.as_ref(), &metrics, &state).await?;
    let stored = objects.as_ref().map(Objects::tier);
    let filling = Arc::clone(&state.filling);
    let logs = (recorder, audit.clone());
    let shared = NodeParts { metrics: Arc::clone(&metrics), clock, tenants, logs, objects, devices, filling };
    let (actors, feeds, memory) = start_actors(&limits.actors, &shared, cluster.as_ref()).await?;
    drop(shared);
    let sessions: Vec<SessionActor> = actors.iter().map(|actor| actor.0.clone()).collect();
    let descriptions = new_descriptions(&limits);
    let told = (&metrics, &descriptions);
    let doors =
        open_doors(&limits, tenants_here.clone(), sessions.clone(), told, state.stopping.subscribe())?;
    let (change_tenants, tenants_change) = mpsc::channel(1);
    let listening = Task(actix_rt::spawn(doors.change_when_told(tenants_change)));
    let addresses: Vec<_> = sessions.iter().map(|actor| actor.address.clone()).collect();
    let reloads = new_reloads(reloadable, &audit, &state);
    let purges = Purges::new(clock, audit.clone());
    purges.begin(&addresses, stored);
    let by_admins = (&reloads, &purges, &state);
    // An error: the node is told to stop at this very moment, and drops this future.
    _ = begun.send(());
    let drains = join_cluster(cluster.as_mut(), &limits, &addresses, http, by_admins).await;
    let tenants = (tenants_here, change_tenants);
    let reloading =
        start_reloading((reloads, reload_times), &addresses, tenants, cluster.as_ref(), drains.as_ref());
    let feeds: Vec<_> = feeds.into_iter().zip(addresses.iter().cloned()).collect();
    let publishing = publish_events(&limits, &feeds, &state, descriptions).await?;
    _ = state.actors.set(feeds);
    tracing::info!(node = limits.name, %http, "sessions are accepted");
    let filled = memory_is_there(memory, &limits, &state, || on_ready(Ready { http, sockets }));

    let mut serving = pin!(serving);
    let (ended, how) = tokio::select! {
        ended = &mut serving => (Some(ended), Ended::Stopped),
        how = to_leave(stop, drains.as_ref(), &addresses, &audit) => (None, how),
        device = actor_ended(&sessions) => return Err(ServeError::Actor(device)),
        error = filled => return Err(error),
    };
    tracing::info!(node = limits.name, "the node stops");
    reloading.abort();
    drop(listening);
    publishing.into_iter().for_each(|publishing| publishing.abort());
    leave(cluster).await;
    state.stopping.send_replace(true);
    wait_for_sessions(&sessions).await;
    if ended.is_none() {
        server.stop().await;
    }
    end_threads(actors.into_iter().map(|(_, arbiter)| arbiter)).await;
    end_logs(&audit, [recording, auditing]).await;
    match ended {
        Some(ended) => ended.unwrap_or_else(|error| Err(error.into())),
        None => serving.await.unwrap_or_else(|error| Err(error.into())),
    }
    .map_err(|source| ServeError::Serve { http, source })?;
    Ok(how)
}

/// The socket of each tenant.
fn sockets_of(limits: &Limits) -> BTreeMap<String, PathBuf> {
    limits.tenants.iter().map(|tenant| (tenant.name.clone(), tenant.socket.clone())).collect()
}

fn bind(listen: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let failed = |source| ServeError::Listen { listen, source };
    let listener = TcpListener::bind(listen).map_err(failed)?;
    let http = listener.local_addr().map_err(failed)?;
    Ok((listener, http))
}

/// Makes the reloads, through which `state` also examines the host.
fn new_reloads(reloadable: Option<Reloadable>, audit: &Audit, state: &HttpState) -> Reloads {
    let reloads = Reloads::new(reloadable, audit.clone());
    let examiner = reloads.clone();
    // An error: the examiner is already set.
    _ = state.examiner.set(Arc::new(move || {
        let examiner = examiner.clone();
        Box::pin(async move { examiner.examine().await })
    }));
    reloads
}

/// Takes changes of the configuration from now on.
fn start_reloading(
    (reloads, times): (Reloads, Option<ReloadTimes>),
    actors: &[Addr<GpuActor>],
    (tenants, change_tenants): (Tenants, mpsc::Sender<ChangeTenants>),
    cluster: Option<&Cluster>,
    drains: Option<&Drains>,
) -> tokio::task::JoinHandle<()> {
    reloads.begin(Changeable {
        actors: actors.to_vec(),
        tenants,
        change_tenants,
        peers: cluster.map(Cluster::peer_actor),
        drains: drains.cloned(),
    });
    actix_rt::spawn(reloads.watch(times))
}

/// The state that the HTTP server shows before anything runs.
fn new_state(limits: &Limits, tenants: &Tenants, metrics: &SharedMetrics, clock: Clock) -> Arc<HttpState> {
    Arc::new(HttpState {
        name: limits.name.clone(),
        incarnation: now_us(),
        tenants: tenants.clone(),
        actors: OnceLock::new(),
        cluster: OnceLock::new(),
        filling: Arc::new(MemoryProgress::new(limits.actors.iter().map(|actor| actor.arena.bytes()).sum())),
        hardware: OnceLock::new(),
        object: OnceLock::new(),
        kv_events: OnceLock::new(),
        drains: OnceLock::new(),
        followers: new_followers(),
        stopping: watch::Sender::new(false),
        examiner: OnceLock::new(),
        findings: Findings::default(),
        what_if: Arc::default(),
        metrics: Arc::clone(metrics),
        clock,
    })
}

/// Takes engines' descriptions of chunks. Keeps them only if events include tokens.
fn new_descriptions(limits: &Limits) -> Descriptions {
    let tells = limits.kv_events.as_ref().is_some_and(|events| events.tokens != EventTokens::Off);
    let arena_bytes = limits.actors.iter().map(|actor| actor.arena.bytes()).sum();
    let descriptions = if tells { Descriptions::kept(arena_bytes) } else { Descriptions::default() };
    descriptions.tenants_are(limits.tenants.len());
    descriptions
}

/// Publishes events in vLLM's format, if the configuration says so.
async fn publish_events(
    limits: &Limits,
    actors: &[(Feed, Addr<GpuActor>)],
    state: &HttpState,
    descriptions: Descriptions,
) -> Result<Option<actix_rt::task::JoinHandle<()>>, ServeError> {
    let Some(config) = &limits.kv_events else { return Ok(None) };
    let failed = |(listen, source)| ServeError::KvEvents { listen, source };
    let (events, bound) = KvEvents::bind(config, &limits.name, descriptions).await.map_err(failed)?;
    tracing::info!(listen = %bound.listen, replay = ?bound.replay, tokens = ?config.tokens, "events are published");
    _ = state.kv_events.set(bound);
    Ok(Some(actix_rt::spawn(events.publish(actors.to_vec()))))
}

/// Waits until an actor has ended. Only a fault of Larder ends an actor.
async fn actor_ended(actors: &[SessionActor]) -> u16 {
    loop {
        tokio::time::sleep(ACTORS_LOOKED_AT).await;
        let ended = (0..).zip(actors).find(|(_, actor)| !actor.address.connected());
        if let Some((device, _)) = ended {
            return device;
        }
    }
}

/// Leaves the cluster. A thread that hangs ends with the process.
async fn leave(cluster: Option<Cluster>) {
    if let Some(cluster) = cluster
        && timeout(THREADS_END_WITHIN, cluster.leave()).await.is_err()
    {
        tracing::error!("the thread between nodes hangs: it ends with the process");
    }
}

/// Ends the actors' threads. Those that hang end with the process.
async fn end_threads(arbiters: impl Iterator<Item = Arbiter>) {
    let end = async |(device, arbiter): (u16, Arbiter)| {
        arbiter.stop();
        // The thread ends when its tasks are dropped, and the arena with it.
        match timeout(THREADS_END_WITHIN, try_blocking(move || arbiter.join())).await {
            Ok(Ok(Ok(()))) => {}
            Ok(_) => tracing::error!(device, "the actor's thread ended in a panic"),
            Err(_) => tracing::error!(device, "the actor's thread hangs: it ends with the process"),
        }
    };
    join_all((0..).zip(arbiters).map(end)).await;
}

/// Waits until the logs have their last lines, but not for ever.
async fn end_logs(audit: &Audit, threads: [Option<JoinHandle<()>>; 2]) {
    audit.end();
    join_all(threads.map(last_lines)).await;
}

/// Allows this process as many open files as the system permits: every extent, session and engine process has a descriptor.
fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(?current, %error, "cannot raise the limit of open files to the system's maximum");
    }
}

/// A task that ends when it is dropped.
struct Task(actix_rt::task::JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

type Serving = actix_rt::task::JoinHandle<std::io::Result<()>>;

fn serve_http(
    listener: TcpListener,
    http: SocketAddr,
    state: Arc<HttpState>,
) -> Result<(larder_net::http::Handle, Serving), ServeError> {
    let connections = state.metrics.connections.clone();
    let state = Data::new(state);
    let configure = move |service: &mut ServiceConfig| _ = service.app_data(state.clone()).configure(routes);
    let (handle, server) = larder_net::http::serve(listener, connections, STOP_WITHIN, configure)
        .map_err(|source| ServeError::Serve { http, source })?;
    Ok((handle, actix_rt::spawn(server)))
}

async fn start_recorder(
    limits: &Limits,
    metrics: &SharedMetrics,
) -> Result<Option<(Recorder, JoinHandle<()>)>, ServeError> {
    let Some(config) = limits.record.clone() else { return Ok(None) };
    let (path, lost) = (config.path.clone(), metrics.unrecorded());
    let started = blocking(move || Recorder::start(config, lost)).await;
    started.map(Some).map_err(|source| ServeError::Record { path, source })
}

async fn start_audit(limits: &Limits) -> Result<(Audit, Option<JoinHandle<()>>), ServeError> {
    let Some(config) = limits.audit.clone() else { return Ok((Audit::default(), None)) };
    let path = config.path.clone();
    let server = audit::Server::Node(limits.name.clone());
    let started = blocking(move || Audit::start(config, server)).await;
    let (audit, thread) = started.map_err(|source| ServeError::Audit { path, source })?;
    Ok((audit, Some(thread)))
}

fn open_doors(
    limits: &Limits,
    tenants: Tenants,
    actors: Vec<SessionActor>,
    (metrics, descriptions): (&SharedMetrics, &Descriptions),
    stopping: watch::Receiver<bool>,
) -> Result<Doors, ServeError> {
    let addresses = actors.iter().map(|actor| actor.address.clone()).collect();
    limits.session.shortage().iter().for_each(|shortage| tracing::warn!("{shortage}: raise LimitNOFILE"));
    let settings = SessionSettings {
        node: limits.name.clone(),
        actors,
        limits: limits.session.clone(),
        places: Arc::new(Semaphore::new(limits.session.max_sessions_in_all as usize)),
        processes: Processes::new(addresses, limits.session.max_lingering_processes),
        metrics: Arc::clone(metrics),
        descriptions: descriptions.clone(),
        sampler: limits.sampler,
        stopping,
    };
    let failed = |(tenant, source): (TenantLimits, BindError)| ServeError::Socket {
        tenant: tenant.name,
        path: tenant.socket,
        source,
    };
    Doors::open(&limits.tenants, tenants, settings).map_err(failed)
}

/// Waits until the sessions have ended, after the node told them that it stops.
async fn wait_for_sessions(actors: &[SessionActor]) {
    let open = || actors.iter().map(|actor| actor.sessions.load(Ordering::Relaxed)).sum::<u32>();
    let ended = async {
        while open() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if timeout(STOP_WITHIN, ended).await.is_err() {
        tracing::warn!(sessions = open(), "the node stops although sessions are still open");
    }
}

/// How long running work may take when the node stops.
pub const STOP_WITHIN: Duration = Duration::from_secs(2);

/// How long the threads of actors, and those between nodes, may take to end: longer than a tier waits for a drive that hangs.
const THREADS_END_WITHIN: Duration = Duration::from_secs(20);

/// How often the node checks that no actor has ended.
const ACTORS_LOOKED_AT: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[test]
    fn a_node_ends_although_an_actor_hangs() {
        actix_rt::System::new().block_on(async {
            tokio::time::pause();
            let actor = Arbiter::new();
            actor.spawn_fn(|| {
                loop {
                    std::thread::park();
                }
            });
            end_threads(std::iter::once(actor)).await;
        });
    }

    #[tokio::test]
    async fn a_node_that_is_told_to_stop_ends_at_once_as_long_as_it_starts() {
        let (begun, has_begun) = oneshot::channel();
        stopped_before(has_begun, ready(())).await;
        assert!(begun.send(()).is_err());
        let (begun, has_begun) = oneshot::channel();
        begun.send(()).unwrap();
        assert!(stopped_before(has_begun, ready(())).now_or_never().is_none(), "later it ends in order");
    }
}
