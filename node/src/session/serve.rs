//! One open session: requests to its actor, answers back.
//!
//! All answers of a session go through one channel, in the order in which the actor made them: an answer may refer to memory that
//! an earlier answer brought. After an answer the task looks for the next request for a moment before it sleeps, since waking a
//! thread costs more than a lookup.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use actix::{Addr, Recipient};
use futures_util::FutureExt as _;
use larder_core::lookups::Origin;
use larder_core::store::ids::SessionId;
use larder_ipc::LookOrSleep;
use larder_ipc::socket::{FrameReader, FrameWriter};
use larder_net::trace::Sampler;
use larder_protocol::TraceContext;
use larder_protocol::describe::Describe;
use larder_protocol::limits::{MAX_NAME_BYTES, MAX_OUTSTANDING_REQUESTS};
use larder_protocol::session::{RefusalCode, Request, decode_request};
use rustix::thread::sched_yield;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::connection::{Connection, closes_at_once};
use super::hello::refusal;
use super::listen::{CountedSession, Places};
use crate::actor::{Answer, Ask, Errand, GpuActor, ReplyTo};
use crate::clock::Clock;
use crate::described::Descriptions;
use crate::metrics::SharedMetrics;
use crate::processes::ProcessShare;

/// A session that was welcomed.
pub(super) struct Opened {
    pub(super) session: SessionId,
    pub(super) tenant: Arc<str>,
    pub(super) places: Places,
    pub(super) address: Addr<GpuActor>,
    pub(super) counted: CountedSession,
    pub(super) member: ProcessShare,
    /// Changes when a fault ended the actor's sessions.
    pub(super) lives: watch::Receiver<u64>,
    pub(super) writer: FrameWriter,
    pub(super) metrics: SharedMetrics,
    pub(super) descriptions: Descriptions,
    pub(super) sampler: Sampler,
    pub(super) stopping: watch::Receiver<bool>,
    /// Turns true when the tenant leaves.
    pub(super) leaves: watch::Receiver<bool>,
    pub(super) permit: [OwnedSemaphorePermit; 2],
}

struct Session {
    socket: UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
    id: SessionId,
    asks: Recipient<Ask>,
    look_or_sleep: LookOrSleep,
    /// Bytes of answers that the engine may leave unread before its requests wait.
    most_unsent_bytes: usize,
    clock: Clock,
    sampler: Sampler,
    /// The trace of the request with this number.
    traced: Option<(u64, TraceContext)>,
    /// The engine's name of the request with this number.
    named: Option<(u64, String)>,
    /// The session's tenant, and the receiver of the session's descriptions of chunks.
    tells: Option<(Arc<str>, Descriptions)>,
    /// Requests without an answer yet: bytes are being copied, or other nodes are being asked.
    waiting: usize,
    /// Descriptors of the engine that the session has no use for.
    unwanted: Vec<OwnedFd>,
    /// Each waiting request that copies out of the session's window has a sender of this channel. `None` once the session ends.
    copies: Option<mpsc::Sender<Infallible>>,
    copies_end: mpsc::Receiver<Infallible>,
    /// The channel for answers. It never has more answers than there are waiting requests.
    answers_here: UnboundedSender<(u64, Answer)>,
    answers: UnboundedReceiver<(u64, Answer)>,
}

/// Why a session ends. `&str::from` gives the reason's name in metrics.
#[derive(Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
enum End {
    #[error("the engine closed its socket")]
    Closed,
    #[error("the engine's process is gone, though another process holds the socket")]
    ProcessGone,
    #[error("the node stops")]
    Stopping,
    #[error("the node no longer serves the tenant")]
    TenantLeft,
    #[error("a fault of Larder emptied the session's actor")]
    Fault,
    #[error("a fault of Larder ended the session")]
    #[strum(serialize = "fault")]
    Panicked,
    #[error("the engine does not speak the session protocol: {what}")]
    #[strum(serialize = "protocol_error")]
    Protocol { number: u64, what: String },
    #[error("the session's socket failed: {0}")]
    #[strum(serialize = "socket_error")]
    Socket(io::Error),
}

/// Starts a session on its actor's thread.
pub(super) fn start(
    socket: std::os::unix::net::UnixStream,
    mut connection: Connection,
    reader: FrameReader,
    opened: Opened,
) {
    actix_rt::spawn(async move {
        let Opened { session, tenant, places, address, counted, mut member, mut lives, .. } = opened;
        let Opened { writer, metrics, sampler, mut stopping, mut leaves, permit, descriptions, .. } = opened;
        let end = match UnixStream::from_std(socket) {
            Ok(socket) => {
                let mut session = Session::new(socket, reader, writer, session, address.clone().recipient());
                session.sampler = sampler;
                session.tells = Some((Arc::clone(&tenant), descriptions));
                let end = tokio::select! {
                    end = AssertUnwindSafe(session.run()).catch_unwind() => end.unwrap_or(End::Panicked),
                    Ok(()) = lives.changed() => End::Fault,
                    _ = member.gone.wait_for(|gone| *gone) => End::ProcessGone,
                    _ = stopping.wait_for(|stopping| *stopping) => End::Stopping,
                    Ok(_) = leaves.wait_for(|leaves| *leaves) => End::TenantLeft,
                };
                session.say_goodbye(&end).await;
                connection.closes(session.reader.take_unclaimed());
                connection.closes(session.unwanted);
                end
            }
            Err(error) => End::Socket(error),
        };
        if let Some(more) = places.says_ended() {
            tracing::info!(tenant = &*tenant, session = session.0, %end, more, "session ended");
        }
        metrics.session_ended(&tenant, (&end).into());
        drop((connection, counted));
        if address.send(close(session)).await.is_err() {
            tracing::debug!(session = session.0, "the actor stopped before the session was closed");
        }
        drop((member, permit));
    });
}

/// Closes a session at its actor.
pub(super) fn close(session: SessionId) -> Errand<()> {
    Errand::new(move |actor, ctx| actor.close_session(session, ctx))
}

impl Session {
    fn new(
        socket: UnixStream,
        reader: FrameReader,
        writer: FrameWriter,
        id: SessionId,
        asks: Recipient<Ask>,
    ) -> Self {
        let (answers_here, answers) = unbounded_channel();
        let (copies, copies_end) = mpsc::channel(1);
        Self {
            socket,
            reader,
            writer,
            id,
            asks,
            look_or_sleep: LookOrSleep::default(),
            most_unsent_bytes: MOST_UNSENT_BYTES,
            clock: Clock::start(),
            sampler: Sampler::default(),
            traced: None,
            named: None,
            tells: None,
            waiting: 0,
            unwanted: Vec::new(),
            copies: Some(copies),
            copies_end,
            answers_here,
            answers,
        }
    }

    async fn run(&mut self) -> End {
        loop {
            let is_ahead = match self.take_frames().await {
                Ok(is_ahead) => is_ahead,
                Err(end) => return end,
            };
            if let Err(error) = self.writer.flush(self.socket.as_fd()) {
                return End::Socket(error);
            }
            if is_ahead && self.writer.pending_bytes() < self.most_unsent_bytes {
                continue;
            }
            let next = match self.receive_soon().await {
                Some(received) => received,
                None => self.wait().await,
            };
            if let Err(end) = next {
                return end;
            }
        }
    }

    /// Handles every request that has come, as long as the engine takes the answers. Returns true if it stopped because the
    /// engine does not take them: then the reader may still have requests, and the socket does not announce them again.
    async fn take_frames(&mut self) -> Result<bool, End> {
        while self.writer.pending_bytes() < self.most_unsent_bytes {
            // Messages without an answer wait for nobody: an engine that sends them without end must not keep the thread.
            tokio::task::coop::consume_budget().await;
            let protocol =
                |number, what: &dyn std::fmt::Display| End::Protocol { number, what: what.to_string() };
            let frame = self.reader.next_frame().map_err(|error| protocol(0, &error))?;
            let Some(frame) = frame else { return Ok(false) };
            let number = frame.header.request;
            let descriptors = frame.descriptors;
            let request = decode_request(frame.payload);
            if !descriptors.is_empty() && !matches!(request, Ok(Request::RegisterTensors(_))) {
                self.unwanted = descriptors;
                return Err(protocol(number, &"only a registration of tensors may have descriptors"));
            }
            if !descriptors.iter().all(closes_at_once) {
                self.unwanted = descriptors;
                return Err(protocol(number, &"the descriptors of tensors must be of memory or of a device"));
            }
            let request = request.map_err(|error| protocol(number, &error))?;
            if matches!(request, Request::Hello(_)) {
                return Err(protocol(number, &"a session has only one hello"));
            }
            if let Request::Trace(context) = request {
                self.traced = Some((number, context));
                continue;
            }
            if let Request::Name(name) = request {
                if name.len() > MAX_NAME_BYTES {
                    return Err(protocol(number, &"the name of a request is too long"));
                }
                self.named = Some((number, name));
                continue;
            }
            if let Request::Describe(said) = request {
                if !self.keeps(said).await {
                    return Err(protocol(number, &"a chunk is described wrongly"));
                }
                continue;
            }
            self.handle(number, request, descriptors).await?;
        }
        Ok(true)
    }

    /// Keeps an engine's descriptions, a few at a time; false if one is not sound. Other tasks run in between: reading them may
    /// take long, and the engine waits for no answer before it sends more.
    async fn keeps(&self, said: Describe) -> bool {
        let Some((tenant, descriptions)) = &self.tells else { return true };
        let Describe { fingerprint, chunks } = said;
        let mut left = chunks.into_iter();
        loop {
            let chunks: Vec<_> = left.by_ref().take(DESCRIBED_AT_ONCE).collect();
            if chunks.is_empty() {
                return true;
            }
            if !descriptions.describe(tenant, Describe { fingerprint, chunks }) {
                return false;
            }
            tokio::task::yield_now().await;
        }
    }

    async fn handle(&mut self, number: u64, request: Request, descriptors: Vec<OwnedFd>) -> Result<(), End> {
        if self.waiting >= MAX_OUTSTANDING_REQUESTS {
            let what = format!("more than {MAX_OUTSTANDING_REQUESTS} requests at a time");
            return Err(End::Protocol { number, what });
        }
        let copies = matches!(request, Request::Commit(_) | Request::HandOver(_));
        let copies = self.copies.clone().filter(|_| copies);
        let reply_to = ReplyTo { number, answers: self.answers_here.clone(), copies };
        let parent = self.traced.take().filter(|(of, _)| *of == number).map(|(_, context)| context);
        let trace = self.sampler.request(request.name(), parent);
        let named = self.named.take().filter(|(of, _)| *of == number).map(|(_, name)| name.into());
        let origin = Origin { request: named, trace_id: parent.map(|context| context.trace_id) };
        let taken = self.asks.send(Ask { session: self.id, request, descriptors, reply_to, trace, origin });
        self.waiting += 1;
        taken.await.map_err(|_| End::Stopping)?;
        while let Ok((number, answer)) = self.answers.try_recv() {
            self.push(number, answer)?;
        }
        Ok(())
    }

    fn push(&mut self, number: u64, answer: Answer) -> Result<(), End> {
        self.waiting -= 1;
        let Some(response) = answer.response else { return Ok(()) };
        if number == 0 {
            return Ok(());
        }
        let pushed = self.writer.push_response(number, &response, answer.descriptors);
        pushed.map_err(|error| End::Socket(io::Error::other(error)))
    }

    /// Receives a request that comes soon after an answer, without sleeping: an engine often asks again at once, and waking a
    /// sleeping thread takes longer than making an answer. Other tasks run meanwhile. `None` if nothing came, if there is
    /// something else to wait for, or if others want the CPU: other threads, or more sessions of this thread than
    /// [`MOST_LOOKING`].
    async fn receive_soon(&mut self) -> Option<Result<(), End>> {
        if self.waiting > 0 || self.writer.pending_bytes() > 0 || !self.look_or_sleep.may_look() {
            return None;
        }
        let _looking = Looking::begin()?;
        let until = self.clock.elapsed() + SPIN;
        loop {
            let socket = self.socket.as_fd();
            match self.socket.try_io(Interest::READABLE, || self.reader.receive_now(socket)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return Some(self.received(received)),
            }
            let lent = self.clock.elapsed();
            if lent >= until {
                return None;
            }
            // The engine may need this very CPU.
            sched_yield();
            if !self.look_or_sleep.looks_on(self.clock.elapsed() - lent) {
                return None;
            }
            tokio::task::yield_now().await;
        }
    }

    fn received(&self, received: io::Result<usize>) -> Result<(), End> {
        match received {
            Ok(0) => Err(End::Closed),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(End::Protocol { number: 0, what: error.to_string() })
            }
            Err(error) => Err(End::Socket(error)),
        }
    }

    /// Waits for the next thing to do: bytes that came, the answer to a waiting request, or room for answers.
    async fn wait(&mut self) -> Result<(), End> {
        let unsent = self.writer.pending_bytes();
        tokio::select! {
            Some((number, answer)) = self.answers.recv(), if self.waiting > 0 => {
                return self.push(number, answer);
            }
            ready = self.socket.readable(), if unsent < self.most_unsent_bytes => {
                ready.map_err(End::Socket)?;
                let socket = self.socket.as_fd();
                let received = self.socket.try_io(Interest::READABLE, || self.reader.receive_now(socket));
                return self.received(received);
            }
            ready = self.socket.writable(), if unsent > 0 => {
                ready.map_err(End::Socket)?;
                let socket = self.socket.as_fd();
                let flushed = self.socket.try_io(Interest::WRITABLE, || match self.writer.flush(socket) {
                    Ok(false) => Err(io::ErrorKind::WouldBlock.into()),
                    flushed => flushed,
                });
                match flushed {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(End::Socket(error)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Tells the engine why the session ends, if it listens. Waits for copies out of the session's window, since commits under
    /// way still count. Does not wait for other answers: they may come late, and the session of an engine that is gone would keep
    /// its leases until then.
    async fn say_goodbye(&mut self, end: &End) {
        let last_words = match end {
            End::Protocol { number, what } => Some((*number, refusal(RefusalCode::Protocol, what))),
            End::Stopping => Some((0, refusal(RefusalCode::Stopping, "the node is stopping"))),
            End::TenantLeft => Some((0, refusal(RefusalCode::Stopping, TENANT_LEFT))),
            End::Fault => Some((0, refusal(RefusalCode::Internal, FAULT))),
            End::Panicked => Some((0, refusal(RefusalCode::Internal, end))),
            End::Closed | End::ProcessGone | End::Socket(_) => None,
        };
        if let Some((number, response)) = last_words {
            let pushed = self.writer.push_response(number, &response, Vec::new()).is_ok();
            if pushed && let Err(error) = self.writer.flush(self.socket.as_fd()) {
                tracing::debug!(%error, session = self.id.0, "the engine did not hear why its session ended");
            }
        }
        if matches!(end, End::Fault) {
            // Nobody answers any more, and each copy keeps its memory by itself.
            return;
        }
        // A request that the actor never takes is dropped with its sender.
        self.copies = None;
        if tokio::time::timeout(COPY_DEADLINE, self.copies_end.recv()).await.is_err() {
            tracing::error!(session = self.id.0, "copies of an ended session are still under way");
        }
    }
}

/// A session that looks for its next request.
struct Looking;

impl Looking {
    /// `None` if enough sessions of this thread look already.
    fn begin() -> Option<Self> {
        LOOKING.with(|looking| (looking.get() < MOST_LOOKING).then(|| looking.update(|of| of + 1)))?;
        Some(Self)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        LOOKING.with(|looking| looking.update(|of| of - 1));
    }
}

thread_local! {
    /// The sessions of this thread that look.
    static LOOKING: Cell<u32> = const { Cell::new(0) };
}

/// The most sessions of a thread that look at a time. Each takes a microsecond of every round, in which the others wait; one
/// sleep serves them all.
const MOST_LOOKING: u32 = 4;

const FAULT: &str =
    "a fault of Larder emptied the cache of this device: open a new session; the node's log says more";

const TENANT_LEFT: &str =
    "the node no longer serves this tenant: its administrator removed the tenant from the configuration";

/// How long a session looks for the next request before its thread may sleep. Waking the thread takes 15 us or more.
const SPIN: Duration = Duration::from_micros(50);

/// The most descriptions of chunks that are read before other tasks run. Together they take less than a millisecond.
const DESCRIBED_AT_ONCE: usize = 4;

/// Bytes of answers that an engine may leave unread before its requests wait: four frames of the largest size.
const MOST_UNSENT_BYTES: usize = 4 << 20;

/// How long the end of a session waits for copies. The store keeps the slots of these copies in quarantine until the copies end.
const COPY_DEADLINE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
