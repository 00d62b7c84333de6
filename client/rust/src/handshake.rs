//! The opening of a session: one Hello, one Welcome.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use larder_protocol::limits::SESSION_VERSION;
use larder_protocol::session::{Hello, Request, Response, Welcome, decode_response};

use crate::error::{ProtocolError, SessionError};
use crate::exchange::granted;
use crate::link::Link;
use crate::options::SessionOptions;
use crate::window::Window;
use larder_ipc::Mapping;
use larder_ipc::socket::{FrameReader, FrameWriter};

/// A session that waits for its Welcome.
pub(crate) struct Handshake {
    reader: FrameReader,
}

/// What the node answered.
pub(crate) struct Opened {
    welcome: Welcome,
    window: Option<Window>,
}

impl Handshake {
    /// Sends the Hello. The first message on a connection always fits in the socket's buffer.
    pub(crate) fn start(socket: BorrowedFd<'_>, options: &SessionOptions) -> Result<Self, SessionError> {
        let hello = Request::Hello(Hello {
            version: SESSION_VERSION,
            client: options.client.clone(),
            device: options.device,
            window_bytes: options.window_bytes,
        });
        let mut writer = FrameWriter::new();
        writer.push_request(HELLO_NUMBER, &hello).map_err(ProtocolError::from)?;
        match writer.flush(socket).map_err(SessionError::Socket)? {
            true => Ok(Self { reader: FrameReader::new() }),
            false => Err(SessionError::Socket(io::ErrorKind::WouldBlock.into())),
        }
    }

    /// Receives once.
    ///
    /// # Errors
    /// The socket's own; `UnexpectedEof` at the end of the stream.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        match self.reader.receive(socket)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// The node's answer, once it is here as a whole.
    pub(crate) fn opened(&mut self) -> Result<Option<Opened>, SessionError> {
        let Some(frame) = self.reader.next_frame().map_err(ProtocolError::from)? else { return Ok(None) };
        let response = decode_response(frame.payload).map_err(ProtocolError::from)?;
        match response {
            Response::Welcome(welcome) if frame.header.request == HELLO_NUMBER => {
                Opened::new(welcome, &frame.descriptors).map(Some)
            }
            response => Err(match granted(response) {
                Ok(_) => SessionError::wrong_answer("a session starts with a welcome"),
                Err(error) => error,
            }),
        }
    }

    /// The session's link, with the reader that may have received more already.
    pub(crate) fn finish(
        self,
        socket: UnixStream,
        opened: Opened,
        options: &SessionOptions,
    ) -> (Arc<Link>, FrameReader) {
        let Opened { welcome, window } = opened;
        (Arc::new(Link::new(socket, welcome, window.map(Arc::new), options)), self.reader)
    }
}

impl Opened {
    fn new(welcome: Welcome, descriptors: &[OwnedFd]) -> Result<Self, SessionError> {
        if welcome.version != SESSION_VERSION {
            return Err(ProtocolError::Version { node: welcome.version }.into());
        }
        let window = match (welcome.window_bytes, descriptors) {
            (0, []) => None,
            (1.., [descriptor]) => Some(Mapping::writable(descriptor.as_fd(), welcome.window_bytes)?),
            _ => return Err(SessionError::wrong_answer("a window comes with one descriptor")),
        };
        Ok(Self { welcome, window: window.map(Window::new) })
    }
}

/// The number of the first request.
pub(crate) const HELLO_NUMBER: u64 = 1;
