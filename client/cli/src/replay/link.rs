//! The session of a replay with one node; it is opened again when the node comes back.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use larder_client::{Namespace, Session, SessionError, SessionOptions, Verify};
use larder_protocol::TraceContext;
use larder_protocol::session::RefusalCode;
use tokio::time::timeout;

use super::Load;
use super::namespace::replay_namespace;
use super::part_chunks;
use crate::clock::now;
use crate::cluster::NodeAddress;
use crate::cluster::TENANT;

/// A node as a replay sees it: one session with one of its devices; all requests share the session.
pub struct Link {
    address: RefCell<NodeAddress>,
    settings: LinkSettings,
    state: RefCell<LinkState>,
    /// Bytes that earlier sessions moved.
    earlier_bytes: Cell<u64>,
    /// Whether the node leaves soon or has left, by the coordinator's status.
    leaves: Cell<bool>,
    reconnected: Cell<u64>,
}

/// The settings of the links to all nodes.
#[derive(Debug, Clone, Copy)]
pub struct LinkSettings {
    /// Bytes of one chunk's block.
    pub block_bytes: u64,
    /// Sessions in flight.
    pub in_flight: u16,
    /// Requests that the engine of a node prefills at a time.
    pub prefills: u16,
    /// Time in which a node must answer.
    pub deadline: Duration,
    /// Tokens that an engine computes in a second of prefill, as the nodes are told.
    pub prefill_tokens_per_s: f64,
    /// The found chunks that requests wait for.
    pub load: Load,
    /// Whether engines take their time for the tokens that they compute.
    pub computes: bool,
}

/// A session and the namespace of the replay in it.
pub struct OpenLink {
    /// The session.
    pub session: Session,
    /// The namespace of the replay, as this session knows it.
    pub namespace: Namespace,
}

impl OpenLink {
    /// A link for a request of this name.
    #[must_use]
    pub fn named(&self, request: &str) -> Self {
        Self { session: self.session.named(request), namespace: self.namespace.clone() }
    }

    /// A link for a traced request.
    #[must_use]
    pub fn traced(&self, context: TraceContext) -> Self {
        Self { session: self.session.traced(context), namespace: self.namespace.clone() }
    }
}

enum LinkState {
    Open(Rc<OpenLink>),
    /// The node is gone, or does not answer; it may be tried again from this time on.
    Lost(Instant),
    /// A request tries to open a session.
    Opening,
}

/// Why a node cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The node serves other tenants only.
    #[error(
        "{node} has no socket for tenant `{TENANT}`: a replay needs this tenant in the node's [[tenants]]"
    )]
    NoSocket {
        /// The node's name.
        node: String,
    },
    /// No node answers.
    #[error("no node answers: see `larder status`")]
    AllDown,
    /// The node does not tell the paths of its sockets.
    #[error("{node} does not answer")]
    Silent {
        /// The node's name.
        node: String,
    },
    /// Another node has the socket: the node is on another host, or both have one path.
    #[error(
        "{node} is left out: {found} answers at its socket's path here, and a replay reaches nodes of its own host alone"
    )]
    Another {
        /// The node's name.
        node: String,
        /// The name of the node that answers.
        found: String,
    },
    /// The node refuses the session or the namespace.
    #[error("no session with {node}")]
    Session {
        /// The node's name.
        node: String,
        /// Why.
        source: SessionError,
    },
}

/// The error of a request that a node did not serve.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The node refused, or does not keep to the protocol.
    #[error("{node}")]
    Session {
        /// The node's name.
        node: String,
        /// Why.
        source: Box<SessionError>,
    },
    /// The node is gone or does not answer: the engine computes its requests.
    #[error("{node} no longer answers")]
    Lost {
        /// The node's name.
        node: String,
    },
}

impl Link {
    /// Opens the session and makes the namespace of the replay known. A node that is down is tried again later.
    ///
    /// # Errors
    /// [`LinkError`]: the node answers, but cannot be used.
    pub async fn connect(address: &NodeAddress, settings: LinkSettings) -> Result<Self, LinkError> {
        let state = match timeout(OPEN_DEADLINE, open(address, settings)).await {
            Ok(Ok(open)) => LinkState::Open(Rc::new(open)),
            Ok(Err(error)) if !error.is_of_a_node_that_is_down() => return Err(error),
            Ok(Err(_)) | Err(_) => LinkState::Lost(now() + RETRY_AFTER),
        };
        Ok(Self {
            address: RefCell::new(address.clone()),
            settings,
            state: RefCell::new(state),
            earlier_bytes: Cell::new(0),
            leaves: Cell::new(false),
            reconnected: Cell::new(0),
        })
    }

    /// Whether the link has a session.
    pub fn is_open(&self) -> bool {
        matches!(&*self.state.borrow(), LinkState::Open(_))
    }

    /// The node's name.
    pub fn node(&self) -> String {
        self.name()
    }

    /// Sets whether the node leaves soon, or has left.
    pub fn set_leaves(&self, leaves: bool) {
        self.leaves.set(leaves);
    }

    /// Whether the node leaves soon or has left, so that requests should go elsewhere.
    pub fn leaves(&self) -> bool {
        self.leaves.get()
    }

    /// Whether the node may serve: it has a session, or it is time to try again.
    pub fn may_serve(&self) -> bool {
        match &*self.state.borrow() {
            LinkState::Open(_) => true,
            LinkState::Lost(until) => now() >= *until,
            LinkState::Opening => false,
        }
    }

    /// The session; a lost session is opened again.
    ///
    /// # Errors
    /// [`RequestError::Lost`] if the node does not answer.
    pub async fn open(&self) -> Result<Rc<OpenLink>, RequestError> {
        if let LinkState::Open(open) = &*self.state.borrow() {
            return Ok(Rc::clone(open));
        }
        if !self.may_serve() {
            return Err(self.lost());
        }
        self.state.replace(LinkState::Opening);
        // A request is dropped only with the whole replay, so no request waits for an opening that was given up.
        match timeout(OPEN_DEADLINE, self.find_and_open()).await {
            Ok(Ok(open)) => {
                let open = Rc::new(open);
                self.state.replace(LinkState::Open(Rc::clone(&open)));
                self.reconnected.set(self.reconnected.get() + 1);
                Ok(open)
            }
            Ok(Err(_)) | Err(_) => {
                self.state.replace(LinkState::Lost(now() + RETRY_AFTER));
                Err(self.lost())
            }
        }
    }

    async fn find_and_open(&self) -> Result<OpenLink, LinkError> {
        let known = self.address.borrow().clone();
        let address = if known.sockets.is_empty() { ask_again(known).await? } else { known };
        let open = open(&address, self.settings).await?;
        self.address.replace(address);
        Ok(open)
    }

    /// The error of a request. After an error that means that the node is gone or hangs, requests avoid the node for a while.
    pub fn failed(&self, used: &Rc<OpenLink>, source: SessionError) -> RequestError {
        if !is_of_a_node_that_is_down(&source) {
            return RequestError::Session { node: self.name(), source: Box::new(source) };
        }
        let is_current = matches!(&*self.state.borrow(), LinkState::Open(open) if Rc::ptr_eq(open, used));
        if is_current {
            self.earlier_bytes.set(self.earlier_bytes.get() + bytes_of(used));
            self.state.replace(LinkState::Lost(now() + RETRY_AFTER));
        }
        self.lost()
    }

    /// Sessions that were opened again.
    pub fn reconnected(&self) -> u64 {
        self.reconnected.get()
    }

    /// Bytes that the link's sessions copied so far, in both directions.
    pub fn bytes_moved(&self) -> u64 {
        let now = match &*self.state.borrow() {
            LinkState::Open(open) => bytes_of(open),
            LinkState::Lost(_) | LinkState::Opening => 0,
        };
        self.earlier_bytes.get() + now
    }

    fn lost(&self) -> RequestError {
        RequestError::Lost { node: self.name() }
    }

    fn name(&self) -> String {
        self.address.borrow().name.clone()
    }
}

impl LinkError {
    fn is_of_a_node_that_is_down(&self) -> bool {
        match self {
            Self::NoSocket { .. } | Self::AllDown | Self::Another { .. } => false,
            Self::Silent { .. } => true,
            Self::Session { source, .. } => is_of_a_node_that_is_down(source),
        }
    }
}

/// Whether the node is gone, or does not answer.
fn is_of_a_node_that_is_down(error: &SessionError) -> bool {
    match error {
        SessionError::Refused(refusal) => refusal.code == RefusalCode::Stopping,
        SessionError::Closed { .. }
        | SessionError::Timeout
        | SessionError::Connect { .. }
        | SessionError::Socket(_) => true,
        _ => false,
    }
}

/// Asks a node again for the sockets that it had not named before.
async fn ask_again(known: NodeAddress) -> Result<NodeAddress, LinkError> {
    let node = known.name.clone();
    let asked = tokio::task::spawn_blocking(move || known.ask_again()).await;
    asked.ok().and_then(Result::ok).ok_or(LinkError::Silent { node })
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("address", &self.address).finish_non_exhaustive()
    }
}

async fn open(address: &NodeAddress, settings: LinkSettings) -> Result<OpenLink, LinkError> {
    let LinkSettings { block_bytes, in_flight, deadline, .. } = settings;
    let node = || address.name.clone();
    if address.sockets.is_empty() {
        return Err(LinkError::Silent { node: node() });
    }
    let socket = address.sockets.get(TENANT).ok_or_else(|| LinkError::NoSocket { node: node() })?;
    let failed = |source| LinkError::Session { node: node(), source };
    let options = SessionOptions {
        client: concat!("larder replay ", env!("CARGO_PKG_VERSION")).into(),
        // Room for the parts of all requests at once, so that no request waits for another's staged blocks.
        window_bytes: u64::from(in_flight)
            * part_chunks(block_bytes, in_flight)
            * block_bytes.next_multiple_of(WINDOW_ALIGNMENT),
        timeout: deadline,
        // A replay knows every block's bytes, and compares each block itself.
        verify: Verify::Off,
        ..SessionOptions::default()
    };
    let spec = replay_namespace(block_bytes);
    let session = Session::connect(socket, options).await.map_err(failed)?;
    if session.node() != address.name {
        return Err(LinkError::Another { node: node(), found: session.node().to_owned() });
    }
    let namespace = session.register(&spec, &[0], &[block_bytes]).await.map_err(failed)?;
    Ok(OpenLink { session, namespace })
}

fn bytes_of(open: &OpenLink) -> u64 {
    let counters = open.session.counters();
    counters.bytes_read + counters.bytes_written
}

/// A block's room in a write window is a multiple of this.
const WINDOW_ALIGNMENT: u64 = 64;

/// Pause before a lost node is tried again.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// Time in which a session must open.
const OPEN_DEADLINE: Duration = Duration::from_secs(2);
