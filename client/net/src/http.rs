//! The HTTP server of a node or a coordinator: few connections, each cheap whatever its client does.
//!
//! A silent client loses its connection after [`IDLE`], a client that does not read after [`UNREAD`]. At the limit of
//! connections, the connection that has been idle for the longest makes way for a new one; one address has half of the
//! connections at most. Bytes that a client sends ahead stay in the socket (`sips`). HEAD is answered as GET is, without the body:
//! load balancers and `curl -I` ask so.

mod connections;
mod sips;

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use actix_http::HttpService;
use actix_http::error::DispatchError;
use actix_server::{Server, ServerHandle};
use actix_service::{IntoServiceFactory as _, ServiceFactoryExt as _, fn_service, map_config};
use actix_web::body::{BodySize, EitherBody, MessageBody};
use actix_web::dev::{AppConfig, ServiceRequest, ServiceResponse};
use actix_web::error::ErrorRequestTimeout;
use actix_web::http::Method;
use actix_web::middleware::{Next, from_fn};
use actix_web::rt::net::TcpStream;
use actix_web::web::{Bytes, Query, ServiceConfig};
use actix_web::{App, Error, HttpMessage as _, HttpRequest, HttpResponse};
use tokio::time::timeout;

pub use self::connections::{Busy, Connections, HttpMetrics, Open};
use self::sips::Sips;
use crate::blocking::no_thread;

/// Stops a server that [`serve`] made. Cloning shares.
#[derive(Debug, Clone)]
pub struct Handle {
    server: ServerHandle,
    connections: Connections,
    stop_within: Duration,
}

/// Serves the paths that `configure` adds, on one thread, while the returned server is awaited. When the handle stops it,
/// requests have `stop_within` to end. Needs an actix system.
///
/// # Errors
/// Fails with the system's error for the listener.
pub fn serve(
    listener: TcpListener,
    connections: Connections,
    stop_within: Duration,
    configure: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
) -> io::Result<(Handle, impl Future<Output = io::Result<()>>)> {
    let known = connections.clone();
    let factory = move || {
        let connections = connections.clone();
        let app =
            App::new().wrap(from_fn(busy)).wrap(from_fn(head_as_get)).configure(&configure).into_factory();
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
            .h1(map_config(app.map_err(|error: Error| error.error_response()), |()| AppConfig::default()))
            .map_init_err(|()| ());
        let accept = fn_service(|socket: TcpStream| {
            let peer: Option<SocketAddr> = socket.peer_addr().ok();
            ready(Ok::<_, DispatchError>((Sips::new(socket), peer)))
        });
        accept.and_then(http)
    };
    let server = Server::build().workers(1).disable_signals();
    let server = server.listen("http", listener, factory)?.run();
    let handle = Handle { server: server.handle(), connections: known, stop_within };
    Ok((handle, async move {
        get_threads()?;
        server.await
    }))
}

/// Checks that the system gives the two threads of a server, which would panic without them.
fn get_threads() -> io::Result<()> {
    let one = || Builder::new().spawn(|| ()).map_err(no_thread);
    let both = Builder::new().spawn(move || one().map(JoinHandle::join)).map_err(no_thread)?;
    // Never a panic: the threads do nothing.
    both.join().unwrap_or_else(|_| Ok(Ok(()))).map(drop)
}

impl Handle {
    /// Stops accepting connections, answers the requests that have come, and closes all connections. Dropping the future does not
    /// undo this.
    pub async fn stop(&self) {
        // The server itself looks once a second whether its connections have ended.
        let have_ended = timeout(self.stop_within, self.connections.end()).await.is_ok();
        self.server.stop(have_ended).await;
    }
}

/// A request's body. If it takes too long to come, the answer is 408. Once it is there, the connection makes way for no other
/// until the request is answered.
///
/// # Errors
/// The error of `read`, or that the body did not come.
///
/// # Cancel safety
/// If dropped, the part of the body that came is lost.
pub async fn body_in_time<T>(
    request: &HttpRequest,
    read: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let body = timeout(BODY_DEADLINE, read)
        .await
        .unwrap_or_else(|_| Err(ErrorRequestTimeout("the body did not come in time\n")))?;
    if let Some(open) = request.conn_data::<Open>() {
        request.extensions_mut().insert(open.busy());
    }
    Ok(body)
}

/// A long answer. The server buffers no more of it than the client reads.
pub fn in_pieces(content_type: &str, answer: impl Into<Bytes>) -> HttpResponse {
    let answer = answer.into();
    let bytes = answer.len() as u64;
    let mut response = HttpResponse::Ok();
    response
        .insert_header(("content-type", content_type))
        .no_chunking(bytes)
        .streaming(connections::pieces(answer))
}

/// The arguments of a request, by name. The error is for people.
///
/// # Errors
/// Fails if the query cannot be read, or has another argument than the `known` ones.
pub fn arguments(path: &str, query: &str, known: &[&str]) -> Result<HashMap<String, String>, String> {
    let found = Query::<HashMap<String, String>>::from_query(query).map_err(|error| error.to_string())?;
    let Some(other) = found.keys().filter(|name| !known.contains(&name.as_str())).min() else {
        return Ok(found.into_inner());
    };
    let takes = match known {
        [] => "takes no arguments".to_owned(),
        known => format!("takes `{}`", known.join("`, `")),
    };
    Err(format!("`{other}` is no argument of {path}, which {takes}"))
}

/// Answers HEAD as GET, without the body.
async fn head_as_get(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> actix_web::Result<ServiceResponse<impl MessageBody>> {
    let is_head = request.method() == Method::HEAD;
    if is_head {
        request.head_mut().method = Method::GET;
    }
    let response = next.call(request).await?;
    Ok(response.map_body(|_, body| {
        if is_head { EitherBody::left(Unsent(body.size())) } else { EitherBody::right(body) }
    }))
}

/// A body of which only the size is told. Events are not waited for.
struct Unsent(BodySize);

impl MessageBody for Unsent {
    type Error = Infallible;

    fn size(&self) -> BodySize {
        self.0
    }

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Bytes, Infallible>>> {
        Poll::Ready(None)
    }
}

/// Keeps a connection from making way while its request is answered. A connection whose request body has yet to come counts
/// as busy only once the body is there ([`body_in_time`]): a client that sends no body must not keep others out.
async fn busy(
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> actix_web::Result<ServiceResponse<impl MessageBody>> {
    let has_come = request.method() == Method::GET;
    let _busy = request.conn_data::<Open>().filter(|_| has_come).map(Open::busy);
    next.call(request).await
}

/// How long a connection may be silent, before a request or between two requests.
pub const IDLE: Duration = Duration::from_secs(5);

/// How long a client may leave an answer unread.
pub const UNREAD: Duration = Duration::from_secs(10);

/// How long a body may take to come.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use actix_rt::task::JoinHandle;
    use actix_web::web::{Data, Payload, get, post};
    use futures_util::stream;
    use prometheus::Registry;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::sync::Notify;

    use super::*;

    /// Whether a request has come, and whether it may be answered.
    #[derive(Default)]
    struct Slow {
        came: Notify,
        go: Notify,
    }

    async fn answer(slow: Data<Slow>) -> &'static str {
        slow.came.notify_one();
        slow.go.notified().await;
        "done"
    }

    /// Serves the paths that `configure` adds on so many connections; returns the address, the handle and the server's task.
    fn serving(
        most: usize,
        configure: impl Fn(&mut ServiceConfig) + Clone + Send + 'static,
    ) -> (SocketAddr, Handle, JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Connections::new(most, &Registry::new()).unwrap();
        let (handle, server) = serve(listener, connections, Duration::from_secs(60), configure).unwrap();
        (address, handle, actix_rt::spawn(server))
    }

    #[test]
    fn an_argument_that_a_path_does_not_take_is_refused_with_those_that_it_takes() {
        let read = |query: &str, known: &[&str]| arguments("/past", query, known);
        assert_eq!(read("most=5&tenant=a%20b", &["most", "tenant"]).unwrap()["tenant"], "a b");
        assert!(read("", &[]).unwrap().is_empty());
        let refused = read("mots=5", &["most", "tenant"]).unwrap_err();
        assert_eq!(refused, "`mots` is no argument of /past, which takes `most`, `tenant`");
        assert!(read("most=5", &[]).unwrap_err().ends_with("/past, which takes no arguments"));
    }

    #[test]
    fn a_head_is_answered_as_a_get_without_the_body_even_of_an_answer_without_an_end() {
        actix_rt::System::new().block_on(async {
            let endless = || async { HttpResponse::Ok().streaming(stream::pending::<io::Result<Bytes>>()) };
            let configure = move |service: &mut ServiceConfig| {
                service
                    .route("/short", get().to(|| async { "ok\n" }))
                    .route("/long", get().to(|| async { in_pieces("text/plain", vec![b'x'; 100_000]) }))
                    .route("/endless", get().to(endless));
            };
            let (address, handle, serving) = serving(4, configure);
            let mut client = TcpStream::connect(address).await.unwrap();
            for (path, head) in
                [("short", "content-length: 3"), ("long", "content-length: 100000"), ("endless", "chunked")]
            {
                let request = format!("HEAD /{path} HTTP/1.1\r\nhost: here\r\n\r\n");
                client.write_all(request.as_bytes()).await.unwrap();
                let mut text = String::new();
                while !text.ends_with("\r\n\r\n") {
                    text.push(client.read_u8().await.unwrap().into());
                }
                assert!(text.starts_with("HTTP/1.1 200") && text.contains(head), "{text}");
            }
            client
                .write_all(b"GET /short HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut text = String::new();
            client.read_to_string(&mut text).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("\r\n\r\nok\n"), "{text}");
            handle.stop().await;
            serving.await.unwrap().unwrap();
        });
    }

    async fn answer_body(slow: Data<Slow>, request: HttpRequest, body: Payload) -> Result<Bytes, Error> {
        let body = body_in_time(&request, body.to_bytes()).await?;
        answer(slow).await;
        Ok(body)
    }

    #[test]
    fn a_connection_makes_no_way_once_the_body_of_its_request_is_there_until_it_is_answered() {
        actix_rt::System::new().block_on(async {
            let slow = Data::from(Arc::new(Slow::default()));
            let app = slow.clone();
            let configure = move |service: &mut ServiceConfig| {
                _ = service.app_data(app.clone()).route("/", post().to(answer_body))
            };
            // One address has one of them.
            let (address, handle, serving) = serving(2, configure);
            let head = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 4\r\n\r\n";
            let mut waits = TcpStream::connect(address).await.unwrap();
            waits.write_all(head).await.unwrap();
            let mut busy = TcpStream::connect(address).await.unwrap();
            assert_eq!(waits.read(&mut [0; 16]).await.unwrap_or(0), 0, "its body has not come");
            busy.write_all(&[head.as_slice(), b"text"].concat()).await.unwrap();
            slow.came.notified().await;
            let mut refused = TcpStream::connect(address).await.unwrap();
            assert_eq!(refused.read(&mut [0; 16]).await.unwrap_or(0), 0);
            slow.go.notify_one();
            let mut text = String::new();
            while !text.ends_with("text") {
                text.push(busy.read_u8().await.unwrap().into());
            }
            let mut last = TcpStream::connect(address).await.unwrap();
            assert_eq!(busy.read(&mut [0; 16]).await.unwrap_or(0), 0, "it is idle again");
            last.write_all(&[head.as_slice(), b"text"].concat()).await.unwrap();
            slow.go.notify_one();
            assert_eq!(last.read_u8().await.unwrap(), b'H');
            drop(last);
            handle.stop().await;
            serving.await.unwrap().unwrap();
        });
    }

    #[test]
    fn a_server_that_stops_leaves_idle_connections_and_answers_what_has_come() {
        actix_rt::System::new().block_on(async {
            let slow = Data::from(Arc::new(Slow::default()));
            let app = slow.clone();
            let configure = move |service: &mut ServiceConfig| {
                _ = service.app_data(app.clone()).route("/", get().to(answer))
            };
            let (address, handle, serving) = serving(4, configure);
            let mut idle = TcpStream::connect(address).await.unwrap();
            let mut busy = TcpStream::connect(address).await.unwrap();
            busy.write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n").await.unwrap();
            slow.came.notified().await;

            let stopping = handle.clone();
            let stopped = actix_rt::spawn(async move { stopping.stop().await });
            // No answer was ever sent on it.
            assert_eq!(idle.read(&mut [0; 16]).await.unwrap(), 0);
            slow.go.notify_one();
            let mut text = String::new();
            busy.read_to_string(&mut text).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("done"), "{text}");
            stopped.await.unwrap();
            serving.await.unwrap().unwrap();
        });
    }
}
