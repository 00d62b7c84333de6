//! Tests which node counts as silent, and which is only slow.
//!
//! Packets between the two nodes go through a relay that the test can stop: then nothing at all comes from the other side.

use larder_protocol::table::MemberState;
use tokio::net::UdpSocket;

use super::*;
use crate::watched::plant;

/// Carries packets between the two nodes.
struct Relay {
    is_stopped: Cell<bool>,
}

/// Runs a test between the two nodes, with a relay before the holder.
fn over_a_relay(test: impl AsyncFnOnce(Asker, Rc<Holder2>, Rc<Relay>)) {
    System::new().block_on(async {
        let [asker, holder] = endpoints(["node-1", "node-2"]);
        let (asks, serves) = (asker.local_address(), holder.local_address());
        let socket = UdpSocket::bind(("127.0.0.1", 0)).await.unwrap();
        let mut table = Table::clone(&table(1, &BTreeMap::from([(1, 10), (2, 20)])));
        table.members[1].peer = socket.local_addr().unwrap();
        let relay = Rc::new(Relay { is_stopped: Cell::new(false) });
        let carries = Rc::clone(&relay);
        actix_rt::spawn(async move {
            let mut packet = vec![0; 65_536];
            loop {
                let (bytes, from) = socket.recv_from(&mut packet).await.unwrap();
                let to = if from == asks { serves } else { asks };
                if !carries.is_stopped.get() {
                    socket.send_to(&packet[..bytes], to).await.unwrap();
                }
            }
        });
        test(Asker::new(asker, &ExchangeLimits::default(), table), Holder2::serve(holder), relay).await;
    });
}

/// Longer than a silence that is taken for a death.
const DEADLINE: Duration = Duration::from_millis(700);

#[test]
fn a_silent_holder_costs_one_deadline_and_then_nothing_until_it_answers_again() {
    over_a_relay(async |asker, holder, relay| {
        assert!(is_here(&asker.fetch(1, LONG).await));
        relay.is_stopped.set(true);
        let came = asker.fetch(2, DEADLINE).await;
        assert!(came.iter().all(|came| matches!(came, Arrival::Failed(FetchFailure::Deadline))), "{came:?}");
        let came = asker.fetch(2, LONG).await;
        assert!(
            came.iter().all(|came| matches!(came, Arrival::Failed(FetchFailure::Unreachable))),
            "nobody waits for it: {came:?}"
        );
        assert_eq!(holder.fetches.get(), 1);

        relay.is_stopped.set(false);
        comes_back(&asker).await;
    });
}

/// Waits until chunks of the holder come again.
async fn comes_back(asker: &Asker) {
    let comes = async {
        while !is_here(&asker.fetch(1, LONG).await) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, comes).await.expect("it is asked again once it has answered a probe");
}

#[test]
fn a_probe_that_panics_is_not_the_last() {
    over_a_relay(async |asker, _, relay| {
        assert!(is_here(&asker.fetch(1, LONG).await));
        relay.is_stopped.set(true);
        plant("probe");
        asker.fetch(1, DEADLINE).await;
        until("the holder is found silent, and the probe panics", || asker.watch.panics("peers") == 1).await;
        assert!(asker.silent.contains(NodeNumber(2)));
        relay.is_stopped.set(false);
        comes_back(&asker).await;
    });
}

#[test]
fn one_small_answer_that_is_late_takes_no_holder_out_of_fetching() {
    between(ExchangeLimits::default(), async |asker, holder| {
        assert!(asker.pings(LONG).await);
        holder.does.set(Does::Nothing);
        for _ in 0..5 {
            assert!(!asker.pings(Duration::from_millis(50)).await);
        }
        holder.does.set(Does::Sends);
        assert!(is_here(&asker.fetch(2, LONG).await), "its packets were heard all the time");
        assert!(asker.silent.get().is_empty());
    });
}

#[test]
fn a_short_silence_is_looked_into_before_a_holder_is_left_out() {
    over_a_relay(async |asker, _, relay| {
        assert!(asker.pings(LONG).await);
        relay.is_stopped.set(true);
        assert!(!asker.pings(Duration::from_millis(50)).await);
        assert!(asker.silent.get().is_empty(), "it may be scheduled late");
        relay.is_stopped.set(false);
        assert!(is_here(&asker.fetch(1, LONG).await));

        relay.is_stopped.set(true);
        assert!(!asker.pings(Duration::from_millis(50)).await);
        until("nothing is heard for longer", || asker.silent.contains(NodeNumber(2))).await;
    });
}

#[test]
fn a_holder_that_is_heard_and_sends_no_blocks_is_left_out_after_some_deadlines() {
    between(ExchangeLimits::default(), async |asker, holder| {
        assert!(asker.pings(LONG).await);
        holder.does.set(Does::Nothing);
        for asked in 1..=3 {
            let came = asker.fetch(1, Duration::from_millis(100)).await;
            assert!(matches!(came[0], Arrival::Failed(FetchFailure::Deadline)), "{came:?}");
            assert_eq!(holder.fetches.get(), asked);
        }
        let came = asker.fetch(1, LONG).await;
        assert!(matches!(came[0], Arrival::Failed(FetchFailure::Unreachable)), "{came:?}");
    });
}

/// A table of the two nodes, of which the other is suspect.
fn with_a_suspect_at(address: SocketAddr) -> Table {
    let mut table = Table::clone(&table(1, &BTreeMap::from([(1, 10), (2, 20)])));
    (table.members[1].peer, table.members[1].state) = (address, MemberState::Suspect);
    table
}

#[test]
fn a_witness_asks_a_suspect_to_which_it_never_talked() {
    System::new().block_on(async {
        let [asker, holder] = endpoints(["node-1", "node-2"]);
        let table = with_a_suspect_at(holder.local_address());
        let holder = Holder2::serve(holder);
        let asker = Asker::new(asker, &ExchangeLimits::default(), table);
        until("the suspect is asked", || holder.connections.borrow().len() == 1).await;
        assert!(is_here(&asker.fetch(1, LONG).await) && asker.silent.get().is_empty());
    });
}

#[test]
fn a_witness_finds_a_dead_suspect_silent_to_which_it_never_talked() {
    System::new().block_on(async {
        let [asker] = endpoints(["node-1"]);
        let nobody = UdpSocket::bind(any_port()).await.unwrap();
        let table = with_a_suspect_at(nobody.local_addr().unwrap());
        let asker = Asker::new(asker, &ExchangeLimits::default(), table);
        until("the suspect is found silent", || asker.silent.contains(NodeNumber(2))).await;
    });
}
