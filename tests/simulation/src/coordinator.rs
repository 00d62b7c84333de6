//! The coordinators, with their real membership, ring and election: one, or three with one leader.

mod election;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_coordinator::Published;
use larder_coordinator::election::Election;
use larder_coordinator::membership::{Beat, DurableState, JoinRefused, Membership, Millis, Patience};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, InUse, Join, Standing};
use larder_protocol::peer::Message as _;
use larder_protocol::table::{Epoch, NodeNumber, Table, TablePage, TableReader};

pub(crate) use self::election::{Register, at_address};
use crate::clock::Clock;
use crate::network::Party;
use crate::world::{CoordinatorHappening, CoordinatorSays, Happening, Life, World};

/// All coordinators, and the tables that they made.
pub(crate) struct Coordinators {
    pub(crate) all: Vec<Coordinator>,
    /// The record of their election.
    pub(crate) register: Register,
    /// The leader of each term so far: a life of a coordinator.
    terms: BTreeMap<u64, u64>,
    /// Every table so far.
    pub(crate) made: BTreeMap<Epoch, Arc<Table>>,
}

/// A coordinator.
pub(crate) struct Coordinator {
    membership: Option<Membership>,
    /// The coordinator's part in the election; `None` for a single coordinator.
    election: Option<Election>,
    /// The question to the register that is not answered yet.
    asked: Option<u64>,
    /// The state that the coordinator last wrote to its file.
    written: DurableState,
    /// The number of the coordinator's life; no other life of any coordinator has this number.
    life: u64,
    clock: Clock,
    /// The rate of the coordinator's clock.
    rate: f64,
    streams: BTreeMap<Stream, Followed>,
    pub(crate) paused_until: Duration,
    published: Published,
    /// The stream on which the coordinator follows the leader.
    watches: Option<u64>,
    watched: TableReader,
}

/// A stream of a follower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stream {
    pub(crate) of: Follows,
    pub(crate) number: u64,
}

/// The followers of a coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Follows {
    Node(Life),
    /// Another coordinator, in one of its lives.
    Coordinator(usize, u64),
}

/// A follower that gets tables.
#[derive(Default)]
struct Followed {
    /// The number and the incarnation of a member.
    member: Option<(NodeNumber, u64)>,
    /// The last table that the follower was sent.
    sent: Epoch,
    /// The pages of the follower's own table that it brings.
    brought: TableReader,
}

impl Follows {
    pub(crate) fn party(self) -> Party {
        match self {
            Self::Node(life) => Party::Host(life.host),
            Self::Coordinator(at, _) => Party::Coordinator(at),
        }
    }
}

impl Coordinators {
    pub(crate) fn new(random: &mut fastrand::Rng, count: usize) -> Self {
        let all = (0..count).map(|_| Coordinator::new(0.9 + 0.2 * random.f64())).collect();
        Self { all, register: Register::default(), terms: BTreeMap::new(), made: BTreeMap::new() }
    }
}

impl Coordinator {
    fn new(rate: f64) -> Self {
        Self {
            membership: None,
            election: None,
            asked: None,
            written: DurableState::default(),
            life: 0,
            clock: Clock::new(Duration::ZERO, rate),
            rate,
            streams: BTreeMap::new(),
            paused_until: Duration::ZERO,
            published: Published::default(),
            watches: None,
            watched: TableReader::default(),
        }
    }

    /// The time on the coordinator's clock.
    fn millis(&self, now: Duration) -> Millis {
        self.clock.shows(now).as_millis() as Millis
    }

    /// The last table of a coordinator that leads.
    fn table(&self, now: Duration) -> Option<Arc<Table>> {
        let membership = self.membership.as_ref()?;
        membership.leads(self.millis(now)).then(|| membership.table())
    }

    /// The coordinator crashes, and all its streams end.
    pub(crate) fn crash(&mut self) {
        (self.membership, self.election, self.asked, self.watches) = (None, None, None, None);
        self.streams.clear();
    }
}

impl World {
    /// The last table of the leader, if exactly one coordinator leads.
    pub(crate) fn leaders_table(&self) -> Option<Arc<Table>> {
        let mut tables = self.coordinators.all.iter().filter_map(|coordinator| coordinator.table(self.now));
        tables.next().filter(|_| tables.next().is_none())
    }

    pub(crate) fn coordinator_starts(&mut self, at: usize, forgets: bool) {
        let life = self.next_number();
        let (now, is_alone) = (self.now, self.coordinators.all.len() == 1);
        let coordinator = &mut self.coordinators.all[at];
        if forgets {
            coordinator.written = DurableState::default();
        }
        (coordinator.life, coordinator.clock) = (life, Clock::new(now, coordinator.rate));
        coordinator.published = Published::default();
        let state = coordinator.written.clone();
        coordinator.election = (!is_alone).then(|| election::takes_part(at, life, state.table.epoch.term));
        let begin = if is_alone { Membership::new } else { Membership::candidate };
        coordinator.membership = Some(begin(PATIENCE, state, 0));
        self.plan(COORDINATOR_TICK, Happening::Coordinator(at, CoordinatorHappening::Tick(life)));
    }

    pub(crate) fn coordinator_happens(&mut self, at: usize, what: CoordinatorHappening) {
        let Some(coordinator) = self.coordinators.all.get_mut(at) else { return };
        match what {
            CoordinatorHappening::Start(forgets) => {
                if coordinator.membership.is_none() {
                    self.coordinator_starts(at, forgets);
                }
            }
            CoordinatorHappening::Tick(life)
                if life == coordinator.life && coordinator.membership.is_some() =>
            {
                self.plan(COORDINATOR_TICK, Happening::Coordinator(at, CoordinatorHappening::Tick(life)));
                self.elect(at);
                self.publish(at);
            }
            CoordinatorHappening::Tick(_) => {}
            CoordinatorHappening::Said { stream, message } => self.coordinator_hears(at, stream, message),
            CoordinatorHappening::Told { life, says } if life == coordinator.life => {
                self.coordinator_follows(at, says);
            }
            CoordinatorHappening::Answered { life, number, answer } if life == coordinator.life => {
                self.register_answered(at, number, answer);
            }
            CoordinatorHappening::Watches(life) if life == coordinator.life => self.watch(at),
            CoordinatorHappening::Told { .. }
            | CoordinatorHappening::Answered { .. }
            | CoordinatorHappening::Watches(_) => {}
        }
    }

    /// Makes a table, if there is news, and publishes it.
    fn publish(&mut self, at: usize) {
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        let Some(membership) = &mut coordinator.membership else { return };
        let Some(table) = membership.tick(now) else { return };
        let (life, epoch, forgets) = (coordinator.life, table.epoch, self.faults_forget());
        let Coordinators { terms, made, .. } = &mut self.coordinators;
        let leader = *terms.entry(epoch.term).or_insert(life);
        // The last table of this term: a leader that is cut off may not know yet that another one leads.
        let last = made.keys().rev().find(|made| made.term == epoch.term).copied();
        made.insert(epoch, Arc::clone(&table));
        self.note("table", &[at as u64, epoch.term, epoch.number, table.members.len() as u64]);
        if leader != life && !forgets {
            self.violate(|| format!("two coordinators of term {}", epoch.term));
        }
        if self.coordinators.register.is_long_over(epoch.term, self.now) {
            self.violate(|| format!("table {epoch} is made long after the term is over"));
        }
        if last.is_some_and(|last| epoch <= last) && !forgets {
            self.violate(|| format!("epoch {epoch} is not newer than the last"));
        }
        if !table.is_consistent() {
            self.violate(|| format!("table {epoch} is not whole"));
        }
        self.tell_all(at, table);
    }

    /// Writes a table to the file, and then sends it to the followers.
    fn tell_all(&mut self, at: usize, table: Arc<Table>) {
        let coordinator = &mut self.coordinators.all[at];
        coordinator.written = coordinator.membership.as_ref().map(Membership::state).unwrap_or_default();
        coordinator.published = Published::new(coordinator.published.table(), table);
        let streams: Vec<Stream> = coordinator.streams.keys().copied().collect();
        streams.into_iter().for_each(|stream| self.tell_table(at, stream));
    }

    /// Sends a follower the parts of the last table that it lacks.
    fn tell_table(&mut self, at: usize, stream: Stream) {
        let Coordinator { streams, published, .. } = &mut self.coordinators.all[at];
        let Some(follower) = streams.get_mut(&stream) else { return };
        let last = std::mem::replace(&mut follower.sent, published.table().epoch);
        if published.table().epoch.number == 0 {
            return;
        }
        let pages = published.messages(last).iter().map(|page| CoordinatorMessage::decode(page));
        for message in pages.collect::<Vec<_>>() {
            match message {
                Ok(message) => self.tell_follower(at, stream, message),
                Err(_) => self.violate(|| "a page of a table is no message".to_owned()),
            }
        }
    }

    fn coordinator_hears(&mut self, at: usize, stream: Stream, message: FollowerMessage) {
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        let Some(membership) = &mut coordinator.membership else { return };
        let member = coordinator.streams.get(&stream).and_then(|followed| followed.member);
        match message {
            FollowerMessage::Join(join) => self.joins(at, stream, &join),
            FollowerMessage::Watch => {
                coordinator.streams.retain(|other, _| other.of != stream.of);
                coordinator.streams.insert(stream, Followed::default());
                self.tell_standing(at, stream);
                self.tell_table(at, stream);
            }
            FollowerMessage::Heartbeat(beat) => {
                let Some((number, incarnation)) = member else { return };
                let beat = membership.heartbeat(number, incarnation, &beat, now);
                self.coverage.note(crate::coverage::beat(&beat));
                match beat {
                    Beat::Heard => self.tell_follower(at, stream, CoordinatorMessage::Heard),
                    Beat::Contested(address) => {
                        self.tell_follower(at, stream, CoordinatorMessage::Contested(address));
                    }
                    Beat::Removed => {
                        coordinator.streams.remove(&stream);
                        self.tell_follower(at, stream, CoordinatorMessage::Removed);
                    }
                    Beat::NotLeading => {
                        coordinator.streams.remove(&stream);
                        self.tell_standing(at, stream);
                    }
                    Beat::LaterTerm(term) => {
                        coordinator.streams.remove(&stream);
                        self.tell_standing(at, stream);
                        self.later_term(at, term);
                    }
                }
            }
            FollowerMessage::Brings(page) => self.brings(at, stream, page),
            FollowerMessage::Leave | FollowerMessage::Drains(_) if !membership.leads(now) => {
                coordinator.streams.remove(&stream);
            }
            FollowerMessage::Leave => {
                coordinator.streams.remove(&stream);
                if let Some((number, incarnation)) = member {
                    membership.leave(number, incarnation);
                }
            }
            FollowerMessage::Drains(drains) => {
                if let Some((number, incarnation)) = member {
                    membership.drains(number, incarnation, drains);
                }
            }
            FollowerMessage::Who(_) => self.tell_standing(at, stream),
            FollowerMessage::Rival(_) | FollowerMessage::Reload | FollowerMessage::Forget(_) => {}
        }
    }

    fn joins(&mut self, at: usize, stream: Stream, join: &Join) {
        let Follows::Node(life) = stream.of else { return };
        let name = self.host_name(life.host);
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        let Some(membership) = &mut coordinator.membership else { return };
        let joined = membership.join(&name, join, now);
        let wants = joined.is_ok() && membership.wants(join.epoch);
        if let Err(refused) = &joined {
            self.coverage.note(crate::coverage::join_refused(refused));
        }
        self.tell_standing(at, stream);
        let refusal = match joined {
            Ok(joined) => {
                let member = Some((joined.number, join.incarnation));
                let followed = Followed { member, ..Followed::default() };
                self.coordinators.all[at].streams.insert(stream, followed);
                self.tell_follower(at, stream, CoordinatorMessage::Joined(joined));
                if wants {
                    self.tell_follower(at, stream, CoordinatorMessage::Bring);
                }
                return self.tell_table(at, stream);
            }
            Err(JoinRefused::NotLeading) => return,
            Err(JoinRefused::LaterTerm(term)) => return self.later_term(at, term),
            Err(JoinRefused::Outdated(at_least)) => CoordinatorMessage::Outdated(at_least),
            Err(JoinRefused::InUse { address, retry_after_ms, .. }) => {
                CoordinatorMessage::InUse(InUse { address, retry_after_ms })
            }
            Err(refused) => CoordinatorMessage::Refused(refused.to_string()),
        };
        self.tell_follower(at, stream, refusal);
    }

    /// A node brings its table to a new leader.
    fn brings(&mut self, at: usize, stream: Stream, page: TablePage) {
        let coordinator = &mut self.coordinators.all[at];
        let now = coordinator.millis(self.now);
        let (Some(membership), Some(followed)) =
            (&mut coordinator.membership, coordinator.streams.get_mut(&stream))
        else {
            return;
        };
        match followed.brought.take(page) {
            Ok(table) => {
                let has_adopted = table.is_some_and(|table| membership.adopt(&table, now));
                self.note("brings", &[at as u64, has_adopted.into()]);
            }
            Err(_) => self.violate(|| "a page that a node brings is none of its table".to_owned()),
        }
    }

    fn tell_standing(&mut self, at: usize, stream: Stream) {
        let coordinator = &self.coordinators.all[at];
        let Some(membership) = &coordinator.membership else { return };
        let now = coordinator.millis(self.now);
        let leads = membership.leads(now);
        let known = coordinator.election.as_ref().and_then(|election| election.leader(now));
        let leader = known.map(|leader| leader.peer.clone()).filter(|_| !leads);
        let standing = Standing { term: membership.term(), life: coordinator.life, leads, leader };
        self.tell_follower(at, stream, CoordinatorMessage::Standing(standing));
    }

    /// A coordinator sends a message on a stream.
    fn tell_follower(&mut self, at: usize, stream: Stream, message: CoordinatorMessage) {
        self.tell_on_stream(at, stream.of, CoordinatorSays { stream: stream.number, message });
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
