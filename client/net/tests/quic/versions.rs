//! Processes of several releases: the version that they agree on, and the error if they have none in common.

use std::ops::RangeInclusive;

use larder_net::quic::ca::Validity;
use larder_net::quic::{Credentials, Endpoint, NoVersion};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::version::Version;

use super::{Ca, bind, connected};

fn version(number: u8) -> Version {
    Version::named(format!("larder/{number}").as_bytes()).unwrap()
}

fn speaking(ca: &Ca, name: &str, versions: RangeInclusive<u8>) -> Endpoint {
    let issued = ca.0.issue(&Identity::new(Role::Node, name), Validity::days(1)).unwrap();
    let [ca, certificate, key] = [&ca.1, &issued.certificate_pem, &issued.key_pem].map(String::as_bytes);
    let spoken = version(*versions.start())..=version(*versions.end());
    bind(&Credentials::speaking(spoken, ca, certificate, key).unwrap())
}

#[tokio::test]
async fn two_processes_speak_the_latest_version_that_both_know() {
    let ca = Ca::new();
    for (client, server, agreed) in [(2, 2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1)] {
        let (client, server) = (speaking(&ca, "a", 1..=client), speaking(&ca, "b", 1..=server));
        let (connected, accepted) = connected(&client, &server).await;
        assert_eq!((connected.version(), accepted.version()), (version(agreed), version(agreed)));
    }
}

#[tokio::test]
async fn releases_to_come_find_the_version_that_they_have_in_common_with_this_one() {
    let ca = Ca::new();
    let (client, server) = (speaking(&ca, "a", 1..=2), speaking(&ca, "b", 2..=3));
    assert_eq!(connected(&client, &server).await.0.version(), version(2));
    assert_eq!(connected(&server, &client).await.0.version(), version(2));
}

#[tokio::test]
async fn of_two_processes_without_a_version_in_common_the_accepting_one_says_what_both_speak() {
    let ca = Ca::new();
    let (client, server) = (speaking(&ca, "a", 8..=9), speaking(&ca, "b", 1..=2));
    let dial = async {
        if let Ok(connection) = client.connect(server.local_address(), Role::Node, None).await {
            connection.quic().closed().await;
        }
    };
    let accept = async { server.accept().await.unwrap().accept().await.unwrap_err() };
    let ((), rejected) = tokio::join!(dial, accept);
    assert_eq!(rejected.reason, "version");
    let text = rejected.source.to_string();
    assert_eq!(text, NoVersion { found: Some(version(9)) }.to_string());
    assert!(text.contains("this process speaks larder/2 and larder/1, the other side larder/9"), "{text}");
}
