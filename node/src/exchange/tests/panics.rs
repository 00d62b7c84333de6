//! Tasks of the exchange that panic lose their own work, and nothing else.

use super::sends::Serving;
use super::*;
use crate::watched::plant;

#[test]
fn a_fetch_that_panics_says_that_nothing_came_and_the_next_one_comes() {
    between(ExchangeLimits::default(), async |asker, holder| {
        assert!(is_here(&asker.fetch(1, LONG).await));
        for (task, panics) in [("fetch", 1), ("orders", 1), ("fetch", 2)] {
            plant(task);
            let class = watch::Sender::new(Class::Decode);
            let order = order_to(NodeNumber(2), Vec::new(), &class, LONG);
            assert!(asker.handle.fetch(order).unwrap().await.is_err(), "nothing writes any more");
            assert_eq!(asker.watch.panics(task), panics);
            assert!(is_here(&asker.fetch(1, LONG).await), "after {task}");
        }
        assert_eq!(asker.metrics.fetches_in_flight.get(), 0);
        assert_eq!(
            holder.connections.borrow().len(),
            3,
            "each fetch that panicked took its connection along"
        );
    });
}

#[test]
fn a_request_whose_serving_panics_fails_alone_and_connections_are_accepted_on() {
    System::new().block_on(async {
        let [holder, asker] = endpoints(["node-1", "node-2"]);
        let address = holder.local_address();
        let serving = Serving::start(holder, ExchangeLimits::default()).await;
        let dials = async || {
            let dialled = asker.connect(address, Role::Node, Some("node-1"));
            tokio::time::timeout(LONG, dialled).await.expect("an answer, or none")
        };
        let pings = async |connection: &Connection| {
            let (mut send, mut receive) = connection.quic().open_bi().await.unwrap();
            write_message(&mut send, &PeerRequest::Ping).await.unwrap();
            send.finish().unwrap();
            matches!(read_message(&mut receive).await, Ok(Some(PeerResponse::Done)))
        };
        let connection = dials().await.unwrap();
        assert!(pings(&connection).await);
        plant("serve");
        assert!(!pings(&connection).await);
        assert!(pings(&connection).await, "on the same connection");

        plant("accept");
        assert!(dials().await.is_err());
        let again = dials().await.unwrap();
        assert!(pings(&again).await && pings(&connection).await);
        assert_eq!((serving.watch.panics("serve"), serving.watch.panics("accept")), (1, 1));
        until("connections are counted right", || serving.metrics.connections.get() == 2).await;
    });
}
