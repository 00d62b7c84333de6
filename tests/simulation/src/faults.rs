//! Faults: their kinds, times and places. A seed plans them; each fault can be left out.

use std::time::Duration;

use crate::network::Party;
use crate::world::{At, CoordinatorHappening, Happening, World};

/// A fault that lasts for a while.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) from: Duration,
    pub(crate) until: Duration,
    pub(crate) kind: Kind,
}

/// The kind of a fault. Hosts are numbered from 0 on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// Every message takes this many microseconds longer.
    Delay(u64),
    /// Of a thousand packets, this many are lost.
    Loss(u32),
    /// Of a thousand packets, this many come twice.
    Double(u32),
    /// Packets pass each other.
    Reorder(u64),
    /// This many bytes a second pass from one host to another.
    Throttle(u64),
    /// Nothing comes from one host to the other.
    CutOneWay(usize, usize),
    /// Nothing comes between two hosts.
    Cut(usize, usize),
    /// Nothing comes between a host and all others, coordinators included.
    Isolate(usize),
    /// Nothing comes between a host and all coordinators.
    CutCoordinators(usize),
    /// Nothing comes between a host and this coordinator.
    CutCoordinator(usize, usize),
    /// Nothing comes between a coordinator and all nodes and other coordinators.
    IsolateCoordinator(usize),
    /// Nothing comes between a coordinator and the register of the election.
    CutRegister(usize),
    /// No coordinator reaches the register.
    NoRegister,
    /// A host is slow to reach.
    Slow(usize, u64),
    /// A process crashes, and comes back at the end.
    Crash(usize),
    /// A process crashes, and comes back this many milliseconds later.
    Restart(usize, u64),
    /// A process crashes, power is lost, and it comes back at the end.
    PowerLoss(usize),
    /// A process crashes, and comes back with an empty disk at the end.
    LostDisk(usize),
    /// A process stands still.
    Stop(usize),
    /// A second process of a name is started.
    Twice(usize),
    /// A process stands still, a second one of its name is started, and the first goes on.
    Displaced(usize),
    /// A clock is this many millionths too fast or too slow.
    Drift(usize, i32),
    /// Copies in memory take seconds.
    SlowCopies(usize),
    /// Of a thousand copies, this many fail.
    FailingCopies(usize, u32),
    /// The GPU ends no copy, and is lost in the end.
    StuckGpu(usize),
    /// Disks and other threads are too busy for this many of a thousand orders.
    Busy(usize, u32),
    /// Disks take seconds.
    SlowDisk(usize),
    /// Of a thousand reads of the disks, this many fail.
    FailingReads(usize, u32),
    /// Syncs of a disk fail.
    FailingSyncs(usize),
    /// A disk is full.
    FullDisk(usize),
    /// Bits of disks flip.
    FlipDisk(usize),
    /// Bits in memory flip.
    FlipMemory(usize),
    /// Of a thousand orders of the object store, this many fail.
    FailingObjects(u32),
    /// The object store is slow.
    SlowObjects,
    /// The object store cannot be reached.
    NoObjects,
    /// Bits of objects flip.
    FlipObjects,
    /// A coordinator crashes, and comes back at the end.
    CoordinatorCrash(usize),
    /// A coordinator crashes, and comes back without its file at the end.
    CoordinatorForgets(usize),
    /// A coordinator stands still.
    CoordinatorStops(usize),
    /// An actor's life ends by a panic.
    ActorPanic(usize),
    /// The directory begins again after a panic.
    DirectoryPanic(usize),
    /// The exchange begins again after a panic.
    ExchangePanic(usize),
    /// Engines of a host die.
    EnginesDie(usize),
    /// Engines of a host lie.
    Liars(usize),
    /// A process drains within the time of the fault, and leaves; or the drain is cancelled.
    Drain(usize, bool),
}

/// The faults of a seed: at least three, of different kinds; and drains.
pub(crate) fn plan(random: &mut fastrand::Rng, nodes: usize, coordinators: usize) -> Vec<Fault> {
    // Drains have their own source of chance: the other faults of a seed do not depend on them.
    let mut of_drains = random.clone();
    of_drains.seed(random.clone().u64(..) ^ 0xd4a1);
    let mut faults = plan_faults(random, nodes, coordinators);
    for _ in 0..of_drains.usize(..4) {
        let kind = Kind::Drain(of_drains.usize(..nodes), of_drains.u8(..4) == 0);
        let from = Duration::from_millis(of_drains.u64(3_000..42_000));
        let lasts = Duration::from_millis(of_drains.u64(200..8_000));
        faults.push(Fault { from, until: from + lasts, kind });
    }
    faults
}

fn plan_faults(random: &mut fastrand::Rng, nodes: usize, coordinators: usize) -> Vec<Fault> {
    let count = random.usize(4..12);
    let mut faults = Vec::<Fault>::new();
    while faults.len() < count {
        let is_of_coordinators = coordinators > 1 && random.u8(..4) == 0;
        let kind = if is_of_coordinators {
            some_kind_of_coordinators(random, nodes, coordinators)
        } else {
            some_kind(random, nodes)
        };
        let is_known = |fault: &Fault| std::mem::discriminant(&fault.kind) == std::mem::discriminant(&kind);
        if faults.iter().filter(|fault| is_known(fault)).count() > faults.len() / 3 {
            continue;
        }
        let from = Duration::from_millis(random.u64(2_000..42_000));
        let lasts = Duration::from_millis(random.u64(200..8_000));
        faults.push(Fault { from, until: from + lasts, kind });
    }
    faults
}

fn some_kind(random: &mut fastrand::Rng, nodes: usize) -> Kind {
    let host = random.usize(..nodes);
    let other = (host + random.usize(1..nodes)) % nodes;
    match random.u8(..45) {
        0 => Kind::Delay(random.u64(500..40_000)),
        1 => Kind::Loss(random.u32(10..300)),
        2 => Kind::Double(random.u32(50..500)),
        3 => Kind::Reorder(random.u64(1_000..30_000)),
        4 => Kind::Throttle(random.u64(20_000..2_000_000)),
        5 => Kind::CutOneWay(host, other),
        6 => Kind::Cut(host, other),
        7 => Kind::Isolate(host),
        8 => Kind::CutCoordinators(host),
        9 => Kind::Slow(host, random.u64(5_000..600_000)),
        10 => Kind::Crash(host),
        11 => Kind::PowerLoss(host),
        12 => Kind::LostDisk(host),
        13 => Kind::Stop(host),
        14 => Kind::Twice(host),
        15 => Kind::Drift(host, random.i32(-20_000..20_000)),
        16 => Kind::SlowCopies(host),
        17 => Kind::FailingCopies(host, random.u32(20..300)),
        18 => Kind::StuckGpu(host),
        19 => Kind::Busy(host, random.u32(50..500)),
        20 => Kind::SlowDisk(host),
        21 => Kind::FailingReads(host, random.u32(20..400)),
        22 => Kind::FailingSyncs(host),
        23 => Kind::FullDisk(host),
        24 => Kind::FlipDisk(host),
        25 => Kind::FlipMemory(host),
        26 => Kind::FailingObjects(random.u32(50..600)),
        27 => Kind::SlowObjects,
        28 => Kind::NoObjects,
        29 => Kind::FlipObjects,
        30 => Kind::CoordinatorCrash(0),
        31 => Kind::CoordinatorForgets(0),
        32 => Kind::CoordinatorStops(0),
        33 => Kind::ActorPanic(host),
        34 => Kind::DirectoryPanic(host),
        35 => Kind::ExchangePanic(host),
        36 => Kind::EnginesDie(host),
        37 | 38 => Kind::Displaced(host),
        39..=42 => Kind::Restart(host, random.u64(20..600)),
        _ => Kind::Liars(host),
    }
}

/// A fault of coordinators that elect a leader.
fn some_kind_of_coordinators(random: &mut fastrand::Rng, nodes: usize, coordinators: usize) -> Kind {
    let (host, at) = (random.usize(..nodes), random.usize(..coordinators));
    match random.u8(..8) {
        0 => Kind::CoordinatorCrash(at),
        1 => Kind::CoordinatorForgets(at),
        2 | 3 => Kind::CoordinatorStops(at),
        4 => Kind::CutCoordinator(host, at),
        5 => Kind::IsolateCoordinator(at),
        6 => Kind::CutRegister(at),
        _ => Kind::NoRegister,
    }
}

impl World {
    /// Begins or ends a fault.
    pub(crate) fn fault(&mut self, number: usize, begins: bool) {
        let fault = self.faults[number].clone();
        if begins && self.now >= fault.until {
            return;
        }
        self.note("fault", &[number as u64, begins.into()]);
        match fault.kind {
            Kind::Crash(host) | Kind::PowerLoss(host) | Kind::LostDisk(host) => {
                self.crash_fault(fault.kind, host, begins);
            }
            Kind::Restart(host, after_ms) if begins => {
                self.crash(host, false);
                self.plan(Duration::from_millis(after_ms), Happening::Start(host));
            }
            Kind::Stop(host) if begins => self.hosts[host].paused_until = fault.until,
            Kind::CoordinatorStops(at) if begins => self.coordinators.all[at].paused_until = fault.until,
            Kind::Twice(host) => self.twice(host, begins),
            Kind::Displaced(host) => {
                if begins {
                    self.hosts[host].paused_until = fault.from + (fault.until - fault.from) / 2;
                }
                self.twice(host, begins);
            }
            Kind::Drift(host, millionths) => {
                // Planned events keep their time, so some of them come early.
                let host = &mut self.hosts[host];
                host.rate = if begins { 1.0 + f64::from(millionths) / 1e6 } else { 1.0 };
                if let Some(process) = &mut host.process {
                    process.clock.drift(self.now, host.rate);
                }
            }
            Kind::CoordinatorCrash(at) | Kind::CoordinatorForgets(at) if begins => {
                self.coordinators.all[at].crash();
            }
            Kind::CoordinatorCrash(at) => self.coordinator_happens(at, CoordinatorHappening::Start(false)),
            Kind::CoordinatorForgets(at) => self.coordinator_happens(at, CoordinatorHappening::Start(true)),
            Kind::ActorPanic(host) if begins => {
                let actor = self.random.u16(..self.settings.actors);
                if let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) {
                    self.actor_panics(At { life, actor });
                }
            }
            Kind::DirectoryPanic(host) if begins => self.directory_panics(host),
            Kind::ExchangePanic(host) if begins => self.exchange_panics(host),
            Kind::EnginesDie(host) if begins => {
                (0..self.engines.len())
                    .filter(|&engine| self.engines[engine].host == host)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|engine| self.engine_dies(engine));
            }
            Kind::Drain(host, gives_up) if begins => {
                self.drain_begins(host, fault.until - fault.from, gives_up);
            }
            Kind::Liars(host) => {
                let engines = self.engines.iter_mut().filter(|engine| engine.host == host);
                engines.for_each(|engine| engine.lies = begins);
            }
            Kind::FlipMemory(host) if begins => {
                self.flip_memory(host);
                self.plan(FLIP_PAUSE, Happening::Fault(number, true));
            }
            kind => self.place_fault(kind, begins),
        }
    }

    fn place_fault(&mut self, kind: Kind, begins: bool) {
        let network = &mut self.network;
        let on = |number: u32| if begins { number } else { 0 };
        match kind {
            Kind::Delay(us) => network.delay_us = if begins { us } else { 0 },
            Kind::Loss(per_mille) => network.lost_per_mille = on(per_mille),
            Kind::Double(per_mille) => network.doubled_per_mille = on(per_mille),
            Kind::Reorder(us) => network.reorder_us = if begins { us } else { 0 },
            Kind::Throttle(rate) => network.bytes_per_second = begins.then_some(rate),
            Kind::Slow(host, us) => network.slow = begins.then_some((host, us)),
            Kind::CutOneWay(..)
            | Kind::Cut(..)
            | Kind::Isolate(_)
            | Kind::CutCoordinators(_)
            | Kind::CutCoordinator(..)
            | Kind::IsolateCoordinator(_)
            | Kind::CutRegister(_)
            | Kind::NoRegister => self.cut(kind, begins),
            Kind::SlowCopies(host) => self.hosts[host].slow_copies = begins,
            Kind::FailingCopies(host, per_mille) => self.hosts[host].failing_copies = on(per_mille),
            Kind::StuckGpu(host) => self.stick_gpu(host, begins),
            Kind::Busy(host, per_mille) => self.hosts[host].busy_disk = on(per_mille),
            Kind::SlowDisk(host) => self.hosts[host].slow_disk = begins,
            Kind::FailingReads(host, per_mille) => {
                self.hosts[host].platters.iter().for_each(|disk| disk.state().failing_reads = on(per_mille));
            }
            Kind::FailingSyncs(host) => {
                self.hosts[host].platters.iter().for_each(|disk| disk.state().fails_syncs = begins);
            }
            Kind::FullDisk(host) => {
                self.hosts[host].platters.iter().for_each(|disk| disk.state().is_full = begins);
            }
            Kind::FlipDisk(host) => self.hosts[host].platters.iter().for_each(|disk| disk.flip()),
            Kind::FailingObjects(per_mille) => self.objects.failing = on(per_mille),
            Kind::SlowObjects => self.objects.is_slow = begins,
            Kind::NoObjects => self.objects.is_closed = begins,
            Kind::FlipObjects => self.objects.flip(&mut self.random),
            _ => {}
        }
    }

    fn cut(&mut self, kind: Kind, begins: bool) {
        let coordinators: Vec<Party> = (0..self.settings.coordinators).map(Party::Coordinator).collect();
        let hosts = (0..self.hosts.len()).map(Party::Host);
        let all: Vec<Party> = hosts.chain(coordinators.iter().copied()).collect();
        let mut ways = Vec::new();
        let mut both = |one: Party, others: &[Party]| {
            let others = others.iter().filter(|&&other| other != one);
            ways.extend(others.flat_map(|&other| [(one, other), (other, one)]));
        };
        match kind {
            Kind::CutOneWay(from, to) => ways.push((Party::Host(from), Party::Host(to))),
            Kind::Cut(one, other) => both(Party::Host(one), &[Party::Host(other)]),
            Kind::Isolate(host) => both(Party::Host(host), &all),
            Kind::CutCoordinators(host) => both(Party::Host(host), &coordinators),
            Kind::CutCoordinator(host, at) => both(Party::Host(host), &[Party::Coordinator(at)]),
            Kind::IsolateCoordinator(at) => both(Party::Coordinator(at), &all),
            Kind::CutRegister(at) => both(Party::Register, &[Party::Coordinator(at)]),
            Kind::NoRegister => both(Party::Register, &coordinators),
            _ => {}
        }
        for (from, to) in ways {
            let way = self.network.way(from, to);
            self.network.cuts[way] = begins;
        }
    }

    fn crash_fault(&mut self, kind: Kind, host: usize, begins: bool) {
        if begins {
            self.crash(host, matches!(kind, Kind::PowerLoss(_)));
            if matches!(kind, Kind::LostDisk(_)) {
                self.hosts[host].platters.iter().for_each(crate::platter::Platter::replace);
                self.hosts[host].described.iter_mut().for_each(std::collections::BTreeMap::clear);
            }
        } else {
            self.plan(Duration::ZERO, Happening::Start(host));
        }
    }

    /// Starts a second process with a host's name on the spare host, or stops it.
    fn twice(&mut self, host: usize, begins: bool) {
        let spare = self.hosts.len() - 1;
        if begins {
            if self.hosts[spare].process.is_none() {
                self.hosts[spare].name = self.host_name(host);
                self.start_process(spare);
            }
        } else {
            self.crash(spare, false);
        }
    }

    fn stick_gpu(&mut self, host: usize, begins: bool) {
        self.hosts[host].stuck_gpu = begins;
        if !begins && let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) {
            (0..self.settings.actors).for_each(|actor| self.device_is_lost(At { life, actor }));
        }
    }

    /// Flips bits in memory.
    fn flip_memory(&mut self, host: usize) {
        let Some(life) = self.hosts[host].process.as_ref().map(|process| process.life) else { return };
        for actor in 0..self.settings.actors {
            for _ in 0..4 {
                let at = At { life, actor };
                let Some(fresh) = self.actor(at).map(|actor| actor.uses.fresh.clone()) else { return };
                // Half of the flips hit places where layers may have been handed over a moment ago, and are not committed yet.
                let (extent, offset) = if self.random.bool() && !fresh.is_empty() {
                    let (extent, offset, bytes) = fresh[self.random.usize(..fresh.len())];
                    (extent, offset + self.random.u64(..bytes))
                } else {
                    (self.random.u32(..crate::actor::EXTENTS), self.random.u64(..crate::actor::EXTENT_BYTES))
                };
                let bit = self.random.u32(..8);
                let Some(actor) = self.actor(at) else { return };
                let memory = actor.memory[extent as usize].as_ref();
                let Some(memory) = memory.filter(|_| !actor.uses.is_unsummed(extent, offset)) else {
                    continue;
                };
                let mut byte = [0];
                if memory.copy_out(offset, &mut byte).is_ok() {
                    byte[0] ^= 1 << bit;
                    let copied = memory.copy_in(offset, &byte);
                    debug_assert!(copied.is_ok(), "it lies within its extent");
                    actor.uses.flip(extent, offset);
                }
            }
        }
    }

    /// Whether the only coordinator lost its file in this run. If there are several, each learns the latest epoch from the
    /// others.
    pub(crate) fn faults_forget(&self) -> bool {
        let is_alone = self.settings.coordinators == 1;
        is_alone && self.faults.iter().any(|fault| matches!(fault.kind, Kind::CoordinatorForgets(_)))
    }

    /// Ends all faults.
    pub(crate) fn end_faults(&mut self) {
        for number in 0..self.faults.len() {
            if self.faults[number].until > self.now {
                self.faults[number].until = self.now;
                self.fault(number, false);
            }
        }
    }
}

/// Pause between flips of bits.
const FLIP_PAUSE: Duration = Duration::from_millis(150);
