//! The coordinators' client: keeps a stream to the coordinator that leads, and knows the latest table.
//!
//! It dials all coordinators again for ever. While none leads, their followers go on with the last table. A coordinator of an
//! earlier term than the table's is not obeyed. Where several addresses are known, a node looks from time to time whether two
//! coordinators lead that do not know of each other, and tells its own.

mod rivals;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, InUse, Join, Standing};
use larder_protocol::table::{Epoch, NodeNumber, Table, TablePage, TableReader, WrongPage, pages};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub use self::rivals::who;
use crate::quic::{Connection, Endpoint, read_message, write_message};

/// The role of a follower.
pub enum FollowAs {
    /// A node that becomes a member.
    Node(NodeFacts),
    /// A watcher that only gets tables.
    Watcher,
}

/// The facts that a node tells the coordinator.
pub struct NodeFacts {
    /// The node's incarnation: microseconds since 1970 at its start.
    pub incarnation: u64,
    /// Address for peers; for an unspecified IP address the coordinator takes the one that it sees.
    pub peer: SocketAddr,
    /// Address of its HTTP server.
    pub http: SocketAddr,
    /// GPU actors it has.
    pub devices: u16,
    /// Its share of the partitions.
    pub weight: u64,
    /// The members that do not answer the node at present.
    pub silent: Box<dyn Fn() -> Vec<NodeNumber> + Send>,
    /// Whether the node drains.
    pub drains: watch::Receiver<bool>,
}

/// The latest table.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// The table.
    pub table: Arc<Table>,
    /// The follower's own number, if it is a node and was ever a member.
    pub own: NodeNumber,
    /// The incarnation that the follower joined as.
    pub incarnation: u64,
    /// Why the coordinator does not let the follower join, as long as it does not.
    pub refused: Option<String>,
}

/// Follows the coordinator that leads until `stop` is ready, and tells every newer table. Each of `coordinators` is `host:port`;
/// all are resolved anew and all their addresses are dialled at each attempt. A watcher follows any coordinator. Needs the
/// runtime of the endpoint.
///
/// # Cancel safety
/// Dropped, it leaves without a word: the coordinator finds out by silence.
pub async fn follow(
    endpoint: Endpoint,
    coordinators: Vec<String>,
    follow_as: FollowAs,
    known: watch::Sender<Known>,
    stop: impl Future<Output = ()>,
) {
    let incarnation = if let FollowAs::Node(facts) = &follow_as { facts.incarnation } else { 0 };
    let (retry_after, warned) = (None, None);
    let reader = TableReader::default();
    let mut follower = CoordinatorClient {
        endpoint,
        coordinators,
        leader: None,
        follow_as,
        known,
        incarnation,
        is_taken: false,
        reader,
        retry_after,
        warned,
        has_drained: false,
    };
    tokio::pin!(stop);
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let (leave, leaving) = watch::channel(false);
        let ended = {
            let following = follower.follow_once(leaving);
            tokio::pin!(following);
            tokio::select! {
                ended = &mut following => ended,
                () = &mut stop => {
                    leave.send_replace(true);
                    // It says goodbye, if anybody hears it.
                    let _ = timeout(LEAVE_DEADLINE, following).await;
                    return;
                }
            }
        };
        tracing::debug!(coordinators = ?follower.coordinators, ended = ?ended, "the coordinators are dialled again");
        if started.elapsed() > LAST_PAUSE {
            pause = FIRST_PAUSE;
        }
        let asked = follower.retry_after.take();
        tokio::select! {
            () = sleep(asked.unwrap_or(pause)) => {}
            () = &mut stop => return,
        }
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

struct CoordinatorClient {
    endpoint: Endpoint,
    coordinators: Vec<String>,
    /// Where the leader is, as another coordinator said.
    leader: Option<String>,
    follow_as: FollowAs,
    known: watch::Sender<Known>,
    incarnation: u64,
    /// Whether the other side of the present stream leads, or is good enough for a watcher.
    is_taken: bool,
    /// The tables of the present stream.
    reader: TableReader,
    /// When the coordinator wants to be asked again.
    retry_after: Option<Duration>,
    /// The last refusal that the log has, and since when.
    warned: Option<(String, Instant)>,
    /// Whether a coordinator was told that the node drains, or does no more.
    has_drained: bool,
}

type Ended = Box<dyn std::error::Error>;

impl CoordinatorClient {
    /// Dials all coordinators, and follows the first that leads, to the end of its stream.
    async fn follow_once(&mut self, mut leaving: watch::Receiver<bool>) -> Result<(), Ended> {
        let names: Vec<String> = self.leader.take().into_iter().chain(self.coordinators.clone()).collect();
        let addresses = resolve(&names).await;
        let endpoint = self.endpoint.clone();
        let dial = |address| {
            let dial = endpoint.connect(address, Role::Coordinator, None);
            async move { Ok::<_, Ended>(timeout(DIAL_DEADLINE, dial).await??) }
        };
        let mut dials: FuturesUnordered<_> = addresses.iter().map(|&address| dial(address)).collect();
        let mut ended: Ended = "no name of a coordinator has an address".into();
        let mut patience = DIAL_DEADLINE;
        while let Ok(Some(dialled)) = timeout(patience, dials.next()).await {
            self.is_taken = false;
            let followed = match dialled {
                Ok(connection) => {
                    // The others answer as fast, or are dead.
                    patience = OTHERS_DEADLINE;
                    self.follow_over(&connection, &mut leaving).await
                }
                Err(error) => Err(error),
            };
            match followed {
                Err(error) if !self.is_taken => ended = error,
                followed => return followed,
            }
        }
        Err(ended)
    }

    /// Follows over one stream, from its start to its end.
    async fn follow_over(
        &mut self,
        connection: &Connection,
        leaving: &mut watch::Receiver<bool>,
    ) -> Result<(), Ended> {
        let (mut send, mut receive) = connection.quic().open_bi().await?;
        write_message(&mut send, &self.first_message()).await?;
        self.reader = TableReader::default();
        let (sender, mut messages) = mpsc::channel(WAITING_MESSAGES);
        // Reading is not cancel safe: it has a task of its own.
        let reader = tokio::spawn(async move {
            while let Ok(Some(message)) = read_message::<CoordinatorMessage>(&mut receive).await {
                if sender.send(message).await.is_err() {
                    return;
                }
            }
        });
        let ended = self.talk(&mut send, &mut messages, leaving).await;
        reader.abort();
        ended
    }

    async fn talk(
        &mut self,
        send: &mut quinn::SendStream,
        messages: &mut mpsc::Receiver<CoordinatorMessage>,
        leaving: &mut watch::Receiver<bool>,
    ) -> Result<(), Ended> {
        let mut every = Duration::from_secs(1);
        let mut next_beat = Instant::now() + every;
        let mut heard = Instant::now();
        let is_node = matches!(self.follow_as, FollowAs::Node(_));
        let mut drains = match &self.follow_as {
            FollowAs::Node(facts) => facts.drains.clone(),
            FollowAs::Watcher => watch::channel(false).1,
        };
        let (mut is_joined, mut told) = (false, None);
        let (found, mut rivals) = mpsc::channel(1);
        let mut looking = None;
        loop {
            let wish = *drains.borrow_and_update();
            if is_joined && told != Some(wish) {
                write_message(send, &FollowerMessage::Drains(wish)).await?;
                (told, self.has_drained) = (Some(wish), true);
            }
            tokio::select! {
                message = messages.recv() => {
                    heard = Instant::now();
                    let message = message.ok_or("the coordinator closed the stream")?;
                    if let CoordinatorMessage::Standing(standing) = &message && is_node && standing.leads {
                        let look = rivals::look(self.endpoint.clone(), self.coordinators.clone(), standing.life, found.clone());
                        looking = Some(AbortOnDrop(tokio::spawn(look)));
                    }
                    if message == CoordinatorMessage::Bring && self.is_taken {
                        let table = Arc::clone(&self.known.borrow().table);
                        for page in pages(&Table::default(), &table) {
                            write_message(send, &FollowerMessage::Brings(page)).await?;
                        }
                    }
                    if let Some(heartbeat) = self.hear(message)? {
                        every = heartbeat;
                        next_beat = Instant::now() + every;
                        is_joined = true;
                        // Of a node that began to drain the coordinator may know it, or have forgotten it.
                        told = if self.has_drained { None } else { Some(false) };
                    }
                }
                Ok(()) = drains.changed(), if is_joined => {}
                Some(rival) = rivals.recv(), if looking.is_some() => {
                    write_message(send, &FollowerMessage::Rival(rival)).await?;
                }
                () = sleep_until(next_beat), if is_node => {
                    next_beat = Instant::now() + every;
                    let silent = if let FollowAs::Node(facts) = &self.follow_as { (facts.silent)() } else { Vec::new() };
                    let beat = Heartbeat { epoch: self.epoch(), silent };
                    write_message(send, &FollowerMessage::Heartbeat(beat)).await?;
                }
                // It may have started again: nothing else would tell before the connection is idle for long.
                () = sleep_until(heard + (every * 5 / 2).max(LEAST_PATIENCE)), if is_node => {
                    return Err("the coordinator does not answer heartbeats".into());
                }
                _ = leaving.wait_for(|leaving| *leaving) => {
                    write_message(send, &FollowerMessage::Leave).await?;
                    send.finish()?;
                    send.stopped().await?;
                    return Ok(());
                }
            }
        }
    }

    /// Takes a message of the coordinator. Returns the interval of heartbeats, if the message names one.
    fn hear(&mut self, message: CoordinatorMessage) -> Result<Option<Duration>, Ended> {
        match message {
            CoordinatorMessage::Standing(standing) => self.judge(standing)?,
            _ if !self.is_taken => return Err("the coordinator does not say whether it leads".into()),
            CoordinatorMessage::Joined(joined) => {
                let incarnation = self.incarnation;
                self.known.send_modify(|known| {
                    (known.own, known.incarnation) = (joined.number, incarnation);
                    known.refused = None;
                });
                self.warned = None;
                return Ok(Some(Duration::from_millis(joined.heartbeat_ms.max(1))));
            }
            CoordinatorMessage::Outdated(at_least) => {
                self.incarnation = at_least.max(self.incarnation.saturating_add(1));
                return Err("a later life of this node is known".into());
            }
            CoordinatorMessage::InUse(InUse { address, retry_after_ms }) => {
                let retry_after = Duration::from_millis(retry_after_ms);
                self.retry_after = Some(retry_after.clamp(FIRST_PAUSE, LONGEST_WAIT));
                let own = self.own_address();
                return Err(self.refused(format!(
                    "another process of this node's name lives at {address}, this one at {own}: stop one of them, or give it a name and certificate of its own"
                )));
            }
            CoordinatorMessage::Refused(reason) => {
                self.retry_after = Some(LAST_PAUSE);
                return Err(self.refused(reason));
            }
            CoordinatorMessage::Contested(rival) => {
                let own = self.own_address();
                tracing::warn!(%rival, own, "another process wants to join under this node's name: it may not while this node lives");
            }
            CoordinatorMessage::Removed => return Err("this node was removed".into()),
            CoordinatorMessage::Table(page) => self.learn(page)?,
            CoordinatorMessage::Heard | CoordinatorMessage::Bring | CoordinatorMessage::Reloaded(_) => {}
        }
        Ok(None)
    }

    /// Decides whether this coordinator is followed.
    fn judge(&mut self, standing: Standing) -> Result<(), Ended> {
        let Standing { term, leads, leader, .. } = standing;
        self.is_taken = false;
        if !leads && matches!(self.follow_as, FollowAs::Node(_)) {
            if leader.is_some() {
                self.retry_after = Some(FIRST_PAUSE);
            }
            self.leader = leader;
            return Err("the coordinator does not lead".into());
        }
        let known = self.epoch().term;
        if term < known {
            tracing::warn!(term, known, "a coordinator of an earlier term is not obeyed");
            return Err("the coordinator is of an earlier term".into());
        }
        self.is_taken = true;
        Ok(())
    }

    /// Notes why this node is no member. The log has it at first, and from time to time.
    fn refused(&mut self, reason: String) -> Ended {
        let is_old = |(said, since): &(String, Instant)| *said == reason && since.elapsed() < WARN_AGAIN;
        if !self.warned.as_ref().is_some_and(is_old) {
            tracing::warn!(reason, "the coordinator does not let this node join");
            self.warned = Some((reason.clone(), Instant::now()));
        }
        self.known.send_if_modified(|known| {
            let is_news = known.refused.as_ref() != Some(&reason);
            known.refused = Some(reason.clone());
            is_news
        });
        reason.into()
    }

    fn own_address(&self) -> String {
        match &self.follow_as {
            FollowAs::Node(facts) => facts.peer.to_string(),
            FollowAs::Watcher => String::new(),
        }
    }

    fn first_message(&self) -> FollowerMessage {
        match &self.follow_as {
            FollowAs::Watcher => FollowerMessage::Watch,
            FollowAs::Node(facts) => FollowerMessage::Join(Join {
                incarnation: self.incarnation,
                epoch: self.epoch(),
                peer: facts.peer,
                http: facts.http,
                devices: facts.devices,
                weight: facts.weight,
            }),
        }
    }

    fn epoch(&self) -> Epoch {
        self.known.borrow().table.epoch
    }

    /// Takes some of a table; one that is whole is known from now on, if it is newer than the one before.
    fn learn(&mut self, page: TablePage) -> Result<(), WrongPage> {
        let taken = self.reader.take(page);
        if let Err(wrong) = &taken {
            tracing::warn!(%wrong, "the coordinator sent a table that is not whole: it is dialled again");
        }
        let Some(table) = taken? else { return Ok(()) };
        self.known.send_if_modified(|known| {
            let is_newer = table.epoch > known.table.epoch;
            if is_newer {
                known.table = table;
            }
            is_newer
        });
        Ok(())
    }
}

/// A task that ends with its owner.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// All addresses of these names, each once. A name that has none now may have one at the next attempt.
async fn resolve(names: &[String]) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for name in names {
        match tokio::net::lookup_host(name).await {
            Ok(found) => addresses.extend(found),
            Err(error) => tracing::debug!(name, %error, "the name of a coordinator has no address"),
        }
    }
    let mut seen = HashSet::new();
    addresses.retain(|address| seen.insert(*address));
    addresses.truncate(MAX_ADDRESSES);
    addresses
}

/// Addresses of coordinators that are dialled: five coordinators, each with three.
const MAX_ADDRESSES: usize = 16;

/// How long a handshake may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);

/// How much longer the handshakes of the other coordinators may take once one has answered.
const OTHERS_DEADLINE: Duration = Duration::from_millis(300);

/// How long a goodbye may take.
const LEAVE_DEADLINE: Duration = Duration::from_millis(500);

/// Pauses between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The longest that a node waits for another of its name to fall silent, before it asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The log is told again after this time why a node may not join.
const WARN_AGAIN: Duration = Duration::from_secs(60);

/// The coordinator is dialled again when two heartbeats are not answered; but it may be as late as this, however often it
/// wants them.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);

/// Messages that were read and wait.
const WAITING_MESSAGES: usize = 16;
