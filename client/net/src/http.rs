//! The HTTP server of a node or a coordinator: few connections, each cheap whatever its client does.
//!
//! A silent client loses its connection after [`IDLE`], a client that does not read after [`UNREAD`]. At the limit of
//! connections, the connection that has been idle for the longest makes way for a new one; one address has half of the
//! connections at most. Bytes that a client sends ahead stay in the socket (`sips`).

mod connections;
mod sips;

use std::future::ready;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use actix_http::HttpService;
use actix_http::error::DispatchError;
use actix_server::Server;
use actix_service::{IntoServiceFactory as _, ServiceFactoryExt as _, fn_service, map_config};
use actix_web::body::MessageBody;
use actix_web::dev::{AppConfig, ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::middleware::{Next, from_fn};
use actix_web::rt::net::TcpStream;
use actix_web::web::{Bytes, ServiceConfig};
use actix_web::{App, HttpResponse};

pub use self::connections::{Busy, Connections, HttpMetrics, Open};
use self::sips::Sips;

/// Serves the paths that `configure` adds, on one thread, until the server is stopped: then requests have `stop_within` to end.
/// Needs an actix system.
///
/// # Errors
/// Fails with the system's error for the listener.
pub fn serve(
    listener: TcpListener,
    connections: Connections,
    stop_within: Duration,
    configure: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
) -> io::Result<Server> {
    let factory = move || {
        let connections = connections.clone();
        let app = App::new().wrap(from_fn(busy)).configure(&configure).into_factory();
        let http = HttpService::build()
            .keep_alive(IDLE)
            .client_request_timeout(IDLE)
            .on_connect_ext(move |socket: &Sips<TcpStream>, extensions| {
                let from = socket.get().peer_addr().ok().map(|from| from.ip());
                match connections.enter(socket.get(), from, UNREAD) {
                    Ok(open) => _ = extensions.insert(open),
                    Err(error) => tracing::debug!(%error, "an HTTP connection is shut down"),
                }
            })
            .h1(map_config(app.map_err(|error: actix_web::Error| error.error_response()), |()| {
                AppConfig::default()
            }))
            .map_init_err(|()| ());
        let accept = fn_service(|socket: TcpStream| {
            let peer: Option<SocketAddr> = socket.peer_addr().ok();
            ready(Ok::<_, DispatchError>((Sips::new(socket), peer)))
        });
        accept.and_then(http)
    };
    let server = Server::build().workers(1).disable_signals().shutdown_timeout(stop_within.as_secs());
    Ok(server.listen("http", listener, factory)?.run())
}

/// A long answer. The server buffers no more of it than its client reads.
pub fn in_pieces(content_type: &str, answer: impl Into<Bytes>) -> HttpResponse {
    let answer = answer.into();
    let bytes = answer.len() as u64;
    let mut response = HttpResponse::Ok();
    response
        .insert_header(("content-type", content_type))
        .no_chunking(bytes)
        .streaming(connections::pieces(answer))
}

/// Keeps a connection from making way while its request is answered. A connection whose request body has yet to come counts
/// as busy only once the body is there: a client that sends no body must not keep others out.
async fn busy(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> actix_web::Result<ServiceResponse<impl MessageBody>> {
    let has_come = request.method() == Method::GET;
    let _busy = request.conn_data::<Open>().filter(|_| has_come).map(Open::busy);
    next.call(request).await
}

/// How long a connection may be silent, before a request and between two.
pub const IDLE: Duration = Duration::from_secs(5);

/// How long a client may leave an answer unread.
pub const UNREAD: Duration = Duration::from_secs(10);
