//! The connections between nodes, over real QUIC.

use larder_protocol::ChunkRef;
use larder_protocol::drain::{Take, TakeChunk};
use larder_protocol::limits::MAX_FETCH_CHUNKS;
use larder_protocol::peer::{Announce, Chunks, Find};
use larder_protocol::table::Epoch;

use super::follows::follows_once;
use super::sends::Serving;
use super::*;

/// A node that asks and serves.
struct Peer {
    serving: Serving,
    endpoint: Endpoint,
    number: u16,
}

impl Peer {
    async fn start(endpoint: Endpoint, number: u16, limits: &ExchangeLimits) -> Self {
        let serving = Serving::start(endpoint.clone(), limits.clone()).await;
        Self { serving, endpoint, number }
    }

    async fn take_table(&self, table: &Arc<Table>) {
        let (table, own) = (Arc::clone(table), NodeNumber(self.number));
        self.serving.actor.send(NewTable { table, own }).await.unwrap();
    }

    /// Asks another node, which counts as use of the connection.
    async fn asks(&self, node: u16) -> Result<PeerResponse, PeerUnavailable> {
        let request = PeerRequest::Find(Find { epoch: Epoch::default(), rows: Vec::new() });
        self.sends(node, request).await
    }

    async fn sends(&self, node: u16, request: PeerRequest) -> Result<PeerResponse, PeerUnavailable> {
        let (node, deadline, trace) = (NodeNumber(node), LONG, Trace::default());
        self.serving.actor.send(AskPeer { node, request, deadline, trace }).await.unwrap()
    }

    /// Connections that were made so far: here, and at the other side.
    fn opened(&self) -> [u64; 2] {
        ["here", "there"].map(|by| self.serving.metrics.opened.with_label_values(&[by]).get())
    }

    fn closed(&self, why: &str) -> u64 {
        self.serving.metrics.closed.with_label_values(&[why]).get()
    }

    /// Requests that the node served.
    fn served(&self) -> u64 {
        self.serving.metrics.requests("find")
    }
}

/// A table of these nodes, each in this life.
fn table_of(number: u64, peers: &[(&Endpoint, u16, u64)]) -> Arc<Table> {
    let lives = peers.iter().map(|&(_, number, life)| (number, life)).collect();
    let mut table = Table::clone(&table(number, &lives));
    for member in &mut table.members {
        let of = peers.iter().find(|(_, number, _)| NodeNumber(*number) == member.number).unwrap();
        member.peer = of.0.local_address();
    }
    Arc::new(table)
}

/// Runs a test with four nodes in one cluster, and an endpoint elsewhere with the name of the second.
fn among(limits: ExchangeLimits, test: impl AsyncFnOnce([Peer; 4], Endpoint)) {
    System::new().block_on(async {
        let [a, b, c, d, other] = endpoints(["node-1", "node-2", "node-3", "node-4", "node-2"]);
        let start = async |endpoint, number| Peer::start(endpoint, number, &limits).await;
        let peers = [start(a, 1).await, start(b, 2).await, start(c, 3).await, start(d, 4).await];
        let table = table_of(1, &peers.each_ref().map(|peer| (&peer.endpoint, peer.number, 10)));
        for peer in &peers {
            peer.take_table(&table).await;
        }
        test(peers, other).await;
    });
}

fn closing_after(idle_ms: u64) -> ExchangeLimits {
    ExchangeLimits { connection_idle: Duration::from_millis(idle_ms), ..ExchangeLimits::default() }
}

#[test]
fn two_nodes_that_ask_each_other_use_the_connection_that_the_first_of_them_dialled() {
    among(ExchangeLimits::default(), async |[a, b, ..], _| {
        for _ in 0..3 {
            b.asks(1).await.unwrap();
            a.asks(2).await.unwrap();
        }
        assert_eq!((a.opened(), b.opened()), ([0, 1], [1, 0]));
        assert_eq!((a.served(), b.served()), (3, 3));
    });
}

#[test]
fn a_dial_that_fails_answers_all_requests_that_waited_for_it() {
    among(ExchangeLimits::default(), async |[a, b, ..], _| {
        let mute = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut table = Table::clone(&table_of(2, &[(&a.endpoint, 1, 10), (&b.endpoint, 2, 10)]));
        table.members[1].peer = mute.local_addr().unwrap();
        a.take_table(&Arc::new(table)).await;
        let answers = futures_util::future::join_all((0..4).map(|_| a.asks(2))).await;
        assert!(answers.iter().all(Result::is_err), "{answers:?}");
        mute.set_nonblocking(true).unwrap();
        let mut packet = [0; 2_048];
        let ids = std::iter::from_fn(|| {
            let _ = mute.recv(&mut packet).ok()?;
            // RFC 9000, 17.2: the length of the destination's id is the sixth byte.
            Some(packet[6..6 + usize::from(packet[5])].to_vec())
        });
        let dialed = ids.collect::<std::collections::BTreeSet<_>>().len();
        assert!(dialed <= 2, "the dial, and perhaps the first probe of a silent node: {dialed}");
    });
}

#[test]
fn chunks_are_offered_and_taken_in_both_directions_over_one_connection() {
    among(ExchangeLimits::default(), async |[a, b, ..], _| {
        let hash = ChunkHash([1; 32]);
        let chunk = ChunkRef { hash, parent: hash, index: 0, anchor: hash };
        for (asker, asked) in [(&b, 1), (&a, 2)] {
            let offer = OfferChunks { device: 0, fingerprint: SPACE, worth: 1, chunks: vec![chunk; 3] };
            let answer = asker.sends(asked, PeerRequest::Offer(offer)).await;
            assert!(matches!(answer, Ok(PeerResponse::Wanted(wanted)) if wanted == [true; 3]));
            let chunks = vec![TakeChunk { chunk, rank_ppm: 1 }];
            let take = Take { from: 0, to: 0, namespace: None, chunks };
            let answer = asker.sends(asked, PeerRequest::Take(Box::new(take))).await;
            assert!(matches!(answer, Ok(PeerResponse::Taken(taken)) if taken.is_kept == [true]));
        }
        assert_eq!((a.opened(), b.opened()), ([0, 1], [1, 0]));
    });
}

#[test]
fn chunks_move_only_to_members_of_the_cluster() {
    among(ExchangeLimits::default(), async |[a, b, ..], _| {
        let moves = async |chunks| {
            let hashes = vec![ChunkHash([1; 32]); chunks];
            let moved = PeerRequest::Moved(Chunks { device: 0, fingerprint: SPACE, hashes });
            match b.sends(1, moved).await.unwrap() {
                PeerResponse::Refused(why) => why,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(moves(1).await, "there is no such device", "the actor of a member's request is asked");
        assert_eq!(moves(MAX_FETCH_CHUNKS + 1).await, "too many chunks in one move");
        a.take_table(&table_of(2, &[(&a.endpoint, 1, 10)])).await;
        assert_eq!(moves(1).await, "only members of the cluster may take chunks over");
    });
}

#[test]
fn blocks_come_on_a_connection_that_their_holder_dialled() {
    System::new().block_on(async {
        let [asks, holds] = endpoints(["node-1", "node-2"]);
        let table = table_of(1, &[(&asks, 1, 10), (&holds, 2, 10)]);
        let asker = Asker::new(asks.clone(), &ExchangeLimits::default(), Table::clone(&table));
        let services = sends::services(&sends::HasAll::new(mpsc::unbounded_channel().0).start());
        asker.actor.send(Serve(services)).await.unwrap();
        let holder = Peer::start(holds, 2, &ExchangeLimits::default()).await;
        holder.take_table(&table).await;
        holder.asks(1).await.unwrap();
        let came = asker.fetch(40, LONG).await;
        assert!(is_here(&came), "{came:?}");
        assert_eq!(holder.opened(), [1, 0], "none was dialled for it");
    });
}

#[test]
fn of_two_dials_at_once_one_connection_remains_and_no_request_fails() {
    among(ExchangeLimits::default(), async |[a, b, ..], _| {
        let (from_a, from_b) = tokio::join!(a.asks(2), b.asks(1));
        assert!(from_a.is_ok() && from_b.is_ok());
        assert_eq!((a.opened(), b.opened()), ([1, 1], [1, 1]), "both have dialled");
        until("the double is closed", || a.closed("double") + b.closed("double") >= 1).await;
        for _ in 0..3 {
            let (from_a, from_b) = tokio::join!(a.asks(2), b.asks(1));
            assert!(from_a.is_ok() && from_b.is_ok());
        }
        assert_eq!((a.opened(), b.opened()), ([1, 1], [1, 1]), "one is enough");
    });
}

#[test]
fn an_idle_connection_is_closed_and_the_next_request_opens_another() {
    among(closing_after(150), async |[a, b, ..], _| {
        a.asks(2).await.unwrap();
        until("it is closed", || a.closed("idle") + b.closed("idle") >= 1).await;
        b.asks(1).await.unwrap();
        assert_eq!((a.opened(), b.opened()), ([1, 1], [1, 1]));
        // Signs of life do not keep the connection open.
        let closes = async {
            while a.closed("idle") + b.closed("idle") < 2 {
                b.sends(1, PeerRequest::Ping).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, closes).await.expect("it is closed all the same");
    });
}

#[test]
fn requests_that_race_with_the_close_of_their_connection_are_all_answered() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    among(closing_after(10), async |[a, b, ..], _| {
        let asks = async |from: &Peer, to: u16, salt: u64| {
            let mut random = fastrand::Rng::with_seed(seed ^ salt);
            for _ in 0..300 {
                from.asks(to).await.unwrap();
                tokio::time::sleep(Duration::from_micros(random.u64(0..20_000))).await;
            }
        };
        tokio::join!(asks(&a, 2, 1), asks(&b, 1, 2));
        assert_eq!((a.served(), b.served()), (300, 300), "and each was served once");
        assert!(a.closed("idle") + b.closed("idle") > 20, "connections were closed meanwhile");
    });
}

#[test]
fn a_request_that_meets_a_connection_just_closed_as_idle_asks_again_on_another_one() {
    between(ExchangeLimits::default(), async |asker, holder| {
        holder.does.set(Does::ClosesAsIdle);
        assert!(asker.pings(LONG).await);
        holder.does.set(Does::ClosesAsIdle);
        assert!(is_here(&asker.fetch(2, LONG).await));
        holder.does.set(Does::ClosesAsIdle);
        assert_eq!(follows_once(&asker, &holder).await, ["0: NotHeld", "1: NotHeld"]);
        assert_eq!(holder.connections.borrow().len(), 4);
        assert!(asker.silent.get().is_empty());
    });
}

#[test]
fn beyond_the_bound_the_connection_that_was_used_longest_ago_is_closed() {
    let limits = ExchangeLimits { connections: 2, ..ExchangeLimits::default() };
    among(limits, async |[a, b, c, d], _| {
        for node in [2, 3, 2, 4] {
            a.asks(node).await.unwrap();
        }
        until("one is too many", || a.closed("bound") == 1).await;
        a.asks(2).await.unwrap();
        a.asks(4).await.unwrap();
        assert_eq!((b.opened(), c.opened(), d.opened()), ([0, 1], [0, 1], [0, 1]));
        a.asks(3).await.unwrap();
        assert_eq!(c.opened(), [0, 2], "it was the third node's");
    });
}

#[test]
fn a_peer_that_restarts_is_dialled_anew_and_its_former_connection_is_used_no_more() {
    among(ExchangeLimits::default(), async |[a, b, ..], elsewhere| {
        b.asks(1).await.unwrap();
        a.asks(2).await.unwrap();
        assert_eq!(a.opened(), [0, 1]);
        // The former process stays at its address, and keeps its connection.
        let next = Peer::start(elsewhere, 2, &ExchangeLimits::default()).await;
        let table = table_of(2, &[(&a.endpoint, 1, 10), (&next.endpoint, 2, 20)]);
        next.take_table(&table).await;
        // The next life asks before the other node knows of it.
        next.asks(1).await.unwrap();
        a.asks(2).await.unwrap();
        assert_eq!((b.served(), next.served()), (2, 0), "the table still names the former life");
        a.take_table(&table).await;
        for _ in 0..3 {
            a.asks(2).await.unwrap();
            next.asks(1).await.unwrap();
        }
        assert_eq!((b.served(), next.served()), (2, 3));
    });
}

#[test]
fn an_impostor_that_dials_in_is_asked_for_nothing_and_speaks_for_nobody_else() {
    among(ExchangeLimits::default(), async |[a, b, c, _], impostor| {
        // An impostor with another node's name and certificate, at another address.
        let address = a.endpoint.local_address();
        let connection = impostor.connect(address, Role::Node, Some("node-1")).await.unwrap();
        until("it is let in", || a.opened() == [0, 1]).await;
        let asked = async { connection.quic().accept_bi().await.is_ok() };
        let asks = async {
            a.asks(2).await.unwrap();
            a.asks(3).await.unwrap();
            b.asks(1).await.unwrap();
        };
        tokio::select! {
            asked = asked => panic!("it was asked: {asked}"),
            () = asks => {}
        }
        assert_eq!((b.served(), c.served()), (1, 1));

        // A node that was dialed asks on that connection only in its own name.
        let announce = |node: u16| {
            PeerRequest::Announce(vec![Announce {
                holder: Holder { node: NodeNumber(node), device: 0 },
                incarnation: 10,
                epoch: Epoch::default(),
                stream: 1,
                sequence: 0,
                digest: None,
                changes: Vec::new(),
            }])
        };
        let own = c.sends(1, announce(3)).await.unwrap();
        assert!(matches!(own, PeerResponse::Announced(_)), "{own:?}");
        let other = c.sends(1, announce(2)).await.unwrap();
        assert!(matches!(other, PeerResponse::Refused(_)), "{other:?}");
        assert_eq!(c.opened(), [0, 1], "it used the connection that was dialled there");
    });
}
