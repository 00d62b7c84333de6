//! QUIC and TLS over TCP, on loopback: who gets a connection and who does not, and what a connection carries.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod guests;
mod refusals;
mod renewal;
mod shares;
mod tcp;
mod transport;
mod versions;

use std::net::SocketAddr;

use larder_net::quic::ca::{Authority, Validity};
use larder_net::quic::{Connection, Credentials, Endpoint, TransportSettings};
use larder_protocol::identity::{Identity, Role};

/// An authority, with its certificate.
struct Ca(Authority, String);

impl Ca {
    fn new() -> Self {
        let (authority, files) = Authority::create(Validity::days(1)).unwrap();
        Self(authority, files.certificate_pem)
    }

    fn credentials(&self, identity: &Identity, validity: Validity) -> Credentials {
        let issued = self.0.issue(identity, validity).unwrap();
        let (certificate, key) = (issued.certificate_pem, issued.key_pem);
        Credentials::from_pem(self.1.as_bytes(), certificate.as_bytes(), key.as_bytes()).unwrap()
    }

    fn endpoint(&self, role: Role, name: &str) -> Endpoint {
        bind(&self.credentials(&Identity::new(role, name), Validity::days(1)))
    }
}

fn bind(credentials: &Credentials) -> Endpoint {
    Endpoint::bind(any_port(), credentials, &TransportSettings::default()).unwrap()
}

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Both ends of a connection.
async fn connected(client: &Endpoint, server: &Endpoint) -> (Connection, Connection) {
    let accept = async { server.accept().await.unwrap().accept().await.unwrap() };
    let connect = client.connect(server.local_address(), Role::Node, None);
    let (accepted, connected) = tokio::join!(accept, connect);
    (connected.unwrap(), accepted)
}
