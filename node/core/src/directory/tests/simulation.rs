//! Whole clusters in virtual time, over a network that loses, doubles, delays and reorders messages. Once the faults stop, the
//! homes' rows equal the chunks that the nodes hold.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::{cmp::Reverse, sync::Arc};

use larder_protocol::peer::{Announced, Find};
use larder_protocol::table::{Holder, NodeNumber, Table};

use super::super::cache::Cache;
use super::super::lookup::{Lookup, View};
use super::super::{Answered, BatchId, Changes, Outbox, Outgoing, Page, Shard};
use super::{SPACE, changes, chunk, key, table};
use crate::Millis;
use crate::store::ChangeKind;

#[test]
fn after_faults_the_directory_equals_what_the_nodes_hold() {
    let first: u64 = std::env::var("LARDER_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for seed in first..first + HISTORIES {
        // The output is shown if the history fails.
        println!("LARDER_SEED={seed}");
        Cluster::new(seed).live();
    }
}

struct Cluster {
    random: fastrand::Rng,
    now: Millis,
    has_faults: bool,
    nodes: BTreeMap<u16, Node>,
    incarnations: u64,
    /// The members that the coordinator knows, with their incarnations.
    members: BTreeMap<u16, u64>,
    table: Arc<Table>,
    events: BTreeMap<u64, Event>,
    queue: BinaryHeap<Reverse<(Millis, u64)>>,
    next_event: u64,
}

struct Node {
    incarnation: u64,
    view: View,
    outbox: Outbox,
    shard: Shard,
    cache: Cache,
    held: BTreeSet<(u16, u64)>,
    /// Attempts to send whose result is not known yet.
    attempts: BTreeSet<u64>,
}

#[derive(Clone)]
enum Event {
    Ask { from: Life, to: u16, attempt: u64, outgoing: Outgoing },
    Answer { to: Life, attempt: u64, ids: Vec<BatchId>, answers: Vec<Option<Announced>> },
    Table { to: u16, table: Arc<Table> },
    Repair { to: u16, holder: Holder, chunk: u64 },
}

/// One life of a node.
#[derive(Clone, Copy, PartialEq)]
struct Life(u16, u64);

impl Cluster {
    fn new(seed: u64) -> Self {
        let mut cluster = Self {
            random: fastrand::Rng::with_seed(seed),
            now: Millis(0),
            has_faults: true,
            nodes: BTreeMap::new(),
            incarnations: 0,
            members: BTreeMap::new(),
            table: Arc::default(),
            events: BTreeMap::new(),
            queue: BinaryHeap::new(),
            next_event: 0,
        };
        for node in 1..=cluster.random.u16(3..=12) {
            cluster.start(node);
        }
        cluster
    }

    fn live(&mut self) {
        for _ in 0..self.random.usize(20..150) {
            self.step();
            let pause = self.random.u64(0..40);
            self.run(pause, 7);
        }
        self.has_faults = false;
        self.members = self.nodes.iter().map(|(&node, state)| (node, state.incarnation)).collect();
        self.publish();
        let table = Arc::clone(&self.table);
        for to in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.schedule(50, Event::Table { to, table: Arc::clone(&table) });
        }
        // All late messages have come after this time.
        self.run(3_000, 50);
        for _ in 0..BOUND_MS / 500 {
            if self.difference().is_empty() {
                return;
            }
            self.run(500, 50);
        }
        panic!("rows that differ from what is held: {:?}", self.difference());
    }

    fn step(&mut self) {
        let Some(node) = self.random.choice(self.nodes.keys().copied().collect::<Vec<_>>()) else {
            return self.start(1);
        };
        match self.random.u32(0..100) {
            0..60 => self.change(node),
            60..64 => self.replace(node),
            64..72 => self.publish(),
            72..76 if self.nodes.len() > 2 => drop(self.nodes.remove(&node)),
            76..80 => {
                let node = self.random.u16(1..=12);
                self.start(node);
            }
            // The coordinator takes a living node for gone, or is late to notice that a node is gone.
            80..84 => drop(self.members.remove(&node)),
            84..88 => drop(self.members.insert(node, self.nodes[&node].incarnation)),
            88..94 => {
                let (to, chunk) = (node, self.random.u64(..CHUNKS));
                let holder = Holder { node: NodeNumber(self.random.u16(1..=12)), device: 0 };
                self.schedule(30, Event::Repair { to, holder, chunk });
            }
            _ => self.look_up(node),
        }
    }

    /// Starts a node, or starts it again. The node holds some chunks already.
    fn start(&mut self, number: u16) {
        self.incarnations += 1;
        let node = Node {
            incarnation: self.incarnations,
            view: View::default(),
            outbox: Outbox::default(),
            shard: Shard::new(1 << 20),
            cache: Cache::default(),
            held: BTreeSet::new(),
            attempts: BTreeSet::new(),
        };
        self.nodes.insert(number, node);
        self.members.insert(number, self.incarnations);
        self.change(number);
        self.publish();
    }

    fn change(&mut self, number: u16) {
        let device = self.random.u16(..2);
        let count = self.random.usize(1..9);
        let some: Vec<u64> = (0..count).map(|_| self.random.u64(..CHUNKS)).collect();
        let other = Holder { node: NodeNumber(self.random.u16(1..=12)), device: 0 };
        let kind =
            self.random.choice([ChangeKind::Gained, ChangeKind::MovedFrom(other), ChangeKind::Lost]).unwrap();
        let node = self.nodes.get_mut(&number).unwrap();
        for &chunk in &some {
            match kind {
                ChangeKind::Lost => node.held.remove(&(device, chunk)),
                ChangeKind::Gained | ChangeKind::MovedFrom(_) => node.held.insert((device, chunk)),
            };
        }
        node.outbox.changed(device, &changes(kind, some), self.now);
    }

    fn replace(&mut self, number: u16) {
        let some: BTreeSet<u64> = (0..CHUNKS).filter(|_| self.random.bool()).collect();
        let node = self.nodes.get_mut(&number).unwrap();
        node.held.retain(|(device, _)| *device != 0);
        node.held.extend(some.iter().map(|&chunk| (0, chunk)));
        // The pages come one by one. Between them other chunks are gained and lost.
        let some: Vec<u64> = some.into_iter().collect();
        let pages = some.chunks(7).chain(some.is_empty().then_some(&[][..]));
        let count = pages.clone().count();
        for (at, page) in pages.enumerate() {
            let chunks = page.iter().map(|&number| (SPACE, chunk(number))).collect();
            let page = Page { is_first: at == 0, chunks, is_last: at + 1 == count };
            let is_last = page.is_last;
            node.outbox.changed(0, &Changes::Page(page), self.now);
            let number = self.random.u64(..CHUNKS);
            if !is_last && self.random.bool() {
                node.held.insert((0, number));
                node.outbox.changed(0, &changes(ChangeKind::Gained, [number]), self.now);
            }
            // Only a chunk is lost that an earlier page had, or that no later page will have.
            let is_paged =
                some.iter().position(|&other| other == number).is_some_and(|place| place < 7 * (at + 1));
            if !is_last && is_paged && self.random.bool() {
                node.held.remove(&(0, number));
                node.outbox.changed(0, &changes(ChangeKind::Lost, [number]), self.now);
            }
        }
    }

    /// Publishes a new table. Nodes hear of it at different times, and some nodes not at all.
    fn publish(&mut self) {
        self.table = table(self.table.epoch.number + 1, &self.members);
        for to in self.nodes.keys().copied().collect::<Vec<_>>() {
            if self.random.u32(0..10) < 7 {
                let table = Arc::clone(&self.table);
                self.schedule(300, Event::Table { to, table });
            }
        }
    }

    fn look_up(&mut self, number: u16) {
        let chunks: Vec<_> = (0..CHUNKS).map(chunk).collect();
        let node = &self.nodes[&number];
        let mut lookup = Lookup::new(&SPACE, &chunks, &node.view, &node.cache, self.now);
        let asks = lookup.take_asks();
        let answers: Vec<_> = asks
            .iter()
            .filter_map(|ask| Some((ask, self.nodes.get(&ask.home.0)?.shard.find(&ask.find, self.now))))
            .collect();
        let answers: Vec<_> = answers.into_iter().filter(|_| self.random.bool()).collect();
        let node = self.nodes.get_mut(&number).unwrap();
        for (ask, rows) in answers {
            lookup.fill(&ask.positions, &rows, &node.view, Some(&mut node.cache), self.now);
        }
        let found = lookup.finish(&node.view);
        assert_eq!(found.len(), chunks.len());
        assert!(
            found.iter().flatten().all(|holder| holder.node != node.view.own),
            "nobody is sent to himself"
        );
    }

    fn schedule(&mut self, within_ms: u64, event: Event) {
        let at = self.now + self.random.u64(1..=within_ms);
        self.events.insert(self.next_event, event);
        self.queue.push(Reverse((at, self.next_event)));
        self.next_event += 1;
    }

    fn run(&mut self, duration_ms: u64, tick_ms: u64) {
        let end = self.now + duration_ms;
        while self.now < end {
            let tick = self.now + tick_ms;
            while let Some(&Reverse((at, number))) = self.queue.peek().filter(|event| event.0.0 <= tick) {
                self.queue.pop();
                self.now = self.now.max(at);
                let event = self.events.remove(&number).unwrap();
                self.happens(event);
            }
            self.now = tick;
            for number in self.nodes.keys().copied().collect::<Vec<_>>() {
                self.tick(number);
            }
        }
    }

    fn tick(&mut self, number: u16) {
        let node = self.nodes.get_mut(&number).unwrap();
        node.shard.tick(self.now);
        let life = Life(number, node.incarnation);
        for outgoing in node.outbox.due(self.now, |_| true) {
            self.send(life, outgoing);
        }
    }

    fn send(&mut self, from: Life, outgoing: Outgoing) {
        let Outgoing { home, announces } = &outgoing;
        let ids: Vec<_> = announces.iter().map(|announce| BatchId::new(*home, announce)).collect();
        let attempt = self.next_event;
        let node = self.nodes.get_mut(&from.0).unwrap();
        if *home == node.view.own {
            let answers: Vec<_> =
                announces.iter().map(|announce| Some(node.shard.announce(announce))).collect();
            node.answered(&ids, &answers, self.now);
            return;
        }
        node.attempts.insert(attempt);
        let copies = if self.has_faults { self.random.choice([0, 1, 1, 1, 2]).unwrap() } else { 1 };
        for _ in 0..copies {
            let late = self.has_faults && self.random.u32(0..10) == 0;
            let ask = Event::Ask { from, to: home.0, attempt, outgoing: outgoing.clone() };
            self.schedule(if late { 10 * DEADLINE_MS } else { DEADLINE_MS / 2 }, ask);
        }
        // At this time the exchange gives up.
        let answers = vec![None; ids.len()];
        self.events.insert(self.next_event, Event::Answer { to: from, attempt, ids, answers });
        self.queue.push(Reverse((self.now + DEADLINE_MS, self.next_event)));
        self.next_event += 1;
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Ask { from, to, attempt, outgoing: Outgoing { home, announces } } => {
                let Some(at_home) = self.nodes.get_mut(&to) else { return };
                let answers =
                    announces.iter().map(|announce| Some(at_home.shard.announce(announce))).collect();
                let ids = announces.iter().map(|announce| BatchId::new(home, announce)).collect();
                if !self.has_faults || self.random.u32(0..5) > 0 {
                    self.schedule(DEADLINE_MS / 2, Event::Answer { to: from, attempt, ids, answers });
                }
            }
            Event::Answer { to: Life(number, incarnation), attempt, ids, answers } => {
                let node = self.nodes.get_mut(&number).filter(|node| node.incarnation == incarnation);
                let Some(node) = node else { return };
                if node.attempts.remove(&attempt) {
                    node.answered(&ids, &answers, self.now);
                }
            }
            Event::Table { to, table } => {
                let Some(node) = self.nodes.get_mut(&to) else { return };
                // A table with an earlier life of this node is not for this life.
                let own = table.member(NodeNumber(to)).map(|member| member.incarnation);
                if table.epoch > node.view.table.epoch && own.is_none_or(|own| own == node.incarnation) {
                    node.new_table(&table, NodeNumber(to), self.now);
                }
            }
            Event::Repair { to, holder, chunk } => {
                let Some(node) = self.nodes.get_mut(&to) else { return };
                node.cache.not_held(holder, &[key(chunk)], self.now);
                node.shard.not_held(holder, &[key(chunk)], self.now);
                let find = Find { epoch: node.view.table.epoch, rows: vec![key(chunk)] };
                let rows = node.shard.find(&find, self.now);
                assert!(
                    rows.spans.iter().all(|span| span.holder != holder),
                    "what was found wrong is kept back"
                );
            }
        }
    }

    /// Rows that should be there and are not, or the reverse.
    fn difference(&self) -> Vec<(u16, (u16, u64, Holder))> {
        let mut expected = BTreeSet::new();
        let mut found = BTreeSet::new();
        for (&number, node) in &self.nodes {
            for &(device, chunk) in &node.held {
                let row = key(chunk);
                let home = self.table.home(row.run.partition()).unwrap();
                let holder = Holder { node: NodeNumber(number), device };
                expected.insert((home.0, (row.run.partition(), row.digest(), holder)));
            }
            found.extend(node.shard.rows(self.now).into_iter().map(|row| (number, row)));
        }
        expected.symmetric_difference(&found).copied().collect()
    }
}

impl Node {
    fn new_table(&mut self, table: &Arc<Table>, own: NodeNumber, now: Millis) {
        self.cache.new_table(&self.view.table, table, own);
        self.shard.new_table(table, own);
        self.outbox.new_table(table, own, now);
        (self.view.table, self.view.own) = (Arc::clone(table), own);
    }

    fn answered(&mut self, ids: &[BatchId], answers: &[Option<Announced>], now: Millis) {
        for (id, &answer) in ids.iter().zip(answers) {
            if let Answered::Known { moved, .. } = self.outbox.answered(id, answer, now) {
                let held: BTreeSet<_> =
                    self.held.iter().map(|&(device, number)| (device, chunk(number).hash)).collect();
                for hash in moved.iter().flat_map(|moved| &moved.hashes) {
                    assert!(held.contains(&(id.device, *hash)), "nobody gives up the last copy");
                }
            }
        }
    }
}

const HISTORIES: u64 = 2_000;

const CHUNKS: u64 = 48;

const DEADLINE_MS: u64 = 60;

/// Within this time after the last fault the directory is right: the time between two comparisons of sums, some pauses, some
/// repairs.
const BOUND_MS: u64 = 20_000;
