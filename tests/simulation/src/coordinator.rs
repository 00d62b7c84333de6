//! The coordinator, with its real membership and ring, and how nodes follow it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_coordinator::Published;
use larder_coordinator::membership::{Beat, JoinRefused, Membership, Patience, State};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, InUse, Join};
use larder_protocol::peer::Message as _;
use larder_protocol::table::{Epoch, NodeNumber, Table, TableReader};

use crate::process::Own;
use crate::world::{CoordinatorHappening, CoordinatorSays, Happening, Life, World};

/// The coordinator.
pub(crate) struct Coordinator {
    membership: Option<Membership>,
    /// What it wrote down last.
    written: State,
    /// Which life of it this is.
    life: u64,
    started: Duration,
    streams: BTreeMap<(Life, u64), Followed>,
    pub(crate) paused_until: Duration,
    /// The leader of each term so far: a life of a coordinator.
    terms: BTreeMap<u64, u64>,
    /// Every table so far.
    tables: BTreeMap<Epoch, Arc<Table>>,
    published: Published,
}

/// A member that follows on a stream.
struct Followed {
    number: NodeNumber,
    incarnation: u64,
    /// The last table that it was sent.
    sent: Epoch,
}

/// How a node follows the coordinator.
#[derive(Debug)]
pub(crate) struct Follower {
    stream: u64,
    pub(crate) known: Arc<Table>,
    reader: TableReader,
    pub(crate) own: NodeNumber,
    pub(crate) incarnation: u64,
    heard: Duration,
    every: Duration,
    is_joined: bool,
    retry_after: Option<Duration>,
    pause: Duration,
    /// Whether a coordinator was told that the node drains.
    pub(crate) has_drained: bool,
}

impl Coordinator {
    pub(crate) fn new() -> Self {
        Self {
            membership: None,
            written: State::default(),
            life: 0,
            started: Duration::ZERO,
            streams: BTreeMap::new(),
            paused_until: Duration::ZERO,
            terms: BTreeMap::new(),
            tables: BTreeMap::new(),
            published: Published::default(),
        }
    }

    /// The last table.
    pub(crate) fn table(&self) -> Option<Arc<Table>> {
        self.membership.as_ref().map(Membership::table)
    }

    /// It is gone, with all its streams.
    pub(crate) fn crash(&mut self) {
        self.membership = None;
        self.streams.clear();
    }
}

impl Follower {
    pub(crate) fn new(incarnation: u64) -> Self {
        Self {
            stream: 0,
            known: Arc::default(),
            reader: TableReader::default(),
            own: NodeNumber::default(),
            incarnation,
            heard: Duration::ZERO,
            every: Duration::from_secs(1),
            is_joined: false,
            retry_after: None,
            pause: FIRST_PAUSE,
            has_drained: false,
        }
    }

    /// The stream on which the coordinator knows the node.
    pub(crate) fn joined_stream(&self) -> Option<u64> {
        self.is_joined.then_some(self.stream)
    }
}

impl World {
    pub(crate) fn coordinator_starts(&mut self, forgets: bool) {
        let coordinator = &mut self.coordinator;
        if forgets {
            coordinator.written = State::default();
        }
        coordinator.life += 1;
        coordinator.started = self.now;
        coordinator.streams.clear();
        coordinator.published = Published::default();
        coordinator.membership = Some(Membership::new(PATIENCE, coordinator.written.clone(), 0));
        let life = coordinator.life;
        self.plan(COORDINATOR_TICK, Happening::Coordinator(CoordinatorHappening::Tick(life)));
    }

    pub(crate) fn coordinator_happens(&mut self, what: CoordinatorHappening) {
        match what {
            CoordinatorHappening::Start(forgets) => {
                if self.coordinator.membership.is_none() {
                    self.coordinator_starts(forgets);
                }
            }
            CoordinatorHappening::Tick(life) if life == self.coordinator.life => {
                self.plan(COORDINATOR_TICK, Happening::Coordinator(CoordinatorHappening::Tick(life)));
                self.publish();
            }
            CoordinatorHappening::Tick(_) => {}
            CoordinatorHappening::Said { life, stream, message } => {
                self.coordinator_hears(life, stream, message)
            }
        }
    }

    fn publish(&mut self) {
        let now = (self.now - self.coordinator.started).as_millis() as u64;
        let coordinator = &mut self.coordinator;
        let Some(membership) = &mut coordinator.membership else { return };
        let Some(table) = membership.tick(now) else { return };
        // It is written down before anybody hears of it.
        coordinator.written = membership.state();
        let (life, epoch) = (coordinator.life, table.epoch);
        let leader = *coordinator.terms.entry(epoch.term).or_insert(life);
        let streams: Vec<(Life, u64)> = coordinator.streams.keys().copied().collect();
        let last = coordinator.tables.last_key_value().map(|(&epoch, _)| epoch);
        coordinator.tables.insert(epoch, Arc::clone(&table));
        let is_newer = last.is_none_or(|last| epoch > last) || self.faults_forget();
        self.coordinator.published = Published::new(self.coordinator.published.table(), Arc::clone(&table));
        self.note("table", &[epoch.term, epoch.number, table.members.len() as u64]);
        if leader != life && !self.faults_forget() {
            self.violate(|| format!("two coordinators of term {}", epoch.term));
        }
        if !is_newer {
            self.violate(|| format!("epoch {epoch} is not newer than the last"));
        }
        if !table.is_consistent() {
            self.violate(|| format!("table {epoch} is not whole"));
        }
        for stream in streams {
            self.tell_table(stream);
        }
    }

    /// Tells a follower what it lacks of the last table.
    fn tell_table(&mut self, (life, stream): (Life, u64)) {
        let Coordinator { streams, published, .. } = &mut self.coordinator;
        let Some(follower) = streams.get_mut(&(life, stream)) else { return };
        let last = std::mem::replace(&mut follower.sent, published.table().epoch);
        if published.table().epoch.number == 0 {
            return;
        }
        let pages = published.messages(last).iter().map(|page| CoordinatorMessage::decode(page));
        for message in pages.collect::<Vec<_>>() {
            match message {
                Ok(message) => self.tell_follower(life, CoordinatorSays { stream, message }),
                Err(_) => self.violate(|| "a page of a table is no message".to_owned()),
            }
        }
    }

    fn coordinator_hears(&mut self, life: Life, stream: u64, message: FollowerMessage) {
        let now = (self.now - self.coordinator.started).as_millis() as u64;
        let name = self.host_name(life.host);
        let Some(membership) = &mut self.coordinator.membership else { return };
        let key = (life, stream);
        let answer = match message {
            FollowerMessage::Join(join) => {
                let answer = membership.join(&name, &join, now);
                match answer {
                    Ok(joined) => {
                        let (number, incarnation) = (joined.number, join.incarnation);
                        let follower = Followed { number, incarnation, sent: Epoch::default() };
                        self.coordinator.streams.insert(key, follower);
                        self.tell_follower(
                            life,
                            CoordinatorSays { stream, message: CoordinatorMessage::Joined(joined) },
                        );
                        return self.tell_table(key);
                    }
                    Err(JoinRefused::Outdated(at_least)) => CoordinatorMessage::Outdated(at_least),
                    Err(JoinRefused::InUse { address, retry_after_ms, .. }) => {
                        CoordinatorMessage::InUse(InUse { address, retry_after_ms })
                    }
                    Err(refused) => CoordinatorMessage::Refused(refused.to_string()),
                }
            }
            FollowerMessage::Heartbeat(beat) => {
                let Some(&Followed { number, incarnation, .. }) = self.coordinator.streams.get(&key) else {
                    return;
                };
                match membership.heartbeat(number, incarnation, &beat, now) {
                    Beat::Heard => CoordinatorMessage::Heard,
                    Beat::Contested(address) => CoordinatorMessage::Contested(address),
                    // It is the only coordinator: it always leads.
                    Beat::Removed | Beat::NotLeading | Beat::LaterTerm(_) => {
                        self.coordinator.streams.remove(&key);
                        CoordinatorMessage::Removed
                    }
                }
            }
            FollowerMessage::Leave => {
                let Some(Followed { number, incarnation, .. }) = self.coordinator.streams.remove(&key) else {
                    return;
                };
                return membership.leave(number, incarnation);
            }
            FollowerMessage::Drains(drains) => {
                let Some(&Followed { number, incarnation, .. }) = self.coordinator.streams.get(&key) else {
                    return;
                };
                return membership.drains(number, incarnation, drains);
            }
            FollowerMessage::Watch
            | FollowerMessage::Brings(_)
            | FollowerMessage::Rival(_)
            | FollowerMessage::Who(_) => return,
        };
        self.tell_follower(life, CoordinatorSays { stream, message: answer });
    }

    /// A node dials the coordinator.
    pub(crate) fn dial_coordinator(&mut self, life: Life) {
        let stream = self.next_number();
        let (peer, actors, local) = (self.address(life.host), self.settings.actors, self.local(life.host));
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        (follower.stream, follower.heard, follower.is_joined) = (stream, local, false);
        follower.every = Duration::from_secs(1);
        follower.reader = TableReader::default();
        let join = Join {
            incarnation: follower.incarnation,
            epoch: follower.known.epoch,
            peer,
            http: peer,
            devices: actors,
            weight: 1,
        };
        self.say(life, stream, FollowerMessage::Join(join));
        self.plan_local(life, Duration::from_secs(1), Own::Beat(stream));
    }

    /// It is time for a heartbeat, or to dial again.
    pub(crate) fn beat(&mut self, life: Life, stream: u64) {
        let local = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let silent = process.silent.iter().copied().collect();
        let follower = &mut process.follower;
        if follower.stream != stream {
            return;
        }
        if local >= follower.heard + (follower.every * 5 / 2).max(LEAST_PATIENCE) {
            return self.dial_again(life);
        }
        let (every, epoch) = (follower.every, follower.known.epoch);
        if follower.is_joined {
            self.say(life, stream, FollowerMessage::Heartbeat(Heartbeat { epoch, silent }));
        }
        self.plan_local(life, every, Own::Beat(stream));
    }

    fn dial_again(&mut self, life: Life) {
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        follower.stream = 0;
        let pause = follower.retry_after.take().unwrap_or(follower.pause);
        follower.pause = (follower.pause * 2).min(LAST_PAUSE);
        self.plan_local(life, pause, Own::Dial);
    }

    /// The coordinator said something.
    pub(crate) fn follower_hears(
        &mut self,
        life: Life,
        CoordinatorSays { stream, message }: CoordinatorSays,
    ) {
        let local = self.local(life.host);
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        if follower.stream != stream {
            return;
        }
        follower.heard = local;
        match message {
            CoordinatorMessage::Joined(joined) => {
                (follower.own, follower.is_joined) = (joined.number, true);
                follower.every = Duration::from_millis(joined.heartbeat_ms.max(1));
                follower.pause = FIRST_PAUSE;
                let drains = process.drain.is_some();
                if drains || process.follower.has_drained {
                    self.say_drains(life, drains);
                }
                self.spread_table(life);
            }
            CoordinatorMessage::Table(page) => match follower.reader.take(page) {
                Ok(Some(table)) if table.epoch > follower.known.epoch => {
                    follower.known = Arc::clone(&table);
                    if self.coordinator.tables.get(&table.epoch) != Some(&table) && !self.faults_forget() {
                        self.violate(|| format!("{life:?}: table {} is not the coordinator's", table.epoch));
                    }
                    self.spread_table(life);
                }
                Ok(_) => {}
                Err(_) => self.dial_again(life),
            },
            CoordinatorMessage::Outdated(at_least) => {
                follower.incarnation = at_least.max(follower.incarnation + 1);
                self.dial_again(life);
            }
            CoordinatorMessage::InUse(InUse { retry_after_ms, .. }) => {
                let retry = Duration::from_millis(retry_after_ms);
                follower.retry_after = Some(retry.clamp(FIRST_PAUSE, LONGEST_WAIT));
                self.dial_again(life);
            }
            CoordinatorMessage::Refused(_) => {
                follower.retry_after = Some(LAST_PAUSE);
                self.dial_again(life);
            }
            CoordinatorMessage::Removed => self.dial_again(life),
            CoordinatorMessage::Contested(_)
            | CoordinatorMessage::Heard
            | CoordinatorMessage::Standing(_)
            | CoordinatorMessage::Bring
            | CoordinatorMessage::Reloaded(_) => {}
        }
    }

    /// Tells a table that names this life of the node to those who go by it.
    fn spread_table(&mut self, life: Life) {
        let Some(process) = self.process(life) else { return };
        let Follower { known, own, incarnation, .. } = &process.follower;
        let (table, own, incarnation) = (Arc::clone(known), *own, *incarnation);
        if table.member(own).is_some_and(|member| member.incarnation == incarnation) {
            self.take_table(life, table, own);
        }
    }
}

/// Short, so that a minute sees many removals.
const PATIENCE: Patience = Patience {
    heartbeat_ms: 200,
    suspect_after_ms: 700,
    remove_after_ms: 2_500,
    remove_reported_after_ms: 1_500,
    grace_ms: 2_000,
    remember_lost_ms: 60_000,
};

const COORDINATOR_TICK: Duration = Duration::from_millis(50);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
