//! A session with the node on this host.

mod read;
mod write;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use larder_protocol::describe::{Describe, Described};
use larder_protocol::limits::{
    DESCRIPTIONS_SINCE_SESSION_VERSION, MAX_FRAME_BYTES, MAX_NAME_BYTES, OBSERVERS_SINCE_SESSION_VERSION,
};
use larder_protocol::session::{Request, Response};
use larder_protocol::{ChunkHash, TraceContext};

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
    /// Chunks for which [`Described::is_sound`] is false end the session. A chunk whose description does not fit in a frame (some
    /// 30,000 blocks) is left out, as are all chunks while the node leaves 4 MiB unread. A node of the release before is not told.
    pub fn describe(&self, namespace: &Namespace, chunks: Vec<Described>) {
        if self.link.welcome.version < DESCRIPTIONS_SINCE_SESSION_VERSION {
            return;
        }
        let fingerprint = namespace.fingerprint();
        for chunks in in_frames(chunks) {
            self.link.describe(Describe { fingerprint, chunks });
        }
    }

    /// Tells the node that this session asks for an operator, and not for an engine: the node counts and logs none of its later
    /// lookups. A node of the release before is not told, and counts them.
    pub fn observe(&self) {
        if self.link.welcome.version >= OBSERVERS_SINCE_SESSION_VERSION {
            self.link.post(&Request::Observe);
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

    /// Whether the session goes on: false once its node has stopped, closed it or broken the protocol. A node that no longer
    /// answers ends no session. Without a task that receives, this call looks at the socket.
    ///
    /// A session that has ended keeps only the memory of the node that its leases use. While a session is idle, call this now and
    /// then: a node that stopped needs its memory back for its next life.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.link.is_open()
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

/// The word for a namespace in errors.
pub(crate) const NAMESPACE: &str = "namespace";

/// Splits descriptions into those of each frame. Leaves out a description that is longer than a frame.
fn in_frames(chunks: Vec<Described>) -> Vec<Vec<Described>> {
    let (mut frames, mut frame, mut bytes) = (Vec::new(), Vec::new(), 0);
    for chunk in chunks {
        let more = most_encoded_bytes(&chunk);
        if more > DESCRIBED_BYTES {
            continue;
        }
        if bytes + more > DESCRIBED_BYTES {
            frames.push(std::mem::take(&mut frame));
            bytes = 0;
        }
        bytes += more;
        frame.push(chunk);
    }
    if !frame.is_empty() {
        frames.push(frame);
    }
    frames
}

/// Maximum bytes of a description in a frame.
fn most_encoded_bytes(
    Described { blocks, parent: _, tokens, lora_id: _, lora_name, extra_keys }: &Described,
) -> usize {
    let texts = lora_name.as_ref().map_or(0, String::len) + extra_keys.len();
    DESCRIPTION_BYTES + size_of::<ChunkHash>() * blocks.len() + size_of::<u32>() * tokens.len() + texts
}

/// Maximum bytes of the descriptions of one message; the frame has room for the rest of the message.
const DESCRIBED_BYTES: usize = MAX_FRAME_BYTES - 1_024;

/// Bytes of a description besides its lists and texts, with what aligns them.
const DESCRIPTION_BYTES: usize = 128;

#[cfg(test)]
mod tests {
    use larder_protocol::Fingerprint;
    use larder_protocol::limits::{MAX_CHUNK_TOKENS, MAX_EXTRA_KEYS_BYTES};
    use larder_protocol::session::encode_request;

    use super::*;

    fn chunk(blocks: usize, tokens: usize, extra_keys: usize) -> Described {
        Described {
            blocks: vec![ChunkHash([7; 32]); blocks],
            parent: Some(ChunkHash([6; 32])),
            tokens: vec![5; tokens],
            lora_id: Some(4),
            lora_name: Some("an adapter with a name".into()),
            extra_keys: "x".repeat(extra_keys),
        }
    }

    #[test]
    fn descriptions_of_any_shape_are_split_into_frames() {
        let all = MAX_CHUNK_TOKENS as usize;
        let short = (0..20_000).map(|_| chunk(1, 1, 3));
        let keyed = (0..300).map(|_| chunk(1, 1, MAX_EXTRA_KEYS_BYTES));
        let many_blocks = (0..40).map(|_| chunk(1_000, all, 9));
        for chunks in
            [short.collect::<Vec<_>>(), keyed.collect(), many_blocks.collect(), vec![chunk(20_000, all, 1)]]
        {
            let expected = chunks.clone();
            let frames = in_frames(chunks);
            for chunks in &frames {
                let (fingerprint, chunks) = (Fingerprint([1; 32]), chunks.clone());
                let request = Request::Describe(Describe { fingerprint, chunks });
                let bytes = encode_request(&request, Default::default()).len();
                assert!(bytes <= MAX_FRAME_BYTES, "{bytes}");
            }
            assert_eq!(frames.concat(), expected);
        }
        assert!(in_frames(vec![chunk(all, all, 0)]).is_empty(), "it is longer than a frame");
    }
}
