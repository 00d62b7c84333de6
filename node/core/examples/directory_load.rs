//! Prints what the directory costs in a large cluster, in virtual time: `directory_load [NODES] [ACTORS] [CHUNKS]`.
//!
//! Some of the nodes are whole: their outboxes say when which announcement goes out. All are homes, whose shards take
//! them. Every node does the same, so that a node gets as many requests as it sends. CPU is that of outboxes and shards;
//! the network's share comes with the requests.

#![expect(clippy::print_stdout, reason = "printing is what this program is for")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_core::Millis;
use larder_core::directory::{Answered, BatchId, Changes, Outbox, Outgoing, Shard};
use larder_core::store::{Change, ChangeKind};
use larder_protocol::peer::Announced;
use larder_protocol::table::{Epoch, Member, MemberState, NodeNumber, PARTITIONS, Table};
use larder_protocol::{ChunkHash, ChunkRef, Fingerprint};
use rustix::time::{ClockId, clock_gettime};

/// Nodes whose announcements are made.
const WHOLE_NODES: u16 = 20;

/// The interval at which nodes look for due messages.
const TICK_MS: u64 = 5;

/// How long an answer takes.
const ROUND_TRIP_MS: u64 = 2;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().unwrap_or(0));
    let nodes = arguments.next().unwrap_or(1_000_u32).clamp(2, 4_000) as u16;
    let devices = arguments.next().unwrap_or(8).clamp(1, 64) as u16;
    let chunks = arguments.next().unwrap_or(2_000);
    println!("{nodes} nodes of {devices} actors with {chunks} chunks each");
    let mut cluster = Cluster::new(nodes, devices);
    let table = cluster.table(nodes);
    cluster.new_table(table);
    cluster.hold(chunks.into());
    cluster.run("a start, all nodes at once", 20);
    cluster.run("nothing happens", 60);
    let table = cluster.table(nodes + 1);
    cluster.new_table(table);
    cluster.run("a node joined", 20);
    let table = cluster.table(nodes + 1);
    cluster.new_table(table);
    cluster.run("a member became suspect", 20);
}

struct Cluster {
    now: Millis,
    devices: u16,
    epoch: u64,
    homes: Vec<NodeNumber>,
    whole: BTreeMap<u16, Outbox>,
    shards: BTreeMap<u16, Shard>,
    answers: Vec<(Millis, u16, Outgoing, Vec<Announced>)>,
    random: fastrand::Rng,
}

impl Cluster {
    fn new(nodes: u16, devices: u16) -> Self {
        Self {
            now: Millis(0),
            devices,
            epoch: 0,
            homes: (0..PARTITIONS).map(|partition| NodeNumber(partition % nodes + 1)).collect(),
            whole: (1..=WHOLE_NODES.min(nodes)).map(|node| (node, Outbox::default())).collect(),
            shards: BTreeMap::new(),
            answers: Vec::new(),
            random: fastrand::Rng::with_seed(7),
        }
    }

    /// The next table, with `nodes` members. A joining node gets its share from as many others as necessary.
    fn table(&mut self, nodes: u16) -> Arc<Table> {
        self.epoch += 1;
        for joined in self.shards.len() as u16 + 1..=nodes {
            if !self.shards.is_empty() {
                for _ in 0..PARTITIONS / nodes {
                    self.homes[self.random.usize(..usize::from(PARTITIONS))] = NodeNumber(joined);
                }
            }
        }
        let member = |number: u16| Member {
            number: NodeNumber(number),
            name: format!("node-{number}"),
            incarnation: 1,
            peer: ([127, 0, 0, 1], number).into(),
            http: ([127, 0, 0, 1], number).into(),
            devices: self.devices,
            weight: 1,
            state: MemberState::Alive,
        };
        let members = (1..=nodes).map(member).collect();
        Arc::new(Table { epoch: Epoch { term: 1, number: self.epoch }, members, homes: self.homes.clone() })
    }

    fn new_table(&mut self, table: Arc<Table>) {
        for member in &table.members {
            let shard = self.shards.entry(member.number.0).or_insert_with(|| Shard::new(1 << 25));
            shard.new_table(&table, member.number);
        }
        let cpu = thread_cpu();
        for (&node, outbox) in &mut self.whole {
            outbox.new_table(&table, NodeNumber(node), self.now);
        }
        let took = (thread_cpu() - cpu).as_secs_f64() / self.whole.len() as f64;
        println!("a table of {} members takes a node {:.2} ms", table.members.len(), took * 1e3);
    }

    fn hold(&mut self, chunks: u64) {
        for (&node, outbox) in &mut self.whole {
            for device in 0..self.devices {
                let change = |_| {
                    let mut hash = [0; 32];
                    self.random.fill(&mut hash);
                    hash[..2].copy_from_slice(&node.to_le_bytes());
                    let hash = ChunkHash(hash);
                    let chunk = ChunkRef { hash, parent: hash, index: 0, anchor: hash };
                    Change { fingerprint: Fingerprint([7; 32]), chunk, kind: ChangeKind::Gained }
                };
                let all = Changes::Since((0..chunks).map(change).collect());
                outbox.changed(device, &all, self.now);
            }
        }
    }

    fn run(&mut self, what: &str, seconds: u64) {
        let end = self.now + seconds * 1_000;
        let (mut requests, mut changes, mut busiest) = (0_usize, 0, 0);
        let (mut sending, mut serving) = (Duration::ZERO, Duration::ZERO);
        while self.now < end {
            self.now = self.now + TICK_MS;
            let cpu = thread_cpu();
            let due = std::mem::take(&mut self.answers);
            let (due, later) = due.into_iter().partition(|answer| answer.0 <= self.now);
            self.answers = later;
            for (_, node, Outgoing { home, announces }, answers) in due {
                let Some(outbox) = self.whole.get_mut(&node) else { continue };
                for (announce, answer) in announces.iter().zip(answers) {
                    let batch = BatchId::new(home, announce);
                    if let Answered::Known { changes: known, .. } =
                        outbox.answered(&batch, Some(answer), self.now)
                    {
                        changes += known;
                    }
                }
            }
            let mut sent = Vec::new();
            for (&node, outbox) in &mut self.whole {
                sent.extend(outbox.due(self.now).into_iter().map(|outgoing| (node, outgoing)));
            }
            sending += thread_cpu() - cpu;
            let cpu = thread_cpu();
            let mut by_node = BTreeMap::<u16, usize>::new();
            for (node, outgoing) in sent {
                let Some(shard) = self.shards.get_mut(&outgoing.home.0) else { continue };
                let answers = outgoing.announces.iter().map(|announce| shard.announce(announce)).collect();
                if outgoing.home.0 != node {
                    requests += 1;
                    *by_node.entry(node).or_default() += 1;
                }
                self.answers.push((self.now + ROUND_TRIP_MS, node, outgoing, answers));
            }
            serving += thread_cpu() - cpu;
            busiest = busiest.max(by_node.values().sum());
        }
        let nodes = self.whole.len() as f64;
        let per_second = nodes * seconds as f64;
        println!(
            "{what}, {seconds} s: {:.1} requests a second and node, at most {:.0} a node within {TICK_MS} ms; {:.0} changes told a node; CPU {:.2} ms sending and {:.2} ms serving a second and node",
            requests as f64 / per_second,
            busiest as f64 / nodes,
            changes as f64 / nodes,
            sending.as_secs_f64() * 1e3 / per_second,
            serving.as_secs_f64() * 1e3 / per_second,
        );
    }
}

/// CPU that this thread has used.
fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
