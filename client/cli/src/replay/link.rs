//! The session of a replay with one node.

use std::cell::Cell;

use larder_client::{Namespace, Session, SessionError, SessionOptions};
use larder_protocol::session::RefusalCode;

use super::namespace::replay_namespace;
use super::{MAX_REQUESTS_IN_FLIGHT, part_chunks};
use crate::cluster::NodeAddress;
use crate::dev::TENANT;

/// A node as a replay sees it: one session, which all requests share, with one of its devices.
pub struct Link {
    /// The session.
    pub session: Session,
    /// The namespace of the replay, as this session knows it.
    pub namespace: Namespace,
    name: String,
    lost: Cell<bool>,
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

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The node's answer, or that there was none.
    #[error("{node}")]
    Session {
        /// Which.
        node: String,
        /// Why.
        source: Box<SessionError>,
    },
    /// An earlier request found that the node no longer answers.
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
    pub async fn connect(address: &NodeAddress, block_bytes: u64) -> Result<Self, LinkError> {
        let node = || address.name.clone();
        let socket = address.sockets.get(TENANT).ok_or_else(|| LinkError::NoSocket { node: node() })?;
        let failed = |source| LinkError::Session { node: node(), source };
        let options = SessionOptions {
            client: concat!("larder replay ", env!("CARGO_PKG_VERSION")).into(),
            // Room for the parts of all requests at once, so that none waits for what another one has staged.
            window_bytes: u64::from(MAX_REQUESTS_IN_FLIGHT)
                * part_chunks(block_bytes)
                * block_bytes.next_multiple_of(WINDOW_ALIGNMENT),
            ..SessionOptions::default()
        };
        let spec = replay_namespace(block_bytes);
        let session = Session::connect(socket, options).await.map_err(failed)?;
        let namespace = session.register(&spec, &[0], &[block_bytes]).await.map_err(failed)?;
        Ok(Self { session, namespace, name: node(), lost: Cell::new(false) })
    }

    /// Whether it is worth asking.
    ///
    /// # Errors
    /// [`RequestError::Lost`] once the node was found to be gone.
    pub fn check(&self) -> Result<(), RequestError> {
        if self.lost.get() { Err(RequestError::Lost { node: self.name.clone() }) } else { Ok(()) }
    }

    /// The error of a request; after one that says that the node is gone or hangs, no request waits for it any more.
    pub fn failed(&self, source: SessionError) -> RequestError {
        let lives = match &source {
            SessionError::Refused(refusal) => refusal.code != RefusalCode::Stopping,
            SessionError::Busy { .. } | SessionError::Chain(_) | SessionError::WindowTooSmall { .. } => true,
            _ => false,
        };
        if !lives {
            self.lost.set(true);
        }
        RequestError::Session { node: self.name.clone(), source: Box::new(source) }
    }

    /// Bytes that its session copied so far, in both directions.
    #[must_use]
    pub fn bytes_moved(&self) -> u64 {
        let counters = self.session.counters();
        counters.bytes_read + counters.bytes_written
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("name", &self.name)
            .field("namespace", &self.namespace)
            .finish_non_exhaustive()
    }
}

/// What a block takes in a write window is a multiple of this.
const WINDOW_ALIGNMENT: u64 = 64;
