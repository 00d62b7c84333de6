//! Hand-overs: chunks that sessions follow at other nodes, and chunks that peers follow here.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use actix::prelude::*;
use futures_util::{StreamExt, stream};
use larder_core::store::{FollowNews, News};
use larder_core::{Counted, Event};
use larder_protocol::peer::Class;
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{oneshot, watch};

use super::GpuActor;
use super::perform::OrderHandles;
use crate::exchange::{AskFollow, FollowOrder, PeerLease, PeerNews, PeerStep};

/// Peers that follow chunks here, by the number of the follow. The store limits their number.
pub(super) type PeerFollowers = HashMap<u64, PeerFollower>;

/// The channel by which a peer hears of its follow. The follow's chunks and layers bound the number of news.
pub(super) struct PeerFollower {
    news: UnboundedSender<PeerNews>,
    lease: Weak<PeerLease>,
}

impl GpuActor {
    /// Asks the writer's node for chunks.
    pub(super) fn order_follow(&mut self, ordered: larder_core::FollowOrder, ctx: &mut Context<Self>) {
        let number = ordered.order;
        let (Some(peers), Some(chunks)) = (&self.hands.peers, self.fetch_chunks(&ordered.chunks)) else {
            return self.tell(Event::FollowEnded(number));
        };
        let ((news, mut came), (cancel, cancelled)) = (mpsc::unbounded_channel(), oneshot::channel());
        let order = FollowOrder { ordered, chunks, news, cancelled };
        if !(peers.follow)(order) {
            return self.tell(Event::FollowEnded(number));
        }
        let class = watch::Sender::new(Class::Decode);
        self.pending.orders.insert(number, OrderHandles { class, cancel: Some(cancel) });
        let end = stream::once(async move { Event::FollowEnded(number) });
        self.hear(ctx, stream::poll_fn(move |cx| came.poll_recv(cx)).chain(end), |actor, came| {
            if let Event::FollowEnded(order) = came {
                actor.pending.orders.remove(&order);
            }
            came
        });
    }

    /// Tells a peer the progress of its follow.
    pub(super) fn tell_follower(&self, FollowNews { follow, position, what }: FollowNews) {
        let Some(PeerFollower { news, lease }) = self.followers.get(&follow) else { return };
        let Some(lease) = lease.upgrade() else { return };
        let step = match what {
            News::Layers(layers) => {
                self.hands.metrics.count(&Counted::Sent(layers.bytes));
                let memory = self.hands.arena.extent(layers.place.extent);
                let bytes = memory.share(layers.place.offset + layers.offset, layers.bytes, lease);
                let (block, offset, checksum) = (layers.block, layers.offset, layers.checksum);
                PeerStep::Layers { block, offset, bytes, checksum }
            }
            News::Whole(checksums) => PeerStep::Whole(checksums),
            News::Lost => PeerStep::Lost,
        };
        // An error: the peer went away, and the end of its lease is on its way.
        let _ = news.send(PeerNews { chunk: position, step });
    }

    /// Lets a peer follow chunks; `None` if peers already follow too many.
    fn follow_for_peer(&mut self, ask: AskFollow, ctx: &mut Context<Self>) -> Option<Arc<PeerLease>> {
        let AskFollow { fingerprint, hashes, pools, attempt, patience_ms, news } = ask;
        let (now, chunks) = (self.hands.clock.elapsed(), (&*hashes, &*pools));
        let number = self.core.follow_for_peer(now, &fingerprint, chunks, (attempt, patience_ms))?;
        let lease = self.peer_lease(number);
        self.followers.insert(number, PeerFollower { news, lease: Arc::downgrade(&lease) });
        self.settle(ctx);
        Some(lease)
    }
}

impl Handler<AskFollow> for GpuActor {
    type Result = MessageResult<AskFollow>;

    fn handle(&mut self, ask: AskFollow, ctx: &mut Self::Context) -> Self::Result {
        MessageResult(self.guard(ctx, |actor, ctx| actor.follow_for_peer(ask, ctx)).flatten())
    }
}
