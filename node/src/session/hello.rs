//! Opens a session: from the accepted socket to the session's task on its actor's thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_core::Event;
use larder_ipc::socket::{FrameReader, FrameWriter};
use larder_net::blocking::blocking;
use larder_protocol::limits::{EARLIEST_SESSION_VERSION, MAX_NAME_BYTES, SESSION_VERSION};
use larder_protocol::session::{
    Busy, Hello, Refusal, RefusalCode, Request, Response, Scarce, Welcome, decode_request,
};
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::connection::Connection;
use super::greetings::Seat;
use super::listen::{CountedSession, Host, SessionActor, SessionSettings};
use super::serve::{self, Opened};
use crate::actor::{Client, Errand};
use crate::arena::PAGE_BYTES;
use crate::processes::{EnterError, PeerError, SocketProcess};
use crate::tell::Tell;
use crate::window::{Window, WindowBudget};

/// A connection that was just accepted.
pub(super) struct Newcomer {
    pub(super) socket: UnixStream,
    pub(super) connection: Connection,
    pub(super) place: Seat,
    pub(super) host: Host,
}

/// The process that wants a session.
struct Guest<'a> {
    host: &'a Host,
    hello: Hello,
    /// Number of the hello request.
    number: u64,
}

/// Reads the hello of a new connection, and starts its session. If that fails, tells the engine why, and closes the connection.
pub(super) async fn open(newcomer: Newcomer, settings: SessionSettings) {
    let Newcomer { socket, mut connection, mut place, host } = newcomer;
    let mut reader = FrameReader::of_a_stranger();
    let too_late = || (0, refusal(RefusalCode::Protocol, "no hello came in time"));
    // A hello that has already come counts, even if another connection wants its place.
    let hello = tokio::select! {
        biased;
        hello = read_hello(&socket, &mut reader) => hello,
        () = tokio::time::sleep(HELLO_DEADLINE) => Err(too_late()),
        () = place.makes_way() => Err(too_late()),
    };
    drop(place);
    let result = match hello {
        Ok((number, hello)) => match take_place(&host, &settings) {
            Some(permit) => {
                let guest = Guest { host: &host, hello, number };
                welcome(&socket, &settings, &guest, permit).await
            }
            None => {
                let busy = Busy { what: Scarce::Sessions, retry_after_ms: SESSIONS_RETRY_MS };
                Err((number, Response::Busy(busy)))
            }
        },
        Err(answer) => Err(answer),
    };
    match result {
        Ok((actor, opened)) => begin(&actor, (socket, connection), reader, opened).await,
        Err((number, response)) => {
            if let Some(more) = host.places.says_refused() {
                tracing::info!(tenant = &*host.name, ?response, more, "session refused");
            }
            settings.metrics.session_ended(&host.name, "refused");
            say(&socket, number, &response);
            connection.closes(reader.take_unclaimed());
            drop(socket);
        }
    }
}

/// A place among the tenant's sessions, and one among all sessions; `None` if there is none.
fn take_place(host: &Host, settings: &SessionSettings) -> Option<[OwnedSemaphorePermit; 2]> {
    let take = |places: &Arc<Semaphore>| Arc::clone(places).try_acquire_owned().ok();
    Some([take(&host.places.sessions)?, take(&settings.places)?])
}

/// Hands an open session over to its actor's thread. Ends the session if that fails.
async fn begin(
    actor: &SessionActor,
    (socket, connection): (UnixStream, Connection),
    mut reader: FrameReader,
    opened: Opened,
) {
    let session = opened.session;
    reader.greeted();
    let begun = match socket.into_std() {
        Ok(socket) => actor.arbiter.spawn_fn(move || serve::start(socket, connection, reader, opened)),
        Err(error) => {
            tracing::warn!(%error, "a session's socket failed");
            false
        }
    };
    if !begun {
        // An error: the actor has ended, and the session with it.
        let _ = actor.address.send(serve::close(session)).await;
    }
}

/// Reads the first frame. It must be a hello with a version that this node speaks.
async fn read_hello(socket: &UnixStream, reader: &mut FrameReader) -> Result<(u64, Hello), (u64, Response)> {
    let malformed = |number, what: &dyn std::fmt::Display| (number, refusal(RefusalCode::Protocol, what));
    loop {
        let frame = reader.next_frame().map_err(|error| malformed(0, &error))?;
        if let Some(frame) = frame {
            let number = frame.header.request;
            if !frame.descriptors.is_empty() {
                return Err(malformed(number, &"a hello must have no descriptors"));
            }
            let hello = match decode_request(frame.payload) {
                Ok(Request::Hello(hello)) => hello,
                Ok(_) => return Err(malformed(number, &"a session must start with a hello")),
                Err(error) => return Err(malformed(number, &error)),
            };
            if hello.client.len() > MAX_NAME_BYTES {
                return Err(malformed(
                    number,
                    &format!("a client's name has at most {MAX_NAME_BYTES} bytes"),
                ));
            }
            if !(EARLIEST_SESSION_VERSION..=SESSION_VERSION).contains(&hello.version) {
                let text = format!(
                    "this node speaks session protocols {EARLIEST_SESSION_VERSION} and {SESSION_VERSION}, the engine {}: two releases that follow each other work together, so upgrade the earlier one",
                    hello.version
                );
                return Err((number, refusal(RefusalCode::Version, &text)));
            }
            return Ok((number, hello));
        }
        socket.readable().await.map_err(|error| malformed(0, &error))?;
        let received = socket.try_io(tokio::io::Interest::READABLE, || reader.receive_now(socket.as_fd()));
        match received {
            Ok(0) => return Err(malformed(0, &"the connection ended before its hello")),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(malformed(0, &error)),
        }
    }
}

/// Opens the session at its actor. Every step that may fail comes before this: nothing would close a session that was opened in
/// vain.
async fn welcome(
    socket: &UnixStream,
    settings: &SessionSettings,
    guest: &Guest<'_>,
    permit: [OwnedSemaphorePermit; 2],
) -> Result<(SessionActor, Opened), (u64, Response)> {
    let Guest { host, ref hello, number } = *guest;
    let Host { tenant, ref name, ref windows, .. } = *host;
    let refused = |code, what: &dyn std::fmt::Display| (number, refusal(code, what));
    let (device, actor) = choose(settings, hello.device).ok_or_else(|| {
        refused(RefusalCode::Unknown, &format!("this node has {} devices", settings.actors.len()))
    })?;
    // The session counts from here on, so that engines that start together get different actors.
    let counted = CountedSession::of(&actor);
    let peer = SocketProcess::of(socket).map_err(|error| refused(code_of(&error), &error))?;
    let pid = peer.pid;
    let member =
        settings.processes.enter(tenant, peer).map_err(|error| refused(code_of_entry(&error), &error))?;
    let window = make_window(settings, windows, &actor, hello).await.map_err(|answer| (number, answer))?;
    let writer = write_welcome(settings, guest, device, window.as_deref())
        .map_err(|error| refused(RefusalCode::Internal, &error))?;
    let audited_as = audit_name(name, &hello.client, pid);
    let client = Client { name: hello.client.clone(), pid, tenant: Arc::clone(name), audited_as };
    let mut lives = actor.lives.clone();
    lives.mark_unchanged();
    let process = member.process;
    member.has_session();
    let open = Errand::new(move |actor, _| actor.open_session(tenant, process, window, client));
    let session = actor.address.send(open).await.ok().flatten();
    let session = session.ok_or_else(|| refused(RefusalCode::Stopping, &"the node is stopping"))?;
    // The actor may have heard of the process's exit before the session was there. Then nobody would tell it again, and the
    // process would keep memory out of use forever.
    let is_gone = *member.gone.borrow();
    if is_gone && actor.address.send(Tell(Event::ProcessGone(process))).await.is_err() {
        tracing::debug!(process = process.0, "an actor has stopped before a process was gone");
    }
    if let Some(more) = host.places.says_opened() {
        let client = &hello.client;
        tracing::info!(tenant = &**name, client, pid, device, session = session.0, more, "session opened");
    }
    let opened = Opened {
        session,
        tenant: Arc::clone(name),
        places: host.places.clone(),
        address: actor.address.clone(),
        counted,
        member,
        lives,
        writer,
        metrics: settings.metrics.clone(),
        descriptions: settings.descriptions.clone(),
        sampler: settings.sampler,
        stopping: settings.stopping.clone(),
        leaves: host.leaves.clone(),
        permit,
    };
    Ok((actor, opened))
}

/// The name of an engine in the audit log.
fn audit_name(tenant: &str, name: &str, pid: Option<u32>) -> String {
    let pid = pid.map_or(String::new(), |pid| format!(" pid {pid}"));
    format!("engine {name} of tenant {tenant}{pid}")
}

/// The welcome, ready to be sent.
fn write_welcome(
    settings: &SessionSettings,
    guest: &Guest<'_>,
    device: u16,
    window: Option<&Window>,
) -> io::Result<FrameWriter> {
    let welcome = Response::Welcome(Welcome {
        version: guest.hello.version,
        node: settings.node.clone(),
        tenant: guest.host.name.as_ref().into(),
        device,
        window_bytes: window.map_or(0, Window::bytes),
        trusted: settings.limits.trust_engines,
    });
    let descriptors: Vec<OwnedFd> =
        window.map(|window| window.descriptor().try_clone_to_owned()).transpose()?.into_iter().collect();
    let mut writer = FrameWriter::new();
    writer.push_response(guest.number, &welcome, descriptors).map_err(io::Error::other)?;
    Ok(writer)
}

fn code_of_entry(error: &EnterError) -> RefusalCode {
    match error {
        EnterError::TooManyLinger { .. } => RefusalCode::Unknown,
        EnterError::Watch(_) => RefusalCode::Internal,
    }
}

fn code_of(error: &PeerError) -> RefusalCode {
    match error {
        PeerError::Gone | PeerError::Unseen => RefusalCode::Unknown,
        PeerError::Io(_) => RefusalCode::Internal,
    }
}

fn choose(settings: &SessionSettings, device: Option<u16>) -> Option<(u16, SessionActor)> {
    let number = match device {
        Some(device) => usize::from(device),
        None => {
            let sessions = |&number: &usize| settings.actors[number].sessions.load(Ordering::Relaxed);
            (0..settings.actors.len()).min_by_key(sessions)?
        }
    };
    Some((number as u16, settings.actors.get(number)?.clone()))
}

/// Makes the session's window from its tenant's budget; `None` if the session has no window. The error is the answer to the
/// engine.
async fn make_window(
    settings: &SessionSettings,
    budget: &WindowBudget,
    actor: &SessionActor,
    hello: &Hello,
) -> Result<Option<Arc<Window>>, Response> {
    let most = settings.limits.max_window_bytes.min(budget.limit_bytes());
    let bytes = hello.window_bytes.min(most).next_multiple_of(PAGE_BYTES);
    if bytes == 0 || settings.limits.trust_engines {
        return Ok(None);
    }
    let Some(share) = budget.take(bytes) else {
        return Err(Response::Busy(Busy { what: Scarce::Memory, retry_after_ms: WINDOW_RETRY_MS }));
    };
    let numa_node = actor.numa_node;
    // This blocks while the kernel clears the memory.
    let made = blocking(move || Window::create(bytes, numa_node, Some(share))).await;
    made.map(|window| Some(Arc::new(window))).map_err(|error| {
        tracing::warn!(%error, source = ?std::error::Error::source(&error), "cannot make the write window of a session");
        refusal(RefusalCode::Internal, &error)
    })
}

pub(super) fn refusal(code: RefusalCode, what: &(impl std::fmt::Display + ?Sized)) -> Response {
    Response::Refused(Refusal { code, message: what.to_string() })
}

/// Sends an answer to a connection that is about to be closed, if the engine still reads.
fn say(socket: &UnixStream, number: u64, response: &Response) {
    let mut writer = FrameWriter::new();
    let said = writer.push_response(number, response, Vec::new()).map_err(io::Error::other);
    if let Err(error) = said.and_then(|()| writer.flush(socket.as_fd())) {
        tracing::debug!(%error, "a refused connection did not listen");
    }
}

/// How long a connection may take to say hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// When a tenant with too many sessions may try again.
const SESSIONS_RETRY_MS: u64 = 100;

/// When a tenant whose windows take its whole budget may try again.
const WINDOW_RETRY_MS: u64 = 1_000;
