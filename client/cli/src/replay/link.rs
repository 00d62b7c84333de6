//! The session of a replay with one node, which comes back when the node does.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use larder_client::{Namespace, Session, SessionError, SessionOptions};
use larder_protocol::TraceContext;
use larder_protocol::session::RefusalCode;

use super::namespace::replay_namespace;
use super::part_chunks;
use crate::clock::now;
use crate::cluster::NodeAddress;
use crate::dev::TENANT;

/// A node as a replay sees it: one session, which all requests share, with one of its devices.
pub struct Link {
    address: NodeAddress,
    settings: LinkSettings,
    state: RefCell<State>,
    /// Bytes that earlier sessions moved.
    earlier_bytes: Cell<u64>,
    reconnected: Cell<u64>,
}

/// What is the same for the links to all nodes.
#[derive(Debug, Clone, Copy)]
pub struct LinkSettings {
    /// Bytes of one chunk's block.
    pub block_bytes: u64,
    /// Requests under way at a time.
    pub in_flight: u16,
    /// How long a node may take to answer.
    pub deadline: Duration,
    /// Tokens that an engine computes in a second of prefill, as the nodes are told.
    pub prefill_tokens_per_s: f64,
}

/// A session and the namespace of the replay in it.
pub struct Open {
    /// The session.
    pub session: Session,
    /// The namespace of the replay, as this session knows it.
    pub namespace: Namespace,
}

impl Open {
    /// The same, for a request that is traced.
    #[must_use]
    pub fn traced(&self, context: TraceContext) -> Self {
        Self { session: self.session.traced(context), namespace: self.namespace.clone() }
    }
}

enum State {
    Open(Rc<Open>),
    /// The node is gone, or does not answer; it may be tried again from then on.
    Lost(Instant),
    /// A request tries to open a session.
    Opening,
}

/// Why a node cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// It serves other tenants only.
    #[error("{node} has no socket for tenant `{TENANT}`")]
    NoSocket {
        /// Which.
        node: String,
    },
    /// It lets no session in, or does not take the namespace.
    #[error("no session with {node}")]
    Session {
        /// Which.
        node: String,
        /// Why.
        source: SessionError,
    },
}

/// How a request that a node did not serve ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The node refused, or does not keep to the protocol.
    #[error("{node}")]
    Session {
        /// Which.
        node: String,
        /// Why.
        source: Box<SessionError>,
    },
    /// The node is gone or does not answer: whatever it would have served is computed.
    #[error("{node} no longer answers")]
    Lost {
        /// Which.
        node: String,
    },
}

impl Link {
    /// Opens the session and makes the namespace of the replay known.
    ///
    /// # Errors
    /// [`LinkError`]
    pub async fn connect(address: &NodeAddress, settings: LinkSettings) -> Result<Self, LinkError> {
        let open = open(address, settings).await?;
        Ok(Self {
            address: address.clone(),
            settings,
            state: RefCell::new(State::Open(Rc::new(open))),
            earlier_bytes: Cell::new(0),
            reconnected: Cell::new(0),
        })
    }

    /// Whether it is worth asking: it serves, or it is time to see whether it does again.
    #[must_use]
    pub fn may_serve(&self) -> bool {
        match &*self.state.borrow() {
            State::Open(_) => true,
            State::Lost(until) => now() >= *until,
            State::Opening => false,
        }
    }

    /// Its session, opened again where it was lost.
    ///
    /// # Errors
    /// [`RequestError::Lost`] where the node does not answer.
    pub async fn open(&self) -> Result<Rc<Open>, RequestError> {
        if let State::Open(open) = &*self.state.borrow() {
            return Ok(Rc::clone(open));
        }
        if !self.may_serve() {
            return Err(self.lost());
        }
        self.state.replace(State::Opening);
        // A request is dropped only with the whole replay, so that nobody waits for an opening that was given up.
        match tokio::time::timeout(OPEN_DEADLINE, open(&self.address, self.settings)).await {
            Ok(Ok(open)) => {
                let open = Rc::new(open);
                self.state.replace(State::Open(Rc::clone(&open)));
                self.reconnected.set(self.reconnected.get() + 1);
                Ok(open)
            }
            Ok(Err(_)) | Err(_) => {
                self.state.replace(State::Lost(now() + RETRY_AFTER));
                Err(self.lost())
            }
        }
    }

    /// The error of a request; after one that says that the node is gone or hangs, no request waits for it for a while.
    pub fn failed(&self, used: &Rc<Open>, source: SessionError) -> RequestError {
        let lives = match &source {
            SessionError::Refused(refusal) => refusal.code != RefusalCode::Stopping,
            SessionError::Closed
            | SessionError::Timeout
            | SessionError::Connect { .. }
            | SessionError::Socket(_) => false,
            _ => true,
        };
        if lives {
            return RequestError::Session { node: self.address.name.clone(), source: Box::new(source) };
        }
        let is_current = matches!(&*self.state.borrow(), State::Open(open) if Rc::ptr_eq(open, used));
        if is_current {
            self.earlier_bytes.set(self.earlier_bytes.get() + bytes_of(used));
            self.state.replace(State::Lost(now() + RETRY_AFTER));
        }
        self.lost()
    }

    /// Sessions that were opened again.
    #[must_use]
    pub fn reconnected(&self) -> u64 {
        self.reconnected.get()
    }

    /// Bytes that its sessions copied so far, in both directions.
    #[must_use]
    pub fn bytes_moved(&self) -> u64 {
        let now = match &*self.state.borrow() {
            State::Open(open) => bytes_of(open),
            State::Lost(_) | State::Opening => 0,
        };
        self.earlier_bytes.get() + now
    }

    fn lost(&self) -> RequestError {
        RequestError::Lost { node: self.address.name.clone() }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("address", &self.address).finish_non_exhaustive()
    }
}

async fn open(address: &NodeAddress, settings: LinkSettings) -> Result<Open, LinkError> {
    let LinkSettings { block_bytes, in_flight, deadline, .. } = settings;
    let node = || address.name.clone();
    let socket = address.sockets.get(TENANT).ok_or_else(|| LinkError::NoSocket { node: node() })?;
    let failed = |source| LinkError::Session { node: node(), source };
    let options = SessionOptions {
        client: concat!("larder replay ", env!("CARGO_PKG_VERSION")).into(),
        // Room for the parts of all requests at once, so that none waits for what another one has staged.
        window_bytes: u64::from(in_flight)
            * part_chunks(block_bytes, in_flight)
            * block_bytes.next_multiple_of(WINDOW_ALIGNMENT),
        timeout: deadline,
        ..SessionOptions::default()
    };
    let spec = replay_namespace(block_bytes);
    let session = Session::connect(socket, options).await.map_err(failed)?;
    let namespace = session.register(&spec, &[0], &[block_bytes]).await.map_err(failed)?;
    Ok(Open { session, namespace })
}

fn bytes_of(open: &Open) -> u64 {
    let counters = open.session.counters();
    counters.bytes_read + counters.bytes_written
}

/// What a block takes in a write window is a multiple of this.
const WINDOW_ALIGNMENT: u64 = 64;

/// How long a node that was lost is left alone before it is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// How long opening a session may take.
const OPEN_DEADLINE: Duration = Duration::from_secs(2);
