//! A session for threads without a runtime.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_protocol::session::{Checked, Found, Pinned, Progress, Wait};
use larder_protocol::{Chain, ChunkHash, NamespaceSpec, PoolSet, TraceContext};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_yield;
use tokio::sync::TryAcquireError;
use tokio::sync::oneshot::error::TryRecvError;

use crate::error::SessionError;
use crate::exchange::{self, Exchange};
use crate::handshake::Handshake;
use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::lock;
use crate::namespace::Namespace;
use crate::options::{LookupOptions, SessionOptions};
use crate::reservation::{Reservation, StagedChunk};
use crate::ticket::{NOTHING_TO_BRING, Ticket};
use crate::traffic::Counters;
use crate::window::{Window, WindowRange};
use larder_ipc::socket::FrameReader;

/// A session with the node on this host, for threads without a runtime; shared by reference.
///
/// One request is outstanding at a time: another thread's waits for it, and its own timeout starts after that. Leases and
/// reservations are given back at once, from any thread; where the socket does not take that, with the next request.
///
/// The session ends when it and its last lease and reservation are dropped.
pub struct BlockingSession {
    link: Arc<Link>,
    reader: Arc<Mutex<FrameReader>>,
    /// What the requests of this handle belong to.
    trace: Option<TraceContext>,
}

impl BlockingSession {
    /// Connects to the node whose socket for this tenant is at `path`.
    ///
    /// # Errors
    /// [`SessionError::Connect`] where nobody listens there; `Refused` and `Busy` where the node wants no session now.
    pub fn connect(path: impl AsRef<Path>, options: SessionOptions) -> Result<Self, SessionError> {
        let path = path.as_ref();
        let socket = UnixStream::connect(path)
            .map_err(|source| SessionError::Connect { path: path.to_owned(), source })?;
        Self::open(socket, options)
    }

    /// Opens a session on a socket that is connected already.
    ///
    /// # Errors
    /// `Refused` and `Busy` where the node wants no session now.
    pub fn open(socket: UnixStream, options: SessionOptions) -> Result<Self, SessionError> {
        socket.set_nonblocking(false).map_err(SessionError::Socket)?;
        let patience = options.timeout.max(Duration::from_millis(1));
        socket.set_read_timeout(Some(patience)).map_err(SessionError::Socket)?;
        let deadline = now() + options.timeout;
        let mut handshake = Handshake::start(socket.as_fd(), &options)?;
        loop {
            handshake.receive(socket.as_fd()).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => SessionError::Timeout,
                _ => SessionError::opening(error),
            })?;
            if let Some(opened) = handshake.opened()? {
                let (link, reader) = handshake.finish(socket, opened, &options);
                return Ok(Self { link, reader: Arc::new(Mutex::new(reader)), trace: None });
            }
            if now() >= deadline {
                return Err(SessionError::Timeout);
            }
        }
    }

    /// The same session, for a request of the engine's that is traced; see [`Session::traced`](crate::Session::traced).
    #[must_use]
    pub fn traced(&self, context: TraceContext) -> Self {
        let (link, reader) = (Arc::clone(&self.link), Arc::clone(&self.reader));
        Self { link, reader, trace: Some(context) }
    }

    /// Makes a namespace known: the `slices` that this session reads and writes, and the bytes of one block of each pool
    /// as the engine's own tensors have it.
    ///
    /// # Errors
    /// `Refused` where the namespace is impossible or the sizes disagree; the general ones of [`SessionError`].
    pub fn register(
        &self,
        spec: &NamespaceSpec,
        slices: &[u16],
        block_bytes: &[u64],
    ) -> Result<Namespace, SessionError> {
        self.exchange(exchange::register(spec, slices, block_bytes))
    }

    /// Asks how much of a prompt is here. Nothing found is a result with 0 tokens.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; the general ones of [`SessionError`].
    pub fn lookup(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        options: LookupOptions,
    ) -> Result<Found, SessionError> {
        Ok(self.exchange(exchange::lookup(namespace, chain, options)?)?.keep())
    }

    /// Asks to read the longest prefix of `chain` that is here. A miss is a lease of 0 chunks.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub fn lease(&self, namespace: &Namespace, chain: &Chain) -> Result<LeaseGuard, SessionError> {
        self.exchange(exchange::lease(namespace, chain)?)
    }

    /// Asks how much of a prompt can be served, and has the node bring it into its memory meanwhile; see
    /// [`Session::prefetch`](crate::Session::prefetch).
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub fn prefetch(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        options: LookupOptions,
    ) -> Result<Ticket, SessionError> {
        let asked = exchange::prefetch(namespace, chain, options)?;
        Ok(self.exchange(asked)?.keep())
    }

    /// Asks how far a prefetch is.
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub fn progress(&self, ticket: &Ticket) -> Result<Progress, SessionError> {
        if ticket.number() == 0 {
            return Ok(NOTHING_TO_BRING);
        }
        self.exchange(exchange::progress(ticket))
    }

    /// Ends a prefetch and leases the contiguous prefix that has come; see
    /// [`Session::collect`](crate::Session::collect).
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub fn collect(&self, ticket: Ticket, wait: Wait) -> Result<LeaseGuard, SessionError> {
        if ticket.number() == 0 {
            return LeaseGuard::nothing(&self.link, ticket.namespace().clone());
        }
        let leased = self.exchange(exchange::collect(&ticket, wait))?;
        ticket.end();
        Ok(leased)
    }

    /// Asks for room for those chunks of `chain` that are missing. `priority` is 0 for ordinary traffic; higher stays
    /// longer under the `priority` policy.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub fn reserve(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        priority: i8,
    ) -> Result<Reservation, SessionError> {
        self.exchange(exchange::reserve(namespace, chain, &[], priority, 0)?)
    }

    /// The same, for an engine that has not all pools of each chunk: by position in the chain, `pools` says which it will
    /// write. Pools that every chunk has are written whether named or not; one that a chunk lacks may be added later. The
    /// blocks that are to be written, [`StagedChunk::blocks`] says.
    ///
    /// # Errors
    /// As [`Self::reserve`]; `Refused` where there is not one set of pools of the namespace for each chunk.
    pub fn reserve_pools(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        pools: &[PoolSet],
        priority: i8,
    ) -> Result<Reservation, SessionError> {
        self.exchange(exchange::reserve(namespace, chain, pools, priority, 0)?)
    }

    /// Gives the reserved chunk at `position` (in the chain) room to be filled; waits until other threads have freed
    /// enough of the write window, in no particular order.
    ///
    /// # Errors
    /// `WindowTooSmall`; `Timeout` where no room was freed in time.
    ///
    /// # Panics
    /// Where the reservation has no chunk there.
    pub fn stage(&self, reservation: &Reservation, position: u32) -> Result<StagedChunk, SessionError> {
        let range = match reservation.room_needed(position)? {
            Some((window, bytes)) => Some(self.take_room(window, bytes)?),
            None => None,
        };
        Ok(reservation.staged(position, range))
    }

    /// Room in the write window.
    pub(crate) fn take_room(&self, window: &Arc<Window>, bytes: u64) -> Result<WindowRange, SessionError> {
        self.deliver_late_answers();
        window.take_within(bytes, self.link.timeout).ok_or(SessionError::Timeout)
    }

    /// Hands filled chunks of one reservation over, and returns how many the node keeps. Their room is free again when the
    /// node has answered.
    ///
    /// # Errors
    /// `Refused` where the reservation's deadline passed; the general ones of [`SessionError`].
    ///
    /// # Panics
    /// Where a chunk belongs to another reservation.
    pub fn commit(&self, reservation: &Reservation, staged: Vec<StagedChunk>) -> Result<u32, SessionError> {
        let parts = reservation.commit_parts(staged).into_iter();
        parts.map(|part| self.exchange(exchange::commit(part))).sum()
    }

    /// Commits chunks of which all layers were handed over or saved, and returns how many the node keeps.
    ///
    /// # Errors
    /// `Refused` where layers are missing, or the reservation ended; the general ones of [`SessionError`].
    pub fn commit_handed_over(
        &self,
        reservation: &Reservation,
        positions: &[u32],
    ) -> Result<u32, SessionError> {
        let parts = reservation.handed_over_parts(positions).into_iter();
        parts.map(|part| self.exchange(exchange::commit(part))).sum()
    }

    /// Keeps the longest prefix of `chain` that is here from eviction, for `duration` or what the node grants. The pin is
    /// the caller's to end; its number is 0 where nothing is pinned.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub fn pin(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        duration: Duration,
    ) -> Result<Pinned, SessionError> {
        Ok(self.exchange(exchange::pin(namespace, chain, duration)?)?.keep())
    }

    /// Ends a pin before its deadline.
    ///
    /// # Errors
    /// `Refused` where there is no such pin; the general ones of [`SessionError`].
    pub fn unpin(&self, pin: u64) -> Result<(), SessionError> {
        self.exchange(exchange::unpin(pin))
    }

    /// Tells the node that a chunk has other bytes than were committed under its name: it verifies the chunk, and drops it if that
    /// is so. Leases report what they find damaged by themselves.
    ///
    /// # Errors
    /// `Busy` where this session reports too much; `Refused` for a namespace that it did not register; the general ones of
    /// [`SessionError`].
    pub fn report_damage(&self, namespace: &Namespace, hash: ChunkHash) -> Result<Checked, SessionError> {
        self.exchange(exchange::report_damage(namespace, hash))
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

    /// Bytes of the session's write window; 0 where it has none.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.link.welcome.window_bytes
    }

    /// Bytes that the session copied so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.link.traffic.counters()
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.link.timeout
    }

    pub(crate) fn exchange<T: Send + 'static>(&self, exchange: Exchange<T>) -> Result<T, SessionError> {
        let mut reader = lock(&self.reader);
        let deadline = now() + self.link.timeout;
        // Permits run out only where that many requests timed out and are not answered yet.
        let permit = Arc::clone(self.link.callers()).try_acquire_owned().map_err(|error| match error {
            TryAcquireError::Closed => self.link.closed(),
            TryAcquireError::NoPermits => SessionError::Timeout,
        })?;
        let mut answer = self.link.send(exchange, self.trace, permit)?;
        loop {
            match answer.try_recv() {
                Ok(result) => return result,
                Err(TryRecvError::Closed) => return Err(self.link.closed()),
                Err(TryRecvError::Empty) => self.receive(&mut reader, deadline)?,
            }
        }
    }

    /// Sends what is left and waits for something to receive.
    fn receive(&self, reader: &mut FrameReader, deadline: Instant) -> Result<(), SessionError> {
        let left = deadline.checked_duration_since(now()).ok_or(SessionError::Timeout)?;
        let socket = self.link.socket().as_fd();
        let received = match self.link.flush_rest() {
            Ok(()) => match receive_soon(reader, socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => reader.receive(socket),
                received => received,
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let wait_for = PollFlags::IN | PollFlags::OUT;
                let left = Timespec::try_from(left).ok();
                // Whether it was interrupted, timed out or became ready shows in the next round.
                let _ = poll(&mut [PollFd::new(&socket, wait_for)], left.as_ref());
                match reader.receive_now(socket) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                    received => received,
                }
            }
            // What the node said before it closed may still be there.
            Err(_) => reader.receive_now(socket),
        };
        match received {
            Ok(1..) => {
                self.link.deliver_all(reader);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(SessionError::Timeout),
            Ok(0) | Err(_) => {
                self.link.close();
                Ok(())
            }
        }
    }

    /// Delivers answers to requests that timed out, as they may free room in the write window.
    fn deliver_late_answers(&self) {
        let mut reader = lock(&self.reader);
        if reader.receive_now(self.link.socket().as_fd()).is_ok_and(|bytes| bytes > 0) {
            self.link.deliver_all(&mut reader);
        }
    }
}

/// Receives what comes soon, without sleeping: a sleeping thread takes longer to wake than most answers to come.
/// `WouldBlock` where nothing came.
fn receive_soon(reader: &mut FrameReader, socket: BorrowedFd<'_>) -> io::Result<usize> {
    let until = now() + SPIN;
    loop {
        match reader.receive_now(socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && now() < until => sched_yield(),
            received => return received,
        }
    }
}

/// How long a thread looks for its answer before it sleeps. An answer takes 10 us where the node is awake, waking a thread
/// on another core 15 us and more; beyond that the node is busy, and the core better used by others.
const SPIN: Duration = Duration::from_micros(50);

#[expect(clippy::disallowed_methods, reason = "requests of threads have deadlines in real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}
