//! The connections of a server: bounds their number, and chooses the idle one that makes way for a new one.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, stream};
use prometheus::Registry;
use rustix::net::sockopt::set_tcp_user_timeout;
use rustix::net::{Shutdown, shutdown};
use tokio::sync::Notify;

use crate::keepalive::probe_when_idle;
use crate::metrics::{Label, Part as _};
use crate::quic::host_of;

/// The connections of a server. At the limit, the connection that has been idle for the longest is shut down for a new one;
/// if none is idle, the new one is shut down. One host has half of the connections at most. Cloning shares.
#[derive(Debug, Clone)]
pub struct Connections(Arc<ConnectionBook>);

/// One open connection. Dropping it ends it.
#[derive(Debug)]
pub struct Open {
    connections: Connections,
    number: u64,
}

/// A request on a connection. The connection is not idle until this is dropped.
#[derive(Debug)]
pub struct Busy {
    connections: Connections,
    number: u64,
}

#[derive(Debug)]
struct ConnectionBook {
    most: usize,
    known: Mutex<KnownConnections>,
    /// Notified of each connection that ends after the server has stopped.
    ended: Notify,
    metrics: HttpMetrics,
}

#[derive(Debug, Default)]
struct KnownConnections {
    by_number: BTreeMap<u64, KnownConnection>,
    /// The idle connections by the time at which they became idle, earliest first.
    idle: BTreeMap<u64, u64>,
    /// The number of connections of each address.
    by_address: HashMap<IpAddr, usize>,
    /// Counts connections, and times at which one became idle.
    last: u64,
    /// Whether the server accepts no more connections.
    is_over: bool,
}

#[derive(Debug)]
struct KnownConnection {
    socket: OwnedFd,
    from: Option<IpAddr>,
    requests: u32,
    idle_since: u64,
}

crate::metrics_table! {
    /// The HTTP connections of a server.
    pub struct HttpMetrics: "HTTP", "" => {
        open: IntGauge = "larder_http_connections", "connections", [], "Connections to the HTTP endpoint";
        closed: IntCounterVec = "larder_http_connections_closed_total", "connections",
            [Label::one_of("reason", &["made_way", "refused"])],
            "Connections that were shut down because the limit was reached: idle connections that made way, and new connections if none was idle";
    }
}

impl Connections {
    /// No connections yet; there will be `most` at most.
    ///
    /// # Errors
    /// Fails if the metrics are registered already.
    pub fn new(most: usize, registry: &Registry) -> Result<Self, prometheus::Error> {
        let metrics = HttpMetrics::register(registry)?;
        Ok(Self(Arc::new(ConnectionBook { most, known: Mutex::default(), ended: Notify::new(), metrics })))
    }

    /// Takes in a new connection; `from` is its address, if it has one. A client that leaves an answer unread for `unread` loses
    /// the connection, and so does a client that is gone without a word.
    ///
    /// # Errors
    /// Fails if the system gives no descriptor, or there is no room. The connection is then shut down.
    pub fn enter(&self, socket: &impl AsFd, from: Option<IpAddr>, unread: Duration) -> io::Result<Open> {
        let socket = socket.as_fd();
        probe_when_idle(&socket);
        // An error: it is no TCP socket.
        let _ = set_tcp_user_timeout(socket, u32::try_from(unread.as_millis()).unwrap_or(u32::MAX));
        let own = match socket.try_clone_to_owned() {
            Ok(own) => own,
            Err(error) => {
                shutdown(socket, Shutdown::Both)?;
                return Err(error);
            }
        };
        let (mut known, from) = (self.lock(), from.map(host_of));
        if known.is_over {
            shutdown(socket, Shutdown::Both)?;
            return Err(io::Error::other("the server stops"));
        }
        let crowd = from.filter(|from| known.by_address.get(from).is_some_and(|&has| has >= self.0.most / 2));
        if crowd.is_some() || known.by_number.len() >= self.0.most {
            let Some(idle) = known.take_longest_idle(crowd) else {
                self.0.metrics.closed.with_label_values(&["refused"]).inc();
                shutdown(socket, Shutdown::Both)?;
                return Err(io::Error::other("the server has too many connections"));
            };
            self.0.metrics.closed.with_label_values(&["made_way"]).inc();
            self.0.metrics.open.dec();
            // An error: the other side was faster.
            let _ = shutdown(&idle, Shutdown::Both);
        }
        let number = known.next();
        known
            .by_number
            .insert(number, KnownConnection { socket: own, from, requests: 0, idle_since: number });
        known.idle.insert(number, number);
        from.into_iter().for_each(|from| *known.by_address.entry(from).or_default() += 1);
        self.0.metrics.open.inc();
        Ok(Open { connections: self.clone(), number })
    }

    /// Stops reading from all clients, and refuses new clients. An idle connection ends at once, a busy one when its requests are
    /// answered. Returns when all have ended.
    pub(super) async fn end(&self) {
        {
            let mut known = self.lock();
            known.is_over = true;
            for state in known.by_number.values() {
                // An error: the client was faster.
                _ = shutdown(&state.socket, Shutdown::Read);
            }
        }
        loop {
            let ended = self.0.ended.notified();
            if self.lock().by_number.is_empty() {
                return;
            }
            ended.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, KnownConnections> {
        crate::lock(&self.0.known)
    }
}

/// An answer in pieces. A server takes the next piece when it has room, so that it buffers no more of a long answer than a client
/// reads.
pub(super) fn pieces(answer: Bytes) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold(answer, |mut rest| async move {
        let piece = rest.split_to(rest.len().min(PIECE_BYTES));
        (!piece.is_empty()).then_some((Ok(piece), rest))
    })
}

impl Open {
    /// Notes that a request has come. The connection is idle again when the result is dropped.
    pub fn busy(&self) -> Busy {
        self.connections.lock().begin(self.number);
        Busy { connections: self.connections.clone(), number: self.number }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let (was_there, is_over) = {
            let mut known = self.connections.lock();
            (known.remove(self.number), known.is_over)
        };
        if was_there {
            self.connections.0.metrics.open.dec();
        }
        if is_over {
            self.connections.0.ended.notify_one();
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.connections.lock().end(self.number);
    }
}

impl KnownConnections {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn begin(&mut self, number: u64) {
        if let Some(state) = self.by_number.get_mut(&number) {
            state.requests += 1;
            self.idle.remove(&state.idle_since);
        }
    }

    fn end(&mut self, number: u64) {
        let now = self.next();
        let Some(state) = self.by_number.get_mut(&number) else { return };
        state.requests -= 1;
        if state.requests == 0 {
            state.idle_since = now;
            self.idle.insert(now, number);
        }
    }

    /// Removes a connection. Returns whether it was there.
    fn remove(&mut self, number: u64) -> bool {
        self.take(number).is_some()
    }

    /// Removes the connection that has been idle for the longest; if `from` is an address, only among its connections.
    fn take_longest_idle(&mut self, from: Option<IpAddr>) -> Option<OwnedFd> {
        let is_from = |number: &&u64| from.is_none() || self.by_number[*number].from == from;
        let number = *self.idle.values().find(is_from)?;
        self.take(number).map(|state| state.socket)
    }

    fn take(&mut self, number: u64) -> Option<KnownConnection> {
        let state = self.by_number.remove(&number)?;
        self.idle.remove(&state.idle_since);
        if let Some(from) = state.from
            && let Some(has) = self.by_address.get_mut(&from)
        {
            *has -= 1;
            if *has == 0 {
                self.by_address.remove(&from);
            }
        }
        Some(state)
    }
}

const PIECE_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use rustix::net::sockopt::socket_keepalive;

    use super::*;

    /// A connection's two ends.
    fn connect(connections: &Connections) -> (io::Result<Open>, UnixStream) {
        connect_from(connections, None)
    }

    fn connect_from(connections: &Connections, from: Option<IpAddr>) -> (io::Result<Open>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (connections.enter(&ours, from, Duration::from_secs(1)), theirs)
    }

    #[test]
    fn a_client_that_is_gone_without_a_word_keeps_no_place() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let _theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (ours, from) = listener.accept().unwrap();
        let registry = Registry::new();
        let _open = connections(&registry).enter(&ours, Some(from.ip()), Duration::from_secs(1)).unwrap();
        assert!(socket_keepalive(&ours).unwrap());
    }

    fn is_shut_down(theirs: &mut UnixStream) -> bool {
        theirs.set_nonblocking(true).unwrap();
        matches!(theirs.read(&mut [0]), Ok(0))
    }

    fn connections(registry: &Registry) -> Connections {
        Connections::new(2, registry).unwrap()
    }

    #[test]
    fn the_longest_idle_connection_makes_way_and_a_busy_one_does_not() {
        let registry = Registry::new();
        let connections = connections(&registry);
        let (first, mut one) = connect(&connections);
        let (second, mut two) = connect(&connections);
        let (first, second) = (first.unwrap(), second.unwrap());
        let at_work = first.busy();
        let (third, mut three) = connect(&connections);
        assert!(is_shut_down(&mut two) && !is_shut_down(&mut one) && third.is_ok());
        drop((second, at_work));
        // The first connection became idle later than the third.
        let (fourth, _four) = connect(&connections);
        assert!(is_shut_down(&mut three) && !is_shut_down(&mut one) && fourth.is_ok());
        assert_eq!(connections.0.metrics.open.get(), 2);
        drop((first, fourth, third));
        assert_eq!(connections.0.metrics.open.get(), 0);
    }

    #[test]
    fn where_all_are_at_work_the_new_one_is_shut_down() {
        let registry = Registry::new();
        let connections = connections(&registry);
        let (first, second) = (connect(&connections), connect(&connections));
        let at_work = (first.0.as_ref().unwrap().busy(), second.0.as_ref().unwrap().busy());
        let (refused, mut theirs) = connect(&connections);
        assert!(refused.is_err() && is_shut_down(&mut theirs));
        drop(at_work);
        assert!(connect(&connections).0.is_ok());
    }

    #[test]
    fn a_connection_with_two_requests_is_idle_when_both_have_ended() {
        let registry = Registry::new();
        let connections = connections(&registry);
        let (first, mut one) = connect(&connections);
        let (second, _two) = connect(&connections);
        let (first, second) = (first.unwrap(), second.unwrap());
        let (a, b, c) = (first.busy(), first.busy(), second.busy());
        drop(a);
        assert!(connect(&connections).0.is_err());
        drop(b);
        let (third, _three) = connect(&connections);
        assert!(third.is_ok() && is_shut_down(&mut one));
        drop(c);
    }

    #[test]
    fn one_address_has_half_of_them_at_most() {
        let registry = Registry::new();
        let connections = Connections::new(4, &registry).unwrap();
        let [one, other] = [1, 2].map(|last| Some(IpAddr::from([10, 0, 0, last])));
        let (first, mut theirs) = connect_from(&connections, one);
        let (second, _second) = connect_from(&connections, one);
        let (first, second) = (first.unwrap(), second.unwrap());
        let at_work = second.busy();
        let (third, _third) = connect_from(&connections, one);
        assert!(third.is_ok() && is_shut_down(&mut theirs), "its own idle one makes way");
        let third = third.unwrap();
        let also_at_work = third.busy();
        assert!(connect_from(&connections, one).0.is_err(), "though there is room");
        let others = [connect_from(&connections, other).0, connect_from(&connections, other).0];
        assert!(others.iter().all(Result::is_ok));
        drop((first, second, at_work, third, also_at_work));
        assert!(connect_from(&connections, one).0.is_ok());
    }
}
