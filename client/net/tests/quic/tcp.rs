//! Connections over TCP: who gets one, and with which credentials.

use std::net::SocketAddr;
use std::time::Duration;

use larder_net::quic::ca::Validity;
use larder_net::quic::{
    ConnectError, Credentials, GuestLimits, Guests, TurnedAway, read_message, write_message,
};
use larder_net::tcp::{TcpEndpoint, TcpGuest, TcpPort};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::peer::PeerRequest;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::{Ca, any_port};

const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

fn node(ca: &Ca, name: &str) -> Credentials {
    ca.credentials(&Identity::new(Role::Node, name), Validity::days(1))
}

fn limits(_: Role) -> GuestLimits {
    GuestLimits { connections: 1, streams: 1, message_bytes: 1_000, waiting_bytes: 1_000 }
}

/// A listener, and its address.
fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpPort::bind(any_port()).unwrap().listen().unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Lets the next connection in.
async fn receive(
    listener: &TcpListener,
    endpoint: &TcpEndpoint,
    guests: &Guests,
) -> Result<TcpGuest, TurnedAway> {
    let (stream, remote) = listener.accept().await.unwrap();
    endpoint.receive(guests, stream, remote).await
}

#[tokio::test]
async fn each_side_learns_who_the_other_is_and_messages_pass() {
    let ca = Ca::new();
    let [client, server] = ["a", "b"].map(|name| TcpEndpoint::new(&node(&ca, name), IDLE_TIMEOUT));
    let ((listener, address), guests) = (listen(), Guests::new(limits, 8));
    let (guest, connection) =
        tokio::join!(receive(&listener, &server, &guests), client.connect(address, Role::Node, "b"));
    let (mut guest, mut connection) = (guest.unwrap(), connection.unwrap());
    assert_eq!(connection.peer(), &Identity::new(Role::Node, "b"));
    assert_eq!(guest.connection.peer(), &Identity::new(Role::Node, "a"));
    assert_eq!(connection.version(), guest.connection.version());
    write_message(&mut connection, &PeerRequest::Ping).await.unwrap();
    connection.flush().await.unwrap();
    let asked = guest.seat.read::<PeerRequest>(&mut guest.connection).await.unwrap().unwrap();
    assert_eq!(asked.message, PeerRequest::Ping);
    drop(connection);
    assert!(!matches!(read_message::<PeerRequest>(&mut guest.connection).await, Ok(Some(_))));
}

#[tokio::test]
async fn the_wrong_name_or_another_authority_gets_no_connection() {
    let (ca, other) = (Ca::new(), Ca::new());
    let server = TcpEndpoint::new(&node(&ca, "b"), IDLE_TIMEOUT);
    let ((listener, address), guests) = (listen(), Guests::new(limits, 8));
    let client = TcpEndpoint::new(&node(&ca, "a"), IDLE_TIMEOUT);
    let (_, connection) =
        tokio::join!(receive(&listener, &server, &guests), client.connect(address, Role::Node, "c"));
    assert!(matches!(connection, Err(ConnectError::SomebodyElse { .. })), "{connection:?}");
    let stranger = TcpEndpoint::new(&node(&other, "a"), IDLE_TIMEOUT);
    let (guest, connection) =
        tokio::join!(receive(&listener, &server, &guests), stranger.connect(address, Role::Node, "b"));
    assert!(matches!(connection, Err(ConnectError::Tcp(_))), "{connection:?}");
    assert_eq!(guest.unwrap_err().reason, "handshake");
    drop(listener);
    assert!(matches!(client.connect(address, Role::Node, "b").await, Err(ConnectError::Tcp(_))));
}

#[tokio::test]
async fn renewed_credentials_serve_new_connections() {
    let (ca, later) = (Ca::new(), Ca::new());
    let server = TcpEndpoint::new(&node(&ca, "b"), IDLE_TIMEOUT);
    let client = TcpEndpoint::new(&node(&later, "a"), IDLE_TIMEOUT);
    let ((listener, address), guests) = (listen(), Guests::new(limits, 8));
    let (_, refused) =
        tokio::join!(receive(&listener, &server, &guests), client.connect(address, Role::Node, "b"));
    assert!(refused.is_err());
    server.renew(&node(&later, "b"));
    let (guest, connection) =
        tokio::join!(receive(&listener, &server, &guests), client.connect(address, Role::Node, "b"));
    assert!(guest.is_ok() && connection.is_ok());
}

#[tokio::test]
async fn a_newer_connection_of_a_node_takes_the_place_of_its_oldest() {
    let ca = Ca::new();
    let [client, server] = ["a", "b"].map(|name| TcpEndpoint::new(&node(&ca, name), IDLE_TIMEOUT));
    let ((listener, address), guests) = (listen(), Guests::new(limits, 8));
    let mut first = None;
    for round in 0..2 {
        let (guest, connection) =
            tokio::join!(receive(&listener, &server, &guests), client.connect(address, Role::Node, "b"));
        connection.unwrap();
        match round {
            0 => first = Some(guest.unwrap()),
            _ => assert!(guest.is_ok()),
        }
    }
    let mut first = first.unwrap();
    tokio::time::timeout(Duration::from_secs(20), first.closed.wait()).await.expect("it is closed");
}
