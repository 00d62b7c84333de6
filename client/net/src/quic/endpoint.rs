//! Endpoints and connections with known identities on the other side.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_protocol::identity::{Identity, ParseIdentityError, Role};
use larder_protocol::version::Version;
use quinn::crypto::rustls::HandshakeData;
use quinn::{
    ClientConfig, ConnectionError, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig, VarInt,
};
use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use super::credentials::Credentials;
use super::port::{PortShare, ShareIds, share_id};
use super::settings::TransportSettings;
use super::socket::BatchedSocket;

/// A UDP socket that opens and accepts connections. It lives on the runtime in which it was made, best a current-thread
/// runtime of its own.
#[derive(Debug, Clone)]
pub struct Endpoint {
    endpoint: quinn::Endpoint,
    transport: Arc<TransportConfig>,
    stranger_transport: Arc<TransportConfig>,
    client: Arc<Mutex<ClientConfig>>,
    /// The configuration of connections whose other side has not proved its identity.
    strangers: Arc<Mutex<Arc<ServerConfig>>>,
    local: SocketAddr,
    window_bytes: u32,
    accepts: bool,
}

/// A connection whose other side has proved its identity.
#[derive(Debug, Clone)]
pub struct Connection {
    quic: quinn::Connection,
    peer: Arc<Identity>,
    version: Version,
    window_bytes: u32,
}

/// A connection that came in and whose other side has not proved its identity.
#[derive(Debug)]
pub struct Incoming {
    incoming: quinn::Incoming,
    strangers: Arc<ServerConfig>,
    window_bytes: u32,
}

/// Why an address cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the {protocol} address {listen}: does another process use it?")]
pub struct BindError {
    /// `UDP` or `TCP`.
    pub protocol: &'static str,
    /// The address.
    pub listen: SocketAddr,
    /// The system's error.
    pub source: std::io::Error,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address cannot be dialled, or the endpoint is closed.
    #[error("cannot begin a connection")]
    Dial(#[from] quinn::ConnectError),
    /// Nobody answers, or the other side's certificate is not trusted, or it does not trust ours.
    #[error(
        "no connection: the other side must be reachable by UDP, and each side must have a valid certificate of an authority that the other side trusts"
    )]
    Handshake(#[from] ConnectionError),
    /// Nobody listens, or the other side's certificate is not trusted.
    #[error(
        "no connection: the other side must be reachable by TCP, and must have a valid certificate of an authority that this side trusts"
    )]
    Tcp(#[source] std::io::Error),
    /// The two speak no version of the protocol in common.
    #[error(transparent)]
    Version(#[from] NoVersion),
    /// The other side's identity is unknown.
    #[error("the other side's certificate cannot be used")]
    Identity(#[from] IdentityError),
    /// The other side is somebody else.
    #[error("the process at this address is {found}, not {}", expected(*.role, .name.as_deref()))]
    SomebodyElse {
        /// The identity found there.
        found: Identity,
        /// The role that was expected.
        role: Role,
        /// The name that was expected.
        name: Option<String>,
    },
}

/// There is no version of the protocol that both sides speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this process speaks {} and {}, the other side {}: two releases that follow each other work together, so upgrade the earlier one, release by release",
    Version::LATEST,
    Version::EARLIEST,
    .found.map_or_else(|| "none that it knows".to_owned(), |found| found.to_string())
)]
pub struct NoVersion {
    /// The best version that the other side speaks, if this process has heard of it.
    pub found: Option<Version>,
}

/// The reason why a certificate names no identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// There is no certificate, or it cannot be read.
    #[error("there is no readable certificate")]
    Unreadable,
    /// The certificate has no identity, or several.
    #[error("the certificate has {found} larder:// URIs among its names; it must have one")]
    NotOne {
        /// How many there are.
        found: usize,
    },
    /// The URI is no identity.
    #[error(transparent)]
    Malformed(#[from] ParseIdentityError),
}

/// Why a connection that came in was turned away.
#[derive(Debug, thiserror::Error)]
#[error("turned away: {reason}")]
pub struct Rejected {
    /// For metrics: `certificate` (not trusted, or expired), `identity` (it does not say who it is), `version` (it speaks no
    /// version that this process speaks) or `handshake` (anything else).
    pub reason: &'static str,
    /// The cause.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl Endpoint {
    /// Binds a socket. Needs a tokio runtime with IO and time.
    ///
    /// # Errors
    /// [`BindError`] if the address is in use, or is not this machine's.
    pub fn bind(
        listen: SocketAddr,
        credentials: &Credentials,
        settings: &TransportSettings,
    ) -> Result<Self, BindError> {
        Self::on(PortShare::whole(listen, settings)?, credentials, settings)
    }

    /// An endpoint on a bound socket. Needs a tokio runtime with IO and time, which serves the socket from now on.
    ///
    /// # Errors
    /// [`BindError`] if the system refuses.
    pub fn on(
        share: PortShare,
        credentials: &Credentials,
        settings: &TransportSettings,
    ) -> Result<Self, BindError> {
        let PortShare { socket, listen, number } = share;
        let failed = |source| BindError { protocol: "UDP", listen, source };
        let socket = BatchedSocket::new(socket, settings).map_err(failed)?;
        let (transport, stranger_transport) = (settings.transport(), settings.transport_of_strangers());
        let mut config = EndpointConfig::default();
        let payload = config.max_udp_payload_size(MAX_DATAGRAM_BYTES);
        payload.map_err(|error| failed(std::io::Error::other(error)))?;
        if let Some(share) = number {
            config.cid_generator(move || Box::new(ShareIds(share)));
        }
        let server = server_config(credentials, &transport);
        let runtime = Arc::new(TokioRuntime);
        let endpoint = quinn::Endpoint::new_with_abstract_socket(config, Some(server), socket, runtime);
        let endpoint = endpoint.map_err(failed)?;
        let local = endpoint.local_addr().map_err(failed)?;
        let client = Arc::new(Mutex::new(client_config(credentials, &transport)));
        let strangers = Arc::new(Mutex::new(Arc::new(server_config(credentials, &stranger_transport))));
        let window_bytes = settings.window_bytes;
        let accepts = true;
        Ok(Self { endpoint, transport, stranger_transport, client, strangers, local, window_bytes, accepts })
    }

    /// An endpoint that only dials, from any port of an address: it answers nobody who dials it.
    ///
    /// # Errors
    /// [`BindError`] if the address is not this machine's.
    pub fn dialler(
        address: IpAddr,
        credentials: &Credentials,
        settings: &TransportSettings,
    ) -> Result<Self, BindError> {
        let endpoint = Self::bind(SocketAddr::new(address, 0), credentials, settings)?;
        endpoint.endpoint.set_server_config(None);
        Ok(Self { accepts: false, ..endpoint })
    }

    /// The local address.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Connects, and checks that the other side has this role and, if one is given, this name.
    ///
    /// The other side judges our certificate a moment later: if it turns us away, the first stream says so.
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
        name: Option<&str>,
    ) -> Result<Connection, ConnectError> {
        let config = crate::lock(&self.client).clone();
        self.connect_with(config, address, role, name).await
    }

    /// As [`Self::connect`], to a share of the address's port ([`PortShare`]). An address with one socket takes all shares.
    ///
    /// # Errors
    /// Those of [`Self::connect`].
    ///
    /// # Cancel safety
    /// Dropped, it gives up the attempt.
    pub async fn connect_to_share(
        &self,
        address: SocketAddr,
        role: Role,
        name: Option<&str>,
        share: u8,
    ) -> Result<Connection, ConnectError> {
        let mut config = crate::lock(&self.client).clone();
        config.initial_dst_cid_provider(Arc::new(move || share_id(share)));
        self.connect_with(config, address, role, name).await
    }

    async fn connect_with(
        &self,
        config: ClientConfig,
        address: SocketAddr,
        role: Role,
        name: Option<&str>,
    ) -> Result<Connection, ConnectError> {
        let dialled = self.endpoint.connect_with(config, address, role.server_name())?.await;
        let quic = dialled.map_err(|error| match crypto_alert(&error) {
            Some(NO_APPLICATION_PROTOCOL) => NoVersion { found: None }.into(),
            _ => ConnectError::Handshake(error),
        })?;
        let version = agreed(&quic)?;
        let peer = identified(&quic)?;
        match expect(peer, role, name) {
            Ok(peer) => {
                Ok(Connection { quic, peer: Arc::new(peer), version, window_bytes: self.window_bytes })
            }
            Err(error) => {
                quic.close(CLOSED_FOR_IDENTITY, b"somebody else was expected here");
                Err(error)
            }
        }
    }

    /// The next connection that comes in; `None` once the endpoint is closed.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn accept(&self) -> Option<Incoming> {
        let incoming = self.endpoint.accept().await?;
        let strangers = Arc::clone(&crate::lock(&self.strangers));
        Some(Incoming { incoming, strangers, window_bytes: self.window_bytes })
    }

    /// Uses other credentials for connections from now on.
    pub fn renew(&self, credentials: &Credentials) {
        if self.accepts {
            self.endpoint.set_server_config(Some(server_config(credentials, &self.transport)));
        }
        *crate::lock(&self.strangers) = Arc::new(server_config(credentials, &self.stranger_transport));
        *crate::lock(&self.client) = client_config(credentials, &self.transport);
    }

    /// Closes every connection and waits a moment until the other sides know.
    ///
    /// # Cancel safety
    /// Dropped, the others may find out only by their idle timeout.
    pub async fn close(&self) {
        self.endpoint.close(CLOSED, b"the process stops");
        // After the grace, a side that has not heard of the close finds out by its idle timeout.
        let _ = tokio::time::timeout(CLOSE_GRACE, self.endpoint.wait_idle()).await;
    }
}

impl Incoming {
    /// The address of the other side.
    pub fn remote(&self) -> SocketAddr {
        self.incoming.remote_address()
    }

    /// Ends the handshake.
    ///
    /// # Errors
    /// [`Rejected`]: the connection is closed.
    ///
    /// # Cancel safety
    /// Dropped, the connection is closed.
    pub async fn accept(self) -> Result<Connection, Rejected> {
        finish(self.incoming.accept(), self.window_bytes).await
    }

    /// Accepts a connection that may send little until [`Connection::admit`].
    pub(super) async fn accept_stranger(self) -> Result<Connection, Rejected> {
        finish(self.incoming.accept_with(self.strangers), self.window_bytes).await
    }

    /// Whether the other side has proved that it receives at its address.
    pub(super) fn has_proved_its_address(&self) -> bool {
        self.incoming.remote_address_validated()
    }

    /// Makes the other side connect again, with a proof of its address.
    pub(super) fn ask_to_come_back(self) {
        // An error: the other side has given the proof already, and is refused.
        let _ = self.incoming.retry();
    }
}

/// Ends a handshake.
async fn finish(
    accepted: Result<quinn::Connecting, ConnectionError>,
    window_bytes: u32,
) -> Result<Connection, Rejected> {
    let failed = |error: ConnectionError| {
        let reason = match crypto_alert(&error) {
            Some(NO_APPLICATION_PROTOCOL) => "version",
            Some(_) => "certificate",
            None => "handshake",
        };
        Rejected { reason, source: Box::new(error) }
    };
    let quic = accepted.map_err(failed)?.await.map_err(failed)?;
    let version = agreed(&quic).map_err(|error| Rejected { reason: "version", source: Box::new(error) })?;
    match identified(&quic) {
        Ok(peer) => Ok(Connection { quic, peer: Arc::new(peer), version, window_bytes }),
        Err(error) => {
            quic.close(CLOSED_FOR_IDENTITY, error.to_string().as_bytes());
            Err(Rejected { reason: "identity", source: Box::new(error) })
        }
    }
}

impl Connection {
    /// The identity of the other side.
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The version of the protocol that both sides speak on the connection.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Raises the limit of open streams for the other side; for a member, also the limit of bytes in flight.
    pub(super) fn admit(&self, streams: u32, is_member: bool) {
        self.quic.set_max_concurrent_bi_streams(VarInt::from_u32(streams));
        if is_member {
            self.quic.set_receive_window(VarInt::from_u32(MEMBER_WINDOW_BYTES));
        }
    }

    /// Allows as many bytes in flight to here as on a connection that this process made: blocks come on both.
    pub fn take_blocks(&self) {
        self.quic.set_receive_window(VarInt::from_u32(self.window_bytes));
    }

    /// Closes the connection because nothing is in flight on it. A request that is on its way is not served: its asker has to
    /// ask again on another connection.
    pub fn close_as_idle(&self) {
        self.quic.close(CLOSED_AS_IDLE, b"nothing was in flight");
    }

    /// Whether the other side closed the connection as idle: then it served none of the requests that have no answer. If its
    /// close was lost, it answers later packets with a reset, which counts too.
    pub fn was_closed_as_idle(&self) -> bool {
        match self.quic.close_reason() {
            Some(ConnectionError::ApplicationClosed(close)) => close.error_code == CLOSED_AS_IDLE,
            Some(ConnectionError::Reset) => true,
            _ => false,
        }
    }

    /// The connection, for streams.
    pub fn quic(&self) -> &quinn::Connection {
        &self.quic
    }
}

/// Checks that the other side has this role and, if one is given, this name.
pub(crate) fn expect(peer: Identity, role: Role, name: Option<&str>) -> Result<Identity, ConnectError> {
    if peer.role == role && name.is_none_or(|name| peer.name == name) {
        return Ok(peer);
    }
    Err(ConnectError::SomebodyElse { found: peer, role, name: name.map(str::to_owned) })
}

/// The identity in a certificate chain.
pub(crate) fn identity_of(chain: &[CertificateDer<'_>]) -> Result<Identity, IdentityError> {
    let own = chain.first().ok_or(IdentityError::Unreadable)?;
    let own = EndEntityCert::try_from(own).map_err(|_| IdentityError::Unreadable)?;
    let uris: Vec<&str> = own.valid_uri_names().filter(|uri| uri.starts_with("larder://")).collect();
    match uris[..] {
        [uri] => Ok(uri.parse()?),
        _ => Err(IdentityError::NotOne { found: uris.len() }),
    }
}

fn identified(quic: &quinn::Connection) -> Result<Identity, IdentityError> {
    let shown = quic.peer_identity().ok_or(IdentityError::Unreadable)?;
    let chain = shown.downcast::<Vec<CertificateDer<'static>>>().map_err(|_| IdentityError::Unreadable)?;
    identity_of(&chain)
}

/// The version that the handshake agreed on. A connection without one is closed, and the other side told why.
fn agreed(quic: &quinn::Connection) -> Result<Version, NoVersion> {
    let data = quic.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    let found = data.and_then(|data| Version::named(&data.protocol?));
    match found {
        Some(version) if version.is_spoken() => Ok(version),
        found => {
            let error = NoVersion { found };
            quic.close(CLOSED_FOR_VERSION, error.to_string().as_bytes());
            Err(error)
        }
    }
}

/// The TLS alert that ended a handshake, raised by either side. Alerts have codes of their own (RFC 9001, section 4.8).
fn crypto_alert(error: &ConnectionError) -> Option<u8> {
    let code = match error {
        ConnectionError::TransportError(error) => u64::from(error.code),
        ConnectionError::ConnectionClosed(close) => u64::from(close.error_code),
        _ => 0,
    };
    (0x100..0x200).contains(&code).then_some(code as u8)
}

fn client_config(credentials: &Credentials, transport: &Arc<TransportConfig>) -> ClientConfig {
    let mut config = ClientConfig::new(credentials.client());
    config.transport_config(Arc::clone(transport));
    config
}

fn server_config(credentials: &Credentials, transport: &Arc<TransportConfig>) -> ServerConfig {
    let mut config = ServerConfig::with_crypto(credentials.server());
    config
        .transport_config(Arc::clone(transport))
        .max_incoming(MAX_INCOMING)
        .incoming_buffer_size(INCOMING_BUFFER_BYTES)
        .incoming_buffer_size_total(MAX_INCOMING as u64 / 4 * INCOMING_BUFFER_BYTES);
    config
}

fn expected(role: Role, name: Option<&str>) -> String {
    name.map_or_else(|| format!("a {role}"), |name| format!("the {role} {name}"))
}

/// Connections that nobody has accepted yet; more are refused.
const MAX_INCOMING: usize = 1_024;

/// Bytes that an unaccepted connection may send: a handshake's first flight takes three datagrams.
const INCOMING_BUFFER_BYTES: u64 = 16 << 10;

/// Bytes of a member's requests in flight on a connection: two of the longest.
const MEMBER_WINDOW_BYTES: u32 = 2 << 20;

/// The largest datagram to receive, UDP's own limit: the sender's setting decides the size.
const MAX_DATAGRAM_BYTES: u16 = 65_507;

/// How long closing waits until the other sides have heard of it.
const CLOSE_GRACE: Duration = Duration::from_millis(200);

const CLOSED: VarInt = VarInt::from_u32(0);
const CLOSED_FOR_IDENTITY: VarInt = VarInt::from_u32(1);
const CLOSED_FOR_VERSION: VarInt = VarInt::from_u32(3);
const CLOSED_AS_IDLE: VarInt = VarInt::from_u32(4);

/// The alert of a server that speaks none of the client's protocols (RFC 7301, section 3.2).
const NO_APPLICATION_PROTOCOL: u8 = 120;
