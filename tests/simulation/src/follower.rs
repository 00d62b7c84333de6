//! How a node follows the coordinators.

use std::sync::Arc;
use std::time::Duration;

use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, InUse, Join, Standing};
use larder_protocol::table::{NodeNumber, Table, TableReader, pages};

use crate::coordinator::{Follows, Stream, at_address};
use crate::process::Own;
use crate::world::{CoordinatorSays, Life, World};

/// How a node follows the coordinator.
#[derive(Debug)]
pub(crate) struct Follower {
    stream: u64,
    /// The coordinator that is dialled, or followed.
    coordinator: usize,
    /// The coordinator that leads, as another one said.
    leader: Option<usize>,
    /// Coordinators that are dialled before the node pauses.
    left: usize,
    /// Whether the coordinator said that it leads.
    is_taken: bool,
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

impl Follower {
    pub(crate) fn new(incarnation: u64) -> Self {
        Self {
            stream: 0,
            coordinator: 0,
            leader: None,
            left: 0,
            is_taken: false,
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

    /// Whether a coordinator knows the node on this stream.
    pub(crate) fn is_joined(&self) -> bool {
        self.is_joined
    }
}

impl World {
    /// A node dials its coordinators, first the one of which it heard that it leads.
    pub(crate) fn dial_coordinators(&mut self, life: Life) {
        let count = self.coordinators.all.len();
        let Some(process) = self.process(life) else { return };
        process.follower.left = count;
        self.dial_next(life);
    }

    fn dial_next(&mut self, life: Life) {
        let (stream, count) = (self.next_number(), self.coordinators.all.len());
        let (peer, actors, local) = (self.address(life.host), self.settings.actors, self.local(life.host));
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        let next = (follower.coordinator + 1) % count;
        follower.coordinator = follower.leader.take().unwrap_or(next);
        follower.left = follower.left.saturating_sub(1);
        (follower.stream, follower.heard, follower.is_joined) = (stream, local, false);
        follower.is_taken = false;
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
        self.say(life, FollowerMessage::Join(join));
        self.plan_local(life, LEAST_PATIENCE, Own::Beat(stream));
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
        if !follower.is_taken {
            return self.dial_another(life);
        }
        if local >= follower.heard + (follower.every * 5 / 2).max(LEAST_PATIENCE) {
            return self.dial_again(life);
        }
        let (every, epoch) = (follower.every, follower.known.epoch);
        if follower.is_joined {
            self.say(life, FollowerMessage::Heartbeat(Heartbeat { epoch, silent }));
        }
        self.plan_local(life, every, Own::Beat(stream));
    }

    /// Says something to the coordinator that a node follows.
    pub(crate) fn say(&mut self, life: Life, message: FollowerMessage) {
        let Some(process) = self.process(life) else { return };
        let Follower { coordinator, stream, .. } = process.follower;
        let stream = Stream { of: Follows::Node(life), number: stream };
        self.say_on_stream(coordinator, stream, message);
    }

    /// This coordinator does not answer, or does not lead: the next one is dialled.
    fn dial_another(&mut self, life: Life) {
        match self.process(life).map(|process| process.follower.left) {
            Some(0) => self.dial_again(life),
            Some(_) => self.dial_next(life),
            None => {}
        }
    }

    fn dial_again(&mut self, life: Life) {
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        (follower.stream, follower.is_joined) = (0, false);
        let pause = follower.retry_after.take().unwrap_or(follower.pause);
        follower.pause = (follower.pause * 2).min(LAST_PAUSE);
        self.plan_local(life, pause, Own::Dial);
    }

    /// Decides whether a coordinator is followed.
    fn judge(&mut self, life: Life, standing: &Standing) {
        let Some(process) = self.process(life) else { return };
        let follower = &mut process.follower;
        follower.is_taken = standing.leads && standing.term >= follower.known.epoch.term;
        if !standing.leads {
            follower.leader = standing.leader.as_deref().and_then(at_address);
        }
        if !follower.is_taken {
            self.dial_another(life);
        }
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
        if let CoordinatorMessage::Standing(standing) = message {
            return self.judge(life, &standing);
        }
        if !follower.is_taken {
            return self.violate(|| format!("{life:?}: a coordinator does not say whether it leads"));
        }
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
                    if self.coordinators.made.get(&table.epoch) != Some(&table) && !self.faults_forget() {
                        self.violate(|| format!("{life:?}: table {} is no coordinator's", table.epoch));
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
            CoordinatorMessage::Bring => {
                for page in pages(&Table::default(), &Arc::clone(&follower.known)) {
                    self.say(life, FollowerMessage::Brings(page));
                }
            }
            CoordinatorMessage::Contested(_)
            | CoordinatorMessage::Heard
            | CoordinatorMessage::Standing(_) => {}
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

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
