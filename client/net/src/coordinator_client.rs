//! The coordinator's client: keeps a stream to the coordinator, and knows the latest table.
//!
//! It dials again for ever. While the coordinator is away, its followers go on with the last table.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, InUse, Join};
use larder_protocol::table::{Epoch, NodeNumber, Table, TablePage, TableReader, WrongPage};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::quic::{Endpoint, read_message, write_message};

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

/// Follows a coordinator until `stop` is ready, and tells every newer table. `coordinator` is `host:port`, and is resolved
/// anew at each attempt. Needs the runtime of the endpoint.
///
/// # Cancel safety
/// Dropped, it leaves without a word: the coordinator finds out by silence.
pub async fn follow(
    endpoint: Endpoint,
    coordinator: String,
    follow_as: FollowAs,
    known: watch::Sender<Known>,
    stop: impl Future<Output = ()>,
) {
    let incarnation = if let FollowAs::Node(facts) = &follow_as { facts.incarnation } else { 0 };
    let (retry_after, warned) = (None, None);
    let reader = TableReader::default();
    let mut follower = CoordinatorClient {
        endpoint,
        coordinator,
        follow_as,
        known,
        incarnation,
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
        tracing::debug!(coordinator = follower.coordinator, ended = ?ended, "the coordinator is dialled again");
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
    coordinator: String,
    follow_as: FollowAs,
    known: watch::Sender<Known>,
    incarnation: u64,
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
    /// Follows over one stream, from its start to its end.
    async fn follow_once(&mut self, mut leaving: watch::Receiver<bool>) -> Result<(), Ended> {
        let address =
            tokio::net::lookup_host(&self.coordinator).await?.next().ok_or("its name has no address")?;
        let dial = self.endpoint.connect(address, Role::Coordinator, None);
        let connection = timeout(DIAL_DEADLINE, dial).await??;
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
        let ended = self.talk(&mut send, &mut messages, &mut leaving).await;
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
                    if let Some(heartbeat) = self.hear(message)? {
                        every = heartbeat;
                        next_beat = Instant::now() + every;
                        is_joined = true;
                        // Of a node that began to drain the coordinator may know it, or have forgotten it.
                        told = if self.has_drained { None } else { Some(false) };
                    }
                }
                Ok(()) = drains.changed(), if is_joined => {}
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
            CoordinatorMessage::Heard => {}
        }
        Ok(None)
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

/// How long a handshake may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);

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
