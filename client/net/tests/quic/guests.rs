//! The bounds on the clients of a server.

use std::time::Duration;

use larder_net::quic::{
    Asked, Connection, Endpoint, Guest, GuestLimits, Guests, MessageError, TurnedAway, read_message,
    write_message,
};
use larder_protocol::identity::Role;
use larder_protocol::limits::MAX_PEER_MESSAGE_BYTES;
use larder_protocol::peer::PeerRequest;
use quinn::SendStream;
use tokio::time::timeout;

use super::{Ca, connected};

/// Limits so small that they are easily reached.
fn limits(role: Role) -> GuestLimits {
    match role {
        Role::Node => GuestLimits { connections: 2, streams: 8, message_bytes: 1_000, waiting_bytes: 1_500 },
        _ => GuestLimits { connections: 2, streams: 8, message_bytes: 16, waiting_bytes: 32 },
    }
}

/// Both ends of a connection that a server lets in, or the reason for which it does not.
async fn visit(
    client: &Endpoint,
    server: &Endpoint,
    guests: &Guests,
) -> (Connection, Result<Guest, TurnedAway>) {
    let receive = async { guests.receive(server.accept().await.unwrap()).await };
    let connect = client.connect(server.local_address(), Role::Node, None);
    let (received, connected) = tokio::join!(receive, connect);
    (connected.unwrap(), received.map(Option::unwrap))
}

/// Begins a message of this many bytes.
async fn announce(connection: &Connection, bytes: u32) -> SendStream {
    let (mut send, _receive) = connection.quic().open_bi().await.unwrap();
    let header = [bytes.to_le_bytes(), [0; 4]].concat();
    send.write_all(&header).await.unwrap();
    send
}

/// Reads the next request; `None` if it does not come within a moment.
async fn read(guest: &Guest) -> Option<Result<Option<Asked<PeerRequest>>, MessageError>> {
    let (_send, mut receive) = guest.connection().quic().accept_bi().await.unwrap();
    timeout(Duration::from_millis(100), guest.seat().read(&mut receive)).await.ok()
}

/// Bytes of this process's memory.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4_096
}

#[tokio::test]
async fn headers_that_announce_long_messages_take_no_memory_until_the_messages_come() {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Node, "a"), ca.endpoint(Role::Node, "b"));
    let (from, to) = connected(&client, &server).await;
    let before = resident_bytes();
    let (mut sending, mut reading) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        sending.push(announce(&from, MAX_PEER_MESSAGE_BYTES as u32).await);
        let (_send, mut receive) = to.quic().accept_bi().await.unwrap();
        let read = async move { read_message::<PeerRequest>(&mut receive).await.is_ok() };
        reading.push(tokio::spawn(read));
    }
    // The last stream's header is read, so all earlier headers are.
    timeout(Duration::from_millis(500), reading.pop().unwrap()).await.unwrap_err();
    let taken = resident_bytes().saturating_sub(before);
    assert!(taken < 32 << 20, "200 headers took {taken} bytes");
    drop(sending);
}

#[tokio::test]
async fn a_message_that_this_role_may_not_send_is_refused_by_its_header() {
    let ca = Ca::new();
    let (admin, server) = (ca.endpoint(Role::Admin, "e"), ca.endpoint(Role::Node, "b"));
    let guests = Guests::new(limits, 8);
    let (from, guest) = visit(&admin, &server, &guests).await;
    let guest = guest.unwrap();
    let _sending = announce(&from, 17).await;
    let refused = read(&guest).await.unwrap().unwrap_err();
    assert!(matches!(refused, MessageError::TooLong { bytes: 17, most: 16 }), "{refused:?}");
}

#[tokio::test]
async fn what_one_identity_has_on_its_way_keeps_only_itself_waiting() {
    let ca = Ca::new();
    let (one, other) = (ca.endpoint(Role::Node, "one"), ca.endpoint(Role::Node, "other"));
    let (server, guests) = (ca.endpoint(Role::Node, "b"), Guests::new(limits, 8));
    let (from, guest) = visit(&one, &server, &guests).await;
    let guest = std::sync::Arc::new(guest.unwrap());
    // A message of a thousand bytes, of fifteen hundred allowed. Its bytes do not come.
    let _sending = announce(&from, 1_000).await;
    let (_send, mut receive) = guest.connection().quic().accept_bi().await.unwrap();
    let reader = std::sync::Arc::clone(&guest);
    let slow = tokio::spawn(async move { reader.seat().read::<PeerRequest>(&mut receive).await.is_ok() });
    let _second = announce(&from, 600).await;
    assert!(read(&guest).await.is_none(), "the second message waits for the first");

    let (from_other, other_guest) = visit(&other, &server, &guests).await;
    let (mut send, _receive) = from_other.quic().open_bi().await.unwrap();
    write_message(&mut send, &PeerRequest::Ping).await.unwrap();
    let asked = read(&other_guest.unwrap()).await.unwrap().unwrap().unwrap();
    assert_eq!(asked.message, PeerRequest::Ping);
    // A short message still finds room.
    let (mut send, _receive) = from.quic().open_bi().await.unwrap();
    write_message(&mut send, &PeerRequest::Ping).await.unwrap();
    assert!(read(&guest).await.is_some());
    slow.abort();
}

#[tokio::test]
async fn a_nodes_oldest_connection_makes_way_for_a_new_one_and_others_are_turned_away() {
    let ca = Ca::new();
    let (node, admin) = (ca.endpoint(Role::Node, "a"), ca.endpoint(Role::Admin, "e"));
    let (server, guests) = (ca.endpoint(Role::Node, "b"), Guests::new(limits, 8));
    let mut of_node = Vec::new();
    for _ in 0..3 {
        let (connection, guest) = visit(&node, &server, &guests).await;
        of_node.push((connection, guest.unwrap()));
    }
    of_node[0].0.quic().closed().await;
    assert!(of_node[1..].iter().all(|(connection, _)| connection.quic().close_reason().is_none()));

    let first = visit(&admin, &server, &guests).await;
    let second = visit(&admin, &server, &guests).await;
    let (third, turned_away) = visit(&admin, &server, &guests).await;
    assert_eq!(turned_away.unwrap_err().reason, "connections");
    third.quic().closed().await;
    drop((first.1, second));
    assert!(visit(&admin, &server, &guests).await.1.is_ok(), "who left makes room");
}

#[tokio::test]
async fn an_engine_that_asks_for_forbidden_things_in_a_loop_fills_no_log() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let log = tracing_subscriber::fmt().with_writer(file.reopen().unwrap()).finish();
    let _logs = tracing::subscriber::set_default(log);
    let (ca, guests) = (Ca::new(), Guests::new(limits, 4));
    let (client, server) = (ca.endpoint(Role::Admin, "e"), ca.endpoint(Role::Node, "b"));
    let (_connection, guest) = visit(&client, &server, &guests).await;
    let guest = guest.unwrap();
    (0..1_000).for_each(|_| guest.log_refused("only nodes may do this"));
    let lines = std::fs::read_to_string(file.path()).unwrap();
    assert_eq!(lines.matches("only nodes may do this").count(), 1, "{lines}");
}

#[tokio::test]
async fn each_server_has_its_own_bound_of_members_which_holds_for_no_others() {
    let ca = Ca::new();
    let (node, admin) = (ca.endpoint(Role::Node, "a"), ca.endpoint(Role::Admin, "e"));
    let server = ca.endpoint(Role::Node, "b");
    let [narrow, wide] = [1, 2].map(|most| Guests::new(limits, most));
    let _first = visit(&node, &server, &narrow).await.1.unwrap();
    assert_eq!(visit(&node, &server, &narrow).await.1.unwrap_err().reason, "connections");
    assert!(visit(&admin, &server, &narrow).await.1.is_ok());
    let _first = visit(&node, &server, &wide).await.1.unwrap();
    assert!(visit(&node, &server, &wide).await.1.is_ok());
}

#[tokio::test]
async fn a_stranger_may_open_one_stream_and_a_guest_as_many_as_its_role_may() {
    let ca = Ca::new();
    let (node, server) = (ca.endpoint(Role::Node, "a"), ca.endpoint(Role::Node, "b"));
    let guests = Guests::new(limits, 8);
    let (from, _guest) = visit(&node, &server, &guests).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(from.quic().open_bi().await.unwrap());
    }
    assert!(timeout(Duration::from_millis(50), from.quic().open_bi()).await.is_err());
}
