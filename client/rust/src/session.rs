//! A session for async callers.

mod driver;

use std::future::Future;
use std::os::fd::AsFd;
use std::os::unix::net;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::session::{Checked, Found, Pinned, Progress, Wait};
use larder_protocol::{Chain, ChunkHash, NamespaceSpec, PoolSet, TraceContext};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::error::SessionError;
use crate::exchange::{self, Exchange};
use crate::handshake::Handshake;
use crate::lease::LeaseGuard;
use crate::link::Link;
use crate::namespace::Namespace;
use crate::options::{LookupOptions, SessionOptions};
use crate::reservation::{Reservation, StagedChunk};
use crate::ticket::{NOTHING_TO_BRING, Ticket};
use crate::traffic::Counters;

/// A session with the node on this host, for async callers on tokio. Clones share it; requests of all clones and tasks
/// are outstanding at the same time on one socket.
///
/// Needs a runtime with IO and time enabled; one thread is enough. The session ends when the last clone, lease and
/// reservation is dropped.
///
/// All methods are cancel safe: what the late answer to a dropped request grants is given back.
#[derive(Clone)]
pub struct Session {
    link: Arc<Link>,
    /// What the requests of this handle belong to.
    trace: Option<TraceContext>,
}

impl Session {
    /// Connects to the node whose socket for this tenant is at `path`.
    ///
    /// Cancel safe: nothing stays open.
    ///
    /// # Errors
    /// [`SessionError::Connect`] where nobody listens there; `Refused` and `Busy` where the node wants no session now.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO and time enabled.
    pub async fn connect(path: impl AsRef<Path>, options: SessionOptions) -> Result<Self, SessionError> {
        let path = path.as_ref();
        let connecting = async {
            let failed = |source| SessionError::Connect { path: path.to_owned(), source };
            UnixStream::connect(path).await.map_err(failed)
        };
        let socket = within(options.timeout, connecting).await?;
        Self::shake_hands(socket, options).await
    }

    /// Opens a session on a socket that is connected already.
    ///
    /// Cancel safe: the socket is closed.
    ///
    /// # Errors
    /// `Refused` and `Busy` where the node wants no session now.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO and time enabled.
    pub async fn open(socket: net::UnixStream, options: SessionOptions) -> Result<Self, SessionError> {
        socket.set_nonblocking(true).map_err(SessionError::Socket)?;
        let socket = UnixStream::from_std(socket).map_err(SessionError::Socket)?;
        Self::shake_hands(socket, options).await
    }

    /// The same session, for a request of the engine's that is traced: what is asked through this handle belongs to that
    /// trace. An engine has it as the header `traceparent`, which [`TraceContext`] parses.
    #[must_use]
    pub fn traced(&self, context: TraceContext) -> Self {
        Self { trace: Some(context), ..self.clone() }
    }

    /// Makes a namespace known: the `slices` that this session reads and writes, and the bytes of one block of each pool
    /// as the engine's own tensors have it.
    ///
    /// Cancel safe: the node may know the namespace nevertheless.
    ///
    /// # Errors
    /// `Refused` where the namespace is impossible or the sizes disagree; the general ones of [`SessionError`].
    pub async fn register(
        &self,
        spec: &NamespaceSpec,
        slices: &[u16],
        block_bytes: &[u64],
    ) -> Result<Namespace, SessionError> {
        self.exchange(exchange::register(spec, slices, block_bytes)).await
    }

    /// Asks how much of a prompt is here. Nothing found is a result with 0 tokens.
    ///
    /// Cancel safe: a pin that was asked for ends.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; the general ones of [`SessionError`].
    pub async fn lookup(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        options: LookupOptions,
    ) -> Result<Found, SessionError> {
        Ok(self.exchange(exchange::lookup(namespace, chain, options)?).await?.keep())
    }

    /// Asks to read the longest prefix of `chain` that is here. A miss is a lease of 0 chunks.
    ///
    /// Cancel safe: the lease is given back.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub async fn lease(&self, namespace: &Namespace, chain: &Chain) -> Result<LeaseGuard, SessionError> {
        self.exchange(exchange::lease(namespace, chain)?).await
    }

    /// Asks how much of a prompt can be served, and has the node bring it into its memory meanwhile: from disk and from
    /// other nodes, all at once.
    ///
    /// Cancel safe: the prefetch ends, and a pin that was asked for too.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub async fn prefetch(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        options: LookupOptions,
    ) -> Result<Ticket, SessionError> {
        let asked = exchange::prefetch(namespace, chain, options)?;
        Ok(self.exchange(asked).await?.keep())
    }

    /// Asks how far a prefetch is.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub async fn progress(&self, ticket: &Ticket) -> Result<Progress, SessionError> {
        if ticket.number() == 0 {
            return Ok(NOTHING_TO_BRING);
        }
        self.exchange(exchange::progress(ticket)).await
    }

    /// Ends a prefetch and leases the contiguous prefix that has come. A chunk that failed to come ends it; what came behind
    /// that stays cached.
    ///
    /// Cancel safe: the lease is given back.
    ///
    /// # Errors
    /// The general ones of [`SessionError`].
    pub async fn collect(&self, ticket: Ticket, wait: Wait) -> Result<LeaseGuard, SessionError> {
        if ticket.number() == 0 {
            return LeaseGuard::nothing(&self.link, ticket.namespace().clone());
        }
        let asked = exchange::collect(&ticket, wait);
        let leased = self.exchange(asked).await?;
        ticket.end();
        Ok(leased)
    }

    /// Asks for room for those chunks of `chain` that are missing. `priority` is 0 for ordinary traffic; higher stays
    /// longer under the `priority` policy.
    ///
    /// Cancel safe: the reservation is given back.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub async fn reserve(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        priority: i8,
    ) -> Result<Reservation, SessionError> {
        self.exchange(exchange::reserve(namespace, chain, &[], priority, 0)?).await
    }

    /// The same, for an engine that has not all pools of each chunk: by position in the chain, `pools` says which it will
    /// write. Pools that every chunk has are written whether named or not; one that a chunk lacks may be added later. The
    /// blocks that are to be written, [`StagedChunk::blocks`] says.
    ///
    /// Cancel safe: the reservation is given back.
    ///
    /// # Errors
    /// As [`Self::reserve`]; `Refused` where there is not one set of pools of the namespace for each chunk.
    pub async fn reserve_pools(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        pools: &[PoolSet],
        priority: i8,
    ) -> Result<Reservation, SessionError> {
        self.exchange(exchange::reserve(namespace, chain, pools, priority, 0)?).await
    }

    /// Gives the reserved chunk at `position` (in the chain) room to be filled; waits until the write window has some.
    ///
    /// Callers get room in the order in which they asked. A caller that keeps staged chunks without committing them
    /// waits for itself until the timeout.
    ///
    /// Cancel safe: no room is taken.
    ///
    /// # Errors
    /// `WindowTooSmall`; `Timeout` where no room was freed in time.
    ///
    /// # Panics
    /// Where the reservation has no chunk there.
    pub async fn stage(&self, reservation: &Reservation, position: u32) -> Result<StagedChunk, SessionError> {
        let range = match reservation.room_needed(position)? {
            Some((window, bytes)) => {
                let range = async { Ok(window.take(bytes).await) };
                Some(within(self.link.timeout, range).await?)
            }
            None => None,
        };
        Ok(reservation.staged(position, range))
    }

    /// Hands filled chunks of one reservation over, and returns how many the node keeps. Their room is free again when the
    /// node has answered.
    ///
    /// Cancel safe: chunks whose message was sent are committed nevertheless; the others are not.
    ///
    /// # Errors
    /// `Refused` where the reservation's deadline passed; the general ones of [`SessionError`].
    ///
    /// # Panics
    /// Where a chunk belongs to another reservation.
    pub async fn commit(
        &self,
        reservation: &Reservation,
        staged: Vec<StagedChunk>,
    ) -> Result<u32, SessionError> {
        let mut kept = 0;
        for part in reservation.commit_parts(staged) {
            kept += self.exchange(exchange::commit(part)).await?;
        }
        Ok(kept)
    }

    /// Keeps the longest prefix of `chain` that is here from eviction, for `duration` or what the node grants. The pin is
    /// the caller's to end; its number is 0 where nothing is pinned.
    ///
    /// Cancel safe: the pin ends.
    ///
    /// # Errors
    /// `Chain` for an impossible chain; `Busy`; the general ones of [`SessionError`].
    pub async fn pin(
        &self,
        namespace: &Namespace,
        chain: &Chain,
        duration: Duration,
    ) -> Result<Pinned, SessionError> {
        Ok(self.exchange(exchange::pin(namespace, chain, duration)?).await?.keep())
    }

    /// Ends a pin before its deadline.
    ///
    /// Cancel safe: a request that was sent takes effect.
    ///
    /// # Errors
    /// `Refused` where there is no such pin; the general ones of [`SessionError`].
    pub async fn unpin(&self, pin: u64) -> Result<(), SessionError> {
        self.exchange(exchange::unpin(pin)).await
    }

    /// Tells the node that a chunk has other bytes than were committed under its name: it verifies the chunk, and drops it if that
    /// is so. Leases report what they find damaged by themselves.
    ///
    /// Cancel safe: a request that was sent takes effect.
    ///
    /// # Errors
    /// `Busy` where this session reports too much; `Refused` for a namespace that it did not register; the general ones of
    /// [`SessionError`].
    pub async fn report_damage(
        &self,
        namespace: &Namespace,
        hash: ChunkHash,
    ) -> Result<Checked, SessionError> {
        self.exchange(exchange::report_damage(namespace, hash)).await
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

    async fn shake_hands(socket: UnixStream, options: SessionOptions) -> Result<Self, SessionError> {
        let mut handshake = Handshake::start(socket.as_fd(), &options)?;
        let welcome = async {
            loop {
                let receive = || handshake.receive(socket.as_fd());
                socket.async_io(Interest::READABLE, receive).await.map_err(SessionError::opening)?;
                if let Some(opened) = handshake.opened()? {
                    return Ok(opened);
                }
            }
        };
        let opened = within(options.timeout, welcome).await?;
        let callers_half = socket.as_fd().try_clone_to_owned().map_err(SessionError::Socket)?;
        let (link, reader) = handshake.finish(callers_half.into(), opened, &options);
        driver::spawn(&link, socket, reader);
        Ok(Self { link, trace: None })
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.link.timeout
    }

    pub(crate) async fn exchange<T: Send + 'static>(&self, exchange: Exchange<T>) -> Result<T, SessionError> {
        let answer = async {
            let permit = Arc::clone(self.link.callers()).acquire_owned().await;
            let permit = permit.map_err(|_| self.link.closed())?;
            let answer = self.link.send(exchange, self.trace, permit)?;
            answer.await.map_err(|_| self.link.closed())?
        };
        within(self.link.timeout, answer).await
    }
}

pub(crate) async fn within<T>(
    timeout: Duration,
    work: impl Future<Output = Result<T, SessionError>>,
) -> Result<T, SessionError> {
    tokio::time::timeout(timeout, work).await.unwrap_or(Err(SessionError::Timeout))
}
