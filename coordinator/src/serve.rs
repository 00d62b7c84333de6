//! Serving those who follow: streams of nodes and watchers.

use std::net::IpAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_client::quic::{Connection, Endpoint, Incoming, read_message, write_message};
use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Join};
use larder_protocol::table::{NodeNumber, Table};
use quinn::{RecvStream, SendStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::timeout;

use crate::membership::{JoinRefused, Membership};
use crate::metrics::Metrics;
use crate::server::Uptime;

/// The membership, shared with HTTP. It is locked for moments only.
#[derive(Debug, Clone)]
pub(crate) struct SharedMembership(Arc<Mutex<Membership>>);

impl SharedMembership {
    pub(crate) fn new(membership: Membership) -> Self {
        Self(Arc::new(Mutex::new(membership)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Membership> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What followers are served with.
pub(crate) struct Server {
    pub(crate) membership: SharedMembership,
    pub(crate) tables: watch::Receiver<Arc<Table>>,
    pub(crate) metrics: Metrics,
    pub(crate) uptime: Uptime,
}

/// Serves until the endpoint is closed.
pub(crate) async fn serve(endpoint: Endpoint, server: Server) {
    let server = Rc::new(server);
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Some(incoming) = endpoint.accept().await {
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            server.metrics.rejected("connections");
            continue;
        };
        let server = Rc::clone(&server);
        actix_rt::spawn(async move {
            server.serve_connection(incoming).await;
            drop(place);
        });
    }
}

impl Server {
    async fn serve_connection(&self, incoming: Incoming) {
        let remote = incoming.remote();
        let connection = match timeout(HANDSHAKE_DEADLINE, incoming.accept()).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(rejected)) => {
                tracing::warn!(%remote, %rejected, source = %rejected.source, "a connection was turned away");
                return self.metrics.rejected(rejected.reason);
            }
            Err(_) => return self.metrics.rejected("handshake"),
        };
        // One stream a connection: a follower needs no more.
        let Ok(Ok((send, mut receive))) = timeout(REQUEST_DEADLINE, connection.quic().accept_bi()).await
        else {
            return;
        };
        let first = timeout(REQUEST_DEADLINE, read_message::<FollowerMessage>(&mut receive)).await;
        let Ok(Ok(Some(first))) = first else { return self.metrics.rejected("malformed") };
        match (first, connection.peer().role) {
            (FollowerMessage::Join(join), Role::Node) => {
                self.serve_node(&connection, join, send, receive).await;
            }
            (FollowerMessage::Watch, Role::Node | Role::Engine | Role::Admin) => {
                let (_keep, messages) = mpsc::channel(1);
                write(send, messages, self.tables.clone(), &self.metrics).await;
            }
            _ => {
                self.metrics.rejected("not_allowed");
                tracing::warn!(peer = %connection.peer(), %remote, "this role may not follow like this");
            }
        }
    }

    async fn serve_node(
        &self,
        connection: &Connection,
        mut join: Join,
        send: SendStream,
        mut receive: RecvStream,
    ) {
        let name = &connection.peer().name;
        let seen = connection.quic().remote_address().ip();
        for address in [&mut join.peer, &mut join.http] {
            if address.ip().is_unspecified() {
                address.set_ip(plain(seen));
            }
        }
        let incarnation = join.incarnation;
        let joined = self.membership.lock().join(name, &join, self.uptime.now());
        let (sender, messages) = mpsc::channel(WAITING_MESSAGES);
        let (metrics, tables) = (self.metrics.clone(), self.tables.clone());
        let writing = actix_rt::spawn(async move { write(send, messages, tables, &metrics).await });
        let number = match joined {
            Ok(joined) => {
                tracing::info!(node = name, number = joined.number.0, incarnation, "a node joined");
                // The writer is there until this returns.
                let _ = sender.send(CoordinatorMessage::Joined(joined)).await;
                joined.number
            }
            Err(JoinRefused::Outdated(at_least)) => {
                let _ = sender.send(CoordinatorMessage::Outdated(at_least)).await;
                drop(sender);
                let _ = writing.await;
                return;
            }
            Err(JoinRefused::Full) => return self.metrics.rejected("full"),
        };
        self.listen(name, number, incarnation, &mut receive, &sender).await;
        drop(sender);
        if timeout(FLUSH_DEADLINE, writing).await.is_err() {
            tracing::debug!(node = name, "a node does not read what it is told");
        }
    }

    /// Hears a node until its stream ends.
    async fn listen(
        &self,
        name: &str,
        number: NodeNumber,
        incarnation: u64,
        receive: &mut RecvStream,
        sender: &mpsc::Sender<CoordinatorMessage>,
    ) {
        loop {
            match read_message(receive).await {
                Ok(Some(FollowerMessage::Heartbeat(beat))) => {
                    let now = self.uptime.now();
                    let is_member = self.membership.lock().heartbeat(number, incarnation, &beat, now);
                    let answer =
                        if is_member { CoordinatorMessage::Heard } else { CoordinatorMessage::Removed };
                    // A node that does not read its answers may miss some.
                    let _ = sender.try_send(answer);
                    if !is_member {
                        return;
                    }
                }
                Ok(Some(FollowerMessage::Leave)) => {
                    tracing::info!(node = name, "a node leaves");
                    self.membership.lock().leave(number, incarnation);
                    return;
                }
                Ok(Some(FollowerMessage::Join(_) | FollowerMessage::Watch)) => {
                    return self.metrics.rejected("out_of_order");
                }
                Ok(None) | Err(_) => return,
            }
        }
    }
}

/// Tells a follower what it is to hear, and every new table; of several that came while it did not read, the last.
async fn write(
    mut send: SendStream,
    mut messages: mpsc::Receiver<CoordinatorMessage>,
    mut tables: watch::Receiver<Arc<Table>>,
    metrics: &Metrics,
) {
    tables.mark_changed();
    loop {
        let message = tokio::select! {
            biased;
            message = messages.recv() => match message {
                Some(message) => message,
                None => break,
            },
            changed = tables.changed() => {
                if changed.is_err() {
                    break;
                }
                let table = Arc::clone(&tables.borrow_and_update());
                if table.epoch.number == 0 {
                    continue;
                }
                metrics.table_pushed();
                CoordinatorMessage::Table((*table).clone())
            }
            _ = send.stopped() => return,
        };
        if write_message(&mut send, &message).await.is_err() {
            return;
        }
    }
    // Errors: it went away.
    let _ = send.finish();
    let _ = timeout(FLUSH_DEADLINE, send.stopped()).await;
}

/// An IPv4 address that came over an IPv6 socket, as itself.
fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// Connections at a time.
const MAX_CONNECTIONS: usize = 8_192;

const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// How long a follower may take to read the last words.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);

/// Answers that wait for a follower to read them.
const WAITING_MESSAGES: usize = 16;
