//! Work with other actors, of this node and of others: find and fetch chunks, announce, offer, lend and follow them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use actix::prelude::*;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use larder_core::directory::Changes;
use larder_core::store::{FollowNews, Granted, News, Offered, Wanted};
use larder_core::{Announced, Arrival, Counted, TakeOrder};
use larder_net::trace::Trace;
use larder_protocol::drain::{Take, Taken};
use larder_protocol::peer::{OfferChunks, PeerRequest, PeerResponse};
use larder_protocol::table::{Holder, NodeNumber};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{oneshot, watch};

use super::Hands;
use crate::directory::{AskHolders, Changed, Stale};
use crate::exchange::{
    AskPeer, FetchChunk, FetchOrder, FollowOrder, Grant, GrantedBlock, GrantedChunk, PeerLease, PeerNews,
    PeerStep, Rooms,
};

/// The ways by which an actor reaches other nodes.
pub struct Peers {
    /// The actor's number.
    pub device: u16,
    /// Answers questions for holders.
    pub holders: Recipient<AskHolders>,
    /// Hears of this actor's gained and lost chunks.
    pub changed: Recipient<Changed>,
    /// The number of times that the directory began again. Each time the actor must tell it all held chunks.
    pub restarts: watch::Receiver<u64>,
    /// Hears of wrong rows.
    pub stale: Recipient<Stale>,
    /// Asks another node.
    pub ask: Recipient<AskPeer>,
    /// Starts fetches.
    pub fetch: Fetcher,
    /// The worth of the nodes' next victims.
    pub rooms: Rooms,
    /// The number of news from `rooms` that the core has heard.
    pub news: u64,
    /// Follows chunks at their writers' nodes.
    pub follow: FollowStarter,
    /// The node's name.
    pub node: String,
    /// How long a lease waits for other nodes.
    pub deadline: Duration,
}

/// Hands an order to the exchange; `None` if the exchange has too many.
pub type Fetcher = Box<dyn Fn(FetchOrder) -> Option<oneshot::Receiver<Vec<Arrival>>> + Send>;

/// Hands a follow to the exchange; returns `false` if the exchange has too many.
pub type FollowStarter = Box<dyn Fn(FollowOrder) -> bool + Send>;

/// Peers that follow chunks here, by the number of the follow. The store limits their number.
pub(crate) type PeerFollowers = HashMap<u64, PeerFollower>;

/// The channel by which a peer hears of its follow. The follow's chunks and layers bound the number of news.
pub(crate) struct PeerFollower {
    news: UnboundedSender<PeerNews>,
    lease: Weak<PeerLease>,
}

impl Hands {
    /// Hands an order to the exchange, or to the sibling that holds its chunks; `None` if there are too many.
    pub(crate) fn fetch(&self, order: FetchOrder) -> Option<LocalBoxFuture<'static, Vec<Arrival>>> {
        if order.ordered.holder.node == NodeNumber::THIS_NODE {
            return Some(self.siblings.as_ref()?.fetch(order, Arc::clone(&self.copy_pool)).boxed_local());
        }
        let coming = (self.peers.as_ref()?.fetch)(order)?;
        Some(coming.map(Result::unwrap_or_default).boxed_local())
    }

    /// A chunk with the targets of its blocks.
    pub(crate) fn fetch_chunk(&self, wanted: &Wanted) -> FetchChunk {
        let blocks = wanted.blocks.iter().map(|block| self.arena.destination(block));
        FetchChunk { hash: wanted.chunk.hash, blocks: blocks.collect() }
    }

    /// Tells the directory of wrong rows.
    pub(crate) fn tell_stale(&self, stale: Stale) {
        let holder: Holder = stale.holder;
        if let Some(peers) = &self.peers
            && peers.stale.try_send(stale).is_err()
        {
            tracing::debug!(%holder, "the directory is busy: a stale row stays for now");
        }
    }

    /// Tells the directory of changes; returns whether it took them. `None` if there is no directory.
    pub(crate) fn announce(&self, changes: Changes) -> Option<Announced> {
        let peers = self.peers.as_ref()?;
        Some(match peers.changed.try_send(Changed { device: peers.device, changes }) {
            Ok(()) => Announced::Taken,
            Err(SendError::Full(Changed { changes, .. })) => Announced::Full(changes),
            Err(SendError::Closed(_)) => Announced::Lost,
        })
    }

    /// Offers a node chunks that are evicted here. No answer in time means that the node wants none.
    pub(crate) fn offer(&self, offered: Offered) -> Option<impl Future<Output = Vec<bool>> + use<>> {
        let peers = self.peers.as_ref()?;
        let Offered { to: node, fingerprint, worth, chunks, .. } = offered;
        let offer = OfferChunks { device: peers.device, fingerprint, worth: worth.0, chunks };
        let (request, deadline) = (PeerRequest::Offer(offer), OFFER_DEADLINE);
        let asked = peers.ask.send(AskPeer { node, request, deadline, trace: Trace::default() });
        Some(asked.map(|answer| match answer {
            Ok(Ok(PeerResponse::Wanted(wanted))) => wanted,
            _ => Vec::new(),
        }))
    }

    /// Asks an actor of another node to keep chunks. The answer is `None` if there is none.
    pub(crate) fn ask_to_take(
        &self,
        order: TakeOrder,
    ) -> Result<impl Future<Output = Option<Taken>> + use<>, Option<Taken>> {
        let peers = self.peers.as_ref().ok_or(None)?;
        let TakeOrder { taker, namespace, chunks, .. } = order;
        let take = Take { from: peers.device, to: taker.device, namespace, chunks };
        let (request, deadline) = (PeerRequest::Take(Box::new(take)), TAKE_DEADLINE);
        let asked = peers.ask.send(AskPeer { node: taker.node, request, deadline, trace: Trace::default() });
        Ok(asked.map(|answer| match answer {
            Ok(Ok(PeerResponse::Taken(taken))) => Some(taken),
            _ => None,
        }))
    }

    /// A peer's view of a grant, with the lease that keeps its slots from reuse.
    pub(crate) fn grant(&self, granted: Granted) -> Grant {
        match granted {
            Granted::Held { grant, reads, is_on_disk, pools, blocks } => {
                let blocks = blocks.into_iter().map(|block| GrantedBlock {
                    memory: Arc::clone(self.arena.extent(block.place.extent)),
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

    /// A lease for a peer's follow. The peer hears of the follow by `news`.
    pub(crate) fn lease_follow(&mut self, follow: u64, news: UnboundedSender<PeerNews>) -> Arc<PeerLease> {
        let lease = self.peer_lease(follow);
        self.followers.insert(follow, PeerFollower { news, lease: Arc::downgrade(&lease) });
        lease
    }

    /// A lease for a peer's grant or follow. The actor hears when the lease ends.
    fn peer_lease(&self, number: u64) -> Arc<PeerLease> {
        Arc::new(PeerLease { number, ended: self.ended_grants.clone() })
    }

    /// Tells a peer the progress of its follow.
    pub(crate) fn tell_follower(&self, FollowNews { follow, position, what }: FollowNews) {
        let Some(follower) = self.followers.get(&follow) else { return };
        let Some(lease) = follower.lease.upgrade() else { return };
        let step = match what {
            News::Layers(layers) => {
                self.metrics.count(&Counted::Sent(layers.bytes));
                let memory = self.arena.extent(layers.place.extent);
                let bytes = memory.share(layers.place.offset + layers.offset, layers.bytes, lease);
                let (block, offset, checksum) = (layers.block, layers.offset, layers.checksum);
                PeerStep::Layers { block, offset, bytes, checksum }
            }
            News::Whole(checksums) => PeerStep::Whole(checksums),
            News::Lost => PeerStep::Lost,
        };
        // An error: the peer went away, and the end of its lease is on its way.
        _ = follower.news.send(PeerNews { chunk: position, step });
    }
}

/// How long a node may take to answer an offer of evicted chunks: shorter than the chunks wait for the answer.
const OFFER_DEADLINE: Duration = Duration::from_millis(500);

/// The pause for a peer when too much is being sent.
const GRANT_RETRY_MS: u64 = 5;

/// How long another node may take to fetch the chunks that it is asked to keep.
const TAKE_DEADLINE: Duration = Duration::from_secs(8);
