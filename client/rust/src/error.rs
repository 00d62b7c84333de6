//! Why a session's request has no result.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::frame::FrameError;
use larder_protocol::frame::MalformedMessage;
use larder_protocol::limits::SESSION_VERSION;
use larder_protocol::session::{Refusal, Scarce};
use larder_protocol::{ChainError, ChunkHash};

use larder_ipc::MappingError;
use larder_ipc::socket::ReceiveError;

/// Why a request has no result. A miss is no error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// There is no way to the node.
    #[error("cannot connect to {path}: {source}. {}", advice(source))]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The session is over: the node closed it or stopped. Open a new one.
    #[error("the node closed the session{}", because(reason.as_deref()))]
    Closed {
        /// The node's last words, where it had any.
        reason: Option<Arc<str>>,
    },
    /// No room or too much in flight; nothing was done. Ask again later, or do without.
    #[error("the node is short of {what:?}; ask again in {retry_after:?}")]
    Busy {
        /// What there is too much of.
        what: Scarce,
        /// When asking again may help.
        retry_after: Duration,
    },
    /// The node refused; nothing was done, and asking again will not help.
    #[error("the node refused: {} ({:?})", .0.message, .0.code)]
    Refused(Refusal),
    /// The chain is impossible, so it was not sent.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// One chunk of the namespace does not fit in the session's write window: ask for a larger one.
    #[error("a chunk takes {chunk_bytes} bytes of the write window, which has {window_bytes}")]
    WindowTooSmall {
        /// Bytes that a chunk takes.
        chunk_bytes: u64,
        /// Bytes of the whole window; 0 where the session has none.
        window_bytes: u64,
    },
    /// GPU memory that is given by its address is this process's own: give its IPC handle or descriptor.
    #[error("memory that is known by its address cannot be shared: give its IPC handle or descriptor")]
    NotShared,
    /// The node does not keep to the protocol. The session is over.
    #[error("the node does not speak this client's protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// A descriptor that came from the node is not the memory that it should be. The session is over.
    #[error("the node sent wrong memory: {0}")]
    Descriptor(#[from] MappingError),
    /// A block that was to be copied is damaged.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// No answer within the session's timeout. What a late answer grants is given back.
    #[error("no answer in time")]
    Timeout,
    /// The socket failed in another way than by its end, while the session was being opened.
    #[error("the socket failed: {0}")]
    Socket(#[source] io::Error),
}

/// A block has other bytes than its name stands for: do as if the block were not there.
///
/// Bytes that differ from what was committed are told to the node, which verifies them. What is followed and has not come, or comes
/// no more, is told to nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "block {block} of the chunk at {position} ({hash}) {}: compute it instead",
    if *.has_come { "has other bytes than were committed under its name" } else { "has not come" }
)]
pub struct Damaged {
    /// Position of the chunk among those leased.
    pub position: usize,
    /// The block.
    pub block: usize,
    /// The chunk.
    pub hash: ChunkHash,
    /// Whether the bytes that were to be read had come. All have but those of a [`Follow`](crate::Follow).
    pub has_come: bool,
}

/// How a node does not keep to the protocol.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// What came is no sequence of frames.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// A message is longer than a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The bytes of a message are none.
    #[error(transparent)]
    Malformed(#[from] MalformedMessage),
    /// The node speaks another version.
    #[error("the node speaks version {node}, this client {SESSION_VERSION}")]
    Version {
        /// The node's version.
        node: u16,
    },
    /// An answer to a request that was not made.
    #[error("an answer to request {number}, which waits for none")]
    UnknownRequest {
        /// Its number.
        number: u64,
    },
    /// An answer of the wrong kind, or that disagrees with its request.
    #[error("the answer disagrees with the request: {what}")]
    WrongAnswer {
        /// What is wrong.
        what: &'static str,
    },
}

/// The end of a sentence about a session that is over.
fn because(reason: Option<&str>) -> String {
    reason.map_or_else(String::new, |reason| format!(": {reason}"))
}

impl SessionError {
    pub(crate) fn wrong_answer(what: &'static str) -> Self {
        Self::Protocol(ProtocolError::WrongAnswer { what })
    }

    /// Whether the session cannot go on.
    pub(crate) fn is_fatal(&self) -> bool {
        matches!(self, Self::Protocol(_) | Self::Descriptor(_) | Self::Closed { .. } | Self::Socket(_))
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "Is the node running, and is this its path for this tenant?",
        io::ErrorKind::ConnectionRefused => "The node that made this socket no longer runs: start it again.",
        io::ErrorKind::PermissionDenied => "Is this the tenant's own socket, and may this user write to it?",
        _ => "Is the node running, and is this the tenant's socket?",
    }
}
