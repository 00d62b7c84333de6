//! Starts the coordinator and stops it.

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use actix_web::web::{Data, ServiceConfig};
use larder_net::quic::{
    BindError, Credentials, CredentialsError, Endpoint, RENEWAL_CHECK, TransportSettings, renew_when_changed,
};
use larder_protocol::identity::{Identity, Role};
use tokio::sync::{mpsc, watch};

use crate::config::Config;
use crate::http::{Bodies, State, routes};
use crate::membership::Membership;
use crate::metrics::Metrics;
use crate::prefix;
use crate::published::Published;
use crate::serve::{self, Server, SharedMembership};
use crate::state::{StateError, StateFile};
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
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be used.
    #[error("cannot listen on {listen}: is another process there?")]
    Listen {
        /// The address.
        listen: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// Its certificate cannot be used.
    #[error("cannot use the coordinator's certificate ([peer] ca, certificate, key)")]
    Credentials(#[from] CredentialsError),
    /// The certificate is somebody else's.
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
    State(#[from] StateError),
    /// The metrics contradict each other.
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
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
    /// Whether another start can help only after a change of the configuration, or of the things it names.
    #[must_use]
    pub fn is_the_askers(&self) -> bool {
        matches!(self, Self::Credentials(_) | Self::NotACoordinator { .. })
    }
}

/// Serves until `stop` is ready, then ends the running work within [`STOP_WITHIN`]. `on_ready` is called once, when requests
/// are accepted. Needs an actix system.
///
/// # Errors
/// [`ServeError`]: it never served, or could not serve on.
///
/// # Cancel safety
/// Dropped, it stops serving without a grace time.
pub async fn run(
    config: Config,
    on_ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let uptime = Uptime::start();
    let credentials = Credentials::load(&config.peer.credentials())?;
    let found = credentials.identity();
    if found.role != Role::Coordinator {
        return Err(ServeError::NotACoordinator { found: found.clone() });
    }
    let endpoint = Endpoint::bind(config.peer.listen, &credentials, &TransportSettings::default())?;
    let (file, state) = StateFile::open(&config.state.path)?;
    let patience = config.membership.patience();
    let membership = SharedMembership::new(Membership::new(patience.clone(), state, uptime.now()));
    let metrics = Metrics::new()?;
    let (files, certificate) = (config.peer.credentials(), metrics.certificate());
    let expires = move |time| certificate.show(time);
    actix_rt::spawn(renew_when_changed(endpoint.clone(), files, credentials, RENEWAL_CHECK, expires));
    let (publish, tables) = watch::channel(Arc::<Published>::default());
    let (questions, asked) = mpsc::channel(WAITING_QUESTIONS);

    let listen = config.http.listen;
    let listener = TcpListener::bind(listen).map_err(|source| ServeError::Listen { listen, source })?;
    let http = listener.local_addr().map_err(|source| ServeError::Listen { listen, source })?;
    let connections = metrics.connections();
    let state = Data::new(State {
        membership: membership.clone(),
        patience,
        questions,
        bodies: Bodies::new(),
        metrics: metrics.clone(),
        uptime,
        sampler: config.tracing.sampler(),
    });
    let failed = |source| ServeError::Serve { http, source };
    let configure = move |service: &mut ServiceConfig| _ = service.app_data(state.clone()).configure(routes);
    let server = larder_net::http::serve(listener, connections, STOP_WITHIN, configure).map_err(failed)?;
    let handle = server.handle();
    let serving = actix_rt::spawn(server);

    let server = Server { membership: membership.clone(), tables: tables.clone(), metrics, uptime };
    actix_rt::spawn(serve::serve(endpoint.clone(), server));
    actix_rt::spawn(prefix::answer(endpoint.clone(), tables, asked));
    let peer = endpoint.local_address();
    tracing::info!(%http, %peer, "the coordinator serves");
    on_ready(Ready { http, peer });

    let mut serving = pin!(serving);
    tokio::select! {
        ended = &mut serving => return ended.unwrap_or_else(|error| Err(error.into())).map_err(failed),
        failed = keep(&membership, &file, &publish, uptime) => return Err(failed.into()),
        () = stop => tracing::info!("the coordinator stops"),
    }
    endpoint.close().await;
    handle.stop(true).await;
    serving.await.unwrap_or_else(|error| Err(error.into())).map_err(failed)
}

/// Makes tables, writes them down, and then publishes them, until writing fails: a table that this coordinator might forget
/// is told to nobody.
async fn keep(
    membership: &SharedMembership,
    file: &StateFile,
    publish: &watch::Sender<Arc<Published>>,
    uptime: Uptime,
) -> StateError {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let changed = {
            let mut membership = membership.lock();
            membership.tick(uptime.now()).map(|table| (table, membership.state()))
        };
        let Some((table, state)) = changed else { continue };
        if let Err(error) = file.write(&state) {
            return error;
        }
        tracing::info!(epoch = %table.epoch, members = table.members.len(), "a new table");
        let published = Published::new(publish.borrow().table(), table);
        publish.send_replace(Arc::new(published));
    }
}

/// How long running work may take when the coordinator stops.
pub const STOP_WITHIN: Duration = Duration::from_secs(2);

/// How often silence is judged and changes are looked for.
const TICK: Duration = Duration::from_millis(20);

/// Questions about prefixes that wait.
const WAITING_QUESTIONS: usize = 256;
