//! The actor's work with other actors, of this node and of others: it asks for holders and chunks, announces its own chunks, lends
//! blocks, and hands chunks over in a drain.

use std::sync::Arc;
use std::time::Duration;

use actix::fut::LocalBoxActorFuture;
use actix::prelude::*;
use larder_core::directory::Changes;
use larder_core::store::{Change, FetchId, Granted, Offered};
use larder_core::{
    Announced, Arrival, Effect, Event, Offer, QuestionId, RecallId, TakeNumber, TakeOrder, TakeReply,
};
use larder_net::trace::Trace;
use larder_protocol::drain::{Take, Taken};
use larder_protocol::peer::{OfferChunks, PeerRequest, PeerResponse};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{ChunkRef, Fingerprint};
use tokio::sync::{oneshot, watch};

use super::GpuActor;
use super::perform::OrderHandles;
use crate::directory::{AskHolders, Changed, FoundHolders, Stale};
use crate::exchange::{
    AskBlocks, AskPeer, FetchChunk, FetchOrder, FollowOrder, Grant, GrantedBlock, GrantedChunk, PeerLease,
    Rooms, TakeChunks, TakeIn,
};
use crate::spans::{cause_of, trace_of};

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

impl GpuActor {
    /// Performs an effect that concerns other actors, of this node or of others.
    pub(super) fn perform_elsewhere(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        match effect {
            Effect::FindSiblings { question, fingerprint, chunks } => {
                self.find_siblings(question, &fingerprint, &chunks);
            }
            Effect::FindHolders { question, fingerprint, chunks, cause } => {
                let trace = trace_of(&cause);
                self.find_holders(question, AskHolders { fingerprint, chunks, trace }, ctx);
            }
            Effect::Fetch(order) => self.fetch(order, ctx),
            Effect::Hurry(order) => self.pending.hurry(order),
            Effect::CancelOrder(order) => self.pending.cancel(order),
            Effect::TellSiblings(changes) => {
                _ = self.hands.siblings.as_ref().map(|siblings| siblings.note(&changes))
            }
            Effect::Changed { sequence, told, changes, to_directory } => {
                self.changed(sequence, told, changes, to_directory);
            }
            Effect::AnnouncePage { page, next } => {
                self.announce(Changes::Page(page), Event::PageAnnounced { next });
            }
            Effect::Stale { holder, fingerprint, chunks } => {
                self.tell_stale(Stale { holder, fingerprint, chunks });
            }
            Effect::TellDamaged { device, fingerprint, hashes } => {
                _ = self.hands.siblings.as_ref().map(|all| all.tell_damaged(device, fingerprint, hashes));
            }
            Effect::TellMoved { device, fingerprint, hash } => {
                _ = self.hands.siblings.as_ref().map(|all| all.tell_moved(device, fingerprint, hash));
            }
            Effect::Granted { recall, granted } => self.answer_recall(recall, granted),
            Effect::Follow(order) => self.order_follow(order, ctx),
            Effect::TellFollower(told) => self.tell_follower(told),
            Effect::Offer(offered) => self.offer(offered, ctx),
            Effect::AskToTake(order) => self.ask_to_take(order, ctx),
            Effect::Taken { take, taken } => self.answer_take(take, taken),
            effect => unreachable!("{effect:?} concerns this actor alone"),
        }
    }

    fn find_siblings(&mut self, question: QuestionId, fingerprint: &Fingerprint, chunks: &[ChunkRef]) {
        let holders = self
            .hands
            .siblings
            .iter()
            .flat_map(|siblings| chunks.iter().map(|chunk| siblings.holders(fingerprint, &chunk.hash)));
        let holders = holders.collect();
        self.tell(Event::SiblingsFound { question, holders });
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
            self.order_from(FetchOrder { ordered, chunks, class: waits, cancelled, trace })
        });
        let Some(coming) = coming else { return self.tell(Event::OrderRefused(number)) };
        self.pending.orders.insert(number, OrderHandles { class, cancel: Some(cancel) });
        let finish = coming.map(move |came, actor, ctx| {
            actor.pending.orders.remove(&number);
            actor.decide(Event::OrderEnded { order: number, came }, ctx);
        });
        self.spawn(ctx, finish);
    }

    /// Hands an order to the exchange, or carries it out if its holder is on this node; `None` if there are too many.
    fn order_from(&self, order: FetchOrder) -> Option<LocalBoxActorFuture<Self, Vec<Arrival>>> {
        if order.ordered.holder.node == NodeNumber::THIS_NODE {
            let coming = self.hands.siblings.as_ref()?.fetch(order, Arc::clone(&self.hands.lane));
            return Some(Box::pin(coming.into_actor(self)));
        }
        let coming = (self.hands.peers.as_ref()?.fetch)(order)?;
        Some(Box::pin(coming.into_actor(self).map(|came, _, _| came.unwrap_or_default())))
    }

    /// Chunks with the targets of their blocks; `None` if a chunk is no longer wanted.
    pub(super) fn fetch_chunks(&self, chunks: &[FetchId]) -> Option<Vec<FetchChunk>> {
        let chunk = |&id: &FetchId| {
            let (_, wanted) = self.core.wanted(id)?;
            let blocks = wanted.blocks.iter().map(|block| self.hands.arena.destination(block));
            Some(FetchChunk { hash: wanted.chunk.hash, blocks: blocks.collect() })
        };
        chunks.iter().map(chunk).collect()
    }

    fn tell_stale(&self, stale: Stale) {
        let holder: Holder = stale.holder;
        if let Some(peers) = &self.hands.peers
            && peers.stale.try_send(stale).is_err()
        {
            tracing::debug!(%holder, "the directory is busy: a stale row stays for now");
        }
    }

    fn answer_recall(&mut self, recall: RecallId, granted: Granted) {
        let grant = self.show_grant(granted);
        // If nobody is there to tell, the asker went away: the grant ends when it is dropped.
        let _ = self.pending.recalls.remove(&recall).map(|answer| answer.send(grant));
    }

    /// Tells followers of events the gained and lost chunks, and also the directory if `to_directory`.
    pub(super) fn changed(&mut self, sequence: u64, told: usize, changes: Vec<Change>, to_directory: bool) {
        self.hands.feed.tell(sequence, &changes[told..]);
        if to_directory {
            self.announce(Changes::Since(changes), Event::Announced(Announced::Taken));
        }
    }

    /// Offers a node chunks that are evicted here. No answer in time means that the node wants none.
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

    /// A lease for a peer's grant or follow. The actor hears when the lease ends.
    pub(super) fn peer_lease(&self, number: u64) -> Arc<PeerLease> {
        Arc::new(PeerLease { number, ended: self.ended_grants.clone() })
    }

    /// Announces changes to the directory, and tells the core whether the directory took them.
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

    /// Asks an actor of another node to keep chunks; the core hears the answer.
    pub(super) fn ask_to_take(&mut self, order: TakeOrder, ctx: &mut Context<Self>) {
        let TakeOrder { take, taker, namespace, chunks } = order;
        let Some(peers) = &self.hands.peers else {
            return self.tell(Event::TakeAnswered { take, taken: None });
        };
        let request = Take { from: peers.device, to: taker.device, namespace, chunks };
        let ask = AskPeer {
            node: taker.node,
            request: PeerRequest::Take(Box::new(request)),
            deadline: TAKE_DEADLINE,
            trace: Trace::default(),
        };
        self.tell_when(ctx, peers.ask.send(ask), move |answer| {
            let taken = match answer {
                Ok(Ok(PeerResponse::Taken(taken))) => Some(taken),
                _ => None,
            };
            Event::TakeAnswered { take, taken }
        });
    }

    /// Answers a node that drains.
    pub(super) fn answer_take(&mut self, take: TakeNumber, taken: Taken) {
        // If nobody is there to tell, the asker went away.
        let _ = self.pending.takes.remove(&take).map(|answer| answer.send(taken));
    }

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

/// How long a node may take to answer an offer of evicted chunks: shorter than the chunks wait for the answer.
const OFFER_DEADLINE: Duration = Duration::from_millis(500);

/// The pause for a peer when too much is being sent.
const GRANT_RETRY_MS: u64 = 5;

/// How long another node may take to fetch the chunks that it is asked to keep.
const TAKE_DEADLINE: Duration = Duration::from_secs(8);
