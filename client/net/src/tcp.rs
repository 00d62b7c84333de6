//! TLS over TCP: a second way for blocks beside QUIC.
//!
//! Network cards and kernels move many packets of a TCP stream as one large piece. QUIC encrypts and counts each packet by itself,
//! so packets of 1,500 bytes cost QUIC far more CPU time than TCP. Both ways use the same certificates, the same cipher and the
//! same checks of the other side.
//!
//! A connection carries one request at a time: the answer ends before the next request begins.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use larder_protocol::identity::{Identity, Role};
use larder_protocol::version::Version;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CommonState};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::quic::{
    BindError, ConnectError, Counted, Credentials, Guests, HANDSHAKE_DEADLINE, IdentityError, NoVersion,
    Seat, TurnedAway, expect, identity_of,
};

/// Dials TLS connections over TCP, and ends the handshakes of those that come in. Cloning shares.
#[derive(Debug, Clone)]
pub struct TcpEndpoint {
    credentials: Arc<Mutex<Credentials>>,
    idle_timeout: Duration,
}

/// A bound TCP address, for a listener on any thread.
#[derive(Debug)]
pub struct TcpPort {
    socket: std::net::TcpListener,
}

/// A connection over TCP whose other side has proved its identity.
///
/// A write may keep bytes back until the next flush. A side that is silent for [`TransportSettings::idle_timeout`] while it owes
/// packets counts as dead: the connection breaks.
///
/// [`TransportSettings::idle_timeout`]: crate::quic::TransportSettings::idle_timeout
#[derive(Debug)]
pub struct TcpConnection {
    stream: TlsStream<TcpStream>,
    peer: Identity,
    version: Version,
}

/// An admitted connection over TCP.
#[derive(Debug)]
pub struct TcpGuest {
    /// The connection.
    pub connection: TcpConnection,
    /// Its seat among the connections at this server, which is taken until this value is dropped.
    pub seat: Seat,
    /// Its end, if the server ends it.
    pub closed: Closed,
}

/// Comes when a server closes a connection, since a newer connection takes its place.
#[derive(Debug)]
pub struct Closed(watch::Receiver<bool>);

impl TcpPort {
    /// Takes an address.
    ///
    /// # Errors
    /// [`BindError`] if the address is in use, or is not this machine's.
    pub fn bind(listen: SocketAddr) -> Result<Self, BindError> {
        let bound = || {
            let socket = Socket::new(Domain::for_address(listen), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&listen.into())?;
            socket.listen(BACKLOG)?;
            Ok(Self { socket: socket.into() })
        };
        bound().map_err(|source| BindError { protocol: "TCP", listen, source })
    }

    /// Listens. Needs a tokio runtime with IO, which serves the socket from now on.
    ///
    /// # Errors
    /// Those of the system.
    pub fn listen(&self) -> io::Result<TcpListener> {
        TcpListener::from_std(self.socket.try_clone()?)
    }
}

impl TcpEndpoint {
    /// An endpoint with these credentials. A side that is silent for `idle_timeout` while it owes packets counts as dead.
    pub fn new(credentials: &Credentials, idle_timeout: Duration) -> Self {
        Self { credentials: Arc::new(Mutex::new(credentials.clone())), idle_timeout }
    }

    /// Uses other credentials for connections from now on.
    pub fn renew(&self, credentials: &Credentials) {
        *crate::lock(&self.credentials) = credentials.clone();
    }

    /// Connects, and checks that the other side has this role and this name.
    ///
    /// The other side judges our certificate a moment later: if it turns us away, the first answer is an error.
    ///
    /// # Errors
    /// [`ConnectError`]: nobody answers, a certificate is not trusted, or somebody else answers.
    ///
    /// # Cancel safety
    /// Dropped, it gives up the attempt.
    pub async fn connect(
        &self,
        address: SocketAddr,
        role: Role,
        name: &str,
    ) -> Result<TcpConnection, ConnectError> {
        let client = crate::lock(&self.credentials).client_over_tcp();
        let stream = TcpStream::connect(address).await.map_err(ConnectError::Tcp)?;
        self.set_up(&stream).map_err(ConnectError::Tcp)?;
        let server_name = ServerName::try_from(role.server_name())
            .map_err(|error| ConnectError::Tcp(io::Error::other(error)))?;
        let mut stream =
            TlsConnector::from(client).connect(server_name, stream).await.map_err(
                |error| match tls_error(&error) {
                    Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => {
                        NoVersion { found: None }.into()
                    }
                    _ => ConnectError::Tcp(error),
                },
            )?;
        let tls = stream.get_mut().1;
        tls.set_buffer_limit(Some(BUFFER_BYTES));
        let (version, peer) = (agreed(tls)?, expect(identified(tls)?, role, Some(name))?);
        Ok(TcpConnection { stream: stream.into(), peer, version })
    }

    /// Ends the handshake of a connection that came in, and lets the other side in if it may. Logs connections that are turned
    /// away, at most one a second.
    ///
    /// # Errors
    /// [`TurnedAway`]: the connection is closed.
    ///
    /// # Cancel safety
    /// Dropped, the connection is closed.
    pub async fn receive(
        &self,
        guests: &Guests,
        stream: TcpStream,
        remote: SocketAddr,
    ) -> Result<TcpGuest, TurnedAway> {
        self.let_in(guests, stream, remote).await.inspect_err(|turned_away| guests.log(remote, turned_away))
    }

    async fn let_in(
        &self,
        guests: &Guests,
        stream: TcpStream,
        remote: SocketAddr,
    ) -> Result<TcpGuest, TurnedAway> {
        let turned_away = |reason, source: Box<dyn std::error::Error + Send + Sync>| TurnedAway {
            reason,
            source: Some(source),
        };
        let (handshake, _) = guests.begin_handshake(remote.ip().to_canonical())?;
        self.set_up(&stream).map_err(|error| turned_away("handshake", error.into()))?;
        let server = crate::lock(&self.credentials).server_over_tcp();
        let mut stream = match timeout(HANDSHAKE_DEADLINE, TlsAcceptor::from(server).accept(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                let reason = match tls_error(&error) {
                    Some(rustls::Error::NoApplicationProtocol) => "version",
                    Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => {
                        "certificate"
                    }
                    _ => "handshake",
                };
                return Err(turned_away(reason, error.into()));
            }
            Err(_) => return Err(TurnedAway { reason: "handshake", source: None }),
        };
        drop(handshake);
        let tls = stream.get_mut().1;
        tls.set_buffer_limit(Some(BUFFER_BYTES));
        let version = agreed(tls).map_err(|error| turned_away("version", error.into()))?;
        let peer = identified(tls).map_err(|error| turned_away("identity", error.into()))?;
        let (closes, closed) = watch::channel(false);
        let seat = guests.seat_for(&peer, Counted::Tcp(closes))?;
        let connection = TcpConnection { stream: stream.into(), peer, version };
        Ok(TcpGuest { connection, seat, closed: Closed(closed) })
    }

    /// Sends packets at once, and notices the death of the other side.
    fn set_up(&self, stream: &TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(stream);
        socket.set_tcp_user_timeout(Some(self.idle_timeout))?;
        let keepalive = TcpKeepalive::new().with_time(self.idle_timeout / 2);
        socket.set_tcp_keepalive(&keepalive.with_interval(self.idle_timeout / 8).with_retries(4))
    }
}

impl TcpConnection {
    /// The identity of the other side.
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The version of the protocol that both sides speak on the connection.
    pub fn version(&self) -> Version {
        self.version
    }
}

impl Closed {
    /// Waits for the end.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait(&mut self) {
        // An error: the connection does not count any more, so nobody closes it.
        if self.0.wait_for(|&is_closed| is_closed).await.is_err() {
            std::future::pending().await
        }
    }
}

impl AsyncRead for TcpConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, to)
    }
}

impl AsyncBufRead for TcpConnection {
    fn poll_fill_buf(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        Pin::new(&mut self.get_mut().stream).poll_fill_buf(cx)
    }

    fn consume(mut self: Pin<&mut Self>, bytes: usize) {
        Pin::new(&mut self.stream).consume(bytes);
    }
}

impl AsyncWrite for TcpConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The error of TLS behind an error of the stream.
fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// The version that the handshake agreed on.
fn agreed(tls: &CommonState) -> Result<Version, NoVersion> {
    let found = tls.alpn_protocol().and_then(Version::named);
    found.filter(|version| version.is_spoken()).ok_or(NoVersion { found })
}

fn identified(tls: &CommonState) -> Result<Identity, IdentityError> {
    identity_of(tls.peer_certificates().ok_or(IdentityError::Unreadable)?)
}

/// Connections that nobody has accepted yet.
const BACKLOG: i32 = 1_024;

/// Encrypted bytes that wait for the socket: few calls of the system for a block, and little memory for a side that does not read.
const BUFFER_BYTES: usize = 256 << 10;
