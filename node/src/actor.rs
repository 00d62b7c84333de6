//! The GPU actor: a mailbox around one [`Core`], on an OS thread of its own.
//!
//! The core decides. The actor tells it each event and performs its effects (`perform`): it copies (`copies`), reads and
//! writes tiers (`below`, `disk`), has its GPU copy (`device_lane`), and asks and answers other actors (`peers`, `handoff`).
//! `answer` writes the replies to sessions, `seen` shows the actor to people, `lives` handles panics.

mod answer;
mod below;
mod copies;
mod device_lane;
mod disk;
mod handoff;
mod lives;
mod messages;
mod peers;
mod perform;
mod seen;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use futures_util::stream::poll_fn;
use larder_core::store::StoreLimits;
use larder_core::store::ids::{ProcessId, SessionId, TenantId};
use larder_core::{Core, DeviceLimits, Event, Sources};
use larder_device::thread::DeviceReport;
use larder_net::audit::Audit;
use larder_net::blocking::aside;
use larder_protocol::session::{Found, Lookup, Pinned, Request};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;

use self::answer::PendingRequest;
pub use self::below::ObjectParts;
use self::copies::RenewalFailures;
pub use self::disk::DiskParts;
use self::handoff::PeerFollowers;
use self::lives::Lives;
pub(crate) use self::messages::HANGS_AFTER;
pub use self::messages::{Answer, Ask, Client, Errand, ReplyTo, ask, tell_each};
pub use self::peers::{Fetcher, FollowStarter, Peers};
use self::perform::Pending;
pub use self::seen::{ActorReport, Holdings, SessionSeen};

use crate::arena::{Arena, Renewal};
use crate::clock::Clock;
use crate::copy::CopyPool;
use crate::device_lane::{DeviceLane, DevicePlace};
use crate::events::Feed;
use crate::exchange::{PinForAdmin, Tell};
use crate::filling::Arrival;
use crate::lookup_log::Recorder;
use crate::metrics::ActorMetrics;
use crate::siblings::{SIBLING_DEADLINE, Siblings};
use crate::spans::{cause_of, describe_request};
use crate::window::Window;

/// The actor of one GPU, or of a node without GPUs.
pub struct GpuActor {
    pub(crate) core: Core,
    hands: Hands,
    /// The lane to the actor's device.
    device_lane: DeviceLane,
    /// Inputs from other threads, beside messages. Taken when the actor starts.
    inputs: Option<Inputs>,
    /// The engines behind the open sessions.
    engines: HashMap<SessionId, Engine>,
    /// Extents that wait for new memory and for the copy pool.
    renewals: Vec<Renewal>,
    /// Whether the copy pool makes memory for one of them.
    is_renewing: bool,
    renewal_failures: RenewalFailures,
    pending: Pending,
    /// Peers' leases report their end here.
    ended_grants: UnboundedSender<u64>,
    /// Peers that follow chunks of writers here.
    followers: PeerFollowers,
    /// The actor's present life.
    lives: Lives,
}

/// The hands of an actor: the parts that perform its core's effects.
pub struct Hands {
    /// The memory of the actor's chunks.
    pub arena: Arena,
    /// The copy threads.
    pub lane: Arc<CopyPool>,
    /// The counters.
    pub metrics: ActorMetrics,
    /// The clock.
    pub clock: Clock,
    /// The audit log of pins.
    pub audit: Audit,
    /// The lookup log.
    pub recorder: Option<Recorder>,
    /// Other actors of this node, if there are any.
    pub siblings: Option<Siblings>,
    /// Other nodes, if there are any.
    pub peers: Option<Peers>,
    /// The feed of events.
    pub feed: Feed,
    /// The disk below the store, if there is one.
    pub disk: Option<DiskParts>,
    /// Why the disk was not opened.
    pub disk_trouble: Option<String>,
    /// The object store, if there is one.
    pub objects: Option<ObjectParts>,
}

/// Inputs of an actor from other threads, beside messages.
struct Inputs {
    /// Ended leases of peers.
    ended_grants: UnboundedReceiver<u64>,
    /// Memory of extents, taken from the system at the start.
    arriving: mpsc::Receiver<Arrival>,
    /// The device's reports.
    device: UnboundedReceiver<DeviceReport>,
}

/// The engine behind an open session.
#[derive(Debug, Default)]
struct Engine {
    client: Client,
    /// The session's write window, if it has one.
    window: Option<Arc<Window>>,
    /// The session's last request, and when it came.
    last: Option<(&'static str, Duration)>,
}

/// The parts of an actor.
pub struct Parts {
    /// Limits of the store.
    pub store: StoreLimits,
    /// The device, and limits of its copies.
    pub device: (DevicePlace, DeviceLimits),
    /// The tenants' names, by number.
    pub tenants: Arc<[String]>,
    /// Brings the memory of every extent.
    pub arriving: mpsc::Receiver<Arrival>,
    /// Tells when a fault ended all sessions.
    pub lives: watch::Sender<u64>,
    /// The actor's hands.
    pub hands: Hands,
}

impl GpuActor {
    /// An actor over an empty store.
    #[must_use]
    pub fn new(Parts { store, device, tenants, arriving, lives, hands }: Parts) -> Self {
        let (place, device_limits) = device;
        let Hands { siblings, peers, disk, objects, .. } = &hands;
        let sources = Sources {
            siblings: siblings.as_ref().map(|_| SIBLING_DEADLINE),
            peers: peers.as_ref().map(|peers| peers.deadline),
            disk: disk.as_ref().map(|disk| disk.deadline),
            object: objects.as_ref().map(|objects| objects.deadline),
            known_chunks: objects.as_ref().map_or(0, |objects| objects.known_chunks),
        };
        let (ended_grants, ends) = mpsc::unbounded_channel();
        let (device_lane, reports) = DeviceLane::new(place, device_limits.orders);
        let mut core = Core::new(store, sources, device_limits, tenants);
        // No extent is in use before its memory is there.
        core.wait_for_memory();
        if let Some(peers) = peers {
            core.is_at(peers.node.clone());
        }
        Self {
            core,
            hands,
            device_lane,
            inputs: Some(Inputs { ended_grants: ends, arriving, device: reports }),
            engines: HashMap::new(),
            renewals: Vec::new(),
            is_renewing: false,
            renewal_failures: RenewalFailures::default(),
            pending: Pending::default(),
            ended_grants,
            followers: PeerFollowers::default(),
            lives: Lives::new(lives),
        }
    }

    /// Opens a session of a process that belongs to the tenant, with a write window if it has one.
    pub(crate) fn open_session(
        &mut self,
        tenant: TenantId,
        process: ProcessId,
        window: Option<Arc<Window>>,
        client: Client,
    ) -> SessionId {
        let bytes = window.as_ref().map_or(0, |window| window.bytes());
        let session = self.core.open_session(tenant, process, bytes);
        self.engines.insert(session, Engine { client, window, last: None });
        session
    }

    /// Closes a session that ended.
    pub(crate) fn close_session(&mut self, session: SessionId, ctx: &mut Context<Self>) {
        if let Some(Engine { window: Some(window), .. }) = self.engines.remove(&session) {
            // The kernel takes milliseconds to free the window's memory. Other sessions go on meanwhile.
            aside(move || drop(window));
        }
        self.pending.forget(session, self.hands.clock.elapsed());
        self.decide(Event::Closed(session), ctx);
        self.device_lane.close_session(session);
    }

    /// Counts a lookup. A whole lookup also goes to the lookup log, if there is one.
    fn looked_up(&mut self, session: SessionId, ask: &Lookup, found: &Found) {
        let Some(lookup) = self.core.looked_up(session, ask, found) else { return };
        self.hands.metrics.looked_up(&lookup);
        if let Some(recorder) = self.hands.recorder.as_ref().filter(|_| lookup.is_whole()) {
            let hashes = &ask.chain.hashes;
            recorder.record(lookup.fingerprint, lookup.chunk_tokens, lookup.prompt_tokens, hashes, lookup.at);
        }
    }

    /// Does the periodic work.
    fn tick(&mut self, ctx: &mut Context<Self>) {
        self.return_extents(ctx);
        self.look_at_drive(ctx);
        self.decide(Event::Tick, ctx);
        self.device_lane.sweep();
    }

    /// Takes a request. The answer follows now or later.
    fn ask(&mut self, ask: Ask, ctx: &mut Context<Self>) {
        let started = self.hands.clock.elapsed();
        let Ask { session, request, descriptors, reply_to, trace, origin } = ask;
        if trace.is_recorded() {
            describe_request(&trace, &request, |namespace| self.core.store().fingerprint(namespace));
        }
        let asked = PendingRequest { request: request.name(), reply_to, trace, started };
        if let Some(engine) = self.engines.get_mut(&session) {
            engine.last = Some((asked.request, started));
        }
        #[cfg(test)]
        lives::planted();
        if let Request::RegisterTensors(ask) = request {
            if let Err(answer) = self.register_tensors(session, ask, descriptors, asked.clone(), ctx) {
                self.reply(asked, answer);
            }
            return self.settle(ctx);
        }
        let (number, cause) = (self.pending.expect(session, asked.clone()), cause_of(&asked.trace));
        self.core.request_is(number, &request, origin);
        self.decide(Event::Asked { request: number, ask: request, cause }, ctx);
    }
}

impl Actor for GpuActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MESSAGES);
        if let Some(Inputs { mut ended_grants, mut arriving, mut device }) = self.inputs.take() {
            self.hear(ctx, poll_fn(move |cx| ended_grants.poll_recv(cx)), |actor, grant| {
                actor.followers.remove(&grant);
                Event::GrantEnded(grant)
            });
            self.hear(ctx, poll_fn(move |cx| arriving.poll_recv(cx)), |actor, (extent, memory)| {
                actor.occupied(extent, memory)
            });
            self.hear(ctx, poll_fn(move |cx| device.poll_recv(cx)), |actor, report| {
                Event::Device(actor.device_lane.event_of(report))
            });
        }
        ctx.run_interval(TICK, |actor, ctx| _ = actor.guard(ctx, Self::tick));
        self.guard(ctx, Self::start_disk);
    }
}

impl Handler<Ask> for GpuActor {
    type Result = ();

    fn handle(&mut self, ask: Ask, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.ask(ask, ctx));
    }
}

impl Handler<Tell> for GpuActor {
    type Result = ();

    fn handle(&mut self, Tell(event): Tell, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.decide(event, ctx));
    }
}

impl Handler<PinForAdmin> for GpuActor {
    type Result = Result<Pinned, String>;

    fn handle(&mut self, PinForAdmin(pin): PinForAdmin, ctx: &mut Self::Context) -> Self::Result {
        let done = self.guard(ctx, |actor, ctx| {
            let done = actor.core.pin_for_admin(pin, actor.hands.clock.now());
            actor.settle(ctx);
            done
        });
        let done = done.ok_or_else(|| "the actor begins anew".to_owned())?;
        done.map_err(|refused| refused.to_string())
    }
}

/// The reply to a request that gets none.
const NO_ANSWER: Answer = Answer { response: None, descriptors: Vec::new() };

/// Messages that wait for the actor; senders wait for a place.
const MAILBOX_MESSAGES: usize = 1_024;

/// Interval of the periodic work, such as checks of deadlines.
const TICK: Duration = Duration::from_millis(50);
