//! Chunks that come from other actors, of this node or others: ask who has them next, order, take what came.
//!
//! Placement decides for each whether it stays. One that no actor gave may be in the object store.

use std::time::Duration;

use actix::fut::LocalBoxActorFuture;
use actix::prelude::*;
use larder_client::trace::{SpanKind, Trace};
use larder_core::directory::Holders;
use larder_core::placement::{Placement, place};
use larder_core::store::ids::ChunkKey;
use larder_core::store::{Came, ChangeKind, Checksums, FetchId, Wanted};
use larder_protocol::Fingerprint;
use larder_protocol::peer::Class;
use larder_protocol::table::{Holder, NodeNumber};
use tokio::sync::{oneshot, watch};

use super::GpuActor;
use crate::directory::{AskHolders, Stale};
use crate::exchange::{Destination, FetchChunk, FetchFailure, FetchOrder, Fetched};
use crate::metrics::Placed;
use crate::siblings::SIBLING_DEADLINE;

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

/// What a fetch belongs to while it is under way.
pub(super) type OrderNumber = u64;

/// Chunks that were asked of a peer together.
#[derive(Debug)]
pub(super) struct PeerOrder {
    /// Chunks that somebody still waits for.
    pub(super) awaited: Vec<FetchId>,
    /// The most urgent of what waits for them.
    pub(super) class: watch::Sender<Class>,
    pub(super) cancel: Option<oneshot::Sender<()>>,
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

    /// One that comes with an order that was made already, and from nowhere else.
    pub(super) fn of_order(wanted: Wanted, fingerprint: Fingerprint, order: OrderNumber) -> Self {
        let mut fetch = Self::new(
            wanted,
            fingerprint,
            Class::Decode,
            Holders::default(),
            Duration::MAX,
            Trace::default(),
        );
        (fetch.is_asked_again, fetch.is_object_asked, fetch.order) = (true, true, Some(order));
        fetch
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
    /// An engine stands still until this chunk is there.
    pub(super) fn hurry_fetch(&mut self, id: FetchId) {
        let Some(fetch) = self.fetching.get_mut(&id) else { return };
        if std::mem::replace(&mut fetch.class, Class::Decode) == Class::Decode {
            return;
        }
        if let Some(order) = fetch.order.and_then(|order| self.peer_orders.get(&order)) {
            order.class.send_if_modified(|class| std::mem::replace(class, Class::Decode) != Class::Decode);
        }
        if let Some(disk) = &mut self.disk {
            disk.reads.hurry(id);
        }
        if let Some(objects) = &mut self.objects {
            objects.reads.hurry(id);
        }
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
        self.spawn(ctx, finish);
    }

    /// Asks the next candidate of each chunk; for one that has none left the object store, if that may have it.
    pub(super) fn order_fetches(&mut self, ids: Vec<FetchId>, ctx: &mut Context<Self>) {
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
        let has_others = fetches.iter().all(|fetch| !fetch.candidates.is_empty());
        let bytes: u64 = fetches.iter().map(|fetch| fetch.bytes()).sum();
        let chunks = fetches.iter().map(|fetch| self.fetch_chunk(&fetch.wanted)).collect();
        let class =
            watch::Sender::new(fetches.iter().map(|fetch| fetch.class).min().unwrap_or(Class::Decode));
        let (cancel, cancelled) = oneshot::channel();
        let (waits, cancelled) = (class.subscribe(), Some(cancelled));
        let trace = first.trace.child(SpanKind::Internal, "fetch");
        trace.count("larder.bytes", bytes);
        let order =
            FetchOrder { holder, fingerprint, chunks, deadline, has_others, class: waits, cancelled, trace };
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
        self.spawn(ctx, finish);
    }

    /// Hands an order to the exchange, or carries it out where its holder is on this node; `None` where there are too many.
    fn order_from(&self, order: FetchOrder) -> Option<LocalBoxActorFuture<Self, Vec<Fetched>>> {
        if order.holder.node == NodeNumber::THIS_NODE {
            return Some(self.fetch_from_sibling(order));
        }
        let coming = (self.peers.as_ref()?.fetch)(order).ok()?;
        Some(Box::pin(coming.into_actor(self).map(|came, _, _| came.unwrap_or_default())))
    }

    pub(super) fn fetch_chunk(&self, wanted: &Wanted) -> FetchChunk {
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
        let (mut again, mut stale, mut busy, mut damaged) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
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
                Some(Fetched::NotHeld) if holder.node == NodeNumber::THIS_NODE => again.push(id),
                Some(Fetched::NotHeld) => {
                    stale.extend(self.fetching.get(&id).map(|fetch| (fetch.fingerprint, fetch.wanted.chunk)));
                    again.push(id);
                }
                // Where other nodes are busy, the exchange waits.
                Some(Fetched::Busy { retry_after_ms }) if holder.node == NodeNumber::THIS_NODE => {
                    busy.push((id, retry_after_ms));
                }
                Some(Fetched::Failed(FetchFailure::Checksum)) if holder.node == NodeNumber::THIS_NODE => {
                    damaged.extend(self.fetching.get(&id).map(Fetch::key));
                    again.push(id);
                }
                Some(Fetched::Busy { .. } | Fetched::Failed(_)) | None => again.push(id),
            }
        }
        self.ask_busy_sibling_again(holder, busy, ctx);
        if let Some(&ChunkKey { fingerprint, .. }) = damaged.first() {
            let hashes = damaged.iter().map(|key| key.hash).collect();
            self.tell_sibling_damaged(holder.device, fingerprint, hashes);
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

    /// Asks a sibling that is busy again when it said, unless others have the chunks; for as long as these may take.
    fn ask_busy_sibling_again(&mut self, holder: Holder, busy: Vec<(FetchId, u64)>, ctx: &mut Context<Self>) {
        let Some(pause_ms) = busy.iter().map(|&(_, pause_ms)| pause_ms).max() else { return };
        for (id, _) in &busy {
            if let Some(fetch) = self.fetching.get_mut(id) {
                // The others are asked first.
                fetch.candidates.insert(0, holder);
            }
        }
        self.later(ctx, Duration::from_millis(pause_ms), move |actor, ctx| {
            let ids = busy.into_iter().map(|(id, _)| id);
            let (wanted, unwanted): (Vec<_>, Vec<_>) = ids.partition(|&id| actor.store.is_awaited(id));
            unwanted.into_iter().for_each(|id| actor.did_not_come(id));
            actor.order_fetches(wanted, ctx);
            actor.follow_up(ctx);
        });
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
            Placement::Migrate if holder.node == NodeNumber::THIS_NODE => {
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

    /// How long chunks may take to come from other actors, of this node or others.
    pub(super) fn peers_deadline(&self) -> Duration {
        let siblings = self.siblings.as_ref().map_or(Duration::ZERO, |_| SIBLING_DEADLINE);
        self.peers.as_ref().map_or(siblings, |peers| peers.deadline)
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
