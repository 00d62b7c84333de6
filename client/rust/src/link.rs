//! An open session: the socket, the requests that wait for answers, the extents, the window.

pub(crate) mod round_trip;
mod task;
mod thread;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use larder_protocol::Chain;
use larder_protocol::describe::Describe;
use larder_protocol::limits::{MAX_OUTSTANDING_REQUESTS, NAMES_SINCE_SESSION_VERSION};
use larder_protocol::session::{Request, Response, Welcome, decode_response};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use self::round_trip::{Answer, Deliver, RoundTrip};
use crate::error::{ProtocolError, SessionError};
use crate::extents::Extents;
use crate::lock;
use crate::options::{SessionOptions, bounded};
use crate::origin::Origin;
use crate::regions::Pinners;
use crate::traffic::Traffic;
use crate::verifier::Verifier;
use crate::window::Window;
use larder_ipc::socket::{Frame, FrameReader, FrameWriter};
use larder_ipc::{LookOrSleep, Mapping};

/// An open session. Once a call is awaited, a [task](task) receives the session's answers. A [thread](thread) that waits for a
/// call receives by itself, and delivers all answers that it finds.
///
/// When the last handle and guard of the session is gone, the socket is shut down.
pub(crate) struct Link {
    /// A number that no other session of this process has.
    pub(crate) number: u64,
    socket: UnixStream,
    /// Held by the task or thread that receives.
    reader: Mutex<FrameReader>,
    /// Decides whether a receiving thread looks for its answer before it sleeps.
    look_or_sleep: LookOrSleep,
    state: Mutex<LinkState>,
    /// Whether there is a task that receives.
    has_task: AtomicBool,
    /// Tells the task, if there is one, that it may receive again.
    reader_is_free: Arc<Notify>,
    /// Tells the task that the socket did not take all bytes.
    unsent: Arc<Notify>,
    /// One permit for each request that callers may have outstanding.
    callers: Arc<Semaphore>,
    pub(crate) extents: Mutex<Extents>,
    pub(crate) window: Option<Arc<Window>>,
    /// The device lane's page of words, once the node has given it.
    pub(crate) words: Mutex<Option<Arc<Mapping>>>,
    pub(crate) traffic: Arc<Traffic>,
    /// Decides which blocks are verified.
    pub(crate) verifier: Verifier,
    /// Threads that copy many bytes, the calling thread among them: at least one.
    pub(crate) copy_threads: usize,
    pub(crate) welcome: Welcome,
    pub(crate) timeout: Duration,
    /// The GPUs that have pinned memory of the session. Dropped last, when nothing here maps that memory any more.
    pub(crate) pinners: Pinners,
}

/// The session of memory that a GPU may have pinned. The last field of a value that keeps such memory mapped: if the session has
/// ended meanwhile, GPUs let go of the memory.
pub(crate) struct MappedFrom(pub(crate) Arc<Link>);

struct LinkState {
    open: bool,
    /// The node's reason for ending the session, if it gave one.
    last_words: Option<Arc<str>>,
    writer: FrameWriter,
    next_number: u64,
    pending: HashMap<u64, Pending>,
    /// Requests that only give something back, and wait for their turn. The node's grants bound their number.
    chores: VecDeque<Request>,
    /// Number of requests of this kind that wait for their answer.
    chores_in_flight: usize,
}

/// A request that waits for its answer.
struct Pending {
    deliver: Deliver,
    /// The permit, given back with the answer even if the caller is gone: the node counts the request until then.
    _permit: OwnedSemaphorePermit,
}

impl Link {
    pub(crate) fn new(
        socket: UnixStream,
        reader: FrameReader,
        welcome: Welcome,
        window: Option<Arc<Window>>,
        options: &SessionOptions,
    ) -> Self {
        let &SessionOptions { timeout, verify, verify_seed, .. } = options;
        Self {
            number: SESSIONS.fetch_add(1, Ordering::Relaxed),
            copy_threads: options.threads_that_copy(),
            verifier: Verifier::new(verify, verify_seed),
            socket,
            reader: Mutex::new(reader),
            look_or_sleep: LookOrSleep::default(),
            state: Mutex::new(LinkState {
                open: true,
                last_words: None,
                writer: FrameWriter::new(),
                next_number: HELLO_NUMBER + 1,
                pending: HashMap::new(),
                chores: VecDeque::new(),
                chores_in_flight: 0,
            }),
            has_task: AtomicBool::new(false),
            reader_is_free: Arc::default(),
            unsent: Arc::default(),
            callers: Arc::new(Semaphore::new(MAX_OUTSTANDING_REQUESTS - CHORES_IN_FLIGHT)),
            extents: Mutex::new(Extents::new(welcome.trusted)),
            window,
            words: Mutex::default(),
            traffic: Arc::default(),
            welcome,
            timeout: bounded(timeout),
            pinners: Pinners::default(),
        }
    }

    /// Checks that `what`, a value that belongs to the session of this number, is used with its own session. Numbers of other
    /// sessions name other things here.
    pub(crate) fn check_own(&self, what: &'static str, session: u64) -> Result<(), SessionError> {
        if session == self.number { Ok(()) } else { Err(SessionError::OtherSession { what }) }
    }

    /// A chain in the form of messages.
    pub(crate) fn chain(&self, chain: &Chain) -> Chain {
        chain.for_session(self.welcome.version)
    }

    /// Sends a request of this origin, as far as the socket takes it.
    fn send<T>(
        &self,
        round_trip: RoundTrip<T>,
        origin: Origin,
        permit: OwnedSemaphorePermit,
    ) -> Result<Answer<T>, SessionError> {
        let RoundTrip { request, descriptors, deliver, answer } = round_trip;
        let mut state = lock(&self.state);
        if !state.open {
            return Err(SessionError::Closed { reason: state.last_words.clone() });
        }
        let number = state.next_number;
        // Messages of a request that turns out to be too long name no other request.
        state.next_number += 1;
        if let Some(context) = origin.trace {
            state.writer.push_request(number, &Request::Trace(context)).map_err(ProtocolError::from)?;
        }
        if let Some(name) = origin.request.filter(|_| self.tells_names_of(&request)) {
            state
                .writer
                .push_request(number, &Request::Name(name.as_ref().into()))
                .map_err(ProtocolError::from)?;
        }
        state.writer.push_request_with(number, &request, descriptors).map_err(ProtocolError::from)?;
        state.pending.insert(number, Pending { deliver, _permit: permit });
        self.flush(&mut state);
        Ok(answer)
    }

    /// Whether the node wants to hear the name of a request.
    fn tells_names_of(&self, request: &Request) -> bool {
        let is_kept = matches!(request, Request::Lookup(_) | Request::Prefetch(_) | Request::Lease(_));
        is_kept && self.welcome.version >= NAMES_SINCE_SESSION_VERSION
    }

    /// Sends a message that has no answer, as far as the socket takes it.
    pub(crate) fn post(&self, request: &Request) {
        let mut state = lock(&self.state);
        if state.open {
            let pushed = state.writer.push_request(0, request);
            debug_assert!(pushed.is_ok(), "a message without an answer is short");
            self.flush(&mut state);
        }
    }

    /// Describes chunks, unless the node has left too much unread: descriptions have no answer for which the engine would wait.
    pub(crate) fn describe(&self, chunks: Describe) {
        if lock(&self.state).writer.pending_bytes() < MOST_UNSENT_BYTES {
            self.post(&Request::Describe(chunks));
        }
    }

    /// Sends a request that only gives something back, now or when fewer of its kind are outstanding. Its answer is of no
    /// interest. Such a request does not wait to ride with the session's next one: that would save 4 us of some 44 on a lease at
    /// most, and without a next request a thread would have to wake to send it.
    pub(crate) fn give_back(&self, request: Request) {
        let mut state = lock(&self.state);
        if state.open {
            state.chores.push_back(request);
            self.send_chores(&mut state);
        }
    }

    /// Tells the node of a damaged chunk, as [`Link::give_back`] sends. If many such requests wait already, the node is not told:
    /// the next reader finds the damage too.
    pub(crate) fn report(&self, request: Request) {
        let waiting = lock(&self.state).chores.len();
        if waiting < MOST_WAITING_CHORES {
            self.give_back(request);
        }
    }

    /// Delivers all answers that `reader` has. If its bytes are no answers, ends the session and returns false.
    fn deliver_all(self: &Arc<Self>, reader: &mut FrameReader) -> bool {
        let delivered = self.try_deliver_all(reader);
        if let Err(error) = &delivered {
            // The reason of `Closed` was logged where it arose.
            if !matches!(error, SessionError::Closed { .. }) {
                tracing::warn!(%error, node = self.welcome.node, "the session with the node ends with an error");
            }
            self.close();
        }
        delivered.is_ok()
    }

    /// Sends the remaining bytes, without blocking.
    ///
    /// # Errors
    /// `WouldBlock` if bytes remain.
    fn flush_rest(&self) -> io::Result<()> {
        let sent = lock(&self.state).writer.flush(self.socket.as_fd())?;
        if sent { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    /// Whether the session goes on, as far as is known. Looks at the socket, unless a thread receives.
    pub(crate) fn is_open(self: &Arc<Self>) -> bool {
        self.receive_what_is_here();
        lock(&self.state).open
    }

    /// The error of a request of a session that is over.
    pub(crate) fn closed(&self) -> SessionError {
        SessionError::Closed { reason: lock(&self.state).last_words.clone() }
    }

    /// Ends the session: all who wait for answers learn that there will be none.
    fn close(&self) {
        let mut state = lock(&self.state);
        state.open = false;
        state.chores.clear();
        let pending = mem::take(&mut state.pending);
        drop(state);
        self.callers.close();
        self.shut_down();
        // Before the room of unanswered commits comes back: the node may still copy from it.
        if let Some(window) = &self.window {
            window.close();
        }
        // An idle engine may keep the session for long. The node's memory exists as long as it is mapped, and the node's next life
        // needs room for its own. Leases keep the extents that they read.
        lock(&self.extents).clear();
        drop(pending);
        self.pinners.let_go();
    }

    fn try_deliver_all(self: &Arc<Self>, reader: &mut FrameReader) -> Result<(), SessionError> {
        while let Some(frame) = reader.next_frame().map_err(ProtocolError::from)? {
            let Frame { header, payload, descriptors } = frame;
            let response = decode_response(payload).map_err(ProtocolError::from)?;
            let number = header.request;
            if number & CHORE != 0 {
                self.finish_chore(number)?;
                continue;
            }
            // The node says why it ends the session.
            if number == 0
                && let Response::Refused(refusal) = response
            {
                lock(&self.state).last_words = Some(refusal.message.as_str().into());
                return Err(SessionError::Refused(refusal));
            }
            let pending = lock(&self.state).pending.remove(&number);
            let pending = pending.ok_or(ProtocolError::UnknownRequest { number })?;
            if !(pending.deliver)(self, response, descriptors) {
                return Err(self.closed());
            }
        }
        Ok(())
    }

    fn finish_chore(&self, number: u64) -> Result<(), SessionError> {
        let mut state = lock(&self.state);
        let left = state.chores_in_flight.checked_sub(1);
        state.chores_in_flight = left.ok_or(ProtocolError::UnknownRequest { number })?;
        self.send_chores(&mut state);
        Ok(())
    }

    fn send_chores(&self, state: &mut LinkState) {
        while state.chores_in_flight < CHORES_IN_FLIGHT
            && let Some(request) = state.chores.pop_front()
        {
            let number = state.next_number | CHORE;
            state.next_number += 1;
            let pushed = state.writer.push_request(number, &request);
            debug_assert!(pushed.is_ok(), "a request that gives back is short");
            state.chores_in_flight += 1;
        }
        self.flush(state);
    }

    fn flush(&self, state: &mut LinkState) {
        match state.writer.flush(self.socket.as_fd()) {
            Ok(true) => {}
            Ok(false) => self.unsent.notify_one(),
            Err(error) => {
                tracing::debug!(%error, node = self.welcome.node, "the socket takes no more");
                // The receiver now comes to the end of the stream and closes the session.
                self.shut_down();
            }
        }
    }

    fn shut_down(&self) {
        // Fails only where the other end has done it already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl Deref for MappedFrom {
    type Target = Link;

    fn deref(&self) -> &Link {
        &self.0
    }
}

impl Drop for MappedFrom {
    fn drop(&mut self) {
        let is_open = lock(&self.state).open;
        if !is_open {
            self.pinners.let_go();
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// The result of some work, if it comes in time.
pub(crate) async fn within<T>(
    timeout: Duration,
    work: impl Future<Output = Result<T, SessionError>>,
) -> Result<T, SessionError> {
    tokio::time::timeout(timeout, work).await.unwrap_or(Err(SessionError::Timeout))
}

/// Counts the sessions of this process.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// The number of the first request of a session.
pub(crate) const HELLO_NUMBER: u64 = 1;

/// Outstanding requests that are reserved for giving things back: a dropped value must not wait for callers' requests.
const CHORES_IN_FLIGHT: usize = 8;

/// With this many bytes of messages unread by the node, chunks are no longer described.
const MOST_UNSENT_BYTES: usize = 4 << 20;

/// With this many requests waiting to give something back, a report of damage is not sent.
const MOST_WAITING_CHORES: usize = 64;

/// The bit that marks the numbers of requests that give something back.
const CHORE: u64 = 1 << 63;
