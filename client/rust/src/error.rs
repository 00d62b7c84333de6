//! The errors of a session's requests.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::frame::FrameError;
use larder_protocol::frame::MalformedMessage;
use larder_protocol::limits::{MAX_FRAME_DESCRIPTORS, SESSION_VERSION};
use larder_protocol::session::{Refusal, Scarce};
use larder_protocol::{ChainError, ChunkHash};

use larder_ipc::MappingError;
use larder_ipc::socket::ReceiveError;

/// The reason why a request has no result. A miss is no error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The node cannot be reached.
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
        /// The node's reason, if it gave one.
        reason: Option<Arc<str>>,
    },
    /// The node has no room, or too much is in flight; nothing was done. Ask again later, or do without.
    #[error("the node is short of {what:?}; ask again in {retry_after:?}")]
    Busy {
        /// The exhausted resource.
        what: Scarce,
        /// The time after which asking again may help.
        retry_after: Duration,
    },
    /// The node refused; nothing was done, and asking again will not help.
    #[error("the node refused: {}", .0.message)]
    Refused(Refusal),
    /// The chain is impossible, so it was not sent.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The chunks to stage do not fit in the session's write window: ask for a larger one.
    #[error(
        "the chunks to stage take {chunk_bytes} bytes of the write window, but the window has {window_bytes} bytes: open the session with a larger window"
    )]
    WindowTooSmall {
        /// Bytes that the chunks take.
        chunk_bytes: u64,
        /// Bytes of the whole window; 0 if the session has none.
        window_bytes: u64,
    },
    /// A namespace, ticket, reservation or other value was used with another session than its own. Nothing was sent.
    #[error("this {what} belongs to another session: use it with the session that gave it")]
    OtherSession {
        /// The value.
        what: &'static str,
    },
    /// GPU memory that is given by its address cannot be shared with the node: give its IPC handle or descriptor.
    #[error("memory that is known by its address cannot be shared: give its IPC handle or descriptor")]
    NotShared,
    /// The request has more memory by descriptor than one message carries. Nothing was sent.
    #[error("{found} pieces of memory by descriptor are too many: a request carries {MAX_FRAME_DESCRIPTORS}")]
    TooManyDescriptors {
        /// The pieces.
        found: usize,
    },
    /// The node broke the protocol. The session is over.
    #[error("the node does not speak this client's protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// A descriptor from the node is not the announced memory, or this process cannot map it. The session is over.
    #[error("{}{}", if matches!(.0, MappingError::Os { .. }) { "" } else { "the node sent wrong memory: " }, .0)]
    Descriptor(#[from] MappingError),
    /// A block that was to be copied is damaged.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// No answer came within the session's timeout. A lease or other grant in a late answer is given back.
    #[error("the node did not answer within the session's timeout")]
    Timeout,
    /// The socket failed while the session was being opened, other than by closing.
    #[error("the socket failed: {0}")]
    Socket(#[source] io::Error),
}

/// A block has other bytes than its name stands for: treat the block as missing.
///
/// If the bytes differ from the committed ones, the session tells the node, which verifies the chunk. If layers of a followed
/// chunk have not come, or will not come, nobody is told.
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
    /// Whether the requested bytes had come. This is false only for a [`Follow`](crate::Follow).
    pub has_come: bool,
}

/// How a node broke the protocol.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The bytes are no sequence of frames.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// A message is longer than a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The bytes of a message cannot be decoded.
    #[error(transparent)]
    Malformed(#[from] MalformedMessage),
    /// The node speaks another version.
    #[error("the node speaks version {node} of the session protocol, this client {SESSION_VERSION}")]
    Version {
        /// The node's version.
        node: u16,
    },
    /// An answer came for a request that waits for none.
    #[error("the node answered request {number}, but this request waits for no answer")]
    UnknownRequest {
        /// Its number.
        number: u64,
    },
    /// An answer is of the wrong kind, or disagrees with its request.
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

    /// Whether the session is over.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_this_process_cannot_map_is_not_the_nodes_fault() {
        let error =
            SessionError::from(MappingError::Os { what: "map", source: io::ErrorKind::OutOfMemory.into() });
        let text = error.to_string();
        assert!(text.starts_with("cannot map shared memory: ") && text.contains("ulimit -v"), "{text}");
        assert!(
            SessionError::from(MappingError::NotAFile).to_string().starts_with("the node sent wrong memory")
        );
    }
}
