//! The opening of a session: from the accepted socket to its task on its actor's thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_client::socket::{FrameReader, FrameWriter};
use larder_protocol::limits::{MAX_NAME_BYTES, SESSION_VERSION};
use larder_protocol::session::{
    Busy, Hello, Refusal, RefusalCode, Request, Response, Scarce, Welcome, decode_request,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::listen::{SessionActor, SessionSettings};
use super::serve::{self, Opened};
use crate::actor::Open;
use crate::processes::Peer;
use crate::store::ids::TenantId;
use crate::window::Window;

/// Reads the hello of a new connection and, if all is well, starts its session; else says why not and closes.
pub(super) async fn open(
    socket: tokio::net::UnixStream,
    tenant: TenantId,
    name: Arc<str>,
    sessions: Arc<Semaphore>,
    settings: SessionSettings,
) {
    let mut reader = FrameReader::new();
    let hello = tokio::time::timeout(HELLO_DEADLINE, read_hello(&socket, &mut reader)).await;
    let result = match hello {
        Ok(Ok((number, hello))) => match Arc::clone(&sessions).try_acquire_owned() {
            Ok(permit) => welcome(&socket, tenant, &name, &settings, &hello, number, permit).await,
            Err(_) => {
                let busy = Busy { what: Scarce::Sessions, retry_after_ms: SESSIONS_RETRY_MS };
                Err((number, Response::Busy(busy)))
            }
        },
        Ok(Err(answer)) => Err(answer),
        Err(_) => Err((0, refusal(RefusalCode::Protocol, "no hello came in time"))),
    };
    match result {
        Ok((actor, opened)) => match socket.into_std() {
            Ok(socket) => _ = actor.arbiter.spawn_fn(move || serve::start(socket, reader, opened)),
            Err(error) => tracing::warn!(%error, "a session's socket failed"),
        },
        Err((number, response)) => {
            tracing::info!(tenant = &*name, ?response, "session refused");
            settings.metrics.session_ended(&name, "refused");
            say(&socket, number, &response);
        }
    }
}

/// Reads the first frame, which has to be a hello of this version.
async fn read_hello(
    socket: &tokio::net::UnixStream,
    reader: &mut FrameReader,
) -> Result<(u64, Hello), (u64, Response)> {
    let malformed = |number, what: &dyn std::fmt::Display| (number, refusal(RefusalCode::Protocol, what));
    loop {
        let frame = reader.next_frame().map_err(|error| malformed(0, &error))?;
        if let Some(frame) = frame {
            let number = frame.header.request;
            if !frame.descriptors.is_empty() {
                return Err(malformed(number, &"a hello brings no descriptors"));
            }
            let hello = match decode_request(frame.payload) {
                Ok(Request::Hello(hello)) => hello,
                Ok(_) => return Err(malformed(number, &"a session starts with a hello")),
                Err(error) => return Err(malformed(number, &error)),
            };
            if hello.client.len() > MAX_NAME_BYTES {
                return Err(malformed(
                    number,
                    &format!("a client's name has at most {MAX_NAME_BYTES} bytes"),
                ));
            }
            if hello.version != SESSION_VERSION {
                let text = format!(
                    "this node speaks session protocol {SESSION_VERSION}, the engine {}: install the same version on both",
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

/// Opens the session at its actor.
async fn welcome(
    socket: &tokio::net::UnixStream,
    tenant: TenantId,
    name: &Arc<str>,
    settings: &SessionSettings,
    hello: &Hello,
    number: u64,
    permit: OwnedSemaphorePermit,
) -> Result<(SessionActor, Opened), (u64, Response)> {
    let refused = |code, what: &dyn std::fmt::Display| (number, refusal(code, what));
    let internal = |error: &dyn std::fmt::Display| refused(RefusalCode::Internal, error);
    let (device, actor) = choose(settings, hello.device).ok_or_else(|| {
        refused(RefusalCode::Unknown, &format!("this node has {} devices", settings.actors.len()))
    })?;
    let peer = Peer::of(socket).map_err(|error| internal(&error))?;
    let pid = peer.pid;
    let member =
        settings.processes.enter(tenant, peer).map_err(|error| refused(RefusalCode::Unknown, &error))?;
    let window = make_window(settings, &actor, hello).map_err(|error| internal(&error))?;
    let mut lives = actor.lives.clone();
    lives.mark_unchanged();
    let open = Open { tenant, process: member.process, window: window.as_ref().map(Arc::clone) };
    let session = actor
        .address
        .send(open)
        .await
        .map_err(|_| refused(RefusalCode::Stopping, &"the node is stopping"))?;
    let welcome = Response::Welcome(Welcome {
        version: SESSION_VERSION,
        node: settings.node.clone(),
        tenant: name.as_ref().into(),
        device,
        window_bytes: window.as_ref().map_or(0, |window| window.bytes()),
        trusted: settings.trust_engines,
    });
    let descriptors: Vec<OwnedFd> = match &window {
        Some(window) => vec![window.descriptor().try_clone_to_owned().map_err(|error| internal(&error))?],
        None => Vec::new(),
    };
    actor.sessions.fetch_add(1, Ordering::Relaxed);
    tracing::info!(
        tenant = &**name,
        client = hello.client,
        pid,
        device,
        session = session.0,
        "session opened"
    );
    let mut writer = FrameWriter::new();
    writer.push_response(number, &welcome, descriptors).map_err(|error| internal(&error))?;
    let opened = Opened {
        session,
        tenant: Arc::clone(name),
        address: actor.address.clone(),
        sessions: Arc::clone(&actor.sessions),
        member,
        lives,
        writer,
        metrics: settings.metrics.clone(),
        sampler: settings.sampler,
        stopping: settings.stopping.clone(),
        permit,
    };
    Ok((actor, opened))
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

fn make_window(
    settings: &SessionSettings,
    actor: &SessionActor,
    hello: &Hello,
) -> io::Result<Option<Arc<Window>>> {
    let bytes = hello.window_bytes.min(settings.max_window_bytes).next_multiple_of(WINDOW_PAGE_BYTES);
    if bytes == 0 || settings.trust_engines {
        return Ok(None);
    }
    Ok(Some(Arc::new(Window::create(bytes, actor.numa_node).map_err(io::Error::other)?)))
}

pub(super) fn refusal(code: RefusalCode, what: &(impl std::fmt::Display + ?Sized)) -> Response {
    Response::Refused(Refusal { code, message: what.to_string() })
}

/// Says one thing to a connection that is about to be closed, if it listens.
fn say(socket: &tokio::net::UnixStream, number: u64, response: &Response) {
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

/// Windows are whole pages.
const WINDOW_PAGE_BYTES: u64 = 4_096;
