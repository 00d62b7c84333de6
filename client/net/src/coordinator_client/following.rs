//! The decisions of a coordinators' client, without IO: whom it obeys, what it says and when, and when it gives up a stream.
//!
//! 1. [`dial`](Following::dial) begins an attempt: the shell connects to the coordinators, first to the leader that it names.
//! 2. [`begin`](Following::begin) begins a stream with one of them. [`hear`](Following::hear) takes each of its messages,
//!    [`tick`](Following::tick) is called at [`next_deadline`](Following::next_deadline). After each of these calls the shell
//!    sends the messages of [`poll_message`](Following::poll_message) and publishes the news of
//!    [`take_news`](Following::take_news).
//! 3. An [`Ended`] is the end of the stream. If the coordinator was [taken](Following::is_taken), or none is left to try, the
//!    attempt is over: [`failed`](Following::failed) takes the reason, and [`pause`](Following::pause) says how long to wait
//!    before the next one.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, InUse, Join, Standing};
use larder_protocol::table::{NodeNumber, Table, TablePage, TableReader, WrongPage, pages};
use larder_protocol::version::Version;

/// The latest table.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The table.
    pub table: Arc<Table>,
    /// The follower's own number, if it is a node and was ever a member.
    pub own: NodeNumber,
    /// The incarnation that the follower joined as.
    pub incarnation: u64,
    /// Whether a table has listed this life of the follower.
    pub was_member: bool,
    /// Why the coordinator does not let the follower join; `None` if it does.
    pub refused: Option<String>,
    /// Why a node follows no coordinator that leads; `None` if it follows one. Without one it goes on with the last table.
    pub leaderless: Option<String>,
    /// Whether the coordinator cannot be told of drains: version 1 has no message for them.
    pub lacks_drains: bool,
}

impl Known {
    /// Whether the table lists this life of the follower.
    pub fn is_member(&self) -> bool {
        self.table.member(self.own).is_some_and(|member| member.incarnation == self.incarnation)
    }
}

/// A node that wants to be a member.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// The node's incarnation: microseconds since 1970 at its start.
    pub incarnation: u64,
    /// Address for peers. If its IP address is unspecified, the coordinator takes the address that it sees.
    pub peer: SocketAddr,
    /// Address of its HTTP server.
    pub http: SocketAddr,
    /// The number of its GPU actors.
    pub devices: u16,
    /// Its share of the partitions.
    pub weight: u64,
}

/// Why a stream is over.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// Another coordinator leads, or none does.
    #[error("the coordinator does not lead")]
    NotLeading,
    /// The coordinator's term is earlier than that of the last table.
    #[error("the coordinator has term {term}, earlier than term {known} of the last table")]
    EarlierTerm {
        /// The coordinator's term.
        term: u64,
        /// The table's term.
        known: u64,
    },
    /// The coordinator is not the one that the watcher wants.
    #[error("another coordinator answers")]
    Another,
    /// The coordinator broke the order of messages.
    #[error("the coordinator does not say whether it leads")]
    Unsaid,
    /// The node joins again as a later incarnation.
    #[error("the coordinator knows a later life of this node")]
    Outdated,
    /// The node may not join.
    #[error("{0}")]
    Refused(String),
    /// The coordinator removed the node, which joins again.
    #[error("the coordinator removed this node")]
    Removed,
    /// A page belongs to no table.
    #[error("the coordinator sent an incomplete table")]
    NotWhole(#[from] WrongPage),
    /// Heartbeats are not answered.
    #[error("the coordinator does not answer heartbeats")]
    Silent,
}

/// A client of the coordinators.
#[derive(Debug)]
pub struct Following {
    /// `None` for a watcher, which only gets tables.
    node: Option<Candidate>,
    known: Known,
    has_news: bool,
    /// The only life of a coordinator that a watcher follows; `None` if it follows any.
    wanted: Option<u64>,
    /// The leader's address, according to another coordinator.
    leader: Option<String>,
    /// The leader's address that the present attempt dials.
    dialled: Option<String>,
    /// The time after which the coordinator wants to be asked again.
    retry_after: Option<Duration>,
    /// The pause after an attempt that fails, and when the present attempt began.
    pause: Duration,
    dialled_at: Duration,
    /// Whether the node drains, and whether a coordinator was ever told so.
    drains: bool,
    has_drained: bool,
    stream: Stream,
    messages: VecDeque<FollowerMessage>,
}

/// The present stream.
#[derive(Debug, Default)]
struct Stream {
    /// Whether its coordinator leads, or is good enough for a watcher.
    is_taken: bool,
    reader: TableReader,
    every: Duration,
    next_beat: Duration,
    heard: Duration,
    is_joined: bool,
    /// Whether the coordinator leads and does not let the node join.
    is_refused: bool,
    /// Whether the coordinator was told that the node drains.
    told: Option<bool>,
}

impl Following {
    /// The client of a watcher, which goes on from the known table.
    pub fn watcher(known: Known) -> Self {
        Self {
            node: None,
            known,
            has_news: false,
            wanted: None,
            leader: None,
            dialled: None,
            retry_after: None,
            pause: FIRST_PAUSE,
            dialled_at: Duration::ZERO,
            drains: false,
            has_drained: false,
            stream: Stream::default(),
            messages: VecDeque::new(),
        }
    }

    /// The client of a watcher that follows one life of one coordinator, and goes on from the known table.
    pub fn watcher_of(life: u64, known: Known) -> Self {
        Self { wanted: Some(life), ..Self::watcher(known) }
    }

    /// The client of a node, which goes on from the known table.
    pub fn node(candidate: Candidate, known: Known) -> Self {
        Self { node: Some(candidate), ..Self::watcher(known) }
    }

    /// Begins an attempt. Returns the leader's address, if another coordinator has told it: dial it with the others.
    pub fn dial(&mut self, now: Duration) -> Option<String> {
        self.dialled_at = now;
        self.dialled = self.leader.take();
        self.dialled.clone()
    }

    /// Begins a stream with a coordinator that speaks this version.
    pub fn begin(&mut self, now: Duration, version: Version) {
        let every = FIRST_HEARTBEAT;
        let lacks_drains = version < Version::SECOND;
        // A coordinator of version 1 does not say that it leads: it is the only one.
        let is_taken = lacks_drains;
        self.stream = Stream { is_taken, every, next_beat: now + every, heard: now, ..Stream::default() };
        self.has_news |= self.known.lacks_drains != lacks_drains;
        self.known.lacks_drains = lacks_drains;
        self.messages.clear();
        self.messages.push_back(self.first_message());
    }

    /// The next message to send on the stream.
    pub fn poll_message(&mut self) -> Option<FollowerMessage> {
        self.messages.pop_front()
    }

    /// The latest table and the node's own place in it, if any of these changed since the last call.
    pub fn take_news(&mut self) -> Option<Known> {
        self.known.was_member |= self.known.is_member();
        std::mem::take(&mut self.has_news).then(|| self.known.clone())
    }

    /// The latest table and the node's own place in it.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Whether the present coordinator leads; a watcher follows any coordinator.
    pub fn is_taken(&self) -> bool {
        self.stream.is_taken
    }

    /// Whether the present coordinator has let the node join.
    pub fn is_joined(&self) -> bool {
        self.stream.is_joined
    }

    /// Notes whether the node drains, and tells the coordinator.
    pub fn drains(&mut self, drains: bool) {
        self.drains = drains;
        self.tell_drains();
    }

    /// Tells the coordinator that the node leaves.
    pub fn leave(&mut self) {
        self.messages.push_back(FollowerMessage::Leave);
    }

    /// Handles a message of the coordinator.
    ///
    /// # Errors
    /// The end of the stream.
    pub fn hear(&mut self, now: Duration, message: CoordinatorMessage) -> Result<(), Ended> {
        self.stream.heard = now;
        match message {
            CoordinatorMessage::Standing(standing) => self.judge(standing),
            _ if !self.stream.is_taken => Err(Ended::Unsaid),
            CoordinatorMessage::Joined(joined) => {
                let incarnation = self.node.map_or(0, |node| node.incarnation);
                (self.known.own, self.known.incarnation) = (joined.number, incarnation);
                (self.known.refused, self.known.leaderless, self.has_news) = (None, None, true);
                let every = Duration::from_millis(joined.heartbeat_ms.max(1));
                (self.stream.every, self.stream.next_beat) = (every, now + every);
                self.stream.is_joined = true;
                // A coordinator may know a drain that is over, or have forgotten one.
                self.stream.told = if self.has_drained { None } else { Some(false) };
                self.tell_drains();
                Ok(())
            }
            CoordinatorMessage::Outdated(at_least) => {
                if let Some(node) = &mut self.node {
                    node.incarnation = at_least.max(node.incarnation.saturating_add(1));
                }
                Err(Ended::Outdated)
            }
            CoordinatorMessage::InUse(InUse { address, retry_after_ms }) => {
                let retry_after = Duration::from_millis(retry_after_ms);
                let own = self.node.map(|node| node.peer.to_string()).unwrap_or_default();
                self.refused(
                    retry_after.clamp(FIRST_PAUSE, LONGEST_WAIT),
                    format!(
                        "another process of this node's name lives at {address}, this one at {own}: stop one of them, or give it a name and certificate of its own"
                    ),
                )
            }
            CoordinatorMessage::Refused(reason) => self.refused(LAST_PAUSE, reason),
            CoordinatorMessage::Removed => Err(Ended::Removed),
            CoordinatorMessage::Table(page) => self.learn(page),
            CoordinatorMessage::Bring => {
                let brought = pages(&Table::default(), &self.known.table);
                self.messages.extend(brought.into_iter().map(FollowerMessage::Brings));
                Ok(())
            }
            CoordinatorMessage::Heard
            | CoordinatorMessage::Contested(_)
            | CoordinatorMessage::Reloaded(_)
            | CoordinatorMessage::Forgot(_) => Ok(()),
        }
    }

    /// When [`tick`](Self::tick) is due; `None` for a watcher.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.node.map(|_| self.stream.next_beat.min(self.stream.silent_at()))
    }

    /// Sends a heartbeat, if it is time, with the members that do not answer the node.
    ///
    /// # Errors
    /// The end of the stream: heartbeats are not answered. The coordinator may have started again, and otherwise only the
    /// connection's long idle timeout would show that.
    pub fn tick(&mut self, now: Duration, silent: impl FnOnce() -> Vec<NodeNumber>) -> Result<(), Ended> {
        if self.node.is_none() {
            return Ok(());
        }
        if now >= self.stream.silent_at() {
            return Err(Ended::Silent);
        }
        if now >= self.stream.next_beat {
            self.stream.next_beat = now + self.stream.every;
            let beat = Heartbeat { epoch: self.known.table.epoch, silent: silent() };
            self.messages.push_back(FollowerMessage::Heartbeat(beat));
        }
        Ok(())
    }

    /// Notes that an attempt is over, and why. A node that was refused is not leaderless: it has heard a coordinator that leads. An
    /// earlier refusal counts no more.
    pub fn failed(&mut self, reason: &str) {
        let leaderless = (self.node.is_some() && !self.stream.is_refused).then(|| reason.to_owned());
        let is_over = leaderless.is_some() && self.known.refused.take().is_some();
        self.has_news |= is_over || self.known.leaderless != leaderless;
        self.known.leaderless = leaderless;
    }

    /// The pause between an attempt and the next one.
    pub fn pause(&mut self, now: Duration) -> Duration {
        self.stream = Stream::default();
        if now.saturating_sub(self.dialled_at) > LAST_PAUSE {
            self.pause = FIRST_PAUSE;
        }
        let pause = self.retry_after.take().unwrap_or(self.pause);
        self.pause = (self.pause * 2).min(LAST_PAUSE);
        pause
    }

    fn first_message(&self) -> FollowerMessage {
        match self.node {
            None => FollowerMessage::Watch,
            Some(Candidate { incarnation, peer, http, devices, weight }) => {
                let epoch = self.known.table.epoch;
                FollowerMessage::Join(Join { incarnation, epoch, peer, http, devices, weight })
            }
        }
    }

    /// Decides whether this coordinator is followed.
    fn judge(&mut self, standing: Standing) -> Result<(), Ended> {
        let Standing { term, life, leads, leader } = standing;
        self.stream.is_taken = false;
        if self.wanted.is_some_and(|wanted| wanted != life) {
            return Err(Ended::Another);
        }
        if !leads && self.node.is_some() {
            // A leader that was just dialled is dead, or its address is wrong.
            if leader.is_some() && leader != self.dialled {
                self.retry_after = Some(FIRST_PAUSE);
            }
            self.leader = leader;
            return Err(Ended::NotLeading);
        }
        let known = self.known.table.epoch.term;
        if term < known {
            return Err(Ended::EarlierTerm { term, known });
        }
        self.stream.is_taken = true;
        Ok(())
    }

    fn refused(&mut self, retry_after: Duration, reason: String) -> Result<(), Ended> {
        (self.retry_after, self.stream.is_refused) = (Some(retry_after), true);
        self.has_news |= self.known.refused.as_ref() != Some(&reason);
        self.known.refused = Some(reason.clone());
        Err(Ended::Refused(reason))
    }

    /// Takes a page of a table. A table that is now whole becomes the known table, if it is newer.
    fn learn(&mut self, page: TablePage) -> Result<(), Ended> {
        let table = self.stream.reader.take(page)?;
        if let Some(table) = table.filter(|table| table.epoch > self.known.table.epoch) {
            (self.known.table, self.has_news) = (table, true);
        }
        Ok(())
    }

    fn tell_drains(&mut self) {
        let is_told = self.known.lacks_drains || self.stream.told == Some(self.drains);
        if self.stream.is_joined && !is_told {
            (self.stream.told, self.has_drained) = (Some(self.drains), true);
            self.messages.push_back(FollowerMessage::Drains(self.drains));
        }
    }
}

impl Stream {
    /// The time at which the coordinator is given up, unless it is heard before.
    fn silent_at(&self) -> Duration {
        self.heard + (self.every * 5 / 2).max(LEAST_PATIENCE)
    }
}

/// The interval of heartbeats before a coordinator names its own.
const FIRST_HEARTBEAT: Duration = Duration::from_secs(1);

/// The first and the longest pause between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The longest wait of a node, before it asks again, for another process of its name to fall silent.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The coordinator is given up and dialled again after two unanswered heartbeats, but not before this time, however short their
/// interval is.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests;
