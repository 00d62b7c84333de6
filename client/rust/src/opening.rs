//! The opening of a session: one Hello, one Welcome.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use larder_protocol::limits::{EARLIEST_SESSION_VERSION, SESSION_VERSION};
use larder_protocol::session::{Hello, Refusal, RefusalCode, Request, Response, Welcome, decode_response};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::io::Interest;
use tokio::time::Instant;

use crate::error::{ProtocolError, SessionError};
use crate::link::round_trip::granted;
use crate::link::{HELLO_NUMBER, Link, within};
use crate::options::{SessionOptions, bounded};
use crate::window::Window;
use larder_ipc::Mapping;
use larder_ipc::socket::{FrameReader, FrameWriter};

/// A session that is to be opened.
pub(crate) struct Opening {
    pub(crate) to: NodeSocket,
    pub(crate) options: SessionOptions,
}

/// The way to the node.
pub(crate) enum NodeSocket {
    /// The path at which the node listens.
    At(PathBuf),
    /// A socket that is connected already.
    On(UnixStream),
}

/// A session that waits for its Welcome.
struct Handshake {
    reader: FrameReader,
    /// The requested version.
    version: u16,
}

impl Opening {
    /// Opens the session on this thread, in an earlier version if the node speaks no later one.
    pub(crate) fn wait(self) -> Result<Arc<Link>, SessionError> {
        let Self { to, options } = self;
        let again = to.again();
        match (Self::wait_once(to, &options, SESSION_VERSION), again) {
            (Err(refused), Some(to)) if is_of_version(&refused) => {
                let opened = Self::wait_once(to, &options, EARLIEST_SESSION_VERSION);
                opened.map_err(|error| if is_of_version(&error) { refused } else { error })
            }
            (opened, _) => opened,
        }
    }

    /// Opens the session in this task, in the same way.
    pub(crate) async fn run(self) -> Result<Arc<Link>, SessionError> {
        let Self { to, options } = self;
        let again = to.again();
        match (Self::run_once(to, &options, SESSION_VERSION).await, again) {
            (Err(refused), Some(to)) if is_of_version(&refused) => {
                let opened = Self::run_once(to, &options, EARLIEST_SESSION_VERSION).await;
                opened.map_err(|error| if is_of_version(&error) { refused } else { error })
            }
            (opened, _) => opened,
        }
    }

    fn wait_once(to: NodeSocket, options: &SessionOptions, version: u16) -> Result<Arc<Link>, SessionError> {
        let deadline = Instant::now() + bounded(options.timeout);
        let socket = match to {
            NodeSocket::At(path) => {
                connect(&path, options.timeout).map_err(|source| match source.kind() {
                    io::ErrorKind::WouldBlock => SessionError::Timeout,
                    _ => SessionError::Connect { path, source },
                })?
            }
            NodeSocket::On(socket) => socket,
        };
        block_within(&socket, options.timeout)?;
        let mut handshake = Handshake::start(socket.as_fd(), options, version)?;
        loop {
            handshake.receive(socket.as_fd()).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => SessionError::Timeout,
                _ => opening(error),
            })?;
            if let Some(welcomed) = handshake.welcomed()? {
                return Ok(handshake.finish(socket, welcomed, options));
            }
            if Instant::now() >= deadline {
                return Err(SessionError::Timeout);
            }
        }
    }

    async fn run_once(
        to: NodeSocket,
        options: &SessionOptions,
        version: u16,
    ) -> Result<Arc<Link>, SessionError> {
        let opened = async {
            let socket = match to {
                NodeSocket::At(path) => {
                    let connected = tokio::net::UnixStream::connect(&path).await;
                    connected.map_err(|source| SessionError::Connect { path, source })?
                }
                NodeSocket::On(socket) => {
                    socket.set_nonblocking(true).map_err(SessionError::Socket)?;
                    tokio::net::UnixStream::from_std(socket).map_err(SessionError::Socket)?
                }
            };
            let mut handshake = Handshake::start(socket.as_fd(), options, version)?;
            loop {
                let receive = || handshake.receive(socket.as_fd());
                socket.async_io(Interest::READABLE, receive).await.map_err(opening)?;
                if let Some(welcomed) = handshake.welcomed()? {
                    let socket = socket.into_std().map_err(SessionError::Socket)?;
                    block_within(&socket, options.timeout)?;
                    return Ok(handshake.finish(socket, welcomed, options));
                }
            }
        };
        within(options.timeout, opened).await
    }
}

impl NodeSocket {
    /// The same way to the node, if another connection can be made.
    fn again(&self) -> Option<Self> {
        match self {
            Self::At(path) => Some(Self::At(path.clone())),
            Self::On(_) => None,
        }
    }
}

impl Handshake {
    /// Sends the Hello. The first message on a connection always fits in the socket's buffer.
    fn start(socket: BorrowedFd<'_>, options: &SessionOptions, version: u16) -> Result<Self, SessionError> {
        let hello = Request::Hello(Hello {
            version,
            client: options.client.clone(),
            device: options.device,
            window_bytes: options.window_bytes,
        });
        let mut writer = FrameWriter::new();
        writer.push_request(HELLO_NUMBER, &hello).map_err(ProtocolError::from)?;
        match writer.flush(socket).map_err(SessionError::Socket)? {
            true => Ok(Self { reader: FrameReader::new(), version }),
            false => Err(SessionError::Socket(io::ErrorKind::WouldBlock.into())),
        }
    }

    /// Receives once.
    ///
    /// # Errors
    /// The socket's errors; `UnexpectedEof` at the end of the stream.
    fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        match self.reader.receive(socket)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// The node's answer with the window, once it has come completely.
    fn welcomed(&mut self) -> Result<Option<(Welcome, Option<Window>)>, SessionError> {
        let Some(frame) = self.reader.next_frame().map_err(ProtocolError::from)? else { return Ok(None) };
        let response = decode_response(frame.payload).map_err(ProtocolError::from)?;
        match response {
            Response::Welcome(welcome) if frame.header.request == HELLO_NUMBER => {
                if welcome.version != self.version {
                    return Err(ProtocolError::Version { node: welcome.version }.into());
                }
                let window = window(&welcome, &frame.descriptors)?;
                Ok(Some((welcome, window)))
            }
            response => Err(match granted(response) {
                Ok(_) => SessionError::wrong_answer("a session starts with a welcome"),
                Err(error) => error,
            }),
        }
    }

    fn finish(
        self,
        socket: UnixStream,
        (welcome, window): (Welcome, Option<Window>),
        options: &SessionOptions,
    ) -> Arc<Link> {
        Arc::new(Link::new(socket, self.reader, welcome, window.map(Arc::new), options))
    }
}

fn window(welcome: &Welcome, descriptors: &[OwnedFd]) -> Result<Option<Window>, SessionError> {
    let mapping = match (welcome.window_bytes, descriptors) {
        (0, []) => None,
        (1.., [descriptor]) => Some(Mapping::writable(descriptor.as_fd(), welcome.window_bytes)?),
        _ => return Err(SessionError::wrong_answer("a window comes with one descriptor")),
    };
    Ok(mapping.map(Window::new))
}

/// Connects to a node on this thread. While the node accepts nobody, it blocks for the timeout at most: then the error is
/// `WouldBlock`.
fn connect(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout.max(SHORTEST_TIMEOUT)))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Sets the time for which a receiving thread blocks. Tasks receive without blocking.
fn block_within(socket: &UnixStream, timeout: Duration) -> Result<(), SessionError> {
    socket.set_nonblocking(false).map_err(SessionError::Socket)?;
    socket.set_read_timeout(Some(timeout.max(SHORTEST_TIMEOUT))).map_err(SessionError::Socket)
}

/// Whether the node refuses the requested version.
fn is_of_version(error: &SessionError) -> bool {
    matches!(error, SessionError::Refused(Refusal { code: RefusalCode::Version, .. }))
}

/// The error of a socket while a session is being opened.
fn opening(error: io::Error) -> SessionError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => SessionError::Closed { reason: None },
        _ => SessionError::Socket(error),
    }
}

/// A socket's timeout of 0 would be none.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(1);
