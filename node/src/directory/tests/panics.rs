//! A directory that panics begins again with nothing, and asks for everything.

use actix::prelude::*;
use larder_core::store::ChangeKind;
use larder_core::store::ids::TenantId;
use larder_net::metrics::Part as _;
use larder_net::trace::Trace;
use larder_protocol::peer::{Announce, Announced, Find, RowChange};
use larder_protocol::table::{Epoch, NodeNumber};
use prometheus::Registry;
use tokio::sync::watch;

use super::super::*;
use super::{SPACE, changes, chunk, holder, key, table_of_one_home};
use crate::clock::Clock;
use crate::exchange::{AskPeer, ConnectedPeers, PeerUnavailable, SilentPeers};
use crate::exchange::{NewTable, ServeAnnounce, ServeFind};
use crate::watched::{Watch, plant};

/// Other nodes, which never answer.
struct Nobody;

impl Actor for Nobody {
    type Context = Context<Self>;
}

impl Handler<AskPeer> for Nobody {
    type Result = Result<larder_protocol::peer::PeerResponse, PeerUnavailable>;

    fn handle(&mut self, ask: AskPeer, _: &mut Self::Context) -> Self::Result {
        Err(PeerUnavailable { node: ask.node, reason: "nobody is there".to_owned() })
    }
}

/// The nodes that hold the first chunks, as the home says.
async fn rows(directory: &Addr<DirectoryActor>) -> Vec<u16> {
    let find = Find { epoch: Epoch::default(), rows: (0..4).map(key).collect() };
    let spans = directory.send(ServeFind(find)).await.unwrap().spans;
    spans.into_iter().map(|span| span.holder.node.0).collect()
}

/// A batch of node 2.
fn batch(stream: u64, sequence: u64, gained: &[u64]) -> ServeAnnounce {
    let change = |&number: &u64| RowChange { row: key(number), is_held: true };
    ServeAnnounce(vec![Announce {
        holder: holder(2),
        incarnation: 20,
        epoch: Epoch { term: 1, number: 1 },
        stream,
        sequence,
        digest: None,
        changes: gained.iter().map(change).collect(),
    }])
}

#[test]
fn a_directory_that_panics_begins_again_and_has_everybody_tell_everything_again() {
    System::new().block_on(async {
        let watch = Watch::in_test();
        let metrics = DirectoryMetrics::register(&Registry::new()).unwrap();
        let (begins, restarts) = watch::channel(0);
        let limits = DirectoryLimits {
            find_deadline: std::time::Duration::from_secs(1),
            announce_deadline: std::time::Duration::from_secs(1),
            max_rows: 1_000,
        };
        let (peers, known) =
            (Nobody.start().recipient(), (SilentPeers::default(), ConnectedPeers::default()));
        let clock = Clock::start();
        let directory =
            DirectoryActor::new(peers, known, begins, limits, metrics.clone(), clock, watch.clone()).start();
        let table = table_of_one_home(1, &[(1, 10), (2, 20)]);
        directory.send(NewTable { table, own: NodeNumber(1) }).await.unwrap();
        let page = || {
            let chunks = (0..2).map(|number| (SPACE, chunk(number))).collect();
            Changed {
                device: 0,
                changes: Changes::Page(larder_core::directory::Page {
                    is_first: true,
                    chunks,
                    is_last: true,
                }),
            }
        };
        let gained = Changed { device: 0, changes: changes(ChangeKind::Gained, 0..2) };
        directory.send(gained).await.unwrap();
        assert_eq!(directory.send(batch(6, 1, &[])).await.unwrap(), [Announced::StartAnew]);
        assert_eq!(directory.send(batch(7, 0, &[3])).await.unwrap(), [Announced::Known(0)]);
        while rows(&directory).await != [1, 2] {
            tokio::task::yield_now().await;
        }

        plant("directory");
        let asked = AskHolders {
            fingerprint: SPACE,
            tenant: TenantId(0),
            chunks: (0..4).map(chunk).collect(),
            trace: Trace::default(),
        };
        let found = directory.send(asked).await.unwrap();
        assert_eq!(found.holders, vec![Holders::default(); 4], "the question has an answer all the same");
        assert_eq!((watch.panics("directory"), *restarts.borrow()), (1, 1));
        assert_eq!(rows(&directory).await, [0; 0]);

        // The other node begins its stream anew, and this node's actor tells all that it holds.
        assert_eq!(directory.send(batch(7, 1, &[])).await.unwrap(), [Announced::StartAnew]);
        assert_eq!(directory.send(batch(8, 0, &[3])).await.unwrap(), [Announced::Known(0)]);
        directory.send(page()).await.unwrap();
        while rows(&directory).await != [1, 2] {
            tokio::task::yield_now().await;
        }
        let restarts = || metrics.shard.with_label_values(&["restart"]).get();
        while restarts() != 2 {
            tokio::task::yield_now().await;
        }
    });
}
