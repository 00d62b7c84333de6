//! The GPU actor: a mailbox around one [`Core`], on an OS thread of its own.
//!
//! The core decides. The actor tells it each event and performs its effects (`perform`): it copies (`copies`), reads and
//! writes tiers (`below`, `disk`), fetches from other actors, lends to peers (`peers`), follows chunks at other nodes
//! (`handoff`) and has its GPU copy (`device_lane`). `answer` writes the replies to sessions, `seen` shows the actor to people,
//! `lives` handles panics.

mod answer;
mod below;
mod copies;
mod device_lane;
mod disk;
mod drain;
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
use futures_util::stream;
use larder_core::store::ids::SessionId;
use larder_core::store::{self, StoreLimits};
use larder_core::what_if::Past;
use larder_core::{Core, Counted, DeviceLimits, Event, Sources};
use larder_device::thread::DeviceReport;
use larder_protocol::Chain;
use larder_protocol::pin::PinStart;
use larder_protocol::session::{Found, Leased, Lookup, Pinned, Request, Response};
use tokio::sync::{mpsc, watch};

use self::answer::PendingRequest;
pub use self::below::ObjectParts;
pub use self::disk::DiskParts;
use self::handoff::PeerFollowers;
use self::lives::Lives;
pub use self::messages::{Answer, Ask, Client, Close, Errand, Open, ReplyTo, ask};
use self::peers::EndedGrants;
pub use self::peers::{Fetcher, FollowStarter, Peers};
use self::perform::Pending;
pub use self::seen::{ActorReport, ChainSeen, Holdings, LookupsSeen, PastSeen, SessionSeen};

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
use larder_net::audit::Audit;

/// One GPU's actor; without a GPU, the host's.
pub struct GpuActor {
    core: Core,
    arena: Arena,
    /// Extents whose memory comes after the start; taken when the actor starts.
    arriving: Option<mpsc::Receiver<Arrival>>,
    lane: Arc<CopyPool>,
    /// Its device, if it copies for engines.
    device_lane: DeviceLane,
    /// The device's reports; taken when the actor starts.
    device_reports: Option<mpsc::UnboundedReceiver<DeviceReport>>,
    metrics: ActorMetrics,
    clock: Clock,
    /// Write windows of the sessions that have one.
    windows: HashMap<SessionId, Arc<Window>>,
    /// The engines behind the open sessions.
    clients: HashMap<SessionId, Engine>,
    /// Extents that wait for new memory and for the copy pool.
    renewals: Vec<Renewal>,
    /// The lookup log.
    recorder: Option<Recorder>,
    /// The last lookups, to try other caches.
    past: Past,
    /// The audit log of pins.
    audit: Audit,
    /// Other actors of this node, if there are any.
    siblings: Option<Siblings>,
    /// Other nodes, if there are any.
    peers: Option<Peers>,
    /// The feed of events.
    feed: Feed,
    pending: Pending,
    ended_grants: EndedGrants,
    /// Peers that follow chunks of writers here.
    followers: PeerFollowers,
    /// The actor's present life.
    lives: Lives,
    /// The disk below the store, if there is one.
    disk: Option<DiskParts>,
    /// Why it was not opened.
    disk_trouble: Option<String>,
    /// The object store beside it, if there is one.
    objects: Option<ObjectParts>,
}

/// The engine behind an open session.
#[derive(Debug, Default)]
struct Engine {
    client: Client,
    /// The session's last request, and when it came.
    last: Option<(&'static str, Duration)>,
}

/// The parts of an actor.
pub struct Parts {
    /// Its chunks.
    pub store: StoreLimits,
    /// Its memory, which comes later.
    pub arena: Arena,
    /// Brings the memory of every extent.
    pub arriving: mpsc::Receiver<Arrival>,
    /// Its copy threads.
    pub lane: CopyPool,
    /// Its device.
    pub device: (DevicePlace, DeviceLimits),
    /// Its counters.
    pub metrics: ActorMetrics,
    /// Its clock.
    pub clock: Clock,
    /// The tenants' names, by number.
    pub tenants: Arc<[String]>,
    /// The lookup log.
    pub recorder: Option<Recorder>,
    /// The audit log.
    pub audit: Audit,
    /// Other actors of this node, if there are any.
    pub siblings: Option<Siblings>,
    /// Other nodes, if there are any.
    pub peers: Option<Peers>,
    /// The feed of events.
    pub feed: Feed,
    /// Tells when a fault ended all sessions.
    pub lives: watch::Sender<u64>,
    /// The disk below the store, if there is one.
    pub disk: Option<DiskParts>,
    /// Why it was not opened.
    pub disk_trouble: Option<String>,
    /// The object store beside it, if there is one.
    pub object: Option<ObjectParts>,
}

impl GpuActor {
    /// An actor over an empty store; `peers` if there are other nodes.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { store, arena, arriving, lane, metrics, clock, tenants, recorder, audit, feed, .. } =
            parts;
        let (place, device_limits) = parts.device;
        let (siblings, peers, disk, object) = (parts.siblings, parts.peers, parts.disk, parts.object);
        let sources = Sources {
            siblings: siblings.as_ref().map(|_| SIBLING_DEADLINE),
            peers: peers.as_ref().map(|peers| peers.deadline),
            disk: disk.as_ref().map(|disk| disk.deadline),
            object: object.as_ref().map(|object| object.deadline),
            known_chunks: object.as_ref().map_or(0, |object| object.known_chunks),
        };
        let (sender, receiver) = mpsc::unbounded_channel();
        let (device_lane, device_reports) = DeviceLane::new(place, device_limits.orders);
        let mut core = Core::new(store, sources, device_limits, tenants);
        // No extent is in use before its memory is there.
        core.wait_for_memory();
        if let Some(peers) = &peers {
            core.is_at(peers.node.clone());
        }
        Self {
            core,
            arena,
            arriving: Some(arriving),
            lane: Arc::new(lane),
            device_lane,
            device_reports: Some(device_reports),
            metrics,
            clock,
            windows: HashMap::new(),
            clients: HashMap::new(),
            renewals: Vec::new(),
            recorder,
            past: Past::default(),
            audit,
            siblings,
            peers,
            feed,
            pending: Pending::default(),
            followers: PeerFollowers::default(),
            lives: Lives::new(parts.lives),
            ended_grants: EndedGrants { sender, receiver: Some(receiver) },
            disk,
            disk_trouble: parts.disk_trouble,
            objects: object,
        }
    }

    /// Counts a lookup, and records it where lookups are recorded.
    fn looked_up(&mut self, ask: &Lookup, found: &Found) {
        let Some(lookup) = self.core.looked_up(ask, found) else { return };
        self.metrics.looked_up(&lookup);
        if !lookup.is_whole() {
            return;
        }
        let hashes = &ask.chain.hashes;
        if let Some(recorder) = &self.recorder {
            recorder.record(lookup.fingerprint, lookup.chunk_tokens, lookup.prompt_tokens, hashes, lookup.at);
        }
        self.past.note(hashes, lookup.past());
    }

    /// Does the periodic work.
    fn tick(&mut self, ctx: &mut Context<Self>) {
        self.return_extents(ctx);
        self.decide(Event::Tick, ctx);
        self.device_lane.sweep();
    }

    /// Takes a request. The answer follows now or later.
    fn ask(&mut self, ask: Ask, ctx: &mut Context<Self>) {
        let started = self.clock.elapsed();
        let Ask { session, request, descriptors, reply_to, trace, origin } = ask;
        if trace.is_recorded() {
            describe_request(&trace, &request, |namespace| self.core.store().fingerprint(namespace));
        }
        let asked = PendingRequest { request: request.name(), reply_to, trace, started };
        if let Some(engine) = self.clients.get_mut(&session) {
            engine.last = Some((asked.request, started));
        }
        #[cfg(test)]
        lives::planted();
        match request {
            Request::RegisterTensors(ask) => {
                if let Err(answer) = self.register_tensors(session, ask, descriptors, asked.clone(), ctx) {
                    self.reply(asked, answer);
                }
            }
            _ => {
                let (number, cause) = (self.pending.expect(session, asked.clone()), cause_of(&asked.trace));
                self.core.request_is(number, &request, origin);
                return self.decide(Event::Asked { request: number, ask: request, cause }, ctx);
            }
        }
        self.settle(ctx);
    }

    fn show_lease(&mut self, leased: store::Leased) -> Answer {
        self.metrics.count(&Counted::Leased(leased.bytes));
        let (extents, descriptors) = self.show(&leased.new_extents);
        let response = Response::Leased(Leased {
            lease: leased.lease,
            chunks: leased.chunks,
            places: leased.places,
            checksums: leased.checksums,
            extents,
        });
        Answer { response: Some(response), descriptors }
    }
}

impl Actor for GpuActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX_MESSAGES);
        if let Some(mut ended) = self.ended_grants.receiver.take() {
            self.hear(ctx, stream::poll_fn(move |cx| ended.poll_recv(cx)), |actor, grant| {
                actor.followers.remove(&grant);
                Event::GrantEnded(grant)
            });
        }
        if let Some(mut arriving) = self.arriving.take() {
            self.hear(ctx, stream::poll_fn(move |cx| arriving.poll_recv(cx)), |actor, (extent, memory)| {
                actor.arena.occupy(extent, memory);
                actor.device_lane.want_sweep();
                Event::ExtentRenewed(extent)
            });
        }
        if let Some(mut reports) = self.device_reports.take() {
            self.hear(ctx, stream::poll_fn(move |cx| reports.poll_recv(cx)), |actor, report| {
                Event::Device(actor.device_lane.event_of(report))
            });
        }
        ctx.run_interval(TICK, |actor, ctx| _ = actor.guard(ctx, Self::tick));
        self.guard(ctx, Self::start_disk);
    }
}

impl Handler<Open> for GpuActor {
    type Result = MessageResult<Open>;

    fn handle(&mut self, open: Open, _: &mut Self::Context) -> Self::Result {
        let bytes = open.window.as_ref().map_or(0, |window| window.bytes());
        let session = self.core.open_session(open.tenant, open.process, bytes);
        if let Some(window) = open.window {
            self.windows.insert(session, window);
        }
        self.clients.insert(session, Engine { client: open.client, last: None });
        MessageResult(session)
    }
}

impl Handler<Ask> for GpuActor {
    type Result = ();

    fn handle(&mut self, ask: Ask, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| actor.ask(ask, ctx));
    }
}

impl Handler<Close> for GpuActor {
    type Result = ();

    fn handle(&mut self, Close { session }: Close, ctx: &mut Self::Context) {
        self.guard(ctx, |actor, ctx| {
            if let Some(window) = actor.windows.remove(&session) {
                // Giving its memory back takes the kernel milliseconds, in which other sessions go on.
                actix_rt::task::spawn_blocking(move || drop(window));
            }
            actor.clients.remove(&session);
            actor.pending.forget(session, actor.clock.elapsed());
            actor.decide(Event::Closed(session), ctx);
            actor.device_lane.close_session(session);
        });
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

    fn handle(&mut self, ask: PinForAdmin, ctx: &mut Self::Context) -> Self::Result {
        let done = self.guard(ctx, |actor, ctx| {
            let done = match ask {
                PinForAdmin::Start(PinStart { fingerprint, hashes, duration_ms }) => {
                    let chain = Chain::from_root(fingerprint.root(), hashes);
                    actor.core.pin_for_admin(&fingerprint, &chain, duration_ms, actor.clock.now())
                }
                PinForAdmin::End(pin) => {
                    let ended = Pinned { pin, chunks: 0, duration_ms: 0 };
                    actor.core.unpin_for_admin(pin).map(|()| ended)
                }
            };
            actor.settle(ctx);
            done
        });
        done.map_or_else(
            || Err("the actor begins anew".to_owned()),
            |done| done.map_err(|refused| refused.to_string()),
        )
    }
}

/// The reply to a request that gets none.
const NO_ANSWER: Answer = Answer { response: None, descriptors: Vec::new() };

/// Messages that wait for the actor; senders wait for a place.
const MAILBOX_MESSAGES: usize = 1_024;

/// How often deadlines are looked at.
const TICK: Duration = Duration::from_millis(50);
