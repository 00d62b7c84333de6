//! Endpoints that share one address, each for the connections that name its share.

use larder_net::quic::PortShare;

use super::*;

/// A node's endpoints on one address, and a client.
fn endpoints(count: usize) -> (Vec<Endpoint>, Endpoint) {
    let ca = Ca::new();
    let credentials = ca.credentials(&Identity::new(Role::Node, "server"), Validity::days(1));
    let settings = TransportSettings::default();
    let shares = PortShare::bind(any_port(), &settings, count).unwrap();
    let on = |share| Endpoint::on(share, &credentials, &settings).unwrap();
    (shares.into_iter().map(on).collect(), ca.endpoint(Role::Node, "client"))
}

/// The number of the endpoint that takes a connection. Both ends speak over the connection, and the server speaks first.
async fn taken(client: &Endpoint, servers: &[Endpoint], share: Option<u8>) -> usize {
    let address = servers[0].local_address();
    let connect = async {
        match share {
            Some(share) => client.connect_to_share(address, Role::Node, Some("server"), share).await,
            None => client.connect(address, Role::Node, Some("server")).await,
        }
    };
    let accept = async {
        let accepts = servers.iter().map(|server| Box::pin(server.accept()));
        let (incoming, number, _) = futures_util::future::select_all(accepts).await;
        (number, incoming.unwrap().accept().await.unwrap())
    };
    let (connected, (number, accepted)) = tokio::join!(connect, accept);
    let connected = connected.unwrap();
    let says = async {
        let (mut send, mut receive) = accepted.quic().open_bi().await.unwrap();
        send.write_all(&[7; 200_000]).await.unwrap();
        send.finish().unwrap();
        receive.read_to_end(200_000).await.unwrap().len()
    };
    let answers = async {
        let (mut send, mut receive) = connected.quic().accept_bi().await.unwrap();
        let heard = receive.read_to_end(200_000).await.unwrap();
        send.write_all(&heard).await.unwrap();
        send.finish().unwrap();
    };
    assert_eq!(tokio::join!(says, answers).0, 200_000);
    number
}

#[tokio::test]
async fn a_connection_goes_to_the_endpoint_of_its_share_and_stays_there() {
    let (servers, client) = endpoints(3);
    assert_eq!(taken(&client, &servers, None).await, 0, "who names no share");
    for (share, expected) in [(0, 0), (1, 1), (2, 2), (3, 1), (4, 2), (255, 1)] {
        assert_eq!(taken(&client, &servers, Some(share)).await, expected, "share {share}");
    }
}

#[tokio::test]
async fn an_address_with_one_socket_takes_all_shares() {
    let (servers, client) = endpoints(1);
    assert_eq!(servers.len(), 1);
    for share in [None, Some(0), Some(5)] {
        assert_eq!(taken(&client, &servers, share).await, 0);
    }
}

#[tokio::test]
async fn an_endpoint_that_only_dials_answers_nobody_before_and_after_its_renewal() {
    let ca = Ca::new();
    let credentials = ca.credentials(&Identity::new(Role::Node, "server"), Validity::days(1));
    let dialler = Endpoint::dialler(any_port().ip(), &credentials, &TransportSettings::default()).unwrap();
    let other = ca.endpoint(Role::Node, "other");
    for _ in 0..2 {
        let dials = other.connect(dialler.local_address(), Role::Node, None);
        let answered = tokio::time::timeout(std::time::Duration::from_millis(200), dials).await;
        assert!(!matches!(answered, Ok(Ok(_))));
        dialler.renew(&credentials);
    }
    connected(&dialler, &other).await;
}

#[tokio::test]
async fn nobody_else_gets_a_shared_address() {
    let (servers, _) = endpoints(2);
    let (address, settings) = (servers[0].local_address(), TransportSettings::default());
    for count in [1, 2] {
        let error = PortShare::bind(address, &settings, count).unwrap_err();
        assert!(error.to_string().contains("does another process use it?"), "{error}");
    }
}
