//! Fetches over TCP: where they go, what happens if the way is closed, and what strangers get.

use larder_net::quic::{ConnectError, Guests};
use larder_net::tcp::{TcpConnection, TcpEndpoint, TcpPort};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::block_threads::{Node, are_filled, large_batches};
use super::sends::{Serving, fetch_of};
use super::*;
use crate::exchange::rooms::read_answer;
use crate::exchange::serve::limits_of;

/// A side of a test: the number of its block threads, and whether blocks move over TCP.
type Side = (usize, bool);

const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

fn over_tcp(common: Common, credentials: &Credentials, port: TcpPort) -> Common {
    common.with_tcp(TcpEndpoint::new(credentials, IDLE_TIMEOUT), port)
}

/// Runs a test between node 1, which asks, and node 2, which has everything. The test also gets node 2's address, and the
/// credentials of both.
fn between_sides(
    [asks, holds]: [Side; 2],
    test: impl AsyncFnOnce(Asker, Serving, (SocketAddr, [Credentials; 2])),
) {
    System::new().block_on(async {
        let [asker, holder] = Node::all([("node-1", asks.0), ("node-2", holds.0)]);
        let address = holder.endpoint.local_address();
        let others_credentials = holder.credentials.clone();
        let mut table = Table::clone(&table(1, &BTreeMap::from([(1, 10), (2, 20)])));
        table.members[1].peer = address;
        let limits = large_batches();
        let serving = Serving::with(holder.endpoint, limits.clone(), async |common| {
            let common = if holds.1 { over_tcp(common, &holder.credentials, holder.tcp) } else { common };
            let threads = Node::threads(holder.others, &holder.credentials, &common).await;
            (common, threads)
        });
        let (serving, common) = (serving.await, common(&limits));
        let common = if asks.1 { over_tcp(common, &asker.credentials, asker.tcp) } else { common };
        let threads = Node::threads(asker.others, &asker.credentials, &common).await;
        let known = (address, [asker.credentials.clone(), others_credentials]);
        test(Asker::with_threads(asker.endpoint, &limits, table, common, threads), serving, known).await;
    });
}

/// Connects to a node's port for blocks.
async fn connect(credentials: &Credentials, address: SocketAddr) -> Result<TcpConnection, ConnectError> {
    TcpEndpoint::new(credentials, IDLE_TIMEOUT).connect(address, Role::Node, "node-2").await
}

#[test]
fn blocks_come_over_tcp_into_their_slots_with_and_without_block_threads() {
    for (asks, holds) in [(0, 0), (2, 0), (0, 2), (2, 1)] {
        between_sides([(asks, true), (holds, true)], async |asker, holder, _| {
            for _ in 0..2 {
                let came = asker.fetch(64, LONG).await;
                assert!(came.len() == 64 && is_here(&came), "{came:?}");
            }
            assert!(are_filled(&asker));
            assert_eq!(asker.metrics.tcp_bytes.get(), 128 * BLOCK_BYTES, "all of them");
            assert_eq!(holder.metrics.requests("fetch"), 8, "a request a batch");
            assert!(asker.metrics.connections.get() == 0, "the asker only dials");
            assert!(
                holder.metrics.connections.get() <= 4 + 1,
                "the second fetch finds the connections of the first"
            );
            assert!(asker.pings(LONG).await && asker.silent.get().is_empty());
        });
    }
}

#[test]
fn more_batches_than_connections_take_turns() {
    between_sides([(0, true), (0, true)], async |asker, holder, _| {
        let came = asker.fetch(16 * 30, LONG).await;
        assert!(is_here(&came), "{came:?}");
        assert_eq!(asker.metrics.tcp_bytes.get(), 480 * BLOCK_BYTES);
        assert!(holder.metrics.connections.get() <= 9, "{}", holder.metrics.connections.get());
    });
}

#[test]
fn a_node_that_takes_no_blocks_over_tcp_is_asked_over_quic() {
    for sides in [[(0, true), (0, false)], [(2, true), (2, false)], [(0, false), (0, true)]] {
        between_sides(sides, async |asker, _, _| {
            for _ in 0..3 {
                assert!(is_here(&asker.fetch(64, LONG).await), "{sides:?}");
            }
            assert!(are_filled(&asker) && asker.silent.get().is_empty());
            assert_eq!(asker.metrics.tcp_bytes.get(), 0);
        });
    }
}

#[test]
fn a_port_that_answers_nothing_costs_a_moment_and_the_blocks_come_over_quic() {
    between_sides([(0, true), (0, false)], async |asker, _, (address, _)| {
        let _mute = TcpListener::bind(address).await.unwrap();
        assert!(is_here(&asker.fetch(3, LONG).await));
        assert!(is_here(&asker.fetch(3, LONG).await));
        assert_eq!(asker.metrics.tcp_bytes.get(), 0);
    });
}

#[test]
fn fetches_that_end_before_a_mute_port_has_failed_soon_come_over_quic() {
    between_sides([(0, true), (0, false)], async |asker, _, (address, _)| {
        let _mute = TcpListener::bind(address).await.unwrap();
        let comes = async { while !is_here(&asker.fetch(3, Duration::from_millis(100)).await) {} };
        tokio::time::timeout(LONG, comes).await.expect("the port is not asked for ever");
        assert_eq!(asker.metrics.tcp_bytes.get(), 0);
    });
}

#[test]
fn a_way_on_which_only_small_packets_come_is_soon_left_for_quic() {
    between_sides([(0, true), (0, false)], async |asker, _, (address, [_, holder])| {
        let listener = TcpListener::bind(address).await.unwrap();
        let holder = TcpEndpoint::new(&holder, IDLE_TIMEOUT);
        let guests = Guests::new(limits_of, 64);
        // The handshake gets through, and no block.
        let loses = async {
            let mut open = Vec::new();
            loop {
                let (stream, remote) = listener.accept().await.unwrap();
                open.push(holder.receive(&guests, stream, remote).await);
            }
        };
        let comes = async {
            while !is_here(&asker.fetch(3, Duration::from_millis(100)).await) {}
            assert!(is_here(&asker.fetch(3, LONG).await));
        };
        tokio::select! {
            () = loses => {}
            came = tokio::time::timeout(LONG, comes) => came.expect("the way is not tried for ever"),
        }
        assert_eq!(asker.metrics.tcp_bytes.get(), 0);
    });
}

#[test]
fn a_node_that_turns_this_node_away_after_the_handshake_is_asked_over_quic() {
    between_sides([(0, true), (0, false)], async |asker, _, (address, [_, holder])| {
        let listener = TcpListener::bind(address).await.unwrap();
        let holder = TcpEndpoint::new(&holder, IDLE_TIMEOUT);
        let turns_away = async {
            loop {
                let (stream, remote) = listener.accept().await.unwrap();
                drop(holder.receive(&Guests::new(limits_of, 8), stream, remote).await);
            }
        };
        let fetches = async {
            for _ in 0..2 {
                assert!(is_here(&asker.fetch(3, LONG).await));
            }
        };
        tokio::select! {
            () = turns_away => {}
            () = fetches => {}
        }
        assert_eq!(asker.metrics.tcp_bytes.get(), 0);
    });
}

#[test]
fn a_cancelled_order_leaves_nothing_to_the_next() {
    between_sides([(0, true), (0, true)], async |asker, _, _| {
        for _ in 0..5 {
            let (cancel, cancelled) = oneshot::channel();
            let class = watch::Sender::new(Class::Decode);
            let order = FetchOrder { cancelled, ..asker.order_of(asker.chunks(200), &class, LONG) };
            let came = asker.handle.fetch(order).unwrap();
            until("it is under way", || asker.metrics.fetches_in_flight.get() > 0).await;
            cancel.send(()).unwrap();
            tokio::time::timeout(LONG, came).await.unwrap().unwrap();
            let came = asker.fetch(64, LONG).await;
            assert!(is_here(&came), "{came:?}");
        }
    });
}

#[test]
fn a_connection_that_the_holder_closed_is_replaced() {
    between_sides([(0, true), (0, true)], async |asker, holder, (address, [credentials, _])| {
        assert!(is_here(&asker.fetch(2, LONG).await));
        // Newer connections take the places of the first.
        let mut newer = Vec::new();
        for _ in 0..72 {
            newer.push(connect(&credentials, address).await.unwrap());
        }
        until("they were let in", || holder.metrics.connections.get() >= 72).await;
        drop(newer);
        assert!(is_here(&asker.fetch(2, LONG).await), "on a new connection");
        assert_eq!(asker.metrics.tcp_bytes.get(), 4 * BLOCK_BYTES);
    });
}

#[test]
fn only_fetches_of_nodes_are_answered_over_tcp() {
    between_sides([(0, true), (0, true)], async |_, holder, (address, [credentials, _])| {
        let mut connection = connect(&credentials, address).await.unwrap();
        for _ in 0..2 {
            write_message(&mut connection, &PeerRequest::Fetch(fetch_of(2))).await.unwrap();
            connection.flush().await.unwrap();
            let answer = read_answer(&mut connection).await;
            assert!(matches!(answer, Ok(Some((_, PeerResponse::Fetched(_))))), "{answer:?}");
            connection.read_exact(&mut vec![0; 2 * BLOCK_BYTES as usize]).await.unwrap();
        }
        let refused = || holder.metrics.rejections("not_allowed");
        for (request, count) in [(PeerRequest::Ping, 1), (PeerRequest::Reload, 2)] {
            let mut connection = connect(&credentials, address).await.unwrap();
            write_message(&mut connection, &request).await.unwrap();
            connection.flush().await.unwrap();
            assert!(matches!(read_answer(&mut connection).await, Ok(None) | Err(_)), "no answer");
            assert_eq!(refused(), count);
        }
    });
}

#[test]
fn strangers_and_garbage_are_turned_away() {
    between_sides([(0, true), (0, true)], async |asker, holder, (address, _)| {
        // A node of another cluster: neither side trusts the other.
        let [other] = credentials([("node-1", Version::LATEST)]);
        assert!(matches!(connect(&other, address).await, Err(ConnectError::Tcp(_))));
        until("it was turned away", || holder.metrics.rejections("handshake") == 1).await;
        // A connection of the right cluster to somebody else.
        let [_, somebody] = credentials([("node-1", Version::LATEST), ("node-2", Version::LATEST)]);
        assert!(connect(&somebody, address).await.is_err());
        let mut garbage = TcpStream::connect(address).await.unwrap();
        garbage.write_all(&[0x16, 3, 1, 0xff, 0xff, 0, 1, 2, 3]).await.unwrap();
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(LONG, garbage.read_to_end(&mut answer)).await.unwrap();
        let idle = TcpStream::connect(address).await.unwrap();
        assert!(is_here(&asker.fetch(64, LONG).await), "others are served meanwhile");
        drop(idle);
    });
}

#[test]
fn an_asker_that_does_not_read_keeps_no_leases() {
    between_sides([(0, true), (0, true)], async |asker, mut holder, (address, [credentials, _])| {
        let mut stuck = Vec::new();
        for _ in 0..4 {
            let mut connection = connect(&credentials, address).await.unwrap();
            write_message(&mut connection, &PeerRequest::Fetch(fetch_of(256))).await.unwrap();
            connection.flush().await.unwrap();
            stuck.push(connection);
        }
        until("all are served", || holder.metrics.requests("fetch") == 4).await;
        assert!(is_here(&asker.fetch(64, LONG).await), "others are served meanwhile");
        for _ in 0..4 * 256 + 64 {
            tokio::time::timeout(LONG, holder.ends.recv()).await.expect("every lease ends").unwrap();
        }
        drop(stuck);
    });
}
