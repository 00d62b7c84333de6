//! The cluster: nodes, the next events, and the network between nodes.

use std::collections::{BTreeSet, HashMap};
use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use larder_core::directory::cache::Cache;
use larder_core::directory::lookup::{HomeAsk, View};
use larder_core::directory::{Changes, FLUSH_MS, Outbox, Outgoing, Shard};
use larder_core::exchange::{PROBE_DEADLINE, witnesses};
use larder_core::placement::{Gaps, Neighbours, Served, Worth};
use larder_core::store::{Change, ChangeKind};
use larder_protocol::Fingerprint;
use larder_protocol::peer::{Announced, Repair, Room, Rows};
use larder_protocol::run::run_start;
use larder_protocol::table::{MemberState, NodeNumber, Table};

use super::Load;
use super::arrivals::{Arrival, Arrivals};
use super::blocks::{Blocks, Id};
use super::connections::{Ends, name};
use super::coordinator::Coordinator;
use super::requests::Asking;
use super::sizes::Sizes;
use super::tally::{Contacts, Tally};
use crate::directory::millis;
use crate::queue::Queue;

/// The whole simulated cluster.
pub(super) struct Cluster<'a> {
    pub(super) load: &'a Load,
    pub(super) now: Duration,
    pub(super) nodes: Vec<Node>,
    pub(super) coordinator: Coordinator,
    pub(super) asking: HashMap<u64, Asking>,
    pub(super) sizes: Sizes,
    pub(super) tally: Tally,
    pub(super) random: fastrand::Rng,
    queue: Queue<Happening>,
    arrivals: Option<Peekable<Arrivals<'a>>>,
    began: Duration,
    requests: u64,
}

/// A node. Each node has a home's rows; nodes that play requests have chunks and requests too.
pub(super) struct Node {
    pub(super) number: NodeNumber,
    pub(super) is_alive: bool,
    pub(super) shard: Shard,
    pub(super) table: Arc<Table>,
    pub(super) player: Option<Box<Player>>,
    pub(super) contacts: Contacts,
    pub(super) ends: Ends,
    /// Members that did not answer: they will be silent soon, or are silent already.
    doubted: BTreeSet<NodeNumber>,
    /// Members that are silent.
    pub(super) silent: BTreeSet<NodeNumber>,
}

/// The parts of a node that plays requests.
pub(super) struct Player {
    pub(super) outbox: Outbox,
    pub(super) cache: Cache,
    pub(super) view: View,
    pub(super) blocks: Blocks,
    /// The times between its reads of others' chunks.
    pub(super) gaps: Gaps,
    /// Bytes of blocks that it has sent.
    pub(super) served: Served,
    /// What other nodes have told about themselves.
    pub(super) neighbours: Neighbours,
    /// Loads of chunks so far.
    pub(super) turn: usize,
}

/// An event.
pub(super) enum Happening {
    Tick,
    CoordinatorTick,
    ConnectionsTick,
    Beat(usize),
    SendTable,
    Table(usize, Arc<Table>),
    Find(u64, HomeAsk),
    Found(u64, NodeNumber, Vec<u32>, Option<Rows>, Option<Room>),
    Fetch(u64, NodeNumber, Vec<u32>),
    Fetched(u64, NodeNumber, Vec<(u32, Option<u32>)>, Option<Room>),
    Computed(u64),
    Announce(usize, Outgoing),
    Announced(usize, Outgoing, Option<Vec<Announced>>),
    Repair(NodeNumber, Repair),
    Silent(usize, NodeNumber),
}

impl<'a> Cluster<'a> {
    pub(super) fn new(load: &'a Load) -> Self {
        let mut cluster = Self {
            load,
            now: Duration::ZERO,
            nodes: Vec::new(),
            coordinator: Coordinator::new(),
            asking: HashMap::new(),
            sizes: Sizes::new(),
            tally: Tally::new(load.nodes + 1),
            random: fastrand::Rng::with_seed(load.seed ^ 0x636c_7573),
            queue: Queue::new(),
            arrivals: None,
            began: Duration::ZERO,
            requests: 0,
        };
        for _ in 0..load.nodes {
            cluster.add_node();
        }
        cluster.plan(Duration::ZERO, Happening::CoordinatorTick);
        cluster.plan(Duration::ZERO, Happening::Tick);
        cluster.plan(Duration::ZERO, Happening::ConnectionsTick);
        cluster
    }

    /// Starts a node with as many chunks as it has room for, which nobody asks for.
    pub(super) fn add_node(&mut self) {
        let index = self.nodes.len();
        let player = (index < self.load.playing() || index >= self.load.nodes)
            .then(|| Box::new(Player::new(index, self.load.chunks)));
        let mut ends = Ends::default();
        ends.connections.set_own(&name(index));
        self.nodes.push(Node {
            number: NodeNumber(index as u16 + 1),
            is_alive: true,
            shard: Shard::new(MAX_ROWS),
            table: Arc::default(),
            player,
            contacts: Contacts::new(index),
            ends,
            doubted: BTreeSet::new(),
            silent: BTreeSet::new(),
        });
        self.joins(index);
        let phase = Duration::from_micros(self.random.u64(..HEARTBEAT.as_micros() as u64));
        self.plan(phase, Happening::Beat(index));
    }

    /// Begins the requests.
    pub(super) fn begin_load(&mut self) {
        self.began = self.now;
        self.arrivals = Some(Arrivals::new(self.load).peekable());
    }

    pub(super) fn plan(&mut self, after: Duration, what: Happening) {
        self.queue.plan(self.now + after, what);
    }

    /// Runs until this time.
    pub(super) fn run_until(&mut self, until: Duration) {
        loop {
            let arrives = self.arrivals.as_mut().and_then(Peekable::peek).map(|next| self.began + next.at);
            let happens = self.queue.next_at();
            match (arrives, happens) {
                (Some(at), _) if at <= until && happens.is_none_or(|happens| at <= happens) => {
                    self.now = at;
                    let next = self.arrivals.as_mut().and_then(Iterator::next);
                    next.into_iter().for_each(|arrival| self.request_arrives(arrival));
                }
                (_, Some(at)) if at <= until => {
                    let Some((at, what)) = self.queue.next() else { break };
                    self.now = at;
                    self.happens(what);
                }
                _ => break,
            }
        }
        self.now = until;
    }

    fn request_arrives(&mut self, arrival: Arrival) {
        self.requests += 1;
        self.arrives(self.requests, arrival);
    }

    fn happens(&mut self, what: Happening) {
        match what {
            Happening::Tick => {
                self.plan(Duration::from_millis(FLUSH_MS), Happening::Tick);
                (0..self.nodes.len()).for_each(|node| self.send_due(node));
            }
            Happening::CoordinatorTick => self.coordinator_ticks(),
            Happening::ConnectionsTick => self.connections_tick(),
            Happening::Beat(node) => self.beats(node),
            Happening::SendTable => self.sends_table(),
            Happening::Table(node, table) => self.takes_table(node, &table),
            Happening::Find(request, ask) => self.finds(request, ask),
            Happening::Found(request, home, positions, rows, room) => {
                self.hears(request, home, room);
                self.found(request, home, &positions, rows);
            }
            Happening::Fetch(request, holder, positions) => self.fetches(request, holder, positions),
            Happening::Fetched(request, holder, chunks, room) => {
                self.hears(request, holder, room);
                self.fetched(request, holder, &chunks);
            }
            Happening::Computed(request) => self.computed(request),
            Happening::Announce(node, outgoing) => self.announces(node, outgoing),
            Happening::Announced(node, outgoing, answers) => self.announced(node, &outgoing, answers),
            Happening::Repair(home, repair) => {
                let now = millis(self.now);
                if let Some(home) = self.node(home) {
                    home.shard.not_held(repair.holder, &repair.rows, now);
                }
            }
            Happening::Silent(node, silent) => {
                let node = &mut self.nodes[node];
                node.silent.insert(silent);
                if let Some(player) = &mut node.player {
                    player.view.silent.insert(silent);
                }
            }
        }
    }

    /// A node that is alive.
    pub(super) fn node(&mut self, number: NodeNumber) -> Option<&mut Node> {
        self.nodes.get_mut(index(number)).filter(|node| node.is_alive)
    }

    /// What a node tells about itself before an answer; nodes that are only homes tell nothing.
    pub(super) fn room(&mut self, number: NodeNumber) -> Option<Room> {
        let now_ms = millis(self.now).0;
        let player = self.node(number)?.player.as_ref()?;
        let Worth(least) = player.blocks.least(now_ms).unwrap_or(Worth::NOTHING);
        Some(Room { least, served: player.served.bytes_a_second(now_ms) })
    }

    /// A request to a node gets no answer: the asker notices after a while.
    pub(super) fn unanswered(&mut self, asker: usize, node: NodeNumber, after: Duration) {
        if self.nodes[asker].doubted.insert(node) {
            self.plan(after, Happening::Silent(asker, node));
        }
    }

    /// Tells the directory that some of an actor's chunks came or went.
    pub(super) fn changed(&mut self, node: usize, changes: Vec<Change>) {
        let now = millis(self.now);
        if let Some(player) = &mut self.nodes[node].player {
            let mut changes = Changes::Since(changes);
            player.cache.leave_out(&mut changes, now);
            player.outbox.changed(0, &changes, now);
        }
    }

    fn takes_table(&mut self, node: usize, table: &Arc<Table>) {
        let now = millis(self.now);
        let Node { number, shard, player, is_alive, table: known, doubted, silent, .. } =
            &mut self.nodes[node];
        if !*is_alive || table.epoch <= known.epoch {
            return;
        }
        if let Some(player) = player {
            player.cache.new_table(known, table, *number);
        }
        shard.new_table(table, *number);
        if let Some(player) = player {
            player.outbox.new_table(table, *number, now);
            (player.view.table, player.view.own) = (Arc::clone(table), *number);
            player.view.silent.retain(|node| table.member(*node).is_some());
        }
        doubted.retain(|node| table.member(*node).is_some());
        silent.retain(|node| table.member(*node).is_some());
        *known = Arc::clone(table);
        self.coordinator.arrived_at = self.now;
        self.witnesses(node, table);
    }

    /// Asks suspect members, of which this node is a witness, for a sign of life. Dead members give none.
    fn witnesses(&mut self, node: usize, table: &Table) {
        let own = self.nodes[node].number;
        for suspect in table.members.iter().filter(|member| member.state == MemberState::Suspect) {
            let number = suspect.number;
            if self.node(number).is_none() && witnesses(table, number).any(|witness| witness == own) {
                self.unanswered(node, number, PROBE_DEADLINE);
            }
        }
    }
}

impl Player {
    fn new(index: usize, chunks: usize) -> Self {
        let mut blocks = Blocks::new(chunks);
        let filler = |number: u64| {
            let anchor =
                number - number % FILLER_CHAIN + u64::from(run_start((number % FILLER_CHAIN) as u32));
            (Id::filler(index, number), Id::filler(index, anchor))
        };
        let mut outbox = Outbox::default();
        let gained = |number: u64| {
            let (id, anchor) = filler(number);
            blocks.insert(id, anchor, 0);
            gained(id, anchor, ChangeKind::Gained)
        };
        let changes = (0..chunks as u64).map(gained).collect();
        outbox.changed(0, &Changes::Since(changes), millis(Duration::ZERO));
        let (cache, view) = (Cache::default(), View::default());
        Self {
            outbox,
            cache,
            view,
            blocks,
            gaps: Gaps::default(),
            served: Served::default(),
            neighbours: Neighbours::default(),
            turn: index,
        }
    }
}

pub(super) fn gained(id: Id, anchor: Id, kind: ChangeKind) -> Change {
    Change { fingerprint: NAMESPACE, chunk: id.chunk(anchor), kind, evicted: None }
}

/// The place of a node: numbers are given out in the order in which nodes join.
pub(super) fn index(number: NodeNumber) -> usize {
    usize::from(number.0) - 1
}

/// All chunks are in one namespace: copies differ in the names of their blocks.
pub(super) const NAMESPACE: Fingerprint = Fingerprint([7; 32]);

/// The travel time of a message.
pub(super) const ONE_WAY: Duration = Duration::from_millis(1);

/// The interval of a node's heartbeats, from the coordinator's default configuration.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

/// The length of the chains of chunks that nobody asks for.
const FILLER_CHAIN: u64 = 64;

const MAX_ROWS: u64 = 1 << 25;
