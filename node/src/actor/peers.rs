//! The actor's work for other actors and nodes: it announces its chunks, sends blocks, gives up chunks that moved.

use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use larder_core::directory::Changes;
use larder_core::store::Change;
use larder_core::store::{Granted, Offered};
use larder_core::{Announced, Arrival, Event, Offer};
use larder_net::trace::Trace;
use larder_protocol::peer::{OfferChunks, PeerRequest, PeerResponse};
use tokio::sync::{oneshot, watch};

use super::GpuActor;
use crate::directory::{AskHolders, Changed, Stale};
use crate::exchange::{
    AskBlocks, AskPeer, FetchOrder, FollowOrder, Grant, GrantedBlock, GrantedChunk, PeerLease, Rooms, TakeIn,
};
use crate::spans::cause_of;

/// The ways by which an actor reaches other nodes.
pub struct Peers {
    /// The actor's number.
    pub device: u16,
    /// Answers questions for holders.
    pub holders: Recipient<AskHolders>,
    /// Hears of this actor's gained and lost chunks.
    pub changed: Recipient<Changed>,
    /// The number of times that the directory began again: each time it must be told all held chunks.
    pub restarts: watch::Receiver<u64>,
    /// Hears of wrong rows.
    pub stale: Recipient<Stale>,
    /// Asks another node.
    pub ask: Recipient<AskPeer>,
    /// Fetches.
    pub fetch: Fetcher,
    /// The worth of the nodes' next victims.
    pub rooms: Rooms,
    /// The number of these news that the core has heard.
    pub news: u64,
    /// Follows chunks at their writers' nodes.
    pub follow: FollowStarter,
    /// The node's name.
    pub node: String,
    /// How long a lease waits for other nodes.
    pub deadline: Duration,
}

/// Hands an order to the exchange; the order comes back if the exchange has too many.
pub type Fetcher = Box<dyn Fn(FetchOrder) -> Result<oneshot::Receiver<Vec<Arrival>>, FetchOrder> + Send>;

/// Hands a follow to the exchange; returns whether it was taken: it is not if the exchange has too many.
pub type FollowStarter = Box<dyn Fn(FollowOrder) -> bool + Send>;

impl GpuActor {
    /// Tells followers of events, and the directory if it is to hear, the gained and lost chunks.
    pub(super) fn changed(&mut self, sequence: u64, told: usize, changes: Vec<Change>, to_directory: bool) {
        self.hands.feed.tell(sequence, &changes[told..]);
        if to_directory {
            self.announce(Changes::Since(changes), Event::Announced(Announced::Taken));
        }
    }

    /// Offers a node chunks that are evicted here. No answer in time means that it wants none.
    pub(super) fn offer(&mut self, offered: Offered, ctx: &mut Context<Self>) {
        let Some(peers) = &self.hands.peers else { return };
        let Offered { number, to, fingerprint, worth, chunks } = offered;
        let request =
            PeerRequest::Offer(OfferChunks { device: peers.device, fingerprint, worth: worth.0, chunks });
        let ask = AskPeer { node: to, request, deadline: OFFER_DEADLINE, trace: Trace::default() };
        self.tell_when(ctx, peers.ask.send(ask), move |answer| {
            let wanted = match answer {
                Ok(Ok(PeerResponse::Wanted(wanted))) => wanted,
                _ => Vec::new(),
            };
            Event::OfferEnded { offer: number, wanted }
        });
    }

    /// A peer's view of a grant, with the lease that keeps its slots from reuse.
    pub(super) fn show_grant(&self, granted: Granted) -> Grant {
        match granted {
            Granted::Held { grant, reads, is_on_disk, pools, blocks } => {
                let blocks = blocks.into_iter().map(|block| GrantedBlock {
                    memory: Arc::clone(self.hands.arena.extent(block.place.extent)),
                    offset: block.place.offset,
                    bytes: block.bytes,
                    checksum: block.checksum,
                });
                let blocks = blocks.collect();
                Grant::Held(GrantedChunk { reads, is_on_disk, pools, blocks, lease: self.peer_lease(grant) })
            }
            Granted::NotHeld | Granted::OnDisk => Grant::NotHeld,
            Granted::Busy => Grant::Busy { retry_after_ms: GRANT_RETRY_MS },
        }
    }

    /// The lease of a grant or follow of a peer; its end is heard.
    pub(super) fn peer_lease(&self, number: u64) -> Arc<PeerLease> {
        Arc::new(PeerLease { number, ended: self.ended_grants.clone() })
    }

    /// Announces to the directory; the core hears whether the directory took it.
    pub(super) fn announce(&mut self, changes: Changes, taken: Event) {
        let Some(peers) = &self.hands.peers else { return };
        let event = match peers.changed.try_send(Changed { device: peers.device, changes }) {
            Ok(()) => taken,
            Err(SendError::Full(Changed { changes, .. })) => Event::Announced(Announced::Full(changes)),
            Err(SendError::Closed(_)) => Event::Announced(Announced::Lost),
        };
        self.tell(event);
    }
}

impl Handler<AskBlocks> for GpuActor {
    type Result = Response<Vec<Grant>>;

    fn handle(&mut self, ask: AskBlocks, ctx: &mut Self::Context) -> Self::Result {
        let nothing = || Response::reply(Vec::new());
        self.guard(ctx, |actor, ctx| actor.grant_all(ask, ctx)).unwrap_or_else(nothing)
    }
}

impl GpuActor {
    /// Keeps chunks for a peer, those on disk included.
    fn grant_all(&mut self, ask: AskBlocks, ctx: &mut Context<Self>) -> Response<Vec<Grant>> {
        let AskBlocks { fingerprint, hashes, block_bytes, class, trace } = ask;
        let (block_bytes, cause): (Arc<[u64]>, _) = (block_bytes.into(), cause_of(&trace));
        let (mut grants, mut coming) = (Vec::with_capacity(hashes.len()), Vec::new());
        for (at, hash) in hashes.into_iter().enumerate() {
            let now = self.hands.clock.elapsed();
            let granted = match self.core.offer(now, (fingerprint, hash), &block_bytes, class, &cause) {
                Offer::Now(granted) => granted,
                Offer::Later(recall) => {
                    let (answer, grant) = oneshot::channel();
                    self.pending.recalls.insert(recall, answer);
                    coming.push((at, grant));
                    Granted::Busy
                }
            };
            grants.push(self.show_grant(granted));
        }
        self.settle(ctx);
        if coming.is_empty() {
            return Response::reply(grants);
        }
        Response::fut(async move {
            for (at, grant) in coming {
                // An error: the actor is stopping.
                grants[at] = grant.await.unwrap_or(Grant::NotHeld);
            }
            grants
        })
    }
}

impl Handler<TakeIn> for GpuActor {
    type Result = MessageResult<TakeIn>;

    fn handle(&mut self, offered: TakeIn, ctx: &mut Self::Context) -> Self::Result {
        let TakeIn { holder, fingerprint, chunks, worth } = offered;
        let wanted = self.guard(ctx, |actor, ctx| {
            let wanted = actor.core.take_in(actor.hands.clock.elapsed(), holder, fingerprint, &chunks, worth);
            actor.settle(ctx);
            wanted
        });
        MessageResult(wanted.unwrap_or_default())
    }
}

/// How long a node may take to answer an offer of evicted chunks: less than the chunks wait for it.
const OFFER_DEADLINE: Duration = Duration::from_millis(500);

/// The pause for a peer when too much is being sent.
const GRANT_RETRY_MS: u64 = 5;
