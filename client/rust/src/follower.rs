//! The follower: keeps a stream to the coordinator, and knows the latest table.
//!
//! It dials again for ever, so that neither side's absence is more than that: whoever follows goes on with the last table.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Heartbeat, Join};
use larder_protocol::table::{Epoch, NodeNumber, Table};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::quic::{Endpoint, read_message, write_message};

/// As what to follow.
pub enum FollowAs {
    /// As a node that is a member.
    Node(NodeFacts),
    /// As somebody who looks on.
    Watcher,
}

/// What a node tells the coordinator.
pub struct NodeFacts {
    /// Which life of it this is: microseconds since 1970 at its start.
    pub incarnation: u64,
    /// Where peers reach it; an unspecified IP address stands for the one that the coordinator sees.
    pub peer: SocketAddr,
    /// Where it serves HTTP.
    pub http: SocketAddr,
    /// GPU actors it has.
    pub devices: u16,
    /// Its share of the partitions.
    pub weight: u64,
    /// Which members do not answer it just now.
    pub silent: Box<dyn Fn() -> Vec<NodeNumber> + Send>,
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
    let mut follower = Follower { endpoint, coordinator, follow_as, known, incarnation };
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
        tokio::select! {
            () = sleep(pause) => {}
            () = &mut stop => return,
        }
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

struct Follower {
    endpoint: Endpoint,
    coordinator: String,
    follow_as: FollowAs,
    known: watch::Sender<Known>,
    incarnation: u64,
}

type Ended = Box<dyn std::error::Error>;

impl Follower {
    /// One stream, from its start to its end.
    async fn follow_once(&mut self, mut leaving: watch::Receiver<bool>) -> Result<(), Ended> {
        let address =
            tokio::net::lookup_host(&self.coordinator).await?.next().ok_or("its name has no address")?;
        let dial = self.endpoint.connect(address, Role::Coordinator, None);
        let connection = timeout(DIAL_DEADLINE, dial).await??;
        let (mut send, mut receive) = connection.quic().open_bi().await?;
        write_message(&mut send, &self.first_message()).await?;
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
        let is_node = matches!(self.follow_as, FollowAs::Node(_));
        loop {
            tokio::select! {
                message = messages.recv() => match message.ok_or("the coordinator closed the stream")? {
                    CoordinatorMessage::Joined(joined) => {
                        every = Duration::from_millis(joined.heartbeat_ms.max(1));
                        next_beat = Instant::now() + every;
                        let incarnation = self.incarnation;
                        self.known.send_modify(|known| {
                            (known.own, known.incarnation) = (joined.number, incarnation);
                        });
                    }
                    CoordinatorMessage::Outdated(at_least) => {
                        self.incarnation = at_least.max(self.incarnation + 1);
                        return Err("a later life of this node is known".into());
                    }
                    CoordinatorMessage::Removed => return Err("this node was removed".into()),
                    CoordinatorMessage::Table(table) => self.learn(table),
                    CoordinatorMessage::Heard => {}
                },
                () = sleep_until(next_beat), if is_node => {
                    next_beat += every;
                    let silent = if let FollowAs::Node(facts) = &self.follow_as { (facts.silent)() } else { Vec::new() };
                    let beat = Heartbeat { epoch: self.epoch(), silent };
                    write_message(send, &FollowerMessage::Heartbeat(beat)).await?;
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

    /// Takes a table that is whole and newer than the one known.
    fn learn(&self, table: Table) {
        if !table.is_consistent() {
            tracing::warn!(epoch = %table.epoch, "the coordinator sent a table that is not whole");
            return;
        }
        self.known.send_if_modified(|known| {
            let is_newer = table.epoch > known.table.epoch;
            if is_newer {
                known.table = Arc::new(table);
            }
            is_newer
        });
    }
}

/// How long a handshake may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);

/// How long a goodbye may take.
const LEAVE_DEADLINE: Duration = Duration::from_millis(500);

/// Pauses between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Messages that were read and wait.
const WAITING_MESSAGES: usize = 16;
