//! Serves the streams of nodes and watchers.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use larder_net::audit::Audit;
use larder_net::coordinator_client::{MAX_ADDRESSES, who};
use larder_net::quic::{
    Asked, Endpoint, Guest, GuestLimits, Guests, Incoming, MessageError, write_encoded, write_message,
};
use larder_net::warnings::Warnings;
use larder_protocol::identity::Role;
use larder_protocol::limits::{MAX_MEMBERS, MAX_NAME_BYTES, MAX_PEER_MESSAGE_BYTES};
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, InUse, Join, Standing};
use larder_protocol::table::{Epoch, NodeNumber, Table, TableReader};
use larder_protocol::v1;
use larder_protocol::version::Version;
use quinn::{RecvStream, SendStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use crate::elect::{Part, Rival};
use crate::membership::{Beat, JoinRefused};
use crate::metrics::Metrics;
use crate::published::Published;
use crate::reload::Reloads;
use crate::rivals::RivalReports;
use crate::shared::SharedMembership;
use crate::uptime::Uptime;

/// The server of followers.
pub(crate) struct Server {
    pub(crate) membership: SharedMembership,
    pub(crate) tables: watch::Receiver<Arc<Published>>,
    pub(crate) metrics: Metrics,
    pub(crate) uptime: Uptime,
    pub(crate) part: Part,
    pub(crate) endpoint: Endpoint,
    pub(crate) reloads: Reloads,
    pub(crate) audit: Audit,
    /// The time for which an elected coordinator may lead beside a successor that it does not know yet.
    pub(crate) yields_after: Duration,
    pub(crate) doubts: Doubts,
    /// Warnings about nodes that may not join, by name.
    pub(crate) warnings: RefCell<Warnings>,
}

/// What speaks for another leader.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    /// Whether a check of another leader is under way.
    is_checking: Cell<bool>,
    /// Other leaders that members report.
    reports: RefCell<RivalReports>,
}

/// Serves until the endpoint is closed.
pub(crate) async fn serve(endpoint: Endpoint, server: Server) {
    let (server, guests) = (Rc::new(server), Guests::new(limits_of, MAX_MEMBER_CONNECTIONS));
    while let Some(incoming) = endpoint.accept().await {
        let (server, guests) = (Rc::clone(&server), guests.clone());
        actix_rt::spawn(async move { server.serve_connection(incoming, &guests).await });
    }
}

impl Server {
    async fn serve_connection(self: &Rc<Self>, incoming: Incoming, guests: &Guests) {
        let guest = match guests.receive(incoming).await {
            Ok(Some(guest)) => guest,
            Ok(None) => return,
            Err(turned_away) => return self.metrics.rejected(turned_away.reason),
        };
        let connection = guest.connection();
        // One stream a connection: a follower needs no more.
        let Ok(Ok((send, mut receive))) = timeout(REQUEST_DEADLINE, connection.quic().accept_bi()).await
        else {
            return;
        };
        let first = match timeout(REQUEST_DEADLINE, guest.seat().read::<FollowerMessage>(&mut receive)).await
        {
            Ok(Ok(Some(Asked { message, .. }))) => message,
            Ok(Err(MessageError::TooLong { .. })) => return self.metrics.rejected("too_long"),
            _ => return self.metrics.rejected("malformed"),
        };
        match (first, connection.peer().role) {
            (FollowerMessage::Join(join), Role::Node) => {
                self.serve_node(&guest, join, send, receive).await;
            }
            (FollowerMessage::Watch, Role::Node | Role::Engine | Role::Admin | Role::Coordinator) => {
                let (keep, messages) = mpsc::channel(1);
                // The channel has room for one message.
                let _ = keep.try_send(CoordinatorMessage::Standing(self.standing()));
                write((send, connection.version()), messages, self.tables.clone(), &self.metrics).await;
            }
            (FollowerMessage::Reload, Role::Admin) => {
                let by = format!("admin {}", connection.peer().name);
                let answer = match self.reloads.reload(&by).await {
                    Ok(reloaded) => CoordinatorMessage::Reloaded(Box::new(reloaded)),
                    Err(refused) => CoordinatorMessage::Refused(refused),
                };
                answer_admin(send, &answer).await;
            }
            (FollowerMessage::Forget(node), Role::Admin) => {
                let by = format!("admin {}", connection.peer().name);
                let answer = match self.membership.forget(&node, &by, &self.audit) {
                    Ok(was_lost) => CoordinatorMessage::Forgot(was_lost),
                    Err(refused) => CoordinatorMessage::Refused(refused.to_string()),
                };
                answer_admin(send, &answer).await;
            }
            (FollowerMessage::Who(asker), role) => {
                let asker = asker.filter(|_| role == Role::Coordinator);
                self.serve_questions(&guest, asker, send, receive).await;
            }
            _ => {
                self.metrics.rejected("not_allowed");
                guest.log_refused("a process of this role may not send this message to a coordinator");
            }
        }
    }

    async fn serve_node(
        self: &Rc<Self>,
        guest: &Guest,
        mut join: Join,
        send: SendStream,
        mut receive: RecvStream,
    ) {
        let connection = guest.connection();
        let name = &connection.peer().name;
        let seen = plain(connection.quic().remote_address().ip());
        let mut taken = None;
        for address in [&mut join.peer, &mut join.http] {
            if address.ip().is_unspecified() {
                address.set_ip(seen);
                taken = Some(seen);
            }
        }
        let (incarnation, version) = (join.incarnation, connection.version());
        let (joined, wants) = {
            let mut membership = self.membership.lock();
            let joined = membership.join(name, &join, self.uptime.now());
            if let Ok(joined) = &joined {
                membership.speaks(joined.number, incarnation, version);
            }
            // A node of version 1 cannot bring its table: it must not take the place of one that can.
            let may_bring = joined.is_ok() && version >= Version::SECOND;
            let wants = may_bring && membership.wants(join.epoch);
            (joined, wants)
        };
        let (sender, messages) = mpsc::channel(WAITING_MESSAGES);
        let (metrics, tables) = (self.metrics.clone(), self.tables.clone());
        let writing =
            actix_rt::spawn(async move { write((send, version), messages, tables, &metrics).await });
        // The writer runs until this function returns.
        let _ = sender.send(CoordinatorMessage::Standing(self.standing())).await;
        let number = match joined {
            Ok(joined) => {
                tracing::info!(node = name, number = joined.number.0, incarnation, %version, "a node joined");
                if version < Version::LATEST {
                    tracing::warn!(node = name, %version, latest = %Version::LATEST, "a node speaks an earlier version: upgrade it, too");
                }
                let _ = sender.send(CoordinatorMessage::Joined(joined)).await;
                if wants {
                    let _ = sender.send(CoordinatorMessage::Bring).await;
                }
                joined.number
            }
            Err(refused) => {
                if let Some(refusal) = self.refusal(name, join.peer, refused) {
                    let _ = sender.send(refusal).await;
                }
                drop(sender);
                let _ = writing.await;
                return;
            }
        };
        let brings = wants.then(TableReader::default);
        self.listen(guest, (number, incarnation), taken, &mut receive, &sender, brings).await;
        drop(sender);
        if timeout(FLUSH_DEADLINE, writing).await.is_err() {
            tracing::debug!(node = name, "a node does not read its messages");
        }
    }

    fn standing(&self) -> Standing {
        self.part.standing(&self.membership, self.uptime)
    }

    /// Tells this coordinator's standing. Another coordinator may ask again on the same stream.
    async fn serve_questions(
        self: &Rc<Self>,
        guest: &Guest,
        mut asker: Option<Standing>,
        mut send: SendStream,
        mut receive: RecvStream,
    ) {
        loop {
            if let Some(asker) = asker.take() {
                self.compare(guest.connection().quic().remote_address(), &asker);
            }
            let answer = CoordinatorMessage::Standing(self.standing());
            if write_message(&mut send, &answer).await.is_err() {
                return;
            }
            if guest.connection().peer().role != Role::Coordinator {
                break;
            }
            match guest.seat().read(&mut receive).await {
                Ok(Some(Asked { message: FollowerMessage::Who(again), .. })) => asker = again,
                Ok(Some(_)) => return self.metrics.rejected("out_of_order"),
                Ok(None) | Err(_) => return,
            }
        }
        // An error means that the asker went away.
        let _ = send.finish();
        let _ = timeout(FLUSH_DEADLINE, send.stopped()).await;
    }

    /// Whether this coordinator should yield to another that leads in a higher term. Without an election it does so only if most of
    /// its members follow either.
    fn yields_to(&self, other: &Standing) -> bool {
        let members = self.membership.lock().heard_members();
        self.standing().yields_to(other)
            && self.doubts.reports.borrow().are_of_most(other.life, &members, self.uptime.now())
    }

    /// Yields to another coordinator that leads in a higher term, unless this coordinator hears of that term in time. In its grace
    /// time it waits for its members, since without them it has nothing to lose.
    fn compare(self: &Rc<Self>, address: SocketAddr, other: &Standing) {
        if !self.yields_to(other) || self.doubts.is_checking.replace(true) {
            return;
        }
        let (server, other) = (Rc::clone(self), other.clone());
        let grace = Duration::from_millis(self.membership.lock().grace_left(self.uptime.now()));
        actix_rt::spawn(async move {
            sleep(server.yields_after.max(grace)).await;
            server.doubts.is_checking.set(false);
            if server.yields_to(&other) {
                // An error means that this coordinator stops already.
                let _ = server.part.rivals.try_send(Rival { address, term: other.term });
            }
        });
    }

    /// The answer to a node that may not join; `None` if this coordinator's standing says enough.
    fn refusal(&self, name: &str, address: SocketAddr, refused: JoinRefused) -> Option<CoordinatorMessage> {
        Some(match refused {
            JoinRefused::NotLeading => {
                self.metrics.rejected("not_leading");
                return None;
            }
            JoinRefused::LaterTerm(term) => {
                self.metrics.rejected("later_term");
                // An error means that others have reported a later term.
                let _ = self.part.later_terms.try_send((term, name.to_owned()));
                return None;
            }
            JoinRefused::Outdated(at_least) => CoordinatorMessage::Outdated(at_least),
            JoinRefused::InUse { address: other, retry_after_ms, is_news } => {
                self.metrics.rejected("in_use");
                if is_news {
                    tracing::warn!(
                        node = name,
                        member = %other,
                        rival = %address,
                        "a process wants to join under the name of a member, and may join once the member is silent"
                    );
                }
                CoordinatorMessage::InUse(InUse { address: other, retry_after_ms })
            }
            JoinRefused::Full | JoinRefused::Implausible { .. } => {
                let reason = refused.to_string();
                self.metrics.rejected(if refused == JoinRefused::Full { "full" } else { "implausible" });
                let now = Duration::from_millis(self.uptime.now());
                if self.warnings.borrow_mut().may_warn(now, name) {
                    tracing::warn!(node = name, %address, reason, "a node may not join");
                }
                CoordinatorMessage::Refused(reason)
            }
        })
    }

    /// Takes a node's messages until its stream ends, or until the node has another address than `taken`, that of the table: then
    /// it must join again. `brings` reads the table of a node that was asked for it.
    async fn listen(
        self: &Rc<Self>,
        guest: &Guest,
        (number, incarnation): (NodeNumber, u64),
        taken: Option<IpAddr>,
        receive: &mut RecvStream,
        sender: &mpsc::Sender<CoordinatorMessage>,
        mut brings: Option<TableReader>,
    ) {
        let connection = guest.connection();
        let rivals = self.meet_reported(number);
        loop {
            let message = guest.seat().read(receive).await;
            match message.map(|asked| asked.map(|asked| asked.message)) {
                Ok(Some(FollowerMessage::Heartbeat(_)))
                    if taken.is_some_and(|taken| taken != plain(connection.quic().remote_address().ip())) =>
                {
                    tracing::info!(
                        node = connection.peer().name,
                        "a node has moved to another address, and joins again"
                    );
                    return self.membership.lock().moves(number, incarnation);
                }
                Ok(Some(FollowerMessage::Heartbeat(beat))) => {
                    let now = self.uptime.now();
                    let beat = self.membership.lock().heartbeat(number, incarnation, &beat, now);
                    // A node that does not read its answers may miss some.
                    let _ = sender.try_send(match beat {
                        Beat::Heard => CoordinatorMessage::Heard,
                        Beat::Contested(address) => CoordinatorMessage::Contested(address),
                        Beat::Removed => CoordinatorMessage::Removed,
                        Beat::NotLeading | Beat::LaterTerm(_) => {
                            CoordinatorMessage::Standing(self.standing())
                        }
                    });
                    if let Beat::LaterTerm(term) = beat {
                        let _ = self.part.later_terms.try_send((term, connection.peer().name.clone()));
                    }
                    if !matches!(beat, Beat::Heard | Beat::Contested(_)) {
                        return;
                    }
                }
                Ok(Some(FollowerMessage::Brings(page))) => {
                    let Some(reader) = &mut brings else { return self.metrics.rejected("out_of_order") };
                    let Ok(table) = reader.take(page) else { return self.metrics.rejected("malformed") };
                    if let Some(table) = table {
                        brings = None;
                        self.adopt(&table, &connection.peer().name);
                    }
                }
                Ok(Some(FollowerMessage::Rival(address))) => _ = rivals.try_send(address),
                Ok(Some(FollowerMessage::Drains(_) | FollowerMessage::Leave)) if !self.standing().leads => {
                    return;
                }
                Ok(Some(FollowerMessage::Drains(drains))) => {
                    let is_news = self.membership.lock().drains(number, incarnation, drains);
                    // A node says it again on each new stream.
                    if is_news {
                        self.note_drain(&connection.peer().name, drains);
                    }
                }
                Ok(Some(FollowerMessage::Leave)) => {
                    tracing::info!(node = guest.connection().peer().name, "a node leaves");
                    return self.membership.lock().leave(number, incarnation);
                }
                Ok(Some(
                    FollowerMessage::Join(_)
                    | FollowerMessage::Watch
                    | FollowerMessage::Who(_)
                    | FollowerMessage::Reload
                    | FollowerMessage::Forget(_),
                )) => {
                    return self.metrics.rejected("out_of_order");
                }
                Ok(None) | Err(_) => return,
            }
        }
    }

    fn note_drain(&self, node: &str, drains: bool) {
        let did = if drains { "a node drains" } else { "a node does not drain any more" };
        tracing::info!(node, "{did}");
        let action = if drains { "drain" } else { "cancel_drain" };
        self.audit.note(&format!("node {node}"), action, node, Ok::<_, &str>(()));
    }

    fn adopt(&self, table: &Arc<Table>, node: &str) {
        if self.membership.lock().adopt(table, self.uptime.now()) {
            tracing::info!(node, "this leader goes on from the table that a node brought");
        }
    }

    /// Meets the coordinators that a member reports, one after the other, until the channel's sender is dropped. The member's
    /// heartbeats are heard meanwhile. A coordinator that finds the channel full is reported again later.
    fn meet_reported(self: &Rc<Self>, by: NodeNumber) -> mpsc::Sender<SocketAddr> {
        let (rivals, mut reported) = mpsc::channel(WAITING_RIVALS);
        let server = Rc::clone(self);
        actix_rt::spawn(async move {
            while let Some(address) = reported.recv().await {
                server.meet(by, address).await;
            }
        });
        rivals
    }

    /// Asks another coordinator that leads, as a member reports. If most members of both report the other, one of the two yields;
    /// the question tells the other this one's standing.
    async fn meet(self: &Rc<Self>, by: NodeNumber, address: SocketAddr) {
        if let Some(other) = who(&self.endpoint, address, Some(self.standing())).await {
            self.doubts.reports.borrow_mut().note(other.life, by, self.uptime.now());
            self.compare(address, &other);
        }
    }
}

/// Sends a follower its messages and the changes of tables. If several tables came while it did not read, it gets the last one
/// whole. A follower of version 1 gets whole tables only.
async fn write(
    (mut send, version): (SendStream, Version),
    mut messages: mpsc::Receiver<CoordinatorMessage>,
    mut tables: watch::Receiver<Arc<Published>>,
    metrics: &Metrics,
) {
    tables.mark_changed();
    let mut last = Epoch::default();
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
                let published = Arc::clone(&tables.borrow_and_update());
                let epoch = published.table().epoch;
                if epoch.number > 0 {
                    metrics.table_pushed();
                    let pages = match version {
                        Version::FIRST => std::slice::from_ref(published.message_for_v1()),
                        _ => published.messages(last),
                    };
                    for page in pages {
                        if write_encoded(&mut send, page).await.is_err() {
                            return;
                        }
                    }
                    last = epoch;
                }
                continue;
            }
            _ = send.stopped() => return,
        };
        let written = match version {
            Version::FIRST => match v1::CoordinatorMessage::before(message) {
                Some(message) => write_message(&mut send, &message).await,
                None => Ok(()),
            },
            _ => write_message(&mut send, &message).await,
        };
        if written.is_err() {
            return;
        }
    }
    // An error means that the follower went away.
    let _ = send.finish();
    let _ = timeout(FLUSH_DEADLINE, send.stopped()).await;
}

/// Sends the only answer of a stream.
async fn answer_admin(mut send: SendStream, answer: &CoordinatorMessage) {
    // An error means that the admin went away.
    if write_message(&mut send, answer).await.is_ok() {
        let _ = send.finish();
        let _ = timeout(FLUSH_DEADLINE, send.stopped()).await;
    }
}

/// Turns an IPv4 address from an IPv6 socket into plain IPv4.
fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// The limits of guests, by role. Nodes report silent nodes, others only watch, and no guest needs more than one stream a
/// connection.
fn limits_of(role: Role) -> GuestLimits {
    let (connections, message_bytes, waiting_bytes) = match role {
        // All dialed addresses may be this coordinator's. Pages of a table are the longest messages.
        Role::Node => (2 * MAX_ADDRESSES, MAX_PEER_MESSAGE_BYTES, MAX_PEER_MESSAGE_BYTES),
        Role::Admin => (64, SMALL_MESSAGE_BYTES, 64 * SMALL_MESSAGE_BYTES),
        Role::Engine => (16, SMALL_MESSAGE_BYTES, 16 * SMALL_MESSAGE_BYTES),
        // All coordinators may have one certificate.
        Role::Coordinator => (16, SMALL_MESSAGE_BYTES, 16 * SMALL_MESSAGE_BYTES),
    };
    GuestLimits { connections, streams: 1, message_bytes, waiting_bytes }
}

/// Most bytes of a message without lists. It may name a node, or a coordinator by its host.
const SMALL_MESSAGE_BYTES: usize = 256 + MAX_NAME_BYTES;

/// Connections of nodes and coordinators: two of each node, since the connection of its earlier life may count for a while, and
/// those of the other coordinators.
const MAX_MEMBER_CONNECTIONS: usize = 2 * MAX_MEMBERS + 256;

const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// Time for a follower to read the last messages.
const FLUSH_DEADLINE: Duration = Duration::from_secs(1);

/// Reported coordinators that wait to be met, of each member.
const WAITING_RIVALS: usize = 16;

/// Answers that wait for a follower to read them.
const WAITING_MESSAGES: usize = 16;
