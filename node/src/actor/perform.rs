//! Performs the core's effects, and tells the core their results.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use actix::fut::LocalBoxActorFuture;
use actix::prelude::*;
use larder_core::directory::Changes;
use larder_core::reports::Reporter;
use larder_core::store::ids::SessionId;
use larder_core::store::{FetchId, Granted, PurgedPage};
use larder_core::{
    Arrival, Effect, Event, OrderNumber, QuestionId, RecallId, RequestId, Started, TakeNumber,
};
use larder_protocol::checksum::BlockKey;
use larder_protocol::drain::Taken;
use larder_protocol::peer::Class;
use larder_protocol::session::{Found, Prefetching, Response};
use larder_protocol::table::{Holder, NodeNumber};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use tokio::sync::{oneshot, watch};

use super::answer::PendingRequest;
use super::{Answer, GpuActor, NO_ANSWER};
use crate::directory::{AskHolders, FoundHolders, Stale};
use crate::disk::namespaces::KnownNamespace;
use crate::exchange::{FetchChunk, FetchOrder, Grant};
use crate::object::metrics::Side;
use crate::spans::trace_of;

/// The things that the core's numbers stand for.
#[derive(Default)]
pub(super) struct Pending {
    last_request: u64,
    /// The request that is being taken: most are answered before the next one comes.
    current: Option<(RequestId, PendingRequest)>,
    /// Requests that are answered later. The sessions' limits of requests bound their number.
    requests: HashMap<RequestId, PendingRequest>,
    /// Orders that other actors carry out.
    pub(super) orders: HashMap<OrderNumber, OrderHandles>,
    /// Peers that wait for chunks from disk.
    pub(super) recalls: HashMap<RecallId, oneshot::Sender<Grant>>,
    /// Nodes that drain and wait for an answer.
    pub(super) takes: HashMap<TakeNumber, oneshot::Sender<Taken>>,
    /// The result of the last page of a purge.
    pub(super) purged: Option<(PurgedPage, u64)>,
    /// The time at which the core must hear that time has passed, if that is before the next tick.
    alarm: Option<Duration>,
}

/// Changes of an order while it is carried out.
pub(super) struct OrderHandles {
    /// The most urgent class of its waiters.
    pub(super) class: watch::Sender<Class>,
    pub(super) cancel: Option<oneshot::Sender<()>>,
}

impl Pending {
    /// The number of a request that the core is about to be told.
    pub(super) fn expect(&mut self, session: SessionId, asked: PendingRequest) -> RequestId {
        self.last_request += 1;
        let request = RequestId { session, number: self.last_request };
        self.current = Some((request, asked));
        request
    }

    /// The request being taken is answered later, if it was not by now.
    fn put_off(&mut self) {
        self.requests.extend(self.current.take());
    }

    fn answered(&mut self, request: RequestId) -> Option<PendingRequest> {
        let current = self.current.take_if(|(current, _)| *current == request);
        current.map(|(_, asked)| asked).or_else(|| self.requests.remove(&request))
    }

    fn hurry(&self, order: OrderNumber) {
        let order = self.orders.get(&order);
        order.into_iter().for_each(|order| _ = order.class.send_replace(Class::Decode));
    }

    fn cancel(&mut self, order: OrderNumber) {
        let order = self.orders.get_mut(&order);
        // If nobody is there to tell, the order has just ended.
        let _ = order.and_then(|order| order.cancel.take()).map(|cancel| cancel.send(()));
    }

    /// Forgets a session's answers, for which nobody waits any more. An answer that was due long ago is a fault of ours.
    pub(super) fn forget(&mut self, session: SessionId, now: Duration) {
        for (_, asked) in self.requests.extract_if(|of, _| of.session == session) {
            let waited = now.saturating_sub(asked.started);
            if waited > LONGEST_REQUEST {
                let request = asked.request;
                tracing::error!(request, ?waited, "a request has no answer; please report this line");
            }
        }
    }

    /// Forgets all that is under way; numbers go on.
    pub(super) fn begin_anew(&mut self) {
        *self = Self { last_request: self.last_request, ..Self::default() };
    }
}

impl GpuActor {
    /// Tells the core an event, and performs the core's effects until none is left.
    pub(super) fn decide(&mut self, event: Event, ctx: &mut Context<Self>) {
        self.tell(event);
        while let Some(effect) = self.core.poll_effect() {
            self.perform(effect, ctx);
        }
        self.pending.put_off();
        self.renew_extents(ctx);
        let Some(at) = self.core.next_deadline() else { return };
        if self.pending.alarm.is_none_or(|alarm| at < alarm) {
            self.pending.alarm = Some(at);
            self.later(ctx, at.saturating_sub(self.hands.clock.elapsed()), |actor, ctx| {
                actor.pending.alarm = None;
                actor.decide(Event::Alarm, ctx);
            });
        }
    }

    /// Performs the effects of told events and of direct calls to the store, at the core's present time.
    pub(super) fn settle(&mut self, ctx: &mut Context<Self>) {
        self.decide(Event::Alarm, ctx);
    }

    fn perform(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        match effect {
            Effect::Answer { request, response, new_extents } => {
                let answer = self.show_answer(response, &new_extents);
                self.answer(request, answer);
            }
            Effect::Done { request } => self.answer(request, NO_ANSWER),
            Effect::Found { request, ask, found } => {
                self.looked_up(&ask, &found);
                self.answer(request, Response::Found(found));
            }
            Effect::Prefetching { request, ask, found, started } => {
                self.looked_up(&ask, &found);
                match started {
                    Ok(started) => self.answer(request, show_prefetch(found, started)),
                    Err(refused) => self.answer(request, refused),
                }
            }
            Effect::Leased { request, leased } => {
                let answer = self.show_lease(leased);
                self.answer(request, answer);
            }
            Effect::Refused { request, refused } => self.answer(request, refused),
            Effect::FindSiblings { question, fingerprint, chunks } => {
                self.find_siblings(question, &fingerprint, &chunks);
            }
            Effect::FindHolders { question, fingerprint, chunks, cause } => {
                let trace = trace_of(&cause);
                self.find_holders(question, AskHolders { fingerprint, chunks, trace }, ctx);
            }
            Effect::FindStored { question, fingerprint, chunks, blocks } => {
                self.find_stored(question, fingerprint, chunks, &blocks, ctx);
            }
            Effect::Fetch(order) => self.fetch(order, ctx),
            Effect::Hurry(order) => self.pending.hurry(order),
            Effect::CancelOrder(order) => self.pending.cancel(order),
            Effect::Read { read, tier, chunk } => self.read(read, tier, chunk, ctx),
            Effect::TellSiblings(changes) => {
                _ = self.hands.siblings.as_ref().map(|siblings| siblings.note(&changes))
            }
            Effect::Changed { sequence, told, changes, to_directory } => {
                self.changed(sequence, told, changes, to_directory);
            }
            Effect::AnnouncePage { page, next } => {
                self.announce(Changes::Page(page), Event::PageAnnounced { next });
            }
            Effect::Write { number, write } => self.write(number, &write, ctx),
            Effect::Touch(keys) => _ = self.hands.disk.as_ref().map(|disk| disk.tier.touch(keys)),
            Effect::Remove(key) => self.remove_from_disk(key),
            Effect::Disagrees { fingerprint, chunk } => self.disagrees(fingerprint, &chunk),
            Effect::Describe { fingerprint, tenant_name, spec } => {
                self.describe(fingerprint, KnownNamespace { tenant: tenant_name, spec }, ctx);
            }
            Effect::ForgetDescriptions(unused) => self.forget_descriptions(unused, ctx),
            Effect::Knows { namespace, tenant_name, fingerprint } => {
                self.hands.metrics.know(namespace, &tenant_name, &fingerprint.to_string());
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
            Effect::Copy { copy, session, moves } => self.copy(copy, session, &moves, ctx),
            Effect::DeviceCopy(order) => self.copy_by_device(order),
            Effect::CancelDeviceCopy(number) => self.device_lane.cancel(larder_device::OrderNumber(number.0)),
            Effect::Renew(extent) => self.renewals.push(self.hands.arena.vacate(extent)),
            Effect::Follow(order) => self.order_follow(order, ctx),
            Effect::TellFollower(told) => self.tell_follower(told),
            Effect::Condemned { by, keys } => condemned(&by, &keys),
            Effect::Count(counted) => self.hands.metrics.count(&counted),
            effect => self.perform_move(effect, ctx),
        }
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

    /// Tells the core an event; [`GpuActor::settle`] performs the effects.
    pub(super) fn tell(&mut self, event: Event) {
        if let Some(objects) = &self.hands.objects {
            self.core.object_is_open(!objects.tier.is_closed(Side::Reading));
        }
        if let Some(peers) = &mut self.hands.peers
            && peers.restarts.has_changed().unwrap_or(false)
        {
            peers.restarts.mark_unchanged();
            self.core.directory_began_again();
        }
        let now = self.hands.clock.elapsed();
        if let Some(peers) = &mut self.hands.peers {
            for (node, room) in peers.rooms.since(&mut peers.news) {
                self.core.neighbour_says(now, node, room);
            }
            self.core.this_node_serves(peers.rooms.served(now));
        }
        self.core.handle(now, event);
        if let Some(peers) = &self.hands.peers {
            peers.rooms.is_worth(peers.device, self.core.store().least_worth());
        }
    }

    fn answer(&mut self, request: RequestId, answer: impl Into<Answer>) {
        if let Some(asked) = self.pending.answered(request) {
            self.reply(asked, answer.into());
        }
    }

    fn answer_recall(&mut self, recall: RecallId, granted: Granted) {
        let grant = self.show_grant(granted);
        // If nobody is there to tell, the asker went away: the grant ends when it is dropped.
        let _ = self.pending.recalls.remove(&recall).map(|answer| answer.send(grant));
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

    /// Hands an order to the exchange, or carries it out if its holder is on this node; `None` if there are too many.
    fn order_from(&self, order: FetchOrder) -> Option<LocalBoxActorFuture<Self, Vec<Arrival>>> {
        if order.ordered.holder.node == NodeNumber::THIS_NODE {
            let coming = self.hands.siblings.as_ref()?.fetch(order, Arc::clone(&self.hands.lane));
            return Some(Box::pin(coming.into_actor(self)));
        }
        let coming = (self.hands.peers.as_ref()?.fetch)(order).ok()?;
        Some(Box::pin(coming.into_actor(self).map(|came, _, _| came.unwrap_or_default())))
    }

    /// Chunks with the targets of their blocks; `None` if a chunk is wanted no more.
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
}

/// The answer to a prefetch that has begun.
fn show_prefetch(found: Found, Started { ticket, tokens, tokens_to_recompute }: Started) -> Response {
    Response::Prefetching(Prefetching { ticket, found, tokens, tokens_to_recompute })
}

/// Counts and logs a wrong chunk in memory.
fn condemned(by: &Reporter, keys: &[BlockKey]) {
    tracing::error!(
        chunk = %keys.first().map_or(ChunkHash([0; 32]), |key| key.hash),
        by = by.name(),
        "a chunk in memory has other bytes than were committed under its name: it is dropped"
    );
}

/// Longer than any request waits: each wait has a deadline, far shorter unless configured otherwise.
const LONGEST_REQUEST: Duration = Duration::from_secs(20);
