//! Performs the core's effects, and tells the core their results.

use std::collections::HashMap;
use std::time::Duration;

use actix::prelude::*;
use futures_util::stream;
use larder_core::alarm::AlarmClock;
use larder_core::reports::Reporter;
use larder_core::store::PurgedPage;
use larder_core::store::ids::SessionId;
use larder_core::{
    Description, Effect, Event, OrderNumber, ReadAnswer, RecallId, RequestId, Started, TakeNumber,
};
use larder_protocol::checksum::BlockKey;
use larder_protocol::drain::Taken;
use larder_protocol::peer::Class;
use larder_protocol::session::{Found, Prefetching, Response};
use larder_protocol::{ChunkHash, Fingerprint};
use tokio::sync::{oneshot, watch};

use super::answer::PendingRequest;
use super::{Answer, GpuActor, NO_ANSWER};
use crate::disk::namespaces::KnownNamespace;
use crate::exchange::Grant;
use crate::hands::{Hands, Renewed};
use crate::object::metrics::Side;

/// Requests, orders and answers under way, by the core's numbers.
#[derive(Default)]
pub(super) struct Pending {
    last_request: u64,
    /// The request that the core is being told. Most requests are answered before the next one comes.
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
    /// The alarm that is set for the core.
    alarm: AlarmClock,
    /// Its timer.
    timer: Option<SpawnHandle>,
}

/// The means to change an order while it is carried out.
pub(super) struct OrderHandles {
    /// The most urgent class of its waiters.
    pub(super) class: watch::Sender<Class>,
    pub(super) cancel: Option<oneshot::Sender<()>>,
}

impl Pending {
    /// Numbers a request that the core is about to be told, and keeps it until its answer.
    pub(super) fn expect(&mut self, session: SessionId, asked: PendingRequest) -> RequestId {
        self.last_request += 1;
        let request = RequestId { session, number: self.last_request };
        self.current = Some((request, asked));
        request
    }

    /// Keeps the current request for a later answer, unless it has been answered.
    fn put_off(&mut self) {
        self.requests.extend(self.current.take());
    }

    fn answered(&mut self, request: RequestId) -> Option<PendingRequest> {
        let current = self.current.take_if(|(current, _)| *current == request);
        current.map(|(_, asked)| asked).or_else(|| self.requests.remove(&request))
    }

    pub(super) fn hurry(&self, order: OrderNumber) {
        let order = self.orders.get(&order);
        order.into_iter().for_each(|order| _ = order.class.send_replace(Class::Decode));
    }

    pub(super) fn cancel(&mut self, order: OrderNumber) {
        let order = self.orders.get_mut(&order);
        // If nobody is there to tell, the order has just ended.
        let _ = order.and_then(|order| order.cancel.take()).map(|cancel| cancel.send(()));
    }

    /// Forgets a session's requests: nobody waits for their answers any more. A long overdue answer is our fault, and is logged.
    pub(super) fn forget(&mut self, session: SessionId, now: Duration) {
        for (_, asked) in self.requests.extract_if(|of, _| of.session == session) {
            let waited = now.saturating_sub(asked.started);
            if waited > LONGEST_REQUEST {
                let request = asked.request;
                tracing::error!(request, ?waited, "a request has no answer; please report this line");
            }
        }
    }

    /// Forgets everything under way; numbers go on.
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
        if let Some(renewed) = self.hands.renewals.next(&self.hands.copy_pool, self.hands.clock.elapsed()) {
            // In every life: the arena needs the memory, whichever life ordered it.
            self.hear(ctx, stream::once(renewed), Self::renewed);
        }
        self.set_alarm(ctx);
    }

    /// Sets the alarm for the core's next deadline, unless it is set for then or for an earlier time.
    fn set_alarm(&mut self, ctx: &mut Context<Self>) {
        let Some(at) = self.pending.alarm.set(self.core.next_deadline()) else { return };
        let timer = self.later(ctx, at.saturating_sub(self.hands.clock.elapsed()), move |actor, ctx| {
            // A timer that was cancelled a moment ago may still come.
            if actor.pending.alarm.rings(at) {
                actor.pending.timer = None;
                actor.decide(Event::Alarm, ctx);
            }
        });
        // The actor polls every timer that is left, whenever it does anything.
        let later = self.pending.timer.replace(timer);
        later.into_iter().for_each(|later| _ = ctx.cancel_future(later));
    }

    /// Performs the effects of events told before and of direct calls to the store.
    pub(super) fn settle(&mut self, ctx: &mut Context<Self>) {
        self.decide(Event::Alarm, ctx);
    }

    fn perform(&mut self, effect: Effect, ctx: &mut Context<Self>) {
        match effect {
            Effect::Answer { request, response, new_extents } => match self.hands.show(&new_extents) {
                Some(shown) => self.answer(request, Self::show_answer(response, shown)),
                None => self.core.cannot_show(Effect::Answer { request, response, new_extents }),
            },
            Effect::Done { request } => self.answer(request, NO_ANSWER),
            Effect::Found { request, ask, found } => {
                self.looked_up(request.session, &ask, &found);
                self.answer(request, Response::Found(found));
            }
            Effect::Prefetching { request, ask, found, started } => {
                self.looked_up(request.session, &ask, &found);
                match started {
                    Ok(started) => self.answer(request, show_prefetch(found, started)),
                    Err(refused) => self.answer(request, refused),
                }
            }
            Effect::Leased { request, leased } => match self.hands.show(&leased.new_extents) {
                Some(shown) => self.answer(request, self.show_lease(leased, shown)),
                None => self.core.cannot_show(Effect::Leased { request, leased }),
            },
            Effect::Refused { request, refused } => self.answer(request, refused),
            Effect::FindStored { question, fingerprint, chunks, blocks } => {
                let asked = self.hands.find_stored(fingerprint, chunks, &blocks);
                self.tell_answer(ctx, asked, move |found| Event::StoredFound { question, found });
            }
            Effect::Read { read, tier, chunk } => {
                let wanted = self.core.wanted(chunk).ok_or(ReadAnswer::Closed);
                let ordered = wanted.and_then(|wanted| self.hands.read(tier, wanted));
                self.tell_answer(ctx, ordered, move |answer| Event::ReadEnded { read, answer });
            }
            Effect::Write { number, write } => {
                let ordered = self.hands.write(&write);
                self.tell_answer(ctx, ordered, move |answer| Event::WriteEnded { number, answer });
            }
            Effect::Touch(keys) => self.hands.touch(keys),
            Effect::Remove(key) => self.hands.remove(key),
            Effect::Disagrees(chunk) => self.hands.disagrees(&chunk),
            Effect::Describe { fingerprint, tenant_name, spec } => {
                self.describe(fingerprint, KnownNamespace { tenant: tenant_name, spec }, ctx);
            }
            Effect::ForgetDescriptions(unused) => self.forget_descriptions(unused, ctx),
            Effect::Knows { namespace, tenant_name, fingerprint } => {
                self.hands.metrics.know(namespace, &tenant_name, &fingerprint.to_string());
                self.hands.owners(|owners| owners.serves(&tenant_name, true));
            }
            Effect::Copy { copy, session, moves } => {
                let window = session.and_then(|session| self.engines.get(&session)?.window.clone());
                let copied = self.hands.copy(window, &moves);
                self.tell_answer(ctx, copied, move |answer| Event::Copied { copy, answer });
            }
            Effect::DeviceCopy(order) => self.copy_by_device(order),
            Effect::CancelDeviceCopy(number) => self.device_lane.cancel(larder_device::OrderNumber(number.0)),
            Effect::Renew(extent) => self.hands.renewals.add(self.hands.arena.vacate(extent)),
            Effect::Condemned { by, keys } => condemned(&by, &keys),
            Effect::Count(counted) => self.hands.metrics.count(&counted),
            Effect::Purged { page, writes, .. } => self.pending.purged = Some((page, writes)),
            Effect::VisitSegment { visit, after } => {
                let visited = self.hands.visit(&visit, after);
                self.tell_answer(ctx, visited, move |result| Event::SegmentVisited { visit, after, result });
            }
            Effect::TenantLeft(name) => {
                self.hands.metrics.tenant_left(&name);
                self.hands.owners(|owners| owners.serves(&name, false));
            }
            effect => self.perform_elsewhere(effect, ctx),
        }
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
            peers.rooms.is_worth(peers.device, self.core.least_worth());
        }
    }

    /// An extent has its new memory, or there is none.
    fn renewed(&mut self, renewed: Renewed) -> Event {
        let Hands { renewals, arena, clock, .. } = &mut self.hands;
        let occupied = renewals.end(renewed, arena, clock.elapsed());
        #[cfg(test)]
        super::lives::planted();
        occupied.map_or(Event::Alarm, |extent| self.is_occupied(extent))
    }

    /// An extent has memory.
    pub(super) fn is_occupied(&self, extent: u32) -> Event {
        self.device_lane.want_sweep();
        Event::ExtentRenewed(extent)
    }

    fn describe(&self, fingerprint: Fingerprint, namespace: KnownNamespace, ctx: &mut Context<Self>) {
        if let Some(described) = self.hands.describe(fingerprint, namespace) {
            self.tell_when(ctx, described, move |description| Event::Described { fingerprint, description });
        }
    }

    fn forget_descriptions(&self, unused: Vec<Fingerprint>, ctx: &mut Context<Self>) {
        let Some(forgotten) = self.hands.forget_descriptions(unused) else { return };
        let finish = forgotten.into_actor(self).map(|forgotten, actor, ctx| {
            for fingerprint in forgotten {
                actor.hands.owners(|owners| owners.forget(&fingerprint));
                actor.tell(Event::Described { fingerprint, description: Description::Gone });
            }
            actor.settle(ctx);
        });
        self.spawn(ctx, finish);
    }

    fn answer(&mut self, request: RequestId, answer: impl Into<Answer>) {
        if let Some(asked) = self.pending.answered(request) {
            let answer = answer.into();
            if matches!(asked.request, "pin" | "unpin") {
                self.note_pin(request.session, asked.request, &answer);
            }
            self.reply(asked, answer);
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

/// Longer than any request waits. Each wait has a deadline, which is far shorter unless configured otherwise.
const LONGEST_REQUEST: Duration = Duration::from_secs(20);
