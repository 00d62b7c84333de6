//! Starts the coordinator and stops it.

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::time::Instant;

use actix_web::web::Data;
use actix_web::{App, HttpServer};

use crate::config::Config;
use crate::http::{State, routes};
use crate::metrics::Metrics;

/// The coordinator serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Where it serves HTTP.
    pub http: SocketAddr,
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
        /// What the system said.
        source: std::io::Error,
    },
    /// The metrics contradict each other.
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
    /// Serving failed.
    #[error("cannot serve HTTP on {http}")]
    Serve {
        /// Where it served.
        http: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Serves until `stop` is ready, then ends what is under way; at most [`STOP_SECONDS`] long. `on_ready` is called once,
/// when requests are accepted. Needs an actix system.
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
    let listen = config.http.listen;
    let listener = TcpListener::bind(listen).map_err(|source| ServeError::Listen { listen, source })?;
    let http = listener.local_addr().map_err(|source| ServeError::Listen { listen, source })?;
    let metrics = Metrics::new(config.nodes.len())?;
    let state = Data::new(State { nodes: config.nodes, metrics, started: now() });

    let serve = |source| ServeError::Serve { http, source };
    let server = HttpServer::new(move || App::new().app_data(state.clone()).configure(routes))
        .workers(HTTP_WORKERS)
        .disable_signals()
        .shutdown_timeout(STOP_SECONDS)
        .listen(listener)
        .map_err(serve)?
        .run();
    let handle = server.handle();
    let serving = actix_rt::spawn(server);
    tracing::info!(%http, "the coordinator serves");
    on_ready(Ready { http });

    let mut serving = pin!(serving);
    tokio::select! {
        ended = &mut serving => return ended.unwrap_or_else(|error| Err(error.into())).map_err(serve),
        () = stop => tracing::info!("the coordinator stops"),
    }
    handle.stop(true).await;
    serving.await.unwrap_or_else(|error| Err(error.into())).map_err(serve)
}

/// The clock.
#[expect(clippy::disallowed_methods, reason = "the server is the shell: its clock is the system's")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// How long requests under way may take when the coordinator stops.
pub const STOP_SECONDS: u64 = 2;

/// HTTP is for people and scrapers here: one thread is plenty.
const HTTP_WORKERS: usize = 1;
