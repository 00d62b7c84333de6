//! A session that does not keep the protocol's rules: it sends whatever a test tells it to.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, bail};
use larder_ipc::socket::{FrameReader, FrameWriter};
use larder_protocol::limits::SESSION_VERSION;
use larder_protocol::session::{
    Commit, Extent, Hello, Lease, Place, Register, Registered, Request, Reserve, Response, decode_response,
};
use larder_protocol::{Chain, ChunkHash};

use crate::content::{BLOCK_BYTES, namespace};

/// One connection to a node.
pub struct RawSession {
    socket: UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
    asked: u64,
}

/// An answer, with its descriptors.
pub type Answered = (Response, Vec<OwnedFd>);

impl RawSession {
    /// Connects and sends nothing.
    ///
    /// # Errors
    /// Fails if nobody listens.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(crate::wait::DEADLINE))?;
        Ok(Self { socket, reader: FrameReader::new(), writer: FrameWriter::new(), asked: 0 })
    }

    /// Connects, says hello and registers [`namespace`]. Also returns the memory of the write window, if there is one.
    ///
    /// # Errors
    /// Fails if the node refuses.
    pub fn open(path: &Path) -> anyhow::Result<(Self, Registered, Option<OwnedFd>)> {
        let mut session = Self::connect(path)?;
        let (welcome, mut descriptors) = session.ask(&hello())?;
        let Response::Welcome(_) = welcome else { bail!("not welcome: {welcome:?}") };
        let window = descriptors.pop();
        let registered = session.register()?;
        Ok((session, registered, window))
    }

    /// Registers [`namespace`].
    ///
    /// # Errors
    /// Fails if the node refuses.
    pub fn register(&mut self) -> anyhow::Result<Registered> {
        match self.ask(&register(BLOCK_BYTES as u64))?.0 {
            Response::Registered(registered) => Ok(registered),
            other => bail!("not registered: {other:?}"),
        }
    }

    /// Sends a request and reads its answer.
    ///
    /// # Errors
    /// Fails if the node closes the connection.
    pub fn ask(&mut self, request: &Request) -> anyhow::Result<Answered> {
        self.send(request)?;
        self.read()?.context("the node closed the connection")
    }

    /// As [`Self::ask`], for a request with descriptors.
    ///
    /// # Errors
    /// Fails if the node closes the connection.
    pub fn ask_with(&mut self, request: &Request, descriptors: Vec<OwnedFd>) -> anyhow::Result<Answered> {
        self.asked += 1;
        self.writer.push_request_with(self.asked, request, descriptors)?;
        self.writer.flush(self.socket.as_fd())?;
        self.read()?.context("the node closed the connection")
    }

    /// Sends a request.
    ///
    /// # Errors
    /// Fails if the node closed the connection.
    pub fn send(&mut self, request: &Request) -> anyhow::Result<()> {
        self.asked += 1;
        self.writer.push_request(self.asked, request)?;
        self.writer.flush(self.socket.as_fd())?;
        Ok(())
    }

    /// Sends a request if the socket takes all of it. Returns whether it did. After `false` only closing makes sense.
    ///
    /// # Errors
    /// Fails if the node closed the connection.
    pub fn send_unless_full(&mut self, request: &Request) -> anyhow::Result<bool> {
        self.asked += 1;
        self.writer.push_request(self.asked, request)?;
        Ok(self.writer.flush(self.socket.as_fd())?)
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// Fails if the node closed the connection.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.socket.write_all(bytes)
    }

    /// Reads the node's next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// Fails if the message is malformed.
    pub fn read(&mut self) -> anyhow::Result<Option<Answered>> {
        loop {
            if let Some(frame) = self.reader.next_frame()? {
                return Ok(Some((decode_response(frame.payload)?, frame.descriptors)));
            }
            match self.reader.receive(self.socket.as_fd()) {
                Ok(0) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                received => _ = received?,
            }
        }
    }

    /// The connection itself.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Leases chunks. Returns their places, with the memory that is new to the session.
    ///
    /// # Errors
    /// Fails if the node does not lease.
    pub fn lease(&mut self, registered: &Registered, hashes: &[ChunkHash]) -> anyhow::Result<RawLease> {
        let chain = Chain::from_root(registered.root, hashes.to_vec());
        match self.ask(&Request::Lease(Lease { namespace: registered.namespace, chain }))? {
            (Response::Leased(leased), memory) => {
                Ok(RawLease { lease: leased.lease, places: leased.places, extents: leased.extents, memory })
            }
            (other, _) => bail!("not leased: {other:?}"),
        }
    }
}

/// A lease.
pub struct RawLease {
    /// The lease's number.
    pub lease: u64,
    /// The place of each block.
    pub places: Vec<Place>,
    /// The extents that are new to the session.
    pub extents: Vec<Extent>,
    /// The memory of these extents.
    pub memory: Vec<OwnedFd>,
}

/// A proper hello, with a window of 1 MiB.
pub fn hello() -> Request {
    Request::Hello(Hello {
        version: SESSION_VERSION,
        client: "test".into(),
        device: None,
        window_bytes: 1 << 20,
    })
}

/// A registration of [`namespace`] by an engine whose blocks have this many bytes.
pub fn register(block_bytes: u64) -> Request {
    Request::Register(Register { spec: namespace(), slices: vec![0], block_bytes: vec![block_bytes] })
}

/// A reservation of a prompt.
pub fn reserve(registered: &Registered, hashes: &[ChunkHash]) -> Request {
    let chain = Chain::from_root(registered.root, hashes.to_vec());
    Request::Reserve(Reserve {
        namespace: registered.namespace,
        chain,
        priority: 0,
        pools: Vec::new(),
        attempt: 0,
    })
}

/// A commit of the first `chunks` chunks of a reservation, whose blocks stand one after the other in the window.
pub fn commit(reservation: u64, chunks: u32) -> Request {
    let sources = (0..chunks).map(|position| u64::from(position) * BLOCK_BYTES as u64).collect();
    Request::Commit(Commit { reservation, chunks: (0..chunks).collect(), sources })
}
