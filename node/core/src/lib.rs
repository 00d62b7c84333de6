//! The decisions of a Larder node, without IO: no thread, socket, file or clock. Time is an argument.
//!
//! A [`Core`] decides for one actor. Its shell tells it each event ([`Core::handle`]) and performs its effects
//! ([`Core::poll_effect`], until none is left). The shell also reports that time has passed, at [`Core::next_deadline`]
//! ([`alarm`]) and a few times a second:
//!
//! ```
//! # use std::time::Duration;
//! # use larder_core::{Core, Effect, Event};
//! # fn perform(_: &Effect) {}
//! fn settle(core: &mut Core, now: Duration, event: Event) {
//!     core.handle(now, event);
//!     while let Some(effect) = core.poll_effect() {
//!         perform(&effect); // The result is an event of its own, at once or later.
//!     }
//! }
//! ```
//!
//! Answers may come in any order, late, twice or never. While something is written into a slot, nobody else gets the slot until
//! the effect is answered. Requests of sessions begin in `requests`. Decisions are in [`store`] (which chunks are kept),
//! `copies` (copies and checksums of bytes), `device` (GPU copies), `bring` (where chunks come from), [`tiers`] (disk and object
//! store) and `announce` (what others hear). The [`directory`] and the [`exchange`] of a node are cores of their own.

pub mod alarm;
mod announce;
mod bring;
pub mod cause;
mod copies;
mod device;
pub mod directory;
pub mod drain;
mod effect;
mod event;
pub mod exchange;
pub mod fair;
mod give_up;
pub mod loading;
mod looked_up;
pub mod lookups;
mod outcome;
pub mod placement;
pub mod prefixes;
pub mod priority;
mod purge;
pub mod reports;
mod requests;
pub mod store;
#[cfg(test)]
mod tests;
pub mod tiers;
mod time;
mod unshown;
pub mod what_if;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

pub use bring::{Offer, Sources};
pub use device::{DeviceLimits, SESSION_WORDS, Tensors};
pub use drain::DrainProgress;
pub use drain::take::TakeReply;
pub use effect::{
    BlockAt, CopyDirection, Counted, DeviceCopyEnd, DeviceOrder, DeviceWork, Effect, FetchOrder, FollowOrder,
    PagesCopy, Promoted, Started, TakeOrder,
};
pub use event::{
    AdminPin, Announced, Arrival, Below, CopyAnswer, CopyNumber, Description, DeviceCopyNumber, DeviceEvent,
    DeviceFailure, DrainOrder, Event, FetchFailure, LayersArrived, NextPage, OrderNumber, OtherNodes,
    PurgeStep, QuestionId, ReadAnswer, ReadId, RecallId, RequestId, SegmentVisit, TakeNumber, Visited,
    WriteNumber, Written,
};
pub use looked_up::LookedUp;
pub use time::Millis;

use larder_protocol::pin::PinStart;
use larder_protocol::session::{Pinned, Request};
use larder_protocol::{Chain, ChainError};

use announce::Untold;
use bring::Bring;
use copies::Copies;
use device::Device;
use drain::Drain;
use drain::take::Takes;
use give_up::Moved;
use lookups::{Lookups, Origin};
use store::ids::{ProcessId, SessionId, TenantId};
use store::policy::PolicyName;
use store::{PurgedKeys, Refused, Store, StoreLimits};
use tiers::described::Described;
use tiers::writes::Writes;
use what_if::{Past, PastLookup};

/// The decisions of one actor.
#[derive(Debug)]
pub struct Core {
    store: Store,
    tenants: Arc<[String]>,
    /// The name of its node; empty if nobody else knows the node.
    node: String,
    bring: Bring,
    writes: Writes,
    described: Described,
    /// Visits to the disk that are repeated, each at its time.
    visit_again: Vec<(Duration, SegmentVisit, u64)>,
    /// Chunks that are being purged on disk.
    purged_on_disk: Vec<Arc<PurgedKeys>>,
    copies: Copies,
    device: Device,
    untold: Untold,
    moved: Moved,
    drain: Option<Drain>,
    takes: Takes,
    lookups: Lookups,
    /// The last lookups, to try other caches.
    past: Past,
    /// The engines' names of requests that are under way, or about to come.
    origins: HashMap<RequestId, Origin>,
    /// The other nodes, which may keep chunks of this one.
    others: OtherNodes,
    effects: VecDeque<Effect>,
    /// The time since the node's start, as of the last event.
    now: Duration,
}

impl Core {
    /// An empty core, with the places from which it may get chunks, the limits of its device, and the names of its tenants.
    pub fn new(limits: StoreLimits, sources: Sources, device: DeviceLimits, tenants: Arc<[String]>) -> Self {
        let mut store = Store::new(limits);
        store.keep_journal();
        Self {
            store,
            tenants,
            node: String::new(),
            bring: Bring::new(sources),
            writes: Writes::default(),
            described: Described::default(),
            visit_again: Vec::new(),
            purged_on_disk: Vec::new(),
            copies: Copies::default(),
            device: Device::new(device),
            untold: Untold::default(),
            moved: Moved::default(),
            drain: None,
            takes: Takes::default(),
            lookups: Lookups::default(),
            past: Past::default(),
            origins: HashMap::new(),
            others: OtherNodes::default(),
            effects: VecDeque::new(),
            now: Duration::ZERO,
        }
    }

    /// Uses no extent before [`Event::ExtentRenewed`] says that its memory is there. Only for an empty core.
    pub fn wait_for_memory(&mut self) {
        self.store.wait_for_memory();
    }

    /// Counts leases, reservations, pins and orders from a number on. Only for an empty core.
    pub fn count_from(&mut self, first: u64) {
        self.store.count_from(first);
    }

    /// Takes an event, and decides its effects.
    pub fn handle(&mut self, now: Duration, event: Event) {
        self.now = self.now.max(now);
        self.store.is_now(self.millis());
        let is_amid_order = matches!(event, Event::FollowedCame { .. });
        match event {
            Event::Asked { request, ask, cause } => {
                let done = self.asked(request, ask, cause);
                self.refuse(request, done);
            }
            Event::Closed(session) => {
                self.forget_waiting_of(session);
                self.copies.reports.forget(session);
                self.end_copies_of(session);
                self.store.close_session(session);
            }
            Event::ProcessGone(process) => self.store.process_gone(process),
            Event::PolicyIs(policy) => self.policy_is(policy),
            Event::LimitsAre(limits) => self.store.change_limits(&limits),
            Event::TenantsAre(tenants) => self.tenants_are(&tenants),
            Event::Purge(step) => self.purge(step),
            Event::Copied { copy, answer } => self.copied(copy, answer),
            Event::Device(event) => self.device_says(event),
            Event::ExtentRenewed(extent) => self.store.extent_renewed(extent),
            Event::ExtentLeft { extent, may_renew } => self.extent_left(extent, may_renew),
            Event::Damaged { by, fingerprint, hashes } => self.doubt(&by, fingerprint, hashes),
            Event::Drain(order) => self.drain(order),
            Event::DrainCancelled => self.drain_cancelled(),
            Event::TakersAre(others) => self.others_are(others),
            Event::TakeAnswered { take, taken } => self.take_answered(take, taken),
            Event::GrantEnded(grant) => self.store.end_grant(grant),
            Event::LayersCame { order, chunk, layers } => self.layers_came(order, chunk, layers),
            Event::FollowedCame { order, chunk, came } => self.followed_came(order, chunk, came),
            Event::FollowEnded(order) => self.follow_ended(order),
            Event::SiblingsFound { question, holders } => self.siblings_found(question, holders),
            Event::HoldersFound { question, holders } => self.holders_found(question, holders),
            Event::StoredFound { question, found } => self.stored_found(question, &found),
            Event::OrderEnded { order, came } => self.order_ended(order, came),
            Event::OrderRefused(order) => self.order_refused(order),
            Event::ReadEnded { read, answer } => self.read_ended(read, answer),
            Event::WriteEnded { number, answer } => self.write_ended(number, answer),
            Event::Described { fingerprint, description } => self.description_is(fingerprint, description),
            Event::SegmentVisited { visit, after, result } => self.segment_visited(visit, after, result),
            Event::LeftDisk(keys) => self.store.left_disk(&keys),
            Event::DiskClosed => self.disk_closed(),
            Event::DiskSilent(is_silent) => self.disk_silent(is_silent),
            Event::Moved { fingerprint, hashes } => self.give_up(fingerprint, &hashes, give_up::TRIES),
            Event::OfferEnded { offer, wanted } => self.store.offer_ended(offer, &wanted),
            Event::Announced(announced) => self.announced(announced),
            Event::PageAnnounced { next } => self.page_announced(next),
            Event::Tick => self.tick(),
            Event::Alarm => {}
        }
        self.use_left_room();
        self.order_busy_again();
        self.go_on_draining();
        self.give_up_again();
        self.visit_again();
        self.offer_evicted();
        self.tell_changes();
        self.stop_abandoned();
        self.follow_again(is_amid_order);
        self.tell_followers();
        self.tell_of_copies();
        self.effects.extend(self.store.take_renewals().into_iter().map(Effect::Renew));
    }

    fn tick(&mut self) {
        self.look_after_copies();
        self.store.tick(self.millis());
        self.answer_late_questions();
        self.finish_late_gathers();
        self.answer_late_followers();
        self.read_again();
        self.write_again();
        self.forget_unused();
    }

    /// The next task for the shell.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        if self.effects.is_empty() {
            self.write_below();
            self.note_changes();
        }
        self.effects.pop_front()
    }

    /// When [`Event::Alarm`] is due.
    pub fn next_deadline(&self) -> Option<Duration> {
        let drain = self.drain.as_ref().and_then(Drain::next_deadline);
        let (bring, untold) = (self.bring.next_deadline(), self.untold.next_deadline());
        let due = [bring, untold, self.moved.next_deadline(), self.next_visit(), drain];
        due.into_iter().flatten().min()
    }

    /// The tenants' names, by number; empty for a tenant that is not served.
    pub fn tenants(&self) -> &[String] {
        &self.tenants
    }

    /// The actor's store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Opens a session of a process that belongs to `tenant`, with a write window of `window_bytes` bytes (0: none).
    pub fn open_session(&mut self, tenant: TenantId, process: ProcessId, window_bytes: u64) -> SessionId {
        self.store.open_session(tenant, process, window_bytes)
    }

    /// Keeps the first chunks of a prompt from eviction for an admin (the pin is the tenant's), or ends such a pin. The shell
    /// performs the effects afterwards.
    ///
    /// # Errors
    /// As [`Store::pin`], and [`Refused::UnknownPin`] for a pin that no longer exists.
    pub fn pin_for_admin(&mut self, pin: AdminPin, now: Millis) -> Result<Pinned, Refused> {
        match pin {
            AdminPin::Start(PinStart { fingerprint, hashes, duration_ms }) => {
                let chain = Chain::from_root(fingerprint.root(), hashes);
                self.store.pin_for_admin(&fingerprint, &chain, duration_ms, now)
            }
            AdminPin::End(pin) => {
                self.store.unpin_for_admin(pin)?;
                Ok(Pinned { pin, chunks: 0, duration_ms: 0 })
            }
        }
    }

    /// Notes that the directory began again, and knows none of this actor's chunks.
    pub fn directory_began_again(&mut self) {
        self.untold.lost();
    }

    /// Names this actor's node: no other node is asked for chunks that an engine of this node writes.
    pub fn is_at(&mut self, node: String) {
        self.node = node;
    }

    /// Notes the engine's own name of a request that is about to come. Lookups, prefetches and leases keep the name.
    pub fn request_is(&mut self, request: RequestId, ask: &Request, origin: Origin) {
        let keeps = matches!(ask, Request::Lookup(_) | Request::Prefetch(_) | Request::Lease(_));
        if keeps && origin != Origin::default() {
            self.origins.insert(request, origin);
        }
    }

    /// The lookups that can be replayed, the oldest first.
    pub fn past(&self) -> Vec<PastLookup> {
        self.past.lookups().cloned().collect()
    }

    /// Bytes of the hashes of lookups that are kept.
    pub fn lookup_bytes(&self) -> u64 {
        self.lookups.bytes() + self.past.bytes()
    }

    /// Sets whether the object store may be read.
    pub fn object_is_open(&mut self, is_open: bool) {
        self.bring.object_is_open = is_open;
    }

    /// Drops all decisions after a fault, and goes on with an empty store. Answers to earlier orders mean nothing any more.
    pub fn begin_anew(&mut self) {
        self.store = self.store.begin_anew();
        self.bring.begin_anew();
        self.writes.begin_anew();
        self.copies.begin_anew();
        self.untold.begin_anew();
        self.moved = Moved::default();
        self.drain_anew();
        self.begin_device_anew();
        self.know_again();
        self.visit_again.clear();
        self.purge_disk_again();
        self.list_disk();
    }

    fn policy_is(&mut self, policy: PolicyName) {
        // The policy in force keeps what it learned.
        if policy != self.store.policy() {
            self.effects.push_back(Effect::Count(Counted::PolicyChanged(policy)));
            self.store.set_policy(policy);
        }
    }

    /// Notes that this node no longer touches an earlier life's bytes in an extent. The extent is in use again if no engine
    /// touches them either. Otherwise it gets new memory once it may, and the engines keep the old memory.
    fn extent_left(&mut self, extent: u32, may_renew: bool) {
        if self.store.is_left_by_all(extent) {
            self.store.extent_returned(extent);
        } else if may_renew && self.store.leave_to_engines(extent) {
            self.effects.push_back(Effect::Renew(extent));
        }
    }

    fn refuse(&mut self, request: RequestId, done: Result<(), Refused>) {
        let Err(refused) = done else { return };
        self.origins.remove(&request);
        // The store counts the names that contradict the chunk's neighbors. Names that contradict the chunk itself are counted
        // here.
        if let Refused::Chain(ChainError::Disagrees { .. }) = refused {
            self.effects.push_back(Effect::Count(Counted::NameRefused));
        }
        self.effects.push_back(Effect::Refused { request, refused });
    }

    fn millis(&self) -> Millis {
        Millis(self.now.as_millis() as u64)
    }
}
