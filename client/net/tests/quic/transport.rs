//! The bytes that a connection carries, and how it carries them.

use larder_net::quic::ca::Validity;
use larder_net::quic::{Endpoint, MessageError, TransportSettings, read_message, write_message};
use larder_protocol::identity::{Identity, Role};
use larder_protocol::peer::{Find, PeerRequest, PeerResponse};
use larder_protocol::table::{Epoch, RowKey, RunKey};

use super::{Ca, any_port, connected};

/// Sends `bytes` bytes from one end to the other; the receiver checks each.
async fn transfer(bytes: usize) -> quinn::ConnectionStats {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Node, "a"), ca.endpoint(Role::Node, "b"));
    let (from, to) = connected(&client, &server).await;
    let sent: bytes::Bytes = (0..bytes).map(|i| (i / 7) as u8).collect();
    let send = async {
        let (mut stream, _receive) = from.quic().open_bi().await.unwrap();
        stream.write_chunk(sent.clone()).await.unwrap();
        stream.finish().unwrap();
        stream.stopped().await.unwrap();
    };
    let receive = async {
        let (_send, mut stream) = to.quic().accept_bi().await.unwrap();
        let mut at = 0;
        while let Some(chunk) = stream.read_chunk(usize::MAX, true).await.unwrap() {
            assert!(chunk.bytes == sent[at..at + chunk.bytes.len()], "byte {at}");
            at += chunk.bytes.len();
        }
        assert_eq!(at, sent.len());
    };
    tokio::join!(send, receive);
    from.quic().stats()
}

/// If the kernel refuses batches, the sender believes that the path carries only small datagrams.
#[tokio::test]
async fn large_datagrams_stay_large_under_load() {
    let stats = transfer(64 << 20).await;
    let most = TransportSettings::default().max_datagram_bytes;
    assert!(stats.path.current_mtu > most - 100, "{stats:?}");
    assert_eq!(stats.path.black_holes_detected, 0, "{stats:?}");
}

/// With large windows and buffers, the congestion window of a loopback grows until very many packets are lost.
#[tokio::test]
async fn windows_bound_what_is_under_way() {
    let stats = transfer(64 << 20).await;
    let lost = stats.path.lost_packets as f64 / stats.path.sent_packets as f64;
    assert!(lost < 0.02, "{lost}: {stats:?}");
    let window = u64::from(TransportSettings::default().window_bytes);
    assert!(stats.path.cwnd <= 2 * window, "{stats:?}");
}

#[tokio::test]
async fn messages_arrive_as_they_were_sent_and_garbage_is_told_apart() {
    let ca = Ca::new();
    let (client, server) = (ca.endpoint(Role::Node, "a"), ca.endpoint(Role::Node, "b"));
    let (from, to) = connected(&client, &server).await;
    let row = |run| RowKey { run: RunKey(run), chunk: 7 };
    let asked =
        PeerRequest::Find(Find { epoch: Epoch { term: 1, number: 2 }, rows: (0..100).map(row).collect() });
    let (mut send, mut receive) = from.quic().open_bi().await.unwrap();
    write_message(&mut send, &asked).await.unwrap();
    send.finish().unwrap();
    let (mut answer, mut request) = to.quic().accept_bi().await.unwrap();
    assert_eq!(read_message(&mut request).await.unwrap(), Some(asked));
    assert_eq!(read_message::<PeerRequest>(&mut request).await.unwrap(), None);
    write_message(&mut answer, &PeerResponse::Done).await.unwrap();
    assert_eq!(read_message(&mut receive).await.unwrap(), Some(PeerResponse::Done));

    for (bytes, what) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "not a frame"),
        (&[255, 255, 255, 0, 0, 0, 0, 0], "too long"),
        (&[16, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3], "cut"),
        (&[4, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4], "malformed"),
    ] {
        let (mut send, _receive) = from.quic().open_bi().await.unwrap();
        send.write_all(bytes).await.unwrap();
        send.finish().unwrap();
        let (_answer, mut request) = to.quic().accept_bi().await.unwrap();
        let error = read_message::<PeerRequest>(&mut request).await.unwrap_err();
        let named = match error {
            MessageError::NotAFrame => what == "not a frame",
            MessageError::TooLong { bytes: 0xff_ffff, .. } => what == "too long",
            MessageError::Cut => what == "cut",
            MessageError::Malformed(_) => what == "malformed",
            _ => false,
        };
        assert!(named, "{what}: {error:?}");
    }
}

/// Probes for large datagrams that a connection with these settings sends while it asks a question.
async fn probes(settings: &TransportSettings) -> u64 {
    let ca = Ca::new();
    let server = ca.endpoint(Role::Node, "server");
    let credentials = ca.credentials(&Identity::new(Role::Admin, "me"), Validity::days(1));
    let client = Endpoint::bind(any_port(), &credentials, settings).unwrap();
    let (asks, answers) = connected(&client, &server).await;
    let question = async {
        let (mut send, mut receive) = asks.quic().open_bi().await.unwrap();
        send.write_all(b"?").await.unwrap();
        send.finish().unwrap();
        assert_eq!(receive.read_to_end(8).await.unwrap(), b"!");
    };
    let answer = async {
        let (mut send, mut receive) = answers.quic().accept_bi().await.unwrap();
        receive.read_to_end(8).await.unwrap();
        send.write_all(b"!").await.unwrap();
        send.finish().unwrap();
    };
    tokio::join!(question, answer);
    asks.quic().stats().path.sent_plpmtud_probes
}

/// A probe in flight would fill the first window, and the message that closes the connection would not be sent.
#[tokio::test]
async fn a_brief_connection_probes_for_no_large_datagrams() {
    assert!(probes(&TransportSettings::default()).await > 0);
    assert_eq!(probes(&TransportSettings::brief()).await, 0);
}
