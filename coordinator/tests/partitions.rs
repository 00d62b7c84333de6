//! Coordinators and nodes in virtual time, with links that are cut and processes that stand still: the real election and the real
//! membership of each coordinator, over a register that some of them cannot reach.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_coordinator::election::{
    Candidate, Election, Record, RegisterAnswer, RegisterOp, Timing, Version,
};
use larder_coordinator::membership::{Beat, DurableState, JoinRefused, Membership, Millis, Patience};
use larder_protocol::membership::{Heartbeat, Join};
use larder_protocol::table::{NodeNumber, Table};

const TIMING: Timing = Timing { lease_ms: 6_000, renew_within_ms: 4_000, retry_ms: 1_000, silence_ms: 1_500 };
const PATIENCE: Patience = Patience { remember_lost_ms: 60_000, ..Patience::USUAL };
const COORDINATORS: usize = 3;
const NODES: usize = 4;
const STEP_MS: u64 = 50;

struct Coordinator {
    election: Election,
    membership: Membership,
    rate: f64,
    stopped_until: u64,
}

struct Node {
    incarnation: u64,
    number: NodeNumber,
    known: Arc<Table>,
    follows: Option<usize>,
    heard: u64,
    next: u64,
}

struct World {
    seed: u64,
    random: fastrand::Rng,
    now: u64,
    register: Option<(u64, Record)>,
    coordinators: Vec<Coordinator>,
    nodes: Vec<Node>,
    /// Times until which a coordinator is cut off from the register, from each other coordinator, and from each node.
    cuts: Vec<[u64; 1 + COORDINATORS + NODES]>,
    /// The last table of the highest term.
    last: Arc<Table>,
    /// The coordinator that made the tables of each term, and the number of the last one.
    terms: BTreeMap<u64, (usize, u64)>,
    takeovers: u64,
    /// Takeovers from a leader that was silent, before its lease was over.
    soon: u64,
    /// Tables that were made in a lower term than that of the last one.
    late: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let coordinator = |at: usize| Coordinator {
            election: Election::new(Candidate { life: at as u64 + 1, ..Candidate::default() }, TIMING, 0),
            membership: Membership::candidate(PATIENCE, DurableState::default(), 0),
            rate: 0.9 + 0.2 * random.f64(),
            stopped_until: 0,
        };
        let coordinators = (0..COORDINATORS).map(coordinator).collect();
        let node = |at: usize| Node {
            incarnation: at as u64 + 1,
            number: NodeNumber(0),
            known: Arc::default(),
            follows: None,
            heard: 0,
            next: 0,
        };
        let nodes = (0..NODES).map(node).collect();
        let cuts = vec![[0; 1 + COORDINATORS + NODES]; COORDINATORS];
        let (register, last) = (None, Arc::default());
        let terms = BTreeMap::new();
        let (takeovers, soon, late) = (0, 0, 0);
        Self { seed, random, now: 0, register, coordinators, nodes, cuts, last, terms, takeovers, soon, late }
    }

    fn clock(&self, at: usize) -> Millis {
        (self.now as f64 * self.coordinators[at].rate) as Millis
    }

    fn answers(&self, at: usize, place: usize) -> bool {
        self.coordinators[at].stopped_until <= self.now && self.cuts[at][place] <= self.now
    }

    fn step(&mut self, is_calm: bool) {
        self.now += STEP_MS;
        if !is_calm {
            self.hurt();
        }
        for at in 0..COORDINATORS {
            if self.coordinators[at].stopped_until <= self.now {
                self.elect(at);
                self.publish(at);
            }
        }
        for at in 0..NODES {
            self.live(at);
        }
    }

    fn hurt(&mut self) {
        let at = self.random.usize(..COORDINATORS);
        let lasts = self.now + self.random.u64(..15_000);
        match self.random.u32(..400) {
            0 => self.coordinators[at].stopped_until = lasts,
            1 => self.cuts[at][0] = lasts,
            2 => {
                let place = self.random.usize(1..1 + COORDINATORS + NODES);
                self.cuts[at][place] = lasts;
            }
            // The coordinator is cut off: it reaches only the register, or nothing at all.
            3 => {
                let from = self.random.usize(..2);
                self.cuts[at][from..].fill(lasts);
            }
            // A node starts again.
            4 => {
                let node = self.random.usize(..NODES);
                let incarnation = 10 + self.now;
                self.nodes[node] =
                    Node { incarnation, known: Arc::default(), follows: None, ..self.nodes[node] };
            }
            _ => {}
        }
    }

    fn elect(&mut self, at: usize) {
        let (clock, reaches) = (self.clock(at), self.answers(at, 0));
        self.ask_leader(at, clock);
        while let Some(ask) = self.coordinators[at].election.poll(clock) {
            let election = &self.coordinators[at].election;
            let is_soon = matches!(ask, RegisterOp::Write(..)) && election.misses_leader(clock);
            let is_lost = !reaches || self.random.u8(..50) == 0;
            // A question whose answer is lost may have been carried out all the same.
            let arrives = reaches && (!is_lost || self.random.bool());
            let answer = if arrives { self.ask(ask) } else { RegisterAnswer::Failed };
            let answer = if is_lost { RegisterAnswer::Failed } else { answer };
            self.soon += u64::from(is_soon && matches!(answer, RegisterAnswer::Written(_)));
            self.coordinators[at].election.answer(answer, clock);
        }
        let Coordinator { election, membership, .. } = &mut self.coordinators[at];
        match election.reign(clock) {
            Some(reign) => {
                self.takeovers += u64::from(membership.term() != reign.term);
                membership.lead(reign.term, reign.until, clock);
            }
            None => membership.resign(),
        }
    }

    /// Asks the leader whether it leads.
    fn ask_leader(&mut self, at: usize, clock: Millis) {
        let Some(leader) = self.coordinators[at].election.poll_leader(clock) else { return };
        let other = leader.life as usize - 1;
        let reaches = self.answers(at, 1 + other) && self.answers(other, 1 + at);
        if reaches && self.coordinators[other].membership.leads(self.clock(other)) {
            self.coordinators[at].election.hear_leader(leader.life);
        }
    }

    fn ask(&mut self, ask: RegisterOp) -> RegisterAnswer {
        let version = |number: u64| Version(number.to_string());
        match ask {
            RegisterOp::Read => {
                RegisterAnswer::Found(self.register.clone().map(|(number, record)| (version(number), record)))
            }
            RegisterOp::Write(record, over) => {
                let number = self.register.as_ref().map(|(number, _)| *number);
                if over != number.map(version) {
                    return RegisterAnswer::Conflict;
                }
                let next = number.unwrap_or(0) + 1;
                self.register = Some((next, record));
                RegisterAnswer::Written(version(next))
            }
        }
    }

    /// Lets a coordinator make a table, and tells it to everybody who can hear it.
    fn publish(&mut self, at: usize) {
        let clock = self.clock(at);
        let leads = self.coordinators[at].membership.leads(clock);
        if let Some(table) = self.coordinators[at].membership.tick(clock) {
            self.made(at, leads, table);
        }
        if !leads {
            return;
        }
        let table = self.coordinators[at].membership.table();
        for other in (0..COORDINATORS).filter(|&other| other != at) {
            let reaches = self.answers(at, 1 + other) && self.answers(other, 1 + at);
            if reaches && self.coordinators[other].membership.table().epoch < table.epoch {
                let clock = self.clock(other);
                self.coordinators[other].membership.follow(&table, clock);
            }
        }
        for node in 0..NODES {
            let hears = self.nodes[node].follows == Some(at) && self.answers(at, 1 + COORDINATORS + node);
            let (seed, node) = (self.seed, &mut self.nodes[node]);
            assert!(
                !hears || table.epoch.term >= node.known.epoch.term,
                "seed {seed}: a node obeys an earlier term"
            );
            if hears && table.epoch > node.known.epoch && table.epoch.number > 0 {
                node.known = Arc::clone(&table);
            }
        }
    }

    /// Checks a table that a coordinator made: its term is the coordinator's own, and it comes after all its tables of that term.
    fn made(&mut self, at: usize, leads: bool, table: Arc<Table>) {
        let (last, seed, epoch) = (&self.last, self.seed, table.epoch);
        let (leader, number) = self.terms.insert(epoch.term, (at, epoch.number)).unwrap_or((at, 0));
        assert!(
            leads && leader == at,
            "seed {seed}: coordinators {leader} and {at} make tables of term {}",
            epoch.term
        );
        assert!(epoch.number > number, "seed {seed}: table {epoch} after number {number}");
        // A leader that is cut off may not know yet that another one leads.
        if epoch.term < last.epoch.term {
            self.late += 1;
            return;
        }
        if last.members.len() == NODES {
            let is_same = table.homes == last.homes && table.members.len() == NODES;
            assert!(is_same, "seed {seed}: table {epoch} moves partitions");
        }
        self.last = table;
    }

    /// Lets a node beat, or look for a coordinator that leads.
    fn live(&mut self, at: usize) {
        if self.now < self.nodes[at].next {
            return;
        }
        self.nodes[at].next = self.now + PATIENCE.heartbeat_ms;
        if let Some(followed) = self.nodes[at].follows {
            let clock = self.clock(followed);
            let answers = self.answers(followed, 1 + COORDINATORS + at);
            let node = &mut self.nodes[at];
            let beat = Heartbeat { epoch: node.known.epoch, silent: Vec::new() };
            let Coordinator { membership, election, .. } = &mut self.coordinators[followed];
            if answers {
                let heard = membership.heartbeat(node.number, node.incarnation, &beat, clock);
                node.heard = self.now;
                if let Beat::LaterTerm(term) = heard {
                    election.heard_of(term, clock);
                }
                if !matches!(heard, Beat::Heard | Beat::Contested(_)) {
                    node.follows = None;
                }
            } else if self.now > node.heard + 2_500 {
                node.follows = None;
            }
        }
        let first = self.random.usize(..COORDINATORS);
        for other in (0..COORDINATORS).map(|i| (first + i) % COORDINATORS) {
            if self.nodes[at].follows.is_none() && self.answers(other, 1 + COORDINATORS + at) {
                self.join(at, other);
            }
        }
    }

    fn join(&mut self, at: usize, other: usize) {
        let clock = self.clock(other);
        let node = &mut self.nodes[at];
        let address = ([10, 0, 0, at as u8], (node.incarnation % 60_000) as u16).into();
        let (incarnation, epoch) = (node.incarnation, node.known.epoch);
        let join = Join { incarnation, epoch, peer: address, http: address, devices: 1, weight: 1 };
        let Coordinator { membership, election, .. } = &mut self.coordinators[other];
        match membership.join(&format!("node-{at}"), &join, clock) {
            Ok(joined) => {
                assert!(membership.term() >= epoch.term, "seed {}: a node obeys an earlier term", self.seed);
                (node.number, node.follows, node.heard) = (joined.number, Some(other), self.now);
                if membership.wants(epoch) {
                    membership.adopt(&node.known, clock);
                }
            }
            Err(JoinRefused::LaterTerm(term)) => election.heard_of(term, clock),
            Err(_) => {}
        }
    }
}

#[test]
fn whoever_is_cut_off_or_stopped_tables_only_grow_and_no_partition_moves() {
    let seeds = if std::env::var_os("LARDER_HEAVY_TESTS").is_some() { 1_000 } else { 100 };
    let (mut takeovers, mut soon, mut late) = (0, 0, 0);
    for seed in 0..seeds {
        let mut world = World::new(seed);
        // All is well until everybody knows everybody.
        while world.coordinators.iter().any(|one| one.membership.table().members.len() < NODES) {
            world.step(true);
            assert!(world.now < 60_000, "seed {seed}: the nodes join");
        }
        let end = world.now + 60_000;
        while world.now < end {
            world.step(false);
        }
        while world.now < end + 40_000 {
            world.step(true);
        }
        let epoch = world.last.epoch;
        assert!(
            world.nodes.iter().all(|node| node.known.epoch == epoch),
            "seed {seed}: all nodes know {epoch}"
        );
        let known = world.coordinators.iter().map(|one| one.membership.table().epoch);
        assert!(known.into_iter().all(|known| known == epoch), "seed {seed}: all coordinators know {epoch}");
        (takeovers, soon, late) = (takeovers + world.takeovers, soon + world.soon, late + world.late);
    }
    assert!(takeovers > 2 * seeds, "{takeovers} takeovers: the histories were too calm to show anything");
    println!(
        "{seeds} seeds, {takeovers} takeovers, {soon} of them soon; {late} tables of leaders left alone"
    );
    assert!(soon > seeds / 2, "{soon} takeovers from a silent leader: too few to show anything");
}
