//! Node processes: they start, stand still, crash, and come back, with a clock of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use larder_core::exchange::{Exchange, ExchangeLimits, Outgoing};
use larder_core::{Core, DeviceLimits, Sources};
use larder_net::coordinator_client::following::Candidate;
use larder_node::siblings::Siblings;
use larder_protocol::table::{NodeNumber, Table};
use larder_protocol::{Fingerprint, NamespaceSpec};

use crate::actor::{Actor, EXTENTS};
use crate::bytes::new_extent;
use crate::clock::Clock;
use crate::directory::Directory;
use crate::exchange::Asking;
use crate::follower::Follower;
use crate::platter::Platter;
use crate::space::TENANTS;
use crate::world::{ActorHappening, At, Happening, Life, World};

/// A machine on which node processes run.
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) platters: Vec<Platter>,
    /// By actor: the namespaces described on its disk.
    pub(crate) described: Vec<BTreeMap<Fingerprint, (String, NamespaceSpec)>>,
    pub(crate) process: Option<Process>,
    lives: u64,
    pub(crate) paused_until: Duration,
    /// The rate of the host's clock.
    pub(crate) rate: f64,
    /// Whether copies take seconds.
    pub(crate) slow_copies: bool,
    /// Number of copies in a thousand that fail.
    pub(crate) failing_copies: u32,
    /// Number of orders in a thousand for which the host's disks are too busy.
    pub(crate) busy_disk: u32,
    /// Whether its disks take seconds.
    pub(crate) slow_disk: bool,
    /// Whether copies of its GPUs never end.
    pub(crate) stuck_gpu: bool,
}

/// One life of a node process.
pub(crate) struct Process {
    pub(crate) life: Life,
    pub(crate) clock: Clock,
    pub(crate) actors: Vec<Actor>,
    pub(crate) directory: Directory,
    pub(crate) exchange: Exchange,
    pub(crate) outgoing: Outgoing,
    pub(crate) asking: Asking,
    pub(crate) serving: crate::serve::Serving,
    pub(crate) streams: crate::streams::Streams,
    pub(crate) follower: Follower,
    pub(crate) silent: BTreeSet<NodeNumber>,
    /// The process's drain, if it is about to leave.
    pub(crate) drain: Option<crate::drain::Draining>,
    /// The epoch of the last table that the process took.
    epoch: larder_protocol::table::Epoch,
}

/// Something that happens in a process, outside of its actors.
#[derive(Debug)]
pub(crate) enum Own {
    /// The directory looks for batches of announcements to send.
    DirectoryTick,
    /// The directory forgets old doubts.
    SlowTick,
    /// The exchange's alarm of this time rings, unless another took its place.
    ExchangeAlarm(Duration),
    /// The coordinators are dialled.
    Dial,
    /// A heartbeat is due, or an answer to one.
    Beat(u64),
    /// A coordinator that is dialled has not answered.
    DialLate(u64),
    /// A message that was lost on a stream is sent again.
    SendAgain(crate::streams::Again),
    /// The answer to a request is late.
    CallLate(u64),
    /// A request to a busy peer is made again.
    CallAgain(u64),
    /// Blocks of a fetch are late.
    BatchLate(u64),
    /// A follow looks for its writer's node again.
    FollowBegins(u64),
    /// A follow asks a busy peer again.
    FollowAgain(u64),
    /// A follow asks its peer for a sign of life.
    FollowProbe(u64),
    /// The next piece of a sending goes out.
    SendNext(u64),
    /// The receiver of a sending does not read.
    SendStalls(u64, u64),
    /// An actor asks for the holders of chunks.
    AskHolders(crate::directory::AskHolders),
    /// An actor gained and lost chunks.
    Changed(u16, larder_core::directory::Changes),
    /// A holder did not have chunks that its rows claimed.
    Stale(larder_protocol::table::Holder, Fingerprint, Vec<larder_protocol::ChunkRef>),
    /// An actor wants chunks from a peer.
    Order(crate::exchange::Ordered),
    /// An actor, in a life of its store, offers a peer chunks that it evicts.
    Offer(u16, u64, larder_core::store::Offered),
    /// An actor wants to follow chunks at a peer.
    Follow(crate::follow::Ordered),
    /// An actor hurries an order.
    Hurry(u16, larder_core::OrderNumber),
    /// An actor no longer wants an order.
    Cancel(u16, larder_core::OrderNumber),
    /// An actor granted blocks to a peer.
    Granted(crate::serve::AskBlocks),
    /// An actor has news for a peer that follows.
    FollowNews(u16, larder_core::store::FollowNews),
    /// The progress of the drain is checked.
    DrainGoesOn,
    /// The drain is cancelled.
    DrainCancelled,
    /// An actor that drains asks another node to keep chunks.
    AskToTake(u16, u64, larder_core::TakeOrder),
}

impl Host {
    pub(crate) fn new(number: usize, actors: u16, seed: u64) -> Self {
        let platter = |actor: u16| Platter::new(seed ^ (number as u64) << 32 ^ u64::from(actor) << 48);
        Self {
            name: format!("node-{number}"),
            platters: (0..actors).map(platter).collect(),
            described: (0..actors).map(|_| BTreeMap::new()).collect(),
            process: None,
            lives: 0,
            paused_until: Duration::ZERO,
            rate: 1.0,
            slow_copies: false,
            failing_copies: 0,
            busy_disk: 0,
            slow_disk: false,
            stuck_gpu: false,
        }
    }
}

impl World {
    /// The process of a life, if it still runs.
    pub(crate) fn process(&mut self, life: Life) -> Option<&mut Process> {
        self.hosts[life.host].process.as_mut().filter(|process| process.life == life)
    }

    /// An actor of a life, if the life's process still runs.
    pub(crate) fn actor(&mut self, at: At) -> Option<&mut Actor> {
        self.process(at.life)?.actors.get_mut(usize::from(at.actor))
    }

    pub(crate) fn host_name(&self, host: usize) -> String {
        self.hosts[host].name.clone()
    }

    pub(crate) fn address(&self, host: usize) -> SocketAddr {
        ([10, 0, 0, 1], host as u16 + 1).into()
    }

    /// The time on the clock of a host's process.
    pub(crate) fn local(&self, host: usize) -> Duration {
        self.hosts[host].process.as_ref().map_or(Duration::ZERO, |process| process.clock.shows(self.now))
    }

    /// Plans an event after a while on the clock of a process.
    pub(crate) fn plan_local(&mut self, life: Life, after: Duration, what: Own) {
        let after = self.takes(life.host, after);
        self.plan(after, Happening::Process(life, what));
    }

    /// Plans an event for an actor after a while on its clock.
    pub(crate) fn plan_actor(&mut self, at: At, after: Duration, what: ActorHappening) {
        let after = self.takes(at.life.host, after);
        self.plan(after, Happening::Actor(at, what));
    }

    fn takes(&self, host: usize, after: Duration) -> Duration {
        self.hosts[host].process.as_ref().map_or(after, |process| process.clock.takes(after))
    }

    /// Starts a process, unless there is one.
    pub(crate) fn start_process(&mut self, host: usize) {
        if self.hosts[host].process.is_some() {
            return;
        }
        let actors = self.settings.actors;
        self.hosts[host].lives += 1;
        let life = Life { host, number: self.hosts[host].lives };
        // Microseconds since 1970, on a clock that may have been set back.
        let set_back = if self.random.u8(..8) == 0 { self.random.u64(..60_000_000) } else { 0 };
        let incarnation = 1_000_000_000 + self.now.as_micros() as u64 - set_back;
        let exchange_limits = ExchangeLimits {
            streams_per_peer: self.random.usize(1..=3),
            credit_bytes: self.random.u64(8 << 10..=64 << 10),
            sending_bytes: 96 << 10,
            batch_bytes: 24 << 10,
            ..ExchangeLimits::default()
        };
        let (seed, peer) = (self.random.u64(..), self.address(host));
        let process = Process {
            life,
            clock: Clock::new(self.now, self.hosts[host].rate),
            actors: Vec::new(),
            directory: Directory::new(),
            outgoing: Outgoing::new(&exchange_limits),
            exchange: Exchange::new(exchange_limits, seed),
            asking: Asking::default(),
            serving: crate::serve::Serving::default(),
            streams: crate::streams::Streams::default(),
            follower: Follower::new(Candidate { incarnation, peer, http: peer, devices: actors, weight: 1 }),
            silent: BTreeSet::new(),
            drain: None,
            epoch: larder_protocol::table::Epoch::default(),
        };
        self.note("start", &[host as u64, life.number]);
        self.hosts[host].process = Some(process);
        let siblings = Siblings::of(actors, &Arc::default());
        // A second process with the same name finds the disk locked.
        let has_disk = self.settings.has_disk && host < self.settings.nodes;
        for (number, siblings) in (0..actors).zip(siblings) {
            let at = At { life, actor: number };
            let sources = Sources {
                siblings: (actors > 1).then_some(LOAD_DEADLINE),
                peers: Some(LOAD_DEADLINE),
                disk: has_disk.then_some(LOAD_DEADLINE),
                object: self.settings.has_objects.then_some(LOAD_DEADLINE),
                known_chunks: 200,
            };
            let limits = crate::actor::limits(&self.settings, has_disk);
            let device = DeviceLimits {
                orders: 4,
                copy_deadline_ms: 400,
                tier_bytes: 24 << 10,
                tier_policy: self.settings.policy,
            };
            let mut core = Core::new(limits, sources, device, TENANTS.map(str::to_owned).into());
            core.wait_for_memory();
            let actor = Actor::new(core, siblings);
            if let Some(process) = self.process(life) {
                process.actors.push(actor);
            }
            if has_disk {
                self.open_disk(at);
            }
            self.plan_actor(at, ACTOR_TICK, ActorHappening::Tick);
            // Most memory comes before the first sessions, some of it long after.
            for extent in 0..EXTENTS {
                let after = Duration::from_micros(self.random.u64(1..=20_000) * self.random.u64(1..=50));
                self.plan_actor(at, after, ActorHappening::Renewed(extent, new_extent()));
            }
        }
        self.plan_local(life, DIRECTORY_TICK, Own::DirectoryTick);
        self.plan_local(life, SLOW_TICK, Own::SlowTick);
        self.plan_local(life, Duration::from_millis(1), Own::Dial);
    }

    /// Ends a process at once: its memory is gone.
    pub(crate) fn crash(&mut self, host: usize, loses_power: bool) {
        let Some(process) = self.hosts[host].process.take() else { return };
        self.note("crash", &[host as u64, process.life.number]);
        drop(process);
        if loses_power {
            self.hosts[host].platters.iter().for_each(Platter::lose_power);
        }
        self.hosts[host].paused_until = Duration::ZERO;
        for engine in 0..self.engines.len() {
            if self.engines[engine].host == host {
                self.node_is_gone(engine);
            }
        }
    }

    /// A process gets a new table.
    pub(crate) fn take_table(&mut self, life: Life, table: Arc<Table>, own: NodeNumber) {
        let now = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let (before, after) = (process.epoch, table.epoch);
        process.epoch = after;
        process.exchange.set_table(Arc::clone(&table), own);
        process.directory.take_table(&table, own, now);
        self.note("takes", &[life.host as u64, after.term, after.number]);
        if after < before {
            self.violate(|| format!("host {} went from epoch {before} back to {after}", life.host));
        }
        self.exchange_wants(life);
        self.send_due(life);
    }

    pub(crate) fn process_happens(&mut self, life: Life, what: Own) {
        if self.process(life).is_none() {
            return;
        }
        match what {
            Own::DirectoryTick => {
                self.plan_local(life, DIRECTORY_TICK, Own::DirectoryTick);
                self.send_due(life);
            }
            Own::SlowTick => {
                self.plan_local(life, SLOW_TICK, Own::SlowTick);
                self.directory_slow_tick(life);
            }
            Own::ExchangeAlarm(due) => self.exchange_alarm(life, due),
            Own::Dial => self.dial_coordinators(life),
            Own::Beat(alarm) => self.beat(life, alarm),
            Own::DialLate(stream) => self.dial_is_late(life, stream),
            Own::SendAgain(again) => self.send_again(life, again),
            Own::CallLate(call) => self.call_is_late(life, call),
            Own::CallAgain(call) => self.call_again(life, call),
            Own::BatchLate(call) => self.batch_is_late(life, call),
            Own::FollowBegins(follow) => self.begin_follow(life, follow),
            Own::FollowAgain(follow) => self.ask_to_follow(life, follow),
            Own::FollowProbe(follow) => self.probe_follow(life, follow),
            Own::SendNext(sending) => self.send_next(life, sending),
            Own::SendStalls(sending, at) => self.sending_stalls(life, sending, at),
            Own::AskHolders(ask) => self.look_up(life, ask),
            Own::Changed(actor, changes) => self.directory_changed(life, actor, changes),
            Own::Stale(holder, fingerprint, chunks) => self.stale(life, holder, &fingerprint, &chunks),
            Own::Order(order) => self.order(life, order),
            Own::Offer(actor, store, offered) => self.offer(life, actor, store, offered),
            Own::Follow(order) => self.order_follow(life, order),
            Own::Hurry(actor, order) => self.hurry(life, actor, order),
            Own::Cancel(actor, order) => self.cancel_order(life, actor, order),
            Own::Granted(ask) => self.granted_to_peer(life, ask),
            Own::FollowNews(actor, told) => self.follow_news(life, actor, told),
            Own::DrainGoesOn => self.drain_goes_on(life),
            Own::DrainCancelled => self.drain_cancelled(life),
            Own::AskToTake(actor, store, order) => self.ask_to_take(At { life, actor }, store, order),
        }
    }
}

pub(crate) const ACTOR_TICK: Duration = Duration::from_millis(50);
const DIRECTORY_TICK: Duration = Duration::from_millis(larder_core::directory::FLUSH_MS);
const SLOW_TICK: Duration = Duration::from_secs(1);

/// How long a lease waits for each of the sources of its chunks.
pub(crate) const LOAD_DEADLINE: Duration = Duration::from_secs(2);
