//! The coordinators' client: keeps a stream to the coordinator that leads, and knows the latest table.
//!
//! It dials all coordinators again and again. While none leads, nodes go on with the last table. [`following`] decides, without
//! IO. If several addresses are known, a node checks from time to time whether two coordinators lead without knowing of each
//! other, and tells its own coordinator.

pub mod following;
mod rivals;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::table::NodeNumber;
use larder_protocol::v1;
use larder_protocol::version::Version;
use quinn::{ConnectionError, RecvStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub use self::following::{Candidate, Known};
use self::following::{Ended, Following};
pub use self::rivals::who;
use crate::in_one_line;
use crate::quic::{Connection, Endpoint, read_message, write_message};
use crate::warnings::Warnings;

/// The role of a follower.
pub enum FollowAs {
    /// A node that becomes a member.
    Node(NodeFacts),
    /// A watcher that only gets tables, from any coordinator.
    Watcher,
    /// A watcher that only gets tables, from this life of a coordinator.
    WatcherOf(u64),
}

/// The facts that a node tells the coordinator.
pub struct NodeFacts {
    /// The node, as it joins.
    pub candidate: Candidate,
    /// The members that do not answer the node at present.
    pub silent: Box<dyn Fn() -> Vec<NodeNumber> + Send>,
    /// Whether the node drains.
    pub drains: watch::Receiver<bool>,
}

/// Follows the coordinator that leads until `stop` is ready, and publishes every newer table. Each of `coordinators` is
/// `host:port`; each attempt resolves all of them anew and dials all their addresses. A watcher follows any coordinator, or one
/// that it names. Needs the runtime of the endpoint.
///
/// # Cancel safety
/// Dropped, it sends no goodbye: the coordinator notices the silence.
pub async fn follow(
    endpoint: Endpoint,
    coordinators: Vec<String>,
    follow_as: FollowAs,
    known: watch::Sender<Known>,
    stop: impl Future<Output = ()>,
) {
    let (following, node) = match follow_as {
        FollowAs::Node(facts) => (Following::node(facts.candidate, known.borrow().clone()), Some(facts)),
        FollowAs::Watcher => (Following::watcher(known.borrow().clone()), None),
        FollowAs::WatcherOf(life) => (Following::watcher_of(life, known.borrow().clone()), None),
    };
    let started = Instant::now();
    let mut client = CoordinatorClient {
        endpoint,
        coordinators,
        resolver: Resolver::default(),
        following,
        node,
        known,
        started,
        led: started,
        warnings: Warnings::default(),
    };
    tokio::pin!(stop);
    let (leave, leaving) = watch::channel(false);
    loop {
        let ended = {
            let attempt = client.follow_once(leaving.clone());
            tokio::pin!(attempt);
            tokio::select! {
                ended = &mut attempt => ended,
                () = &mut stop => {
                    leave.send_replace(true);
                    // The node says goodbye, if a coordinator hears it.
                    match timeout(LEAVE_DEADLINE, attempt).await {
                        Ok(Ok(())) => return,
                        _ => break,
                    }
                }
            }
        };
        if let Err(ended) = ended {
            client.has_failed(&ended);
        }
        let pause = client.following.pause(client.now());
        tokio::select! {
            () = sleep(pause) => {}
            () = &mut stop => break,
        }
    }
    leave.send_replace(true);
    client.say_goodbye(leaving).await;
}

struct CoordinatorClient {
    endpoint: Endpoint,
    coordinators: Vec<String>,
    resolver: Resolver,
    following: Following,
    /// `None` for a watcher.
    node: Option<NodeFacts>,
    known: watch::Sender<Known>,
    started: Instant,
    /// When the node was last a member, when a watcher last had a coordinator, or the client's start.
    led: Instant,
    warnings: Warnings,
}

type Failed = Box<dyn std::error::Error>;

impl CoordinatorClient {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Joins once more in order to leave: a coordinator that this member does not follow yet would otherwise call it lost.
    async fn say_goodbye(&mut self, leaving: watch::Receiver<bool>) {
        if self.node.is_none() || self.following.known().own == NodeNumber::default() {
            return;
        }
        let goodbye = async {
            while self.follow_once(leaving.clone()).await.is_err() {
                sleep(GOODBYE_PAUSE).await;
            }
        };
        // After the deadline, the coordinators notice the silence.
        let _ = timeout(LEAVE_DEADLINE, goodbye).await;
    }

    /// Dials all coordinators, and follows the first that leads, to the end of its stream.
    async fn follow_once(&mut self, mut leaving: watch::Receiver<bool>) -> Result<(), Failed> {
        let leader = self.following.dial(self.now());
        let names: Vec<String> = leader.into_iter().chain(self.coordinators.clone()).collect();
        let addresses = self.resolver.resolve(&names).await;
        let endpoint = self.endpoint.clone();
        let dial = |address| {
            let dial = endpoint.connect(address, Role::Coordinator, None);
            async move {
                let dialled =
                    timeout(DIAL_DEADLINE, dial).await.unwrap_or(Err(ConnectionError::TimedOut.into()));
                dialled.map_err(|error| {
                    Failed::from(format!("the coordinator at {address}: {}", in_one_line(&error)))
                })
            }
        };
        let mut dials: FuturesUnordered<_> = addresses.iter().map(|&address| dial(address)).collect();
        let mut ended: Failed = match addresses.is_empty() {
            true => {
                format!("none of these names of coordinators has an address: {}", names.join(", ")).into()
            }
            false => format!("no coordinator answers at {}", names.join(", ")).into(),
        };
        let mut patience = DIAL_DEADLINE;
        while let Ok(Some(dialled)) = timeout(patience, dials.next()).await {
            let followed = match dialled {
                Ok(connection) => {
                    // The others answer as fast, or are dead.
                    patience = OTHERS_DEADLINE;
                    match self.follow_over(&connection, &mut leaving, || dials.clear()).await {
                        Err(error) if !error.is::<Ended>() => Err(by_connection(&connection, &*error).await),
                        ended => ended,
                    }
                }
                Err(error) => Err(error),
            };
            match followed {
                Err(error) if !self.following.is_taken() => ended = error,
                followed => return followed,
            }
        }
        Err(ended)
    }

    /// Follows over one stream, from its start to its end. Calls `is_taken` when the coordinator leads and follows.
    async fn follow_over(
        &mut self,
        connection: &Connection,
        leaving: &mut watch::Receiver<bool>,
        is_taken: impl FnMut(),
    ) -> Result<(), Failed> {
        let (mut send, mut receive) = connection.quic().open_bi().await?;
        let version = connection.version();
        self.following.begin(self.now(), version);
        self.tell_news();
        let (sender, mut messages) = mpsc::channel(WAITING_MESSAGES);
        // Reading is not cancel safe: it has a task of its own.
        let reader = tokio::spawn(async move {
            while let Some(came) = read_messages(&mut receive, version).await {
                for message in came {
                    if sender.send(message).await.is_err() {
                        return;
                    }
                }
            }
        });
        let ended = self.talk(&mut send, &mut messages, leaving, is_taken).await;
        reader.abort();
        if self.following.is_joined() || (self.node.is_none() && self.following.is_taken()) {
            self.led = Instant::now();
        }
        ended
    }

    async fn talk(
        &mut self,
        send: &mut quinn::SendStream,
        messages: &mut mpsc::Receiver<CoordinatorMessage>,
        leaving: &mut watch::Receiver<bool>,
        mut is_taken: impl FnMut(),
    ) -> Result<(), Failed> {
        let mut drains =
            self.node.as_ref().map_or_else(|| watch::channel(false).1, |node| node.drains.clone());
        let (found, mut rivals) = mpsc::channel(1);
        let mut looking = None;
        loop {
            self.following.drains(*drains.borrow_and_update());
            while let Some(message) = self.following.poll_message() {
                write_message(send, &message).await?;
            }
            let due = self.following.next_deadline();
            tokio::select! {
                message = messages.recv() => {
                    let message = message.ok_or("it closed the stream")?;
                    if let CoordinatorMessage::Standing(standing) = &message && self.node.is_some() && standing.leads {
                        let look = rivals::look(self.endpoint.clone(), self.coordinators.clone(), standing.life, found.clone());
                        looking = Some(AbortOnDrop(tokio::spawn(look)));
                    }
                    self.hear(message)?;
                    if self.following.is_taken() {
                        is_taken();
                    }
                }
                Ok(()) = drains.changed(), if self.node.is_some() => {}
                Some(rival) = rivals.recv(), if looking.is_some() => {
                    write_message(send, &FollowerMessage::Rival(rival)).await?;
                }
                () = sleep_until(self.started + due.unwrap_or_default()), if due.is_some() => {
                    let silent = || self.node.as_ref().map(|node| (node.silent)()).unwrap_or_default();
                    self.following.tick(self.started.elapsed(), silent)?;
                }
                // A coordinator that does not lead hears no goodbye.
                _ = leaving.wait_for(|leaving| *leaving), if self.following.is_taken() => {
                    self.following.leave();
                    while let Some(message) = self.following.poll_message() {
                        write_message(send, &message).await?;
                    }
                    send.finish()?;
                    // The coordinator ends the stream when it has heard this; closing the connection earlier may lose the
                    // goodbye.
                    while messages.recv().await.is_some() {}
                    return Ok(());
                }
            }
        }
    }

    /// Handles a message of the coordinator, and publishes the news.
    fn hear(&mut self, message: CoordinatorMessage) -> Result<(), Ended> {
        match &message {
            CoordinatorMessage::Contested(rival) => {
                tracing::warn!(%rival, "another process wants to join under this node's name, and may not while this node lives: give each node its own name");
            }
            CoordinatorMessage::Joined(_) => self.warnings.are_over(),
            _ => {}
        }
        let heard = self.following.hear(self.now(), message);
        self.tell_news();
        match &heard {
            Err(Ended::Refused(reason)) if self.may_warn(reason) => {
                tracing::warn!(reason, "the coordinator does not let this node join");
            }
            Err(ended @ (Ended::EarlierTerm { .. } | Ended::NotWhole(_))) => {
                tracing::warn!(%ended, "this node does not follow that coordinator: it dials all coordinators again");
            }
            _ => {}
        }
        heard
    }

    fn tell_news(&mut self) {
        if let Some(known) = self.following.take_news() {
            self.known.send_replace(known);
        }
    }

    /// Notes that an attempt has failed. Logs the reason if no coordinator has led for long. A coordinator that refuses this node
    /// leads.
    fn has_failed(&mut self, ended: &Failed) {
        let is_another = matches!(ended.downcast_ref(), Some(Ended::Another));
        let reason = ended.to_string();
        self.following.failed(&reason);
        self.tell_news();
        let is_refused = matches!(ended.downcast_ref(), Some(Ended::Refused(_)));
        if is_refused || self.led.elapsed() <= WARN_AFTER || !self.may_warn("leaderless") {
            return;
        }
        if self.node.is_some() {
            tracing::warn!(
                reason,
                "no leading coordinator is found: this node shares chunks by its last table, and none if it has no table"
            );
        } else if is_another {
            let address = self.coordinators.join(",");
            tracing::warn!(
                "the coordinator at {address} is not the leader that the register names: set the leader's `[election] advertise` to its own host"
            );
        } else {
            tracing::warn!(
                coordinator = self.coordinators.join(","),
                reason,
                "the coordinator that leads cannot be followed: if it belongs to another cluster, give each cluster its own `[election] name`"
            );
        }
    }

    /// Whether to log a warning about this: the first time, and again from time to time.
    fn may_warn(&mut self, about: &str) -> bool {
        self.warnings.may_warn(self.now(), about)
    }
}

/// Names the coordinator whose stream ended with an error, and the reason why the connection was closed, if it was. A coordinator
/// that refuses a follower's certificate closes the connection after the follower's handshake.
async fn by_connection(connection: &Connection, error: &dyn std::error::Error) -> Failed {
    let quic = connection.quic();
    let closed = timeout(CLOSE_DEADLINE, quic.closed()).await;
    let reason = closed.map_or_else(|_| in_one_line(error), |closed| in_one_line(&closed));
    format!("the coordinator at {}: {reason}", quic.remote_address()).into()
}

/// Reads the next message of a coordinator that speaks this version, as messages of today; `None` at the end of the stream.
///
/// # Cancel safety
/// Dropped, it may have taken half a message off the stream.
pub async fn read_messages(receive: &mut RecvStream, version: Version) -> Option<Vec<CoordinatorMessage>> {
    if version < Version::SECOND {
        let message: v1::CoordinatorMessage = read_message(receive).await.ok()??;
        return Some(message.today());
    }
    Some(vec![read_message(receive).await.ok()??])
}

/// A task that ends with its owner.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Resolves the names of coordinators. A name that has no address, or is not resolved in time, keeps its last addresses.
#[derive(Default)]
struct Resolver(HashMap<String, Resolved>);

#[derive(Default, Clone)]
struct Resolved {
    addresses: Vec<SocketAddr>,
    /// Attempts since the last success.
    in_vain: u32,
}

impl Resolver {
    /// All addresses of these names, each once.
    async fn resolve(&mut self, names: &[String]) -> Vec<SocketAddr> {
        let found = names.iter().zip(self.deadlines(names)).map(|(name, deadline)| resolve(name, deadline));
        let found = join_all(found).await;
        let before = std::mem::take(&mut self.0);
        for (name, found) in names.iter().zip(found) {
            let Resolved { addresses, in_vain } = before.get(name).cloned().unwrap_or_default();
            let resolved = match found {
                Ok(addresses) => Resolved { addresses, in_vain: 0 },
                Err(_) => Resolved { addresses, in_vain: in_vain + 1 },
            };
            self.0.insert(name.clone(), resolved);
        }
        let mut seen = HashSet::new();
        let addresses = names.iter().flat_map(|name| &self.0[name].addresses).copied();
        addresses.filter(|address| seen.insert(*address)).take(MAX_ADDRESSES).collect()
    }

    /// How long the next resolution of each name may take. While the server of names is silent, a node follows a new leader at the
    /// known addresses, before it counts as suspect, also if another name never had an address. A server that is slow has more
    /// time in each further attempt.
    fn deadlines(&self, names: &[String]) -> Vec<Duration> {
        let has_address = |name: &String| {
            let is_resolved = self.0.get(name).is_some_and(|known| !known.addresses.is_empty());
            is_resolved || name.parse::<SocketAddr>().is_ok()
        };
        let deadline: fn(u32) -> Duration = match names.iter().any(has_address) {
            true => |in_vain| (RESOLVE_AGAIN_DEADLINE * 2_u32.pow(in_vain.min(4))).min(RESOLVE_DEADLINE),
            false => |_| RESOLVE_DEADLINE,
        };
        names.iter().map(|name| deadline(self.0.get(name).map_or(0, |known| known.in_vain))).collect()
    }
}

async fn resolve(name: &str, deadline: Duration) -> std::io::Result<Vec<SocketAddr>> {
    let found = timeout(deadline, tokio::net::lookup_host(name)).await;
    let found = found.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    found
        .map(Iterator::collect)
        .inspect_err(|error| tracing::debug!(name, %error, "the name of a coordinator has no address"))
}

/// The most addresses of coordinators to dial: five coordinators, each with three.
pub const MAX_ADDRESSES: usize = 16;

/// How long the reason for the end of a stream may take to come.
const CLOSE_DEADLINE: Duration = Duration::from_millis(100);

/// How long the resolution of a name may take.
const RESOLVE_DEADLINE: Duration = Duration::from_secs(5);

/// How long it may take at first, if an address of any coordinator is known.
const RESOLVE_AGAIN_DEADLINE: Duration = Duration::from_millis(500);

/// How long a handshake may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(2);

/// How much longer the handshakes of the other coordinators may take once one has answered.
const OTHERS_DEADLINE: Duration = Duration::from_millis(300);

/// How long a goodbye may take.
const LEAVE_DEADLINE: Duration = Duration::from_millis(500);

/// Pause between attempts to say goodbye.
const GOODBYE_PAUSE: Duration = Duration::from_millis(20);

/// A node logs a warning once no coordinator has led for this time.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// Messages that were read and wait to be handled.
const WAITING_MESSAGES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_that_is_not_resolved_any_more_keeps_its_last_addresses() {
        let (address, mut resolver) = ("127.0.0.1:7".parse().unwrap(), Resolver::default());
        // Without a port, it is no name.
        resolver.0.insert("lost".to_owned(), Resolved { addresses: vec![address], in_vain: 0 });
        let names = ["lost", "127.0.0.1:8", "127.0.0.1:7"].map(str::to_owned);
        let found = [address, "127.0.0.1:8".parse().unwrap()];
        assert_eq!(resolver.resolve(&names).await, found);
        assert_eq!(resolver.resolve(&names).await, found);
        let deadlines = resolver.deadlines(&names[..2]);
        assert_eq!(deadlines, [4 * RESOLVE_AGAIN_DEADLINE, RESOLVE_AGAIN_DEADLINE]);
    }

    #[test]
    fn a_name_that_never_had_an_address_delays_the_others_little() {
        let mut resolver = Resolver::default();
        let deadlines = |resolver: &Resolver, names: &[&str]| {
            resolver.deadlines(&names.iter().map(|&it| it.into()).collect::<Vec<_>>())
        };
        assert_eq!(deadlines(&resolver, &["new:1", "new:2"]), [RESOLVE_DEADLINE; 2], "there is no other");
        assert_eq!(deadlines(&resolver, &["new:1", "127.0.0.1:8"]), [RESOLVE_AGAIN_DEADLINE; 2]);
        let addresses = vec!["127.0.0.1:7".parse().unwrap()];
        resolver.0.insert("known:1".to_owned(), Resolved { addresses, in_vain: 0 });
        resolver.0.insert("new:1".to_owned(), Resolved { addresses: Vec::new(), in_vain: 9 });
        assert_eq!(deadlines(&resolver, &["new:1", "known:1"]), [RESOLVE_DEADLINE, RESOLVE_AGAIN_DEADLINE]);
    }
}
