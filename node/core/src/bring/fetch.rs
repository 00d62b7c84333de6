//! Fetches chunks from other actors, of this node or of other nodes: chooses the holder, orders, takes the answer.
//!
//! Placement decides for each chunk whether it stays. A chunk that no actor gave may still be in the object store.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_protocol::Fingerprint;
use larder_protocol::peer::{Class, RetryAfter};
use larder_protocol::table::{Holder, NodeNumber};

use crate::Core;
use crate::cause::Cause;
use crate::directory::Holders;
use crate::effect::{Counted, Effect, FetchOrder};
use crate::event::{Arrival, Below, FetchFailure, OrderNumber};
use crate::exchange::BusyPause;
use crate::loading::Meter;
use crate::lookups::NotDelivered;
use crate::placement::{Placement, PlacementRule, place_by_reads, place_by_worth};
use crate::store::ids::{ChunkKey, TenantId};
use crate::store::{Came, ChangeKind, FetchId, Wanted};
use crate::tiers::presence::Fact;

/// A chunk that is being fetched.
#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) wanted: Wanted,
    pub(crate) fingerprint: Fingerprint,
    /// The most urgent class of the requests that wait for the chunk.
    pub(crate) class: Class,
    /// Actors that have the chunk and were not asked yet; the last one is asked next.
    pub(super) candidates: Holders,
    /// The number of actors that had the chunk when the directory was asked.
    pub(super) copies: usize,
    /// Whether the directory was asked a second time.
    pub(crate) is_asked_again: bool,
    /// Whether the object store was asked.
    pub(crate) is_object_asked: bool,
    /// Whether the chunk's holder drains, and this actor keeps the chunk.
    pub(crate) is_taken: bool,
    /// The time until which other actors are asked.
    deadline: Duration,
    /// The order that asks an actor for the chunk.
    order: Option<OrderNumber>,
    /// The pauses before busy siblings are asked again.
    pause: BusyPause,
    /// The reason why the last place did not give the chunk.
    pub(crate) failed: Option<NotDelivered>,
    pub(super) cause: Cause,
}

/// Chunks that were asked of an actor together.
#[derive(Debug)]
pub(super) struct OrderUnderWay {
    /// The holder to ask; `None` for a follow, which asks the node of the engine that writes the chunks.
    holder: Option<Holder>,
    /// For a follow, the earliest attempt that may be followed.
    attempt: u64,
    chunks: Vec<FetchId>,
    /// The chunks that somebody still waits for.
    awaited: Vec<FetchId>,
    /// The most urgent class of the requests that wait for the chunks.
    class: Class,
}

impl Fetch {
    /// A fetch of a chunk that `candidates` hold; there may be none.
    pub(crate) fn new(
        wanted: Wanted,
        fingerprint: Fingerprint,
        class: Class,
        mut candidates: Holders,
        deadline: Duration,
        cause: Cause,
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
            pause: BusyPause::default(),
            is_object_asked,
            is_taken: false,
            deadline,
            order,
            failed: None,
            cause,
        }
    }

    /// Notes that the chunk's holder drains: the chunk comes from this holder or not at all, and stays.
    pub(crate) fn is_from_a_drain(&mut self) {
        (self.is_taken, self.is_asked_again, self.is_object_asked) = (true, true, true);
    }

    /// The chunk's name.
    pub(crate) fn key(&self) -> ChunkKey {
        ChunkKey { fingerprint: self.fingerprint, hash: self.wanted.chunk.hash }
    }

    /// Bytes of the chunk's blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.wanted.blocks.iter().map(|block| block.bytes).sum()
    }

    /// Notes that the chunk is followed: it comes by this order or from disk, and from nowhere else.
    pub(super) fn is_followed_by(&mut self, order: Option<OrderNumber>) {
        (self.order, self.is_asked_again, self.is_object_asked) = (order, order.is_some(), order.is_some());
    }

    /// The order that asks for the chunk.
    pub(super) fn order(&self) -> Option<OrderNumber> {
        self.order
    }

    /// Whether this order asks for the chunk.
    pub(super) fn is_in(&self, order: OrderNumber) -> bool {
        self.order == Some(order)
    }
}

impl OrderUnderWay {
    /// An order of chunks that a node sends while its engine writes them.
    pub(super) fn of_follow(chunks: Vec<FetchId>, attempt: u64) -> Self {
        Self { holder: None, attempt, awaited: chunks.clone(), chunks, class: Class::Decode }
    }

    /// Whether the order follows an earlier attempt of the writer than this one.
    pub(super) fn is_before(&self, attempt: u64) -> bool {
        self.is_follow() && self.attempt < attempt
    }

    pub(super) fn is_follow(&self) -> bool {
        self.holder.is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// The chunk at a position of an order to follow.
    pub(super) fn followed(&self, position: usize) -> Option<FetchId> {
        self.chunks.get(position).copied().filter(|_| self.is_follow())
    }
}

impl Core {
    /// A chunk that is being fetched: its namespace, and where its blocks go.
    pub fn wanted(&self, id: FetchId) -> Option<(Fingerprint, &Wanted)> {
        self.bring.fetches.get(&id).map(|fetch| (fetch.fingerprint, &fetch.wanted))
    }

    /// Notes that an engine waits for this chunk.
    pub(crate) fn hurry_fetch(&mut self, id: FetchId) {
        let Some(fetch) = self.bring.fetches.get_mut(&id) else { return };
        if std::mem::replace(&mut fetch.class, Class::Decode) == Class::Decode {
            return;
        }
        if let Some(number) = fetch.order
            && let Some(order) = self.bring.orders.get_mut(&number)
            && std::mem::replace(&mut order.class, Class::Decode) != Class::Decode
        {
            self.effects.push_back(Effect::Hurry(number));
        }
        for tier in [Below::Disk, Below::Object] {
            if let Some(reads) = self.bring.reads_of(tier) {
                reads.line.hurry(id);
            }
        }
    }

    /// Whether the object store may have a chunk that no node gave.
    pub(crate) fn may_be_stored(&self, id: FetchId) -> bool {
        let Some(fetch) = self.bring.fetches.get(&id) else { return false };
        let known = self.bring.known.get(&fetch.key(), self.now);
        self.bring.sources.object.is_some()
            && self.bring.object_is_open
            && !fetch.is_object_asked
            && !matches!(known, Some(Fact::Absent | Fact::Damaged))
            && self.store.is_leased_soon(id)
    }

    /// Asks the next candidate of each chunk, or the object store if no candidate is left and the store may have the chunk.
    pub(crate) fn order_fetches(&mut self, ids: Vec<FetchId>) {
        let mut by_holder = BTreeMap::<Holder, Vec<FetchId>>::new();
        let (mut last, mut stored) = (None, Vec::new());
        for id in ids {
            let Some(fetch) = self.bring.fetches.get_mut(&id) else { continue };
            let is_late = self.now >= fetch.deadline;
            if is_late && fetch.failed.is_none() {
                fetch.failed = Some(NotDelivered::Deadline);
            }
            let next = if is_late { None } else { next_candidate(&mut fetch.candidates, last) };
            match next {
                Some(holder) => by_holder.entry(holder).or_default().push(id),
                None if self.may_be_stored(id) => stored.push(id),
                None => self.did_not_come(id),
            }
            last = next.or(last);
        }
        if !stored.is_empty() {
            self.read_from(Below::Object, stored);
        }
        for (holder, ids) in by_holder {
            for part in self.parts_of(&ids) {
                self.order_fetch(holder, part);
            }
        }
    }

    /// Orders the chunks that somebody still waits for; gives the others up.
    pub(super) fn order_awaited(&mut self, ids: Vec<FetchId>) {
        let (wanted, unwanted): (Vec<_>, Vec<_>) = ids.into_iter().partition(|&id| self.store.is_awaited(id));
        unwanted.into_iter().for_each(|id| self.did_not_come(id));
        self.order_fetches(wanted);
    }

    /// Divides chunks into orders of some MiB, so that each order can be reported and stopped by itself.
    fn parts_of(&self, ids: &[FetchId]) -> Vec<Vec<FetchId>> {
        let mut parts: Vec<Vec<FetchId>> = Vec::new();
        let mut bytes = ORDER_BYTES;
        for &id in ids {
            let more = self.bring.fetches.get(&id).map_or(0, Fetch::bytes);
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

    fn order_fetch(&mut self, holder: Holder, chunks: Vec<FetchId>) {
        let fetches: Vec<&Fetch> = chunks.iter().filter_map(|id| self.bring.fetches.get(id)).collect();
        let Some(first) = fetches.first() else { return };
        let most = self.bring.others_deadline();
        let (fingerprint, deadline) = (first.fingerprint, first.deadline.saturating_sub(self.now).min(most));
        let has_others = fetches.iter().all(|fetch| !fetch.candidates.is_empty());
        let bytes: u64 = fetches.iter().map(|fetch| fetch.bytes()).sum();
        let class = fetches.iter().map(|fetch| fetch.class).min().unwrap_or(Class::Decode);
        let cause = first.cause.child("fetch");
        cause.count("larder.bytes", bytes);
        let order = OrderNumber(self.bring.next_number());
        let awaited = chunks.clone();
        self.bring.orders.insert(
            order,
            OrderUnderWay { holder: Some(holder), attempt: 0, chunks: chunks.clone(), awaited, class },
        );
        for id in &chunks {
            if let Some(fetch) = self.bring.fetches.get_mut(id) {
                fetch.order = Some(order);
            }
        }
        let now = self.now;
        self.meter(holder).ordered(bytes, now);
        let tenant = self.store.tenant_of_namespace(&fingerprint).unwrap_or(TenantId(0));
        self.effects.push_back(Effect::Fetch(FetchOrder {
            order,
            holder,
            fingerprint,
            tenant,
            chunks,
            deadline,
            has_others,
            class,
            cause,
        }));
    }

    /// Stops asking an actor for a chunk that nobody waits for, once nobody waits for any chunk of its order.
    pub(super) fn stop_fetch(&mut self, id: FetchId) {
        let Some(number) = self.bring.fetches.get(&id).and_then(|fetch| fetch.order) else { return };
        let Some(order) = self.bring.orders.get_mut(&number) else { return };
        let awaited = order.awaited.len();
        order.awaited.retain(|&other| other != id);
        if order.awaited.is_empty() && awaited > 0 {
            self.effects.push_back(Effect::CancelOrder(number));
        }
    }

    /// Ends an order that was not taken: asking another actor would meet the same queue.
    pub(crate) fn order_refused(&mut self, number: OrderNumber) {
        let Some(OrderUnderWay { holder: Some(holder), chunks, .. }) = self.bring.orders.remove(&number)
        else {
            return;
        };
        for id in chunks {
            let bytes = self.bring.fetches.get(&id).map_or(0, Fetch::bytes);
            self.meter(holder).gave_up(bytes);
            if let Some(fetch) = self.bring.fetches.get_mut(&id) {
                fetch.failed = Some(NotDelivered::Busy);
            }
            self.did_not_come(id);
        }
    }

    /// Takes the end of an order: each of its chunks has come or not.
    pub(crate) fn order_ended(&mut self, number: OrderNumber, came: Vec<Arrival>) {
        let Some(OrderUnderWay { holder: Some(holder), chunks, .. }) = self.bring.orders.remove(&number)
        else {
            return;
        };
        let came: Vec<(FetchId, Arrival)> = chunks
            .into_iter()
            .zip(came.into_iter().chain(std::iter::repeat(Arrival::Failed(FetchFailure::Broken))))
            .collect();
        self.measure(holder, &came);
        let is_near = holder.node == NodeNumber::THIS_NODE;
        let (mut again, mut stale, mut busy, mut damaged) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (id, came) in came {
            let Some(fetch) = self.bring.fetches.get_mut(&id) else { continue };
            fetch.order = None;
            fetch.failed = why_not(&came).or(fetch.failed);
            match came {
                Arrival::Here { checksums, pools, reads, is_on_disk } => {
                    let came = Came {
                        checksums,
                        pools,
                        reads,
                        is_on_disk_elsewhere: is_on_disk,
                        is_stored: false,
                        is_copy: false,
                    };
                    self.came(id, holder, came);
                    continue;
                }
                // A busy sibling is asked again later. The exchange itself waits for busy nodes.
                Arrival::Busy { retry_after_ms } if is_near => {
                    busy.push((id, retry_after_ms));
                    continue;
                }
                Arrival::NotHeld if !is_near => stale.push((fetch.fingerprint, fetch.wanted.chunk)),
                Arrival::Damaged if is_near => damaged.push(fetch.key()),
                Arrival::NotHeld | Arrival::Busy { .. } | Arrival::Damaged | Arrival::Failed(_) => {}
            }
            again.push(id);
        }
        self.ask_busy_sibling_again(holder, busy);
        if let Some(&ChunkKey { fingerprint, .. }) = damaged.first() {
            let hashes = damaged.iter().map(|key| key.hash).collect();
            self.effects.push_back(Effect::TellDamaged { device: holder.device, fingerprint, hashes });
        }
        if let Some(&(fingerprint, _)) = stale.first() {
            let chunks: Vec<_> = stale.into_iter().map(|(_, chunk)| chunk).collect();
            self.forget_holder(holder, &fingerprint, &chunks);
            self.effects.push_back(Effect::Stale { holder, fingerprint, chunks });
        }
        let (again, unwanted): (Vec<FetchId>, Vec<FetchId>) =
            again.into_iter().partition(|&id| self.store.is_awaited(id));
        unwanted.into_iter().for_each(|id| self.did_not_come(id));
        let fetches = &self.bring.fetches;
        let is_lost = |id: &FetchId| {
            fetches.get(id).is_some_and(|fetch| fetch.candidates.is_empty() && !fetch.is_asked_again)
        };
        let (lost, again): (Vec<FetchId>, Vec<FetchId>) = again.into_iter().partition(is_lost);
        self.order_fetches(again);
        self.ask_again(lost);
    }

    /// Orders chunks of a busy sibling again, not before the time that the sibling named and later each time, until the chunks'
    /// deadline.
    fn ask_busy_sibling_again(&mut self, holder: Holder, busy: Vec<(FetchId, u64)>) {
        if busy.is_empty() {
            return;
        }
        let mut longest = Duration::ZERO;
        for &(id, retry_after_ms) in &busy {
            if let Some(fetch) = self.bring.fetches.get_mut(&id) {
                // Other holders are asked first.
                fetch.candidates.insert(0, holder);
                longest = longest.max(fetch.pause.next(RetryAfter { retry_after_ms }, AVERAGE));
            }
        }
        let at = (self.now + longest, self.bring.next_number());
        self.bring.retries.insert(at, busy.into_iter().map(|(id, _)| id).collect());
    }

    /// Orders chunks again whose holder was busy.
    pub(crate) fn order_busy_again(&mut self) {
        while let Some(entry) = self.bring.retries.first_entry()
            && entry.key().0 <= self.now
        {
            let ids = entry.remove();
            self.order_awaited(ids);
        }
    }

    fn measure(&mut self, holder: Holder, came: &[(FetchId, Arrival)]) {
        let (mut delivered, mut missing) = (0, 0);
        for (id, came) in came {
            let bytes = self.bring.fetches.get(id).map_or(0, Fetch::bytes);
            let is_here = matches!(came, Arrival::Here { .. });
            *(if is_here { &mut delivered } else { &mut missing }) += bytes;
        }
        let now = self.now;
        let meter = self.meter(holder);
        meter.gave_up(missing);
        if delivered > 0 {
            meter.delivered(delivered, now);
        }
    }

    pub(super) fn meter(&mut self, holder: Holder) -> &mut Meter {
        let meters = &mut self.bring.meters;
        // All meters are forgotten, with those of nodes that left: the other nodes are measured again soon.
        if meters.len() >= MAX_METERED_PEERS && !meters.contains_key(&holder) {
            meters.clear();
        }
        meters.entry(holder).or_default()
    }

    fn came(&mut self, id: FetchId, holder: Holder, mut came: Came) {
        let Some(fetch) = self.bring.fetches.remove(&id) else { return };
        // The disk of a holder that leaves is of no use.
        came.is_on_disk_elsewhere &= !fetch.is_taken;
        let rule = self.store.placement();
        let placement = match rule {
            _ if self.is_draining() => Placement::Pass,
            _ if fetch.is_taken => Placement::Migrate,
            _ if self.store.is_taken_in(id) => Placement::Forwarded,
            PlacementRule::Reads => place_by_reads(fetch.copies, came.reads, came.is_on_disk_elsewhere),
            PlacementRule::Worth => self.place_by_worth(&fetch, holder),
        };
        came.is_copy = rule == PlacementRule::Worth && placement == Placement::Replicate;
        let kept = match placement {
            Placement::Migrate | Placement::Forwarded if holder.node == NodeNumber::THIS_NODE => {
                let (device, fingerprint, hash) = (holder.device, fetch.fingerprint, fetch.wanted.chunk.hash);
                self.effects.push_back(Effect::TellMoved { device, fingerprint, hash });
                Some(ChangeKind::Gained)
            }
            Placement::Migrate | Placement::Forwarded => Some(ChangeKind::MovedFrom(holder)),
            Placement::Replicate => Some(ChangeKind::Gained),
            Placement::Pass => None,
        };
        self.count(Counted::Placed(Some(placement)));
        self.end_fetch(id, Some(came), kept);
    }

    /// Keeps a copy if it earns its place. A chunk that is read for the first time counts as read once in the time for which this
    /// store keeps an unused chunk.
    fn place_by_worth(&mut self, fetch: &Fetch, holder: Holder) -> Placement {
        let gap_ms = self.bring.gaps.read(&fetch.wanted.chunk.hash, self.store.age_ms());
        let every_ms = gap_ms.unwrap_or_else(|| self.store.keeps_ms());
        let every_ms = every_ms / self.store.neighbours().transfer_weight(holder.node);
        let copy = self.store.worth_of_copy(&fetch.fingerprint, every_ms);
        place_by_worth(copy, self.store.least_for(&fetch.fingerprint))
    }

    /// Gives up a chunk that will not come.
    pub(crate) fn did_not_come(&mut self, id: FetchId) {
        if let Some(fetch) = self.bring.fetches.remove(&id) {
            if self.store.is_awaited(id) {
                let why = fetch.failed.unwrap_or(NotDelivered::Unreadable);
                self.lookups.did_not_come(fetch.wanted.chunk.hash, why);
            }
            // Nobody here asked for a chunk that another node offered.
            if !self.store.is_taken_in(id) || self.store.is_leased_soon(id) {
                self.count(Counted::Placed(None));
            }
            self.end_fetch(id, None, None);
        }
    }

    /// Ends a fetch, whether its chunk came or not, and tells the requests that wait for the chunk.
    pub(crate) fn end_fetch(&mut self, id: FetchId, came: Option<Came>, kept: Option<ChangeKind>) {
        let ready = self.store.fetched(id, came, kept);
        self.end_recalls(id);
        self.end_takes(id);
        self.gathers_are_ready(&ready);
        self.bring.has_left_room = true;
    }
}

fn why_not(came: &Arrival) -> Option<NotDelivered> {
    match *came {
        Arrival::Here { .. } => None,
        Arrival::NotHeld => Some(NotDelivered::NotHeld),
        Arrival::Busy { .. } => Some(NotDelivered::Busy),
        Arrival::Damaged => Some(NotDelivered::Damaged),
        Arrival::Failed(failure) => Some(failure.into()),
    }
}

/// The next actor to ask: preferably the actor that was asked for the preceding chunk, so that one order asks for both.
fn next_candidate(candidates: &mut Holders, last: Option<Holder>) -> Option<Holder> {
    let same = candidates.iter().position(|&holder| Some(holder) == last);
    match same {
        Some(at) => Some(candidates.remove(at)),
        None => candidates.pop(),
    }
}

/// Bytes of an order, unless one chunk has more: enough to use a connection, and few enough to stop soon.
const ORDER_BYTES: u64 = 4 << 20;

/// Actors whose speed is remembered.
const MAX_METERED_PEERS: usize = 4_096;

/// A chance that makes a pause as long as it is on average: the few actors of a node need not be kept apart.
const AVERAGE: f64 = 0.5;
