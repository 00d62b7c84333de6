//! A session with the node on this host.

mod read;
mod write;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use larder_protocol::TraceContext;
use larder_protocol::describe::{Describe, Described};
use larder_protocol::limits::{DESCRIPTIONS_SINCE_SESSION_VERSION, MAX_NAME_BYTES};
use larder_protocol::session::{Request, Response};

use crate::call::{Call, Step};
use crate::error::SessionError;
use crate::link::Link;
use crate::link::round_trip::RoundTrip;
use crate::namespace::Namespace;
use crate::opening::{NodeSocket, Opening};
use crate::options::SessionOptions;
use crate::origin::Origin;
use crate::traffic::Counters;

/// A session with the node on this host. Clones share it.
///
/// Its requests are [`Call`]s, which tasks await and threads wait for. Requests of all clones and tasks are outstanding at the
/// same time on one socket. Leases and reservations are given back at once, from any thread; if the socket is full, with the next
/// request.
///
/// The session ends when the last clone, lease and reservation is dropped.
#[derive(Clone)]
pub struct Session {
    pub(crate) link: Arc<Link>,
    /// The engine's request to which requests of this handle belong.
    pub(crate) origin: Origin,
}

impl Session {
    /// Connects to the node whose socket for this tenant is at `path`.
    ///
    /// Cancel safe: nothing stays open.
    ///
    /// # Errors
    /// [`SessionError::Connect`] if nobody listens there; `Refused` and `Busy` if the node wants no session now.
    pub fn connect(path: impl AsRef<Path>, options: SessionOptions) -> Call<Self> {
        Call::open(Opening { to: NodeSocket::At(path.as_ref().to_owned()), options }, Self::new)
    }

    /// Opens a session on a socket that is connected already.
    ///
    /// Cancel safe: the socket is closed.
    ///
    /// # Errors
    /// `Refused` and `Busy` if the node wants no session now.
    pub fn open(socket: UnixStream, options: SessionOptions) -> Call<Self> {
        Call::open(Opening { to: NodeSocket::On(socket), options }, Self::new)
    }

    /// The same session, for a traced request of the engine: requests through this handle belong to that trace. An engine gets
    /// the trace in the header `traceparent`, which [`TraceContext`] parses.
    #[must_use]
    pub fn traced(&self, context: TraceContext) -> Self {
        let mut traced = self.clone();
        traced.origin.trace = Some(context);
        traced
    }

    /// The same session, for a request of the engine: lookups, prefetches and leases through this handle have this name.
    /// Operators find them by the name (`larder explain`). Names are cut after 256 bytes; a node of the release before gets no
    /// names.
    #[must_use]
    pub fn named(&self, request: &str) -> Self {
        let mut named = self.clone();
        let ends = request.char_indices().map(|(at, letter)| at + letter.len_utf8());
        let end = ends.take_while(|&end| end <= MAX_NAME_BYTES).last().unwrap_or(0);
        named.origin.request = Some(request[..end].into());
        named
    }

    /// Tells the node the tokens of chunks, for the node's events (`[kv_events] tokens`); a node without such events drops them.
    /// Chunks for which [`Described::is_sound`] is false end the session. A node of the release before is not told.
    pub fn describe(&self, namespace: &Namespace, chunks: Vec<Described>) {
        if self.link.welcome.version < DESCRIPTIONS_SINCE_SESSION_VERSION {
            return;
        }
        let fingerprint = namespace.fingerprint();
        let mut chunks = chunks.into_iter();
        let (mut part, mut tokens) = (Vec::new(), 0);
        while let Some(chunk) = chunks.next() {
            tokens += chunk.tokens.len();
            part.push(chunk);
            if tokens >= DESCRIBED_AT_ONCE || chunks.len() == 0 {
                let chunks = std::mem::take(&mut part);
                self.link.post(&Request::Describe(Describe { fingerprint, chunks }));
                tokens = 0;
            }
        }
    }

    /// The tenant that the socket serves.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.link.welcome.tenant
    }

    /// The node's name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.link.welcome.node
    }

    /// Number of the GPU actor that serves the session.
    #[must_use]
    pub fn device(&self) -> u16 {
        self.link.welcome.device
    }

    /// Bytes of the session's write window; 0 if it has none.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.link.welcome.window_bytes
    }

    /// Bytes that the session copied so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.link.traffic.counters()
    }

    /// A request of one message. `accept` gets answers other than `Busy` and `Refused`.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        request: Request,
        accept: impl FnOnce(&Arc<Link>, Response, Vec<OwnedFd>) -> Result<T, SessionError> + Send + 'static,
    ) -> Call<T> {
        self.call(Step::Ask(RoundTrip::new(request, accept)))
    }

    /// A call that begins with this step.
    pub(crate) fn call<T: Send + 'static>(&self, step: Step<T>) -> Call<T> {
        Call::new(&self.link, self.origin.clone(), step)
    }

    fn new(link: Arc<Link>) -> Self {
        Self { link, origin: Origin::default() }
    }
}

/// The most tokens in one message of descriptions, roughly: with their hashes they fill only a part of a frame.
const DESCRIBED_AT_ONCE: usize = 32 << 10;
