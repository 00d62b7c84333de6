//! Starts the coordinator and stops it.

mod checks;
mod console;

use std::cell::RefCell;
use std::error::Error as _;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::{Data, ServiceConfig};
use futures_util::FutureExt as _;
use larder_net::audit::{self, Audit};
use larder_net::blocking::blocking;
use larder_net::coordinator_client::Known;
use larder_net::failure::Failure;
use larder_net::line_file::last_lines;
use larder_net::metrics::EarliestEnd;
use larder_net::quic::{
    BindError, Credentials, CredentialsError, Endpoint, RENEWAL_CHECK, TransportSettings, renew_when_changed,
};
use larder_net::reload::ReloadTimes;
use larder_protocol::identity::Identity;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use self::checks::credentials;
pub use self::checks::{check_build, check_files};
use crate::config::{Backend, Config};
use crate::elect::{Elect, Part, Rival, follow_leader, look_out};
use crate::election::{Candidate, Election};
use crate::gather;
use crate::history::History;
use crate::http::{Bodies, HttpState, routes};
use crate::keep::keep;
use crate::membership::{self, Membership, Patience};
use crate::metrics::Metrics;
use crate::nodes::Nodes;
use crate::prefix;
use crate::published::Published;
#[cfg(feature = "etcd")]
use crate::register::etcd::Etcd;
#[cfg(feature = "kubernetes")]
use crate::register::kubernetes::Kubernetes;
use crate::register::{Memory, Register, Trouble};
use crate::reload::Reloads;
use crate::serve::{Doubts, Server, serve as serve_followers};
use crate::shared::SharedMembership;
use crate::state::StateWriter;
use crate::uptime::Uptime;

/// The coordinator serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Address of its HTTP server.
    pub http: SocketAddr,
    /// Address of the server for nodes and other followers.
    pub peer: SocketAddr,
}

/// Why the coordinator does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be used.
    #[error("cannot listen on {listen}: does another process use it?")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The coordinator's certificate cannot be used.
    #[error("cannot use the coordinator's certificate ([peer] ca, certificate, key)")]
    Credentials(#[from] CredentialsError),
    /// The certificate is not a coordinator's.
    #[error(
        "the certificate belongs to {found}, not to a coordinator: issue one by `larder ca issue coordinator NAME`"
    )]
    NotACoordinator {
        /// The certificate's identity.
        found: Identity,
    },
    /// The UDP address cannot be used.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The state cannot be read or written.
    #[error(transparent)]
    State(#[from] Failure),
    /// The console's token cannot be used.
    #[error("cannot use the console's token in {}: the file must have a token and nothing else", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// The system's error; `None` if the file is empty.
        source: Option<std::io::Error>,
    },
    /// The certificate of the console's admin cannot be used.
    #[error(
        "cannot use the certificate of the console's admin ([http] console_admin_certificate, console_admin_key)"
    )]
    ConsoleCredentials(#[source] CredentialsError),
    /// The certificate of the console's admin is not an admin's.
    #[error("[http] console_admin_certificate must be an admin's: `larder ca issue admin NAME` makes one")]
    ConsoleAdmin,
    /// This program was built without tokenizers.
    #[error(
        "this program was built without tokenizers: remove `console_tokenizers` from [http], or build the program with `--features tokenizers`"
    )]
    NoTokenizers,
    /// No thread for tokenizers.
    #[error("cannot start a thread for tokenizers")]
    Tokenizers(#[source] std::io::Error),
    /// The audit log cannot be written.
    #[error("cannot write the audit log {}: set [audit] path to a file that this user may write and nobody else writes", path.display())]
    Audit {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The metrics contradict each other.
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
    /// This program was built without this backend.
    #[error(
        "this program was built without the election backend `{backend}`: build it with `--features {backend}`"
    )]
    NotBuilt {
        /// The feature.
        backend: &'static str,
    },
    /// Others cannot find this coordinator.
    #[error(
        "coordinators that elect a leader must find each other: set [election] advertise to this host's name or address"
    )]
    NoAddress,
    /// The election's register cannot be used.
    #[error("cannot use the election's register")]
    Register(#[source] Trouble),
    /// Another coordinator leads, and this one was not elected together with it.
    #[error(
        "another coordinator leads nodes of this cluster, at {address} in term {term}. This one, in term {own}, started earlier or has the lower term, and stops. Let only one coordinator run, or let them elect the leader ([election])"
    )]
    Rival {
        /// The other coordinator's address.
        address: SocketAddr,
        /// Its term.
        term: u64,
        /// The term of this coordinator.
        own: u64,
    },
    /// Serving failed.
    #[error("cannot serve HTTP on {http}")]
    Serve {
        /// The address.
        http: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}

impl ServeError {
    /// Whether another start can help only after a change of the configuration, or of the things it names. An error of the system
    /// may pass: a disk may come late.
    pub fn is_the_askers(&self) -> bool {
        let is_of_the_election =
            matches!(self, Self::NotBuilt { .. } | Self::NoAddress | Self::Register(_) | Self::Rival { .. });
        let is_of_a_file = matches!(
            self,
            Self::Credentials(_)
                | Self::NotACoordinator { .. }
                | Self::Token { .. }
                | Self::ConsoleCredentials(_)
                | Self::ConsoleAdmin
                | Self::NoTokenizers
        );
        let mut causes = std::iter::successors(self.source(), |&cause| cause.source());
        (is_of_the_election || is_of_a_file) && !causes.any(|cause| cause.is::<std::io::Error>())
    }
}

/// Serves until `stop` is ready, then ends the running work within [`STOP_WITHIN`]. `on_ready` is called once, when requests
/// are accepted. Needs an actix system.
///
/// # Errors
/// [`ServeError`]: it could not begin to serve, or could not go on.
///
/// # Cancel safety
/// If the future is dropped, it stops serving without a grace time.
pub async fn run(
    config: Config,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    run_from(config, None, on_ready, stop).await
}

/// As [`run`], with a configuration from this file; the coordinator follows changes of the file while it runs. `config` may differ
/// from the content of the file: arguments of the command line override it.
///
/// # Errors
/// As [`run`].
///
/// # Cancel safety
/// As [`run`].
pub async fn run_from(
    config: Config,
    file: Option<(PathBuf, Config)>,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    check_build(&config)?;
    let file = file.map(|(path, in_file)| (ReloadTimes::begin(&path), in_file));
    match config.election.backend {
        Backend::Embedded => serve(config, file, None::<Memory>, on_ready, stop).await,
        #[cfg(feature = "etcd")]
        Backend::Etcd => {
            let register = Etcd::new(&config.election).map_err(|error| ServeError::Register(error.into()))?;
            serve(config, file, Some(register), on_ready, stop).await
        }
        #[cfg(not(feature = "etcd"))]
        Backend::Etcd => Err(ServeError::NotBuilt { backend: "etcd" }),
        #[cfg(feature = "kubernetes")]
        Backend::Kubernetes => {
            let (kubeconfig, name) = (config.election.kubeconfig.as_deref(), config.election.name.clone());
            let register = Kubernetes::new(kubeconfig, name).await;
            let register = register.map_err(|error| ServeError::Register(error.into()))?;
            serve(config, file, Some(register), on_ready, stop).await
        }
        #[cfg(not(feature = "kubernetes"))]
        Backend::Kubernetes => Err(ServeError::NotBuilt { backend: "kubernetes" }),
    }
}

/// As [`run_from`], elected over this register.
///
/// # Errors
/// As [`run`].
///
/// # Cancel safety
/// As [`run`].
pub async fn run_elected(
    config: Config,
    register: impl Register + 'static,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    serve(config, None, Some(register), on_ready, stop).await
}

async fn serve<R: Register + 'static>(
    config: Config,
    file: Option<(ReloadTimes, Config)>,
    register: Option<R>,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (audit, thread) = start_audit(&config).await?;
    let served = serve_noting(config, file, register, &audit, on_ready, stop).await;
    audit.end();
    last_lines(thread).await;
    served
}

async fn serve_noting<R: Register + 'static>(
    config: Config,
    file: Option<(ReloadTimes, Config)>,
    register: Option<R>,
    audit: &Audit,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (uptime, credentials) = (Uptime::start(), credentials(&config)?);
    let endpoint = Endpoint::bind(config.peer.listen, &credentials, &TransportSettings::default())?;
    let (writer, state) = StateWriter::open(&config.state.path, register.is_some())?;
    let (patience, highest_term) = (config.membership.clone(), state.table.epoch.term);
    let membership = membership_of(register.is_some(), &patience, state, uptime);
    let reloads = Reloads::new(file.as_ref(), membership.clone(), audit.clone());
    let metrics = Metrics::new()?;
    let ends = renew_certificate(&endpoint, &config, credentials, &metrics);
    let (publish, tables) = watch::channel(Arc::<Published>::default());
    let (console_tokens, admin) = console::open(&config, audit, ends)?;
    let (questions, gathers) = answer_questions(&endpoint, admin, &tables, (membership.clone(), uptime));

    let listener = Listener::bind(config.http.listen)?;
    let yields_after_ms = if register.is_some() { config.election.renew_within_ms } else { 0 };
    let (http, (part, mut office)) = (listener.address, Office::new(life()));
    let state = Data::new(HttpState {
        membership: membership.clone(),
        part: part.clone(),
        patience,
        peer_port: endpoint.local_address().port(),
        questions,
        history: History::start(gathers.clone(), tables.clone()),
        gathers,
        what_if: Arc::default(),
        tokenizers: console::tokenizers(&config)?,
        console_tokens,
        bodies: Bodies::new(),
        metrics: metrics.clone(),
        audit: audit.clone(),
        uptime,
        sampler: config.tracing.sampler(),
    });
    let failed = |source| ServeError::Serve { http, source };
    let (handle, serving) = listener.serve(state)?;
    let server = Server {
        membership: membership.clone(),
        tables,
        metrics,
        uptime,
        part: part.clone(),
        endpoint: endpoint.clone(),
        reloads: reloads.clone(),
        audit: audit.clone(),
        yields_after: Duration::from_millis(yields_after_ms),
        doubts: Doubts::default(),
        warnings: RefCell::default(),
    };
    actix_rt::spawn(reloads.watch(file.map(|(times, _)| times)));
    actix_rt::spawn(serve_followers(endpoint.clone(), server));
    let (peer, mut electing) = (endpoint.local_address(), None);
    if let Some(register) = register {
        let own = Candidate { life: part.life, ..candidate(&config, http, peer)? };
        let election = Election::new(own, config.election.timing(), highest_term);
        electing =
            Some(Electing::start(register, office.elect(&config, election, &membership, uptime, &endpoint)));
    }
    tracing::info!(%http, %peer, "the coordinator serves");
    on_ready(Ready { http, peer });

    let mut serving = pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => return ended.unwrap_or_else(|error| Err(error.into())).map_err(failed),
        failed = keep(&membership, &writer, &publish, uptime, office.tables.subscribe()) => Err(failed.into()),
        Some(rival) = office.rivals.recv() => return Err(yields_to(&rival, &membership)),
        () = stop.map(|()| tracing::info!("the coordinator stops")) => Ok(()),
    };
    Electing::end(electing).await;
    endpoint.close().await;
    tokio::join!(handle.stop(), writer.end(STOP_WITHIN));
    ended.and(serving.await.unwrap_or_else(|error| Err(error.into())).map_err(failed))
}

fn membership_of(
    elects: bool,
    patience: &Patience,
    state: membership::DurableState,
    uptime: Uptime,
) -> SharedMembership {
    let begin = if elects { Membership::candidate } else { Membership::new };
    SharedMembership::new(begin(patience.clone(), state, uptime.now()))
}

fn yields_to(&Rival { address, term }: &Rival, membership: &SharedMembership) -> ServeError {
    ServeError::Rival { address, term, own: membership.lock().term() }
}

/// A running part in the election.
struct Electing {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Electing {
    fn start(register: impl Register + 'static, elect: Elect) -> Self {
        let (stop, stops) = oneshot::channel::<()>();
        Self { stop, task: actix_rt::spawn(elect.run(register, async { drop(stops.await) })) }
    }

    /// Frees the lease, if this coordinator leads.
    async fn end(electing: Option<Self>) {
        let Some(Self { stop, task }) = electing else { return };
        drop(stop);
        // An error means that the task panicked. Then the others wait until its lease is over.
        let _ = task.await;
    }
}

/// Opens the audit log, if there is one.
async fn start_audit(config: &Config) -> Result<(Audit, Option<std::thread::JoinHandle<()>>), ServeError> {
    let Some(log) = config.audit.clone() else { return Ok((Audit::default(), None)) };
    let (path, name) = (log.path.clone(), credentials(config)?.identity().name.clone());
    let started = blocking(move || Audit::start(log, audit::Server::Coordinator(name))).await;
    let (audit, thread) = started.map_err(|source| ServeError::Audit { path, source })?;
    Ok((audit, Some(thread)))
}

/// Starts to answer questions of HTTP for nodes.
fn answer_questions(
    endpoint: &Endpoint,
    admin: Option<gather::Admin>,
    tables: &watch::Receiver<Arc<Published>>,
    (membership, uptime): (SharedMembership, Uptime),
) -> (mpsc::Sender<prefix::HoldingsQuery>, mpsc::Sender<gather::NodeQuery>) {
    let (questions, asked) = mpsc::channel(WAITING_QUESTIONS);
    let (gathers, gathered) = mpsc::channel(WAITING_GATHERS);
    let nodes = Rc::new(Nodes::new(endpoint.clone()));
    actix_rt::spawn(prefix::answer(Rc::clone(&nodes), tables.clone(), asked));
    let known = move || {
        let (membership, now) = (membership.lock(), uptime.now());
        (membership.members().cloned().collect(), membership.lost(now))
    };
    actix_rt::spawn(gather::answer((nodes, admin), tables.clone(), known, gathered));
    (questions, gathers)
}

/// Watches the files of the certificate, and uses a new one.
fn renew_certificate(
    endpoint: &Endpoint,
    config: &Config,
    credentials: Credentials,
    metrics: &Metrics,
) -> EarliestEnd {
    let (files, ends) = (config.peer.credentials(), EarliestEnd::new(metrics.certificate()));
    let own = ends.clone();
    let expires = move |end| own.note("own", end);
    let renewed = endpoint.clone();
    let renew = move |new: &Credentials| renewed.renew(new);
    actix_rt::spawn(renew_when_changed(files, credentials, RENEWAL_CHECK, renew, expires));
    ends
}

/// The address of HTTP, before it is served.
struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    fn bind(listen: SocketAddr) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Listen { listen, source };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    fn serve(
        self,
        state: Data<HttpState>,
    ) -> Result<(larder_net::http::Handle, JoinHandle<std::io::Result<()>>), ServeError> {
        let Self { listener, address } = self;
        let connections = state.metrics.connections();
        let configure =
            move |service: &mut ServiceConfig| _ = service.app_data(state.clone()).configure(routes);
        let (handle, server) = larder_net::http::serve(listener, connections, STOP_WITHIN, configure)
            .map_err(|source| ServeError::Serve { http: address, source })?;
        Ok((handle, actix_rt::spawn(server)))
    }
}

/// The coordinator's part in an election.
struct Office {
    leader: watch::Sender<Option<Candidate>>,
    later_terms: Option<mpsc::Receiver<(u64, String)>>,
    rivals: mpsc::Receiver<Rival>,
    /// The tables of the leader, while another coordinator leads.
    tables: watch::Sender<Known>,
}

impl Office {
    fn new(life: u64) -> (Part, Self) {
        let (leader, known) = watch::channel(None);
        let (later_terms, heard) = mpsc::channel(1);
        let (rivals, met) = mpsc::channel(1);
        let part = Part { life, leader: known, later_terms, rivals };
        (part, Self { leader, later_terms: Some(heard), rivals: met, tables: watch::Sender::default() })
    }

    /// Follows the leader from now on. Returns the part in the election.
    fn elect(
        &mut self,
        config: &Config,
        election: Election,
        membership: &SharedMembership,
        uptime: Uptime,
        endpoint: &Endpoint,
    ) -> Elect {
        let known = self.tables.clone();
        actix_rt::spawn(follow_leader(endpoint.clone(), self.leader.subscribe(), known));
        // The receiver is there, since nothing else takes it.
        let later_terms = self.later_terms.take().unwrap_or_else(|| mpsc::channel(1).1);
        let (membership, leader) = (membership.clone(), self.leader.clone());
        // With half the time, a leader whose register hangs asks twice before its right to lead is over.
        let deadline = Duration::from_millis(config.election.renew_within_ms / 2);
        let patience = Duration::from_millis(config.election.timing().silence_ms);
        let (lookout, asks) = look_out(endpoint.clone(), patience);
        actix_rt::spawn(asks);
        Elect { election, membership, uptime, leader, later_terms, lookout, deadline, led: None }
    }
}

/// The addresses at which others find this coordinator.
fn candidate(config: &Config, http: SocketAddr, peer: SocketAddr) -> Result<Candidate, ServeError> {
    let at = |address: SocketAddr| match &config.election.advertise {
        Some(host) if host.contains(':') => Ok(format!("[{host}]:{}", address.port())),
        Some(host) => Ok(format!("{host}:{}", address.port())),
        None if address.ip().is_unspecified() => Err(ServeError::NoAddress),
        None => Ok(address.to_string()),
    };
    Ok(Candidate { life: 0, peer: at(peer)?, http: at(http)? })
}

/// A number for this life of this coordinator that no other has: microseconds since 1970, or a moment more.
fn life() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    (since.as_micros() as u64).wrapping_shl(10) | u64::from(std::process::id() % 1_024)
}

/// Time for running work to end when the coordinator stops.
pub const STOP_WITHIN: Duration = Duration::from_secs(2);

/// Questions of consoles to nodes that wait.
const WAITING_GATHERS: usize = 16;

/// Questions about prefixes that wait.
const WAITING_QUESTIONS: usize = 256;
