//! Lookups and leases that need more than memory: ask where chunks are (`locate`), read or fetch them, answer.
//!
//! A lookup adds to its answer what is elsewhere; a lease has it fetched into slots of its own, and placement decides for each
//! chunk whether it stays. A session that asks does not wait for this: its answer comes later, and its other requests go on.

use std::time::Duration;

use super::answer::Asked;
use super::locate::{Located, Locating};
use super::prefetch::{OrderNumber, PeerOrder, Waiting};
use super::traces::{gather_span, source_span};
use super::{Answer, GpuActor, Reply};
use crate::directory::{AskHolders, ChangeKind, Holders, Stale};
use crate::disk::ChunkKey;
use crate::exchange::{Destination, FetchChunk, FetchOrder, Fetched};
use crate::metrics::Placed;
use crate::placement::{Placement, place};
use crate::siblings::{SIBLING_DEADLINE, THIS_NODE};
use crate::store::ids::SessionId;
use crate::store::{Came, Checksums, FetchId, LookupOptions, Refused, Source, Walk, Wanted};
use actix::fut::LocalBoxActorFuture;
use actix::prelude::*;
use larder_client::trace::{SpanKind, Trace};
use larder_protocol::Fingerprint;
use larder_protocol::peer::Class;
use larder_protocol::session::{Found, Lease, Lookup, Response};
use larder_protocol::table::Holder;
use tokio::sync::{oneshot, watch};

/// A chunk that is being fetched.
pub(super) struct Fetch {
    pub(super) wanted: Wanted,
    pub(super) fingerprint: Fingerprint,
    /// The most urgent of what waits for it.
    pub(super) class: Class,
    /// Nodes that have it and were not asked yet, the next last.
    candidates: Holders,
    /// Nodes that had it when the directory was asked.
    copies: usize,
    /// Whether the directory was asked a second time, since chunks move to their readers.
    is_asked_again: bool,
    /// Whether the object store was asked.
    pub(super) is_object_asked: bool,
    deadline: Duration,
    /// The order that asks a peer for it.
    order: Option<OrderNumber>,
    /// What it is brought for.
    trace: Trace,
}

/// What chunks are brought for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Errand<'a> {
    /// What waits for them.
    pub(super) class: Class,
    /// Until when.
    pub(super) until: Duration,
    /// What that belongs to.
    pub(super) trace: &'a Trace,
}

impl Fetch {
    /// One that these nodes have, if any.
    pub(super) fn new(
        wanted: Wanted,
        fingerprint: Fingerprint,
        class: Class,
        mut candidates: Holders,
        deadline: Duration,
        trace: Trace,
    ) -> Self {
        let copies = candidates.len();
        candidates.reverse();
        let (is_asked_again, is_object_asked, order) = (false, false, None);
        Self {
            wanted,
            fingerprint,
            class,
            candidates,
            copies,
            is_asked_again,
            is_object_asked,
            deadline,
            order,
            trace,
        }
    }

    /// What it is called.
    pub(super) fn key(&self) -> ChunkKey {
        ChunkKey { fingerprint: self.fingerprint, hash: self.wanted.chunk.hash }
    }

    /// Bytes of its blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.wanted.blocks.iter().map(|block| block.bytes).sum()
    }
}

impl GpuActor {
    /// Answers a lookup, at once where other nodes need not be asked.
    pub(super) fn lookup(
        &mut self,
        session: SessionId,
        ask: Lookup,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        let missing = self.missing_for_lookup(&ask, &walk);
        let asking = match self.locate(ask.namespace, &ask.chain, missing, &asked.trace) {
            Locating::Known(located) => {
                let elsewhere = located.sources(ask.chain.len());
                return self.look_up(session, &ask, &walk, &elsewhere).map(Reply::Now);
            }
            Locating::Asked(asking) => asking,
        };
        let finish = asking.map(move |located, actor, _| {
            let elsewhere = located.sources(ask.chain.len());
            let walk = actor.store.find(session, ask.namespace, &ask.chain);
            let answer = walk.and_then(|walk| actor.look_up(session, &ask, &walk, &elsewhere));
            let answer = answer.unwrap_or_else(Answer::from);
            actor.reply(asked, answer);
        });
        ctx.spawn(finish);
        Ok(Reply::Later)
    }

    /// Answers a lease, at once where all of it is in memory or nobody else has the rest.
    pub(super) fn lease(
        &mut self,
        session: SessionId,
        ask: Lease,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) -> Result<Reply, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        let missing = self.missing(&walk, ask.chain.len());
        match self.locate(ask.namespace, &ask.chain, missing, &asked.trace) {
            Locating::Known(located) if walk.needs_disk() || !located.stored.is_empty() => {
                self.gather(session, &ask, &located, asked, ctx);
            }
            Locating::Known(_) => {
                let leased = self.store.lease_found(session, ask.namespace, walk)?;
                return Ok(Reply::Now(self.show_lease(leased)));
            }
            Locating::Asked(asking) => {
                let finish = asking.map(move |located, actor, ctx| {
                    actor.gather(session, &ask, &located, asked, ctx);
                });
                ctx.spawn(finish);
            }
        }
        Ok(Reply::Later)
    }

    fn look_up(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        walk: &Walk,
        elsewhere: &[Option<Source>],
    ) -> Result<Answer, Refused> {
        let found = self.found_on(session, ask, walk, elsewhere)?;
        Ok(Answer::from(Response::Found(found)))
    }

    /// What a lookup finds now; counts it.
    pub(super) fn found(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        elsewhere: &[Option<Source>],
    ) -> Result<Found, Refused> {
        let walk = self.store.find(session, ask.namespace, &ask.chain)?;
        self.found_on(session, ask, &walk, elsewhere)
    }

    fn found_on(
        &mut self,
        session: SessionId,
        ask: &Lookup,
        walk: &Walk,
        elsewhere: &[Option<Source>],
    ) -> Result<Found, Refused> {
        let &Lookup { prompt_tokens, skip_read, pin_ms, ref tiers, .. } = ask;
        let options = LookupOptions { elsewhere, prompt_tokens, skip_read, tiers, pin_ms };
        let now = self.clock.now();
        let found = self.store.lookup_found(session, &ask.chain, walk, options, now)?;
        self.looked_up(ask, &found);
        Ok(found)
    }

    /// How long chunks may take to come from other actors, of this node or others.
    fn peers_deadline(&self) -> Duration {
        let siblings = self.siblings.as_ref().map_or(Duration::ZERO, |_| SIBLING_DEADLINE);
        self.peers.as_ref().map_or(siblings, |peers| peers.deadline)
    }

    /// How long chunks may take to come from where they are.
    pub(super) fn load_deadline(&self) -> Duration {
        let others = (self.peers.is_some() || self.siblings.is_some()).then(|| self.peers_deadline());
        let (disk, objects) = (self.disk.as_ref(), self.objects.as_ref());
        let below = [disk.map(|disk| disk.deadline), objects.map(|objects| objects.deadline)];
        others.into_iter().chain(below.into_iter().flatten()).max().unwrap_or_default()
    }

    /// Starts to read and fetch what a lease needs.
    fn gather(
        &mut self,
        session: SessionId,
        ask: &Lease,
        located: &Located,
        asked: Asked,
        ctx: &mut Context<Self>,
    ) {
        let elsewhere = located.sources(ask.chain.len());
        let gathered = match self.store.gather(session, ask.namespace, &ask.chain, &elsewhere) {
            Ok(gathered) => gathered,
            Err(refused) => {
                return self.reply(asked, Answer::from(refused));
            }
        };
        let until = asked.started + self.load_deadline();
        let trace = gather_span(&asked.trace, &gathered);
        let waiting = Waiting { session, asked: Some(asked), trace: trace.clone(), until };
        self.waiting.insert(gathered.gather, waiting);
        if gathered.is_ready {
            self.finish_gathers(vec![gathered.gather]);
        }
        // What a ticket had ordered already is urgent from now on.
        self.hurry(gathered.gather);
        let errand = Errand { class: Class::Decode, until, trace: &trace };
        self.load(ask.namespace, gathered.wanted, located, errand, ctx);
    }

    /// An engine stands still until these chunks are there.
    pub(super) fn hurry(&mut self, gather: u64) {
        let awaited: Vec<FetchId> = self.store.awaited(gather).collect();
        awaited.into_iter().for_each(|id| self.hurry_fetch(id));
    }

    /// The same of one chunk.
    pub(super) fn hurry_fetch(&mut self, id: FetchId) {
        let Some(fetch) = self.fetching.get_mut(&id) else { return };
        if std::mem::replace(&mut fetch.class, Class::Decode) == Class::Decode {
            return;
        }
        if let Some(order) = fetch.order.and_then(|order| self.peer_orders.get(&order)) {
            order.class.send_if_modified(|class| std::mem::replace(class, Class::Decode) != Class::Decode);
        }
        if let Some(disk) = &mut self.disk {
            disk.queued_reads.change_class(id, Class::Decode);
        }
        if let Some(objects) = &mut self.objects {
            objects.queued_reads.change_class(id, Class::Decode);
        }
    }

    /// Orders chunks, each from where it is.
    pub(super) fn load(
        &mut self,
        namespace: u32,
        wanted: Vec<Wanted>,
        located: &Located,
        errand: Errand<'_>,
        ctx: &mut Context<Self>,
    ) {
        let Errand { class, until, trace } = errand;
        let peers_deadline = self.peers_deadline();
        let deadline = match class {
            Class::Decode => until.min(self.clock.elapsed() + peers_deadline),
            // Nobody waits: it has as long as the ticket lives.
            Class::Prefetch => Duration::MAX,
        };
        let fingerprint = self.store.fingerprint(namespace).unwrap_or(Fingerprint([0; 32]));
        let (mut held, mut on_disk, mut stored) = (Vec::with_capacity(wanted.len()), Vec::new(), Vec::new());
        let disk_trace = source_span(trace, &wanted, Source::Disk);
        let object_trace = source_span(trace, &wanted, Source::Object);
        for wanted in wanted {
            let (candidates, ids, trace) = match wanted.from {
                Source::Disk => (Holders::default(), &mut on_disk, &disk_trace),
                Source::Object => (Holders::default(), &mut stored, &object_trace),
                Source::Sibling | Source::Peer => (located.holders(wanted.position), &mut held, trace),
            };
            ids.push(wanted.fetch);
            let fetch = Fetch::new(wanted, fingerprint, class, candidates, deadline, trace.clone());
            self.fetching.insert(fetch.wanted.fetch, fetch);
        }
        self.read_from_disk(on_disk, ctx);
        self.read_from_objects(stored, ctx);
        self.order_fetches(held, ctx);
        self.renew_extents(ctx);
    }

    /// Whether the directory may be asked (again) who has a chunk.
    pub(super) fn is_not_asked_again(&self, id: FetchId) -> bool {
        self.fetching.get(&id).is_some_and(|fetch| !fetch.is_asked_again)
    }

    /// Asks the directory again for chunks whose holders did not have them.
    pub(super) fn ask_again(&mut self, ids: Vec<FetchId>, ctx: &mut Context<Self>) {
        let Some(first) = ids.first().and_then(|id| self.fetching.get(id)) else { return };
        let (fingerprint, trace) = (first.fingerprint, first.trace.child(SpanKind::Internal, "find_holders"));
        let mut chunks = Vec::with_capacity(ids.len());
        for id in &ids {
            if let Some(fetch) = self.fetching.get_mut(id) {
                fetch.is_asked_again = true;
                chunks.push(fetch.wanted.chunk);
            }
        }
        let Some(peers) = &self.peers else {
            return self.order_fetches(ids, ctx);
        };
        let asking = peers.holders.send(AskHolders { fingerprint, chunks, trace });
        let finish = asking.into_actor(self).map(move |holders, actor, ctx| {
            for (id, holders) in ids.iter().zip(holders.unwrap_or_default()) {
                let Some(fetch) = actor.fetching.get_mut(id) else { continue };
                fetch.copies = holders.len();
                fetch.candidates = holders;
            }
            actor.order_fetches(ids, ctx);
        });
        ctx.spawn(finish);
    }

    /// Asks the next candidate of each chunk; for one that has none left the object store, if that may have it.
    fn order_fetches(&mut self, ids: Vec<FetchId>, ctx: &mut Context<Self>) {
        let now = self.clock.elapsed();
        let mut by_holder = std::collections::BTreeMap::<Holder, Vec<FetchId>>::new();
        let (mut last, mut stored) = (None, Vec::new());
        for id in ids {
            let Some(fetch) = self.fetching.get_mut(&id) else { continue };
            let next = if now < fetch.deadline { next_candidate(&mut fetch.candidates, last) } else { None };
            match next {
                Some(holder) => by_holder.entry(holder).or_default().push(id),
                None if self.may_be_stored(id) => stored.push(id),
                None => self.did_not_come(id),
            }
            last = next.or(last);
        }
        if !stored.is_empty() {
            self.read_from_objects(stored, ctx);
        }
        for (holder, ids) in by_holder {
            for part in self.parts_of(&ids) {
                self.order_fetch(holder, part, now, ctx);
            }
        }
    }

    /// Divides chunks into orders of some MiB, so that each can be told and stopped by itself.
    fn parts_of(&self, ids: &[FetchId]) -> Vec<Vec<FetchId>> {
        let mut parts: Vec<Vec<FetchId>> = Vec::new();
        let mut bytes = ORDER_BYTES;
        for &id in ids {
            let more = self.fetching.get(&id).map_or(0, Fetch::bytes);
            match parts.last_mut() {
                Some(part) if bytes + more <= ORDER_BYTES => part.push(id),
                _ => {
                    parts.push(vec![id]);
                    bytes = 0;
                }
            }
            bytes += more;
        }
        parts
    }

    /// Stops asking a peer for a chunk that nobody waits for, when that is so for all that was asked with it.
    pub(super) fn stop_fetch(&mut self, id: FetchId) {
        let Some(order) = self.fetching.get(&id).and_then(|fetch| fetch.order) else { return };
        let Some(order) = self.peer_orders.get_mut(&order) else { return };
        order.awaited.retain(|&other| other != id);
        if order.awaited.is_empty()
            && let Some(cancel) = order.cancel.take()
        {
            // It has just ended where this fails.
            let _ = cancel.send(());
        }
    }

    fn order_fetch(&mut self, holder: Holder, ids: Vec<FetchId>, now: Duration, ctx: &mut Context<Self>) {
        let fetches: Vec<&Fetch> = ids.iter().filter_map(|id| self.fetching.get(id)).collect();
        let Some(first) = fetches.first() else { return };
        let most = self.peers_deadline();
        let (fingerprint, deadline) = (first.fingerprint, first.deadline.saturating_sub(now).min(most));
        let bytes: u64 = fetches.iter().map(|fetch| fetch.bytes()).sum();
        let chunks = fetches.iter().map(|fetch| self.fetch_chunk(&fetch.wanted)).collect();
        let class =
            watch::Sender::new(fetches.iter().map(|fetch| fetch.class).min().unwrap_or(Class::Decode));
        let (cancel, cancelled) = oneshot::channel();
        let (waits, cancelled) = (class.subscribe(), Some(cancelled));
        let trace = first.trace.child(SpanKind::Internal, "fetch");
        trace.count("larder.bytes", bytes);
        let order = FetchOrder { holder, fingerprint, chunks, deadline, class: waits, cancelled, trace };
        let Some(coming) = self.order_from(order) else {
            // Too many fetches are under way: asking another node would meet the same queue.
            ids.into_iter().for_each(|id| self.did_not_come(id));
            return;
        };
        self.last_peer_order += 1;
        let number = self.last_peer_order;
        self.peer_orders.insert(number, PeerOrder { awaited: ids.clone(), class, cancel: Some(cancel) });
        ids.iter().for_each(|id| {
            if let Some(fetch) = self.fetching.get_mut(id) {
                fetch.order = Some(number);
            }
        });
        self.meters.peer(holder).ordered(bytes, now);
        let finish = coming.map(move |came, actor, ctx| {
            actor.peer_orders.remove(&number);
            let came = came.into_iter().map(Some).chain(std::iter::repeat_with(|| None));
            actor.fetched(holder, ids.into_iter().zip(came).collect(), ctx);
        });
        ctx.spawn(finish);
    }

    /// Hands an order to the exchange, or carries it out where its holder is on this node; `None` where there are too many.
    fn order_from(&self, order: FetchOrder) -> Option<LocalBoxActorFuture<Self, Vec<Fetched>>> {
        if order.holder.node == THIS_NODE {
            return Some(self.fetch_from_sibling(order));
        }
        let coming = (self.peers.as_ref()?.fetch)(order).ok()?;
        Some(Box::pin(coming.into_actor(self).map(|came, _, _| came.unwrap_or_default())))
    }

    fn fetch_chunk(&self, wanted: &Wanted) -> FetchChunk {
        let blocks = wanted.blocks.iter().map(|block| Destination {
            memory: std::sync::Arc::clone(self.arena.extent(block.place.extent)),
            offset: block.place.offset,
            bytes: block.bytes,
            range_bytes: block.range_bytes,
            key: block.key,
        });
        FetchChunk { hash: wanted.chunk.hash, blocks: blocks.collect() }
    }

    /// What a holder sent is here, or not.
    fn fetched(&mut self, holder: Holder, came: Vec<(FetchId, Option<Fetched>)>, ctx: &mut Context<Self>) {
        let (mut again, mut stale) = (Vec::new(), Vec::new());
        let now = self.clock.elapsed();
        self.meter(holder, &came, now);
        for (id, came) in came {
            match came {
                Some(Fetched::Here { checksums, pools, reads, is_on_disk }) => {
                    let checksums = checksums.into_iter().map(Checksums::from).collect();
                    let came =
                        Came { checksums, pools, reads, is_on_disk_elsewhere: is_on_disk, is_stored: false };
                    self.came(id, holder, came);
                }
                Some(Fetched::NotHeld) if holder.node == THIS_NODE => again.push(id),
                Some(Fetched::NotHeld) => {
                    stale.extend(self.fetching.get(&id).map(|fetch| (fetch.fingerprint, fetch.wanted.chunk)));
                    again.push(id);
                }
                Some(Fetched::Busy { .. } | Fetched::Failed(_)) | None => again.push(id),
            }
        }
        if let (Some(peers), Some(&(fingerprint, _))) = (&self.peers, stale.first()) {
            let chunks = stale.iter().map(|&(_, chunk)| chunk).collect();
            if peers.stale.try_send(Stale { holder, fingerprint, chunks }).is_err() {
                tracing::debug!(%holder, "the directory is busy: a stale row stays for now");
            }
        }
        let (again, unwanted): (Vec<FetchId>, Vec<FetchId>) =
            again.into_iter().partition(|&id| self.store.is_awaited(id));
        unwanted.into_iter().for_each(|id| self.did_not_come(id));
        let is_lost = |id: &FetchId| {
            self.fetching.get(id).is_some_and(|fetch| fetch.candidates.is_empty() && !fetch.is_asked_again)
        };
        let (lost, again): (Vec<FetchId>, Vec<FetchId>) = again.into_iter().partition(is_lost);
        self.order_fetches(again, ctx);
        self.ask_again(lost, ctx);
        self.follow_up(ctx);
    }

    /// Measures what came together: chunk by chunk the first would count for the time of all.
    fn meter(&mut self, holder: Holder, came: &[(FetchId, Option<Fetched>)], now: Duration) {
        let (mut delivered, mut missing) = (0, 0);
        for (id, came) in came {
            let bytes = self.fetching.get(id).map_or(0, Fetch::bytes);
            let is_here = matches!(came, Some(Fetched::Here { .. }));
            *(if is_here { &mut delivered } else { &mut missing }) += bytes;
        }
        let meter = self.meters.peer(holder);
        meter.gave_up(missing);
        if delivered > 0 {
            meter.delivered(delivered, now);
        }
    }

    fn came(&mut self, id: FetchId, holder: Holder, came: Came) {
        let Some(fetch) = self.fetching.remove(&id) else { return };
        let placement = place(fetch.copies, came.reads, came.is_on_disk_elsewhere);
        let kept = match placement {
            Placement::Migrate if holder.node == THIS_NODE => {
                self.moved_from_sibling(holder.device, fetch.fingerprint, fetch.wanted.chunk.hash);
                Some(ChangeKind::Gained)
            }
            Placement::Migrate => Some(ChangeKind::MovedFrom(holder)),
            Placement::Replicate => Some(ChangeKind::Gained),
            Placement::Pass => None,
        };
        self.metrics.placed_fetched(match placement {
            Placement::Migrate => Placed::Migrated,
            Placement::Replicate => Placed::Replicated,
            Placement::Pass => Placed::Passed,
        });
        let ready = self.store.fetched(id, Some(came), kept);
        self.end_recalls(id);
        self.finish_gathers(ready);
    }

    pub(super) fn did_not_come(&mut self, id: FetchId) {
        self.fetching.remove(&id);
        self.metrics.placed_fetched(Placed::Missed);
        let ready = self.store.fetched(id, None, None);
        self.end_recalls(id);
        self.finish_gathers(ready);
    }

    /// Answers leases that have waited as long as they may with what is here. What they waited for may still come.
    pub(super) fn finish_late_gathers(&mut self, ctx: &mut Context<Self>) {
        let now = self.clock.elapsed();
        let late = self.waiting.iter().filter(|(_, waiting)| waiting.asked.is_some() && waiting.until <= now);
        let mut late: Vec<u64> = late.map(|(&gather, _)| gather).collect();
        if late.is_empty() {
            return;
        }
        late.sort_unstable();
        self.finish_gathers(late);
        self.stop_abandoned(ctx);
    }

    pub(super) fn finish_gathers(&mut self, ready: Vec<u64>) {
        for gather in ready {
            // A ticket that nobody has collected yet stays.
            let Some(waiting) = self.waiting.get_mut(&gather) else { continue };
            let Some(asked) = waiting.asked.take() else { continue };
            let trace = std::mem::take(&mut waiting.trace);
            self.waiting.remove(&gather);
            let leased = self.store.finish_gather(gather);
            if let Ok(leased) = &leased {
                trace.count("larder.chunks_here", leased.chunks);
            }
            let answer = leased.map_or_else(Answer::from, |leased| self.show_lease(leased));
            self.reply(asked, answer);
        }
    }
}

/// Bytes of the chunks that are asked of a peer together, at least one: the exchange divides no further.
const ORDER_BYTES: u64 = 4 << 20;

/// The next node to ask: the one that is asked for the chunk before, if it may be, else a random one.
fn next_candidate(candidates: &mut Holders, last: Option<Holder>) -> Option<Holder> {
    let same = candidates.iter().position(|&holder| Some(holder) == last);
    match same {
        Some(at) => Some(candidates.remove(at)),
        None => candidates.pop(),
    }
}
