//! QUIC between processes of a cluster: mutual TLS, one set of transport settings, messages on streams.

use std::net::SocketAddr;
use std::path::PathBuf;

use larder_protocol::identity::{Identity, Role};
use larder_protocol::peer::Message;

/// Where a process's certificate is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialFiles {
    /// Certificates of the authorities that are trusted (PEM).
    pub ca: PathBuf,
    /// The process's own certificate chain (PEM).
    pub certificate: PathBuf,
    /// Its private key (PEM).
    pub key: PathBuf,
}

/// Who a process is, and whom it trusts.
#[derive(Debug, Clone)]
pub struct Credentials {
    identity: Identity,
}

impl Credentials {
    /// Reads PEM files.
    pub fn load(_files: &CredentialFiles) -> Result<Self, CredentialsError> {
        unimplemented!()
    }

    /// Who the certificate says this process is.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
}

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialsError {}

/// How QUIC is set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TransportSettings {
    /// The largest datagram that path discovery tries, in bytes of UDP payload.
    pub max_datagram_bytes: u16,
}

/// A UDP socket that connects and accepts connections. Lives on the current-thread runtime in which it was made.
#[derive(Debug, Clone)]
pub struct Endpoint {}

/// Why an address cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use UDP address {listen}")]
pub struct BindError {
    /// The address.
    pub listen: SocketAddr,
    /// What the system says.
    pub source: std::io::Error,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {}

/// Why a connection that came in was turned away. Its `reason` is a short word for metrics.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Rejected {
    /// `certificate`, `identity` or `handshake`.
    pub reason: &'static str,
}

/// A connection whose other side has shown who it is.
#[derive(Debug, Clone)]
pub struct Connection {
    quic: quinn::Connection,
    peer: Identity,
}

/// A connection that came in and has not shown who it is.
#[derive(Debug)]
pub struct Incoming {}

/// Why a message was not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {}

impl Endpoint {
    /// Binds a socket. Needs a tokio runtime, best a current-thread one of its own.
    pub fn bind(_: SocketAddr, _: &Credentials, _: &TransportSettings) -> Result<Self, BindError> {
        unimplemented!()
    }

    /// Where it listens.
    #[must_use]
    pub fn local_address(&self) -> SocketAddr {
        unimplemented!()
    }

    /// Connects, and checks that the other side has this role and, where one is given, this name.
    pub async fn connect(&self, _: SocketAddr, _: Role, _: Option<&str>) -> Result<Connection, ConnectError> {
        unimplemented!()
    }

    /// The next connection that comes in; `None` once the endpoint is closed.
    pub async fn accept(&self) -> Option<Incoming> {
        unimplemented!()
    }

    /// Uses other credentials for connections from now on.
    pub fn renew(&self, _: &Credentials) {
        unimplemented!()
    }

    /// Closes every connection and waits a moment until the others know.
    pub async fn close(&self) {
        unimplemented!()
    }
}

impl Incoming {
    /// Where it comes from.
    #[must_use]
    pub fn remote(&self) -> SocketAddr {
        unimplemented!()
    }

    /// Ends the handshake.
    pub async fn accept(self) -> Result<Connection, Rejected> {
        unimplemented!()
    }
}

impl Connection {
    /// Who the other side is.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The connection, for streams.
    #[must_use]
    pub fn quic(&self) -> &quinn::Connection {
        &self.quic
    }
}

/// Writes a message, framed as [`larder_protocol::peer`] says.
pub async fn write_message<M: Message>(_: &mut quinn::SendStream, _: &M) -> Result<(), MessageError> {
    unimplemented!()
}

/// Reads a message; `None` where the stream ended before one began.
pub async fn read_message<M: Message>(_: &mut quinn::RecvStream) -> Result<Option<M>, MessageError> {
    unimplemented!()
}
