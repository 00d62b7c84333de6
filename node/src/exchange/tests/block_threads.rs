//! Fetches on block threads: the nodes that they reach, and the fate of a fetch that a thread cannot carry out.

use larder_net::quic::PortShare;
use larder_net::tcp::TcpPort;

use super::sends::{Serving, asks};
use super::*;
use crate::exchange::fetch::Report;
use crate::host::CpuSet;

/// A node before the test starts it: its endpoint, and its block threads.
pub(super) struct Node {
    pub(super) endpoint: Endpoint,
    pub(super) others: Vec<PortShare>,
    /// The TCP port of the same number.
    pub(super) tcp: TcpPort,
    pub(super) credentials: Credentials,
}

impl Node {
    /// Nodes of these names, with these numbers of block threads.
    pub(super) fn all<const COUNT: usize>(nodes: [(&str, usize); COUNT]) -> [Self; COUNT] {
        let settings = TransportSettings::default();
        let credentials = credentials(nodes.map(|(name, _)| (name, Version::LATEST)));
        let mut threads = nodes.into_iter();
        credentials.map(|credentials| {
            let (_, threads) = threads.next().unwrap();
            let (mut others, tcp) = std::iter::repeat_with(|| {
                let shares = PortShare::bind(any_port(), &settings, threads + 1).unwrap();
                let tcp = TcpPort::bind(shares[0].local_address().unwrap()).ok()?;
                Some((shares, tcp))
            })
            .find_map(|bound| bound)
            .unwrap();
            let endpoint = Endpoint::on(others.remove(0), &credentials, &settings).unwrap();
            Self { endpoint, others, tcp, credentials }
        })
    }

    pub(super) async fn threads(
        others: Vec<PortShare>,
        credentials: &Credentials,
        common: &Common,
    ) -> TakenThreads {
        let (settings, cpus) = (TransportSettings::default(), CpuSet::from_iter([0]));
        let with = (credentials, &settings);
        let threads = BlockThreads::start(others, any_port(), with, &cpus, common, &Watch::in_test()).await;
        let mut threads = threads.unwrap();
        let taken = threads.take();
        // The threads end with the test's system.
        std::mem::forget(threads);
        taken
    }
}

/// Limits with batches of 1 MiB, for which a block thread is worth its hop.
pub(super) fn large_batches() -> ExchangeLimits {
    ExchangeLimits { batch_bytes: 16 * BLOCK_BYTES, ..ExchangeLimits::default() }
}

/// Runs a test between node 1, which asks, and node 2, which has everything, with these numbers of block threads.
fn between_threads([asks, holds]: [usize; 2], test: impl AsyncFnOnce(Asker, Serving)) {
    System::new().block_on(async {
        let [asker, holder] = Node::all([("node-1", asks), ("node-2", holds)]);
        let mut table = Table::clone(&table(1, &BTreeMap::from([(1, 10), (2, 20)])));
        table.members[1].peer = holder.endpoint.local_address();
        let limits = large_batches();
        let serving = Serving::with(holder.endpoint, limits.clone(), async |common| {
            let threads = Node::threads(holder.others, &holder.credentials, &common).await;
            (common, threads)
        });
        let serving = serving.await;
        let common = common(&limits);
        let threads = Node::threads(asker.others, &asker.credentials, &common).await;
        test(Asker::with_threads(asker.endpoint, &limits, table, common, threads), serving).await;
    });
}

/// Whether every byte of the first 64 slots is a byte of the blocks.
pub(super) fn are_filled(asker: &Asker) -> bool {
    let mut bytes = vec![0; 2 << 20];
    asker.extents[..2].iter().all(|extent| {
        extent.copy_out(0, &mut bytes).unwrap();
        bytes.iter().all(|&byte| byte == CONTENT[0])
    })
}

#[test]
fn large_orders_spread_over_the_block_threads_of_both_nodes() {
    between_threads([2, 2], async |asker, holder| {
        let came = asker.fetch(64, LONG).await;
        assert!(came.len() == 64 && is_here(&came), "{came:?}");
        assert!(are_filled(&asker));
        assert_eq!(holder.metrics.requests("fetch"), 4, "a stream a batch");
        until("two block threads and the thread between nodes have connected", || {
            holder.metrics.connections.get() == 3
        })
        .await;
        assert!(is_here(&asker.fetch(64, LONG).await));
        assert_eq!(holder.metrics.connections.get(), 3, "the same connections");
    });
}

#[test]
fn block_threads_dial_a_node_that_has_restarted_at_its_address_anew() {
    System::new().block_on(async {
        let [asker, holder] = Node::all([("node-1", 2), ("node-2", 2)]);
        let mut before = Table::clone(&table(1, &BTreeMap::from([(1, 10), (2, 20)])));
        before.members[1].peer = holder.endpoint.local_address();
        let mut after = before.clone();
        (after.epoch.number, after.members[1].incarnation) = (2, 21);
        let limits = large_batches();
        let serving = Serving::with(holder.endpoint, limits.clone(), async |common| {
            let threads = Node::threads(holder.others, &holder.credentials, &common).await;
            (common, threads)
        });
        let _serving = serving.await;
        let common = common(&limits);
        let mut threads = Node::threads(asker.others, &asker.credentials, &common).await;
        let (opens, opened) = mpsc::unbounded_channel();
        let mut dials = std::mem::replace(&mut threads.opened, opened);
        let dialled = Rc::new(RefCell::new(Vec::<Connection>::new()));
        let notes = Rc::clone(&dialled);
        actix_rt::spawn(async move {
            while let Some(connection) = dials.recv().await {
                notes.borrow_mut().push(connection.clone());
                _ = opens.send(connection);
            }
        });
        let asker = Asker::with_threads(asker.endpoint, &limits, before, common, threads);
        let are_open = || -> Vec<bool> {
            dialled.borrow().iter().map(|dialled| dialled.quic().close_reason().is_none()).collect()
        };
        assert!(is_here(&asker.fetch(64, LONG).await));
        until("both block threads have dialled", || are_open() == [true; 2]).await;
        let table = Arc::new(after);
        asker.actor.send(NewTable { table, own: NodeNumber(1) }).await.unwrap();
        assert!(is_here(&asker.fetch(64, LONG).await));
        until("both dial the other life", || are_open() == [false, false, true, true]).await;
        assert!(is_here(&asker.fetch(64, LONG).await));
        assert_eq!(dialled.borrow().len(), 4, "the same connections");
    });
}

#[test]
fn small_orders_need_no_block_thread() {
    between_threads([2, 2], async |asker, holder| {
        for _ in 0..5 {
            assert!(is_here(&asker.fetch(2, LONG).await));
        }
        assert_eq!(holder.metrics.connections.get(), 1);
    });
}

#[test]
fn nodes_with_other_numbers_of_block_threads_fetch_from_each_other() {
    for threads in [[3, 1], [1, 3]] {
        between_threads(threads, async |asker, holder| {
            for _ in 0..3 {
                assert!(is_here(&asker.fetch(64, LONG).await), "{threads:?}");
            }
            until("block threads have connected", || holder.metrics.connections.get() >= 2).await;
        });
    }
}

#[test]
fn what_a_block_thread_cannot_reach_comes_over_the_thread_between_nodes() {
    between_threads([2, 0], async |asker, holder| {
        for _ in 0..3 {
            let came = asker.fetch(64, LONG).await;
            assert!(is_here(&came), "{came:?}");
        }
        assert!(are_filled(&asker) && asker.silent.get().is_empty());
        assert_eq!(holder.metrics.connections.get(), 1);
        assert!(asker.pings(LONG).await);
    });
}

#[test]
fn a_cancelled_order_on_block_threads_is_reported_and_the_next_one_comes() {
    between_threads([2, 2], async |asker, _holder| {
        for chunks in [64, 200] {
            let (cancel, cancelled) = oneshot::channel();
            let class = watch::Sender::new(Class::Decode);
            let order = FetchOrder { cancelled, ..asker.order_of(asker.chunks(chunks), &class, LONG) };
            let came = asker.handle.fetch(order).unwrap();
            until("it is under way", || asker.metrics.fetches_in_flight.get() > 0).await;
            cancel.send(()).unwrap();
            let came = tokio::time::timeout(LONG, came).await.unwrap().unwrap();
            assert_eq!(came.len() as u64, chunks);
            let cut = |came: &Arrival| matches!(came, Arrival::Failed(FetchFailure::Deadline));
            assert!(came.iter().all(|one| cut(one) || is_here(std::slice::from_ref(one))), "{came:?}");
            assert!(is_here(&asker.fetch(64, LONG).await));
        }
        assert_eq!(asker.metrics.fetches_in_flight.get(), 0);
    });
}

#[test]
fn a_block_thread_serves_fetches_of_nodes_and_nothing_else() {
    System::new().block_on(async {
        let [asker, holder] = Node::all([("node-1", 0), ("node-2", 1)]);
        let address = holder.endpoint.local_address();
        let serving = Serving::with(holder.endpoint, large_batches(), async |common| {
            let threads = Node::threads(holder.others, &holder.credentials, &common).await;
            (common, threads)
        });
        let serving = serving.await;
        let blocks =
            Endpoint::bind(any_port(), &asker.credentials.for_blocks(), &TransportSettings::default());
        let connection =
            blocks.unwrap().connect_to_share(address, Role::Node, Some("node-2"), 1).await.unwrap();
        let mut receive = asks(&connection, 2).await;
        assert!(receive.read_to_end(3 * BLOCK_BYTES as usize).await.unwrap().len() as u64 > 2 * BLOCK_BYTES);
        let rejected = |reason| serving.metrics.rejections(reason);
        for (request, reason) in [(PeerRequest::Ping, "not_allowed"), (PeerRequest::Reload, "not_allowed")] {
            let before = rejected(reason);
            let (mut send, mut receive) = connection.quic().open_bi().await.unwrap();
            write_message(&mut send, &request).await.unwrap();
            send.finish().unwrap();
            assert!(receive.read_to_end(100).await.unwrap().is_empty(), "no answer");
            assert_eq!(rejected(reason), before + 1);
        }
        // An asker that does not say that only fetches follow reaches no block thread. An asker that says so reaches nothing
        // else.
        assert!(asker.endpoint.connect_to_share(address, Role::Node, None, 1).await.is_err());
        let blocks =
            Endpoint::bind(any_port(), &asker.credentials.for_blocks(), &TransportSettings::default());
        assert!(blocks.unwrap().connect(address, Role::Node, None).await.is_err());
    });
}

#[test]
fn a_report_waits_for_all_threads_that_may_write_and_a_panic_ends_it() {
    System::new().block_on(async {
        let (done, mut came) = oneshot::channel();
        let report = Report::new(done);
        let writer = report.clone();
        report.is(vec![Arrival::NotHeld]);
        drop(report);
        assert!(came.try_recv().is_err(), "somebody may write");
        drop(writer);
        assert_eq!(came.try_recv().unwrap(), [Arrival::NotHeld]);

        let (done, mut came) = oneshot::channel();
        let report = Report::new(done);
        let writer = report.clone();
        drop(report);
        assert_eq!(came.try_recv().unwrap_err(), oneshot::error::TryRecvError::Empty, "somebody may write");
        drop(writer);
        assert_eq!(came.try_recv().unwrap_err(), oneshot::error::TryRecvError::Closed);
    });
}
