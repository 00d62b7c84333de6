//! Hand-overs: who follows chunks that are being written, here and at other nodes, hears of each layer.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use actix::prelude::*;
use futures_util::{StreamExt, stream};
use larder_core::OrderNumber;
use larder_core::store::ids::SessionId;
use larder_core::store::{
    Came, Checksums, FetchId, FollowProgress, FollowProofs, FollowRequest, FollowStarted, News, Refused,
    Source, Told, Wanted,
};
use larder_protocol::Fingerprint;
use larder_protocol::handoff::{AskInPlace, Follow, InPlace, Writer};
use larder_protocol::limits::MAX_FETCH_CHUNKS;
use larder_protocol::peer::Class;
use larder_protocol::session::{Leased, Response};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{oneshot, watch};

use super::answer::Asked;
use super::perform::OrderHandles;
use super::{Answer, GpuActor, Reply};
use crate::exchange::{
    AskFollow, ChunkStep, Fetched, FollowCame, FollowOrder, PeerLease, PeerNews, PeerStep,
};
use crate::metrics::{HandedOver, Movement};

/// Who follows what is being written.
#[derive(Default)]
pub(super) struct Handoffs {
    /// Sessions that wait for news, by follow. As many as they have requests under way, which each session bounds.
    waiting: HashMap<u64, Vec<WaitingFollower>>,
    /// Peers, by follow. As many as the store lets them follow.
    peers: HashMap<u64, PeerFollower>,
    /// What is asked of peers.
    orders: HashMap<OrderNumber, Vec<Option<FollowedFetch>>>,
}

struct WaitingFollower {
    session: SessionId,
    ask: AskInPlace,
    asked: Asked,
    until: Duration,
}

/// Where a peer hears of what it follows. There are no more news than chunks and their layers.
struct PeerFollower {
    news: UnboundedSender<PeerNews>,
    lease: Weak<PeerLease>,
}

/// A chunk that comes from its writer's node.
#[derive(Clone, Copy)]
struct FollowedFetch {
    fetch: FetchId,
    number: u64,
    bytes: u64,
}

impl GpuActor {
    /// Starts to follow chunks, and has those come that another node's engine writes.
    pub(super) fn follow(
        &mut self,
        session: SessionId,
        ask: &Follow,
        ctx: &mut Context<Self>,
    ) -> Result<Answer, Refused> {
        let now = self.clock.now();
        let writer = ask.writer.as_ref().filter(|writer| self.is_elsewhere(writer));
        let patience_ms = ask.patience_ms.min(MOST_PATIENCE_MS);
        let FollowStarted { follow, wanted } = self.core.store.follow(
            session,
            FollowRequest {
                namespace: ask.namespace,
                chain: &ask.chain,
                from_peer: writer.is_some(),
                attempt: ask.attempt,
                patience_ms,
            },
            now,
        )?;
        let fingerprint = self.core.store.fingerprint(ask.namespace).unwrap_or(Fingerprint([0; 32]));
        let (coming, on_disk): (Vec<Wanted>, Vec<Wanted>) =
            wanted.into_iter().partition(|wanted| wanted.from == Source::Peer);
        self.core.read_followed(self.clock.elapsed(), fingerprint, on_disk);
        if let Some(writer) = writer {
            let mut coming = coming.into_iter().peekable();
            while coming.peek().is_some() {
                let part: Vec<Wanted> = coming.by_ref().take(MAX_FETCH_CHUNKS).collect();
                self.order_follow(writer, fingerprint, (ask.attempt, patience_ms), part, ctx);
            }
        }
        Ok(Answer::from(Response::Following(follow)))
    }

    /// Whether an engine writes at another node.
    fn is_elsewhere(&self, writer: &Writer) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.node != writer.node)
    }

    /// Asks the writer's node for chunks, once: it sends their layers as it has them.
    fn order_follow(
        &mut self,
        writer: &Writer,
        fingerprint: Fingerprint,
        (attempt, patience_ms): (u64, u64),
        wanted: Vec<Wanted>,
        ctx: &mut Context<Self>,
    ) {
        let Some(peers) = &self.peers else { return };
        let chunks = wanted.iter().map(|wanted| self.fetch_chunk(wanted)).collect();
        let followed = wanted.iter().map(|wanted| {
            let bytes = wanted.blocks.iter().map(|block| block.bytes).sum();
            Some(FollowedFetch { fetch: wanted.fetch, number: wanted.number, bytes })
        });
        let followed: Vec<Option<FollowedFetch>> = followed.collect();
        let number = self.core.follow(self.clock.elapsed(), fingerprint, wanted);
        let ((news, mut came), (cancel, cancelled)) = (mpsc::unbounded_channel(), oneshot::channel());
        let order = FollowOrder {
            node: writer.node.clone(),
            device: writer.device,
            fingerprint,
            chunks,
            order: number.0,
            attempt,
            patience_ms,
            news,
            cancelled,
        };
        let is_taken = (peers.follow)(order);
        if !is_taken {
            return self.close_follow(number, followed);
        }
        let class = watch::Sender::new(Class::Decode);
        self.pending.orders.insert(number, OrderHandles { class, cancel: Some(cancel) });
        self.handoffs.orders.insert(number, followed);
        // The end of the channel without a last word: the peer thread stopped.
        let end =
            stream::once(async move { FollowCame { order: number.0, chunk: 0, step: ChunkStep::Closed } });
        ctx.add_stream(stream::poll_fn(move |cx| came.poll_recv(cx)).chain(end));
    }

    /// Answers how much of what a session follows is in place, once that is more than it knows of.
    pub(super) fn ask_in_place(
        &mut self,
        session: SessionId,
        ask: AskInPlace,
        asked: Asked,
    ) -> Result<Reply, Refused> {
        let progress = self.core.store.followed(session, ask.follow)?;
        let until = asked.started + Duration::from_millis(ask.wait_ms).min(MOST_WAIT);
        if is_news(&ask, &progress) || ask.wait_ms == 0 {
            return Ok(Reply::Now(self.show_in_place(session, &ask)?));
        }
        let waiting = WaitingFollower { session, ask, asked, until };
        self.handoffs.waiting.entry(ask.follow).or_default().push(waiting);
        Ok(Reply::Later)
    }

    fn show_in_place(&mut self, session: SessionId, ask: &AskInPlace) -> Result<Answer, Refused> {
        let mut descriptors = Vec::new();
        let mut leased = None;
        if self.core.store.followed(session, ask.follow)?.layers > 0
            && let Some(shown) = self.core.store.show_followed(session, ask.follow)?
        {
            self.metrics.moved(Movement::Leased, shown.bytes);
            let (extents, shown_descriptors) = self.show(&shown.new_extents);
            descriptors = shown_descriptors;
            let (lease, chunks, places, checksums) = (shown.lease, shown.chunks, shown.places, Vec::new());
            leased = Some(Leased { lease, chunks, places, checksums, extents });
        }
        let FollowProofs { progress, sums, checksums } =
            self.core.store.prove_followed(session, ask.follow, ask.layers)?;
        let FollowProgress { chunks, layers, is_whole } = progress;
        let response = Some(Response::InPlace(InPlace { chunks, layers, is_whole, leased, sums, checksums }));
        Ok(Answer { response, descriptors })
    }

    /// Tells those who follow what has come, here and at other nodes.
    pub(super) fn tell_followers(&mut self) {
        for follow in self.core.store.take_progressed() {
            self.answer_followers(follow, |actor, waiting| {
                let progress = actor.core.store.followed(waiting.session, follow);
                progress.is_err() || progress.is_ok_and(|progress| is_news(&waiting.ask, &progress))
            });
        }
        for Told { follow, position, what } in self.core.store.take_told() {
            let Some(PeerFollower { news, lease }) = self.handoffs.peers.get(&follow) else { continue };
            let Some(lease) = lease.upgrade() else { continue };
            let step = match what {
                News::Layers(layers) => {
                    self.metrics.handed_over(HandedOver::Sent, 1, layers.bytes);
                    let memory = self.arena.extent(layers.place.extent);
                    let bytes = memory.share(layers.place.offset + layers.offset, layers.bytes, lease);
                    PeerStep::Layers {
                        block: layers.block,
                        offset: layers.offset,
                        bytes,
                        checksum: layers.checksum,
                    }
                }
                News::Whole(checksums) => PeerStep::Whole(checksums),
                News::Lost => PeerStep::Lost,
            };
            // An error: the peer went away, and the end of its lease is on its way.
            let _ = news.send(PeerNews { chunk: position, step });
        }
    }

    /// Answers sessions that have waited as long as they wanted to.
    pub(super) fn answer_late_followers(&mut self) {
        let now = self.clock.elapsed();
        let mut late: Vec<u64> = self.handoffs.waiting.keys().copied().collect();
        late.sort_unstable();
        for follow in late {
            self.answer_followers(follow, |_, waiting| waiting.until <= now);
        }
    }

    fn answer_followers(&mut self, follow: u64, is_due: impl Fn(&Self, &WaitingFollower) -> bool) {
        let Some(waiting) = self.handoffs.waiting.remove(&follow) else { return };
        let (due, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|waiting| is_due(self, waiting));
        if !waiting.is_empty() {
            self.handoffs.waiting.insert(follow, waiting);
        }
        for WaitingFollower { session, ask, asked, .. } in due {
            let answer = self.show_in_place(session, &ask);
            self.reply(asked, answer.unwrap_or_else(Answer::from));
        }
    }

    /// A peer follows no more.
    pub(super) fn forget_follower(&mut self, follow: u64) {
        self.handoffs.peers.remove(&follow);
    }

    /// A session has ended: nobody waits for its answers.
    pub(super) fn forget_followers_of(&mut self, session: SessionId) {
        self.handoffs.waiting.retain(|_, waiting| {
            waiting.retain(|waiting| waiting.session != session);
            !waiting.is_empty()
        });
    }

    fn follow_ended(&mut self, order: OrderNumber, followed: FollowedFetch, fetched: Fetched) {
        let came = match fetched {
            Fetched::Here { checksums, pools, reads, .. } => {
                self.metrics.handed_over(HandedOver::Came, 0, followed.bytes);
                let checksums = checksums.into_iter().map(Checksums::from).collect();
                Some(Came { checksums, pools, reads, is_on_disk_elsewhere: false, is_stored: false })
            }
            _ => None,
        };
        self.core.follow_ended(order, followed.fetch, came);
    }

    /// Nothing of a follow is to come any more.
    fn close_follow(&mut self, order: OrderNumber, left: Vec<Option<FollowedFetch>>) {
        for FollowedFetch { fetch, .. } in left.into_iter().flatten() {
            self.core.follow_ended(order, fetch, None);
        }
        self.core.follow_closed(order);
    }
}

impl StreamHandler<FollowCame> for GpuActor {
    fn handle(&mut self, came: FollowCame, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.follow_came(came, ctx));
    }

    /// One follow has ended; the actor goes on.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl GpuActor {
    /// Takes what another node sends of a chunk that is written there.
    fn follow_came(&mut self, FollowCame { order, chunk, step }: FollowCame, ctx: &mut Context<Self>) {
        let order = OrderNumber(order);
        let Some(followed) = self.handoffs.orders.get_mut(&order) else { return };
        match step {
            ChunkStep::Layers { block, offset, bytes, checksum } => {
                if let Some(FollowedFetch { fetch, number, .. }) = followed.get(chunk).copied().flatten() {
                    self.metrics.handed_over(HandedOver::Came, 1, 0);
                    self.core.store.layers_came(fetch, number, block, offset, bytes, checksum);
                }
            }
            ChunkStep::Ended(fetched) => {
                if let Some(ended) = followed.get_mut(chunk).and_then(Option::take) {
                    self.follow_ended(order, ended, fetched);
                }
            }
            ChunkStep::Closed => {
                let left = self.handoffs.orders.remove(&order).unwrap_or_default();
                self.pending.orders.remove(&order);
                self.close_follow(order, left);
            }
        }
        self.settle(ctx);
    }

    /// Has a peer follow chunks; `None` where peers follow too much.
    fn follow_for_peer(&mut self, ask: AskFollow, ctx: &mut Context<Self>) -> Option<Arc<PeerLease>> {
        let AskFollow { fingerprint, hashes, attempt, patience_ms, news } = ask;
        let now = self.clock.now();
        let patience_ms = patience_ms.min(MOST_PATIENCE_MS);
        let follow = self.core.store.follow_for_peer(&fingerprint, &hashes, attempt, patience_ms, now);
        let lease = follow.map(|number| {
            let lease = Arc::new(PeerLease { number, ended: self.ended_grants.sender.clone() });
            self.handoffs.peers.insert(number, PeerFollower { news, lease: Arc::downgrade(&lease) });
            lease
        });
        self.settle(ctx);
        lease
    }
}

impl Handler<AskFollow> for GpuActor {
    type Result = MessageResult<AskFollow>;

    fn handle(&mut self, ask: AskFollow, ctx: &mut Self::Context) -> Self::Result {
        MessageResult(self.guard(ctx, |actor, ctx| actor.follow_for_peer(ask, ctx)).flatten())
    }
}

/// Whether somebody who asks does not know of this yet.
fn is_news(ask: &AskInPlace, progress: &FollowProgress) -> bool {
    progress.layers > ask.layers || progress.chunks < ask.chunks || progress.is_whole
}

/// How long an answer may wait for news: a session that ends waits for it.
const MOST_WAIT: Duration = Duration::from_secs(1);

/// How long a reader may wait for a writer that is silent: longer than any prefill takes from layer to layer.
const MOST_PATIENCE_MS: u64 = 600_000;
