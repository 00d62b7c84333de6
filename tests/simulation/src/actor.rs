//! An actor: a real core, and the simulated shell that performs for it.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use larder_core::alarm::AlarmClock;
use larder_core::directory::Changes;
use larder_core::store::ids::{ProcessId, SessionId};
use larder_core::store::{
    DiskStoreLimits, FetchId, ObjectStoreLimits, PeerStoreLimits, StoreLimits, WritePolicy,
};
use larder_core::{
    Announced, Core, Counted, Effect, Event, OrderNumber, RecallId, RequestId, SegmentVisit, Visited,
};
use larder_node::arena::ExtentMemory;
use larder_node::siblings::Siblings;
use larder_protocol::checksum::BlockKey;
use larder_protocol::table::NodeNumber;

use crate::bytes::{Doing, Reader, Uses, new_extent};
use crate::directory::AskHolders;
use crate::engine::{Answer, Asking, Pending};
use crate::exchange::Destination;
use crate::gpu::Gpu;
use crate::process::{ACTOR_TICK, LOAD_DEADLINE, Own};
use crate::serve::{AskBlocks, Asker, MAILBOX};
use crate::tiers::Tier;
use crate::world::{ActorHappening, At, Settings, World};

/// One actor of a process.
pub(crate) struct Actor {
    pub(crate) core: Core,
    pub(crate) siblings: Siblings,
    /// The number of this store's life; faults may have ended earlier lives.
    pub(crate) life: u64,
    life_began: Duration,
    /// The time at which its store knew everything on its disk; the store of an actor without a disk waits for nothing.
    pub(crate) recovered: Option<Duration>,
    /// By extent; `None` while the extent is between two memories.
    pub(crate) memory: Vec<Option<Arc<ExtentMemory>>>,
    pub(crate) uses: Uses,
    /// The blocks that engines wrote into their windows.
    pub(crate) windows: BTreeMap<SessionId, BTreeMap<u64, (BlockKey, u64)>>,
    /// The places that engines have overwritten since, when they no longer had to keep the content.
    pub(crate) scribbled: BTreeMap<SessionId, BTreeSet<u64>>,
    pub(crate) requests: BTreeMap<RequestId, Pending>,
    /// Requests of sessions that ended: each may still be answered, once.
    pub(crate) over: BTreeSet<RequestId>,
    last_request: u64,
    /// Peers and siblings that wait for blocks, and the chunks from disk that they wait for.
    pub(crate) asks: BTreeMap<u64, AskBlocks>,
    pub(crate) recalls: BTreeMap<RecallId, (u64, usize)>,
    /// Peers that drain and wait for an answer.
    pub(crate) takes: crate::drain::Taking,
    /// Orders that siblings carry out.
    pub(crate) from_siblings: BTreeMap<(u64, OrderNumber), Vec<Destination>>,
    pub(crate) disk: Option<Tier>,
    pub(crate) gpu: Gpu,
    alarm: AlarmClock,
    /// The time of the alarm that was planned last, until it rings.
    pub(crate) planned_alarm: Option<Duration>,
    /// Events that followers got.
    told: u64,
}

impl Actor {
    pub(crate) fn new(core: Core, siblings: Siblings) -> Self {
        Self {
            core,
            siblings,
            life: 0,
            life_began: Duration::ZERO,
            recovered: None,
            memory: vec![None; EXTENTS as usize],
            uses: Uses::default(),
            windows: BTreeMap::new(),
            scribbled: BTreeMap::new(),
            requests: BTreeMap::new(),
            over: BTreeSet::new(),
            last_request: 0,
            asks: BTreeMap::new(),
            recalls: BTreeMap::new(),
            takes: BTreeMap::new(),
            from_siblings: BTreeMap::new(),
            disk: None,
            gpu: Gpu::default(),
            alarm: AlarmClock::default(),
            planned_alarm: None,
            told: 0,
        }
    }
}

/// The limits of the stores in the simulation.
pub(crate) fn limits(settings: &Settings, has_disk: bool) -> StoreLimits {
    let most = u64::from(EXTENTS) * EXTENT_BYTES;
    StoreLimits {
        extents: EXTENTS,
        extent_bytes: EXTENT_BYTES,
        capacity_chunks: settings.capacity_chunks,
        high_watermark_bytes: most * 6 / 10,
        low_watermark_bytes: most / 2,
        policy: settings.policy,
        recompute_doubles_at: None,
        age_speed: NonZeroU32::MIN,
        trust_engines: false,
        tenant_bytes: vec![most * 8 / 10, most * 8 / 10],
        max_leased_blocks: 48,
        max_reserved_bytes: 64 << 10,
        max_pinned_bytes: 48 << 10,
        reservation_ttl_ms: 400,
        max_pin_ms: 3_000,
        remembered_evictions: 256,
        peers: Some(PeerStoreLimits {
            passing_bytes: 32 << 10,
            max_granted_chunks: 12,
            placement: settings.placement,
        }),
        disk: has_disk.then_some(DiskStoreLimits {
            write: settings.write,
            write_after_uses: 2,
            max_waiting_bytes: 64 << 10,
            max_reading_bytes: 64 << 10,
        }),
        object: settings.has_objects.then_some(ObjectStoreLimits {
            write: Some(WritePolicy::WriteThroughSelective),
            write_after_uses: 2,
            max_waiting_bytes: 64 << 10,
            max_reading_bytes: 64 << 10,
        }),
    }
}

impl World {
    pub(crate) fn actor_happens(&mut self, at: At, what: ActorHappening) {
        if self.actor(at).is_none() {
            return;
        }
        match what {
            ActorHappening::Tick => {
                self.plan_actor(at, ACTOR_TICK, ActorHappening::Tick);
                self.return_extents(at);
                self.tell(at, Event::Tick);
            }
            ActorHappening::Alarm(due) => {
                if self.actor(at).is_some_and(|actor| actor.alarm.rings(due)) {
                    self.alarm_rings(at, due);
                    self.tell(at, Event::Alarm);
                }
            }
            ActorHappening::InLife(life, event) => self.tell_in_life(at, life, event),
            ActorHappening::Copied(life, copying) => self.copied(at, life, copying),
            ActorHappening::Asked(asking) => self.asked(at, asking),
            ActorHappening::Closed(session) => self.session_closed(at, session),
            ActorHappening::Disk => self.disk_works(at),
            ActorHappening::Object(job) => self.object_works(at, job),
            ActorHappening::Device(step) => self.device_works(at, step),
            ActorHappening::Renewed(extent, memory) => {
                let Some(actor) = self.actor(at) else { return };
                actor.memory[extent as usize] = memory;
                self.tell(at, Event::ExtentRenewed(extent));
            }
            ActorHappening::Grant(ask) => self.grant_all(at, ask),
            ActorHappening::PeerFollows { number, fingerprint, hashes, pools, attempt, patience_ms } => {
                let now = self.local(at.life.host);
                let Some(actor) = self.actor(at) else { return };
                let (chunks, terms) = ((&*hashes, &*pools), (attempt, patience_ms));
                let follow = actor.core.follow_for_peer(now, &fingerprint, chunks, terms);
                // The exchange learns of the follow before there are news.
                self.peer_follows(at.life, number, follow);
                self.tell(at, Event::Alarm);
            }
            ActorHappening::TakeIn(offered) => self.take_in(at, offered),
            ActorHappening::Imported(import) => self.imported(at, import),
            ActorHappening::GrantEnded(grant) => self.tell(at, Event::GrantEnded(grant)),
            ActorHappening::Take(from, call, take) => self.take(at, from, call, &take),
            ActorHappening::PurgeEnds(end) => self.purge_ends(at, end),
            ActorHappening::SiblingLate(life, order) => {
                let Some(actor) = self.actor(at) else { return };
                if actor.from_siblings.remove(&(life, order)).is_some() {
                    self.tell_in_life(at, life, Event::OrderEnded { order, came: Vec::new() });
                }
            }
        }
    }

    /// A request of an engine arrives.
    fn asked(&mut self, at: At, Asking { pending, session, ask }: Asking) {
        let Some(actor) = self.actor(at) else { return };
        if pending.life != actor.life {
            return;
        }
        actor.last_request += 1;
        let request = RequestId { session, number: actor.last_request };
        actor.requests.insert(request, pending);
        if let larder_protocol::session::Request::Release(lease) = ask {
            // An engine that died after it sent this release had ended its reading before.
            let ghost = crate::bytes::ghost(session, lease);
            actor.uses.readings.retain(|reader, _| match *reader {
                Reader::Lease(of, number) => (of, number) != (session, lease),
                Reader::Process(_, number) => number != ghost,
                Reader::Grant(..) => true,
            });
        }
        if let larder_protocol::session::Request::Reserve(ask) = &ask {
            self.reserved.extend(ask.chain.hashes.iter().map(|&hash| (hash, self.now)));
        }
        self.coverage.note(crate::coverage::request(&ask));
        let cause = larder_core::cause::Cause::default();
        self.tell(at, Event::Asked { request, ask, cause });
    }

    fn session_closed(&mut self, at: At, session: SessionId) {
        let Some(actor) = self.actor(at) else { return };
        actor.windows.remove(&session);
        actor.scribbled.remove(&session);
        let (over, open) = std::mem::take(&mut actor.requests)
            .into_iter()
            .partition(|(_, pending)| pending.session == session);
        let over: BTreeMap<RequestId, Pending> = over;
        actor.over.extend(over.into_keys());
        actor.requests = open;
        self.tell(at, Event::Closed(session));
        self.device_closes(at, session);
    }

    /// The process of an engine is gone.
    pub(crate) fn engine_is_gone(&mut self, at: At, process: ProcessId) {
        let Some(actor) = self.actor(at) else { return };
        actor.uses.readings.retain(|reader, _| !matches!(reader, Reader::Process(of, _) if *of == process));
        self.tell(at, Event::ProcessGone(process));
    }

    /// Tells a core an event a moment later, if its store is still the same.
    pub(crate) fn tell_soon(&mut self, at: At, life: u64, event: Event) {
        self.plan_actor(at, MAILBOX, ActorHappening::InLife(life, event));
    }

    /// As [`Self::tell_soon`], for any store that the actor has by then.
    pub(crate) fn tell_soon_in_any_life(&mut self, at: At, event: Event) {
        let Some(actor) = self.actor(at) else { return };
        let life = actor.life;
        self.tell_soon(at, life, event);
    }

    /// Tells a core the result of an effect. Results for an earlier store are dropped.
    pub(crate) fn tell_in_life(&mut self, at: At, life: u64, event: Event) {
        let Some(actor) = self.actor(at) else { return };
        if let Some(doing) = ended(&event) {
            actor.uses.end(life, doing);
        }
        if actor.life == life {
            self.tell(at, event);
        }
    }

    /// Tells a core an event, and performs its effects, until there are no more.
    pub(crate) fn tell(&mut self, at: At, event: Event) {
        self.tell_at_once(at, event);
        while let Some(actor) = self.actor(at) {
            let Some(effect) = actor.core.poll_effect() else { break };
            let name = crate::coverage::effect(&effect);
            self.coverage.note(name);
            self.note(name, &[at.life.host as u64, at.actor.into()]);
            self.perform(at, effect);
            if self.violation.is_some() {
                return;
            }
        }
        self.check_store(at);
        let now = self.local(at.life.host);
        let Some(actor) = self.actor(at) else { return };
        if let Some(due) = actor.alarm.set(actor.core.next_deadline()) {
            actor.planned_alarm = Some(due);
            let after = due.saturating_sub(now) + Duration::from_micros(1);
            self.plan_actor(at, after, ActorHappening::Alarm(due));
        }
    }

    /// Tells a core the result of an effect that is being performed.
    pub(crate) fn tell_at_once(&mut self, at: At, event: Event) {
        let name = crate::coverage::event(&event);
        self.coverage.note(name);
        self.note(name, &[at.life.host as u64, at.actor.into()]);
        let (now, true_now, is_open) = (self.local(at.life.host), self.now, !self.objects.is_closed);
        let Some(actor) = self.actor(at) else { return };
        if let Event::SegmentVisited {
            visit: SegmentVisit::List,
            result: Visited::Done { next: None, .. },
            ..
        } = event
        {
            actor.recovered = Some(true_now);
        }
        if let Some(doing) = ended(&event) {
            actor.uses.end(actor.life, doing);
        }
        actor.core.object_is_open(is_open);
        actor.core.handle(now, event);
    }

    fn perform(&mut self, at: At, effect: Effect) {
        match effect {
            Effect::Answer { request, response, new_extents } => {
                self.reply(at, request, Answer::Response(response, new_extents));
            }
            Effect::Done { request } => self.reply(at, request, Answer::Done),
            Effect::Found { request, found, .. } => self.reply(at, request, Answer::Found(found)),
            Effect::Prefetching { request, started, .. } => {
                self.reply(at, request, Answer::Prefetching(started));
            }
            Effect::Leased { request, leased } => self.reply(at, request, Answer::Leased(leased)),
            Effect::Refused { request, refused } => self.reply(at, request, Answer::Refused(refused)),
            Effect::Copy { copy, session, moves } => self.copy(at, copy, session, moves),
            Effect::DeviceCopy(order) => self.device_copy(at, order),
            Effect::CancelDeviceCopy(ticket) => self.cancel_device_copy(at, ticket),
            Effect::Renew(extent) => self.renew(at, extent),
            Effect::Follow(order) => {
                let number = order.order;
                match self.destinations(at, number, &order.chunks, true) {
                    Some((life, chunks)) => {
                        let ordered = crate::follow::Ordered { at, life, order, chunks };
                        self.plan_local(at.life, MAILBOX, Own::Follow(ordered));
                    }
                    None => self.tell_at_once(at, Event::FollowEnded(number)),
                }
            }
            Effect::TellFollower(told) => {
                self.plan_local(at.life, Duration::ZERO, Own::FollowNews(at.actor, told))
            }
            Effect::FindSiblings { question, fingerprint, chunks } => {
                let Some(actor) = self.actor(at) else { return };
                let holders = chunks.iter().map(|chunk| actor.siblings.holders(&fingerprint, &chunk.hash));
                let holders = holders.collect();
                self.tell_at_once(at, Event::SiblingsFound { question, holders });
            }
            Effect::FindHolders { question, fingerprint, chunks, .. } => {
                let life = self.actor(at).map_or(0, |actor| actor.life);
                let ask = AskHolders { actor: at.actor, life, question, fingerprint, chunks };
                self.plan_local(at.life, MAILBOX, Own::AskHolders(ask));
            }
            Effect::FindStored { question, fingerprint, chunks, blocks } => {
                self.find_stored(at, question, fingerprint, &chunks, blocks);
            }
            Effect::Fetch(order) => self.fetch(at, order),
            Effect::Hurry(order) => self.plan_local(at.life, MAILBOX, Own::Hurry(at.actor, order)),
            Effect::CancelOrder(order) => self.plan_local(at.life, MAILBOX, Own::Cancel(at.actor, order)),
            effect => self.perform_below(at, effect),
        }
    }

    /// Performs effects on tiers, the directory and other actors.
    fn perform_below(&mut self, at: At, effect: Effect) {
        match effect {
            Effect::Read { read, tier, chunk } => self.read(at, read, tier, chunk),
            Effect::Write { number, write } => self.write(at, number, write),
            Effect::VisitSegment { visit, after } => self.visit_segment(at, visit, after),
            Effect::Touch(keys) => self.touch(at, keys),
            Effect::Remove(key) => self.remove(at, key),
            Effect::Describe { fingerprint, tenant_name, spec } => {
                self.describe(at, fingerprint, tenant_name, spec);
            }
            Effect::ForgetDescriptions(unused) => self.forget_descriptions(at, unused),
            Effect::TellSiblings(changes) => {
                if let Some(actor) = self.actor(at) {
                    actor.siblings.note(&changes);
                }
            }
            Effect::Changed { sequence, told, changes, to_directory } => {
                self.changed(at, sequence, told, changes, to_directory);
            }
            Effect::AnnouncePage { page, next } => {
                self.announce(at, Changes::Page(page), Event::PageAnnounced { next });
            }
            Effect::Stale { holder, fingerprint, chunks } => {
                self.plan_local(at.life, MAILBOX, Own::Stale(holder, fingerprint, chunks));
            }
            Effect::TellDamaged { device, fingerprint, hashes } => {
                let by = larder_core::reports::Reporter::Sibling(at.actor);
                let to = At { actor: device, ..at };
                self.tell_soon_in_any_life(to, Event::Damaged { by, fingerprint, hashes });
            }
            Effect::TellMoved { device, fingerprint, hash } => {
                let event = Event::Moved { fingerprint, hashes: vec![hash] };
                self.tell_soon_in_any_life(At { actor: device, ..at }, event);
            }
            Effect::Granted { recall, granted } => self.recalled(at, recall, granted),
            Effect::AskToTake(order) => {
                let life = self.actor(at).map_or(0, |actor| actor.life);
                self.plan_local(at.life, MAILBOX, Own::AskToTake(at.actor, life, order));
            }
            Effect::Taken { take, taken } => self.taken(at, take, taken),
            Effect::Condemned { keys, .. } => self.condemned(at, &keys),
            Effect::Offer(offered) => {
                let life = self.actor(at).map_or(0, |actor| actor.life);
                self.plan_local(at.life, MAILBOX, Own::Offer(at.actor, life, offered));
            }
            Effect::Count(Counted::Placed(Some(placement))) => {
                self.coverage.note(crate::coverage::placed(&placement));
            }
            _ => {}
        }
    }

    /// The places for ordered chunks: nobody else uses these places.
    fn destinations(
        &mut self,
        at: At,
        order: OrderNumber,
        chunks: &[FetchId],
        is_followed: bool,
    ) -> Option<(u64, Vec<Destination>)> {
        let actor = self.actor(at)?;
        let life = actor.life;
        let wanted = chunks.iter().map(|&id| Some(actor.core.wanted(id)?.1.clone()));
        let wanted = wanted.collect::<Option<Vec<_>>>()?;
        for (chunk, wanted) in wanted.iter().enumerate() {
            // Followed chunks come one by one, other chunks together.
            let doing = if is_followed { Doing::Followed(order, chunk) } else { Doing::Order(order) };
            self.begin(at, doing, &wanted.blocks, true);
        }
        let destination = |wanted: larder_core::store::Wanted| {
            let memory = self.memory_of(at, &wanted.blocks)?;
            Some(Destination { wanted, memory })
        };
        Some((life, wanted.into_iter().map(destination).collect::<Option<Vec<_>>>()?))
    }

    /// Asks another actor for chunks.
    fn fetch(&mut self, at: At, order: larder_core::FetchOrder) {
        let (number, holder) = (order.order, order.holder);
        let Some((life, chunks)) = self.destinations(at, number, &order.chunks, false) else {
            return self.tell_at_once(at, Event::OrderRefused(number));
        };
        if self.chance(self.hosts[at.life.host].busy_disk / 4) {
            return self.tell_at_once(at, Event::OrderRefused(number));
        }
        if holder.node != NodeNumber::THIS_NODE {
            let ordered = crate::exchange::Ordered { at, life, order, chunks };
            return self.plan_local(at.life, MAILBOX, Own::Order(ordered));
        }
        let hashes = chunks.iter().map(|chunk| chunk.wanted.chunk.hash).collect();
        let block_bytes = chunks[0].wanted.blocks.iter().map(|block| block.bytes).collect();
        let asker = Asker::Sibling(at, life, number);
        let (fingerprint, class) = (order.fingerprint, order.class);
        let ask = AskBlocks { asker, fingerprint, hashes, block_bytes, class, grants: Vec::new() };
        if let Some(actor) = self.actor(at) {
            actor.from_siblings.insert((life, number), chunks);
        }
        self.plan_actor(At { actor: holder.device, ..at }, MAILBOX, ActorHappening::Grant(ask));
        self.plan_actor(at, LOAD_DEADLINE, ActorHappening::SiblingLate(life, number));
    }

    fn changed(
        &mut self,
        at: At,
        sequence: u64,
        told: usize,
        changes: Vec<larder_core::store::Change>,
        to_directory: bool,
    ) {
        let Some(actor) = self.actor(at) else { return };
        let expected = actor.told;
        actor.told = sequence + (changes.len() - told) as u64;
        if sequence != expected {
            self.violate(|| format!("{at:?}: followers of events are told {sequence} after {expected}"));
        }
        if to_directory {
            self.announce(at, Changes::Since(changes), Event::Announced(Announced::Taken));
        }
    }

    /// Tells the directory some changes; it may be too busy.
    fn announce(&mut self, at: At, changes: Changes, taken: Event) {
        if self.chance(self.hosts[at.life.host].busy_disk / 2) {
            let announced = if self.random.bool() { Announced::Lost } else { Announced::Full(changes) };
            return self.tell_at_once(at, Event::Announced(announced));
        }
        self.plan_local(at.life, MAILBOX, Own::Changed(at.actor, changes));
        self.tell_at_once(at, taken);
    }

    /// Gives an extent new memory.
    fn renew(&mut self, at: At, extent: u32) {
        let after = self.some_us(50, 2_000);
        let Some(actor) = self.actor(at) else { return };
        let is_used = actor.uses.uses(extent);
        actor.uses.renew(extent);
        let memory = actor.memory[extent as usize].clone();
        if let Some(engine) = memory.and_then(|memory| self.engine_that_maps(at, extent, &memory)) {
            self.violate(|| {
                format!("{at:?}: extent {extent} gets new memory while engine {engine} maps the old one")
            });
        }
        let Some(actor) = self.actor(at) else { return };
        actor.memory[extent as usize] = None;
        if is_used {
            self.violate(|| format!("{at:?}: extent {extent} gets new memory while an effect uses it"));
        }
        self.plan_actor(at, after, ActorHappening::Renewed(extent, new_extent()));
    }

    /// Gives extents that nobody can touch any more back to the store.
    fn return_extents(&mut self, at: At) {
        let now = self.local(at.life.host);
        let Some(actor) = self.actor(at) else { return };
        let may_renew = now >= actor.life_began + UNMAP_TIME;
        for extent in actor.core.store().secluded() {
            let Some(actor) = self.actor(at) else { return };
            let is_unshared =
                actor.memory[extent as usize].as_ref().is_some_and(|memory| Arc::strong_count(memory) == 1);
            if is_unshared {
                self.tell_at_once(at, Event::ExtentLeft { extent, may_renew });
            }
        }
    }

    /// A fault of Larder ends an actor's store.
    pub(crate) fn actor_panics(&mut self, at: At) {
        let now = self.local(at.life.host);
        let Some(actor) = self.actor(at) else { return };
        let before = actor.life;
        actor.life += 1;
        (actor.life_began, actor.recovered) = (now, None);
        actor.windows.clear();
        actor.requests.clear();
        actor.recalls.clear();
        actor.takes.clear();
        actor.core.begin_anew();
        actor.siblings.forget_all();
        let waiting = std::mem::take(&mut actor.asks);
        for (_, ask) in waiting {
            if matches!(ask.asker, Asker::Sibling(..)) {
                // Its answer is dropped, and with it the grants.
                for given in ask.grants.iter().flatten() {
                    if let (crate::serve::Given::Held { grant, .. }, Some(actor)) = (given, self.actor(at)) {
                        actor.uses.readings.remove(&Reader::Grant(before, *grant));
                    }
                }
                continue;
            }
            let grants =
                ask.grants.into_iter().map(|given| Some(given.unwrap_or(crate::serve::Given::NotHeld)));
            let ask = AskBlocks { grants: grants.collect(), ..ask };
            if matches!(ask.asker, Asker::Peer(..)) {
                self.plan_local(at.life, MAILBOX, Own::Granted(ask));
            }
        }
        self.cut_followees(at);
        self.note("panic", &[at.life.host as u64, at.actor.into()]);
        for engine in 0..self.engines.len() {
            if self.engines[engine].is_at(at) {
                self.session_is_gone(engine);
            }
        }
        self.return_extents(at);
        self.tell(at, Event::Alarm);
    }
}

/// The effect that an event ends.
fn ended(event: &Event) -> Option<Doing> {
    match *event {
        Event::OrderEnded { order, .. } | Event::OrderRefused(order) => Some(Doing::Order(order)),
        Event::FollowedCame { order, chunk, .. } => Some(Doing::Followed(order, chunk)),
        Event::ReadEnded { read, .. } => Some(Doing::Read(read)),
        Event::WriteEnded { number, .. } => Some(Doing::Write(number)),
        Event::Copied { copy, .. } => Some(Doing::Copy(copy)),
        _ => None,
    }
}

pub(crate) const EXTENTS: u32 = 10;
pub(crate) const EXTENT_BYTES: u64 = 16 << 10;

/// Time in which engines must unmap the memory that they were shown.
const UNMAP_TIME: Duration = Duration::from_secs(1);
