//! The world: all parts of a simulated cluster, and its next event.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use larder_coordinator::election::{RegisterAnswer, RegisterOp};
use larder_core::Event;
use larder_core::store::policy::PolicyName;
use larder_node::arena::ExtentMemory;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::{ChunkHash, Fingerprint, PoolSet};
use xxhash_rust::xxh3::Xxh3;

use crate::coordinator::{Coordinators, Stream};
use crate::coverage::Coverage;
use crate::engine::{Deed, Engine, Reply};
use crate::faults::Fault;
use crate::network::{Network, Packet};
use crate::objects::Objects;
use crate::process::{Host, Own};
use crate::queue::Queue;
use crate::space::Space;

/// The whole simulated cluster.
pub(crate) struct World {
    pub(crate) now: Duration,
    pub(crate) random: fastrand::Rng,
    pub(crate) coverage: Coverage,
    pub(crate) settings: Settings,
    pub(crate) spaces: Vec<Space>,
    pub(crate) hosts: Vec<Host>,
    pub(crate) engines: Vec<Engine>,
    pub(crate) coordinators: Coordinators,
    pub(crate) network: Network,
    pub(crate) objects: Objects,
    pub(crate) faults: Vec<Fault>,
    /// When an engine last reserved each chunk.
    pub(crate) reserved: HashMap<ChunkHash, Duration>,
    /// A violation of a check, if any.
    pub(crate) violation: Option<String>,
    /// Whether every event is printed.
    pub(crate) is_traced: bool,
    /// Whether engines send new requests.
    pub(crate) is_busy: bool,
    queue: Queue<Happening>,
    history: Xxh3,
    events: u64,
    last_number: u64,
}

/// The settings that differ from seed to seed.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) nodes: usize,
    pub(crate) actors: u16,
    pub(crate) coordinators: usize,
    pub(crate) policy: PolicyName,
    pub(crate) write: larder_core::store::WritePolicy,
    pub(crate) capacity_chunks: Option<u64>,
    pub(crate) placement: larder_core::placement::PlacementRule,
    pub(crate) has_disk: bool,
    pub(crate) has_objects: bool,
}

/// One life of a process on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Life {
    pub(crate) host: usize,
    pub(crate) number: u64,
}

/// One actor of such a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct At {
    pub(crate) life: Life,
    pub(crate) actor: u16,
}

/// An event.
pub(crate) enum Happening {
    /// An event of an actor.
    Actor(At, ActorHappening),
    /// An event of a process.
    Process(Life, Own),
    /// A packet comes to a host.
    Packet(Packet),
    /// A deed of an engine.
    Engine(usize, u64, Deed),
    /// An engine gets an answer.
    Reply(usize, u64, Reply),
    /// A node learns that an engine's process is gone.
    EngineGone(At, larder_core::store::ids::ProcessId),
    /// An event of a coordinator.
    Coordinator(usize, CoordinatorHappening),
    /// A coordinator's question arrives at the register of the election.
    Register { at: usize, life: u64, number: u64, ask: RegisterOp },
    /// A fault begins or ends.
    Fault(usize, bool),
    /// A process starts on a host.
    Start(usize),
}

/// An event of an actor.
pub(crate) enum ActorHappening {
    Tick,
    /// The alarm of this time rings, unless another took its place.
    Alarm(Duration),
    /// The result of an effect that was carried out elsewhere, in a life of the store.
    InLife(u64, Event),
    /// A copy has ended.
    Copied(u64, crate::bytes::Copying),
    /// A request of an engine arrives.
    Asked(crate::engine::Asking),
    /// A session of an engine is closed.
    Closed(larder_core::store::ids::SessionId),
    /// The disk's thread has time.
    Disk,
    /// The object store carries out a job.
    Object(crate::objects::Job),
    /// The GPU takes a step.
    Device(crate::gpu::Step),
    /// An extent gets new memory.
    Renewed(u32, Option<Arc<ExtentMemory>>),
    /// Other actors of this node want blocks.
    Grant(crate::serve::AskBlocks),
    /// A peer wants to follow chunks.
    PeerFollows {
        number: u64,
        fingerprint: Fingerprint,
        hashes: Vec<ChunkHash>,
        pools: Vec<PoolSet>,
        attempt: u64,
        patience_ms: u64,
    },
    /// A peer offers chunks that it evicts.
    TakeIn(crate::serve::TakeIn),
    /// Blocks of a sibling are copied.
    Imported(crate::serve::Import),
    /// Nobody reads the granted blocks any more.
    GrantEnded(u64),
    /// A peer that drains asks this actor to keep chunks.
    Take(Life, u64, Box<larder_protocol::drain::Take>),
    /// A sibling did not answer.
    SiblingLate(u64, larder_core::OrderNumber),
    /// A purge ends.
    PurgeEnds(crate::purge::PurgeEnd),
}

/// An event of a coordinator.
pub(crate) enum CoordinatorHappening {
    /// Time passes, in one of its lives.
    Tick(u64),
    /// A message of a follower on a stream.
    Said { stream: Stream, message: FollowerMessage },
    /// A message of the leader to one of the coordinator's lives.
    Told { life: u64, says: CoordinatorSays },
    /// The register's answer to one of the coordinator's lives.
    Answered { life: u64, number: u64, answer: RegisterAnswer },
    /// One of the coordinator's lives follows the leader anew.
    Watches(u64),
    /// The coordinator starts again, with or without its state.
    Start(bool),
}

/// A coordinator's message on a stream.
pub(crate) struct CoordinatorSays {
    pub(crate) stream: u64,
    pub(crate) message: CoordinatorMessage,
}

impl World {
    pub(crate) fn new(seed: u64, settings: Settings, faults: Vec<Fault>, is_traced: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let coordinators = Coordinators::new(&mut random, settings.coordinators);
        let mut world = Self {
            now: Duration::ZERO,
            random,
            coverage: Coverage::default(),
            spaces: crate::space::all(),
            hosts: Vec::new(),
            engines: Vec::new(),
            coordinators,
            network: Network::new(settings.nodes + 1, settings.coordinators),
            objects: Objects::default(),
            faults,
            reserved: HashMap::new(),
            violation: None,
            is_traced,
            is_busy: true,
            queue: Queue::new(),
            history: Xxh3::new(),
            events: 0,
            last_number: 0,
            settings,
        };
        world.populate(seed);
        world
    }

    fn populate(&mut self, seed: u64) {
        for host in 0..=self.settings.nodes {
            // The last host is a spare, on which a second process with another host's name may start.
            self.hosts.push(Host::new(host, self.settings.actors, seed));
        }
        (0..self.settings.coordinators).for_each(|at| self.coordinator_starts(at, false));
        for host in 0..self.settings.nodes {
            let after = self.random.u64(..300);
            self.plan(Duration::from_millis(after), Happening::Start(host));
        }
        for engine in 0..ENGINES_A_NODE * self.settings.nodes {
            let host = engine % self.settings.nodes;
            self.engines.push(Engine::new(host));
            let after = Duration::from_millis(500 + self.random.u64(..500));
            self.plan(after, Happening::Engine(engine, 0, Deed::Start));
        }
        for (number, fault) in self.faults.clone().iter().enumerate() {
            self.queue.plan(fault.from, Happening::Fault(number, true));
            self.queue.plan(fault.until, Happening::Fault(number, false));
        }
    }

    /// Plays all events until a time, or until a violation.
    pub(crate) fn run_until(&mut self, end: Duration) {
        while self.violation.is_none() {
            let Some((at, happening)) = self.queue.next() else { return };
            if at > end {
                // Put back, it is the first event again.
                self.queue.plan(at, happening);
                self.now = end;
                return;
            }
            self.now = at;
            if let Some(until) = self.paused_until(&happening) {
                self.queue.plan(until, happening);
                continue;
            }
            self.events += 1;
            self.happen(happening);
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Actor(at, what) => self.actor_happens(at, what),
            Happening::Process(life, what) => self.process_happens(life, what),
            Happening::Packet(packet) => self.packet_comes(packet),
            Happening::Engine(engine, life, deed) => self.engine_does(engine, life, deed),
            Happening::Reply(engine, life, reply) => self.engine_hears(engine, life, reply),
            Happening::EngineGone(at, process) => self.engine_is_gone(at, process),
            Happening::Coordinator(at, what) => self.coordinator_happens(at, what),
            Happening::Register { at, life, number, ask } => self.register_hears(at, life, number, ask),
            Happening::Fault(number, begins) => self.fault(number, begins),
            Happening::Start(host) => self.start_process(host),
        }
    }

    /// The time until which the process of an event stands still.
    fn paused_until(&self, happening: &Happening) -> Option<Duration> {
        let host = match happening {
            Happening::Actor(at, _) | Happening::EngineGone(at, _) => at.life.host,
            Happening::Process(life, _) => life.host,
            Happening::Packet(packet) => packet.to.host()?,
            Happening::Coordinator(at, _) => {
                return Some(self.coordinators.all[*at].paused_until).filter(|&until| until > self.now);
            }
            _ => return None,
        };
        Some(self.hosts[host].paused_until).filter(|&until| until > self.now)
    }

    /// Plans an event after a while.
    pub(crate) fn plan(&mut self, after: Duration, happening: Happening) {
        self.queue.plan(self.now + after, happening);
    }

    /// A number that was never used before.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// A time between two numbers of microseconds.
    pub(crate) fn some_us(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.random.u64(from..to))
    }

    /// Whether an event of this chance in a thousand happens.
    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        per_mille > 0 && self.random.u32(..1_000) < per_mille
    }

    /// Notes an event in the history, and prints it if the run is traced.
    pub(crate) fn note(&mut self, what: &str, numbers: &[u64]) {
        self.history.update(what.as_bytes());
        numbers.iter().for_each(|number| self.history.update(&number.to_le_bytes()));
        self.history.update(&(self.now.as_nanos() as u64).to_le_bytes());
        if self.is_traced {
            eprintln!("{:>12.6} {what} {numbers:?}", self.now.as_secs_f64());
        }
    }

    /// Notes a violation. Only the first counts.
    pub(crate) fn violate(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(format!("at {:.6} s: {}", self.now.as_secs_f64(), what()));
        }
    }

    /// A hash of the whole history.
    pub(crate) fn hash(&self) -> u64 {
        self.history.digest()
    }

    /// The number of events so far.
    pub(crate) fn events(&self) -> u64 {
        self.events
    }
}

/// Engines of each node.
const ENGINES_A_NODE: usize = 2;
