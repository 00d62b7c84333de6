//! Diallers that get no connection.

use std::time::{Duration, SystemTime};

use larder_net::quic::ca::Validity;
use larder_net::quic::{ConnectError, Credentials};
use larder_protocol::identity::{Identity, Role};

use super::{Ca, any_port, bind, connected};

/// Dials a node of `ca` with these credentials. Returns the node's reason for turning the dialler away.
async fn turned_away(ca: &Ca, dialler: &Credentials) -> &'static str {
    let (server, client) = (ca.endpoint(Role::Node, "node-0"), bind(dialler));
    let accept = async { server.accept().await.unwrap().accept().await.unwrap_err().reason };
    let dial = async {
        if let Ok(connection) = client.connect(server.local_address(), Role::Node, None).await {
            connection.quic().closed().await;
        }
    };
    tokio::join!(accept, dial).0
}

#[tokio::test]
async fn a_node_is_known_by_role_and_name_on_both_sides() {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Admin, "me"), ca.endpoint(Role::Node, "node-7"));
    let (connected, accepted) = connected(&client, &server).await;
    assert_eq!(*connected.peer(), Identity::new(Role::Node, "node-7"));
    assert_eq!(*accepted.peer(), Identity::new(Role::Admin, "me"));
}

#[tokio::test]
async fn a_dialler_of_another_authority_is_turned_away() {
    let stranger = Ca::new().credentials(&Identity::new(Role::Node, "node-1"), Validity::days(1));
    assert_eq!(turned_away(&Ca::new(), &stranger).await, "certificate");
}

#[tokio::test]
async fn an_expired_dialler_is_turned_away() {
    let ca = Ca::new();
    let long_ago = SystemTime::now() - Duration::from_secs(7_200);
    let validity = Validity { not_before: long_ago, not_after: long_ago + Duration::from_secs(3_600) };
    let stale = Credentials::from_pem(
        ca.1.as_bytes(),
        ca.0.issue(&Identity::new(Role::Node, "a"), validity).unwrap().certificate_pem.as_bytes(),
        b"",
    );
    assert!(stale.is_err(), "without its key a certificate is worth nothing");
    let expired = ca.credentials(&Identity::new(Role::Node, "node-1"), validity);
    // The dialler trusts this node, but this node does not trust the dialler's expired certificate.
    assert_eq!(turned_away(&ca, &expired).await, "certificate");
}

#[tokio::test]
async fn who_dials_a_node_does_not_take_another_role_for_it() {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Node, "node-1"), ca.endpoint(Role::Admin, "x"));
    let dial = client.connect(server.local_address(), Role::Node, None);
    let accept = async { server.accept().await.unwrap().accept().await.map(drop) };
    let (refused, _) = tokio::join!(dial, accept);
    assert!(matches!(refused, Err(ConnectError::Handshake(_))), "its certificate has another server name");
}

#[tokio::test]
async fn who_dials_one_node_does_not_take_another_for_it() {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Node, "node-1"), ca.endpoint(Role::Node, "node-2"));
    let dial = client.connect(server.local_address(), Role::Node, Some("node-3"));
    let accept = async { server.accept().await.unwrap().accept().await.unwrap() };
    let (refused, accepted) = tokio::join!(dial, accept);
    let Err(ConnectError::SomebodyElse { found, .. }) = refused else { panic!("{refused:?}") };
    assert_eq!(found.name, "node-2");
    accepted.quic().closed().await;
}

#[tokio::test]
async fn garbage_on_the_port_disturbs_nobody() {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Node, "node-1"), ca.endpoint(Role::Node, "node-2"));
    let garbage = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    for length in [1, 20, 100, 1_200, 1_500, 9_000] {
        let bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
        garbage.send_to(&bytes, server.local_address()).await.unwrap();
    }
    connected(&client, &server).await;
}

#[tokio::test]
async fn renewed_credentials_count_for_new_connections() {
    let (old, new) = (Ca::new(), Ca::new());
    let server = old.endpoint(Role::Node, "node-0");
    server.renew(&new.credentials(&Identity::new(Role::Node, "node-0"), Validity::days(1)));
    connected(&new.endpoint(Role::Node, "node-1"), &server).await;
}
