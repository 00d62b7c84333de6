//! The place of a fetch or follow in the exchange, from its beginning. Dropping the place leaves the exchange.

use std::cell::Cell;
use std::rc::Rc;

use larder_core::exchange::{RequestId, Turn, Wanted};
use larder_core::store::ids::TenantId;
use larder_protocol::peer::{Class, RetryAfter};
use tokio::sync::{Notify, watch};

use super::connections::Link;
use super::peers::Peers;

pub(super) struct InLine {
    peers: Peers,
    request: RequestId,
    told: Rc<TurnSignal>,
}

/// The place of a tenant's follow whose writer's node is no member yet. Dropping it gives the place back.
pub(super) struct AwaitsMember {
    peers: Peers,
    tenant: TenantId,
}

/// The channel by which a fetch hears of its turn.
#[derive(Default)]
pub(super) struct TurnSignal {
    turn: Cell<Option<Turn>>,
    news: Notify,
}

impl InLine {
    pub(super) fn of_fetch(peers: &Peers, link: &Link, wanted: Wanted) -> Self {
        let (peers, told) = (peers.clone(), Rc::new(TurnSignal::default()));
        let request = peers.decide(|exchange, now| {
            let request = exchange.fetch(now, link.peer, wanted);
            peers.turns().insert(request, Rc::clone(&told));
            request
        });
        Self { peers, request, told }
    }

    /// The place of a tenant's follow; `None` if too much is followed at this peer.
    pub(super) fn of_follow(peers: &Peers, link: &Link, tenant: TenantId) -> Option<Self> {
        let request = peers.decide(|exchange, _| exchange.follow(link.peer, tenant))?;
        Some(Self { peers: peers.clone(), request, told: Rc::default() })
    }

    /// Waits for the fetch's turn. Its class may change meanwhile.
    pub(super) async fn turn(&self, class: &mut watch::Receiver<Class>) -> Turn {
        loop {
            tokio::select! {
                () = self.told.news.notified() => if let Some(turn) = self.told.turn.take() { return turn },
                Ok(()) = class.changed() => {
                    let class = *class.borrow_and_update();
                    self.peers.decide(|exchange, now| exchange.change_class(now, self.request, class));
                }
            }
        }
    }

    /// Notes that the peer is too busy for `bytes` bytes. Returns whether they get another turn.
    pub(super) fn is_busy(&self, bytes: u64, retry: RetryAfter) -> bool {
        self.peers.decide(|exchange, now| exchange.is_busy(now, self.request, bytes, retry))
    }

    pub(super) fn is_late(&self, was_heard: bool) {
        self.peers.decide(|exchange, now| exchange.fetch_is_late(now, self.request, was_heard));
    }

    /// Whether a follow goes on after its peer answered a probe, or did not answer.
    pub(super) fn follows_on(&self, answers: bool) -> bool {
        self.peers.decide(|exchange, _| exchange.follows_on(self.request, answers))
    }
}

impl AwaitsMember {
    /// `None` if the tenant's follows wait for too many nodes already.
    pub(super) fn of(peers: &Peers, tenant: TenantId) -> Option<Self> {
        let waits = peers.decide(|exchange, _| exchange.waits_for_member(tenant));
        waits.then(|| Self { peers: peers.clone(), tenant })
    }
}

impl Drop for AwaitsMember {
    fn drop(&mut self) {
        self.peers.decide(|exchange, _| exchange.stops_waiting(self.tenant));
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        self.peers.turns().remove(&self.request);
        self.peers.decide(|exchange, now| exchange.leave(now, self.request));
    }
}

impl TurnSignal {
    pub(super) fn tell(&self, turn: Turn) {
        self.turn.set(Some(turn));
        self.news.notify_one();
    }
}
