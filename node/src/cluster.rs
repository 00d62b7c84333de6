//! The node in its cluster: the peer thread and its parts.
//!
//! One arbiter with a current-thread runtime runs the QUIC endpoint, the exchange, the directory and the coordinator's client.
//! They share state without locks. They start in the order in which they need each other: the half of the exchange that asks, the
//! directory, the GPU actors (elsewhere), then the half that serves.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use actix_rt::Arbiter;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use larder_net::blocking::try_blocking;
use larder_net::coordinator_client::{Candidate, FollowAs, Known, NodeFacts, follow};
use larder_net::metrics::{CertificateMetrics, Part as _};
use larder_net::quic::{
    BindError, Credentials, CredentialsError, Endpoint, PortShare, RENEWAL_CHECK, TransportSettings,
    renew_when_changed,
};
use larder_net::tcp::{TcpEndpoint, TcpPort};
use larder_net::trace::Sampler;
use larder_protocol::identity::{Identity, Role};
use larder_protocol::table::{MemberState, NodeNumber, Table};
use prometheus::Registry;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use crate::actor::GpuActor;
use crate::clock::Clock;
use crate::directory::{DirectoryActor, DirectoryLimits, DirectoryMetrics};
use crate::drain::Drains;
use crate::exchange::{
    BlockThreads, Common, ConnectedPeers, ExchangeHandle, ExchangeLimits, ExchangeMetrics, NewTable,
    PeerActor, Rooms, Serve, Services, ShowNode, SilentPeers, StartError,
};
use crate::hands::Peers;
use crate::limits::ClusterLimits;
use crate::metrics::table::Membership;
use crate::purge::Purges;
use crate::reload::Reloads;
use crate::threads;
use crate::watched::Watch;

/// The node in its cluster.
pub(crate) struct Cluster {
    name: String,
    limits: ClusterLimits,
    sampler: Sampler,
    arbiter: Arbiter,
    endpoint: Endpoint,
    parts: Parts,
    silent: SilentPeers,
    rooms: Rooms,
    watch: Watch,
    known: watch::Sender<Known>,
    gauges: Membership,
    stop: Option<oneshot::Sender<()>>,
    left: Option<oneshot::Receiver<()>>,
}

/// The parts that ask other nodes, and that serve nodes, admins and coordinators.
struct Parts {
    handle: ExchangeHandle,
    peer: Addr<PeerActor>,
    directory: Addr<DirectoryActor>,
    /// Number of the directory's restarts.
    restarts: watch::Receiver<u64>,
    block_threads: BlockThreads,
}

/// Why a node cannot be a member.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The node's certificate cannot be used.
    #[error("cannot use the node's certificate ([cluster] ca, certificate, key)")]
    Credentials(#[from] CredentialsError),
    /// The certificate belongs to another identity.
    #[error(
        "the certificate belongs to {found}, not to the node `{name}`: issue one by `larder ca issue node {name}`, or set the node's name"
    )]
    SomebodyElse {
        /// The certificate's identity.
        found: Identity,
        /// The node's name.
        name: String,
    },
    /// The UDP address cannot be used.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The metrics contradict each other.
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
    /// A thread that speaks with other nodes cannot be started.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// A node's view of its cluster, in `GET /status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The node's number; 0 before it is a member.
    pub number: u16,
    /// The node's incarnation.
    pub incarnation: u64,
    /// Whether this life of the node was ever a member. Until then, `/readyz` answers 503.
    #[serde(default)]
    pub was_member: bool,
    /// The epoch of the node's table, `TERM.NUMBER`.
    pub epoch: String,
    /// Members of the cluster.
    pub members: usize,
    /// Members that are suspect.
    pub suspects: usize,
    /// Members that do not answer this node.
    pub silent: Vec<String>,
    /// Whether the node shares chunks.
    pub shares: bool,
    /// The zone in the node's configuration.
    #[serde(default)]
    pub zone: Option<String>,
    /// Why the coordinator refuses to let the node join; `None` if it does not refuse.
    #[serde(default)]
    pub refused: Option<String>,
    /// Why the node follows no leading coordinator; `None` while it follows one. Without a leader, the node goes on with its last
    /// table.
    #[serde(default)]
    pub leaderless: Option<String>,
}

impl Cluster {
    /// Starts the peer thread; nobody is served yet.
    pub(crate) async fn start(
        limits: &ClusterLimits,
        sampler: Sampler,
        name: &str,
        registry: &Registry,
        clock: Clock,
    ) -> Result<Self, ClusterError> {
        let credentials = Credentials::load(&limits.credentials)?;
        let found = credentials.identity();
        if found.role != Role::Node || found.name != name {
            return Err(ClusterError::SomebodyElse { found: found.clone(), name: name.to_owned() });
        }
        let arbiter = threads::arbiter("larder-peer".to_owned(), &limits.place.cpus);
        let arbiter = arbiter.map_err(StartError::Thread)?;
        let settings = TransportSettings {
            max_datagram_bytes: limits.max_datagram_bytes,
            ..TransportSettings::default()
        };
        let block_threads = if limits.share { limits.block_threads } else { 0 };
        let (mut shares, tcp_port) = bind(limits, &settings, block_threads + 1)?;
        let (others, first) = (shares.split_off(1), shares.remove(0));
        let (bound, binding) = oneshot::channel();
        let (own, own_settings) = (credentials.clone(), settings.clone());
        arbiter.spawn(async move {
            // An error: nobody waits for the endpoint any more.
            let _ = bound.send(Endpoint::on(first, &own, &own_settings));
        });
        let endpoint = binding.await.map_err(|_| StartError::ended())??;
        let gauges = Membership::register(registry)?;
        let watch = Watch::new(gauges.panics.clone());
        let (silent, rooms) = (SilentPeers::default(), Rooms::default());
        let tcp = limits.blocks_over_tcp.then(|| TcpEndpoint::new(&credentials, settings.idle_timeout));
        let metrics = ExchangeMetrics::register(registry)?;
        let common = Common::new(&exchange_limits(limits), metrics, clock, rooms.clone());
        let common = match tcp.clone().zip(tcp_port) {
            Some((tcp, port)) => common.with_tcp(tcp, port),
            None => common,
        };
        let (place, with) = (&limits.place.cpus, (&credentials, &settings));
        let threads = BlockThreads::start(others, limits.listen, with, place, &common, &watch).await?;
        let parts = Parts::start(limits, &arbiter, &endpoint, registry, common, (&silent, threads, &watch))?;
        let certificate = CertificateMetrics::register(registry)?;
        let of_blocks = parts.block_endpoints();
        renew(&arbiter, &watch, limits, (endpoint.clone(), of_blocks, tcp), credentials, certificate);
        let known = watch::Sender::default();
        let limits = limits.clone();
        Ok(Self {
            name: name.to_owned(),
            limits,
            sampler,
            arbiter,
            endpoint,
            parts,
            silent,
            rooms,
            watch,
            known,
            gauges,
            stop: None,
            left: None,
        })
    }

    /// How the actor of a device reaches other nodes; `None` if chunks are not shared.
    pub(crate) fn peers(&self, device: u16) -> Option<Peers> {
        let Parts { handle, peer, directory, restarts, .. } = &self.parts;
        if !self.limits.share {
            return None;
        }
        let (handle, following) = (handle.clone(), handle.clone());
        Some(Peers {
            device,
            holders: directory.clone().recipient(),
            changed: directory.clone().recipient(),
            restarts: restarts.clone(),
            stale: directory.clone().recipient(),
            ask: peer.clone().recipient(),
            fetch: Box::new(move |order| handle.fetch(order)),
            follow: Box::new(move |order| following.follow(order)),
            rooms: self.rooms.clone(),
            news: 0,
            node: self.name.clone(),
            deadline: self.limits.fetch_deadline,
        })
    }

    /// Serves peers from these actors, and joins the cluster.
    pub(crate) async fn join(
        &mut self,
        actors: &[Addr<GpuActor>],
        http: SocketAddr,
        incarnation: u64,
        weight: u64,
        drains: &Drains,
        (reloads, purges, show): (&Reloads, &Purges, ShowNode),
    ) {
        let services = self.services(actors, drains, (reloads, purges, show));
        if self.parts.peer.send(Serve(services)).await.is_err() {
            tracing::error!(
                "the peer thread ended before it served: this node shares no chunks; start it again"
            );
        }
        let port = self.endpoint.local_address().port();
        let peer = self.limits.advertise.unwrap_or_else(|| SocketAddr::new(self.limits.listen.ip(), port));
        let http = self.limits.reached_at(http);
        // A node that shares no chunks has no actor for others.
        let devices = if self.limits.share { actors.len() as u16 } else { 0 };
        let (silent, drains) = (self.silent.clone(), drains.watch());
        let facts = move || {
            let silent = silent.clone();
            let silent = Box::new(move || silent.get().into_iter().collect());
            let candidate = Candidate { incarnation, peer, http, devices, weight };
            NodeFacts { candidate, silent, drains: drains.clone() }
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let (left, leaving) = oneshot::channel();
        let (endpoint, coordinators) = (self.endpoint.clone(), self.limits.coordinators.clone());
        let of_blocks = self.parts.block_endpoints();
        let (known, watch) = (self.known.clone(), self.watch.clone());
        self.arbiter.spawn_fn(move || {
            actix_rt::spawn(async move {
                let stop = async { drop(stopped.await) }.boxed_local().shared();
                let begin = || {
                    let (endpoint, coordinators) = (endpoint.clone(), coordinators.clone());
                    follow(endpoint, coordinators, FollowAs::Node(facts()), known.clone(), stop.clone())
                };
                watch.keep("follower", begin).await;
                join_all(of_blocks.iter().map(Endpoint::close)).await;
                endpoint.close().await;
                // An error: nobody waits for the end any more.
                let _ = left.send(());
            });
        });
        (self.stop, self.left) = (Some(stop), Some(leaving));
        let Parts { peer, directory, .. } = &self.parts;
        let (peer, directory, known) = (peer.clone(), directory.clone(), self.known.clone());
        self.arbiter.spawn(self.watch.clone().keep("tables", move || {
            let mut known = known.subscribe();
            // The task may have panicked while it spread the current table, so it spreads this table again.
            known.mark_changed();
            spread_tables(known, peer.clone(), directory.clone())
        }));
    }

    /// The recipients of requests from peers and admins.
    fn services(
        &self,
        actors: &[Addr<GpuActor>],
        drains: &Drains,
        (reloads, purges, show): (&Reloads, &Purges, ShowNode),
    ) -> Services {
        let directory = &self.parts.directory;
        Services {
            shares: self.limits.share,
            blocks: actors.iter().map(|actor| actor.clone().recipient()).collect(),
            follow: actors.iter().map(|actor| actor.clone().recipient()).collect(),
            take_in: actors.iter().map(|actor| actor.clone().recipient()).collect(),
            tell: actors.iter().map(|actor| actor.clone().recipient()).collect(),
            pin: actors.iter().map(|actor| actor.clone().recipient()).collect(),
            take: actors.iter().map(|actor| actor.clone().recipient()).collect(),
            drain: {
                let drains = drains.clone();
                Box::new(move |admin, command| drains.command(admin, command))
            },
            reload: {
                let reloads = reloads.clone();
                Box::new(move |by| {
                    let reloads = reloads.clone();
                    async move { reloads.reload(&by).await }.boxed_local()
                })
            },
            purge: {
                let (purges, watch) = (purges.clone(), self.watch.clone());
                Box::new(move |admin, command| purges.command(&watch, admin, command))
            },
            show,
            audit: reloads.audit(),
            find: directory.clone().recipient(),
            announce: directory.clone().recipient(),
            repair: directory.clone().recipient(),
            sampler: self.sampler,
        }
    }

    /// A function that reports the node's view of its cluster at any time; it also updates the gauges.
    pub(crate) fn reporter(&self) -> impl Fn() -> ClusterStatus + Send + Sync + use<> {
        let (known, silent, shares) = (self.known.subscribe(), self.silent.clone(), self.limits.share);
        let (gauges, zone) = (self.gauges.clone(), self.limits.zone.clone());
        move || {
            let Known { table, own, incarnation, was_member, refused, leaderless, .. } =
                known.borrow().clone();
            gauges.show(&table);
            let name = |number: &NodeNumber| table.member(*number).map(|member| member.name.clone());
            let suspects = table.members.iter().filter(|member| member.state == MemberState::Suspect);
            ClusterStatus {
                number: own.0,
                incarnation,
                was_member,
                epoch: table.epoch.to_string(),
                members: table.members.len(),
                suspects: suspects.count(),
                silent: silent.get().iter().filter_map(name).collect(),
                shares,
                zone: zone.clone(),
                refused,
                leaderless,
            }
        }
    }

    /// The node's view of its cluster.
    pub(crate) fn known(&self) -> watch::Receiver<Known> {
        self.known.subscribe()
    }

    /// The actor that asks and serves other nodes.
    pub(crate) fn peer_actor(&self) -> Addr<PeerActor> {
        self.parts.peer.clone()
    }

    /// Leaves the cluster in order.
    pub(crate) async fn leave(mut self) {
        drop(self.stop.take());
        if let Some(left) = self.left.take() {
            // An error: the thread has ended already.
            let _ = left.await;
        }
        let Self { arbiter, parts, .. } = self;
        let Parts { block_threads, .. } = parts;
        arbiter.stop();
        let joined = move || {
            block_threads.stop();
            arbiter.join()
        };
        if try_blocking(joined).await.is_err() {
            tracing::error!("the peer thread ended in a panic");
        }
    }
}

impl Membership {
    fn show(&self, table: &Table) {
        self.epoch.with_label_values(&["term"]).set(table.epoch.term as i64);
        self.epoch.with_label_values(&["number"]).set(table.epoch.number as i64);
        let states = [
            ("alive", MemberState::Alive),
            ("suspect", MemberState::Suspect),
            ("draining", MemberState::Draining),
        ];
        for (name, state) in states {
            let members = table.members.iter().filter(|member| member.state == state);
            self.members.with_label_values(&[name]).set(members.count() as i64);
        }
    }
}

impl Parts {
    fn start(
        limits: &ClusterLimits,
        arbiter: &Arbiter,
        endpoint: &Endpoint,
        registry: &Registry,
        common: Common,
        (silent, mut block_threads, watch): (&SilentPeers, BlockThreads, &Watch),
    ) -> Result<Self, ClusterError> {
        let clock = common.clock();
        let (handle, orders) = ExchangeHandle::new(clock);
        let connected = ConnectedPeers::default();
        let (endpoint, watches) = (endpoint.clone(), watch.clone());
        let (limits_of_exchange, known) = (exchange_limits(limits), (silent.clone(), connected.clone()));
        let threads = block_threads.take();
        let peer = PeerActor::start_in_arbiter(&arbiter.handle(), move |_| {
            PeerActor::new(endpoint, limits_of_exchange, common, known, threads, watches, orders)
        });
        let directory_limits = DirectoryLimits {
            find_deadline: limits.find_deadline,
            announce_deadline: ANNOUNCE_DEADLINE,
            max_rows: limits.directory_rows,
        };
        let metrics = DirectoryMetrics::register(registry)?;
        let (asks, silent, watches) = (peer.clone().recipient(), silent.clone(), watch.clone());
        let (begins, restarts) = watch::channel(0);
        let directory = DirectoryActor::start_in_arbiter(&arbiter.handle(), move |_| {
            DirectoryActor::new(asks, (silent, connected), begins, directory_limits, metrics, clock, watches)
        });
        Ok(Self { handle, peer, directory, restarts, block_threads })
    }

    fn block_endpoints(&self) -> Vec<Endpoint> {
        self.block_threads.endpoints()
    }
}

/// Takes the node's UDP port in `count` shares, and the TCP port of that number if blocks move over TCP.
fn bind(
    limits: &ClusterLimits,
    settings: &TransportSettings,
    count: usize,
) -> Result<(Vec<PortShare>, Option<TcpPort>), BindError> {
    let mut tries = 0;
    loop {
        let shares = PortShare::bind(limits.listen, settings, count)?;
        if !(limits.share && limits.blocks_over_tcp) {
            return Ok((shares, None));
        }
        match TcpPort::bind(shares[0].local_address()?) {
            Ok(port) => return Ok((shares, Some(port))),
            // The system chose a port that is free for UDP alone: it chooses again.
            Err(_) if limits.listen.port() == 0 && tries < MOST_TRIES => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Renews the certificates of all endpoints: the endpoint between nodes, those of block threads, and that over TCP.
fn renew(
    arbiter: &Arbiter,
    watch: &Watch,
    limits: &ClusterLimits,
    (endpoint, of_blocks, tcp): (Endpoint, Vec<Endpoint>, Option<TcpEndpoint>),
    credentials: Credentials,
    certificate: CertificateMetrics,
) {
    let (files, certificate) = (limits.credentials.clone(), Arc::new(certificate));
    arbiter.spawn(watch.clone().keep("certificates", move || {
        let (endpoint, of_blocks, tcp) = (endpoint.clone(), of_blocks.clone(), tcp.clone());
        let certificate = Arc::clone(&certificate);
        let renew = move |new: &Credentials| {
            endpoint.renew(new);
            of_blocks.iter().for_each(|endpoint| endpoint.renew(&new.for_blocks()));
            tcp.iter().for_each(|tcp| tcp.renew(new));
        };
        let expires = move |time| certificate.show(time);
        renew_when_changed(files.clone(), credentials.clone(), RENEWAL_CHECK, renew, expires)
    }));
}

/// How often the system chooses a port that must be free for UDP and TCP.
const MOST_TRIES: u32 = 16;

fn exchange_limits(limits: &ClusterLimits) -> ExchangeLimits {
    let default = ExchangeLimits::default();
    ExchangeLimits {
        send_bytes_per_second: limits.send_bytes_per_second,
        connections: limits.peer_connections,
        // Each block thread has a stream in use and its next stream under way.
        streams_per_peer: default.streams_per_peer.max(2 * limits.block_threads),
        ..default
    }
}

/// Gives each table that lists this life of the node to the exchange and the directory.
async fn spread_tables(
    mut known: watch::Receiver<Known>,
    peer: Addr<PeerActor>,
    directory: Addr<DirectoryActor>,
) {
    let mut spread = None;
    while known.changed().await.is_ok() {
        let latest = known.borrow_and_update().clone();
        let is_member = latest.is_member();
        let Known { table, own, incarnation, .. } = latest;
        let news = Some((table.epoch, own, incarnation));
        let is_spread = std::mem::replace(&mut spread, news) == news;
        if is_spread || !is_member {
            continue;
        }
        let new = NewTable { table: Arc::clone(&table), own };
        // The exchange gets the table first, because the directory asks through the exchange at once.
        if peer.send(new.clone()).await.is_err() || directory.send(new).await.is_err() {
            return;
        }
        tracing::info!(epoch = %table.epoch, members = table.members.len(), "a new table");
    }
}

/// How long an announcement waits for its answer before it is sent again.
const ANNOUNCE_DEADLINE: Duration = Duration::from_secs(1);
