//! Connections that nobody should make: silent, cut off in a message, or garbage, to every socket of the cluster.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_net::quic::{Connection, Credentials};
use larder_protocol::frame::FrameHeader;
use larder_protocol::identity::Role;

use crate::soak::nodes::Node;
use crate::soak::tally::Tally;
use crate::visitor::Visitor;

/// The maker of such connections, on a thread of its own. Dropping it ends the thread.
pub(super) struct Strangers {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Work {
    nodes: Vec<Arc<Node>>,
    coordinator: Arc<Node>,
    visitor: Option<Visitor>,
    rng: fastrand::Rng,
    tally: Arc<Tally>,
    unix: VecDeque<UnixStream>,
    tcp: VecDeque<TcpStream>,
    quic: VecDeque<Connection>,
}

impl Strangers {
    /// Begins to disturb the nodes and the coordinator; over QUIC too, with a certificate of the cluster.
    pub(super) fn start(
        nodes: &[Arc<Node>],
        coordinator: &Arc<Node>,
        credentials: Credentials,
        seed: u64,
        tally: &Arc<Tally>,
    ) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (nodes, coordinator, tally) = (nodes.to_vec(), Arc::clone(coordinator), Arc::clone(tally));
        let is_to_stop = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("strangers".into()).spawn(move || {
            let mut work = Work {
                nodes,
                coordinator,
                visitor: Visitor::new(&credentials).ok(),
                rng: fastrand::Rng::with_seed(seed),
                tally,
                unix: VecDeque::new(),
                tcp: VecDeque::new(),
                quic: VecDeque::new(),
            };
            while !is_to_stop.load(Ordering::Acquire) {
                work.bother();
                std::thread::sleep(PAUSE);
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The thread has told of its panic already.
            let _ = thread.join();
        }
    }
}

impl Work {
    /// Makes one connection. Its result does not matter, even if the node is down.
    fn bother(&mut self) {
        let node = Arc::clone(&self.nodes[self.rng.usize(..self.nodes.len())]);
        match self.rng.u8(..10) {
            0..=3 => self.call_on_session(&node),
            4..=6 => self.call_on_http(&node),
            7 => self.ask_for_much(),
            _ => self.call_on_peer(&node),
        }
        self.tally.count(|counts| counts.hostile_connections += 1);
    }

    /// Sends nothing, half a frame, or garbage.
    fn call_on_session(&mut self, node: &Node) {
        let socket = &node.sockets[self.rng.usize(..node.sockets.len())];
        let Ok(mut stream) = UnixStream::connect(socket) else { return };
        let garbage: Vec<u8> = std::iter::repeat_with(|| self.rng.u8(..)).take(64).collect();
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let _ = match self.rng.u8(..4) {
            0 | 1 => Ok(()),
            2 => stream.write_all(&garbage),
            _ => {
                let header = FrameHeader { payload_bytes: 4_096, descriptors: 0, request: 1 };
                stream.write_all(&header.encode()).and_then(|()| stream.write_all(&garbage))
            }
        };
        keep(&mut self.unix, stream, MOST_UNIX);
    }

    /// Sends nothing or half a request, or asks and does not read.
    fn call_on_http(&mut self, node: &Node) {
        let whom = if self.rng.u8(..4) == 0 { &self.coordinator } else { node };
        let Ok(mut stream) = TcpStream::connect(whom.life().http) else { return };
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let _ = match self.rng.u8(..4) {
            0 | 1 => Ok(()),
            2 => stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Half: "),
            _ => stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
        };
        keep(&mut self.tcp, stream, MOST_TCP);
    }

    /// Has the coordinator hash many tokens.
    fn ask_for_much(&mut self) {
        let Ok(mut stream) = TcpStream::connect(self.coordinator.life().http) else { return };
        let tokens = vec!["7"; TOKENS].join(",");
        let fingerprint = "ab".repeat(32);
        let body = format!("{{\"fingerprint\":\"{fingerprint}\",\"chunk_tokens\":1,\"tokens\":[{tokens}]}}");
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let head = format!(
            "POST /v1/prefix HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let asked = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
        let _ = asked.and_then(|()| stream.read(&mut [0; 64]));
        keep(&mut self.tcp, stream, MOST_TCP);
    }

    /// Connects with a certificate of the cluster, announces long messages and does not send them.
    fn call_on_peer(&mut self, node: &Node) {
        let Some(visitor) = &self.visitor else { return };
        let status = crate::cluster::members(&self.coordinator.life().http);
        let found = status.iter().find(|member| member["name"] == node.name.as_str());
        let Some(address) = found.and_then(|member| member["peer"].as_str()?.parse().ok()) else { return };
        let Some(connection) = visitor.dial_soon(address, Role::Node) else { return };
        visitor.open_half(&connection, STREAMS);
        keep(&mut self.quic, connection, MOST_QUIC);
    }
}

/// Keeps a connection, and drops the oldest if there are too many.
fn keep<T>(all: &mut VecDeque<T>, one: T, most: usize) {
    all.push_back(one);
    if all.len() > most {
        all.pop_front();
    }
}

/// Time between two connections.
const PAUSE: Duration = Duration::from_millis(40);

/// How long a send may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// Connections that are kept open.
const MOST_UNIX: usize = 400;
const MOST_TCP: usize = 400;
const MOST_QUIC: usize = 8;

/// Streams of a connection on which half a message is sent.
const STREAMS: usize = 50;

/// Tokens that the coordinator is asked to hash.
const TOKENS: usize = 100_000;
