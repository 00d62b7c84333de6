//! Tests of the exchange's decisions, in virtual time.

mod busy;
mod connections;
mod gate;
mod histories;
mod sending;
mod silence;

use larder_protocol::peer::Class;
use larder_protocol::table::MemberState;

use super::*;
use crate::directory::tests::fixtures::member;
use crate::store::ids::TenantId;

/// Node 1 with its exchange, and the present time.
struct Node {
    exchange: Exchange,
    now: Duration,
}

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A table of these nodes in these lives.
fn table(lives: impl IntoIterator<Item = (u16, u64)>) -> Arc<Table> {
    Arc::new(Table {
        members: lives.into_iter().map(|(number, incarnation)| member(number, incarnation)).collect(),
        ..Table::default()
    })
}

/// Two streams and 8 credits for each peer; a credit is [`UNIT`] bytes.
const LIMITS: ExchangeLimits = ExchangeLimits {
    streams_per_peer: 2,
    credit_bytes: 8 * UNIT,
    sending_bytes: 1_000,
    batch_bytes: 4 * UNIT,
    send_bytes_per_second: None,
    connections: 4,
    connection_idle: ms(60_000),
};

const UNIT: u64 = 4 << 10;

const DEADLINE: Duration = ms(1_000);

impl Node {
    /// Node 1 in a cluster of nodes 1 to 9.
    fn new(limits: ExchangeLimits) -> Self {
        let mut exchange = Exchange::new(limits, 7);
        exchange.set_table(table((1..10).map(|node| (node, 10))), NodeNumber(1));
        Self { exchange, now: ms(5_000) }
    }

    fn peer(&mut self, node: u16) -> PeerId {
        self.exchange.peer(NodeNumber(node)).expect("it may be asked")
    }

    fn is_left_out(&mut self, peer: PeerId) -> bool {
        self.exchange.peer(peer.node) == Err(NoPeer::Silent)
    }

    /// Begins a fetch from a peer that needs so many credits.
    fn fetch(&mut self, peer: PeerId, credits: u64, class: Class) -> RequestId {
        self.fetch_of(TenantId(0), peer, credits, class)
    }

    fn fetch_of(&mut self, tenant: TenantId, peer: PeerId, credits: u64, class: Class) -> RequestId {
        let wanted = Wanted { tenant, bytes: credits * UNIT, class, deadline: DEADLINE, has_others: false };
        self.exchange.fetch(self.now, peer, wanted)
    }

    fn leave(&mut self, request: RequestId) {
        self.exchange.leave(self.now, request);
    }

    fn effects(&mut self) -> Vec<Effect> {
        std::iter::from_fn(|| self.exchange.poll_effect()).collect()
    }

    /// The requests that get their turn now.
    fn turns(&mut self) -> Vec<RequestId> {
        let turn = |effect| match effect {
            Effect::Turn(request, Turn { until: Some(_), .. }) => Some(request),
            _ => None,
        };
        self.effects().into_iter().filter_map(turn).collect()
    }

    /// The only probe that the exchange wants.
    fn probe(&mut self) -> (PeerId, u64) {
        let probe = |effect: &Effect| match *effect {
            Effect::Probe { peer, probe, .. } => Some((peer, probe)),
            _ => None,
        };
        let effects = self.effects();
        let [probe] = effects.iter().filter_map(probe).collect::<Vec<_>>()[..] else { panic!("{effects:?}") };
        probe
    }

    /// Tells the exchange the result of a probe.
    fn probed(&mut self, (peer, probe): (PeerId, u64), answers: bool, was_heard: bool) {
        self.exchange.probed(self.now, peer, probe, answers, was_heard);
    }

    /// Lets time pass, with a tick at each deadline of the exchange.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.exchange.next_deadline().filter(|&due| due <= end) {
            self.now = self.now.max(due);
            self.exchange.tick(self.now);
            assert!(self.exchange.next_deadline().is_none_or(|next| next > self.now), "what was due is done");
        }
        self.now = end;
        self.exchange.tick(end);
    }
}
