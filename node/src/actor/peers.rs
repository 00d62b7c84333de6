//! The actor's work with other actors, of this node and of others: it fetches chunks from them, and answers what they ask.

use std::sync::Arc;

use actix::prelude::*;
use futures_util::{StreamExt as _, stream};
use larder_core::directory::Changes;
use larder_core::store::{FetchId, Granted};
use larder_core::{Announced, Effect, Event, Offer, QuestionId, TakeReply};
use larder_protocol::drain::Taken;
use larder_protocol::peer::Class;
use tokio::sync::{mpsc, oneshot, watch};

use super::GpuActor;
use super::perform::OrderHandles;
use crate::directory::{AskHolders, FoundHolders, Stale};
use crate::exchange::{
    AskBlocks, AskFollow, FetchChunk, FetchOrder, FollowOrder, Grant, PeerLease, TakeChunks, TakeIn,
};
use crate::spans::{cause_of, trace_of};

impl GpuActor {
    /// Performs an effect that concerns other actors, of this node or of others.
    pub(super) fn perform_elsewhere(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        match effect {
            Effect::FindSiblings { question, fingerprint, chunks } => {
                let siblings = self.hands.siblings.iter();
                let holders = siblings.flat_map(|siblings| {
                    chunks.iter().map(|chunk| siblings.holders(&fingerprint, &chunk.hash))
                });
                let holders = holders.collect();
                self.tell(Event::SiblingsFound { question, holders });
            }
            Effect::FindHolders { question, fingerprint, tenant, chunks, cause } => {
                let trace = trace_of(&cause);
                self.find_holders(question, AskHolders { fingerprint, tenant, chunks, trace }, ctx);
            }
            Effect::Fetch(order) => self.fetch(order, ctx),
            Effect::Hurry(order) => self.pending.hurry(order),
            Effect::CancelOrder(order) => self.pending.cancel(order),
            Effect::TellSiblings(changes) => {
                _ = self.hands.siblings.as_ref().map(|siblings| siblings.note(&changes));
            }
            Effect::Changed { sequence, told, changes, to_directory } => {
                self.hands.feed.tell(sequence, &changes[told..]);
                let announced = to_directory.then(|| self.hands.announce(Changes::Since(changes)));
                if let Some(announced) = announced.flatten() {
                    self.tell(Event::Announced(announced));
                }
            }
            Effect::AnnouncePage { page, next } => match self.hands.announce(Changes::Page(page)) {
                Some(Announced::Taken) => self.tell(Event::PageAnnounced { next }),
                Some(refused) => self.tell(Event::Announced(refused)),
                None => {}
            },
            Effect::Stale { holder, fingerprint, chunks } => {
                self.hands.tell_stale(Stale { holder, fingerprint, chunks });
            }
            Effect::TellDamaged { device, fingerprint, hashes } => {
                _ = self.hands.siblings.as_ref().map(|all| all.tell_damaged(device, fingerprint, hashes));
            }
            Effect::TellMoved { device, fingerprint, hash } => {
                _ = self.hands.siblings.as_ref().map(|all| all.tell_moved(device, fingerprint, hash));
            }
            Effect::Granted { recall, granted } => {
                let grant = self.hands.grant(granted);
                // If nobody is there to tell, the asker went away: the grant ends when it is dropped.
                _ = self.pending.recalls.remove(&recall).map(|answer| answer.send(grant));
            }
            Effect::Follow(order) => self.follow(order, ctx),
            Effect::TellFollower(news) => self.hands.tell_follower(news),
            Effect::Offer(offered) => {
                let offer = offered.number;
                if let Some(asked) = self.hands.offer(offered) {
                    self.tell_when(ctx, asked, move |wanted| Event::OfferEnded { offer, wanted });
                }
            }
            Effect::AskToTake(order) => {
                let take = order.take;
                let asked = self.hands.ask_to_take(order);
                self.tell_answer(ctx, asked, move |taken| Event::TakeAnswered { take, taken });
            }
            // If nobody is there to tell, the asker went away.
            Effect::Taken { take, taken } => {
                _ = self.pending.takes.remove(&take).map(|answer| answer.send(taken));
            }
            effect => unreachable!("{effect:?} concerns this actor alone"),
        }
    }

    fn find_holders(&mut self, question: QuestionId, ask: AskHolders, ctx: &mut Context<Self>) {
        let Some(peers) = &self.hands.peers else {
            return self.tell(Event::HoldersFound { question, holders: Vec::new() });
        };
        let finish = peers.holders.send(ask).into_actor(self).map(move |found, actor, ctx| {
            let FoundHolders { holders, unanswered } = found.unwrap_or_default();
            if !unanswered.is_empty() {
                actor.core.homes_are_silent(question, &unanswered);
            }
            actor.decide(Event::HoldersFound { question, holders }, ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Asks another actor for chunks.
    fn fetch(&mut self, ordered: larder_core::FetchOrder, ctx: &mut Context<Self>) {
        let number = ordered.order;
        let (class, waits) = watch::channel(ordered.class);
        let (cancel, cancelled) = oneshot::channel();
        let trace = trace_of(&ordered.cause);
        let coming = self.fetch_chunks(&ordered.chunks).and_then(|chunks| {
            self.hands.fetch(FetchOrder { ordered, chunks, class: waits, cancelled, trace })
        });
        let Some(coming) = coming else { return self.tell(Event::OrderRefused(number)) };
        self.pending.orders.insert(number, OrderHandles { class, cancel: Some(cancel) });
        let finish = coming.into_actor(self).map(move |came, actor, ctx| {
            actor.pending.orders.remove(&number);
            actor.decide(Event::OrderEnded { order: number, came }, ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Chunks with the targets of their blocks; `None` if a chunk is no longer wanted.
    fn fetch_chunks(&self, chunks: &[FetchId]) -> Option<Vec<FetchChunk>> {
        let chunk = |&id: &FetchId| self.core.wanted(id).map(|(_, wanted)| self.hands.fetch_chunk(wanted));
        chunks.iter().map(chunk).collect()
    }

    /// Follows chunks at their writer's node.
    fn follow(&mut self, ordered: larder_core::FollowOrder, ctx: &mut Context<Self>) {
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

    /// Grants chunks to a peer, those on disk included.
    fn grant_all(&mut self, ask: AskBlocks, ctx: &mut Context<Self>) -> Response<Vec<Grant>> {
        let AskBlocks { fingerprint, hashes, block_bytes, class, trace } = ask;
        let (block_bytes, cause): (Arc<[u64]>, _) = (block_bytes.into(), cause_of(&trace));
        let (mut grants, mut coming) = (Vec::with_capacity(hashes.len()), Vec::new());
        let now = self.hands.clock.elapsed();
        let offers = self.core.offer(now, (fingerprint, &hashes), &block_bytes, class, &cause);
        for (at, offer) in offers.into_iter().enumerate() {
            let granted = match offer {
                Offer::Now(granted) => granted,
                Offer::Later(recall) => {
                    let (answer, grant) = oneshot::channel();
                    self.pending.recalls.insert(recall, answer);
                    coming.push((at, grant));
                    Granted::Busy
                }
            };
            grants.push(self.hands.grant(granted));
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

    /// Lets a peer follow chunks; `None` if peers already follow too many.
    fn follow_for_peer(&mut self, ask: AskFollow, ctx: &mut Context<Self>) -> Option<Arc<PeerLease>> {
        let AskFollow { fingerprint, hashes, pools, attempt, patience_ms, news } = ask;
        let (now, chunks) = (self.hands.clock.elapsed(), (&*hashes, &*pools));
        let number = self.core.follow_for_peer(now, &fingerprint, chunks, (attempt, patience_ms))?;
        let lease = self.hands.lease_follow(number, news);
        self.settle(ctx);
        Some(lease)
    }

    /// Takes chunks over from a node that drains.
    fn take(&mut self, asked: TakeChunks, ctx: &mut Context<Self>) -> Response<Option<Taken>> {
        let TakeChunks { from, namespace, chunks } = asked;
        let now = self.hands.clock.elapsed();
        let reply = self.core.take(now, from, namespace.as_ref(), &chunks);
        let response = match reply {
            TakeReply::Now(taken) => Response::reply(Some(taken)),
            TakeReply::Busy => Response::reply(None),
            TakeReply::Later(take) => {
                let (answer, taken) = oneshot::channel();
                self.pending.takes.insert(take, answer);
                // An error: the actor is stopping, or its life ended.
                Response::fut(async move { taken.await.ok() })
            }
        };
        self.settle(ctx);
        response
    }
}

impl Handler<AskBlocks> for GpuActor {
    type Result = Response<Vec<Grant>>;

    fn handle(&mut self, ask: AskBlocks, ctx: &mut Self::Context) -> Self::Result {
        let nothing = || Response::reply(Vec::new());
        self.guard(ctx, |actor, ctx| actor.grant_all(ask, ctx)).unwrap_or_else(nothing)
    }
}

impl Handler<AskFollow> for GpuActor {
    type Result = MessageResult<AskFollow>;

    fn handle(&mut self, ask: AskFollow, ctx: &mut Self::Context) -> Self::Result {
        MessageResult(self.guard(ctx, |actor, ctx| actor.follow_for_peer(ask, ctx)).flatten())
    }
}

impl Handler<TakeChunks> for GpuActor {
    type Result = Response<Option<Taken>>;

    fn handle(&mut self, asked: TakeChunks, ctx: &mut Self::Context) -> Self::Result {
        self.guard(ctx, |actor, ctx| actor.take(asked, ctx)).unwrap_or_else(|| Response::reply(None))
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
