//! The GPU actor: a mailbox around one [`Core`], on an OS thread of its own.
//!
//! The core decides. The actor tells it each event, and has its hands ([`crate::hands`]) perform the core's effects (`perform`,
//! `peers` for those that concern other actors, `device_lane` for the GPU). `answer` writes the replies to sessions, `seen` shows
//! the actor to people, `lives` handles panics.

mod answer;
mod device_lane;
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
use larder_net::blocking::aside;
use larder_protocol::session::{Found, Lookup, Pinned, Request};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::watch;

use self::answer::PendingRequest;
use self::lives::Lives;
pub use self::messages::{Answer, Ask, Client, Errand, ReplyTo, ask};
use self::perform::Pending;
pub use self::seen::{ActorReport, Holdings, SessionSeen};

use crate::clock::now_us;
use crate::device_lane::{DeviceLane, DevicePlace};
use crate::disk::namespaces::KnownNamespace;
use crate::disk::{Gone, Why};
use crate::exchange::PinForAdmin;
use crate::filling::Arrival;
use crate::hands::Hands;
use crate::siblings::SIBLING_DEADLINE;
use crate::spans::{cause_of, describe_request};
use crate::tell::Tell;
use crate::window::Window;

/// The actor of one GPU, or of a node without GPUs.
pub struct GpuActor {
    pub(crate) core: Core,
    pub(crate) hands: Hands,
    /// The lane to the actor's device.
    device_lane: DeviceLane,
    /// Inputs from other threads, beside messages. Taken when the actor starts.
    inputs: Option<Inputs>,
    /// The engines behind the open sessions.
    engines: HashMap<SessionId, Engine>,
    pending: Pending,
    /// The actor's present life.
    lives: Lives,
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
    /// Brings the ends of peers' leases.
    pub ended_grants: UnboundedReceiver<u64>,
    /// Tells when a fault ended all sessions.
    pub lives: watch::Sender<u64>,
    /// The actor's hands.
    pub hands: Hands,
}

impl GpuActor {
    /// An actor over an empty store.
    pub fn new(Parts { store, device, tenants, arriving, ended_grants, lives, hands }: Parts) -> Self {
        let (place, device_limits) = device;
        let Hands { siblings, peers, disk, objects, .. } = &hands;
        let sources = Sources {
            siblings: siblings.as_ref().map(|_| SIBLING_DEADLINE),
            peers: peers.as_ref().map(|peers| peers.deadline),
            disk: disk.as_ref().map(|disk| disk.deadline),
            object: objects.as_ref().map(|objects| objects.deadline),
            known_chunks: objects.as_ref().map_or(0, |objects| objects.known_chunks),
        };
        let (device_lane, reports) = DeviceLane::new(place, device_limits.orders);
        let mut core = Core::new(store, sources, device_limits, tenants);
        // No extent is in use before its memory is there.
        core.wait_for_memory();
        core.count_from(now_us());
        if let Some(peers) = peers {
            core.is_at(peers.node.clone());
        }
        Self {
            core,
            hands,
            device_lane,
            inputs: Some(Inputs { ended_grants, arriving, device: reports }),
            engines: HashMap::new(),
            pending: Pending::default(),
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

    /// Begins to learn which chunks are on disk.
    fn start_disk(&mut self, ctx: &mut Context<Self>) {
        let Some(disk) = &mut self.hands.disk else { return };
        let known = std::mem::take(&mut disk.known);
        if let Some(mut gone) = disk.gone.take() {
            self.hear(ctx, poll_fn(move |cx| gone.poll_recv(cx)), |_, Gone { chunks, why }| match why {
                Why::Evicted | Why::Damaged => Event::LeftDisk(chunks),
                Why::Closed => Event::DiskClosed,
            });
        }
        for known in known {
            let (fingerprint, KnownNamespace { tenant, spec }) = (known.fingerprint(), known);
            self.hands.owners(|owners| owners.own(&tenant, fingerprint));
            match self.core.know(tenant.clone(), fingerprint, spec) {
                Ok(true) => {}
                Ok(false) => {
                    self.hands.owners(|owners| owners.serves(&tenant, false));
                    tracing::warn!(
                        tenant,
                        "the disk has chunks of a tenant that is not configured: they are not used"
                    );
                }
                Err(error) => tracing::warn!(tenant, %error, "a namespace on disk cannot be used"),
            }
        }
        self.core.list_disk();
        self.settle(ctx);
    }

    /// Tells the core when the disk's drive falls silent, and when it answers again.
    fn look_at_drive(&mut self, ctx: &mut Context<Self>) {
        let is_silent = self.hands.is_drive_silent();
        let store = self.core.store();
        if store.has_disk() && is_silent != store.is_disk_silent() {
            self.decide(Event::DiskSilent(is_silent), ctx);
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
                actor.hands.followers.remove(&grant);
                Event::GrantEnded(grant)
            });
            self.hear(ctx, poll_fn(move |cx| arriving.poll_recv(cx)), |actor, (extent, memory)| {
                actor.hands.arena.occupy(extent, memory);
                actor.is_occupied(extent)
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
